"""Ends a command that cannot end on its own: SIGTERM while it compiles or waits, or another host is gone.

Python handles signals only between bytecode instructions, and a thread that blocks inside XLA executes none. So a
command handles SIGTERM in a dedicated thread, which exits the process if that loses nothing, and otherwise forwards the
signal to the training loop, which saves. Only commands opt in, by calling `listen`; as a library none of this happens.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ejdist.cluster.hosts import Failed, notify_failure
from ejdist.cluster.presence import presence
from ejdist.cluster.verdict import give

_EVERY = 2.0  # seconds between two looks at the other hosts
_GRACE = 15.0  # seconds for this host to find the cause itself after another host reported a failure
_GONE = (
    5.0  # seconds for it to end by itself after another host has ended without a word, where there is nothing to find
)


@dataclass(frozen=True)
class Codes:
    """Exit codes: stopped by a signal; another host is gone."""

    stopped: int
    lost: int


_codes: Codes | None = None
_stepping = threading.Event()
_stepped = threading.Event()  # a step was compiled, and the loop has begun
_finding_out = threading.Event()
_limit = 0.0  # seconds that a step may take after SIGTERM


def listen(codes: Codes) -> None:
    """Handles SIGTERM from now on, at any time. Call it once, from a main thread that blocked SIGTERM before any other
    thread started, so that all threads inherit the block.

    During training SIGTERM finishes the step and saves; if that takes too long, because the step waits for a lost host,
    the process exits without saving. At any other time it exits at once: there is nothing to save.
    """
    global _codes
    _codes = codes
    threading.Thread(target=_hear, args=(codes,), name="signals", daemon=True).start()


def codes() -> Codes | None:
    """Returns the codes passed to `listen`, None outside a command."""
    return _codes


def _hear(codes: Codes) -> None:
    signal.sigwait({signal.SIGTERM})
    if not _stepping.is_set():
        notify_failure("it was stopped by SIGTERM")
        leave("stopped at once by SIGTERM, as no step was running; the same command resumes", codes.stopped)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # for this thread, which then runs the handler
    signal.raise_signal(signal.SIGTERM)
    time.sleep(_limit)
    if _stepping.is_set():
        faulthandler.dump_traceback(all_threads=True)
        leave(
            f"error: SIGTERM came {_limit:g} s ago (run.host_timeout) and the step has not ended: another host is gone "
            "or hangs; exiting without a save. The stack of every thread is above; the same command resumes from the "
            "last checkpoint",
            codes.lost,
        )


@contextlib.contextmanager
def stepping(failed: Callable[[], Failed | None] | None, limit: float) -> Iterator[None]:
    """During training: SIGTERM goes to the training loop, which saves, and a failure reported by another host ends this
    one.

    Args:
      failed: returns the failure that another host reported, or None. None if there is only one host.
      limit: seconds after SIGTERM for the step to end and be saved.
    """
    global _limit
    _limit = limit
    ended = threading.Event()
    if _codes is not None and failed is not None:
        threading.Thread(target=_watch, args=(_codes, failed, ended), name="other hosts", daemon=True).start()
    _stepping.set()
    _stepped.set()
    try:
        yield
    finally:
        _stepping.clear()
        ended.set()


def _watch(codes: Codes, failed: Callable[[], Failed | None], ended: threading.Event) -> None:
    while not ended.wait(_EVERY):
        try:
            failure = failed()
        except Exception:  # the coordinator is gone: JAX ends this process and reports it
            return
        if failure is not None:
            gone = presence().gone()
            grace = _GONE if gone is not None and gone.text == failure.text else _GRACE
            if not ended.wait(grace) and not _finding_out.is_set():
                if failure.code:  # 0 would be no failure
                    leave(f"error: {failure.text}", failure.code)
                leave(f"error: {failure.text}; the same command resumes from the last checkpoint", codes.lost)
            return


def has_stepped() -> bool:
    """Returns whether the loop over steps has begun in this process."""
    return _stepped.is_set()


@contextlib.contextmanager
def finding_out() -> Iterator[None]:
    """While open, the caller is about to end this process with a better message than "another host ended", however long
    that takes."""
    _finding_out.set()
    try:
        yield
    finally:
        _finding_out.clear()


@contextlib.contextmanager
def within(seconds: float, otherwise: Callable[[], str]) -> Iterator[None]:
    """Exits the process with a message if the body takes longer: for waits that Python cannot interrupt. Has no effect
    outside a command."""
    done = threading.Event()

    def watch(codes: Codes) -> None:
        if not done.wait(seconds):
            leave(otherwise(), codes.lost)

    if _codes is not None:
        threading.Thread(target=watch, args=(_codes,), name="a wait", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def bounded(wait: Callable[[], object], seconds: float) -> bool:
    """Calls a function that may wait for lost hosts, in a thread that is abandoned after `seconds`; with 0 seconds it is not
    called. Returns whether it ended, if only with an error."""
    if seconds <= 0:
        return False
    thread = threading.Thread(target=_ignoring, args=(wait,), name="a last wait", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _ignoring(wait: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # what ended the run is what is reported
        wait()


def leave(message: str, code: int) -> None:
    """Exits the process now, without waiting for threads or for other hosts longer than `give` does. Writes nothing but the
    message, and the verdict. A process that has stated another failure ends with the code of that."""
    print(message, file=sys.stderr, flush=True)
    code = give(code, message).code or code
    for last in _last:
        with contextlib.suppress(Exception):
            last()
    sys.stdout.flush()
    os._exit(code)


_last: list[Callable[[], object]] = []


def at_leaving(last: Callable[[], object]) -> None:
    """Calls a function, which must not wait for others, when `leave` ends this process."""
    _last.append(last)
