"""What ends a run early: a signal, or a loss that is no number. All processes end at the same step."""

from __future__ import annotations

import collections
import contextlib
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils


class Stop:
    """Whether the run was told to stop. All processes hear of it before the same step: each makes the same steps, or the
    others would wait for it for ever."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def after(self, step: int) -> bool:
        """Returns whether this step, which has been started, is the last. Every process asks after every step."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.signals.append(signal.SIGTERM)
        return bool(self.signals)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Yields what SIGTERM and SIGINT are told to; a second one has its usual effect."""
    stop, before = Stop(), {}

    def note(number: int, frame: Any) -> None:
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
    """The loss is no number any more; the message says since when, and what to do."""


# Steps between the one started and the one whose loss is looked at: by then it is known, and looking does not wait.
_LAG = 8


class Watch:
    """Stops a run whose loss or gradient is not finite, before a checkpoint of it is written. Every process sees the same
    numbers, so all stop at the same step."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._steps = directory, collections.deque()

    def add(self, step: int, metrics: dict[str, jax.Array], *, all_of_them: bool) -> None:
        """Raises Diverged. `all_of_them` looks at this step too, and waits for it: a save of its state does so anyway."""
        loss, norm = metrics["loss"], metrics["grad_norm"]
        for value in (loss, norm):
            value.copy_to_host_async()  # so that it is here when it is looked at
        self._steps.append((step, loss, norm))
        while len(self._steps) > (0 if all_of_them else _LAG):
            at, loss, norm = self._steps.popleft()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise Diverged(
                    f"step {at} has loss {float(loss)} and gradient norm {float(norm)}; nothing was saved since. Start again "
                    f"in {self._directory} to go on from the last checkpoint, or in another run.dir with a lower "
                    "optimizer.learning_rate or more optimizer.warmup_steps"
                )
