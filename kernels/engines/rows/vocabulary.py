"""Projections to a vocabulary, a block of tokens at a time: their logits never exist as a whole."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from kernels.framework.binding import Call

# Every block reads lm_head and, in a backward, reads and writes its float32 gradient, so below about a thousand rows the
# matmuls wait for memory whatever the vocabulary.
_LEAST_ROWS = 1024


def no_features(x: jax.Array) -> bool:
    """Returns whether rows of features, of logits, or of a projection to them are empty. Of tokens there may be none."""
    return any(isinstance(n, int) and n == 0 for n in x.shape[-1:])


def block_rows(call: Call, elements: int) -> int:
    """Returns the tokens whose logits exist at one time, for about that many logits."""
    return rows_of_block(math.prod(call.dims["lead"]), call.dims["V"], elements)


def rows_of_block(tokens: int, vocabulary: int, elements: int) -> int:
    """Returns the same from the numbers."""
    return max(1, min(tokens, max(_LEAST_ROWS, elements // vocabulary // 128 * 128)))


def candidates(call: Call, most: int) -> list[int]:
    """Returns the tokens of a block to choose from when tuning; all of them, and powers of two up to `most`."""
    tokens = math.prod(call.dims["lead"])
    return [*(r for r in (2**n for n in range(8, most.bit_length())) if r < tokens), max(1, tokens)]


def in_blocks(x: jax.Array, rows: int, fill: int = 0) -> jax.Array:
    """Returns [n, rows, ...] of x [T, ...], padded."""
    n = -(-x.shape[0] // rows)
    x = jnp.pad(x, [(0, n * rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
    return x.reshape(n, rows, *x.shape[1:])


def out_of_blocks(x: jax.Array, count: int) -> jax.Array:
    """Returns [count, ...] of blocks [n, rows, ...], without the padding."""
    return x.reshape(-1, *x.shape[2:])[:count]
