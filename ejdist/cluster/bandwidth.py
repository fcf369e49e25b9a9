"""How fast a mesh communicates, measured: seconds of each collective along each axis, by the bytes that a device sends."""

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
    "message_bytes": "of a device's array where it is whole: gathered, or not yet reduced or exchanged",
    "bytes": "that each device sends, at the least that the collective can do with",
    "seconds": "of one collective, of many started one after the other: the median of the rounds",
    "bytes_per_second": "bytes / seconds, of one device",
}
ON_ACCELERATORS, ON_CPUS = (2**20, 2**24, 2**27), (2**16, 2**20)


def _collectives(axis: str, size: int) -> dict[str, tuple[Callable[[Any], Any], float, int]]:
    """Returns name -> (the collective on a device's array, bytes that a device sends for each byte of the whole array, in how
    many parts of that the devices' arrays are given)."""
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
    """Returns what two devices that differ along an axis alone may be apart by: "slices", "hosts", or nothing: "devices"."""
    number = {d: i for i, one in enumerate(slices_of(list(mesh.devices.flat))) for d in one}
    at = mesh.axis_names.index(axis)
    for word, of in (("slices", number.__getitem__), ("hosts", lambda d: d.process_index)):
        found = np.vectorize(of, otypes=[int])(mesh.devices)
        if (found != np.take(found, [0], axis=at)).any():
            return word
    return "devices"


def measure(
    mesh: jax.sharding.Mesh, messages: Sequence[int] | None = None, *, calls: int = 10, rounds: int = 5
) -> dict[str, Any]:
    """Returns what was measured, as JSON holds it; `UNITS` says what its numbers are. Every process of the mesh calls this.

    Each collective runs along one axis on all devices at once, as in a step: rings that share links share them here too.

    Args:
      messages: bytes of a device's whole array; default: three sizes, or two small ones on CPUs.
      calls, rounds: how many collectives are started one after the other, and how often that is timed, after one round that is
        not.
    """
    if (
        mesh.devices.flat[0].platform == "cpu"
    ):  # its devices share threads, and several collectives at once may wait for them
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
    lies = spec(("N",), {"N": tuple(mesh.axis_names)})
    size, rows = mesh.shape[axis], []
    for name, (collective, sent, parts) in _collectives(axis, size).items():
        run = jax.jit(map_shards(collective, mesh, lies, lies))
        for message in messages:
            elements = max(message // 4 // size, 1) * size  # of float32, so many that they can be split
            given = jax.jit(
                lambda n=elements // parts * mesh.size: jnp.ones(n, jnp.float32),
                out_shardings=jax.sharding.NamedSharding(mesh, lies),
            )()
            seconds = _seconds(run, given, calls, rounds)
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


def _seconds(run: Callable[[Any], Any], given: Any, calls: int, rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        jax.block_until_ready([run(given) for _ in range(calls)][-1])
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times[1:])
