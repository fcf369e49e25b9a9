"""A warp-specialized Gluon kernel of quantized_matmul for Hopper: words are unpacked in the registers from which its tensor
cores read weights.

A program multiplies a tile of columns of the weights by a tile of rows of x, over a part of D. It computes the transposed
product, weights^T times x^T: then the weights are the operand that may lie in registers. Its warps unpack one half of the
columns while the tensor cores multiply the other. Four more warps feed them: words and scales by TMA, and x in the order of the
codes in the registers of a warp.
"""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

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


@gluon.jit
def _pair(words, scale, of_odd, bias, zero, PART: gl.constexpr, MODE: gl.constexpr, BITS: gl.constexpr, dtype: gl.constexpr):
    """Returns two weights of each word, in a new last dim: of the codes that begin at bit PART * BITS and 16 bits above, and of
    nf4 of codes 2 PART and 2 PART + 1."""
    SHIFT: gl.constexpr = PART * BITS
    if MODE == "affine":
        # Of two codes of 4 bits in a byte one is read where it lies, 16 times as large.
        ODD: gl.constexpr = BITS == 4 and PART % 2 == 1
        MASK: gl.constexpr = 0x00FF00FF if BITS == 8 else 0x00F000F0 if ODD else 0x000F000F
        codes = words >> (SHIFT // 8 * 8) & MASK
        if dtype == gl.bfloat16:
            # Subnormal numbers, and those after them: 2 ** -133 of the code, or 2 ** -129.
            weights = _fma(codes, of_odd if ODD else scale, bias, dtype)
        else:
            # With these leading bits a number is 1024 more.
            UNIT: gl.constexpr = 0x2C002C00 if ODD else 0x3C003C00
            LESS: gl.constexpr = 0x2BFF2C00 if ODD else 0x1BFF1C00
            weights = _fma(_fma(codes | 0x64006400, zero + UNIT, zero - LESS, dtype), scale, bias, dtype)
    elif MODE == "nf4":
        weights = _fma(_nf4(words, zero, PART, dtype), scale, zero, dtype)
    elif MODE == "mxfp4":
        # Exponent and mantissa in those of a bfloat16: 2 ** -126 of the number.
        numbers = ((words << (12 - SHIFT)) & -0x7FFF8000) | (
            (words << (6 - SHIFT) if SHIFT < 6 else words >> (SHIFT - 6)) & 0x01C001C0
        )
        weights = _fma(numbers, scale, zero, dtype)
    elif MODE == "mxfp8":
        # Likewise 2 ** -120 of it. That with all bits set is NaN: one more, and the bit above is.
        without = (words >> SHIFT) & (zero + 0x007F007F)
        none = ((without + 0x00010001) & (zero + 0x00800080)) * 0xFF
        numbers = ((words << (8 - SHIFT)) & -0x7FFF8000) | (without << 4) | none
        weights = _fma(numbers, scale, zero, dtype)
    low = weights.to(gl.uint16).to(dtype, bitcast=True)
    return gl.join(low, (weights >> 16).to(gl.uint16).to(dtype, bitcast=True))


@gluon.constexpr_function
def _layout_of_sums(warps, rows):
    """Returns the layout of sums [HALF, rows]: a warp has 16 columns of the weights at a time."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 16])


@gluon.jit
def _weights(words, scale, of_odd, bias, zero, MODE: gl.constexpr, BITS: gl.constexpr, WARPS: gl.constexpr, BLOCK_M: gl.constexpr,
             dtype: gl.constexpr):  # fmt: skip
    """Returns weights [HALF, D] where tensor cores read them, from words [HALF, D * BITS / 32]."""
    HALF: gl.constexpr = words.shape[0]
    COUNT: gl.constexpr = words.shape[1]
    weights = gl.join(
        _pair(words, scale, of_odd, bias, zero, 0, MODE, BITS, dtype), _pair(words, scale, of_odd, bias, zero, 1, MODE, BITS, dtype)
    )
    if BITS == 4:
        second = gl.join(
            _pair(words, scale, of_odd, bias, zero, 2, MODE, BITS, dtype), _pair(words, scale, of_odd, bias, zero, 3, MODE, BITS, dtype)
        )
        # Of part h + 2 j the r-th number is at [.., r, h, j].
        weights = gl.join(weights, second).reshape((HALF, COUNT // 4, 4, 2, 2, 2)).permute(0, 1, 5, 4, 2, 3)
    else:
        weights = weights.reshape((HALF, COUNT // 4, 4, 2, 2)).permute(0, 1, 4, 2, 3)
    sums: gl.constexpr = _layout_of_sums(WARPS, BLOCK_M)
    return gl.convert_layout(
        weights.reshape((HALF, COUNT * (32 // BITS))), gl.DotOperandLayout(0, sums, 2), assert_trivial=True
    )


@gluon.jit
def _in_order(x, MODE: gl.constexpr, BITS: gl.constexpr):
    """Returns x [M, D] with its columns in the order of the weights of `_weights`."""
    M: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    if BITS == 8:  # code h + 2 r of word t of four
        x = x.reshape((M, D // 16, 4, 2, 2)).permute(0, 1, 4, 2, 3)
    elif MODE == "nf4":  # code r + 2 h + 4 j
        x = x.reshape((M, D // 32, 4, 2, 2, 2)).permute(0, 1, 3, 4, 2, 5)
    else:  # code h + 2 j + 4 r
        x = x.reshape((M, D // 32, 4, 2, 2, 2)).permute(0, 1, 4, 5, 2, 3)
    return x.reshape((M, D))


# -- the kernel ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _make_ring(w_desc, s_desc, dtype: gl.constexpr, BIASES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr,
               STAGES: gl.constexpr):  # fmt: skip
    COUNT: gl.constexpr = w_desc.block_type.shape[0]
    CHUNKS: gl.constexpr = s_desc.block_type.shape[0]
    BLOCK_F: gl.constexpr = w_desc.block_type.shape[1]
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES, COUNT, BLOCK_F], w_desc.layout)
    s_tiles = gl.allocate_shared_memory(s_desc.dtype, [STAGES, CHUNKS, BLOCK_F], s_desc.layout)
    b_tiles = s_tiles
    if BIASES:
        b_tiles = gl.allocate_shared_memory(s_desc.dtype, [STAGES, CHUNKS, BLOCK_F], s_desc.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], SWIZZLED)
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(there.index(i), count=1)
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(free.index(i), count=1)
    return w_tiles, s_tiles, b_tiles, x_tiles, there, full, free


@gluon.jit
def _place(M: gl.constexpr, STEPS: gl.constexpr, SPLITS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Returns a program's row of x, its tile of columns, its part of D, and the first step of that and their number."""
    ROWS: gl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    EACH: gl.constexpr = STEPS // SPLITS
    REST: gl.constexpr = STEPS % SPLITS
    program = gl.program_id(0)
    part = program // ROWS % SPLITS
    # So that the compiler knows where there is a step: before a loop that may have none it orders products one by one.
    count = EACH
    if REST > 0:
        count += (part < REST).to(gl.int32)
    first = part * EACH + gl.minimum(part, REST)
    return program % ROWS * BLOCK_M, program // (ROWS * SPLITS), part, first, count


@gluon.jit
def _copy(x_desc, w_desc, s_desc, b_desc, ring, M: gl.constexpr, D: gl.constexpr, BIASES: gl.constexpr, GROUP: gl.constexpr,
          SPLITS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Starts the copies of each step, of x and of words, scales and biases, as soon as their stage is free."""
    w_tiles, s_tiles, b_tiles, x_tiles, there, full, free = ring
    STEPS: gl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    BYTES: gl.constexpr = w_desc.nbytes_per_cta + s_desc.nbytes_per_cta * (2 if BIASES else 1)
    row, tile, part, first, count = _place(M, STEPS, SPLITS, BLOCK_M)
    column = tile * w_desc.block_type.shape[1]
    stage, phase = 0, 1
    for step in range(first, first + count):
        mbarrier.wait(free.index(stage), phase)
        arrived = full.index(stage)
        mbarrier.expect(arrived, BYTES)
        tma.async_load(w_desc, [step * w_desc.block_type.shape[0], column], arrived, w_tiles.index(stage))
        mbarrier.expect(there.index(stage), x_desc.nbytes_per_cta)
        tma.async_load(x_desc, [row, step * BLOCK_D], there.index(stage), x_tiles.index(stage))
        tma.async_load(s_desc, [step * BLOCK_D // GROUP, column], arrived, s_tiles.index(stage))
        if BIASES:
            tma.async_load(b_desc, [step * BLOCK_D // GROUP, column], arrived, b_tiles.index(stage))
        stage, phase = after(stage, phase, STAGES)


@gluon.constexpr_function
def _layout_of_x(rows, columns, warps):
    """Returns a layout in which a thread has 32 columns, of those that are put in another order, or fewer of few rows."""
    each = min(32, rows * columns // (32 * warps))
    return gl.BlockedLayout([1, each], [32 * each // columns, columns // each], [warps, 1], [1, 0])


@gluon.jit
def _order(ring, M: gl.constexpr, D: gl.constexpr, MODE: gl.constexpr, BITS: gl.constexpr, SPLITS: gl.constexpr,
           BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Puts x into the order of the codes, as soon as it is there."""
    w_tiles, s_tiles, b_tiles, x_tiles, there, full, free = ring
    STEPS: gl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    row, tile, part, first, count = _place(M, STEPS, SPLITS, BLOCK_M)
    # As many rows at once as a thread has registers for.
    ROWS: gl.constexpr = min(BLOCK_M, 2048 * WARPS // BLOCK_D)
    layout: gl.constexpr = _layout_of_x(ROWS, BLOCK_D, WARPS)
    stage, phase = 0, 0
    for _ in range(count):
        mbarrier.wait(there.index(stage), phase)
        for i in gl.static_range(BLOCK_M // ROWS):
            rows = x_tiles.index(stage).slice(i * ROWS, ROWS, 0)
            rows.store(_in_order(rows.load(layout), MODE, BITS))
        fence_async_shared()
        mbarrier.arrive(full.index(stage))
        stage, phase = after(stage, phase, STAGES)


@gluon.constexpr_function
def _layout_of_words(warps, half, *counts):
    """Returns the layout of words [half, *counts]: each of four threads has every fourth word of a column, as it has every
    fourth pair of weights in an operand of the tensor cores."""
    places = []  # of the words of a column, beginning with the last dim
    for dim, count in reversed([*enumerate(counts, 1)]):
        places += [[0] * dim + [1 << i] + [0] * (len(counts) - dim) for i in range(count.bit_length() - 1)]
    columns = [[1 << i] + [0] * len(counts) for i in range(half.bit_length() - 1)]
    past = 4 + warps.bit_length() - 1
    registers, lanes = [columns[3], *places[2:], *columns[past:]], [*places[:2], *columns[:3]]
    return gl.DistributedLinearLayout(registers, lanes, columns[4:past], [], [half, *counts])


@gluon.jit
def _half(tiles, stage, WHICH: gl.constexpr, OF_D: gl.constexpr):
    """Returns half of a stage: of its columns, or of D, of which one scale may be for both halves."""
    ROWS: gl.constexpr = tiles.shape[1]
    HALF: gl.constexpr = tiles.shape[2] // 2
    if not OF_D:
        return tiles.index(stage).slice(WHICH * HALF, HALF, 1)
    elif ROWS > 1:
        return tiles.index(stage).slice(WHICH * (ROWS // 2), ROWS // 2, 0)
    else:
        return tiles.index(stage)


@gluon.constexpr_function
def _is_small(mode, dtype):
    """Returns whether products are 2 ** -60 of what they mean. `_pair` reads codes as bfloat16 numbers that are far too small; what
    would correct them is a factor of their scale, which then must stay finite."""
    return dtype == gl.bfloat16 and mode != "nf4"


@gluon.jit
def _numbers(tile, WARPS: gl.constexpr, COUNT: gl.constexpr):
    """Returns the bits of the scales of a tile [CHUNKS, HALF], transposed."""
    layout: gl.constexpr = _layout_of_words(WARPS, tile.shape[1], tile.shape[0], COUNT // tile.shape[0])
    scale = tile.permute((1, 0)).load(gl.SliceLayout(2, layout))
    if tile.dtype == gl.uint8:  # the exponent of a bfloat16; 255 is NaN
        scale = scale.to(gl.int32)
        scale = gl.where(scale == 255, 0x7FC0, scale << 7).to(gl.uint16)
    return scale.to(gl.uint16, bitcast=True)


@gluon.jit
def _of_words(pairs, WARPS: gl.constexpr, COUNT: gl.constexpr):
    """Returns the entry of `pairs` [HALF, CHUNKS] for each of COUNT words of a column."""
    HALF: gl.constexpr = pairs.shape[0]
    CHUNKS: gl.constexpr = pairs.shape[1]
    layout: gl.constexpr = _layout_of_words(WARPS, HALF, CHUNKS, COUNT // CHUNKS)
    pairs = gl.expand_dims(pairs, 2)
    pairs, _ = gl.broadcast(pairs, gl.zeros([HALF, CHUNKS, COUNT // CHUNKS], gl.int32, layout))
    return gl.convert_layout(pairs.reshape((HALF, COUNT)), _layout_of_words(WARPS, HALF, COUNT), assert_trivial=True)


@gluon.jit
def _unpacked(ring, stage, zero, WHICH: gl.constexpr, OF_D: gl.constexpr, MODE: gl.constexpr, BITS: gl.constexpr,
              BIASES: gl.constexpr, WARPS: gl.constexpr, BLOCK_M: gl.constexpr, dtype: gl.constexpr):  # fmt: skip
    """Returns the weights of half a stage, or 2 ** -60 of them: see `_is_small`."""
    w_tiles, s_tiles, b_tiles, x_tiles, there, full, free = ring
    tile = _half(w_tiles, stage, WHICH, OF_D).permute((1, 0))
    COUNT: gl.constexpr = tile.shape[1]
    words = tile.load(_layout_of_words(WARPS, tile.shape[0], COUNT)).to(gl.int32, bitcast=True)
    scales = _numbers(_half(s_tiles, stage, WHICH, OF_D), WARPS, COUNT)
    scale, of_odd, bias = scales, scales, scales
    if BIASES:
        bias = _numbers(_half(b_tiles, stage, WHICH, OF_D), WARPS, COUNT)
    if not _is_small(MODE, dtype):
        scale, of_odd, bias = _twice(scale), _twice(of_odd), _twice(bias)
    elif BIASES:
        # `_pair` reads 2 ** -133 of a code, or 2 ** -129.
        scale, of_odd = _twice_times(scale, 0x6400, zero), _twice_times(of_odd, 0x6200, zero)
        bias = _twice_times(bias, 0x2180, zero)
    else:
        # `_pair` reads 2 ** -126 of a number, or 2 ** -120.
        scale = _twice_times(scale, 0x6080 if BITS == 4 else 0x5D80, zero)
        of_odd, bias = scale, scale
    scale, of_odd, bias = _of_words(scale, WARPS, COUNT), _of_words(of_odd, WARPS, COUNT), _of_words(bias, WARPS, COUNT)
    return _weights(words, scale, of_odd, bias, zero, MODE, BITS, WARPS, BLOCK_M, dtype)


@gluon.jit
def _store(
    out_ptr, acc, row, column, part, M: gl.constexpr, F: gl.constexpr, WARPS: gl.constexpr, BLOCK_M: gl.constexpr
):
    HALF: gl.constexpr = acc.shape[0]
    layout: gl.constexpr = _layout_of_sums(WARPS, BLOCK_M)
    columns = column + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    out = out_ptr + (part * M + rows)[None, :] * F + columns[:, None]
    gl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(columns < F)[:, None] & (rows < M)[None, :])


@gluon.jit
def _of_x(ring, stage, WHICH: gl.constexpr, OF_D: gl.constexpr):
    """Returns what half of the weights of a stage are multiplied by, transposed."""
    w_tiles, s_tiles, b_tiles, x_tiles, there, full, free = ring
    HALF: gl.constexpr = x_tiles.shape[2] // 2
    if OF_D:
        return x_tiles.index(stage).slice(WHICH * HALF, HALF, 1).permute((1, 0))
    else:
        return x_tiles.index(stage).permute((1, 0))


@gluon.jit
def _multiply(out_ptr, ring, sums, summed, dtype: gl.constexpr, M: gl.constexpr, D: gl.constexpr, F: gl.constexpr,
              MODE: gl.constexpr, BITS: gl.constexpr, BIASES: gl.constexpr, SPLITS: gl.constexpr, WARPS: gl.constexpr,
              BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, TEAM: gl.constexpr,
              TEAMS: gl.constexpr):  # fmt: skip
    """Multiplies every TEAMS-th step of a program; the first team adds up what all have."""
    w_tiles, s_tiles, b_tiles, x_tiles, there, full, free = ring
    STEPS: gl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    row, tile, part, first, count = _place(M, STEPS, SPLITS, BLOCK_M)
    zero = gl.num_programs(1) >> 1  # there is one
    BLOCK_F: gl.constexpr = w_tiles.shape[2]
    OF_D: gl.constexpr = BLOCK_F < 128
    HALF: gl.constexpr = BLOCK_F if OF_D else BLOCK_F // 2
    HALVES: gl.constexpr = BLOCK_F // HALF
    layout: gl.constexpr = _layout_of_sums(WARPS, BLOCK_M)
    left = gl.zeros([HALF, BLOCK_M], gl.float32, layout)
    right = warpgroup_mma_init(gl.zeros([HALF, BLOCK_M], gl.float32, layout))
    stage, phase, last = TEAM, 0, STAGES - TEAMS + TEAM
    for step in range(TEAM, count, TEAMS):
        mbarrier.wait(full.index(stage), phase)
        weights = _unpacked(ring, stage, zero, 0, OF_D, MODE, BITS, BIASES, WARPS, BLOCK_M, dtype)
        left = warpgroup_mma(weights, _of_x(ring, stage, 0, OF_D), left, is_async=True)
        right = warpgroup_mma_wait(1, (right,))
        mbarrier.arrive(free.index(last), pred=step > TEAM)
        weights = _unpacked(ring, stage, zero, 1, OF_D, MODE, BITS, BIASES, WARPS, BLOCK_M, dtype)
        right = warpgroup_mma(weights, _of_x(ring, stage, 1, OF_D), right, is_async=True)
        left = warpgroup_mma_wait(1, (left,))
        last = stage
        stage, phase = after(stage // TEAMS, phase, STAGES // TEAMS)
        stage = stage * TEAMS + TEAM
    right = warpgroup_mma_wait(0, (right,))
    if _is_small(MODE, dtype):
        left, right = left * 2.0**60, right * 2.0**60
    if OF_D:
        left += right
    if TEAM > 0:
        sums.index(TEAM * HALVES).store(left)
        if not OF_D:
            sums.index(TEAM * HALVES + 1).store(right)
        mbarrier.arrive(summed)
    else:
        if TEAMS > 1:
            mbarrier.wait(summed, 0)
            for team in gl.static_range(1, TEAMS):
                left += sums.index(team * HALVES).load(layout)
                if not OF_D:
                    right += sums.index(team * HALVES + 1).load(layout)
        column = tile * BLOCK_F
        _store(out_ptr, left, row, column, part, M, F, WARPS, BLOCK_M)
        if not OF_D:
            _store(out_ptr, right, row, column + HALF, part, M, F, WARPS, BLOCK_M)


@gluon.jit
def unpacked_matmul_kernel(
    x_desc,  # [M, D] in blocks [BLOCK_M, BLOCK_D]
    w_desc,  # [D * BITS / 32, F] in blocks [BLOCK_D * BITS / 32, BLOCK_F]
    s_desc,  # [D / GROUP, F] in blocks of BLOCK_D / GROUP rows, or 1
    b_desc,  # likewise, or None
    out_ptr,  # [SPLITS, M, F]
    M: gl.constexpr,
    D: gl.constexpr,
    F: gl.constexpr,
    MODE: gl.constexpr,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,
    SPLITS: gl.constexpr,
    WARPS: gl.constexpr,  # that multiply
    BLOCK_M: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    ORDERING: gl.constexpr,  # warps that put x into the order of the codes
    TEAMS: gl.constexpr,  # groups of WARPS warps that multiply, each every TEAMS-th step
    MULTIPLYING: gl.constexpr,  # registers per thread of each but the first of them
    FEEDING: gl.constexpr,  # registers per thread that does not multiply
):
    dtype: gl.constexpr = x_desc.dtype
    BIASES: gl.constexpr = b_desc is not None
    ring = _make_ring(w_desc, s_desc, dtype, BIASES, BLOCK_M, BLOCK_D, STAGES)
    BLOCK_F: gl.constexpr = w_desc.block_type.shape[1]
    HALF: gl.constexpr = 64 if BLOCK_F == 64 else BLOCK_F // 2
    sums = gl.allocate_shared_memory(gl.float32, [(4 if TEAMS == 3 else TEAMS) * (BLOCK_F // HALF), HALF, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(summed, count=max(1, TEAMS - 1))
    if TEAMS == 1:
        gl.warp_specialize(
            [
                (_multiply, (out_ptr, ring, sums, summed, dtype, M, D, F, MODE, BITS, BIASES, SPLITS, WARPS, BLOCK_M, BLOCK_D, STAGES, 0, 1)),
                (_order, (ring, M, D, MODE, BITS, SPLITS, BLOCK_M, BLOCK_D, STAGES, ORDERING)),
                (_copy, (x_desc, w_desc, s_desc, b_desc, ring, M, D, BIASES, GROUP, SPLITS, BLOCK_M, BLOCK_D, STAGES)),
            ],
            [ORDERING, 1],
            [FEEDING, FEEDING],
        )  # fmt: skip
    elif TEAMS == 2:
        gl.warp_specialize(
            [
                (_multiply, (out_ptr, ring, sums, summed, dtype, M, D, F, MODE, BITS, BIASES, SPLITS, WARPS, BLOCK_M, BLOCK_D, STAGES, 0, 2)),
                (_multiply, (out_ptr, ring, sums, summed, dtype, M, D, F, MODE, BITS, BIASES, SPLITS, WARPS, BLOCK_M, BLOCK_D, STAGES, 1, 2)),
                (_order, (ring, M, D, MODE, BITS, SPLITS, BLOCK_M, BLOCK_D, STAGES, ORDERING)),
                (_copy, (x_desc, w_desc, s_desc, b_desc, ring, M, D, BIASES, GROUP, SPLITS, BLOCK_M, BLOCK_D, STAGES)),
            ],
            [WARPS, ORDERING, 1],
            [MULTIPLYING, FEEDING, FEEDING],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (out_ptr, ring, sums, summed, dtype, M, D, F, MODE, BITS, BIASES, SPLITS, WARPS, BLOCK_M, BLOCK_D, STAGES, 0, 3)),
                (_multiply, (out_ptr, ring, sums, summed, dtype, M, D, F, MODE, BITS, BIASES, SPLITS, WARPS, BLOCK_M, BLOCK_D, STAGES, 1, 3)),
                (_multiply, (out_ptr, ring, sums, summed, dtype, M, D, F, MODE, BITS, BIASES, SPLITS, WARPS, BLOCK_M, BLOCK_D, STAGES, 2, 3)),
                (_order, (ring, M, D, MODE, BITS, SPLITS, BLOCK_M, BLOCK_D, STAGES, ORDERING)),
                (_copy, (x_desc, w_desc, s_desc, b_desc, ring, M, D, BIASES, GROUP, SPLITS, BLOCK_M, BLOCK_D, STAGES)),
            ],
            [WARPS, WARPS, ORDERING, 1],
            [MULTIPLYING, MULTIPLYING, FEEDING, FEEDING],
        )  # fmt: skip
