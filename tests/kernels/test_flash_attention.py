"""Flash attention: its contract against loops and finite differences, its blocks, its public functions, its refusals."""

import contextlib
import functools
import math
import re

import attention_loop as loop
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.engines.attention.masks import MaskInfo
from kernels.framework.binding import is_float_array
from kernels.framework.config import BwdParams, FwdParams
from kernels.framework.interpret import interpret
from kernels.ops.flash_attention import (
    FlashAttentionConfig,
    attention,
    expand_dropout_seed,
    flash_attention,
    flash_attention_backward,
    op,
    scaled_dot_product_attention,
)

CASES = [c for c in op.cases if "bench" not in c.tags]
WRITTEN = [
    c for c in CASES if c.name != "long"
]  # a Python loop over 300 x 300 pairs says nothing that 37 x 37 does not
FLOATS = ("query", "key", "value", "bias", "softmax_aux", "alibi_slopes")


def blocks(q, k):
    return FlashAttentionConfig(FwdParams(q_blocksize=q, kv_blocksize=k), BwdParams(q_blocksize=q, kv_blocksize=k))


def qkv(*shape, heads=4, kv_heads=2, width=16, seed=0, keys=None, dtype=jnp.float32):
    """Returns random query, key, value of shape [batch, length] x heads x width."""
    rng = np.random.default_rng(seed)
    batch, length = shape

    def make(t, n):
        return jnp.asarray(rng.standard_normal((batch, t, n, width)).astype(dtype))

    keys = length if keys is None else keys
    return make(length, heads), make(keys, kv_heads), make(keys, kv_heads)


# -- the contract ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[pytest.mark.slow] * ("slow" in c.tags)) for c in WRITTEN]
)
def test_contract_is_the_loop_and_its_gradient_the_finite_difference(case):
    """Value against float64 loops; every gradient, along random directions, against central differences of the loops."""
    given = op.case_inputs(case)
    floats = {n: np.asarray(given[n], np.float64) for n in FLOATS if given.get(n) is not None}
    options = {"softmax_scale": given.get("softmax_scale"), "cap": given.get("logits_soft_cap")}
    d = case.dims
    fixed = loop.plan(
        *(d[n] for n in ("B", "N", "T", "S")),
        given.get("mask"),
        given.get("dropout_seed"),
        given.get("dropout_prob", 0),
    )
    out, lse = loop.attention(*fixed, **floats, **options)
    rng = np.random.default_rng(0)
    d_out, d_lse = rng.standard_normal(out.shape), np.where(np.isfinite(lse), rng.standard_normal(lse.shape), 0)
    mask = given.get("mask")
    if mask is not None and mask.q_segment_ids is not None:  # padding has no cotangent
        d_lse = np.where((np.asarray(mask.q_segment_ids) >= 0)[..., None], d_lse, 0)

    def scalar(**arrays):
        o, s = loop.attention(*fixed, **arrays, **options)
        return (o * d_out).sum() + (np.where(np.isfinite(s), s, 0) * d_lse).sum()

    with jax.enable_x64(True):
        rest = {n: v for n, v in given.items() if n not in floats}

        @jax.jit
        def both(floats, d_outputs):
            got, pull = jax.vjp(lambda f: op.function(**f, **rest), floats)
            return got, pull(d_outputs)[0]

        got, gradients = jax.tree.map(np.asarray, both(floats, (d_out, d_lse)))
    np.testing.assert_allclose(got[0], out, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(got[1], lse, rtol=1e-6, atol=1e-7)
    assert set(gradients) == set(floats)
    step = 1e-5
    for name, value in floats.items():
        assert np.isfinite(gradients[name]).all(), name
        for _ in range(2):
            way = rng.standard_normal(value.shape)
            ahead, behind = (scalar(**{**floats, name: value + s * step * way}) for s in (1, -1))
            wanted = (ahead - behind) / (2 * step)
            size = np.linalg.norm(gradients[name]) + 1e-3
            assert abs((gradients[name] * way).sum() - wanted) < 1e-5 * size, name


@pytest.mark.parametrize(
    ("extra", "causal"),
    [
        *(("none", False), ("bias", True), ("mask", False), ("window", True)),
        *(
            pytest.param(e, c, marks=pytest.mark.slow)
            for e, c in (("none", True), ("bias", False), ("mask", True), ("window", False))
        ),
    ],
)
def test_agrees_with_jax_nn(causal, extra):
    q, k, v = qkv(2, 33)
    rng = np.random.default_rng(1)
    ours, theirs = {}, {}
    if extra == "bias":
        ours["bias"] = theirs["bias"] = jnp.asarray(rng.standard_normal((2, 4, 33, 33)).astype(np.float32))
    if extra == "mask":
        dense = rng.random((2, 1, 33, 33)) < 0.7
        dense[..., np.arange(33), np.arange(33)] = True  # their rows without a key are not zero
        ours["attention_mask"] = theirs["mask"] = jnp.asarray(dense)
    if extra == "window":
        ours["sliding_window"], theirs["local_window_size"] = (6, 0 if causal else 3), (6, 0 if causal else 3)
    ones = [flash_attention, jax.nn.dot_product_attention]
    named = [{"causal": causal, **ours}, {"is_causal": causal, **theirs}]

    @jax.jit
    def both(q, k, v):
        found = []
        for f, options in zip(ones, named, strict=True):
            out, pull = jax.vjp(functools.partial(f, **options), q, k, v)
            found.append((out, pull(jnp.cos(out))))
        return found

    with jax.default_matmul_precision("highest"):
        results = both(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *results)


# -- the blocks ------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # cases of the operation have blocks of several sizes
@pytest.mark.parametrize(
    "name",
    ["segments_sink_window", "together", "cum_seqlens_window_chunk"],
)
def test_the_block_size_is_not_in_the_numbers(name):
    given = op.case_inputs(next(c for c in CASES if c.name == name))
    floats = {n: v for n, v in given.items() if is_float_array(v)}
    rest = {n: v for n, v in given.items() if n not in floats}

    def run(cfg):
        out, pull = jax.vjp(lambda f: op(**f, **rest, cfg=cfg), floats)
        return out, pull(jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), jnp.cos(x), 0), out))

    wanted = run(None)
    for q, k in ((8, 24), (64, 1)):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), run(blocks(q, k)), wanted)


@pytest.mark.parametrize(
    ("name", "platform"),
    [("cross_causal", "xla"), *(pytest.param("together", p, marks=pytest.mark.slow) for p in ("xla", "pallas"))],
)
def test_keys_in_two_parts_with_the_global_lse_give_the_gradients_of_the_whole(name, platform):
    """What a ring does: each part's backward gets the lse and delta of the whole, never its own."""
    given = op.case_inputs(next(c for c in CASES if c.name == name))
    given.pop("softmax_aux", None)  # a ring joins the sinks itself, once
    S, cut = given["key"].shape[1], 20
    mask = given.get("mask") or MaskInfo()
    q_at, k_at = (jnp.asarray(x) for x in mask.positions(given["query"].shape[1], S))

    def part(keys):
        def of(x):
            return None if x is None else x[:, keys]

        smaller = mask.replace(q_positions=q_at, kv_positions=of(k_at), kv_segment_ids=of(mask.kv_segment_ids))
        changed = {"key": of(given["key"]), "value": of(given["value"]), "mask": smaller}
        if "bias" in given:
            changed["bias"] = given["bias"][..., keys]
        return {**given, **changed}

    halves = [part(slice(0, cut)), part(slice(cut, S))]
    out, lse = op(**given)
    outs, lses = zip(*(op(**h) for h in halves), strict=True)
    np.testing.assert_allclose(np.logaddexp(*lses), lse, atol=1e-5)
    merged = sum(
        o * jnp.exp(jnp.where(l > -jnp.inf, l - lse, -jnp.inf))[..., None] for o, l in zip(outs, lses, strict=True)
    )
    np.testing.assert_allclose(merged, out, atol=1e-5)

    floats = {n: v for n, v in given.items() if is_float_array(v)}
    rest = {n: v for n, v in given.items() if n not in floats}
    d_out = jnp.asarray(np.random.default_rng(5).standard_normal(out.shape).astype(np.float32))
    (whole,) = jax.vjp(lambda f: op(**f, **rest)[0], floats)[1](d_out)
    saved = {"d_out": d_out, "lse": lse, "delta": jnp.sum(d_out * out, axis=-1)}
    with interpret() if platform != "xla" else contextlib.nullcontext():
        first, second = (op.backward(saved, **h, platform=platform) for h in halves)
    for n, wanted in whole.items():
        dim = {"key": 1, "value": 1, "bias": 3}.get(n)
        got = first[n] + second[n] if dim is None else jnp.concatenate([first[n], second[n]], dim)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max(), err_msg=n)


def test_public_block_backward_takes_out_or_delta():
    q, k, v = qkv(1, 24)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
    d_out = jnp.cos(out)
    (wanted,) = jax.vjp(lambda x: flash_attention(*x, causal=True), (q, k, v))[1](d_out)
    for saved in ({"out": out}, {"delta": (d_out * out).sum(-1)}):
        got = flash_attention_backward(d_out, q, k, v, lse=lse, causal=True, **saved)
        for name, w in zip(("query", "key", "value"), wanted, strict=True):
            np.testing.assert_allclose(got[name], w, atol=1e-6)
    with pytest.raises(ValueError, match="'delta' and 'out'"):
        flash_attention_backward(d_out, q, k, v, lse=lse)
    wrong = [
        ({"lse": lse[:, :3]}, "'lse' must be"),
        ({"lse": None}, "'lse' must be a float array.*got NoneType"),
        ({"out": out.astype(int)}, "'out' must be a float array.*got int32"),
        ({"value": v[0]}, "'value' must be"),
        ({"return_lse": True}, "'return_lse'"),
    ]
    right = {"d_out": d_out, "query": q, "key": k, "value": v, "lse": lse, "out": out}
    for change, words in wrong:
        with pytest.raises(ValueError, match=words):
            flash_attention_backward(**{**right, **change})


def temporary_bytes(length, **options):
    shape = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)
    f = jax.jit(jax.grad(lambda *a: flash_attention(*a, **options).sum(), (0, 1, 2)))
    return f.lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", ["causal", pytest.param("segments", marks=pytest.mark.slow)])
def test_memory_of_forward_and_backward_is_linear_in_length(name):
    def options(length):
        ids = jnp.arange(length)[None] // 1000
        return {"causal": True, **({"q_segment_ids": ids} if name == "segments" else {})}

    small, large = (temporary_bytes(n, **options(n)) for n in (4096, 32768))
    assert large < 9 * small, (small, large)
    assert large < 32768**2 / 8  # not even a bit per pair


@pytest.mark.slow  # what is computed, not what comes out
def test_blocks_that_a_mask_hides_are_not_computed():
    """Keys that are NaN spoil whatever touches them, even with weight zero: so nothing did."""
    cfg = blocks(16, 16)
    q, k, v = qkv(1, 64)
    nan = jnp.full((1, 16, 2, 16), jnp.nan)

    def spoiled(at):
        return k.at[:, at : at + 16].set(nan), v.at[:, at : at + 16].set(nan)

    def run(q, k, v, **options):
        out, lse = flash_attention(q, k, v, cfg=cfg, return_lse=True, **options)
        saved = {"lse": jnp.nan_to_num(lse), "delta": jnp.zeros_like(lse)}
        return out, flash_attention_backward(jnp.ones_like(out), q, k, v, cfg=cfg, **saved, **options)

    # Causal: the last key block touches the last query block only.
    out, gradients = run(q, *spoiled(48), causal=True)
    assert jnp.isfinite(out[:, :48]).all() and jnp.isfinite(gradients["query"][:, :48]).all()
    assert jnp.isnan(out[:, 48:]).all()
    # Window, chunk: the last queries alone, far from the spoiled keys; dK and dV are zero there.
    documents = jnp.repeat(jnp.arange(4), 16)[None]
    shuffled = jnp.asarray([3, 1, 2, 0]).repeat(16)[None] * 16 + jnp.tile(jnp.arange(16), 4)[None]
    for options in (
        {"causal": True, "sliding_window": 17},
        {"causal": True, "chunk_size": 32},
        {"q_segment_ids": documents[:, 48:], "kv_segment_ids": documents},
        {"q_segment_ids": documents[:, :16] * 0 + 3, "kv_segment_ids": jnp.where(documents == 0, -1, documents)},
        {"causal": True, "q_positions": shuffled[:, 48:], "kv_positions": shuffled},
        {"attention_mask": jnp.zeros((1, 16, 64), bool).at[:, :, 30:].set(True)},
    ):
        out, gradients = run(q[:, 48:], *spoiled(0), **options)
        for x in (out, *gradients.values()):
            assert jnp.isfinite(x).all(), options
        assert (gradients["key"][:, :16] == 0).all() and (gradients["value"][:, :16] == 0).all()
    # Padding queries do no work either.
    out, gradients = run(jnp.full_like(q, jnp.nan), *spoiled(0), q_segment_ids=jnp.full((1, 64), -1))
    assert (out == 0).all() and all((g == 0).all() for g in gradients.values())


def test_a_row_without_keys_is_zero_whatever_is_done_with_its_lse():
    q, k, v = qkv(1, 12)
    ids = jnp.asarray([[0] * 5 + [-1] * 7])

    def loss(q, k, v):
        out, lse = flash_attention(q, k, v, q_segment_ids=ids, return_lse=True)
        return (out**2).sum() + jnp.exp(lse - jnp.inf * (lse == -jnp.inf)).sum() + (lse * lse).sum()

    out, lse = flash_attention(q, k, v, q_segment_ids=ids, return_lse=True)
    assert (out[:, 5:] == 0).all() and (lse[:, 5:] == -jnp.inf).all() and jnp.isfinite(lse[:, :5]).all()
    for g in jax.grad(loss, (0, 1, 2))(q, k, v):
        assert jnp.isfinite(g).all() and (g[:, 5:] == 0).all() and (g[:, :5] != 0).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_large_logits_do_not_overflow(dtype):
    q, k, v = qkv(1, 20, dtype=dtype)
    out, gradients = jax.value_and_grad(
        lambda q: (
            flash_attention(q * 200, k * 200, v, logits_soft_cap=5.0, softmax_aux=jnp.full(4, 50.0)).astype("f4").sum()
        )
    )(q)
    assert jnp.isfinite(out) and jnp.isfinite(gradients).all()
    plain = flash_attention(q * 200, k * 200, v, causal=True)
    assert jnp.isfinite(plain).all()


def test_float32_is_float32():
    """The dots ask for the highest precision; a device with tf32 or bfloat16 passes would otherwise take them."""
    x = jnp.ones((1, 32, 2, 8))
    text = jax.jit(jax.grad(lambda x: flash_attention(x, x, x).sum())).lower(x).as_text()
    dots = re.findall(r"dot_general .*", text)
    assert len(dots) >= 7 and all("precision = [HIGHEST, HIGHEST]" in d for d in dots), dots


def test_under_remat_the_saved_outputs_are_enough():
    """With out and lse kept, the backward calls one forward less."""
    q, k, v = qkv(1, 40)

    def loss(q, k, v):
        return jnp.sin(flash_attention(q, k, v, causal=True)).sum()

    policies = jax.checkpoint_policies
    keep = policies.save_only_these_names("flash_attention.out", "flash_attention.lse")
    wanted = jax.grad(loss, (0, 1, 2))(q, k, v)
    calls = {}
    for name, policy in (("keep", keep), ("nothing", policies.nothing_saveable)):
        f = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1, 2)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), f(q, k, v), wanted)
        calls[name] = str(jax.make_jaxpr(f)(q, k, v)).count("ejdist_call[")
    assert calls == {"keep": 2, "nothing": 3}, calls


# -- dropout ---------------------------------------------------------------------------------------------------------


def drawn(seed, length=256, probability=0.3, batch=2, heads=4):
    from kernels.engines.attention.dropout import dropout_scale

    at = jnp.arange(length)[None]
    return np.asarray(dropout_scale(expand_dropout_seed(seed, batch, heads), at, at, probability) > 0)


def test_dropout_is_even_and_independent_of_rows_columns_heads_and_seeds():
    a, b = drawn(7), drawn(8)
    assert (a == drawn(7)).all()

    def deviation(m):
        return math.sqrt(0.3 * 0.7 / m)

    assert abs(a.mean() - 0.7) < 5 * deviation(a.size)
    for dims in ((2, 3), (0, 1, 2), (0, 1, 3), (1, 2, 3)):
        means = a.mean(dims)
        assert np.abs(means - 0.7).max() < 6 * deviation(a.size // means.size), dims
    both = {
        "seed": (a, b),
        "row": (a[0], a[1]),
        "head": (a[:, 0], a[:, 1]),
        "query": (a[:, :, 1:], a[:, :, :-1]),
        "key": (a[..., 1:], a[..., :-1]),
        "diagonal": (a, a.swapaxes(2, 3)),
    }
    for name, (x, y) in both.items():
        off = ~np.eye(256, dtype=bool) if name == "diagonal" else True
        agree = np.mean((x == y), where=np.broadcast_to(off, x.shape))
        assert abs(agree - (0.7**2 + 0.3**2)) < 6 * math.sqrt(0.25 / x.size) * (1.5 if name == "diagonal" else 1), name


def test_dropout_follows_a_traced_seed():
    q, k, v = qkv(1, 40)
    traces = []

    @jax.jit
    def run(seed):
        traces.append(seed)
        return flash_attention(q, k, v, dropout_prob=0.5, dropout_seed=seed)

    first, second = run(1), run(2)
    assert len(traces) == 1 and not jnp.allclose(first, second)
    np.testing.assert_array_equal(first, run(1))
    np.testing.assert_allclose(first, flash_attention(q, k, v, dropout_prob=0.5, dropout_seed=1), atol=1e-6)
    np.testing.assert_array_equal(
        flash_attention(q, k, v, dropout_prob=0.5), flash_attention(q, k, v, dropout_prob=0.5, dropout_seed=0)
    )
    many = jax.vmap(run)(jnp.arange(300))
    np.testing.assert_allclose(many.mean(0), flash_attention(q, k, v), atol=0.2)


def test_dropout_goes_by_position_not_by_place():
    q, k, v = qkv(1, 32)
    order = np.random.default_rng(0).permutation(32)
    options = {"dropout_prob": 0.4, "dropout_seed": 3, "causal": True}
    moved = flash_attention(q[:, order], k[:, order], v[:, order], q_positions=order, **options)
    np.testing.assert_allclose(moved, flash_attention(q, k, v, **options)[:, order], atol=1e-6)


# -- the public functions --------------------------------------------------------------------------------------------


def test_every_mask_that_is_given_applies():
    q, k, v = qkv(2, 24)
    rng = np.random.default_rng(2)
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (2, 24)), axis=1))
    real = jnp.asarray(np.arange(24) < [[20], [24]])
    dense = jnp.asarray(rng.random((2, 4, 24, 24)) < 0.8)
    other = MaskInfo.from_segments(jnp.asarray(np.sort(rng.integers(0, 2, (2, 24)), axis=1)), window=(6, 0))
    i, j = np.arange(24)[:, None], np.arange(24)[None]
    wanted = (j <= i) & (j > i - 9) & (j >= i - 6)
    wanted = wanted & np.asarray(ids)[:, None, :, None].__eq__(np.asarray(ids)[:, None, None])
    theirs = np.asarray(other.q_segment_ids)
    wanted = wanted & (theirs[:, None, :, None] == theirs[:, None, None])
    both = np.asarray(dense) & np.asarray(real)[:, None, :, None] & np.asarray(real)[:, None, None]
    options = {"causal": True, "sliding_window": 9, "mask_info": other, "q_segment_ids": ids}
    for mask, all_of_it in ((real, wanted & both | False), (dense, wanted & np.asarray(dense))):
        expected = (
            all_of_it
            if mask is dense
            else wanted & np.asarray(real)[:, None, :, None] & np.asarray(real)[:, None, None]
        )
        got = flash_attention(q, k, v, attention_mask=mask, **options)
        np.testing.assert_allclose(got, flash_attention(q, k, v, attention_mask=jnp.asarray(expected)), atol=1e-6)


@pytest.mark.parametrize("W", [1, 5])
def test_a_window_of_w_is_exactly_w_keys(W):
    _, weights = attention(*qkv(1, 12), causal=True, sliding_window=W)
    np.testing.assert_array_equal((weights[0, 0] > 0).sum(-1), np.minimum(np.arange(12) + 1, W))
    _, weights = attention(*qkv(1, 12), sliding_window=(W, 2))
    assert (weights[0, 0, 6] > 0).sum() == min(6, W) + 3


@pytest.mark.parametrize("platform", ["contract", "xla", "triton", "pallas"])
def test_a_row_that_is_no_number_has_an_lse_that_is_none(platform):
    """-inf would say that it sees no key, and a merge with other keys would hide it. A cotangent of lse alone shows it too."""
    q, k, v = qkv(1, 16)
    k = k.at[0, 12, 0, 0].set(jnp.nan)

    def run(q):
        if platform == "contract":
            return op.function(query=q, key=k, value=v, mask=MaskInfo(causal=True))
        return flash_attention(q, k, v, causal=True, return_lse=True, platform=platform)

    with interpret():
        out, lse = run(q)
        gradient = jax.grad(lambda q: run(q)[1][:, 12:, :2].sum())(q) if platform in ("contract", "xla") else None
    heads = np.arange(4) < 2  # those that read the first key head
    wanted = (np.arange(16) >= 12)[:, None] & heads
    np.testing.assert_array_equal(np.isnan(lse)[0], wanted)
    np.testing.assert_array_equal(np.isnan(out)[0].all(-1), wanted)
    assert np.isfinite(np.asarray(lse)[0][~wanted]).all()
    assert gradient is None or np.isnan(gradient[0, 12:, :2]).all()


@pytest.mark.slow  # a case of the contract has them, which a loop over pairs has checked
@pytest.mark.parametrize("keys", [None, "other"])
def test_cum_seqlens_is_a_loop_over_sequences(keys):
    cu = np.array([0, 7, 7, 20, 26])
    cu_k = cu if keys is None else np.array([0, 9, 12, 30, 40])
    q, k, v = qkv(1, 30, keys=30 if keys is None else 44)
    names = {"cum_seqlens_q": jnp.asarray(cu), "cum_seqlens_k": None if keys is None else jnp.asarray(cu_k)}
    chunks = {"causal": True, "chunk_size": 4}, {"causal": True, "mask_info": MaskInfo(chunk_size=4)}
    for options in ({"causal": True}, {"sliding_window": (3, 1)}, *chunks):
        got = flash_attention(q, k, v, **names, **options)
        for s in range(4):
            a, b = slice(cu[s], cu[s + 1]), slice(cu_k[s], cu_k[s + 1])
            if cu[s] < cu[s + 1]:
                np.testing.assert_allclose(got[:, a], flash_attention(q[:, a], k[:, b], v[:, b], **options), atol=2e-6)
        assert (got[:, 26:] == 0).all()


def test_attention_returns_the_weights_it_used():
    q, k, v = qkv(2, 18)
    options = {"causal": True, "sliding_window": 7, "softmax_aux": jnp.asarray([0.1, 2.0, -1.0, 0.0])}
    out, weights = attention(q, k, v, **options)
    assert weights.shape == (2, 4, 18, 18) and weights.dtype == jnp.float32
    by_hand = jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(v, 2, axis=2))
    np.testing.assert_allclose(out, by_hand, atol=1e-5)
    assert (weights.sum(-1) < 1).all()  # the sink has the rest
    np.testing.assert_allclose(out, flash_attention(q, k, v, **options), atol=1e-6)
    np.testing.assert_allclose(attention(q, k, v)[1].sum(-1), 1, atol=1e-5)


def test_scaled_dot_product_attention_is_flash_attention():
    q, k, v = qkv(2, 18)
    real = jnp.arange(18)[None] < jnp.asarray([[18], [9]])
    got = scaled_dot_product_attention(q, k, v, attention_mask=real, causal=True)
    np.testing.assert_array_equal(got, flash_attention(q, k, v, attention_mask=real, causal=True))
    assert (got[1, 9:] == 0).all() and (got[1, :9] != 0).any()


Q, KV = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 8, 2, 16))
ONE_ROW = {"query": Q[:1], "key": KV[:1], "value": KV[:1]}
WRONG = [
    ({"key": jnp.ones((2, 8, 3, 16)), "value": jnp.ones((2, 8, 3, 16))}, "query heads must be a multiple"),
    ({"key": KV.astype(jnp.bfloat16)}, "'key' is bfloat16 but 'query' is float32"),
    ({"query": Q[0]}, "'query' must be"),
    ({"value": KV[:, :5]}, "'value'.*S = 5"),
    ({"key": jnp.ones((2, 8, 2, 12))}, "'key'.*H = 12"),
    ({"attention_mask": jnp.ones((2, 8, 7), bool)}, "'attention_mask' must broadcast"),
    ({"attention_mask": jnp.zeros((2, 1, 8, 8))}, "'attention_mask' must be boolean"),
    ({"bias": jnp.ones((2, 3, 8, 8))}, "'bias'.*N = 3"),
    ({"q_segment_ids": jnp.ones((2, 8))}, "'q_segment_ids' must hold integers"),
    ({"q_segment_ids": jnp.ones((2, 7), int)}, "'q_segment_ids' must be"),
    ({"kv_segment_ids": jnp.ones((2, 8), int)}, "must be given together"),
    ({"attention_mask": jnp.ones((2, 7), bool)}, "'attention_mask' of shape .2, 7. must be .B, S. = .2, 8."),
    ({"mask_info": MaskInfo(window=(0,))}, "'window' must be .left, right."),
    ({"kv_positions": jnp.ones((2, 8), int)}, "must be given together"),
    ({"q_positions": jnp.ones((3, 8), int)}, "'q_positions' must be"),
    ({"sliding_window": 0}, "'sliding_window'"),
    ({"sliding_window": (3, -1)}, "'sliding_window'"),
    ({"sliding_window": 2.5}, "'sliding_window'"),
    # Sums of it and a position would not be int32: a window of all keys would hide some.
    ({"sliding_window": (2**31 - 1, 2**31 - 1)}, "'sliding_window'.*less than 1073741824, or None"),
    ({"chunk_size": 2**40}, "'chunk_size'.*None for no chunks"),
    ({"chunk_size": 0}, "'chunk_size'"),
    ({"chunk_size": 4, "mask_info": MaskInfo(chunk_size=6)}, "'chunk_size' was given twice"),
    ({"dropout_prob": 1.0}, "'dropout_prob'"),
    ({"dropout_prob": 0.1, "dropout_seed": 0.5}, "'dropout_seed'"),
    ({"logits_soft_cap": 0.0}, "'logits_soft_cap'"),
    ({"softmax_aux": jnp.ones(3)}, "'softmax_aux'"),
    ({"softmax_aux": jnp.ones((4, 0))}, "'softmax_aux'.*None for no sinks"),
    ({"alibi_slopes": jnp.ones(3)}, "'alibi_slopes'.*N = 3"),
    ({"cum_seqlens_q": jnp.asarray([0, 8])}, "batch must be 1"),
    ({**ONE_ROW, "cum_seqlens_q": [3, 5]}, "'cum_seqlens_q' must rise from 0.*not the lengths"),
    ({**ONE_ROW, "cum_seqlens_q": np.uint8([0, 5, 3, 8])}, "'cum_seqlens_q' must rise from 0"),
    ({**ONE_ROW, "cum_seqlens_q": [0, 8], "cum_seqlens_k": [0, 9]}, "'cum_seqlens_k' must rise from 0 to at most 8"),
    ({"softmax_scale": jnp.ones(())}, "'softmax_scale'"),
    ({"platform": "cudda"}, "'platform'"),
    ({"query": Q[:0], "key": KV[:0], "value": KV[:0]}, "'query'.*is empty"),
    ({"key": KV[:, :0], "value": KV[:, :0]}, "'key'.*is empty"),
    ({"softmax_aux": 1.0}, "'softmax_aux' must be an array"),
    ({"alibi_slopes": [1.0] * 4}, "'alibi_slopes' must be an array"),
    ({"causal": jnp.asarray(True)}, "'causal' is compiled"),
    ({"mask_info": "causal"}, "'mask_info' must be a MaskInfo"),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=[w for _, w in WRONG])
def test_a_wrong_argument_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        flash_attention(**{"query": Q, "key": KV, "value": KV, **change})


def test_the_operation_itself_checks_its_mask_and_seed():
    with pytest.raises(ValueError, match="'kv_segment_ids' must be"):
        op(Q, KV, KV, MaskInfo.from_segments(jnp.zeros((2, 8), int), jnp.zeros((2, 9), int)))
    with pytest.raises(ValueError, match="'dropout_seed' is required"):
        op(Q, KV, KV, dropout_prob=0.5)
    with pytest.raises(ValueError, match="multiple of the key heads"):
        op(Q, jnp.ones((2, 8, 3, 16)), jnp.ones((2, 8, 3, 16)))
