"""Unpacks matrices in Triton: those that `kernels.engines.matmul.formats` describes, written once in another dtype."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels.engines.matmul.formats import NF4
from kernels.engines.matmul.triton_codes import gathered
from kernels.framework.work import Work, nbytes
from kernels.toolchains.triton import triton_launch

# Entries of D and columns of a tile, and its warps: 3.35 TB/s on an H200.
TILE = 32, 256, 4


def table_of(mode: str, dtype: Any) -> jax.Array | None:
    """Returns the numbers of nf4 by code, and None for the other formats."""
    return jnp.asarray(NF4, dtype) if mode == "nf4" else None


def unpacked(
    w: jax.Array,
    scales: jax.Array,
    biases: jax.Array | None,
    dtype: Any,
    *,
    mode: str,
    bits: int,
    group_size: int,
    tile: tuple[int, int, int] = TILE,
) -> jax.Array:
    """Returns the unpacked weights [..., D, F], rounded to a dtype. No run of codes and no group crosses from one matrix to the
    next, so a stack is unpacked as one matrix with more rows."""
    *lead, words, F = w.shape
    rows = math.prod(lead) * words * 32 // bits
    block_d, block_f, num_warps = tile
    block_f = min(block_f, max(16, triton.next_power_of_2(F)))
    out = jax.ShapeDtypeStruct((*lead, words * 32 // bits, F), dtype)
    (weights,) = triton_launch(
        dequantize_kernel,
        w,
        scales,
        biases,
        table_of(mode, jnp.float32),
        out_shape=(out,),
        grid=(triton.cdiv(F, block_f) * triton.cdiv(rows, block_d),),
        num_warps=num_warps,
        work=Work(2 * rows * F, nbytes(w, scales, biases, out)),
        D=rows,
        F=F,
        MODE=mode,
        BITS=bits,
        GROUP=group_size,
        BLOCK_D=block_d,
        BLOCK_F=block_f,
    )
    return weights


@triton.jit
def dequantize_kernel(
    w_ptr,
    s_ptr,
    b_ptr,
    table_ptr,
    out_ptr,  # [D, F]
    D: tl.constexpr,
    F: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    across = (F + BLOCK_F - 1) // BLOCK_F
    d = tl.program_id(0) // across * BLOCK_D + tl.arange(0, BLOCK_D)
    cols = tl.program_id(0) % across * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = (d < D)[:, None] & (cols < F)[None, :]
    weights = gathered(w_ptr, s_ptr, b_ptr, table_ptr, d, cols, mask, F, MODE, BITS, GROUP)
    out = out_ptr + d.to(tl.int64)[:, None] * F + cols[None, :]
    tl.store(out, weights.to(out_ptr.dtype.element_ty), mask=mask)
