"""Measures the bandwidth of a mesh: the time of each collective along each axis, by the bytes that a device sends."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.costs import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER
from ejdist.layout import spec
from ejdist.mapped import map_shards
from ejdist.mesh import slices_of

UNITS = {
    "message_bytes": "size of a device's whole array: gathered, or before it is reduced or exchanged",
    "bytes": "bytes that each device sends: the minimum for the collective",
    "seconds": "of one collective out of many started in sequence: the median over rounds",
    "bytes_per_second": "bytes / seconds, per device",
}
ON_ACCELERATORS, ON_CPUS = (2**20, 2**24, 2**27), (2**16, 2**20)


def _collectives(axis: str, size: int) -> dict[str, tuple[Callable[[Any], Any], float, int]]:
    """Returns name -> (the collective on a local array, bytes that a device sends for each byte of the whole array,
    number of shards that the whole array is passed in)."""
    ring = [(i, (i + 1) % size) for i in range(size)]
    others = (size - 1) / size
    return {
        ALL_GATHER: (lambda x: jax.lax.all_gather(x, axis, tiled=True), others, size),
        REDUCE_SCATTER: (lambda x: jax.lax.psum_scatter(x, axis, tiled=True), others, 1),
        ALL_REDUCE: (lambda x: jax.lax.psum(x, axis), 2 * others, 1),
        ALL_TO_ALL: (lambda x: jax.lax.all_to_all(x, axis, 0, 0, tiled=True), others, 1),
        PERMUTE: (lambda x: jax.lax.ppermute(x, axis, ring), 1.0, 1),
    }


def crosses(mesh: jax.sharding.Mesh, axis: str) -> str:
    """Returns the widest boundary between two neighbours along an axis: "slices", "hosts", or "devices" of one host."""
    number = {d: i for i, one in enumerate(slices_of(list(mesh.devices.flat))) for d in one}
    dim = mesh.axis_names.index(axis)
    for word, owner in (("slices", number.__getitem__), ("hosts", lambda d: d.process_index)):
        owners = np.vectorize(owner, otypes=[int])(mesh.devices)
        if (owners != np.take(owners, [0], axis=dim)).any():
            return word
    return "devices"


def measure(
    mesh: jax.sharding.Mesh, messages: Sequence[int] | None = None, *, calls: int = 10, rounds: int = 5
) -> dict[str, Any]:
    """Returns the measurements as JSON-compatible values; `UNITS` documents them. Every process of the mesh must call
    this.

    Each collective runs along one axis on all devices at once, as in a training step, so rings compete for shared
    links.

    Args:
      messages: bytes of a device's whole array; default: three sizes, or two small ones on CPUs.
      calls, rounds: collectives started in sequence, and how many timed rounds of them follow one warmup round.
    """
    # CPU devices share a thread pool, where concurrent collectives may deadlock.
    if mesh.devices.flat[0].platform == "cpu":
        messages, calls = ON_CPUS if messages is None else messages, 1
    elif messages is None:
        messages = ON_ACCELERATORS
    axes = {
        axis: {
            "size": size,
            "crosses": crosses(mesh, axis),
            "measured": _measure_axis(mesh, axis, messages, calls, rounds),
        }
        for axis, size in mesh.shape.items()
        if size > 1
    }
    device = mesh.devices.flat[0]
    return {
        "units": UNITS,
        "device_kind": device.device_kind,
        "devices": mesh.size,
        "processes": jax.process_count(),
        "jax": jax.__version__,
        "mesh": dict(mesh.shape),
        "axes": axes,
    }


def _measure_axis(
    mesh: jax.sharding.Mesh, axis: str, messages: Sequence[int], calls: int, rounds: int
) -> list[dict[str, Any]]:
    partition = spec(("N",), {"N": tuple(mesh.axis_names)})
    size, rows = mesh.shape[axis], []
    for name, (collective, sent, parts) in _collectives(axis, size).items():
        run = jax.jit(map_shards(collective, mesh, partition, partition))
        for message in messages:
            elements = max(message // 4 // size, 1) * size  # of float32, a multiple of the axis size
            array = jax.jit(
                lambda n=elements // parts * mesh.size: jnp.ones(n, jnp.float32),
                out_shardings=jax.sharding.NamedSharding(mesh, partition),
            )()
            seconds = _seconds(run, array, calls, rounds)
            moved = 4 * elements * sent
            rows.append(
                {
                    "collective": name,
                    "message_bytes": 4 * elements,
                    "bytes": round(moved),
                    "seconds": seconds,
                    "bytes_per_second": round(moved / seconds),
                }
            )
    return rows


def _seconds(run: Callable[[Any], Any], array: Any, calls: int, rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        jax.block_until_ready([run(array) for _ in range(calls)][-1])
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times[1:])
