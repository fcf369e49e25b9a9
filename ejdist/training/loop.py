"""A training run from its recipe to its summary: opens it, makes its steps, and stops where it was told to."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ejdist.cluster.agreement import check_shared
from ejdist.cluster.ending import stepping
from ejdist.cluster.hosts import Hosts, lost
from ejdist.cluster.watchdog import ending_hangs
from ejdist.paths import ELSEWHERE
from ejdist.pictures import draw_loss
from ejdist.training.flops import peak_flops
from ejdist.training.goodput import NAME, Ledger, account, read
from ejdist.training.guards import PASSED
from ejdist.training.lock import let_go_at_the_end
from ejdist.training.metrics import cannot_write, read_rows, summarise, write_whole
from ejdist.training.opening import Run, open_run
from ejdist.training.pace import SAVES, Pace
from ejdist.training.program import TrainSections
from ejdist.training.resume import how_to_go_on
from ejdist.training.start import open_source
from ejdist.training.steps import Steps, begin, compile_stage, tell_stage
from ejdist.training.stop import stop_on_signals


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    finished: bool  # False: it was stopped early and can go on
    summary: dict[str, Any] | None


@let_go_at_the_end()
def train(
    sections: TrainSections,
    *,
    devices: list[Any] | None = None,
    log: Any = print,
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
    log = log if main else (lambda line: None)
    ledger = Ledger(main, began)
    hosts = Hosts(s.run.host_timeout)
    with hosts.together():
        opened = open_run(s, hosts, devices, log)
        given = getattr(s.model, "init_from", None)
        source = open_source(given, s.model) if given is not None and not opened.found else None
        weights = {} if source is None or hosts.count == 1 else {"model.init_from (digest)": source.digest()}
        # Compiled before anything is written, so that a recipe that cannot run leaves no trace.
        compiled = compile_stage(opened, "the first step", weights | {"checkpoint": opened.last}, ledger)
        check_shared(hosts, opened.directory)
        if opened.found and given is not None:
            log(f"model.init_from = {given!r} is not read: the run goes on from its own checkpoint")
        begun = begin(opened, opened.found, source, log)
        if begun.step == 0 and main and (rows := len(read_rows(opened.directory / "metrics.jsonl"))):
            where = opened.checkpoints.directory
            log(f"there is no checkpoint in {where}: beginning at step 1, in place of the {rows} rows of metrics.jsonl")
        if later := [(first, count) for first, count in begun.passed.rewinds if first > begun.step]:
            first, count = later[0][0], sum(count for _, count in later)
            kept = "as rewinds have said; remove it to take them after all"
            log(f"{opened.directory / PASSED}: steps from {first} on go past {count} batches, {kept}")
        opened.saves.begin(begun.step, log)
    run, start = begun.run, begun.step
    end = s.run.steps if s.run.stop_after is None else min(s.run.steps, s.run.stop_after)
    program, mesh, data = run.program, run.program.mesh, run.sections.data
    used = {axis: size for axis, size in mesh.shape.items() if size > 1}
    log(
        f"{program.num_parameters:,} parameters on {mesh.size} x {mesh.devices.flat[0].device_kind}, mesh {used or 'of one'}, "
        f"{data.global_batch} x {data.sequence_length:,} tokens a step, {s.sequence.scheme} in {program.order.name} order"
    )
    tell_stage(run, log)
    if s.guards.replicas_every and not compiled.replicas.every:
        log(f"guards.replicas_every = {s.guards.replicas_every} compares nothing: no two devices hold the same")
    if start >= end:
        more = how_to_go_on(s.run, s.optimizer, start)
        log(f"nothing to do: {run.directory} has {start} of {end} steps; {more}, or {ELSEWHERE}")
        # A disk may have been full, or the run killed, after the last checkpoint and before the summary.
        summary = _finish(run) if main and not _has_summary(run.directory, start) else None
        return Outcome(start, start >= s.run.steps, summary)
    pace = Pace(start, hosts, ledger, s.guards.stragglers_every, log)
    try:
        others = hosts.failed if hosts.count > 1 else None
        with hosts.together(), stop_on_signals() as stop, stepping(others, hosts.limit):
            ledger.open(run.directory)
            ledger.phase("restart", resumed=start)
            with ending_hangs(pace, hosts, s.guards.hang_seconds, SAVES):
                steps = Steps(s, source, stop, pace, ledger, log)
                run, last = steps.make(begun, compiled, end)
    except BaseException as error:
        if lost(error) is None:  # else a save that is being written would wait for that host
            with contextlib.suppress(Exception):  # what has ended the run is to be told
                run.saves.close()
        raise
    finally:
        pace.close()
    run.saves.close()
    if stop.signals and last < end:
        log(f"stopped by {signal.Signals(stop.signals[0]).name} after step {last}; the same command goes on from there")
    if main:
        log(str(account(read(run.directory / NAME))))
    summary = _finish(run) if main else None
    return Outcome(last, last >= s.run.steps, summary)


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
        "peak_source": f"none: no data sheet is known for {kind!r}" if peak is None else "data sheet, dense bf16",
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
