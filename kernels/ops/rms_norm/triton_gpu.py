"""rms_norm on GPUs: a program holds whole rows, so each direction reads its arrays once and writes once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels._core.triton import triton_launch
from kernels.ops.rms_norm.contract import RMSNormConfig, op, work

# A row lies in the registers of one program: 32 elements of each array a thread, at 32 warps.
WIDEST = 32768
# Of an H100 or H200. The backward has some programs for each, and each keeps one partial sum of the weight's gradient.
MULTIPROCESSORS = 132
# From this width on, the backward does best with one large program a multiprocessor (measured, benchmarks/results).
WIDE = 4096


@triton.jit
def _load(ptr, offsets, mask, CHUNKS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns CHUNKS tiles of BLOCK_D columns each. They keep their dtype, which halves the registers of 16-bit types."""
    tiles = ()
    for i in tl.static_range(CHUNKS):
        tiles = tiles + (tl.load(ptr + offsets + i * BLOCK_D, mask=mask, other=0.0),)
    return tiles


@triton.jit
def _factor(weight_ptr, cols, mask, ZERO_CENTERED: tl.constexpr):
    """Returns what a row is multiplied by, float32 [1, columns]; 1 without a weight."""
    factor = tl.full([1, 1], 1.0, tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            weight += 1.0
        factor = weight[None, :]
    return factor


@triton.jit
def rms_norm_fwd_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rstd_ptr,
    M: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < M)[:, None] & (cols < D)[None, :]
    offsets = rows.to(tl.int64)[:, None] * D + cols[None, :]
    x = _load(x_ptr, offsets, mask, CHUNKS, BLOCK_D)
    squares = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in tl.static_range(CHUNKS):
        wide = x[i].to(tl.float32)
        squares += wide * wide
    rstd = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1) / D + EPS)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    for i in tl.static_range(CHUNKS):
        out = x[i].to(tl.float32) * rstd[:, None] * _factor(weight_ptr, i * BLOCK_D + cols, cols < D, ZERO_CENTERED)
        tl.store(out_ptr + offsets + i * BLOCK_D, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_bwd_kernel(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    d_out_ptr,
    d_rstd_ptr,
    dx_ptr,
    dweight_ptr,  # [programs, D] float32: a partial sum for each program
    M: tl.constexpr,
    D: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    dweight = ()
    for _ in tl.static_range(CHUNKS):
        dweight = dweight + (tl.zeros([BLOCK_M, BLOCK_D], tl.float32),)
    for start in range(program * BLOCK_M, M, PROGRAMS * BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & (cols < D)[None, :]
        offsets = rows.to(tl.int64)[:, None] * D + cols[None, :]
        x = _load(x_ptr, offsets, mask, CHUNKS, BLOCK_D)
        g = _load(d_out_ptr, offsets, mask, CHUNKS, BLOCK_D)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        d_rstd = tl.load(d_rstd_ptr + rows, mask=rows < M, other=0.0)
        # Read again for each row: it stays in the cache, and in registers it would take as many as x and g together.
        weight = ()
        for i in tl.static_range(CHUNKS):
            weight = weight + (_factor(weight_ptr, i * BLOCK_D + cols, cols < D, ZERO_CENTERED),)
        products = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for i in tl.static_range(CHUNKS):
            products += g[i].to(tl.float32) * weight[i] * x[i].to(tl.float32)
        c = (tl.sum(products, axis=1) + d_rstd) * rstd * rstd / D
        sums = ()
        for i in tl.static_range(CHUNKS):
            normal = x[i].to(tl.float32) * rstd[:, None]
            wide = g[i].to(tl.float32)
            if weight_ptr is not None:
                sums = sums + (dweight[i] + wide * normal,)
            dx = wide * weight[i] * rstd[:, None] - normal * c[:, None]
            tl.store(dx_ptr + offsets + i * BLOCK_D, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if weight_ptr is not None:
            dweight = sums
    if weight_ptr is not None:
        for i in tl.static_range(CHUNKS):
            tl.store(dweight_ptr + program * D + i * BLOCK_D + cols, tl.sum(dweight[i], axis=0), mask=cols < D)


def _tiles(D: int) -> tuple[int, int]:
    """Returns (chunks, block_d): a row as tiles whose width is a power of two, with no column to spare if D allows it."""
    block_d = D & -D
    if block_d >= 16 and D // block_d <= 8:
        return D // block_d, block_d
    return 1, max(16, triton.next_power_of_2(D))


def _rows(D: int, elements: int) -> int:
    chunks, block_d = _tiles(D)
    return 1 << (max(1, min(32, elements // (chunks * block_d))).bit_length() - 1)


def _warps(elements: int, each: int) -> int:
    return min(32, max(1, triton.next_power_of_2(elements // (32 * each))))


def heuristic(call, platform):
    D = call.dims["D"]
    chunks, block_d = _tiles(D)
    rows = _rows(D, 4096)
    # 8 elements of a chunk in a thread are a load of 16 bytes of a 16-bit type.
    num_warps = _warps(rows * block_d, 16 if chunks == 1 else 8)
    if chunks > 1:
        backward_rows = _rows(D, 2048)
        backward_num_warps = _warps(backward_rows * block_d, 4)
    elif D >= WIDE:
        backward_rows = _rows(D, 32768 // jnp.dtype(call.dtype).itemsize)
        backward_num_warps = 16 if D <= 16384 else 32  # a row must fit the registers, and a thread has at most 255
    else:
        backward_rows = _rows(D, max(2048, 2 * D))
        backward_num_warps = _warps(backward_rows * block_d, 32)
    # 16 warps on each multiprocessor, in one program or in several that take turns.
    programs = MULTIPROCESSORS * max(1, 16 // backward_num_warps)
    return RMSNormConfig(rows, num_warps, backward_rows, backward_num_warps, backward_programs=programs)


def candidates(call):
    D = call.dims["D"]
    chunks, block_d = _tiles(D)
    found = []
    for elements in (1024, 2048, 4096, 8192, 16384):
        rows = _rows(D, elements)
        for warps in (2, 4, 8, 16, 32):
            if 8 <= rows * chunks * block_d // (32 * warps) <= 64:
                for per_multiprocessor in (1, 2, 4, 8):
                    found.append(RMSNormConfig(rows, warps, rows, warps, MULTIPROCESSORS * per_multiprocessor))
    return list(dict.fromkeys(found))


def rejects(call):
    if call.x.size == 0:
        return "x has no elements"
    if call.dims["D"] > WIDEST:
        return f"D = {call.dims['D']} is more than {WIDEST}, and a row must fit the registers of one program"
    return None


def forward(x, weight, eps, zero_centered, cfg):
    D = x.shape[-1]
    M = x.size // D
    chunks, block_d = _tiles(D)
    out, rstd = triton_launch(
        rms_norm_fwd_kernel,
        x.reshape(M, D),
        weight,
        out_shape=(jax.ShapeDtypeStruct((M, D), x.dtype), jax.ShapeDtypeStruct((M,), jnp.float32)),
        grid=(triton.cdiv(M, cfg.block_rows),),
        num_warps=cfg.num_warps,
        work=work(op.bind(x, weight))[0],
        M=M,
        D=D,
        EPS=eps,
        ZERO_CENTERED=zero_centered,
        BLOCK_M=cfg.block_rows,
        BLOCK_D=block_d,
        CHUNKS=chunks,
    )
    return out.reshape(x.shape), rstd.reshape(x.shape[:-1])


def backward(saved, x, weight, eps, zero_centered, cfg):
    D = x.shape[-1]
    M = x.size // D
    chunks, block_d = _tiles(D)
    programs = min(triton.cdiv(M, cfg.backward_block_rows), cfg.backward_programs)
    dx_shape = jax.ShapeDtypeStruct((M, D), x.dtype)
    partial = jax.ShapeDtypeStruct((programs, D), jnp.float32)
    unused: dict[str, Any] = {"dweight_ptr": None} if weight is None else {}
    result = triton_launch(
        rms_norm_bwd_kernel,
        x.reshape(M, D),
        weight,
        saved.rstd.reshape(M),
        saved.d_out.reshape(M, D),
        saved.d_rstd.reshape(M),
        out_shape=(dx_shape,) if weight is None else (dx_shape, partial),
        grid=(programs,),
        num_warps=cfg.backward_num_warps,
        work=work(op.bind(x, weight))[1],
        M=M,
        D=D,
        ZERO_CENTERED=zero_centered,
        PROGRAMS=programs,
        BLOCK_M=cfg.backward_block_rows,
        BLOCK_D=block_d,
        CHUNKS=chunks,
        **unused,
    )
    gradients = {"x": result[0].reshape(x.shape)}
    if weight is not None:
        # Summed in a fixed order, not by atomics: the same call gives the same bits.
        gradients["weight"] = jnp.sum(result[1], axis=0).astype(weight.dtype)
    return gradients


op.register(
    forward,
    backward,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    rejects=rejects,
    heuristic=heuristic,
    candidates=candidates,
)
