"""What the calls of all Triton kernels of recurrences share: sizes of tiles, refusals, sums over shared heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kernels.framework.binding import Call
from kernels.framework.measured import power_of_two
from kernels.toolchains.triton import compute_capability

WIDEST = 128  # channels of a key: the gradients of one chunk's queries and keys fill the registers of a program
WIDEST_VALUE = 512
LEAST = 16  # tokens or channels of a tile: the least of a product
LONGEST = 128  # tokens of a chunk


def check_chunk(chunk: int | None) -> int:
    """Returns the tokens of a chunk.

    Raises:
      ValueError: they are fewer than those of a product, or too many.
    """
    chunk = chunk or 64
    if not LEAST <= chunk <= LONGEST:
        raise ValueError(f"cfg: chunk = {chunk}, but the chunks of the Triton kernels have {LEAST} to {LONGEST} tokens")
    return chunk


def longest_chunk(call: Call) -> int:
    """Returns the most tokens of a chunk that are worth while: those of a sequence of mean length."""
    return max(LEAST, power_of_two(-(-call.dims["T"] // call.num_states)))


def precisions(dtype: Any) -> tuple[str, str]:
    """Returns how products are computed, of pairs and walks and of gradients of chunks.

    Those of float32 are exact, or three of TF32 for each where exact ones do not fit the registers.
    """
    return ("ieee", "tf32x3") if dtype == jnp.float32 else ("tf32", "tf32")


def columns(block_v: int | None, Hv: int) -> int:
    """Returns the columns of a state that one program has."""
    return min(block_v or 64, max(LEAST, power_of_two(Hv)))


def columns_here(block_v: int | None, Hv: int) -> int:
    """Returns `columns` on the GPU being compiled for: before Hopper the operands of products lie in registers."""
    return columns(block_v, Hv) if compute_capability() >= 90 else max(LEAST, columns(block_v, Hv) // 2)


def gradient_tiles(cfg: Any, dtype: Any, Hv: int, num_warps: int | None = None) -> dict[str, Any]:
    """Returns the tiles of programs of one chunk's gradients: columns of a state at a time, warps, and stages of their loop.

    The loop has at least two steps, whose loads overlap products. Eight warps fill a multiprocessor with one program, which
    then loads both at once; of four, several programs hide each other's loads.
    """
    num_warps = num_warps or cfg.backward_num_warps or 8
    block_v = max(LEAST, min(64, power_of_two(Hv) // 2))
    if dtype == jnp.float32:  # small tiles fit the registers
        return {"BLOCK_V": max(LEAST, min(cfg.block_v or 64, block_v)), "num_warps": num_warps, "num_stages": 1}
    if compute_capability() < 90:
        return {"BLOCK_V": max(LEAST, block_v // 2), "num_warps": num_warps, "num_stages": 2}
    return {"BLOCK_V": block_v, "num_warps": num_warps, "num_stages": 3 if num_warps > 4 or block_v < 64 else 2}


def reads_diagonals(dtype: Any) -> bool:
    """Returns whether a sum of products is computed as the diagonal of a matrix product, whose operands need no registers."""
    return dtype != jnp.float32 and compute_capability() >= 90


def sizes_refused(dims: Mapping[str, Any], *arrays: Any) -> str | None:
    """Returns why the kernels cannot run a call of these sizes and arrays of tokens."""
    if 0 in dims.values():
        return "an array has no elements"
    if dims["H"] > WIDEST:
        return f"H = {dims['H']} exceeds {WIDEST}: the gradients of a chunk's keys must fit the registers of a program"
    if dims["Hv"] > WIDEST_VALUE:
        return f"Hv = {dims['Hv']} exceeds {WIDEST_VALUE}"
    if len({x.dtype for x in arrays}) > 1:
        return f"arrays of tokens have the dtypes {', '.join(sorted({str(x.dtype) for x in arrays}))}; cast them to one"
    return None


def fade_shapes(B: int, N: int, chunks: int, T: int) -> tuple[Any, Any, Any]:
    """Returns the shapes of what `triton_parts.fades` returns for all chunks."""
    token = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    return token, token, jax.ShapeDtypeStruct((B, N, chunks), jnp.float32)


def heads_of(x: jax.Array, K: int) -> jax.Array:
    """Returns [B, T, K, ...]: sums over the heads that share one of K."""
    return x if x.shape[2] == K else jnp.sum(x.reshape(*x.shape[:2], K, -1, x.shape[-1]), axis=3)
