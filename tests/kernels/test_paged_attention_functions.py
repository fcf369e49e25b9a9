"""What users call of paged attention: each function is the one engine, also on meshes, and says what is wrong with a call."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from paged_loop import CUTS, LENS, PAGE, QUERY, TABLES, loop, normal

import ejdist
import kernels
from ejdist import make_mesh
from kernels import Unsupported

# -- each is the one engine ----------------------------------------------------------------------------------------------------

PAGES = tuple(PAGE.values())
REQUESTS = {"query_start_loc": CUTS, "kv_lens": LENS, "block_tables": TABLES}
# The last new token of request 0 and that of request 1 go to page 3.
SHARED = {**REQUESTS, "kv_lens": np.int32([9, 1, 1]), "block_tables": np.int32([[5, 0, 3], [3, 7, 0], [2, 2, 2]])}
ROWS = QUERY[:6].reshape(3, 2, 4, 16)
close = functools.partial(np.testing.assert_allclose, atol=2e-5)


def says(function, *args, **kwargs):
    """Returns what a function makes of its arguments: the operation's own."""
    return {n: x for n, x in function.prepare(*args, **kwargs).call.arguments.items() if x is not None}


def same(one, other):
    assert one.keys() == other.keys()
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_ragged_functions_are_one_engine():
    want = loop(QUERY, PAGES[0], CUTS, LENS, TABLES, PAGES[1])
    close(kernels.unified_attention(QUERY, *PAGES, **REQUESTS), want)
    said = says(kernels.unified_attention, QUERY, *PAGES, **REQUESTS)
    cuts = {"cu_seqlens_q": CUTS, "cu_seqlens_k": np.int32([0, 9, 13, 14]), "page_indices": TABLES}  # as documented
    same(says(kernels.ragged_page_attention_v3, QUERY, *PAGES, **cuts), said)
    same(says(kernels.ragged_page_attention_v3, QUERY, *PAGES, **REQUESTS), said)
    # With fewer requests than there might be.
    combined = np.stack(PAGES, axis=3).reshape(8, 4, 4, 16)
    got = kernels.ragged_page_attention_v2(QUERY, combined, LENS, TABLES, CUTS, num_seqs=np.int32([2]))
    close(got, np.where(np.arange(7)[:, None, None] < 6, want, 0))


def test_functions_that_write_are_one_engine():
    new = normal(2, 7, 2, 16)
    out, *caches = kernels.ragged_page_attention_v3(QUERY, *PAGES, *new, **REQUESTS)
    again = kernels.append_to_cache(*new, *PAGES, **REQUESTS)
    traced = jax.jit(kernels.append_to_cache)(*new, *PAGES, **REQUESTS)  # nothing is known of where rows go
    for a, b, c in zip(caches, again, traced, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    close(out, loop(QUERY, caches[0], CUTS, LENS, TABLES, caches[1]))
    said = says(kernels.chunked_prefill_paged_decode, QUERY, *new, *PAGES, **REQUESTS)
    same(says(kernels.ragged_page_attention_v3, QUERY, *PAGES, *new, **REQUESTS), said)


def test_functions_of_rows_are_one_engine():
    want = loop(QUERY[:6], PAGES[0], [0, 2, 4, 6], LENS, TABLES, PAGES[1]).reshape(3, 2, 4, 16)
    said = says(kernels.page_attention, ROWS[:, 1:], *PAGES, LENS, TABLES, softmax_scale=0.25)
    named = {"kv_lens": LENS, "block_tables": TABLES, "scale": 0.25, "block_size": 4}
    same(says(kernels.page_attention, ROWS[:, 1], *PAGES, **named), said)
    close(kernels.prefill_page_attention(ROWS[0], *PAGES, 9, TABLES[0]), want[0])
    said = says(kernels.page_attention, ROWS, *PAGES, LENS, TABLES)
    same(says(kernels.prefill_page_attention, ROWS, *PAGES, LENS, TABLES), said)
    dense = tuple(x[TABLES].reshape(3, 12, 2, 16) for x in PAGES)
    start = np.int32([3, 4, 0])
    want = loop(QUERY[:3], dense[0], range(4), LENS, np.arange(3)[:, None], dense[1], starts=start)
    close(kernels.ragged_decode_attention(QUERY[:3], *dense, start, LENS), want)
    said = says(kernels.ragged_decode_attention, QUERY[:3], *dense, start, LENS)
    same(says(kernels.decode_attention, QUERY[:3], *dense, LENS), {n: x for n, x in said.items() if n != "kv_starts"})


def test_requests_may_be_lists_and_lists_of_traced_numbers():
    lens, tables, cuts = (x.tolist() for x in (LENS, TABLES, CUTS))
    said = says(kernels.unified_attention, QUERY, *PAGES, **REQUESTS)
    same(says(kernels.unified_attention, QUERY, *PAGES, lens, tables, cuts), said)
    said = says(kernels.page_attention, ROWS, *PAGES, LENS, TABLES)
    same(says(kernels.page_attention, ROWS, *PAGES, lens, tables), said)

    @jax.jit
    def step(first, page):
        requests = lens, [[page, *tables[0][1:]], *tables[1:]], [0, first, *cuts[2:]]
        return kernels.unified_attention(QUERY, *PAGES, *requests)

    close(step(cuts[1], tables[0][0]), loop(QUERY, PAGES[0], CUTS, LENS, TABLES, PAGES[1]))


def test_a_decode_step_over_8_bit_floats_that_need_no_scale():
    pages = [x.astype(jnp.float8_e4m3fn) for x in PAGES]
    want = loop(QUERY[:3], pages[0].astype(np.float32), range(4), LENS, TABLES, pages[1].astype(np.float32))
    close(kernels.page_attention(QUERY[:3], *pages, LENS, TABLES), want)


def test_every_function_takes_the_options_and_no_others():
    options = {
        "softmax_scale",
        "sliding_window",
        "logits_soft_cap",
        "softmax_aux",
        "alibi_slopes",
        "k_scale",
        "v_scale",
    }
    for name in ATTENDING:
        function = getattr(kernels, name)
        assert options <= set(inspect.signature(function).parameters) and "sinks, [N]" in function.__doc__
        with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'sofmax_scale'"):
            function(sofmax_scale=1.0)


# -- on a mesh ----------------------------------------------------------------------------------------------------------------

FOUR = {"kv_lens": np.int32([9, 4, 1, 7]), "block_tables": np.concatenate([TABLES, TABLES[:1]])}
DENSE = tuple(normal(4, 12, 2, 16) for _ in range(2))
NEW = tuple(normal(2, 7, 2, 16))
ON_MESH = {
    "page_attention": ((QUERY[:4], *PAGES), FOUR),
    "prefill_page_attention": ((QUERY, *PAGES, 9, TABLES[0]), {}),
    "decode_attention": ((QUERY[:4], *DENSE, FOUR["kv_lens"]), {}),
    "ragged_decode_attention": ((QUERY[:4], *DENSE, np.int32([3, 4, 0, 2]), FOUR["kv_lens"]), {}),
    "ragged_page_attention_v2": ((QUERY, np.stack(PAGES, axis=3).reshape(8, 4, 4, 16), LENS, TABLES, CUTS), {}),
    "ragged_page_attention_v3": ((QUERY, *PAGES, *NEW), REQUESTS),
    "unified_attention": ((QUERY, *PAGES), REQUESTS),
    "chunked_prefill_paged_decode": ((QUERY, *NEW, *PAGES), REQUESTS),
    "append_to_cache": ((*NEW, *PAGES), REQUESTS),
}
ATTENDING = [n for n in ON_MESH if n != "append_to_cache"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n != "page_attention")) for n in ON_MESH],
)
def test_on_a_mesh(name):
    """Heads over tp; rows of a batch over dp, tables with them; pages are whole, and tokens of ragged requests."""
    args, kwargs = ON_MESH[name]
    got = getattr(ejdist, name)(*args, **kwargs, mesh=make_mesh(dp=2, tp=2))
    want = getattr(kernels, name)(*args, **kwargs)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), got, want)
    shapes = [x.addressable_shards[0].data.shape for x in jax.tree.leaves(got)]
    rows = 2 if name in ("page_attention", "decode_attention", "ragged_decode_attention") else 7
    every = {"out": (rows, 2, 16), "caches": (8, 4, 1, 16)}
    kinds = {"ragged_page_attention_v3": "occ", "chunked_prefill_paged_decode": "occ", "append_to_cache": "cc"}
    assert shapes == [every["out" if kind == "o" else "caches"] for kind in kinds.get(name, "o")]


@pytest.mark.slow
def test_requests_over_dp_in_a_shard_map_of_the_callers_own():
    """Each device serves requests of its own over pages of its own, and has some of the heads."""
    mesh = make_mesh(dp=2, tp=2)
    halves = [jnp.stack([x, x[::-1]]) for x in (QUERY, *PAGES)]
    heads, pages, whole = P("dp", None, "tp"), P("dp", None, None, "tp"), P("dp")
    lengths = [jnp.asarray(x) for x in (([9, 4, 1], [12, 2, 5]), (TABLES, TABLES[::-1]), ([0, 5, 6, 7], [0, 1, 1, 7]))]

    def serve(query, key_cache, value_cache, *lengths):
        return kernels.unified_attention(*(x[0] for x in (query, key_cache, value_cache, *lengths)))[None]

    specs = (heads, pages, pages, whole, whole, whole)
    run = jax.jit(jax.shard_map(serve, mesh=mesh, in_specs=specs, out_specs=heads))
    got = run(*halves, *lengths)
    for i in range(2):
        query, key, value, lens, tables, cuts = (np.asarray(x[i]) for x in (*halves, *lengths))
        close(got[i], loop(query, key, cuts, lens, tables, value))


@pytest.mark.slow
def test_a_single_key_head_that_is_read_is_whole_on_every_device():
    pages = [x[:, :, :1] for x in PAGES]
    got = ejdist.page_attention(QUERY[:3], *pages, LENS, TABLES, mesh=make_mesh(tp=2))
    close(got, loop(QUERY[:3], pages[0], range(4), LENS, TABLES, pages[1]))


def test_a_single_key_head_that_is_written_is_repeated():
    pages, new = [x[:, :, :1] for x in PAGES], normal(7, 1, 16)
    with pytest.raises(ValueError, match=r"K = 1 of output 'new_key_cache' .* repeat that dim of 'key' and .* 2 times"):
        ejdist.chunked_prefill_paged_decode(QUERY, new, new, *pages, LENS, TABLES, CUTS, mesh=make_mesh(tp=2))


# -- what is refused ----------------------------------------------------------------------------------------------------------

ROW = (QUERY[:3], *PAGES, LENS, TABLES)
HEADS_FIRST = [normal(8, 2, 3, 16)] * 2
OUTER = normal(2, 5, 3, 16)
QUANTISED = dict.fromkeys(PAGE, np.zeros((8, 4, 2, 16), np.int8))


def of_rows(**changes):
    names = ("query", "key_cache", "value_cache", "context_lens", "block_tables")
    a = dict(zip(names, ROW)) | changes
    return lambda: kernels.page_attention(**a)


def unified(**changes):
    return lambda: kernels.unified_attention(**{**PAGE, "query": QUERY, **REQUESTS, **changes})


def v2(**changes):
    return kernels.ragged_page_attention_v2(QUERY, np.concatenate(PAGES, axis=2), LENS, TABLES, CUTS, **changes)


ILLEGAL = [
    ("page_attention: argument 'query' must be an array .*got shape", of_rows(query=QUERY[0])),
    ("'key_cache' must be an array .num_blocks, block_size, kv_heads, head_dim.", of_rows(key_cache=normal(4, 2, 16))),
    (
        r"'key_cache' of shape \(8, 2, 3, 16\) .* \[num_blocks, kv_heads, block_size, head_dim\]: pass key_cache.swapaxes",
        of_rows(key_cache=HEADS_FIRST[0], value_cache=HEADS_FIRST[1]),
    ),
    (
        "block_size = 3; it looks like .num_blocks, kv_heads, .*swapaxes",
        of_rows(key_cache=HEADS_FIRST[0], value_cache=HEADS_FIRST[1], block_size=3),
    ),
    (r"\[kv_heads, num_blocks, .*transpose\(1, 2, 0, 3\)", of_rows(key_cache=OUTER, value_cache=OUTER)),
    ("must be .* with head_dim = 16", of_rows(key_cache=normal(8, 4, 2, 8), value_cache=normal(8, 4, 2, 8))),
    ("'value_cache' must have the num_blocks", of_rows(value_cache=normal(7, 4, 2, 16))),
    ("with block_size = 5", of_rows(block_size=5)),
    ("'context_lens' is missing", of_rows(context_lens=None)),
    ("'context_lens' and 'kv_lens' are names for the same argument", of_rows(kv_lens=LENS)),
    ("'softmax_scale' and 'scale' are names for the same argument", of_rows(softmax_scale=1.0, scale=1.0)),
    ("'context_lens' has 2 lengths, but 'query' has 3 rows", of_rows(context_lens=LENS[:2])),
    ("'context_lens' must hold integers, got float32", of_rows(context_lens=LENS.astype(np.float32))),
    ("'block_tables' has 2 rows, but 'query' has 3", of_rows(block_tables=TABLES[:2])),
    ("'sliding_window' must be at least 1", of_rows(sliding_window=0)),
    ("'sliding_window' must be W or", of_rows(sliding_window=(1, 2, 3))),
    ("'logits_soft_cap' must be positive", of_rows(logits_soft_cap=0.0)),
    ("'softmax_scale' is compiled into the program", of_rows(softmax_scale=jnp.float32(1))),
    ("'softmax_aux' must be .N. or .N, sinks. with N = 4", of_rows(softmax_aux=normal(3))),
    ("'alibi_slopes' must be .N. with N = 4", of_rows(alibi_slopes=normal(2))),
    ("'k_scale' is missing: an int8 cache needs a scale", of_rows(**QUANTISED)),
    ("'v_scale' is missing", of_rows(**QUANTISED, k_scale=1.0)),
    ("'k_scale' applies to an int8 or 8-bit float cache", of_rows(k_scale=1.0)),
    ("'k_scale' must be one number, .*got .3,.", of_rows(**QUANTISED, k_scale=normal(3), v_scale=1.0)),
    ("'query' is float16, but the cache is float32; cast", of_rows(query=QUERY[:3].astype(np.float16))),
    ("'query' is float32, but the cache is uint8", of_rows(**{n: x.astype(np.uint8) for n, x in QUANTISED.items()})),
    ("'k_scale' must be a float, or floats, got 'a'", of_rows(**QUANTISED, k_scale="a", v_scale=1.0)),
    ("'softmax_scale' must be a finite number, got nan", of_rows(softmax_scale=float("nan"))),
    ("'logits_soft_cap' must be a finite number, got '5'", of_rows(logits_soft_cap="5")),
    ("'context_lens' has 13 keys, but a row of 'block_tables' .3 pages of 4. has room for 12", of_rows(context_lens=LENS + 4)),
    ("'context_lens' must be at least 0, got -1", of_rows(context_lens=LENS - 2)),
    ("'block_tables' has page -1 for request 0, which has keys on it", of_rows(block_tables=np.where(TABLES == 5, -1, TABLES))),
    ("'block_tables' has page 8 for request 1, .* pages 0 to 7", of_rows(block_tables=np.where(TABLES == 1, 8, TABLES))),
    ("'query_start_loc' must rise from 0", unified(query_start_loc=np.int32([0, 5, 3, 7]))),
    ("'query_start_loc' must rise from 0", unified(query_start_loc=np.uint8([0, 5, 3, 7]))),
    ("'query_start_loc' ends at row 9, but there are 7", unified(query_start_loc=np.int32([0, 5, 6, 9]))),
    ("'kv_lens' is missing", unified(kv_lens=None)),
    ("'context_lens' is missing", lambda: kernels.prefill_page_attention(QUERY, *PAGES, None, TABLES[0])),
    ("'num_seqs' must be between 0 and the 3 requests, got 5", lambda: v2(num_seqs=5)),
    ("'cu_seqlens_k' must be at least 0, got -4", lambda: kernels.ragged_page_attention_v3(
        QUERY, *PAGES, cu_seqlens_q=CUTS, cu_seqlens_k=np.int32([0, 9, 5, 6]), page_indices=TABLES)),
    ("'kv_lens' has 13 keys, but a row of 'key_cache' has room for 12", lambda: kernels.decode_attention(
        QUERY[:3], *[x[:3] for x in DENSE], LENS + 4)),
    ("'sequence_start' must be between 0 and 'sequence_end'", lambda: kernels.ragged_decode_attention(
        QUERY[:3], *[x[:3] for x in DENSE], LENS + 1, LENS)),
    ("'slots' has slot 3 twice", lambda: kernels.append_to_cache(*[x[:2] for x in NEW], *PAGES, [3, 3])),
    ("append_to_cache: argument 'block_tables' has slot 12 twice", lambda: kernels.append_to_cache(
        *NEW, *PAGES, **SHARED)),
    ("chunked_prefill_paged_decode: argument 'block_tables' has slot 12 twice", lambda: (
        kernels.chunked_prefill_paged_decode(QUERY, *NEW, *PAGES, **SHARED))),
    ("ragged_page_attention_v3: argument 'page_indices' has slot 12 twice", lambda: kernels.ragged_page_attention_v3(
        QUERY, *PAGES, *NEW, cu_seqlens_q=CUTS, kv_lens=SHARED["kv_lens"], page_indices=SHARED["block_tables"])),
    ("'slots' has slot 32, past the 8 pages", lambda: kernels.append_to_cache(*[x[:2] for x in NEW], *PAGES, [3, 32])),
    ("'slots' has slot 4294967299, past the 8 pages", lambda: kernels.append_to_cache(
        *[x[:2] for x in NEW], *PAGES, np.int64([2**32 + 3, 4]))),
    ("'value' is float16, but the cache is float32; cast it", lambda: kernels.append_to_cache(
        NEW[0], NEW[1].astype(np.float16), *PAGES, np.arange(7))),
    ("'key' is float16, but the cache is float32; cast it", lambda: kernels.chunked_prefill_paged_decode(
        QUERY, NEW[0].astype(np.float16), NEW[1], *PAGES, **REQUESTS)),
    ("'key' is float16, but the cache is float32; cast it", lambda: kernels.append_to_cache(
        *[x[:2].astype(np.float16) for x in NEW], *PAGES, [3, 4])),
    ("unified_attention: argument 'query' must be an array .M, N, H.", unified(query=QUERY[None])),
    ("'query' of shape .* is empty", unified(query=QUERY[:0])),
    ("'query_start_loc' has 2 requests .* but 'kv_lens' has 3", unified(query_start_loc=CUTS[:-1])),
    ("'block_tables' has 2 requests, but 'kv_lens' has 3", unified(block_tables=TABLES[:2])),
    ("'causal' is compiled into", unified(causal=jnp.bool_(True))),
    ("'causal' must be bool, got 'no'", unified(causal="no")),
    (
        "'kv_pages' must be .*keys at the even heads",
        lambda: kernels.ragged_page_attention_v2(QUERY, PAGE["key_cache"][:, :, :1], LENS, TABLES, CUTS),
    ),
    (
        "'num_seqs' must be one integer",
        lambda: kernels.ragged_page_attention_v2(QUERY, PAGE["key_cache"], LENS, TABLES, CUTS, num_seqs=LENS),
    ),
    (
        "'value' must be an array .* together",
        lambda: kernels.ragged_page_attention_v3(
            QUERY, *PAGES, normal(7, 2, 16), cu_seqlens_q=CUTS, kv_lens=LENS, page_indices=TABLES
        ),
    ),
    (
        "'key' is missing",
        lambda: kernels.chunked_prefill_paged_decode(QUERY, None, None, *PAGES, LENS, TABLES, CUTS),
    ),
    (
        "'slots' or all of 'query_start_loc', 'kv_lens' and 'block_tables'",
        lambda: kernels.append_to_cache(normal(3, 2, 16), normal(3, 2, 16), *PAGES, kv_lens=LENS),
    ),
    (
        "'slots' must have one slot for each of the 3 rows",
        lambda: kernels.append_to_cache(normal(3, 2, 16), normal(3, 2, 16), *PAGES, [1, 2]),
    ),
    (
        "decode_attention: argument 'key_cache' has 3 heads.*B, kv_heads, S, head_dim.: pass key_cache.swapaxes",
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
