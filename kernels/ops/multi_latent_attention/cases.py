"""Shapes and options of multi-head latent attention, for tests, benchmarks and tuning."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kernels.engines.attention.masks import MaskInfo
from kernels.framework.backend import Case

SMALL = {"B": 2, "T": 19, "S": 19, "N": 4, "K": 4, "H": 8, "Hr": 4, "Hv": 8, "R": 12}
ROPE = ("query_rope", "key_rope")


def _causal(rng, dims):
    return MaskInfo(causal=True)


def _packed(rng, dims):
    cuts = np.array([5, 6, 14])
    ids = np.searchsorted(cuts, np.arange(dims["T"]), side="right")
    rows = np.stack([ids] * dims["B"])
    rows[-1, 14:] = -1
    return MaskInfo.from_segments(jnp.asarray(rows, jnp.int32), causal=True, window=(6, 0))


def _packed_wide(rng, dims):
    ids = np.repeat([0, 1, -1], [60, 64, dims["T"] - 124])
    return MaskInfo.from_segments(jnp.asarray(ids[None], jnp.int32), causal=True)


CASES = (
    Case("small", SMALL, arrays=ROPE, make={"mask": _causal}, tags=frozenset({"smoke"})),
    Case("no_rope", {**SMALL, "T": 7, "S": 23, "N": 6, "K": 2, "Hv": 5, "R": 9}, tags=frozenset({"slow"})),
    Case(
        "together",
        {**SMALL, "K": 2, "H": 5, "Hr": 6, "Hv": 7, "sinks": 1},
        {"softmax_scale": 0.7, "logits_soft_cap": 2.0, "deterministic": True},
        arrays=(*ROPE, "softmax_aux"),
        make={"mask": _packed},
    ),
    # The parts of a head as the Hopper forward takes them, over two blocks of keys and with padding.
    Case(
        "wide_head",
        {"B": 1, "T": 133, "S": 133, "N": 2, "K": 1, "H": 128, "Hr": 24, "Hv": 64, "R": 16, "sinks": 1},
        arrays=(*ROPE, "softmax_aux"),
        make={"mask": _packed_wide},
        tags=frozenset({"code"}),
    ),
    Case("one_key_head", {**SMALL, "K": 1}, arrays=ROPE, make={"mask": _causal}, tags=frozenset({"slow"})),
    Case(
        "deepseek_v3_8k",
        {"B": 1, "T": 8192, "S": 8192, "N": 128, "K": 128, "H": 128, "Hr": 64, "Hv": 128, "R": 512},
        arrays=ROPE,
        make={"mask": _causal},
        tags=frozenset({"bench"}),
    ),
)


def _lens(*lens: int):
    return {"kv_lens": lambda rng, dims: jnp.asarray(lens, jnp.int32)}


# Benchmark inputs at any scale: each request fills its row, or all requests have the same number of full pages.
def _full(rng, dims):
    return jnp.full(dims["B"], dims["S"], jnp.int32)


def _full_pages(rng, dims):
    return jnp.full(dims["requests"], max(1, dims["pages"] // dims["requests"]) * dims["C"], jnp.int32)


def _own_pages(rng, dims):
    each = max(1, dims["pages"] // dims["requests"])
    pages = jnp.arange(dims["requests"] * each, dtype=jnp.int32) % dims["pages"]
    return pages.reshape(dims["requests"], each)


def _one_token_each(rng, dims):
    return jnp.minimum(jnp.arange(dims["requests"] + 1, dtype=jnp.int32), dims["M"])


def _entries(*slots: str):
    """Returns the shape of a cache: its slots, each holding a latent and a rotary key."""
    return {"kv_cache": lambda dims: (*(dims[d] for d in slots), dims["R"] + dims["Hr"])}


def _decode(name, make, options, *tags, **dims):
    return Case(
        name, dims, {"softmax_scale": 0.3, **options}, make=make, shapes=_entries("B", "S"), tags=frozenset(tags)
    )


DECODE_CASES = (
    _decode("one_token", _lens(17, 5), {}, "smoke", "code", B=2, T=1, S=21, N=4, R=8, Hr=4),
    _decode(
        "several_tokens",
        _lens(600, 2, 0),
        {"sliding_window": 300, "logits_soft_cap": 1.5},
        B=3, T=3, S=600, N=2, R=6, Hr=2,
    ),
    # As Hopper's kernel takes it.
    _decode("many_heads", _lens(150, 40), {}, "code", B=2, T=1, S=150, N=64, R=128, Hr=64),
    _decode("deepseek_v3_8k", {"kv_lens": _full}, {}, "bench", B=32, T=1, S=8192, N=128, R=512, Hr=64),
)  # fmt: skip


def _paged(name, lens, counts, options, *tags, pages, C, N, R, Hr, rest=0):
    """Returns a case with the given lengths and new tokens per request; pages are shuffled and unused table entries junk."""
    lens, counts = np.asarray(lens, np.int32), np.asarray(counts, np.int32)
    num_columns = max(1, -(-int(lens.max()) // C)) + 1

    def tables(rng, dims):
        order = rng.permutation(pages)
        table = np.full((len(lens), num_columns), -7, np.int32)
        used = 0
        for row, n in zip(table, -(-lens // C), strict=True):
            row[:n] = order[used : used + n]
            used += n
        return jnp.asarray(table)

    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    dims = {"M": int(starts[-1]) + rest, "N": N, "R": R, "Hr": Hr, "pages": pages, "C": C, "requests": len(lens)}
    make = {
        "kv_lens": lambda rng, dims: jnp.asarray(lens),
        "block_tables": tables,
        "query_start_loc": lambda rng, dims: jnp.asarray(starts),
    }
    shapes = _entries("pages", "C")
    return Case(name, dims, {"softmax_scale": 0.3, **options}, make=make, shapes=shapes, tags=frozenset(tags))


PAGED_CASES = (
    _paged("decode", (17, 5), (1, 1), {}, "smoke", "code", pages=12, C=4, N=4, R=8, Hr=4),
    _paged(
        "ragged",
        (300, 3, 0, 40, 9),
        (7, 3, 0, 1, 9),
        {"sliding_window": 150, "logits_soft_cap": 1.5},
        "code",
        pages=70, C=6, N=2, R=6, Hr=2, rest=3,
    ),
    Case(
        "deepseek_v3_decode",
        {"M": 64, "N": 128, "R": 512, "Hr": 64, "pages": 64 * 128, "C": 64, "requests": 64},
        {"softmax_scale": 0.3},
        make={"kv_lens": _full_pages, "block_tables": _own_pages, "query_start_loc": _one_token_each},
        shapes=_entries("pages", "C"),
        tags=frozenset({"bench", "code"}),
    ),
)  # fmt: skip
