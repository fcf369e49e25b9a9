"""Patterns of blocks: which key blocks each query block sees, as NumPy bool [query blocks, key blocks].

They are arrays, so `|` and `&` combine them. With more key blocks than query blocks, the last query block is aligned with the
last key block, as queries are with keys. None is causal: pass `causal` in the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.engines.attention.masks import MaskInfo, key_range
from kernels.engines.attention.tiles import active_tiles
from kernels.ops.blocksparse_attention.contract import sides_of

Size = int | tuple[int, int]


def _integer(name: str, value: Any, least: int, what: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"argument {name!r} must be an integer of at least {least}{what}, got {value!r}")
    return int(value)


def _distance(q_blocks: int, kv_blocks: int | None) -> np.ndarray:
    """Returns, for each query block and key block, how many blocks the key block is before the query block."""
    kv_blocks = q_blocks if kv_blocks is None else kv_blocks
    for name, n in (("q_blocks", q_blocks), ("kv_blocks", kv_blocks)):
        _integer(name, n, 1, " block")
    return np.arange(q_blocks)[:, None] + (kv_blocks - q_blocks) - np.arange(kv_blocks)[None]


def local_blocks(q_blocks: int, kv_blocks: int | None = None, *, before: int = 1, after: int = 1) -> np.ndarray:
    """Returns the pattern in which a query block sees its own key block, `before` blocks before it and `after` after it.

    >>> local_blocks(3, before=1, after=0).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """
    for name, n in (("before", before), ("after", after)):
        _integer(name, n, 0)
    distance = _distance(q_blocks, kv_blocks)
    return (distance <= before) & (distance >= -after)


def strided_blocks(q_blocks: int, kv_blocks: int | None = None, *, stride: int) -> np.ndarray:
    """Returns the pattern in which a query block sees every `stride`-th key block, counted from its own (Child et al., 2019).

    >>> strided_blocks(4, stride=2).astype(int)
    array([[1, 0, 1, 0],
           [0, 1, 0, 1],
           [1, 0, 1, 0],
           [0, 1, 0, 1]])
    """
    return _distance(q_blocks, kv_blocks) % _integer("stride", stride, 1) == 0


def global_blocks(q_blocks: int, kv_blocks: int | None = None, *, blocks: int | Sequence[int] = 1) -> np.ndarray:
    """Returns the pattern in which all see the first `blocks` blocks, or the listed ones, and those see all.

    >>> global_blocks(3, blocks=[1]).astype(int)
    array([[0, 1, 0],
           [1, 1, 1],
           [0, 1, 0]])
    """
    distance = _distance(q_blocks, kv_blocks)
    if isinstance(blocks, (int, np.integer)):
        named = np.arange(_integer("blocks", blocks, 0))
    else:
        named = np.array([_integer("blocks", n, 0) for n in blocks], int)
    columns = distance.shape[1]
    if named.size and not (0 <= named.min() and named.max() < columns):
        raise ValueError(f"argument 'blocks' = {blocks} must be within the {columns} key blocks")
    of_keys = np.isin(np.arange(columns), named)
    of_queries = np.isin(np.arange(distance.shape[0]) + columns - distance.shape[0], named)
    return of_keys[None] | of_queries[:, None]


def random_blocks(q_blocks: int, kv_blocks: int | None = None, *, count: int, seed: int = 0) -> np.ndarray:
    """Returns the pattern in which each query block sees `count` random key blocks, drawn without replacement from a seed."""
    shape = _distance(q_blocks, kv_blocks).shape
    if _integer("count", count, 0) > shape[1]:
        raise ValueError(f"argument 'count' = {count} must be between 0 and the {shape[1]} key blocks")
    return np.random.default_rng(seed).random(shape).argsort(1).argsort(1) < count


def bigbird_blocks(
    q_blocks: int,
    kv_blocks: int | None = None,
    *,
    num_global: int = 1,
    before: int = 1,
    after: int = 1,
    num_random: int = 2,
    seed: int = 0,
) -> np.ndarray:
    """Returns BigBird's pattern (Zaheer et al., 2020): local, global and random blocks together."""
    pattern = local_blocks(q_blocks, kv_blocks, before=before, after=after)
    pattern |= global_blocks(q_blocks, kv_blocks, blocks=num_global)
    return pattern | random_blocks(q_blocks, kv_blocks, count=num_random, seed=seed)


def blocks_of_mask(mask: MaskInfo, q_length: int, kv_length: int | None = None, *, block_size: Size = 64) -> Any:
    """Returns the blocks in which `mask` may let a pair through, in any row or head: bool [query blocks, key blocks].

    Pass the mask in the call too, as `mask_info`: it still applies within blocks. A NumPy array if the mask has no positions
    and segments; otherwise a JAX array, traced if they are.

    >>> blocks_of_mask(MaskInfo(causal=True, window=(2, 0)), 8, block_size=4).astype(int)
    array([[1, 0],
           [1, 1]])
    """
    if not isinstance(mask, MaskInfo):
        raise ValueError(f"blocks_of_mask: argument 'mask' must be a MaskInfo, got {type(mask).__name__}")
    lengths = q_length, q_length if kv_length is None else kv_length
    for name, n in zip(("q_length", "kv_length"), lengths, strict=True):
        _integer(name, n, 1)
    return active_tiles(key_range(mask, *lengths), *sides_of(block_size, "blocks_of_mask"))
