"""`python -m benchmarks.experts [tokens=32768] [experts=128] [top_k=8] [width=2048] [hidden=768] [dtype=bfloat16] [chunks=1,2]
[buffer=1.25] [schemes=all_gather,all_to_all] [rounds=7] [out=FILE]`: a layer of experts over all devices, forward and
backward, by way of dispatch.

Tokens are of a device. Beside every dispatch stands the same local work without a byte that travels: as many tokens, each with
as many choices, among the experts that a device has. Its time over that of a dispatch is the share that is reported, once for
the routes of a random router and once with one expert at twice the mean. Numbers first: a dispatch whose result and gradients
are not those of one device, on fewer tokens, is not timed.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ejdist
from benchmarks.options import read
from ejdist.experts import route
from ejdist.layout import sharding, spec
from ejdist.mapped import map_shards

OPTIONS = {
    "tokens": 32768, "experts": 128, "top_k": 8, "width": 2048, "hidden": 768, "dtype": "bfloat16", "chunks": "1,2",
    "buffer": 1.25, "schemes": "all_gather,all_to_all,ragged_all_to_all", "rounds": 7, "out": "",
}  # fmt: skip
WHERE = {"B": ("ep",), "E": ("ep",)}
LAYOUT = {
    "x": ("B", "T", "_"),
    "router": ("_", "_"),
    "router_bias": ("_",),
    "gate": ("E", "_", "_", "_"),
    "down": ("E", "_", "_"),
}


def arrays(mesh: Any, o: dict[str, Any], tokens: int, experts: int) -> dict[str, jax.Array]:
    """Returns a layer's arrays where they lie; every device has its own tokens and experts."""
    D, F, dtype = o["width"], o["hidden"], jnp.dtype(o["dtype"])
    shapes = {
        "x": (mesh.size, tokens, D), "router": (D, experts), "router_bias": (experts,), "gate": (experts, D, 2, F),
        "down": (experts, F, D),
    }  # fmt: skip
    lies = {n: sharding(mesh, LAYOUT[n], WHERE, shape=s) for n, s in shapes.items()}

    @functools.partial(jax.jit, out_shardings=lies)
    def make() -> dict[str, jax.Array]:
        keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
        made = {n: jax.random.normal(keys[n], s, jnp.float32) for n, s in shapes.items()}
        scale = {"x": 1, "router": D**-0.5, "router_bias": 0, "gate": D**-0.5, "down": F**-0.5}
        wide = ("router", "router_bias")
        return {n: (scale[n] * a).astype(jnp.float32 if n in wide else dtype) for n, a in made.items()}

    return make()


def hot(params: dict[str, jax.Array], top_k: int) -> jax.Array:
    """Returns the router's bias that brings one expert twice the mean."""
    experts = params["router"].shape[1]

    @jax.jit
    def load(x: jax.Array, b: jax.Array) -> jax.Array:
        counts = route(x, params["router"], top_k=top_k, router_bias=b * (jnp.arange(experts) == 0)).stats.counts
        return counts[0] * experts / counts.sum()

    low, high, some = 0.0, 8.0, params["x"][:1, :4096]
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (middle, high) if load(some, jnp.float32(middle)) < 2 else (low, middle)
    return jnp.where(jnp.arange(experts) == 0, low, 0.0).astype(jnp.float32)


def step(top_k: int, **how: Any) -> Callable:
    """Returns the jitted (arrays) -> (statistics, gradients) of a layer."""

    def total(params: dict[str, jax.Array]) -> Any:
        out, stats = ejdist.moe(**params, top_k=top_k, **how)
        return jnp.sum(jnp.square(out.astype(jnp.float32))) / out.size, (stats, out)

    def both(params: dict[str, jax.Array]) -> Any:
        (_, (stats, out)), gradients = jax.value_and_grad(total, has_aux=True)(params)
        return stats, out, gradients

    return jax.jit(both)


def local(mesh: Any, top_k: int) -> Callable:
    """Returns the same for every device's tokens among its own experts."""

    def total(params: dict[str, jax.Array]) -> jax.Array:
        out, _ = ejdist.moe(**params, top_k=top_k)
        return jax.lax.psum(jnp.sum(jnp.square(out.astype(jnp.float32))), "ep")

    def run(params: dict[str, jax.Array]) -> Any:
        lies = {n: spec(LAYOUT[n], WHERE) for n in params}
        return jax.value_and_grad(map_shards(total, mesh, (lies,), spec((), {})))(params)

    return jax.jit(run)


def checked(mesh: Any, o: dict[str, Any], how: dict[str, Any]) -> float:
    """Returns the largest error of a dispatch against one device, relative to each array's largest entry."""
    params = arrays(mesh, o, 256, o["experts"])
    _, out, gradients = step(o["top_k"], mesh=mesh, **how)(params)
    alone = jax.tree.map(lambda a: jax.device_put(np.asarray(a), jax.devices()[0]), params)
    _, want, wanted = step(o["top_k"])(alone)

    def error(a: jax.Array, b: jax.Array) -> float:
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))

    return max(error(out, want), *(error(gradients[n], wanted[n]) for n in gradients))


class Attempt(NamedTuple):
    """What is said of a dispatch, and what is timed: a compiled program and its arrays; None where it is refused."""

    row: dict[str, Any]
    program: tuple[Callable, dict[str, jax.Array]] | None = None


def attempts(
    mesh: Any, o: dict[str, Any], params: dict[str, jax.Array], routes: dict[str, jax.Array], how: dict[str, Any]
) -> Iterator[tuple[str, Attempt]]:
    """Yields a dispatch on each of the routes, of one program."""
    label = f"{how['dispatch']}, {how['chunks']} chunks"
    try:
        error = checked(mesh, o, how)
        if error > (0.05 if o["dtype"] == "bfloat16" else 1e-4):
            raise ValueError(f"wrong by {error:.2g}")
        compiled = step(o["top_k"], mesh=mesh, **how).lower(params).compile()
        gib = compiled.memory_analysis().temp_size_in_bytes / 2**30
        for name, bias in routes.items():
            given = {**params, "router_bias": jax.device_put(bias, params["router_bias"].sharding)}
            stats = compiled(given)[0]
            said = {"extra_passes": int(stats.extra_passes), "high_water": float(stats.high_water)}
            said |= {"max_violation": float(stats.max_violation), "temporaries_gib": gib, "error": error}
            yield f"{label}, {name}", Attempt(said, (compiled, given))
    except Exception as e:
        yield label, Attempt({"refused": f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"})


def main(argv: list[str]) -> None:
    o = read(OPTIONS, argv)
    mesh = ejdist.make_mesh(ep=-1)
    ranks, kind = mesh.size, jax.devices()[0].device_kind
    params = arrays(mesh, o, o["tokens"], o["experts"])
    routes = {"random": params["router_bias"], "hot": hot(params, o["top_k"])}
    mine = o["experts"] // ranks  # a device's own
    own = {**params, "router": params["router"][:, :mine], "router_bias": params["router_bias"][:mine]}
    programs: dict[str, tuple[Callable, dict[str, jax.Array]]] = {
        "local work": (local(mesh, o["top_k"]).lower(own).compile(), own)
    }
    rows: dict[str, dict[str, Any]] = {}
    for scheme in o["schemes"].split(","):
        for chunks in map(int, o["chunks"].split(",")):
            how = {"dispatch": scheme, "chunks": chunks, "buffer": o["buffer"]}
            for label, found in attempts(mesh, o, params, routes, how):
                rows[label] = found.row
                if found.program is not None:
                    programs[label] = found.program
                print(label, found.row, flush=True)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(o["rounds"]):
        for name in random.sample(list(programs), len(programs)):
            run, given = programs[name]
            jax.block_until_ready(run(given))
            start = time.perf_counter()
            for _ in range(3):
                found = run(given)
            jax.block_until_ready(found)
            times[name].append((time.perf_counter() - start) / 3)
    flops = 3 * 2 * 3 * o["tokens"] * o["top_k"] * o["width"] * o["hidden"]
    base = statistics.median(times["local work"])
    print(f"\n{ranks} x {kind}, {o}\n| | ms | of local work | TFLOP/s a device |\n|---|---|---|---|")
    for name, seconds in sorted(times.items(), key=lambda item: statistics.median(item[1])):
        median = statistics.median(seconds)
        rows.setdefault(name, {}).update(ms=median * 1e3, share=base / median, tflops=flops / median / 1e12)
        print(f"| {name} | {median * 1e3:.2f} | {base / median:.3f} | {flops / median / 1e12:.0f} |", flush=True)
    if o["out"]:
        with open(o["out"], "w") as file:
            json.dump(
                {"device": kind, "ranks": ranks, "jax": jax.__version__, "options": o, "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main(sys.argv[1:])
