"""The training loop: builds the parts, feeds the devices, saves, and stops where it was told to."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ejdist.cluster.agreement import check_shared, program_digest
from ejdist.cluster.ending import stepping
from ejdist.cluster.hosts import Hosts
from ejdist.cluster.watchdog import ending_hangs
from ejdist.training.flops import peak_flops, step_flops
from ejdist.training.goodput import NAME, Ledger, account, read
from ejdist.training.guards import Passed, Rewind, Watch, stopped
from ejdist.training.metrics import (
    MetricsWriter,
    cannot_write,
    draw_loss,
    measured_peak,
    read_rows,
    summarise,
    write_whole,
)
from ejdist.training.opening import Run, open_run, resume, start_from
from ejdist.training.pace import CALLS, DATA, HOST, SAVES, WAITS, Pace
from ejdist.training.program import Program, TrainSections, local_rows, place_batch
from ejdist.training.replicas import Replicas
from ejdist.training.resume import fingerprint, how_to_go_on
from ejdist.training.saves import Tier
from ejdist.training.step import LIMITS
from ejdist.training.stop import Diverged, Stop, stop_on_signals
from ejdist.weights.match import flat
from ejdist.weights.start import open_source


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    finished: bool  # False: it was stopped early and can go on
    summary: dict[str, Any] | None


def train(
    sections: TrainSections,
    *,
    devices: list[Any] | None = None,
    say: Any = print,
    began: float | None = None,
) -> Outcome:
    """Returns how the run ended, after training it from where `run.dir` left it.

    Writes to run.dir: metrics.jsonl, goodput.jsonl, tensorboard/, checkpoints/, and at the end summary.json, loss.png and the
    model's own pictures.

    Args:
      devices: default: all.
      say: takes a line for the user; only the first process calls it.
      began: when the process did, in seconds since 1970, for the goodput ledger; default: now.

    Raises:
      ValueError: the recipe is wrong; nothing has been written. CheckpointError: a checkpoint cannot be read or written.
      Diverged: the loss is not a number any more, or a spike, and `guards` says to stop. ReplicasDiffer: a device has other
        bits than those that hold the same. HostsDiffer: hosts were started with different things, before anything was written.
        HostLost: one of them does not answer.
    """
    s = sections
    main = jax.process_index() == 0
    say = say if main else (lambda line: None)
    ledger = Ledger(main, began)
    hosts = Hosts(s.run.host_timeout)
    with hosts.together():
        run = open_run(s, hosts, devices, say)
        program, saves, directory = run.program, run.saves, run.directory
        given = getattr(s.model, "init_from", None)
        source = open_source(given, s.model) if given is not None and not run.found else None
        ledger.phase("compile")
        lowered = program.step.lower(program.state, program.batch)
        weights = {} if source is None or hosts.count == 1 else {"model.init_from (digest)": source.digest()}
        corpus = {name: run.data.cursor(0)[name] for name in ("tokenizer", "corpus")}
        facts = corpus | weights | {"checkpoint": run.last, "program (digest)": program_digest(lowered)}
        hosts.compare("the first step", facts)
        # Compiled before anything is written, so that a recipe that cannot run leaves no trace.
        step = lowered.compile()
        replicas = Replicas(hosts, program.state, s.guards.replicas_every)
        ledger.phase("restart")
        check_shared(hosts, directory)
        if run.found and given is not None:
            say(f"model.init_from = {given!r} is not read: the run goes on from its own checkpoint")
        begun = _begin(run, run.found, source, say)
        saves.begin(begun.step, say)
    start = begun.step
    end = s.run.steps if s.run.stop_after is None else min(s.run.steps, s.run.stop_after)
    mesh = program.mesh
    used = {axis: size for axis, size in mesh.shape.items() if size > 1}
    say(
        f"{program.num_parameters:,} parameters on {mesh.size} x {mesh.devices.flat[0].device_kind}, mesh {used or 'of one'}, "
        f"{s.data.global_batch} x {s.data.sequence_length:,} tokens a step, {s.sequence.scheme} in {program.order.name} order"
    )
    for line in dict.fromkeys(program.notes):
        say(line)
    if s.guards.replicas_every and not replicas.every:
        say(f"guards.replicas_every = {s.guards.replicas_every} compares nothing: no two devices hold the same")
    if start >= end:
        more = how_to_go_on(s.run, s.optimizer, start)
        say(f"nothing to do: {directory} has {start} of {end} steps; {more}, or choose another run.dir")
        # A disk may have been full, or the run killed, after the last checkpoint and before the summary.
        summary = _finish(s, program, directory) if main and not _has_summary(directory, start) else None
        return Outcome(start, start >= s.run.steps, summary)
    pace = Pace(start, hosts, ledger, s.guards.stragglers_every, say)
    try:
        with hosts.together(), stop_on_signals() as stop, stepping(hosts.failed, hosts.limit):
            ledger.open(directory)
            ledger.phase("restart", resumed=start)
            with ending_hangs(pace, hosts, s.guards.hang_seconds, SAVES):
                last = _steps_past_rewinds(run, step, begun, end, stop, pace, replicas, source, say)
    finally:
        pace.close()
        saves.close()
    if stop.signals and last < end:
        say(f"stopped by {signal.Signals(stop.signals[0]).name} after step {last}; the same command goes on from there")
    if main:
        say(str(account(read(directory / NAME))))
    summary = _finish(s, program, directory) if main else None
    return Outcome(last, last >= s.run.steps, summary)


@dataclass
class _Begun:
    """What steps go on from; `state` is taken out by whoever uses it up."""

    step: int
    state: Any
    kept: dict[str, Any]  # of guards, in the checkpoint
    passed: Passed


def _begin(run: Run, found: list[tuple[int, Tier]], source: Any, say: Any) -> _Begun:
    """Returns the state of the last of these checkpoints that is whole, or the first one. To be called by all hosts."""
    if found:
        step, state, beside = resume(run, found, say)
        kept = beside.get("guards", {})
    else:
        step, kept = 0, {}
        state = run.program.init() if source is None else start_from(run.program, source, say)
    hosts = run.hosts
    rewinds = Passed.read(run.directory, kept.get("passed", ()), step).rewinds if hosts.index == 0 else None
    return _Begun(step, state, kept, Passed(hosts.say("the batches that rewinds went past", rewinds)))


def _steps_past_rewinds(
    run: Run,
    train_step: Any,
    begun: _Begun,
    end: int,
    stop: Stop,
    pace: Pace,
    replicas: Replicas,
    source: Any,
    say: Any,
) -> int:
    """Returns the last step made, after going back to the last checkpoint as often as a guard asks for it."""
    s, main = run.sections, run.hosts.index == 0
    tables = s.experts.load_every
    while True:
        start, passed = begun.step, begun.passed
        watch = Watch(s.guards, run.directory, begun.kept)
        recipe = flat(s)
        writer = MetricsWriter(run.directory, start, s.run.steps, tables_every=tables, recipe=recipe) if main else None
        state, begun.state = begun.state, None
        try:
            return _steps(run, train_step, state, writer, start, end, stop, Guards(watch, passed, replicas, pace))
        except Rewind as error:
            bad, words = error.step, str(error)  # and not the error, which holds the frames that hold the state
        finally:
            if writer is not None:
                writer.close()
        state = None
        begun = _rewind(run, bad, words, passed, pace, source, say)


def _rewind(run: Run, bad: int, words: str, passed: Passed, pace: Pace, source: Any, say: Any) -> _Begun:
    """Returns what the run goes on from after a bad step: the last checkpoint, and the batches after those since."""
    s = run.sections
    with pace.at(SAVES):
        run.saves.wait()
        found = run.saves.find(run.program.state, say)
        restored = found[0][0] if found else 0
        times = passed.times(restored)
        if times >= s.guards.most_rewinds:
            many = f"the run has gone back to step {restored} {times} times (guards.most_rewinds)"
            raise Diverged(stopped(f"{words}, and {many}; nothing was saved since", run.directory))
        pace.goes_back(restored)
        new = passed.past(bad, restored)
        gone = f"batches {passed.number(restored + 1)} to {passed.number(bad)}"
        say(f"{words}: going back to step {restored} and past {gone}")
        if run.hosts.index == 0:
            new.write(run.directory)
        begun = _begin(run, found, source, say)
        if begun.step < restored:  # that checkpoint is damaged: what was made up to it is given up too
            pace.goes_back(begun.step)
    return begun


@dataclass(frozen=True)
class Guards:
    """What looks after the steps."""

    watch: Watch
    passed: Passed
    replicas: Replicas
    pace: Pace


def _steps(run: Run, train_step: Any, state: Any, writer: Any, start: int, end: int, stop: Stop, guards: Guards) -> int:
    """Returns the last step made. The loop: nothing in it waits for the step just started but a save of its state."""
    s, program, data, saves = run.sections, run.program, run.data, run.saves
    watch, passed, pace = guards.watch, guards.passed, guards.pace
    rows = local_rows(program)
    batches = data.iterator(start, end, rows, lambda made: passed.number(made + 1))
    step = start
    pace.begins(start)
    for step in range(start + 1, end + 1):
        with pace.at(DATA):
            batch = next(batches)
        with pace.at(HOST):
            flops = step_flops(program.model.flops, batch["segment_ids"])
            placed = place_batch(batch | {LIMITS: watch.limits(step)}, program, rows.start)
        with pace.at(CALLS):
            state, metrics = train_step(state, placed)
        with pace.at(WAITS):
            if writer is not None:
                share = s.data.global_batch / (rows.stop - rows.start)
                host = {"flops_causal": flops.causal * share, "flops_full": flops.full * share}
                writer.put(step, metrics, host)
            stopped_here = stop.after(step)
            where = saves.due(step, last=step == end or stopped_here)
            watch.add(step, metrics, all_of_them=where is not None)
            guards.replicas.look(step, state, saves=where is not None)
        if where is not None:
            with pace.saving(step):
                kept = watch.keep() | {"passed": passed.until(step)}
                where.save(step, state, {"recipe": fingerprint(s), "data": data.cursor(step), "guards": kept})
        pace.ends(step)
        if stopped_here:
            break
    with pace.saving(step):
        saves.wait()
    return step


def _has_summary(directory: Path, step: int) -> bool:
    """Returns whether the summary of that step is there, or cannot be made: its rows are not."""
    try:
        written = json.loads((directory / "summary.json").read_text())["steps"] == step
    except (OSError, ValueError, KeyError, TypeError):
        written = False
    return (written and (directory / "loss.png").exists()) or not read_rows(directory / "metrics.jsonl")


def _finish(s: TrainSections, program: Program, directory: Path) -> dict[str, Any]:
    rows = read_rows(directory / "metrics.jsonl")
    devices = list(program.mesh.devices.flat)
    kind = devices[0].device_kind
    peak = peak_flops(kind)
    facts = {
        "peak_source": "measured: float32 matmul on all devices at once" if peak is None else "data sheet, dense bf16",
        "mfu_causal_counts": "attention by the (query, key) pairs of the mask that was used",
        "mfu_full_counts": "attention as sequence_length^2 in every layer",
        "device_kind": kind,
        "mesh": dict(program.mesh.shape),
        "sequence_length": s.data.sequence_length,
        "global_batch": s.data.global_batch,
        "parameters": program.num_parameters,
        "jax": jax.__version__,
        "goodput": account(read(directory / NAME)).as_json(),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    summary = summarise(rows, devices=len(devices), peak=peak or measured_peak(devices), **facts)
    try:
        write_whole(directory / "summary.json", json.dumps(summary, indent=1) + "\n")
        title = f"{program.num_parameters:,} parameters, {s.data.sequence_length:,} tokens"
        draw_loss(rows, directory / "loss.png", title)
        for name, draw in program.model.pictures.items():
            draw(rows, directory / name)
    except OSError as error:
        raise cannot_write(directory, error) from error
    return summary
