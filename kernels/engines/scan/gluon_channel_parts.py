"""Parts of the Gluon kernels of decays of channels: factors of the steps of `triton_channel_steps.py`, for a chunk of 64 tokens
and 64 channels. Sums are those of log decays since the beginning of the chunk."""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.engines.scan.gluon_tiles import C, again

WARPS = gl.constexpr(4)  # of a program, of which two share a multiprocessor
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 256 // WARPS, 16]))
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0]))  # 16 contiguous bytes a thread
LOG2E = gl.constexpr(1.4426950408889634)
LEVELS = gl.constexpr(6)  # of 64 tokens
SUMS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
BY_ROW = gl.constexpr(gl.SliceLayout(1, SQUARE))
BY_COLUMN = gl.constexpr(gl.SliceLayout(0, SQUARE))


@gluon.jit
def run_of(ptr):
    """Returns the documents of tokens: see `layout.Layout`."""
    coded = gl.load(ptr)
    return gl.where(coded < 0, -1 - coded, coded)


@gluon.jit
def wide(tile):
    return tile.load(SQUARE).to(gl.float32)


@gluon.jit
def clear_padding(tiles, first: gl.constexpr, runs_ptr):
    """Sets tokens of padding to zero in two tiles: they may hold anything, even NaN."""
    there = gl.load(runs_ptr + gl.arange(0, C, gl.SliceLayout(1, WIDE))) >= 0
    for i in gl.static_range(2):
        tile = tiles.index(first + i)
        x = tile.load(WIDE)
        tile.store(gl.where(there[:, None], x, gl.zeros_like(x)))


@gluon.jit
def store_tile(ptr, x, tile, token, column, STRIDE: gl.constexpr):
    """Stores [tokens, channels] of a chunk through a tile, so that each thread writes 16 contiguous bytes; in other dtypes than
    the tile's from registers."""
    if ptr.dtype.element_ty == tile.dtype:
        tile.store(x.to(tile.dtype))
        rows, columns = gl.arange(0, C, gl.SliceLayout(1, WIDE)), gl.arange(0, C, gl.SliceLayout(0, WIDE))
        at = (token + rows).to(gl.int64)[:, None] * STRIDE + (column + columns)[None, :]
        gl.store(ptr + at, tile.load(WIDE))
    else:
        rows, columns = gl.arange(0, C, BY_ROW), gl.arange(0, C, BY_COLUMN)
        at = (token + rows).to(gl.int64)[:, None] * STRIDE + (column + columns)[None, :]
        gl.store(ptr + at, x.to(ptr.dtype.element_ty))


@gluon.jit
def _sums_at(sums_ptr, rows, columns, there, ROW: gl.constexpr):
    """Returns sums at tokens [C] of all rows and at columns; 0 for those that are not there."""
    at = rows.to(gl.int64)[:, None] * ROW + columns[None, :]
    return gl.load(sums_ptr + at, mask=there[:, None] & (columns >= 0)[None, :], other=0.0)


@gluon.jit
def factors(sums, sums_ptr, token, column, number, at_level, ROW: gl.constexpr):
    """Returns the decays of a step as tokens read and as they are written, [C, C]. If number < at_level, they are those of
    blocks of 2 << number tokens, referred to the middle of each channel's sums over its block; else those of the level of
    1 << number tokens, the same twice."""
    columns = column + gl.arange(0, C, BY_COLUMN)
    most = 2 << number
    begin = again(gl.arange(0, C, BY_ROW)) & -most
    since = sums.load(SQUARE) * LOG2E
    if number < at_level:
        low = _sums_at(sums_ptr, token + begin - 1, columns, begin > 0, ROW)
        high = _sums_at(sums_ptr, token + begin + most - 1, columns, begin >= 0, ROW)
        since -= (low + high) * (0.5 * LOG2E)
        reads, writes = gl.exp2(since), gl.exp2(-since)
    else:
        since -= _sums_at(sums_ptr, token + begin + (1 << number) - 1, columns, begin >= 0, ROW) * LOG2E
        reads = gl.exp2(gl.minimum(since, -since))
        writes = reads
    return reads, writes
