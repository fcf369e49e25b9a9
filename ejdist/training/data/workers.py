"""Processes that make shards. A unit is given to a process that is free, the largest first; each has a pipe of its own, so
that one that is killed takes nothing with it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from ejdist.registered import load, loaded
from ejdist.training.data.dataset import tokenizer_of
from ejdist.training.data.tokenizer import Tokenizer
from ejdist.training.data.tokenizing import Plan, make_shard
from ejdist.training.data.units import Unit

_TOLD_EVERY = 0.2  # seconds


class Progress:
    """How far a run is, in bytes of its sources: of units that are done, and of text of those that are not.

    Attributes:
      done, total: bytes. shards: units done.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.total, self.shards, self.of = sum(u.size for u in units), 0, len(units)
        self._finished, self._running = 0, dict.fromkeys(range(len(units)), 0)
        self._units, self._start = units, time.monotonic()

    @property
    def done(self) -> int:
        return self._finished + sum(min(n, self._units[i].size) for i, n in self._running.items())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @property
    def rate(self) -> float:
        """Bytes a second since the start."""
        return self.done / max(self.seconds, 1e-9)

    def more(self, unit: int, characters: int) -> None:
        self._running[unit] += characters

    def finished(self, unit: int) -> None:
        del self._running[unit]
        self._finished += self._units[unit].size
        self.shards += 1


def make_shards(
    plan: Plan, units: Sequence[Unit], *, processes: int, threads: int, on_progress: Callable[[Progress], Any]
) -> Progress:
    """Builds the shards of the units; calls `on_progress` a few times per second.

    Whatever ends it, its processes have ended too, and what they had not finished is removed.

    Raises:
      ValueError, OSError, ModuleNotFoundError: what a process raised, or one was killed.
    """
    units = sorted(units, key=lambda unit: -unit.size)
    progress, waiting = Progress(units), list(range(len(units)))[::-1]
    context = multiprocessing.get_context("spawn")  # a copy of this process would have its threads' locks
    workers: dict[Connection, Any] = {}
    busy: dict[Connection, int] = {}

    def give(pipe: Connection) -> None:
        busy[pipe] = waiting.pop()
        with contextlib.suppress(BrokenPipeError):  # it has been killed, which shows as the end of its pipe
            _send(pipe, units[busy[pipe]])

    try:
        with _threads(threads):
            for _ in range(min(processes, len(units))):
                ours, theirs = context.Pipe()
                worker = context.Process(target=_work, args=(plan.folder, plan.settings, plan.source, theirs, loaded()))
                worker.start()
                theirs.close()
                workers[ours] = worker
        for pipe in workers:
            give(pipe)
        while busy:
            ready: Any = wait(list(busy), timeout=_TOLD_EVERY)
            for pipe in ready:
                unit = busy[pipe]
                kind, value = _received(pipe, workers[pipe], units[unit])
                if kind == "failed":
                    raise value
                if kind == "text":
                    progress.more(unit, value)
                else:
                    progress.finished(unit)
                    del busy[pipe]
                    if waiting:
                        give(pipe)
            on_progress(progress)
    finally:
        for pipe, worker in workers.items():
            if pipe in busy and worker.is_alive():
                worker.terminate()
            pipe.close()
        for worker in workers.values():
            worker.join()
    return progress


class _threads:
    """The number of threads that the tokenizers library has in processes started here: it asks the environment once."""

    def __init__(self, number: int) -> None:
        self._wanted = {"RAYON_NUM_THREADS": str(number), "TOKENIZERS_PARALLELISM": "true" if number > 1 else "false"}

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._wanted}
        os.environ.update(self._wanted)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _send(pipe: Connection, message: Any) -> None:
    """Sends as `pipe.send` does, without its buffer, about which Python complains when a signal ends the process."""
    pipe.send_bytes(pickle.dumps(message))


def _received(pipe: Connection, worker: Any, unit: Unit) -> tuple[str, Any]:
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        worker.join()
        code = worker.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        raise ChildProcessError(
            f"the process that tokenized {unit.spans[0].path} {how}; if memory ran out, use fewer processes or a smaller "
            "shard_mb in another folder; the same command goes on with what is missing"
        ) from None


def _work(folder: Path, settings: Any, source: Any, pipe: Connection, plugins: Sequence[str]) -> None:
    """A worker process: builds the shards requested through the pipe, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent hears it too, and ends this process
    signal.signal(signal.SIGTERM, _end)
    # JAX's, of arrays, of which there are none here: what a signal raises while garbage is collected is dropped.
    gc.callbacks.clear()
    load(plugins)  # which read the source, and which this process has not imported
    tokenizer: Tokenizer = tokenizer_of(folder, settings.own)
    while True:
        try:
            unit = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            make_shard(folder, unit, settings, tokenizer, source, lambda n: _send(pipe, ("text", n)))
            answer = ("done", None)
        except BrokenPipeError:  # the parent is gone
            return
        except (ValueError, OSError, ModuleNotFoundError) as error:
            answer = ("failed", _plain(error))
        except Exception:
            answer = ("failed", RuntimeError(traceback.format_exc()))
        try:
            _send(pipe, answer)
        except BrokenPipeError:
            return


def _plain(error: ValueError | OSError | ModuleNotFoundError) -> Exception:
    """Returns an error that travels through a pipe: of its class, if that can be built from its message."""
    if isinstance(error, ModuleNotFoundError):  # a package that is not installed, which the command names
        return ModuleNotFoundError(str(error), name=error.name)
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error))
    return ValueError(str(error))


def _end(number: int, frame: Any) -> NoReturn:
    sys.exit(128 + number)
