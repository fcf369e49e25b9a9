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
from ejdist.training.flops import peak_flops, step_flops
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
from ejdist.training.program import TrainSections, local_rows, place_batch
from ejdist.training.resume import how_to_go_on
from ejdist.training.stop import Stop, Watch, stop_on_signals
from ejdist.weights.start import open_source


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    finished: bool  # False: it was stopped early and can go on
    summary: dict[str, Any] | None


def train(sections: TrainSections, *, devices: list[Any] | None = None, say: Any = print) -> Outcome:
    """Returns how the run ended, after training it from where `run.dir` left it.

    Writes to run.dir: metrics.jsonl, tensorboard/, checkpoints/, and at the end summary.json, loss.png and the model's own
    pictures.

    Args:
      devices: default: all.
      say: takes a line for the user; only the first process calls it.

    Raises:
      ValueError: the recipe is wrong; nothing has been written. CheckpointError: a checkpoint cannot be read or written.
      Diverged: the loss is not a number any more. HostsDiffer: hosts were started with different things, before anything was
        written. HostLost: one of them does not answer.
    """
    s = sections
    main = jax.process_index() == 0
    say = say if main else (lambda line: None)
    hosts = Hosts(s.run.host_timeout)
    with hosts.together():
        run = open_run(s, hosts, devices)
        checkpoints, directory = run.checkpoints, run.directory
        given = getattr(s.model, "init_from", None)
        source = open_source(given, s.model) if given is not None and run.last is None else None
        weights = {} if source is None or hosts.count == 1 else {"model.init_from (digest)": source.digest()}
        # Compiled before anything is written, so that a recipe that cannot run leaves no trace.
        step = _compiled(run, "the first step", weights | {"checkpoint": run.last})
        check_shared(hosts, directory)
        if run.last is not None:
            opened = run
            run, start, state = resume(opened, say)
            if run is not opened:  # the newest checkpoint was damaged, and the one before is of an earlier stage
                step = _compiled(run, f"step {start + 1}", {"checkpoint": start})
            if given is not None:
                say(f"model.init_from = {given!r} is not read: the run goes on from its own checkpoint")
        else:
            program = run.program
            start, state = 0, program.init() if source is None else start_from(program, source, say)
    for name in checkpoints.interrupted():
        say(f"ignoring {name}: a save that was cut off")
    end = s.run.steps if s.run.stop_after is None else min(s.run.steps, s.run.stop_after)
    s, program = run.sections, run.program
    mesh = program.mesh
    used = {axis: size for axis, size in mesh.shape.items() if size > 1}
    say(
        f"{program.num_parameters:,} parameters on {mesh.size} x {mesh.devices.flat[0].device_kind}, mesh {used or 'of one'}, "
        f"{s.data.global_batch} x {s.data.sequence_length:,} tokens a step, {s.sequence.scheme} in {program.order.name} order"
    )
    _tell_stage(run, say)
    if start >= end:
        more = how_to_go_on(s.run, s.optimizer, start)
        say(f"nothing to do: {directory} has {start} of {end} steps; {more}, or choose another run.dir")
        # A disk may have been full, or the run killed, after the last checkpoint and before the summary.
        summary = _finish(run) if main and not _has_summary(directory, start) else None
        return Outcome(start, start >= s.run.steps, summary)
    writer = MetricsWriter(directory, start, s.run.steps, tables_every=s.experts.load_every) if main else None
    try:
        with hosts.together(), stop_on_signals() as stop, stepping(hosts.failed, hosts.limit):
            last = _steps(run, step, state, writer, start, min(end, run.stage.until), stop)
            while last < end and not stop.signals:
                del step, state  # of the stage that has ended: the next has arrays and a program of its own
                run, step, state = _next_stage(run, last, say)
                if not stop.signals:
                    last = _steps(run, step, state, writer, last, min(end, run.stage.until), stop)
    finally:
        if writer is not None:
            writer.close()
        checkpoints.close()
    if stop.signals and last < end:
        say(f"stopped by {signal.Signals(stop.signals[0]).name} after step {last}; the same command goes on from there")
    summary = _finish(run) if main else None
    return Outcome(last, last >= s.run.steps, summary)


def _compiled(run: Run, moment: str, more: dict[str, Any]) -> Any:
    """Returns the compiled step of the run's stage. Raises unless all hosts come to it with the same, and with `more`."""
    program = run.program
    lowered = program.step.lower(program.state, program.batch)
    facts = more | {name: run.data.cursor(0)[name] for name in ("tokenizer", "corpus")}
    facts |= {"stage": run.stage.number, "program (digest)": program_digest(lowered)}
    run.hosts.compare(moment, facts)
    return lowered.compile()


def _next_stage(run: Run, last: int, say: Any) -> tuple[Run, Any, Any]:
    """Returns (the run in its next stage, its step, the state that the stage before has saved after step `last`)."""
    run = run.after(last)
    step = _compiled(run, f"step {last + 1}", {"checkpoint": last})
    state, _ = run.checkpoints.restore(last, run.program.state, run.hosts.first)
    _tell_stage(run, say)
    return run, step, state


def _tell_stage(run: Run, say: Any) -> None:
    if run.stage.count > 1:
        say(run.stage.told())
    for line in dict.fromkeys(run.program.notes):
        say(line)


def _steps(run: Run, train_step: Any, state: Any, writer: Any, start: int, end: int, stop: Stop) -> int:
    """Returns the last step made. The loop: nothing in it waits for the step just started but a save of its state."""
    s, program, data, checkpoints = run.sections, run.program, run.data, run.checkpoints
    rows = local_rows(program)
    batches = data.iterator(start, end, rows)
    watch = Watch(run.directory)
    step = start
    for step in range(start + 1, end + 1):
        batch = next(batches)
        flops = step_flops(program.model.flops, batch["segment_ids"])
        state, metrics = train_step(state, place_batch(batch, program, rows.start))
        if writer is not None:
            share = s.data.global_batch / (rows.stop - rows.start)
            host = {"flops_causal": flops.causal * share, "flops_full": flops.full * share} | run.labels()
            writer.put(step, metrics, host)
        stopped = stop.after(step)
        saves = checkpoints.due(step) or step == end or stopped
        watch.add(step, metrics, all_of_them=saves)
        if saves:
            checkpoints.save(step, state, run.kept(step))
        if stopped:
            break
    checkpoints.wait()
    return step


def _has_summary(directory: Path, step: int) -> bool:
    """Returns whether the summary of that step is there, or cannot be made: its rows are not."""
    try:
        written = json.loads((directory / "summary.json").read_text())["steps"] == step
    except (OSError, ValueError, KeyError, TypeError):
        written = False
    return (written and (directory / "loss.png").exists()) or not read_rows(directory / "metrics.jsonl")


def _finish(run: Run) -> dict[str, Any]:
    s, program, directory = run.sections, run.program, run.directory
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
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    peak = peak or measured_peak(devices)
    summary = summarise(rows, devices=len(devices), peak=peak, since=run.stage.start, **facts)
    try:
        write_whole(directory / "summary.json", json.dumps(summary, indent=1) + "\n")
        title = f"{program.num_parameters:,} parameters, {s.data.sequence_length:,} tokens"
        draw_loss(rows, directory / "loss.png", title)
        for name, draw in program.model.pictures.items():
            draw(rows, directory / name)
    except OSError as error:
        raise cannot_write(directory, error) from error
    return summary
