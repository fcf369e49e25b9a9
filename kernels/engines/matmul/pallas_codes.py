"""Numbers of a few bits in Pallas kernels for TPUs: words are read into VMEM as they are, and unpacked there by blocks.

`PERIOD` codes of a column lie in `WORDS` words in the same way everywhere. So the i-th codes of all periods are unpacked by one
shift, and multiplied by every PERIOD-th column of x from the i-th on, which XLA brings side by side (`arranged`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.engines.matmul.formats import NF4, RUN

LANES, SUBLANES = 128, 8
# Memory for a kernel's blocks and temporaries. The smallest default limit of a chip is 16 MiB.
VMEM_BUDGET = 10 * 2**20
MOST_D, MOST_F = 1024, 512
# Groups of a block that its periods may cross: each is a selection, unrolled.
MOST_CROSSED = 16


def period_of(bits: int) -> tuple[int, int]:
    """Returns how many codes lie in how many words in the same way everywhere."""
    return (RUN, bits) if 32 % bits else (32 // bits, 1)


def arranged(x: jax.Array, period: int) -> jax.Array:
    """Returns [PERIOD, M, D / PERIOD] from [M, D]: the i-th of each PERIOD columns, for each i."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, period), 2, 0)


def packed_arrays(w: jax.Array, scales: jax.Array, biases: jax.Array | None) -> list[jax.Array]:
    """Returns the arrays that a kernel reads of packed weights, as they are: XLA would copy what it converts."""
    return [w, scales, *([] if biases is None else [biases])]


# -- in a kernel ------------------------------------------------------------------------------------------------------


def _values(codes, mode: str):
    """Returns the float32 numbers that int32 codes stand for, before they are scaled."""
    if mode == "affine":
        return codes.astype(jnp.float32)
    if mode == "nf4":  # a choice between halves of the table for each bit of a code, the lowest first
        values = [jnp.float32(x) for x in NF4]
        for bit in range(4):
            one = codes & (1 << bit) != 0
            values = [jnp.where(one, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
        return values[0]
    mantissa_bits, bias = (3, 7) if mode == "mxfp8" else (1, 1)
    magnitude = codes & ((16 << mantissa_bits) - 1 if mode == "mxfp8" else 7)
    subnormal = magnitude.astype(jnp.float32) * 2.0 ** (1 - bias - mantissa_bits)
    normal = lax.bitcast_convert_type(
        (magnitude + ((127 - bias) << mantissa_bits)) << (23 - mantissa_bits), jnp.float32
    )
    values = jnp.where(magnitude < 1 << mantissa_bits, subnormal, normal)
    if mode == "mxfp8":
        values = jnp.where(magnitude == 127, jnp.nan, values)
    return jnp.where(codes != magnitude, -values, values)


def _floats(x):
    """Returns scales or biases as float32; uint8 ones are exponents, as in `formats.exponents`, but that 2 ** -127 is zero."""
    if x.dtype != jnp.uint8:
        return x.astype(jnp.float32)
    codes = x.astype(jnp.int32)
    return jnp.where(codes == 255, jnp.nan, lax.bitcast_convert_type(codes << 23, jnp.float32))


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


def unpacked_weights(w_ref, s_ref, b_ref, dtype, *, mode: str, bits: int, group_size: int) -> Iterator[Any]:
    """Yields, for each place in a period, the weights [periods, F] of the codes there, of references [rows, F]."""
    period, words = period_of(bits)
    rows = w_ref.shape[0] // words
    factors = [_floats(s_ref[...])] if b_ref is None else [_floats(s_ref[...]), _floats(b_ref[...])]
    alike = group_size % period == 0  # whatever the place: spread once, since groups of few rows take shuffles
    factors = [_spread(x, rows, 0, period, group_size) for x in factors] if alike else factors

    def word(i):
        x = w_ref[...] if words == 1 else w_ref[pl.ds(i, rows, stride=words), :]
        return lax.bitcast_convert_type(x, jnp.int32)

    for i in range(period):
        at, shift = divmod(i * bits, 32)
        codes = lax.shift_right_logical(word(at), shift)
        if shift + bits > 32:
            codes |= word(at + 1) << (32 - shift)
        here = factors if alike else [_spread(x, rows, i, period, group_size) for x in factors]
        values = _values(codes & ((1 << bits) - 1), mode) * here[0]
        yield (values + here[1] if len(here) > 1 else values).astype(dtype)


def product(x_ref, weights: Iterator[Any]):
    """Returns the float32 sum of products of x [PERIOD, rows, periods] with the weights [periods, F] of each place: one product
    where the places fill whole tiles, since a sum of several would go to memory and back."""
    pieces = list(weights)
    if x_ref.shape[2] % LANES:
        return sum(dot(x_ref[i], piece, (1, 0)) for i, piece in enumerate(pieces))
    x = jnp.concatenate([x_ref[i] for i in range(len(pieces))], axis=1)
    return dot(x, jnp.concatenate(pieces), (1, 0))


def dot(a, b, contracting: tuple[int, int]):
    """Returns the product of two tiles, summed over a dim of each in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = ((contracting[:1], contracting[1:]), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def inside(x, first: Any, end: int, whole: bool):
    """Returns x with zeros in the columns past `end`, counted from `first`, where there may be anything, NaN too; x itself if
    its columns are `whole`."""
    columns = lax.broadcasted_iota(jnp.int32, x.shape, 1) + first
    return x if whole else jnp.where(columns < end, x.astype(jnp.float32), 0.0).astype(x.dtype)


# -- sizes of blocks --------------------------------------------------------------------------------------------------


def _unit(bits: int, group_size: int) -> int:
    """Returns what a block of D is a multiple of, unless it is all of D: whole tiles of scales, and of columns of x."""
    return math.lcm(SUBLANES * group_size, LANES * period_of(bits)[0])


def _vmem(m: int, f: int, d: int, bits: int, group_size: int, itemsize: int) -> int:
    """Returns the bytes that a program of either direction may need."""
    rows = d // period_of(bits)[0]
    scales = max(SUBLANES, d // group_size) * f * 4
    # Blocks twice (double buffering): x or dx with its sum, words, scales and biases, the result or its cotangent and its sum.
    blocks = m * d * (2 * itemsize + 4) + 2 * d * bits // 8 * f + 4 * scales + m * f * (2 * itemsize + 4)
    # Codes, what they stand for, their scales and biases; and the weights.
    return blocks + rows * f * (6 * 4) + d * f * itemsize


def blocks_of(
    rows: int, D: int, F: int, bits: int, group_size: int, itemsize: int, most_m: int
) -> tuple[int, int, int]:
    """Returns the largest blocks (of at most `most_m` rows, of F, of D) that fit into VMEM, or zeros."""
    unit, (period, words) = _unit(bits, group_size), period_of(bits)
    # A strided load is of 128 columns; and a program of 16 codes a word and more is long enough as it is.
    most_f = LANES if words > 1 or period > 8 else MOST_F
    depths = [d for d in range(unit, max(unit, MOST_D) + 1, unit) if D % d == 0][::-1] or [D]
    for d in depths:
        for f in sorted({most_f, min(most_f, 256), LANES}, reverse=True):
            for m in (256, 128, 64, 32, 16, 8):
                block = min(m, rows), min(f, F), d
                if m <= most_m and _vmem(*block, bits, group_size, itemsize) <= VMEM_BUDGET:
                    return block
    return 0, 0, 0


def refusal(block_d: int, D: int, bits: int, group_size: int) -> str | None:
    """Returns why blocks of `block_d` entries of D cannot be unpacked, None if they can. 0: no block fits into VMEM."""
    period = period_of(bits)[0]
    if group_size % period and block_d > MOST_CROSSED * group_size:
        return f"groups of {group_size} are no multiple of the {period} codes that lie alike in words of {bits} bits"
    if not block_d:
        return (
            f"D = {D} has no part of whole tiles of groups of {group_size}, and all of it does not fit in "
            f"the {VMEM_BUDGET >> 20} MiB of VMEM of a program"
        )
    return None
