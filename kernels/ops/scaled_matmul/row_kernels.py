"""Triton kernels that quantise rows in blocks of 128 entries: as they are, after the activation of a gate, and its cotangents.
A program has a block of 64 rows, which may end anywhere."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.matmul.triton_activations import activation
from kernels.ops.scaled_matmul.quantize_kernels import bytes_of, largest, scales_of


@triton.jit
def _place(D: tl.constexpr, TALL: tl.constexpr):
    """Returns the rows of a program and its block of 128 columns; programs side by side read one row after the other."""
    program = tl.program_id(0)
    return program // (D // 128) * TALL + tl.arange(0, TALL), program % (D // 128)


@triton.jit
def _entries(rows, j, WIDTH: tl.constexpr):
    return rows.to(tl.int64)[:, None] * WIDTH + (j * 128 + tl.arange(0, 128))[None, :]


@triton.jit
def _write(x, values_ptr, scale_ptr, rows, j, M: tl.constexpr, D: tl.constexpr):
    """Writes block j of some rows of an array [M, D], and its scales."""
    scale, reciprocal = scales_of(largest(x, 1), 448.0)
    tl.store(values_ptr + _entries(rows, j, D), bytes_of(x * reciprocal[:, None], False), mask=(rows < M)[:, None])
    tl.store(scale_ptr + rows * (D // 128) + j, scale, mask=rows < M)


@triton.jit
def quantize_rows_kernel(
    x_ptr,  # [M, D]
    values_ptr,  # [M, D]
    scale_ptr,  # [M, D / 128]
    M: tl.constexpr,
    D: tl.constexpr,
    TALL: tl.constexpr,
):
    rows, j = _place(D, TALL)
    x = tl.load(x_ptr + _entries(rows, j, D), mask=(rows < M)[:, None], other=0.0).to(tl.float32)
    _write(x, values_ptr, scale_ptr, rows, j, M, D)


@triton.jit
def activate_rows_kernel(
    pair_ptr,  # [M, 2, F]
    values_ptr,  # [M, F]
    scale_ptr,  # [M, F / 128]
    M: tl.constexpr,
    F: tl.constexpr,
    NAME: tl.constexpr,
    TALL: tl.constexpr,
):
    rows, j = _place(F, TALL)
    entries, there = _entries(rows, j, 2 * F), (rows < M)[:, None]
    act, _ = activation(tl.load(pair_ptr + entries, mask=there, other=0.0).to(tl.float32), NAME)
    x = act * tl.load(pair_ptr + F + entries, mask=there, other=0.0).to(tl.float32)
    _write(x.to(pair_ptr.dtype.element_ty).to(tl.float32), values_ptr, scale_ptr, rows, j, M, F)


@triton.jit
def activated_row_cotangents_kernel(
    pair_ptr,  # [M, 2, F]
    d_ptr,  # [M, F]
    d_pair_ptr,  # [M, 2, F]
    values_ptr,  # [M, 2 F]
    scale_ptr,  # [M, 2 F / 128]
    product_ptr,  # [M, F]
    M: tl.constexpr,
    F: tl.constexpr,
    NAME: tl.constexpr,
    TALL: tl.constexpr,
):
    rows, j = _place(F, TALL)
    entries, narrow, there = _entries(rows, j, 2 * F), _entries(rows, j, F), (rows < M)[:, None]
    dtype: tl.constexpr = pair_ptr.dtype.element_ty
    act, slope = activation(tl.load(pair_ptr + entries, mask=there, other=0.0).to(tl.float32), NAME)
    up = tl.load(pair_ptr + F + entries, mask=there, other=0.0).to(tl.float32)
    d = tl.load(d_ptr + narrow, mask=there, other=0.0).to(tl.float32)
    tl.store(product_ptr + narrow, (act * up).to(dtype), mask=there)
    d_gate, d_up = (d * up * slope).to(dtype), (d * act).to(dtype)
    tl.store(d_pair_ptr + entries, d_gate, mask=there)
    tl.store(d_pair_ptr + F + entries, d_up, mask=there)
    _write(d_gate.to(tl.float32), values_ptr, scale_ptr, rows, j, M, 2 * F)
    _write(d_up.to(tl.float32), values_ptr, scale_ptr, rows, F // 128 + j, M, 2 * F)


# -- for one scale of a whole row: what is computed is written with the largest magnitudes of each block -------------------


@triton.jit
def _write_with_largest(x, x_ptr, of_rows_ptr, of_columns_ptr, rows, j, M: tl.constexpr, D: tl.constexpr):
    """Writes a block of an array [M, D], of whole blocks, and the bits of its rows' and columns' largest magnitudes."""
    tl.store(x_ptr + _entries(rows, j, D), x)
    x = x.to(tl.float32)
    tl.store(of_rows_ptr + j.to(tl.int64) * M + rows, largest(x, 1))
    block = tl.program_id(0) // (D // 128)
    tl.store(of_columns_ptr + block.to(tl.int64) * D + j * 128 + tl.arange(0, 128), largest(x, 0))


@triton.jit
def activate_with_largest_kernel(
    gate_ptr,  # [M, F]
    up_ptr,
    product_ptr,
    of_rows_ptr,  # [F / 128, M]: the bits of the largest magnitude of each row, in each 128 columns
    of_columns_ptr,  # [M / TALL, F]
    M: tl.constexpr,
    F: tl.constexpr,
    NAME: tl.constexpr,
    TALL: tl.constexpr,
):
    rows, j = _place(F, TALL)
    entries = _entries(rows, j, F)
    act, _ = activation(tl.load(gate_ptr + entries).to(tl.float32), NAME)
    x = (act * tl.load(up_ptr + entries).to(tl.float32)).to(gate_ptr.dtype.element_ty)
    _write_with_largest(x, product_ptr, of_rows_ptr, of_columns_ptr, rows, j, M, F)


@triton.jit
def cotangents_with_largest_kernel(
    gate_ptr,  # [M, F]
    up_ptr,
    d_ptr,
    d_gate_ptr,
    gate_of_rows_ptr,  # as above
    gate_of_columns_ptr,
    d_up_ptr,
    up_of_rows_ptr,
    up_of_columns_ptr,
    M: tl.constexpr,
    F: tl.constexpr,
    NAME: tl.constexpr,
    TALL: tl.constexpr,
):
    rows, j = _place(F, TALL)
    entries = _entries(rows, j, F)
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    act, slope = activation(tl.load(gate_ptr + entries).to(tl.float32), NAME)
    d = tl.load(d_ptr + entries).to(tl.float32)
    d_gate, d_up = (d * tl.load(up_ptr + entries).to(tl.float32) * slope).to(dtype), (d * act).to(dtype)
    _write_with_largest(d_gate, d_gate_ptr, gate_of_rows_ptr, gate_of_columns_ptr, rows, j, M, F)
    _write_with_largest(d_up, d_up_ptr, up_of_rows_ptr, up_of_columns_ptr, rows, j, M, F)
