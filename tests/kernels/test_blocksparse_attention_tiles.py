"""Lists of tiles of blocksparse_attention: against NumPy, in XLA and in Triton; and what its kernels refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import MaskInfo, Unsupported
from kernels.framework.config import BwdParams, FwdParams
from kernels.framework.interpret import interpret
from kernels.ops.blocksparse_attention import BlockSparseConfig, op, tiles, triton_lists
from kernels.toolchains.simulate.ahead_of_time import export_cuda

RNG = np.random.default_rng(0)


def by_hand(kinds):
    """Returns (list of visited tiles, how many are full) of every row of tiles."""
    found = {}
    for at in np.ndindex(kinds.shape[:3]):
        full, masked = (np.flatnonzero(kinds[at] == kind) for kind in (tiles.FULL, tiles.MASKED))
        found[at] = [*full, *masked], len(full)
    return found


def in_triton(kinds, group):
    with interpret():
        return jax.jit(triton_lists.lists, static_argnums=1)(kinds, group)


@pytest.mark.parametrize("make", [jax.jit(tiles.tile_map, static_argnums=1), in_triton], ids=["xla", "triton"])
@pytest.mark.parametrize(
    ("shape", "group"), [((2, 4, 5, 7), 2), ((1, 1, 70, 3), 4), ((1, 2, 3, 1100), 1)], ids=["grouped", "shared", "long"]
)
def test_lists(make, shape, group):
    kinds = RNG.choice([tiles.HIDDEN, tiles.MASKED, tiles.FULL], shape).astype(np.int8)
    kinds[:, :, 1] = tiles.HIDDEN
    index, ends, order = (np.asarray(x) for x in make(jnp.asarray(kinds), group))
    for at, (visited, full) in by_hand(kinds).items():
        assert list(ends[at]) == [full, len(visited)]
        np.testing.assert_array_equal(index[at][: len(visited)], visited)
    counts = ends[..., 1] if shape[1] == 1 else ends[..., 1].reshape(shape[0], -1, group, shape[2]).sum(2)
    np.testing.assert_array_equal(order, np.argsort(-counts, axis=-1, kind="stable"))


@pytest.mark.parametrize("tile", [(8, 16), (32, 16), (24, 24)], ids=str)
def test_kinds_are_what_blocks_and_the_mask_say(tile):
    """A tile is visited if some pair of it is, and full only if every pair attends: in a block, or with tokens of several."""
    T, S, size = 90, 110, (16, 32)
    ids = [jnp.asarray(np.arange(n)[None] > at, jnp.int32) for n, at in ((T, [[30], [70]]), (S, [[40], [70]]))]
    mask = MaskInfo(causal=True, q_segment_ids=ids[0], kv_segment_ids=ids[1])
    block_mask = np.random.default_rng(0).random((1, 3, 6, 4)) < 0.8
    kinds = jax.jit(functools.partial(tiles.kinds, lengths=(T, S), block_size=size, tile=tile))
    found = np.asarray(kinds(block_mask, mask))
    assert found.shape == (2, 3, -(-T // tile[0]), -(-S // tile[1]))
    pairs = np.repeat(np.repeat(block_mask, size[0], 2), size[1], 3)[:, :, :T, :S] & np.asarray(mask.visible(T, S))
    for b, n, i, j in np.ndindex(found.shape):
        pair = pairs[b, n, i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
        assert not pair.any() or found[b, n, i, j] != tiles.HIDDEN
        assert found[b, n, i, j] != tiles.FULL or (pair.all() and pair.shape[1] == tile[1])
    assert {*found.ravel()} == {tiles.HIDDEN, tiles.MASKED, tiles.FULL}


def call(block_size=(64, 64), length=256, width=128, **rest):
    shape = jax.ShapeDtypeStruct((1, length, 2, width), "bfloat16")
    blocks = jax.ShapeDtypeStruct((1, 1, *(-(-length // n) for n in block_size)), bool)
    return {"query": shape, "key": shape, "value": shape, "block_mask": blocks, "block_size": block_size, **rest}


@pytest.mark.parametrize(
    ("given", "tile", "warps"),
    [
        ({"block_size": (128, 128)}, (128, 128), 12),
        ({"block_size": (384, 64)}, (128, 64), 12),
        ({"block_size": (64, 128)}, (64, 64), 12),
        ({"block_size": (96, 128)}, (32, 64), 4),
        ({"block_size": (48, 16)}, (16, 16), 4),
        ({"block_size": (128, 128), "width": 256}, (128, 64), 8),
        ({"mask": MaskInfo(attention_mask=jnp.ones((1, 1, 256, 256), bool))}, (64, 64), 4),
        ({"softmax_scale": -1.0}, (64, 64), 4),
    ],
    ids=str,
)
def test_tiles_divide_blocks(given, tile, warps):
    params = op.backends["triton_gpu"].heuristic(op.bind(**call(**given)), "cuda").fwd_params
    assert ((params.q_blocksize, params.kv_blocksize), params.num_warps) == (tile, warps)


@pytest.mark.parametrize(
    ("given", "why"),
    [({"block_size": (8, 16)}, "multiples of 16"), ({"width": 320}, "exceeds the maximum of 256")],
    ids=str,
)
def test_refusals(given, why):
    with pytest.raises(Unsupported, match=why):
        op.choose(op.bind(**call(**given)), "triton")["cuda"]


@pytest.mark.parametrize(
    ("cfg", "why"),
    [
        (BlockSparseConfig(fwd_params=FwdParams(64, 128, 12, 2)), "fwd_params has tiles of 64 queries and 128 keys"),
        (BlockSparseConfig(bwd_params=BwdParams(32, 32, 12, 2)), "bwd_params has 12 warps"),
    ],
    ids=["divide", "hopper"],
)
def test_tiles_of_a_configuration_are_checked(cfg, why):
    arrays = {n: x for n, x in call().items() if n != "block_size"}

    def run(arrays):
        return op(**arrays, block_size=(64, 64), platform="triton", cfg=cfg)

    with pytest.raises(ValueError, match=why):
        export_cuda(run, arrays, compute_capability=90)
