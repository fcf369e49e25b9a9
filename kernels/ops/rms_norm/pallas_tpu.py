"""rms_norm on TPUs: blocks of rows with all of D in VMEM, so each direction reads its arrays once and writes once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels._core.pallas import pallas_launch
from kernels.ops.rms_norm.contract import RMSNormConfig, op, work

# What a kernel's blocks and temporaries may take. The least of the chips' default limits is 16 MiB.
VMEM_BUDGET = 12 * 2**20
# Rows of one register tile for the narrowest dtype (16 bit); a block of rows is a multiple of it.
ROW_TILE = 16
MOST_ROWS = 512


def rms_norm_fwd_kernel(*refs, eps, zero_centered, has_weight):
    x_ref, *weight_ref, out_ref, rstd_ref = refs
    x = x_ref[...].astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    out = x * rstd
    if has_weight:
        out = out * _factor(weight_ref[0], zero_centered)
    rstd_ref[...] = rstd
    out_ref[...] = out.astype(out_ref.dtype)


def rms_norm_bwd_kernel(*refs, num_rows, zero_centered, has_weight):
    x_ref, *weight_ref, rstd_ref, d_out_ref, d_rstd_ref = refs[: 5 if has_weight else 4]
    dx_ref, *dweight_ref = refs[5 if has_weight else 4 :]
    x, rstd = x_ref[...].astype(jnp.float32), rstd_ref[...]
    g = d_out_ref[...].astype(jnp.float32)
    normal = x * rstd
    if has_weight:
        # The last block may reach past the array, where there is anything at all, NaN too.
        row = pl.program_id(0) * x.shape[0] + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        dweight_ref[0][...] = jnp.sum(jnp.where(row < num_rows, g * normal, 0.0), axis=0, keepdims=True)[None]
        g = g * _factor(weight_ref[0], zero_centered)
    c = (jnp.sum(g * x, axis=-1, keepdims=True) + d_rstd_ref[...]) * rstd * rstd / x.shape[-1]
    dx_ref[...] = (g * rstd - normal * c).astype(dx_ref.dtype)


def _factor(weight_ref, zero_centered):
    return weight_ref[...].astype(jnp.float32) + (1.0 if zero_centered else 0.0)


def _bytes_per_row(D: int, itemsize: int, arrays: int) -> int:
    lanes = -(-D // 128) * 128
    # Each array twice (one block moves while the other is worked on), and float32 copies in the middle.
    return lanes * (2 * arrays * itemsize + 4 * arrays)


def _rows(D: int, itemsize: int, arrays: int) -> int:
    return min(MOST_ROWS, VMEM_BUDGET // _bytes_per_row(D, itemsize, arrays) // ROW_TILE * ROW_TILE)


def heuristic(call, platform):
    D, itemsize = call.dims["D"], call.x.dtype.itemsize
    return RMSNormConfig(block_rows=_rows(D, itemsize, 2), backward_block_rows=_rows(D, itemsize, 3))


def candidates(call):
    best = heuristic(call, "tpu")

    def part(rows, n):
        return max(ROW_TILE, rows // n // ROW_TILE * ROW_TILE)

    found = [
        RMSNormConfig(block_rows=part(best.block_rows, n), backward_block_rows=part(best.backward_block_rows, n))
        for n in (1, 2, 4)
    ]
    return list(dict.fromkeys(found))


def rejects(call):
    if call.x.size == 0:
        return "x has no elements"
    D, itemsize = call.dims["D"], call.x.dtype.itemsize
    if _rows(D, itemsize, 3) < ROW_TILE:
        return f"D = {D} is too wide: {ROW_TILE} rows of it do not fit the {VMEM_BUDGET >> 20} MiB of VMEM of a block"
    return None


def _specs(M: int, D: int, block_rows: int):
    """Returns the number of blocks, and the specs of arrays [M, D], [M, 1] and [1, D]."""
    rows = M if M <= block_rows else block_rows  # a block as tall as the array needs no multiple of the tile
    tall = pl.BlockSpec((rows, D), lambda i: (i, 0))
    thin = pl.BlockSpec((rows, 1), lambda i: (i, 0))
    flat = pl.BlockSpec((1, D), lambda i: (0, 0))
    return pl.cdiv(M, rows), tall, thin, flat


def forward(x, weight, eps, zero_centered, cfg):
    D = x.shape[-1]
    M = x.size // D
    num_blocks, tall, thin, flat = _specs(M, D, cfg.block_rows)
    out, rstd = pallas_launch(
        functools.partial(rms_norm_fwd_kernel, eps=eps, zero_centered=zero_centered, has_weight=weight is not None),
        x.reshape(M, D),
        *(() if weight is None else (weight.reshape(1, D),)),
        out_shape=(jax.ShapeDtypeStruct((M, D), x.dtype), jax.ShapeDtypeStruct((M, 1), jnp.float32)),
        grid=(num_blocks,),
        in_specs=[tall] if weight is None else [tall, flat],
        out_specs=(tall, thin),
        dimension_semantics=("parallel",),
        work=work(op.bind(x, weight))[0],
        name="rms_norm_fwd_kernel",
    )
    return out.reshape(x.shape), rstd.reshape(x.shape[:-1])


def backward(saved, x, weight, eps, zero_centered, cfg):
    D = x.shape[-1]
    M = x.size // D
    num_blocks, tall, thin, flat = _specs(M, D, cfg.backward_block_rows)
    dx_shape = jax.ShapeDtypeStruct((M, D), x.dtype)
    # A partial sum for each block; its middle dim makes the block as large as the array in the last two dims.
    partial = jax.ShapeDtypeStruct((num_blocks, 1, D), jnp.float32)
    one_partial = pl.BlockSpec((1, 1, D), lambda i: (i, 0, 0))
    given = weight is not None
    result = pallas_launch(
        functools.partial(rms_norm_bwd_kernel, num_rows=M, zero_centered=zero_centered, has_weight=given),
        x.reshape(M, D),
        *((weight.reshape(1, D),) if given else ()),
        saved.rstd.reshape(M, 1),
        saved.d_out.reshape(M, D),
        saved.d_rstd.reshape(M, 1),
        out_shape=(dx_shape, partial) if given else (dx_shape,),
        grid=(num_blocks,),
        in_specs=[tall, *([flat] if given else []), thin, tall, thin],
        out_specs=(tall, one_partial) if given else (tall,),
        dimension_semantics=("parallel",),
        work=work(op.bind(x, weight))[1],
        name="rms_norm_bwd_kernel",
    )
    gradients = {"x": result[0].reshape(x.shape)}
    if given:
        gradients["weight"] = jnp.sum(result[1], axis=(0, 1)).astype(weight.dtype)
    return gradients


op.register(
    forward,
    backward,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    rejects=rejects,
    heuristic=heuristic,
    candidates=candidates,
)
