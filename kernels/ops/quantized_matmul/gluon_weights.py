"""Weights of a quantised product on Hopper, from words to the registers in which its tensor cores read them."""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.engines.matmul.formats import NF4


@dataclass(frozen=True)
class Product:
    """Compile-time sizes of a product and of its programs.

    Attributes:
      M, D, F: rows of x, of which those of whole tiles are stored, and the sizes of the weights.
      MODE, BITS, GROUP: format of the weights.
      SPLITS: parts of D, of a program each.
      TEAMS: groups of warps that share the columns of a program, and wait for nothing of each other. WARPS: of each.
      ORDERING: warps that put x into the order of the codes.
      BLOCK_M, BLOCK_F, BLOCK_D: rows, columns and entries of D of a step.
      STAGES: steps on their way or in use.
    """

    M: int
    D: int
    F: int
    MODE: str
    BITS: int
    GROUP: int
    SPLITS: int
    TEAMS: int
    WARPS: int
    ORDERING: int
    BLOCK_M: int
    BLOCK_F: int
    BLOCK_D: int
    STAGES: int

    @property
    def STEPS(self) -> int:
        return -(-self.D // self.BLOCK_D)

    @property
    def COLUMNS(self) -> int:
        """Columns of a sum: half of those of a team."""
        return self.BLOCK_F // (2 * self.TEAMS)


def _nf4_words(dtype: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the low bytes of the numbers of nf4, by code, four in each int32, and their high bytes."""
    numbers = np.asarray(NF4, np.float32).astype(dtype).view(np.uint8).reshape(16, 2)
    low, high = (np.ascontiguousarray(numbers[:, i]).view(np.int32).tolist() for i in (0, 1))
    return tuple(low), tuple(high)


NF4_BFLOAT16 = gl.constexpr(_nf4_words(ml_dtypes.bfloat16))
NF4_FLOAT16 = gl.constexpr(_nf4_words(np.float16))


# -- weights from codes ---------------------------------------------------------------------------------------------------
#
# Codes are unpacked two at a time, as two 16-bit numbers of a word. `zero` is 0, which the compiler does not know: it would
# load anew each constant that an instruction cannot hold.


@gluon.jit
def _fma(x, y, z, dtype: gl.constexpr):
    """Returns x * y + z, of two numbers in each word."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, y, z], gl.int32, True, 1)
    else:
        return gl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, y, z], gl.int32, True, 1)


@gluon.jit
def _twice(numbers):
    """Returns each number of 16 bits twice in a word."""
    return numbers.to(gl.int32) * 0x10001


@gluon.jit
def _twice_times(numbers, FACTOR: gl.constexpr, zero):
    """Returns bfloat16 numbers, times one with the bits FACTOR, twice in a word: by the product's instruction alone."""
    asm: gl.constexpr = "{ .reg .b32 pair; mov.b32 pair, {$1, $1}; fma.rn.bf16x2 $0, pair, $2, $3; }"
    return gl.inline_asm_elementwise(asm, "=r,h,r,r", [numbers, zero + FACTOR * 0x10001, zero], gl.int32, True, 1)


@gluon.jit
def _bytes(low, high, places):
    """Returns four of the eight bytes of two words: those that the four lowest numbers of 4 bits in `places` tell. With its
    highest bit such a number stands for the highest bit of a byte, eight times."""
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, places], gl.int32, True, 1)


@gluon.jit
def _nf4_bytes(words, codes, highest, zero, BYTE: gl.constexpr, dtype: gl.constexpr):
    """Returns one byte of the numbers of four codes; `highest` has the bits of bytes set whose code is 8 or more."""
    TABLE: gl.constexpr = NF4_BFLOAT16 if dtype == gl.bfloat16 else NF4_FLOAT16
    few = _bytes(zero + TABLE[BYTE][0], zero + TABLE[BYTE][1], codes)
    more = _bytes(zero + TABLE[BYTE][2], zero + TABLE[BYTE][3], codes)
    return (few & ~highest) | (more & highest)


@gluon.jit
def _nf4(words, zero, PART: gl.constexpr, dtype: gl.constexpr):
    """Returns the numbers of codes 2 PART and 2 PART + 1."""
    codes = (words & 0x77777777) >> (16 if PART >= 2 else 0)
    highest = _bytes(words << 4, words, zero + (0xFBEA if PART >= 2 else 0xD9C8))
    low, high = _nf4_bytes(words, codes, highest, zero, 0, dtype), _nf4_bytes(words, codes, highest, zero, 1, dtype)
    return _bytes(low, high, zero + (0x7362 if PART % 2 else 0x5140))


@gluon.constexpr_function
def is_small(mode, dtype):
    """Returns whether weights, and sums, are 2 ** -60 of what they mean. `_pair` reads codes as bfloat16 numbers that are far
    too small; a factor of the scale corrects that, but for so much, so that scales stay finite."""
    return dtype == gl.bfloat16 and mode != "nf4"


@gluon.jit
def _pair(words, scale, of_odd, bias, zero, PART: gl.constexpr, P: gl.constexpr, dtype: gl.constexpr):
    """Returns two weights of each word, in a new last dim: of the codes that begin at bit PART * BITS and 16 bits above, and of
    nf4 of codes 2 PART and 2 PART + 1. `of_odd` is the scale of odd parts of 4 bits."""
    SHIFT: gl.constexpr = PART * P.BITS
    if P.MODE == "affine":
        # Of two codes of 4 bits in a byte the second is read where it lies, 16 times as large.
        ODD: gl.constexpr = P.BITS == 4 and PART % 2 == 1
        MASK: gl.constexpr = 0x00FF00FF if P.BITS == 8 else 0x00F000F0 if ODD else 0x000F000F
        codes = words >> (SHIFT // 8 * 8) & MASK
        if dtype == gl.bfloat16:
            # A subnormal number, or one of those after them, which are as far apart: 2 ** -133 of what is read.
            weights = _fma(codes, of_odd if ODD else scale, bias, dtype)
        else:
            # With these leading bits a number is 1024 more.
            UNIT: gl.constexpr = 0x2C002C00 if ODD else 0x3C003C00
            LESS: gl.constexpr = 0x2BFF2C00 if ODD else 0x1BFF1C00
            weights = _fma(_fma(codes | 0x64006400, zero + UNIT, zero - LESS, dtype), scale, bias, dtype)
    elif P.MODE == "nf4":
        weights = _fma(_nf4(words, zero, PART, dtype), scale, zero, dtype)
    elif P.MODE == "mxfp4":
        # Exponent and mantissa in those of a bfloat16: 2 ** -126 of the number.
        numbers = ((words << (12 - SHIFT)) & -0x7FFF8000) | (
            (words << (6 - SHIFT) if SHIFT < 6 else words >> (SHIFT - 6)) & 0x01C001C0
        )
        weights = _fma(numbers, scale, zero, dtype)
    elif P.MODE == "mxfp8":
        # Likewise 2 ** -120 of it. That with all bits set is NaN: one more, and the bit above is.
        without = (words >> SHIFT) & (zero + 0x007F007F)
        none = ((without + 0x00010001) & (zero + 0x00800080)) * 0xFF
        numbers = ((words << (8 - SHIFT)) & -0x7FFF8000) | (without << 4) | none
        weights = _fma(numbers, scale, zero, dtype)
    low = weights.to(gl.uint16).to(dtype, bitcast=True)
    return gl.join(low, (weights >> 16).to(gl.uint16).to(dtype, bitcast=True))


@gluon.constexpr_function
def layout_of_sums(P):
    """Returns the layout of sums [COLUMNS, BLOCK_M]: a warp has 16 columns of the weights at a time."""
    return gl.NVMMADistributedLayout([3, 0], [P.WARPS, 1], [16, P.BLOCK_M, 16])


@gluon.jit
def _weights(words, scale, of_odd, bias, zero, P: gl.constexpr, dtype: gl.constexpr):
    """Returns weights [COLUMNS, D] where tensor cores read them, from words [COLUMNS, D * BITS / 32]."""
    COUNT: gl.constexpr = words.shape[1]
    first = _pair(words, scale, of_odd, bias, zero, 0, P, dtype)
    weights = gl.join(first, _pair(words, scale, of_odd, bias, zero, 1, P, dtype))
    if P.BITS == 4:
        third = _pair(words, scale, of_odd, bias, zero, 2, P, dtype)
        second = gl.join(third, _pair(words, scale, of_odd, bias, zero, 3, P, dtype))
        # Of part h + 2 j the r-th number is at [.., r, h, j].
        weights = gl.join(weights, second).reshape((P.COLUMNS, COUNT // 4, 4, 2, 2, 2)).permute(0, 1, 5, 4, 2, 3)
    else:
        weights = weights.reshape((P.COLUMNS, COUNT // 4, 4, 2, 2)).permute(0, 1, 4, 2, 3)
    sums: gl.constexpr = layout_of_sums(P)
    weights = weights.reshape((P.COLUMNS, COUNT * (32 // P.BITS)))
    return gl.convert_layout(weights, gl.DotOperandLayout(0, sums, 2), assert_trivial=True)


@gluon.jit
def in_order(x, P: gl.constexpr):
    """Returns x [M, D] with its columns in the order of the weights of `_weights`."""
    M: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    if P.BITS == 8:  # code h + 2 r of word t of four
        x = x.reshape((M, D // 16, 4, 2, 2)).permute(0, 1, 4, 2, 3)
    elif P.MODE == "nf4":  # code r + 2 h + 4 j
        x = x.reshape((M, D // 32, 4, 2, 2, 2)).permute(0, 1, 3, 4, 2, 5)
    else:  # code h + 2 j + 4 r
        x = x.reshape((M, D // 32, 4, 2, 2, 2)).permute(0, 1, 4, 5, 2, 3)
    return x.reshape((M, D))


# -- tiles of words and scales ---------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _layout_of_words(P, *counts):
    """Returns the layout of words [COLUMNS, *counts]: each of four threads has every fourth word of a column, as it has every
    fourth pair of weights in an operand of the tensor cores."""
    places = []  # of the words of a column, beginning with the last dim
    for dim, count in reversed([*enumerate(counts, 1)]):
        places += [[0] * dim + [1 << i] + [0] * (len(counts) - dim) for i in range(count.bit_length() - 1)]
    columns = [[1 << i] + [0] * len(counts) for i in range(P.COLUMNS.bit_length() - 1)]
    past = 4 + P.WARPS.bit_length() - 1
    registers, lanes = [columns[3], *places[2:], *columns[past:]], [*places[:2], *columns[:3]]
    return gl.DistributedLinearLayout(registers, lanes, columns[4:past], [], [P.COLUMNS, *counts])


@gluon.jit
def _half(tiles, stage, WHICH: gl.constexpr, P: gl.constexpr):
    """Returns COLUMNS of a stage, transposed."""
    return tiles.index(stage).slice(WHICH * P.COLUMNS, P.COLUMNS, 1).permute((1, 0))


@gluon.jit
def _numbers(tile, P: gl.constexpr, COUNT: gl.constexpr):
    """Returns the bits of the scales of a tile [COLUMNS, CHUNKS], in x's dtype; COUNT words of a column have these."""
    CHUNKS: gl.constexpr = tile.shape[1]
    scale = tile.load(gl.SliceLayout(2, _layout_of_words(P, CHUNKS, COUNT // CHUNKS)))
    if tile.dtype == gl.uint8:  # the exponent of a bfloat16; 255 is NaN
        scale = scale.to(gl.int32)
        scale = gl.where(scale == 255, 0x7FC0, scale << 7).to(gl.uint16)
    return scale.to(gl.uint16, bitcast=True)


@gluon.jit
def _of_words(pairs, P: gl.constexpr, COUNT: gl.constexpr):
    """Returns the entry of `pairs` [COLUMNS, CHUNKS] for each of COUNT words of a column."""
    CHUNKS: gl.constexpr = pairs.shape[1]
    zeros = gl.zeros([P.COLUMNS, CHUNKS, COUNT // CHUNKS], gl.int32, _layout_of_words(P, CHUNKS, COUNT // CHUNKS))
    pairs, _ = gl.broadcast(gl.expand_dims(pairs, 2), zeros)
    return gl.convert_layout(pairs.reshape((P.COLUMNS, COUNT)), _layout_of_words(P, COUNT), assert_trivial=True)


@gluon.jit
def unpacked(ring, stage, zero, WHICH: gl.constexpr, P: gl.constexpr, dtype: gl.constexpr):
    """Returns the weights of half a stage, or 2 ** -60 of them: see `is_small`."""
    w_tiles, s_tiles, b_tiles, x_tiles, there, full, free = ring
    tile = _half(w_tiles, stage, WHICH, P)
    COUNT: gl.constexpr = tile.shape[1]
    words = tile.load(_layout_of_words(P, COUNT)).to(gl.int32, bitcast=True)
    scale = _numbers(_half(s_tiles, stage, WHICH, P), P, COUNT)
    bias = scale
    if P.MODE == "affine":
        bias = _numbers(_half(b_tiles, stage, WHICH, P), P, COUNT)
    if not is_small(P.MODE, dtype):
        scale, bias = _twice(scale), _twice(bias)
        of_odd = scale
    elif P.MODE == "affine":
        # Of 2 ** -133 and 2 ** -129 of a code.
        scale, of_odd = _twice_times(scale, 0x6400, zero), _twice_times(scale, 0x6200, zero)
        bias = _twice_times(bias, 0x2180, zero)
    else:
        # Of 2 ** -126 and 2 ** -120 of a number.
        scale = _twice_times(scale, 0x6080 if P.BITS == 4 else 0x5D80, zero)
        of_odd, bias = scale, scale
    scale, of_odd, bias = _of_words(scale, P, COUNT), _of_words(of_odd, P, COUNT), _of_words(bias, P, COUNT)
    return _weights(words, scale, of_odd, bias, zero, P, dtype)
