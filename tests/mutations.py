"""`python tests/mutations.py [-n WORKERS] [WORDS ...]`: seeds one fault at a time into a copy, and tests must go red.

Each fault (tests/faults, which says how one is written) is code replaced in a private copy of the sources, and the tests that
should notice are run there until one fails. The command fails if a fault goes unnoticed, or if its code is not there any more.
WORDS choose faults by their area (a file of tests/faults), or by what their name, their anchor or their file contains.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults import Fault, collected
from seeding import Project, Stale

ROOT = Path(__file__).resolve().parent.parent
NOTICED = (
    "red"  # what every fault should be; else GREEN: unnoticed, STALE: its line is gone, BROKEN: no test ran to its end
)
LIMIT = 1200.0  # seconds: a fault may make a loop that never ends


def seeded(fault: Fault, project: Project) -> tuple[str, str]:
    """Returns (file, its text with the fault); raises Stale, with the reason, where it cannot be seeded any more."""
    if not fault.is_text:
        return project.mutated(fault.where, fault.old, fault.new)
    if fault.where not in project.texts:
        raise Stale(f"there is no {fault.where}")
    if fault.old not in project.texts[fault.where]:
        raise Stale(f"{fault.old!r} is not in {fault.where}")
    text = project.texts[fault.where].replace(fault.old, fault.new, 1)
    try:
        ast.parse(text)
    except SyntaxError as error:  # it would turn tests red whatever they are for
        raise Stale(f"with {fault.new!r}, {fault.where} is not Python: {error.msg}") from None
    return fault.where, text


def place(fault: Fault, project: Project) -> str:
    """Returns the file that a fault is in; raises Stale where it cannot be seeded any more."""
    return (seeded(fault, project) if fault.is_text else (project.find(fault.where, fault.old, fault.new), ""))[0]


def stale(fault: Fault, project: Project) -> str:
    """Returns why a fault cannot be seeded any more, or nothing."""
    try:
        place(fault, project)
    except Stale as why:
        return str(why)
    return ""


class Copy:
    """A private copy of the project with a compile cache of its own. Both serve one fault after the other: what a fault does
    not touch is compiled once, since a program is known by what it computes."""

    def __init__(self, folder: Path):
        self.root, self.cache = folder / "project", folder / "cache"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "outputs", "*.egg-info")
        shutil.copytree(ROOT, self.root, ignore=ignored)
        self.project = Project(self.root)

    def run(self, fault: Fault) -> tuple[str, str]:
        """Returns ("red" | "GREEN" | "STALE" | "BROKEN", the first test that failed)."""
        try:
            file, text = seeded(fault, self.project)
        except Stale as why:
            return "STALE", str(why)
        before = self.project.texts[file]
        self._write(self.root / file, text)
        try:
            return self._pytest(fault)
        finally:
            self._write(self.root / file, before)

    @staticmethod
    def _write(file: Path, text: str) -> None:
        file.write_text(text)
        # Python tells by size and second that what it compiled is old, and a fault may have both of the line before.
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()

    def _pytest(self, fault: Fault) -> tuple[str, str]:
        """Runs the quick tests of a fault, and where these are green or there are none, the slow ones."""
        state, line = self._selected(shlex.split(fault.tests))
        if state in ("GREEN", "NONE") and "-m" not in shlex.split(fault.tests):
            slow, said = self._selected([*shlex.split(fault.tests), "-m", "slow and not gpu"])
            state, line = (state, line) if slow == "NONE" else (slow, f"slow: {said}")
        return "BROKEN" if state == "NONE" else state, line[:110]

    def _selected(self, arguments: list[str]) -> tuple[str, str]:
        options = ["-n", "0", "-x", "-q", "-p", "no:cacheprovider", "--basetemp", str(self.root.parent / "temporary")]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        path = os.pathsep.join([str(self.root), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "JAX_COMPILATION_CACHE_DIR": str(self.cache)}
        try:
            done = subprocess.run(
                command, cwd=self.root, capture_output=True, text=True, env=environment, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            return "BROKEN", f"no end after {LIMIT:.0f} s"
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        state = {0: "GREEN", 1: NOTICED, 5: "NONE"}.get(done.returncode, "BROKEN")
        return state, (failed or done.stdout.splitlines()[-1:] or done.stderr.splitlines()[-1:] or [""])[0]


def chosen(words: list[str]) -> list[Fault]:
    """Returns the faults that any of the words names; all, where there are none."""
    project = Project(ROOT)

    @functools.cache  # every word asks for it
    def file(fault: Fault) -> str:
        return "" if stale(fault, project) else place(fault, project)

    return [
        fault
        for area, faults in collected().items()
        for fault in faults
        if not words
        or any(word == area or word in fault.name or word in fault.where or word in file(fault) for word in words)
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORDS")
    parser.add_argument("-n", type=int, default=1, metavar="WORKERS", help="faults at a time (1)")
    asked = parser.parse_args(arguments)
    faults = chosen(asked.words)
    if not faults:
        parser.error(f"no fault is named by {' '.join(asked.words)}; areas are {', '.join(collected())}")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(max(asked.n, 1)) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for i in range(max(asked.n, 1)):
            copies.put(Copy(Path(folder) / str(i)))

        def seed(fault: Fault) -> tuple[Fault, str, str]:
            copy, start = copies.get(), time.monotonic()
            try:
                state, what = copy.run(fault)
            finally:
                copies.put(copy)
            print(f"{state:6} {time.monotonic() - start:4.0f} s  {fault.name:60} {what}", flush=True)
            return fault, state, what

        found = list(pool.map(seed, faults))
    states = Counter(state for _, state, _ in found)
    print(f"\n{states[NOTICED]} of {len(found)} faults turned the tests red, in {time.monotonic() - begin:.0f} s")
    for fault, state, what in found:
        if state != NOTICED:
            print(f"{state:6} {fault.name} ({fault.where}; {fault.tests}): {what}")
    return 0 if states[NOTICED] == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
