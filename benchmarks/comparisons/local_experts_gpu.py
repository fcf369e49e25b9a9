"""`python -m benchmarks.comparisons.local_experts_gpu [parts=order,combine,layer,gathered,random] [shapes=qwen3]
[routes=even,zipf,hot] [random=8] [out=FILE]`

On one GPU, the work of experts where nothing travels, by the profiler's kernel times:
- order, combine: sorting choices by expert, and the weighted sum of their rows, both ways; against the same in XLA;
- layer: rows through their experts and back, value and all gradients; what share of it is not in the products. Of
  qwen3/8 a rank of 8 has its experts, and as many rows as all tokens of one rank have;
- gathered: grouped products whose rows are read by index over those of rows that lie in order. Numbers first: both must have
  the same bits;
- random: the same of random shapes.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.options import read
from benchmarks.timing import kernel_seconds, traced, union
from ejdist.experts import local
from kernels.engines.matmul.ordering import group_order
from kernels.ops.combine_rows import op as combine_op
from kernels.ops.grouped_matmul import gathered_op, op

OPTIONS = {
    "parts": "order,combine,layer,gathered,random", "shapes": "qwen3", "routes": "even,zipf,hot", "random": 8, "out": "",
}  # fmt: skip
# Tokens, experts, choices, width, and inner width of an expert: of Qwen3-30B-A3B and DeepSeek-V3.
SHAPES = {"qwen3": (32768, 128, 8, 2048, 768), "deepseek": (16384, 256, 8, 7168, 2048)}
PRODUCTS = ("grouped_matmul", "warp_specialized", "ragged_contraction", "group_sum")


def routes_of(kind: str, tokens: int, experts: int, top_k: int) -> jax.Array:
    """Returns the choices [tokens, k]: evenly, by Zipf's law, or one expert with half of all."""
    rng = np.random.default_rng(0)
    shares = {
        "even": np.full(experts, 1.0),
        "zipf": rng.permutation(1 / np.arange(1, experts + 1)),
        "hot": np.where(np.arange(experts) == 0, max(1, experts - 1), 1.0),
    }[kind]
    return jnp.asarray(rng.choice(experts, (tokens, top_k), p=shares / shares.sum()), jnp.int32)


def normal(key: int, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(key), shape, jnp.float32)).astype(jnp.bfloat16)


def microseconds(run: Callable, *arrays: Any, calls: int = 5) -> float:
    jax.block_until_ready(run(*arrays))
    return 1e6 * kernel_seconds(lambda n: run(*arrays), jax.block_until_ready, calls)


def order(tokens: int, experts: int, top_k: int, ids: jax.Array) -> dict[str, float]:
    runs = {
        name: jax.jit(lambda ids, name=name: group_order(ids, experts, platform=name)) for name in ("triton", "xla")
    }
    got, want = (run(ids) for run in runs.values())
    assert all((a == b).all() for a, b in zip(got, want)), "the order is not that of XLA's sort"
    return {f"{name} us": microseconds(run, ids) for name, run in runs.items()}


def combine(tokens: int, experts: int, top_k: int, width: int, ids: jax.Array) -> dict[str, float]:
    placed = jax.jit(lambda ids: group_order(ids, experts))(ids)
    rows, weights = normal(1, (tokens * top_k, width)), jax.random.uniform(jax.random.key(2), (tokens, top_k))
    d = normal(3, (tokens, width))
    found, results = {}, {}
    for name in ("triton", "xla"):
        forward = jax.jit(lambda r, w, n=name: combine_op(r, placed.slots, placed.pairs, w, platform=n))
        plain = jax.jit(lambda r, n=name: combine_op(r, placed.slots, placed.pairs, platform=n))
        back = jax.jit(
            lambda d, r, w, n=name: combine_op.backward({"d_out": d}, r, placed.slots, placed.pairs, w, platform=n)
        )
        results[name] = forward(rows, weights), plain(rows), back(d, rows, weights)
        found |= {f"{name} us": microseconds(forward, rows, weights), f"{name} plain us": microseconds(plain, rows)}
        found |= {f"{name} backward us": microseconds(back, d, rows, weights)}
    for a, b in zip(*map(jax.tree.leaves, results.values())):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        assert float(jnp.abs(a - b).max()) < 0.02 * float(jnp.abs(b).max()), "combine is not XLA's"
    moved = 2 * (tokens * top_k + tokens) * width
    return found | {"triton TB/s": moved / found["triton us"] / 1e6}


def expert(
    params: dict[str, jax.Array], x: jax.Array, sizes: jax.Array, rows: jax.Array, slots: jax.Array
) -> jax.Array:
    hidden = gathered_op(x, params["gate"], None, sizes, rows, slots, activation="silu")
    return op(hidden, params["down"], None, sizes)


def layer(experts: int, width: int, hidden: int, ids: jax.Array) -> dict[str, Any]:
    """Returns ms of value and gradients, the share that is outside of the products, and each kernel's ms."""
    params = {
        "gate": normal(1, (experts, width, 2, hidden), width**-0.5),
        "down": normal(2, (experts, hidden, width), hidden**-0.5),
    }
    x, d = normal(3, (ids.shape[0], width)), normal(4, (ids.shape[0], width))
    weights = jax.random.uniform(jax.random.key(5), ids.shape)

    @jax.jit
    def both(x: jax.Array, weights: jax.Array, params: dict[str, jax.Array], ids: jax.Array, d: jax.Array) -> Any:
        def run(x: jax.Array, weights: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
            return local(x, ids, weights, params, expert, num_experts=experts, gathers=True)[0]

        out, pull = jax.vjp(run, x, weights, params)
        return out, pull(d.astype(out.dtype))

    arrays = x, weights, params, ids, d
    for _ in range(2):
        jax.block_until_ready(both(*arrays))
    calls = 3

    def several() -> None:
        for _ in range(calls):
            jax.block_until_ready(both(*arrays))

    kernels = traced(several)
    each: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        each[kernel.name] += (kernel.end - kernel.start) * 1e-6 / calls
    total = union([(k.start, k.end) for k in kernels]) * 1e-6 / calls
    outside = sum(ms for name, ms in each.items() if not name.startswith(PRODUCTS))
    flops = 3 * 2 * 3 * ids.size * width * hidden
    largest = dict(sorted(each.items(), key=lambda item: -item[1])[:14])
    return {"ms": total, "outside": outside / total, "TFLOP/s": flops / total / 1e9, "kernels": largest}


def gathered(
    tokens: int, experts: int, top_k: int, width: int, hidden: int, gated: bool, ids: jax.Array
) -> dict[str, Any]:
    """Returns the time of products of gathered rows over that of rows in order: the result, and the matrices' gradient."""
    from kernels.ops.grouped_matmul import triton_gpu as gpu

    placed = jax.jit(lambda ids: group_order(ids, experts))(ids)
    columns = (2, hidden) if gated else (hidden,)
    x, w = normal(1, (tokens, width)), normal(2, (experts, width, *columns), width**-0.5)
    rows = x[placed.tokens]
    activation = "silu" if gated else None
    d = normal(3, (tokens * top_k, hidden * len(columns)))
    tile = gpu.heuristic(op.bind(rows, w, None, placed.sizes, activation=activation), "cuda").d_rhs

    @jax.jit
    def contiguous(x: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
        return op(rows, w, None, placed.sizes, activation=activation)

    @jax.jit
    def by_index(x: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
        return gathered_op(x, w, None, placed.sizes, placed.tokens, placed.slots, activation=activation)

    def contraction(index: Any) -> Callable:
        @jax.jit
        def run(a: jax.Array, d: jax.Array) -> jax.Array:
            maps = gpu._Maps(placed.sizes, None, d.shape[0], experts)
            maps.of(256)
            return gpu._contraction(a, d, experts, w.dtype, tile, maps, index)

        return run

    same = bool((contiguous(x, w, rows) == by_index(x, w, rows)).all())
    same &= bool((contraction(None)(rows, d) == contraction(placed.tokens)(x, d)).all())
    pairs = [microseconds(run, x, w, rows) for run in (contiguous, by_index)]
    turned = [microseconds(contraction(None), rows, d), microseconds(contraction(placed.tokens), x, d)]
    work = 2 * rows.size * d.shape[1] / 1e6
    return {
        "same bits": same, "forward": pairs[1] / pairs[0], "d_rhs": turned[1] / turned[0],
        "forward TFLOP/s": work / pairs[1], "d_rhs TFLOP/s": work / turned[1],
    }  # fmt: skip


def random_shapes(count: int) -> Any:
    """Yields (tokens, experts, choices, width, hidden, gated) of layers that somebody may have."""
    rng = np.random.default_rng(7)
    for _ in range(count):
        experts, top_k = int(rng.choice([8, 16, 40, 64, 96, 160])), int(rng.choice([1, 2, 4, 6, 8]))
        width, hidden = 64 * int(rng.integers(12, 96)), 64 * int(rng.integers(6, 48))
        yield int(rng.integers(4096, 32768)), experts, top_k, width, hidden, bool(rng.integers(2))


def main(argv: list[str]) -> None:
    o = read(OPTIONS, argv)
    parts, found = o["parts"].split(","), {}

    def say(name: str, run: Callable) -> None:
        try:
            found[name] = run()
        except Exception as e:
            found[name] = {"refused": f"{type(e).__name__}: {str(e)[:300]}"}
        print(name, found[name], flush=True)
        if o["out"]:
            with open(o["out"], "w") as file:
                json.dump(
                    {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "found": found}, file, indent=1
                )

    for shape in o["shapes"].split(","):
        name, _, ranks = shape.partition("/")
        tokens, experts, top_k, width, hidden = SHAPES[name]
        experts //= int(ranks or 1)
        ids = {kind: routes_of(kind, tokens, experts, top_k) for kind in o["routes"].split(",")}
        first = next(iter(ids.values()))
        if "order" in parts:
            say(f"order {shape}", functools.partial(order, tokens, experts, top_k, first))
        if "combine" in parts:
            say(f"combine {shape}", functools.partial(combine, tokens, experts, top_k, width, first))
        for kind, chosen in ids.items() if "layer" in parts else ():
            say(f"layer {shape} {kind}", functools.partial(layer, experts, width, hidden, chosen))
        if "gathered" in parts:
            say(f"gathered {shape}", functools.partial(gathered, tokens, experts, top_k, width, hidden, True, first))
    for i, shape in enumerate(random_shapes(o["random"]) if "random" in parts else ()):
        tokens, experts, top_k, *rest = shape
        ids = routes_of("even" if i % 2 else "zipf", tokens, experts, top_k)
        say(f"random {shape}", functools.partial(gathered, *shape, ids))


if __name__ == "__main__":
    main(sys.argv[1:])
