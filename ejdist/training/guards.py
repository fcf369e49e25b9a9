"""What is done about losses and gradients that go wrong: the run stops, leaves the update out, or goes back and past the data.

A spike is a loss or gradient norm of more than `spike_factor` standard deviations above the mean of the last `spike_window`
steps, as in the SkipStepOptimizer of OLMo-core (Ai2), with its defaults. To go back to the last checkpoint and past the
batches since is what PaLM did (Chowdhery et al. 2022, section 5.1). Steps that were bad are not in the mean.

Every host sees the same numbers, a fixed number of steps late, and draws the same conclusion from them at the same step. It
follows from what a checkpoint keeps, so that a run that is killed and goes on comes to it again.
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
from ejdist.training.leaves import name_of
from ejdist.training.metrics import write_whole
from ejdist.training.stop import Diverged

# Steps between the one started and the one whose loss is looked at: by then it is known, and looking does not wait.
LAG = 8
PASSED = "passed_batches.json"


@dataclass
class GuardsSection:
    """The `guards` section of a recipe: what is done about numbers, devices and hosts that go wrong."""

    nonfinite: str = operational("stop")  # a loss or gradient norm that is not finite: stop, skip (the update), rewind
    spike: str = operational("off")  # one far above those of the last steps: off, stop, skip, rewind
    spike_factor: float = operational(6.0)  # how far: standard deviations above their mean
    spike_window: int = operational(128)  # the last steps, of which half must be there
    most_skips: int = operational(10)  # updates in a row that are left out; then the run stops
    most_rewinds: int = operational(3)  # to the same checkpoint; then the run stops
    # Steps between comparisons of what several devices hold alike, and at each save; 0: none.
    replicas_every: int = operational(0)
    # Without a step, after which a command ends with the stack of every thread; 0: never.
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
        """What a step leaves out by itself; nothing, and the compiled step has nothing of guards."""
        return tuple(name for name in ("nonfinite", "spike") if getattr(self, name) == "skip")


class Rewind(Exception):
    """The run is to go back: `step` is the bad one, and the message says what it had."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(what)
        self.step = step


class Finite:
    """Which parameters are finite numbers, by one program for all.

    Args:
      like: the parameters, as `jax.ShapeDtypeStruct` with shardings.
    """

    def __init__(self, like: Any, mesh: jax.sharding.Mesh) -> None:
        self._names = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)]

        def every(params: Any) -> jax.Array:
            return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(params)])

        # Compiled now, and not while a host that is about to be taken away waits for its last save.
        self._every = jax.jit(every, out_shardings=replicated(mesh)).lower(like).compile()

    def others(self, params: Any) -> list[str]:
        """Returns the names of those that are not. Waits for the step that made them."""
        return [name for name, finite in zip(self._names, np.asarray(self._every(params)), strict=True) if not finite]


class Watch:
    """Looks at the numbers of each step, and does what the section says before a checkpoint of a bad one is written.

    Args:
      directory: of the run, for messages.
      finite: looks at the parameters before a save.
      kept: what `keep` returned when the checkpoint was written that the run goes on from; nothing for a new run.
    """

    def __init__(
        self, section: GuardsSection, directory: Path, finite: Finite, kept: dict[str, Any] | None = None
    ) -> None:
        self._section, self._directory, self._finite = section, directory, finite
        self._steps: collections.deque = collections.deque()
        kept = kept or {}
        self._good: collections.deque = collections.deque(kept.get("good", ()), maxlen=section.spike_window + LAG)
        self._skips: int = kept.get("skips", 0)

    def limits(self, step: int) -> np.ndarray:
        """Returns float32[2], the largest loss and gradient norm of this step that are no spike. They follow from steps that
        are at least so far back that their numbers are known without a wait."""
        s = self._section
        known = [row for row in self._good if row[0] < step - LAG][-s.spike_window :]
        if len(known) < max(2, s.spike_window // 2):
            return np.full(2, np.inf, np.float32)
        return np.array([_limit([row[i] for row in known], s.spike_factor) for i in (1, 2)], np.float32)

    def add(self, step: int, metrics: dict[str, jax.Array], *, wait: bool) -> None:
        """Looks at the step that is `LAG` back. `all_of_them` looks at this step too, and waits for it: a save of its state
        does so anyway.

        Raises:
          Diverged: the run is to stop. Rewind: it is to go back.
        """
        loss, norm = metrics["loss"], metrics["grad_norm"]
        for value in (loss, norm):
            value.copy_to_host_async()  # so that it is here when it is looked at
        self._steps.append((step, loss, norm))
        while len(self._steps) > (0 if wait else LAG):
            at, loss, norm = self._steps.popleft()
            self._judge(at, float(loss), float(norm))

    def _judge(self, step: int, loss: float, norm: float) -> None:
        s, what = self._section, f"step {step} has loss {loss} and gradient norm {norm}"
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._bad(step, s.nonfinite, what)
            return
        if s.spike != "off":
            most = [float(x) for x in self.limits(step)]
            if loss > most[0] or norm > most[1]:
                told = f"where at most {most[0]:.6g} and {most[1]:.6g} were expected (guards.spike_factor)"
                self._bad(step, s.spike, f"{what}, {told}")
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
            many = f"the updates of {self._skips} steps in a row were left out (guards.most_skips)"
            raise Diverged(stopped(f"{what}, and {many}", self._directory, "a larger guards.most_skips"))

    def before_save(self, step: int, params: Any) -> None:
        """Looks at the parameters that are to be saved. An update can break them though its loss and gradient are finite, and
        a device can; no step leaves that out again, and no start goes on from it.

        Raises:
          Diverged: the run is to stop. Rewind: it is to go back.
        """
        if not (names := self._finite.others(params)):
            return
        more = f" and {len(names) - 1} more parameters" if len(names) > 1 else ""
        what = f"after step {step} {names[0]}{more} {'are' if more else 'is'} not finite"
        if self._section.nonfinite == "rewind":
            raise Rewind(step, what)
        past = "guards.nonfinite=rewind to go past the data since"
        raise Diverged(stopped(f"{what}, and was not saved", self._directory, past))

    def keep(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: JSON, in which every number is itself again."""
        return {"good": list(self._good), "skips": self._skips}


_SKIPPED = "guards.nonfinite or guards.spike to skip such a step or to rewind past its data"


def stopped(what: str, directory: Path, past: str = _SKIPPED) -> str:
    """Returns the words for a run that goes no further by itself; `past`, how it would get past the step."""
    return (
        f"{what}. Start again in {directory} to go on from the last checkpoint, with {past}; or in another run.dir with a "
        "lower optimizer.learning_rate or more optimizer.warmup_steps"
    )


def _limit(values: Sequence[float], factor: float) -> float:
    """Returns their mean and `factor` standard deviations. Sums are exact, so that every machine has the same bits."""
    mean = math.fsum(values) / len(values)
    return mean + factor * math.sqrt(math.fsum((x - mean) ** 2 for x in values) / len(values))


class Passed:
    """Which batch a step takes. The batch stays a pure function of (seed, number), and a rewind changes the numbers: from a
    step on they are so many further. A run without a rewind takes batch n - 1 at step n.

    Attributes:
      rewinds: [step, count]: from this step on batches are `count` further along, for each.
    """

    def __init__(self, rewinds: Iterable[Sequence[int]] = ()) -> None:
        self.rewinds = [[int(step), int(count)] for step, count in rewinds]

    def number(self, step: int) -> int:
        """Returns the number of the batch, from 0, of a step, from 1."""
        return step - 1 + sum(count for first, count in self.rewinds if first <= step)

    def past(self, bad: int, restored: int) -> Passed:
        """Returns what holds once a run goes back from a bad step to a checkpoint: the next batch is that after the bad
        step's."""
        kept = Passed(r for r in self.rewinds if r[0] <= restored + 1)
        return Passed([*kept.rewinds, [restored + 1, self.number(bad) + 1 - kept.number(restored + 1)]])

    def times(self, restored: int) -> int:
        """Returns how often a run went back to this checkpoint."""
        return sum(first == restored + 1 for first, _ in self.rewinds)

    def until(self, step: int) -> list[list[int]]:
        """Returns the rewinds that batches of steps up to this one know of: what its checkpoint keeps."""
        return [r for r in self.rewinds if r[0] <= step]

    @staticmethod
    def read(directory: Path, kept: Sequence[Sequence[int]], step: int) -> Passed:
        """Returns that of a run that goes on from a checkpoint of this step: what it has kept, and later what the folder of the
        run says, where a rewind is written down before any checkpoint knows of it.

        Raises:
          ValueError: the file is not one that `write` wrote.
        """
        path, later = directory / PASSED, []
        try:
            later = json.loads(path.read_text())["rewinds"] if path.exists() else []
            return Passed([*kept, *(r for r in later if r[0] > step)])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}): restore it, or remove it to take the batches of the last rewind after all"
            ) from error

    def write(self, directory: Path) -> None:
        """Writes it down, whole or not at all. Raises OSError."""
        write_whole(directory / PASSED, json.dumps({"rewinds": self.rewinds}) + "\n")
