"""Times programs on a GPU by the profiler: the time its kernels ran, without the host and without the gaps between them."""

from __future__ import annotations

import glob
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

REPEATS, ROUNDS = 10, 5


def device_seconds(function: Callable[..., Any], *args: Any, rounds: int = ROUNDS) -> float:
    """Returns the median, over rounds, of the seconds that the kernels of one call took together.

    The function is called twice first, so that compiling it is no part of this.

    Raises:
      RuntimeError: the profiler shows no kernel, so there is nothing to report.
    """
    for _ in range(2):
        jax.block_until_ready(function(*args))
    times = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(function(*args))
            (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
            times.append(_kernel_nanoseconds(path) * 1e-9)
    return statistics.median(times)


def _kernel_nanoseconds(path: str) -> float:
    lines = [
        line
        for plane in jax.profiler.ProfileData.from_file(path).planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
    ]
    total = sum(event.duration_ns for line in lines for event in line.events)
    if not total:
        raise RuntimeError("the profiler saw no kernel on a GPU")
    return total


def chained(step: Callable[..., Any], first: Any, *constants: Any, repeats: int = REPEATS) -> float:
    """Returns the seconds of one `step(carry, *constants)`, which gives a carry of the same shapes. All that it gives is
    computed, and no two steps are merged."""

    @jax.jit
    def run(carry: Any, constants: Any) -> Any:
        for _ in range(repeats):
            carry = jax.lax.optimization_barrier(step(carry, *constants))
        return carry

    return device_seconds(run, first, constants) / repeats


def copy_ceiling() -> float:
    """Returns bytes a second of an elementwise pass over 1 GiB, reads and writes counted."""
    x = jnp.ones((2**29,), jnp.bfloat16)
    return 2 * x.nbytes / chained(lambda x: -x, x)
