"""Sizes of a call for the Triton kernels, and where the rows of a tile are."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from kernels.ops.native_sparse_attention.blocks import CallSizes, power

# The minimum number of rows, and of columns, of a product.
LEAST = 16


@dataclass(frozen=True)
class Sizes(CallSizes):
    """Compile-time sizes of the kernels.

    Attributes:
      PARTS: tiles of BLOCK_K keys that a block has.
      BLOCK_G: query heads of a key head, padded: a tile of queries has BLOCK_Q * BLOCK_G rows.
    """

    PARTS: int
    BLOCK_G: int
    BLOCK_H: int
    BLOCK_V: int


def queries_of(rows: int, group: int, most: int) -> int:
    """Returns the queries in a tile with that number of rows: a power of 2, at most `most` unless a product needs more."""
    group = power(group)
    return max(LEAST // group, min(power(rows // group + 1) // 2, most), 1)


# The most keys of a tile by the bytes of a number; longer blocks have several tiles. Products of float32 are made by registers.
LONGEST = {2: 64, 4: 32}
# The most queries whose blocks are read together: of more, few read the same.
TOGETHER = 4


def sizes_of(query: Any, key: Any, value: Any, named: int, size: int, scale: float | None, rows: int) -> Sizes:
    """Returns the sizes of a call, for tiles with that number of rows.

    Args:
      named: blocks that a query names at most. size: tokens of a block.
    """
    (B, T, N, H), (S, K), HV = query.shape, key.shape[1:3], value.shape[3]
    block_k = min(LONGEST[query.dtype.itemsize], power(size, LEAST))
    scale = 1 / math.sqrt(H) if scale is None else scale
    return Sizes(
        B, T, S, N, K, H, HV, named, size, scale, queries_of(rows, N // K, TOGETHER), block_k,
        -(-size // block_k), power(N // K), power(H, LEAST), power(HV, LEAST),
    )  # fmt: skip


@triton.jit
def place_of(program, BLOCKS: tl.constexpr, O: tl.constexpr):
    """Returns (tile, key head, row of the batch) of a program. The last tiles see the most keys, and start first."""
    return BLOCKS - 1 - program % BLOCKS, program // BLOCKS % O.K, program // (BLOCKS * O.K)


@triton.jit
def rows_of_tile(tile, head, O: tl.constexpr):
    """Returns for each row of a tile (query, query head, index of the query in the tile); the query is T in padding."""
    G: tl.constexpr = O.N // O.K
    r = tl.arange(0, O.BLOCK_Q * O.BLOCK_G)
    g = r % O.BLOCK_G
    query = tile * O.BLOCK_Q + r // O.BLOCK_G
    return tl.where((g < G) & (query < O.T), query, O.T), head * G + tl.minimum(g, G - 1), r // O.BLOCK_G
