"""Times: of kernels by the profiler, of calls by the clock, and of what the device can do at best."""

from __future__ import annotations

import glob
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# The profiler's planes and lines on which kernels lie.
_KERNELS = {"/device:GPU": "Stream", "/device:TPU": "XLA Modules"}


def wall_seconds(run: Callable[[int], Any], block: Callable[[Any], Any], calls: int) -> float:
    """Returns the seconds of one call of `run`, from `calls` of them back to back, the last one waited for."""
    start = time.perf_counter()
    result = None
    for n in range(calls):
        result = run(n)
    block(result)
    return (time.perf_counter() - start) / calls


class Kernel(NamedTuple):
    """A kernel that the profiler saw: its device, its name, when it ran, in ns, and of which instruction of XLA's program it
    was, of which program, where that is known."""

    device: str
    name: str
    start: float
    end: float
    hlo_op: str
    module: str = ""


def kernel_seconds(run: Callable[[int], Any], block: Callable[[Any], Any], calls: int) -> float:
    """Returns the seconds in which some kernel of one call ran: without the host, without the gaps between kernels.

    Raises:
      RuntimeError: the profiler shows no kernel, so there is nothing to report.
    """

    def several() -> None:
        result = None
        for n in range(calls):
            result = run(n)
        block(result)

    return union([(kernel.start, kernel.end) for kernel in traced(several)]) * 1e-9 / calls


def kernel_seconds_of_each(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Returns the seconds in which some kernel of each call ran, on the first device that is seen, from one trace.

    Raises:
      RuntimeError: the profiler shows no kernel, or not those by which the calls are told apart.
    """
    x = jnp.ones((8,), jnp.float32)
    jax.block_until_ready(_between_calls(x))

    def everything() -> None:
        for call in calls:
            jax.block_until_ready(_between_calls(x))
            jax.block_until_ready(call())

    return seconds_between(traced(everything), len(calls))


@jax.jit
def _between_calls(x: jax.Array) -> jax.Array:
    """A program whose kernel no other has, to tell calls apart in a trace."""
    return jnp.arctan2(x, x + 1)


def seconds_between(kernels: Sequence[Kernel], count: int) -> list[float]:
    """Returns the seconds of the kernels after each kernel of `_between_calls`, up to the next.

    Raises:
      RuntimeError: there are not `count` such groups.
    """
    first = min(kernel.device for kernel in kernels)
    groups: list[list[tuple[float, float]]] = []
    marked = False
    for kernel in sorted((k for k in kernels if k.device == first), key=lambda k: k.start):
        is_mark = _between_calls.__name__ in kernel.module or "atan2" in kernel.name
        if is_mark and not marked:
            groups.append([])
        elif not is_mark and groups:
            groups[-1].append((kernel.start, kernel.end))
        marked = is_mark
    if len(groups) != count or not all(groups):
        raise RuntimeError(
            f"the profiler shows {len(groups)} calls, {sum(map(bool, groups))} with kernels, and not {count}"
        )
    return [union(group) * 1e-9 for group in groups]


def traced(run: Callable[[], Any]) -> list[Kernel]:
    """Returns the kernels that ran on this host's accelerators until `run` returned.

    Raises:
      RuntimeError: the profiler shows no kernel, so there is nothing to report.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        found = kernels_in(path)
    if not found:
        raise RuntimeError("the profiler saw no kernel on an accelerator")
    return found


def kernels_in(path: str) -> list[Kernel]:
    """Returns the kernels in a trace file of the profiler (`*.xplane.pb`)."""
    found = []
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        line_name = next((line for prefix, line in _KERNELS.items() if plane.name.startswith(prefix)), None)
        for line in plane.lines if line_name else ():
            if line.name.startswith(line_name):
                found += [_kernel(plane.name, event) for event in line.events]
    return found


def _kernel(device: str, event: Any) -> Kernel:
    said = {name: value for name, value in event.stats if name is not None}
    start = event.start_ns
    names = (str(said.get(name, "")) for name in ("hlo_op", "hlo_module"))
    return Kernel(device, event.name, start, start + event.duration_ns, *names)


def union(spans: list[tuple[float, float]]) -> float:
    """Returns the length of a union of intervals: kernels that run side by side count once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def quartiles(samples: list[float]) -> list[float]:
    """Returns [first quartile, median, third quartile]."""
    if len(samples) < 2:
        return samples * 3
    return statistics.quantiles(samples, n=4, method="inclusive")


def has_kernel_times() -> bool:
    return jax.default_backend() != "cpu"


# Of the pass that is the yardstick of bytes. On an H200 a GiB of float32 is read and written at 4,294 GB/s, of uint32 at 4,300,
# of bfloat16, which was the yardstick before, at 3,368.
COPIED = "float32"


def ceilings(dtype: str, rounds: int = 5) -> tuple[float, float]:
    """Returns (FLOP/s of a large square matmul of that dtype, bytes/s of an elementwise pass that reads and writes), both
    measured here and now: what this device does at its best today."""
    large = has_kernel_times()
    side, elements = (8192, 2**28) if large else (1024, 2**24)
    a = jax.random.normal(jax.random.key(0), (side, side)).astype(dtype)
    x = jnp.ones((elements,), COPIED)
    multiply, negate = jax.jit(lambda a, _: a @ a), jax.jit(lambda x, _: -x)

    def best(function: Callable[..., Any], value: Any) -> float:
        measure = kernel_seconds if large else wall_seconds
        jax.block_until_ready(function(value, 0))
        samples = [
            measure(lambda n: function(value, n), jax.block_until_ready, 5 if large else 1) for _ in range(rounds)
        ]
        return statistics.median(samples)

    return 2 * side**3 / best(multiply, a), 2 * x.nbytes / best(negate, x)


def cache_bytes() -> int:
    """Returns the size of the last cache, or, where it cannot be read, a size that no cache here exceeds."""
    if jax.default_backend() == "cpu":
        sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
        units = {"K": 2**10, "M": 2**20}
        return max((int(s[:-1]) * units[s[-1]] for s in sizes if s[-1:] in units), default=32 * 2**20)
    return 128 * 2**20  # 50 MiB on an H200, 126 MB on a B200
