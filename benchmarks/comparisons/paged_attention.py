"""`python benchmarks/comparisons/paged_attention.py`: what a decode step costs as requests grow, in tables of one size.

The work of paged attention follows the lengths of the requests, not the pages that their tables have room for. Beside it: the
same numbers the dense way, every page of every table gathered and masked.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

import kernels
from kernels import MaskInfo

B, N, K, H, C, LONGEST = 8, 8, 2, 64, 16, 512


def seconds(function, *arguments) -> float:
    """Returns the shortest time of a call, of several that take a second together."""
    jax.block_until_ready(function(*arguments))
    best, begun = np.inf, time.perf_counter()
    while time.perf_counter() < begun + 1:
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        best = min(best, time.perf_counter() - start)
    return best


def dense(query, key_cache, value_cache, lens, tables):
    key, value = (x[tables].reshape(B, -1, K, H) for x in (key_cache, value_cache))
    seen = jnp.arange(key.shape[1]) < lens[:, None]
    return kernels.flash_attention(query, key, value, mask_info=MaskInfo.from_attention_mask(seen[:, None, None]))


def main() -> None:
    """Prints a row of the table in the README of paged attention for each length."""
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((B, 1, N, H)), jnp.float32)
    cache = tuple(jnp.asarray(rng.standard_normal((B * LONGEST, C, K, H)), jnp.float32) for _ in range(2))
    tables = jnp.asarray(rng.permutation(B * LONGEST).reshape(B, LONGEST), jnp.int32)
    paged, whole = jax.jit(kernels.page_attention), jax.jit(dense)
    print(f"{jax.devices()[0].device_kind}: {B} requests, tables of {LONGEST * C} keys, {N} heads of {H}, {K} of keys")
    every = LONGEST * C
    for name, lens in (
        *((f"{n} each", [n] * B) for n in (16, every // 64, every // 16, every // 4, every)),
        ("one full, the others 16", [every] + [16] * (B - 1)),
    ):
        lens = jnp.asarray(lens, jnp.int32)
        arguments = (query, *cache, lens, tables)
        off = float(jnp.abs(paged(*arguments) - whole(*arguments)).max())
        assert off < 1e-4, off
        print(
            f"| {name} | {1e3 * seconds(paged, *arguments):.2f} | {1e3 * seconds(whole, *arguments):.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
