"""A training run from recipe to summary: opens the run, runs its steps, and stops at the right step."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from ejdist.cluster.ending import bounded, stepping
from ejdist.cluster.hosts import Hosts
from ejdist.cluster.lost import patience
from ejdist.cluster.presence import write_hosts
from ejdist.cluster.watchdog import ending_hangs
from ejdist.device_rates import peak_flops
from ejdist.models.told import told_of_precision
from ejdist.paths import ELSEWHERE
from ejdist.pictures import draw_loss
from ejdist.training.frozen_base import check_base
from ejdist.training.goodput import NAME, Ledger, account, read
from ejdist.training.guards import SKIPPED_FILE
from ejdist.training.kept import keep, published_in
from ejdist.training.losses import Loss, LossTerms, digests, named_loss
from ejdist.training.metrics import RowsOfRun, read_evaluations, rows_in, write_atomic, write_error
from ejdist.training.program import TrainSections
from ejdist.training.resume import how_to_continue
from ejdist.training.run_lock import release_locks_at_exit
from ejdist.training.setup import Run, open_run
from ejdist.training.start import open_source
from ejdist.training.step_timer import SAVES, StepTimer
from ejdist.training.steps import Steps, check_stages, compile_stage, log_stage, start_state
from ejdist.training.stop import stop_on_signals
from ejdist.training.summary import summarise


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    step: the last one. finished: whether that is `run.steps`; if not, the same call resumes. summary: the content of
    summary.json, on the first process.
    """

    step: int
    finished: bool
    summary: dict[str, Any] | None


def train(
    sections: TrainSections,
    *,
    loss: Callable[..., LossTerms] | Loss | None = None,
    batches: Callable[[int], Mapping[str, Any]] | Iterable[Mapping[str, Any]] | None = None,
    devices: list[Any] | None = None,
    log: Any = print,
    began: float | None = None,
) -> Outcome:
    """Trains a run from where `run.dir` left it, and returns how it ended.

    The same call resumes, from the newest checkpoint that can be read and with the same losses as if it had not stopped; it
    refuses another recipe, loss or batches. On several hosts, call it on all of them, after `jax.distributed.initialize`.

    Writes to run.dir: metrics.jsonl, tables.jsonl (of experts), goodput.jsonl, evaluation.jsonl (with `evaluation.every`),
    tensorboard/, checkpoints/, and at the end summary.json, loss.png and the model's own pictures.

    Args:
      sections: a recipe, `recipes.schema.compose([KEY=VALUE, ...])`, which imports its plugins too; or made by hand,
        `TrainSections(model=DecoderConfig(...), ...)`.
      loss: instead of the recipe's: a function as `ejdist.plugins.register_loss` takes it, without a section; with references,
        a `Loss`. The run records its qualified name.
      batches: instead of the recipe's data: step, from 0 -> the batch of all hosts, the same each time; or an iterable of
        batches that begins anew each time. A batch has integer arrays [data.global_batch, data.sequence_length]: tokens,
        targets (-1: not counted), and, unless a row is one document, positions and segment_ids (-1: padding).
      devices: default: all.
      log: takes a line for the user; called by the first process only.
      began: start time of the process, in seconds since 1970, for the goodput ledger; default: now.

    Raises:
      ValueError: the recipe is wrong; nothing was written. CheckpointError: a checkpoint cannot be read or written.
      Diverged: the loss is not finite, or spiked, and `guards` says to stop. ReplicasDiffer: a device's bits differ from its
        replicas'. HostsDiffer: the hosts were started with different inputs; nothing was written. HostLost: a host does not
        answer.
    """
    if not isinstance(sections, TrainSections):
        raise ValueError(
            f"train: argument 'sections' is {type(sections).__name__}; give a recipe, recipes.schema.compose([KEY=VALUE]), "
            "or TrainSections(model=...)"
        )
    if loss is None:
        return _train(sections, batches, devices, log, began)
    with named_loss(loss) as name:
        return _train(replace(sections, loss=name), batches, devices, log, began)


@release_locks_at_exit()
def _train(sections: TrainSections, batches: Any, devices: list[Any] | None, log: Any, began: float | None) -> Outcome:
    """Trains, as `train` says."""
    s = sections
    main = jax.process_index() == 0
    log = log if main else (lambda line: None)
    ledger = Ledger(main, began)
    hosts = Hosts(s.run.host_timeout)
    with hosts.together():
        opened = open_run(s, hosts, devices, log, batches)
        init_from = getattr(s.model, "init_from", None)
        source = None
        if not opened.checkpoints_found:
            check_base(s.lora, init_from)
            if init_from is not None:
                source = open_source(init_from, s.model, [stage.sections.model for stage in opened.stages])
                if batches is None:
                    for line in source.told_of_tokenizer(opened.data.corpus.tokenizer.fingerprint):
                        log(line)
        weights = {} if source is None or hosts.count == 1 else {"model.init_from (digest)": source.digest()}
        if hosts.count > 1 and not opened.checkpoints_found:
            weights |= digests(opened.program.trained)
        opened.saves.check_shared()
        check_stages(opened)
        # Compile before writing anything, so that a recipe that cannot run leaves no trace.
        compiled = compile_stage(opened, "the first step", weights | {"checkpoint": opened.last}, ledger, log)
        if opened.checkpoints_found and init_from is not None:
            log(f"model.init_from = {init_from!r} is not read: the run resumes from its own checkpoint")
        current = start_state(opened, opened.checkpoints_found, source, log)
        if main and current.step == 0 and not opened.checkpoints_found:
            try:
                keep(published_in(init_from), opened.directory)
            except OSError as error:
                raise write_error(opened.directory, error) from error
        if main:
            write_hosts(opened.directory)
        if current.step == 0 and main and (rows := sum(1 for _ in rows_in(opened.directory / "metrics.jsonl"))):
            where = opened.checkpoints.directory
            log(f"no checkpoint in {where}: starting at step 1 and discarding the {rows} rows of metrics.jsonl")
        if later := [(first, count) for first, count in current.skipped.rewinds if first > current.step]:
            first, count = later[0][0], sum(count for _, count in later)
            log(
                f"{opened.directory / SKIPPED_FILE}: {count} batches are skipped from step {first} on, because of rewinds; "
                "remove the file to use them after all"
            )
        opened.saves.begin(current.step, log)
    run, start = current.run, current.step
    end = s.run.steps if s.run.stop_after is None else min(s.run.steps, s.run.stop_after)
    program, mesh, data = run.program, run.program.mesh, run.sections.data
    used = {axis: size for axis, size in mesh.shape.items() if size > 1}
    way = f"{run.sections.sequence.named} in {program.order.name} order"
    log(
        f"{program.num_parameters:,} parameters on {mesh.size} x {mesh.devices.flat[0].device_kind}, mesh {used or 'of one'}, "
        f"{data.global_batch} x {data.sequence_length:,} tokens per step, {way}"
    )
    for line in told_of_precision(run.sections.model):
        log(line)
    log_stage(run, log)
    if s.run.profile and start >= s.run.profile[1]:
        log(f"run.profile = {list(s.run.profile)}: these steps are done, so nothing is traced")
    if s.guards.replicas_every and not compiled.replicas.every:
        log(f"guards.replicas_every = {s.guards.replicas_every} compares nothing: no array is replicated")
    if start >= end:
        more = how_to_continue(s.run, s.optimizer, start)
        log(f"nothing to do: {run.directory} has {start} of {end} steps; {more}, or {ELSEWHERE}")
        # The disk may have filled up, or the run been killed, between the last checkpoint and the summary.
        summary = _finish(run) if main and not _has_summary(run.directory, start) else None
        return Outcome(start, start >= s.run.steps, summary)
    timer = StepTimer(start, hosts, ledger, s.guards.stragglers_every, log)
    try:
        others = hosts.failed if hosts.count > 1 else None
        with hosts.together(), stop_on_signals() as stop, stepping(others, hosts.limit):
            ledger.open(run.directory)
            ledger.phase("restart", resumed=start)
            with ending_hangs(timer, hosts, s.guards.hang_seconds, SAVES):
                steps = Steps(s, source, stop, timer, ledger, log)
                run, last = steps.run(current, compiled, end)
    except BaseException as error:
        bounded(run.saves.close, patience(error, hosts))  # an unfinished save waits for all hosts
        raise
    finally:
        timer.close()
    run.saves.close()
    if stop.signals and last < end:
        log(f"stopped by {signal.Signals(stop.signals[0]).name} after step {last}; the same command resumes from there")
    if main:
        log(str(account(read(run.directory / NAME))))
    summary = _finish(run) if main else None
    return Outcome(last, last >= s.run.steps, summary)


def _has_summary(directory: Path, step: int) -> bool:
    """Returns whether the summary of that step exists, or cannot be written because its rows are missing."""
    try:
        written = json.loads((directory / "summary.json").read_text())["steps"] == step
    except (OSError, ValueError, KeyError, TypeError):
        written = False
    return (written and (directory / "loss.png").exists()) or not rows_in(directory / "metrics.jsonl")


def _finish(run: Run) -> dict[str, Any]:
    s, program, directory = run.sections, run.program, run.directory
    rows, evaluations = RowsOfRun(directory), read_evaluations(directory)
    devices = list(program.mesh.devices.flat)
    kind = devices[0].device_kind
    peak = peak_flops(kind)
    facts = {
        "peak_source": f"none: no data sheet is known for {kind!r}" if peak is None else "data sheet, dense bf16",
        "mfu_causal_counts": "attention by the (query, key) pairs of the mask in use",
        "mfu_full_counts": "attention as sequence_length^2 in every layer",
        "device_kind": kind,
        "mesh": dict(program.mesh.shape),
        "sequence_length": s.data.sequence_length,
        "global_batch": s.data.global_batch,
        "parameters": program.num_parameters,
        "jax": jax.__version__,
        "goodput": account(read(directory / NAME)).as_json(),
        "evaluation": {name: evaluations[-1][name] for name in ("step", "loss", "tokens")} if evaluations else None,
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    summary = summarise(rows, devices=len(devices), peak=peak, since=run.stage.start, **facts)
    try:
        write_atomic(directory / "summary.json", json.dumps(summary, indent=1) + "\n")
        title = f"{program.num_parameters:,} parameters, {s.data.sequence_length:,} tokens"
        shown = rows.for_pictures()
        draw_loss(shown, directory / "loss.png", title, evaluations)
        for name, draw in program.model.pictures.items():
            draw(shown, directory / name)
    except OSError as error:
        raise write_error(directory, error) from error
    return summary
