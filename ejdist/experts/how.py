"""How the tokens of a call are dispatched: what its caller gives, and what is chosen of what is left open."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import jax

from ejdist.experts.choice import choose, choose_chunks
from ejdist.experts.narrow import BF16


@dataclass(frozen=True)
class DispatchConfig:
    """How tokens are dispatched to their experts; see `exchange`."""

    scheme: Any = "auto"
    buffer: float = 1.25
    chunks: int | None = 1  # None: by the expected time
    capacity: float | None = None
    precision: str = BF16
    max_ranks: int | None = None

    def options(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def chosen(
    how: DispatchConfig,
    place: Any,
    tokens: int,
    num_experts: int,
    top_k: int,
    x: jax.Array,
    params: Mapping[str, jax.Array],
    on_choice: Any,
) -> DispatchConfig:
    """Returns how tokens are dispatched, with a scheme and a number of chunks; place: the `ExpertSharding` of a call."""
    if place.ranks == 1 or place.alike:  # nothing is dispatched
        return replace(how, chunks=how.chunks or 1)
    if how.scheme != "auto" and how.chunks is not None:
        return how
    sizes = tuple(jax.lax.axis_size(a) if place.mesh is None else place.mesh.shape[a] for a in place.axis)
    kind = _kind_of(place.mesh) if place.mesh is not None else None
    kind = jax.local_devices()[0].device_kind if kind is None else kind
    named = isinstance(how.scheme, str)  # of one that is the caller's own the time is not known
    choice = choose(
        axis_sizes=sizes, tokens=tokens, top_k=top_k, width=x.shape[2], itemsize=x.dtype.itemsize, buffer=how.buffer,
        num_experts=num_experts, max_ranks=how.max_ranks, precision=how.precision, device_kind=kind,
        pinned=how.scheme if named and how.scheme != "auto" else None,
    )  # fmt: skip
    told = []
    if how.scheme == "auto":
        how = replace(how, scheme=choice.scheme)
        told.append(choice.reason)
    if how.chunks is None:
        # Inside of a `shard_map` they are the device's own.
        devices = 1 if place.mesh is None else place.ranks * math.prod(place.mesh.shape[a] for a in place.axes["F"])
        weights = sum(p.size for p in params.values()) / devices
        rows = tokens * top_k / (num_experts // place.ranks)
        chunks, reason = choose_chunks(
            how.scheme, choice.seconds.get(how.scheme) if named else None, ranks=place.ranks, rows=rows, weights=weights,
            itemsize=x.dtype.itemsize, device_kind=kind,
        )  # fmt: skip
        how = replace(how, chunks=chunks)
        told.append(f"experts.chunks: {reason}")
    for line in told if on_choice is not None else ():
        on_choice(line)
    return how


def _kind_of(mesh: Any) -> str | None:
    return mesh.devices.flat[0].device_kind if isinstance(mesh, jax.sharding.Mesh) else None
