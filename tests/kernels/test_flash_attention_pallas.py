"""Flash attention's Pallas kernels, interpreted: several blocks of each dim, and that no other pairs than those of the mask
are looked at."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, cotangents, error

from kernels import MaskInfo, Unsupported
from kernels.engines.attention import pallas_visits
from kernels.engines.attention.tiles import FIRST, LAST, spans
from kernels.framework.config import BwdParams, FwdParams
from kernels.framework.interpret import interpret
from kernels.ops.flash_attention import FlashAttentionConfig, expand_dropout_seed, flash_attention, op, pallas_tpu
from kernels.toolchains.simulate import ahead_of_time as checks

SMALLEST = FlashAttentionConfig(
    FwdParams(q_blocksize=128, kv_blocksize=128), BwdParams(q_blocksize=128, kv_blocksize=128)
)


def packed(length, *rows):
    """Returns segment ids of documents that end where each row says; what is left is padding."""
    ids = np.full((len(rows), length), -1, np.int32)
    for row, ends in enumerate(rows):
        for n, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
            ids[row, begin:end] = n
    return jnp.asarray(ids)


def made(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def zigzag(length, parts=4):
    order = np.arange(length).reshape(parts, -1)
    return jnp.asarray(np.concatenate([order[0], order[3], order[1], order[2]])[None], jnp.int32)


DOCUMENTS = packed(400, (100, 128, 400), (60, 130))  # blocks that are one document's, and those of nothing but padding
# Rows, queries, keys, widths (of queries and keys, and of values), options. Widths of 128 lie as [T, H], others as [H, T].
CALLS = {
    # Rows of a batch with other pairs; a block of padding is visited by nobody, and its rows have no key.
    "documents": (1, 400, 400, (32, 128), {"mask": MaskInfo.from_segments(DOCUMENTS, causal=True)}),
    # Pairs known beforehand, full ones among them; sinks before the first of several blocks.
    "window": (
        1,
        200,
        390,
        (128, 16),
        {
            "mask": MaskInfo(causal=True, window=(150, 0)),
            "softmax_aux": made(2, 2),
            "logits_soft_cap": 2.0,
        },
    ),
    # A bias that all rows and heads share, whose pairs are those of any row.
    "shared bias": (
        2,
        200,
        200,
        (16, 16),
        {
            "mask": MaskInfo.from_segments(packed(200, (128, 200), (20, 190)), causal=True),
            "bias": made(1, 1, 200, 200, seed=3),
            "alibi_slopes": jnp.abs(made(1, 2, seed=4)),
            "dropout_seed": expand_dropout_seed(7, 2, 2),
            "dropout_prob": 0.3,
        },
    ),
    "bias of keys": (2, 150, 260, (16, 16), {"mask": MaskInfo(causal=True), "bias": made(1, 2, 1, 260, seed=3)}),
    "bias of queries": (
        2,
        260,
        150,
        (16, 16),
        {"mask": MaskInfo(causal=True, window=(90, 0)), "bias": made(2, 1, 260, 1)},
    ),
    "bias of rows": (
        2,
        260,
        150,
        (16, 16),
        {"mask": MaskInfo(window=(90, 9)), "bias": made(2, 1, 1, 1), "softmax_aux": made(2, 1)},
    ),
    "zigzag": (
        2,
        512,
        512,
        (128, 128),
        {
            "mask": MaskInfo(
                causal=True,
                q_positions=zigzag(512),
                kv_positions=zigzag(512),
                prefix_lengths=jnp.asarray([40, 300]),
                window=(200, None),
            ),
            "alibi_slopes": jnp.abs(made(2, 2)),
        },
    ),
    # Padded keys have no segment that would tell them from others, and no query hides what lies after it.
    "any order": (
        2,
        200,
        200,
        (16, 16),
        {
            "mask": MaskInfo(
                window=(40, None),
                q_positions=jnp.asarray(np.random.default_rng(0).permutation(200)[None], jnp.int32),
                kv_positions=jnp.asarray(np.random.default_rng(1).permutation(200)[None], jnp.int32),
            )
        },
    ),
    "chunks": (1, 390, 390, (136, 128), {"mask": MaskInfo(causal=True, chunk_size=130)}),
    "nothing masked": (1, 256, 256, (16, 16), {}),
    "dense": (1, 260, 150, (16, 16), {"mask": MaskInfo(attention_mask=made(1, 2, 260, 150) > 0.2)}),
    "dense mask of keys": (2, 130, 260, (16, 16), {"mask": MaskInfo(attention_mask=made(2, 1, 1, 260) > 0.5)}),
}
QUICK = {"documents"}


def results(platform, floats, others, d=None, cfg=None):
    """Returns outputs and gradients by name, and the cotangents, of which lse has one too."""

    @jax.jit
    def both(floats, seed):
        rest = others if seed is None else {**others, "dropout_seed": seed}
        outputs, pull = jax.vjp(lambda f: op(**f, **rest, platform=platform, cfg=cfg), floats)
        given = cotangents(outputs) if d is None else d
        return outputs, pull(given)[0], given

    outputs, gradients, given = both(floats, others.get("dropout_seed"))
    return {**dict(zip(op.outputs, outputs, strict=True)), **gradients}, given


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CALLS])
def test_several_blocks(name):
    batch, T, S, (H, Hv), options = CALLS[name]
    mask = options.get("mask")
    for field in ("q_segment_ids", "q_positions") if mask is not None else ():
        if getattr(mask, field) is not None:
            batch = max(batch, getattr(mask, field).shape[0])
    floats = {
        "query": made(batch, T, 2, H),
        "key": made(batch, S, 1, H, seed=1),
        "value": made(batch, S, 1, Hv, seed=2),
    }
    floats |= {n: x for n, x in options.items() if n in ("bias", "softmax_aux", "alibi_slopes")}
    others = {n: x for n, x in options.items() if n not in floats}
    wanted, d = results("xla", floats, others)
    with interpret():
        got, _ = results("pallas", floats, others, d, SMALLEST)
    assert set(got) == set(wanted)
    for n, value in wanted.items():
        assert error(got[n], value) < 2 * FLOOR["float32"], n


@pytest.mark.slow  # what is read; padding of NaN is quick
def test_what_no_pair_needs_is_not_read():
    """Two documents, of which one is not a number: a masked weight of zero would not hide that, not to look at it does."""
    ids = packed(512, (256, 512))

    def bad(x):
        return x.at[:, 256:].set(jnp.nan)

    floats = [bad(made(1, 512, 1, 16, seed=n)) for n in range(3)]
    with interpret():
        run = functools.partial(flash_attention, q_segment_ids=ids, platform="pallas", cfg=SMALLEST)
        out, pull = jax.vjp(run, *floats)
        for x in (out, *pull(bad(jnp.ones_like(out)))):
            assert jnp.isfinite(x[:, :256]).all() and jnp.isnan(x[:, 256:]).any()


MASKS = {
    "causal": MaskInfo(causal=True),
    "window": MaskInfo(causal=True, window=(300, 0)),
    "segments": MaskInfo.from_segments(packed(1024, (100, 300, 900), (1024,), (), (512, 513)), causal=True),
    "none": None,
}


@pytest.mark.parametrize("name", MASKS)
def test_visits_are_the_pairs_of_each_row(name):
    """Each pair once, in order, what stays together; a block with no pair once; and no more steps than the longest row has."""
    mask = MASKS[name]
    q_block, k_block, length = 128, 256, 1024
    found = spans(mask, length, length, q_block, k_block)
    for by_keys, span in enumerate(found):
        blocks = (length // q_block, length // k_block)
        most = blocks[0] * blocks[1]
        visits = pallas_visits.visits_of(span, blocks[1 - by_keys], most, bool(by_keys))
        packed_visits = np.asarray(visits.packed).reshape(visits.rows, visits.length)
        longest = 0
        for row, words in zip(np.asarray(span), packed_visits, strict=True):
            wanted = []
            for outer, (first, _, _, last) in enumerate(row):
                inner = list(range(first, last)) or [None]
                wanted += [(outer, j, n == 0, n == len(inner) - 1) for n, j in enumerate(inner)]
            longest = max(longest, len(wanted))
            for word, (outer, j, begins, ends) in zip(words, wanted, strict=False):
                step = pallas_visits.decoded(visits, [int(word)], 0, 0, 0) if visits.rows == 1 else None
                at = step or pallas_visits.decoded(visits._replace(rows=1), [int(word)], 0, 0, 0)
                assert (at.j if by_keys else at.i) == outer
                assert at.has(pallas_visits.ACTIVE) == (j is not None)
                assert j is None or (at.i if by_keys else at.j) == j
                assert (at.has(pallas_visits.BEGINS), at.has(pallas_visits.ENDS)) == (begins, ends)
            # What is left over does nothing and stays where it is.
            rest = {int(word) for word in words[len(wanted) :]}
            assert not rest or rest == {int(words[len(wanted) - 1]) >> 4 << 4}
        assert int(visits.steps) == longest
    assert name != "causal" or int(visits.steps) == 20  # of 32 pairs


def test_rules_bound_the_pairs_of_a_traced_mask():
    call = pallas_tpu._call(
        *(made(1, 1024, 1, 16),) * 3,
        MASKS["segments"].replace(window=(100, 0)),
        (None,) * 6 + (0.0,),
        SMALLEST.fwd_params,
    )
    visits = pallas_tpu._Spans(call).visits(False)
    alone = spans(MaskInfo(causal=True, window=(100, 0)), 1024, 1024, 128, 128)[0]
    assert visits.length == (alone[..., LAST] - alone[..., FIRST]).sum() == 15


def test_a_float32_is_one_in_every_product():
    """What the interpreter does not show: on a TPU a product of float32 is made of one pass in bfloat16 unless it says more."""
    x = made(1, 128, 1, 16)
    saved = {"d_out": x, "lse": x[..., 0], "delta": x[..., 0]}
    rest = dict.fromkeys(
        ("mask", "bias", "softmax_aux", "alibi_slopes", "dropout_seed", "softmax_scale", "logits_soft_cap")
    )
    backend = op.backends["pallas_tpu"]

    def both(x):
        from kernels.framework.execute import Saved

        how = {"query": x, "key": x, "value": x, **rest, "dropout_prob": 0.0, "deterministic": False, "cfg": SMALLEST}
        return backend.forward(**how), backend.backward(Saved(**saved), **how)

    program = str(jax.make_jaxpr(both)(x))
    assert program.count("Precision.HIGHEST, Precision.HIGHEST") == program.count("dot_general[") == 9


def test_too_many_pairs_are_refused():
    x = jax.ShapeDtypeStruct((1, 2**21, 1, 128), jnp.bfloat16)
    with pytest.raises(Unsupported, match="scalar memory"):
        jax.eval_shape(functools.partial(flash_attention, platform="pallas"), x, x, x)


def of_a_model(name, dtype, topology):
    """Returns both directions of a call of SHAPES, compiled."""
    (B, T, N, K, H, Hv), options = SHAPES[name]
    sizes = {"query": (B, T, N, H), "key": (B, T, K, H), "value": (B, T, K, Hv)}
    given = {n: jax.ShapeDtypeStruct(shape, dtype) for n, shape in sizes.items()}
    for n, shape in options.items():
        if isinstance(shape, tuple):
            given[n] = jax.ShapeDtypeStruct(shape, jnp.int32 if n == "q_segment_ids" else jnp.float32)
    static = {n: x for n, x in options.items() if n not in given}

    def run(given):
        data = {n: x for n, x in given.items() if n == "q_segment_ids"}
        floats = {n: x for n, x in given.items() if n not in data}
        out, pull = jax.vjp(lambda f: flash_attention(**f, **data, **static, platform="pallas"), floats)
        return out, pull(jnp.ones_like(out))

    return checks.compile_tpu(run, given, topology=topology)


@pytest.mark.parametrize(
    ("length", "mask", "large"),
    [
        (8192, MaskInfo(causal=True), True),
        (8192, None, True),
        (4096, MaskInfo(causal=True), False),
        (8192, MaskInfo(causal=True, window=(1023, 0)), False),
        (8192, MaskInfo(causal=True, chunk_size=1024), False),
        (8192, MaskInfo.from_segments(jnp.zeros((1, 8192), jnp.int32), causal=True), False),
        (2**19, MaskInfo(causal=True, window=(1023, 0)), True),  # or the list of pairs would be long
    ],
)
def test_blocks_are_large_where_few_pairs_are_wasted(length, mask, large):
    for dtype in ("bfloat16", "float32"):
        x = jax.ShapeDtypeStruct((1, length, 1, 128), dtype)
        found = pallas_tpu.heuristic(op.bind(query=x, key=x, value=x, mask=mask), "tpu").bwd_params
        wanted = 1024 if large and (dtype == "bfloat16" or length == 2**19) else 512
        assert (found.q_blocksize, found.kv_blocksize) == (wanted, wanted)


SHAPES = {
    "causal, 8k": ((2, 8192, 32, 8, 128, 128), {"causal": True}),
    "window of 32k": ((1, 32768, 32, 8, 128, 128), {"causal": True, "sliding_window": 4096}),
    "documents of 32k": ((1, 32768, 32, 8, 128, 128), {"causal": True, "q_segment_ids": (1, 32768)}),
    "width 64": ((2, 8192, 32, 8, 64, 64), {"causal": True}),
    "width 256": ((1, 8192, 8, 4, 256, 256), {"causal": True}),
    "widths 192 and 128": ((1, 8192, 16, 16, 192, 128), {"causal": True}),
    "soft cap and sinks": ((2, 8192, 32, 8, 128, 128), {"causal": True, "logits_soft_cap": 30.0, "softmax_aux": (32,)}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "topology"), [("float32", checks.TPU_TOPOLOGIES[0]), *(("bfloat16", t) for t in checks.TPU_TOPOLOGIES)]
)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_models_compile(name, dtype, topology):
    """Three kernels, and no more memory than some copies of what is given: nothing has the size of the pairs."""
    compiled = of_a_model(name, dtype, topology)
    assert checks.mosaic_calls(compiled) == 3
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 4 * memory.argument_size_in_bytes


@pytest.mark.slow  # the TPU compiler, 9 s
def test_heads_take_the_room_of_64_entries():
    """Rows of 64 would be padded to 128 lanes, and copied to be so: what is given, twice, for each array of the heads."""
    memory = of_a_model("width 64", "bfloat16", checks.TPU_TOPOLOGIES[0]).memory_analysis()
    assert memory.temp_size_in_bytes < memory.argument_size_in_bytes
