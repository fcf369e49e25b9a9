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
def combine_rows_fwd_kernel(
    rows_ptr,  # [M, D]
    slots_ptr,  # [tokens, TOP_K]
    weights_ptr,  # [tokens, TOP_K] or None
    out_ptr,  # [tokens, D]
    D: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for j in tl.static_range(TOP_K):
        slot = tl.load(slots_ptr + token * TOP_K + j).to(tl.int64)
        row = tl.load(rows_ptr + slot * D + cols, mask=(cols < D) & (slot >= 0), other=0.0).to(tl.float32)
        if weights_ptr is not None:
            # A slot without a row adds nothing, whatever its weight.
            row *= tl.load(weights_ptr + token * TOP_K + j, mask=slot >= 0, other=0.0).to(tl.float32)
        total += row
    tl.store(out_ptr + token * D + cols, total.to(out_ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def combine_rows_bwd_kernel(
    rows_ptr,  # [M, D]; None without weights, whose gradient needs it
    slots_ptr,  # [tokens, TOP_K]
    pairs_ptr,  # [M]
    weights_ptr,  # [tokens, TOP_K] or None
    d_out_ptr,  # [tokens, D]
    d_rows_ptr,  # [M, D]
    d_weights_ptr,  # [tokens, TOP_K], float32; a single entry without weights
    M: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    for j in tl.static_range(TOP_K):
        slot = tl.load(slots_ptr + token * TOP_K + j).to(tl.int64)
        weight = 1.0
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + token * TOP_K + j).to(tl.float32)
        dot = tl.zeros([BLOCK_D], tl.float32)
        for start in tl.static_range(0, D, BLOCK_D):
            cols = start + tl.arange(0, BLOCK_D)
            mask = (cols < D) & (slot >= 0)
            d = tl.load(d_out_ptr + token * D + cols, mask=cols < D, other=0.0).to(tl.float32)
            if weights_ptr is not None:
                dot += d * tl.load(rows_ptr + slot * D + cols, mask=mask, other=0.0).to(tl.float32)
            tl.store(d_rows_ptr + slot * D + cols, (d * weight).to(d_rows_ptr.dtype.element_ty), mask=mask)
        if weights_ptr is not None:
            tl.store(d_weights_ptr + token * TOP_K + j, tl.sum(dot, axis=0))
    # Rows that no token has: a part of all rows for each program.
    PART: tl.constexpr = (M + TOKENS - 1) // TOKENS
    for i in range(PART):
        m = token * PART + i
        unused = tl.load(pairs_ptr + m, mask=m < M, other=0) < 0
        for block in tl.static_range(0, D, BLOCK_D):
            columns = block + tl.arange(0, BLOCK_D)
            zeros = tl.zeros([BLOCK_D], d_rows_ptr.dtype.element_ty)
            tl.store(d_rows_ptr + m * D + columns, zeros, mask=(columns < D) & unused)


def forward(rows, slots, pairs, weights, cfg):
    D, (tokens, top_k) = rows.shape[1], slots.shape
    (out,) = triton_launch(
        combine_rows_fwd_kernel,
        rows,
        slots.astype(jnp.int32),
        weights,
        out_shape=(jax.ShapeDtypeStruct((tokens, D), rows.dtype),),
        grid=(tokens, triton.cdiv(D, cfg.block_d)),
        num_warps=cfg.num_warps,
        work=work(op.bind(rows, slots, pairs, weights))[0],
        D=D,
        TOP_K=top_k,
        BLOCK_D=cfg.block_d,
    )
    return out


def backward(saved, rows, slots, pairs, weights, cfg):
    (M, D), (tokens, top_k) = rows.shape, slots.shape
    weighted = weights is not None
    shapes = rows.shape, slots.shape if weighted else (1,)
    d_rows, d_weights = triton_launch(
        combine_rows_bwd_kernel,
        rows if weighted else None,
        slots.astype(jnp.int32),
        pairs.astype(jnp.int32),
        weights,
        saved.d_out,
        out_shape=tuple(map(jax.ShapeDtypeStruct, shapes, (rows.dtype, jnp.float32))),
        grid=(tokens,),
        num_warps=cfg.backward_num_warps,
        work=work(op.bind(rows, slots, pairs, weights))[1],
        M=M,
        D=D,
        TOKENS=tokens,
        TOP_K=top_k,
        BLOCK_D=cfg.backward_block_d,
    )
    return {"rows": d_rows, "weights": d_weights} if weighted else {"rows": d_rows}


def rejects(call):
    if 0 in (*call.rows.shape, *call.slots.shape):
        return "an array has no elements"
    return None


def _block(D: int, most: int) -> int:
    """Returns the largest power of two that divides D, if it is wide; else the one that covers D. At most `most`."""
    whole = D & -D
    return min(most, whole if whole >= 512 else max(16, triton.next_power_of_2(D)))


def heuristic(call, platform):
    D = call.dims["D"]
    # 16 bytes a thread for each load; a program waits for the rows of a token at once.
    forward, backward = _block(D, 1024), _block(D, 2048)
    return CombineRowsConfig(forward, max(1, forward // 256), backward, max(1, backward // 512))


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
