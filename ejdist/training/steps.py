"""The steps of a run: feeds the devices, saves, goes back where a guard asks for it, and on to the next stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ejdist.cluster.agreement import program_digest
from ejdist.sections import flat
from ejdist.training.flops import step_flops
from ejdist.training.goodput import Ledger
from ejdist.training.guards import Finite, Passed, Rewind, Watch, stopped
from ejdist.training.metrics import MetricsWriter, cannot_write
from ejdist.training.opening import Run, resume, start_from
from ejdist.training.pace import CALLS, DATA, HOST, SAVES, WAITS, Pace
from ejdist.training.program import local_rows, place_batch, place_limits
from ejdist.training.replicas import Replicas
from ejdist.training.saves import Tier
from ejdist.training.start import Source
from ejdist.training.stop import Diverged, Stop


@dataclass(frozen=True)
class Compiled:
    """The step of a stage, what compares its replicas, and what looks at its parameters."""

    stage: int
    step: Any
    replicas: Replicas
    finite: Finite


def compile_stage(run: Run, moment: str, more: dict[str, Any], ledger: Ledger) -> Compiled:
    """Returns the compiled step of the run's stage. Raises unless all hosts come to it with the same, and with `more`."""
    ledger.phase("compile")
    program = run.program
    lowered = program.lower()
    facts = more | {name: run.data.cursor(0)[name] for name in ("tokenizer", "corpus")}
    facts |= {"stage": run.stage.number, "program (digest)": program_digest(lowered)}
    run.hosts.compare(moment, facts)
    step = lowered.compile()
    replicas = Replicas(run.hosts, program.state, run.sections.guards.replicas_every)
    made = Compiled(run.stage.number, step, replicas, Finite(program.state.params, program.mesh))
    ledger.phase("restart")
    return made


@dataclass
class Begun:
    """What steps go on from; `state` is taken out by whoever uses it up.

    Attributes:
      run: in the stage that goes on.
      kept: of guards, in the checkpoint.
    """

    run: Run
    step: int
    state: Any
    kept: dict[str, Any]
    passed: Passed


def begin(run: Run, found: list[tuple[int, Tier]], source: Source | None, log: Any) -> Begun:
    """Returns the state of the last of these checkpoints that is whole, or the first one. To be called by all hosts.

    Raises:
      ValueError: another process trains in a folder of the run, or has since this one looked; and as `resume`.
    """
    if found:
        run, step, state, beside = resume(run, found, log)
        kept = beside.get("guards", {})
    else:
        step, kept = 0, {}
        state = run.program.init() if source is None else start_from(run.program, source, log)
    hosts = run.hosts
    for lock in run.locks:
        try:
            taken = lock.take(log, make=True)
        except OSError as error:
            raise cannot_write(lock.directory, error, lock.key) from error
        # There was no such folder when this run was opened.
        if taken and any(p.name == "metrics.jsonl" or p.name.isdigit() for p in lock.directory.iterdir()):
            raise ValueError(
                f"{lock.key} = {str(lock.directory)!r}: another process has trained in it since this one was started; start "
                f"this one again, which goes on from there, or choose another {lock.key}"
            )
    rewinds = Passed.read(run.directory, kept.get("passed", ()), step).rewinds if hosts.index == 0 else None
    return Begun(run, step, state, kept, Passed(hosts.broadcast("the batches that rewinds went past", rewinds)))


@dataclass
class Steps:
    """The steps from a state to the end, past rewinds and through stages.

    Attributes:
      source: where the first state has its parameters from, should a run go back to it.
    """

    recipe: Any  # TrainSections, with all stages
    source: Source | None
    stop: Stop
    pace: Pace
    ledger: Ledger
    log: Any

    def make(self, begun: Begun, compiled: Compiled, end: int) -> tuple[Run, int]:
        """Returns (the run in the stage that made it, the last step). `begun.state` is used up."""
        # Where the newest checkpoint was damaged, it may be of an earlier stage.
        compiled = self._compiled(begun, compiled)
        while True:
            run, until = begun.run, min(end, begun.run.stage.until)
            bad = None
            try:
                last = self._to(until, begun, compiled)
                if last == end or last < until or self.stop.signals:
                    return run, last
            except Rewind as error:
                bad = error.step, str(error)  # and not the error, which holds the frames that hold the state
            # Restored and compiled within the limits of a save.
            with self.pace.at(SAVES):
                begun = self._rewind(begun, *bad) if bad else self._next_stage(run)
                compiled = self._compiled(begun, compiled)

    def _compiled(self, begun: Begun, before: Compiled) -> Compiled:
        """Returns the step of the stage that goes on."""
        run = begun.run
        if run.stage.number == before.stage:
            return before
        made = compile_stage(run, f"step {begun.step + 1}", {"checkpoint": begun.step}, self.ledger)
        tell_stage(run, self.log)
        return made

    def _to(self, until: int, begun: Begun, compiled: Compiled) -> int:
        """Returns the last step made, of those of a stage."""
        run, s, start = begun.run, begun.run.sections, begun.step
        watch = Watch(s.guards, run.directory, compiled.finite, begun.kept)
        writer = None
        if run.hosts.index == 0:
            tables = s.experts.load_every
            recipe = flat(self.recipe)
            writer = MetricsWriter(run.directory, start, s.run.steps, tables_every=tables, recipe=recipe)
        state, begun.state = begun.state, None
        guards = Guards(watch, begun.passed, compiled.replicas, self.pace)
        try:
            return make_steps(run, compiled.step, state, writer, start, until, self.stop, guards)
        finally:
            if writer is not None:
                writer.close()

    def _next_stage(self, run: Run) -> Begun:
        """Returns what the next stage goes on from: the state that this one has saved at its end."""
        last = run.stage.until
        self.ledger.phase("restart", step=last)
        return begin(run.after(last), [(last, run.saves.durable)], None, lambda line: None)

    def _rewind(self, begun: Begun, bad: int, words: str) -> Begun:
        """Returns what the run goes on from after a bad step: the last checkpoint, and the batches after those since."""
        run, passed = begun.run, begun.passed
        run.saves.wait()
        found = run.saves.find(run.program.state, self.log)
        restored = found[0][0] if found else 0
        times = passed.times(restored)
        if times >= run.sections.guards.most_rewinds:
            many = f"the run has gone back to step {restored} {times} times (guards.most_rewinds)"
            raise Diverged(stopped(f"{words}, and {many}", run.directory, "a larger guards.most_rewinds"))
        self.pace.goes_back(restored)
        new = passed.past(bad, restored)
        gone = f"batches {passed.number(restored + 1)} to {passed.number(bad)}"
        self.log(f"{words}: going back to step {restored} and past {gone}")
        if run.hosts.index == 0:
            new.write(run.directory)
        again = begin(run, found, self.source, self.log)
        if again.step < restored:  # that checkpoint is damaged: what was made up to it is given up too
            self.pace.goes_back(again.step)
        return again


def tell_stage(run: Run, log: Any) -> None:
    """Says which stage it is, where there are several, and what its program has chosen."""
    if run.stage.count > 1:
        log(run.stage.told())
    for line in dict.fromkeys(run.program.notes):
        log(line)


@dataclass(frozen=True)
class Guards:
    """What looks after the steps."""

    watch: Watch
    passed: Passed
    replicas: Replicas
    pace: Pace


def make_steps(
    run: Run, train_step: Any, state: Any, writer: Any, start: int, end: int, stop: Stop, guards: Guards
) -> int:
    """Returns the last step made. The loop: nothing in it waits for the step just started but a save of its state."""
    program, data, saves = run.program, run.data, run.saves
    watch, passed, pace = guards.watch, guards.passed, guards.pace
    rows = local_rows(program)
    mesh = " ".join(f"{axis}={size}" for axis, size in program.mesh.shape.items() if size > 1)
    batches = data.iterator(start, end, rows, lambda made: passed.number(made + 1))
    step = start
    pace.begins(start)
    for step in range(start + 1, end + 1):
        with pace.at(DATA):
            batch = next(batches)
        with pace.at(HOST):
            flops = step_flops(program.model.flops, batch["segment_ids"])
            placed = place_batch(batch, program, rows.start), *place_limits(watch.limits(step), program)
        with pace.at(CALLS):
            state, metrics = train_step(state, *placed)
        with pace.at(WAITS):
            if writer is not None:
                share = data.global_batch / (rows.stop - rows.start)
                host = {"flops_causal": flops.causal * share, "flops_full": flops.full * share}
                host |= {"devices": program.mesh.size, "mesh": mesh}
                writer.put(step, metrics, host | run.labels())
            stopped_here = stop.after(step)
            where = saves.due(step, last=step == end or stopped_here)
            watch.add(step, metrics, wait=where is not None)
            guards.replicas.look(step, state, saves=where is not None)
            if where is not None:
                watch.before_save(step, state.params)
        if where is not None:
            with pace.saving(step):
                kept = watch.keep() | {"passed": passed.until(step)}
                where.save(step, state, run.kept(step) | {"guards": kept})
        pace.ends(step)
        if stopped_here:
            break
    with pace.saving(step):
        saves.wait()
    return step
