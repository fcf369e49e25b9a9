"""layer_norm on GPUs, alone and with the residual: a program holds whole rows, so each array is read or written once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels._core import rows as cut
from kernels._core.triton import triton_launch
from kernels.ops.layer_norm.contract import LayerNormConfig, add_op, op, work, work_of_add


@triton.jit
def _load(ptr, offsets, mask, CHUNKS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns CHUNKS tiles of BLOCK_D columns each. They keep their dtype, which halves the registers of 16-bit types."""
    tiles = ()
    for i in tl.static_range(CHUNKS):
        tiles = tiles + (tl.load(ptr + offsets + i * BLOCK_D, mask=mask, other=0.0),)
    return tiles


@triton.jit
def _feature(ptr, cols, mask, otherwise):
    """Returns a weight or a bias, float32 [1, columns]; `otherwise` without it."""
    feature = tl.full([1, 1], otherwise, tl.float32)
    if ptr is not None:
        feature = tl.load(ptr + cols, mask=mask, other=0.0).to(tl.float32)[None, :]
    return feature


@triton.jit
def layer_norm_fwd_kernel(
    x_ptr,
    residual_ptr,  # None: x alone
    weight_ptr,
    bias_ptr,
    out_ptr,
    stream_ptr,  # x + residual, in the dtype of residual
    mean_ptr,
    rstd_ptr,
    M: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < M)[:, None] & (cols < D)[None, :]
    offsets = rows.to(tl.int64)[:, None] * D + cols[None, :]
    x = _load(x_ptr, offsets, mask, CHUNKS, BLOCK_D)
    if residual_ptr is not None:
        residual = _load(residual_ptr, offsets, mask, CHUNKS, BLOCK_D)
        stream = ()
        for i in tl.static_range(CHUNKS):
            # Rounded first: what is normalised is what goes on.
            total = (x[i].to(tl.float32) + residual[i].to(tl.float32)).to(stream_ptr.dtype.element_ty)
            tl.store(stream_ptr + offsets + i * BLOCK_D, total, mask=mask)
            stream = stream + (total,)
        x = stream
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in tl.static_range(CHUNKS):
        total += x[i].to(tl.float32)
    mean = tl.sum(total, axis=1) / D
    squares = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in tl.static_range(CHUNKS):
        # Of a chunk that reaches past D, what is masked is 0, and that is not its distance from the mean.
        apart = tl.where(mask, x[i].to(tl.float32) - mean[:, None], 0.0)
        squares += apart * apart
    rstd = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1) / D + EPS)
    tl.store(mean_ptr + rows, mean, mask=rows < M)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    for i in tl.static_range(CHUNKS):
        out = (x[i].to(tl.float32) - mean[:, None]) * rstd[:, None]
        out = out * _feature(weight_ptr, i * BLOCK_D + cols, cols < D, 1.0)
        out += _feature(bias_ptr, i * BLOCK_D + cols, cols < D, 0.0)
        tl.store(out_ptr + offsets + i * BLOCK_D, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm_bwd_kernel(
    x_ptr,  # or the stream
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    d_out_ptr,
    d_stream_ptr,  # None without a residual
    d_mean_ptr,
    d_rstd_ptr,
    dx_ptr,  # in the dtype of what was normalised
    narrow_dx_ptr,  # the same in that of x, where the stream has another; else None
    dweight_ptr,  # [programs, D] float32: a partial sum for each program
    dbias_ptr,  # the same
    M: tl.constexpr,
    D: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    dweight, dbias = (), ()
    for _ in tl.static_range(CHUNKS):
        dweight = dweight + (tl.zeros([BLOCK_M, BLOCK_D], tl.float32),)
        dbias = dbias + (tl.zeros([BLOCK_M, BLOCK_D], tl.float32),)
    for start in range(program * BLOCK_M, M, PROGRAMS * BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None] & (cols < D)[None, :]
        offsets = rows.to(tl.int64)[:, None] * D + cols[None, :]
        x = _load(x_ptr, offsets, mask, CHUNKS, BLOCK_D)
        g = _load(d_out_ptr, offsets, mask, CHUNKS, BLOCK_D)
        d_stream = g
        if d_stream_ptr is not None:
            d_stream = _load(d_stream_ptr, offsets, mask, CHUNKS, BLOCK_D)
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        d_mean = tl.load(d_mean_ptr + rows, mask=rows < M, other=0.0)
        d_rstd = tl.load(d_rstd_ptr + rows, mask=rows < M, other=0.0)
        # Read again for each row: it stays in the cache, and in registers it would take as many as x and g together.
        weight = ()
        for i in tl.static_range(CHUNKS):
            weight = weight + (_feature(weight_ptr, i * BLOCK_D + cols, cols < D, 1.0),)
        total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        products = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for i in tl.static_range(CHUNKS):
            scaled = g[i].to(tl.float32) * weight[i]
            total += scaled
            products += scaled * (x[i].to(tl.float32) - mean[:, None])
        through_mean = (tl.sum(total, axis=1) * rstd - d_mean) / D
        through_rstd = (tl.sum(products, axis=1) + d_rstd) * rstd * rstd / D
        weight_sums, bias_sums = (), ()
        for i in tl.static_range(CHUNKS):
            normal = (x[i].to(tl.float32) - mean[:, None]) * rstd[:, None]
            wide = g[i].to(tl.float32)
            if dweight_ptr is not None:
                weight_sums = weight_sums + (dweight[i] + wide * normal,)
            if dbias_ptr is not None:
                bias_sums = bias_sums + (dbias[i] + wide,)
            dx = wide * weight[i] * rstd[:, None] - through_mean[:, None] - normal * through_rstd[:, None]
            if d_stream_ptr is not None:
                dx += d_stream[i].to(tl.float32)
            tl.store(dx_ptr + offsets + i * BLOCK_D, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if narrow_dx_ptr is not None:
                narrow = dx.to(narrow_dx_ptr.dtype.element_ty)
                tl.store(narrow_dx_ptr + offsets + i * BLOCK_D, narrow, mask=mask)
        if dweight_ptr is not None:
            dweight = weight_sums
        if dbias_ptr is not None:
            dbias = bias_sums
    for i in tl.static_range(CHUNKS):
        at = program * D + i * BLOCK_D + cols
        if dweight_ptr is not None:
            tl.store(dweight_ptr + at, tl.sum(dweight[i], axis=0), mask=cols < D)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + at, tl.sum(dbias[i], axis=0), mask=cols < D)


def heuristic(call, platform):
    itemsize = max(jnp.dtype(x.dtype).itemsize for x in (call.x, call.arguments.get("residual", call.x)))
    return LayerNormConfig(*cut.shapes(call.dims["D"], itemsize, crowded=True))


def candidates(call):
    return [LayerNormConfig(*shape) for shape in cut.candidates(call.dims["D"])]


def rejects(call):
    if call.x.size == 0:
        return "x has no elements"
    if call.dims["D"] > cut.WIDEST:
        return f"D = {call.dims['D']} is more than {cut.WIDEST}, and a row must fit the registers of one program"
    return None


def _normalised(x, residual, weight, bias, eps, cfg, cost):
    """Returns (out, stream if there is a residual, mean, rstd)."""
    D = x.shape[-1]
    M = x.size // D
    chunks, block_d = cut.tiles(D)
    out_shape = [jax.ShapeDtypeStruct((M, D), x.dtype), *[jax.ShapeDtypeStruct((M,), jnp.float32)] * 2]
    unused: dict[str, Any] = {"stream_ptr": None}
    if residual is not None:
        out_shape.insert(1, jax.ShapeDtypeStruct((M, D), residual.dtype))
        residual, unused = residual.reshape(M, D), {}
    *arrays, mean, rstd = triton_launch(
        layer_norm_fwd_kernel,
        x.reshape(M, D),
        residual,
        weight,
        bias,
        out_shape=tuple(out_shape),
        grid=(triton.cdiv(M, cfg.block_rows),),
        num_warps=cfg.num_warps,
        work=cost,
        M=M,
        D=D,
        EPS=eps,
        BLOCK_M=cfg.block_rows,
        BLOCK_D=block_d,
        CHUNKS=chunks,
        **unused,
    )
    return *(a.reshape(x.shape) for a in arrays), *(a.reshape(x.shape[:-1]) for a in (mean, rstd))


def _pulled(saved, normalised, x, weight, bias, cfg, cost):
    """Returns (dx in the dtype of what was normalised, {"x": dx in its own, and the gradients of weight and bias})."""
    D = x.shape[-1]
    M = x.size // D
    chunks, block_d = cut.tiles(D)
    programs = min(triton.cdiv(M, cfg.backward_block_rows), cfg.backward_programs)
    out_shape = {"dx_ptr": jax.ShapeDtypeStruct((M, D), normalised.dtype)}
    if normalised.dtype != x.dtype:
        out_shape["narrow_dx_ptr"] = jax.ShapeDtypeStruct((M, D), x.dtype)
    features = {n: x for n, x in {"weight": weight, "bias": bias}.items() if x is not None}
    out_shape |= {f"d{n}_ptr": jax.ShapeDtypeStruct((programs, D), jnp.float32) for n in features}
    unused: dict[str, Any] = {n: None for n in ("narrow_dx_ptr", "dweight_ptr", "dbias_ptr") if n not in out_shape}
    d_stream = saved.get("d_stream")
    result = triton_launch(
        layer_norm_bwd_kernel,
        normalised.reshape(M, D),
        weight,
        saved.mean.reshape(M),
        saved.rstd.reshape(M),
        saved.d_out.reshape(M, D),
        None if d_stream is None else d_stream.reshape(M, D),
        saved.d_mean.reshape(M),
        saved.d_rstd.reshape(M),
        out_shape=tuple(out_shape.values()),
        grid=(programs,),
        num_warps=cfg.backward_num_warps,
        work=cost,
        M=M,
        D=D,
        PROGRAMS=programs,
        BLOCK_M=cfg.backward_block_rows,
        BLOCK_D=block_d,
        CHUNKS=chunks,
        **unused,
    )
    found = dict(zip(out_shape, result, strict=True))
    dx = found["dx_ptr"].reshape(x.shape)
    narrow = found.get("narrow_dx_ptr", dx).reshape(x.shape)
    # Summed in a fixed order, not by atomics: the same call gives the same bits.
    sums = {n: jnp.sum(found[f"d{n}_ptr"], axis=0) for n in features}
    return dx, {"x": narrow, **sums}


def forward(x, weight, bias, eps, cfg):
    return _normalised(x, None, weight, bias, eps, cfg, work(op.bind(x, weight, bias))[0])


def backward(saved, x, weight, bias, eps, cfg):
    return _pulled(saved, x, x, weight, bias, cfg, work(op.bind(x, weight, bias))[1])[1]


def forward_add(x, residual, weight, bias, eps, cfg):
    return _normalised(x, residual, weight, bias, eps, cfg, work_of_add(add_op.bind(x, residual, weight, bias))[0])


def backward_add(saved, x, residual, weight, bias, eps, cfg):
    cost = work_of_add(add_op.bind(x, residual, weight, bias))[1]
    d_residual, gradients = _pulled(saved, saved.stream, x, weight, bias, cfg, cost)
    return {**gradients, "residual": d_residual}


FACTS: Any = {
    "platforms": {"cuda"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "rejects": rejects,
    "heuristic": heuristic,
    "candidates": candidates,
}
op.register(forward, backward, **FACTS)
add_op.register(forward_add, backward_add, **FACTS)
