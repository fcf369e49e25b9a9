"""`python -m benchmarks.comparisons.grouped_matmul [ROWS] [--ragged-dot]`: grouped_matmul, dense products of as many FLOPs
with one matrix and with one for each of equal groups, and `lax.ragged_dot`, which takes minutes.

Seconds are of the process's CPU, the best of several; on one core (`taskset -c 0`) they are those of the program."""

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
        start = time.process_time()
        jax.block_until_ready(compiled(*arrays))
        times.append(time.process_time() - start)
    return min(times[1:]), compiled.memory_analysis().temp_size_in_bytes / 2**20, compiled(*arrays)


def main(rows=8192, ragged_dot=False, D=512, F=1024, E=64):
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.integers(0, rows + 1, E - 1))
    sizes = jnp.asarray(np.diff(np.r_[0, cuts, rows]), jnp.int32)
    lhs, d = (jnp.asarray(rng.standard_normal((rows, n)), jnp.float32) for n in (D, F))
    rhs = jnp.asarray(rng.standard_normal((E, D, F)), jnp.float32)
    products = {
        "dense, one matrix": lambda x, w: x @ w[0],
        "dense, equal groups": lambda x, w: jnp.matmul(x.reshape(E, -1, D), w).reshape(-1, F),
        "grouped_matmul": lambda x, w: grouped_matmul(x, w, sizes),
    }
    if ragged_dot:
        products["lax.ragged_dot"] = lambda x, w: lax.ragged_dot(x, w, sizes, precision="highest")
    print(
        f"{rows} rows in {E} groups of {sizes.min()} to {sizes.max()}, D = {D}, F = {F}, float32, jax {jax.__version__}"
    )
    print("| | forward s | / dense | MiB | forward and backward s | / dense | MiB |\n|---|---|---|---|---|---|---|")
    found = {}
    for name, product in products.items():

        def both(x, w, d, product=product):
            out, pull = jax.vjp(product, x, w)
            return out, pull(d)

        runs = 1 if name == "lax.ragged_dot" else 5
        # The gradients of the matrices that `dense, one matrix` leaves out are no part of what is compared.
        weights = rhs[:1] if name == "dense, one matrix" else rhs
        found[name] = (f, f_mib, _), (b, b_mib, _) = (
            measured(product, lhs, rhs, runs=runs),
            measured(both, lhs, weights, d, runs=runs),
        )
        base = [part[0] for part in found["dense, one matrix"]]
        print(
            f"| {name} | {f:.3f} | {f / base[0]:.2f} | {f_mib:.0f} | {b:.3f} | {b / base[1]:.2f} | {b_mib:.0f} |",
            flush=True,
        )
    if ragged_dot:
        ours, theirs = (jax.tree.leaves(found[n][1][2]) for n in ("grouped_matmul", "lax.ragged_dot"))
        off = [f"{jnp.abs(a - b).max():.1e}" for a, b in zip(ours, theirs, strict=True)]
        print("largest differences of out, d lhs, d rhs:", *off)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    main(*numbers, ragged_dot="--ragged-dot" in sys.argv)
