"""Runs of every combination of some values, one after the other: `python -m launch.train -m KEY=A,B ...`.

Each run is a process of its own, as it would be alone, with a folder of its own in run.dir, named after its values. One that
fails does not keep the others from being made. What concerns all of them ends the sweep: a signal, or a host that is gone.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.errors import ABORTED, DONE, HOST_LOST, PREEMPTED
from recipes.arguments import Arguments, Job, RecipeError, assigned, jobs_of
from recipes.plugins import load_plugins
from recipes.schema import compose, texts_of

_ENDS_ALL = (PREEMPTED, HOST_LOST, ABORTED)


def sweep(a: Arguments) -> int:
    """Returns the first exit code that is not 0, after the last run.

    Raises:
      RecipeError: of one run; then none is started.
    """
    load_plugins(a)
    runs = [(job, *_command(job, a)) for job in jobs_of(a.overrides, texts_of())]
    codes: list[int] = []
    with _passed_on() as now:
        for n, (job, _, command) in enumerate(runs, 1):
            if now.stopped:
                break
            print(f"run {n} of {len(runs)}: {job.name}", flush=True)
            # In a group of its own a Ctrl-C comes to it only from here: of two it would take the second for impatience.
            now.process = subprocess.Popen(command, process_group=0)
            if now.stopped:  # while it was started
                now.process.send_signal(signal.SIGTERM)
            code = now.process.wait()
            codes.append(128 - code if code < 0 else code)
            if codes[-1]:
                print(
                    f"run {n} of {len(runs)} ended with exit code {codes[-1]}: {job.name}", file=sys.stderr, flush=True
                )
            if codes[-1] in _ENDS_ALL:
                break
    for (job, folder, _), code in zip(runs, codes, strict=False):
        print(f"{code:>4}  {_loss(folder):>10}  {job.name}")
    if left := runs[len(codes) :]:
        print(f"{len(left)} of {len(runs)} runs were not started; the same command resumes", file=sys.stderr)
    return next((code for code in codes if code), PREEMPTED if now.stopped else DONE)


def _command(job: Job, a: Arguments) -> tuple[Path, list[str]]:
    """Returns the folder of a run and how it is started. Raises RecipeError, naming the run."""
    words = Arguments(job.overrides, a.config_dir).words()
    from ejdist.sections import validate

    try:
        recipe = compose(words)
        validate(recipe)  # run.dir too: a URL or nothing, with a name behind it, would be a folder of this machine
    except ValueError as error:
        raise RecipeError(f"run {job.name}: {error}") from error
    folder = Path(recipe.run.dir) / job.name
    return folder, [sys.executable, "-m", "launch.train", *words, assigned("run.dir", str(folder))]


def _loss(folder: Path) -> str:
    try:
        return f"loss {json.loads((folder.expanduser() / 'summary.json').read_text())['loss_last']:.4f}"
    except (OSError, ValueError, KeyError, TypeError):
        return "no loss"


class _Now:
    """The process of the current run, and whether the sweep was told to stop."""

    process: Any = None
    stopped = False


@contextlib.contextmanager
def _passed_on() -> Iterator[_Now]:
    """Passes SIGTERM, SIGINT and SIGHUP to the current run, which saves, and starts no other run."""
    now, before = _Now(), {}

    def note(number: int, frame: Any) -> None:
        now.stopped = True
        if now.process is not None and now.process.poll() is None:
            now.process.send_signal(number)

    with contextlib.suppress(ValueError):  # not the main thread: whoever runs this handles signals
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            before[number] = signal.signal(number, note)
    try:
        yield now
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
