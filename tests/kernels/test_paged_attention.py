"""Paged attention: against a loop over pages and against `flash_attention`, alone and on meshes, and what is refused."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ejdist
import kernels
from ejdist import make_mesh
from kernels import MaskInfo, Unsupported
from kernels.ops.flash_attention import op as flash_op
from kernels.ops.paged_attention import PagedAttentionConfig, append_and_attend_op, append_op, decode_op, op, page_op
from kernels.ops.paged_attention import xla as engine

RNG = np.random.default_rng(0)
F8 = jnp.float8_e4m3fn
# Blocks so small that a request has several, and a step has pairs of several requests and of one.
SMALL = PagedAttentionConfig(block_q=2, block_k=4, parallel=3)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def loop(
    query,
    key_cache,
    cuts,
    lens,
    tables,
    value_cache=None,
    k_scale=1.0,
    v_scale=1.0,
    softmax_aux=None,
    alibi_slopes=None,
    softmax_scale=None,
    logits_soft_cap=None,
    causal=True,
    window=None,
    starts=None,
):
    """Returns [M, N, Hv], float64: a loop over requests, queries, heads and keys, each key looked up in its page."""
    M, N, H = query.shape
    wide = [None if x is None else np.asarray(x, np.float64) for x in (query, key_cache, value_cache)]
    q, keys, values = wide
    if values is None:
        keys, values = keys[..., :H], keys[..., H:]
    keys, values = (
        x * np.broadcast_to(np.asarray(s, np.float64), x.shape[:3])[..., None]
        for x, s in ((keys, k_scale), (values, v_scale))
    )
    C, K = keys.shape[1:3]
    left, right = (None, None) if window is None else window
    out = np.zeros((M, N, values.shape[3]))
    for r, (begin, end) in enumerate(itertools.pairwise(np.asarray(cuts))):
        for row, n in itertools.product(range(begin, end), range(N)):
            i = lens[r] - (end - begin) + row - begin
            logits, seen = [], []
            for j in range(0 if starts is None else starts[r], min(lens[r], len(tables[r]) * C)):
                if (causal and j > i) or (left is not None and j < i - left) or (right is not None and j > i + right):
                    continue
                page, entry = tables[r][j // C], j % C
                x = q[row, n] @ keys[page, entry, n // (N // K)] * (softmax_scale or 1 / np.sqrt(H))
                x = x if logits_soft_cap is None else logits_soft_cap * np.tanh(x / logits_soft_cap)
                logits.append(x if alibi_slopes is None else x - alibi_slopes[n] * abs(i - j))
                seen.append(values[page, entry, n // (N // K)])
            if seen:
                sinks = [] if softmax_aux is None else list(softmax_aux[n])
                weights = np.exp(np.array(logits + sinks) - max(logits + sinks))
                out[row, n] = weights[: len(seen)] @ np.array(seen) / weights.sum()
    return out


def numbers(arguments):
    return {n: np.asarray(x) if isinstance(x, jax.Array) else x for n, x in arguments.items()}


def wanted(which, arguments):
    """Returns what the loop says of a case of one of the operations that attend."""
    a = numbers(arguments)
    if which is op:
        a["cuts"], a["lens"], a["tables"] = (a.pop(n) for n in ("query_start_loc", "kv_lens", "block_tables"))
        return loop(**a)
    B, T, N, H = a["query"].shape
    a["query"], a["cuts"], a["lens"] = a["query"].reshape(B * T, N, H), T * np.arange(B + 1), a.pop("kv_lens")
    a["tables"], a["starts"] = a.pop("block_tables", np.arange(B)[:, None]), a.pop("kv_starts", None)
    return loop(**a).reshape(B, T, N, -1)


CASES = [(o, c) for o in (op, page_op, decode_op) for c in o.cases if "bench" not in c.tags]


@pytest.mark.parametrize(
    ("which", "case"),
    [
        # A decode step alone is in "together" and in the grid of every operation.
        pytest.param(
            o, c, marks=[pytest.mark.slow] * (bool({"slow"} & c.tags) or c.name == "decode"), id=f"{o.name}-{c.name}"
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
    {"logits_soft_cap": 2.0, "alibi_slopes": np.abs(normal(N)), "cache": "float8_e4m3fn", "cfg": SMALL},
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
        shapes = (
            rng.permuted([(1, 1, 1), (1, 1, K), (PAGES, C, K)], axis=0)[:2]
            if index == 2
            else [(1, 1, K), (PAGES, C, K)]
        )
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


@given(index=st.integers(1, 2), **CALL)
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
    def temporary(longest):
        a = op.case_inputs(op.cases[0])
        a["block_tables"] = jnp.zeros((5, longest), jnp.int32)
        run = jax.jit(lambda a: op(**a, cfg=SMALL)).lower(a).compile()
        return run.memory_analysis().temp_size_in_bytes

    assert temporary(4096) <= temporary(8) + 1024


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


# -- the public functions -----------------------------------------------------------------------------------------------------

PAGE = {"key_cache": normal(8, 4, 2, 16), "value_cache": normal(8, 4, 2, 16)}
TABLES, LENS = np.int32([[5, 0, 3], [1, 7, 0], [2, 2, 2]]), np.int32([9, 4, 1])
CUTS = np.int32([0, 5, 6, 7])
QUERY = normal(7, 4, 16)


def test_ragged_functions_are_one_engine():
    want = loop(QUERY, PAGE["key_cache"], CUTS, LENS, TABLES, PAGE["value_cache"])
    close = functools.partial(np.testing.assert_allclose, atol=2e-5)
    close(kernels.unified_attention(QUERY, **PAGE, kv_lens=LENS, block_tables=TABLES, query_start_loc=CUTS), want)
    # The documented call; and with more requests than there are.
    cut, more = np.int32([0, 9, 13, 14]), {"page_indices": TABLES}
    pages = tuple(PAGE.values())
    close(kernels.ragged_page_attention_v3(QUERY, *pages, cu_seqlens_q=CUTS, cu_seqlens_k=cut, **more), want)
    combined = np.stack(pages, axis=3).reshape(8, 4, 4, 16)
    got = kernels.ragged_page_attention_v2(QUERY, combined, LENS, TABLES, CUTS, num_seqs=np.int32([2]))
    close(got, np.where(np.arange(7)[:, None, None] < 6, want, 0))
    new = normal(2, 7, 2, 16)
    lengths = {"query_start_loc": CUTS, "kv_lens": LENS, "block_tables": TABLES}
    out, *caches = kernels.ragged_page_attention_v3(QUERY, *pages, *new, **lengths)
    again = kernels.append_to_cache(*new, *pages, **lengths)
    for a, b in zip(caches, again, strict=True):
        np.testing.assert_array_equal(a, b)
    close(out, loop(QUERY, caches[0], CUTS, LENS, TABLES, caches[1]))


def test_functions_of_rows_are_one_engine():
    close = functools.partial(np.testing.assert_allclose, atol=2e-5)
    query, pages = QUERY[:6].reshape(3, 2, 4, 16), tuple(PAGE.values())
    want = loop(QUERY[:6], pages[0], [0, 2, 4, 6], LENS, TABLES, pages[1]).reshape(3, 2, 4, 16)
    close(kernels.page_attention(query, *pages, LENS, TABLES), want)
    close(kernels.page_attention(query[:, 1:], *pages, LENS, TABLES, scale=0.25, block_size=4), want[:, 1:])
    close(kernels.page_attention(query[:, 1], *pages, kv_lens=LENS, block_tables=TABLES), want[:, 1])
    close(kernels.prefill_page_attention(query[0], *pages, 9, TABLES[0]), want[0])
    dense = tuple(x[TABLES].reshape(3, 12, 2, 16) for x in pages)
    close(kernels.decode_attention(query[:, 1], *dense, LENS), want[:, 1])
    start = np.int32([3, 4, 0])
    want = loop(QUERY[:3], dense[0], range(4), LENS, np.arange(3)[:, None], dense[1], starts=start)
    close(kernels.ragged_decode_attention(QUERY[:3], *dense, start, LENS), want)


def test_an_8_bit_float_cache_needs_no_scale():
    pages = [x.astype(F8) for x in PAGE.values()]
    want = loop(QUERY[:3], pages[0].astype(np.float32), range(4), LENS, TABLES, pages[1].astype(np.float32))
    got = kernels.page_attention(QUERY[:3], *pages, LENS, TABLES)
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_sizes_may_be_symbols():
    m, r, b = jax.export.symbolic_shape("m, r, b")
    shape = jax.ShapeDtypeStruct
    a = op.case_inputs(op.cases[0])
    arrays = [a[n] for n in ("query", "key_cache", "query_start_loc", "kv_lens", "block_tables", "value_cache")]
    sizes = [(m, 4, 16), (12, 4, 2, 16), (r + 1,), (r,), (r, 5), (12, 4, 2, 16)]
    run = jax.jit(lambda *x: op(*x))
    exported = jax.export.export(run)(*(shape(s, x.dtype) for s, x in zip(sizes, arrays)))
    assert error(exported.call(*arrays), run(*arrays)) < 1e-6
    a = page_op.case_inputs(page_op.cases[0])
    arrays = [a[n] for n in ("query", "key_cache", "kv_lens", "block_tables", "value_cache")]
    sizes = [(b, 1, 4, 16), (10, 4, 2, 16), (b,), (b, 4), (10, 4, 2, 16)]
    run = jax.jit(lambda *x: page_op(*x))
    exported = jax.export.export(run)(*(shape(s, x.dtype) for s, x in zip(sizes, arrays)))
    assert error(exported.call(*arrays), run(*arrays)) < 1e-6


# -- on a mesh ----------------------------------------------------------------------------------------------------------------


def sharded_calls():
    pages, new = tuple(PAGE.values()), normal(2, 7, 2, 16)
    lengths = {"query_start_loc": CUTS, "kv_lens": LENS, "block_tables": TABLES}
    four = np.int32([9, 4, 1, 7]), np.concatenate([TABLES, TABLES[:1]])
    dense = tuple(normal(4, 12, 2, 16) for _ in range(2))
    one = tuple(x[:, :, :1] for x in pages)
    return {
        "page_attention": (QUERY[:4], *pages, *four),
        "decode_attention": (QUERY[:4], *dense, four[0]),
        "ragged_page_attention_v3": (QUERY, *pages, *new, lengths),
        "page_attention of one key head": (QUERY[:4], *one, *four),
    }


def test_a_single_key_head_that_is_written_is_repeated():
    pages, new = [x[:, :, :1] for x in PAGE.values()], normal(7, 1, 16)
    with pytest.raises(ValueError, match=r"K = 1 of output 'new_key_cache' .* repeat that dim of 'key' and .* 2 times"):
        ejdist.chunked_prefill_paged_decode(QUERY, new, new, *pages, LENS, TABLES, CUTS, mesh=make_mesh(tp=2))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * ("one key" in n)) for n in sharded_calls()]
)
def test_on_a_mesh(name):
    """Heads over tp; rows of a batch over dp, tables with them; pages are whole, and tokens of ragged requests."""
    *args, last = sharded_calls()[name]
    kwargs = last if isinstance(last, dict) else {}
    args = args if kwargs else [*args, last]
    function = name.split()[0]
    mesh = make_mesh(dp=2, tp=2)
    got = getattr(ejdist, function)(*args, **kwargs, mesh=mesh)
    want = getattr(kernels, function)(*args, **kwargs)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), got, want)
    if name in ("page_attention", "decode_attention"):
        assert {s.data.shape for s in got.addressable_shards} == {(2, 2, 16)}
    elif "v3" in name:
        assert [x.addressable_shards[0].data.shape[-2] for x in got] == [2, 1, 1]


# -- what is refused ----------------------------------------------------------------------------------------------------------

ROW = (QUERY[:3], *PAGE.values(), LENS, TABLES)
RAGGED = {**PAGE, "query": QUERY, "kv_lens": LENS, "block_tables": TABLES, "query_start_loc": CUTS}
HEADS_FIRST = [normal(8, 2, 3, 16)] * 2
OUTER = normal(2, 5, 3, 16)
INT8 = [np.zeros((8, 4, 2, 16), np.int8)] * 2


def rows(**changes):
    names = ("query", "key_cache", "value_cache", "context_lens", "block_tables")
    a = dict(zip(names, ROW)) | changes
    return lambda: kernels.page_attention(**a)


def unified(**changes):
    return lambda: kernels.unified_attention(**{**RAGGED, **changes})


ILLEGAL = [
    ("page_attention: argument 'query' must be an array .*got shape", rows(query=QUERY[0])),
    ("'key_cache' must be an array .num_blocks, block_size, kv_heads, head_dim.", rows(key_cache=normal(4, 2, 16))),
    (
        r"'key_cache' of shape \(8, 2, 3, 16\) .* \[num_blocks, kv_heads, block_size, head_dim\]: give key_cache.swapaxes",
        rows(key_cache=HEADS_FIRST[0], value_cache=HEADS_FIRST[1]),
    ),
    (
        "block_size = 3; it looks like .num_blocks, kv_heads, .*swapaxes",
        rows(key_cache=HEADS_FIRST[0], value_cache=HEADS_FIRST[1], block_size=3),
    ),
    (r"\[kv_heads, num_blocks, .*transpose\(1, 2, 0, 3\)", rows(key_cache=OUTER, value_cache=OUTER)),
    ("must be .* with head_dim = 16", rows(key_cache=normal(8, 4, 2, 8), value_cache=normal(8, 4, 2, 8))),
    ("'value_cache' must have the num_blocks", rows(value_cache=normal(7, 4, 2, 16))),
    ("with block_size = 5", rows(block_size=5)),
    ("'context_lens' is missing", rows(context_lens=None)),
    ("'context_lens' and 'kv_lens' say the same", rows(kv_lens=LENS)),
    ("'softmax_scale' and 'scale' say the same", rows(softmax_scale=1.0, scale=1.0)),
    ("'context_lens' has 2 lengths, and 'query' 3 rows", rows(context_lens=LENS[:2])),
    ("'context_lens' must hold integers, got float32", rows(context_lens=LENS.astype(np.float32))),
    ("'block_tables' has 2 rows, and 'query' 3", rows(block_tables=TABLES[:2])),
    ("'sliding_window' must be at least 1", rows(sliding_window=0)),
    ("'sliding_window' must be W or", rows(sliding_window=(1, 2, 3))),
    ("'logits_soft_cap' must be positive", rows(logits_soft_cap=0.0)),
    ("'softmax_scale' is compiled into the program", rows(softmax_scale=jnp.float32(1))),
    ("'softmax_aux' must be .N. or .N, sinks. with N = 4", rows(softmax_aux=normal(3))),
    ("'alibi_slopes' must be .N. with N = 4", rows(alibi_slopes=normal(2))),
    ("'k_scale' is missing: what is in an int8 cache", rows(key_cache=INT8[0], value_cache=INT8[1])),
    ("'v_scale' is missing", rows(key_cache=INT8[0], value_cache=INT8[1], k_scale=1.0)),
    ("'k_scale' is for an int8 or 8-bit float cache", rows(k_scale=1.0)),
    ("'k_scale' must be one number, .*got .3,.", rows(key_cache=INT8[0], value_cache=INT8[1], k_scale=normal(3), v_scale=1.0)),
    ("'query' is float16 and the cache float32; cast", rows(query=QUERY[:3].astype(np.float16))),
    (
        "'query' is float32 and the cache uint8; a cache is int8",
        rows(key_cache=INT8[0].astype(np.uint8), value_cache=INT8[1].astype(np.uint8)),
    ),
    ("unified_attention: argument 'query' must be an array .M, N, H.", unified(query=QUERY[None])),
    ("'query' of shape .* is empty", unified(query=QUERY[:0])),
    ("'query_start_loc' is for 2 requests .* and 'kv_lens' for 3", unified(query_start_loc=CUTS[:-1])),
    ("'block_tables' is for 2 requests and 'kv_lens' for 3", unified(block_tables=TABLES[:2])),
    ("'causal' is compiled into", unified(causal=jnp.bool_(True))),
    (
        "'kv_pages' must be .*keys at the even heads",
        lambda: kernels.ragged_page_attention_v2(QUERY, PAGE["key_cache"][:, :, :1], LENS, TABLES, CUTS),
    ),
    (
        "'num_seqs' must be one integer",
        lambda: kernels.ragged_page_attention_v2(QUERY, PAGE["key_cache"], LENS, TABLES, CUTS, num_seqs=LENS),
    ),
    (
        "'value' must be an array .* go together",
        lambda: kernels.ragged_page_attention_v3(
            QUERY, *PAGE.values(), normal(7, 2, 16), cu_seqlens_q=CUTS, kv_lens=LENS, page_indices=TABLES
        ),
    ),
    (
        "'key' is missing",
        lambda: kernels.chunked_prefill_paged_decode(QUERY, None, None, *PAGE.values(), LENS, TABLES, CUTS),
    ),
    (
        "'slots' or all of 'query_start_loc', 'kv_lens' and 'block_tables'",
        lambda: kernels.append_to_cache(normal(3, 2, 16), normal(3, 2, 16), *PAGE.values(), kv_lens=LENS),
    ),
    (
        "'slots' must have one slot for each of the 3 rows",
        lambda: kernels.append_to_cache(normal(3, 2, 16), normal(3, 2, 16), *PAGE.values(), [1, 2]),
    ),
    (
        "decode_attention: argument 'key_cache' has 3 heads.*B, kv_heads, S, head_dim.: give key_cache.swapaxes",
        lambda: kernels.decode_attention(QUERY[:3], *[normal(3, 2, 3, 16)] * 2, LENS),
    ),
    ("'key' must be .B, S, kv_heads, head_dim. of 3 rows", lambda: kernels.ragged_decode_attention(*ROW)),
]  # fmt: skip


@pytest.mark.parametrize(("said", "call"), ILLEGAL, ids=[said[:40] for said, _ in ILLEGAL])
def test_a_wrong_call_is_a_value_error(said, call):
    with pytest.raises(ValueError, match=said):
        call()


def test_gradients_are_refused_by_name():
    def loss(query, key_cache):
        return kernels.page_attention(query, key_cache, *ROW[2:]).sum()

    for at in (0, 1):
        with pytest.raises(Unsupported, match=r"page_attention has no backend .* it has no backward"):
            jax.grad(loss, at)(*ROW[:2])
