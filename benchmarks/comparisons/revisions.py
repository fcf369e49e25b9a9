"""`python -m benchmarks.comparisons.revisions OLD [OP] [case=NAME,NAME] [seconds=LIMIT] [out=FILE] [old=REVISION]
[commit=]`: the GPU kernels of an operation before and after, in one run.

OLD is a folder with `kernels/` and `benchmarks/` of another revision:
`git archive REVISION kernels ejdist benchmarks | tar x -C OLD`. Each tree has a process of its own, and they take turns: five
rounds of each direction of each case, kernel times by the profiler. The time of first calls is that of forward, forward with
residuals and backward until they returned, with both processes compiling at once.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROUNDS, SAMPLE_US, MOST_CALLS = 5, 30_000, 40


def worker(tree: str, name: str) -> None:
    """Answers commands on stdin with a line of JSON each: `list`, `prepare CASE`, `time DIRECTION CALLS`."""
    sys.path.insert(0, tree)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a compiler prints is no answer
    import jax
    import jax.numpy as jnp

    import kernels
    from benchmarks.cases import is_float, split
    from benchmarks.programs import JaxPrograms
    from benchmarks.timing import kernel_seconds

    if not Path(kernels.__file__).resolve().is_relative_to(Path(tree).resolve()):
        raise SystemExit(f"kernels were imported from {kernels.__file__}, not from {tree}")
    op = kernels.operations()[name]
    cases = {case.name: case for case in op.cases if "bench" in case.tags}
    ready: dict[str, Any] = {}

    def timed(run: Any) -> tuple[Any, float]:
        start = time.perf_counter()
        result = run()
        jax.block_until_ready(result)
        return result, time.perf_counter() - start

    def prepare(case: str) -> dict[str, Any]:
        ready.clear()
        floats, data, static = split(op.case_inputs(cases[case], dtype="bfloat16"))

        def first(**arrays: Any) -> Any:
            outputs = op(**static, **arrays, platform="triton_gpu")
            return outputs[0] if isinstance(outputs, tuple) else outputs

        programs = JaxPrograms(first)
        inputs = programs.load(floats, data)
        jax.block_until_ready(inputs)
        outputs, forward = timed(lambda: programs.forward(inputs))
        sent = tuple(jax.random.normal(jax.random.key(1), x.shape).astype(x.dtype) for x in outputs[0])
        saved, save = timed(lambda: programs.save(inputs))
        gradients, backward = timed(lambda: programs.backward(saved, sent))
        ready.update(forward=lambda n: programs.forward(inputs), backward=lambda n: programs.backward(saved, sent))
        leaves = [x for x in jax.tree.leaves((outputs, gradients)) if is_float(x)]
        return {
            "first_call_s": [forward, save, backward],
            "sums": [float(jnp.sum(jnp.abs(x.astype(jnp.float32)))) for x in leaves],
        }

    for line in sys.stdin:
        command, *rest = line.split()
        try:
            if command == "list":
                answer: dict[str, Any] = {"cases": list(cases), "device": jax.devices()[0].device_kind}
            elif command == "prepare":
                answer = prepare(rest[0])
            else:
                answer = {"us": kernel_seconds(ready[rest[0]], jax.block_until_ready, int(rest[1])) * 1e6}
        except Exception as error:  # the other cases can still be timed
            answer = {"error": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps(answer), file=answers)


class _Tree:
    """A process with the kernels of one tree."""

    def __init__(self, tree: str, op: str):
        others = [p for p in os.environ.get("PYTHONPATH", "").split(":") if p and Path(p).resolve() != Path.cwd()]
        environment = os.environ | {"PYTHONPATH": ":".join([tree, *others])}
        command = [sys.executable, __file__, "--worker", tree, op]
        self.process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment)

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        print(line, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else {"error": "its process ended"}


def main(argv: list[str]) -> int:
    plain = [a for a in argv if "=" not in a]
    options = dict(a.split("=", 1) for a in argv if "=" in a)
    if not 1 <= len(plain) <= 2 or set(options) - {"case", "seconds", "out", "old", "commit"}:
        print(__doc__, file=sys.stderr)
        return 2
    op, start = plain[1] if len(plain) > 1 else "flash_attention", time.monotonic()
    trees = {"old": _Tree(plain[0], op), "new": _Tree(str(Path.cwd()), op)}
    listed = trees["new"].ask("list")
    cases = options["case"].split(",") if "case" in options else listed["cases"]
    result: dict[str, Any] = {}
    for case in cases:
        if time.monotonic() - start > float(options.get("seconds", "inf")):
            print(f"out of time before {case}")
            break
        with ThreadPoolExecutor(2) as pool:
            answers = pool.map(_Tree.ask, trees.values(), [f"prepare {case}"] * len(trees))
            rows = dict(zip(trees, answers, strict=True))
        result[case] = rows
        if any("error" in row for row in rows.values()):
            print(case, rows)
            continue
        for direction in ("forward", "backward"):
            calls = max(3, min(MOST_CALLS, int(SAMPLE_US / trees["old"].ask(f"time {direction} 3")["us"])))
            samples: dict[str, list[float]] = {name: [] for name in trees}
            for n in range(ROUNDS):
                for name in list(trees)[:: 1 if n % 2 else -1]:
                    samples[name].append(trees[name].ask(f"time {direction} {calls}")["us"])
            for name in trees:
                rows[name][f"{direction}_us"] = samples[name]
            old, new = (statistics.median(samples[name]) for name in ("old", "new"))
            print(f"{case:28s} {direction:8s} {new:8.0f} us, {new / old:.3f} of before", flush=True)
        old, new = (sum(rows[name]["first_call_s"]) for name in ("old", "new"))
        print(f"{case:28s} first calls {new:.1f} s, before {old:.1f} s", flush=True)
    if "out" in options:
        from benchmarks.measure import provenance  # not above: a worker imports the modules of its own tree

        about = {"device": listed["device"], "dtype": "bfloat16", "op": op, "old": options.get("old", plain[0])}
        about |= provenance(options.get("commit"))
        Path(options["out"]).write_text(json.dumps({**about, "cases": result}))
    for tree in trees.values():
        assert tree.process.stdin
        tree.process.stdin.close()
        tree.process.wait()
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
