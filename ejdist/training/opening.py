"""Opens a run for every command that needs one: its recipe checked and the same on all hosts, its program, data and
checkpoints; and the state that it starts or goes on from.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from ejdist.cluster.agreement import environment
from ejdist.cluster.hosts import Hosts
from ejdist.mesh import make_mesh
from ejdist.paths import ELSEWHERE, is_step, is_url
from ejdist.sections import flat, validate
from ejdist.training.checkpoint import Checkpoints, CheckpointSection
from ejdist.training.curriculum import Stage, check_history, history, stage_of, stages_of
from ejdist.training.data import Data
from ejdist.training.data import build as build_data
from ejdist.training.leaves import name_of
from ejdist.training.lock import Lock
from ejdist.training.program import Program, RunSection, TrainSections, make_program
from ejdist.training.resume import check_same_run, fingerprint
from ejdist.training.saves import Saves, Tier
from ejdist.training.start import Source, nested
from ejdist.training.step import TrainState
from ejdist.training.stored import CheckpointError, DamagedCheckpoint


@dataclass(frozen=True)
class Run:
    """A run that is open. Nothing of it has been compiled, written, or read but its data's index.

    Attributes:
      sections, program, data: of its stage; a run without a curriculum has one.
      last: step of the newest checkpoint in `checkpoint.dir`; None if there is none.
      found: (step, where) of all checkpoints, those on disks of the hosts too, the newest first.
      stages: all of them, with the devices that their meshes are made of.
      locks: of `directory`, and of a folder for its checkpoints, held as long as the run is; one that is not there yet is
        taken by whoever makes steps.
    """

    sections: TrainSections
    hosts: Hosts
    directory: Path
    program: Program
    saves: Saves
    data: Data
    last: int | None
    found: list[tuple[int, Tier]]
    stage: Stage
    stages: Sequence[Stage]
    devices: list[Any] | None
    locks: Sequence[Lock]

    @property
    def checkpoints(self) -> Checkpoints:
        return self.saves.durable

    def in_stage_after(self, step: int) -> Run:
        """Returns the run in the stage that goes on after so many steps: itself, where that is its own."""
        stage = stage_of(self.stages, step + 1)
        if stage.number == self.stage.number:
            return self
        s = stage.sections
        program = stage_program(stage, self.devices)
        data = self.data.resized(s.data.sequence_length, s.data.global_batch)
        return replace(self, sections=s, program=program, data=data, stage=stage)

    def labels(self) -> dict[str, float]:
        """Returns what a row of metrics.jsonl has of the stage, where there are several."""
        if len(self.stages) == 1:
            return {}
        return {"stage": self.stage.number, "sequence_length": self.sections.data.sequence_length}

    def checkpoint_metadata(self, step: int) -> dict[str, Any]:
        """Returns what a checkpoint keeps beside the state."""
        found = {"recipe": fingerprint(self.sections), "data": self.data.cursor(step)}
        return found | ({"stages": history(self.stages, step)} if len(self.stages) > 1 else {})


def open_run(
    sections: TrainSections, hosts: Hosts, devices: list[Any] | None = None, log: Any = lambda line: None
) -> Run:
    """Returns the run of a recipe. To be called inside `hosts.together()`, by all hosts.

    Args:
      devices: default: all.
      say: takes a line for the user.

    Raises:
      ValueError: the recipe is wrong, or its files are, or another process trains in run.dir. CheckpointError: what is in
        run.dir is none of ours. HostsDiffer: the hosts were started with different things. HostLost: one does not come.
    """
    s = sections
    validate(s)
    directory = _folder_of(s.run)
    recipe = {key: value for key, value in flat(s).items() if not key.startswith("cluster.")}
    hosts.compare("the start", recipe | environment())
    folders = [("run.dir", directory)]
    if s.checkpoint.dir is not None and not is_url(s.checkpoint.dir):
        kept = Path(s.checkpoint.dir).expanduser()
        if kept.resolve() == directory.resolve():
            raise ValueError(
                f"checkpoint.dir = {s.checkpoint.dir!r} is run.dir: a folder of checkpoints holds nothing else; leave it out, "
                "and they lie in run.dir/checkpoints"
            )
        folders.append(("checkpoint.dir", kept))
        # It may be the own folder of a run, whose run.dir is then taken too.
        if kept.name == "checkpoints" and kept.resolve().parent != directory.resolve():
            folders.append(("checkpoint.dir", kept.parent))
    locks = [Lock(key, folder, hosts.index == 0, hosts.limit) for key, folder in folders]
    for lock in locks:
        lock.take(log)  # before any host looks what is there: a process that is about to end writes its last checkpoint
    hosts.broadcast("that its folders are taken")
    stages = stages_of(s)
    # Those of all stages, so that what is wrong with a later one is said now; nothing is compiled or allocated.
    programs = [stage_program(stage, devices) for stage in stages]
    saves = Saves(directory, s.checkpoint, hosts)
    last = saves.durable.latest()
    stage = stage_of(stages, (last or 0) + 1)
    program, s = programs[stage.number - 1], stage.sections
    data = data_of(s)
    found = saves.find(program.state, log)
    if not found and hosts.index == 0:
        _check_moved(directory, s.checkpoint)
    return Run(s, hosts, directory, program, saves, data, last, found, stage, stages, devices, locks)


def _check_moved(directory: Path, section: CheckpointSection) -> None:
    """Raises ValueError where the run in a folder has its checkpoints in another folder than `checkpoint.dir`, which has none:
    it would begin anew, and its metrics would go. Called by one host, so by no manager of Orbax, which waits for all."""
    try:
        before = json.loads((directory / "recipe.json").read_text())["checkpoint.dir"]
        if before == section.dir or (before is not None and is_url(before)):
            return
        there = directory / "checkpoints" if before is None else Path(before).expanduser()
        last = max((int(path.name) for path in there.iterdir() if is_step(path.name)), default=None)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):
        return  # nothing is known of another folder, or it is there no more
    if last is not None:
        raise ValueError(
            f"checkpoint.dir = {section.dir!r} has no checkpoint, and the run in {directory} has one of step {last} in "
            f"{there}, where checkpoint.dir was {before!r}: restore checkpoint.dir, move the folder there, or {ELSEWHERE}"
        )


def stage_program(stage: Stage, devices: list[Any] | None = None) -> Program:
    """Returns the program of a stage. Raises ValueError, which names the stage where there are several."""
    try:
        mesh = make_mesh(**vars(stage.sections.mesh), devices=devices)
        check_hosts(mesh)
        return make_program(stage.sections, mesh)
    except ValueError as error:
        if stage.count == 1:
            raise
        raise ValueError(f"curriculum[{stage.number - 1}]: {error}") from error


def check_hosts(mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError, naming it, where a host has no device of a mesh: it has no part in a step."""
    working = {device.process_index for device in mesh.devices.flat}
    idle = [i for i in range(jax.process_count()) if i not in working]
    if idle:
        used = {axis: size for axis, size in mesh.shape.items() if size > 1}
        raise ValueError(
            f"the mesh {used or 'of one'} has {mesh.size} of {jax.device_count()} devices, and host {idle[0]} has none of "
            "them: make an axis larger, or -1 for all that are left"
        )


def resume(run: Run, found: list[tuple[int, Tier]], log: Any) -> tuple[Run, int, TrainState, dict[str, Any]]:
    """Returns (the run in the stage that goes on, step, state, what was saved beside it) of the last checkpoint that is whole.
    One that is not is set aside, once an earlier one is read.

    Args:
      found: what `Saves.find` returned; not empty.

    Raises:
      ValueError: it is of another run than this recipe's. CheckpointError: none can be read, or it is of another model.
    """
    saves = run.saves
    damaged: list[tuple[int, Tier, DamagedCheckpoint]] = []
    for step, where in found:
        try:
            run = run.in_stage_after(step)
            state, kept = where.restore(step, run.program.state, run.hosts.first_error)
            made = kept["data"].get("step", step)
            if made != step:  # a copy: its moments and rates would be of one step, and its batches of another
                raise DamagedCheckpoint(f"checkpoint {where.directory / str(step)} is of step {made}, by what it holds")
            break
        except DamagedCheckpoint as error:
            damaged.append((step, where, error))
    else:
        none = "it is the only one" if len(damaged) == 1 else f"nor can the {len(damaged) - 1} before it"
        first = damaged[0][2]
        raise CheckpointError(f"{first}; {none}: mend the storage, or {ELSEWHERE}") from first
    s = stage_of(run.stages, step).sections  # of the stage that made the step, which may end there
    if len(run.stages) > 1 or "stages" in kept:
        check_history(kept, run.stages, step, run.directory)
    check_same_run(kept["recipe"], s, step, run.directory)
    run.data.check_cursor(kept["data"], sequence_length=s.data.sequence_length, global_batch=s.data.global_batch)
    for lost, place, error in damaged:
        log(f"{error}: going on from the one before it; {saves.set_aside(lost, place)}")
    local = f", as this host has it in {where.directory}" if where is saves.local else ""
    log(f"going on from step {step} of {run.directory}{local}")
    before = kept["recipe"]["run.steps"]
    if before != s.run.steps:
        log(f"run.steps was {before} and is {s.run.steps}: optimizer.schedule ends there from here on")
    return run, step, state, kept


def start_from(program: Program, source: Source, log: Any) -> TrainState:
    """Returns the state before the first step, with the parameters of a source."""
    wanted = {
        f"params.{name_of(path)}": like for path, like in jax.tree_util.tree_leaves_with_path(program.state.params)
    }
    wanted |= {
        f"buffers.{name_of(path)}": like for path, like in jax.tree_util.tree_leaves_with_path(program.state.buffers)
    }
    began = time.perf_counter()
    found = source.load({name: like for name, like in wanted.items() if name in source.leaves})
    for line in source.notes:
        log(line)
    count = sum(x.size for x in found.values())
    log(f"{count:,} parameters read from {source.what} in {time.perf_counter() - began:.1f} s")
    tree = nested(found)
    return program.init_from({"params": tree["params"], "buffers": tree.get("buffers", {})})


def _folder_of(run: RunSection) -> Path:
    """Returns the directory of the run. Raises ValueError, naming the key, where nothing can be written there."""
    directory = Path(run.dir).expanduser()
    there = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    if not there.is_dir():
        raise ValueError(f"run.dir = {run.dir!r}: {there} is a file; name another folder, or remove it")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"run.dir = {run.dir!r}: {there} cannot be written; choose another folder, or mend its permissions"
        )
    return directory


def data_of(s: TrainSections) -> Data:
    """Returns the data of a recipe. Raises ValueError if the model's vocabulary does not hold its tokens."""
    data = build_data(s.data, seed=s.run.seed)
    if data.vocab_size > s.model.vocab_size:
        raise ValueError(
            f"model.vocab_size = {s.model.vocab_size} is smaller than the {data.vocab_size} tokens of data.tokenizer = "
            f"{s.data.tokenizer!r}; make it at least that"
        )
    return data
