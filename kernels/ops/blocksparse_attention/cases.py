"""Shapes and options of block-sparse attention, for tests, benchmarks and tuning."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.ranges import EXAMPLES
from kernels.framework.backend import Case

SMALL = {"B": 2, "T": 37, "S": 37, "N": 4, "K": 2, "H": 16, "Hv": 16}
CROSS = {**SMALL, "T": 29, "S": 53}
BLOCKS = (8, 8)


def _blocks(density: float, block_size=BLOCKS, rows: bool = False, heads: bool = False):
    """Returns a generator of random block masks whose second block row is empty. NumPy, so that set blocks can be counted."""

    def make(rng, dims):
        shape = [-(-dims[d] // size) for d, size in zip("TS", block_size, strict=True)]
        lead = (dims["B"] if rows else 1, dims["N"] if heads else 1)
        blocks = rng.random((*lead, *shape)) < density
        blocks[:, :, 1] = False
        return blocks

    return make


def _packed(rng, dims):
    """Returns ids of documents of random lengths; the end of the second row is padding."""
    rows = []
    for row in range(dims["B"]):
        cuts = np.sort(rng.choice(np.arange(1, dims["T"]), 3, replace=False))
        ids = np.searchsorted(cuts, np.arange(dims["T"]), side="right")
        rows.append(np.where(ids == 3, -1, ids) if row % 2 else ids)
    return jnp.asarray(np.stack(rows), jnp.int32)


def _segments(**options):
    return lambda rng, dims: MaskInfo.from_segments(_packed(rng, dims), **options)


def _permuted(rng, dims):
    order = rng.permutation(dims["T"])
    ids, positions = _packed(rng, dims)[:, order], jnp.asarray(order, jnp.int32)[None]
    return MaskInfo(
        q_segment_ids=ids, kv_segment_ids=ids, q_positions=positions, kv_positions=positions, window=(20, 0)
    )


def _prefix(rng, dims):
    return MaskInfo(prefix_lengths=jnp.asarray(rng.integers(1, dims["S"], dims["B"]), jnp.int32), causal=True)


def _dense(rng, dims):
    shape = (dims["B"], dims["N"], dims["T"], dims["S"])
    return MaskInfo(attention_mask=jnp.asarray(rng.random(shape) < 0.6))


def _case(name, dims, *tags, density=0.5, blocks=BLOCKS, rows=False, heads=False, mask=None, **rest) -> Case:
    options = {"block_size": blocks, **rest.pop("options", {})}
    make = {"block_mask": _blocks(density, blocks, rows, heads)} | ({} if mask is None else {"mask": mask})
    return Case(name, dims, options, make=make, tags=frozenset(tags), **rest)


def _causal(rng, dims):
    return MaskInfo(causal=True)


def _rules(**rules):
    return lambda rng, dims: MaskInfo(**rules)


# Blocks that kernels support: tiles have at least 16 rows, or 64 on Hopper.
TILES = (16, 16)
_ODD = {"B": 2, "T": 150, "S": 150, "N": 4, "K": 2, "H": 80, "Hv": 72}
_LONGEST = {"B": 1, "T": 32768, "S": 32768, "N": 16, "K": 4, "H": 128, "Hv": 128}
_LONG = {"B": 1, "T": 16384, "S": 16384, "N": 8, "K": 2, "H": 128, "Hv": 128}
CASES = (
    _case("shared", SMALL, "smoke", mask=_causal),
    _case("per_head", SMALL, "slow", heads=True, mask=_causal),
    _case("per_row", CROSS, "slow", rows=True),
    _case("per_row_and_head", {**CROSS, "Hv": 8}, "slow", rows=True, heads=True, blocks=(4, 16)),
    _case("segments", SMALL, "slow", rows=True, mask=_segments(causal=True, chunk_size=5), density=0.8),
    _case("permuted", SMALL, "slow", mask=_permuted),
    _case("prefix", SMALL, "slow", mask=_prefix),
    *(_case(name, SMALL, "slow", mask=_rules(**rules)) for name, rules in EXAMPLES.items()),
    _case("dense_mask", SMALL, "slow", heads=True, mask=_dense),
    _case(
        "together",
        {**SMALL, "sinks": 2},
        "slow",
        arrays=("softmax_aux",),
        options={"softmax_scale": 0.4, "logits_soft_cap": 1.5},
        mask=lambda rng, dims: MaskInfo(causal=True, window=(11, 0)),
    ),
    _case("nothing", SMALL, "slow", density=0.0),
    _case("tiles_shared", SMALL, "smoke", blocks=TILES, mask=_causal, density=0.7),
    _case("tiles_per_row_and_head", {**CROSS, "Hv": 8}, "slow", blocks=(16, 32), rows=True, heads=True, density=0.7),
    _case(
        "tiles_segments", SMALL, "slow", blocks=TILES, rows=True, mask=_segments(causal=True, chunk_size=9), density=0.8
    ),
    _case("tiles_permuted", SMALL, "slow", blocks=TILES, mask=_permuted, density=0.7),
    _case("tiles_prefix", SMALL, "slow", blocks=TILES, heads=True, mask=_prefix, density=0.7),
    _case("tiles_dense_mask", SMALL, "slow", blocks=TILES, heads=True, mask=_dense, density=0.7),
    _case(
        "tiles_together",
        {**SMALL, "sinks": 2},
        "kernels",
        blocks=TILES,
        heads=True,
        density=0.8,
        arrays=("softmax_aux",),
        options={"softmax_scale": 0.4, "logits_soft_cap": 1.5},
        mask=lambda rng, dims: MaskInfo(causal=True, window=(11, 0)),
    ),
    _case("tiles_nothing", SMALL, "slow", blocks=TILES, density=0.0),
    _case("odd_widths", _ODD, "code", "slow", blocks=(128, 64), rows=True, mask=_segments(causal=True)),
    _case("tenth_of_32k", _LONGEST, "bench", density=0.1, blocks=(128, 128)),
    _case("tenth_of_32k_per_head", _LONGEST, "bench", density=0.1, blocks=(128, 128), heads=True),
    _case("tenth_of_32k_narrow", _LONGEST, "bench", density=0.1, blocks=(64, 64), heads=True),
    _case("tenth_of_16k", _LONG, "bench", density=0.1, blocks=(128, 128)),
    _case("tenth_of_16k_per_head", _LONG, "bench", "code", density=0.1, blocks=(64, 64), heads=True, mask=_causal),
)
