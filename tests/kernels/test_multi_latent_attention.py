"""Latent attention against NumPy in float64, alone and on meshes; its two forms against each other; what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from hypothesis import given, settings
from hypothesis import strategies as st

import ejdist
import kernels
from ejdist import MaskInfo, make_mesh
from kernels import Unsupported, flash_mla, mla_decode, multi_latent_ragged_page_attention
from kernels.ops.multi_latent_attention import decode_op, op, paged_op

RNG = np.random.default_rng(0)
B, T, N, H, HR, HV, R = 2, 12, 4, 6, 4, 5, 8


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape).astype(np.float32))


def inputs(batch=B, length=T, keys=T, heads=N, key_heads=N):
    return {
        "query": normal(batch, length, heads, H),
        "key_value": normal(batch, keys, R),
        "w_kc": normal(R, key_heads, H),
        "w_vc": normal(R, key_heads, HV),
        "query_rope": normal(batch, length, heads, HR),
        "key_rope": normal(batch, keys, HR),
    }


def of_one_query(q, q_rope, latents, w_kc, w_vc, k_rope, seen, scale, cap=None, sink=None):
    """Returns (out, lse) of one query of one head over all entries, float64: a key at a time."""
    logits, values = [], []
    for j, c in enumerate(latents):
        if seen[j]:
            x = scale * (q @ (c @ w_kc) + (q_rope @ k_rope[j] if q_rope is not None else 0))
            logits.append(cap * np.tanh(x / cap) if cap else x)
            values.append(c @ w_vc)
    every = np.asarray(logits + ([] if sink is None else [sink]))
    if not len(every):
        return np.zeros(w_vc.shape[-1]), -np.inf
    lse = every.max() + np.log(np.exp(every - every.max()).sum())
    out = sum((np.exp(x - lse) * v for x, v in zip(logits, values)), np.zeros(w_vc.shape[-1]))
    return out, lse


def numpy_mla(a, visible, scale=None, cap=None, sinks=None):
    """Returns (out, lse) for bool visible [B, T, S]."""
    a = {n: np.asarray(x, np.float64) for n, x in a.items()}
    q, rope = a["query"], a.get("query_rope")
    group = q.shape[2] // a["w_kc"].shape[1]
    scale = (q.shape[-1] + (0 if rope is None else rope.shape[-1])) ** -0.5 if scale is None else scale
    out, lse = np.zeros((*q.shape[:3], a["w_vc"].shape[-1])), np.zeros(q.shape[:3])
    for b, t, n in np.ndindex(lse.shape):
        out[b, t, n], lse[b, t, n] = of_one_query(
            q[b, t, n],
            None if rope is None else rope[b, t, n],
            a["key_value"][b],
            a["w_kc"][:, n // group],
            a["w_vc"][:, n // group],
            a["key_rope"][b] if rope is not None else None,
            visible[b, t],
            scale,
            cap,
            None if sinks is None else np.asarray(sinks, np.float64)[n],
        )
    return out, lse


def causal(batch, queries, keys):
    return np.broadcast_to(np.arange(keys) <= np.arange(queries)[:, None] + keys - queries, (batch, queries, keys))


IDS = np.sort(RNG.integers(-1, 3, (B, T)), axis=1)
SAME = (IDS[:, :, None] == IDS[:, None]) & (IDS >= 0)[..., None]
NEAR = np.arange(T)[:, None] - np.arange(T) < 4


def test_values_against_numpy():
    a, sinks = inputs(), normal(N)
    options = {"logits_soft_cap": 1.5, "softmax_scale": 0.4, "softmax_aux": sinks}
    got = flash_mla(**a, causal=True, segment_ids=IDS, sliding_window=4, return_lse=True, **options)
    want = numpy_mla(a, SAME & NEAR & causal(B, T, T), scale=0.4, cap=1.5, sinks=sinks)
    assert all(error(g, w) < 2e-6 for g, w in zip(got, want, strict=True))
    # Fewer queries than keys, grouped heads, no rotary part.
    a = {n: x for n, x in inputs(1, 3, 11, 4, 2).items() if "rope" not in n}
    assert error(flash_mla(**a, causal=True), numpy_mla(a, causal(1, 3, 11))[0]) < 2e-6
    # A query without a key.
    out, lse = flash_mla(**inputs(), segment_ids=np.full((B, T), -1), return_lse=True)
    assert (out == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("name", ["cum_seqlens", "cu_seqlens"])
def test_cuts_under_both_names(name):
    a = inputs(batch=1)
    ids = np.searchsorted([5, 9, T], np.arange(T), side="right")[None]
    want = numpy_mla(a, (ids[:, :, None] == ids[:, None]) & causal(1, T, T))[0]
    assert error(flash_mla(**a, causal=True, **{name: [0, 5, 9, T]}), want) < 2e-6


def test_gradients_of_the_contract_are_finite_differences():
    case = next(c for c in op.cases if c.name == "together")
    a = op.case_inputs(case)
    weigh = {}

    def loss(floats, mask, **options):
        out, lse = op.function(**floats, mask=mask, **options)
        weigh.setdefault("out", np.cos(np.arange(out.size)).reshape(out.shape))
        counted = jnp.isfinite(lse) & (mask.q_segment_ids >= 0)[..., None]  # padding has no cotangent
        return (out * weigh["out"]).sum() + (jnp.where(counted, lse, 0)).sum()

    with jax.enable_x64(True):
        floats = {n: jnp.asarray(x, jnp.float64) for n, x in a.items() if isinstance(x, jax.Array)}
        run = jax.jit(functools.partial(loss, mask=a["mask"], **case.options))
        gradients = jax.grad(run)(floats)
        for n, x in floats.items():
            way = jnp.asarray(RNG.standard_normal(x.shape))
            step = 1e-5
            difference = (run({**floats, n: x + step * way}) - run({**floats, n: x - step * way})) / (2 * step)
            np.testing.assert_allclose(jnp.vdot(gradients[n], way), difference, rtol=1e-6, atol=1e-8, err_msg=n)


def test_the_absorbed_form_is_the_same_attention():
    """Decoding over a cache, plain and in pages, gives the last rows of the whole, in value; the plain one in gradients too."""
    a = inputs(length=3)
    want, pull = jax.vjp(lambda a: flash_mla(**a, causal=True), a)

    def decode(a):
        cache = jnp.concatenate([a["key_value"], a["key_rope"]], -1)
        cache = jnp.pad(cache, ((0, 0), (0, 4), (0, 0)), constant_values=3.0)
        weights = a["w_kc"], a["w_vc"]
        return mla_decode(a["query"], a["query_rope"], cache, jnp.full(B, T), *weights)

    got, pull_decode = jax.vjp(decode, a)
    assert error(got, want) < 2e-6
    for n, g in pull_decode(jnp.cos(want))[0].items():
        assert error(g, pull(jnp.cos(want))[0][n]) < 5e-6, n


def test_decoding_meets_no_entries_but_those_in_sight():
    """Of a long cache, neither the blocks before the window nor what is behind a row, where NaN lies."""
    lens, S = jnp.array([600, 580]), 620
    query, rope, cache = normal(B, 2, N, R), normal(B, 2, N, HR), normal(B, S, R + HR)
    options = {"softmax_scale": 0.3, "sliding_window": 9}
    want = jax.jit(functools.partial(decode_op.function, **options))(query, rope, cache, lens)[0]
    at = jnp.arange(S)
    hidden = (at < 512) | (at >= lens[:, None])
    got = mla_decode(query, rope, jnp.where(hidden[..., None], jnp.nan, cache), lens, **options)
    assert error(got, want) < 2e-6


def paged(lens, counts, C=4, pages=40, rest=0, seed=0, width=0):
    """Returns (call, what it should give) of requests whose pages lie in any order; NaN where nothing was written."""
    rng = np.random.default_rng(seed)
    M = sum(counts) + rest
    weights = rng.standard_normal((R, N, H)), rng.standard_normal((R, N, HV))
    query, rope = rng.standard_normal((M, N, H)), rng.standard_normal((M, N, HR))
    cache = np.full((pages, C, R + HR), np.nan)
    tables = np.full((len(lens), max(width, *(-(-n // C) for n in lens)) + 2), 2**30)
    free = list(rng.permutation(pages))
    want, start = np.zeros((M, N, HV)), 0
    for r, (n, count) in enumerate(zip(lens, counts, strict=True)):
        entries = rng.standard_normal((n, R + HR))
        for j, e in enumerate(entries):
            if j % C == 0:
                tables[r, j // C] = free.pop()
            cache[tables[r, j // C], j % C] = e
        for t, h in np.ndindex(count, N):
            at = start + t
            seen = np.arange(n) <= n - count + t
            one = query[at, h], rope[at, h], entries[:, :R], weights[0][:, h], weights[1][:, h], entries[:, R:]
            want[at, h] = of_one_query(*one, seen, (H + HR) ** -0.5)[0]
        start += count
    arrays = [query, rope, cache, *weights]
    query, rope, cache, *weights = (jnp.asarray(x, jnp.float32) for x in arrays)
    starts = np.concatenate([[0], np.cumsum(counts)])
    indices = [jnp.asarray(x, jnp.int32) for x in (lens, tables, starts)]
    return (query, rope, cache, *indices, *weights), want


def test_pages_against_numpy():
    call, want = paged((1, 9, 0, 33, 20), (1, 9, 0, 1, 5), rest=2)
    assert error(multi_latent_ragged_page_attention(*call), want) < 2e-6
    # Absorbed by the caller: the same, before w_vc.
    absorbed = jnp.einsum("mnh,rnh->mnr", call[0], call[6])
    out = multi_latent_ragged_page_attention(absorbed, *call[1:6], softmax_scale=(H + HR) ** -0.5)
    assert error(jnp.einsum("mnr,rnv->mnv", out, call[7]), want) < 2e-6


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), min_size=4, max_size=4), st.integers(0, 9))
def test_any_requests_against_numpy(requests, seed):
    lens, counts = [max(n, t) for n, t in requests], [t for _, t in requests]
    # Always of the same shapes, so one program serves them all.
    call, want = paged(lens, counts, pages=70, rest=33 - sum(counts), seed=seed, width=10)
    assert error(multi_latent_ragged_page_attention(*call), want) < 3e-6


@pytest.mark.slow
def test_requests_of_narrow_and_unsigned_integers():
    query, rope, cache, lens, tables, cuts, *weights = paged((9, 20), (2, 9), pages=200)[0]
    cache, tables = jnp.nan_to_num(cache), tables % 128
    want = multi_latent_ragged_page_attention(query, rope, cache, lens, tables, cuts, *weights)
    for dtype in (jnp.int8, jnp.uint8, jnp.uint32):
        requests = (x.astype(dtype) for x in (lens, tables, cuts))
        assert error(multi_latent_ragged_page_attention(query, rope, cache, *requests, *weights), want) == 0


def test_past_the_last_page_of_a_table_there_is_nothing():
    """Where no value is read before the call, as under jit: the last page was read again, as what follows it."""
    query, rope, cache = normal(2, 1, 4), normal(2, 1, 2), normal(3, 4, 6)
    requests = [jnp.array(x, jnp.int32) for x in ([11, 2], [[0, 1], [2, 0]], [0, 1, 2])]
    call = functools.partial(multi_latent_ragged_page_attention, softmax_scale=0.3)
    contract = functools.partial(paged_op.function, softmax_scale=0.3)
    got, want = (jax.jit(f)(query, rope, cache, *requests) for f in (call, contract))
    assert error(got, want) < 2e-6


def test_a_cost_that_follows_kv_lens():
    """The trip counts are data: one program, and what it reads is the blocks that its requests have."""
    call, _ = paged((9, 3), (1, 1))
    text = jax.jit(multi_latent_ragged_page_attention).lower(*call).as_text()
    assert "stablehlo.while" in text
    wide = jax.ShapeDtypeStruct((2, 1 << 20), jnp.int32)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call]
    compiled = jax.jit(multi_latent_ragged_page_attention).lower(*shapes[:4], wide, *shapes[5:]).compile()
    # Eight tiles may each copy their row of the table; entries are gathered a block at a time.
    assert compiled.memory_analysis().temp_size_in_bytes < 10 * 4 * (1 << 20) + (1 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("differentiated", [False, True])
def test_memory_is_linear_in_the_length(differentiated):
    def temporaries(length):
        shapes = jax.eval_shape(lambda: inputs(1, 64, 64))
        shapes = {
            n: jax.ShapeDtypeStruct(tuple(length if s == 64 else s for s in x.shape), x.dtype)
            for n, x in shapes.items()
        }

        def run(a):
            return flash_mla(**a, causal=True).sum()

        run = jax.grad(run) if differentiated else run
        return jax.jit(run).lower(shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8192) < 5 * temporaries(2048)


# -- on a mesh ---------------------------------------------------------------------------------------------------------


def value_and_gradients(function, a, **options):
    def loss(a):
        out = function(**a, **options)
        return jnp.sum(jnp.sin(out)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(a)
    return {"out": out, **gradients}


@pytest.mark.slow  # latents over ranks are quick in test_latents.py
@pytest.mark.parametrize("sizes", [{"dp": 2, "sp": 2, "tp": 2}])
def test_on_a_mesh(sizes):
    """Batch, heads and sequence: the numbers and gradients of one device."""
    a = {**inputs(), "softmax_aux": normal(N)}
    options = {"causal": True, "segment_ids": IDS, "logits_soft_cap": 2.0}
    got = value_and_gradients(functools.partial(ejdist.flash_mla, mesh=make_mesh(**sizes)), a, **options)
    # The contract compiles in half the time, and the grid holds the operation to it.
    mask = MaskInfo.from_segments(jnp.asarray(IDS), causal=True)
    a["softmax_aux"] = a["softmax_aux"][:, None]
    want = value_and_gradients(lambda **a: op.function(**a, mask=mask, logits_soft_cap=2.0)[0], a)
    want["softmax_aux"] = want["softmax_aux"][:, 0]
    for n, w in want.items():
        assert error(got[n], w) < 1e-5, n


def dense_decode(query, query_rope, kv_cache, kv_lens, w_kc, w_vc, sliding_window):
    """The contract, which compiles in half the time; the grid holds the operation to it."""
    absorbed = jnp.einsum("btnh,rnh->btnr", query, w_kc)
    more = {"softmax_scale": (H + HR) ** -0.5, "sliding_window": sliding_window}
    return jnp.einsum("btnr,rnv->btnv", decode_op.function(absorbed, query_rope, kv_cache, kv_lens, **more)[0], w_vc)


def test_decoding_over_a_cache_that_is_split():
    a = {"query": normal(B, 1, N, H), "query_rope": normal(B, 1, N, HR), "kv_cache": normal(B, 16, R + HR)}
    a |= {"w_kc": normal(R, N, H), "w_vc": normal(R, N, HV)}
    lens = jnp.array([13, 3])  # the second has nothing on most devices
    want = value_and_gradients(dense_decode, a, kv_lens=lens, sliding_window=9)
    mesh = make_mesh(dp=1, sp=4, tp=2)
    got = value_and_gradients(functools.partial(ejdist.mla_decode, mesh=mesh), a, kv_lens=lens, sliding_window=9)
    for n, w in want.items():
        assert error(got[n], w) < 1e-5, n


def test_pages_with_the_heads_split():
    call, want = paged((9, 20), (2, 1))
    assert error(ejdist.multi_latent_ragged_page_attention(*call, mesh=make_mesh(tp=4)), want) < 2e-6


# -- what is refused ---------------------------------------------------------------------------------------------------

A = inputs()
CALL = paged((5, 2), (1, 1))[0]
NARROW = (A["query"], A["query_rope"], normal(B, 16, R + HR - 1), jnp.full(B, 9), A["w_kc"], A["w_vc"])
DECODE = (A["query"], A["query_rope"], normal(B, 16, R + HR), jnp.full(B, 9), A["w_kc"], A["w_vc"])


def pages(**changes):
    names = ("query", "query_rope", "kv_cache", "kv_lens", "block_tables", "query_start_loc", "w_kc", "w_vc")
    return multi_latent_ragged_page_attention(**{**dict(zip(names, CALL)), **changes})


def mla(**changes):
    return lambda: flash_mla(**{**A, **changes})


@pytest.mark.parametrize(
    ("said", "call"),
    [
        (r"'query' must be a float array \[B, T, N, H\], got float32 of shape \(12, 4, 6\)", mla(query=A["query"][0])),
        (r"'key_value' must be a float array .* int32", mla(key_value=A["key_value"].astype(jnp.int32))),
        (r"'key_value' of shape \(2, 0, 8\) is empty", mla(key_value=A["key_value"][:, :0])),
        (r"'w_kc' of shape .* has R = 7, but R = 8 in argument 'key_value'", mla(w_kc=A["w_kc"][:7])),
        (r"'query' has N = 4 heads and 'w_kc' has K = 3", mla(w_kc=A["w_kc"][:, :3], w_vc=A["w_vc"][:, :3])),
        (r"'query_rope' is given without 'key_rope'; pass both", mla(key_rope=None)),
        (r"'key_rope' is given without 'query_rope'", mla(query_rope=None)),
        (r"'logits_soft_cap' must be positive, got 0", mla(logits_soft_cap=0)),
        (r"'softmax_scale' is compiled into the program", mla(softmax_scale=jnp.float32(1))),
        (r"'softmax_aux' must be \[N\] or \[N, sinks\] with N = 4, got \(3,\)", mla(softmax_aux=normal(3))),
        (r"'cum_seqlens' and 'cu_seqlens' are two names for the same argument", mla(cum_seqlens=[0, 12], cu_seqlens=[0, 12])),
        (r"'cu_seqlens' splits one packed axis, so the batch must be 1, got 2", mla(cu_seqlens=[0, 12])),
        (r"'segment_ids' applies to queries and keys alike", lambda: flash_mla(**inputs(length=3), segment_ids=IDS)),
        (r"'mask_info' must be a MaskInfo, got str", mla(mask_info="causal")),
        (r"'w_kc' is bfloat16 but 'query' is float32", mla(w_kc=A["w_kc"].astype("bfloat16"))),
        (r"'kv_cache' has entries of width 11, .* R \+ Hr = 8 \+ 4", lambda: mla_decode(*NARROW)),
        (r"'w_kc' and 'w_vc' must be given together", lambda: mla_decode(*DECODE[:5])),
        (r"'softmax_scale' is required for an absorbed 'query'", lambda: mla_decode(*DECODE[:4])),
        (r"'sliding_window' must be a number of entries", lambda: mla_decode(*DECODE, sliding_window=(3, 0))),
        (r"'w_kc' \(8, 3, 6\) .* must be \[R, N, H\]", lambda: mla_decode(*DECODE[:4], A["w_kc"][:, :3], A["w_vc"])),
        (r"'kv_lens' must have an int dtype", lambda: mla_decode(*DECODE[:3], jnp.ones(B), *DECODE[4:])),
        (r"'query_start_loc' of shape \(2,\)", lambda: multi_latent_ragged_page_attention(*CALL[:5], CALL[5][1:], *CALL[6:])),
        (r"'softmax_scale' must be a finite number, got 'x'", mla(softmax_scale="x")),
        (r"'kv_lens' is missing", lambda: mla_decode(*DECODE[:3], None, *DECODE[4:])),
        (r"'kv_lens' has 17 keys, .* 'kv_cache' has room for 16", lambda: mla_decode(*DECODE[:3], [3, 17], *DECODE[4:])),
        (r"'sliding_window' must be a number of entries", lambda: mla_decode(*DECODE, sliding_window=True)),
        (r"'kv_lens' has 17 keys, .*4 pages of 4. has room for 16", lambda: pages(kv_lens=[17, 2])),
        (r"'kv_lens' must be at least 0, got -1", lambda: pages(kv_lens=[-1, 2])),
        (r"'block_tables' has page -7 for request 1", lambda: pages(block_tables=CALL[4].at[1].set(-7))),
        (r"'block_tables' has page 42949\d+ for request 0", lambda: pages(block_tables=np.asarray(CALL[4], int) + 2**32)),
        (r"'block_tables' of shape \(2, 0\) is empty", lambda: pages(block_tables=CALL[4][:, :0])),
        (r"'query_start_loc' must rise from 0", lambda: pages(query_start_loc=[0, 2, 1])),
        (r"'query_start_loc' ends at row 3, but there are 2", lambda: pages(query_start_loc=[0, 1, 3])),
        (r"'kv_cache' must be a float array", lambda: multi_latent_ragged_page_attention(*CALL[:2], CALL[2][0], *CALL[3:])),
    ],
)  # fmt: skip
def test_a_wrong_call_names_the_argument(said, call):
    with pytest.raises(ValueError, match=f"arguments? {said}"):
        call()


def test_pages_are_forward_only_and_other_backends_are_refused():
    with pytest.raises(NotImplementedError, match="it has no backward"):
        jax.grad(lambda q: multi_latent_ragged_page_attention(q, *CALL[1:]).sum())(CALL[0])
    with pytest.raises(Unsupported, match="has no pallas backend"):
        flash_mla(**A, platform="pallas")


def test_the_public_functions():
    assert kernels.operations()["multi_latent_ragged_page_attention"] is paged_op
    assert error(ejdist.FlashMLA()(**A, mask_info=MaskInfo(causal=True)), flash_mla(**A, causal=True)) < 1e-7
