"""Sets up a run for every command that needs one: checks the recipe on all hosts; opens its program, data and checkpoints."""

from __future__ import annotations

import contextlib
import errno
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from ejdist.cluster.agreement import environment, first_alone
from ejdist.cluster.hosts import Hosts
from ejdist.mesh import make_mesh
from ejdist.paths import ELSEWHERE, is_step, is_url
from ejdist.registered import check_recorded, digests, load
from ejdist.sections import flat, validate
from ejdist.training.bucket_lock import locks_of
from ejdist.training.checkpoint import Checkpoints, CheckpointSection
from ejdist.training.checkpoint_format import check_same_model
from ejdist.training.checkpoint_policy import Saves, Tier
from ejdist.training.choices import resolve
from ejdist.training.curriculum import Stage, history, stage_of, stages_of
from ejdist.training.data import Data, default_cache_dir
from ejdist.training.guards import SkippedBatches
from ejdist.training.held_out import data_of_evaluation
from ejdist.training.kept import told_of_folder
from ejdist.training.optimizer import moments_like
from ejdist.training.program import Program, TrainSections, make_program
from ejdist.training.recorded import recorded
from ejdist.training.resume import Past, check_data, check_history, check_same_run, fingerprint
from ejdist.training.run_lock import Lock
from ejdist.training.stage_data import data_of_stages, own_batches, sizes_of
from ejdist.training.step import TrainState
from ejdist.training.trackers import check_installed


@dataclass(frozen=True)
class Run:
    """A run that is set up. Nothing is compiled or written yet, and nothing but the index of its data is read.

    Attributes:
      sections, program, data: of the current stage; a run without a curriculum has one stage.
      held_out: the data of `evaluation.data`; None if the run evaluates nothing.
      last: step of the newest checkpoint in `checkpoint.dir`; None if there is none.
      checkpoints_found: (step, tier) of all checkpoints, local ones included, newest first.
      stages: all stages. programs, datas: of each; its data may have the sizes of another stage.
      past: the run's history up to its last change.
      locks: on `directory`, and on the folder of its checkpoints, held as long as the run lives; a folder that does not exist
        yet is locked when training begins.
    """

    sections: TrainSections
    hosts: Hosts
    directory: Path
    program: Program
    saves: Saves
    data: Data
    held_out: Data | None
    last: int | None
    checkpoints_found: list[tuple[int, Tier]]
    stage: Stage
    stages: Sequence[Stage]
    programs: Sequence[Program]
    datas: Sequence[Data]
    locks: Sequence[Lock]
    past: Past = field(default_factory=Past)

    @property
    def checkpoints(self) -> Checkpoints:
        return self.saves.durable

    def in_stage_after(self, step: int) -> Run:
        """Returns the run in the stage of the step after this one; itself if that is the current stage."""
        stage = stage_of(self.stages, step + 1)
        if stage.number == self.stage.number:
            return self
        program = self.programs[stage.number - 1]
        return replace(self, sections=stage.sections, program=program, data=self.data_of(stage), stage=stage)

    def data_of(self, stage: Stage) -> Data:
        """Returns the data of a stage, as at the start of a run."""
        return self.datas[stage.number - 1].resized(**sizes_of(stage.sections.data))

    @property
    def corpora(self) -> list[str]:
        """The fingerprint of each stage's data."""
        return [data.corpus.fingerprint for data in self.datas]

    def check(self, kept: dict[str, Any], step: int) -> Past:
        """Returns the run's history, if it may resume from a checkpoint with this metadata.

        Raises:
          ValueError: a key that affects the losses has changed, and may not.
        """
        stage = stage_of(self.stages, step)  # the stage that ran the step, which may end there
        allowed, past = stage.sections.run.allow_change, Past.of(kept)
        changes = {}
        if len(self.stages) > 1 or "stages" in kept:
            how = {"allowed": allowed, "corpora": self.corpora}
            changes |= check_history(kept, self.stages, step, self.directory, **how)
        how = {"allowed": allowed, "kept": kept, "stages": self.stages}
        changes |= check_same_run(kept["recipe"], stage.sections, step, self.directory, **how)
        changes |= check_data(kept, self.data_of(stage), stage.sections, step, allowed)
        return past.with_change(kept, step, changes) if changes else past

    def state_like(self, kept: dict[str, Any] | None) -> TrainState:
        """Returns the state of the program, with the moments of a checkpoint with this metadata; default: its own."""
        state = self.program.state
        dtype = self.sections.optimizer.moments
        was = dtype if kept is None else kept["recipe"].get("optimizer.moments", dtype)
        return state if was == dtype else state._replace(opt_state=moments_like(state.opt_state, was))

    def check_owned(self) -> None:
        """Raises ValueError, on host 0, if another process has taken over a folder of the run. Call it before writing."""
        for lock in self.locks:
            lock.check()

    def labels(self) -> dict[str, float]:
        """Returns the columns that metrics.jsonl has about the stage, if there are several stages."""
        if len(self.stages) == 1:
            return {}
        return {"stage": self.stage.number, "sequence_length": self.sections.data.sequence_length}

    def checkpoint_metadata(self, step: int, number: int | None = None) -> dict[str, Any]:
        """Returns the JSON that a checkpoint stores with the state. `number`: of the next batch, see `Data.cursor`."""
        past, metadata = (
            self.past,
            dict[str, Any](recipe=fingerprint(self.sections), data=self.data.cursor(step, number)),
        )
        if len(self.stages) > 1 or past.changes:
            metadata["stages"] = [*past.settings, *history(self.stages, step, past.since, self.corpora)]
        return metadata | ({"changes": list(past.changes)} if past.changes else {})


def open_run(
    sections: TrainSections,
    hosts: Hosts,
    devices: list[Any] | None = None,
    log: Any = lambda line: None,
    batches: Any = None,
) -> Run:
    """Sets up the run of a recipe. Call it inside `hosts.together()`, on all hosts.

    Args:
      devices: default: all.
      log: takes a line for the user.
      batches: in the place of the recipe's data, see `ejdist.training.train`.

    Raises:
      ValueError: the recipe or its files are wrong, or another process trains in run.dir. CheckpointError: run.dir holds
        files of another project. HostsDiffer: the hosts were started with different inputs. HostLost: a host is missing.
    """
    s = sections
    s.run.validate()
    if hosts.index == 0:  # another host's folder may be of a run before
        check_recorded(recorded(s.run.dir).get("plugins") or (), s.plugins, s.run.dir)
    load(s.plugins)
    validate(s)
    directory = Path(s.run.dir).expanduser()
    if hosts.index == 0 or s.checkpoint.dir is None or s.run.profile:  # other hosts write nothing else there
        _writable("run.dir", s.run.dir)
    for key, folder in (("checkpoint.dir", s.checkpoint.dir), ("checkpoint.local", s.checkpoint.local)):
        if folder is not None and not is_url(folder):
            _writable(key, folder)
    if (computed := getattr(s.model, "compute_dtype", None)) is not None:
        log(f"compute in {computed}, parameters in float32")
    if hosts.index == 0:
        for line in told_of_folder(getattr(s.model, "init_from", None), directory):
            log(line)
        check_installed(s.run.trackers)
    recipe = {key: value for key, value in flat(s).items() if not key.startswith("cluster.")}
    hosts.compare("the start", recipe | digests() | environment())
    locks = locks_of(directory, s.checkpoint.dir, hosts)
    for lock in locks:
        lock.take(log)  # before any host lists the folder: a process that is ending may still write its last checkpoint
    hosts.broadcast("that its folders are locked")
    stages = stages_of(s)
    # All stages, to find errors in later ones now; nothing is compiled or allocated.
    programs = [stage_program(stage, devices) for stage in stages]
    saves = Saves(directory, s.checkpoint, hosts)
    last = saves.durable.latest()
    stage = stage_of(stages, (last or 0) + 1)
    s = stage.sections
    cache = Path(s.data.cache_dir or default_cache_dir()).expanduser()
    with contextlib.nullcontext() if batches is not None else first_alone(hosts, cache, "tokens in data.cache_dir"):
        datas = data_of_stages(stages) if batches is None else own_batches(stages, batches)
        stages, programs = resolve(stages, programs, datas, lambda one: stage_program(one, devices), log)
        stage = stage_of(stages, stage.start + 1)
        program, s = programs[stage.number - 1], stage.sections
        data = datas[stage.number - 1].resized(**sizes_of(s.data))
        held_out = data_of_evaluation(s, data, datas)
    if (line := data.ends()) is not None:
        log(line)
    of_stages = {f"{one.where}data.source": d for one, d in reversed(list(zip(stages, datas, strict=True)))}
    shared = {id(d.corpus): (key, d) for key, d in of_stages.items()}
    for key, one in [*reversed(shared.values()), *([("evaluation.data", held_out)] if held_out is not None else [])]:
        for line in one.notes(key):
            log(line)
    if held_out is not None and held_out.has_conversations:  # they must fit into the rows of every stage
        for other in stages:
            held_out.resized(**sizes_of(other.sections.data))
    checkpoints = saves.find(program.state, log)
    if not checkpoints and hosts.index == 0:
        _check_moved(directory, s.checkpoint)
    run = Run(
        s, hosts, directory, program, saves, data, held_out, last, checkpoints, stage, stages, programs, datas, locks
    )
    check_newest(run)
    return run


def check_newest(run: Run) -> None:
    """Checks the newest checkpoint that can be read, so that a recipe that may not resume it is refused before it is compiled.

    Raises:
      ValueError, CheckpointError: as `resume`.
    """
    for step, where in run.checkpoints_found:
        try:
            metadata, kinds = where.described(step)
        except Exception:  # damaged; `resume` reports it
            continue
        run.check(metadata, step)
        if run.hosts.index == 0:
            SkippedBatches.read(run.directory, metadata.get("guards", {}).get("passed", ()), step)
        here = run.in_stage_after(step)
        check_same_model(f"checkpoint {where.directory / str(step)}", here.state_like(metadata), kinds)
        return


def _check_moved(directory: Path, section: CheckpointSection) -> None:
    """Raises ValueError if the run in a folder has its checkpoints elsewhere than `checkpoint.dir`, which has none: the run
    would start over and lose its metrics. Runs on one host, so it cannot use an Orbax manager, which waits for all."""
    try:
        before = json.loads((directory / "recipe.json").read_text())["checkpoint.dir"]
        if before == section.dir or (before is not None and is_url(before)):
            return
        folder = directory / "checkpoints" if before is None else Path(before).expanduser()
        last = max((int(path.name) for path in folder.iterdir() if is_step(path.name)), default=None)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):
        return  # no other folder is recorded, or it no longer exists
    if last is not None:
        raise ValueError(
            f"checkpoint.dir = {section.dir!r} has no checkpoint, and the run in {directory} has one of step {last} in "
            f"{folder}, where checkpoint.dir was {before!r}: restore checkpoint.dir, move the folder there, or {ELSEWHERE}"
        )


def stage_program(stage: Stage, devices: list[Any] | None = None) -> Program:
    """Returns the program of a stage. Raises ValueError, naming the stage if there are several."""
    try:
        mesh = make_mesh(**vars(stage.sections.mesh), devices=devices)
        check_hosts(mesh)
        return make_program(stage.sections, mesh, stage.rate)
    except ValueError as error:
        if stage.count == 1:
            raise
        raise ValueError(f"{stage.where}{error}") from error


def check_hosts(mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError, naming the host, if a host has no device in the mesh and so would not take part in a step."""
    working = {device.process_index for device in mesh.devices.flat}
    idle = [i for i in range(jax.process_count()) if i not in working]
    if idle:
        used = {axis: size for axis, size in mesh.shape.items() if size > 1}
        raise ValueError(
            f"the mesh {used or 'of one'} uses {mesh.size} of {jax.device_count()} devices, and none of host {idle[0]}: "
            "make an axis larger, or -1 to use all devices"
        )


def _writable(key: str, folder: str) -> Path:
    """Returns the folder that a key names, which need not exist. Raises ValueError, naming the key, if it is not writable."""
    directory = Path(folder).expanduser()
    existing = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise ValueError(f"{key} = {folder!r}: {existing} is a file; name another folder, or remove it")
    try:
        tempfile.TemporaryFile(
            dir=existing
        ).close()  # permissions do not tell: root may write what no one can, as in /proc
    except OSError as error:
        remedy = ", or fix its permissions" if error.errno in (errno.EACCES, errno.EPERM) else ""
        raise ValueError(
            f"{key} = {folder!r}: {existing} cannot be written ({error.strerror}); choose another folder{remedy}"
        ) from error
    return directory
