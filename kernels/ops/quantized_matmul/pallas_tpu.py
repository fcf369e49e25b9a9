"""Products with quantised weights on TPUs: packed words are read into VMEM, and unpacked there, a block at a time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.engines.matmul.pallas_codes import (
    arranged,
    blocks_of,
    dot,
    inside,
    packed_arrays,
    period_of,
    product,
    refusal,
    unpacked_weights,
)
from kernels.framework.work import Work, nbytes
from kernels.ops.quantized_matmul.contract import QuantizedMatmulConfig, op
from kernels.toolchains.pallas import pallas_launch

MOST_M = 256


def quantized_matmul_fwd_kernel(x_ref, w_ref, s_ref, *refs, affine, how):
    """Operands: x [PERIOD, rows, periods], words, scales and perhaps biases; the result; its float32 sum."""
    b_ref, out_ref, total = (refs[0] if affine else None), *refs[-2:]
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    total[...] += product(x_ref, unpacked_weights(w_ref, s_ref, b_ref, x_ref.dtype, **how))

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        out_ref[...] = total[...].astype(out_ref.dtype)


def quantized_matmul_bwd_kernel(d_ref, w_ref, s_ref, *refs, affine, how, F):
    """Operands: the cotangent [rows, F], words, scales and perhaps biases; that of x as above; its float32 sum."""
    b_ref, dx_ref, total = (refs[0] if affine else None), *refs[-2:]
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    width = d_ref.shape[1]
    first, whole = step * width, F % width == 0
    d = inside(d_ref[...], first, F, whole)
    for i, weights in enumerate(unpacked_weights(w_ref, s_ref, b_ref, d.dtype, **how)):
        total[i] += dot(d, inside(weights, first, F, whole), (1, 1))

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        dx_ref[...] = total[...].astype(dx_ref.dtype)


def _blocks(call) -> tuple[int, int, int]:
    D, F = call.dims["D"], call.dims["F"]
    return blocks_of(call.x.size // D, D, F, call.bits, call.group_size, call.x.dtype.itemsize, MOST_M)


def heuristic(call, platform):
    return QuantizedMatmulConfig(*_blocks(call))


def rejects(call):
    if 0 in call.x.shape:
        return "x has no rows"
    return refusal(_blocks(call)[2], call.dims["D"], call.bits, call.group_size)


def _launch(kernel, x, w, scales, biases, out, cfg, sizes, by_columns: bool, name: str, how):
    """Returns the result of either direction: the last dim of the grid, which is summed over, is that of D or of F."""
    (M, D, F), (period, _) = sizes, period_of(how["bits"])
    m, f, d = min(cfg.block_m, M), min(cfg.block_f, F), min(cfg.block_d, D)
    packed = packed_arrays(w, scales, biases)

    def at(index):
        return (lambda i, j, k: index(i, k, j)) if by_columns else index

    tall = (period, m, d // period), at(lambda i, j, k: (0, i, k))
    wide = (m, f), at(lambda i, j, k: (i, j))
    weights = [pl.BlockSpec((d * a.shape[0] // D, f), at(lambda i, j, k: (k, j))) for a in packed]
    first, second = (wide, tall) if by_columns else (tall, wide)
    grid = (pl.cdiv(M, m), pl.cdiv(F, f), pl.cdiv(D, d))
    return pallas_launch(
        functools.partial(kernel, affine=biases is not None, how=how),
        x,
        *packed,
        out_shape=out,
        grid=(grid[0], grid[2], grid[1]) if by_columns else grid,
        in_specs=[pl.BlockSpec(*first), *weights],
        out_specs=pl.BlockSpec(*second),
        scratch_shapes=[pltpu.VMEM(second[0], jnp.float32)],
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        work=Work(2 * M * D * F, nbytes(x, *packed, out)),
        name=name,
    )


def forward(x, w, scales, biases, mode, bits, group_size, cfg):
    rows, F = x.reshape(-1, x.shape[-1]), w.shape[1]
    how = {"mode": mode, "bits": bits, "group_size": group_size}
    out = jax.ShapeDtypeStruct((rows.shape[0], F), x.dtype)
    columns = arranged(rows, period_of(bits)[0])
    name = "quantized_matmul_fwd_kernel"
    kernel = quantized_matmul_fwd_kernel
    result = _launch(kernel, columns, w, scales, biases, out, cfg, (*rows.shape, F), False, name, how)
    return result.reshape(*x.shape[:-1], F)


def backward(saved, x, w, scales, biases, mode, bits, group_size, cfg):
    D, F, (period, _) = x.shape[-1], w.shape[1], period_of(bits)
    d = saved.d_out.astype(x.dtype).reshape(-1, F)
    how = {"mode": mode, "bits": bits, "group_size": group_size}
    out = jax.ShapeDtypeStruct((period, d.shape[0], D // period), x.dtype)
    kernel = functools.partial(quantized_matmul_bwd_kernel, F=F)
    name = "quantized_matmul_bwd_kernel"
    dx = _launch(kernel, d, w, scales, biases, out, cfg, (d.shape[0], D, F), True, name, how)
    return {"x": jnp.moveaxis(dx, 0, 2).reshape(x.shape)}


op.register(
    forward,
    backward,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    rejects=rejects,
    heuristic=heuristic,
)
