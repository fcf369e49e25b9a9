"""Numbers of 8 bits and fewer in Triton, on GPUs whose compiler has no float8 too."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def upcast(tile, CODE: tl.constexpr, dtype: tl.constexpr):
    """Converts 8-bit numbers to another type, exactly: int8, or the bits of a float8, which are the leading bits of a
    float16."""
    if CODE == "int8":
        return tile.to(tl.float32).to(dtype)
    bits = tile.to(tl.uint16)
    if CODE == "float8_e5m2":
        return (bits << 8).to(tl.float16, bitcast=True).to(dtype)
    half = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True)  # the exponent bias differs by 8
    value = tl.where((bits & 127) == 127, float("nan"), half.to(tl.float32) * 256.0)
    return value.to(dtype)


# Codes of the formats of `quantized_matmul`. A word holds 32 / BITS of them along the contracted dim, lowest bits first.
# `joined` unpacks words of 4 or 8 bits where they lie: a thread that loads a word has all of its codes. Tensor cores take
# the entries of a product's contracted dim in any order that both operands share, so it leaves them in the order in which
# the threads of a warp hold them, and `arranged` puts the other operand in that order.


@triton.jit
def joined(words, table_ptr, MODE: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Returns [ROWS * 32 / BITS, COLUMNS] of a 16-bit type, from words [ROWS, COLUMNS], with ROWS a multiple of 4 and codes of
    4 or 8 bits: the numbers that codes stand for before they are scaled, divided by `unit_of` and plus `offset_of`, exactly
    (those of nf4 are rounded).

    Their order is that of `arranged`. `table_ptr`: the numbers of nf4, by code.
    """
    ROWS: tl.constexpr = words.shape[0]
    COLUMNS: tl.constexpr = words.shape[1]
    # Codes that lie 16 bits apart are unpacked by one instruction, as two 16-bit numbers.
    if BITS == 4:
        pairs = tl.join(tl.join(words, words >> 4), tl.join(words >> 8, words >> 12))
    else:
        pairs = tl.join(words, words >> 8)
    MASK: tl.constexpr = (1 << BITS) - 1
    if MODE == "affine" and (BITS == 4 or dtype == tl.float16):
        # With these leading bits a number is 128, or in float16 1024, plus the code in its lowest bits.
        ONE: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
        pairs = (pairs & (MASK << 16 | MASK)) | ONE
        low = pairs.to(tl.uint16).to(dtype, bitcast=True)
        high = (pairs >> 16).to(tl.uint16).to(dtype, bitcast=True)
    elif MODE == "mxfp4":
        # Sign, exponent and mantissa in those of two float16: 2 ** -14 of the number, which a subnormal stays. In bfloat16 they
        # would be 2 ** -126 of it, too small for products in float32.
        pairs = ((pairs & 0x00070007) << 9) | ((pairs & 0x00080008) << 12)
        low = pairs.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32).to(dtype)
        high = (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32).to(dtype)
    else:
        low = _value(pairs & MASK, table_ptr, MODE).to(dtype)
        high = _value((pairs >> 16) & MASK, table_ptr, MODE).to(dtype)
    codes = tl.join(low, high)
    if BITS == 4:  # code 4 h + 2 s + t of a word is at [row, column, t, s, h]
        codes = codes.reshape(ROWS // 4, 4, COLUMNS, 2, 2, 2).permute(0, 4, 1, 3, 5, 2)
    else:  # code 2 h + t at [row, column, t, h]
        codes = codes.permute(0, 3, 2, 1)
    return codes.reshape(ROWS * (32 // BITS), COLUMNS)


@triton.jit
def arranged(x, BITS: tl.constexpr):
    """Returns x [M, K] with its columns in the order of `joined`'s rows."""
    if BITS == 8:
        return x
    M: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    return x.reshape(M, K // 32, 4, 2, 2, 2).permute(0, 1, 4, 2, 5, 3).reshape(M, K)


@triton.jit
def offset_of(MODE: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Returns what `joined` adds to every number."""
    if MODE != "affine" or (BITS == 8 and dtype == tl.bfloat16):
        return 0.0
    return 128.0 if dtype == tl.bfloat16 else 1024.0


@triton.jit
def unit_of(MODE: tl.constexpr):
    """Returns what the numbers of `joined` are in units of."""
    return 16384.0 if MODE == "mxfp4" else 1.0


@triton.jit
def _value(codes, table_ptr, MODE: tl.constexpr):
    """Returns the float32 numbers that codes of one of the formats stand for, before they are scaled."""
    if (
        MODE == "affine"
    ):  # conversions from integers are slow; with these leading bits a float32 is 2 ** 23 plus the code
        values = (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    elif MODE == "nf4":
        values = tl.load(table_ptr + codes).to(tl.float32)
    elif MODE == "mxfp8":
        values = upcast(codes.to(tl.uint8), "float8_e4m3fn", tl.float32)
    else:
        half = (((codes & 7) << 9) | ((codes & 8) << 12)).to(tl.uint16).to(tl.float16, bitcast=True)
        values = half.to(tl.float32) * unit_of(MODE)
    return values


@triton.jit
def scale_of(scales, MODE: tl.constexpr):
    """Returns scales in float32, of the MX formats from their exponents; 255 is NaN."""
    if MODE == "affine" or MODE == "nf4":
        return scales.to(tl.float32)
    power = (scales.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    return tl.where(scales == 255, float("nan"), power)


@triton.jit
def gathered(w_ptr, s_ptr, b_ptr, table_ptr, d, cols, mask, F: tl.constexpr, MODE: tl.constexpr, BITS: tl.constexpr,
             GROUP: tl.constexpr):  # fmt: skip
    """Returns the float32 weights at rows d and columns `cols` of packed ones [D, F], of any width of codes and groups: each
    entry reads its word, or two, its scale and its bias. Undefined where `mask` is False."""
    bit = d % 32 * BITS
    word, shift = d // 32 * BITS + bit // 32, bit % 32
    at = w_ptr + word.to(tl.int64)[:, None] * F + cols[None, :]
    codes = tl.load(at, mask=mask, other=0) >> shift[:, None]
    if 32 % BITS != 0:
        crosses = shift + BITS > 32
        rest = tl.load(at + F, mask=mask & crosses[:, None], other=0)
        codes |= tl.where(crosses[:, None], rest << ((32 - shift) % 32)[:, None], 0)
    values = _value(codes & ((1 << BITS) - 1), table_ptr, MODE)
    of = (d // GROUP).to(tl.int64)[:, None] * F + cols[None, :]
    weights = values * scale_of(tl.load(s_ptr + of, mask=mask, other=0), MODE)
    if MODE == "affine":
        weights += tl.load(b_ptr + of, mask=mask, other=0.0).to(tl.float32)
    return weights
