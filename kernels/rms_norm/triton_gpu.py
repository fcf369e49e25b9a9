"""rms_norm on GPUs: a program holds whole rows, so each direction reads its arrays once and writes once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels._core.triton import triton_launch
from kernels.rms_norm.contract import RMSNormConfig, op

# A row lies in the registers of one program: 32 elements of each array a thread, at 32 warps.
WIDEST = 32768
# Programs of the backward, each with one partial sum of the weight's gradient: four on each of 132 multiprocessors.
BACKWARD_PROGRAMS = 528


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
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < M)[:, None] & (cols < D)[None, :]
    offsets = rows.to(tl.int64)[:, None] * D + cols[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1) / D + EPS)
    out = x * rstd[:, None]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            weight += 1.0
        out = out * weight[None, :]
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


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
):
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    weight = tl.full([BLOCK_D], 1.0, tl.float32)
    dweight = tl.zeros([BLOCK_D], tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            weight += 1.0
    for start in range(program * BLOCK_M, M, PROGRAMS * BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & (cols < D)[None, :]
        offsets = rows.to(tl.int64)[:, None] * D + cols[None, :]
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(d_out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        d_rstd = tl.load(d_rstd_ptr + rows, mask=rows < M, other=0.0)
        normal = x * rstd[:, None]
        if weight_ptr is not None:
            dweight += tl.sum(g * normal, axis=0)
        g = g * weight[None, :]
        c = (tl.sum(g * x, axis=1) + d_rstd) * rstd * rstd / D
        dx = g * rstd[:, None] - normal * c[:, None]
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if weight_ptr is not None:
        tl.store(dweight_ptr + program * D + cols, dweight, mask=cols < D)


def _block_d(D: int) -> int:
    return max(16, triton.next_power_of_2(D))


def _tile(block_d: int, elements: int) -> tuple[int, int]:
    """Returns rows and warps: a tile of about `elements` elements, 8 to 16 of them a thread where that is possible."""
    rows = max(1, min(32, elements // block_d))
    return rows, min(32, max(4, rows * block_d // (16 * 32)))


def heuristic(call):
    block_d = _block_d(call.dims["D"])
    return RMSNormConfig(*_tile(block_d, 4096), *_tile(block_d, 2048), backward_programs=BACKWARD_PROGRAMS)


def candidates(call):
    block_d = _block_d(call.dims["D"])
    found = []
    for elements in (1024, 2048, 4096, 8192):
        rows = max(1, min(32, elements // block_d))
        for warps in (2, 4, 8, 16, 32):
            if 4 <= rows * block_d // (32 * warps) <= 64:
                for programs in (BACKWARD_PROGRAMS // 2, BACKWARD_PROGRAMS, 2 * BACKWARD_PROGRAMS):
                    found.append(RMSNormConfig(rows, warps, rows, warps, programs))
    return list(dict.fromkeys(found))


def rejects(call):
    if call.x.size == 0:
        return "x has no elements"
    if call.dims["D"] > WIDEST:
        return f"D = {call.dims['D']} is more than {WIDEST}, and a row must fit the registers of one program"
    return None


@op.backend(
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    features={"weight", "eps", "zero_centered"},
    rejects=rejects,
    heuristic=heuristic,
    candidates=candidates,
)
def forward(x, weight, eps, zero_centered, cfg):
    D = x.shape[-1]
    M = x.size // D
    out, rstd = triton_launch(
        rms_norm_fwd_kernel,
        x.reshape(M, D),
        weight,
        out_shape=(jax.ShapeDtypeStruct((M, D), x.dtype), jax.ShapeDtypeStruct((M,), jnp.float32)),
        grid=(triton.cdiv(M, cfg.block_rows),),
        num_warps=cfg.num_warps,
        flops=4 * M * D,
        bytes_accessed=2 * M * D * x.dtype.itemsize + 4 * M,
        M=M,
        D=D,
        EPS=eps,
        ZERO_CENTERED=zero_centered,
        BLOCK_M=cfg.block_rows,
        BLOCK_D=_block_d(D),
    )
    return out.reshape(x.shape), rstd.reshape(x.shape[:-1])


def backward(saved, x, weight, eps, zero_centered, cfg):
    D = x.shape[-1]
    M = x.size // D
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
        flops=8 * M * D,
        bytes_accessed=3 * M * D * x.dtype.itemsize + 4 * programs * D,
        M=M,
        D=D,
        ZERO_CENTERED=zero_centered,
        PROGRAMS=programs,
        BLOCK_M=cfg.backward_block_rows,
        BLOCK_D=_block_d(D),
        **unused,
    )
    gradients = {"x": result[0].reshape(x.shape)}
    if weight is not None:
        # Summed in a fixed order, not by atomics: the same call gives the same bits.
        gradients["weight"] = jnp.sum(result[1], axis=0).astype(weight.dtype)
    return gradients
