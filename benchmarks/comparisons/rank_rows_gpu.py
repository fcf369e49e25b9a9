"""`python -m benchmarks.comparisons.rank_rows_gpu [shapes=qwen3,deepseek] [ranks=8,64] [routes=balanced,zipf,hot]
[precisions=bf16,fp8] [out=FILE]`

On one GPU, what one rank of many does for a layer of experts whose tokens travel once to a rank, value and all gradients, by
the profiler's kernel times: planning, gathering and quantising rows, the products of its experts, sums. Where rows would travel
a kernel copies them, which is not counted: from each rank comes what this one has for itself, as if all had the same tokens.
With `hot` half of all choices are of the experts of this rank; with `zipf` this is the rank that Zipf's law gives most.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
from triton import language as tl

from benchmarks.comparisons.local_experts_gpu import PRODUCTS, SHAPES, normal
from benchmarks.options import read
from benchmarks.timing import traced, union
from ejdist.experts.by_rank import Turn
from ejdist.experts.cost import ExchangeShape
from ejdist.experts.dispatch import run
from ejdist.experts.mlp import GatedExperts
from ejdist.experts.rows import DispatchSpec
from ejdist.experts.schemes import AllToAll
from kernels.toolchains.triton import triton_launch

OPTIONS = {
    "shapes": "qwen3,deepseek", "ranks": "8,64", "routes": "balanced,zipf,hot", "precisions": "bf16", "out": "",
}  # fmt: skip
CALLS = 3
BITS = {1: "uint8", 2: "uint16", 4: "uint32"}


@triton.jit
def stand_in_kernel(x_ptr, out_ptr, PART: tl.constexpr, ME: tl.constexpr, BLOCK: tl.constexpr):
    """Copies part ME of x to every part of the output."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + ME * PART + at, mask=at < PART, other=0)
    tl.store(out_ptr + tl.program_id(1).to(tl.int64) * PART + at, x, mask=at < PART)


@dataclass(frozen=True)
class OneRank(AllToAll):
    """What rank `me` of `count` does, alone: from each rank comes what it has for itself, and what it makes comes back."""

    count: int
    me: int

    def _ranks(self, job: DispatchSpec) -> int:
        return self.count

    def dispatch(self, job: DispatchSpec, turn: Turn, x: jax.Array) -> jax.Array:
        # By a kernel of its own name: XLA would read the one part wherever a copy of it is wanted.
        bits = jax.lax.bitcast_convert_type(x, BITS[x.dtype.itemsize])
        part, block = x.size // self.count, 8192
        (copies,) = triton_launch(
            stand_in_kernel,
            bits,
            out_shape=(jax.ShapeDtypeStruct(x.shape, bits.dtype),),
            grid=(triton.cdiv(part, block), self.count),
            PART=part,
            ME=self.me,
            BLOCK=block,
        )
        return jax.lax.bitcast_convert_type(copies, x.dtype)

    def combine(self, job: DispatchSpec, turn: Turn, x: jax.Array) -> jax.Array:
        return self.dispatch(job, turn, x)


def routes_of(kind: str, tokens: int, experts: int, top_k: int, ranks: int) -> tuple[jax.Array, int]:
    """Returns the choices [tokens, k], all of a token different, and the rank with the most of them."""
    rng = np.random.default_rng(0)
    share = np.full(experts, 1.0)
    if kind == "zipf":
        share = rng.permutation(1 / np.arange(1, experts + 1))
    if kind == "hot":
        own = experts // ranks
        share[:own] = (experts - own) / own
    # The largest of log share + Gumbel noise are draws without replacement.
    noise = rng.gumbel(size=(tokens, experts)).astype(np.float32) + np.log(share / share.sum())
    chosen = np.argpartition(-noise, top_k, axis=1)[:, :top_k].astype(np.int32)
    load = np.bincount(chosen.reshape(-1), minlength=experts).reshape(ranks, -1).sum(1)
    return jnp.asarray(chosen), int(load.argmax())


def rank_rows(name: str, ranks: int, route: str, precision: str) -> dict[str, Any]:
    """Returns ms of a rank, of these of products and of copies, the share of the rest that is not in products, passes, and ms
    of each kernel."""
    tokens, experts, top_k, width, hidden = SHAPES[name]
    ids, me = routes_of(route, tokens, experts, top_k, ranks)
    shape = ExchangeShape(
        (("ep", ranks),), tokens, top_k, width, hidden, 2, 1.25, num_experts=experts, precision=precision
    )
    scheme = OneRank(ranks, me)
    job = DispatchSpec(GatedExperts("silu"), (), scheme, experts, scheme.rooms(shape, 1), 1, precision, gathers=True)
    own = experts // ranks
    params = {
        "gate": normal(0, (own, width, 2, hidden), width**-0.5),
        "down": normal(1, (own, hidden, width), hidden**-0.5),
    }
    x, d = normal(2, (tokens, width)), normal(3, (tokens, width))
    weights = jax.random.uniform(jax.random.key(4), ids.shape)

    @jax.jit
    def both(ids: jax.Array, x: jax.Array, weights: jax.Array, params: Any, d: jax.Array) -> Any:
        out, pull, passes = jax.vjp(lambda *floats: run_of(job, ids, *floats), x, weights, params, has_aux=True)
        return out, pull(d), passes

    arrays = ids, x, weights, params, d
    passes = jax.block_until_ready(both(*arrays))[2]

    def several() -> None:
        for _ in range(CALLS):
            found = both(*arrays)
        jax.block_until_ready(found)

    kernels, spent = traced(several), defaultdict(float)
    for kernel in kernels:
        spent[kernel.name] += (kernel.end - kernel.start) / CALLS / 1e6
    # Copies are of counters and conditions of loops, of which a profile may show one for as long as kernels before it take.
    computing = [k for k in kernels if not k.name.startswith("Memcpy")]
    total = union([(k.start, k.end) for k in computing]) / CALLS / 1e6
    copies = spent.pop(stand_in_kernel.__name__, 0.0)
    products = sum(ms for kernel, ms in spent.items() if any(word in kernel for word in PRODUCTS))
    most = sorted(spent.items(), key=lambda item: -item[1])[:16]
    row = {
        "ms": total, "products_ms": products, "copies_ms": copies, "outside": 1 - products / (total - copies),
        "passes": np.asarray(passes).tolist(),
        "rooms": list(job.rooms), "kernels": {kernel[:80]: ms for kernel, ms in most},
    }  # fmt: skip
    bytes_sent = sum(scheme.cost(shape).bytes.values())
    return row | {"bytes_sent": bytes_sent, "reached": shape.reached}


def run_of(
    job: DispatchSpec, ids: jax.Array, x: jax.Array, weights: jax.Array, params: Any
) -> tuple[jax.Array, jax.Array]:
    out, passes, _ = run(job, x, ids, weights, params)
    return out, passes


def main(argv: list[str]) -> None:
    o, rows = read(OPTIONS, argv), {}
    for name in o["shapes"].split(","):
        for ranks in map(int, o["ranks"].split(",")):
            for route in o["routes"].split(","):
                for precision in o["precisions"].split(","):
                    label = f"{name}, {ranks} ranks, {route}, {precision}"
                    try:
                        rows[label] = made = rank_rows(name, ranks, route, precision)
                    except Exception as error:
                        print(
                            f"{label}: failed: {type(error).__name__}: {str(error).splitlines()[0][:300]}", flush=True
                        )
                        continue
                    print(
                        f"{label}: {made['ms']:.2f} ms, products {made['products_ms']:.2f}, "
                        f"copies {made['copies_ms']:.2f}, outside {made['outside']:.3f}, "
                        f"passes {made['passes']}",
                        flush=True,
                    )
                    for kernel, ms in made["kernels"].items():
                        print(f"    {ms:8.3f} {kernel}", flush=True)
                    if o["out"]:
                        with open(o["out"], "w") as file:
                            device = jax.devices()[0].device_kind
                            json.dump(
                                {"device": device, "jax": jax.__version__, "options": o, "rows": rows}, file, indent=1
                            )


if __name__ == "__main__":
    main(sys.argv[1:])
