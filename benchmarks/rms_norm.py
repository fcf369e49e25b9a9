"""Times rms_norm, Triton against XLA, on the GPU that is here. Numbers are checked first, in the same process.

    python benchmarks/rms_norm.py --out results.json [--candidates]

A time is the median over rounds of a program that runs the operation several times in a row, divided by how often, so
that neither dispatch nor the host is in it. Bytes are those that must move: forward 2 arrays [M, D], backward 3. The
ceiling is a copy of 1 GiB, measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kernels.rms_norm import op

REPEATS, ROUNDS = 10, 15
TOLERANCE = 2e-2  # bfloat16, relative in the 2-norm


def seconds(function, *args) -> float:
    """Returns the median time of one call, after it was compiled and warmed up."""
    for _ in range(3):
        jax.block_until_ready(function(*args))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def repeated(step, x) -> float:
    """Returns the seconds of one step x -> x, from a program of REPEATS of them that may not be merged."""

    @jax.jit
    def run(x):
        for _ in range(REPEATS):
            x = jax.lax.optimization_barrier(step(x))
        return x

    return seconds(run, x) / REPEATS


def copy_ceiling() -> float:
    """Returns bytes a second of an elementwise pass over 1 GiB, reads and writes counted."""
    x = jnp.ones((2**29,), jnp.bfloat16)
    return 2 * x.nbytes / repeated(lambda x: -x, x)


def forward_step(weight, platform, cfg):
    return lambda x: op(x, weight, platform=platform, cfg=cfg)[0]


def training_step(weight, platform, cfg):
    def step(x):
        (out, rstd), pull = jax.vjp(lambda x, w: op(x, w, platform=platform, cfg=cfg), x, weight)
        # The output is the cotangent, so that it must be written.
        dx, dweight = pull((out, jnp.zeros_like(rstd)))
        return jax.lax.optimization_barrier((dx, dweight))[0]

    return step


def check(case, platform, cfg=None) -> float:
    """Returns the largest relative error of outputs and gradients; exits if it is too large."""
    arguments = op.case_inputs(case, dtype="bfloat16")

    def run(function):
        def both(x, weight):
            outputs, pull = jax.vjp(function, x, weight)
            return outputs, pull(jax.tree.map(lambda y: jnp.cos(y).astype(y.dtype), outputs))

        return jax.jit(both)

    exact = run(op.function)(*(v.astype(jnp.float32) for v in arguments.values()))
    actual = run(lambda x, weight: op(x, weight, platform=platform, cfg=cfg))(*arguments.values())
    worst = 0.0
    for a, w in zip(jax.tree.leaves(actual), jax.tree.leaves(exact), strict=True):
        a, w = np.asarray(a, np.float32), np.asarray(w, np.float32)
        worst = max(worst, float(np.linalg.norm(a - w) / np.linalg.norm(w)))
    if not worst < TOLERANCE:
        sys.exit(f"{case.name} on {platform} with {cfg} is wrong: relative error {worst:.2e}; nothing is reported")
    return worst


def measure(case, platform, ceiling, cfg=None) -> dict:
    arguments = op.case_inputs(case, dtype="bfloat16")
    x, weight = arguments["x"], arguments["weight"]
    row = {
        "case": case.name,
        "shape": list(x.shape),
        "platform": platform,
        "cfg": str(cfg),
        "error": check(case, platform, cfg),
    }
    for name, step, arrays in (("fwd", forward_step, 2), ("fwd_bwd", training_step, 5)):
        time_taken = repeated(step(weight, platform, cfg), x)
        rate = arrays * x.nbytes / time_taken
        row |= {f"{name}_us": time_taken * 1e6, f"{name}_GB_s": rate / 1e9, f"{name}_of_copy": rate / ceiling}
    print(
        f"{case.name:12} {platform:7} fwd {row['fwd_us']:8.1f} us {row['fwd_GB_s']:6.0f} GB/s {row['fwd_of_copy']:5.2f}   "
        f"fwd+bwd {row['fwd_bwd_us']:8.1f} us {row['fwd_bwd_GB_s']:6.0f} GB/s {row['fwd_bwd_of_copy']:5.2f}"
        + (f"   {cfg}" if cfg is not None else ""),
        flush=True,
    )
    return row


def commit() -> str:
    here = Path(__file__).resolve().parent
    run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where to write the results, as JSON")
    parser.add_argument("--candidates", action="store_true", help="also time every tuning candidate")
    parser.add_argument("--commit", default=commit(), help="the commit measured, where there is no git")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit(f"this times a GPU, and JAX runs on {jax.default_backend()} here")
    device = jax.devices()[0]
    ceiling = copy_ceiling()
    print(f"{device.device_kind}: copy {ceiling / 1e9:.0f} GB/s")
    rows = []
    for case in op.cases:
        if "bench" not in case.tags:
            continue
        rows += [measure(case, platform, ceiling) for platform in ("triton", "xla")]
        if arguments.candidates:
            call = op.bind(**op.case_inputs(case, dtype="bfloat16"))
            rows += [measure(case, "triton", ceiling, cfg) for cfg in op.backends["triton_gpu"].candidates(call)]
    result = {
        "op": op.name,
        "dtype": "bfloat16",
        "device": device.device_kind,
        "commit": arguments.commit,
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "jax-triton", "triton")},
        "copy_GB_s": ceiling / 1e9,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
