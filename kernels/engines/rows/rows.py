"""How kernels that hold whole rows [M, D] cut them: for Triton in the registers of programs, for Pallas in blocks of VMEM."""

from __future__ import annotations

from kernels.framework.measured import power_of_two
from kernels.framework.target import MULTIPROCESSORS

# A row is held in the registers of one program: 32 elements of each array a thread, at 32 warps.
WIDEST = 32768
# From this width on, a backward does best with one large program a multiprocessor (measured, benchmarks/results).
WIDE = 4096

# What blocks and temporaries of a kernel on a TPU may take. The least of the chips' default limits is 16 MiB.
VMEM_BUDGET = 12 * 2**20
# Rows of one register tile for the narrowest dtype (16 bit); a block of rows is a multiple of it.
ROW_TILE = 16
MOST_ROWS = 512


def tiles(D: int) -> tuple[int, int]:
    """Returns (chunks, block_d): a row as tiles whose width is a power of two, with no column to spare if D allows it."""
    block_d = D & -D
    if block_d >= 16 and D // block_d <= 8:
        return D // block_d, block_d
    return 1, max(16, power_of_two(D))


def rows(D: int, elements: int) -> int:
    """Returns how many rows are a tile of that many elements, a power of two."""
    chunks, block_d = tiles(D)
    return 1 << (max(1, min(32, elements // (chunks * block_d))).bit_length() - 1)


def warps(elements: int, each: int) -> int:
    """Returns the warps of a program whose threads have `each` of its elements."""
    return min(32, max(1, power_of_two(elements // (32 * each))))


def shapes(D: int, itemsize: int, *, crowded: bool = False) -> tuple[int, int, int, int, int]:
    """Returns (rows and warps of a program of the forward, the same of the backward, programs of the backward).

    Args:
      crowded: the backward has more in its registers than two arrays and one sum: another array, or another sum. Of rows
        narrower than WIDE, whose sums have a row for each of the tile's.
    """
    chunks, block_d = tiles(D)
    # 8 elements of a chunk in a thread are a load of 16 bytes of a 16-bit type.
    forward_rows = rows(D, 4096)
    forward_warps = warps(forward_rows * block_d, 16 if chunks == 1 else 8)
    if chunks > 1:
        backward_rows = rows(D, 2048)
        backward_warps = warps(backward_rows * block_d, 4)
    elif D >= WIDE:
        backward_rows = rows(D, 16384 // itemsize)
        backward_warps = 16 if D <= 16384 else 32  # a row must fit the registers, and a thread has at most 255
    else:
        backward_rows = rows(D, max(2048, 2 * D))
        backward_warps = warps(backward_rows * block_d, 16 if crowded else 32)
    # 16 warps on each multiprocessor, in one program or in several that take turns. Each keeps one partial sum of the gradient
    # of a weight.
    programs = MULTIPROCESSORS * max(1, 16 // backward_warps)
    return forward_rows, forward_warps, backward_rows, backward_warps, programs


def candidates(D: int) -> list[tuple[int, int, int, int, int]]:
    """Returns what `shapes` may be, for tuning."""
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
    """Returns the rows of a block of VMEM for arrays [M, D] of those item sizes; less than ROW_TILE: they do not fit."""
    lanes = -(-D // 128) * 128
    # Each array twice (one block moves while the other is worked on), and float32 copies in the middle.
    of_a_row = lanes * sum(2 * size + 4 for size in itemsizes)
    return min(MOST_ROWS, VMEM_BUDGET // of_a_row // ROW_TILE * ROW_TILE)


def parts(height: int) -> list[int]:
    """Returns the whole of a block's rows, a half and a quarter of it, in whole tiles."""
    return [max(ROW_TILE, height // n // ROW_TILE * ROW_TILE) for n in (1, 2, 4)]
