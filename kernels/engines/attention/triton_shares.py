"""Into how many programs the query heads of a key head are dealt, in the backward of attention on Hopper.

A program has a block of keys and goes through the queries of all heads that share them. With few key heads and short rows,
programs are fewer than multiprocessors, or all wait for the longest: two rows of 6,400 tokens with one key head are 100
programs. Programs that share a block of keys write gradients in float32, which are then added. With segment ids the steps
of a program are not known at compile time: those of programs that are fewer than multiprocessors are then taken for those of
a causal mask, and of more nothing is shared unless a configuration asks for it (`BwdParams.shares`).
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from kernels.engines.attention.tiles import FIRST, LAST
from kernels.framework.target import MULTIPROCESSORS

# What a program costs besides its steps, in steps of a pair of blocks, where it has a block of keys alone and where it shares
# one: fitted to 41 times of eight shapes on an H200. With these the choice is at most 6% slower than the best of every shape.
ALONE, SHARED = 4, 1
# Fewer steps than this of a program in the mean were not measured.
FEWEST = 12
# Even programs, whose longest takes less than this multiple of the mean, were measured only where they are fewer than
# multiprocessors. Those of a window are even: there, writing float32 gradients may cost more than sharing saves.
EVEN = 1.5
# What further programs must save at least, of the time with fewer.
WORTH = 0.03
# From this number of programs per multiprocessor on, little is idle at the end.
ENOUGH = 16


def shares_of_group(spans: Any, batch: int, key_heads: int, group: int, queries: int, side: int = 8) -> int:
    """Returns how many programs share the query heads of a key head: a divisor of `group`.

    Args:
      spans: of the blocks of keys, as `tiles.spans` has them, [B or 1, blocks, 4]; of these only NumPy arrays are read.
      group: query heads of a key head.
      queries: blocks of queries. Where spans are known at run time alone, they are taken for those of a causal mask.
      side: how many heads run side by side, at most.
    """
    if group == 1:
        return 1
    if isinstance(spans, np.ndarray):
        steps = np.broadcast_to(spans[..., LAST] - spans[..., FIRST], (batch, *spans.shape[1:-1])).reshape(batch, -1)
    elif batch * spans.shape[1] * key_heads < MULTIPROCESSORS:
        steps = np.tile(np.linspace(queries, 0, spans.shape[1], endpoint=False), (batch, 1))
    else:
        return 1
    programs = steps.size * key_heads
    if programs >= ENOUGH * MULTIPROCESSORS or (programs >= MULTIPROCESSORS and steps.max() < EVEN * steps.mean()):
        return 1
    best, least = 1, makespan(steps * group + ALONE, key_heads, side)
    for shares in range(2, group + 1):
        if group % shares == 0 and steps.mean() * (group // shares) >= FEWEST:
            time = makespan(steps * (group // shares) + SHARED, key_heads * shares, side)
            if time < (1 - WORTH) * least:
                best, least = shares, time
    return best


def check_shares(shares: int | None, group: int) -> None:
    """Raises ValueError where what is asked for does not divide a group; None: nothing is."""
    if shares is not None and group % shares:
        raise ValueError(
            f"flash_attention: argument 'cfg': bwd_params.shares = {shares} must divide the {group} query heads of a key head"
        )


def makespan(steps: np.ndarray, heads: int, side: int) -> float:
    """Returns when the last of the programs ends that start in the order of `gluon_gradients.place`.

    Args:
      steps: of each program of a head, [batch rows, blocks].
      heads, side: how many heads there are, and run side by side.
    """
    side = next(n for n in range(min(side, heads), 0, -1) if heads % n == 0)
    busy = [0.0] * MULTIPROCESSORS
    for row in steps:
        for program in np.tile(np.repeat(row, side), heads // side).tolist():
            heapq.heapreplace(busy, busy[0] + program)
    return max(busy)
