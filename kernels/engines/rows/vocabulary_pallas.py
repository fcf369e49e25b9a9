"""Passes over logits [M, V] on TPUs: tiles of rows and of the vocabulary, each read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.engines.rows.vocabulary import work_of_pass
from kernels.framework.binding import Call
from kernels.toolchains.pallas import pallas_launch

# Entries of a tile: a megabyte of float32, which with its prefetched successor and intermediates fits 16 MiB of VMEM.
ELEMENTS = 256 * 1024
LANES = 128


def facts(config: type) -> Any:
    """Returns the registration of the backend on existing logits."""

    def candidates(call: Call) -> list[Any]:
        # Columns of a tile, the untuned default first; whole tiles of 128 lanes.
        whole = -(-call.dims["V"] // LANES) * LANES
        return [config(block_vocab=n) for n in dict.fromkeys(min(most, whole) for most in (2048, 1024, 4096))]

    return {
        "platforms": {"tpu"},
        "dtypes": {"float32", "bfloat16"},
        "rejects": lambda call: "an array has no elements" if call.logits.size == 0 else None,
        "heuristic": lambda call, platform: candidates(call)[0],
        "candidates": candidates,
    }


def passed(
    kernel: Callable,
    logits: Sequence[jax.Array],
    rows: Sequence[jax.Array],
    cols: int,
    *,
    outputs: int | jnp.dtype,
    accumulators: int = 0,
    **options: Any,
) -> list[jax.Array]:
    """Returns the outputs of `kernel(*logits, *rows, *outputs, *accumulators, V=, **options)` over tiles of all the logits.

    Args:
      logits: [M, V] each, in tiles of `cols` columns; the last tile has the remaining ones.
      rows: [M] each, passed to the kernel as [rows, 1].
      outputs: the number of float32 [M] outputs, accumulated over the tiles of a row; or the dtype of a single [M, V] output.
      accumulators: the number of extra float32 [rows, 1] accumulators carried from one tile of a row to the next.
    """
    M, V = logits[0].shape
    cols = min(V, cols)
    # Narrow tiles occupy whole lanes too, and so do per-row numbers.
    lanes = -(-cols // LANES) * LANES
    height = min(M, max(16, ELEMENTS // len(logits) // lanes // 16 * 16))
    tile, row = pl.BlockSpec((height, cols), lambda i, j: (i, j)), pl.BlockSpec((height, 1), lambda i, j: (i, 0))
    by_row = isinstance(outputs, int)
    out = [jax.ShapeDtypeStruct((M, 1), jnp.float32)] * outputs if by_row else [jax.ShapeDtypeStruct((M, V), outputs)]

    def run(*refs: Any) -> None:
        kernel(*refs, V=V, **options)

    results = pallas_launch(
        run,
        *logits,
        *(x[:, None] for x in rows),
        out_shape=tuple(out),
        grid=(pl.cdiv(M, height), pl.cdiv(V, cols)),
        in_specs=[*(tile for _ in logits), *(row for _ in rows)],
        out_specs=tuple(row if by_row else tile for _ in out),
        scratch_shapes=[pltpu.VMEM((height, 1), jnp.float32)] * accumulators,
        dimension_semantics=("parallel", "arbitrary" if by_row else "parallel"),
        work=work_of_pass(logits, rows, out),
        name=kernel.__name__,
    )
    return [x[:, 0] if by_row else x for x in results]


def column(shape: tuple[int, ...]) -> jax.Array:
    """Returns the vocabulary entry of each element of this tile."""
    return pl.program_id(1) * shape[1] + jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def tile_by_tile(tile: tuple[int, ...], V: int, add: Callable[[Callable], None]) -> None:
    """Calls `add(within)` for a tile; `within(x, other)` replaces entries past the vocabulary by `other`. Only the last
    tile has such entries, and only it pays for the check."""
    cols = tile[1]
    if V % cols == 0:
        add(lambda x, other: x)
        return
    last = pl.num_programs(1) - 1
    pl.when(pl.program_id(1) < last)(lambda: add(lambda x, other: x))
    pl.when(pl.program_id(1) == last)(lambda: add(lambda x, other: jnp.where(column(tile) < V, x, other)))


def finite(x: jax.Array) -> jax.Array:
    """Returns x with 0 in place of infinity and NaN, to subtract in an exponential: infinity minus itself would be NaN."""
    return jnp.where(jnp.abs(x) < jnp.inf, x, 0.0)


def joined(x: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (the running maximum of each row, exponentials of the tile, the factor that rescales earlier sums)."""
    new = jnp.maximum(largest, jnp.max(x, axis=1, keepdims=True))
    return new, jnp.exp(x - finite(new)), jnp.exp(largest - finite(new))
