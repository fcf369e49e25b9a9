"""Shapes that test every backend of the state spaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels.framework.backend import Case


def _decay(*dims: str, least: float = 0.05, most: float = 1.5) -> Callable:
    """Returns a generator of negative A, so that the steps below give decays between 0.2 and 0.999."""
    return lambda rng, sizes: -rng.uniform(least, most, [sizes[d] for d in dims]).astype(np.float32)


def _steps(*dims: str) -> Callable:
    """Returns a generator of dt, as a softplus outputs it."""
    return lambda rng, sizes: np.exp(rng.uniform(np.log(0.01), 0.0, [sizes[d] for d in dims])).astype(np.float32)


def documents(rng: Any, sizes: Mapping[str, int]) -> Any:
    """Returns segment ids of consecutive documents, some ids reused, with padding inside and at the end."""
    B, T = sizes["B"], sizes["T"]
    ids = np.cumsum(rng.random((B, T)) < 3 / T, axis=1) % 4
    ids[rng.random((B, T)) < 0.15] = -1
    ids[0, -max(T // 6, 1) :] = -1
    return jnp.asarray(ids, jnp.int32)


def packed(count: int) -> Callable:
    """Returns a generator of ids of `count` sequences in one row: the second is empty, and the row ends in padding."""

    def make(rng: Any, sizes: Mapping[str, int]) -> Any:
        B, T = sizes["B"], sizes["T"]
        nonempty = [g for g in range(count) if g != 1]
        ids = np.full((B, T), -1)
        for row in ids:
            cuts = np.sort(rng.integers(0, T, len(nonempty)))
            for g, begin, end in zip(nonempty, [0, *cuts[:-1]], cuts, strict=True):
                row[begin:end] = g
        return jnp.asarray(ids, jnp.int32)

    return make


def _cases(
    make: Mapping[str, Callable],
    small: Any,
    odd: Any,
    long: Any,
    optional: tuple[str, ...],
    bench: Any,
    code: tuple[str, ...] = (),
) -> Any:
    """Returns the cases common to all: one token, lengths that no chunk divides, documents, packed sequences.

    Args:
      code: names of those with the tag `code`.
    """

    def case(name: str, dims: Any, *tags: str, arrays: Any = (), states: int = 1, **more: Any) -> Case:
        options = {} if states == 1 else {"num_states": states}
        tags = (*tags, "code") if name in code else tags
        return Case(name, dims, options, tuple(arrays), {**make, **more}, tags=frozenset(tags))

    state = ("initial_state",)
    return (
        case("small", small, "smoke", arrays=optional),
        case("documents", odd, "kernels", arrays=(*optional, *state), segment_ids=documents),
        case("packed", {**odd, "B": 1, "G": 3}, arrays=state, states=3, segment_ids=packed(3)),
        case("one_token", {**small, "T": 1}, "slow", arrays=(*optional, *state)),
        case("long", long, "slow", arrays=(*optional, *state), segment_ids=documents),
        *(case(name, dims, "bench", arrays=optional) for name, dims in bench.items()),
    )


_SIZES_V2 = {"B": 2, "G": 1, "N": 4, "K": 2, "H": 8, "Hv": 4}
V2 = _cases(
    {"A": _decay("N"), "dt": _steps("B", "T", "N")},
    {**_SIZES_V2, "T": 12},
    {**_SIZES_V2, "T": 77, "N": 3, "K": 1, "H": 5, "Hv": 7},
    {**_SIZES_V2, "T": 300},
    ("D",),
    {
        "mamba2_8k": {"B": 2, "T": 8192, "N": 64, "K": 1, "H": 128, "Hv": 64},
        "mamba2_128k": {"B": 1, "T": 131072, "N": 64, "K": 1, "H": 128, "Hv": 64},
    },
    code=("packed", "mamba2_8k"),
)
V1 = _cases(
    {"A": _decay("F", "H"), "dt": _steps("B", "T", "F")},
    {"B": 2, "G": 1, "T": 12, "F": 8, "H": 4},
    {"B": 2, "G": 1, "T": 41, "F": 5, "H": 3},
    {"B": 2, "G": 1, "T": 150, "F": 6, "H": 4},
    ("D",),
    {
        "mamba_4k": {"B": 2, "T": 4096, "F": 4096, "H": 16},
        "mamba_64k": {"B": 1, "T": 65536, "F": 1024, "H": 16},
    },
    code=("small", "packed", "mamba_4k"),
)


def lengths(mean: int) -> Callable:
    """Returns a generator of ids of documents of `mean` tokens in the mean, one after the other, without padding."""

    def make(rng: Any, sizes: Mapping[str, int]) -> Any:
        return jnp.asarray(np.cumsum(rng.random((sizes["B"], sizes["T"])) < 1 / mean, axis=1), jnp.int32)

    return make


def _conv() -> tuple[Case, ...]:
    small, odd = {"B": 2, "G": 1, "T": 12, "F": 8, "W": 4}, {"B": 2, "G": 1, "T": 37, "F": 5, "W": 4}
    base = _cases({}, small, odd, {**odd, "T": 200, "W": 2}, ("bias",), {}, code=("packed",))
    silu = {"activation": "silu"}
    short = {**odd, "T": 2}
    return (
        *base,
        Case("silu", {**odd, "W": 3}, silu, ("bias", "initial_state")),
        Case("wide_window", {**odd, "W": 7}, silu, ("initial_state",), {"segment_ids": documents}),
        Case("shorter_than_the_window", short, {}, ("initial_state",), tags=frozenset({"slow"})),
        Case("qwen3_next", {"B": 1, "T": 8192, "F": 8192, "W": 4}, silu, tags=frozenset({"bench", "code"})),
        Case("mamba2_8k", {"B": 2, "T": 8192, "F": 4352, "W": 4}, silu, ("bias",), tags=frozenset({"bench"})),
        Case(
            "documents_32k",
            {"B": 1, "T": 32768, "F": 8192, "W": 4},
            silu,
            make={"segment_ids": lengths(2048)},
            tags=frozenset({"bench", "code"}),
        ),
    )


CONV = _conv()
