"""Times rms_norm, Triton against XLA, on the GPU that is here. Numbers are checked first, in the same process.

    python -m benchmarks.rms_norm --out results.json [--candidates]

Forward: reads x, writes out and the rstd that a backward needs. Backward: reads x, the cotangent and rstd, writes the
gradients of x and weight. Each is a program of its own, as they are in training, where other layers lie between them; a
program that holds both lets XLA compute the output again instead of writing and reading it. Times are those of the kernels
alone (benchmarks/timing.py); bytes are those that must move, 2 arrays [M, D] forward and 3 backward; the ceiling is a pass
over 1 GiB, measured here. Results are written after every row, so what was measured is kept if the run ends early.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import chained, copy_ceiling
from kernels.rms_norm import op

TOLERANCE = 2e-2  # bfloat16, relative in the 2-norm


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
        sys.exit(f"{case.name} on {platform} with {cfg} is wrong: relative error {worst:.2e}; nothing more is reported")
    return worst


def measure(case, platform, ceiling, cfg=None) -> dict:
    error = check(case, platform, cfg)
    arguments = op.case_inputs(case, dtype="bfloat16")
    x, weight = arguments["x"], arguments["weight"]
    (out, rstd), pull = jax.jit(lambda x, w: jax.vjp(lambda x, w: op(x, w, platform=platform, cfg=cfg), x, w))(
        x, weight
    )
    no_rstd = jnp.zeros_like(rstd)  # rstd is kept for the backward and used by nothing else

    def forward(carry, weight):
        return op(carry[0], weight, platform=platform, cfg=cfg)

    def backward(carry, pull):
        return pull((carry[0], no_rstd))

    row = {"case": case.name, "shape": list(x.shape), "platform": platform, "cfg": str(cfg), "error": error}
    timed = {"fwd": (2, chained(forward, (x, rstd), weight)), "bwd": (3, chained(backward, (out, weight), pull))}
    for name, (arrays, seconds) in timed.items():
        row |= {f"{name}_us": seconds * 1e6, f"{name}_of_copy": arrays * x.nbytes / seconds / ceiling}
    print(
        f"{case.name:12} {platform:7} "
        + "   ".join(f"{name} {row[f'{name}_us']:7.1f} us, {row[f'{name}_of_copy']:4.2f} of copy" for name in timed)
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
    print(f"{device.device_kind}: copy {ceiling / 1e9:.0f} GB/s", flush=True)
    result = {
        "op": op.name,
        "dtype": "bfloat16",
        "device": device.device_kind,
        "commit": arguments.commit,
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "jax-triton", "triton")},
        "copy_GB_s": ceiling / 1e9,
        "rows": [],
    }

    def keep(row: dict) -> None:
        result["rows"].append(row)
        temporary = arguments.out.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=1) + "\n")
        os.replace(temporary, arguments.out)

    cases = [case for case in op.cases if "bench" in case.tags]
    for case in cases:
        for platform in ("triton", "xla"):
            keep(measure(case, platform, ceiling))
    for case in cases if arguments.candidates else ():
        call = op.bind(**op.case_inputs(case, dtype="bfloat16"))
        for cfg in op.backends["triton_gpu"].candidates(call):
            keep(measure(case, "triton", ceiling, cfg))


if __name__ == "__main__":
    main()
