"""The variants of attention against NumPy in float64, alone and on meshes; and what each refuses."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import apart, error
from sparse_calls import check_draws, contract_of

import ejdist
import kernels
from ejdist import make_mesh
from kernels import (
    Unsupported,
    differential_attention,
    flash_attention,
    linformer_attention,
    mixture_of_attention_heads,
    performer_attention,
    quantized_attention,
)
from kernels.ops.attention_variants import orthogonal_features

RNG = np.random.default_rng(0)
B, T, N, K, H, HV, D, E, P = 2, 11, 4, 2, 6, 5, 8, 5, 7


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape).astype(np.float32))


Q, Q2, KEY, KEY2, VALUE = (
    normal(B, T, N, H),
    normal(B, T, N, H),
    normal(B, T, K, H),
    normal(B, T, K, H),
    normal(B, T, K, HV),
)
CAUSAL = np.tril(np.ones((T, T), bool))
IDS = np.sort(RNG.integers(-1, 3, (B, T)), axis=1)
SAME = (IDS[:, :, None] == IDS[:, None]) & (IDS >= 0)[..., None]


def wide(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


def weigh(weight, v, visible=None):
    """Returns the means of v [B, S, K, Hv] by weights [B, T, N, S], float64, a pair at a time; 0 where there are none."""
    (v,) = wide(v)
    (rows, keys), queries, heads = v.shape[:2], weight.shape[1], weight.shape[2]
    out = np.zeros((rows, queries, heads, v.shape[-1]))
    for b, t, n in np.ndindex(out.shape[:3]):
        seen = [j for j in range(keys) if visible is None or visible[b, t, j]]
        total = sum(weight[b, t, n, j] for j in seen)
        for j in seen:
            out[b, t, n] += weight[b, t, n, j] / total * v[b, j, n // (heads // v.shape[2])]
    return out


def exponentials(q, k, scale=None):
    q, k = wide(q, k)
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    return np.exp(np.einsum("btnh,bsnh->btns", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale))


def test_differential_attention():
    lam = normal(N)
    visible = SAME & CAUSAL
    one, two = (weigh(exponentials(q, k), VALUE, visible) for q, k in ((Q, KEY), (Q2, KEY2)))
    got = differential_attention(Q, KEY, Q2, KEY2, VALUE, lam, causal=True, segment_ids=IDS)
    assert error(got, one - wide(lam)[0][:, None] * two) < 2e-6
    near = np.arange(T)[:, None] - np.arange(T) < 3
    visible = np.broadcast_to(CAUSAL & near, (B, T, T))
    one, two = (weigh(exponentials(q, k, 0.3), VALUE, visible) for q, k in ((Q, KEY), (Q2, KEY2)))
    options = {"causal": True, "sliding_window": 3, "softmax_scale": 0.3}
    assert error(differential_attention(Q, KEY, Q2, KEY2, VALUE, 0.2, **options), one - 0.2 * two) < 2e-6


def test_linformer_attention():
    e, f = normal(P, T), normal(P, T)
    mask = np.arange(T) < np.array([T, 4])[:, None]
    k, v = (
        np.einsum("ps,bskh->bpkh", wide(w)[0], wide(x)[0] * mask[..., None, None]) for w, x in ((e, KEY), (f, VALUE))
    )
    junk = jnp.where(mask[..., None, None], KEY, jnp.nan)  # of what is masked nothing is read, NaN neither
    got = linformer_attention(Q, junk, VALUE, e, f, key_mask=mask)
    assert error(got, weigh(exponentials(Q, k), v)) < 2e-6
    k = np.einsum("ps,bskh->bpkh", *wide(e, KEY))
    assert (
        error(
            linformer_attention(Q, KEY, VALUE, e),
            weigh(exponentials(Q, k), np.einsum("ps,bskh->bpkh", *wide(e, VALUE))),
        )
        < 2e-6
    )


def phi(x, features, scale):
    x = np.asarray(x, np.float64) * np.sqrt(scale)
    return np.exp(x @ np.asarray(features, np.float64).T - (x * x).sum(-1, keepdims=True) / 2)


@pytest.mark.parametrize("causal", [False, True])
def test_performer_attention(causal):
    features = normal(P, H)
    mask = np.arange(T) >= np.array([0, 4])[:, None]
    weight = np.einsum("btnp,bsnp->btns", phi(Q, features, H**-0.5), np.repeat(phi(KEY, features, H**-0.5), N // K, 2))
    visible = np.broadcast_to(mask[:, None] & (CAUSAL | (not causal)), (B, T, T))
    got = performer_attention(Q, KEY, VALUE, features, causal, key_mask=mask)
    assert error(got, weigh(weight, VALUE, visible)) < 2e-6


def test_the_weights_of_a_performer_are_those_of_a_softmax_in_the_mean():
    features = orthogonal_features(jax.random.key(0), 4096, H)
    np.testing.assert_allclose(
        features[:H] @ features[:H].T, np.diag(np.diag(features[:H] @ features[:H].T)), atol=1e-4
    )
    assert abs(float(jnp.mean(features**2)) - 1) < 0.05
    got = performer_attention(Q / 2, KEY / 2, VALUE, features)
    assert error(got, flash_attention(Q / 2, KEY / 2, VALUE)) < 0.05


def test_a_performer_does_not_overflow():
    """Over many chunks, where the logarithms of the features are far from 0 and grow along the sequence."""
    length = 200
    grow = jnp.linspace(0, 12, length)[None, :, None, None]
    q, k, v = normal(1, length, 1, H), normal(1, length, 1, H) + grow, normal(1, length, 1, HV)
    features = 3 * normal(P, H)
    weight = np.einsum("btnp,bsnp->btns", phi(q, features, 1.0), phi(k, features, 1.0))
    visible = np.tril(np.ones((length, length), bool))[None]
    got = performer_attention(q, k, v, features, True, softmax_scale=1.0)
    assert error(got, weigh(weight, v, visible)) < 2e-5


@pytest.mark.slow
def test_a_small_key_of_a_performer_is_not_lost_before_a_large_one():
    """The key of a long vector is small in every feature: divided by those after it, it would be 0, and the rows that see no
    other too."""
    length = 70
    q, k, v, features = normal(1, length, 2, H), normal(1, length, 1, H), normal(1, length, 1, HV), normal(P, H)
    long = np.zeros((1, length, 1, 1))
    long[:, [0, 1, 2, 20, 65]] = 20.0
    k = k + jnp.asarray(long, jnp.float32)

    def loss(function):
        return lambda *arrays: jnp.sum(jnp.sin(function(*arrays, causal=True)))

    contract = kernels.operations()["performer_attention"].function
    got = performer_attention(q, k, v, features, True)
    np.testing.assert_allclose(got, contract(q, k, v, features, causal=True), atol=2e-4)
    np.testing.assert_allclose(got[0, 0], np.broadcast_to(v[0, 0], (2, HV)), atol=1e-6)
    gradients = (jax.jit(jax.grad(loss(f), (0, 1, 2, 3)))(q, k, v, features) for f in (performer_attention, contract))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3), *gradients)


def test_mixture_of_attention_heads():
    x, key, value, logits = normal(B, T, D), normal(B, T, H), normal(B, T, HV), normal(B, T, E)
    w_query, w_out = normal(E, D, H), normal(E, HV, D)
    a = wide(x, key, value, logits, w_query, w_out)
    want = np.zeros((B, T, D))
    for b, t in np.ndindex(B, T):
        p = np.exp(a[3][b, t]) / np.exp(a[3][b, t]).sum()
        best = np.argsort(-p)[:2]
        for e in best:
            s = np.exp(a[0][b, t] @ a[4][e] @ a[1][b, : t + 1].T / np.sqrt(H))
            want[b, t] += p[e] / p[best].sum() * (s / s.sum() @ a[2][b, : t + 1] @ a[5][e])
    got = mixture_of_attention_heads(x, key, value, logits, w_query, w_out, 2, causal=True)
    assert error(got, want) < 2e-6


def numpy_quantized(x, block):
    """Returns x [B, T, N, H] rounded in blocks, a block at a time."""
    x = np.asarray(x, np.float64)
    out = np.zeros_like(x)
    for b, n in itertools.product(range(x.shape[0]), range(x.shape[2])):
        for t in range(0, x.shape[1], block):
            part = x[b, t : t + block, n]
            step = np.abs(part).max() / 127
            out[b, t : t + block, n] = np.round(part / step) * step
    return out


def test_quantized_attention():
    k = wide(KEY)[0] + 3  # what all keys have in common is taken off before it is rounded
    q, rounded = numpy_quantized(Q, 4), numpy_quantized(k - k.mean(1, keepdims=True), 4)
    want = weigh(exponentials(q, rounded), VALUE, np.broadcast_to(CAUSAL, (B, T, T)))
    got = quantized_attention(Q, KEY + 3, VALUE, causal=True, block_size=4)
    assert error(got, want) < 5e-6
    exact = flash_attention(Q, KEY, VALUE, causal=True)
    assert 1e-4 < error(got, exact) < 1e-2
    # Straight through: the gradients of exact attention.
    d = jnp.cos(jnp.arange(exact.size)).reshape(exact.shape)
    pulled = [
        jax.vjp(functools.partial(f, causal=True), Q, KEY, VALUE)[1](d) for f in (quantized_attention, flash_attention)
    ]
    assert all(error(g, w) < 1e-6 for g, w in zip(*pulled, strict=True))


def test_gradients_are_finite_differences():
    """Of the contracts, in float64; the grid holds every backend to them."""
    ops = kernels.operations()
    for name in ("differential_attention", "linformer_attention", "performer_attention"):
        op = ops[name]
        case = op.cases[1 if name == "differential_attention" else 0]
        a = op.case_inputs(case)
        with jax.enable_x64(True):
            floats = {
                n: jnp.asarray(x, jnp.float64)
                for n, x in a.items()
                if isinstance(x, jax.Array) and x.dtype == jnp.float32
            }
            rest = {n: x for n, x in a.items() if n not in floats}

            @jax.jit
            def loss(floats, op=op, rest=rest):
                return sum(
                    jnp.sum(jnp.sin(jnp.where(jnp.isfinite(y), y, 0)))
                    for y in jax.tree.leaves(op.function(**floats, **rest))
                )

            ways = {n: jnp.asarray(RNG.standard_normal(x.shape)) for n, x in floats.items()}
            gradients = jax.grad(loss)(floats)
            for n, way in ways.items():
                moved = [loss({**floats, n: floats[n] + s * 1e-5 * way}) for s in (1, -1)]
                np.testing.assert_allclose(
                    jnp.vdot(gradients[n], way), (moved[0] - moved[1]) / 2e-5, rtol=1e-6, atol=1e-8
                )


LINEAR = {
    "differential": lambda x, f: differential_attention(x, x, x, x, x, 0.3, causal=True),
    "performer": lambda x, f: performer_attention(x, x, x, f, causal=True),
    "quantized": lambda x, f: quantized_attention(x, x, x, causal=True),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in LINEAR])
def test_memory_is_linear_in_the_length(name):
    def temporaries(length):
        shapes = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
        run = jax.jit(jax.grad(lambda x, f: LINEAR[name](x, f).sum()))
        return run.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8192) < 5 * temporaries(2048)


# -- on a mesh ---------------------------------------------------------------------------------------------------------

ARRAYS = {"query": Q, "key": KEY, "value": VALUE}
CALLS = {
    "differential_attention": ({**ARRAYS, "query_2": Q2, "key_2": KEY2, "lambda_": normal(N)}, {"causal": True}),
    "linformer_attention": ({**ARRAYS, "key_projection": normal(P, T)}, {}),
    "performer_attention": ({**ARRAYS, "features": normal(P, H)}, {"causal": True}),
    "quantized_attention": (ARRAYS, {"segment_ids": IDS}),
    "mixture_of_attention_heads": (
        {
            "x": normal(B, T, D),
            "key": normal(B, T, H),
            "value": normal(B, T, HV),
            "router_logits": normal(B, T, E),
            "w_query": normal(E, D, H),
            "w_out": normal(E, HV, D),
        },
        {"top_k": 2, "causal": True},
    ),
}


def value_and_gradients(function, arrays, options):
    def loss(arrays):
        out = function(**arrays, **options)
        return jnp.sum(jnp.sin(out)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return {"out": out, **gradients}


@pytest.mark.slow  # the attention that they are made of is quick on meshes
@pytest.mark.parametrize("name", CALLS)
def test_on_a_mesh(name):
    arrays, options = CALLS[name]
    mesh = make_mesh(dp=2, tp=2)
    want = value_and_gradients(getattr(kernels, name), arrays, options)
    got = value_and_gradients(functools.partial(getattr(ejdist, name), mesh=mesh), arrays, options)
    for n, w in want.items():
        assert error(got[n], w) < 1e-5, n


# -- calls drawn at random ---------------------------------------------------------------------------------------------


def drawn(name, shapes, extra=lambda rng: {}, dtype=jnp.float32, **options):
    """Returns the entry of a table of draws: floats of these shapes, and what `extra` draws."""

    def draw(rng):
        large = rng.choice([0.1, 0.5, 0.8])  # a softmax that is all one key has gradients of rounding errors alone
        return {n: jnp.asarray(large * rng.standard_normal(s), dtype) for n, s in shapes.items()}, extra(rng)

    public, op = getattr(kernels, name), kernels.operations()[name]
    contract = functools.partial(contract_of(public, op, 0), **options)
    return functools.partial(public, **options), contract, draw, None, True


def attended(t, s, n, k, more=()):
    shapes = {"query": (2, t, n, 6), "key": (2, s, k, 6), "value": (2, s, k, 5), **dict(more)}
    return shapes | ({"query_2": shapes["query"], "key_2": shapes["key"]} if "lambda_" in shapes else {})


def ids(t):
    return lambda rng: {"segment_ids": jnp.asarray(rng.integers(-1, 3, (2, t)), jnp.int32)}  # in any order


def valid(s):
    return lambda rng: {"key_mask": jnp.asarray(rng.random((2, s)) < rng.choice([0.0, 0.5, 1.0]))}


def experts(s):
    shapes = {"x": (2, s, D), "key": (2, s, H), "value": (2, s, HV), "router_logits": (2, s, E)}
    return shapes | {"w_query": (E, D, H), "w_out": (E, HV, D)}


DRAWN = {
    "differential, segments": drawn(
        "differential_attention", attended(11, 11, 4, 2, [("lambda_", (4,))]), ids(11), causal=True
    ),
    "differential, window": drawn(
        "differential_attention", attended(7, 10, 2, 2, [("lambda_", ())]), sliding_window=(3, 1), softmax_scale=0.3
    ),
    "linformer, padding": drawn("linformer_attention", attended(9, 12, 4, 2, [("key_projection", (5, 12))]), valid(12)),
    "linformer, two projections": drawn(
        "linformer_attention", attended(3, 8, 2, 1, [("key_projection", (4, 8)), ("value_projection", (4, 8))])
    ),
    "performer, causal": drawn(
        "performer_attention", attended(70, 70, 2, 1, [("features", (6, 6))]), valid(70), causal=True
    ),
    "performer": drawn(
        "performer_attention", attended(5, 9, 4, 2, [("features", (7, 6))]), valid(9), softmax_scale=0.5
    ),
    "mixture, segments": drawn("mixture_of_attention_heads", experts(10), ids(10), causal=True, top_k=2),
    "mixture, all": drawn("mixture_of_attention_heads", experts(6), top_k=5, sliding_window=2),
    "quantized, segments": drawn("quantized_attention", attended(12, 12, 4, 2), ids(12), causal=True, block_size=5),
    "quantized": drawn("quantized_attention", attended(5, 9, 2, 2), block_size=4, softmax_scale=0.4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_many_legal_calls(name):
    # A mean that differs by its last bit may round an entry to the next integer.
    check_draws(DRAWN, name, range(150), (5e-3, 1e-4) if "quantized" in name else (5e-6, 5e-5))


def test_a_split_sequence_is_refused():
    with pytest.raises(ValueError, match=r"linformer_attention: .* dim [TS] split over sp"):
        x = normal(2, 4, 2, 4)
        ejdist.linformer_attention(x, x, x, normal(2, 4), mesh=make_mesh(dp=1, sp=2))


# -- what is refused ---------------------------------------------------------------------------------------------------


def of(name, **changes):
    arrays, options = CALLS[name]
    given = {**arrays, **options, **changes}
    return lambda: getattr(kernels, name)(**given)


@pytest.mark.parametrize(
    ("said", "call"),
    [
        (r"'query' must be a float array \[B, T, N, H\], got int32", of("differential_attention", query=Q.astype(int))),
        (
            r"'lambda_' must be a float, .* with N = 4, got float32 of shape \(3,\)",
            of("differential_attention", lambda_=normal(3)),
        ),
        (r"'query' has N = 4 heads and 'key' has K = 3", of("quantized_attention", key=normal(B, T, 3, H))),
        (r"'segment_ids' applies to queries and keys alike", of("quantized_attention", query=Q[:, :4])),
        (r"'causal' is compiled into the program", of("differential_attention", causal=jnp.bool_(True))),
        (r"'softmax_scale' must be float or None, got 'x'", of("linformer_attention", softmax_scale="x")),
        (r"'mask_info' must be a MaskInfo, got int", of("differential_attention", mask_info=3)),
        (
            r"'key_projection' of shape \(7, 10\) has S = 10, but S = 11",
            of("linformer_attention", key_projection=normal(P, T - 1)),
        ),
        (r"'key_mask' must be bool or 0/1 integers .* got float32", of("linformer_attention", key_mask=normal(B, T))),
        (r"'features' must be a float array \[P, H\], got list", of("performer_attention", features=[[1.0]])),
        (r"'causal' requires T = S, but there are 4 queries", of("performer_attention", query=Q[:, :4])),
        (r"'softmax_scale' must be at least 0, got -1", of("performer_attention", softmax_scale=-1)),
        (r"'value' of shape \(2, 0, 2, 5\) is empty", of("performer_attention", value=VALUE[:, :0])),
        (r"'top_k' must be an integer from 1 to E = 5, got 6", of("mixture_of_attention_heads", top_k=6)),
        (r"'w_out' of shape .* has E = 4, but E = 5", of("mixture_of_attention_heads", w_out=normal(4, HV, D))),
        (r"'block_size' must be a positive number of tokens, got 0", of("quantized_attention", block_size=0)),
    ],
)
def test_a_wrong_call_names_the_argument(said, call):
    with pytest.raises(ValueError, match=f"argument {said}"):
        call()


def test_a_dense_mask_for_each_head_is_refused_where_heads_are_experts():
    """In the order of their gates, which is another one for each token."""
    arrays, options = CALLS["mixture_of_attention_heads"]
    every = kernels.MaskInfo(attention_mask=jnp.ones((1, E, T, T), bool).at[0, 1, :, 0].set(False))
    call = functools.partial(mixture_of_attention_heads, **arrays, **{**options, "top_k": E})
    with pytest.raises(
        ValueError, match=r"'attention_mask' of shape \(1, 5, 11, 11\) .* pass one for all heads, \[B, 1, T, S\]"
    ):
        call(mask_info=every)
    one = kernels.MaskInfo(attention_mask=every.attention_mask[:, 1:2])
    got, contract = call(mask_info=one), kernels.operations()["mixture_of_attention_heads"].function
    mask = one.combine(kernels.MaskInfo(causal=True))
    want = contract(**{n: jnp.asarray(x) for n, x in arrays.items()}, mask=mask, top_k=E)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_dense_mask_is_refused_by_quantized_attention():
    dense = kernels.MaskInfo(attention_mask=jnp.ones((1, 1, T, T), bool))
    with pytest.raises(Unsupported, match="its mask is dense; use segments"):
        quantized_attention(Q, KEY, VALUE, mask_info=dense)


VARIANTS = [
    op for op in kernels.operations().values() if op.package.endswith(("attention_variants", "multi_latent_attention"))
]


@pytest.mark.parametrize("op", VARIANTS, ids=lambda op: op.name)
def test_what_is_nan_in_the_contract_is_nan(op):
    """An array with a NaN in its first token: no backend makes a number, or an lse of no key, of it."""
    case = next(c for c in op.cases if "bench" not in c.tags)
    traced, static = apart(op.case_inputs(case, dtype="float32"))
    both = jax.jit(lambda traced: [f(**traced, **static) for f in (op.function, functools.partial(op, platform="xla"))])
    for name, x in traced.items():
        if hasattr(x, "ndim") and x.ndim > 2 and jnp.issubdtype(x.dtype, jnp.floating):
            given = np.array(x)
            given[0, 0] = np.nan
            wanted, found = map(jax.tree.leaves, both({**traced, name: given}))
            assert any(np.isnan(x).any() for x in wanted) or name != "query"
            for want, got in zip(wanted, found):
                np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=name)
