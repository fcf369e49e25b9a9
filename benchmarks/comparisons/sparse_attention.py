"""`python -m benchmarks.comparisons.sparse_attention [case=random_64k,...] [out=FILE] [commit=]`

On one GPU, native sparse attention in Triton beside causal flash attention of the same queries, keys and values: milliseconds
of a forward and of both ways, how many times faster, and the temporaries of both ways. Whether its numbers are right is asked
by `tests/gpu/test_sparse_attention_gpu.py`, at lengths that have a reference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.comparisons.paged_decode import report, timed
from benchmarks.options import read
from kernels import flash_attention
from kernels.ops.native_sparse_attention import op

DEFAULTS = {"case": "", "out": "", "commit": ""}
CASES = {case.name: case for case in op.cases if "bench" in case.tags}


def measured(call: Callable[..., jax.Array], floats: dict[str, jax.Array], *others: Any) -> tuple[float, float, float]:
    """Returns (ms of a forward, ms of both ways, GiB of temporaries of both ways)."""

    def both(floats: dict[str, jax.Array], *others: Any) -> Any:
        out, pull = jax.vjp(lambda floats: call(floats, *others), floats)
        return out, pull(jnp.ones_like(out))

    temporaries = jax.jit(both).lower(floats, *others).compile().memory_analysis().temp_size_in_bytes
    return 1e3 * timed(call, floats, *others), 1e3 * timed(both, floats, *others), temporaries / 2**30


def row(name: str) -> dict[str, Any]:
    case = CASES[name]
    floats, integers, options = {}, {}, {}
    # The shapes alone: of random numbers for the host there would be gigabytes.
    for i, (n, x) in enumerate(op.case_inputs(case, dtype="bfloat16", shapes_only=True).items()):
        if n in case.make:
            integers[n] = case.make[n](np.random.default_rng(0), case.dims)
        elif isinstance(x, jax.ShapeDtypeStruct):
            floats[n] = jax.random.normal(jax.random.key(i), x.shape, x.dtype)
        else:
            options[n] = x
    qkv = {n: floats[n] for n in ("query", "key", "value")}
    dense = measured(lambda x: flash_attention(**x, causal=True), qkv)
    sparse = measured(lambda x, y: op(**x, **y, **options, platform="triton"), floats, integers)
    return {
        "case": name,
        "forward, ms": sparse[0],
        "both ways, ms": sparse[1],
        "flash forward, ms": dense[0],
        "flash both ways, ms": dense[1],
        "forward, times faster": dense[0] / sparse[0],
        "both ways, times faster": dense[1] / sparse[1],
        "temporaries, GiB": sparse[2],
    }


def main() -> None:
    report(read(DEFAULTS, sys.argv[1:]), CASES, row)


if __name__ == "__main__":
    main()
