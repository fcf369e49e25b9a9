"""Launches the Triton and Gluon kernels of grouped_matmul on NVIDIA GPUs, and chooses their tiles.

The map of tiles is computed on the device by a separate kernel: no size is transferred to the host. With an activation
the backward recomputes the products, and the same kernel converts the cotangent of the result to that of the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
from jax import lax

from kernels.framework.target import MULTIPROCESSORS
from kernels.framework.work import Work, nbytes
from kernels.ops.grouped_matmul.contract import GroupedMatmulConfig, Tile
from kernels.ops.grouped_matmul.gluon_contractions import warp_specialized_contraction_kernel
from kernels.ops.grouped_matmul.gluon_kernels import MATRIX, warp_specialized_matmul_kernel
from kernels.ops.grouped_matmul.groups import register, scales
from kernels.ops.grouped_matmul.triton_kernels import (
    group_sum_kernel,
    grouped_matmul_kernel,
    products_bwd_kernel,
    products_fwd_kernel,
    ragged_contraction_kernel,
    tile_map_kernel,
)
from kernels.toolchains.gluon import SWIZZLED
from kernels.toolchains.triton import compute_capability, tensor_descriptor, triton_launch


class _Map(NamedTuple):
    """The tiles of `block_m` rows, at most `bound` of them, the bounds and the order of the groups, and a counter at
    zero."""

    tiles: jax.Array
    bounds: jax.Array
    turn: jax.Array
    bound: int
    block_m: int


def tile_map(group_sizes: jax.Array, group_offset: jax.Array | None, rows: int, experts: int, block_m: int) -> _Map:
    """Returns the tiles of `block_m` rows of each group, computed on the device."""
    bound = rows // block_m + experts + 2
    block_e = triton.next_power_of_2(experts + 2)
    block_t = max(16, min(64, 8192 // block_e))
    tiles, bounds, turn = triton_launch(
        tile_map_kernel,
        group_sizes.astype(jnp.int32),
        None if group_offset is None else group_offset.astype(jnp.int32).reshape(1),
        out_shape=(
            jax.ShapeDtypeStruct((3, bound), jnp.int32),
            jax.ShapeDtypeStruct((3 * experts + 2,), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ),
        grid=(triton.cdiv(bound, block_t),),
        ROWS=rows,
        G=group_sizes.shape[0],
        E=experts,
        BOUND=bound,
        BLOCK_M=block_m,
        BLOCK_G=triton.next_power_of_2(group_sizes.shape[0]),
        BLOCK_E=block_e,
        BLOCK_T=block_t,
    )
    return _Map(tiles, bounds, turn, bound, block_m)


class _Maps:
    """The maps of one call, by rows per tile, each computed on first use."""

    def __init__(self, group_sizes: jax.Array, group_offset: jax.Array | None, rows: int, experts: int) -> None:
        self._of = group_sizes, group_offset, rows, experts
        self._made: dict[int, _Map] = {}

    def of(self, block_m: int) -> _Map:
        if block_m not in self._made:
            self._made[block_m] = tile_map(*self._of, block_m)
        return self._made[block_m]

    def any(self) -> _Map:
        """Returns any map, for code that reads only the bounds of groups."""
        return next(iter(self._made.values()))


def _whole(x: jax.Array, width: int) -> bool:
    """Returns whether TMA can read x: its rows are aligned to 16 bytes.

    Not float32, which is multiplied from registers."""
    return x.dtype.itemsize <= 2 and width * x.dtype.itemsize % 16 == 0


def _work(flops: int, *arrays: Any) -> Work:
    return Work(flops, nbytes(*arrays))


def _product(
    a, b, transposed, gated, tile: Any, maps: _Maps, bias=None, activation=None, d_out=None, scale=None, rows=None
) -> jax.Array:
    """Returns rows of a [M, K] times their matrices b [E, K, width], or [E, width, K]; see `grouped_matmul_kernel`.

    `scale` is for 8-bit b: (per "columns" or per "rows", the scales [E, width] or [E, K]). `rows` [M]: the rows are those of
    a [*, K]."""
    K, experts, width = a.shape[1], b.shape[0], b.shape[1] if transposed else b.shape[2]
    M = len(a if rows is None else rows)
    N = width // 2 if gated else width
    if scale is None and _specialises(tile, a, b, (K, N)):
        return _warp_specialized_product(
            a, b, transposed, gated, WARP_SPECIALIZED[tile.specialised], maps, bias, activation, d_out, rows
        )[0]
    where = maps.of(tile.block_m)
    tma = K % tile.block_k == 0 and _whole(a, K) and _whole(b, N)
    out = jax.ShapeDtypeStruct((M, N if d_out is None else width), a.dtype)
    code = str(b.dtype) if b.dtype.itemsize == 1 else None
    of, factors = scale or (None, None)
    parts = 2 if d_out is not None and tile.block_n >= 32 else 1
    b = b if code in (None, "int8") else lax.bitcast_convert_type(b, jnp.uint8)
    a_desc = b_desc = None
    if tma:
        a_desc = tensor_descriptor(a, (M, K), (where.block_m, tile.block_k)) if rows is None else None
        matrix = (experts * width, K) if transposed else (experts * K, width)
        block = tile.block_k, tile.block_n
        b_desc = tensor_descriptor(b, matrix, block[::-1] if transposed else block)
    (result,) = triton_launch(
        grouped_matmul_kernel,
        a,
        b,
        factors,
        bias,
        d_out,
        rows,
        a_desc,
        b_desc,
        where.tiles,
        where.bounds,
        out_shape=(out,),
        grid=(min(tile.programs, where.bound * triton.cdiv(N, tile.block_n)),),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        work=_work(2 * M * K * width, a, b, out),
        M=M,
        K=K,
        N=N,
        E=experts,
        BOUND=where.bound,
        GATED=gated,
        TRANSPOSED=transposed,
        ACTIVATION=activation,
        CODE=code,
        SCALES=of,
        TMA=tma,
        FLATTEN=tile.flatten,
        PARTS=parts,
        BAND=tile.band,
        BLOCK_M=where.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
    )
    return result


def _contraction(a, b, experts: int, dtype: Any, tile: Any, maps: _Maps, rows=None) -> jax.Array:
    """Returns [E, P, Q]: the rows of each group of a [M, P], transposed, times those of b [M, Q]. `rows` [M]: as above."""
    P, (M, Q), where = a.shape[1], b.shape, maps.any()
    if dtype == a.dtype and _specialises(tile, a, b, (P, Q)):
        return _warp_specialized_contraction(a, b, experts, WARP_SPECIALIZED[tile.specialised], where, rows)
    out = jax.ShapeDtypeStruct((experts, P, Q), dtype)
    tma, a_desc, b_desc = rows is None and _whole(a, P) and _whole(b, Q), None, None
    if tma:
        a_desc = tensor_descriptor(a, (M, P), (tile.block_k, tile.block_m))
        b_desc = tensor_descriptor(b, (M, Q), (tile.block_k, tile.block_n))
    result, _ = triton_launch(
        ragged_contraction_kernel,
        a,
        b,
        rows,
        where.bounds,
        where.turn,
        a_desc,
        b_desc,
        out_shape=(out, jax.ShapeDtypeStruct((1,), jnp.int32)),
        input_output_aliases={3 + (rows is not None): 1},
        grid=(min(tile.programs, experts * triton.cdiv(P, tile.block_m) * triton.cdiv(Q, tile.block_n)),),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        work=_work(2 * M * P * Q, a, b, out),
        M=M,
        P=P,
        Q=Q,
        E=experts,
        TMA=tma,
        STAGES=tile.num_stages,
        BAND=tile.band,
        BLOCK_P=tile.block_m,
        BLOCK_Q=tile.block_n,
        BLOCK_K=tile.block_k,
    )
    return result


# -- kernels of Hopper ------------------------------------------------------------------------------------------------


def _specialises(tile: Any, a: jax.Array, b: jax.Array, widths: Sequence[int]) -> bool:
    """Returns whether a product runs on a warp-specialized kernel: for 16-bit arrays that TMA can read, on Hopper,
    which alone has the instructions."""
    sixteen = a.dtype == b.dtype and a.dtype.itemsize == 2 and all(_whole(a, width) for width in widths)
    return tile.specialised in WARP_SPECIALIZED and sixteen and compute_capability() == 90


def _height(tile: Any, a: jax.Array, b: jax.Array, widths: Sequence[int]) -> int:
    """Returns the rows of a tile of a product."""
    return 2 * WARP_SPECIALIZED[tile.specialised].rows if _specialises(tile, a, b, widths) else tile.block_m


class _WarpSpecialized(NamedTuple):
    """A tile of the warp-specialized kernels that fits in the shared memory of a multiprocessor."""

    rows: int  # rows per consumer warpgroup
    columns: int
    stages: int
    buffers: int  # buffers per consumer warpgroup, for 64 columns of its sums
    band: int
    block_k: int = 64


WARP_SPECIALIZED = {"tall": _WarpSpecialized(128, 128, 4, 1, 8), "wide": _WarpSpecialized(64, 256, 4, 2, 16)}
# Registers per multiplying thread, and per other thread: three warpgroups share 64,512.
REGISTERS = {"MULTIPLYING": 216, "OTHERS": 72}


def _launch(
    kernel, shape: _WarpSpecialized, inputs: Sequence[Any], out: Sequence[Any], tiles: int, work: Work, **named
):
    """Returns the results of a kernel, of these shapes; the last of its inputs is the counter of the queue."""
    *results, _ = triton_launch(
        kernel,
        *inputs,
        out_shape=(*out, jax.ShapeDtypeStruct((1,), jnp.int32)),
        input_output_aliases={sum(x is not None for x in inputs) - 1: len(out)},
        grid=(min(MULTIPROCESSORS, tiles),),
        num_warps=4,
        work=work,
        **named,
        **REGISTERS,
        BAND=shape.band,
        ROWS=shape.rows,
        BLOCK_K=shape.block_k,
        STAGES=shape.stages,
        BUFFERS=shape.buffers,
    )
    return results


def _warp_specialized_product(
    a,
    b,
    transposed: bool,
    gated: bool,
    shape: _WarpSpecialized,
    maps: _Maps,
    bias=None,
    activation=None,
    d_out=None,
    rows=None,
    keep: bool = False,
) -> list[jax.Array]:
    K, experts, width = a.shape[1], b.shape[0], b.shape[1] if transposed else b.shape[2]
    M = len(a if rows is None else rows)
    N, columns = (width // 2, shape.columns // 2) if gated else (width, shape.columns)
    where, layout = maps.of(2 * shape.rows), SWIZZLED.value
    out = jax.ShapeDtypeStruct((M, N if d_out is None else width), a.dtype)
    a_desc = tensor_descriptor(a, (M, K), (shape.rows, shape.block_k), layout) if rows is None else None
    if transposed:
        b_desc = tensor_descriptor(b, (experts * width, K), (columns, shape.block_k), layout)
    else:
        b_desc = tensor_descriptor(b, b.shape, (1, shape.block_k, columns), MATRIX.value)
    d_desc = None if d_out is None else tensor_descriptor(d_out, (M, N), (shape.rows, 64), layout)
    rows_of = (None, None) if rows is None else (a, rows)
    inputs = a_desc, *rows_of, b_desc, d_desc, bias, where.tiles, where.bounds, where.turn
    tiles, work = where.bound * triton.cdiv(N, columns), _work(2 * M * K * width, a, b, d_out, out)
    sizes = {"K": K, "N": N, "E": experts, "BOUND": where.bound, "BLOCK_N": columns}
    how = {"GATED": gated, "TRANSPOSED": transposed, "ACTIVATION": activation}
    outputs = (out, jax.ShapeDtypeStruct((M, width), a.dtype)) if keep else (out,)
    how |= {} if keep else {"kept_ptr": None}
    return _launch(warp_specialized_matmul_kernel, shape, inputs, outputs, tiles, work, **sizes, **how)


def _warp_specialized_contraction(a, b, experts: int, shape: _WarpSpecialized, where: _Map, rows=None) -> jax.Array:
    P, (M, Q) = a.shape[1], b.shape
    layout, out = SWIZZLED.value, jax.ShapeDtypeStruct((experts, P, Q), a.dtype)
    a_desc = tensor_descriptor(a, (M, P), (shape.block_k, shape.rows), layout) if rows is None else None
    b_desc = tensor_descriptor(b, (M, Q), (shape.block_k, shape.columns), layout)
    rows_of = (None, None) if rows is None else (a, rows)
    inputs = a_desc, *rows_of, b_desc, where.bounds, where.turn
    tiles = experts * triton.cdiv(P, 2 * shape.rows) * triton.cdiv(Q, shape.columns)
    sizes = {"P": P, "Q": Q, "E": experts, "BLOCK_Q": shape.columns}
    work = _work(2 * M * P * Q, a, b, out)
    return _launch(warp_specialized_contraction_kernel, shape, inputs, (out,), tiles, work, **sizes)[0]


def _group_sums(x, experts: int, dtype: Any, where: _Map):
    N = x.shape[1]
    block_n = max(16, min(128, triton.next_power_of_2(N)))
    (result,) = triton_launch(
        group_sum_kernel,
        x,
        where.bounds,
        out_shape=(jax.ShapeDtypeStruct((experts, N), dtype),),
        grid=(experts, triton.cdiv(N, block_n)),
        N=N,
        E=experts,
        BLOCK_M=4096 // block_n,
        BLOCK_N=block_n,
    )
    return result


def _activated(z, gated: bool, activation: str) -> jax.Array:
    """Returns the activation of products [M, width]; of a gate and an up projection, multiplied by the latter."""
    M, N = z.shape[0], z.shape[1] // (2 if gated else 1)
    block_n, out = min(1024, triton.next_power_of_2(N)), jax.ShapeDtypeStruct((M, N), z.dtype)
    (result,) = triton_launch(
        products_fwd_kernel,
        z,
        out_shape=(out,),
        grid=(M, triton.cdiv(N, block_n)),
        work=_work(0, z, out),
        N=N,
        GATED=gated,
        ACTIVATION=activation,
        BLOCK_N=block_n,
    )
    return result


def _activated_backward(z, d, gated: bool, activation: str, where: _Map, experts: int) -> jax.Array:
    """Returns the cotangent of products [M, width], given that of their activation [M, N]; undefined in rows of no group."""
    M, N = d.shape
    block_n = min(1024, triton.next_power_of_2(N))
    (result,) = triton_launch(
        products_bwd_kernel,
        z,
        d,
        where.bounds,
        out_shape=(jax.ShapeDtypeStruct(z.shape, z.dtype),),
        grid=(M, triton.cdiv(N, block_n)),
        work=_work(0, z, z, d),
        E=experts,
        N=N,
        GATED=gated,
        ACTIVATION=activation,
        BLOCK_N=block_n,
    )
    return result


# -- the operation ----------------------------------------------------------------------------------------------------


def _forward(lhs, weights, group_sizes, group_offset, rhs_bias, activation, cfg, scale, rows=None):
    b, transposed, gated = weights
    maps = _Maps(group_sizes, group_offset, len(lhs if rows is None else rows), b.shape[0])
    of_columns = scales("columns", scale)
    return _product(lhs, b, transposed, gated, cfg.forward, maps, rhs_bias, activation, scale=of_columns, rows=rows)


def keeps(call, cfg):
    """Returns the products that an activation is of, where reading them takes less time than computing them again."""
    M, _, depth, width, _ = _sizes(call)
    if call.activation is None or call.lhs.dtype.itemsize != 2 or depth < WORTH_KEEPING:
        return {}
    return {"products": jax.ShapeDtypeStruct((M, width), call.lhs.dtype)}


def _forward_keeping(lhs, weights, group_sizes, group_offset, rhs_bias, activation, cfg, rows=None):
    """Returns (the result, the products that the activation is of)."""
    b, transposed, gated = weights
    maps = _Maps(group_sizes, group_offset, len(lhs if rows is None else rows), b.shape[0])
    width = b.shape[1] if transposed else b.shape[2]
    if _specialises(cfg.forward, lhs, b, (lhs.shape[1], width // 2 if gated else width)):
        shape = WARP_SPECIALIZED[cfg.forward.specialised]
        return _warp_specialized_product(
            lhs, b, transposed, gated, shape, maps, rhs_bias, activation, None, rows, keep=True
        )
    products = _product(lhs, b, transposed, False, cfg.forward, maps, rhs_bias, rows=rows)
    return _activated(products, gated, activation), products


def _backward(saved, lhs, weights, group_sizes, group_offset, rhs_bias, activation, cfg, scale, rows=None):
    """Returns (the gradients of lhs and of the bias by name, the cotangent of the products, maps of tiles)."""
    b, transposed, gated = weights
    d = saved.d_out.astype(lhs.dtype)
    maps = _Maps(group_sizes, group_offset, d.shape[0], b.shape[0])
    if "products" in saved:
        # Of the next product, whose map has the bounds of groups too.
        widths = b.shape[1:] if transposed else b.shape[:0:-1]
        where = maps.of(_height(cfg.d_lhs, saved["products"], b, widths))
        d = _activated_backward(saved["products"], d, gated, activation, where, b.shape[0])
    elif activation is not None:
        columns = scales("columns", scale)
        d = _product(lhs, b, transposed, gated, cfg.forward, maps, rhs_bias, activation, d, scale=columns, rows=rows)
    gradients = {"lhs": _product(d, b, not transposed, False, cfg.d_lhs, maps, scale=scales("rows", scale))}
    if rhs_bias is not None:
        sums = _group_sums(d, b.shape[0], rhs_bias.dtype, maps.any())
        gradients["rhs_bias"] = sums.reshape(rhs_bias.shape)
    return gradients, d, maps


# -- configurations ---------------------------------------------------------------------------------------------------


def _power(n: int, most: int) -> int:
    return max(16, min(most, triton.next_power_of_2(n)))


def _sizes(call) -> tuple[int, int, int, int, int]:
    """Returns M, E, D, the columns of a matrix, and those of the result."""
    weights = call.rhs if call.rhs_transposed is None else call.rhs_transposed
    M, E, D, F = (call.dims[n] for n in "MEDF")
    return M, E, D, F * (2 if weights.ndim == 4 else 1), F


class _Shape(NamedTuple):
    """A tile that fits in the registers and the shared memory of a multiprocessor with 16-bit types, and how it is
    computed.

    `speed` is its relative speed without padding, as measured on an H200."""

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int  # per multiprocessor
    speed: float
    band: int = 8


PRODUCTS = (
    # Over 8 rows of tiles 570 TFLOP/s of 128 groups of 1,024 rows, over 16 rows 619; of fewer groups the same.
    _Shape(128, 128, 4, 3, 2, 1.0, band=16),
    _Shape(128, 256, 8, 3, 1, 0.94),
    _Shape(256, 128, 8, 3, 1, 0.9),
    _Shape(64, 256, 4, 4, 1, 0.83),
    _Shape(64, 128, 4, 3, 2, 0.77),
)
CONTRACTIONS = (
    _Shape(128, 128, 4, 3, 2, 1.0),
    _Shape(128, 256, 8, 3, 1, 0.94),
    _Shape(64, 256, 4, 4, 1, 0.82),
    _Shape(64, 128, 4, 3, 2, 0.76),
)
# From this depth, or rows per group, a tile alone on its multiprocessor is worth the latency at its ends.
LONG_PRODUCT, LONG_CONTRACTION = 4096, 2048
LARGE = _Shape(128, 256, 8, 3, 1, 1.06)
# Other candidates for the tuner.
OTHER_BANDS = PRODUCTS[0]._replace(band=8), PRODUCTS[1]._replace(band=16)
DEEPER = _Shape(128, 256, 8, 4, 1, 1.0)


def _tile(
    rows: float,
    columns: int,
    depth: int,
    itemsize: int,
    shapes: Sequence[_Shape],
    *,
    halves: int = 1,
    ragged_rows: bool = True,
    widened: bool = False,
) -> Tile:
    """Returns the tile with the least work for groups with that many rows, counting padding."""
    if itemsize == 4:  # multiplied in true float32, without tensor cores
        deep = 16 if widened else 32  # upcasting holds weights in registers twice
        m, n, k = _power(int(rows), 64), _power(columns, 64 // halves), _power(depth, deep)
        return Tile(m, n, k, 4, 2, 2 * MULTIPROCESSORS, 8, False)

    def cost(shape):
        m, n = shape.rows, shape.columns
        # On average a group ends in the middle of its last tile.
        height = rows + m / 2 if ragged_rows else triton.cdiv(int(rows), m) * m
        return height * triton.cdiv(columns, n // halves) * n / shape.speed

    shape = min(shapes, key=cost)
    m = min(shape.rows, _power(max(1, int(1.25 * rows)), shape.rows))
    n, deep = _power(columns, shape.columns // halves), _power(depth, 64)
    warps = shape.warps if m * n * halves >= 64 * 128 else 4
    # With two accumulators, one loop zeroes one of them at the start of a tile by instructions other than the tensor
    # cores', and the assembler then lets no products overlap (C7515). In the inner one of two loops this does not
    # occur.
    flatten = ragged_rows and halves == 1
    return Tile(m, n, deep, warps, shape.stages, shape.programs * MULTIPROCESSORS, shape.band, flatten)


# Of so many entries or more, a product takes longer than writing and reading its result.
WORTH_KEEPING = 512
# From this mean number of rows per group, a warp-specialized tile is worthwhile: of a gate or of gathered rows, and of other
# products and of contractions. These take .9 to .95 and .6 of the time of plain tiles with 54 rows per group on an H200
# (benchmarks/comparisons/results/grouped_tiles_h200.json), which were timed without bias and activation.
SPECIALISED_ROWS, PLAIN_SPECIALISED_ROWS = 128, 48
# Relative speeds of the wide tile without padding, fitted to the same calls. Of products: where rows of a matrix are whole
# lines of the cache, where they are not, and where they are not and the matrix is read transposed, so that rows of both
# operands are no whole lines. Of contractions: over few and over many rows per group.
WIDE_PRODUCT, WIDE_CONTRACTION = (0.96, 0.89, 1.0), (1.0, 1.05)
LINE = 64  # numbers of 16 bits in a line of the cache


def _specialised(rows: float, columns: int, wide_speed: float, *, ragged_rows: bool) -> str:
    """Returns the name of the warp-specialized tile with the least work, counting padding as `_tile` does."""

    def cost(name):
        shape = WARP_SPECIALIZED[name]
        m = 2 * shape.rows
        height = rows + m / 2 if ragged_rows else triton.cdiv(int(rows), m) * m
        return height * triton.cdiv(columns, shape.columns) * shape.columns / (wide_speed if name == "wide" else 1.0)

    return min(WARP_SPECIALIZED, key=cost)


def _config(call, shape: _Shape | None = None, specialised: str | None = None) -> GroupedMatmulConfig:
    """Returns the configuration of a call; with the given shape of tiles, or with the given warp-specialized tile."""
    M, E, D, width, F = _sizes(call)
    itemsize, rows, transposed = call.lhs.dtype.itemsize, M / max(1, E), call.rhs is None
    first, second = (width, D) if transposed else (D, width)
    widened = "rhs_scale" in call.arguments
    if shape is not None or itemsize != 2 or widened:
        specialised = "none"
    gathers = "rows" in call.arguments  # of a wide tile, half as many rows are copied by instructions in each step

    def few(special):
        return rows < (SPECIALISED_ROWS if special else PLAIN_SPECIALISED_ROWS)

    def product(columns, depth, transposed_rhs, halves=1):
        large = () if transposed_rhs or depth < LONG_PRODUCT else (LARGE,)
        shapes = (shape,) if shape else PRODUCTS + large
        tile = _tile(rows, columns, depth, itemsize, shapes, halves=halves, widened=widened)
        special = halves == 2 or (gathers and columns == F)
        in_lines = (depth if transposed_rhs else columns) % LINE == 0
        speed = WIDE_PRODUCT[0 if in_lines else 1 + transposed_rhs]
        best = "wide" if special else _specialised(rows, columns, speed, ragged_rows=True)
        return replace(tile, specialised=specialised or ("none" if few(special) else best))

    long = rows >= LONG_CONTRACTION
    shapes = (shape,) if shape else CONTRACTIONS + ((LARGE,) if long else ())
    contraction = _tile(first, second, int(max(1, rows)), itemsize, shapes, ragged_rows=False)
    if gathers:
        best = "wide"
    else:
        best = _specialised(first, second, WIDE_CONTRACTION[long], ragged_rows=False)
    return GroupedMatmulConfig(
        product(F, D, transposed, halves=width // F),
        product(D, width, not transposed),
        replace(contraction, specialised=specialised or ("none" if few(gathers) else best)),
    )


def heuristic(call, platform):
    return _config(call)


def candidates(call):
    if call.lhs.dtype.itemsize == 4:
        return [_config(call)]
    plain = [_config(call, shape) for shape in (*PRODUCTS, *OTHER_BANDS, DEEPER)]
    return list(dict.fromkeys([_config(call), *(_config(call, specialised=s) for s in WARP_SPECIALIZED), *plain]))


register(
    _forward,
    _backward,
    _contraction,
    gathers=True,
    keeping=_forward_keeping,
    keeps=keeps,
    platforms={"cuda"},
    dtypes={"float32", "bfloat16", "float16"},
    heuristic=heuristic,
    candidates=candidates,
)
