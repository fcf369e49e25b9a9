"""`python -m launch.local processes=4 [devices=2] [KEY=VALUE ...]`: one run as several processes of this machine.

For a machine with several GPUs and a process for each, and to see on any machine what a run on several hosts does. A signal
goes to all of them. Ends with the first exit code that is not 0, after the others have ended too; with restarts= it starts a
run again that was stopped or lost a process.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from ejdist.cluster.verdict import again, of_start
from ejdist.cluster.verdict import read as read_verdict
from launch.errors import run_command
from launch.options import command_option, help_of, option, read, refuse_cluster
from launch.processes import Job

_PATIENCE = 150  # seconds that the others have to end once one has failed


@dataclass(frozen=True, kw_only=True)
class Options:
    """The processes; the rest of the command line is the recipe's."""

    processes: int = option(MISSING, "number of processes of the run")
    devices: int | None = option(None, "virtual CPU devices of each process")
    gpus: str = option("", "the GPU of each process, such as 0,1,2,3")
    restarts: int = option(
        0, "how often a run that lost a process, or that one was told to stop, is started again", least=0
    )
    command: str = command_option()

    @property
    def visible(self) -> list[str]:
        return self.gpus.split(",") if self.gpus else []


def parse(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """Returns (the processes, the arguments of the run). Raises ValueError, naming the argument."""
    options, rest = read(Options, argv)
    refuse_cluster(rest, "launch.local sets how its processes find each other")
    if options.gpus and (options.devices is not None or len(options.visible) != options.processes):
        raise ValueError(
            f"gpus={options.gpus} names one GPU for each of {options.processes} processes, and excludes devices="
        )
    if not all(options.visible) or len(set(options.visible)) < len(options.visible):
        raise ValueError(
            f"gpus={options.gpus} must name a GPU for each process, and each once, with a comma between two"
        )
    return options, rest


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_command(argv, _main, lambda _: f"{__doc__}\n{help_of(Options)}")


def _main(arguments: list[str]) -> int:
    options, rest = parse(arguments)
    left = options.restarts
    while True:
        code, stopped = _start(options, rest)
        if stopped or left < 1 or not again(code):
            return code
        print(
            f"the run ended with exit code {code}, and is started again, {left} of {options.restarts} times left",
            flush=True,
        )
        left -= 1


def _start(options: Options, rest: Sequence[str]) -> tuple[int, bool]:
    """Returns the exit code of a start, and whether this process was told to stop."""
    logs = Path(tempfile.mkdtemp(prefix="ejdist-local-"))
    job = Job(options.processes, logs, options.devices, (sys.executable, "-m", f"launch.{options.command}"))
    gpus = {i: {"CUDA_VISIBLE_DEVICES": gpu} for i, gpu in enumerate(options.visible)}
    ended, before, unread, stopped = threading.Event(), {}, threading.Event(), threading.Event()

    def stop(number: int, frame: Any) -> None:
        stopped.set()
        job.signal(number)

    def tell() -> None:
        try:
            _tell(job, ended)
        except BrokenPipeError:  # the main thread raises it, once the processes have saved
            unread.set()
            job.signal(signal.SIGTERM)

    try:
        job.start(rest, environment=gpus)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            before[number] = signal.signal(number, stop)
        reader = threading.Thread(target=tell, daemon=True)
        reader.start()
        codes = job.wait(float("inf"), _PATIENCE)
        left = read_verdict(job.verdict)
        ended.set()
        reader.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        job.kill()
        shutil.rmtree(logs, ignore_errors=True)
    if unread.is_set():
        raise BrokenPipeError
    if left is not None:
        print(f"the run ended with exit code {left.code}, by {left.reason}", file=sys.stderr, flush=True)
    return of_start(codes, left), stopped.is_set()


def _tell(job: Job, ended: threading.Event) -> None:
    """Prints the output of the processes as it arrives, each line with the number of its process."""
    read, open_lines = [0] * job.count, [b""] * job.count
    last = False
    while True:
        for i in range(job.count):
            if not job.log(i).exists():
                continue
            with job.log(i).open("rb") as log:
                log.seek(read[i])
                new = log.read()
            read[i] += len(new)
            *lines, open_lines[i] = (open_lines[i] + new).split(b"\n")
            for line in [*lines, *([open_lines[i]] if last and open_lines[i] else [])]:
                sys.stdout.write(f"[{i}] {line.decode(errors='replace')}{os.linesep}")
        sys.stdout.flush()
        if last:
            return
        last = ended.is_set()
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
