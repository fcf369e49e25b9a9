"""What a layer's products in 8 bits take on a TPU beside those in bfloat16, forward and backward, by what its compiler says.

    python -m benchmarks.comparisons.tpu_precision [tpus=tpu7x,v6e] [precisions=bf16,fp8_row] [layers=matrix,mlp]

It prints a table, and needs no TPU. Of what XLA computes the cycles are the compiler's own estimates. Of a Pallas kernel it has
none, and they are the larger of two: the bundles of its schedule, each of which takes at least a cycle, times the steps of its
grid; and the bytes that it declares over those that memory moves in a cycle, by data sheets. "products": XLA's, with what it
computes as it writes them. "kernels": Pallas', in brackets how many. "rest": XLA's other passes. A program is compiled in a
process of its own, as the compiler reads where to write its schedules when it is loaded. Of v5p, two cores of which are one
device, it says nothing.

`matrix` is a matrix of 4096 x 12288 and 8,192 rows; `mlp` a gated MLP of these sizes after a norm, as in an 8B model.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.comparisons.tpu_schedules import COMPILE, bundles

M, D, F = 8192, 4096, 12288
# Cores of a chip, and cycles a second that its peak in bfloat16 stands for.
CORES = {"v5e": 1, "v6e": 1, "tpu7x": 2}
CYCLES = {"v5e": 1.5e9, "v6e": 1.75e9, "tpu7x": 2.2e9}
ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
UNKNOWN = 2**60  # what it says of an instruction that it does not estimate


class Launch(NamedTuple):
    """A Pallas kernel as it was called."""

    name: str
    shapes: tuple[str, ...]  # of its results
    steps: int
    nbytes: int


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Yields a list that every `pallas_call` inside is added to."""
    import jax
    from jax.experimental import pallas as pl

    found: list[Launch] = []
    call = pl.pallas_call

    def noted(kernel: Callable, **how: Any) -> Any:
        shapes = tuple(",".join(map(str, x.shape)) for x in jax.tree.leaves(how["out_shape"]))
        moved = 0 if how["cost_estimate"] is None else how["cost_estimate"].bytes_accessed
        found.append(Launch(how["name"], shapes, math.prod(how["grid_spec"].grid), moved))
        return call(kernel, **how)

    with mock.patch.object(pl, "pallas_call", noted):
        yield found


def program(layer: str, precision: str) -> tuple[Callable, tuple[Any, ...]]:
    """Returns (a layer's forward and backward, the shapes of its arrays)."""
    import jax
    import jax.numpy as jnp

    import kernels
    from ejdist.precision import BF16, Matrix, Norm, narrow_mlp, narrow_products

    def matrix(x: Any, w: Any) -> Any:
        if precision == BF16:
            return x @ w
        return narrow_products([(["T", "D"], ["D", "F"], ["T", "F"])], x, None, [Matrix(w)], precision)[0]

    def mlp(x: Any, norm: Any, gate: Any, up: Any, down: Any) -> Any:
        if precision == BF16:
            h = kernels.rms_norm(x, norm)
            return kernels.gated_activation(h @ gate, h @ up) @ down
        return narrow_mlp(x, Norm(norm, 1e-6), (Matrix(gate), Matrix(up), Matrix(down)), precision, "silu")

    function, shapes, out = {
        "matrix": (matrix, [(M, D), (D, F)], (M, F)),
        "mlp": (mlp, [(M, D), (D,), (D, F), (D, F), (F, D)], (M, D)),
    }[layer]

    def both_ways(arrays: Any, d: Any) -> Any:
        y, pull = jax.vjp(function, *arrays)
        return y, pull(d)

    def of(shape: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32 if len(shape) == 1 else jnp.bfloat16)

    return both_ways, (tuple(map(of, shapes)), of(out))


def compiled(layer: str, precision: str, topology: str, folder: str) -> None:
    """Compiles a layer, and prints its cycles as JSON."""
    from ejdist.device_rates import memory_rate
    from kernels.toolchains.simulate import ahead_of_time

    function, arguments = program(layer, precision)
    with launches() as calls:
        made = ahead_of_time.compile_tpu(function, *arguments, topology=topology)
    generation = topology.split(":")[0]
    kind = ahead_of_time.tpu_topology(topology).devices[0].device_kind
    rate = memory_rate(kind) / CORES[generation] / CYCLES[generation]
    text = made.as_text()
    schedules = {  # by the name of the instruction
        match[1]: sum(n for depth, n in bundles(path.read_text()).items() if depth)
        for path in sorted(Path(folder).glob("*-final_bundles.txt"))
        if (match := re.search(r"\d-(\w+_kernel(?:\.\d+)?)-\d+-final_bundles", path.name))
    }
    found, kernels, alike = {"products": 0.0, "kernels": 0.0, "launched": 0, "rest": 0.0}, [], {}
    for line in text[text.index("\nENTRY") :].splitlines():
        estimate = ESTIMATE.search(line)
        if estimate and int(estimate[1]) < UNKNOWN:
            found["products" if "kind=kOutput" in line else "rest"] += int(estimate[1])
        if "tpu_custom_call" in line:
            name, shape = re.match(r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) custom-call\(", line).groups()
            operands = line.split("custom_call_target")[0].count("%") - 1
            kernels.append((name.split(".")[0], tuple(re.findall(r"\w+\[([\d,]+)\]", shape)), operands))
            if name in schedules:  # equal kernels have one
                alike[kernels[-1]] = schedules[name]
    for base, shapes, operands in kernels:
        (launch, *_) = [call for call in calls if (call.name, call.shapes) == (base, shapes)]
        found["kernels"] += max(alike[base, shapes, operands] * launch.steps, launch.nbytes / rate)
        found["launched"] += 1
    print(json.dumps(found))


def cycles(layer: str, precision: str, topology: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.comparisons.tpu_precision", COMPILE, layer, precision, topology]
        environment = os.environ | {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"}
        done = subprocess.run([*command, folder], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{layer} for {topology}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str]) -> None:
    if arguments[:1] == [COMPILE]:
        compiled(*arguments[1:])
        return
    from kernels.toolchains.simulate.ahead_of_time import TPU_TOPOLOGIES

    options = {"tpus": "tpu7x", "precisions": "bf16,fp8_tensor,fp8_row", "layers": "matrix,mlp"}
    options |= dict(word.split("=", 1) for word in arguments)
    print("million cycles")
    print("| layer | TPU | precision | all | products | kernels | rest |\n|---|---|---|---|---|---|---|")
    for layer in options["layers"].split(","):
        for topology in [t for t in TPU_TOPOLOGIES if t.split(":")[0] in options["tpus"].split(",")]:
            for precision in options["precisions"].split(","):
                x = cycles(layer, precision, topology)
                each = {name: n / 1e6 for name, n in x.items()}
                total = each["products"] + each["kernels"] + each["rest"]
                kernels = f"{each['kernels']:.2f} ({x['launched']})"
                row = [f"{total:.2f}", f"{each['products']:.2f}", kernels, f"{each['rest']:.2f}"]
                print(f"| `{layer}` | {topology.split(':')[0]} | `{precision}` | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
