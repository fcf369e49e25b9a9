"""Shapes and options of native sparse attention, for tests, benchmarks and tuning."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kernels.framework.backend import Case

SMALL = {"B": 2, "T": 37, "S": 37, "N": 4, "K": 2, "H": 16, "Hv": 16}
GATES = ("g_cmp", "g_slc", "g_swa")


def _indices(count: int):
    """Returns a generator of random block selections, some with duplicates, some with empty slots."""

    def make(rng, dims):
        own_block = (np.arange(dims["T"]) + dims["S"] - dims["T"])[None, :, None, None] // 4
        indices = rng.integers(-1, own_block + 1, (dims["B"], dims["T"], dims["K"], count))
        return jnp.asarray(indices, jnp.int32)

    return make


def _counts(rng, dims):
    return jnp.asarray(rng.integers(0, 5, (dims["B"], dims["T"], dims["K"])), jnp.int32)


def documents(rng, dims):
    """Returns the starts of documents of random lengths, with padding between two of them and at the end."""
    starts = np.full((dims["B"], dims["S"]), -1)
    for row in starts:
        cuts = np.sort(rng.choice(np.arange(1, dims["S"]), 4, replace=False))
        for n, (begin, end) in enumerate(zip([0, *cuts[:-1]], cuts, strict=True)):
            if n != 2:
                row[begin:end] = begin
    return jnp.asarray(starts, jnp.int32)


def _far_apart(shared: float):
    """Returns a generator of 16 blocks of 64 tokens for each query: its own, the first, the one before its own, and 13 spread
    over the others at random. That share of them is the same for 32 queries side by side."""

    def make(rng, dims):
        B, T, K, others = dims["B"], dims["T"], dims["K"], 13
        own_block = ((np.arange(T) + dims["S"] - T) // 64)[:, None, None]
        together = np.repeat(rng.random((B, -(-T // 32), K, others)), 32, axis=1)[:, :T]
        drawn = np.where(rng.random(together.shape) < shared, together, rng.random(together.shape))
        inner = np.maximum(own_block - 2, 0)
        blocks = 1 + np.floor((np.arange(others) + drawn) * inner / others).astype(np.int32)
        again = np.diff(blocks, axis=-1, prepend=0) == 0
        blocks = np.where(again | (inner == 0), -1, blocks)
        always = np.concatenate(
            [own_block, np.where(own_block > 0, 0, -1), np.where(own_block > 1, own_block - 1, -1)], -1
        )
        return jnp.asarray(np.concatenate([np.broadcast_to(always, (B, T, K, 3)), blocks], -1), jnp.int32)

    return make


def _case(name, dims, *tags, gates=GATES, make=(), **options) -> Case:
    options = {"block_size": 4, "num_blocks": 4, "window": 5, **options}
    return Case(name, dims, options, arrays=gates, make=dict(make), tags=frozenset(tags))


_LONG = {"B": 1, "T": 16384, "S": 16384, "N": 16, "K": 1, "H": 128, "Hv": 128}
_LONGER = {"B": 1, "T": 65536, "S": 65536, "N": 32, "K": 2, "H": 128, "Hv": 128}
_PAPER = {"block_size": 64, "num_blocks": 16, "window": 0}
CASES = (
    # One branch, and the selection: tests of the first case (mostly transformations) spend their time compiling.
    _case("best_blocks", SMALL, "smoke", "code", gates=("g_slc",), window=0, num_blocks=3),
    _case("three_branches", SMALL, "slow"),
    _case("given", {**SMALL, "Hv": 8}, "slow", make={"block_indices": _indices(5)}.items()),
    _case("documents", SMALL, "slow", make={"starts": documents, "block_counts": _counts}.items()),
    _case(
        "selected_alone",
        {**SMALL, "T": 9},
        "slow",
        "code",
        gates=(),
        make={"block_indices": _indices(3), "block_counts": _counts}.items(),
        window=0,
    ),
    _case("ungated_window", {**SMALL, "K": 1}, "slow", gates=("g_cmp",), softmax_scale=0.7, num_blocks=1),
    _case(
        "part_of_the_queries",
        {**SMALL, "T": 8},
        "slow",
        make={"q_start": lambda rng, dims: jnp.int32(11), "starts": documents}.items(),
        softmax_scale=0.4,
    ),
    _case("blocks_of_one", SMALL, "slow", block_size=1, num_blocks=100),
    _case(
        "odd_sizes",
        {"B": 1, "T": 150, "S": 150, "N": 6, "K": 2, "H": 40, "Hv": 72},
        "slow",
        make={"starts": documents}.items(),
        block_size=20,
        num_blocks=5,
        window=33,
    ),
    _case("paper_16k", _LONG, "bench", block_size=64, num_blocks=16, window=512),
    # Blocks are given: what is compared is not the choice.
    _case("random_64k", _LONGER, "bench", gates=GATES[:2], make={"block_indices": _far_apart(0.0)}.items(), **_PAPER),
    _case(
        "clustered_64k", _LONGER, "bench", gates=GATES[:2], make={"block_indices": _far_apart(0.75)}.items(), **_PAPER
    ),
    _case("paper_64k", _LONGER, "bench", "code", **{**_PAPER, "window": 512}),
)
