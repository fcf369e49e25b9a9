"""`python -m benchmarks.comparisons.grouped_matmul_gpu [shapes=moe_64,moe_8] [sizes=equal,zipf] [tiles=every] [out=FILE]`

On one GPU, each product of grouped_matmul by itself, with the tile that a call gets and the one without specialised warps
(`tiles=candidates`: those that the tuner tries; `tiles=every`: with other depths too),
against torch._grouped_mm, JAX's Mosaic ragged dot and a dense product of as many FLOPs. Numbers first: a contestant that is not
within 1% of the `xla` backend is not timed.

TFLOP/s are of the median of shuffled rounds, each of calls back to back, as the clock has them. `table=FILE` prints what a
file of results says of the tile that a call gets.
"""

import dataclasses
import functools
import json
import random
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kernels.ops.grouped_matmul.contract import op

# name -> (T, E, K, N): DeepSeek-V2-Lite, Mixtral 8x7B, Qwen3-30B-A3B
SHAPES = {"moe_64": (65536, 64, 2048, 1408), "moe_8": (32768, 8, 4096, 14336), "moe_128": (131072, 128, 2048, 768)}
DIRECTIONS = ("forward", "d_lhs", "d_rhs")


def group_sizes(kind, rows, groups):
    """Returns sizes that are equal, of a router that is not quite even, or by Zipf's law."""
    rng = np.random.default_rng(0)
    shares = {
        "equal": np.full(groups, 1 / groups),
        "even": rng.dirichlet(np.full(groups, 8.0)),
        "zipf": rng.permutation(1 / np.arange(1, groups + 1)),
    }[kind]
    ends = np.round(np.cumsum(shares / shares.sum()) * rows).astype(np.int32)
    return jnp.asarray(np.diff(ends, prepend=0))


def ours(lhs, rhs, d, sizes, tiles):
    """Yields (direction, name, function of lhs, rhs, d, sizes) for every tile."""
    from kernels.ops.grouped_matmul import triton_gpu as gpu

    call = op.bind(lhs, rhs, None, sizes)
    experts = rhs.shape[0]
    for direction in DIRECTIONS:
        found = [getattr(cfg, direction) for cfg in gpu.candidates(call)]
        if tiles == "chosen":
            found = [found[0], dataclasses.replace(found[0], specialised="none")]
        elif tiles == "every":
            plain = [t for t in found if t.specialised == "none"]
            found += [dataclasses.replace(t, num_stages=n) for t in plain for n in (3, 4)]
        for i, tile in enumerate(dict.fromkeys(found)):

            @jax.jit
            def run(lhs, rhs, d, sizes, tile=tile, direction=direction):
                maps = gpu._Maps(sizes, None, lhs.shape[0], experts)
                if direction == "d_rhs":
                    return gpu._contraction(lhs, d, experts, rhs.dtype, tile, maps.of(128))
                if direction == "d_lhs":
                    return gpu._product(d, rhs, True, False, tile, maps)
                return gpu._product(lhs, rhs, False, False, tile, maps)

            name = "x".join(map(str, (tile.block_m, tile.block_n, tile.block_k)))
            name += f" w{tile.num_warps} s{tile.num_stages} p{tile.programs} b{tile.band}" + " flat" * bool(
                tile.flatten
            )
            name = name if tile.specialised == "none" else tile.specialised
            yield direction, "ours " + name + " (heuristic)" * (i == 0), run


def torch_grouped(lhs, rhs, d, sizes):
    import torch

    a, b, g = (torch.from_dlpack(x) for x in (lhs, rhs, d))

    def with_ends(product):
        made = {}  # the ends are made once: torch is timed for the product alone

        def call(lhs, rhs, d, sizes):
            if made.get("sizes") is not sizes:
                made.update(sizes=sizes, ends=torch.cumsum(torch.from_dlpack(sizes), 0, dtype=torch.int32))
            return product(made["ends"])

        return call

    yield "forward", "torch._grouped_mm", with_ends(lambda ends: torch._grouped_mm(a, b, offs=ends))
    yield "d_lhs", "torch._grouped_mm", with_ends(lambda ends: torch._grouped_mm(g, b.transpose(1, 2), offs=ends))
    yield "d_rhs", "torch._grouped_mm", with_ends(lambda ends: torch._grouped_mm(a.t(), g, offs=ends))


def mosaic(lhs, rhs, d, sizes, tiles):
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    for m, n, k, steps, band in ((128, 128, 64, 4, 8), (64, 256, 64, 4, 8), (128, 256, 64, 4, 8))[
        : 3 if tiles == "every" else 1
    ]:

        @jax.jit
        def run(lhs, rhs, d, sizes, blocks=(m, n, k, steps, band)):
            m, n, k, steps, band = blocks
            how = {"block_m": m, "block_n": n, "block_k": k, "max_concurrent_steps": steps, "grid_block_n": band}
            return ragged_dot(lhs, rhs, group_sizes=sizes, **how)

        yield "forward", f"mosaic ragged_dot {m}x{n}x{k}", run


def dense(lhs, rhs, d, sizes):
    yield "forward", "dense", jax.jit(lambda lhs, rhs, d, sizes: lhs @ rhs[0])
    yield "d_lhs", "dense", jax.jit(lambda lhs, rhs, d, sizes: d @ rhs[0].T)
    yield "d_rhs", "dense", jax.jit(lambda lhs, rhs, d, sizes: lhs.T @ d)


def wait(x):
    if isinstance(x, jax.Array):
        jax.block_until_ready(x)
    else:
        import torch

        torch.cuda.synchronize()


def as_jax(x):
    return x if isinstance(x, jax.Array) else jnp.from_dlpack(x.contiguous())


@jax.jit
def distance(x, y):
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((x - y) ** 2) / jnp.sum(y**2))


def race(contestants, flops, rounds=7, seconds=0.03):
    """Returns name -> TFLOP/s, the median of rounds in an order shuffled anew."""
    calls, times = {}, {name: [] for name in contestants}
    for name, f in contestants.items():
        wait(f())
        start = time.perf_counter()
        wait(f())
        calls[name] = max(1, min(200, int(seconds / max(time.perf_counter() - start, 1e-5))))
    for _ in range(rounds):
        for name in random.sample(list(contestants), len(contestants)):
            start, result = time.perf_counter(), None
            for _ in range(calls[name]):
                result = contestants[name]()
            wait(result)
            times[name].append((time.perf_counter() - start) / calls[name])
    return {name: flops / statistics.median(t) / 1e12 for name, t in times.items()}


def contestants(arrays, tiles):
    """Returns (direction, name, function) of all that can be made; what cannot is said."""
    found = []
    for name, source in {
        "ours": lambda *a: ours(*a, tiles),
        "torch": torch_grouped,
        "mosaic": lambda *a: mosaic(*a, tiles),
        "dense": dense,
    }.items():
        try:
            found += source(*arrays)
        except Exception as error:
            print(f"{name} cannot: {error}"[:200], flush=True)
    return found


def right(made, arrays, wanted, where):
    """Returns direction -> name -> function of no arguments, of those whose numbers are right."""
    found = {direction: {} for direction in DIRECTIONS}
    for direction, name, f in made:
        try:
            off = 0.0 if name == "dense" else float(distance(as_jax(f(*arrays)), wanted[direction]))
        except Exception as error:
            print(f"{where} {direction} {name} failed: {str(error).splitlines()[0][:160]}", flush=True)
            continue
        if off < 0.01:
            found[direction][name] = functools.partial(f, *arrays)
        else:
            print(f"{where} {direction} {name} IS WRONG: off by {off:.2e}", flush=True)
    return found


@jax.jit
def truth(lhs, rhs, d, sizes):
    y, pull = jax.vjp(lambda lhs, rhs: op(lhs, rhs, None, sizes, platform="xla"), lhs, rhs)
    return dict(zip(DIRECTIONS, (y, *pull(d))))


def as_table(rows):
    """Returns TFLOP/s of the tile that a call gets and, in brackets, of a dense product, of torch, and of plain tiles."""
    speeds = {(r["shape"], r["sizes"], r["direction"], r["name"]): r["TFLOP_s"] for r in rows}
    lines = ["| | " + " | ".join(DIRECTIONS) + " |", "|---|" + "---|" * len(DIRECTIONS)]
    for shape, sizes in dict.fromkeys((r["shape"], r["sizes"]) for r in rows):
        T, E, K, N = SHAPES[shape]
        cells = [f"{T:,} rows, {E} groups, {K} x {N}, {sizes}"]
        for direction in DIRECTIONS:
            of = {name: x for (*where, name), x in speeds.items() if where == [shape, sizes, direction]}
            (mine,) = (x for name, x in of.items() if "(heuristic)" in name)
            plain = max(x for name, x in of.items() if name.startswith("ours ") and "x64 " in name)
            shares = [mine / of["dense"], mine / of["torch._grouped_mm"], mine / plain]
            cells.append(f"{mine:.0f} ({', '.join(f'{x:.2f}' for x in shares)})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(shapes="moe_64,moe_8,moe_128", sizes="equal,zipf", tiles="chosen", out="", table=""):
    if table:
        return print(as_table(json.loads(Path(table).read_text())["rows"]))
    found, start = [], time.perf_counter()
    for shape in shapes.split(","):
        rows, experts, K, N = SHAPES[shape]
        keys = jax.random.split(jax.random.key(0), 3)
        lhs, rhs, d = (
            jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, ((rows, K), (experts, K, N), (rows, N)))
        )
        kinds = {kind: group_sizes(kind, rows, experts) for kind in sizes.split(",")}
        made = contestants((lhs, rhs, d, next(iter(kinds.values()))), tiles)
        for kind, counts in kinds.items():
            arrays = lhs, rhs, d, counts
            ready = right(made, arrays, truth(*arrays), f"{shape} {kind}")
            for direction in DIRECTIONS:
                speeds = race(ready[direction], 2 * rows * K * N)
                print(f"\n{shape} {kind} {direction}, TFLOP/s, of dense")
                for name, speed in sorted(speeds.items(), key=lambda item: -item[1]):
                    print(f"  {speed:7.1f}  {speed / speeds['dense']:5.2f}  {name}", flush=True)
                    row = {"shape": shape, "sizes": kind, "direction": direction, "name": name, "TFLOP_s": speed}
                    found.append(row)
            if out:
                about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "command": " ".join(sys.argv)}
                Path(out).write_text(json.dumps({**about, "rows": found}, indent=1))
            print(f"\n{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(**dict(argument.split("=", 1) for argument in sys.argv[1:]))
