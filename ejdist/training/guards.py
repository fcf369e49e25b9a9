"""Guards against bad losses and gradients: the run stops, skips the update, or rewinds and skips the data.

A spike is a loss or gradient norm of more than `spike_factor` standard deviations above the mean of the last `spike_window`
steps, as in the SkipStepOptimizer of OLMo-core (Ai2), with its defaults. PaLM also went back to the last checkpoint and skipped
the batches since (Chowdhery et al. 2022, section 5.1). Bad steps do not enter the mean.

Every host sees the same numbers, a fixed number of steps late, and so makes the same decision at the same step. The decision
depends only on state that checkpoints contain, so a run that is killed and resumes repeats it.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.layout import replicated
from ejdist.sections import operational
from ejdist.training.metrics import write_atomic
from ejdist.training.pytree_io import name_of
from ejdist.training.stop import Diverged

# Steps between the dispatched one and the one whose loss is checked: by then the loss is known, so the check does not wait.
LAG = 8
SKIPPED_FILE = "passed_batches.json"


@dataclass
class GuardsSection:
    """The `guards` section of a recipe: what to do about bad numbers, devices and hosts."""

    # What to do on a loss or gradient norm that is not finite: stop, skip (the update), rewind.
    nonfinite: str = operational("stop")
    spike: str = operational("off")  # what to do on one far above those of the last steps: off, stop, skip, rewind
    spike_factor: float = operational(
        6.0
    )  # how far above is a spike: standard deviations above the mean of the last steps
    spike_window: int = operational(128)  # how many of the last steps enter the mean; at least half are needed
    most_skips: int = operational(10)  # consecutive skipped updates after which the run stops
    most_rewinds: int = operational(3)  # rewinds to the same checkpoint after which the run stops
    # Steps between comparisons of replicated arrays; also before each save. 0: none.
    replicas_every: int = operational(0)
    # Seconds without a finished step after which a command dumps the stack of every thread and exits; 0: never.
    hang_seconds: float = operational(1800.0)
    stragglers_every: int = operational(100)  # steps between comparisons of the hosts' own time; 0: none

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy."""
        actions = ("stop", "skip", "rewind")
        if self.nonfinite not in actions:
            raise ValueError(f"guards.nonfinite = {self.nonfinite!r} is unknown; use {', '.join(actions)}")
        if self.spike not in ("off", *actions):
            raise ValueError(f"guards.spike = {self.spike!r} is unknown; use off, {', '.join(actions)}")
        if not 0 < self.spike_factor < math.inf:
            raise ValueError(f"guards.spike_factor must be a positive number, got {self.spike_factor}")
        least = {"spike_window": 4, "most_skips": 1, "most_rewinds": 1, "replicas_every": 0, "stragglers_every": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"guards.{name} must be at least {low}, got {getattr(self, name)}")
        if not 0 <= self.hang_seconds < math.inf:
            raise ValueError(f"guards.hang_seconds must be 0, for never, or positive, got {self.hang_seconds}")

    @property
    def skip(self) -> tuple[str, ...]:
        """The conditions under which the compiled step skips its update. Empty: the step is compiled without checks."""
        return tuple(name for name in ("nonfinite", "spike") if getattr(self, name) == "skip")


class Rewind(Exception):
    """Asks the loop to rewind: `step` is the bad one, and the message says what was wrong with it."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(what)
        self.step = step


class Finite:
    """Checks that all parameters are finite, in one program.

    Args:
      like: the parameters, as `jax.ShapeDtypeStruct` with shardings.
    """

    def __init__(self, like: Any, mesh: jax.sharding.Mesh) -> None:
        self._names = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)]

        def every(params: Any) -> jax.Array:
            return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(params)])

        # Compile now, not when a preempted host waits for its last save.
        self._every = jax.jit(every, out_shardings=replicated(mesh)).lower(like).compile()

    def nonfinite(self, params: Any) -> list[str]:
        """Returns the names of the parameters that are not finite. Waits for the step that computes them."""
        return [name for name, finite in zip(self._names, np.asarray(self._every(params)), strict=True) if not finite]


class Watch:
    """Checks the numbers of each step, and acts as the section says before a bad state is saved.

    Args:
      directory: of the run, for messages.
      finite: checks the parameters before a save.
      saved: the result of `to_json` in the checkpoint that the run resumes from; None for a new run.
    """

    def __init__(
        self, section: GuardsSection, directory: Path, finite: Finite, saved: dict[str, Any] | None = None
    ) -> None:
        self._section, self._directory, self._finite = section, directory, finite
        self._steps: collections.deque = collections.deque()
        saved = saved or {}
        self._good: collections.deque = collections.deque(saved.get("good", ()), maxlen=section.spike_window + LAG)
        self._skips: int = saved.get("skips", 0)

    def limits(self, step: int) -> np.ndarray:
        """Returns float32[2], the largest loss and gradient norm of this step that do not count as a spike. They depend only on
        steps so far back that their numbers are known without waiting."""
        s = self._section
        known = [row for row in self._good if row[0] < step - LAG][-s.spike_window :]
        if len(known) < max(2, s.spike_window // 2):
            return np.full(2, np.inf, np.float32)
        return np.array([_limit([row[i] for row in known], s.spike_factor) for i in (1, 2)], np.float32)

    def add(self, step: int, metrics: dict[str, jax.Array], *, wait: bool) -> None:
        """Checks the step `LAG` steps back. With `wait` it also checks this step and all between, and waits for them, as a save
        does anyway.

        Raises:
          Diverged: the run must stop. Rewind: it must rewind.
        """
        loss, norm = metrics["loss"], metrics["grad_norm"]
        for value in (loss, norm):
            value.copy_to_host_async()  # so that it has arrived when it is checked
        self._steps.append((step, loss, norm))
        while len(self._steps) > (0 if wait else LAG):
            checked, loss, norm = self._steps.popleft()
            self._check(checked, float(loss), float(norm))

    def _check(self, step: int, loss: float, norm: float) -> None:
        s, what = self._section, f"step {step} has loss {loss} and gradient norm {norm}"
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._bad(step, s.nonfinite, what)
            return
        if s.spike != "off":
            most = [float(x) for x in self.limits(step)]
            if loss > most[0] or norm > most[1]:
                limits = f"above the limits {most[0]:.6g} and {most[1]:.6g} (guards.spike_factor)"
                self._bad(step, s.spike, f"{what}, {limits}")
                return
            self._good.append([step, loss, norm])
        self._skips = 0

    def _bad(self, step: int, action: str, what: str) -> None:
        if action == "rewind":
            raise Rewind(step, what)
        if action == "stop":
            raise Diverged(stopped(f"{what}; nothing was saved since", self._directory))
        self._skips += 1
        if self._skips > self._section.most_skips:
            many = f"{self._skips} updates in a row were skipped (guards.most_skips)"
            raise Diverged(stopped(f"{what}, and {many}", self._directory, "a larger guards.most_skips"))

    def before_save(self, step: int, params: Any) -> None:
        """Checks the parameters before they are saved. An update, or a faulty device, can break them although loss and gradient
        are finite; skipping later steps does not repair that, and a run cannot resume from it.

        Raises:
          Diverged: the run must stop. Rewind: it must rewind.
        """
        if not (names := self._finite.nonfinite(params)):
            return
        more = f" and {len(names) - 1} more parameters" if len(names) > 1 else ""
        what = f"after step {step} {names[0]}{more} {'are' if more else 'is'} not finite"
        if self._section.nonfinite == "rewind":
            raise Rewind(step, what)
        remedy = "guards.nonfinite=rewind to skip the data since then"
        raise Diverged(stopped(f"{what}, and was not saved", self._directory, remedy))

    def to_json(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON that preserves every number exactly."""
        return {"good": list(self._good), "skips": self._skips}


_REMEDY = "guards.nonfinite or guards.spike set to skip such a step or rewind past its data"


def stopped(what: str, directory: Path, remedy: str = _REMEDY) -> str:
    """Returns the message for a run that cannot continue on its own; `remedy` is the setting that gets it past the step."""
    return (
        f"{what}. Start again in {directory} to resume from the last checkpoint, with {remedy}; or in another run.dir with a "
        "lower optimizer.learning_rate or more optimizer.warmup_steps"
    )


def _limit(values: Sequence[float], factor: float) -> float:
    """Returns the mean plus `factor` standard deviations. Sums are exact, so that every machine computes the same bits."""
    mean = math.fsum(values) / len(values)
    return mean + factor * math.sqrt(math.fsum((x - mean) ** 2 for x in values) / len(values))


class SkippedBatches:
    """Maps steps to batches. A batch is a pure function of (seed, number); each rewind adds an offset to the numbers from a
    step on. Without rewinds step n takes batch n - 1.

    Attributes:
      rewinds: list of [step, count]: from this step on, batch numbers are larger by `count`.
    """

    def __init__(self, rewinds: Iterable[Sequence[int]] = ()) -> None:
        self.rewinds = [[int(step), int(count)] for step, count in rewinds]

    def number(self, step: int) -> int:
        """Returns the number of the batch, from 0, of a step, from 1."""
        return step - 1 + sum(count for first, count in self.rewinds if first <= step)

    def after_rewind(self, bad: int, restored: int) -> SkippedBatches:
        """Returns the offsets after a rewind from a bad step to a checkpoint: the next batch is the one after the bad
        step's."""
        earlier = SkippedBatches(r for r in self.rewinds if r[0] <= restored + 1)
        return SkippedBatches([*earlier.rewinds, [restored + 1, self.number(bad) + 1 - earlier.number(restored + 1)]])

    def num_rewinds(self, restored: int) -> int:
        """Returns how often the run has rewound to this checkpoint."""
        return sum(first == restored + 1 for first, _ in self.rewinds)

    def until(self, step: int) -> list[list[int]]:
        """Returns the rewinds that affect the steps up to this one, for its checkpoint."""
        return [r for r in self.rewinds if r[0] <= step]

    @staticmethod
    def read(directory: Path, saved: Sequence[Sequence[int]], step: int) -> SkippedBatches:
        """Returns the offsets of a run that resumes from a checkpoint of this step: those in the checkpoint, and later ones
        from the run's folder, where a rewind is recorded before any checkpoint contains it.

        Raises:
          ValueError: the file was not written by `write`.
        """
        path, later = directory / SKIPPED_FILE, []
        try:
            later = json.loads(path.read_text())["rewinds"] if path.exists() else []
            return SkippedBatches([*saved, *(r for r in later if r[0] > step)])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}): restore it, or remove it to use the batches that the last rewind skipped"
            ) from error

    def write(self, directory: Path) -> None:
        """Writes the file atomically. Raises OSError."""
        write_atomic(directory / SKIPPED_FILE, json.dumps({"rewinds": self.rewinds}) + "\n")
