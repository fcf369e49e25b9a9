"""Latent attention over pages in Triton: against XLA's loop through the interpreter, and its code."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.engines.attention import triton_paged_calls as calls
from kernels.engines.attention import triton_paged_latent_calls as latents
from kernels.framework.interpret import interpret
from kernels.ops.multi_latent_attention import paged_op
from kernels.toolchains.simulate import ahead_of_time as checks

# Heads are in two groups of three, of which a tile has a query or five; widths fill no tile.
M, N, R, HR, PAGES, REQUESTS, LONGEST = 22, 6, 20, 4, 20, 4, 5
OPTIONS = ({}, {"sliding_window": 11, "logits_soft_cap": 1.5})
PARTS = ({}, {(16, 4): 2})  # programs that share the columns of a tile
SLOTS = (32, 8)  # of a page: a block of 16 is half of one, or lies in two
FLOAT32 = 3e-6


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Splits entries into pieces of a few blocks, and heads into groups of three."""
    monkeypatch.setattr(calls, "LEAST_KEYS", 1)
    monkeypatch.setattr(latents, "HEADS", dict.fromkeys(latents.HEADS, 3))
    monkeypatch.setattr(latents, "PROGRAMS", {calls.FEW: 6})
    monkeypatch.setattr(latents, "tiles", lambda *_: (calls.Tile(16, 16, 4, 2), calls.Tile(16, 16, 4, 2)))


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def batch(seed, counts, lens, C=8):
    """Returns a batch of requests: entries that are no request's are NaN, and unused numbers of pages are junk."""
    rng = np.random.default_rng(seed)
    cuts = np.cumsum([0, *counts]).astype(np.int32)
    lens = np.int32([max(n, c) for n, c in zip(lens, counts, strict=True)])
    tables = rng.permutation(PAGES).reshape(REQUESTS, LONGEST).astype(np.int32)
    cache = np.full((PAGES, C, R + HR), np.nan, np.float32)
    for table, n in zip(tables, lens, strict=True):
        for p in range(n):
            cache[table[p // C], p % C] = normal(rng, R + HR)
        table[-(-n // C) :] = 2**31 - 1
    a = {"query": normal(rng, M, N, R), "query_rope": normal(rng, M, N, HR), "kv_cache": cache, "kv_lens": lens}
    return a | {"block_tables": tables, "query_start_loc": cuts}


@functools.cache
def serving(index, platform):
    return jax.jit(lambda a: paged_op(**a, softmax_scale=0.3, **OPTIONS[index], platform=platform))


def check(index, seed, counts, lens, C=8):
    a = batch(seed, counts, lens, C)
    wanted = serving(index, "xla")(a)
    with interpret(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(latents, "PARTS", PARTS[index])
        got = serving(index, "triton")(a)
    assert error(got, wanted) <= FLOAT32 and not np.asarray(got)[sum(counts) :].any()


@pytest.mark.slow  # a ragged batch is quick in test_ops.py
@pytest.mark.parametrize(("index", "slots"), [(0, SLOTS[0]), (1, SLOTS[1])])
def test_a_ragged_batch(index, slots):
    """A prompt of several tiles, a decode over all pages, a request of no tokens, and a chunk; two rows are of none."""
    check(index, 0, (9, 1, 0, 10), (25, 5 * slots, 3, 10), slots)


def test_single_tokens():
    """As many rows as requests, as in a step of a generation; one has no entries but its own."""
    a = batch(1, (1, 1, 1, 1), (40, 1, 17, 33))
    a |= {name: a[name][:REQUESTS] for name in ("query", "query_rope")}
    run = functools.partial(paged_op, **a, softmax_scale=0.3)
    with interpret():
        assert error(run(platform="triton"), run(platform="xla")) <= FLOAT32


@pytest.mark.slow
@given(
    index=st.integers(0, len(OPTIONS) - 1),
    seed=st.integers(0, 2**31),
    counts=st.lists(st.integers(0, 5), min_size=REQUESTS, max_size=REQUESTS),
    lens=st.lists(st.integers(0, 8 * LONGEST), min_size=REQUESTS, max_size=REQUESTS),
    slots=st.sampled_from(SLOTS),
)
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_500_random_batches(index, seed, counts, lens, slots):
    check(index, seed, counts, lens, slots)


@pytest.mark.parametrize(
    ("heads", "page"),
    [
        pytest.param(16, 16, marks=pytest.mark.slow),
        *(pytest.param(h, p, marks=pytest.mark.slow) for h, p in ((16, 64), (128, 16), (128, 64))),
    ],
)
def test_a_decode_step_of_deepseek(heads, page, monkeypatch):
    """Without `platform=`: a block of entries is on its way while one is multiplied, in copies of 16 bytes."""
    monkeypatch.undo()
    shape, B, S = jax.ShapeDtypeStruct, 64, 8192
    arrays = [shape((B, heads, 512), jnp.bfloat16), shape((B, heads, 64), jnp.bfloat16)]
    arrays += [shape((B * S // page, page, 576), jnp.bfloat16)]
    arrays += [shape(s, jnp.int32) for s in ((B,), (B, S // page), (B + 1,))]
    report = checks.export_cuda(lambda *a: paged_op(*a, softmax_scale=0.1), *arrays)
    attend, merge = report.kernels
    assert (attend.name, merge.name) == ("latent_kernel", "paged_merge_kernel")
    copies = re.findall(r"cp\.async\.cg\.shared\.global [^;]*, 0x10,", attend.ptx)
    # Of a block, a thread copies its share of 32 entries of 576 numbers.
    threads, blocks = (128, 2) if heads == 16 else (256, 1)
    assert len(copies) >= blocks * 32 * 576 * 2 // 16 // threads
    assert attend.resources["spill_stores"] == merge.resources["spill_stores"] == 0
    assert attend.shared_memory_bytes <= (114 if heads == 16 else 227) * 1024  # two programs a multiprocessor, or one
