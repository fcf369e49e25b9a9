"""One run that is disturbed repeatedly (a soak test): `launch.rehearse fault=kill,kill_in_save series=20`.

Each time a host is killed or told to stop, the run is started again and goes on from what is on disk, until it has been
disturbed so many times and is left to end. Then every loss and every bit of the last state must be those of the run that
nothing happened to.
"""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import DONE, HOST_LOST, PREEMPTED
from launch.scenes import GONE, Disturbance

# Faults after which the same command resumes, so that they can be repeated.
IN_SERIES = ("kill", "kill_in_save", "sigterm")

_STEP = 0.1  # seconds that each step takes at least
# One SIGTERM of four comes at any moment of a start. The others while steps are made, at most `_WHILE` seconds after host 0
# says so.
_EARLY, _WHILE, _STEPS = 0.25, 10.0, " tokens per step, "


@dataclass(frozen=True)
class Left:
    """What a start of the run has left: the step of the last complete checkpoint, that of the one that was being written
    (None if none was), and the last step made."""

    saved: int
    writing: int | None
    made: int

    def lost(self) -> int:
        return max(0, self.made - self.saved)


@dataclass(frozen=True)
class Round:
    """A disturbance, and what it may cost.

    signalled: (seconds, host) of a SIGTERM from outside.
    since: what host 0 says from when these seconds count; nothing: from the start, so that it may come before the first step.
    """

    fault: str
    told: str
    disturbance: Disturbance
    signalled: tuple[float, int] | None = None
    since: str = ""


def left_by(run: Path) -> Left:
    """Returns the progress that run.dir records."""
    from ejdist.training.metrics import read_rows

    folder = run / "checkpoints"
    names = [p.name for p in folder.iterdir()] if folder.exists() else []
    writing = [int(n.split(".")[0]) for n in names if "orbax-checkpoint-tmp" in n]
    steps = [row["step"] for row in read_rows(run / "metrics.jsonl")]
    return Left(
        max((int(n) for n in names if n.isdigit()), default=0), max(writing, default=None), max(steps, default=0)
    )


def round_of(
    fault: str, chance: random.Random, hosts: int, steps: int, every: int, saved: int, seconds: float
) -> Round:
    """Returns one of these faults, at a place that chance chooses between the last checkpoint and the end.

    Args:
      saved: step of the last complete checkpoint.
      seconds: that a start takes to the end where nothing happens.
    """
    host = chance.randrange(hosts)
    # Steps of some length, as in a real run: saves are under way while steps are made.
    inside: dict[int, dict[str, Any]] = {i: {"do": "sleep", "seconds": _STEP} for i in range(hosts)}
    after = saved - saved % every + every * chance.randint(1, 3)  # a checkpoint that is to come
    if fault == "kill_in_save" and after < steps:
        inside[host] |= {"do": "kill_in_save", "step": after}
        description = f"kill -9 of host {host} in the save of step {after}"
        return Round(fault, description, Disturbance(description, GONE, inside=inside))
    if fault == "sigterm":
        early = chance.random() < _EARLY
        most = seconds if early else _WHILE
        # So slow that the run has not ended at whatever moment it comes.
        pace = max(_STEP, 2 * most / max(1, steps - saved))
        moment = chance.uniform(0, most)
        description = f"SIGTERM to host {host} {moment:.1f} s after {'the start' if early else 'it makes steps'}"
        inside = {i: {"do": "sleep", "seconds": pace} for i in range(hosts)}
        d = Disturbance(description, (PREEMPTED, HOST_LOST, -6), ["cluster.timeout=60"], inside)
        return Round(fault, description, d, (moment, host), "" if early else _STEPS)
    step = chance.randint(saved + 1, max(saved + 1, min(saved + 3 * every, steps - 1)))
    inside[host] |= {"do": "signal", "number": int(signal.SIGKILL), "step": step}
    description = f"kill -9 of host {host} at step {step}"
    return Round("kill", description, Disturbance(description, GONE, inside=inside))


def faults_of(r: Round, codes: list[int | None], output: str, before: Left, after: Left, every: int) -> list[str]:
    """Returns what is unexpected after a round, in sentences.

    No step may be lost beyond the interval of checkpoints: at most `every` between the last complete one and the last step, or
    the one that was being written when the end came. SIGTERM loses none: while steps are made the one at which the run
    stopped is saved, and all hosts end with 75; before the first step nothing is written, what was there stays, and the other
    hosts end because one is gone.
    """
    faults = []
    if not set(codes) <= set(r.disturbance.codes):
        faults.append(
            f"exit codes {codes}, which are not of {sorted(set(r.disturbance.codes), key=lambda c: (c is None, c or 0))}"
        )
    if after.saved < before.saved:
        faults.append(f"checkpoint {before.saved} is gone")
    if r.fault == "sigterm":
        stopped = re.search(r"stopped by SIGTERM after step (\d+)", output)
        if stopped is not None and (after.saved != int(stopped[1]) or set(codes) != {PREEMPTED}):
            faults.append(
                f"it stopped after step {stopped[1]} with {codes}, and the last checkpoint is of {after.saved}"
            )
        if stopped is None and (after.saved != before.saved or "stopped at once by SIGTERM" not in output):
            faults.append("no host said that it was stopped at once, or a checkpoint was written anyway")
    elif (limit := after.made if after.writing is None else after.writing) - after.saved > every:
        faults.append(f"step {limit} was begun to be saved, or made, and only {after.saved} is on disk")
    return faults


def rehearse_series(
    folder: Path,
    rounds: int,
    names: tuple[str, ...],
    shape: tuple[int, int, int],
    seconds: float,
    chance: random.Random,
    start: Callable[[Path, Round | None], tuple[list[int | None], str]],
    same: Callable[[Path], str | None],
    log: Callable[[str], Any],
) -> bool:
    """Returns whether a run that is disturbed in every round ended as the undisturbed one.

    Args:
      shape: hosts, steps of the run, steps between checkpoints.
      seconds: of the undisturbed run.
      start: starts the run once, with a round's disturbance; returns exit codes, and the output of the hosts.
      same: returns how the run differs from the undisturbed one, None if it does not.
    """
    hosts, steps, every = shape
    folder.mkdir(parents=True)
    before, passed, lost, during, done = Left(0, None, 0), 0, [0], 0, None
    for n in range(rounds):
        r = round_of(chance.choice(names), chance, hosts, steps, every, before.saved, seconds)
        codes, output = start(folder, r)
        after = left_by(folder / "run")
        if after.saved >= steps and codes == [DONE] * hosts:
            done = f"the run had made its {steps} steps after {n} of {rounds} rounds: give it more, by run.steps"
            before = after
            break
        faults = faults_of(r, codes, output, before, after, every) + went_on(output, before)
        lost.append(after.lost())
        passed += not faults
        during += "stopped by SIGTERM after step" in output or r.fault != "sigterm"
        log(
            f"{n + 1:3} {r.told}: exit codes {codes}, step {after.made} was made and {after.saved} is saved"
            f"{'' if after.writing is None else f' ({after.writing} was being written)'}, {lost[-1]} lost"
        )
        for fault in faults:
            log(f"    UNEXPECTED: {fault}; see {folder / 'logs'}")
        before = after
    codes, output = start(folder, None)
    faults = [] if codes == [DONE] * hosts else [f"left alone it ended with {codes}"]
    faults += went_on(output, before)
    unlike = same(folder)
    faults += [text for text in (unlike, done) if text is not None]
    log(
        f"{passed} of {rounds} ended as expected, {during} of them while steps were made; {sum(lost)} steps lost in all, at "
        f"most {max(lost)} at once with a checkpoint every {every}"
    )
    log("losses and final state match the run without" if unlike is None else "LOSSES OR STATE DIFFER")
    for fault in faults:
        log(f"    UNEXPECTED: {fault}; see {folder / 'logs'}")
    return passed == rounds and not faults


def went_on(output: str, before: Left) -> list[str]:
    """Returns what is wrong with the step that a start resumed from; empty if it ended before it resumed."""
    match = re.search(r"resuming from step (\d+)", output)
    if match is not None and int(match[1]) != before.saved:
        return [f"it resumed from step {match[1]}, but the last complete checkpoint was of {before.saved}"]
    return []
