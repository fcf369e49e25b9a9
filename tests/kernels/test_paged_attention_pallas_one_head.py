"""Attention over pages in Pallas with one head of keys, whose slots are the rows of a matrix: latents among them; and the
log-sum-exp. Interpreted, against XLA, and compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error
from test_multi_latent_attention_pages_hopper import batch
from test_paged_attention_pallas import SMALL, on_pallas
from test_paged_attention_triton import FLOAT32, H, N, normal, rows_of

from kernels.engines.attention import pallas_paged_calls as calls
from kernels.ops.multi_latent_attention import decode_op, paged_op
from kernels.ops.multi_latent_attention import pallas_tpu as latents
from kernels.ops.paged_attention import decode_op as dense_op
from kernels.ops.paged_attention import lse_op, page_op
from kernels.toolchains.simulate import ahead_of_time as checks

LENS = [48, 17, 0]


@pytest.fixture
def rows_of_slots(monkeypatch):
    """Whether the slots of each launch were rows of a matrix."""
    seen, launch = [], calls._launch
    monkeypatch.setattr(calls, "_launch", lambda op, o, *rest: seen.append(o.rows_of_slots) or launch(op, o, *rest))
    return seen


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("page", "T"), [pytest.param(*x, marks=SLOW) for x in ((8, 3), (6, 1), (8, 1), (6, 3))])
def test_slots_that_fill_tiles_are_rows(rows_of_slots, page, T):
    """Of float32 there are 8 rows in a tile; slots that no query sees are NaN."""
    a = rows_of(np.random.default_rng(1), 3, T, 48, LENS, page=page)
    a |= {n: a[n][:, :, :1] for n in ("key_cache", "value_cache")}
    wanted = page_op(**a, platform="xla")
    for table, n in zip(a["block_tables"], LENS):
        for p in range(n, 48):
            a["value_cache"] = a["value_cache"].at[table[p // page], p % page].set(jnp.nan)
    for options in ({}, {"window": (9, 0), "logits_soft_cap": 2.0}):
        wanted = page_op(**a, **options, platform="xla")
        assert error(on_pallas(page_op, **a, **options, cfg=SMALL), wanted) <= FLOAT32
    assert set(rows_of_slots) == {page == 8}


@pytest.mark.slow
def test_one_head_of_8_bits_and_of_keys_beside_values(rows_of_slots):
    rng = np.random.default_rng(2)
    a = rows_of(rng, 2, 2, 64, [64, 33], page=32)
    caches = {n: a.pop(n)[:, :, :1] for n in ("key_cache", "value_cache")}
    narrow = {n: jnp.round(20 * x).astype(jnp.int8) for n, x in caches.items()}
    shape = narrow["key_cache"].shape[:3]
    scales = {n: jnp.asarray(0.1 + rng.random(shape), jnp.float32) for n in ("k_scale", "v_scale")}
    joined = {"key_cache": jnp.concatenate([*caches.values(), caches["value_cache"]], -1)}
    for more in (narrow | scales, joined, caches | {"softmax_aux": jnp.ones((N, 1))}):
        wanted = page_op(**a, **more, platform="xla")
        assert error(on_pallas(page_op, **a, **more, cfg=SMALL), wanted) <= FLOAT32
    dense = {n: normal(rng, 2, 48, 1, H) for n in ("key_cache", "value_cache")} | {"query": normal(rng, 2, 2, N, H)}
    dense |= {"kv_lens": np.int32([48, 13]), "kv_starts": np.int32([21, 0])}
    assert error(on_pallas(dense_op, **dense, cfg=SMALL), dense_op(**dense, platform="xla")) <= FLOAT32
    assert all(rows_of_slots)


@pytest.mark.parametrize(
    ("T", "heads", "sinks"),
    [
        (3, 1, True),
        *(
            pytest.param(*how, marks=SLOW)
            for how in ((3, 1, False), (1, 2, True), (1, 2, False), (3, 2, True), (3, 2, False))
        ),
    ],
)
def test_the_lse(T, heads, sinks):
    """Of sinks too, and -inf of a request without keys; where tables take several launches, each has its own rows."""
    a = rows_of(np.random.default_rng(3), 3, T, 48, LENS)
    a |= {n: a[n][:, :, :heads] for n in ("key_cache", "value_cache")}
    more = {"softmax_aux": jnp.asarray(normal(np.random.default_rng(4), N, 2))} if sinks else {}
    got, wanted = on_pallas(lse_op, **a, **more, cfg=SMALL), lse_op(**a, **more, platform="xla")
    assert [error(*x) <= FLOAT32 for x in zip(got, wanted, strict=True)] == [True, True]
    assert bool(np.isinf(got[1][2]).all()) == (not sinks)


# Counts, lengths, heads, widths of latents and of rotary keys, slots of a page, rows of no request; options.
CALLS = {
    "decode": ((1, 1, 1), (300, 32, 1), 16, 128, 64, 64, 0, {}),
    "mixed": ((3, 1, 0, 2), (90, 40, 5, 2), 6, 24, 8, 32, 2, {"sliding_window": 50}),
    "odd_pages": ((2, 1), (65, 20), 4, 12, 6, 6, 1, {"logits_soft_cap": 1.5}),
}


@pytest.mark.slow  # latents over pages are quick in test_ops.py
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("call", ["mixed", "decode", "odd_pages"])
def test_latents(call, dtype, monkeypatch):
    """Values are the first numbers of keys; slots without an entry are NaN, and rows of no request are 0."""
    monkeypatch.setattr(latents, "BLOCK_BYTES", 2**14)  # requests have several blocks
    *sizes, options = CALLS[call]
    a = batch(*sizes)
    exact = {n: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for n, x in a.items()}
    run = functools.partial(paged_op, softmax_scale=0.1, **options)
    got = np.asarray(on_pallas(run, **(a if dtype == "bfloat16" else exact)), np.float32)
    wanted = run(**exact, platform="xla")
    allowed = FLOAT32
    if dtype == "bfloat16":
        allowed = 2 * error(run(**a, platform="xla").astype(jnp.float32), wanted) + FLOOR[dtype]
    assert error(got, wanted) <= allowed
    assert not got[sum(sizes[0]) :].any()


@pytest.mark.slow  # of pages it is quick
@pytest.mark.parametrize("T", [3, pytest.param(1, marks=SLOW)])
def test_latents_of_dense_rows(T):
    """The forward of `mla_decode`; a row may be shorter than its tokens, and longer than its part of the cache."""
    rng = np.random.default_rng(5)
    a = {"query": normal(rng, 3, T, 4, 24), "query_rope": normal(rng, 3, T, 4, 8), "kv_cache": normal(rng, 3, 40, 32)}
    a |= {"kv_lens": np.int32([43, 17, 2]), "softmax_scale": 0.3}
    for x, w in zip(on_pallas(decode_op, **a), decode_op(**a, platform="xla"), strict=True):
        assert error(x, w) <= FLOAT32


# -- code -------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # compiled; a case of the operation is compiled in the quick tests
@pytest.mark.parametrize("rope", [128, 64])
def test_a_decode_step_of_deepseek_copies_a_cache_where_the_compiler_turns_it(rope):
    """64 requests of 8,192 entries. Queries' parts are joined. Of entries whose width 128 does not divide, XLA's own layout has
    the pages last, which no kernel reads in place: XLA's backend copies the cache as well."""
    B, heads = 64, 128
    shapes = {"query": (B, heads, 512), "query_rope": (B, heads, rope), "kv_cache": (B * 128, 64, 512 + rope)}
    arrays = {n: jax.ShapeDtypeStruct(s, jnp.bfloat16) for n, s in shapes.items()}
    integers = {"kv_lens": (B,), "block_tables": (B, 128), "query_start_loc": (B + 1,)}
    arrays |= {n: jax.ShapeDtypeStruct(s, jnp.int32) for n, s in integers.items()}
    run = functools.partial(paged_op, softmax_scale=0.1)
    program = checks.compile_tpu(lambda a: run(**a), arrays, topology=checks.TPU_TOPOLOGIES[0])
    assert checks.mosaic_calls(program), "taken without `platform=`"
    cache = 2 * np.prod((*shapes["kv_cache"][:2], 640)) * (rope == 64)
    assert program.memory_analysis().temp_size_in_bytes < cache + 2**26
