"""The training loop: builds the parts, feeds the devices, saves, and stops where it was told to."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ejdist.bound import bind_ops
from ejdist.layout import ACTIVATIONS, PARAMETERS, replicated, sharding
from ejdist.mesh import MeshSection, make_mesh
from ejdist.models import decoder
from ejdist.models.parameters import initialise, map_declared, num_parameters
from ejdist.sequence.order import Order
from ejdist.training.checkpoint import Checkpoints, CheckpointSection
from ejdist.training.data import Data, DataSection
from ejdist.training.data import build as build_data
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
from ejdist.training.optimizer import OptimizerSection, make_optimizer
from ejdist.training.step import TrainState, init_state, make_train_step


@dataclass
class RunSection:
    """The `run` section of a recipe."""

    dir: str = "outputs/run"  # everything that the run writes; a run that is there goes on
    steps: int = 200  # of the whole run; the schedule ends there
    stop_after: int | None = None  # stop at this step, with a checkpoint; the schedule does not change
    seed: int = 0  # of parameters and data
    cpu_devices: int = 4  # virtual devices where there is no accelerator and a mesh size is -1


@dataclass
class SequenceSection:
    """The `sequence` section of a recipe."""

    scheme: str = "ring"  # how keys and values travel over sp: ring, all_gather
    order: str = "zigzag"  # how tokens lie on sp: contiguous, zigzag, striped


@dataclass
class TrainSections:
    """What a training run is made from; `recipes.schema.Recipe` is this."""

    run: RunSection = field(default_factory=RunSection)
    model: decoder.DecoderConfig = field(default_factory=decoder.DecoderConfig)
    mesh: MeshSection = field(default_factory=MeshSection)
    sequence: SequenceSection = field(default_factory=SequenceSection)
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    accumulation: int = 1  # microbatches of a step
    z_loss: float = 1e-4  # weight of the squared log-sum-exp of the logits
    platform: str | None = None  # backend of every operation; null for the fastest


@dataclass(frozen=True)
class Program:
    """A training step on a mesh, and where its arguments lie."""

    config: decoder.DecoderConfig
    mesh: jax.sharding.Mesh
    order: Order
    step: Any  # jitted (state, batch) -> (state, metrics)
    init: Any  # jitted () -> state
    state: Any  # tree of jax.ShapeDtypeStruct with shardings
    batch: dict[str, jax.ShapeDtypeStruct]
    schedule: Any
    num_parameters: int


def make_program(sections: TrainSections, mesh: jax.sharding.Mesh) -> Program:
    """Returns the step of a recipe on a mesh. Nothing runs and nothing is allocated: it may be compiled ahead of time.

    Raises:
      ValueError: a size does not fit the mesh; names the parameter or key, and the remedy.
    """
    s, config = sections, sections.model
    config.validate()
    order = Order(s.sequence.order, MeshSection.sequence_shards(mesh))
    length, rows = s.data.sequence_length, s.data.global_batch
    order.indices(length)
    if s.accumulation < 1 or rows % s.accumulation:
        raise ValueError(f"data.global_batch = {rows} must be a multiple of accumulation = {s.accumulation}")
    if not (s.z_loss >= 0 and math.isfinite(s.z_loss)):
        raise ValueError(f"z_loss must be a number that is not negative, got {s.z_loss}; 0 for none")
    part = (rows // s.accumulation, length)
    sharding(mesh, ("B", "T"), ACTIVATIONS, shape=part, what="a microbatch (data.global_batch, data.sequence_length)")
    for dim, key, heads in (("N", "num_heads", config.num_heads), ("K", "num_kv_heads", config.num_kv_heads)):
        sharding(mesh, (dim,), ACTIVATIONS, shape=(heads,), what=f"model.{key}")
    declared = decoder.declare(config)
    ops = bind_ops(mesh, order=order, scheme=s.sequence.scheme, platform=s.platform)
    decayed = map_declared(lambda _, p: p.decay, declared)
    optimizer, schedule = make_optimizer(s.optimizer, s.run.steps, decayed)

    def loss(params: Any, batch: dict[str, jax.Array]) -> Any:
        return decoder.loss(params, batch, config, ops, z_loss=s.z_loss)

    def make_state() -> TrainState:
        return init_state(initialise(declared, jax.random.key(s.run.seed)), optimizer)

    placed = map_declared(
        lambda path, p: sharding(mesh, p.dims.split(), PARAMETERS, shape=p.shape, what=f"parameter {path}"), declared
    )
    shapes = jax.eval_shape(make_state)
    shardings = _state_shardings(shapes, placed, mesh)
    state = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)
    at = sharding(mesh, ("B", "T"), ACTIVATIONS, shape=(rows, length), what="the batch (data.global_batch)")
    fields = ("tokens", "targets", "positions", "segment_ids")
    batch = {name: jax.ShapeDtypeStruct((rows, length), np.int32, sharding=at) for name in fields}

    def place(grads: Any) -> Any:
        return jax.lax.with_sharding_constraint(grads, placed)

    step = jax.jit(
        make_train_step(loss, optimizer, accumulation=s.accumulation, place=place),
        donate_argnums=0,
        in_shardings=(shardings, dict.fromkeys(fields, at)),
        out_shardings=(shardings, replicated(mesh)),
    )
    init = jax.jit(make_state, out_shardings=shardings)
    return Program(config, mesh, order, step, init, state, batch, schedule, num_parameters(declared))


def _state_shardings(shapes: Any, placed: Any, mesh: jax.sharding.Mesh) -> Any:
    """Returns a sharding for each leaf of the state: the moments lie with their parameters, the rest is replicated."""
    whole = replicated(mesh)
    structure = jax.tree.structure(placed)

    def is_params(x: Any) -> bool:
        return jax.tree.structure(x) == structure

    return jax.tree.map(lambda x: placed if is_params(x) else whole, shapes, is_leaf=is_params)


def _place(batch: dict[str, np.ndarray], program: Program, first_row: int) -> dict[str, jax.Array]:
    """Returns the batch on the devices, permuted to the order; `batch` has the rows from `first_row` that this host needs."""

    def put(name: str) -> jax.Array:
        rows = program.order.permute(batch[name], axis=1)
        like = program.batch[name]

        def shard(index: Any) -> np.ndarray:
            b, t = index
            start, stop, _ = b.indices(like.shape[0])
            return rows[start - first_row : stop - first_row, t]

        return jax.make_array_from_callback(like.shape, like.sharding, shard)

    return {name: put(name) for name in program.batch}


def _local_rows(program: Program) -> slice:
    """Returns the rows of the global batch that this host's devices hold."""
    like = program.batch["tokens"]
    index = like.sharding.addressable_devices_indices_map(like.shape).values()
    spans = [at[0].indices(like.shape[0])[:2] for at in index if at]
    return slice(min(s for s, _ in spans), max(e for _, e in spans))


class _Stop:
    """Whether the run was told to stop. All processes hear of it before the same step: each makes the same steps, or the
    others would wait for it for ever."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def after(self, step: int) -> bool:
        """Returns whether this step, which has been started, is the last. Every process asks after every step."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.signals.append(signal.SIGTERM)
        return bool(self.signals)


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[_Stop]:
    """Yields what SIGTERM and SIGINT are told to; a second one has its usual effect."""
    stop, before = _Stop(), {}

    def note(number: int, frame: Any) -> None:
        signal.signal(number, before[number])
        if jax.process_count() > 1:
            # JAX listens for SIGTERM itself, and brings all processes to agree on a step.
            signal.raise_signal(signal.SIGTERM)
        else:
            stop.signals.append(number)

    numbers = (signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGTERM, signal.SIGINT)
    with contextlib.suppress(ValueError):  # not the main thread: whoever runs this handles signals
        for number in numbers:
            before[number] = signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fingerprint(sections: TrainSections) -> dict[str, Any]:
    """Returns what must not change when a run goes on: what decides the losses, and not where or how fast."""
    model = {k: v for k, v in vars(sections.model).items() if k not in ("remat",)}
    return json.loads(
        json.dumps(
            {"run.steps": sections.run.steps, "accumulation": sections.accumulation, "z_loss": sections.z_loss}
            | {f"model.{k}": v for k, v in model.items()}
            | {f"optimizer.{k}": v for k, v in vars(sections.optimizer).items()}
        )
    )


def _check_same_run(stored: dict[str, Any], now: dict[str, Any], where: Path) -> None:
    changed = [
        f"{k}: was {stored.get(k)}, is {now.get(k)}" for k in sorted({*stored, *now}) if stored.get(k) != now.get(k)
    ]
    if changed:
        raise ValueError(
            f"the run in {where} was started with another recipe: {'; '.join(changed[:5])}; restore it, or choose another "
            "run.dir"
        )


class Diverged(RuntimeError):
    """The loss is no number any more; the message says since when, and what to do."""


# Steps between the one started and the one whose loss is looked at: by then it is known, and looking does not wait.
_LAG = 8


class _Watch:
    """Stops a run whose loss or gradient is not finite, before a checkpoint of it is written. Every process sees the same
    numbers, so all stop at the same step."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._steps = directory, collections.deque()

    def add(self, step: int, metrics: dict[str, jax.Array], *, all_of_them: bool) -> None:
        """Raises Diverged. `all_of_them` looks at this step too, and waits for it: a save of its state does so anyway."""
        self._steps.append((step, metrics["loss"], metrics["grad_norm"]))
        while len(self._steps) > (0 if all_of_them else _LAG):
            at, loss, norm = self._steps.popleft()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise Diverged(
                    f"step {at} has loss {float(loss)} and gradient norm {float(norm)}; nothing was saved since. Start again "
                    f"in {self._directory} to go on from the last checkpoint, or in another run.dir with a lower "
                    "optimizer.learning_rate or more optimizer.warmup_steps"
                )


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

    Writes to run.dir: metrics.jsonl, tensorboard/, checkpoints/, and at the end summary.json and loss.png.

    Args:
      devices: default: all.
      say: takes a line for the user; only the first process calls it.

    Raises:
      ValueError: the recipe is wrong; nothing has been written. CheckpointError: a checkpoint cannot be read or written.
      Diverged: the loss is not a number any more.
    """
    s = sections
    main = jax.process_index() == 0
    say = say if main else (lambda line: None)
    directory = _check_run(s.run)
    mesh = make_mesh(**vars(s.mesh), devices=devices)
    program = make_program(s, mesh)
    checkpoints = Checkpoints(directory, s.checkpoint)
    start = checkpoints.latest()
    data = build_data(s.data, seed=s.run.seed)
    if data.vocab_size > s.model.vocab_size:
        raise ValueError(
            f"model.vocab_size = {s.model.vocab_size} is smaller than the {data.vocab_size} tokens of data.tokenizer = "
            f"{s.data.tokenizer!r}; make it at least that"
        )
    # Compiled before anything is written, so that a recipe that cannot run leaves no trace.
    step = program.step.lower(program.state, program.batch).compile()
    if start is None:
        start, state = 0, program.init()
    else:
        state, kept = checkpoints.restore(start, program.state)
        _check_same_run(kept["recipe"], _fingerprint(s), directory)
        data.check_cursor(kept["data"])
        say(f"going on from step {start} of {directory}")
    for name in checkpoints.interrupted():
        say(f"ignoring {name}: a save that was cut off")
    end = s.run.steps if s.run.stop_after is None else min(s.run.steps, s.run.stop_after)
    used = {axis: size for axis, size in mesh.shape.items() if size > 1}
    say(
        f"{program.num_parameters:,} parameters on {mesh.size} x {mesh.devices.flat[0].device_kind}, mesh {used or 'of one'}, "
        f"{s.data.global_batch} x {s.data.sequence_length:,} tokens a step, {s.sequence.scheme} in {program.order.name} order"
    )
    if start >= end:
        key = "run.steps" if end == s.run.steps else "run.stop_after"
        say(f"nothing to do: {directory} has {start} of {end} steps; raise {key}, or choose another run.dir")
        # A disk may have been full, or the run killed, after the last checkpoint and before the summary.
        summary = _finish(s, program, directory) if main and not _has_summary(directory, start) else None
        return Outcome(start, start >= s.run.steps, summary)
    writer = MetricsWriter(directory, start, s.run.steps) if main else None
    try:
        with _stop_on_signals() as stop:
            last = _steps(s, program, step, data, state, checkpoints, writer, start, end, stop)
    finally:
        if writer is not None:
            writer.close()
        checkpoints.close()
    if stop.signals and last < end:
        say(f"stopped by {signal.Signals(stop.signals[0]).name} after step {last}; the same command goes on from there")
    summary = _finish(s, program, directory) if main else None
    return Outcome(last, last >= s.run.steps, summary)


def _steps(s, program, train_step, data: Data, state, checkpoints, writer, start: int, end: int, stop: _Stop) -> int:
    """Returns the last step made. The loop: nothing in it waits for the step just started but a save of its state."""
    rows = _local_rows(program)
    batches = data.iterator(start, end, rows)
    watch = _Watch(Path(s.run.dir))
    step = start
    for step in range(start + 1, end + 1):
        batch = next(batches)
        flops = step_flops(program.config, batch["segment_ids"])
        state, metrics = train_step(state, _place(batch, program, rows.start))
        if writer is not None:
            share = s.data.global_batch / (rows.stop - rows.start)
            host = {"flops_causal": flops.causal * share, "flops_full": flops.full * share}
            writer.put(step, metrics, {"learning_rate": float(program.schedule(step - 1)), **host})
        stopped = stop.after(step)
        saves = checkpoints.due(step) or step == end or stopped
        watch.add(step, metrics, all_of_them=saves)
        if saves:
            checkpoints.save(step, state, {"recipe": _fingerprint(s), "data": data.cursor(step)})
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
    except OSError as error:
        raise cannot_write(directory, error) from error
    return summary
