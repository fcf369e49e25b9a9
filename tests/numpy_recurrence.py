"""Recurrences in NumPy, float64, a token and a row at a time: what the contracts of recurrences are held against."""

import itertools

import numpy as np
from hypothesis import strategies as st


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


@st.composite
def calls(draw, names):
    """Draws a call of a public function on one row: its name, sizes, dtype, which tokens are a sequence, and states or none."""
    T = draw(st.sampled_from([1, 2, 7, 21]))
    kind = draw(st.sampled_from(["whole", "segment_ids", "cu_seqlens", "cum_seqlens"]))
    where = {}
    if kind == "segment_ids":
        where = {kind: np.array([draw(st.lists(st.integers(-1, 2), min_size=T, max_size=T))])}
    elif kind != "whole":
        where = {kind: np.array([0, *sorted(draw(st.lists(st.integers(0, T), min_size=1, max_size=3)))])}
    return {
        "name": draw(st.sampled_from(names)),
        "T": T,
        "heads": draw(st.sampled_from([(1, 1), (2, 1), (2, 2)])),
        "seed": draw(st.integers(0, 99)),
        "dtype": draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"])),
        "where": where,
        "state": draw(st.sampled_from(["", "state", "initial_state"])),
        "scale": draw(st.sampled_from([None, 0.7])),
        "some": draw(st.booleans()),
    }


def check_call(run, reference, arrays, tokens, drawn, state_shape):
    """Holds `run(arrays, **options)` -> (out, state) to `reference(arrays, ids, state [1, ...])`, each sequence by itself.

    Args:
      tokens: names of the arrays that have a dim of tokens, their second.
    """
    allowed = 1e-5 if drawn["dtype"] == "float32" else 3e-2
    where, rng = drawn["where"], np.random.default_rng(drawn["seed"])
    cuts = next((where[n] for n in ("cu_seqlens", "cum_seqlens") if n in where), None)
    count = 1 if cuts is None else len(cuts) - 1
    states, given = np.zeros((count, *state_shape), np.float32), dict(where)
    if drawn["state"]:
        states = given[drawn["state"]] = rng.standard_normal(states.shape).astype(np.float32)
    out, final = (np.asarray(y, np.float64) for y in run(arrays, **given))
    ids = where.get("segment_ids")
    spans = [(0, drawn["T"])] if cuts is None else itertools.pairwise(cuts)
    for i, (begin, end) in enumerate(spans):
        part = {n: x[:, begin:end] if n in tokens else x for n, x in arrays.items()}
        if begin == end or (ids is not None and (ids < 0).all()):
            np.testing.assert_array_equal(final[i], states[i])
            continue
        want, state = reference({n: np.asarray(x, np.float64) for n, x in part.items()}, ids, states[i : i + 1])
        for got, exact in ((out[:, begin:end], want), (final[i], state)):
            assert np.abs(got - exact).max() < allowed * (1 + np.abs(exact).max())
    assert cuts is None or not out[:, cuts[-1] :].any()
