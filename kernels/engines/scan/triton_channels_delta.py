"""A Triton kernel of delta rules in which each channel of a key decays by its own factor: gradients through what is written.

What precedes it are the kernels of `triton_delta.py` and `triton_channels.py`, which also says what a level is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.engines.scan.triton_channels import interval_sums, level, level_decay, sums_over_intervals
from kernels.engines.scan.triton_parts import (
    chunk_of,
    load_columns,
    load_rows,
    load_state,
    per_token,
    runs_of,
    store_rows,
    tokens_by_channels,
)


@triton.jit
def channel_delta_bwd_kernel(
    k_ptr,  # [B, T, K, H]
    v_ptr,  # [B, T, N, Hv]
    beta_ptr,  # [B, N, T]
    sums_ptr,  # [B, T, N, H] float32: see `level_decay`
    runs_ptr,
    table_ptr,
    written_ptr,  # [B, T, N, Hv]
    du_ptr,  # [B, T, N, Hv]
    states_ptr,  # [B, N, CHUNKS, H, Hv]: before each chunk
    d_key_ptr,  # [B, T, N, H] float32: gradients of keys by what outputs read, to which those of writes are added
    d_decay_ptr,  # [B, T, N, H] float32: those of log decays
    dk_ptr,  # [B, T, N, H]
    dv_ptr,  # [B, T, N, Hv]
    dbeta_ptr,  # [B, N, T]
    da_ptr,  # [B, T, N, H] float32
    T: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    Hv: tl.constexpr,
    CHUNKS: tl.constexpr,
    DIAGONAL: tl.constexpr,  # whether sums of products of du and v are the diagonal of a matrix product
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Gradients of one chunk and head through beta (v - exp(sum) k S), and through A, whose gradient is -du · writtenᵀ."""
    c, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    row, n = head // N, head % N
    first, count, owner, begins, ends = chunk_of(table_ptr, row, c, T, CHUNKS, BLOCK_C)
    here, valid, run, before, last = runs_of(runs_ptr, table_ptr, row, first, count, T, BLOCK_C)
    i, h, zeros = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_H), tl.zeros([BLOCK_C], tl.int32)
    v_at = tokens_by_channels(v_ptr, row, first, n, T, N, Hv)
    dv_at = tokens_by_channels(dv_ptr, row, first, n, T, N, Hv)
    written_at = tokens_by_channels(written_ptr, row, first, n, T, N, Hv)
    du_at = tokens_by_channels(du_ptr, row, first, n, T, N, Hv)
    beta = per_token(beta_ptr, row, n, first, here, T, N, BLOCK_C)
    square, wide = tl.zeros([BLOCK_C, BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    of_values = tl.zeros([BLOCK_C, BLOCK_C] if DIAGONAL else [BLOCK_C, BLOCK_V], tl.float32)
    for start in range(0, Hv, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        du = load_rows(du_at, valid, v, N, Hv, BLOCK_C)
        written = load_rows(written_at, valid, v, N, Hv, BLOCK_C)
        state = load_state(states_ptr, head.to(tl.int64) * CHUNKS + c, h, v, True, H, Hv)
        square = tl.dot(du, tl.trans(written), square, input_precision=PRECISION)
        wide = tl.dot(du, tl.trans(state), wide, input_precision=PRECISION)
        if DIAGONAL:  # loads for products overlap them, and loads for sums would not
            x = load_columns(v_at, valid, v, N, Hv, BLOCK_C)
            of_values = tl.dot(du, x, of_values, input_precision=PRECISION)
        else:
            of_values += du.to(tl.float32) * load_rows(v_at, valid, v, N, Hv, BLOCK_C).to(tl.float32)
        store_rows(dv_at, du.to(tl.float32) * beta[:, None], here, v, N, Hv, BLOCK_C)
    if DIAGONAL:
        of_values = tl.where(i[:, None] == i[None, :], of_values, 0.0)
    k_at = tokens_by_channels(k_ptr, row, first, n // (N // K), T, K, H)
    sums_at = tokens_by_channels(sums_ptr, row, first, n, T, N, H)
    k = load_rows(k_at, valid, h, K, H, BLOCK_C)
    sums = load_rows(sums_at, here, h, N, H, BLOCK_C)
    if EXACT:
        sums = interval_sums(sums, zeros, i + 1, BLOCK_C)
    wide = tl.where((run == before)[:, None], wide * tl.exp(tl.minimum(sums, 0.0)), 0.0)
    old = wide * k.to(tl.float32)
    d_beta = tl.sum(of_values, 1) - tl.sum(old, 1)
    dk = load_rows(tokens_by_channels(d_key_ptr, row, first, n, T, N, H), here, h, N, H, BLOCK_C)
    da = load_rows(tokens_by_channels(d_decay_ptr, row, first, n, T, N, H), here, h, N, H, BLOCK_C)
    dk -= wide * beta[:, None]
    reads = old * -beta[:, None]
    if EXACT:
        da += sums_over_intervals(reads, zeros, i + 1, BLOCK_C)
    square = tl.where(run[:, None] == run[None, :], square, 0.0)
    for number in tl.range(0, LEVELS, num_stages=1):
        half = 1 << number
        late, middle, wanted = level(half, BLOCK_C)
        f = level_decay(sums_at, here, h, late, middle, False, False, N, H, EXACT, BLOCK_C)
        key = (load_rows(k_at, valid, h, K, H, BLOCK_C).to(tl.float32) * f).to(k.dtype)
        of_level = tl.where(wanted, square, 0.0)
        d_beta -= tl.sum(tl.dot(key, tl.trans(key), input_precision=PRECISION) * of_level, 1)
        of_level *= -beta[:, None]
        through = tl.dot((of_level + tl.trans(of_level)).to(k.dtype), key, input_precision=PRECISION)
        dk += through * f
        z = through * key.to(tl.float32)
        if EXACT:
            da += sums_over_intervals(z, tl.where(late, middle, i + 1), tl.where(late, i + 1, middle), BLOCK_C)
        else:
            reads += tl.where(late[:, None], z, -z)
    if not EXACT:
        da += tl.cumsum(reads, 0, reverse=True)
    tl.store(dbeta_ptr + head.to(tl.int64) * T + first + i, d_beta, mask=here)
    store_rows(tokens_by_channels(da_ptr, row, first, n, T, N, H), da, here, h, N, H, BLOCK_C)
    store_rows(tokens_by_channels(dk_ptr, row, first, n, T, N, H), dk, here, h, N, H, BLOCK_C)
