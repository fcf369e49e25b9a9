"""A warp-specialized Gluon kernel of quantized_matmul for Hopper: words are unpacked in the registers from which its tensor
cores read weights.

A program multiplies a tile of columns of the weights by a tile of rows of x, over a part of D. It computes the transposed
product, weights^T times x^T: then the weights are the operand that may lie in registers. Its warps unpack one half of a step
while the tensor cores multiply the other: half of the columns, or of D where a tile has 64. A few more warps feed them, as far
ahead as there are stages: one starts the copies by TMA, and one or two put x into the order of the codes in the registers of a
warp. Teams of warps may share the steps of a program; they add up their sums in shared memory, in a fixed order.
"""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from kernels.engines.matmul.formats import NF4
from kernels.toolchains.gluon import SWIZZLED, after

WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
SCALES = gl.constexpr(gl.NVMMASharedLayout(0, 16, 2))
EXPONENTS = gl.constexpr(gl.NVMMASharedLayout(0, 8, 2))


@dataclass(frozen=True)
class Product:
    """Compile-time sizes of a product and of its programs.

    Attributes:
      M, D, F: rows of x, of which those of whole tiles are stored, and the sizes of the weights.
      MODE, BITS, GROUP: format of the weights.
      SPLITS: parts of D, of a program each.
      WARPS: warps that multiply a step. TEAMS: how many such groups of warps share the steps of a program.
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
    WARPS: int
    TEAMS: int
    ORDERING: int
    BLOCK_M: int
    BLOCK_F: int
    BLOCK_D: int
    STAGES: int

    @property
    def STEPS(self) -> int:
        return -(-self.D // self.BLOCK_D)

    @property
    def HALVES(self) -> int:
        """Sums of a program: of two halves of its columns, or of all of them, which then are those of one instruction."""
        return 1 if self.BLOCK_F == 64 else 2

    @property
    def COLUMNS(self) -> int:
        """Columns of a sum."""
        return self.BLOCK_F // self.HALVES


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
def _is_small(mode, dtype):
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
def _layout_of_sums(P):
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
    sums: gl.constexpr = _layout_of_sums(P)
    weights = weights.reshape((P.COLUMNS, COUNT * (32 // P.BITS)))
    return gl.convert_layout(weights, gl.DotOperandLayout(0, sums, 2), assert_trivial=True)


@gluon.jit
def _in_order(x, P: gl.constexpr):
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


# -- the kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _make_ring(w_desc, s_desc, P: gl.constexpr, dtype: gl.constexpr):
    """Allocates tiles of words, scales, biases and x, and barriers: x has been copied; a stage is full; it is free."""
    COUNT: gl.constexpr = w_desc.block_type.shape[0]
    CHUNKS: gl.constexpr = s_desc.block_type.shape[0]
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [P.STAGES, COUNT, P.BLOCK_F], w_desc.layout)
    s_tiles = gl.allocate_shared_memory(s_desc.dtype, [P.STAGES, CHUNKS, P.BLOCK_F], s_desc.layout)
    b_tiles = s_tiles
    if P.MODE == "affine":
        b_tiles = gl.allocate_shared_memory(s_desc.dtype, [P.STAGES, CHUNKS, P.BLOCK_F], s_desc.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [P.STAGES, P.BLOCK_M, P.BLOCK_D], SWIZZLED)
    there = gl.allocate_shared_memory(gl.int64, [P.STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [P.STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [P.STAGES, 1], mbarrier.MBarrierLayout())
    STAGES: gl.constexpr = P.STAGES
    for i in gl.static_range(STAGES):
        mbarrier.init(there.index(i), count=1)
        mbarrier.init(full.index(i), count=2)  # words have been copied; x is in order
        mbarrier.init(free.index(i), count=1)
    return w_tiles, s_tiles, b_tiles, x_tiles, there, full, free


@gluon.jit
def _place(P: gl.constexpr):
    """Returns a program's row of x, its tile of columns, its part of D, and the first step of that and their number."""
    ROWS: gl.constexpr = (P.M + P.BLOCK_M - 1) // P.BLOCK_M
    EACH: gl.constexpr = P.STEPS // P.SPLITS
    REST: gl.constexpr = P.STEPS % P.SPLITS
    program = gl.program_id(0)
    part = program // ROWS % P.SPLITS
    # In this form the compiler knows that there is a step: after a loop that may have none it lets no products overlap.
    count = EACH
    if REST > 0:
        count += (part < REST).to(gl.int32)
    first = part * EACH + gl.minimum(part, REST)
    return program % ROWS * P.BLOCK_M, program // (ROWS * P.SPLITS), part, first, count


@gluon.jit
def _copy(x_desc, w_desc, s_desc, b_desc, ring, P: gl.constexpr):
    """Starts the copies of each step, of x and of words, scales and biases, as soon as its stage is free."""
    w_tiles, s_tiles, b_tiles, x_tiles, there, full, free = ring
    BYTES: gl.constexpr = w_desc.nbytes_per_cta + s_desc.nbytes_per_cta * (2 if P.MODE == "affine" else 1)
    row, tile, part, first, count = _place(P)
    column = tile * P.BLOCK_F
    stage, phase = 0, 1
    for step in range(first, first + count):
        mbarrier.wait(free.index(stage), phase)
        arrived = full.index(stage)
        mbarrier.expect(arrived, BYTES)
        tma.async_load(w_desc, [step * w_desc.block_type.shape[0], column], arrived, w_tiles.index(stage))
        mbarrier.expect(there.index(stage), x_desc.nbytes_per_cta)
        tma.async_load(x_desc, [row, step * P.BLOCK_D], there.index(stage), x_tiles.index(stage))
        tma.async_load(s_desc, [step * P.BLOCK_D // P.GROUP, column], arrived, s_tiles.index(stage))
        if P.MODE == "affine":
            tma.async_load(b_desc, [step * P.BLOCK_D // P.GROUP, column], arrived, b_tiles.index(stage))
        stage, phase = after(stage, phase, P.STAGES)


@gluon.constexpr_function
def _layout_of_x(rows, P):
    """Returns a layout in which a thread has 32 columns, of those that are put in another order, or fewer of few rows."""
    each = min(32, rows * P.BLOCK_D // (32 * P.ORDERING))
    return gl.BlockedLayout([1, each], [32 * each // P.BLOCK_D, P.BLOCK_D // each], [P.ORDERING, 1], [1, 0])


@gluon.jit
def _order(ring, P: gl.constexpr):
    """Puts x into the order of the codes, as soon as it is there."""
    w_tiles, s_tiles, b_tiles, x_tiles, there, full, free = ring
    row, tile, part, first, count = _place(P)
    # As many rows at once as a thread has registers for.
    ROWS: gl.constexpr = min(P.BLOCK_M, 2048 * P.ORDERING // P.BLOCK_D)
    layout: gl.constexpr = _layout_of_x(ROWS, P)
    stage, phase = 0, 0
    for _ in range(count):
        mbarrier.wait(there.index(stage), phase)
        for i in gl.static_range(P.BLOCK_M // ROWS):
            rows = x_tiles.index(stage).slice(i * ROWS, ROWS, 0)
            rows.store(_in_order(rows.load(layout), P))
        fence_async_shared()
        mbarrier.arrive(full.index(stage))
        stage, phase = after(stage, phase, P.STAGES)


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
    """Returns half of a stage [COLUMNS, rows]: of its columns, or of D, of which one scale may be for both halves."""
    ROWS: gl.constexpr = tiles.shape[1] // 2
    if P.HALVES == 2:
        tile = tiles.index(stage).slice(WHICH * P.COLUMNS, P.COLUMNS, 1)
    elif ROWS > 0:
        tile = tiles.index(stage).slice(WHICH * ROWS, ROWS, 0)
    else:
        tile = tiles.index(stage)
    return tile.permute((1, 0))


@gluon.jit
def _half_of_x(x_tiles, stage, WHICH: gl.constexpr, P: gl.constexpr):
    """Returns what half of a stage's weights are multiplied by: all of x, or its half of D, transposed."""
    tile = x_tiles.index(stage)
    if P.HALVES == 1:
        tile = tile.slice(WHICH * (P.BLOCK_D // 2), P.BLOCK_D // 2, 1)
    return tile.permute((1, 0))


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
def _unpacked(ring, stage, zero, WHICH: gl.constexpr, P: gl.constexpr, dtype: gl.constexpr):
    """Returns the weights of half a stage, or 2 ** -60 of them: see `_is_small`."""
    w_tiles, s_tiles, b_tiles, x_tiles, there, full, free = ring
    tile = _half(w_tiles, stage, WHICH, P)
    COUNT: gl.constexpr = tile.shape[1]
    words = tile.load(_layout_of_words(P, COUNT)).to(gl.int32, bitcast=True)
    scale = _numbers(_half(s_tiles, stage, WHICH, P), P, COUNT)
    bias = scale
    if P.MODE == "affine":
        bias = _numbers(_half(b_tiles, stage, WHICH, P), P, COUNT)
    if not _is_small(P.MODE, dtype):
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


@gluon.jit
def _store(out_ptr, acc, row, column, part, P: gl.constexpr):
    layout: gl.constexpr = _layout_of_sums(P)
    columns = column + gl.arange(0, P.COLUMNS, gl.SliceLayout(1, layout))
    rows = row + gl.arange(0, P.BLOCK_M, gl.SliceLayout(0, layout))
    out = out_ptr + (part * P.M + rows)[None, :] * P.F + columns[:, None]
    gl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(columns < P.F)[:, None] & (rows < P.M)[None, :])


@gluon.jit
def _multiply(out_ptr, ring, sums, summed, TEAM: gl.constexpr, P: gl.constexpr, dtype: gl.constexpr):
    """Multiplies every TEAMS-th step of a program; the first team adds up what all have, and stores it."""
    w_tiles, s_tiles, b_tiles, x_tiles, there, full, free = ring
    row, tile, part, first, count = _place(P)
    zero = gl.num_programs(1) >> 1  # there is one
    layout: gl.constexpr = _layout_of_sums(P)
    left = gl.zeros([P.COLUMNS, P.BLOCK_M], gl.float32, layout)
    right = warpgroup_mma_init(gl.zeros([P.COLUMNS, P.BLOCK_M], gl.float32, layout))
    stage, phase, last = TEAM, 0, 0
    for step in range(TEAM, count, P.TEAMS):
        mbarrier.wait(full.index(stage), phase)
        weights = _unpacked(ring, stage, zero, 0, P, dtype)
        left = warpgroup_mma(weights, _half_of_x(x_tiles, stage, 0, P), left, is_async=True)
        right = warpgroup_mma_wait(1, (right,))
        mbarrier.arrive(free.index(last), pred=step > TEAM)
        weights = _unpacked(ring, stage, zero, 1, P, dtype)
        right = warpgroup_mma(weights, _half_of_x(x_tiles, stage, 1, P), right, is_async=True)
        left = warpgroup_mma_wait(1, (left,))
        last = stage
        turn, phase = after(stage // P.TEAMS, phase, P.STAGES // P.TEAMS)
        stage = turn * P.TEAMS + TEAM
    right = warpgroup_mma_wait(0, (right,))
    if P.HALVES == 1:
        left += right
    if TEAM > 0:
        sums.index(TEAM * P.HALVES).store(left)
        if P.HALVES == 2:
            sums.index(TEAM * P.HALVES + 1).store(right)
        mbarrier.arrive(summed)
    else:
        if P.TEAMS > 1:
            mbarrier.wait(summed, 0)
            TEAMS: gl.constexpr = P.TEAMS
            for team in gl.static_range(1, TEAMS):
                left += sums.index(team * P.HALVES).load(layout)
                if P.HALVES == 2:
                    right += sums.index(team * P.HALVES + 1).load(layout)
        if _is_small(P.MODE, dtype):
            left, right = left * 2.0**60, right * 2.0**60
        column = tile * P.BLOCK_F
        _store(out_ptr, left, row, column, part, P)
        if P.HALVES == 2:
            _store(out_ptr, right, row, column + P.COLUMNS, part, P)


@gluon.jit
def unpacked_matmul_kernel(
    x_desc,  # [M, D] in blocks [BLOCK_M, BLOCK_D]
    w_desc,  # [D * BITS / 32, F] in blocks [BLOCK_D * BITS / 32, BLOCK_F]
    s_desc,  # [D / GROUP, F] in blocks of BLOCK_D / GROUP rows, or 1
    b_desc,  # likewise, or None
    out_ptr,  # [SPLITS, M, F]
    P: gl.constexpr,  # `Product`
    MULTIPLYING: gl.constexpr,  # registers per thread of each team but the first
    FEEDING: gl.constexpr,  # registers per thread that does not multiply
):
    dtype: gl.constexpr = x_desc.dtype
    ring = _make_ring(w_desc, s_desc, P, dtype)
    PLACES: gl.constexpr = (4 if P.TEAMS == 3 else P.TEAMS) * P.HALVES
    sums = gl.allocate_shared_memory(
        gl.float32, [PLACES, P.COLUMNS, P.BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(summed, count=max(1, P.TEAMS - 1))
    if P.TEAMS == 1:
        gl.warp_specialize(
            [
                (_multiply, (out_ptr, ring, sums, summed, 0, P, dtype)),
                (_order, (ring, P)),
                (_copy, (x_desc, w_desc, s_desc, b_desc, ring, P)),
            ],
            [P.ORDERING, 1],
            [FEEDING, FEEDING],
        )
    elif P.TEAMS == 2:
        gl.warp_specialize(
            [
                (_multiply, (out_ptr, ring, sums, summed, 0, P, dtype)),
                (_multiply, (out_ptr, ring, sums, summed, 1, P, dtype)),
                (_order, (ring, P)),
                (_copy, (x_desc, w_desc, s_desc, b_desc, ring, P)),
            ],
            [P.WARPS, P.ORDERING, 1],
            [MULTIPLYING, FEEDING, FEEDING],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (out_ptr, ring, sums, summed, 0, P, dtype)),
                (_multiply, (out_ptr, ring, sums, summed, 1, P, dtype)),
                (_multiply, (out_ptr, ring, sums, summed, 2, P, dtype)),
                (_order, (ring, P)),
                (_copy, (x_desc, w_desc, s_desc, b_desc, ring, P)),
            ],
            [P.WARPS, P.WARPS, P.ORDERING, 1],
            [MULTIPLYING, MULTIPLYING, FEEDING, FEEDING],
        )
