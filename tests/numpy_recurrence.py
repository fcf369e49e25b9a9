"""Recurrences in NumPy, float64, a token and a row at a time: what the contracts of recurrences are held against."""

import itertools

import numpy as np


def walk(step, start, rows, length, segment_ids=None, states=None, reverse=False):
    """Returns (outs [B, T, ...], states [B, G, ...]) of `state, out = step(state, b, t)`.

    With one state a row (G = 1) it starts anew, as `start`, where the id changes; with more, each id has its own. Tokens of a
    negative id are passed over, and have the output 0.
    """
    states = np.repeat(start[None, None], rows, 0) if states is None else np.array(states, np.float64)
    outs = [[None] * length for _ in range(rows)]
    for b in range(rows):
        last = None
        for t in range(length)[:: -1 if reverse else 1]:
            i = 0 if segment_ids is None else int(segment_ids[b][t])
            if i < 0:
                continue
            g = i if states.shape[1] > 1 else 0
            if states.shape[1] == 1 and last not in (None, i):
                states[b, 0] = start
            last = i
            states[b, g], outs[b][t] = step(states[b, g], b, t)
    like = next(y for row in outs for y in row if y is not None)
    return np.array([[np.zeros_like(like) if y is None else y for y in row] for row in outs]), states


def ids_of_cuts(cuts, length):
    """Returns the ids [1, T] of a row that is cut there."""
    ids = np.full((1, length), -1)
    for g, (begin, end) in enumerate(itertools.pairwise(cuts)):
        ids[0, begin:end] = g
    return ids


def slope(function, floats, direction, step=1e-5):
    """Returns the derivative of a function of a dict of float64 arrays along a direction, by central differences."""
    moved = [{n: x + s * step * direction[n] for n, x in floats.items()} for s in (1, -1)]
    return (function(moved[0]) - function(moved[1])) / (2 * step)


def weighed(outputs):
    """Returns a sum of arrays in which every element counts differently."""
    return sum(float(np.sum(np.asarray(y, np.float64) * np.cos(np.arange(y.size)).reshape(y.shape))) for y in outputs)
