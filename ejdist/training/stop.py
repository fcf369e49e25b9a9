"""Stops a run early: on a signal, at the same step on all processes; and the error for a loss that diverged."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils


class Stop:
    """Whether the run was told to stop. All processes learn it at the same step: if one ran fewer steps, the others would wait
    for it forever."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        self._counter = 0

    def after(self, step: int) -> bool:
        """Returns whether this step, already dispatched, is the last. Every process must call it after every step."""
        # JAX's sync point needs a counter that only grows; step numbers go back with a rewind.
        self._counter += 1
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(self._counter):
            self.signals.append(signal.SIGTERM)
        return bool(self.signals)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Handles SIGTERM and SIGINT in the body, and yields the `Stop` that records them. A second SIGINT has its usual effect; a
    second SIGTERM has none, because schedulers send another when time is up, while the checkpoint may be half written."""
    stop, before = Stop(), {}

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            signal.signal(number, before[number])
        if jax.process_count() > 1:
            # JAX handles SIGTERM itself, and makes all processes agree on a step.
            signal.raise_signal(signal.SIGTERM)
        else:
            stop.signals.append(number)

    numbers = (signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGTERM, signal.SIGINT)
    with contextlib.suppress(ValueError):  # not the main thread: the caller handles signals
        for number in numbers:
            before[number] = signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Diverged(RuntimeError):
    """The loss is not finite, or spiked; the message gives the step and the remedy."""

    on_all_hosts = True  # all raise it, at the same step
