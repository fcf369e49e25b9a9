"""linear_attention: against loops in float64, at decays of every size, in memory, on meshes, and what is refused."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, value_and_gradients
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy_recurrence import calls, check_call

import ejdist
import kernels
from kernels.ops.linear_attention import op

CASES = {case.name: case for case in op.cases}
SMALL = [case for case in op.cases if "bench" not in case.tags]


def numpy_loop(
    query, key, value, g=None, gk=None, gv=None, g_gamma=None, bonus=None, segment_ids=None, initial_state=None,
    *, softmax_scale=None, num_states=1,
):  # fmt: skip
    """Returns (out, final_state) in float64, by the formulas: one row, head and token at a time."""

    def wide(x):
        return None if x is None else np.asarray(x, np.float64)

    q, k, v, g, gk, gv, gamma, u = map(wide, (query, key, value, g, gk, gv, g_gamma, bonus))
    B, T, N, H = q.shape
    scale = 1 / np.sqrt(H) if softmax_scale is None else softmax_scale
    out = np.zeros((B, T, N, v.shape[-1]))
    final = np.zeros((B, num_states, N, H, v.shape[-1])) if initial_state is None else np.array(wide(initial_state))
    for b, n in np.ndindex(B, N):
        last = None
        for t in range(T):
            i = 0 if segment_ids is None else int(segment_ids[b, t])
            if i < 0:
                continue
            S = final[b, i if num_states > 1 else 0, n]  # a view
            if num_states == 1 and last not in (None, i):
                S[:] = 0
            last = i
            kt, vt = k[b, t, n * k.shape[2] // N], v[b, t, n * k.shape[2] // N]
            before, a, d = S.copy(), np.zeros(H), np.zeros(v.shape[-1])
            a += (
                (0 if gamma is None else gamma[n])
                + (0 if g is None else g[b, t, n])
                + (0 if gk is None else gk[b, t, n])
            )
            d += 0 if gv is None else gv[b, t, n]
            S[:] = np.exp(a)[:, None] * np.exp(d)[None] * S + np.outer(kt, vt)
            read = S if u is None else before + np.outer(u[n] * kt, vt)
            out[b, t, n] = scale * read.T @ q[b, t, n]
    return out, final


@pytest.mark.parametrize("case", [pytest.param(CASES[n], id=n) for n in ("every_decay", "rwkv6", "packed")])
def test_the_contract_against_numpy(case):
    a = op.case_inputs(case)
    for got, want in zip(op.reference(**a), numpy_loop(**a), strict=True):
        assert error(got, want) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small", "every_decay", "rwkv6", "packed"])
def test_gradients_against_finite_differences(name):
    a = op.case_inputs(CASES[name])
    _, gradients, d = value_and_gradients(op.function, a)
    rng = np.random.default_rng(0)
    for argument, gradient in gradients.items():
        way = rng.standard_normal(gradient.shape)

        def along(step, argument=argument, way=way):
            outputs = numpy_loop(**{**a, argument: np.asarray(a[argument], np.float64) + step * way})
            return sum(np.sum(y * np.asarray(c, np.float64)) for y, c in zip(outputs, d, strict=True))

        slope = (along(1e-5) - along(-1e-5)) / 2e-5
        assert abs(np.sum(np.asarray(gradient, np.float64) * way) - slope) < 2e-4 * max(1, abs(slope)), argument


# -- the chunks --------------------------------------------------------------------------------------------------------


def normal(rng, *shape, dtype="float32"):
    return jnp.asarray(rng.standard_normal(shape).astype(dtype))


def of_decay(kind, T=23, seed=0):
    """Returns a call in which every decay is as `kind` says, from forgetting nothing to forgetting all."""
    rng = np.random.default_rng(seed)
    B, N, H, Hv = 1, 2, 3, 2
    sizes = {"none": (-1e-6, -1e-6), "all": (-50, -50), "mixed": (-50, -1e-6), "infinite": (-50, -1e-6)}[kind]

    def log(*shape):
        return jnp.asarray(np.where(rng.random(shape) < 0.5, *sizes), jnp.float32)

    a = {"query": normal(rng, B, T, N, H), "key": normal(rng, B, T, N, H), "value": normal(rng, B, T, N, Hv)}
    a |= {"gk": log(B, T, N, H), "gv": log(B, T, N, Hv), "initial_state": normal(rng, B, 1, N, H, Hv)}
    if kind == "infinite":
        a["gk"] = a["gk"].at[:, 5:7].set(-jnp.inf)
    return a


@pytest.mark.parametrize(
    "kind", ["infinite", *(pytest.param(k, marks=pytest.mark.slow) for k in ("none", "all", "mixed"))]
)
@pytest.mark.parametrize("form", ["channels", pytest.param("head", marks=pytest.mark.slow)])
def test_chunks_and_steps_and_the_loop_agree_at_decays_of_every_size(kind, form):
    a = of_decay(kind)
    if form == "head":
        a |= {"g": a.pop("gk")[..., 0]}
        a.pop("gv")
    want, want_gradients, d = value_and_gradients(op.function, a)
    for got, exact in zip(want, numpy_loop(**a), strict=True):
        assert error(got, exact) < 1e-6
    for chunk in (1, 8):
        run = functools.partial(op, cfg=kernels.ChunkConfig(chunk))
        got, gradients, _ = value_and_gradients(run, a, d)
        for name, x, y in [(n, gradients[n], want_gradients[n]) for n in gradients] + [
            ("", *p) for p in zip(got, want)
        ]:
            assert error(x, y) < 5e-6, (chunk, name, error(x, y))


@pytest.mark.slow
def test_a_decay_that_forgets_all_beside_documents_and_a_bonus():
    """The query does not see its own token's decay then, and an infinite one is no part of it, not 0 times infinity."""
    rng = np.random.default_rng(0)
    arrays = {n: normal(rng, 1, 6, 1, 2) for n in "rkv"} | {"w": -jnp.ones((1, 6, 1, 2)), "u": normal(rng, 1, 2)}
    ids = jnp.asarray([[0, 0, 0, 0, 1, 1]])

    def run(decay):
        w = arrays["w"].at[:, jnp.asarray([2, 4])].set(decay)
        return jax.value_and_grad(lambda a: jnp.sum(kernels.rwkv6(**a, segment_ids=ids)))({**arrays, "w": w})

    jax.tree.map(np.testing.assert_allclose, run(-jnp.inf), run(-1e4))


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 129])
def test_every_length(T):
    a = of_decay("mixed", T)
    want, want_gradients, d = value_and_gradients(op.function, a)
    got, gradients, _ = value_and_gradients(op, a, d)
    assert max(map(error, got, want)) < 5e-6
    assert max(error(gradients[n], want_gradients[n]) for n in gradients) < 5e-6


def test_a_stream_of_pieces_is_the_whole():
    """State out, state in: token by token, then many at once."""
    rng = np.random.default_rng(3)
    q, k, v = (normal(rng, 2, 9, 2, 4) for _ in range(3))
    gamma = jnp.asarray([-0.1, -2.0])
    whole, last = kernels.recurrent_attention(q, k, v, g_gamma=gamma)
    outs, state = [], None
    for piece in (slice(0, 1), slice(1, 2), slice(2, 9)):
        out, state = kernels.recurrent_attention(q[:, piece], k[:, piece], v[:, piece], g_gamma=gamma, state=state)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), whole, atol=1e-6)
    np.testing.assert_allclose(state, last, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, allowed", [("float32", 1e-5), ("bfloat16", 5e-3)])
@pytest.mark.parametrize("decay", [-1e-6, -1e-3, -5.0])
def test_65536_steps(decay, dtype, allowed):
    rng = np.random.default_rng(0)
    T = 65536
    q, k, v = (normal(rng, 1, T, 1, 4, dtype=dtype) for _ in range(3))
    g = jnp.full((1, T, 1, 4), decay, "float32")
    got = kernels.gla_attention(q, k, v, g, return_state=True)
    want = numpy_loop(q, k, v, gk=g)
    assert error(got[0], want[0]) < allowed and error(got[1], want[1][:, 0]) < allowed


@pytest.mark.slow
def test_memory_is_linear_in_the_length():
    """Temporaries of the compiled forward and backward. The states of all tokens would be 16 times what the query is."""

    def temporaries(T):
        x, g = (jax.ShapeDtypeStruct((1, T, 1, 16), "float32") for _ in range(2))

        def loss(q, k, v, g):
            return jnp.sum(kernels.gla_attention(q, k, v, g, cfg=kernels.ChunkConfig(16)))

        return jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(x, x, x, g).compile().memory_analysis().temp_size_in_bytes

    short, long = temporaries(512), temporaries(2048)
    assert short < long < 4.2 * short and long < 14 * 4 * 2048 * 16  # in arrays of the size of query


# -- the public functions ----------------------------------------------------------------------------------------------


def test_the_functions_are_these_recurrences():
    """Among them the calls of the documents: gate=, decay=, and a state in and out."""
    rng = np.random.default_rng(1)
    q, k, v = normal(rng, 2, 6, 4, 3), normal(rng, 2, 6, 2, 3), normal(rng, 2, 6, 2, 5)
    g, gk, gv = (-jnp.abs(normal(rng, 2, 6, 4, *w)) for w in ((), (3,), (5,)))
    state = normal(rng, 2, 4, 3, 5)
    heads = np.arange(4)
    u = normal(rng, 4, 3)

    def check(got, state_after=None, **arguments):
        out, final = numpy_loop(q, k, v, **arguments)
        np.testing.assert_allclose(got, out, rtol=1e-5, atol=1e-5)
        if state_after is not None:
            np.testing.assert_allclose(state_after, final[:, 0], rtol=1e-5, atol=1e-5)

    check(kernels.gla_attention(q, k, v))
    check(kernels.gla_attention(q, k, v, gate=gk), gk=gk)
    check(kernels.gla_attention(q, k, v, g, jnp.asarray(-0.5)), g=g, g_gamma=np.full(4, -0.5))
    check(kernels.gla_attention(q, k, v, gk[:, :, :2]), gk=jnp.repeat(gk[:, :, :2], 2, 2))
    check(kernels.lightning_attention(q, k, v, 1, 4), g_gamma=-8 * heads / 4 * (1 - 1 / 4))
    check(
        kernels.lightning_attention(q, k, v, decay=heads / 2.0, softmax_scale=1.0), g_gamma=-heads / 2, softmax_scale=1
    )
    check(kernels.retention(q, k, v), g_gamma=np.log(1 - 2.0 ** (-5 - heads)))
    first = {"initial_state": state[:, None]}
    check(*kernels.recurrent_attention(q, k, v, g, None, gk, gv, state=state), g=g, gk=gk, gv=gv, **first)
    check(*kernels.recurrent_attention(q, k, v, gk, gk=gk), gk=2 * gk)
    check(kernels.recurrent_attention(q, k, v, return_state=False))
    check(*kernels.rwkv6(q, k, v, gk, u, initial_state=state, return_state=True), gk=gk, bonus=u, **first)


def test_the_layer_may_be_traced():
    x = normal(np.random.default_rng(0), 1, 3, 2, 2)
    traced = jax.jit(lambda layer: kernels.lightning_attention(x, x, x, layer, 3))(2)
    np.testing.assert_allclose(traced, kernels.lightning_attention(x, x, x, 2, 3), atol=1e-6)


def test_packed_sequences_are_sequences_of_their_own():
    rng = np.random.default_rng(2)
    q, k, v, gk = (normal(rng, 1, 12, 2, 3) for _ in range(4))
    gk, state, cuts = -jnp.abs(gk), normal(rng, 3, 2, 3, 3), [0, 5, 5, 11]
    out, final = kernels.gla_attention(q, k, v, gk, cu_seqlens=cuts, initial_state=state, return_state=True)
    for i, (a, b) in enumerate(itertools.pairwise(cuts)):
        own = slice(a, b)
        want, after = numpy_loop(q[:, own], k[:, own], v[:, own], gk=gk[:, own], initial_state=state[i][None, None])
        np.testing.assert_allclose(out[:, own], want, atol=1e-5)
        np.testing.assert_allclose(final[i], after[0, 0], atol=1e-5)
    assert (out[:, 11:] == 0).all()
    ids = jnp.asarray([[0] * 5 + [4] * 6 + [-1]])
    by_ids = kernels.gla_attention(q, k, v, gk, segment_ids=ids)
    np.testing.assert_allclose(by_ids, kernels.gla_attention(q, k, v, gk, cum_seqlens=cuts), atol=1e-6)


X = jnp.ones((2, 4, 4, 3))
KV = jnp.ones((2, 4, 2, 3))
WRONG = {
    "'query' must be a float array [B, T, N, H], got float32 of shape (4, 4, 3)": ("gla_attention", (X[0], X, X), {}),
    "'value' must be a float array [B, T, K, Hv], got list": ("retention", (X, X, [1.0]), {}),
    "'key' of shape (2, 0, 4, 3) has no elements": ("gla_attention", (X, X[:, :0], X), {}),
    "'key' must have the shape (2, 4, 4, 3) to match 'query'": ("gla_attention", (X, X[..., :2], X), {}),
    "'v' must have the shape (2, 4, 4, 3) to match 'k'": ("rwkv6", (X, X, KV, X, X[0, 0]), {}),
    "'query' has N = 4 heads, which must be a multiple of the K = 3": ("retention", (X, X[:, :, :3], X[:, :, :3]), {}),
    "arguments 'g' and 'gate' are two names": ("gla_attention", (X, X, X, X), {"gate": X}),
    "arguments 'initial_state' and 'state' are two names": ("retention", (X, X, X), {"state": X, "initial_state": X}),
    "'gate' must be a float array of log decays [2, 4, 4, 3]": ("gla_attention", (X, X, X), {"gate": X[..., :1]}),
    "'g' must be a float array of log decays [2, 4, 4]": ("gla_attention", (X, X, X, X[..., :3, 0]), {}),
    "'gv' must be a float array of log decays": ("recurrent_attention", (X, X, X), {"gv": X[:, :3]}),
    "'g_gamma' must be a float or a float array [N]": ("retention", (X, X, X, jnp.ones(3)), {}),
    "'u' must be a float array [N, H] = [4, 3], got float32 of shape (3,)": ("rwkv6", (X, X, X, X, X[0, 0, 0]), {}),
    "'w' must be a float array of log decays [B, T, N, H], got None": ("rwkv6", (X, X, X, None, X[0, 0]), {}),
    "'decay' [N], the rate at which heads forget": ("lightning_attention", (X, X, X), {}),
    "'decay' [N], the": ("lightning_attention", (X, X, X, 1, 2), {"decay": 0.5}),
    "'decay' [N]": ("lightning_attention", (X, X, X, 1), {}),
    "'layer_idx' must be in [0, num_layers = 2), got 2": ("lightning_attention", (X, X, X, 2, 2), {}),
    "'layer_idx' must be an integer, got nan": ("lightning_attention", (X, X, X, float("nan"), 2), {}),
    "'layer_idx' must be an integer, got 'x'": ("lightning_attention", (X, X, X, "x", 2), {}),
    "'layer_idx' must be in [0, num_layers = 2), got -1": ("lightning_attention", (X, X, X, jnp.int32(-1), 2), {}),
    "'num_layers' must be a positive integer, got 2.0": ("lightning_attention", (X, X, X, 1, 2.0), {}),
    "'decay' must be a float or a float array [N]": ("lightning_attention", (X, X, X), {"decay": jnp.ones((4, 1))}),
    "'decay' must be a float or a float array [N] = [4], one for each head, got <U1": (
        "lightning_attention", (X, X, X), {"decay": "x"},
    ),
    "'g_gamma' must be a float or a float array [N] = [4], one for each head, got list": (
        "gla_attention", (X, X, X), {"g_gamma": [[-1.0], [-1.0, -2.0]]},
    ),
    "'initial_state' must be a float array [B, ...] = [2, 4, 3, 3]": ("rwkv6", (X, X, X, X, X[0, 0]), {"state": X}),
    "'cum_seqlens' splits one packed row": ("recurrent_attention", (X, X, X), {"cu_seqlens": [0, 4]}),
}  # fmt: skip


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_call_is_a_value_error(said):
    name, args, options = WRONG[said]
    said = said.removeprefix("arguments ")
    for library in (kernels, ejdist):
        with pytest.raises(ValueError, match=f"{name}: argument.*" + re.escape(said)):
            getattr(library, name)(*args, **options)


def test_a_chunk_is_a_power_of_two():
    with pytest.raises(ValueError, match="chunk = 48 is not a power of 2; use one, or None"):
        kernels.ChunkConfig(48)
    with pytest.raises(ValueError, match="N = 4 heads, not a multiple of the key's K = 3"):
        op(X, X[:, :, :3], X[:, :, :3])


# -- any call ----------------------------------------------------------------------------------------------------------


def check_any(seed):
    rng = np.random.default_rng(seed)
    B, T, K, H, Hv = (
        1 + rng.integers(2),
        1 + rng.integers(40),
        1 + rng.integers(2),
        1 + rng.integers(5),
        1 + rng.integers(5),
    )
    N, G = K * (1 + rng.integers(2)), 1 + rng.integers(3)
    shapes = {"g": (B, T, N), "gk": (B, T, N, H), "gv": (B, T, N, Hv), "g_gamma": (N,), "bonus": (N, H)}
    shapes["initial_state"] = (B, G, N, H, Hv)
    a = {"query": normal(rng, B, T, N, H), "key": normal(rng, B, T, K, H), "value": normal(rng, B, T, K, Hv)}
    for name, shape in shapes.items():
        if rng.random() < 0.4:
            a[name] = normal(rng, *shape)
            if name.startswith("g"):
                a[name] = -jnp.exp(3 * a[name])
    if G > 1:
        a["segment_ids"], a["num_states"] = jnp.asarray(np.sort(rng.integers(-1, G, (B, T)), axis=1)), int(G)
    elif rng.random() < 0.6:
        a["segment_ids"] = jnp.asarray(rng.integers(-1, 3, (B, T)).repeat(3, axis=1)[:, :T])
    cfg = kernels.ChunkConfig(int(2 ** rng.integers(6)))
    want, want_gradients, d = value_and_gradients(op.function, a)
    got, gradients, _ = value_and_gradients(functools.partial(op, cfg=cfg), a, d)
    for x, y in zip(want, numpy_loop(**a), strict=True):
        assert error(x, y) < 2e-6
    assert max(map(error, got, want)) < 1e-5, a.keys()
    assert all(error(gradients[n], want_gradients[n]) < 2e-5 for n in gradients), a.keys()


@pytest.mark.slow  # one drawn call; each option has a quick test, and 300 draws are slow
@settings(max_examples=1, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**31))
def test_any_call(seed):
    check_any(seed)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**31))
def test_any_call_300_times(seed):
    check_any(seed)


def random_call(drawn):
    """Of a public function."""
    name, (N, K), rng = drawn["name"], drawn["heads"], np.random.default_rng(drawn["seed"])
    q, k, v = (normal(rng, 1, drawn["T"], *w, dtype=drawn["dtype"]) for w in ((N, 4), (K, 4), (K, 3)))
    arrays = {"query": q, "key": k, "value": v}
    decays = {"g": (N,), "gk": (N, 4), "gv": (N, 3)}
    wanted = {"gla_attention": ["gk" if drawn["some"] else "g"], "recurrent_attention": decays, "rwkv6": ["gk"]}
    for n in wanted.get(name, ()):
        arrays[n] = -jnp.exp(normal(rng, 1, drawn["T"], *decays[n]))
    fixed = {"bonus": normal(rng, N, 4)} if name == "rwkv6" else {}
    fixed |= {"g_gamma": -jnp.abs(normal(rng, N))} if name in ("lightning_attention", "retention") else {}

    def run(a, **given):
        given |= {"softmax_scale": drawn["scale"], "return_state": True}
        if name == "rwkv6":
            return kernels.rwkv6(a["query"], a["key"], a["value"], a["gk"], a["bonus"], **given)
        if name == "lightning_attention":
            return kernels.lightning_attention(a["query"], a["key"], a["value"], decay=-a["g_gamma"], **given)
        a = dict(a)
        if name == "gla_attention" and "gk" in a:
            a["gate"] = a.pop("gk")
        return getattr(kernels, name)(**a, **given)

    def reference(a, ids, state):
        out, final = numpy_loop(**a, segment_ids=ids, initial_state=state[None], softmax_scale=drawn["scale"])
        return out, final[0, 0]

    check_call(run, reference, arrays | fixed, arrays.keys(), drawn, (N, 4, 3))


NAMES = ["gla_attention", "recurrent_attention", "lightning_attention", "retention", "rwkv6"]
test_300_random_calls = pytest.mark.slow(
    settings(max_examples=300, deadline=None, database=None)(given(calls(NAMES))(random_call))
)


@pytest.mark.parametrize("decay", [pytest.param("none", marks=pytest.mark.slow), "g_gamma"])
def test_one_chunk_from_no_state(decay):
    """A state of zeros is a constant of the program, and some compilers for CPUs get a matmul with one wrong."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 64, 32, 64)).astype(np.float32)) for _ in range(3))
    arguments = {"query": q, "key": k, "value": v} | ({"g_gamma": -jnp.arange(32) / 32} if decay == "g_gamma" else {})
    got, wanted = jax.jit(lambda a: op(**a))(arguments)[0], op.function(**arguments)[0]
    np.testing.assert_allclose(got, wanted, atol=1e-4)
