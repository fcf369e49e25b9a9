"""The race: every contestant and direction once in each round, in an order shuffled anew, on inputs that the cache has lost."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from benchmarks.cases import split
from benchmarks.contestants import Contestant, first_line
from benchmarks.timing import has_kernel_times, kernel_seconds_of_each, quartiles, wall_seconds
from kernels.framework.work import nbytes

DIRECTIONS = ("forward", "backward", "both")
MOST_COPIES, MOST_CALLS = 16, 100


@dataclass
class Runner:
    """One contestant in one direction: `run(n)` starts call n, on copy n of the inputs."""

    contestant: Contestant
    direction: str
    run: Callable[[int], Any]
    calls: int = 1
    wall: list[float] = field(default_factory=list)
    kernel: list[float] = field(default_factory=list)


def copies(inputs: Any, cache: float, memory_bound: bool) -> int:
    """Returns how many copies of the inputs, arrays of any dtype, make each call find none of its own in a cache of that many
    bytes."""
    if not memory_bound:
        return 1
    return max(1, min(MOST_COPIES, -(-int(2 * cache) // max(1, nbytes(*jax.tree.leaves(inputs))))))


def _runners(contestant: Contestant, arguments: dict[str, Any], cotangents: tuple, number: int) -> dict[str, Runner]:
    """Returns a runner for each direction, warmed up: compiled, and run once."""
    programs = contestant.programs
    floats, data, _ = split(arguments)
    inputs = [programs.load(floats, data) for _ in range(number)]
    run: dict[str, Callable[[int], Any]] = {"forward": lambda n: programs.forward(inputs[n % number])}
    if contestant.backward:
        sent = [programs.load_cotangents(cotangents) for _ in range(number)]
        saved = [programs.save(one) for one in inputs]
        run["backward"] = lambda n: programs.backward(saved[n % number], sent[n % number])
        run["both"] = lambda n: programs.both(inputs[n % number], sent[n % number])
    for function in run.values():
        programs.block(function(0))
    return {direction: Runner(contestant, direction, function) for direction, function in run.items()}


def warm_up(contestant: Contestant, arguments: dict[str, Any], cotangents: tuple) -> None:
    """Compiles what a check has not, so that a race need not: it may have the device to itself."""
    with contextlib.suppress(Exception):  # it fails again in the race, which says so
        _runners(contestant, arguments, cotangents, 1)


def _kernel_seconds(runners: list[Runner]) -> list[float | None]:
    """Returns the seconds of the kernels of one call of each; None where there are none, as on a CPU.

    Those that the profiler sees are run in one trace: it takes more time to write one than to run what is in it.
    """

    def several(r: Runner) -> None:
        result = None
        for n in range(r.calls):
            result = r.run(n)
        r.contestant.programs.block(result)

    by_profiler = [r for r in runners if r.contestant.programs.kernel_seconds is None]
    runs = [functools.partial(several, r) for r in by_profiler]
    seconds = iter(kernel_seconds_of_each(runs) if runs and has_kernel_times() else [None] * len(runs))

    def of_one(r: Runner) -> float | None:
        if r.contestant.programs.kernel_seconds is not None:
            return r.contestant.programs.kernel_seconds(r.run, r.calls)
        total = next(seconds)
        return total and total / r.calls

    return [of_one(r) for r in runners]


def race(
    contestants: list[Contestant],
    arguments: dict[str, Any],
    cotangents: Callable[[Contestant], tuple],
    *,
    number: int,
    rounds: int,
    seconds: float,
) -> dict[str, dict[str, Any]]:
    """Returns contestant -> {direction: {"wall_us": quartiles, "kernel_us": quartiles or None}}, or {"failed": reason}.

    Args:
      cotangents: what to send back to a contestant.
      number: copies of the inputs to go round.
      seconds: about how long one sample may take; it has as many calls as that allows.
    """
    result: dict[str, dict[str, Any]] = {}
    runners: list[Runner] = []
    for contestant in contestants:
        try:
            runners += _runners(contestant, arguments, cotangents(contestant), number).values()
            result[contestant.name] = {}
        except Exception as error:  # memory for all copies at once, mostly; the others can still be timed
            result[contestant.name] = {"failed": first_line(error)}
    for r in runners:
        one = wall_seconds(r.run, r.contestant.programs.block, 1)
        r.calls = max(1, min(MOST_CALLS, round(seconds / max(one, 1e-7))))
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(runners)
        for r in runners:
            programs = r.contestant.programs
            r.wall.append(wall_seconds(r.run, programs.block, r.calls))
        for r, kernel in zip(runners, _kernel_seconds(runners), strict=True):
            r.kernel += [] if kernel is None else [kernel]
    for r in sorted(runners, key=lambda r: DIRECTIONS.index(r.direction)):
        microseconds = {
            "wall_us": [t * 1e6 for t in quartiles(r.wall)],
            "kernel_us": [t * 1e6 for t in quartiles(r.kernel)] or None,
        }
        result[r.contestant.name][r.direction] = microseconds
    return result
