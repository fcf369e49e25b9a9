"""What the TPU compiler makes of a recurrence's kernels: bundles of a chunk of 128 tokens and a head, and bytes of memory.

    python -m benchmarks.comparisons.linear_schedules linear_attention:head_16k state_space_v2:mamba2_8k

It prints a table for all generations, and needs no TPU. Bundles are those of the compiler's schedules of a direction's kernels,
all of them, divided by the heads of a program: a bundle takes at least a cycle, and waiting for memory is not in them. Bytes
are those of the inputs and outputs of every instruction of the program that lie in main memory, over those of the inputs and
outputs of the direction and of the states that a backward stores there (written and read).
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kernels
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.pallas_linear_calls import blocks_of
from kernels.toolchains.simulate.ahead_of_time import TPU_TOPOLOGIES, call_of, compile_tpu

BYTES = {"bf16": 2, "f32": 4, "s32": 4, "pred": 1}
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy-done"}


def program(op: Any, case: Any, backward: bool, platform: str, cfg: Any) -> tuple[Any, tuple]:
    """Returns (a function, its arguments) of one direction; a backward takes cotangents, and its forward is not run."""
    forward, arrays = call_of(op, case, platform=platform, cfg=cfg, backward=False)
    if not backward:
        return forward, (arrays,)
    outputs = jax.eval_shape(forward, arrays)
    return (lambda arrays, d: jax.vjp(forward, arrays)[1](d)), (arrays, outputs)


def size_of(shape: str) -> int:
    """Returns the bytes of the arrays of an instruction's type that lie in main memory, without what tiles are padded by."""
    total = 0
    for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\]\{([^}]*)\}", shape):
        if dtype in BYTES and "S(" not in layout:
            total += BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
    return total


def moved(hlo: str) -> tuple[int, int]:
    """Returns (bytes that the instructions of a program read and write, those of states written for its backward)."""
    entry = hlo[hlo.index("ENTRY") :]
    sizes: dict[str, int] = {}
    total = states = 0
    for line in entry.splitlines():
        instruction = re.match(r"\s*(?:ROOT )?(%[\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)", line)
        if not instruction:
            continue
        name, shape, kind, arguments = instruction.groups()
        sizes[name] = size_of(shape)
        if kind in FREE:
            continue
        wrote = 0 if kind == "copy-start" else sizes[name]
        total += wrote + sum(sizes.get(x, 0) for x in re.findall(r"%[\w.\-]+", arguments))
        if kind == "custom-call" and not shape.startswith("("):
            states += wrote
    return total, states


def row(op_name: str, case_name: str, topology: str, chunk: int, dump: Path) -> str:
    """Returns a row of the table, from a process whose compiler writes its schedules to `dump`."""
    op = kernels.operations()[op_name]
    case = next(c for c in op.cases if c.name == case_name)
    call = op.bind(**op.case_inputs(case, dtype="bfloat16", shapes_only=True))
    heads, cells = blocks_of(call.dims["N"], call.dims["K"]).heads, []
    for backward in (False, True):
        before = set(dump.iterdir())
        function, arguments = program(op, case, backward, "pallas", ChunkConfig(chunk))
        compiled = compile_tpu(function, *arguments, topology=topology)
        written = [
            path for path in set(dump.iterdir()) - before if re.search("linear_.*schedule-analysis_final", path.name)
        ]
        totals = [re.search(r"total scheduled bundles:\s+(\d+)", path.read_text()) for path in written]
        bundles = sum(int(x[1]) for x in totals if x) / heads / (chunk / 128)
        memory, (total, states) = compiled.memory_analysis(), moved(compiled.as_text())
        inputs = jax.tree.leaves(arguments)
        declared = sum(x.size * np.dtype(x.dtype).itemsize for x in inputs)
        declared += sum(
            x.size * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(jax.eval_shape(function, *arguments))
        )
        declared += 2 * states if backward else 0
        cells += [f"{bundles:,.0f}", f"{total / 1e6:,.0f}", f"{total / declared:.2f}"]
        cells += [f"{memory.temp_size_in_bytes / 1e6:,.0f}"] if backward else []
    return f"| `{case_name}` | {topology.split(':')[0]} | {chunk} | " + " | ".join(cells) + " |"


def main(cases: list[str]) -> None:
    print(
        "| case | TPU | chunk | forward: bundles | MB | of declared | backward: bundles | MB | of declared | temporaries, MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for case in cases:
        for topology in TPU_TOPOLOGIES:
            for chunk in (128, 256):
                with tempfile.TemporaryDirectory() as dump:
                    flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
                    command = [
                        sys.executable,
                        "-m",
                        "benchmarks.comparisons.linear_schedules",
                        "--row",
                        *case.split(":"),
                        topology,
                        str(chunk),
                        dump,
                    ]
                    child = {**os.environ, "LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu"}
                    done = subprocess.run(command, env=child, capture_output=True, text=True, check=False)
                    if done.returncode:
                        raise RuntimeError(f"{case} for {topology}: {done.stderr.strip().splitlines()[-1]}")
                    print(done.stdout.strip(), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--row"]:
        print(row(*sys.argv[2:5], int(sys.argv[5]), Path(sys.argv[6])))
    else:
        main(sys.argv[1:])
