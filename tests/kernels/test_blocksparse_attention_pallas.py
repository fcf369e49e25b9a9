"""blocksparse_attention's Pallas kernels, interpreted: several tiles of each dim, tiles in a block and tiles that hold several,
lists of rows and heads. And which pairs of tiles the lists have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, cotangents, error
from jax.extend.core import jaxprs_in_params

from kernels import MaskInfo, Unsupported
from kernels.engines.attention import pallas_visits
from kernels.framework.config import BwdParams, FwdParams
from kernels.framework.interpret import interpret
from kernels.ops.blocksparse_attention import BlockSparseConfig, op, pallas_tpu, tiles
from kernels.toolchains.simulate import ahead_of_time as checks

B, N, K = 2, 4, 2


def made(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def blocks(lead, lengths, block_size, density=0.5, seed=0):
    """Returns random blocks, of which the second row and the first column are hidden."""
    shape = (*lead, *(-(-n // size) for n, size in zip(lengths, block_size)))
    drawn = np.random.default_rng(seed).random(shape) < density
    drawn[:, :, 1:2] = drawn[..., :1] = False
    return jnp.asarray(drawn)


def documents(length):
    ids = np.full((B, length), -1, np.int32)
    ids[0], ids[1, : length - 70] = np.arange(length) // 100, np.arange(length - 70) // 130
    return jnp.asarray(ids)


def tile(*sides):
    return BlockSparseConfig(fwd_params=FwdParams(*sides), bwd_params=BwdParams(*sides))


# Lengths, widths (of queries and keys, and of values), block size, rows and heads with blocks of their own, other arguments.
CALLS = {
    # Each tile lies in a block, and each query head has its lists, of which a key head's backward reads those of its group.
    "tiles in blocks": ((300, 390), (128, 16), (128, 128), (1, N), {"mask": MaskInfo(causal=True)}),
    # Four blocks in a tile, whose bits lie in one integer; rows have lists of their own by the mask alone.
    "blocks in tiles": (
        (270, 270),
        (16, 128),
        (64, 64),
        (1, 1),
        {
            "mask": MaskInfo.from_segments(documents(270), causal=True),
            "softmax_aux": made(N, 1),
            "logits_soft_cap": 2.0,
        },
    ),
    # Tiles begin inside a block, and the bits of a tile go on in the next integer.
    "blocks across tiles": ((260, 560), (16, 16), (48, 11), (B, N), {"mask": MaskInfo(window=(300, 30))}),
    "blocks of half a tile on one side": ((150, 300), (16, 16), (64, 256), (B, 1), {}),
    "large tiles": ((520, 390), (16, 16), (64, 128), (1, N), {"mask": MaskInfo(causal=True), "cfg": tile(384, 256)}),
    "nothing set": ((150, 150), (16, 16), (64, 64), (1, 1), {"density": 0.0}),
}


def hold(lengths, widths, block_size, lead, options):
    """Asserts the numbers of the contract, in value and in every gradient."""
    options = dict(options)
    floats = {
        "query": made(B, lengths[0], N, widths[0]),
        "key": made(B, lengths[1], K, widths[0], seed=1),
        "value": made(B, lengths[1], K, widths[1], seed=2),
    }
    if "softmax_aux" in options:
        floats["softmax_aux"] = options.pop("softmax_aux")
    block_mask, cfg = blocks(lead, lengths, block_size, options.pop("density", 0.5)), options.pop("cfg", None)

    @functools.partial(jax.jit, static_argnums=0)
    def run(ours, floats, block_mask, d=None):
        function = functools.partial(op, platform="pallas", cfg=cfg) if ours else op.function
        given = functools.partial(function, block_mask=block_mask, block_size=block_size, **options)
        outputs, pull = jax.vjp(lambda f: given(**f), floats)
        d = cotangents(outputs) if d is None else d
        return {**dict(zip(op.outputs, outputs, strict=True)), **pull(d)[0]}, d

    wanted, d = run(False, floats, block_mask)
    with interpret():
        got, _ = run(True, floats, block_mask, d)
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        assert error(got[name], value) < 2 * FLOOR["float32"], name


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_numbers(name):
    hold(*CALLS[name])


@pytest.mark.slow  # many launches, interpreted
def test_lists_that_do_not_fit_into_scalar_memory_at_once(monkeypatch):
    """Every launch has the lists of some of the tiles, and writes those of the outputs. Tiles hold four blocks."""
    lengths, block_size = (200, 390), (64, 64)
    options = {"mask": MaskInfo(causal=True, window=(300, 0)), "softmax_aux": made(N, 1), "logits_soft_cap": 2.0}
    dims = {"T": lengths[0], "S": lengths[1], "N": N, "K": K}
    bits = pallas_tpu._Sizes((1, N, 4, 7), dims, options["mask"], block_size, (128, 128)).bits
    monkeypatch.setattr(pallas_tpu, "SMEM_BYTES", 4 * (bits + 4 * N))
    sizes = pallas_tpu._Sizes((1, N, 4, 7), dims, options["mask"], block_size, (128, 128))
    assert (sizes.parts(False), sizes.parts(True)) == (2, 2)
    hold(lengths, (16, 128), block_size, (1, N), options)


@pytest.mark.slow
def test_a_block_that_is_not_set_is_not_read():
    """NaN in its keys and values, where tiles lie in blocks."""
    block_mask = np.ones((1, 1, 1, 2), bool)
    block_mask[..., 1] = False
    x = {"query": made(1, 128, 1, 16), **{n: made(1, 256, 1, 16).at[:, 128:].set(jnp.nan) for n in ("key", "value")}}

    @jax.jit
    def run(x):
        return op(**x, block_mask=jnp.asarray(block_mask), block_size=(128, 128), platform="pallas")[0].sum()

    with interpret():
        for name, gradient in jax.grad(run)(x).items():
            assert jnp.isfinite(gradient).all(), name
            assert name == "query" or not gradient[:, 128:].any(), name


# -- lists --------------------------------------------------------------------------------------------------------------


def lists(lead, lengths, block_size, mask=None, cfg=None):
    """Returns (kinds of tiles, visits by queries, visits by keys) of a call with random blocks."""
    x = [made(B, n, heads, 16) for n, heads in ((lengths[0], N), (lengths[1], K), (lengths[1], K))]
    found = pallas_tpu._Lists(
        *x, blocks(lead, lengths, block_size), mask, None, block_size, None, None, (cfg or tile(128, 128)).fwd_params
    )
    return np.asarray(found._kinds), found.by_queries(), found.by_keys()


def wanted(kinds, by_keys):
    """Yields, for each list, its (head in a group, block that stays, block that changes, kind), in order."""
    batch, heads = kinds.shape[:2]
    group = N // K if by_keys and heads > 1 else 1
    for row in range(batch):
        for head in range(0, heads, group):
            own = kinds[row, head : head + group]  # [group, queries, keys]
            own = own.transpose(2, 0, 1) if by_keys else own.swapaxes(0, 1)  # [stays, group, changes]
            found = []
            for stays, pairs in enumerate(own):
                met = [(g, stays, changes, pairs[g, changes]) for g, changes in np.argwhere(pairs != tiles.HIDDEN)]
                found.append(met or [(0, stays, 0, tiles.HIDDEN)])
            yield found


@pytest.mark.parametrize(
    ("lead", "mask", "parts"),
    [
        pytest.param((1, 1), None, 1, marks=pytest.mark.slow),
        pytest.param((1, N), MaskInfo(causal=True), 1, marks=pytest.mark.slow),
        ((B, N), MaskInfo.from_segments(documents(900)), 2),
    ],
    ids=["shared", "per head", "per row and head"],
)
def test_lists_are_the_pairs_of_tiles_that_are_set(monkeypatch, lead, mask, parts):
    """Each once, in order, those of a tile that stays together; a tile that meets none once, to be written."""
    if parts > 1:
        monkeypatch.setattr(pallas_tpu._Sizes, "parts", lambda self, by_keys: parts)
    kinds, *both = lists(lead, (900, 900), (128, 128), mask)
    for by_keys, visits in enumerate(both):
        packed = np.asarray(visits.packed).reshape(parts, visits.rows, visits.heads, visits.length)
        each, steps = -(-kinds.shape[3 if by_keys else 2] // parts), np.zeros(parts, int)
        for number, tiles_of_list in enumerate(wanted(kinds, by_keys)):
            row, head = divmod(number, visits.heads)
            for part in range(parts):
                own = [
                    (visit, n == 0, n == len(met) - 1)
                    for met in tiles_of_list[part * each : (part + 1) * each]
                    for n, visit in enumerate(met)
                ]
                steps[part] = max(steps[part], len(own))
                words = packed[part, row, head]
                for word, ((group, stays, changes, kind), begins, ends) in zip(words, own, strict=False):
                    at = pallas_visits.decoded(visits._replace(rows=1, heads=1), np.asarray([word]), row, 0, 0)
                    assert (
                        (at.n, at.j, at.i) == (group, stays, changes) if by_keys else (at.i, at.j) == (stays, changes)
                    )
                    flags = [bool(at.has(flag)) for flag in (pallas_visits.ACTIVE, pallas_visits.FULL)]
                    assert flags == [kind != tiles.HIDDEN, kind == tiles.FULL]
                    assert [bool(at.has(f)) for f in (pallas_visits.BEGINS, pallas_visits.ENDS)] == [begins, ends]
                # What is left over does nothing and stays where it is.
                assert {*words[len(own) :]} <= {words[len(own) - 1] >> 4 << 4}
        np.testing.assert_array_equal(np.ravel(visits.steps), steps)


def test_lists_take_no_more_than_a_few_numbers_a_pair_of_tiles():
    """No array of tokens by tokens, nor of tokens by tiles, is made on the way."""
    sides, size = 64, 128

    def run(block_mask):
        kinds = tiles.kinds(block_mask, MaskInfo(causal=True), (sides * size,) * 2, (size, size), (size, size))
        return pallas_visits.listed_visits(kinds > 0, kinds > 1, sides**2, False).packed

    def largest(jaxpr):
        inside = [largest(j) for e in jaxpr.eqns for j in jaxprs_in_params(e.params)]
        return max([v.aval.size for e in jaxpr.eqns for v in e.outvars] + inside, default=0)

    program = jax.make_jaxpr(run)(jax.ShapeDtypeStruct((1, 1, sides, sides), bool))
    assert sides**2 <= largest(program.jaxpr) <= 2 * sides**2 < sides**2 * size


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tenth_of_32k_per_head", "tenth_of_32k_narrow"])
def test_lists_in_parts_compile_for_tpus(name):
    """Three kernels, however many launches they have; nothing is as large as the pairs of tokens."""
    case = next(case for case in op.cases if case.name == name)
    function, arguments = checks.call_of(op, case, platform="pallas_tpu")
    compiled = checks.compile_tpu(function, arguments)
    assert checks.mosaic_calls(compiled) == 3
    assert compiled.memory_analysis().temp_size_in_bytes < 32768**2


# -- what there is no kernel for ------------------------------------------------------------------------------------------


def call(block_size, length=1024, heads=1, width=128, **rest):
    x = jax.ShapeDtypeStruct((1, length, 16, width), "bfloat16")
    shape = (1, heads, *(-(-length // n) for n in block_size))
    return op.bind(query=x, key=x, value=x, block_mask=jax.ShapeDtypeStruct(shape, bool), block_size=block_size, **rest)


@pytest.mark.parametrize(
    ("block_size", "length", "forward", "backward"),
    [
        ((64, 64), 1024, (128, 128), (128, 128)),
        ((128, 256), 1024, (128, 256), (128, 256)),
        ((1024, 2048), 4096, (512, 1024), (512, 512)),
        ((384, 96), 1024, (384, 128), (384, 128)),
        ((512, 512), 200, (256, 256), (256, 256)),
    ],
    ids=str,
)
def test_a_tile_is_as_large_as_a_block(block_size, length, forward, backward):
    cfg = op.backends["pallas_tpu"].heuristic(call(block_size, length), "tpu")
    found = [(p.q_blocksize, p.kv_blocksize) for p in (cfg.fwd_params, cfg.bwd_params)]
    assert found == [forward, backward]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"block_size": (2, 64)}, "a tile of 128 overlaps more than 32 blocks of 2"),
        ({"block_size": (64, 64), "length": 2**16, "heads": 16}, "do not fit in the 640 KiB of scalar memory"),
        ({"block_size": (128, 128), "length": 2**21}, "exceed 16,384 and 8,192"),
    ],
    ids=str,
)
def test_refusals(given, why):
    with pytest.raises(Unsupported, match=why):
        op.choose(call(**given), "pallas")["tpu"]


@pytest.mark.parametrize(
    ("block_size", "cfg", "why"),
    [
        ((64, 64), tile(64, 128), "must be multiples of 128"),
        ((8, 8), tile(512, 128), "a tile side of 512 overlaps 64"),
    ],
    ids=["lanes", "bits"],
)
def test_tiles_of_a_configuration_are_checked(block_size, cfg, why):
    x = made(1, 512, 1, 16)
    with interpret(), pytest.raises(ValueError, match=why):
        op(x, x, x, blocks((1, 1), (512, 512), block_size), block_size=block_size, platform="pallas", cfg=cfg)
