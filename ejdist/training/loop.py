"""The training loop: builds the parts, feeds the devices, saves, and stops where it was told to."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ejdist.cluster.agreement import check_shared, environment, program_digest
from ejdist.cluster.ending import stepping
from ejdist.cluster.hosts import Hosts
from ejdist.mesh import make_mesh
from ejdist.training.checkpoint import CheckpointError, Checkpoints, DamagedCheckpoint
from ejdist.training.data import Data
from ejdist.training.data import build as build_data
from ejdist.training.flops import peak_flops, step_flops
from ejdist.training.leaves import name_of
from ejdist.training.metrics import (
    MetricsWriter,
    cannot_write,
    draw_loss,
    measured_peak,
    read_rows,
    summarise,
    write_whole,
)
from ejdist.training.program import Program, RunSection, TrainSections, local_rows, make_program, place_batch
from ejdist.training.resume import check_same_run, fingerprint, flat, how_to_go_on
from ejdist.training.step import TrainState
from ejdist.training.stop import Stop, Watch, stop_on_signals
from ejdist.weights.start import Source, nested, open_source


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    finished: bool  # False: it was stopped early and can go on
    summary: dict[str, Any] | None


def _check_run(run: RunSection) -> Path:
    """Returns the directory of the run. Raises ValueError, naming the key, before anything is compiled or written."""
    if run.steps < 1:
        raise ValueError(f"run.steps must be at least 1, got {run.steps}")
    if run.stop_after is not None and run.stop_after < 1:
        raise ValueError(f"run.stop_after must be at least 1, or null to make all steps, got {run.stop_after}")
    if run.cpu_devices < 1:
        raise ValueError(f"run.cpu_devices must be at least 1, got {run.cpu_devices}")
    if not 0 <= run.seed < 2**32:
        raise ValueError(f"run.seed must be in [0, 2**32), got {run.seed}")
    if not run.dir.strip():
        raise ValueError("run.dir is empty: name a folder for what the run writes, for example outputs/first")
    directory = Path(run.dir).expanduser()
    there = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    if not there.is_dir():
        raise ValueError(f"run.dir = {run.dir!r}: {there} is a file; name another folder, or remove it")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"run.dir = {run.dir!r}: {there} cannot be written; choose another folder, or mend its permissions"
        )
    return directory


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
        directory = _check_run(s.run)
        recipe = {key: value for key, value in flat(s).items() if not key.startswith("cluster.")}
        hosts.compare("the start", recipe | environment())
        mesh = make_mesh(**vars(s.mesh), devices=devices)
        program = make_program(s, mesh)
        checkpoints = Checkpoints(directory, s.checkpoint, hosts.limit)
        there = checkpoints.latest()
        given = getattr(s.model, "init_from", None)
        source = open_source(given, s.model) if given is not None and there is None else None
        data = _build_data(s)
        lowered = program.step.lower(program.state, program.batch)
        corpus = {name: data.cursor(0)[name] for name in ("tokenizer", "corpus")}
        hosts.compare("the first step", corpus | {"checkpoint": there, "program (digest)": program_digest(lowered)})
        # Compiled before anything is written, so that a recipe that cannot run leaves no trace.
        step = lowered.compile()
        check_shared(hosts, directory)
        if there is not None:
            start, state = _resume(s, program, checkpoints, data, hosts, say)
            if given is not None:
                say(f"model.init_from = {given!r} is not read: the run goes on from its own checkpoint")
        else:
            start, state = 0, program.init() if source is None else _start(program, source, say)
    for name in checkpoints.interrupted():
        say(f"ignoring {name}: a save that was cut off")
    end = s.run.steps if s.run.stop_after is None else min(s.run.steps, s.run.stop_after)
    used = {axis: size for axis, size in mesh.shape.items() if size > 1}
    say(
        f"{program.num_parameters:,} parameters on {mesh.size} x {mesh.devices.flat[0].device_kind}, mesh {used or 'of one'}, "
        f"{s.data.global_batch} x {s.data.sequence_length:,} tokens a step, {s.sequence.scheme} in {program.order.name} order"
    )
    for line in dict.fromkeys(program.notes):
        say(line)
    if start >= end:
        more = how_to_go_on(s.run, s.optimizer, start)
        say(f"nothing to do: {directory} has {start} of {end} steps; {more}, or choose another run.dir")
        # A disk may have been full, or the run killed, after the last checkpoint and before the summary.
        summary = _finish(s, program, directory) if main and not _has_summary(directory, start) else None
        return Outcome(start, start >= s.run.steps, summary)
    writer = MetricsWriter(directory, start, s.run.steps, tables_every=s.experts.load_every) if main else None
    try:
        with hosts.together(), stop_on_signals() as stop, stepping(hosts.failed, hosts.limit):
            last = _steps(s, program, step, data, state, checkpoints, writer, start, end, stop)
    finally:
        if writer is not None:
            writer.close()
        checkpoints.close()
    if stop.signals and last < end:
        say(f"stopped by {signal.Signals(stop.signals[0]).name} after step {last}; the same command goes on from there")
    summary = _finish(s, program, directory) if main else None
    return Outcome(last, last >= s.run.steps, summary)


def _start(program: Program, source: Source, say: Any) -> TrainState:
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
        say(line)
    say(f"{len(found)} parameters read from {source.what} in {time.perf_counter() - began:.1f} s")
    tree = nested(found)
    return program.init_from({"params": tree["params"], "buffers": tree.get("buffers", {})})


def _build_data(s: TrainSections) -> Data:
    """Returns the data of a recipe. Raises ValueError if the model's vocabulary does not hold its tokens."""
    data = build_data(s.data, seed=s.run.seed)
    if data.vocab_size > s.model.vocab_size:
        raise ValueError(
            f"model.vocab_size = {s.model.vocab_size} is smaller than the {data.vocab_size} tokens of data.tokenizer = "
            f"{s.data.tokenizer!r}; make it at least that"
        )
    return data


def _resume(
    s: TrainSections, program: Program, checkpoints: Checkpoints, data: Data, hosts: Hosts, say: Any
) -> tuple[int, Any]:
    """Returns (step, state) of the last checkpoint that is whole. One that is not is set aside, once an earlier one is read.

    Raises:
      ValueError: it is of another run than this recipe's. CheckpointError: none can be read, or it is of another model.
    """
    damaged: list[tuple[int, DamagedCheckpoint]] = []
    for step in checkpoints.steps():
        try:
            state, kept = checkpoints.restore(step, program.state, hosts.first)
            break
        except DamagedCheckpoint as error:
            damaged.append((step, error))
    else:
        none = "it is the only one" if len(damaged) == 1 else f"nor can the {len(damaged) - 1} before it"
        raise CheckpointError(f"{damaged[0][1]}; {none}: mend the storage, or choose another run.dir") from damaged[0][
            1
        ]
    directory = Path(s.run.dir).expanduser()
    check_same_run(kept["recipe"], s, step, directory)
    data.check_cursor(kept["data"])
    for lost, error in damaged:
        aside = hosts.say(
            "the place of a damaged checkpoint", str(checkpoints.set_aside(lost)) if hosts.index == 0 else ""
        )
        say(f"{error}: going on from the one before it; what is left of it is in {aside}")
    if damaged:
        checkpoints.reload()
    say(f"going on from step {step} of {directory}")
    before = kept["recipe"]["run.steps"]
    if before != s.run.steps:
        say(f"run.steps was {before} and is {s.run.steps}: optimizer.schedule ends there from here on")
    return step, state


def _steps(s, program, train_step, data: Data, state, checkpoints, writer, start: int, end: int, stop: Stop) -> int:
    """Returns the last step made. The loop: nothing in it waits for the step just started but a save of its state."""
    rows = local_rows(program)
    batches = data.iterator(start, end, rows)
    watch = Watch(Path(s.run.dir))
    step = start
    for step in range(start + 1, end + 1):
        batch = next(batches)
        flops = step_flops(program.model.flops, batch["segment_ids"])
        state, metrics = train_step(state, place_batch(batch, program, rows.start))
        if writer is not None:
            share = s.data.global_batch / (rows.stop - rows.start)
            host = {"flops_causal": flops.causal * share, "flops_full": flops.full * share}
            writer.put(step, metrics, host)
        stopped = stop.after(step)
        saves = checkpoints.due(step) or step == end or stopped
        watch.add(step, metrics, all_of_them=saves)
        if saves:
            checkpoints.save(step, state, {"recipe": fingerprint(s), "data": data.cursor(step)})
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
