"""Shapes that test every backend of the recurrent cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels.framework.backend import Case

_GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def documents(rng: Any, sizes: Mapping[str, int]) -> Any:
    """Returns segment ids of consecutive documents, some ids reused, with padding inside and at the end."""
    B, T = sizes["B"], sizes["T"]
    ids = np.cumsum(rng.random((B, T)) < 3 / T, axis=1) % 4
    ids[rng.random((B, T)) < 0.15] = -1
    ids[0, -max(T // 6, 1) :] = -1
    return jnp.asarray(ids, jnp.int32)


def packed(rng: Any, sizes: Mapping[str, int]) -> Any:
    """Returns ids of three sequences per row: the second is empty, and the row ends in padding."""
    B, T = sizes["B"], sizes["T"]
    ids = np.full((B, T), -1)
    for row in ids:
        first, last = np.sort(rng.integers(1, T, 2))
        row[:first], row[first:last] = 0, 2
    return jnp.asarray(ids, jnp.int32)


def _weights(cell_type: str, bidirectional: bool = False, biases: bool = True) -> Callable:
    """Returns a generator of weights at torch's default scale."""

    def make(rng: Any, sizes: Mapping[str, int]) -> Any:
        F, D = sizes["F"], sizes["D"]
        rows = _GATES[cell_type] * F
        shapes = {"weight_ih": (rows, D), "weight_hh": (rows, F)}
        shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)} if biases else {}
        if bidirectional:
            shapes |= {f"{n}_reverse": s for n, s in shapes.items()}
        return {n: (rng.uniform(-1, 1, s) * 1.5 / np.sqrt(F)).astype(np.float32) for n, s in shapes.items()}

    return make


def _cell(
    name: str,
    dims: Mapping[str, int],
    cell_type: str = "lstm",
    *tags: str,
    rows: int = 0,
    ids: Callable | None = None,
    biases: bool = True,
    **options: Any,
) -> Case:
    """Returns a case; `rows` is the number of rows of its initial state, 0 for no state."""
    arguments = {**({} if cell_type == "lstm" else {"cell_type": cell_type}), **options}
    make = {"weights": _weights(cell_type, options.get("bidirectional", False), biases)}
    make |= {} if ids is None else {"segment_ids": ids}
    shape = (dims["B"], dims.get("G", 1), rows, dims["F"])
    arrays, shapes = (("initial_state",), {"initial_state": shape}) if rows else ((), {})
    return Case(name, dims, arguments, arrays, make, shapes, frozenset(tags))


_SMALL = {"B": 2, "T": 5, "D": 6, "F": 4}
_ODD = {"B": 2, "T": 19, "D": 5, "F": 3}
RECURRENT = (
    _cell("small", {**_SMALL, "T": 18}, "lstm", "smoke"),
    _cell("gru_documents", _ODD, "gru", "code", rows=1, ids=documents),
    _cell("both_ways", _ODD, "lstm", "code", rows=4, ids=documents, bidirectional=True),
    _cell("packed", {**_ODD, "G": 3}, "gru", "slow", rows=2, ids=packed, bidirectional=True, num_states=3),
    _cell("packed_lstm", {**_ODD, "G": 3}, "lstm", rows=2, ids=packed, biases=False, num_states=3),
    _cell("rnn_relu", {**_ODD, "T": 1}, "rnn", rows=1, biases=False, activation="relu"),
    _cell("rnn", _ODD, "rnn", "slow", rows=2, ids=documents, bidirectional=True),
    _cell("gru_sigmoid", _SMALL, "gru", "slow", activation="sigmoid"),
    _cell("lstm_1k", {"B": 64, "T": 512, "D": 1024, "F": 1024}, "lstm", "bench", "code"),
)


def _sums(rng: Any, sizes: Mapping[str, int]) -> Any:
    """Returns states (a, b, p) in which b, the sum of weights, is positive."""
    shape = (sizes["B"], sizes["G"], sizes["F"])
    state = [rng.standard_normal(shape), rng.uniform(0.5, 2, shape), rng.standard_normal(shape)]
    return np.stack(state, axis=2).astype(np.float32)


def _mix(
    name: str, dims: Mapping[str, int], *tags: str, state: bool = True, ids: Callable | None = None, **options: Any
):
    make = {} if ids is None else {"segment_ids": ids}
    make |= {"initial_state": _sums} if state else {}
    return Case(name, dims, options, (), make, tags=frozenset(tags))


_CHANNELS = {"B": 2, "G": 1, "T": 37, "F": 5}
RWKV4 = (
    _mix("small", {**_CHANNELS, "T": 6}, "smoke", "code", state=False),
    _mix("documents", _CHANNELS, ids=documents),
    _mix("packed", {**_CHANNELS, "G": 3}, "code", ids=packed, num_states=3),
    _mix("one_token", {**_CHANNELS, "T": 1}, "slow"),
    _mix("long", {**_CHANNELS, "T": 200}, "slow", ids=documents),
    _mix("rwkv_3b", {"B": 8, "T": 4096, "F": 2560}, "bench", "code", state=False),
    _mix("rwkv_64k", {"B": 1, "T": 65536, "F": 2560}, "bench", state=False),
)
