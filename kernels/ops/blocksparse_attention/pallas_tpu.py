"""Block-sparse attention on TPUs: the kernels of flash attention over lists of tiles, forward and backward.

Tiles have multiples of 128 queries and keys. If no such tile divides a block, tiles overlap several blocks: a tile is visited
if any of its blocks is set, and the kernels read one bit per block. The backward has two passes with separate lists and
accumulates nothing in memory, so results are bitwise reproducible.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.pallas_calls import LANES, SMEM_BYTES, Blocks, Call, most_visits, prepare
from kernels.engines.attention.pallas_passes import attend, gradients, of_saved
from kernels.engines.attention.pallas_visits import MOST_INNER, MOST_OUTER, Visits, listed_visits
from kernels.engines.attention.softmax import sink_gradient
from kernels.framework.config import BwdParams, FwdParams
from kernels.framework.execute import Saved
from kernels.ops.blocksparse_attention import tiles
from kernels.ops.blocksparse_attention.contract import FEATURES, BlockSparseConfig, check_blocks, op

# The longest sides of tiles, forward and backward, as in flash attention.
LONGEST = {"fwd_params": (512, 1024), "bwd_params": (512, 512)}
# The maximum number of blocks that a tile may overlap along a side: the bits of an integer.
MOST_INSIDE = 32


class _Sizes:
    """The sizes of a call's lists.

    Attributes:
      tiles: numbers of query tiles and of key tiles.
      lists: number of lists by queries, over rows and heads.
      group: query heads whose queries share one list by keys.
      bits: number of integers that store the bits of blocks.
    """

    def __init__(self, shape: tuple[int, ...], dims: Mapping[str, int], mask: MaskInfo, block_size: Any, tile: Any):
        """`shape` is that of the block mask; `dims` has T, S, N and K."""
        self._mask, self._lengths, self._tile = mask, (dims["T"], dims["S"]), tile
        data = [getattr(mask, name).shape[0] for name in mask.data_fields if name != "attention_mask"]
        blocks = _bits_shape(shape, block_size, self._lengths, tile)
        self.tiles = tuple(-(-n // side) for n, side in zip(self._lengths, tile, strict=True))
        self.lists = max([shape[0], *data]) * shape[1]
        self.group = dims["N"] // dims["K"] if shape[1] > 1 else 1
        self.bits = 0 if blocks is None else blocks.rows * blocks.heads * blocks.height * blocks.words

    @functools.cached_property
    def _most(self) -> tuple[int, int]:
        return most_visits(self._mask, *self._lengths, *self._tile)

    def most(self, by_keys: bool) -> int:
        """Returns the maximum number of visits per list."""
        return (self.group if by_keys else 1) * self._most[by_keys]

    def inner(self, by_keys: bool) -> int:
        """Returns the number of streamed tiles, for each resident tile."""
        return self.group * self.tiles[0] if by_keys else self.tiles[1]

    def room(self, by_keys: bool) -> int:
        """Returns the number of entries that each list may have in scalar memory."""
        return max(0, SMEM_BYTES // 4 - self.bits) // (self.lists // self.group if by_keys else self.lists)

    def parts(self, by_keys: bool) -> int:
        """Returns the number of launches over which the lists fit in scalar memory; 0 if no number suffices."""
        if self.most(by_keys) <= self.room(by_keys):
            return 1
        each = self.room(by_keys) // self.inner(by_keys)
        return -(-self.tiles[by_keys] // each) if each else 0


class _Lists:
    """A call in the kernels' form, with the lists of tiles that it visits."""

    def __init__(
        self, query, key, value, block_mask, mask, softmax_aux, block_size, softmax_scale, logits_soft_cap, params
    ):
        (B, T, N, _), (S, K) = query.shape, key.shape[1:3]
        check_blocks(block_mask, block_size, B, T, S, N, K)
        tile = _tile(params)
        _check_tile(block_size, tile)
        self.call: Call = prepare(
            "blocksparse_attention",
            query,
            key,
            value,
            mask,
            softmax_aux,
            softmax_scale,
            logits_soft_cap,
            tile,
            blocks=_bits(block_mask, block_size, (T, S), tile),
        )
        self._kinds = tiles.kinds(block_mask, self.call.mask, (T, S), block_size, tile)
        dims = {"T": T, "S": S, "N": N, "K": K}
        self._sizes = _Sizes(block_mask.shape, dims, self.call.mask, block_size, tile)

    def by_queries(self) -> Visits:
        return self._visits(self._kinds, False)

    def by_keys(self) -> Visits:
        kinds, G = self._kinds.swapaxes(2, 3), self._sizes.group
        batch, heads, k_tiles, q_tiles = kinds.shape
        if G == 1:
            return self._visits(kinds, True)
        # A key head has one list, over the queries of all query heads that read it.
        kinds = kinds.reshape(batch, heads // G, G, k_tiles, q_tiles).swapaxes(2, 3)
        return self._visits(kinds.reshape(batch, heads // G, k_tiles, G * q_tiles), True)

    def _visits(self, kinds: jax.Array, by_keys: bool) -> Visits:
        sizes = self._sizes
        return listed_visits(
            kinds != tiles.HIDDEN,
            kinds == tiles.FULL,
            sizes.most(by_keys),
            by_keys,
            per_head=sizes.tiles[0] if by_keys and sizes.group > 1 else 0,
            parts=sizes.parts(by_keys),
        )


def _tile(params: FwdParams) -> tuple[int, int]:
    """Returns (queries, keys) per tile."""
    assert params.q_blocksize and params.kv_blocksize
    return params.q_blocksize, params.kv_blocksize


def _check_tile(block_size: tuple[int, int], tile: tuple[int, int]) -> None:
    """Raises ValueError if the kernels cannot run the tiles of a configuration."""
    for size, side in zip(block_size, tile, strict=True):
        if side % LANES:
            raise ValueError(
                f"blocksparse_attention: argument 'cfg': on a TPU the sides of a tile must be multiples of {LANES}, got "
                f"{tile[0]} queries and {tile[1]} keys"
            )
        if tiles.held(size, side) > MOST_INSIDE:
            raise ValueError(
                f"blocksparse_attention: argument 'cfg': a tile side of {side} overlaps {tiles.held(size, side)} blocks of "
                f"{size}, but at most {MOST_INSIDE} are possible; use a shorter side"
            )


def _bits_shape(
    shape: tuple[int, ...], block_size: tuple[int, int], lengths: tuple[int, int], tile: tuple[int, int]
) -> Blocks | None:
    """Returns the layout of a block mask for tiles that overlap several blocks; None if each tile is within one block."""
    inside = tiles.held(block_size[0], tile[0]), tiles.held(block_size[1], tile[1])
    if inside == (1, 1):
        return None
    # The last tiles may end past the last block, so their bits need room there.
    last = [(-(-n // side) - 1) * side // size for n, side, size in zip(lengths, tile, block_size, strict=True)]
    return Blocks(block_size, inside, shape[0], shape[1], last[0] + inside[0], last[1] // 32 + 2)


def _bits(
    block_mask: jax.Array, block_size: tuple[int, int], lengths: tuple[int, int], tile: tuple[int, int]
) -> tuple[Blocks, jax.Array] | None:
    """Returns the layout and the bits of a block mask: 32 blocks of a row per integer, the first one in its lowest bit."""
    blocks = _bits_shape(block_mask.shape, block_size, lengths, tile)
    if blocks is None:
        return None
    rows, columns = block_mask.shape[2:]
    room = ((0, 0), (0, 0), (0, blocks.height - rows), (0, 32 * blocks.words - columns))
    bits = jnp.pad(jnp.asarray(block_mask), room).reshape(*block_mask.shape[:2], blocks.height, blocks.words, 32)
    words = (bits.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
    return blocks, jax.lax.bitcast_convert_type(words, jnp.int32).reshape(-1)


def forward(query, key, value, block_mask, mask, softmax_aux, block_size, softmax_scale, logits_soft_cap, cfg):
    options = block_size, softmax_scale, logits_soft_cap, cfg.fwd_params
    lists = _Lists(query, key, value, block_mask, mask, softmax_aux, *options)
    return attend(lists.call, lists.by_queries(), query.dtype)


def backward(
    saved: Saved, query, key, value, block_mask, mask, softmax_aux, block_size, softmax_scale, logits_soft_cap, cfg
):
    options = block_size, softmax_scale, logits_soft_cap, cfg.bwd_params
    lists = _Lists(query, key, value, block_mask, mask, softmax_aux, *options)
    extra = of_saved(lists.call, saved, query.dtype)
    grads = gradients(lists.call, extra, lists.by_queries(), lists.by_keys())
    if softmax_aux is not None:
        grads["softmax_aux"] = sink_gradient(softmax_aux, saved.lse, saved.delta)
    return grads


# -- configurations -----------------------------------------------------------------------------------------------------


def _side(size: int, length: int, longest: int) -> int:
    """Returns the longest side of a tile that divides the side of a block, or the shortest possible side if none does."""
    most = min(size, longest, -(-length // LANES) * LANES)
    return next((n for n in range(most // LANES * LANES, LANES, -LANES) if size % n == 0), LANES)


def _heuristic(call: Any, platform: str) -> BlockSparseConfig:
    # Each tile has a fixed cost besides its products, so tiles are as large as a block. Larger tiles would compute blocks
    # that are not set.
    lengths = call.dims["T"], call.dims["S"]
    sides = {
        name: [_side(*limits) for limits in zip(call.block_size, lengths, longest, strict=True)]
        for name, longest in LONGEST.items()
    }
    return BlockSparseConfig(fwd_params=FwdParams(*sides["fwd_params"]), bwd_params=BwdParams(*sides["bwd_params"]))


def _candidates(call: Any) -> list[BlockSparseConfig]:
    """Returns tiles within one block, and larger ones: fewer, but they compute some blocks that are not set."""
    first = _heuristic(call, "tpu")
    larger = [
        BlockSparseConfig(fwd_params=FwdParams(side, side), bwd_params=BwdParams(side, side))
        for side in (256, 512)
        if all(tiles.held(size, side) <= MOST_INSIDE for size in call.block_size)
    ]
    return list(dict.fromkeys([first, *larger]))


def _rejects(call: Any) -> str | None:
    if min(call.block_size) < 1:
        return f"block_size = {call.block_size} must be positive"
    cfg, mask = _heuristic(call, "tpu"), MaskInfo() if call.mask is None else call.mask.resolved()
    for params in (cfg.fwd_params, cfg.bwd_params):
        tile = _tile(params)
        if small := [n for n, side in zip(call.block_size, tile, strict=True) if tiles.held(n, side) > MOST_INSIDE]:
            return f"a tile of {LANES} overlaps more than {MOST_INSIDE} blocks of {small[0]} along a side"
        sizes = _Sizes(call.block_mask.shape, call.dims, mask, call.block_size, tile)
        for by_keys in (False, True):
            stays, changes = sizes.tiles[by_keys], sizes.inner(by_keys)
            if stays > MOST_OUTER or changes > MOST_INNER:
                return f"{stays:,} resident and {changes:,} streamed tiles exceed {MOST_OUTER:,} and {MOST_INNER:,}"
            if not sizes.parts(by_keys):
                return (
                    f"{sizes.lists} lists of {changes:,} tiles, with {sizes.bits >> 8:,} KiB for the bits of blocks, do not "
                    f"fit in the {SMEM_BYTES >> 10} KiB of scalar memory; use larger blocks, or split the sequence or the "
                    "heads over devices"
                )
    return None


op.register(
    forward,
    backward,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    features=FEATURES,
    rejects=_rejects,
    heuristic=_heuristic,
    candidates=_candidates,
)
