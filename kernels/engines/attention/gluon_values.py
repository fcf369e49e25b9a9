"""The sums of a warpgroup of the Hopper forward: weights times values, in one tile of columns or in three."""

# Triton's stubs declare tensors where its compiler accepts constants and integers too.
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation, missing-attribute, bad-index]

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait


@gluon.constexpr_function
def value_width(O, width):
    """Returns the columns of a tile of values, where a tile of queries has `width`: heads of values of more than two such tiles
    are stored in three, others in one."""
    return width if O.HV > 2 * width else O.BLOCK_V


@gluon.constexpr_function
def value_tiles(O, width):
    return (O.HV + value_width(O, width) - 1) // value_width(O, width)


@gluon.jit
def add_values(p, v_tiles, stage, acc):
    """Starts the products of a warpgroup's weights and a block of values, one tile of columns at a time."""
    sums = ()
    for i in gl.static_range(len(acc)):
        v = v_tiles.index(len(acc) * stage + i)
        sums = sums + (warpgroup_mma(p, v, acc[i], is_async=True),)
    return sums


@gluon.jit
def added(acc):
    """Waits for all products; returns their sums."""
    sums = warpgroup_mma_wait(0, acc)
    if len(acc) == 1:
        sums = (sums,)
    return sums


@gluon.jit
def times(acc, factor):
    """Returns the sums with each row times its factor."""
    sums = ()
    for i in gl.static_range(len(acc)):
        sums = sums + (acc[i] * factor[:, None],)
    return sums
