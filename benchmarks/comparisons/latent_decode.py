"""`python -m benchmarks.comparisons.latent_decode [case=b64_8k_h128,...] [out=FILE] [commit=]`

On one GPU, a step of decoding with latent attention over pages, of DeepSeek-V3's widths: bytes that it must read over its
time, and FLOP/s. Numbers first: each case agrees with the `xla` backend. Times and the copy are as in `paged_decode`.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.comparisons.paged_decode import LIMIT, copied, report, timed
from benchmarks.options import read
from kernels.ops.multi_latent_attention import paged_op

DEFAULTS = {"case": "", "out": "", "commit": ""}
R, HR, PAGE, SCALE = 512, 64, 64, 192**-0.5
# Requests, entries of each, heads.
CASES = {
    "b64_8k_h16": (64, 8192, 16),
    "b64_8k_h64": (64, 8192, 64),
    "b64_8k_h128": (64, 8192, 128),
    "b1_32k_h16": (1, 32768, 16),
    "b1_32k_h128": (1, 32768, 128),
}


def arguments_of(requests: int, entries: int, heads: int) -> dict[str, jax.Array]:
    """Returns a token of each request, and pages in no order."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {
        "query": (requests, heads, R),
        "query_rope": (requests, heads, HR),
        "kv_cache": (requests * entries // PAGE, PAGE, R + HR),
    }
    arrays = {n: jax.random.normal(k, s, jnp.bfloat16) for k, (n, s) in zip(keys, shapes.items(), strict=True)}
    tables = np.random.default_rng(0).permutation(requests * entries // PAGE).reshape(requests, -1)
    integers = {
        "kv_lens": np.full(requests, entries),
        "block_tables": tables,
        "query_start_loc": np.arange(requests + 1),
    }
    return arrays | {n: jnp.asarray(x, jnp.int32) for n, x in integers.items()}


def row(name: str) -> dict[str, Any]:
    arguments = arguments_of(*CASES[name])
    run = {p: functools.partial(paged_op, softmax_scale=SCALE, platform=p) for p in ("triton", "xla")}
    a, b = (np.asarray(jax.jit(f)(**arguments), np.float32) for f in run.values())
    if (error := float(np.linalg.norm(a - b) / np.linalg.norm(b))) > LIMIT:
        raise SystemExit(f"{name}: off by {error:.1e}, so nothing is timed")
    work, _ = paged_op.work(paged_op.bind(**arguments, softmax_scale=SCALE))
    seconds = timed(run["triton"], *arguments.values())
    speeds = {"TB/s": work.bytes / seconds / 1e12, "TFLOP/s": work.flops / seconds / 1e12}
    return {"case": name, "us": seconds * 1e6, **speeds, "off": error}


def main() -> None:
    first = {"case": "a copy of 2 GiB", "TB/s": copied(2**31) / 1e12}
    report(read(DEFAULTS, sys.argv[1:]), CASES, row, first)


if __name__ == "__main__":
    main()
