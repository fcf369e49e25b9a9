"""Grouped matmul on TPUs: blocks of rows are visited once for each group that has rows in them, in the order of the rows
(`pallas_visits`)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.engines.matmul.pallas_visits import Visits, put_rows, visits_of
from kernels.framework.work import Work, nbytes
from kernels.ops.grouped_matmul.contract import GroupedMatmulConfig, Tile, activated
from kernels.ops.grouped_matmul.groups import bounds, register, scales
from kernels.toolchains.pallas import pallas_launch

LANES = 128


def visits_of_groups(
    group_sizes: Any, group_offset: Any, rows: int, experts: int, block_m: int, every_matrix: bool
) -> Visits:
    """Returns `visits_of` groups that lie one after another, from `group_offset` on."""
    begin, end = bounds(group_sizes, group_offset, experts, rows)
    return visits_of(begin, end, rows, block_m, every_matrix)


def _dot(a, b, contracting):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = ((contracting[:1], contracting[1:]), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _masked(x, axis: int, first, begin, end):
    """Returns x with zeros where its index along an axis, counted from `first`, is not in [begin, end)."""
    index = lax.broadcasted_iota(jnp.int32, x.shape, axis) + first
    return jnp.where((index >= begin) & (index < end), x.astype(jnp.float32), 0.0).astype(x.dtype)


def grouped_matmul_kernel(
    expert, block, begin, end, count, *refs, K, activation, gated, transposed, scales, bias, adjoint
):
    """Operands: a [rows, k], one or two matrices [1, k, n], with scales and a bias [1, 1, n] each, a cotangent [rows,
    n]; the results; float32 accumulators. Scales may also be those of the rows of one matrix, [1, 1, k]."""
    refs, parts = list(refs), 2 if gated else 1
    a_ref = refs.pop(0)
    b_refs = [refs.pop(0) for _ in range(parts)]
    scale_refs = [refs.pop(0) for _ in range(parts if scales else 0)]
    bias_refs = [refs.pop(0) for _ in range(parts if bias else 0)]
    d_ref = refs.pop(0) if adjoint else None
    out_refs, sums = refs[: parts if adjoint else 1], refs[-parts:]
    v, step = pl.program_id(1), pl.program_id(2)
    active = v < count[0]
    block_k, last = a_ref.shape[1], pl.num_programs(2) - 1

    @pl.when(active & (step == 0))
    def _():
        for total in sums:
            total[...] = jnp.zeros_like(total)

    @pl.when(active & (expert[v] >= 0))
    def _():
        a = a_ref[...]
        if scales == "rows":
            a = (a.astype(jnp.float32) * scale_refs[0][0].astype(jnp.float32)).astype(a.dtype)
        a = a if K % block_k == 0 else _masked(a, 1, step * block_k, 0, K)
        for b_ref, total in zip(b_refs, sums):
            b = b_ref[0]
            b = b if b.dtype == a.dtype else b.astype(jnp.float32).astype(a.dtype)
            b = b if K % block_k == 0 else _masked(b, 1 if transposed else 0, step * block_k, 0, K)
            total[...] += _dot(a, b, (1, 1 if transposed else 0))

    @pl.when(active & (step == last))
    def _():
        z = [total[...] for total in sums]
        if scales == "columns":
            z = [x * scale[0].astype(jnp.float32) for x, scale in zip(z, scale_refs)]
        if bias:
            z = [x + b[0].astype(jnp.float32) for x, b in zip(z, bias_refs)]
        act = activated(activation, False)

        def result(*z):
            return act(z[0]) * z[1] if gated else act(z[0])

        if d_ref is not None:
            _, pull = jax.vjp(result, *z)
            results = pull(d_ref[...].astype(jnp.float32))
        else:
            results = [result(*z)]
        put_rows(Visits(expert, block, begin, end, count), v, out_refs, results)


def ragged_contraction_kernel(expert, block, begin, end, count, a_ref, b_ref, out_ref, total):
    v = pl.program_id(2)
    matrix, active = expert[v], v < count[0]

    @pl.when(active & ((v == 0) | (matrix != expert[jnp.maximum(v, 1) - 1])))
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(active & (begin[v] < end[v]))
    def _():
        first = block[v] * a_ref.shape[0]
        a, b = (_masked(ref[...], 0, first, begin[v], end[v]) for ref in (a_ref, b_ref))
        total[...] += _dot(a, b, (0, 0))

    @pl.when(active & ((v == count[0] - 1) | (matrix != expert[jnp.minimum(v, pl.num_programs(2) - 2) + 1])))
    def _():
        out_ref[0] = total[...].astype(out_ref.dtype)


# -- launches ---------------------------------------------------------------------------------------------------------


def _halves(b: jax.Array, transposed: bool, block_n: int) -> tuple[list[jax.Array], list[int]]:
    """Returns the gate and the up projection of [E, K, 2 N], or [E, 2 N, K], and the block of columns at which each
    starts."""
    axis = 1 if transposed else 2
    N = b.shape[axis] // 2
    if N % block_n == 0 and block_n % LANES == 0:  # read in place
        return [b, b], [0, N // block_n]
    return jnp.split(b, 2, axis=axis), [0, 0]


def _product(a, b, transposed, gated, tile: Any, visits: Visits, bias=None, activation=None, d_out=None, scale=None):
    """Returns rows of a [M, K] times their matrices b [E, K, width], or [E, width, K]; see `grouped_matmul_kernel`.

    `scale` is for 8-bit b: (per "columns" or per "rows", the scales [E, 1, width] or [E, 1, K])."""
    (M, K), width = a.shape, b.shape[1] if transposed else b.shape[2]
    N = width // 2 if gated else width
    bm, bn, bk = min(tile.block_m, M), min(tile.block_n, N), min(tile.block_k, K)
    steps, parts = pl.cdiv(K, bk), 2 if gated else 1
    arrays, starts = _halves(b, transposed, bn) if gated else ([b], [0])

    def step(v, k, expert, count):  # a visit that multiplies nothing fetches nothing new
        return jnp.where((expert[v] >= 0) & (v < count[0]), k, steps - 1)

    def a_at(n, v, k, expert, block, begin, end, count):
        return block[v], step(v, k, expert, count)

    def b_at(n, v, k, expert, block, begin, end, count, start):
        k_block = step(v, k, expert, count)
        matrix = jnp.maximum(expert[v], 0)
        return (matrix, start + n, k_block) if transposed else (matrix, k_block, start + n)

    def column_at(n, v, k, expert, block, begin, end, count):
        return jnp.maximum(expert[v], 0), 0, n

    def row_at(n, v, k, expert, block, begin, end, count):
        return jnp.maximum(expert[v], 0), 0, step(v, k, expert, count)

    def out_at(n, v, k, expert, block, begin, end, count):
        return block[v], n

    b_block = (1, bn, bk) if transposed else (1, bk, bn)
    in_specs = [pl.BlockSpec((bm, bk), a_at)]
    in_specs += [pl.BlockSpec(b_block, functools.partial(b_at, start=start)) for start in starts]
    of, factors = None, []
    if scale is not None:
        of, values = scale
        values = values.reshape(len(b), 1, -1)
        factors = [values] if of == "rows" else jnp.split(values, parts, axis=2)
        in_specs += [pl.BlockSpec((1, 1, bk), row_at) if of == "rows" else pl.BlockSpec((1, 1, bn), column_at)] * len(
            factors
        )
    biases = [] if bias is None else [x[:, None] for x in jnp.split(bias.reshape(-1, width), parts, axis=1)]
    in_specs += [pl.BlockSpec((1, 1, bn), column_at) for _ in biases]
    cotangents = [] if d_out is None else [d_out]
    in_specs += [pl.BlockSpec((bm, bn), out_at) for _ in cotangents]
    results = parts if d_out is not None else 1
    shapes = [jax.ShapeDtypeStruct((M, N), a.dtype)] * results
    out = pallas_launch(
        functools.partial(
            grouped_matmul_kernel,
            K=K,
            activation=activation,
            gated=gated,
            transposed=transposed,
            scales=of,
            bias=bias is not None,
            adjoint=d_out is not None,
        ),
        *visits,
        a,
        *arrays,
        *factors,
        *biases,
        *cotangents,
        out_shape=shapes,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(pl.cdiv(N, bn), visits.expert.shape[0], steps),
            in_specs=in_specs,
            out_specs=[pl.BlockSpec((bm, bn), out_at)] * results,
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)] * parts,
        ),
        dimension_semantics=("parallel", "arbitrary", "arbitrary"),
        work=Work(2 * M * K * width, nbytes(a, b, *shapes)),
        name="grouped_matmul_kernel",
    )
    return out[0] if results == 1 else jnp.concatenate(out, axis=1)


def _contraction(a, b, experts: int, dtype: Any, tile: Any, visits: Visits):
    """Returns [E, P, Q]: the rows of each group of a [M, P], transposed, times those of b [M, Q]."""
    (M, P), Q = a.shape, b.shape[1]
    bm, bp, bq = min(tile.block_k, M), min(tile.block_m, P), min(tile.block_n, Q)
    out = jax.ShapeDtypeStruct((experts, P, Q), dtype)
    return pallas_launch(
        ragged_contraction_kernel,
        *visits,
        a,
        b,
        out_shape=out,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(pl.cdiv(P, bp), pl.cdiv(Q, bq), visits.expert.shape[0]),
            in_specs=[
                pl.BlockSpec((bm, bp), lambda p, q, v, expert, block, *_: (block[v], p)),
                pl.BlockSpec((bm, bq), lambda p, q, v, expert, block, *_: (block[v], q)),
            ],
            out_specs=pl.BlockSpec((1, bp, bq), lambda p, q, v, expert, *_: (expert[v], p, q)),
            scratch_shapes=[pltpu.VMEM((bp, bq), jnp.float32)],
        ),
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        work=Work(2 * M * P * Q, nbytes(a, b, out)),
        name="ragged_contraction_kernel",
    )


# -- the operation ----------------------------------------------------------------------------------------------------


def _forward(lhs, weights, group_sizes, group_offset, rhs_bias, activation, cfg, scale):
    b, transposed, gated = weights
    M = lhs.shape[0]
    visits = visits_of_groups(group_sizes, group_offset, M, b.shape[0], min(M, cfg.forward.block_m), False)
    return _product(
        lhs, b, transposed, gated, cfg.forward, visits, rhs_bias, activation, scale=scales("columns", scale)
    )


def _backward(saved, lhs, weights, group_sizes, group_offset, rhs_bias, activation, cfg, scale):
    """Returns (the gradients of lhs and of the bias by name, the cotangent of the products, visits of every group)."""
    b, transposed, gated = weights
    M, experts, d = lhs.shape[0], b.shape[0], saved.d_out.astype(lhs.dtype)

    def visits(block_m: int, every_matrix: bool) -> Visits:
        return visits_of_groups(group_sizes, group_offset, M, experts, min(M, block_m), every_matrix)

    if activation is not None:
        of, columns = visits(cfg.forward.block_m, False), scales("columns", scale)
        d = _product(lhs, b, transposed, gated, cfg.forward, of, rhs_bias, activation, d, scale=columns)
    of, rows = visits(cfg.d_lhs.block_m, False), scales("rows", scale)
    grads = {"lhs": _product(d, b, not transposed, False, cfg.d_lhs, of, scale=rows)}
    of = visits(cfg.d_rhs.block_k, True)
    if rhs_bias is not None:  # row sums as a product with enough ones to fill a tile
        sums = _contraction(jnp.ones((M, 8), d.dtype), d, experts, rhs_bias.dtype, cfg.d_rhs, of)
        grads["rhs_bias"] = sums[:, 0].reshape(rhs_bias.shape)
    return grads, d, of


# -- configurations ---------------------------------------------------------------------------------------------------


def _even(size: int, most: int) -> int:
    """Returns the largest multiple of a tile's lanes, at most `most`, that divides the size; else `most`."""
    return next((n for n in range(most, 0, -LANES) if size % n == 0), most)


def _config(call, rows: int, columns: int, depth: int) -> GroupedMatmulConfig:
    weights = call.rhs if call.rhs_transposed is None else call.rhs_transposed
    D, F = call.dims["D"], call.dims["F"]
    width = F * (2 if weights.ndim == 4 else 1)
    first, second = (width, D) if call.rhs is None else (D, width)
    return GroupedMatmulConfig(
        Tile(rows, _even(F, columns * F // width), _even(D, depth)),
        Tile(rows, _even(D, columns), _even(width, depth)),
        Tile(_even(first, columns), _even(second, columns), rows),
    )


def heuristic(call, platform):
    narrow = call.lhs.dtype.itemsize == 2
    return _config(call, 256, 512 if narrow else 256, 1024 if narrow else 512)


def candidates(call):
    scale = 2 if call.lhs.dtype.itemsize == 2 else 1
    sizes = [(256, 256, 512), (128, 256, 512), (256, 512, 512), (512, 256, 512), (256, 256, 1024)]
    configs = [_config(call, rows, columns * scale, depth) for rows, columns, depth in sizes]
    return list(dict.fromkeys([heuristic(call, "tpu"), *configs]))


def refuses(call):
    if call.activation == "gelu":
        return "activation = 'gelu' needs the error function, which Mosaic lacks; use 'gelu_tanh'"
    return None


register(
    _forward,
    _backward,
    _contraction,
    refuses=refuses,
    platforms={"tpu"},
    dtypes={"float32", "bfloat16"},
    heuristic=heuristic,
    candidates=candidates,
)
