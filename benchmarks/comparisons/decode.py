"""`python -m benchmarks.comparisons.decode [requests=64] [heads=32] [width=128] [tokens=64] [out=FILE]`

On one GPU, tokens of a delta rule one after another, as in serving: a program of `tokens` steps over states that it owns,
[requests, heads, width, width] in rows, or in a pool of twice as many slots. Numbers first: states after all tokens are those
of the `xla` backend. Microseconds of a step are of the clock, the median of 9 programs; bytes are those that a step must move,
each state once in and once out. Beside it a copy of as many bytes, the most that the memory does.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels
from benchmarks.options import read
from kernels.ops.delta_rule import op, pool_op

DEFAULTS = {"requests": 64, "heads": 32, "width": 128, "tokens": 64, "out": ""}


def token(requests: int, heads: int, width: int) -> dict[str, jax.Array]:
    """Returns what each step adds: unit keys, so that states stay of one size."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = {
        n: jax.random.normal(k, (requests, heads, width)) for n, k in zip(("query", "key", "value"), keys, strict=False)
    }
    x["key"] /= jnp.linalg.norm(x["key"], axis=-1, keepdims=True)
    x = {n: y.astype(jnp.bfloat16) for n, y in x.items()}
    x["beta"] = jax.random.uniform(keys[3], (requests, heads))
    return x | {"g": -jax.random.uniform(keys[4], (requests, heads, 1))}


def rows(x: dict[str, jax.Array], platform: str) -> Callable[[Any], Any]:
    def step(states: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, after = op(**{n: y[:, None] for n, y in x.items()}, initial_state=states, platform=platform)
        return after, out[:, 0]

    return step


def pool(x: dict[str, jax.Array], slots: jax.Array, platform: str) -> Callable[[Any], Any]:
    def step(states: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, after = pool_op(**x, state_pool=states, state_indices=slots, platform=platform)
        return after, out

    return step


def timed(step: Callable[[Any], Any], states: jax.Array, tokens: int) -> tuple[float, jax.Array]:
    """Returns (seconds of a step, the states after the first program)."""

    @functools.partial(jax.jit, donate_argnums=0)
    def run(states: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(lambda states, _: step(states), states, None, tokens)

    first, _ = run(jnp.array(states, copy=True))
    kept, times = np.asarray(first, np.float32), []
    for _ in range(9):
        start = time.perf_counter()
        first, _ = jax.block_until_ready(run(first))
        times.append((time.perf_counter() - start) / tokens)
    return statistics.median(times), kept


def main() -> None:
    asked = read(DEFAULTS, sys.argv[1:])
    requests, heads, width, tokens = (asked[n] for n in ("requests", "heads", "width", "tokens"))
    x, found = token(requests, heads, width), []
    slots = jnp.asarray(np.random.default_rng(0).permutation(2 * requests)[:requests], jnp.int32)
    for dtype in ("float32", "bfloat16"):
        moved = 2 * requests * heads * width * width * jnp.dtype(dtype).itemsize
        half = jnp.ones(moved // 2 // 4, jnp.float32)
        seconds, _ = timed(lambda y: (y + 1, y[:1]), half, tokens)
        found.append(
            {
                "states": f"a copy of as many bytes, {dtype}",
                "by": "xla",
                "us": seconds * 1e6,
                "TB/s": moved / seconds / 1e12,
            }
        )
        kinds: dict[str, Any] = {} if dtype == "bfloat16" else {"rows": (functools.partial(rows, x), (requests, 1))}
        kinds["pool"] = functools.partial(pool, x, slots), (2 * requests,)
        for kind, (made, lead) in kinds.items():
            states = jax.random.normal(jax.random.key(1), (*lead, heads, width, width), dtype)
            wanted = None
            for platform in ("xla", "triton"):
                seconds, after = timed(made(platform), states, tokens)
                wanted = after if wanted is None else wanted
                off = float(np.linalg.norm(after - wanted) / np.linalg.norm(wanted))
                if off > (1e-5 if dtype == "float32" else 2e-2):
                    raise SystemExit(
                        f"{kind} of {dtype} by {platform}: states are off by {off:.1e}, so nothing is timed"
                    )
                row = {
                    "states": f"{kind}, {dtype}",
                    "by": platform,
                    "us": seconds * 1e6,
                    "TB/s": moved / seconds / 1e12,
                }
                found.append(row | {"off": off})
    for row in found:
        print(f"{row['states']:36} {row['by']:8} {row['us']:8.1f} us  {row['TB/s']:.2f} TB/s  {row.get('off', 0):.1e}")
    if asked["out"]:
        device = jax.devices()[0].device_kind
        Path(asked["out"]).write_text(json.dumps({"device": device, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    assert kernels.operations()
    main()
