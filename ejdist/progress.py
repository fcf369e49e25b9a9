"""Log lines of a command while it waits for long work that reports nothing itself, such as a compiler."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

FIRST = 15.0  # seconds until the first line about how long it has taken; each later one comes after twice as long


@contextlib.contextmanager
def waiting(what: str, log: Callable[[str], Any], stream: Any = None) -> Iterator[None]:
    """A context that logs `what` at its start, the time so far at growing intervals, and after any such line the time in all.

    Args:
      log: takes a line.
      stream: where `log` writes; on a terminal one live line counts the seconds there. Default: stderr.
    """
    stream = sys.stderr if stream is None else stream
    live, began, done, reported = stream.isatty(), time.monotonic(), threading.Event(), []

    def tick() -> None:
        after = FIRST
        while not done.wait(1.0 if live else after - (time.monotonic() - began)):
            spent = time.monotonic() - began
            if live:
                with contextlib.suppress(OSError, ValueError):  # the terminal is gone, which need not end the work
                    stream.write(f"\r\x1b[K{what}: {_time(spent)}")
                    stream.flush()
                reported.append(spent)
            elif spent >= after:
                log(f"{what}: {_time(spent)} so far")
                reported.append(spent)
                after *= 2

    log(what)
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if reported and live:
            stream.write("\r\x1b[K")
            stream.flush()
        if reported:
            log(f"{what}: {_time(time.monotonic() - began)}")


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
