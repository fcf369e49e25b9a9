"""Tile shapes for kernels that hold whole rows of [M, D]: in registers for Triton, in VMEM for Pallas."""

from __future__ import annotations

from kernels.framework.measured import power_of_two
from kernels.framework.target import MULTIPROCESSORS

# A row must fit the registers of one program: with 32 warps, 32 elements of each array per thread.
WIDEST = 32768
# From this width on, a backward is fastest with one large program per multiprocessor (measured, benchmarks/results).
WIDE = 4096

# The forward splits a row into chunks where padding it to a power of two would make it wider than MOST_IDLE times its width. On
# an H200, rows of 4,672 and 8,584 entries then take 0.72 of the time of one tile. From NARROWEST_CUT to FEW_CHUNKS entries it
# splits rows of any width but a power of two into at most FEW chunks, with 2 warps: rows of 520 entries then take 0.68 of the
# time, of 1,160 0.80, of 1,480 0.90, of 992 0.93.
NARROWEST_CUT, FEW_CHUNKS, FEW, MOST_IDLE = 256, 2048, 5, 1.125
# Columns of a chunk and warps of a program: of rows narrower than WIDE, and of others.
CHUNK_AND_WARPS = (1024, 4), (2048, 8)

# The following were measured for RMS norms in bfloat16 on an H200 (benchmarks/comparisons/results/norm_tiles_h200.json).
# (widest row, columns of a chunk) of the backward, which cuts a row where its chunks have fewer columns than one padded tile.
# Time over that of one tile: 0.90 for rows of 4,376 entries, 0.96 of 5,376, 0.78 of 9,216, 0.79 of 11,264, 0.52 of 18,432 and
# 0.51 of 25,600.
BACKWARD_CHUNKS = ((5 * 1024, 1024), (7 * 2048, 2048), (7 * 4096, 4096))
# In the backward a thread holds 4 entries of a chunk, but 8 (16 bytes in bfloat16) if a row has at most FEW_BACKWARD chunks of
# a width in OF_FEW: 0.78 of the time of 4 for rows of 3,000 entries and 0.72 of 5,568.
FEW_BACKWARD, OF_FEW = 3, (1024, 2048)
# The (chunks, columns) of a backward that takes 16 warps, whose threads have more registers: 0.68 of the time of 32.
OF_16_WARPS = 5, 4096
# A forward whose tile has NARROW columns, from the first to the second number, takes tiles of OF_NARROW entries and 2 warps:
# 0.96 of the time of twice as many entries and 8 warps, for rows of 256 and of 512.
NARROW, OF_NARROW = (128, 512), 2048

# VMEM for a kernel's blocks and temporaries. The smallest default limit of a chip is 16 MiB.
VMEM_BUDGET = 12 * 2**20
# Rows per register tile of the narrowest dtype (16 bits). Blocks have a multiple of this.
ROW_TILE = 16
MOST_ROWS = 512


def tiles(D: int) -> tuple[int, int]:
    """Returns (chunks, block_d): the tiles of a row, as wide as a power of two. They cover D exactly if at most 8 can."""
    block_d = D & -D
    if block_d >= 16 and D // block_d <= 8:
        return D // block_d, block_d
    return 1, max(16, power_of_two(D))


def forward_tiles(D: int) -> tuple[int, int]:
    """Returns the same for a forward, whose last chunk may be cut off: as much of a power of two as is idle else."""
    if not is_cut(D):
        return tiles(D)
    chunk = power_of_two(1 + (D - 1) // FEW) if D < FEW_CHUNKS else CHUNK_AND_WARPS[D >= WIDE][0]
    return -(-D // chunk), chunk


def backward_tiles(D: int) -> tuple[int, int]:
    """Returns the same for a backward, whose last chunk may be cut off: where chunks have fewer columns than one tile."""
    chunks, block_d = tiles(D)
    if chunks > 1 or D < WIDE:
        return chunks, block_d
    chunk = next((chunk for most, chunk in BACKWARD_CHUNKS if D <= most), block_d)
    cut = -(-D // chunk), chunk
    return cut if cut[0] * chunk < block_d else (chunks, block_d)


def is_cut(D: int) -> bool:
    """Returns whether the rows of a forward have chunks of which the last is cut off."""
    chunks, block_d = tiles(D)
    most = 1 if D < FEW_CHUNKS else MOST_IDLE
    return chunks == 1 and D >= NARROWEST_CUT and block_d > most * D


def rows(D: int, elements: int) -> int:
    """Returns the number of rows in a tile of about `elements` elements, a power of two."""
    chunks, block_d = tiles(D)
    return 1 << (max(1, min(32, elements // (chunks * block_d))).bit_length() - 1)


def warps(elements: int, each: int) -> int:
    """Returns the number of warps of a program with `each` elements per thread."""
    return min(32, max(1, power_of_two(elements // (32 * each))))


def shapes(D: int, itemsize: int, *, crowded: bool = False) -> tuple[int, int, int, int, int]:
    """Returns (rows and warps per program of the forward, those of the backward, number of programs of the backward).

    Args:
      crowded: whether the backward holds more in registers than two arrays and one sum. Matters for rows narrower than WIDE,
        whose sums have as many rows as the tile.
    """
    chunks, block_d = tiles(D)
    # 8 elements of a chunk per thread are one load of 16 bytes for a 16-bit type.
    forward_rows = rows(D, 4096)
    if is_cut(D):
        forward_warps = 2 if D < FEW_CHUNKS else CHUNK_AND_WARPS[D >= WIDE][1]
    elif chunks == 1 and NARROW[0] <= block_d <= NARROW[1]:
        forward_rows, forward_warps = OF_NARROW // block_d, 2
    else:
        forward_warps = warps(forward_rows * block_d, 16 if chunks == 1 else 8)
    chunks, block_d = backward_tiles(D)
    if chunks > 1:
        backward_rows = rows(D, 2048)
        few = chunks <= FEW_BACKWARD and block_d in OF_FEW
        backward_warps = warps(backward_rows * block_d, 8 if few else 4)
        if (chunks, block_d) == OF_16_WARPS and not crowded:
            backward_warps = 16
    elif D >= WIDE:
        backward_rows = rows(D, 16384 // itemsize)
        backward_warps = 16 if D <= 16384 else 32  # a row must fit the registers, at most 255 per thread
    else:
        backward_rows = rows(D, max(2048, 2 * D))
        backward_warps = warps(backward_rows * block_d, 16 if crowded else 32)
    # 16 warps per multiprocessor, in one or several programs. Each program has one partial sum of each weight's gradient.
    programs = MULTIPROCESSORS * max(1, 16 // backward_warps)
    return forward_rows, forward_warps, backward_rows, backward_warps, programs


def candidates(D: int) -> list[tuple[int, int, int, int, int]]:
    """Returns the shapes to tune over, in the form of `shapes`."""
    chunks, block_d = tiles(D)
    choices = []
    for elements in (1024, 2048, 4096, 8192, 16384):
        height = rows(D, elements)
        for num_warps in (2, 4, 8, 16, 32):
            if 8 <= height * chunks * block_d // (32 * num_warps) <= 64:
                for each in (1, 2, 4, 8):
                    choices.append((height, num_warps, height, num_warps, MULTIPROCESSORS * each))
    return list(dict.fromkeys(choices))


def block_rows(D: int, itemsizes: tuple[int, ...]) -> int:
    """Returns the rows per block in VMEM for arrays [M, D] of those item sizes; less than ROW_TILE if they do not fit."""
    lanes = -(-D // 128) * 128
    # Each array twice (double buffering), and float32 copies.
    of_a_row = lanes * sum(2 * size + 4 for size in itemsizes)
    return min(MOST_ROWS, VMEM_BUDGET // of_a_row // ROW_TILE * ROW_TILE)


def parts(height: int) -> list[int]:
    """Returns all, a half and a quarter of a block's rows, rounded to whole tiles."""
    return [max(ROW_TILE, height // n // ROW_TILE * ROW_TILE) for n in (1, 2, 4)]
