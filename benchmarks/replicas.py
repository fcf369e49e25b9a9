"""`python -m benchmarks.replicas [parameters=10000000] [arrays=12] [rounds=5] [out=FILE]`: what a comparison of replicas costs.

A state of float32 parameters and their two moments is held whole by every device of this host, of which there must be several
(on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count=4). Timed are the hashing, for which a step after it waits on its
devices, and what the host does beside them: its text for the others, and host 0's judgement of it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.options import read
from ejdist.cluster import Hosts
from ejdist.layout import replicated
from ejdist.mesh import make_mesh
from ejdist.training.replicas import Replicas, _Check, _hashes_of, different

OPTIONS = {"parameters": 10_000_000, "arrays": 12, "rounds": 5, "out": ""}


def measure(parameters: int, arrays: int, rounds: int) -> dict[str, float | int | str]:
    """Returns the numbers of one comparison: milliseconds are the least of `rounds`."""
    mesh = make_mesh(dp=-1, sp=1)
    if mesh.size == 1:
        raise SystemExit("one device has no replicas; on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count=4")
    shape, at = (parameters // arrays,), replicated(mesh)
    make = jax.jit(lambda i: jnp.arange(shape[0], dtype=jnp.float32) * i, out_shardings=at)
    state = {kind: {f"a{i}": make(float(i)) for i in range(arrays)} for kind in ("params", "mu", "nu")}
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    replicas = Replicas(Hosts(60), like, 1)
    named = {name: dict(zip(replicas.groups, jax.tree.leaves(state), strict=True))[name] for name in replicas.groups}
    hashing, beside = [], []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        hashes = jax.block_until_ready(replicas._hash(named))
        done = time.perf_counter()
        reports = {0: ["here", _hashes_of(_Check(1, hashes))]}
        if different(reports, replicas.groups, 1, "at the start"):
            raise SystemExit("replicas that are the same were told apart")
        hashing.append(done - began)
        beside.append(time.perf_counter() - done)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    best = min(hashing[1:])
    return {
        "device": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "arrays": len(replicas.groups),
        "bytes_of_a_device": size,
        "hashing_ms": round(1e3 * best, 3),
        "gb_a_second_of_a_device": round(size / best / 1e9, 2),
        "beside_ms": round(1e3 * min(beside[1:]), 3),
        "said_bytes_of_a_device": max(len(text) for text in reports[0][1].values()),
    }


def main(argv: list[str]) -> None:
    o = read(OPTIONS, argv)
    if min(o["parameters"], o["arrays"], o["rounds"]) < 1 or o["parameters"] < o["arrays"]:
        raise SystemExit("parameters, arrays and rounds must be positive, and parameters at least as many as arrays")
    found = measure(o["parameters"], o["arrays"], o["rounds"])
    print(json.dumps(found, indent=1))
    if o["out"]:
        Path(o["out"]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
