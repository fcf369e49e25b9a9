"""What ends a run early: a signal, at the same step on all processes; and the error of a loss that is no number."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils


class Stop:
    """Whether the run was told to stop. All processes hear of it before the same step: each makes the same steps, or the
    others would wait for it for ever."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        self._asked = 0

    def after(self, step: int) -> bool:
        """Returns whether this step, which has been started, is the last. Every process asks after every step."""
        # JAX agrees on a number that no process has asked about yet, so it must grow: that of a step goes back with a rewind.
        self._asked += 1
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(self._asked):
            self.signals.append(signal.SIGTERM)
        return bool(self.signals)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Yields what SIGTERM and SIGINT are told to. A second SIGINT has its usual effect; a second SIGTERM has none:
    schedulers send one more when time is up, while the checkpoint may be half written."""
    stop, before = Stop(), {}

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            signal.signal(number, before[number])
        if jax.process_count() > 1:
            # JAX listens for SIGTERM itself, and brings all processes to agree on a step.
            signal.raise_signal(signal.SIGTERM)
        else:
            stop.signals.append(number)

    numbers = (signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGTERM, signal.SIGINT)
    with contextlib.suppress(ValueError):  # not the main thread: whoever runs this handles signals
        for number in numbers:
            before[number] = signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Diverged(RuntimeError):
    """The loss is no number any more, or far from what it was; the message says since when, and what to do."""
