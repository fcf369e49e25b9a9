"""Shapes and options of paged attention, for tests, benchmarks and tuning."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from kernels.framework.backend import Case

# Combined options and quantised caches have their own tests against a loop, so here they run as slow cases.
SLOW = frozenset({"slow"})
SMOKE = frozenset({"smoke"})


def _integers(values: Any) -> Any:
    return jnp.asarray(np.asarray(values, np.int32))


def _tables(max_pages: int):
    """Returns a generator of block tables: random pages, sometimes shared between requests as common prefixes are."""

    def make(rng, dims):
        requests = dims.get("requests") or dims["B"]
        table = rng.integers(0, dims["pages"], (requests, max_pages))
        return _integers(table)

    return make


def _distinct_tables(max_pages: int):
    """Returns a generator of block tables without duplicate pages, as writing requires."""

    def make(rng, dims):
        order = rng.permutation(dims["pages"])[: dims["requests"] * max_pages]
        return _integers(order.reshape(dims["requests"], max_pages))

    return make


def _cuts(*counts: int):
    return lambda rng, dims: _integers([0, *np.cumsum(counts)])


def _lens(*lens: int):
    return lambda rng, dims: _integers(lens)


# Benchmark inputs at any scale: the same number of full pages for each request.
def _requests(dims) -> int:
    return dims.get("requests") or dims["B"]


def _own_pages(rng, dims):
    each = max(1, dims["pages"] // _requests(dims))
    return _integers(np.arange(_requests(dims) * each).reshape(-1, each) % dims["pages"])


def _full(rng, dims):
    keys = dims["S"] if "S" in dims else dims["C"] * max(1, dims["pages"] // _requests(dims))
    return _integers([keys] * _requests(dims))


def _decodes_and_a_prompt(rng, dims):
    return _integers([*range(dims["requests"]), dims["M"]])


def _slots(dims) -> tuple[int, ...]:
    """Returns all dims of a cache except the last."""
    return tuple(dims[d] for d in (("pages", "C", "K") if "pages" in dims else ("B", "S", "K")))


def _of_width(*names: str):
    """Returns the shape of a cache, a function of dims."""
    return lambda dims: (*_slots(dims), sum(dims[name] for name in names))


# Float pages: keys and values in separate arrays.
APART: dict[str, Any] = {"arrays": ("value_cache",), "shapes": {"key_cache": _of_width("H")}}


def _int8(width: str):
    """Returns a generator of random pages over the full int8 range."""
    return lambda rng, dims: jnp.asarray(rng.integers(-128, 128, _of_width(width)(dims)), jnp.int8)


INT8 = {"key_cache": _int8("H"), "value_cache": _int8("Hv")}


def _scale(rng, dims):
    return jnp.asarray(0.01 * (0.5 + rng.random((1, 1, dims["K"]))), jnp.float32)


def _scale_of_slots(rng, dims):
    return jnp.asarray(0.01 * (0.5 + rng.random(_slots(dims))), jnp.float32)


# A prompt, a request with queries but no earlier keys, a decode, an empty request, and a continued prompt; the last rows
# belong to no request.
SMALL = {"M": 24, "N": 4, "K": 2, "H": 16, "Hv": 16, "pages": 12, "C": 4, "requests": 5}
RAGGED_MAKE = {
    "query_start_loc": _cuts(9, 4, 1, 0, 7),
    "kv_lens": _lens(9, 4, 17, 0, 18),
    "block_tables": _tables(5),
}
OPTIONS = {"softmax_scale": 0.4, "logits_soft_cap": 1.5, "window": (6, None)}
RAGGED = (
    Case("mixed", SMALL, **APART, make=RAGGED_MAKE, tags=SMOKE),
    Case(
        "together",
        {**SMALL, "sinks": 2, "Hv": 24},
        options=OPTIONS,
        arrays=("value_cache", "softmax_aux", "alibi_slopes"),
        shapes=APART["shapes"],
        make=RAGGED_MAKE,
        tags=SLOW,
    ),
    Case("two_sided", SMALL, **APART, options={"causal": False, "window": (3, 2)}, make=RAGGED_MAKE, tags=SLOW),
    Case(
        "int8",
        SMALL,
        make={**RAGGED_MAKE, **INT8, "k_scale": _scale, "v_scale": _scale_of_slots},
        tags=SLOW,
    ),
    Case(
        "keys_and_values_in_a_slot",
        {**SMALL, "Hv": 8},
        shapes={"key_cache": _of_width("H", "Hv")},
        make=RAGGED_MAKE,
        tags=SLOW,
    ),
    Case(
        "mixed_8k",
        {"M": 2048 + 31, "N": 32, "K": 8, "H": 128, "Hv": 128, "pages": 16384, "C": 16, "requests": 32},
        **APART,
        make={"query_start_loc": _decodes_and_a_prompt, "kv_lens": _full, "block_tables": _own_pages},
        tags=frozenset({"bench"}),
    ),
)

ROWS = {"B": 4, "T": 1, "N": 4, "K": 2, "H": 16, "Hv": 16, "pages": 10, "C": 4}
PAGES_MAKE = {"kv_lens": _lens(13, 1, 8, 0), "block_tables": _tables(4)}
PAGES = (
    Case("decode", ROWS, **APART, make=PAGES_MAKE, tags=SMOKE),
    Case(
        "together",
        {**ROWS, "T": 3, "sinks": 1},
        options={**OPTIONS, "causal": False},
        arrays=("softmax_aux", "alibi_slopes"),
        make={**PAGES_MAKE, **INT8, "k_scale": _scale_of_slots, "v_scale": _scale},
        tags=SLOW,
    ),
    Case(
        "decode_8k",
        {"B": 32, "T": 1, "N": 32, "K": 8, "H": 128, "Hv": 128, "pages": 16384, "C": 16},
        **APART,
        make={"kv_lens": _full, "block_tables": _own_pages},
        tags=frozenset({"bench"}),
    ),
)

DENSE_ROWS = {"B": 4, "T": 1, "S": 19, "N": 4, "K": 2, "H": 16, "Hv": 16}
DENSE_MAKE = {"kv_lens": _lens(13, 1, 19, 0)}
DENSE = (
    Case("decode", DENSE_ROWS, make=DENSE_MAKE, tags=SMOKE),
    Case(
        "together",
        {**DENSE_ROWS, "T": 3, "sinks": 1},
        options={**OPTIONS, "causal": False},
        arrays=("softmax_aux", "alibi_slopes"),
        make={
            **DENSE_MAKE,
            **INT8,
            "kv_starts": _lens(2, 0, 5, 0),
            "k_scale": _scale_of_slots,
            "v_scale": _scale,
        },
        tags=SLOW,
    ),
    Case(
        "decode_8k",
        {"B": 16, "T": 1, "S": 8192, "N": 32, "K": 8, "H": 128, "Hv": 128},
        make={"kv_lens": _full},
        tags=frozenset({"bench"}),
    ),
)

APPEND_DIMS = {"M": 6, "K": 2, "H": 16, "Hv": 24, "pages": 5, "C": 4}
APPEND = (
    Case(
        "small",
        APPEND_DIMS,
        make={"slots": lambda rng, dims: _integers([3, -1, 19, 0, 20, 7])},
        tags=SMOKE,
    ),
    Case(
        "int8",
        APPEND_DIMS,
        make={
            **INT8,
            "slots": lambda rng, dims: _integers([3, -1, 19, 0, 20, 7]),
            "k_scale": _scale_of_slots,
            "v_scale": _scale,
        },
    ),
)

UPDATE = {**SMALL, "pages": 27}
UPDATE_MAKE = {**RAGGED_MAKE, "block_tables": _distinct_tables(5)}
APPEND_AND_ATTEND = (
    Case("mixed", UPDATE, make=UPDATE_MAKE, tags=SMOKE),
    Case(
        "together",
        {**UPDATE, "sinks": 1},
        options={**OPTIONS, "causal": False},
        arrays=("softmax_aux", "alibi_slopes"),
        make={**UPDATE_MAKE, **INT8, "k_scale": _scale, "v_scale": _scale_of_slots},
        tags=SLOW,
    ),
)
