"""`python -m benchmarks.comparisons.tpu_schedules [case=NAME] [TOPOLOGY ...]`: what the TPU compiler makes of delta rules.

For each topology a row for each kernel: the bundles of its schedule for a step of its grid, and for a head of a chunk of 128
tokens; and the bytes of HBM that the program of each direction moves, beside what the operation declares. Nothing runs: a
bundle takes at least a cycle, and waiting for memory is in none. Bundles of a loop inside a step count as often as it runs. A
program is compiled in a process of its own, as the compiler reads where to write its schedules when it is loaded.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from kernels.engines.scan.pallas_delta_calls import group_of
from kernels.ops.delta_rule import op
from kernels.toolchains.simulate.ahead_of_time import TPU_TOPOLOGIES

COMPILE = "compile"  # how a process of one program is called

BUNDLE = re.compile(r"\s*(?:0x)?[0-9a-f]+\s+(?:\w\w)?\s*:\s*(>*)\s*\{")


def compiled(case_name: str, topology: str, direction: str) -> None:
    """Compiles a direction, and prints the bytes that it is said to move and declared to move."""
    import jax

    from kernels.toolchains.simulate import ahead_of_time

    case = next(case for case in op.cases if case.name == case_name)
    backward = direction == "backward"
    moved = op.work(op.bind(**op.case_inputs(case, dtype="bfloat16", shapes_only=True)))[backward].bytes
    function, arguments = ahead_of_time.call_of(op, case, platform="pallas", backward=False)
    inputs = (arguments, jax.eval_shape(function, arguments)) if backward else (arguments,)

    def gradients(arguments: Any, cotangents: Any) -> Any:
        return jax.vjp(function, arguments)[1](cotangents)

    program = ahead_of_time.compile_tpu(gradients if backward else function, *inputs, topology=topology)
    print("bytes", program.cost_analysis()["bytes accessed"], moved)


def bundles(schedule: Path) -> Counter[int]:
    """Returns the bundles of a schedule by the number of loops around them; the first is that over the grid."""
    matches = (BUNDLE.match(line) for line in schedule.read_text().splitlines())
    return Counter(len(match[1]) for match in matches if match)


def rows(case_name: str, topology: str, direction: str) -> list[str]:
    """Returns the rows of a direction on a topology."""
    dims = next(case for case in op.cases if case.name == case_name).dims
    keys, values, unit = group_of(dims["K"], dims["N"])
    with tempfile.TemporaryDirectory() as folder:
        settings = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [
            sys.executable,
            "-m",
            "benchmarks.comparisons.tpu_schedules",
            COMPILE,
            case_name,
            topology,
            direction,
        ]
        environment = {**os.environ, "LIBTPU_INIT_ARGS": settings}
        answer = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
        answered = re.search(r"^bytes (\S+) (\S+)$", answer, re.M)
        assert answered, answer
        moved, declared = map(float, answered.groups())
        steps = []
        for schedule in sorted(Path(folder).glob("*_kernel*-final_bundles.txt")):
            kernel = re.search(r"\d-(\w+_kernel)[.\d]*-\d+-final_bundles", schedule.name)
            if kernel:
                depths = bundles(schedule)
                step = depths[1] + depths[2] * (keys // unit)
                steps.append(f"`{kernel[1]}` {step:,} ({step / values:.0f} of a head)")
    traffic = f"{moved / 1e6:.0f} MB, {moved / declared:.2f} of declared"
    return [f"| {topology.split(':')[0]} | {direction} | {', '.join(steps)} | {traffic} |"]


def main(arguments: list[str]) -> None:
    if arguments[:1] == [COMPILE]:
        compiled(*arguments[1:])
        return
    case = next((word.removeprefix("case=") for word in arguments if word.startswith("case=")), "qwen3_next")
    print("| TPU | direction | bundles of a step | bytes of HBM |\n|---|---|---|---|")
    for topology in [word for word in arguments if "=" not in word] or TPU_TOPOLOGIES:
        for direction in ("forward", "backward"):
            print("\n".join(rows(case, topology, direction)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
