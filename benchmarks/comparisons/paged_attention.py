"""`python benchmarks/comparisons/paged_attention.py [cost|numbers]`: paged attention beside other ways to the same numbers.

`cost`: what a decode step costs as requests grow, in tables of one size. The work of paged attention follows the lengths of the
requests, not the pages that their tables have room for. Beside it: the same the dense way, every page gathered and masked.

`numbers`: the references that JAX ships with its own serving kernels for TPUs and GPUs, which are plain jnp and run anywhere.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels
from kernels import MaskInfo

B, N, K, H, C, LONGEST = 8, 8, 2, 64, 16, 512


def seconds(function, *arguments) -> float:
    """Returns the CPU time of a call, the mean of a second of them: other load on the machine changes it little."""
    jax.block_until_ready(function(*arguments))
    begun, calls = time.process_time(), 0
    while calls < 10 or time.process_time() < begun + 1:
        jax.block_until_ready(function(*arguments))
        calls += 1
    return (time.process_time() - begun) / calls


def dense(query, key_cache, value_cache, lens, tables):
    key, value = (x[tables].reshape(B, -1, K, H) for x in (key_cache, value_cache))
    seen = jnp.arange(key.shape[1]) < lens[:, None]
    return kernels.flash_attention(query, key, value, mask_info=MaskInfo.from_attention_mask(seen[:, None, None]))


def cost() -> None:
    """Prints a row of the table of costs in the README of paged attention for each length."""
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


def ragged_requests(rng: np.random.Generator, dtype: str = "float32") -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns (queries, pages of keys and values, and where they are, in JAX's order of arguments; the same in ours)."""
    counts, lens = [300, 1, 37, 1, 1], [300, 900, 400, 1, 77]
    pages, longest = 200, -(-max(lens) // C)
    query = jnp.asarray(rng.standard_normal((sum(counts), N, 128)), jnp.float32)
    both = jnp.asarray(rng.standard_normal((pages, C, 2 * K, 128)), dtype)
    tables = jnp.asarray(rng.integers(0, pages, (len(lens), longest)), jnp.int32)
    cuts = jnp.asarray([0, *np.cumsum(counts)], jnp.int32)
    where = jnp.asarray(lens, jnp.int32), tables, cuts
    return (query, both, *where, jnp.asarray([len(lens)], jnp.int32)), (query, both, *where)


def numbers() -> None:
    """Prints a row of the table of differences in the README of paged attention for each of JAX's references."""
    from jax.experimental.pallas.ops.gpu.decode_attention import gqa_reference
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ref_ragged_paged_attention

    def row(name: str, theirs: str, got: Any, want: Any) -> None:
        off = jnp.linalg.norm(got - want) / jnp.linalg.norm(want)
        print(f"| `{name}` | {theirs} | {float(off):.1e} |", flush=True)

    rng = np.random.default_rng(0)
    print(f"jax {jax.__version__}, {N} heads, {K} of keys, float32\n| ours | theirs | difference |\n|---|---|---|")
    with jax.default_matmul_precision("highest"):
        for said, dtype, ours, other in (
            ("", "float32", {}, {}),
            (
                ", window, cap",
                "float32",
                {"sliding_window": 64, "logits_soft_cap": 3.0},
                {"sliding_window": 64, "soft_cap": 3.0},
            ),
            (", 8-bit floats", "float8_e4m3fn", {"k_scale": 0.5, "v_scale": 2.0}, {"k_scale": 0.5, "v_scale": 2.0}),
        ):
            a, b = ragged_requests(rng, dtype)
            want = ref_ragged_paged_attention(*a, sm_scale=128**-0.5, **other)
            row(
                "ragged_page_attention_v2",
                f"`ref_ragged_paged_attention`{said}",
                kernels.ragged_page_attention_v2(*b, **ours),
                want,
            )
        query, key, value = (
            jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((B, N, H), *[(B, 500, K, H)] * 2)
        )
        begin, end = jnp.asarray(np.sort(rng.integers(0, 501, (2, B)), axis=0), jnp.int32)
        want = gqa_reference(query, key, value, begin, end)
        row(
            "ragged_decode_attention",
            "`gqa_reference` of decode_attention",
            kernels.ragged_decode_attention(query, key, value, begin, end),
            want,
        )


if __name__ == "__main__":
    for part in sys.argv[1:] or ("cost", "numbers"):
        {"cost": cost, "numbers": numbers}[part]()
