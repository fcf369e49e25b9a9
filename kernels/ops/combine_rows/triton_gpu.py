"""combine_rows for NVIDIA GPUs in Triton: a launch each way, which reads every row once and writes its gradient once."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels.ops.combine_rows.contract import CombineRowsConfig, op, work
from kernels.toolchains.triton import triton_launch


@triton.jit
def _slots(slots_ptr, token, TOP_K: tl.constexpr):
    """Returns the slots of a token, all of them loaded before any is waited for."""
    slots = ()
    for j in tl.static_range(TOP_K):
        slots += (tl.load(slots_ptr + token * TOP_K + j),)
    return slots


@triton.jit
def _add_row(total, rows_ptr, weights_ptr, slot, pair, cols, D: tl.constexpr):
    """Adds a row, times its weight; nothing for slot -1, whatever its weight."""
    row = tl.load(rows_ptr + slot.to(tl.int64) * D + cols, mask=(cols < D) & (slot >= 0), other=0.0).to(tl.float32)
    if weights_ptr is not None:
        row *= tl.load(weights_ptr + pair, mask=slot >= 0, other=0.0).to(tl.float32)
    return total + row


@triton.jit
def combine_rows_fwd_kernel(
    rows_ptr,  # [M, D]
    slots_ptr,  # [tokens, TOP_K]
    weights_ptr,  # [tokens, TOP_K] or None
    out_ptr,  # [tokens, D]
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    SPARSE: tl.constexpr,  # slots of -1 are branched over, as their instructions would take longer than the rows
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    slots = _slots(slots_ptr, token, TOP_K)
    for j in tl.static_range(TOP_K):
        if SPARSE:
            if slots[j] >= 0:
                total = _add_row(total, rows_ptr, weights_ptr, slots[j], token * TOP_K + j, cols, D)
        else:
            total = _add_row(total, rows_ptr, weights_ptr, slots[j], token * TOP_K + j, cols, D)
    tl.store(out_ptr + token * D + cols, total.to(out_ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def add_rows_kernel(
    rows_ptr,  # [M, D]
    slots_ptr,  # [tokens, TOP_K]
    weights_ptr,  # [tokens, TOP_K] or None
    total_ptr,  # [tokens, D], read and written
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Adds a token's rows to what is there. One that has none is left as it is."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    slots = _slots(slots_ptr, token, TOP_K)
    most = slots[0]
    for j in tl.static_range(1, TOP_K):
        most = tl.maximum(most, slots[j])
    if most >= 0:
        total = tl.load(total_ptr + token * D + cols, mask=cols < D, other=0.0).to(tl.float32)
        for j in tl.static_range(TOP_K):
            if slots[j] >= 0:
                total = _add_row(total, rows_ptr, weights_ptr, slots[j], token * TOP_K + j, cols, D)
        tl.store(total_ptr + token * D + cols, total.to(total_ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def _zero_unused(
    pairs_ptr, d_rows_ptr, token, M: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Zeroes the rows that no token has: a part of all rows for each program."""
    PART: tl.constexpr = (M + TOKENS - 1) // TOKENS
    for i in range(PART):
        m = token * PART + i
        unused = tl.load(pairs_ptr + m, mask=m < M, other=0) < 0
        for block in tl.static_range(0, D, BLOCK_D):
            columns = block + tl.arange(0, BLOCK_D)
            zeros = tl.zeros([BLOCK_D], d_rows_ptr.dtype.element_ty)
            tl.store(d_rows_ptr + m * D + columns, zeros, mask=(columns < D) & unused)


@triton.jit
def spread_rows_kernel(
    slots_ptr,  # [tokens, TOP_K]
    pairs_ptr,  # [M]
    d_out_ptr,  # [tokens, D]
    d_rows_ptr,  # [M, D]
    M: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The backward without weights: a token's row, read once, is written to all of its slots."""
    token = tl.program_id(0).to(tl.int64)
    slots = _slots(slots_ptr, token, TOP_K)
    for start in tl.static_range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        d = tl.load(d_out_ptr + token * D + cols, mask=cols < D, other=0.0)
        for j in tl.static_range(TOP_K):
            tl.store(d_rows_ptr + slots[j].to(tl.int64) * D + cols, d, mask=(cols < D) & (slots[j] >= 0))
    _zero_unused(pairs_ptr, d_rows_ptr, token, M, D, TOKENS, BLOCK_D)


@triton.jit
def combine_rows_bwd_kernel(
    rows_ptr,  # [M, D]
    slots_ptr,  # [tokens, TOP_K]
    pairs_ptr,  # [M]
    weights_ptr,  # [tokens, TOP_K]
    d_out_ptr,  # [tokens, D]
    d_rows_ptr,  # [M, D]
    d_weights_ptr,  # [tokens, TOP_K], float32
    M: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    for j in tl.static_range(TOP_K):
        slot = tl.load(slots_ptr + token * TOP_K + j).to(tl.int64)
        weight = tl.load(weights_ptr + token * TOP_K + j).to(tl.float32)
        dot = tl.zeros([BLOCK_D], tl.float32)
        for start in tl.static_range(0, D, BLOCK_D):
            cols = start + tl.arange(0, BLOCK_D)
            mask = (cols < D) & (slot >= 0)
            d = tl.load(d_out_ptr + token * D + cols, mask=cols < D, other=0.0).to(tl.float32)
            dot += d * tl.load(rows_ptr + slot * D + cols, mask=mask, other=0.0).to(tl.float32)
            tl.store(d_rows_ptr + slot * D + cols, (d * weight).to(d_rows_ptr.dtype.element_ty), mask=mask)
        tl.store(d_weights_ptr + token * TOP_K + j, tl.sum(dot, axis=0))
    _zero_unused(pairs_ptr, d_rows_ptr, token, M, D, TOKENS, BLOCK_D)


def forward(rows, slots, pairs, weights, total, cfg):
    D, (tokens, top_k) = rows.shape[1], slots.shape
    arrays = rows, slots.astype(jnp.int32), weights
    how = {
        "out_shape": (jax.ShapeDtypeStruct((tokens, D), rows.dtype),), "grid": (tokens, triton.cdiv(D, cfg.block_d)),
        "num_warps": cfg.num_warps, "work": work(op.bind(rows, slots, pairs, weights, total))[0],
        "D": D, "TOP_K": top_k, "BLOCK_D": cfg.block_d,
    }  # fmt: skip
    if total is not None:
        at = sum(x is not None for x in arrays)
        return triton_launch(add_rows_kernel, *arrays, total, input_output_aliases={at: 0}, **how)[0]
    return triton_launch(combine_rows_fwd_kernel, *arrays, SPARSE=_sparse(rows, slots), **how)[0]


def backward(saved, rows, slots, pairs, weights, total, cfg):
    (M, D), (tokens, top_k) = rows.shape, slots.shape
    d_rows, of_total = jax.ShapeDtypeStruct(rows.shape, rows.dtype), {} if total is None else {"total": saved.d_out}
    places = slots.astype(jnp.int32), pairs.astype(jnp.int32)
    how = {
        "grid": (tokens,), "num_warps": cfg.backward_num_warps, "work": work(op.bind(rows, slots, pairs, weights, total))[1],
        "M": M, "D": D, "TOKENS": tokens, "TOP_K": top_k, "BLOCK_D": cfg.backward_block_d,
    }  # fmt: skip
    if weights is None:
        (d_rows,) = triton_launch(spread_rows_kernel, *places, saved.d_out, out_shape=(d_rows,), **how)
        return {"rows": d_rows} | of_total
    shapes = d_rows, jax.ShapeDtypeStruct(slots.shape, jnp.float32)
    arrays = rows, *places, weights, saved.d_out
    d_rows, d_weights = triton_launch(combine_rows_bwd_kernel, *arrays, out_shape=shapes, **how)
    return {"rows": d_rows, "weights": d_weights} | of_total


def rejects(call):
    if 0 in (*call.rows.shape, *call.slots.shape):
        return "an array has no elements"
    return None


def _block(D: int, most: int) -> int:
    """Returns the largest power of two that divides D, if it is wide; else the one that covers D. At most `most`."""
    whole = D & -D
    return min(most, whole if whole >= 512 else max(16, triton.next_power_of_2(D)))


def _sparse(rows, slots) -> bool:
    """Returns whether at least a quarter of all slots are -1, as there are not more rows."""
    return 4 * rows.shape[0] <= 3 * slots.size


def heuristic(call, platform):
    D = call.dims["D"]
    # 16 bytes a thread for each load; a program waits for the rows of a token at once. Where slots are branched over it waits
    # for one at a time, so of each there is twice as much.
    forward, backward = _block(D, 2048 if _sparse(call.rows, call.slots) else 1024), _block(D, 2048)
    warps = forward // 512 if forward > 1024 else forward // 256
    return CombineRowsConfig(forward, max(1, warps), backward, max(1, backward // 512))


def candidates(call):
    D = call.dims["D"]
    sizes = [(_block(D, most), each) for most in (512, 1024, 2048, 4096) for each in (256, 512)]
    configs = [CombineRowsConfig(b, max(1, b // each), b, max(1, b // each)) for b, each in sizes]
    return list(dict.fromkeys([heuristic(call, "cuda"), *configs]))


op.register(
    forward,
    backward,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=rejects,
    heuristic=heuristic,
    candidates=candidates,
)
