"""`python -m launch.plan topology=v5p:4x4x4 recipe=long_context ...`: will it fit? Compiles the training step of a recipe
ahead of time, with the real compiler of a TPU slice that need not be there, and prints memory and communication per chip.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launch.errors import DONE, NotCompiled, run_command

# HBM of one chip in GiB, from the vendor's data sheets.
HBM = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 192}

_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclass(frozen=True)
class Fit:
    """What a compiled step needs on each chip, in bytes, and the collectives in its program."""

    topology: str
    mesh: dict[str, int]
    parameters: int
    arguments: int  # parameters, optimizer state and batch
    temporaries: int
    peak: int
    collectives: dict[str, int]
    compile_seconds: float
    notes: Sequence[str] = ()  # what was chosen, and why

    def text(self) -> str:
        gib = 2**30
        chip = HBM.get(self.topology.split(":")[0])
        fits = "" if chip is None else f" of {chip} GiB: {'fits' if self.peak < chip * gib else 'DOES NOT FIT'}"
        used = {axis: size for axis, size in self.mesh.items() if size > 1}
        calls = ", ".join(f"{n} {kind}" for kind, n in self.collectives.items()) or "none"
        return (
            f"{self.topology}, mesh {used}, {self.parameters:,} parameters\n"
            f"memory per chip: {self.peak / gib:.2f} GiB{fits}\n"
            f"  state and batch {self.arguments / gib:.2f} GiB, temporaries {self.temporaries / gib:.2f} GiB\n"
            f"collectives in the program: {calls}\n"
            + "".join(f"{line}\n" for line in self.notes)
            + f"compiled in {self.compile_seconds:.0f} s"
        )


def collectives_of(text: str) -> dict[str, int]:
    """Returns how often each kind of collective stands in a compiled program; one inside a loop counts once."""
    found, fused = Counter(), False
    for line in text.splitlines():
        if line and not line.startswith(" "):
            # On a TPU a reduce-scatter is a fused computation of this name, written as an all-reduce and a slice.
            fused = line.startswith("%all-reduce-scatter")
        elif call := re.search(rf" = .*? ({'|'.join(_COLLECTIVES)})(?:-start)?\(", line):
            found["reduce-scatter" if fused else call[1]] += 1
    return {kind: found[kind] for kind in _COLLECTIVES if found[kind]}


def plan(sections: Any, topology: str) -> Fit:
    """Returns what the recipe's step needs on a topology ("v5p:4x4x4").

    Raises:
      ValueError: the recipe does not fit the mesh. `jax.errors.JaxRuntimeError`: the compiler refuses, as when a chip's
        memory does not hold the program; its message says by how much.
    """
    from ejdist.mesh import make_mesh
    from ejdist.training.program import make_program
    from kernels._core.ahead_of_time import tpu_topology

    devices = list(tpu_topology(topology).devices)
    mesh = make_mesh(**vars(sections.mesh), devices=devices)
    if mesh.size != len(devices):
        raise ValueError(f"the mesh {dict(mesh.shape)} has {mesh.size} devices, {topology} has {len(devices)}")
    program = make_program(sections, mesh)
    start = time.perf_counter()
    compiled = program.step.lower(program.state, program.batch).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    shared = memory.alias_size_in_bytes  # the state is donated: its outputs lie where its inputs were
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    peak = arguments + temporaries + memory.output_size_in_bytes - shared
    calls = collectives_of(compiled.as_text())
    notes = list(dict.fromkeys(program.notes))
    return Fit(topology, dict(mesh.shape), program.num_parameters, arguments, temporaries, peak, calls, seconds, notes)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the command; prints JSON instead of text with --json."""
    return run_command(argv, _main, lambda _: (__doc__ or "").strip(), needs_arguments=False)


def _main(arguments: list[str]) -> int:
    import jax

    as_json = "--json" in arguments
    named = [a.removeprefix("topology=") for a in arguments if a.startswith("topology=")]
    if len(named) != 1 or not named[0]:
        raise ValueError("give one topology=GENERATION:SHAPE, for example topology=v5p:4x4x4; --help says more")
    jax.config.update("jax_platforms", "cpu")  # the chips are described, not opened
    from recipes.schema import compose

    recipe = compose([a for a in arguments if not a.startswith("topology=") and a != "--json"])
    try:
        made = plan(recipe, named[0])
    except jax.errors.JaxRuntimeError as error:
        raise NotCompiled(f"the compiler refuses: {str(error)[:2000]}") from error
    print(json.dumps(vars(made), indent=1) if as_json else made.text())
    return DONE


if __name__ == "__main__":
    sys.exit(main())
