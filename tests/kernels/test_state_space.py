"""State spaces and their convolution: against NumPy in value and gradient, on meshes, and at the ends of what is possible."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_recurrence import calls, check_call, ids_of_cuts, slope, walk, weighed

import ejdist
import kernels
from ejdist import make_mesh
from kernels import causal_conv1d, state_space_v1, state_space_v2

RNG = np.random.default_rng(0)
T = 16
_ = -1
IDS = np.array([[5, 5, 5, 5, 2, _, 2, 2, 9, 9, _, 9, 9, 9, 9, 9], [_, _, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4, 4, 4, _, _]])
CUTS = np.array([0, 3, 3, 11, 14])


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def steps(*shape):
    return np.exp(RNG.uniform(np.log(0.01), 0.3, shape)).astype(np.float32)


B, N, K, S, P, D, W = 2, 4, 2, 3, 5, 6, 4
V2 = {
    "x": normal(B, T, N, P), "dt": steps(B, T, N), "A": -steps(N), "B": normal(B, T, K, S), "C": normal(B, T, K, S),
    "D": normal(N),
}  # fmt: skip
V1 = {
    "x": normal(B, T, D), "dt": steps(B, T, D), "A": -steps(D, S), "B": normal(B, T, S), "C": normal(B, T, S),
    "D": normal(D),
}  # fmt: skip
CONV = {"x": normal(B, T, D), "weight": normal(D, W), "bias": normal(D)}
STATES = {"v2": (N, S, P), "v1": (D, S), "conv": (D, W - 1)}
FUNCTIONS = {"v2": "state_space_v2", "v1": "state_space_v1", "conv": "causal_conv1d"}
ARRAYS = {"v2": V2, "v1": V1, "conv": CONV}


def numpy_v2(x, dt, A, B, C, D=None, segment_ids=None, state=None):
    heads = x.shape[2] // B.shape[2]

    def step(h, b, t):
        out = np.zeros(x.shape[2:])
        h = h.copy()
        for n in range(x.shape[2]):
            h[n] = np.exp(dt[b, t, n] * A[n]) * h[n] + dt[b, t, n] * np.outer(B[b, t, n // heads], x[b, t, n])
            out[n] = C[b, t, n // heads] @ h[n] + (0 if D is None else D[n] * x[b, t, n])
        return h, out

    return walk(step, np.zeros((x.shape[2], B.shape[3], x.shape[3])), *x.shape[:2], segment_ids, state)


def numpy_v1(x, dt, A, B, C, D=None, segment_ids=None, state=None):
    def step(h, b, t):
        h = np.exp(dt[b, t][:, None] * A) * h + np.outer(dt[b, t] * x[b, t], B[b, t])
        return h, h @ C[b, t] + (0 if D is None else D * x[b, t])

    return walk(step, np.zeros(A.shape), *x.shape[:2], segment_ids, state)


def numpy_conv(x, weight, bias=None, segment_ids=None, state=None):
    def step(before, b, t):
        window = np.concatenate([before, x[b, t][:, None]], axis=1)
        out = np.array([sum(window[d, j] * weight[d, j] for j in range(window.shape[1])) for d in range(len(window))])
        out = out if bias is None else out + bias
        return window[:, 1:], out / (1 + np.exp(-out))

    return walk(step, np.zeros((x.shape[2], weight.shape[1] - 1)), *x.shape[:2], segment_ids, state)


NUMPY = {"v2": numpy_v2, "v1": numpy_v1, "conv": numpy_conv}


def call_of(name, kind):
    """Returns (float arrays with the initial state, options) of a call: "plain", "documents" or "packed"."""
    rng, tokens = np.random.default_rng(1), ("x", "dt", "B", "C")
    arrays = {n: x[:1] if kind == "packed" and n in tokens else x for n, x in ARRAYS[name].items()}
    count = len(CUTS) - 1 if kind == "packed" else B
    arrays["initial_state"] = rng.standard_normal((count, *STATES[name])).astype(np.float32)
    options = {"plain": {}, "documents": {"segment_ids": IDS}, "packed": {"cu_seqlens": CUTS}}[kind]
    return arrays, options | ({"activation": "silu"} if name == "conv" else {})


def run(name, arrays, options, module=kernels, **where):
    """Returns (out, state), and the gradients of their weighed sum."""

    def loss(arrays):
        out = getattr(module, FUNCTIONS[name])(**arrays, **options, **where, return_state=True)
        return sum(jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)) for y in out), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return out, gradients


@functools.cache
def plain(name, kind):
    return run(name, *call_of(name, kind))


def close(got, want, allowed=2e-5):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert error(g, w) < allowed, error(g, w)


# Packed sequences are documents with a state each.
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(n, k, marks=[pytest.mark.slow] * (k == "plain" or (k == "packed" and n != "v2")))
        for n in NUMPY
        for k in ("plain", "documents", "packed")
    ],
)
def test_values_and_gradients_against_numpy(name, kind):
    arrays, options = call_of(name, kind)
    ids = ids_of_cuts(CUTS, T) if kind == "packed" else options.get("segment_ids")

    def reference(floats):
        state = floats.pop("initial_state")
        out, state = NUMPY[name](**floats, segment_ids=ids, state=state[None] if kind == "packed" else state[:, None])
        return out, state[0] if kind == "packed" else state[:, 0]

    wide = {n: x.astype(np.float64) for n, x in arrays.items()}
    out, gradients = plain(name, kind)
    close(out, reference(dict(wide)), 1e-6)
    way = {n: np.random.default_rng(2).standard_normal(x.shape) for n, x in wide.items()}
    for some in (way, *({m: x * (m == n) for m, x in way.items()} for n in wide)):
        found = sum(float(np.sum(np.asarray(gradients[n], np.float64) * some[n])) for n in wide)
        wanted = slope(lambda f: weighed(reference(f)), wide, some)
        assert abs(found - wanted) < 2e-5 * (1 + abs(wanted)), (found, wanted)


@pytest.mark.parametrize("name", ["v2", pytest.param("v1", marks=pytest.mark.slow)])
def test_decays_near_0_and_near_1_and_side_by_side(name):
    """Over several chunks; what a weak decay says is not lost behind a strong one."""
    length, rng = 150, np.random.default_rng(3)
    arrays = {n: np.concatenate([x] * 10, axis=1)[:, :length] for n, x in ARRAYS[name].items() if n in ("x", "B", "C")}
    arrays = {n: rng.standard_normal(x.shape).astype(np.float32) for n, x in arrays.items()}
    A = -np.ones_like(ARRAYS[name]["A"])
    function = jax.jit(functools.partial(getattr(kernels, FUNCTIONS[name]), A=A, return_state=True))
    shape = (B, length, *ARRAYS[name]["dt"].shape[2:])
    mixed = np.where(rng.random(shape) < 0.2, 100.0, 1e-3)
    for dt in (np.full(shape, 1e-6), np.full(shape, 80.0), mixed):
        dt = dt.astype(np.float32)
        out, states = NUMPY[name](**arrays, A=A, dt=dt.astype(np.float64))
        close(function(**arrays, dt=dt), (out, states[:, 0]), 2e-6)


def test_padding_holds_anything():
    for name in ("v2", "conv"):
        arrays, options = call_of(name, "documents")
        tokens = {n for n in arrays if n in ("x", "dt", "B", "C")}
        bad = IDS < 0
        arrays = {
            n: np.where(bad.reshape(*bad.shape, *(1,) * (x.ndim - 2)), np.nan, x) if n in tokens else x
            for n, x in arrays.items()
        }
        close(run(name, arrays, options), plain(name, "documents"), 1e-6)


def test_a_sequence_in_parts_is_the_whole():
    """As a prompt, one shorter than the window of the convolution, and then token by token."""
    for name in NUMPY:
        arrays, options = call_of(name, "plain")
        want, want_state = plain(name, "plain")[0]
        state = arrays.pop("initial_state")
        one = jax.jit(functools.partial(getattr(kernels, FUNCTIONS[name]), **options, return_state=True))
        outs = []
        for begin, end in ((0, 13), (13, 15), (15, 16)):
            part = {n: x[:, begin:end] if n in ("x", "dt", "B", "C") else x for n, x in arrays.items()}
            out, state = one(**part, state=state)
            outs.append(out)
        close((jnp.concatenate(outs, axis=1), state), (want, want_state), 2e-6)


def test_gate_and_norm():
    z, weight = normal(B, T, N, P), normal(N * P)
    out = np.asarray(state_space_v2(**V2), np.float64)
    gated = out * z / (1 + np.exp(-z.astype(np.float64)))
    close(state_space_v2(**V2, z=z), gated, 1e-6)
    for groups in (1, 2):
        each = gated.reshape(B, T, groups, -1)
        each = each / np.sqrt(np.mean(each**2, axis=-1, keepdims=True) + 1e-5)
        want = (each.reshape(B, T, -1) * weight).reshape(gated.shape)
        close(state_space_v2(**V2, z=z, norm_weight=weight, norm_groups=groups), want, 1e-6)
    z = normal(B, T, D)
    want = np.asarray(state_space_v1(**V1), np.float64) * z / (1 + np.exp(-z.astype(np.float64)))
    close(state_space_v1(**V1, z=z), want, 1e-6)


SMALL = {"x": normal(1, 9, 2), "weight": normal(2, 3)}
LITTLE = {
    "x": normal(1, 9, 2, 2), "dt": steps(1, 9, 2), "A": -steps(2), "B": normal(1, 9, 1, 2), "C": normal(1, 9, 1, 2),
}  # fmt: skip


def check_random_ids(ids, state):
    ids = np.array([ids])
    for function, reference, arrays, shape in (
        (causal_conv1d, numpy_conv, SMALL, (2, 2)),
        (state_space_v2, numpy_v2, LITTLE, (2, 2, 2)),
    ):
        initial = np.random.default_rng(4).standard_normal((1, *shape)).astype(np.float32) * state
        more = {"activation": "silu"} if function is causal_conv1d else {}
        got = function(**arrays, **more, segment_ids=ids, initial_state=initial, return_state=True)
        want = reference(**arrays, segment_ids=ids, state=initial[:, None]) if (ids >= 0).any() else None
        if want is None:
            assert not np.any(got[0]) and np.array_equal(got[1], initial)
        else:
            close(got, (want[0], want[1][:, 0]), 2e-6)


RANDOM = given(st.lists(st.integers(-1, 2), min_size=9, max_size=9), st.sampled_from([0, 1]))
test_any_ids = settings(max_examples=15, deadline=None, derandomize=True)(RANDOM(check_random_ids))
test_any_ids_at_length = pytest.mark.slow(settings(max_examples=300, deadline=None)(RANDOM(check_random_ids)))


def random_call(drawn):
    """Of a public function, with every optional argument there or not."""
    name, rng, T = drawn["name"], np.random.default_rng(drawn["seed"]), drawn["T"]
    tokens = {n for n in ARRAYS[name] if n in ("x", "dt", "B", "C")}

    def of_tokens(n, x):  # steps are positive
        y = rng.standard_normal((1, T, *x.shape[2:]))
        return np.exp(y - 2) if n == "dt" else y

    arrays = {n: of_tokens(n, x) if n in tokens else x for n, x in ARRAYS[name].items()}
    arrays = {n: jnp.asarray(x, drawn["dtype"]) for n, x in arrays.items()}
    if drawn["some"] and name != "conv":
        arrays.pop("D")
    more = {"activation": "silu"} if name == "conv" else {}

    def reference(a, ids, state):
        out, final = NUMPY[name](**a, segment_ids=ids, state=state[:, None])
        return out, final[0, 0]

    run = functools.partial(getattr(kernels, FUNCTIONS[name]), return_state=True, **more)
    check_call(lambda a, **given: run(**a, **given), reference, arrays, tokens, drawn, STATES[name])


test_300_random_calls = pytest.mark.slow(
    settings(max_examples=300, deadline=None, database=None)(given(calls(list(NUMPY)))(random_call))
)


# -- long sequences ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v2", "v1"])
def test_65536_steps(name):
    length, rng = 65536, np.random.default_rng(5)
    arrays = {n: rng.standard_normal((1, length, *x.shape[2:])).astype(np.float32) for n, x in ARRAYS[name].items()
              if n in ("x", "B", "C")}  # fmt: skip
    dt = np.exp(rng.uniform(np.log(1e-4), 1, (1, length, *ARRAYS[name]["dt"].shape[2:]))).astype(np.float32)
    arrays |= {"A": ARRAYS[name]["A"], "dt": dt}
    got = jax.jit(functools.partial(getattr(kernels, FUNCTIONS[name]), return_state=True))(**arrays)
    want = NUMPY[name](**{n: x.astype(np.float64) for n, x in arrays.items()})
    off = [error(g, w) for g, w in zip(got, (want[0], want[1][:, 0]), strict=True)]
    assert max(off) < 2e-6, off


def bytes_of_gradient(name, length):
    """Returns (what the compiled gradient takes beside its arguments and results, the size of those)."""
    arrays = {
        n: jax.ShapeDtypeStruct((1, length, *x.shape[2:]) if n in ("x", "dt", "B", "C") else x.shape, x.dtype)
        for n, x in ARRAYS[name].items()
    }

    def loss(arrays):
        return jnp.sum(jnp.sin(getattr(kernels, FUNCTIONS[name])(**arrays)))

    memory = jax.jit(jax.grad(loss)).lower(arrays).compile().memory_analysis()
    return memory.temp_size_in_bytes, memory.argument_size_in_bytes + memory.output_size_in_bytes


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in ("v2", "v1", "conv")])
def test_memory_is_linear_in_the_length(name):
    """And less than some copies of the arrays: no state a token, and no token against every other."""
    short, long = bytes_of_gradient(name, 2048), bytes_of_gradient(name, 8192)
    assert long[0] < 4.2 * short[0] and long[0] < 6 * long[1], (short, long)


# -- on a mesh ---------------------------------------------------------------------------------------------------------

MESHES = {"sp1": {"sp": 1}, "sp2": {"dp": 2, "sp": 2, "tp": 2}, "sp4": {"sp": 4}, "sp8": {"sp": 8}}
QUICK = {("v2", "documents", "sp2")}


@pytest.mark.parametrize(
    ("name", "kind", "mesh"),
    [
        pytest.param(n, k, m, marks=() if (n, k, m) in QUICK else pytest.mark.slow)
        for n in NUMPY
        for k in ("plain", "documents", "packed")
        for m in MESHES
    ],
)
def test_on_a_mesh(name, kind, mesh):
    sizes = {a: n for a, n in MESHES[mesh].items() if not (kind == "packed" and a == "dp")}
    got = run(name, *call_of(name, kind), module=ejdist, mesh=make_mesh(**sizes))
    close(got, plain(name, kind))


def bytes_sent(name, length):
    """Returns the bytes that the gradient's collectives have as results, by kind, from the program before it is compiled."""
    arrays, options = call_of(name, "plain")
    arrays = {
        n: np.resize(x, (B, length, *x.shape[2:])) if n in ("x", "dt", "B", "C") else x for n, x in arrays.items()
    }
    options |= {"segment_ids": np.resize(IDS, (B, length))} if name != "conv" else {}

    def loss(arrays):
        out, state = getattr(ejdist, FUNCTIONS[name])(**arrays, **options, mesh=make_mesh(sp=4), return_state=True)
        return jnp.sum(out) + jnp.sum(state)

    text = jax.jit(jax.grad(loss)).lower(arrays).as_text()
    found = {}
    for kind, shape in re.findall(r'stablehlo\.(collective_permute|all_gather|all_reduce|reduce_scatter|all_to_all)"?[^\n]*?'
                                  r'(?:\n[^\n]*?){0,6}?-> tensor<([^>]*)>', text):  # fmt: skip
        sizes = [int(n) for n in shape.split("x")[:-1]]
        found.setdefault(kind, []).append(int(np.prod(sizes)))
    return found


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in ("v2", "v1", "conv")])
def test_what_is_sent_does_not_grow_with_the_length(name):
    short, long = bytes_sent(name, 64), bytes_sent(name, 256)
    assert short == long and short["collective_permute"], (short, long)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "said", "arrays", "options"),
    [
        (state_space_v2, r"'x' must be a float array \[B, T, N, P\], got float32 of shape", {**V2, "x": V2["x"][0]}, {}),
        (state_space_v2, r"'x' of shape \(2, 0, 4, 5\) has no elements", {**V2, "x": V2["x"][:, :0]}, {}),
        (state_space_v2, "'B' has 3 groups, which do not divide the 4 heads", {**V2, "B": normal(B, T, 3, S)}, {}),
        (state_space_v2, "'dt' of shape", {**V2, "dt": V2["dt"][:, 1:]}, {}),
        (state_space_v2, "'C' of shape", {**V2, "C": normal(B, T, K, S + 1)}, {}),
        (state_space_v2, "'A' of shape", {**V2, "A": V2["A"][1:]}, {}),
        (state_space_v2, "'z' must be a float array of x's shape", V2, {"z": V2["dt"]}),
        (state_space_v2, r"'norm_weight' must have one factor .* \[N \* P\] = \[20\]", V2, {"norm_weight": normal(5)}),
        (state_space_v2, "'norm_groups' requires 'norm_weight'", V2, {"norm_groups": 2}),
        (state_space_v2, "'norm_groups' = 3 must divide the 4 heads", V2, {"norm_weight": normal(20), "norm_groups": 3}),
        (state_space_v2, "'norm_eps' must be a number, got str", V2, {"norm_weight": normal(20), "norm_eps": "x"}),
        (state_space_v2, "'norm_weight' .* got int", V2, {"norm_weight": np.ones(20, int)}),
        (state_space_v2, "'initial_state' must be a float array", V2, {"initial_state": normal(B, N, P, S)}),
        (state_space_v2, "'initial_state' and 'state' are two names", V2, dict.fromkeys(("initial_state", "state"), V2["x"])),
        (state_space_v2, "'cum_seqlens' splits one packed row", V2, {"cu_seqlens": CUTS}),
        (state_space_v1, r"'x' must be a float array \[B, T, D\], got list", {**V1, "x": [[1.0]]}, {}),
        (state_space_v1, r"'A' must be a float array \[D, S\]", {**V1, "A": V1["A"][0]}, {}),
        (state_space_v1, r"'A' must have the shape \(6, 3\) to match 'x'", {**V1, "A": V1["A"][1:]}, {}),
        (state_space_v1, "'z' must be a float array of x's shape", V1, {"z": V1["B"]}),
        (state_space_v1, "'segment_ids' must have the shape", V1, {"segment_ids": IDS[:, 1:]}),
        (causal_conv1d, r"'weight' must be a float array \[D, W\]", {**CONV, "weight": normal(D, 1, W)}, {}),
        (causal_conv1d, r"'weight' must have the shape \(6, 4\) to match 'x'", {**CONV, "weight": normal(D + 1, W)}, {}),
        (causal_conv1d, "'bias' of shape", {**CONV, "bias": normal(W)}, {}),
        (causal_conv1d, "'activation' = 'gelu' is unknown; use 'silu'", CONV, {"activation": "gelu"}),
        (causal_conv1d, r"'initial_state' must be a float array \[B, ...\] = \[2, 6, 3\]", CONV, {"state": normal(B, D, W)}),
    ],
)  # fmt: skip
def test_a_wrong_call_is_a_value_error(function, said, arrays, options):
    with pytest.raises(ValueError, match=f"{function.__name__}: argument.*{said}"):
        function(**arrays, **options)
