"""Batches on the devices of a program: each host puts its own rows there."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ejdist.training.program import Program


def place_batch(batch: dict[str, np.ndarray], program: Program, first_row: int) -> dict[str, jax.Array]:
    """Puts a batch on the devices, permuted to the order; `batch` has this host's rows, which start at `first_row`."""

    def put(name: str) -> jax.Array:
        like = program.batch[name]
        rows = program.order.permute(batch[name], axis=1)

        def shard(index: Any) -> np.ndarray:
            b, t = index
            start, stop, _ = b.indices(like.shape[0])
            return rows[start - first_row : stop - first_row, t]

        return jax.make_array_from_callback(like.shape, like.sharding, shard)

    return {name: put(name) for name in program.batch}


def place_limits(limits: np.ndarray, program: Program) -> tuple[jax.Array, ...]:
    """Returns the step's extra arguments: the limits, replicated, or nothing if it does not skip spikes."""
    like = program.limits
    if like is None:
        return ()
    return (jax.make_array_from_callback(like.shape, like.sharding, lambda index: limits[index]),)


def local_rows(program: Program) -> slice:
    """Returns the rows of the global batch that this host's devices hold."""
    like = program.batch["tokens"]
    index = like.sharding.addressable_devices_indices_map(like.shape).values()
    spans = [slices[0].indices(like.shape[0])[:2] for slices in index if slices]
    return slice(min(s for s, _ in spans), max(e for _, e in spans))
