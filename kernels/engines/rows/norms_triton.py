"""Norms of whole rows on GPUs, of x or of x + residual. Each program holds whole rows, so each array is read or written once.

rms_norm is layer_norm without the mean: a kernel whose pointer to means is None does not compute them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels.engines.rows import rows as cut
from kernels.engines.rows.norms import Norm, NormConfig, centers, cost
from kernels.framework.binding import Call
from kernels.toolchains.triton import triton_launch

# Bytes of shared memory for prefetched tiles. On an A100 the rest is for exchanging sums.
READ_AHEAD = 128 * 1024
WIDEST_AHEAD = 8192


@triton.jit
def _inside(rows, cols, i, M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns which entries of chunk i are in the array."""
    return (rows < M)[:, None] & (i * BLOCK_D + cols < D)[None, :]


@triton.jit
def _load_row(ptr, offsets, rows, cols, M: tl.constexpr, D: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns CHUNKS tiles of BLOCK_D columns in their own dtype: 16-bit types then take half the registers. The last may be
    cut off."""
    tiles = ()
    for i in tl.static_range(CHUNKS):
        inside = _inside(rows, cols, i, M, D, BLOCK_D)
        tiles = tiles + (tl.load(ptr + offsets + i * BLOCK_D, mask=inside, other=0.0),)
    return tiles


@triton.jit
def _factor(weight_ptr, cols, mask, ZERO_CENTERED: tl.constexpr):
    """Returns the scale of a row, float32 [1, columns]; 1 without a weight."""
    factor = tl.full([1, 1], 1.0, tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if ZERO_CENTERED:
            weight += 1.0
        factor = weight[None, :]
    return factor


@triton.jit
def _factors(weight_ptr, cols, D, CHUNKS: tl.constexpr, BLOCK_D: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """Returns the scales of the chunks of a row."""
    factors = ()
    for i in tl.static_range(CHUNKS):
        col = i * BLOCK_D + cols
        factors = factors + (_factor(weight_ptr, col, col < D, ZERO_CENTERED),)
    return factors


@triton.jit
def _summand(x, TALL_SUMS: tl.constexpr):
    """Returns what a tile adds to a sum over rows: the tile itself, or the sum of its rows."""
    part = x
    if not TALL_SUMS:
        part = tl.sum(x, axis=0, keep_dims=True)
    return part


@triton.jit
def norm_fwd_kernel(
    x_ptr,
    residual_ptr,  # None to normalise x alone
    weight_ptr,
    bias_ptr,
    out_ptr,
    stream_ptr,  # x + residual, in the dtype of residual
    mean_ptr,  # None: the mean is not subtracted
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
    offsets = rows.to(tl.int64)[:, None] * D + cols[None, :]
    x = _load_row(x_ptr, offsets, rows, cols, M, D, CHUNKS, BLOCK_D)
    if residual_ptr is not None:
        residual = _load_row(residual_ptr, offsets, rows, cols, M, D, CHUNKS, BLOCK_D)
        stream = ()
        for i in tl.static_range(CHUNKS):
            # Rounded first, because the norm is of the stream that is returned.
            total = (x[i].to(tl.float32) + residual[i].to(tl.float32)).to(stream_ptr.dtype.element_ty)
            tl.store(stream_ptr + offsets + i * BLOCK_D, total, mask=_inside(rows, cols, i, M, D, BLOCK_D))
            stream = stream + (total,)
        x = stream
    mean = tl.zeros([BLOCK_M], tl.float32)
    if mean_ptr is not None:
        total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for i in tl.static_range(CHUNKS):
            total += x[i].to(tl.float32)
        mean = tl.sum(total, axis=1) / D
        tl.store(mean_ptr + rows, mean, mask=rows < M)
    squares = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in tl.static_range(CHUNKS):
        apart = x[i].to(tl.float32)
        if mean_ptr is not None:
            # Entries past D were loaded as 0, and subtracting the mean would make them nonzero.
            apart = tl.where(_inside(rows, cols, i, M, D, BLOCK_D), apart - mean[:, None], 0.0)
        squares += apart * apart
    rstd = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1) / D + EPS)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    for i in tl.static_range(CHUNKS):
        out = x[i].to(tl.float32)
        if mean_ptr is not None:
            out = out - mean[:, None]
        col = i * BLOCK_D + cols
        out = out * rstd[:, None] * _factor(weight_ptr, col, col < D, ZERO_CENTERED)
        if bias_ptr is not None:
            out += tl.load(bias_ptr + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
        inside = _inside(rows, cols, i, M, D, BLOCK_D)
        tl.store(out_ptr + offsets + i * BLOCK_D, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_bwd_kernel(
    x_ptr,  # or the stream
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    d_out_ptr,
    d_stream_ptr,  # None without a residual
    d_mean_ptr,
    d_rstd_ptr,
    dx_ptr,  # in the dtype of the normalised input
    narrow_dx_ptr,  # the same in the dtype of x, if the stream has another one; else None
    dweight_ptr,  # [programs, D] float32: a partial sum for each program
    dbias_ptr,  # the same
    M: tl.constexpr,
    D: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,
    TALL_SUMS: tl.constexpr,  # whether sums keep BLOCK_M rows, which are added up at the end
    STAGES: tl.constexpr,  # tiles of rows in flight in shared memory; 1: no prefetch, tiles are loaded into registers
):
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    dweight, dbias = (), ()
    for _ in tl.static_range(CHUNKS):
        dweight = dweight + (tl.zeros([BLOCK_M if TALL_SUMS else 1, BLOCK_D], tl.float32),)
        dbias = dbias + (tl.zeros([BLOCK_M if TALL_SUMS else 1, BLOCK_D], tl.float32),)
    factors = ()
    if STAGES > 1:
        factors = _factors(weight_ptr, cols, D, CHUNKS, BLOCK_D, ZERO_CENTERED)
    for start in tl.range(program * BLOCK_M, M, PROGRAMS * BLOCK_M, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_M)
        offsets = rows.to(tl.int64)[:, None] * D + cols[None, :]
        x = _load_row(x_ptr, offsets, rows, cols, M, D, CHUNKS, BLOCK_D)
        g = _load_row(d_out_ptr, offsets, rows, cols, M, D, CHUNKS, BLOCK_D)
        d_stream = g
        if d_stream_ptr is not None:
            d_stream = _load_row(d_stream_ptr, offsets, rows, cols, M, D, CHUNKS, BLOCK_D)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        d_rstd = tl.load(d_rstd_ptr + rows, mask=rows < M, other=0.0)
        mean, d_mean = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
            d_mean = tl.load(d_mean_ptr + rows, mask=rows < M, other=0.0)
        weight = factors
        if STAGES == 1:
            # Reloaded for each tile: it stays in the cache, and x and g need the registers.
            weight = _factors(weight_ptr, cols, D, CHUNKS, BLOCK_D, ZERO_CENTERED)
        total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        products = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for i in tl.static_range(CHUNKS):
            apart = x[i].to(tl.float32)
            if mean_ptr is not None:
                apart = apart - mean[:, None]
            scaled = g[i].to(tl.float32) * weight[i]
            total += scaled
            products += scaled * apart
        through_rstd = (tl.sum(products, axis=1) + d_rstd) * rstd * rstd / D
        through_mean = mean
        if mean_ptr is not None:
            through_mean = (tl.sum(total, axis=1) * rstd - d_mean) / D
        weight_sums, bias_sums = (), ()
        for i in tl.static_range(CHUNKS):
            apart = x[i].to(tl.float32)
            if mean_ptr is not None:
                apart = apart - mean[:, None]
            normal = apart * rstd[:, None]
            wide = g[i].to(tl.float32)
            if dweight_ptr is not None:
                weight_sums = weight_sums + (dweight[i] + _summand(wide * normal, TALL_SUMS),)
            if dbias_ptr is not None:
                bias_sums = bias_sums + (dbias[i] + _summand(wide, TALL_SUMS),)
            dx = wide * weight[i] * rstd[:, None]
            if mean_ptr is not None:
                dx = dx - through_mean[:, None]
            dx = dx - normal * through_rstd[:, None]
            if d_stream_ptr is not None:
                dx += d_stream[i].to(tl.float32)
            inside = _inside(rows, cols, i, M, D, BLOCK_D)
            tl.store(dx_ptr + offsets + i * BLOCK_D, dx.to(dx_ptr.dtype.element_ty), mask=inside)
            if narrow_dx_ptr is not None:
                narrow = dx.to(narrow_dx_ptr.dtype.element_ty)
                tl.store(narrow_dx_ptr + offsets + i * BLOCK_D, narrow, mask=inside)
        if dweight_ptr is not None:
            dweight = weight_sums
        if dbias_ptr is not None:
            dbias = bias_sums
    for i in tl.static_range(CHUNKS):
        col = i * BLOCK_D + cols
        if dweight_ptr is not None:
            tl.store(dweight_ptr + program * D + col, tl.sum(dweight[i], axis=0), mask=col < D)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + program * D + col, tl.sum(dbias[i], axis=0), mask=col < D)


def _threads_hold_all_rows(block_d: int, num_warps: int, itemsize: int) -> bool:
    """Returns whether each thread holds its columns of all rows of a tile, so that summing rows moves no data. This is so if
    loads of 16 bytes by all threads cover at most one row."""
    return block_d >= num_warps * 32 * (16 // itemsize)


def forward(x: Any, residual: Any, weight: Any, bias: Any, norm: Norm, cfg: Any) -> tuple[jax.Array, ...]:
    """Returns (out, stream if there is a residual, the statistics of each row)."""
    D = x.shape[-1]
    M = x.size // D
    chunks, block_d = cut.forward_tiles(D)
    out_shape = {"out_ptr": jax.ShapeDtypeStruct((M, D), x.dtype)}
    if residual is not None:
        out_shape["stream_ptr"] = jax.ShapeDtypeStruct((M, D), residual.dtype)
    out_shape |= {f"{name}_ptr": jax.ShapeDtypeStruct((M,), jnp.float32) for name in norm.statistics}
    unused: dict[str, Any] = {n: None for n in ("stream_ptr", "mean_ptr") if n not in out_shape}
    outputs = triton_launch(
        norm_fwd_kernel,
        x.reshape(M, D),
        None if residual is None else residual.reshape(M, D),
        weight,
        bias,
        out_shape=tuple(out_shape.values()),
        grid=(triton.cdiv(M, cfg.block_rows),),
        num_warps=cfg.num_warps,
        work=cost(x, residual, weight, bias, norm.centered)[0],
        M=M,
        D=D,
        EPS=norm.eps,
        ZERO_CENTERED=norm.zero_centered,
        BLOCK_M=cfg.block_rows,
        BLOCK_D=block_d,
        CHUNKS=chunks,
        **unused,
    )
    return tuple(y.reshape(x.shape if y.ndim == 2 else x.shape[:-1]) for y in outputs)


def backward(saved: Any, x: Any, residual: Any, weight: Any, bias: Any, norm: Norm, cfg: Any) -> dict[str, jax.Array]:
    """Returns the gradients by name."""
    D = x.shape[-1]
    M = x.size // D
    chunks, block_d = cut.backward_tiles(D)
    programs = min(triton.cdiv(M, cfg.backward_block_rows), cfg.backward_programs)
    normalised = x if residual is None else saved.stream
    out_shape = {"dx_ptr": jax.ShapeDtypeStruct((M, D), normalised.dtype)}
    if normalised.dtype != x.dtype:
        out_shape["narrow_dx_ptr"] = jax.ShapeDtypeStruct((M, D), x.dtype)
    summed = [name for name, array in (("weight", weight), ("bias", bias)) if array is not None]
    out_shape |= {f"d{n}_ptr": jax.ShapeDtypeStruct((programs, D), jnp.float32) for n in summed}
    unused: dict[str, Any] = {n: None for n in ("narrow_dx_ptr", "dweight_ptr", "dbias_ptr") if n not in out_shape}

    def flat(name: str, *shape: int) -> jax.Array | None:
        return saved[name].reshape(shape) if name in saved else None

    result = triton_launch(
        norm_bwd_kernel,
        normalised.reshape(M, D),
        weight,
        flat("mean", M),
        flat("rstd", M),
        flat("d_out", M, D),
        flat("d_stream", M, D),
        flat("d_mean", M),
        flat("d_rstd", M),
        out_shape=tuple(out_shape.values()),
        grid=(programs,),
        num_warps=cfg.backward_num_warps,
        work=cost(x, residual, weight, bias, norm.centered)[1],
        M=M,
        D=D,
        ZERO_CENTERED=norm.zero_centered,
        PROGRAMS=programs,
        BLOCK_M=cfg.backward_block_rows,
        BLOCK_D=block_d,
        CHUNKS=chunks,
        TALL_SUMS=not _threads_hold_all_rows(block_d, cfg.backward_num_warps, x.dtype.itemsize),
        STAGES=cfg.backward_num_stages,
        **unused,
    )
    outputs = dict(zip(out_shape, result, strict=True))
    dx = outputs["dx_ptr"].reshape(x.shape)
    gradients = {"x": outputs.get("narrow_dx_ptr", dx).reshape(x.shape)}
    # Summed in a fixed order, not by atomics, for bitwise reproducible results.
    gradients |= {n: jnp.sum(outputs[f"d{n}_ptr"], axis=0) for n in summed}
    return gradients if residual is None else {**gradients, "residual": dx}


def rejects(call: Call) -> str | None:
    """Returns why the kernels cannot run a call."""
    if call.x.size == 0:
        return "x has no elements"
    if call.dims["D"] > cut.WIDEST:
        return f"D = {call.dims['D']} exceeds {cut.WIDEST}: a row must fit the registers of one program"
    return None


def _read_ahead(call: Call, rows: int) -> int:
    """Returns the maximum number of stages of a backward, so that the next tile or two fit in shared memory. 1 for narrow
    rows, which run in many programs, and for rows so wide that they fill the registers."""
    D = call.dims["D"]
    chunks, block_d = cut.backward_tiles(D)
    if chunks > 1 or D < cut.WIDE or block_d > WIDEST_AHEAD:
        return 1
    x, stream = call.x.dtype.itemsize, jnp.dtype(call.arguments.get("residual", call.x).dtype).itemsize
    tile = rows * block_d * (x + stream * (2 if "residual" in call.arguments else 1))
    return 1 + min(2, READ_AHEAD // tile)


def heuristic(call: Call, platform: str) -> NormConfig:
    """Returns the default tiles of a call."""
    crowded = "residual" in call.arguments or centers(call)  # one more array, or one more sum
    itemsize = max(jnp.dtype(x.dtype).itemsize for x in (call.x, call.arguments.get("residual", call.x)))
    shape = cut.shapes(call.dims["D"], itemsize, crowded=crowded)
    return NormConfig(*shape, _read_ahead(call, shape[2]))


def candidates(call: Call) -> list[NormConfig]:
    """Returns the configurations to tune over: every shape, with each possible number of stages."""
    shapes = cut.candidates(call.dims["D"])
    return [NormConfig(*shape, n + 1) for shape in shapes for n in range(_read_ahead(call, shape[2]))]


FACTS: Any = {
    "platforms": {"cuda"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "rejects": rejects,
    "heuristic": heuristic,
    "candidates": candidates,
    "version": 2,
}
