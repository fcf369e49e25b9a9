"""The state that a run starts or resumes from."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from ejdist.models.lora import BASE
from ejdist.models.parameters import num_parameters
from ejdist.paths import ELSEWHERE
from ejdist.training.checkpoint_format import CheckpointError, DamagedCheckpoint
from ejdist.training.checkpoint_policy import Tier
from ejdist.training.frozen_base import load_base
from ejdist.training.guards import SkippedBatches
from ejdist.training.one_replica import read_once
from ejdist.training.optimizer import cast_moments
from ejdist.training.program import Program
from ejdist.training.pytree_io import name_of
from ejdist.training.recorded import told_changes
from ejdist.training.resume import Past
from ejdist.training.setup import Run
from ejdist.training.start import Source, nested
from ejdist.training.step import TrainState


def resume(run: Run, found: list[tuple[int, Tier]], log: Any) -> tuple[Run, int, TrainState, dict[str, Any]]:
    """Returns (the run in its current stage, step, state, metadata) from the newest intact checkpoint. Damaged ones are set
    aside once an earlier one has been read.

    Args:
      found: the result of `Saves.find`; not empty.

    Raises:
      ValueError: it belongs to a run with another recipe. CheckpointError: none can be read, or it has another model.
    """
    saves = run.saves
    damaged: list[tuple[int, Tier, DamagedCheckpoint]] = []
    for step, where in found:
        try:
            run = run.in_stage_after(step)
            metadata = where.described(step)[0] if "optimizer.moments" in run.sections.run.allow_change else None
            like = run.state_like(metadata)
            state, metadata = where.restore(step, like, run.hosts.first_error)
            saved_step = metadata["data"].get("step", step)
            if saved_step != step:  # a renamed copy: its state and its batches would be of different steps
                raise DamagedCheckpoint(
                    f"checkpoint {where.directory / str(step)} holds the state of step {saved_step}"
                )
            break
        except DamagedCheckpoint as error:
            damaged.append((step, where, error))
    else:
        none = "it is the only one" if len(damaged) == 1 else f"nor can the {len(damaged) - 1} before it"
        first = damaged[0][2]
        raise CheckpointError(f"{first}; {none}: repair the storage, or {ELSEWHERE}") from first
    past = run.check(metadata, step)
    state = state._replace(opt_state=cast_moments(state.opt_state, run.program.state.opt_state))
    passed = metadata.get("guards", {}).get("passed", ())
    data = run.data_of(run.stage).after(metadata["data"], SkippedBatches(passed).number(step) + 1)
    new = past.changes[len(Past.of(metadata).changes) :]
    run = replace(run, data=data, past=past)
    for lost, place, error in damaged:
        log(f"{error}: resuming from the one before it; {saves.set_aside(lost, place)}")
    local = f", from the local checkpoint in {where.directory}{where.filled}" if where is saves.local else ""
    log(f"resuming from step {step} of {run.directory}{local}")
    before, steps = metadata["recipe"]["run.steps"], run.sections.run.steps
    if before != steps:
        log(f"run.steps changed from {before} to {steps}: optimizer.schedule now ends there")
    for change in new:
        others = {key: values for key, values in change["keys"].items() if key != "run.steps"}  # logged above
        for line in told_changes([change | {"keys": others}]):
            log(line)
    return run, step, state, metadata


def start_from(program: Program, source: Source, log: Any, first: Any = lambda moment, word: word) -> TrainState:
    """Returns the initial state with the parameters of a source.

    Args:
      first: `Hosts.first_error` of a run on several hosts.
    """

    def of_all(read: Callable[[], Any]) -> Any:
        found = read()
        # A host that cannot read does not come here: the others hear of its failure while they wait.
        first("the reading of model.init_from", None)
        return found

    wanted = {
        f"params.{name_of(path)}": like for path, like in jax.tree_util.tree_leaves_with_path(program.state.params)
    }
    wanted |= {
        f"buffers.{name_of(path)}": like for path, like in jax.tree_util.tree_leaves_with_path(program.state.buffers)
    }
    began = time.perf_counter()
    arrays = read_once({name: like for name, like in wanted.items() if name in source.leaves}, source.load, of_all)
    base, count = {}, sum(x.size for x in arrays.values())
    if program.model.base is not None:
        base = {BASE: load_base(program, source)}
        count += num_parameters(program.model.base.declared)
    for line in source.notes:
        log(line)
    log(f"{count:,} parameters read from {source.what} in {time.perf_counter() - began:.1f} s")
    tree = nested(arrays)
    return program.init_from({"params": tree.get("params", {}), "buffers": tree.get("buffers", {}) | base})
