"""Latent attention over pages on Hopper, interpreted: blocks of entries that two warpgroups share. tests/gpu runs its cases."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error
from hopper import interpreted

from kernels.engines.attention import triton_paged_calls as calls
from kernels.engines.attention import triton_paged_latent_calls as latents
from kernels.ops.multi_latent_attention import decode_op, paged_op
from kernels.toolchains.simulate import ahead_of_time as checks

BF16 = FLOOR["bfloat16"]


def batch(counts, lens, N, R, Hr, C, rest=0, seed=0):
    """Returns a ragged batch: slots without an entry are NaN, and unused numbers of pages point nowhere."""
    rng = np.random.default_rng(seed)
    each = -(-max(lens) // C) + 1
    pages = len(lens) * each
    tables = rng.permutation(pages).reshape(len(lens), each).astype(np.int32)
    cache = np.full((pages, C, R + Hr), np.nan, np.float32)
    for table, n in zip(tables, lens, strict=True):
        at = np.arange(n)
        cache[table[at // C], at % C] = rng.standard_normal((n, R + Hr))
        table[-(-n // C) :] = 2**31 - 1
    M = sum(counts) + rest
    floats = {"query": rng.standard_normal((M, N, R)), "query_rope": rng.standard_normal((M, N, Hr)), "kv_cache": cache}
    integers = {"kv_lens": lens, "block_tables": tables, "query_start_loc": np.cumsum([0, *counts])}
    return {n: jnp.asarray(x, jnp.bfloat16) for n, x in floats.items()} | {
        n: jnp.asarray(x, jnp.int32) for n, x in integers.items()
    }


# Counts, lengths, heads, widths of latents and of rotary keys, slots of a page, rows of no request, options.
CALLS = {
    "decode": ((1, 1, 1), (300, 32, 1), 64, 128, 64, 64, 0, {}),
    "two_groups": ((1, 1), (130, 77), 128, 128, 64, 16, 0, {}),
    "mixed": ((2, 1, 0), (90, 40, 5), 48, 256, 24, 32, 1, {"sliding_window": 50}),
    "more_requests": ((3, 1, 0, 2), (90, 40, 5, 2), 48, 256, 24, 32, 2, {"sliding_window": 50}),
    "several_tokens": ((2, 2), (65, 200), 40, 128, 8, 8, 0, {"logits_soft_cap": 1.5}),
}


# The same of few rows: with a prompt, which another kernel takes, programs that fill rows of nobody, and 32 rows.
FEW_CALLS = {
    "few_decode": ((1, 1, 1), (300, 32, 1), 16, 128, 64, 64, 0, {}),
    "few_mixed": ((2, 1, 0), (200, 140, 5), 4, 256, 24, 32, 1, {"sliding_window": 150}),
    "few_and_a_prompt": ((3, 1, 0, 20), (90, 140, 5, 22), 8, 256, 24, 32, 2, {"sliding_window": 50}),
    "few_of_32": ((1, 1), (165, 200), 32, 128, 8, 8, 0, {"logits_soft_cap": 1.5}),
    "few_of_12": ((1, 1, 1), (165, 200, 3), 12, 128, 8, 128, 3, {}),
}
QUICK = ("mixed", "few_mixed")


# "mixed" has most in it: requests of several tokens, of one and of none, a window, several groups and rows of nobody.
@pytest.mark.parametrize(
    "call", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CALLS | FEW_CALLS]
)
def test_numbers(call, monkeypatch):
    check(*(CALLS | FEW_CALLS)[call], least=64, monkeypatch=monkeypatch)


def test_whole_requests_use_stages_again(monkeypatch):
    """Pieces of ten blocks in four stages; requests of no token leave pieces of no tile, which write nothing."""
    check((1, 0, 1, 0), (300, 9, 40, 3), 64, 128, 64, 64, 1, {}, least=2**20, monkeypatch=monkeypatch)


def check(*call, least, monkeypatch):
    """The numbers of a call are those of XLA, where pieces of a request have at least so many entries."""
    *sizes, options = call
    a = batch(*sizes)
    monkeypatch.setattr(calls, "LEAST_KEYS", least)
    monkeypatch.setattr(latents, "TURNED_PROGRAMS", 6)
    run = functools.partial(paged_op, softmax_scale=0.1, **options)
    with interpreted(monkeypatch, paged_op, latents):
        got = np.asarray(run(**a, platform="triton"))
    exact = {n: jnp.nan_to_num(x.astype(jnp.float32)) if x.dtype == jnp.bfloat16 else x for n, x in a.items()}
    clean = a | {"kv_cache": jnp.nan_to_num(a["kv_cache"])}
    wanted, rounded = (run(**x, platform="xla") for x in (exact, clean))
    assert error(got, wanted) <= 2 * error(rounded, wanted) + BF16
    assert not got[sum(sizes[0]) :].any()


def lowered(requests, heads, page, monkeypatch):
    """Returns the compiled kernels of a step of decoding with DeepSeek's widths, 8,192 entries of a request."""
    monkeypatch.setattr(paged_op, "_programs", {})
    shape, B, S = jax.ShapeDtypeStruct, requests, 8192
    arrays = [shape((B, heads, 512), jnp.bfloat16), shape((B, heads, 64), jnp.bfloat16)]
    arrays += [shape((B * S // page, page, 576), jnp.bfloat16)]
    arrays += [shape(s, jnp.int32) for s in ((B,), (B, S // page), (B + 1,))]
    return checks.export_cuda(lambda *a: paged_op(*a, softmax_scale=0.1), *arrays).kernels


@pytest.mark.slow  # compiled; the numbers are quick
@pytest.mark.parametrize(("requests", "heads", "page"), [(1, 16, 64), (64, 32, 16)])
def test_a_decode_step_of_few_heads(requests, heads, page, monkeypatch):
    attend, merge = lowered(requests, heads, page, monkeypatch)
    assert (attend.name, merge.name) == ("turned_latent_kernel", "paged_merge_kernel")
    assert attend.resources["spill_stores"] == attend.resources["serialized"] == merge.resources["spill_stores"] == 0
    assert attend.shared_memory_bytes <= 227 * 1024
    assert len(re.findall(rf"wgmma\.mma_async\S*m64n{heads}k16", attend.ptx)) == 36 + 32


@pytest.mark.slow  # compiled; the numbers are quick
@pytest.mark.parametrize(
    ("heads", "page"),
    [(128, 64), (64, 16), (128, 16), (64, 128)],
)
def test_a_decode_step_of_deepseek(heads, page, monkeypatch):
    """Products are not serialised, few registers are spilled, and blocks fit into shared memory."""
    listed, attend, merge = lowered(64, heads, page, monkeypatch)
    assert (listed.name, attend.name, merge.name) == (
        "list_kernel",
        "warp_specialized_latent_kernel",
        "paged_merge_kernel",
    )
    assert listed.resources["spill_stores"] == merge.resources["spill_stores"] == 0
    assert attend.resources["spill_stores"] <= 64 and not attend.resources["serialized"]
    assert attend.shared_memory_bytes <= 227 * 1024
    assert len(re.findall(r"wgmma\.mma_async\S*m64n256k16", attend.ptx)) == 2 * 2


@pytest.mark.slow  # of pages it is quick
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 1, 75, 64, 128, 64), {}),
        ((3, 2, 140, 40, 128, 8), {"sliding_window": 50}),
        ((3, 2, 140, 8, 128, 8), {"sliding_window": 50}),
    ],
)
def test_a_cache_without_pages(sizes, options, monkeypatch):
    """`mla_decode`, with its lse; a row is shorter than its tokens, and a slot without an entry is NaN."""
    B, T, S, N, R, Hr = sizes
    rng = np.random.default_rng(0)
    lens = np.int32([S, 1, 67][:B])
    cache = np.where((np.arange(S) < lens[:, None])[..., None], rng.standard_normal((B, S, R + Hr)), np.nan)
    floats = {
        "query": rng.standard_normal((B, T, N, R)),
        "query_rope": rng.standard_normal((B, T, N, Hr)),
        "kv_cache": cache,
    }
    a = {n: jnp.asarray(x, jnp.bfloat16) for n, x in floats.items()}
    monkeypatch.setattr(calls, "LEAST_KEYS", 64)
    run = functools.partial(decode_op, kv_lens=jnp.asarray(lens), softmax_scale=0.1, **options)
    with interpreted(monkeypatch, decode_op, latents):
        got = run(**a, platform="triton")
    exact = {n: jnp.nan_to_num(x.astype(jnp.float32)) for n, x in a.items()}
    wanted, rounded = (run(**x, platform="xla") for x in (exact, a | {"kv_cache": jnp.nan_to_num(a["kv_cache"])}))
    for x, y, z in zip(got, wanted, rounded, strict=True):
        seen = np.isfinite(np.asarray(y, np.float32))
        assert (np.isfinite(np.asarray(x, np.float32)) == seen).all()
        x, y, z = (np.where(seen, np.asarray(v, np.float32), 0) for v in (x, y, z))
        assert error(x, y) <= 2 * error(z, y) + BF16
