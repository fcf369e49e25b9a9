"""The step loop of a run: feeds the devices, saves, rewinds when a guard asks for it, and moves on to the next stage."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

from ejdist.cluster.agreement import program_digest
from ejdist.progress import waiting
from ejdist.sections import flat
from ejdist.training.attended import Attended
from ejdist.training.checkpoint_policy import Tier
from ejdist.training.curriculum import source_of
from ejdist.training.dealing import dealer, described
from ejdist.training.flops import step_flops
from ejdist.training.goodput import Ledger
from ejdist.training.guards import Finite, Rewind, SkippedBatches, Watch, stopped
from ejdist.training.held_out import HeldOut, evaluation_of
from ejdist.training.losses import read_references
from ejdist.training.metrics import MetricsWriter, write_error
from ejdist.training.placing import local_rows, permuted, place_batch, place_limits
from ejdist.training.profiling import StepProfiler, peak_memory
from ejdist.training.replicas import Replicas
from ejdist.training.restore import resume, start_from
from ejdist.training.setup import Run
from ejdist.training.start import Source
from ejdist.training.step_timer import CALLS, DATA, HOST, SAVES, WAITS, StepTimer
from ejdist.training.stop import Diverged, Stop
from ejdist.training.verify import check_plan


@dataclass(frozen=True)
class Compiled:
    """The compiled programs of a stage: its step, the hash of its replicas, the check of its parameters, and its evaluation."""

    stage: int
    step: Any
    replicas: Replicas
    finite: Finite
    held_out: HeldOut | None


def check_stages(run: Run) -> None:
    """Checks that the programs of later stages can be lowered and their rows dealt: what only that finds would end the run when
    they begin.

    Raises:
      ValueError: one cannot be; names the stage.
    """
    for stage, program in list(zip(run.stages, run.programs, strict=True))[run.stage.number :]:
        try:
            dealer(run.data_of(stage), program, stage.sections)
            evaluation_of(stage.sections, program, run.held_out)
            program.lower()
        except ValueError as error:
            raise ValueError(f"{stage.where}{error}") from error


def compile_stage(run: Run, moment: str, more: dict[str, Any], ledger: Ledger, log: Any) -> Compiled:
    """Returns the compiled step of the run's stage. Raises HostsDiffer unless all hosts have the same program, data and
    `more`."""
    several = {"stage": run.stage.number, "data": source_of(run.sections.data)} if len(run.stages) > 1 else {}
    ledger.phase("compile", **several)
    of = f" of stage {run.stage.number}" if len(run.stages) > 1 else ""
    what = f"compiling the step{of}: {run.program.model.num_layers} layers, {run.program.num_parameters:,} parameters"
    with waiting(what, log, sys.stdout) if run.hosts.index == 0 else contextlib.nullcontext():
        compiled = _compiled(run, moment, more, ledger)
    first = max(run.stage.start, run.data.begin.batch)
    check_plan(run.sections, run.program, run.hosts, lambda: run.data.batch(first, slice(0, 1)), log)
    return compiled


def _compiled(run: Run, moment: str, more: dict[str, Any], ledger: Ledger) -> Compiled:
    program = run.program
    held_out = evaluation_of(run.sections, program, run.held_out)
    lowered = program.lower()
    facts = more | {name: run.data.cursor(0)[name] for name in ("tokenizer", "corpus")}
    facts |= {"corpora of all stages": run.corpora} if len(run.stages) > 1 else {}
    if run.held_out is not None:
        facts["evaluation corpus"] = run.held_out.corpus.fingerprint
    facts |= {"stage": run.stage.number, "program (digest)": program_digest(lowered)}
    run.hosts.compare(moment, facts)
    step = lowered.compile()
    replicas = Replicas(run.hosts, program.state, run.sections.guards.replicas_every)
    finite = Finite(program.state.params, program.mesh)
    if held_out is not None:
        held_out.evaluator.compile_losses()
    compiled = Compiled(run.stage.number, step, replicas, finite, held_out)
    ledger.phase("restart")
    return compiled


@dataclass
class LoopState:
    """The state that the loop continues from. `state` is None once the loop has donated it.

    Attributes:
      run: the run in its current stage.
      guards: the guards' state in the checkpoint, see `Watch.to_json`.
    """

    run: Run
    step: int
    state: Any
    guards: dict[str, Any]
    skipped: SkippedBatches


def start_state(run: Run, found: list[tuple[int, Tier]], source: Source | None, log: Any) -> LoopState:
    """Returns the state of the newest of these checkpoints that is intact, or the initial state. Call it on all hosts.

    Raises:
      ValueError: another process trains in a folder of the run, or has since this one started; and as `resume`.
    """
    if found:
        run, step, state, metadata = resume(run, found, log)
        guards = metadata.get("guards", {})
    else:
        step, guards = 0, {}
        state = run.program.init() if source is None else start_from(run.program, source, log, run.hosts.first_error)
        state = read_references(run.program.trained, state, run.program.state, log)
    hosts = run.hosts
    for lock in run.locks:
        try:
            taken = lock.take(log, make=True)
        except OSError as error:
            raise write_error(lock.directory, error, lock.key) from error
        # The folder did not exist when this run was opened.
        if taken and any(p.name == "metrics.jsonl" or p.name.isdigit() for p in lock.directory.iterdir()):
            raise ValueError(
                f"{lock.key} = {str(lock.directory)!r}: another process has trained in it since this one started; start "
                f"this one again to resume from there, or choose another {lock.key}"
            )
    rewinds = SkippedBatches.read(run.directory, guards.get("passed", ()), step).rewinds if hosts.index == 0 else None
    return LoopState(
        run, step, state, guards, SkippedBatches(hosts.broadcast("the batches that rewinds skipped", rewinds))
    )


@dataclass
class Steps:
    """Runs the steps from a state to the end, through rewinds and stages.

    Attributes:
      recipe: the recipe with all stages.
      source: of the initial parameters, in case the run rewinds to step 0.
    """

    recipe: Any  # TrainSections
    source: Source | None
    stop: Stop
    timer: StepTimer
    ledger: Ledger
    log: Any

    def run(self, current: LoopState, compiled: Compiled, end: int) -> tuple[Run, int]:
        """Returns (the run in its last stage, the last step). Donates `current.state`."""
        # If the newest checkpoint was damaged, the run may resume in an earlier stage.
        compiled = self._compiled(current, compiled)
        while True:
            run, until = current.run, min(end, current.run.stage.until)
            bad = None
            try:
                last = self._to(until, current, compiled)
                if last == end or last < until or self.stop.signals:
                    return run, last
            except Rewind as error:
                bad = error.step, str(error)  # not the error itself, whose frames keep the state alive
            # Restoring and compiling get the time limit of a save.
            with self.timer.during(SAVES):
                current = self._rewind(current, *bad) if bad else self._next_stage(run)
                compiled = self._compiled(current, compiled)

    def _compiled(self, current: LoopState, before: Compiled) -> Compiled:
        """Returns the programs of the current stage."""
        run = current.run
        if run.stage.number == before.stage:
            return before
        compiled = compile_stage(run, f"step {current.step + 1}", {"checkpoint": current.step}, self.ledger, self.log)
        log_stage(run, self.log)
        return compiled

    def _to(self, until: int, current: LoopState, compiled: Compiled) -> int:
        """Runs the steps of a stage, and returns the last one."""
        run, s, start = current.run, current.run.sections, current.step
        watch = Watch(s.guards, run.directory, compiled.finite, current.guards)
        writer = None
        if run.hosts.index == 0:
            tables = s.experts.load_every
            recipe = flat(self.recipe)
            run.check_owned()
            options = {"tables_every": tables, "recipe": recipe, "changes": run.past.changes}
            writer = MetricsWriter(run.directory, start, s.run.steps, trackers=s.run.trackers, **options)
        state, current.state = current.state, None
        guards = Guards(watch, current.skipped, compiled.replicas, self.timer)
        profiler = StepProfiler(s.run.profile, run.directory, start, self.log)
        try:
            evaluation = None
            if compiled.held_out is not None:
                done = None if writer is None else writer.evaluated(start)
                done = run.hosts.broadcast("whether its first state is evaluated", done)
                evaluation = Evaluation(compiled.held_out, writer, self.timer, start if done else None)
            return run_steps(run, compiled.step, state, writer, start, until, self.stop, guards, evaluation, profiler)
        finally:
            profiler.stop()
            if writer is not None:
                writer.close()

    def _next_stage(self, run: Run) -> LoopState:
        """Returns the start of the next stage: the state that this one saved at its end."""
        last = run.stage.until
        self.ledger.phase("restart", step=last)
        return start_state(run.in_stage_after(last), [(last, run.saves.durable)], None, lambda line: None)

    def _rewind(self, current: LoopState, bad: int, words: str) -> LoopState:
        """Returns the state to continue from after a bad step: the last checkpoint, with every batch since then skipped."""
        run, skipped = current.run, current.skipped
        run.saves.wait()
        checkpoints = run.saves.find(run.program.state, self.log)
        restored = checkpoints[0][0] if checkpoints else 0
        times = skipped.num_rewinds(restored)
        if times >= run.sections.guards.most_rewinds:
            many = f"the run has rewound to step {restored} {times} times (guards.most_rewinds)"
            raise Diverged(stopped(f"{words}, and {many}", run.directory, "a larger guards.most_rewinds"))
        self.timer.rewind(restored)
        new = skipped.after_rewind(bad, restored)
        batches = f"batches {skipped.number(restored + 1)} to {skipped.number(bad)}"
        self.log(f"{words}: rewinding to step {restored} and skipping {batches}")
        if run.hosts.index == 0:
            new.write(run.directory)
        again = start_state(run, checkpoints, self.source, self.log)
        if again.step < restored:  # that checkpoint is damaged, so the steps before it are lost too
            self.timer.rewind(again.step)
        return again


def log_stage(run: Run, log: Any) -> None:
    """Logs the stage, if there are several, and the choices made for its program."""
    if run.stage.count > 1:
        log(run.stage.describe())
    if run.stage.has_rate or run.stage.number == 1:  # the run's schedule, once
        for line in run.stage.rate.notes:
            log(f"{run.stage.where if run.stage.has_rate else ''}{line}")
    for line in dict.fromkeys(run.program.notes):
        log(line)
    if (line := described(run.data, run.program, run.sections)) is not None:
        log(line)


@dataclass(frozen=True)
class Guards:
    """The checks on the steps."""

    watch: Watch
    skipped: SkippedBatches
    replicas: Replicas
    timer: StepTimer


@dataclass
class Evaluation:
    """The evaluations between steps. `done`: the step whose state has been evaluated, None if there is none."""

    held_out: HeldOut
    writer: Any
    timer: StepTimer
    done: int | None

    def after(self, step: int, state: Any) -> None:
        """Evaluates the state after a step if it is due. Call it on all hosts."""
        if step == self.done or not self.held_out.due(step):
            return
        with self.timer.evaluating(step):
            row = self.held_out.measure(state, self.timer.alive)
        self.done = step
        if self.writer is not None:
            self.writer.put_evaluation(step, row)


def run_steps(
    run: Run,
    train_step: Any,
    state: Any,
    writer: Any,
    start: int,
    end: int,
    stop: Stop,
    guards: Guards,
    evaluation: Evaluation | None,
    profiler: StepProfiler,
) -> int:
    """Runs the steps `start` + 1 to `end`, and returns the last one. Only a save waits for the step that was just
    dispatched."""
    program, data, saves = run.program, run.data, run.saves
    watch, skipped, timer = guards.watch, guards.skipped, guards.timer
    rows = local_rows(program)
    mesh = " ".join(f"{axis}={size}" for axis, size in program.mesh.shape.items() if size > 1)

    def ready(batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        attended = Attended.of(program, batch["segment_ids"])
        logged = attended.evenness(program, run.sections) | attended.sent(program, run.sections)
        facts = step_flops(program.model.flops, batch["segment_ids"]), logged
        return facts, permuted(batch, program, attended)

    deal = dealer(data, program, run.sections)
    batches = data.iterator(start, end, rows, lambda done: skipped.number(done + 1), ready, deal)
    step = start
    timer.start(start)
    if evaluation is not None:
        evaluation.after(start, state)
    for step in range(start + 1, end + 1):
        with timer.during(DATA):
            (flops, even), batch = next(batches)
        with timer.during(HOST):
            placed = place_batch(batch, program, rows), *place_limits(watch.limits(step), program)
        with timer.during(CALLS), profiler.step(step):
            state, metrics = train_step(state, *placed)
        with timer.during(WAITS):
            if writer is not None:
                share = data.global_batch / len(rows)
                host = {"flops_causal": flops.causal * share, "flops_full": flops.full * share}
                host |= {"devices": program.mesh.size, "mesh": mesh, **even}
                host |= {"peak_memory_gib": peaks} if (peaks := peak_memory()) else {}
                writer.put(step, metrics, host | run.labels())
            if profiler.end_step(step, metrics) and writer is not None:
                writer.pause()
            stopped_here = stop.after(step)
            where = saves.due(step, last=step == end or stopped_here)
            watch.add(step, metrics, wait=where is not None)
            guards.replicas.look(step, state, saves=where is not None)
            if where is not None:
                watch.before_save(step, state.params)
        if where is not None:
            run.check_owned()
            with timer.saving(step):
                saved = watch.to_json() | {"passed": skipped.until(step)}
                where.save(step, state, run.checkpoint_metadata(step, skipped.number(step) + 1) | {"guards": saved})
        timer.end_step(step)
        if stopped_here:
            break
        if evaluation is not None:
            evaluation.after(step, state)
    with timer.saving(step):
        saves.wait()
    return step
