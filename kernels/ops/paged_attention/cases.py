"""Shapes and options of paged attention, for tests, benchmarks and tuning."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.framework.backend import Case

# Combined options and quantised caches have their own tests against a loop, so here they run as slow cases.
SLOW = frozenset({"slow"})
SMOKE = frozenset({"smoke"})
BENCH, CODE = frozenset({"bench"}), frozenset({"bench", "code"})


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


def _on_device(width: str, dtype: Any):
    """Returns a generator of large pages, which are drawn where they are used: NumPy would take minutes."""

    def shaped(dims):
        return jax.ShapeDtypeStruct(_of_width(width)(dims), dtype)

    def make(rng, dims):
        key, shape = jax.random.key(int(rng.integers(2**31))), shaped(dims).shape
        if jnp.issubdtype(dtype, jnp.integer):
            return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), dtype)
        return jax.random.normal(key, shape, dtype)

    vars(make)["shaped"] = shaped
    return make


def _decode(name: str, B: int, S: int, C: int, tags: frozenset[str] = BENCH, *, T: int = 1, dtype: Any = jnp.bfloat16):
    """Returns a case of B requests of S keys in pages of C, with 32 query and 8 key heads as in Llama 3 8B."""
    dims = {"B": B, "T": T, "N": 32, "K": 8, "H": 128, "Hv": 128, "pages": B * S // C, "C": C}
    caches = {"key_cache": _on_device("H", dtype), "value_cache": _on_device("Hv", dtype)}
    scales = {"k_scale": _scale, "v_scale": _scale} if jnp.issubdtype(dtype, jnp.integer) else {}
    return Case(name, dims, make={"kv_lens": _full, "block_tables": _own_pages, **caches, **scales}, tags=tags)


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
        tags=SLOW | {"code"},
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
        tags=BENCH,
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
        tags=SLOW | {"code"},
    ),
    _decode("decode_8k", 64, 8192, 16, CODE),
    _decode("decode_8k_pages_of_64", 64, 8192, 64),
    _decode("decode_64k", 64, 65536, 16),
    _decode("decode_64k_pages_of_64", 64, 65536, 64),
    _decode("decode_128k_alone", 1, 131072, 16),
    _decode("decode_8k_int8", 64, 8192, 16, CODE, dtype=jnp.int8),
    _decode("prefill_2k_of_8k", 1, 8192, 16, CODE, T=2048),
)

# One length is past the room of its table, as on a rank that has the first part of each request.
LSE_MAKE = {"kv_lens": _lens(13, 19, 1, 0), "block_tables": _tables(4)}
WITH_LSE = (
    Case("decode", ROWS, **APART, make=LSE_MAKE, tags=SMOKE | {"code"}),
    Case(
        "together",
        {**ROWS, "T": 3, "sinks": 1},
        options={**OPTIONS, "causal": False},
        arrays=("softmax_aux", "alibi_slopes"),
        make={**LSE_MAKE, **INT8, "k_scale": _scale_of_slots, "v_scale": _scale},
        tags=SLOW | {"code"},
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
        tags=CODE,
    ),
)

APPEND_DIMS = {"M": 6, "K": 2, "H": 16, "Hv": 24, "pages": 5, "C": 4}
APPEND = (
    Case(
        "small",
        APPEND_DIMS,
        make={"slots": lambda rng, dims: _integers([3, -1, 19, 0, 20, 7])},
        tags=SMOKE | {"code"},
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
    Case(
        "tokens_of_2048",
        {"M": 2048, "K": 8, "H": 128, "Hv": 128, "pages": 4096, "C": 16},
        make={"slots": lambda rng, dims: _integers(rng.permutation(dims["pages"] * dims["C"])[: dims["M"]])},
        tags=BENCH,
    ),
)

UPDATE = {**SMALL, "pages": 27}
UPDATE_MAKE = {**RAGGED_MAKE, "block_tables": _distinct_tables(5)}
APPEND_AND_ATTEND = (
    Case("mixed", UPDATE, make=UPDATE_MAKE, tags=SMOKE | {"code"}),
    Case(
        "together",
        {**UPDATE, "sinks": 1},
        options={**OPTIONS, "causal": False},
        arrays=("softmax_aux", "alibi_slopes"),
        make={**UPDATE_MAKE, **INT8, "k_scale": _scale, "v_scale": _scale_of_slots},
        tags=SLOW,
    ),
)
