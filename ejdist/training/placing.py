"""Batches on the devices of a program: each host puts its own rows there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from ejdist.training.attended import Attended, text_indices
from ejdist.training.program import Program


def permuted(batch: dict[str, np.ndarray], program: Program, attended: Attended | None = None) -> dict[str, np.ndarray]:
    """Returns a batch, or rows of it, in the order of the program's sequence. Threads that read ahead can do this.

    Args:
      attended: of these rows, where it is known.
    """
    index = None
    if program.order.carried:
        index = text_indices(program, batch["segment_ids"]) if attended is None else attended.index
    # The index says where the tokens are, so it is in their order already.
    return {n: index if n == "order" else program.order.permute(batch[n], index=index) for n in program.batch}  # pyrefly: ignore[bad-return]


def place_batch(batch: dict[str, np.ndarray], program: Program, rows: np.ndarray) -> dict[str, jax.Array]:
    """Puts a `permuted` batch on the devices; `batch` has this host's rows, which are these of the global batch, ascending."""

    def put(name: str) -> jax.Array:
        like = program.batch[name]

        def shard(index: Any) -> np.ndarray:
            b, t = index
            start, stop, _ = b.indices(like.shape[0])
            at = int(np.searchsorted(rows, start))  # all rows of the shard are among these, so they follow each other
            return batch[name][at : at + stop - start, t]

        return jax.make_array_from_callback(like.shape, like.sharding, shard)

    return {name: put(name) for name in program.batch}


def place_limits(limits: np.ndarray, program: Program) -> tuple[jax.Array, ...]:
    """Returns the step's extra arguments: the limits, replicated, or nothing if it does not skip spikes."""
    like = program.limits
    if like is None:
        return ()
    return (jax.make_array_from_callback(like.shape, like.sharding, lambda index: limits[index]),)


def local_rows(program: Program) -> np.ndarray:
    """Returns the rows of the global batch that this host's devices hold, int64, ascending: no span, as a mesh gives
    neighbouring devices rows that are far apart."""
    like = program.batch["tokens"]
    return rows_of_indices(like.sharding.addressable_devices_indices_map(like.shape).values(), like.shape[0])


def rows_of_indices(indices: Iterable[Any], count: int) -> np.ndarray:
    """Returns which of `count` rows arrays with these indices of the global one hold, int64, ascending."""
    held = np.zeros(count, bool)
    for index in indices:
        held[index[0] if index else slice(None)] = True
    return np.flatnonzero(held)
