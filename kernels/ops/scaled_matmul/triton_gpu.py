"""Launches the kernels of scaled_matmul on NVIDIA GPUs: on Hopper its own, elsewhere the one for any GPU."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import triton
from jax import lax

from kernels.framework.target import MULTIPROCESSORS
from kernels.framework.work import Work, nbytes
from kernels.ops.scaled_matmul.contract import ScaledMatmulConfig, op
from kernels.ops.scaled_matmul.formats import step_of
from kernels.ops.scaled_matmul.gluon_kernels import NARROW, warp_specialized_scaled_kernel
from kernels.ops.scaled_matmul.grouped import check_scales, grouped_op, tiles_of
from kernels.ops.scaled_matmul.quantize_kernels import (
    activate_both_ways_kernel,
    activation_cotangents_kernel,
    largest_both_ways_kernel,
    quantize_both_ways_kernel,
    quantize_rows_both_ways_kernel,
)
from kernels.ops.scaled_matmul.quantizing import (
    activate_both_ways,
    activate_op,
    activation_cotangents,
    both_ways_op,
    cotangents_op,
    norm_both_ways_op,
    normalize_both_ways,
    quantize_both_ways,
    rstd_of,
    work_of_activation,
    work_of_cotangents,
    work_of_norm,
    work_of_quantisation,
)
from kernels.ops.scaled_matmul.quantizing_rows import (
    activate_rows,
    activate_rows_op,
    activated_row_cotangents,
    quantize_rows,
    row_cotangents_op,
    rows_op,
    work_of_activated,
    work_of_row_cotangents,
    work_of_rows,
)
from kernels.ops.scaled_matmul.row_kernels import (
    activate_rows_kernel,
    activate_with_largest_kernel,
    activated_row_cotangents_kernel,
    cotangents_with_largest_kernel,
    quantize_rows_kernel,
)
from kernels.ops.scaled_matmul.triton_kernels import scaled_matmul_kernel
from kernels.ops.scaled_matmul.xla import grouped as grouped_by_xla
from kernels.toolchains.triton import compute_capability, tensor_descriptor, triton_launch

TALL_ROWS = 64  # rows of a block of the kernels of rows
DEEP = 128  # entries of D per step on Hopper: as many as a row of shared memory has bytes
# Registers per multiplying thread, and per other thread, by whether sums stay in the tensor cores: warpgroups share 64,512
REGISTERS = {True: (208, 88), False: (216, 72)}


def _specialises(a, b, a_scale, b_scale, dtype) -> bool:
    """Returns whether Hopper's kernel computes a call: with one scale for rows or for all, or for blocks of 128 as in
    DeepSeek-V3, and rows that TMA can read."""
    (M, D), F = a.shape, b.shape[0]
    floats = a_scale.dtype == b_scale.dtype == jnp.float32 and jnp.dtype(dtype).itemsize == 2
    if not floats or D % 16 or F % 8 or compute_capability() != 90:
        return False
    if a_scale.shape[1] == b_scale.shape[1] == 1:
        return a_scale.shape[0] in (1, M) and b_scale.shape[0] in (1, F)
    blocks = D == DEEP * a_scale.shape[1] == DEEP * b_scale.shape[1]
    return blocks and a_scale.shape[0] == M and (b_scale.shape[0] == F or F == 128 * b_scale.shape[0])


def _on_hopper(a, b, a_scale, b_scale, dtype, fast, cfg, tiles=None, bound=0, matrices=1) -> jax.Array:
    """Returns the product with b [F, D]; or, of `tiles` of groups of rows, with as many matrices [matrices * F, D]."""
    (M, D), F = a.shape, b.shape[0] // matrices
    blocks = a_scale.shape[1] > 1
    a_rows, b_rows = a_scale.shape[0] == M, b_scale.shape[0] == matrices * F
    rows, (multiplying, others) = cfg.block_m // 2, REGISTERS[fast]
    out = jax.ShapeDtypeStruct((M, F), dtype)
    scales = (a_scale.T, b_scale.T if b_rows else b_scale) if blocks else (a_scale.reshape(-1), b_scale.reshape(-1))
    (result,) = triton_launch(
        warp_specialized_scaled_kernel,
        tensor_descriptor(a, (M, D), (rows, DEEP), NARROW.value),
        tensor_descriptor(b, (matrices * F, D), (cfg.block_n, DEEP), NARROW.value),
        *scales,
        tiles,
        out_shape=(out,),
        grid=(min(MULTIPROCESSORS, (bound or triton.cdiv(M, cfg.block_m)) * triton.cdiv(F, cfg.block_n)),),
        num_warps=4,
        work=Work(2 * M * D * F, nbytes(a, b, a_scale, b_scale, out)),
        M=M,
        N=F,
        K=D,
        FAST=fast,
        BLOCKS=blocks,
        A_ROWS=a_rows,
        B_ROWS=b_rows,
        BOUND=bound,
        BAND=cfg.band,
        ROWS=rows,
        BLOCK_N=cfg.block_n,
        BLOCK_K=DEEP,
        STAGES=cfg.num_stages,
        BUFFERS=cfg.num_buffers,
        MULTIPLYING=multiplying,
        OTHERS=others,
    )
    return result


def forward(a, b, a_scale, b_scale, dtype, fast_accumulation, cfg):
    if _specialises(a, b, a_scale, b_scale, dtype):
        fast = fast_accumulation and a_scale.shape[1] == 1
        return _on_hopper(a, b, a_scale, b_scale, dtype, fast, cfg)
    (M, D), F = a.shape, b.shape[0]
    step = step_of(D, a_scale, b_scale)
    out = jax.ShapeDtypeStruct((M, F), dtype)
    sides = zip((cfg.block_m, cfg.block_n), (M, F), strict=True)
    block_m, block_n = (min(side, max(16, min(128, triton.next_power_of_2(n)))) for side, n in sides)
    (result,) = triton_launch(
        scaled_matmul_kernel,
        lax.bitcast_convert_type(a, jnp.uint8),
        lax.bitcast_convert_type(b, jnp.uint8),
        a_scale,
        b_scale,
        out_shape=(out,),
        grid=(triton.cdiv(M, block_m) * triton.cdiv(F, block_n),),
        num_warps=max(cfg.num_warps, 8) if block_m * block_n >= 128 * 128 else cfg.num_warps,
        num_stages=min(cfg.num_stages, 3),
        work=Work(2 * M * D * F, nbytes(a, b, a_scale, b_scale, out)),
        M=M,
        N=F,
        K=D,
        A_CODE=str(a.dtype),
        B_CODE=str(b.dtype),
        A_ROWS=a_scale.shape[0],
        A_BLOCKS=a_scale.shape[1],
        B_ROWS=b_scale.shape[0],
        B_BLOCKS=b_scale.shape[1],
        EXPONENTS=a_scale.dtype == jnp.uint8,
        STEP=step,
        BAND=cfg.band,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=max(16, min(64, triton.next_power_of_2(step))),
    )
    return result


def rejects(call):
    if call.a_scale.dtype != call.b_scale.dtype:
        return f"scales of 'a' are {call.a_scale.dtype} and those of 'b' {call.b_scale.dtype}"
    if str(call.b.dtype) not in ("float8_e4m3fn", "float8_e5m2"):
        return f"'b' is {call.b.dtype}"
    return None


# -- configurations ---------------------------------------------------------------------------------------------------

TALL = ScaledMatmulConfig(block_m=256, block_n=128, num_stages=4, num_buffers=1, num_warps=4, band=8)
WIDE = replace(TALL, block_m=128, block_n=256, num_buffers=2)
SQUARE = replace(WIDE, block_n=128, num_stages=6, band=16)
NARROW_TILE = replace(SQUARE, block_n=64, num_stages=7, num_buffers=1)
# With room for all sums of a tile a warpgroup never waits for a store. At 8192 x 8192 x 8192 1,147 TFLOP/s with blocks' scales
# and 1,200 of rows; with room for half of them, in 3 and 4 stages, 1,116 and 1,183.
ROOMY = replace(TALL, num_stages=3, num_buffers=2)
# Scales of blocks take a part of each stage.
SHALLOW, SQUARE_BLOCKS = replace(TALL, num_stages=3), replace(SQUARE, num_stages=5)


def candidates(call):
    """Returns the tiles whose sums fit into registers, the one to take without measurements first."""
    blocks, D = call.a_scale.shape[1] > 1, call.dims["D"]
    if blocks and call.b_scale.shape[0] == call.dims["F"]:
        return [SQUARE_BLOCKS]  # scales of each row of b, one for each column of the tile, are in registers too
    # How fast each is beside the first, of an H200: small tiles read more from the L2 cache, and still more where rows do not
    # begin at its lines, or are long powers of 2.
    square = 0.8 if D % 128 else 0.84 if blocks and D > 4096 else 0.96
    if blocks:
        speeds = {ROOMY: 1.0, SHALLOW: 0.97, SQUARE_BLOCKS: square, replace(NARROW_TILE, num_stages=6): 0.6}
    elif call.fast_accumulation:
        wide = 1.03 if D % 128 else 0.98
        speeds = {TALL: 1.0, WIDE: wide, replace(WIDE, num_stages=3, num_buffers=4): wide - 0.01, ROOMY: 0.95}
        speeds |= {SQUARE: square, NARROW_TILE: 0.63}
    else:
        speeds = {ROOMY: 1.0, TALL: 0.99, SQUARE: square, NARROW_TILE: 0.66}
    return sorted(speeds, key=lambda cfg: _time(call, cfg) / speeds[cfg])


def _time(call, cfg):
    """Returns how many entries of the result the busiest multiprocessor computes, those past its edges included."""
    tiles = triton.cdiv(call.dims["M"], cfg.block_m) * triton.cdiv(call.dims["F"], cfg.block_n)
    return triton.cdiv(tiles, MULTIPROCESSORS) * cfg.block_m * cfg.block_n


def heuristic(call, platform):
    return candidates(call)[0]


op.register(
    forward,
    platforms={"cuda"},
    dtypes={"float8_e4m3fn", "float8_e5m2"},
    rejects=rejects,
    heuristic=heuristic,
    candidates=candidates,
)


# -- groups of rows ----------------------------------------------------------------------------------------------------


def grouped(a, b, a_scale, b_scale, group_sizes, dtype, cfg):
    (M, D), (E, F, _) = a.shape, b.shape
    check_scales(a, b, a_scale, b_scale)
    of_rows, of_blocks = ((1,), (F, 1)), ((D // 128,), (F // 128, D // 128))
    known = (a_scale.shape[1:], b_scale.shape[1:]) in (of_rows, of_blocks) and D % 128 == F % 128 == 0
    if compute_capability() != 90 or not known or a_scale.dtype != jnp.float32 or b_scale.dtype != jnp.float32:
        return grouped_by_xla(a, b, a_scale, b_scale, group_sizes, dtype)
    tiles, bound = tiles_of(group_sizes, M, cfg.block_m)
    scales = a_scale, b_scale.reshape(-1, b_scale.shape[2])
    return _on_hopper(a, b.reshape(E * F, D), *scales, dtype, False, cfg, tiles, bound, E)


def grouped_rejects(call):
    dtype = call.arguments["dtype"]
    if jnp.dtype(dtype).itemsize != 2:
        return f"it writes 16 bits, and 'dtype' is {dtype}"
    return "an array has no elements" if 0 in (*call.a.shape, *call.b.shape) else None


def grouped_candidates(call):
    tall = [ROOMY, SHALLOW if call.a_scale.shape[1] > 1 else TALL]
    square = SQUARE_BLOCKS if call.a_scale.shape[1] > 1 else SQUARE
    return [square, *tall] if call.dims["M"] < 192 * call.dims["E"] else [*tall, square]


grouped_op.register(
    grouped,
    platforms={"cuda"},
    dtypes={"float8_e4m3fn", "float8_e5m2"},
    rejects=grouped_rejects,
    heuristic=lambda call, platform: grouped_candidates(call)[0],
    candidates=grouped_candidates,
)

# -- quantisation along both dims ------------------------------------------------------------------------------------------


def _operands(x, rows, turned_rows, entries=128, matrices=1):
    """Returns the shapes of an array's operands, their values as bytes."""
    (M, D), one = x.shape, entries or x.shape[1]
    return (
        jax.ShapeDtypeStruct((M, D), jnp.uint8),
        jax.ShapeDtypeStruct((M // rows, D // one), jnp.float32),
        jax.ShapeDtypeStruct((matrices * D, M // matrices), jnp.uint8),
        jax.ShapeDtypeStruct((matrices * D // turned_rows, M // matrices // entries if entries else 1), jnp.float32),
    )


def _launch(kernel, arrays, out_shape, cfg, work, dtype="float8_e4m3fn", matrices=1, **named):
    M, D = arrays[0].shape
    # One result: two programs on a multiprocessor, so that one loads while the other computes. Two take all of its registers.
    most = min(255, 1024 * max(1, len(out_shape) // 4) // cfg.num_warps)
    how = {"num_warps": cfg.num_warps, "max_registers": most, "work": work, "grid": (M // 128 * (D // 128),)}
    results = triton_launch(kernel, *arrays, out_shape=out_shape, M=M // matrices, **how, **named)
    return tuple(lax.bitcast_convert_type(y, jnp.dtype(dtype)) if y.dtype == jnp.uint8 else y for y in results)


def _converts() -> bool:
    """Returns whether a GPU converts to 8-bit floats."""
    return compute_capability() >= 89


def _parts(x, tall):
    """Returns the shapes of the largest magnitudes of each block, 128 columns wide: of its rows, and of its columns."""
    M, D = x.shape
    return jax.ShapeDtypeStruct((D // 128, M), jnp.int32), jax.ShapeDtypeStruct((M // tall, D), jnp.int32)


def _quantised_rows(x, parts, cfg, dtype="float8_e4m3fn", matrices=1, norm=(None, None)):
    """Returns the operands of x with one scale for each whole row, from the bits of the largest magnitudes of its parts; or
    those of its norm (weight, rstd)."""
    (of_rows, of_columns), D = parts, x.shape[1]
    arrays = x, *norm, jnp.max(of_rows, 0), jnp.max(of_columns.reshape(matrices, -1, D), 1).reshape(-1)
    out, how = _operands(x, 1, 1, None, matrices), {"matrices": matrices, "E": matrices, "D": D}
    work = Work(2 * x.size, nbytes(*arrays, *out))
    return _launch(quantize_rows_both_ways_kernel, arrays, out, cfg, work, dtype, E5M2=dtype == "float8_e5m2", **how)


def _with_largest(x, cfg, dtype="float8_e4m3fn", matrices=1, norm=(None, None)):
    parts = _parts(x, 128)
    work = Work(2 * x.size, nbytes(x, *norm, *parts))
    most = _launch(largest_both_ways_kernel, (x, *norm), parts, cfg, work, D=x.shape[1])
    return _quantised_rows(x, most, cfg, dtype, matrices, norm)


def both_ways(x, rows, turned_rows, entries, matrices, dtype, cfg):
    options = {"rows": rows, "turned_rows": turned_rows, "entries": entries, "matrices": matrices, "dtype": dtype}
    if not _converts():
        return quantize_both_ways(x, **options)
    if entries is None:
        return _with_largest(x, cfg, dtype, matrices)
    out, work = _operands(x, rows, turned_rows, 128, matrices), work_of_quantisation(both_ways_op.bind(x, **options))[0]
    how = {"matrices": matrices, "E": matrices, "D": x.shape[1], "E5M2": dtype == "float8_e5m2"}
    how |= {"ROWS": rows, "TURNED_ROWS": turned_rows}
    return _launch(quantize_both_ways_kernel, (x, None, None), out, cfg, work, dtype, **how)


def normalised(x, weight, eps, entries, cfg):
    if not _converts():
        return normalize_both_ways(x, weight, eps=eps, entries=entries)
    rstd = rstd_of(x, eps)
    if entries is None:
        return *_with_largest(x, cfg, norm=(weight, rstd)), rstd
    out, how = _operands(x, 1, 1), {"E": 1, "D": x.shape[1], "ROWS": 1, "TURNED_ROWS": 1, "E5M2": False}
    work = work_of_norm(norm_both_ways_op.bind(x, weight))[0]
    return *_launch(quantize_both_ways_kernel, (x, weight, rstd), out, cfg, work, **how), rstd


def activate(gate, up, activation, entries, cfg):
    if not _converts():
        return activate_both_ways(gate, up, activation=activation, entries=entries)
    F = gate.shape[1]
    if entries is None:
        out = jax.ShapeDtypeStruct(gate.shape, gate.dtype), *_parts(gate, TALL_ROWS)
        work = Work(8 * gate.size, nbytes(gate, up, *out))
        product, *parts = _launch_rows(
            activate_with_largest_kernel, (gate, up), out, F, cfg, work, F=F, NAME=activation
        )
        return _quantised_rows(product, parts, cfg)
    out, work = _operands(gate, 1, 1), work_of_activation(activate_op.bind(gate, up))[0]
    return _launch(activate_both_ways_kernel, (gate, up), out, cfg, work, F=F, NAME=activation)


def cotangents(gate, up, d, activation, entries, cfg):
    if not _converts():
        return activation_cotangents(gate, up, d, activation=activation, entries=entries)
    arrays, F = (gate, up, d), gate.shape[1]
    if entries is None:
        out = 2 * (jax.ShapeDtypeStruct(gate.shape, gate.dtype), *_parts(gate, TALL_ROWS))
        work = Work(18 * gate.size, nbytes(*arrays, *out))
        made = _launch_rows(cotangents_with_largest_kernel, arrays, out, F, cfg, work, F=F, NAME=activation)
        return *_quantised_rows(made[0], made[1:3], cfg), *_quantised_rows(made[3], made[4:], cfg)
    out, work = 2 * _operands(gate, 1, 128), work_of_cotangents(cotangents_op.bind(*arrays))[0]
    return _launch(activation_cotangents_kernel, arrays, out, cfg, work, F=F, NAME=activation)


# -- of rows alone --------------------------------------------------------------------------------------------------------


def _launch_rows(kernel, arrays, out_shape, columns, cfg, work, **named):
    """`columns`: of the blocks that programs share out."""
    M = arrays[0].shape[0]
    how = {"num_warps": cfg.num_warps, "work": work, "grid": (triton.cdiv(M, TALL_ROWS) * (columns // 128),)}
    results = triton_launch(kernel, *arrays, out_shape=out_shape, M=M, TALL=TALL_ROWS, **how, **named)
    return tuple(lax.bitcast_convert_type(y, jnp.float8_e4m3fn) if y.dtype == jnp.uint8 else y for y in results)


def _row_operand(M, D):
    return jax.ShapeDtypeStruct((M, D), jnp.uint8), jax.ShapeDtypeStruct((M, D // 128), jnp.float32)


def quantise_rows(x, cfg):
    if not _converts():
        return quantize_rows(x)
    work, D = work_of_rows(rows_op.bind(x))[0], x.shape[1]
    return _launch_rows(quantize_rows_kernel, (x,), _row_operand(*x.shape), D, cfg, work, D=D)


def activate_pairs(pair, activation, cfg):
    if not _converts():
        return activate_rows(pair, activation=activation)
    (M, _, F), work = pair.shape, work_of_activated(activate_rows_op.bind(pair))[0]
    return _launch_rows(activate_rows_kernel, (pair,), _row_operand(M, F), F, cfg, work, F=F, NAME=activation)


def pair_cotangents(pair, d, activation, cfg):
    if not _converts():
        return activated_row_cotangents(pair, d, activation=activation)
    (M, _, F), work = pair.shape, work_of_row_cotangents(row_cotangents_op.bind(pair, d))[0]
    out = jax.ShapeDtypeStruct(pair.shape, pair.dtype), *_row_operand(M, 2 * F), jax.ShapeDtypeStruct(d.shape, d.dtype)
    return _launch_rows(activated_row_cotangents_kernel, (pair, d), out, F, cfg, work, F=F, NAME=activation)


# The fastest on an H200 of 4, 8 and 16 for [32768, 8192], with scales of blocks and of whole rows; of cotangents before their
# kernel moved words.
for _op, _function, _warps, _whole in (
    (both_ways_op, both_ways, 8, 8),
    (norm_both_ways_op, normalised, 8, 8),
    (activate_op, activate, 16, 8),
    (cotangents_op, cotangents, 16, 8),
    (rows_op, quantise_rows, 4, None),
    (activate_rows_op, activate_pairs, 4, None),
    (row_cotangents_op, pair_cotangents, 8, None),
):
    _op.register(
        _function,
        platforms={"cuda"},
        dtypes={"float32", "bfloat16", "float16"},
        heuristic=lambda call, platform, warps=_warps, whole=_whole: ScaledMatmulConfig(
            num_warps=warps if call.arguments.get("entries", 128) else whole
        ),
        candidates=lambda call: [ScaledMatmulConfig(num_warps=n) for n in (8, 16, 4)],
    )
