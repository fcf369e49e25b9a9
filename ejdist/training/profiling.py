"""Traces of a few steps of a run, by `run.profile`, and the peak memory of its devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

GIB = 2**30


class StepProfiler:
    """Traces the steps `first` to `last` into `run.dir/profile`, for xprof and TensorBoard; of several processes each has a
    folder of its own there. The first process also writes `perfetto_trace.json.gz` for ui.perfetto.dev. A trace that fails is
    given up with a message.

    Args:
      steps: (first, last), or empty for no trace.
      start: the run resumes after this step. Steps of the span before it are not traced.
      log: takes a line for the user.
    """

    def __init__(self, steps: Sequence[int], directory: Path, start: int, log: Callable[[str], Any]) -> None:
        first, self._last = steps or (0, 0)
        self._first = max(first, start + 1) if start < self._last else 0
        self._folder, self._log, self._running = directory / "profile", log, False
        self._step = start  # the last one that is dispatched
        if jax.process_count() > 1:  # JAX names a folder by the second, and expects one host in it
            self._folder /= f"host{jax.process_index()}"

    def step(self, step: int) -> contextlib.AbstractContextManager:
        """Returns a context for dispatching a step; starts the trace before the first step."""
        self._step = step
        if step == self._first:
            try:
                jax.profiler.start_trace(self._folder, create_perfetto_trace=jax.process_index() == 0)
                self._running = True
            except (OSError, ValueError, RuntimeError) as error:
                self._log(f"run.profile: no trace is made: {error}")
        if not self._running:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def end_step(self, step: int, metrics: Any) -> bool:
        """Stops the trace after the last step, once the devices have finished it; returns whether it did."""
        stops = self._running and step == self._last
        if stops:
            jax.block_until_ready(metrics)
            self.stop()
        return stops

    def stop(self) -> None:
        """Stops the trace if it runs: at its last step, or at the end of a stage or of the run before that."""
        if not self._running:
            return
        self._running = False
        try:
            jax.profiler.stop_trace()
        except (OSError, ValueError, RuntimeError) as error:
            self._log(f"run.profile: the trace is not complete: {error}")
            return
        self._log(
            f"trace of steps {self._first} to {self._step} in {self._folder}: open it with xprof or TensorBoard, or "
            "perfetto_trace.json.gz in it at ui.perfetto.dev"
        )


def peak_memory(devices: Sequence[Any] | None = None) -> list[float]:
    """Returns the most memory that each of this host's devices has held since the process started, in GiB. Empty if a device
    does not say, as CPUs do not."""
    stats = [device.memory_stats() for device in (jax.local_devices() if devices is None else devices)]
    peaks = [None if one is None else one.get("peak_bytes_in_use") for one in stats]
    return [round(peak / GIB, 3) for peak in peaks if peak is not None] if None not in peaks else []
