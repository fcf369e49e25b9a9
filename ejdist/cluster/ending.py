"""How a command ends when it cannot end by itself: told to while it compiles or waits, or left alone by another host.

Python hears a signal only between two of its own instructions, and a thread that waits inside XLA has none. So a command gives
SIGTERM to a thread of its own, which ends the process where nothing is lost by that, and else passes the signal on to whoever
saves. Only a command asks for this, by `listen`; in somebody else's program none of it happens.
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

from ejdist.cluster.hosts import Failed, tell_others

_EVERY = 2.0  # seconds between two looks at the other hosts
_GRACE = 15.0  # seconds in which this host may find out for itself what another one has told


@dataclass(frozen=True)
class Codes:
    """Exit codes: stopped by a signal, and another host is gone."""

    stopped: int
    lost: int


_codes: Codes | None = None
_stepping = threading.Event()
_finding_out = threading.Event()
_limit = 0.0  # seconds that a step may take after SIGTERM


def listen(codes: Codes) -> None:
    """From here on SIGTERM is heard at any time. To be called once, by a main thread that blocked it before any other was
    started, so that they have it blocked too.

    While steps are made it finishes the step and saves, as ever; if that takes too long, because the step waits for a host that
    is gone, the process ends without a save. At any other time it ends at once: what is on disk is all that there was.
    """
    global _codes
    _codes = codes
    threading.Thread(target=_hear, args=(codes,), name="signals", daemon=True).start()


def codes() -> Codes | None:
    """Returns what a command has given to `listen`, None outside of one."""
    return _codes


def _hear(codes: Codes) -> None:
    signal.sigwait({signal.SIGTERM})
    if not _stepping.is_set():
        tell_others("it was stopped by SIGTERM")
        leave("stopped at once by SIGTERM, as no step was being made; the same command goes on", codes.stopped)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # of this thread, in which the handler then runs
    signal.raise_signal(signal.SIGTERM)
    time.sleep(_limit)
    if _stepping.is_set():
        faulthandler.dump_traceback(all_threads=True)
        leave(
            f"error: SIGTERM came {_limit:g} s ago (run.host_timeout), and the step has not ended: another host is gone, or "
            "hangs; ending without a save. The stack of every thread is above; the same command goes on from the last "
            "checkpoint",
            codes.lost,
        )


@contextlib.contextmanager
def stepping(failed: Callable[[], Failed | None] | None, limit: float) -> Iterator[None]:
    """While steps are made: SIGTERM is for whoever saves, and a host that says that it has failed ends this one too.

    Args:
      failed: returns what another host has said, None if nothing. None where there is no other.
      limit: seconds after SIGTERM in which the step is to end and to be saved.
    """
    global _limit
    _limit = limit
    ended = threading.Event()
    if _codes is not None and failed is not None:
        threading.Thread(target=_watch, args=(_codes, failed, ended), name="other hosts", daemon=True).start()
    _stepping.set()
    try:
        yield
    finally:
        _stepping.clear()
        ended.set()


def _watch(codes: Codes, failed: Callable[[], Failed | None], ended: threading.Event) -> None:
    while not ended.wait(_EVERY):
        try:
            said = failed()
        except Exception:  # the coordinator is gone: JAX ends this process, and says so
            return
        if said is not None:
            if not ended.wait(_GRACE) and not _finding_out.is_set():
                if said.code is not None:
                    leave(f"error: {said.text}", said.code)
                leave(f"error: {said.text}; the same command goes on from the last checkpoint", codes.lost)
            return


@contextlib.contextmanager
def finding_out() -> Iterator[None]:
    """Whoever is in here ends this process, and has more to say than that another host has ended, however long it takes."""
    _finding_out.set()
    try:
        yield
    finally:
        _finding_out.clear()


@contextlib.contextmanager
def within(seconds: float, otherwise: Callable[[], str]) -> Iterator[None]:
    """What is done in here ends the process, with a message, if it takes longer: for a wait that Python cannot end otherwise.
    Outside of a command it may take as long as it likes."""
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


def leave(message: str, code: int) -> None:
    """Ends the process now: no thread is waited for, no other host, and nothing is written but the message."""
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)
