"""Grouped matmul with packed matrices on TPUs: the words of a group's matrix are read into VMEM, and unpacked there.

A matrix is unpacked once for each block of rows that has rows of its group (`visits_of`). Where that would be often, all
matrices are unpacked once by XLA, for the kernel of `grouped_matmul`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

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
from kernels.engines.matmul.pallas_visits import Visits, put_rows
from kernels.framework.work import Work, nbytes
from kernels.ops.grouped_matmul.composed import dense, too_many
from kernels.ops.grouped_matmul.packed import QuantizedGroupedMatmulConfig, packed_op
from kernels.ops.grouped_matmul.pallas_tpu import visits_of_groups
from kernels.toolchains.pallas import pallas_launch

MOST_M = 256
# Rows of a matrix, on average, from which on unpacking it for each block of rows would take longer than unpacking all matrices
# once, and writing and reading them.
MOST_ROWS = 1024

_FORWARD, _BACKWARD = dense("pallas")


def quantized_grouped_matmul_fwd_kernel(expert, block, begin, end, count, x_ref, w_ref, s_ref, *refs, affine, how):
    """Operands: x [PERIOD, rows, periods], words, scales and perhaps biases of a matrix; the result; its float32 sum."""
    b_ref, out_ref, total = (refs[0].at[0] if affine else None), *refs[-2:]
    v, step = pl.program_id(1), pl.program_id(2)
    active = v < count[0]

    @pl.when(active & (step == 0))
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(active & (expert[v] >= 0))
    def _():
        total[...] += product(x_ref, unpacked_weights(w_ref.at[0], s_ref.at[0], b_ref, x_ref.dtype, **how))

    @pl.when(active & (step == pl.num_programs(2) - 1))
    def _():
        put_rows(Visits(expert, block, begin, end, count), v, [out_ref], [total[...]])


def quantized_grouped_matmul_bwd_kernel(expert, block, begin, end, count, d_ref, w_ref, s_ref, *refs, affine, how, F):
    """Operands: the cotangent [rows, F], words, scales and perhaps biases of a matrix; that of x as above; its sum."""
    b_ref, dx_ref, total = (refs[0].at[0] if affine else None), *refs[-2:]
    v, step = pl.program_id(1), pl.program_id(2)
    active = v < count[0]

    @pl.when(active & (step == 0))
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(active & (expert[v] >= 0))
    def _():
        width = d_ref.shape[1]
        first, whole = step * width, F % width == 0
        d = inside(d_ref[...], first, F, whole)
        for i, weights in enumerate(unpacked_weights(w_ref.at[0], s_ref.at[0], b_ref, d.dtype, **how)):
            total[i] += dot(d, inside(weights, first, F, whole), (1, 1))

    @pl.when(active & (step == pl.num_programs(2) - 1))
    def _():
        for i in range(total.shape[0]):
            put_rows(Visits(expert, block, begin, end, count), v, [dx_ref.at[i]], [total[i]])


def _launch(kernel, x, w, scales, biases, group_sizes, out, cfg, sizes, turned: bool, how):
    """Returns the result of either direction: the last dim of the grid, which is summed over, is that of D or, turned, of F."""
    (M, D, F), (period, _), E = sizes, period_of(how["bits"]), w.shape[0]
    m, f, d = min(cfg.block_m, M), min(cfg.block_f, F), min(cfg.block_d, D)
    packed = packed_arrays(w, scales, biases)
    visits = visits_of_groups(group_sizes, None, M, E, m, False)
    columns, steps = (pl.cdiv(D, d), pl.cdiv(F, f)) if turned else (pl.cdiv(F, f), pl.cdiv(D, d))

    def step(v: Any, k: Any, expert: Any, count: Any) -> Any:  # a visit that multiplies nothing fetches nothing new
        return jnp.where((expert[v] >= 0) & (v < count[0]), k, steps - 1)

    def given_at(n, v, k, expert, block, begin, end, count):
        at = block[v], step(v, k, expert, count)
        return at if turned else (0, *at)

    def weights_at(n, v, k, expert, block, begin, end, count):
        at = n, step(v, k, expert, count)
        return jnp.maximum(expert[v], 0), *(at if turned else at[::-1])

    def out_at(n, v, k, expert, block, begin, end, count):
        return (0, block[v], n) if turned else (block[v], n)

    tall, wide = (period, m, d // period), (m, f)
    given, made = (wide, tall) if turned else (tall, wide)
    return pallas_launch(
        functools.partial(kernel, affine=biases is not None, how=how),
        *visits,
        x,
        *packed,
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(columns, visits.expert.shape[0], steps),
            in_specs=[
                pl.BlockSpec(given, given_at),
                *(pl.BlockSpec((1, d * a.shape[1] // D, f), weights_at) for a in packed),
            ],
            out_specs=pl.BlockSpec(made, out_at),
            scratch_shapes=[pltpu.VMEM(made, jnp.float32)],
        ),
        dimension_semantics=("parallel", "arbitrary", "arbitrary"),
        work=Work(2 * M * D * F, nbytes(x, *packed, out)),
        name=f"quantized_grouped_matmul_{'bwd' if turned else 'fwd'}_kernel",
    )


def forward(x, w, scales, biases, group_sizes, mode, bits, group_size, cfg):
    """Returns the products, by one of both ways, as the contract says."""
    if cfg.dense:
        return _FORWARD(x, w, scales, biases, group_sizes, mode, bits, group_size)
    how = {"mode": mode, "bits": bits, "group_size": group_size}
    (M, D), F = x.shape, w.shape[-1]
    out = jax.ShapeDtypeStruct((M, F), x.dtype)
    columns, kernel = arranged(x, period_of(bits)[0]), quantized_grouped_matmul_fwd_kernel
    return _launch(kernel, columns, w, scales, biases, group_sizes, out, cfg, (M, D, F), False, how)


def backward(saved, x, w, scales, biases, group_sizes, mode, bits, group_size, cfg):
    """Returns the gradient of x, by the same way."""
    if cfg.dense:
        return _BACKWARD(saved, x, w, scales, biases, group_sizes, mode, bits, group_size)
    how, (period, _) = {"mode": mode, "bits": bits, "group_size": group_size}, period_of(bits)
    (M, D), F = x.shape, w.shape[-1]
    out = jax.ShapeDtypeStruct((period, M, D // period), x.dtype)
    kernel = functools.partial(quantized_grouped_matmul_bwd_kernel, F=F)
    d = saved.d_out.astype(x.dtype)
    dx = _launch(kernel, d, w, scales, biases, group_sizes, out, cfg, (M, D, F), True, how)
    return {"x": jnp.moveaxis(dx, 0, 2).reshape(M, D)}


def _blocks(call: Any) -> tuple[int, int, int]:
    M, D, F, E = (call.dims[n] for n in "MDFE")
    # A visit takes as long as unpacking, and a little more for each row; there is one for each matrix and each block of rows.
    rows = 2 ** round(math.log2(16 * math.sqrt(max(1, M / E))))
    return blocks_of(M, D, F, call.bits, call.group_size, call.x.dtype.itemsize, min(MOST_M, rows))


def heuristic(call, platform):
    m, f, d = _blocks(call)
    often = call.dims["M"] > MOST_ROWS * call.dims["E"]
    return QuantizedGroupedMatmulConfig(m, f, block_d=d, dense=often and too_many(call) is None)


def rejects(call):
    if 0 in (*call.x.shape, *call.w.shape):
        return "an array has no elements"
    return refusal(_blocks(call)[2], call.dims["D"], call.bits, call.group_size)


packed_op.register(
    forward,
    backward,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    rejects=rejects,
    heuristic=heuristic,
    name="pallas_packed",
)
