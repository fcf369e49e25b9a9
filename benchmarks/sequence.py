"""`python -m benchmarks.sequence [tokens=8192,32768] [heads=32] [kv_heads=8] [width=128] [dtype=bfloat16]
[schemes=ring,all_gather] [orders=zigzag,contiguous] [backends=auto] [directions=forward,both] [check=512] [rounds=5]
[out=FILE] [commit=]`: causal attention whose sequence is split over all devices.

Tokens and `check` are of a device. Beside every way stand three times:
one device: its kernel on one sequence with as many visible pairs as a device has of the split one, by the backend that
dispatch chooses and by the one that was asked for; its time over that of a way is the efficiency that is reported.
work: the same program with every array that would arrive replaced by the device's own, so that nothing travels.
exchange: what travels, with nothing else beside it. What the whole takes longer than the work is what does not hide.

Numbers first: a way whose result and gradients are not those of one device in float32, on `check` tokens, is not timed.
A process for each device: start as many with coordinator=HOST:PORT processes=COUNT process=NUMBER.
"""

from __future__ import annotations

import functools
import json
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import ejdist
import kernels
from benchmarks.measure import provenance
from benchmarks.options import read
from benchmarks.timing import quartiles
from ejdist.layout import ACTIVATIONS, sharding, spec
from ejdist.mapped import map_shards
from ejdist.mesh import SP
from ejdist.sequence import Scheme, exchange
from ejdist.sequence.schemes import AllGather, Ring, scheme_of
from kernels.engines.attention.pairs import visible_pairs

OPTIONS = {
    "tokens": "8192,32768", "heads": 32, "kv_heads": 8, "width": 128, "dtype": "bfloat16", "schemes": "ring,all_gather",
    "orders": "zigzag,contiguous", "backends": "auto", "directions": "forward,both", "check": 512, "rounds": 5, "out": "",
    "coordinator": "", "processes": 1, "process": 0, "commit": "",
}  # fmt: skip
DIMS = {"query": "BTNH", "key": "BSKH", "value": "BSKH", "d_out": "BTNH"}
TRAVELS = ("key", "value")
# FLOPs of a visible pair of one head, over its width: two products forward, five backward.
PRODUCTS = {"forward": 2 * 2, "both": 2 * 2 + 2 * 5}
Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Work(Scheme):
    """A scheme in whose place nothing travels: every array that would arrive is this rank's own."""

    scheme: Scheme

    def forward(self, local: Any) -> tuple[jax.Array, jax.Array]:
        with _staying():
            return self.scheme.forward(local)

    def backward(self, local: Any, saved: dict[str, jax.Array]) -> dict[str, jax.Array]:
        with _staying():
            return self.scheme.backward(local, saved)


def _staying() -> Any:
    """Returns a context in which arrays are exchanged with nobody."""

    def gather(tree: Any, axis: Any) -> Any:
        n = jax.lax.axis_size(axis)
        return jax.tree.map(lambda x: jnp.concatenate([x] * n, axis=1), tree)

    def scatter_sum(tree: Any, axis: Any) -> Any:
        n = jax.lax.axis_size(axis)
        return jax.tree.map(lambda x: x.reshape(x.shape[0], n, -1, *x.shape[2:]).sum(1), tree)

    return mock.patch.multiple(exchange, shift=lambda tree, axis, by: tree, gather=gather, scatter_sum=scatter_sum)


def shapes(o: dict[str, Any], length: int) -> dict[str, tuple[int, ...]]:
    heads = {"N": o["heads"], "K": o["kv_heads"]}
    return {n: (1, length, heads[dims[2]], o["width"]) for n, dims in DIMS.items()}


def make(o: dict[str, Any], length: int, mesh: Any = None) -> Arrays:
    """Returns the arrays of a call, where they lie; the same numbers on one device, the default, as on many."""
    made = shapes(o, length)
    if mesh is None:
        lies: Any = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    else:
        lies = {n: sharding(mesh, [*DIMS[n]], ACTIVATIONS, shape=s) for n, s in made.items()}

    @functools.partial(jax.jit, out_shardings=lies)
    def draw() -> Arrays:
        keys = jax.random.split(jax.random.key(0), len(made))
        return {n: jax.random.normal(k, s).astype(o["dtype"]) for k, (n, s) in zip(keys, made.items(), strict=True)}

    return draw()


def program(attention: Callable, direction: str) -> Callable:
    """Returns the jitted (arrays) -> out, and of "both" directions the gradients too."""

    def run(arrays: Arrays) -> tuple[jax.Array, ...]:
        *inputs, d_out = (arrays[n] for n in DIMS)
        if direction == "forward":
            return (attention(*inputs),)
        out, pull = jax.vjp(attention, *inputs)
        return out, *pull(d_out)

    return jax.jit(run)


def _platform(backend: str) -> str | None:
    return None if backend == "auto" else backend


def split(mesh: Any, scheme: Scheme, order: str, backend: str) -> Callable:
    return functools.partial(
        ejdist.ring_attention, causal=True, mesh=mesh, scheme=scheme, order=order, platform=_platform(backend)
    )


def whole(backend: str) -> Callable:
    return functools.partial(kernels.flash_attention, causal=True, platform=_platform(backend))


def travelling(mesh: Any, scheme: str, direction: str) -> Callable:
    """Returns the jitted (arrays) -> what arrives: keys and values, and on the way back their gradients in float32 too."""
    n = mesh.size

    def ring(kept: Any, hops: int) -> Any:
        for _ in range(hops):
            kept = exchange.shift(kept, SP, 1)
        return kept

    def gathered(arrays: Arrays) -> Any:
        keys = exchange.gather({name: arrays[name] for name in TRAVELS}, SP)
        if direction == "forward":
            return keys
        again = exchange.gather(jax.lax.optimization_barrier({name: arrays[name] for name in TRAVELS}), SP)
        sums = jax.tree.map(lambda x: x.astype(jnp.float32), again)
        return keys, exchange.scatter_sum(sums, SP)

    def passed_on(arrays: Arrays) -> Any:
        keys = ring({name: arrays[name] for name in TRAVELS}, n - 1)
        if direction == "forward":
            return keys
        sums = jax.tree.map(lambda x: x.astype(jnp.float32), keys)
        return ring(keys, n - 1), ring(sums, n)

    bodies: dict[type[Scheme], Callable] = {Ring: passed_on, AllGather: gathered}
    if type(scheme_of(scheme)) not in bodies:
        raise ValueError(f"schemes = {scheme!r}: there is no program of its transfers alone; add one to `travelling`")
    lies = {name: spec([*dims], ACTIVATIONS) for name, dims in DIMS.items()}
    return jax.jit(map_shards(bodies[type(scheme_of(scheme))], mesh, (lies,), lies["key"]))


def checked(mesh: Any, o: dict[str, Any], run: Callable, order: str, direction: str) -> float:
    """Returns the largest error against one device in float32, relative to each array's largest entry."""
    lies = ejdist.Order(order, mesh.size)
    length = o["check"] * mesh.size
    arrays = make(o, length, mesh)
    found = run(jax.tree.map(functools.partial(_permuted, lies), arrays))
    alone = {n: x.astype(jnp.float32) for n, x in make(o, length).items()}
    wanted = program(whole("xla"), direction)(alone)
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        b = lies.permute(np.asarray(b))
        for shard in a.addressable_shards:
            difference = np.abs(np.asarray(shard.data, np.float32) - b[shard.index]).max()
            worst = max(worst, float(difference / np.abs(b).max()))
    if jax.process_count() > 1:  # whether a way is timed must be the same for all
        from jax.experimental.multihost_utils import process_allgather

        worst = float(np.max(process_allgather(np.float32(worst))))
    return worst


def _permuted(order: ejdist.Order, x: jax.Array) -> jax.Array:
    return jax.jit(order.permute, out_shardings=x.sharding)(x)


def same_work(tokens: int, ranks: int) -> int:
    """Returns the length of one causal sequence with about as many visible pairs as a rank has of `ranks * tokens`."""
    return max(256, round(tokens * math.sqrt(ranks) / 256) * 256)


def pairs(length: int, heads: int) -> int:
    return visible_pairs(kernels.MaskInfo(causal=True), 1, heads, length, length)


class Rows:
    """What is said of each way, and the compiled programs that are still to be timed."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.programs: dict[tuple[str, str], tuple[Callable, Arrays]] = {}
        self.say = say

    def add(self, label: str, part: str, prepare: Callable[[], tuple[Callable, Arrays, dict[str, Any]]]) -> bool:
        """Returns whether there is a program; why there is none is kept in its row."""
        row = self.rows.setdefault(label, {})
        start = time.perf_counter()
        try:
            run, arrays, said = prepare()
            self.programs[label, part] = run.lower(arrays).compile(), arrays
        except Exception as error:  # what one way cannot do is no reason to lose the others
            row["refused"] = f"{part}: {type(error).__name__}: {str(error).splitlines()[0][:300]}"
            self.say(f"{label}, {row['refused']}")
            return False
        row |= said
        self.say(f"{label}, {part}: {said or 'compiled'}, {time.perf_counter() - start:.1f} s")
        return True

    def time(self, rounds: int, seed: int) -> None:
        """Times every program once in each round, in an order shuffled anew; the same one in every process."""
        shuffled, times = random.Random(seed), {key: [] for key in self.programs}
        for number in range(rounds + 1):
            for key in shuffled.sample(list(self.programs), len(self.programs)):
                run, arrays = self.programs[key]
                start = time.perf_counter()
                for _ in range(3 if number else 1):
                    found = run(arrays)
                jax.block_until_ready(found)
                del found
                if number:  # the first round warms up
                    times[key].append((time.perf_counter() - start) / 3)
        for (label, part), seconds in times.items():
            self.rows[label][f"{part}_ms"] = [1e3 * s for s in quartiles(seconds)]
        self.programs.clear()


def measure(mesh: Any, o: dict[str, Any], tokens: int, rows: Rows) -> None:
    """Adds and times everything for so many tokens a device."""
    ranks, length = mesh.size, tokens * mesh.size
    alone = same_work(tokens, ranks)
    scale = pairs(length, o["heads"]) / ranks / pairs(alone, o["heads"])
    arrays, one = make(o, length, mesh), make(o, alone)
    limit = 0.03 if o["dtype"] == "bfloat16" else 1e-4
    backends, directions = o["backends"].split(","), o["directions"].split(",")
    for direction in directions:
        for backend in dict.fromkeys(["auto", *backends]):
            label = f"{tokens} tokens, {direction}, one device, {backend}"
            said = {"kind": "one device", "tokens": tokens, "direction": direction, "backend": backend, "length": alone}
            rows.add(label, "whole", lambda: (program(whole(backend), direction), one, said | {"scale": scale}))  # noqa: B023
        for scheme in o["schemes"].split(","):
            label = f"{tokens} tokens, {direction}, {scheme}, exchange"
            said = {"kind": "exchange", "tokens": tokens, "direction": direction, "scheme": scheme}
            rows.add(label, "whole", lambda: (travelling(mesh, scheme, direction), arrays, said))  # noqa: B023
            for order in o["orders"].split(","):
                for backend in backends:
                    label = f"{tokens} tokens, {direction}, {scheme}, {order}, {backend}"

                    def prepare(made: Scheme) -> tuple[Callable, Arrays, dict[str, Any]]:
                        run, said = program(split(mesh, made, order, backend), direction), {}  # noqa: B023
                        if not isinstance(made, Work):
                            error = checked(mesh, o, run, order, direction)  # noqa: B023
                            if not error <= limit:
                                raise ValueError(f"wrong by {error:.2g}")
                            said = {"kind": "split", "tokens": tokens, "direction": direction, "scheme": scheme}  # noqa: B023
                            said |= {"order": order, "backend": backend, "error": error}  # noqa: B023
                        return run, arrays, said

                    if rows.add(label, "whole", functools.partial(prepare, scheme_of(scheme))):
                        rows.add(label, "work", functools.partial(prepare, Work(scheme_of(scheme))))
    rows.time(o["rounds"], seed=tokens)
    for row in rows.rows.values():
        if row.get("tokens") == tokens and row["kind"] != "exchange" and "whole_ms" in row:
            share = row.get("scale", 1.0)
            flops = PRODUCTS[row["direction"]] * o["width"] * pairs(length, o["heads"]) / ranks / share
            row["tflops"] = flops / row["whole_ms"][1] / 1e9
    for row in rows.rows.values():
        if row.get("tokens") == tokens and row["kind"] == "split" and "tflops" in row:
            for name, backend in (("efficiency", "auto"), ("of_its_backend", row["backend"])):
                base = rows.rows[f"{tokens} tokens, {row['direction']}, one device, {backend}"]
                if "tflops" in base:
                    row[name] = row["tflops"] / base["tflops"]


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Returns the rows in Markdown."""

    def cell(row: dict[str, Any], name: str, digits: int) -> str:
        value = row.get(name)
        value = value[1] if isinstance(value, list) else value
        return "" if value is None else f"{value:.{digits}f}"

    lines = ["| | ms | work, ms | TFLOP/s a device | efficiency | of its backend |", "|---|---|---|---|---|---|"]
    for label, row in rows.items():
        if "refused" in row:
            lines.append(f"| {label} | {row['refused']} | | | | |")
            continue
        parts = (("whole_ms", 2), ("work_ms", 2), ("tflops", 0), ("efficiency", 3), ("of_its_backend", 3))
        lines.append(f"| {label} | {' | '.join(cell(row, *part) for part in parts)} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    o = read(OPTIONS, argv)
    if o["coordinator"]:
        jax.distributed.initialize(o["coordinator"], o["processes"], o["process"])
    first = jax.process_index() == 0
    mesh = ejdist.make_mesh(sp=-1)
    rows = Rows(lambda text: print(text, flush=True) if first else None)
    kind = jax.devices()[0].device_kind
    facts = {
        "device": kind,
        "ranks": mesh.size,
        "processes": jax.process_count(),
        "options": o,
        **provenance(o["commit"]),
    }
    for tokens in map(int, o["tokens"].split(",")):
        measure(mesh, o, tokens, rows)
        if first and o["out"]:  # after each length, so that what was measured is not lost with what comes after
            with open(o["out"], "w") as file:
                json.dump({**facts, "rows": rows.rows}, file, indent=1)
    rows.say(f"\n{mesh.size} x {kind}, {jax.process_count()} processes\n\n{table(rows.rows)}")


if __name__ == "__main__":
    main(sys.argv[1:])
