"""A training step compiled ahead of time for devices that need not be there: its memory and its collectives."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ejdist.mesh import make_mesh
from ejdist.planning.targets import Target
from ejdist.training.program import make_program

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclass(frozen=True)
class Compiled:
    """Bytes on each device, and the collectives in the program. arguments: parameters, optimizer state and batch. host: bytes
    of a device in the memory of its host."""

    mesh: dict[str, int]
    parameters: int
    arguments: int
    temporaries: int
    peak: int
    collectives: dict[str, int]
    compile_seconds: float
    notes: Sequence[str] = field(default=())  # what was chosen, and why
    host: int = 0


class DoesNotFit(Exception):
    """A compiler refuses a program. memory: because it exceeds a device's memory; the message says by how much."""

    def __init__(self, message: str, *, memory: bool) -> None:
        super().__init__(message)
        self.memory = memory


def compiled_step(sections: Any, target: Target) -> Compiled:
    """Returns what the recipe's step needs on a target.

    Raises:
      ValueError: the recipe does not fit the mesh. NoCompiler: none can be asked.
      jax.errors.JaxRuntimeError: the compiler refuses, for example a program that exceeds a TPU's memory; its message says by
        how much.
    """
    devices = target.devices()
    mesh = make_mesh(**vars(sections.mesh), devices=devices)
    if mesh.size != len(devices):
        raise ValueError(f"the mesh {dict(mesh.shape)} has {mesh.size} devices, {target.name} has {len(devices)}")
    program = make_program(sections, mesh)
    start = time.perf_counter()
    with target.lowering():
        lowered = program.lower()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    shared = memory.alias_size_in_bytes  # the state is donated: its outputs lie where its inputs were
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    peak = arguments + temporaries + memory.output_size_in_bytes - shared
    host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
    host += memory.host_output_size_in_bytes - memory.host_alias_size_in_bytes
    calls = collectives_of(compiled.as_text())
    notes = list(dict.fromkeys(program.notes))
    return Compiled(dict(mesh.shape), program.num_parameters, arguments, temporaries, peak, calls, seconds, notes, host)


def does_not_fit(error: jax.errors.JaxRuntimeError) -> bool:
    """Returns whether a compiler refused because the memory of a device is too small."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Ran out of memory" in str(error)


def collectives_of(text: str) -> dict[str, int]:
    """Returns how often each kind of collective occurs in a compiled program; one inside a loop counts once."""
    counts, fused = Counter(), False
    for line in text.splitlines():
        if line and not line.startswith(" "):
            # On a TPU a reduce-scatter is a fused computation of this name, written as an all-reduce and a slice.
            fused = line.startswith("%all-reduce-scatter")
        elif call := re.search(rf" = .*? ({'|'.join(COLLECTIVES)})(?:-start)?\(", line):
            counts["reduce-scatter" if fused else call[1]] += 1
    return {kind: counts[kind] for kind in COLLECTIVES if counts[kind]}
