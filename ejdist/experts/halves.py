"""Two halves of a batch that go through layers side by side: neither reads the other, so the exchange of one may run beside
attention and the products of the other. What a layer says of its tokens is of both together.

Sources: DeepSeek-AI, *DeepSeek-V3*, 2024, arXiv:2412.19437 (DualPipe: two microbatches, the exchange of one beside the work of
the other); NVIDIA, Megatron-LM, 2025 (one batch's exchange beside the other's attention).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.experts.losses import balance_loss
from ejdist.experts.metrics import Stats, dead_experts, max_violation, merge
from ejdist.layout import current_layout, mesh_here, on_mesh, spec
from ejdist.mapped import map_shards

NONE, HALVES = "none", "halves"
OVERLAPS = (NONE, HALVES)


def _on_each_device(function: Callable, arrays: Sequence[jax.Array], results: int, mesh: Any) -> Any:
    """Returns what a function makes of each device's own rows of arrays [B, T, ...] of one rank: one array, or a tuple."""
    mesh = mesh_here(mesh)
    if mesh is None or mesh.size == 1:
        return function(*arrays)
    dims = ("B", "T", *"_" * (arrays[0].ndim - 2))
    where = spec(dims, on_mesh(current_layout().activations, mesh))
    return map_shards(function, mesh, (where,) * len(arrays), where if results == 1 else (where,) * results)(*arrays)


def halved(x: jax.Array, *, mesh: Any, overlap: str = HALVES) -> list[jax.Array]:
    """Returns the halves of an array [B, T, ...]: of each device the first of its rows, and the others, so that nothing moves.
    With overlap="none" it is whole, the only one.

    Raises:
      ValueError: a device has one row.
    """
    if overlap == NONE:
        return [x]

    def cut(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        half = x.shape[0] // 2
        if not half:
            raise ValueError(
                f"experts.overlap = {HALVES!r} halves the rows of a device, which has one of a batch here: give at least two "
                f"rows a device, or experts.overlap={NONE}"
            )
        return x[:half], x[half:]

    return list(_on_each_device(cut, [x], 2, mesh))


def joined(parts: Sequence[jax.Array], *, mesh: Any) -> jax.Array:
    """Returns the array [B, T, ...] that these are of, the result of `halved`."""
    if len(parts) == 1:
        return parts[0]
    return _on_each_device(lambda *parts: jnp.concatenate(parts), parts, 1, mesh)


def of_all(parts: Sequence[Stats], balance: str, load: jax.Array | None) -> Stats:
    """Returns the statistics of the tokens of all parts of a batch, as if they had been routed together; `extra_passes` are
    those of all parts. balance, load: of `route`."""
    if len(parts) == 1:
        return parts[0]
    whole = functools.reduce(merge, parts)
    # The loss of a batch is not the sum of its parts': each has shares of its own. Those of sequences add up.
    loss = whole.balance_loss
    if balance != "sequence":
        loss = balance_loss(whole.counts if load is None else load, whole.probabilities)
    return whole._replace(
        balance_loss=loss,
        max_violation=max_violation(whole.counts),
        dead_experts=dead_experts(whole.counts),
        extra_passes=functools.reduce(jnp.add, [part.extra_passes for part in parts]),
    )


# What share of the exchanges of two halves runs beside products, forward and backward, by (platform, whether layers are a loop,
# whether there is a shared expert): of the schedules of two layers, compiled for eight H200s (tests/test_experts_transfers.py)
# and for v5p, see README.md. No device has timed them.
BESIDE = {
    ("gpu", False, True): 15 / 16, ("gpu", False, False): 7 / 16, ("gpu", True, True): 4 / 8, ("gpu", True, False): 1 / 8,
    ("tpu", False, True): 3 / 8, ("tpu", False, False): 1 / 8, ("tpu", True, True): 3 / 8, ("tpu", True, False): 1 / 8,
}  # fmt: skip


def waits_alone(platform: str, in_loop: bool, shared: bool) -> float:
    """Returns the share of the exchanges of two halves that nothing runs beside."""
    return 1 - BESIDE[platform, in_loop, shared]
