"""`python -m benchmarks.comparisons.generation [model=8b] [slots=64] [prompt=4096] [new=512] [steps=100] [weights=int4]
[platform=triton] [out=FILE] [commit=]`

On one GPU, steps of a generation in which every slot writes a token, with random weights in bfloat16, or packed in a format of
`ejdist.packed`: the median of their times by the clock, of which a step has its host's share, tokens per second, and the bytes
that a step must read, which are every matrix once and the keys and values of all tokens so far, beside a copy of as many. Then
the kernels of a step by the profiler.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.comparisons.paged_decode import copied
from benchmarks.measure import provenance
from benchmarks.options import read
from benchmarks.timing import traced, union
from ejdist.generation import Engine
from ejdist.models.parameters import initialise
from recipes.schema import compose

DEFAULTS = {"model": "8b", "slots": 64, "prompt": 4096, "new": 512, "steps": 100}
DEFAULTS |= {"weights": "", "platform": "", "out": "", "commit": ""}
SHOWN = 15
TRACED = 5  # steps


def engine_of(asked: dict[str, Any]) -> tuple[Engine, Any]:
    """Returns (an engine with a request in every slot, the model's configuration)."""
    c = compose(["recipe=long_context", f"model={asked['model']}", "mesh=single", "model.compute_dtype=bfloat16"]).model
    model = c.build()

    @jax.jit
    def drawn() -> Any:
        params = initialise(model.declared, jax.random.key(0))
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 2 else x, params)

    slots, prompt, new = (asked[name] for name in ("slots", "prompt", "new"))
    how = {"weights": asked["weights"] or None, "platform": asked["platform"] or None}
    engine = Engine(model, drawn(), slots=slots, length=prompt + new, page=16, chunk=1024, donate=True, **how)
    rng = np.random.default_rng(0)
    for _ in range(slots):
        engine.submit(rng.integers(0, c.vocab_size, prompt), max_tokens=new, temperature=0)
    return engine, c


def matrices(engine: Engine, c: Any) -> int:
    """Returns the bytes of what a step reads of the parameters: not of an embedding from which it takes a few rows."""
    rows = 0 if c.tie_embeddings else engine._weights["embedding"].nbytes
    return sum(x.nbytes for x in jax.tree.leaves(engine._weights)) - rows


def kernels_of(engine: Engine) -> dict[str, Any]:
    """Returns the seconds of a step in which some kernel runs, those on which it waits for the host, and its kernels: calls and
    seconds of a step by name without number."""

    def steps() -> None:
        for _ in range(TRACED):
            engine.step()

    began = time.perf_counter()
    seen = traced(steps)
    wall = (time.perf_counter() - began) / TRACED
    calls, seconds = Counter(), Counter()
    for kernel in seen:
        name = re.sub(r"[._]?\d+$", "", kernel.name) if len(kernel.name) < 80 else kernel.name[:80]
        calls[name] += 1
        seconds[name] += (kernel.end - kernel.start) * 1e-9
    busy = union([(kernel.start, kernel.end) for kernel in seen]) * 1e-9 / TRACED
    span = (max(k.end for k in seen) - min(k.start for k in seen)) * 1e-9 / TRACED
    rows = [
        {"kernel": name, "calls": calls[name] / TRACED, "ms": 1e3 * total / TRACED}
        for name, total in seconds.most_common()
    ]
    return {"busy ms": 1e3 * busy, "span ms": 1e3 * span, "wall ms": 1e3 * wall, "kernels": rows}


def started(engine: Engine) -> float:
    """Returns the seconds that the host takes to start a step, with nothing that it waits for."""
    times = []
    for _ in range(TRACED):
        jax.block_until_ready(engine._kept)
        start = time.perf_counter()
        engine._start(engine._running, engine.slots, 1)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    asked = read(DEFAULTS, sys.argv[1:])
    engine, c = engine_of(asked)
    began, times, sizes, count = time.perf_counter(), [], [], 0
    token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * 2  # bytes of its keys and values
    while not engine.idle and len(times) < asked["steps"]:
        writing = [len(r.prompt) + len(r.tokens) for r in engine._running if r.filled == len(r.prompt)]
        start = time.perf_counter()
        count += len(engine.step())
        if len(writing) == asked["slots"]:
            times.append(time.perf_counter() - start)
            sizes.append(matrices(engine, c) + token * sum(writing))
    seconds, size, reach = statistics.median(times), statistics.median(sizes), copied(2**31)
    found = {
        "device": jax.devices()[0].device_kind,
        **provenance(asked["commit"] or None),
        **{name: asked[name] for name in ("weights", "platform")},
        "tokens until then": count,
        "seconds until then": time.perf_counter() - began,
        "step ms": 1e3 * seconds,
        "tokens/s": asked["slots"] / seconds,
        "matrices GB": matrices(engine, c) / 1e9,
        "read GB": size / 1e9,
        "TB/s": size / seconds / 1e12,
        "copy TB/s": reach / 1e12,
        "of a copy": size / seconds / reach,
    }
    print({n: round(x, 3) if isinstance(x, float) else x for n, x in found.items()}, flush=True)
    found |= {"start ms": 1e3 * started(engine)} | kernels_of(engine)
    print({n: round(x, 3) for n, x in found.items() if n in ("start ms", "busy ms", "span ms", "wall ms")})
    for row in found["kernels"][:SHOWN]:
        print(f"{row['ms']:9.3f} ms  {row['calls']:7.1f} calls  {row['kernel']}", flush=True)
    if asked["out"]:
        Path(asked["out"]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
