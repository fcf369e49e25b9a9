"""native_sparse_attention: against loops over NumPy float64, alone and on meshes; its memory; wrong calls."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from numpy_native_sparse import loop
from sparse_calls import check_draws, check_on_a_mesh, check_slopes, contract_of, mesh_grid, with_gradients

import ejdist
import kernels
from ejdist import make_mesh
from ejdist.operations import bind_ops
from ejdist.order import Order
from kernels import Unsupported
from kernels.ops.native_sparse_attention import NativeSparseConfig, native_sparse_attention, op

RNG = np.random.default_rng(0)
B, T, N, K, H, HV = 2, 19, 4, 2, 6, 5


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


ARRAYS = {"query": normal(B, T, N, H), "key": normal(B, T, K, H), "value": normal(B, T, K, HV)}
GATES = {name: normal(B, T, N) for name in ("g_cmp", "g_slc", "g_swa")}
COUNTS = RNG.integers(0, 4, (B, T, K)).astype(np.int32)
PER_TOKEN = RNG.integers(-1, 6, (B, T, K, 3)).astype(np.int32)
PER_BLOCK = RNG.integers(-1, 5, (B, 5, K, 3)).astype(np.int32)
SEGMENTS = np.stack([np.repeat([0, -1, 3, 1, 0], [4, 1, 9, 2, 3]), np.repeat([5, -1], [16, 3])]).astype(np.int32)


def row(x):
    return {name: a[:1] for name, a in x.items()}


CALLS = {
    "chosen": (ARRAYS | GATES, {"block_size": 3, "block_counts": 4, "sliding_window": 4}),
    "per token": (ARRAYS | {"g_slc": GATES["g_slc"]}, {"block_size": 4, "block_indices": PER_TOKEN, "block_counts": 2}),
    "per block of queries": (
        ARRAYS,
        {"block_size": 4, "block_indices": PER_BLOCK, "sliding_window": 3, "softmax_scale": 0.6},
    ),
    "packed": (
        row(ARRAYS | {"g_cmp": GATES["g_cmp"]}),
        {"block_size": 3, "block_counts": COUNTS[:1], "cu_seqlens": [0, 5, 5, 17]},
    ),
    "segments": (ARRAYS | GATES, {"block_size": 2, "block_counts": 3, "segment_ids": SEGMENTS, "sliding_window": 5}),
    "last queries of documents": (
        ARRAYS | {n: x[:, -9:] for n, x in (GATES | {"query": ARRAYS["query"]}).items()},
        {"block_size": 3, "block_counts": 3, "segment_ids": SEGMENTS, "sliding_window": 4},
    ),
    "last queries": (
        ARRAYS | {n: x[:, -5:] for n, x in (GATES | {"query": ARRAYS["query"]}).items()},
        {"block_size": 4, "block_counts": 2, "sliding_window": 30},
    ),
}
QUICK = ("chosen",)


def output_and_gradients(function, arrays, options):
    data = {n: x for n, x in options.items() if isinstance(x, np.ndarray) and n != "block_counts"}
    rest = {n: x for n, x in options.items() if n not in data}
    return with_gradients(functools.partial(function, **rest))(arrays, data)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else (pytest.mark.slow,)) for n in CALLS])
def test_value_and_gradients_against_a_loop_over_tokens(name):
    arrays, options = CALLS[name]
    run = functools.partial(native_sparse_attention, cfg=NativeSparseConfig(8))
    out, gradients = output_and_gradients(run, arrays, options)
    assert error(out, loop(**arrays, **options)) < 3e-6
    check_slopes(functools.partial(loop, **options), arrays, gradients)


@pytest.mark.slow
def test_all_blocks_selected_is_attention_and_nothing_goes_through_the_choice():
    out = native_sparse_attention(**ARRAYS, block_size=3, block_counts=100)
    assert error(out, kernels.flash_attention(**ARRAYS, causal=True)) < 1e-6
    # The compressed branch has no gate: its weights choose, and have no gradient. One block alone is the query's own.
    own = {"block_size": 3, "block_counts": 1}
    index = np.broadcast_to((np.arange(T) // 3)[None, :, None, None], (B, T, K, 1))
    chosen, given = (
        output_and_gradients(native_sparse_attention, ARRAYS, o)
        for o in (own, {"block_size": 3, "block_indices": index})
    )
    for a, b in zip(jax.tree.leaves(chosen), jax.tree.leaves(given), strict=True):
        assert error(a, b) < 1e-6


def test_documented_calls():
    query, key, value = normal(1, 130, 4, 8), normal(1, 130, 2, 8), normal(1, 130, 2, 8)
    block_indices = RNG.integers(0, 3, (1, 3, 2, 20))
    output = native_sparse_attention(query, key, value, block_indices=block_indices, block_counts=16)
    want = loop(query, key, value, block_indices=block_indices, block_counts=16, block_size=64)
    assert error(output, want) < 3e-6
    cu_seqlens = jnp.array([0, 70, 130])
    output = native_sparse_attention(query, key, value, cu_seqlens=cu_seqlens, block_indices=block_indices)
    assert (
        error(output, loop(query, key, value, cu_seqlens=[0, 70, 130], block_indices=block_indices, block_size=64))
        < 3e-6
    )
    assert kernels.operations()["native_sparse_attention"] is op
    again = ejdist.NativeSparseAttention()(query, key, value, cum_seqlens=cu_seqlens, block_indices=block_indices)
    np.testing.assert_array_equal(again, output)
    names = ({"window_size": 8, "scale": 0.2}, {"sliding_window": 8, "softmax_scale": 0.2})
    one, other = (native_sparse_attention.prepare(query, key, value, **n).call.arguments for n in names)
    assert one["window"] == other["window"] == 8 and one["softmax_scale"] == other["softmax_scale"] == 0.2


def test_blocks_far_past_the_end_are_none_and_a_window_may_be_longer_than_the_keys():
    far = np.where(PER_TOKEN == -1, 2**31 - 1, np.where(PER_TOKEN == 1, 2**30, PER_TOKEN))
    none = np.where(np.isin(PER_TOKEN, (-1, 1)), -1, PER_TOKEN)
    options = {**ARRAYS, "block_size": 4}
    got = native_sparse_attention(**options, block_indices=far, sliding_window=2**31)
    assert error(got, native_sparse_attention(**options, block_indices=none, sliding_window=T)) == 0


@pytest.mark.slow  # that of its parts is in their files
def test_memory_is_linear_in_the_length():
    def bytes_at(length):
        shapes = [(1, length, 4, 16), (1, length, 1, 16), (1, length, 4)]
        q, k, gate = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
        options = {"block_size": 32, "block_counts": 4, "sliding_window": 64, "cfg": NativeSparseConfig(16)}

        def loss(q, k, gate):
            return jnp.sum(jnp.sin(native_sparse_attention(q, k, k, gate, gate, gate, **options)))

        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, gate).compile().memory_analysis().temp_size_in_bytes

    short, long = bytes_at(4096), bytes_at(16384)
    assert long < 4.2 * short and long < 16384**2 / 4


# -- on a mesh ---------------------------------------------------------------------------------------------------------

LONG = {"query": normal(2, 24, 4, 8), "key": normal(2, 24, 2, 8), "value": normal(2, 24, 2, 8)}
LONG |= {name: normal(2, 24, 4) for name in GATES}
IDS = np.stack([np.repeat([0, -1, 1, 2], [7, 2, 11, 4]), np.repeat([0, 1], [3, 21])]).astype(np.int32)
ON_MESH: dict[str, dict[str, Any]] = {
    "chosen": {"block_size": 3, "block_counts": 4, "sliding_window": 5, "segment_ids": IDS},
    "given": {"block_size": 4, "block_indices": RNG.integers(0, 6, (2, 24, 2, 3)), "sliding_window": 5},
}


@functools.cache
def on_one_device(name):
    return output_and_gradients(contract_of(native_sparse_attention, op), LONG, ON_MESH[name])


@pytest.mark.parametrize(("name", "mesh"), mesh_grid(ON_MESH, set()))
def test_the_numbers_of_one_device_on_a_mesh(name, mesh):
    options = dict(ON_MESH[name])
    data = {n: options.pop(n) for n in ("segment_ids", "block_indices") if n in options}
    check_on_a_mesh(functools.partial(ejdist.native_sparse_attention, **options), mesh, LONG, data, on_one_device(name))


@pytest.mark.slow  # blocks of other ranks are quick in test_sparse_blocks.py
@pytest.mark.parametrize(
    "order", [Order("striped", 4, 3), Order("zigzag", 4), Order("striped", 4)],
    ids=lambda order: f"{order.name}{order.stripe}",
)  # fmt: skip
def test_tokens_in_another_order_are_exchanged(order):
    """Documents of the text, whose runs lie apart, and blocks that reach over several ranks."""
    arrays, ids = ({n: order.permute(x) for n, x in some.items()} for some in (LONG, {"segment_ids": IDS}))
    options = {n: x for n, x in ON_MESH["chosen"].items() if n not in ids}
    mesh, weight = make_mesh(sp=4, devices=jax.devices()[:4]), order.permute(loss_weight(2, 24, 4, 8))

    @jax.jit
    def run(arrays, ids):
        call = functools.partial(bind_ops(mesh, order=order).native_sparse_attention, **options, segment_ids=ids)
        out, back = jax.vjp(lambda x: call(**x), arrays)
        return out, back(weight)[0]

    out, gradients = run(arrays, ids["segment_ids"])
    wanted, d_wanted = on_one_device("chosen")
    assert error(order.inverse(out), wanted) < 3e-6
    for name, gradient in gradients.items():
        assert error(order.inverse(gradient), d_wanted[name]) < 3e-6, name


def loss_weight(*shape):
    """Returns the cotangent of the loss of `sparse_calls`."""
    return np.cos(np.arange(np.prod(shape))).reshape(shape).astype(np.float32)


def test_an_order_that_it_has_no_form_for():
    mesh, of = make_mesh(sp=4, devices=jax.devices()[:4]), ON_MESH["chosen"]
    with pytest.raises(
        Unsupported, match=r"native_sparse_attention: its result depends on the order .*'balanced' over 4"
    ):
        bind_ops(mesh, order="balanced").native_sparse_attention(**LONG, **of)
    fewer = LONG | {n: LONG[n][:, :16] for n in ("query", *GATES)}
    with pytest.raises(
        ValueError, match=r"'query' has 4 tokens of a rank and 'key' 6, .* in order 'zigzag' both must be"
    ):
        bind_ops(mesh, order="zigzag").native_sparse_attention(**fewer, **of)


# -- wrong calls, and right ones drawn at random -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "options"),
    [
        (r"'query' must be floats .* got int64", {"query": np.ones((B, T, N, H), np.int64)}),
        (r"'key' must be floats .* shape \(19, 2, 6\)", {"key": ARRAYS["key"][0]}),
        (r"'query' has N = 3 heads and 'key' has K = 2", {"query": ARRAYS["query"][:, :, :3]}),
        (r"'query' has 19 tokens and 'key' has 18", {"key": ARRAYS["key"][:, 1:], "value": ARRAYS["value"][:, 1:]}),
        (r"'g_cmp' must be floats \[B, T, N\] = \(2, 19, 4\), got .* \(2, 19, 2\)", {"g_cmp": GATES["g_cmp"][..., :2]}),
        (r"'g_swa' is the gate of the sliding branch, which requires 'sliding_window'", {"g_swa": GATES["g_swa"]}),
        (r"'block_size' must be an integer of at least 1, got 0", {"block_size": 0}),
        (r"'block_size' must be an integer of at least 1, got 2.0", {"block_size": 2.0}),
        (r"'sliding_window' must be an integer of at least 0, got -1", {"sliding_window": -1}),
        (r"'sliding_window' must be an integer .* got \(3, 0\)", {"sliding_window": (3, 0)}),
        (r"'block_counts' must be an integer of at least 1, got 0", {"block_counts": 0}),
        (r"'block_counts' must be integers of dims \[2, 19, 2\]", {"block_counts": np.ones((2, 19))}),
        (r"'block_counts' must be \[B, T, K\] or one integer, got shape", {"block_counts": np.ones((2, 19, 2, 1), int)}),
        (r"'block_indices' must be integers of dims \[2, 19, 2\] or \[2, 5, 2\], then", {"block_indices": PER_TOKEN[:, :4]}),
        (r"'block_indices' must be \[B, T, K, n\] with at least one", {"block_indices": PER_TOKEN[..., :0]}),
        (r"'cu_seqlens' must be integers .* got int\d+ of shape \(2,\) for 2 rows", {"cu_seqlens": [0, 4]}),
        (r"'cu_seqlens' must rise from 0 to at most 19", {**{n: x[:1] for n, x in ARRAYS.items()}, "cu_seqlens": [3, 8]}),
        (r"'segment_ids' must be integers \[B, S\] = \(2, 19\), got", {"segment_ids": np.ones(19, int)}),
        (r"'segment_ids' must be at most 2147483647, got 2147483648", {"segment_ids": np.full((B, T), 2**31)}),
        (r"'cu_seqlens' requires queries for all tokens, not 3 of 19: give 'segment_ids'",
         {"query": ARRAYS["query"][:, :3], "cu_seqlens": [0, 4]}),
        (r"s 'cu_seqlens' and 'segment_ids' both define", {"segment_ids": SEGMENTS, "cu_seqlens": [0, 4]}),
        (r"s 'sliding_window' and 'window_size' are two names for the same argument", {"sliding_window": 3, "window_size": 3}),
        (r"'scale' must be float or None, got 'x'", {"scale": "x"}),
        (r"s 'softmax_scale' and 'scale' are two names", {"softmax_scale": 1.0, "scale": 1.0}),
    ],
)  # fmt: skip
def test_a_wrong_call_is_a_value_error(said, options):
    for function in (native_sparse_attention, ejdist.native_sparse_attention):
        with pytest.raises(ValueError, match=f"native_sparse_attention: argument ?{said}"):
            function(**{**ARRAYS, "block_size": 4, **options})


def test_other_wrong_calls():
    with pytest.raises(ValueError, match="'block_counts' is traced"):
        jax.jit(lambda n: native_sparse_attention(**ARRAYS, block_counts=n))(COUNTS)
    with pytest.raises(ValueError, match="'num_blocks' must be at least 1, got 0"):
        op(**ARRAYS, num_blocks=0)
    with pytest.raises(Unsupported, match="cannot be compiled for cpu with platform='pallas'"):
        native_sparse_attention(**ARRAYS, platform="pallas")
    with pytest.raises(ValueError, match=r"native_sparse_attention: .*sp=4"):
        ejdist.native_sparse_attention(**ARRAYS, mesh=make_mesh(sp=4))


def drawn(t, s, *gates, heads=(4, 2), b=2, dtype=np.float32, extra=lambda rng: {}, compiled=True, **options):
    """Returns the entry of a table of draws: arrays of these shapes, and what `extra` draws."""

    def draw(rng):
        n, k = heads
        shapes = {"query": (b, t, n, 6), "key": (b, s, k, 6), "value": (b, s, k, 5)} | dict.fromkeys(gates, (b, t, n))
        large = rng.choice([0.3, 1.0, 4.0])
        return {name: (large * rng.standard_normal(x)).astype(dtype) for name, x in shapes.items()}, extra(rng)

    run = functools.partial(native_sparse_attention, **options, cfg=NativeSparseConfig(5))
    contract = functools.partial(contract_of(native_sparse_attention, op), **options)
    return run, contract, draw, functools.partial(loop, **options), compiled


def given(rows, blocks, names=4, counts=False, b=2):
    """Draws blocks, some of them twice, some -1 or after the query, some past the end; and how many count, some 0."""

    def extra(rng):
        found = {"block_indices": rng.integers(-1, blocks + 2, (b, rows, 2, names)).astype(np.int32)}
        return found | ({"block_counts": rng.integers(0, names + 2, (b, rows, 2)).astype(np.int32)} if counts else {})

    return extra


def cuts(length):
    def extra(rng):
        inside = np.sort(rng.integers(0, length + 1, 3))  # empty documents too
        return {"cu_seqlens": np.array([0, *inside, rng.choice([length, inside[-1]])], np.int32)}

    return extra


def runs(length):
    return lambda rng: {
        "segment_ids": np.sort(rng.integers(-1, 3, (2, length)), 1)[:, :: rng.choice([1, -1])].astype(np.int32)
    }


def counts_of_each(rng):
    counts = rng.integers(0, 4, (2, 13, 2))
    counts[0, 0] = 4  # the most, which is part of the program
    return {"block_counts": counts}


DRAWN: dict[str, Any] = {
    "chosen, three gates": drawn(17, 17, *GATES, block_size=4, block_counts=3, sliding_window=5),
    "chosen, counts of each": drawn(13, 13, "g_cmp", block_size=3, extra=counts_of_each, compiled=False),
    "given, counts of each": drawn(14, 14, "g_slc", block_size=3, extra=given(14, 5, counts=True)),
    "given to blocks of the last queries": drawn(9, 13, block_size=4, sliding_window=30, extra=given(3, 4)),
    "packed": drawn(16, 16, *GATES, b=1, block_size=3, block_counts=2, sliding_window=1, extra=cuts(16)),
    "segments, window without its gate": drawn(15, 15, "g_cmp", block_size=2, sliding_window=4, extra=runs(15)),
    "one token, one head": drawn(1, 1, *GATES, heads=(1, 1), b=1, block_size=1, sliding_window=1, block_counts=9),
    "bfloat16": drawn(11, 11, *GATES, dtype=jnp.bfloat16, block_size=4, sliding_window=3, extra=given(11, 3)),
}


@pytest.mark.slow  # random calls; each option has a quick test
def test_legal_calls():
    check_draws(DRAWN, "given, counts of each", [0])


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_many_legal_calls(name):
    check_draws(DRAWN, name, range(38))
