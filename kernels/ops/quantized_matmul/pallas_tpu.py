"""Products with quantised weights on TPUs: packed words are read into VMEM, and unpacked there, a block at a time.

`PERIOD` codes of a column lie in `WORDS` words in the same way everywhere. So the i-th codes of all periods are unpacked by one
shift, and multiplied by every PERIOD-th column of x from the i-th on, which XLA brings side by side.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.engines.matmul.formats import FORMATS, FP4, NF4, RUN, exponents
from kernels.framework.work import Work, nbytes
from kernels.ops.quantized_matmul.contract import QuantizedMatmulConfig, op
from kernels.toolchains.pallas import pallas_launch

LANES, SUBLANES = 128, 8
# Memory for a kernel's blocks and temporaries. The smallest default limit of a chip is 16 MiB.
VMEM_BUDGET = 10 * 2**20
MOST_M, MOST_D, MOST_F = 256, 1024, 512
# Groups of a block that its periods may cross: each is a selection, unrolled.
MOST_CROSSED = 16


def _period(bits: int) -> tuple[int, int]:
    """Returns how many codes lie in how many words in the same way everywhere."""
    return (RUN, bits) if 32 % bits else (32 // bits, 1)


def _values(codes, mode: str):
    """Returns the float32 numbers that int32 codes stand for, before they are scaled."""
    if mode == "affine":
        return codes.astype(jnp.float32)
    if mode == "mxfp8":
        exponent, mantissa = (codes >> 3) & 15, codes & 7
        normal = lax.bitcast_convert_type(((exponent + 120) << 23) | (mantissa << 20), jnp.float32)
        magnitude = jnp.where(exponent == 0, mantissa.astype(jnp.float32) * 2.0**-9, normal)
        magnitude = jnp.where(codes & 127 == 127, jnp.nan, magnitude)
        return jnp.where(codes >= 128, -magnitude, magnitude)
    table = NF4 if mode == "nf4" else FP4
    values = jnp.full(codes.shape, table[0], jnp.float32)
    for code in range(1, len(table)):
        values = jnp.where(codes == code, jnp.float32(table[code]), values)
    return values


def _spread(x, rows: int, first: int, period: int, group_size: int):
    """Returns [rows, F] from [groups, F]: for each period, what belongs to the group of its code `first`."""
    groups, F = x.shape
    if groups == 1:
        return jnp.broadcast_to(x, (rows, F))
    if group_size % period == 0:
        return jnp.broadcast_to(x[:, None, :], (groups, rows // groups, F)).reshape(rows, F)
    row = lax.broadcasted_iota(jnp.int32, (rows, F), 0) * period + first
    values = jnp.zeros((rows, F), x.dtype)
    for group in range(groups):
        values = jnp.where(row >= group * group_size, x[group : group + 1], values)
    return values


def _weights(w_ref, s_ref, b_ref, dtype, *, mode, bits, group_size):
    """Yields, for each place in a period, the weights [periods, F] of the codes there."""
    period, words = _period(bits)
    rows = w_ref.shape[0] // words

    def word(i):
        return w_ref[...] if words == 1 else w_ref[pl.ds(i, rows, stride=words), :]

    for i in range(period):
        at, shift = divmod(i * bits, 32)
        codes = lax.shift_right_logical(word(at), shift)
        if shift + bits > 32:
            codes |= word(at + 1) << (32 - shift)
        values = _values(codes & ((1 << bits) - 1), mode) * _spread(s_ref[...], rows, i, period, group_size)
        if b_ref is not None:
            values += _spread(b_ref[...], rows, i, period, group_size)
        yield values.astype(dtype)


def _dot(a, b, contracting):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = ((contracting[:1], contracting[1:]), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def quantized_matmul_fwd_kernel(x_ref, w_ref, s_ref, *refs, affine, how):
    """Operands: x [PERIOD, rows, periods], words, scales and perhaps biases; the result; its float32 sum."""
    b_ref, out_ref, total = (refs[0] if affine else None), *refs[-2:]
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    for i, weights in enumerate(_weights(w_ref, s_ref, b_ref, x_ref.dtype, **how)):
        total[...] += _dot(x_ref[i], weights, (1, 0))

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

    def inside(x):  # past the last column there may be anything, NaN too
        columns = lax.broadcasted_iota(jnp.int32, x.shape, 1) + step * d_ref.shape[1]
        return x if F % d_ref.shape[1] == 0 else jnp.where(columns < F, x.astype(jnp.float32), 0.0).astype(x.dtype)

    d = inside(d_ref[...])
    for i, weights in enumerate(_weights(w_ref, s_ref, b_ref, d.dtype, **how)):
        total[i] += _dot(d, inside(weights), (1, 1))

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        dx_ref[...] = total[...].astype(dx_ref.dtype)


def _unit(bits: int, group_size: int) -> int:
    """Returns what a block of D is a multiple of, unless it is all of D: whole tiles of scales, and of columns of x."""
    return math.lcm(SUBLANES * group_size, LANES * _period(bits)[0])


def _vmem(m: int, f: int, d: int, bits: int, group_size: int, itemsize: int) -> int:
    """Returns the bytes that a program of either direction may need."""
    rows = d // _period(bits)[0]
    scales = max(SUBLANES, d // group_size) * f * 4
    # Blocks twice (double buffering): x or dx with its sum, words, scales and biases, the result or its cotangent and its sum.
    blocks = m * d * (2 * itemsize + 4) + 2 * d * bits // 8 * f + 4 * scales + m * f * (2 * itemsize + 4)
    # Codes, what they stand for, their scales and biases, and the weights.
    return blocks + rows * f * (6 * 4)


def _blocks(call) -> tuple[int, int, int]:
    """Returns the largest (block_m, block_f, block_d) that fits, or zeros."""
    D, F, itemsize = call.dims["D"], call.dims["F"], call.x.dtype.itemsize
    M, unit, (period, words) = call.x.size // D, _unit(call.bits, call.group_size), _period(call.bits)
    # A strided load is of 128 columns; and a program of 16 codes a word and more is long enough as it is.
    most_f = LANES if words > 1 or period > 8 else MOST_F
    depths = [d for d in range(unit, max(unit, MOST_D) + 1, unit) if D % d == 0][::-1] or [D]
    for d in depths:
        for f in sorted({most_f, min(most_f, 256), LANES}, reverse=True):
            for m in (MOST_M, 128, 64, 32, 16, 8):
                block = min(m, M), min(f, F), d
                if _vmem(*block, call.bits, call.group_size, itemsize) <= VMEM_BUDGET:
                    return block
    return 0, 0, 0


def heuristic(call, platform):
    return QuantizedMatmulConfig(*_blocks(call))


def rejects(call):
    if 0 in call.x.shape:
        return "x has no rows"
    (_, _, block_d), period = _blocks(call), _period(call.bits)[0]
    if call.group_size % period and block_d > MOST_CROSSED * call.group_size:
        return f"groups of {call.group_size} are no multiple of the {period} codes that lie alike in words of {call.bits} bits"
    if not block_d:
        return (
            f"D = {call.dims['D']} has no part of whole tiles of groups of {call.group_size}, and all of it does not fit in "
            f"the {VMEM_BUDGET >> 20} MiB of VMEM of a program"
        )
    return None


def _arranged(x, period: int):
    """Returns [PERIOD, M, D / PERIOD] from [M, D]: the i-th of each PERIOD columns, for each i."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, period), 2, 0)


def _launch(kernel, x, w, scales, biases, out, cfg, sizes, by_columns: bool, name: str, how):
    """Returns the result of either direction: the last dim of the grid, which is summed over, is that of D or of F."""
    (M, D, F), (period, _) = sizes, _period(how["bits"])
    m, f, d = min(cfg.block_m, M), min(cfg.block_f, F), min(cfg.block_d, D)
    scales = exponents(scales) if FORMATS[how["mode"]].exponents else scales.astype(jnp.float32)
    packed = [lax.bitcast_convert_type(w, jnp.int32), scales]
    packed += [] if biases is None else [biases.astype(jnp.float32)]

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
    arranged = _arranged(rows, _period(bits)[0])
    name = "quantized_matmul_fwd_kernel"
    kernel = quantized_matmul_fwd_kernel
    result = _launch(kernel, arranged, w, scales, biases, out, cfg, (*rows.shape, F), False, name, how)
    return result.reshape(*x.shape[:-1], F)


def backward(saved, x, w, scales, biases, mode, bits, group_size, cfg):
    D, F, (period, _) = x.shape[-1], w.shape[1], _period(bits)
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
