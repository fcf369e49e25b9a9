"""`python -m benchmarks.comparisons.grouped_matmul [ROWS]`: grouped_matmul, `lax.ragged_dot` and one dense product of as many
FLOPs, on this machine's CPU: seconds (the best of several) and temporary memory of the compiled program."""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels import grouped_matmul


def measured(function, *arrays, runs):
    compiled = jax.jit(function).lower(*arrays).compile()
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        times.append(time.perf_counter() - start)
    return min(times[1:]), compiled.memory_analysis().temp_size_in_bytes / 2**20, compiled(*arrays)


def main(rows=8192, D=512, F=1024, E=64):
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.integers(0, rows + 1, E - 1))
    sizes = jnp.asarray(np.diff(np.r_[0, cuts, rows]), jnp.int32)
    lhs, d = (jnp.asarray(rng.standard_normal((rows, n)), jnp.float32) for n in (D, F))
    rhs = jnp.asarray(rng.standard_normal((E, D, F)), jnp.float32)
    products = {
        "dense": lambda x, w: x @ w[0],
        "grouped_matmul": lambda x, w: grouped_matmul(x, w, sizes),
        "lax.ragged_dot": lambda x, w: lax.ragged_dot(x, w, sizes, precision="highest"),
    }
    print(
        f"{rows} rows in {E} groups of {sizes.min()} to {sizes.max()}, D = {D}, F = {F}, float32, jax {jax.__version__}"
    )
    print("| | forward s | / dense | MiB | forward and backward s | / dense | MiB |\n|---|---|---|---|---|---|---|")
    found = {}
    for name, product in products.items():

        def both(x, w, d, product=product):
            out, pull = jax.vjp(product, x, w)
            return out, pull(d)

        slow = name == "lax.ragged_dot"
        forward = measured(product, lhs, rhs, runs=1 if slow else 7)
        # The whole of `dense` has one matrix: the gradients of the others are not part of what is compared.
        weights = rhs[:1] if name == "dense" else rhs
        backward = measured(both, lhs, weights, d, runs=1 if slow else 5)
        found[name] = forward, backward
        (f, f_mib, _), (b, b_mib, _) = forward, backward
        base = [part[0] for part in found["dense"]]
        print(
            f"| {name} | {f:.3f} | {f / base[0]:.2f} | {f_mib:.0f} | {b:.3f} | {b / base[1]:.2f} | {b_mib:.0f} |",
            flush=True,
        )
    ours, theirs = (jax.tree.leaves(found[n][1][2]) for n in ("grouped_matmul", "lax.ragged_dot"))
    print(
        "largest differences of out, d lhs, d rhs:",
        *(f"{jnp.abs(a - b).max():.1e}" for a, b in zip(ours, theirs, strict=True)),
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
