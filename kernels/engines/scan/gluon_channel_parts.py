"""Parts of the Gluon kernels of decays of channels: factors of the steps of `triton_channel_steps.py`, for a chunk of 64 tokens
and 64 channels. Sums are those of log decays since the beginning of the chunk."""

# Gluon's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.engines.scan.gluon_tiles import SQUARE, C, again

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
