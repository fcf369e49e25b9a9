"""What was measured of each way: rows, the programs that are still to be timed, and tables."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks.timing import quartiles

SAMPLE = 0.1  # seconds that calls of one sample take together, at least, where one process decides alone


class Rows:
    """Rows by label, and the programs that are still to be timed."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.programs: dict[tuple[str, str], tuple[Callable, tuple]] = {}
        self.say = say

    def add(self, label: str, part: str, prepare: Callable[[], tuple[Callable, tuple, dict[str, Any]]]) -> bool:
        """Returns whether there is a program; why there is none is kept in its row.

        Args:
          prepare: returns (a jitted program, its arguments, what the row says).
        """
        row = self.rows.setdefault(label, {})
        start = time.perf_counter()
        try:
            run, arguments, about = prepare()
            jax.block_until_ready(run(*arguments))  # compiles it too
            self.programs[label, part] = run, arguments
        except Exception as error:  # what one way cannot do is no reason to lose the others
            # Beside what can be timed, a part that cannot is no reason to hide the rest.
            name = f"{part}_refused" if any(of == label for of, _ in self.programs) else "refused"
            row[name] = f"{part}: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
            self.say(f"{label}, {row[name]}")
            return False
        row |= about
        error = f", error {about['error']:.1e}" if "error" in about else ""
        self.say(f"{label}, {part}: ready{error}, {time.perf_counter() - start:.1f} s")
        return True

    def time(self, rounds: int, seed: int) -> None:
        """Times every program once in each round, in an order shuffled anew; the same one in every process."""
        shuffled, times = random.Random(seed), {key: [] for key in self.programs}
        calls: dict[tuple[str, str], int] = {}
        for number in range(rounds + 1):
            for key in shuffled.sample(list(self.programs), len(self.programs)):
                seconds = _seconds(*self.programs[key], calls.get(key, 1))
                if number:
                    times[key].append(seconds)
                else:  # the first round warms up, and says how long a call takes
                    seconds = _seconds(*self.programs[key], 1)
                    calls[key] = 3 if jax.process_count() > 1 else min(max(int(SAMPLE / seconds), 1), 20)
        for (label, part), seconds in times.items():
            self.rows[label][f"{part}_ms"] = [1e3 * s for s in quartiles(seconds)]
        self.programs.clear()


def _seconds(run: Callable, arguments: tuple, calls: int) -> float:
    start, found = time.perf_counter(), None
    for _ in range(calls):
        found = run(*arguments)
    jax.block_until_ready(found)
    return (time.perf_counter() - start) / calls


def median(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    return value[1] if isinstance(value, list) else value


# Of each kind of rows: (heading, entry, digits). A column that no row has is left out.
SPLIT = (
    ("ms", "whole_ms", 2), ("work, ms", "work_ms", 2), ("TFLOP/s a device", "tflops", 0), ("efficiency", "efficiency", 3),
    ("of its backend", "of_its_backend", 3), ("exposed, ms", "exposed_ms", 2), ("of the exchange", "exposed_share", 2),
    ("busiest rank over the mean", "imbalance", 2),
)  # fmt: skip
RANK = (
    ("rank", "rank", 0), ("busiest over mean", "imbalance", 2), ("pairs", "pairs", 0), ("ms", "whole_ms", 2),
    ("same work in one call, ms", "alone_ms", 2), ("efficiency", "efficiency", 3), ("TFLOP/s", "tflops", 0),
    ("the row on one device, ms", "row_ms", 2), ("efficiency by it", "efficiency_of_row", 3), ("hops, ms", "hops_ms", 2),
    ("one call over the hops", "efficiency_of_hops", 3), ("of each hop, ms", "each", None),
)  # fmt: skip
BALANCE = (("ranks", "ranks", 0), ("order", "order", None), ("stripe", "stripe", 0), ("busiest over mean", "imbalance", 3),
           ("mean of rows", "mean_of_rows", 3), ("pairs of each rank over the mean", "each", None))  # fmt: skip


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the rows in Markdown: a table of each kind that there is."""
    kinds: dict[str, dict[str, Mapping[str, Any]]] = {}
    for label, row in rows.items():
        kinds.setdefault({"rank": "rank", "balance": "balance"}.get(row.get("kind", ""), "split"), {})[label] = row
    columns = {"split": SPLIT, "rank": RANK, "balance": BALANCE}
    return "\n\n".join(_table(kinds[kind], columns[kind]) for kind in columns if kind in kinds)


def _table(rows: Mapping[str, Mapping[str, Any]], columns: Any) -> str:
    always = SPLIT[:5]
    used = [c for c in columns if c in always or any(c[1] in row for row in rows.values())]
    lines = [f"| | {' | '.join(c[0] for c in used)} |", "|---" * (len(used) + 1) + "|"]
    for label, row in rows.items():
        if "refused" in row:
            lines.append(f"| {label} | {row['refused']} |{' |' * (len(used) - 1)}")
            continue
        lines.append(f"| {label} | {' | '.join(_cell(row, name, digits) for _, name, digits in used)} |")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], name: str, digits: int | None) -> str:
    value = row.get(name)
    if value is None or digits is None:
        return " ".join(f"{x:.3g}" for x in value) if isinstance(value, list) else str(value or "")
    number = median(row, name)
    return f"{number:,.0f}" if name == "pairs" else f"{number:.{digits}f}"
