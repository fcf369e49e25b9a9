"""Paged attention: its operations against a loop over pages and against `flash_attention`, and what they write."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_loop import RNG, SMALL, normal, wanted

import kernels
from kernels import MaskInfo
from kernels.ops.flash_attention import op as flash_op
from kernels.ops.paged_attention import PagedAttentionConfig, append_and_attend_op, append_op, decode_op, op, page_op
from kernels.ops.paged_attention import xla as engine

CASES = [(o, c) for o in (op, page_op, decode_op) for c in o.cases if "bench" not in c.tags]


@pytest.mark.parametrize(
    ("which", "case"),
    # What stands alone elsewhere is together in these.
    [
        pytest.param(
            o,
            c,
            marks=[pytest.mark.slow] * (c.name != "together" or o is page_op),
            id=f"{o.name}-{c.name}",
        )
        for o, c in CASES
    ],
)
def test_contract_and_engine_against_a_loop_over_pages(which, case):
    a = which.case_inputs(case)
    traced = which.bind(**a).traced()
    options = {n: x for n, x in a.items() if n not in traced}
    want = wanted(which, a)
    with jax.default_matmul_precision("highest"):
        assert error(jax.jit(functools.partial(which.function, **options))(**traced), want) < 2e-6
    assert error(which(**a, cfg=SMALL), want) < 2e-6


# -- random calls -------------------------------------------------------------------------------------------------------------

M, N, K, H, PAGES, C, REQUESTS, LONGEST = 12, 4, 2, 8, 9, 4, 4, 3
OPTIONS = (
    {},
    {"window": (4, None), "softmax_aux": normal(N, 1), "cache": "int8"},
    {
        "window": (4, None),
        "softmax_aux": normal(N, 1),
        "logits_soft_cap": 2.0,
        "alibi_slopes": np.abs(normal(N)),
        "cache": "float8_e4m3fn",
        "cfg": SMALL,
    },
    {"causal": False, "window": (2, 3), "softmax_scale": 0.3, "cfg": PagedAttentionConfig(4, 2, 16)},
    {"window": (0, 0), "cache": "float8_e5m2", "cfg": PagedAttentionConfig(1, 8, 1)},
    {
        "softmax_aux": normal(N, 2),
        "alibi_slopes": normal(N),
        "logits_soft_cap": 1.0,
        "cfg": PagedAttentionConfig(8, 4, 5),
    },
)


@functools.cache
def over_gathered_keys(index):
    """Returns `flash_attention`'s contract, jitted, over the keys of all requests one after the other."""
    options = {n: x for n, x in OPTIONS[index].items() if n not in ("cache", "cfg", "causal", "window")}
    mask = {"causal": OPTIONS[index].get("causal", True), "window": OPTIONS[index].get("window")}
    slopes = options.pop("alibi_slopes", None)

    @jax.jit
    def run(query, key, value, arrays):
        with jax.default_matmul_precision("highest"):
            more = {**options, "alibi_slopes": None if slopes is None else slopes[None]}
            return flash_op.function(query[None], key[None], value[None], MaskInfo(**arrays, **mask), **more)[0][0]

    return run


@functools.cache
def paged(index):
    options = {n: x for n, x in OPTIONS[index].items() if n != "cache"}
    return jax.jit(lambda *arrays, **scales: op(*arrays, **scales, **options))


def random_call(seed, index, cuts, lens):
    """Returns (what the operation gives, what `flash_attention` over the gathered keys gives)."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((M, N, H)).astype(np.float32)
    dtype = jnp.dtype(OPTIONS[index].get("cache", "float32"))
    caches = [(3 * rng.standard_normal((PAGES, C, K, H))).astype(dtype) for _ in range(2)]
    scales, meant = {}, caches
    if dtype.itemsize == 1:
        shapes = [(1, 1, K), (PAGES, C, K), (1, 1, 1)]
        if index == 4:  # another program for each
            shapes = rng.permuted(shapes, axis=0)
        scales = {n: (0.1 + rng.random(tuple(s))).astype(np.float32) for n, s in zip(("k_scale", "v_scale"), shapes)}
        meant = [np.asarray(x, np.float32) * np.float32(s)[..., None] for x, s in zip(caches, scales.values())]
    tables = rng.integers(0, PAGES, (REQUESTS, LONGEST)).astype(np.int32)  # pages are shared, and come twice
    key, value = (np.concatenate([x[t].reshape(-1, K, H) for t in tables]) for x in meant)
    place = np.arange(LONGEST * C)
    request = np.searchsorted(cuts, np.arange(M), side="right") - 1
    at = np.minimum(request, REQUESTS - 1)
    counts = np.diff(cuts)
    arrays = {
        "q_segment_ids": np.where(request < REQUESTS, request, -1),
        "q_positions": lens[at] - counts[at] + np.arange(M) - cuts[at],
        "kv_segment_ids": np.concatenate([np.where(place < n, r, -1) for r, n in enumerate(lens)]),
        "kv_positions": np.tile(place, REQUESTS),
    }
    arrays = {n: x.astype(np.int32)[None] for n, x in arrays.items()}
    return paged(index)(query, caches[0], cuts, lens, tables, caches[1], **scales), over_gathered_keys(index)(
        query, np.asarray(key, np.float32), np.asarray(value, np.float32), arrays
    )


CALL = {
    "seed": st.integers(0, 2**31),
    # Where requests begin and end: some are empty, some have one query, and the last rows may be of none.
    "cuts": st.lists(st.integers(0, M), min_size=REQUESTS, max_size=REQUESTS).map(sorted),
    # How many keys each has: none, fewer than queries, whole pages and one more, a full table.
    "lens": st.lists(st.integers(0, LONGEST * C), min_size=REQUESTS, max_size=REQUESTS),
}


def check_random(seed, index, cuts, lens):
    got, want = random_call(seed, index, np.int32([0, *cuts]), np.int32(lens))
    np.testing.assert_allclose(got, want, atol=3e-5, rtol=1e-4)


@pytest.mark.slow  # random calls; each option has a quick test
@given(index=st.just(2), **CALL)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_random_calls_are_flash_attention_over_the_gathered_keys(seed, index, cuts, lens):
    check_random(seed, index, cuts, lens)


@pytest.mark.slow
@given(index=st.integers(0, len(OPTIONS) - 1), **CALL)
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_500_random_calls(seed, index, cuts, lens):
    check_random(seed, index, cuts, lens)


# -- the work that is done ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, (5, None)), (False, (3, 2))])
def test_only_pairs_that_a_query_sees_are_in_the_list(causal, window):
    """How many pairs of a tile and a block of keys are computed, counted by hand; a tile without any has one, of no key."""
    counts, lens, q, k = np.int32([9, 1, 0, 1, 4]), np.int32([9, 40, 12, 0, 23]), 4, 8
    begin = np.cumsum(counts) - counts
    requests = engine._Requests(begin, counts, 0 * lens, lens, lens, None)
    o = engine._Options(1.0, None, MaskInfo(causal=causal, window=window), q, k, 1)
    found = jax.jit(lambda requests: engine._tiles(requests, 9, o))(requests)
    want = []
    for count, n in zip(counts, lens):
        for first in range(0, count, q):
            i = n - count + np.arange(first, min(first + q, count))[:, None]
            j = np.arange(n)[None]
            seen = (j <= i) if causal else np.ones((len(i), n), bool)
            left, right = window or (None, None)
            seen &= (left is None) | (j >= i - (left or 0))
            seen &= (right is None) | (j <= i + (right or 0))
            want.append(max(1, len({x // k for x in np.where(seen)[1]})))
    assert list(np.diff([0, *found.end])[: len(want)]) == want and found.end[-1] == sum(want)


def test_memory_does_not_follow_the_size_of_the_table():
    """One gathered table would be 5 * 2^20 keys of 2 heads, 16 wide: 640 MiB."""
    a = op.case_inputs(op.cases[0])
    a["block_tables"] = jax.ShapeDtypeStruct((5, 2**18), jnp.int32)
    memory = jax.jit(lambda a: op(**a, cfg=SMALL)).lower(a).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 64 * 1024


def test_what_lies_in_slots_that_are_no_key_is_in_no_output():
    a = append_and_attend_op.case_inputs(append_and_attend_op.cases[0])  # no page is of two requests
    a = {n: x for n, x in a.items() if n not in ("key", "value")}
    want, tables = op(**a, cfg=SMALL), np.asarray(a["block_tables"])
    used = np.zeros((27, 4), bool)
    for r, n in enumerate(np.asarray(a["kv_lens"])):
        for p in range(n):
            used[tables[r, p // 4], p % 4] = True
    for name in ("key_cache", "value_cache"):
        a[name] = jnp.where(used[..., None, None], a[name], jnp.nan)
    np.testing.assert_array_equal(op(**a, cfg=SMALL), want)
    # And a NaN that is a key of one request, the last here, is in the outputs of no other.
    a["value_cache"] = a["value_cache"].at[tables[4, 4], 1].set(jnp.nan)
    got = np.asarray(op(**a, cfg=SMALL))
    assert np.isnan(got[20]).any() and not np.isnan(np.delete(got, slice(14, 21), axis=0)).any()


def test_sizes_may_be_symbols():
    m, r = jax.export.symbolic_shape("m, r")
    a = op.case_inputs(op.cases[0])
    arrays = [a[n] for n in ("query", "key_cache", "query_start_loc", "kv_lens", "block_tables", "value_cache")]
    sizes = [(m, 4, 16), (12, 4, 2, 16), (r + 1,), (r,), (r, 5), (12, 4, 2, 16)]
    shapes = (jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(sizes, arrays))
    exported = jax.export.export(jax.jit(lambda *x: op(*x)))(*shapes)
    assert error(exported.call(*arrays), wanted(op, a)) < 2e-6


# -- writing ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_slots_that_are_not_written_stay_bit_for_bit(dtype):
    bits = RNG.integers(0, 256, (6, 3, 2, 8, jnp.dtype(dtype).itemsize), np.uint8)  # NaNs of every kind among them
    cache = jnp.asarray(np.squeeze(bits.view(dtype), -1))
    slots, new = np.int32([4, -1, 16, 18, 0]), 100 * normal(5, 2, 8)
    scale = np.float32([[[0.5, 2.0]]]) if dtype != "float32" else None
    a = {"key": new, "value": -new, "slots": slots, "key_cache": cache, "value_cache": cache}
    keys, values = append_op(**a, k_scale=scale, v_scale=scale)
    for got, rows in ((keys, new), (values, -new)):
        flat, old = (np.asarray(x).reshape(18, 2, 8) for x in (got, cache))
        others = np.setdiff1d(np.arange(18), [4, 16, 0])
        assert flat[others].tobytes() == old[others].tobytes()
        want = rows[[0, 2, 4]] / (1.0 if scale is None else scale[0, 0, :, None])
        if dtype == "int8":
            want = np.clip(np.round(want), -128, 127)
        elif scale is not None:
            want = np.clip(want, -448, 448).astype(dtype)
        np.testing.assert_array_equal(flat[[4, 16, 0]].astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize(
    ("page", "slot"),
    [
        (2**28, 2**32),
        pytest.param(2**32, 2**32 + 1, marks=pytest.mark.slow),
        pytest.param(-(2**32), -(2**32), marks=pytest.mark.slow),
    ],
)
def test_pages_and_slots_past_an_int32_are_none(page, slot):
    """Where no value is read before the call, as under jit: slot 2**32 was the first one, of another request."""
    pages, new = jnp.zeros((3, 16, 1, 4)), jnp.ones((1, 1, 4))
    with jax.enable_x64(True):
        table, slots = jnp.array([[page]]), jnp.array([slot])
        write = jax.jit(lambda slots: kernels.append_to_cache(new, new, pages, pages, slots))
        requests = {"kv_lens": [1], "query_start_loc": [0, 1]}
        attend = jax.jit(
            lambda t: kernels.chunked_prefill_paged_decode(new, new, new, pages, pages, block_tables=t, **requests)
        )
        assert not any(x.any() for x in (*write(slots), *attend(table)[1:]))


def test_donated_pages_are_written_in_place():
    shape, pages = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((2048, 16, 2, 16), jnp.float32)
    rows = [shape((8, n, 16), jnp.float32) for n in (4, 2, 2)]
    integers = [shape(n, jnp.int32) for n in ((8,), (8, 64), (9,))]
    run = jax.jit(lambda *x: kernels.chunked_prefill_paged_decode(*x), donate_argnums=(3, 4))
    memory = run.lower(*rows, pages, pages, *integers).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * 4 * pages.size > 4 * memory.temp_size_in_bytes


def test_new_keys_are_written_and_seen():
    a = append_and_attend_op.case_inputs(append_and_attend_op.cases[1])
    names = ("key", "value", "query_start_loc", "kv_lens", "block_tables")
    key, value, cuts, lens, tables = (np.asarray(a[n]) for n in names)
    caches = {n: np.array(a[n], copy=True) for n in ("key_cache", "value_cache")}
    scales = {n: np.broadcast_to(a[n], (27, 4, 2)) for n in ("k_scale", "v_scale")}
    for r, (begin, end) in enumerate(itertools.pairwise(cuts)):
        for row in range(begin, end):
            p = lens[r] - end + row
            at = (tables[r, p // 4], p % 4)
            for cache, scale, new in zip(caches.values(), scales.values(), (key, value)):
                cache[at] = np.clip(np.round(new[row] / scale[at][:, None]), -128, 127)
    got = append_and_attend_op(**a, cfg=SMALL)
    np.testing.assert_array_equal(got[1], caches["key_cache"])
    np.testing.assert_array_equal(got[2], caches["value_cache"])
    rest = {n: x for n, x in a.items() if n not in ("key", "value", *caches)}
    assert error(got[0], wanted(op, {**rest, **caches})) < 2e-6


def test_decoding_token_by_token_is_training_attention():
    """A scan over steps, its carry the pages: a prompt of 5, then one token at a time; as `flash_attention` of all at once."""
    T, B = 11, 2
    query, key, value = normal(B, T, N, H), normal(B, T, K, H), normal(B, T, K, H)
    more = {"sliding_window": 6, "alibi_slopes": np.float32([0.1, 0.2, 0.3, 0.4]), "softmax_aux": normal(N)}
    want = kernels.flash_attention(query, key, value, causal=True, **more)
    tables = np.int32([[3, 1, 5], [0, 4, 2]])
    pages = jnp.full((6, 4, K, H), jnp.nan)

    def step(caches, x):
        t, q, k, v = x
        where = (jnp.full(B, t + 1), tables, jnp.arange(B + 1))
        out, *caches = kernels.chunked_prefill_paged_decode(q, k, v, *caches, *where, **more)
        return caches, out

    @jax.jit
    def serve(query, key, value):
        first = [x[:, :5].reshape(B * 5, -1, H) for x in (query, key, value)]
        where = ([5, 5], tables, [0, 5, 10])
        out, *caches = kernels.chunked_prefill_paged_decode(*first, pages, pages, *where, **more)
        later = [x[:, 5:].swapaxes(0, 1) for x in (query, key, value)]
        rest = jax.lax.scan(step, caches, (jnp.arange(5, T), *later))[1]
        return jnp.concatenate([out.reshape(B, 5, N, H), rest.swapaxes(0, 1)], axis=1)

    np.testing.assert_allclose(serve(query, key, value), want, atol=2e-5)
