"""Recurrent cells and RWKV-4: against NumPy in value and gradient, on meshes, and at the ends of what is possible."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_recurrence import ids_of_cuts, slope, walk, weighed

import ejdist
import kernels
from ejdist import make_mesh
from kernels import recurrent, rwkv4
from kernels.ops.recurrent import op

RNG = np.random.default_rng(0)
B, T, D, F = 2, 16, 4, 3
_ = -1
IDS = np.array([[5, 5, 5, 5, 2, _, 2, 2, 9, 9, _, 9, 9, 9, 9, 9], [_, _, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4, 4, 4, _, _]])
CUTS = np.array([0, 3, 3, 11, 14])
GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def weights_of(cell_type, ways=1):
    rows = GATES[cell_type] * F
    shapes = {"weight_ih": (rows, D), "weight_hh": (rows, F), "bias_ih": (rows,), "bias_hh": (rows,)}
    return {n + end: normal(*s) for n, s in shapes.items() for end in ("", "_reverse")[:ways]}


X = normal(B, T, D)
WEIGHTS = {(c, ways): weights_of(c, ways) for c in GATES for ways in (1, 2)}


def s(x):
    return 1 / (1 + np.exp(-x))


def numpy_cell(cell_type, w, x, h, c, act=np.tanh):
    """Returns (h, c) after one token, a gate at a time, in the words of the cell's equations."""
    n = h.shape[0]

    def gate(i):
        return slice(i * n, (i + 1) * n)

    def of_x(i):
        return w["weight_ih"][gate(i)] @ x + w["bias_ih"][gate(i)]

    def of_h(i):
        return w["weight_hh"][gate(i)] @ h + w["bias_hh"][gate(i)]

    if cell_type == "rnn":
        return act(of_x(0) + of_h(0)), c
    if cell_type == "gru":
        reset, update = s(of_x(0) + of_h(0)), s(of_x(1) + of_h(1))
        return (1 - update) * act(of_x(2) + reset * of_h(2)) + update * h, c
    i, f, g, o = (of_x(k) + of_h(k) for k in range(4))
    c = s(f) * c + s(i) * act(g)
    return s(o) * act(c), c


def numpy_recurrent(x, weights, cell_type, segment_ids=None, states=None, bidirectional=False, act=np.tanh):
    """Returns (out, states [B, G, ways, 2, F]); rows of the state are h and c."""
    outs, finals = [], []
    for i, end in enumerate(("", "_reverse") if bidirectional else ("",)):
        w = {n.removesuffix("_reverse"): y for n, y in weights.items() if n.endswith("_reverse") == bool(end)}

        def step(state, b, t, w=w):
            h, c = numpy_cell(cell_type, w, x[b, t], *state, act)
            return np.stack([h, c]), h

        own = None if states is None else states[:, :, i]
        out, final = walk(step, np.zeros((2, F)), *x.shape[:2], segment_ids, own, reverse=bool(end))
        outs.append(out)
        finals.append(final)
    return np.concatenate(outs, -1), np.stack(finals, axis=2)


def numpy_rwkv4(w, u, k, v, segment_ids=None, states=None):
    """The two sums themselves, without their largest exponent: (a, b) in place of (a, b, p)."""
    d = -np.exp(w)

    def step(state, b, t):
        own = np.exp(u + k[b, t])
        out = (state[0] + own * v[b, t]) / (state[1] + own)
        return np.stack([np.exp(d) * state[0] + np.exp(k[b, t]) * v[b, t], np.exp(d) * state[1] + np.exp(k[b, t])]), out

    return walk(step, np.zeros((2, k.shape[2])), *k.shape[:2], segment_ids, states)


# -- calls: name -> (function, float arrays, options) ------------------------------------------------------------------


def call_of(name, kind):
    """Returns (function's name, float arrays, options): of a cell, "lstm", or with "2" both ways, "gru2"; or of rwkv4."""
    rng = np.random.default_rng(1)
    options = {"plain": {}, "documents": {"segment_ids": IDS}, "packed": {"cu_seqlens": CUTS}}[kind]
    rows, count = (1, len(CUTS) - 1) if kind == "packed" else (B, B)
    if name == "rwkv4":
        arrays = {
            "w": normal_of(rng, F),
            "u": normal_of(rng, F),
            "k": normal_of(rng, rows, T, F),
            "v": normal_of(rng, rows, T, F),
        }
        state = normal_of(rng, count, 3, F)
        state[:, 1] = np.abs(state[:, 1]) + 0.5
        return "rwkv4", arrays | {"state": state}, options
    cell_type, ways = name.removesuffix("2"), 2 if name.endswith("2") else 1
    shape = (2, count, F) if ways == 2 else (count, F)
    hidden = tuple(normal_of(rng, *shape) for _ in range(2 if cell_type == "lstm" else 1))
    arrays = {
        "inputs": X[:rows],
        "weights": WEIGHTS[cell_type, ways],
        "hidden": hidden if len(hidden) > 1 else hidden[0],
    }
    return "recurrent", arrays, options | {"cell_type": cell_type, "bidirectional": ways == 2}


def normal_of(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def run(name, kind, module=kernels, **where):
    """Returns (out, state), and the gradients of their weighed sum."""
    function, arrays, options = call_of(name, kind)

    def loss(arrays):
        out = getattr(module, function)(**arrays, **options, **where, return_state=True)
        if name == "rwkv4":  # the sums themselves: which exponent they are written with is of no meaning
            out = (out[0], out[1][:, :2] * jnp.exp(out[1][:, 2:]))
        return sum(jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)) for y in jax.tree.leaves(out)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return out, gradients


@functools.cache
def plain(name, kind):
    return run(name, kind)


def reference(name, kind, arrays):
    """Returns what `run` does, of float64 arrays."""
    _, _, options = call_of(name, kind)
    ids = ids_of_cuts(CUTS, T) if kind == "packed" else options.get("segment_ids")
    packed = kind == "packed"
    if name == "rwkv4":
        state = arrays["state"][:, :2] * np.exp(arrays["state"][:, 2:])
        given = {n: arrays[n] for n in ("w", "u", "k", "v")}
        out, final = numpy_rwkv4(**given, segment_ids=ids, states=state[None] if packed else state[:, None])
        return out, final[0] if packed else final[:, 0]
    cell_type, both = name.removesuffix("2"), name.endswith("2")
    hidden = arrays["hidden"] if isinstance(arrays["hidden"], tuple) else (arrays["hidden"], 0 * arrays["hidden"])
    hidden = [h if both else h[None] for h in hidden]  # [ways, sequences, F]
    state = np.stack(hidden, axis=2).swapaxes(0, 1)  # [sequences, ways, 2, F]
    out, final = numpy_recurrent(
        arrays["inputs"], arrays["weights"], cell_type, ids, state[None] if packed else state[:, None], both
    )
    final = final[0] if packed else final[:, 0]
    parts = [final[:, :, i].swapaxes(0, 1) if both else final[:, 0, i] for i in range(2 if cell_type == "lstm" else 1)]
    return (out, tuple(parts)) if len(parts) > 1 else (out, parts[0])


def close(got, want, allowed=2e-5):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert error(g, w) < allowed, error(g, w)


QUICK = {
    ("lstm2", "documents"),
    ("gru2", "packed"),
    ("rnn", "documents"),
    ("rwkv4", "packed"),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(n, k, marks=() if (n, k) in QUICK else pytest.mark.slow)
        for n in ("lstm", "lstm2", "gru", "gru2", "rnn", "rnn2", "rwkv4")
        for k in ("plain", "documents", "packed")
    ],
)
def test_values_and_gradients_against_numpy(name, kind):
    _, arrays, _ = call_of(name, kind)
    leaves, tree = jax.tree.flatten(arrays)
    wide = {i: x.astype(np.float64) for i, x in enumerate(leaves)}

    def of(floats):
        return reference(name, kind, jax.tree.unflatten(tree, [floats[i] for i in wide]))

    out, gradients = plain(name, kind)
    close(out, of(wide), 2e-6)
    way = {i: np.random.default_rng(2).standard_normal(x.shape) for i, x in wide.items()}
    for some in (way, *({m: x * (m == n) for m, x in way.items()} for n in wide)):
        found = sum(
            float(np.sum(np.asarray(g, np.float64) * some[i])) for i, g in enumerate(jax.tree.leaves(gradients))
        )
        wanted = slope(lambda f: weighed(jax.tree.leaves(of(f))), wide, some)
        assert abs(found - wanted) < 3e-5 * (1 + abs(wanted)), (found, wanted)


def test_documented_call_and_forms_of_hidden():
    """The state of an LSTM may be h alone, and lengths say what is padding."""
    h, w = normal(B, F), WEIGHTS["lstm", 1]
    out, (last, cell) = recurrent(X, h, w, cell_type="lstm", lengths=[16, 9], return_state=True)
    assert out.shape == (B, T, F) and not np.any(out[1, 9:])
    states = np.stack([h, 0 * h], axis=1).astype(np.float64)[:, None, None]
    want, final = numpy_recurrent(X, w, "lstm", np.where(np.arange(T) < np.array([[16], [9]]), 0, -1), states)
    close((out, last, cell), (want, final[:, 0, 0, 0], final[:, 0, 0, 1]), 2e-6)
    np.testing.assert_array_equal(out, recurrent(X, (h, 0 * h), w, lengths=[16, 9]))
    np.testing.assert_array_equal(ejdist.Recurrent()(X, h, w, lengths=[16, 9]), out)


def test_a_sequence_in_parts_is_the_whole():
    for name, function, tokens in (("lstm", recurrent, ("inputs",)), ("rwkv4", rwkv4, ("k", "v"))):
        _, arrays, _ = call_of(name, "plain")
        arrays = dict(arrays)
        state = arrays.pop("state", None) if name == "rwkv4" else arrays.pop("hidden")
        want = function(**arrays, initial_state=state, return_state=True)

        def part(at):
            return {n: x[:, at] if n in tokens else x for n, x in arrays.items()}  # noqa: B023

        first, state = function(**part(slice(0, 13)), initial_state=state, return_state=True)
        second, state = function(**part(slice(13, 16)), initial_state=state, return_state=True)
        close((jnp.concatenate([first, second], axis=1), state), want, 2e-6)


def test_activations():
    for activation, act in (("relu", lambda x: np.maximum(x, 0)), ("sigmoid", s)):
        out = recurrent(X[:1, :5], None, WEIGHTS["lstm", 1], activation=activation)
        close(out, numpy_recurrent(X[:1, :5], WEIGHTS["lstm", 1], "lstm", act=act)[0], 2e-6)


def test_rwkv4_with_exponents_that_no_float_holds():
    """And a token of the largest weight, first and last, over several chunks."""
    rng = np.random.default_rng(3)
    k, v = 300 * normal_of(rng, 1, 130, F), normal_of(rng, 1, 130, F)
    w, u = np.array([-9.0, 0.0, 3.0], np.float32), normal_of(rng, F)
    out = rwkv4(w, u, k, v)
    d, k64 = -np.exp(w.astype(np.float64)), k.astype(np.float64)
    for t in (0, 1, 63, 64, 129):
        weights = np.concatenate([(t - 1 - np.arange(t))[:, None] * d + k64[0, :t], u + k64[0, t : t + 1]])
        weights = np.exp(weights - weights.max(0))
        close(out[0, t], (weights * v[0, : t + 1]).sum(0) / weights.sum(0), 1e-5)


def test_padding_holds_anything():
    x = np.where((IDS < 0)[..., None], np.nan, X)
    grad = jax.grad(lambda x: jnp.sum(jnp.sin(recurrent(x, None, WEIGHTS["gru", 1], "gru", segment_ids=IDS))))
    np.testing.assert_array_equal(grad(x), grad(X))


def check_random_ids(ids):
    ids = np.array([ids])
    if not (ids >= 0).any():
        return
    got = recurrent(X[:1, :9], None, WEIGHTS["gru", 2], "gru", True, segment_ids=ids)
    close(got, numpy_recurrent(X[:1, :9], WEIGHTS["gru", 2], "gru", ids, None, True)[0], 2e-6)
    _, arrays, _ = call_of("rwkv4", "packed")
    got = rwkv4(arrays["w"], arrays["u"], arrays["k"][:, :9], arrays["v"][:, :9], segment_ids=ids)
    close(got, numpy_rwkv4(arrays["w"], arrays["u"], arrays["k"][:, :9], arrays["v"][:, :9], ids)[0], 2e-6)


RANDOM = given(st.lists(st.integers(-1, 2), min_size=9, max_size=9))
test_any_ids = settings(max_examples=15, deadline=None, derandomize=True)(RANDOM(check_random_ids))
test_any_ids_at_length = pytest.mark.slow(settings(max_examples=300, deadline=None)(RANDOM(check_random_ids)))


def bytes_of_gradient(name, length):
    def loss(arrays):
        if name == "rwkv4":
            return jnp.sum(jnp.sin(rwkv4(**arrays)))
        return jnp.sum(jnp.sin(recurrent(cell_type=name, **arrays)))

    tokens = jax.ShapeDtypeStruct((2, length, 8), jnp.float32)
    if name == "rwkv4":
        arrays = {n: jax.ShapeDtypeStruct((8,), jnp.float32) for n in "wu"} | {"k": tokens, "v": tokens}
    else:
        rows = GATES[name] * 8
        arrays = {
            "inputs": tokens,
            "weights": {n: jax.ShapeDtypeStruct((rows, 8), jnp.float32) for n in ("weight_ih", "weight_hh")},
        }
    memory = jax.jit(jax.grad(loss)).lower(arrays).compile().memory_analysis()
    return memory.temp_size_in_bytes, memory.argument_size_in_bytes + memory.output_size_in_bytes


@pytest.mark.slow  # a scan, which keeps what a step is given
@pytest.mark.parametrize("name", ["lstm", "gru", "rwkv4"])
def test_memory_is_linear_in_the_length(name):
    short, long = bytes_of_gradient(name, 512), bytes_of_gradient(name, 2048)
    assert long[0] < 4.2 * short[0] and long[0] < 16 * long[1], (short, long)


# -- on a mesh ---------------------------------------------------------------------------------------------------------

MESHES = {"sp1": {"sp": 1}, "sp2": {"dp": 2, "sp": 2}, "sp4": {"sp": 4}, "sp8": {"sp": 8}}
ON_A_MESH = {("lstm2", "documents", "sp2")}


@pytest.mark.parametrize(
    ("name", "kind", "mesh"),
    [
        pytest.param(n, k, m, marks=() if (n, k, m) in ON_A_MESH else pytest.mark.slow)
        for n in ("lstm2", "gru", "rnn", "rwkv4")
        for k in ("plain", "documents", "packed")
        for m in MESHES
    ],
)
def test_on_a_mesh(name, kind, mesh):
    sizes = {a: n for a, n in MESHES[mesh].items() if not (kind == "packed" and a == "dp")}
    close(run(name, kind, module=ejdist, mesh=make_mesh(**sizes)), plain(name, kind))


def sent(name, length):
    """Returns the number of elements of each collective of the gradient, by kind, from the program before it is compiled."""
    function, arrays, options = call_of(name, "plain")
    tokens = ("inputs", "k", "v")
    arrays = {n: np.resize(x, (B, length, x.shape[2])) if n in tokens else x for n, x in arrays.items()}
    options |= {"segment_ids": np.resize(IDS, (B, length)), "mesh": make_mesh(sp=4), "return_state": True}

    def loss(arrays):
        return sum(jnp.sum(y) for y in jax.tree.leaves(getattr(ejdist, function)(**arrays, **options)))

    text = jax.jit(jax.grad(loss)).lower(arrays).as_text()
    kinds = "collective_permute|all_gather|all_reduce|reduce_scatter|all_to_all"
    found = {}
    for kind, shape in re.findall(rf'stablehlo\.({kinds})"?[^\n]*?(?:\n[^\n]*?){{0,6}}?-> tensor<([^>]*)>', text):
        found.setdefault(kind, []).append(int(np.prod([int(n) for n in shape.split("x")[:-1]])))
    return found


def test_weights_that_are_too_large_for_a_kernel_are_refused():
    x, w = (
        jax.ShapeDtypeStruct((64, 8, 4096), jnp.float32),
        {n: jax.ShapeDtypeStruct((16384, 4096), jnp.float32) for n in ("weight_ih", "weight_hh")},
    )
    with pytest.raises(
        kernels.Unsupported, match="weights of 512 MiB and the gates of a token do not fit 48 MiB of VMEM"
    ):
        jax.eval_shape(functools.partial(op, platform="pallas"), x, w)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in ("gru2", "rwkv4")])
def test_what_is_sent_does_not_grow_with_the_length(name):
    short, long = sent(name, 64), sent(name, 256)
    assert short == long and short["collective_permute"], (short, long)


# -- what is refused ---------------------------------------------------------------------------------------------------

W1 = WEIGHTS["lstm", 1]


@pytest.mark.parametrize(
    ("said", "args", "options"),
    [
        (r"'inputs' must be a float array \[B, T, D\], got float32 of shape \(16, 4\)", (X[0], None, W1), {}),
        (r"'inputs' of shape \(2, 0, 4\) has no elements", (X[:, :0], None, W1), {}),
        ("'cell_type' = 'mgu' is unknown; use one of lstm, gru, rnn", (X, None, W1, "mgu"), {}),
        ("'cell_type' = \\['lstm'\\] is unknown", (X, None, W1, ["lstm"]), {}),
        (r"'hidden' of lstm must be \(h, c\)", (X, (), W1), {}),
        (r"'lengths' must be integers \[B\] = \[2\], got list", (X, None, W1), {"lengths": [[1], [1, 2]]}),
        ("'activation' = 'gelu' is unknown; use one of tanh", (X, None, W1), {"activation": "gelu"}),
        ("'weights' must be a dict of arrays, weight_ih", (X, None, W1["weight_ih"]), {}),
        ("'weights' must have weight_ih, weight_hh, .*_l0", (X, None, {"weight_ih_l0": W1["weight_ih"]}), {}),
        ("'weights' must have .*weight_ih_reverse", (X, None, W1), {"bidirectional": True}),
        ("'weights' must hold float arrays, but 'bias_ih' is int", (X, None, {**W1, "bias_ih": np.zeros(12, int)}), {}),
        (r"'weights': 'weight_ih' of gru must have the shape \(9, 4\)", (X, None, W1, "gru"), {}),
        (r"'hidden' of lstm must be \(h, c\), or h alone", (X, normal(B, F + 1), W1), {}),
        (r"'hidden' of gru must be h of float arrays \[B, F\]", (X, (normal(B, F),) * 2, WEIGHTS["gru", 1], "gru"), {}),
        (r"'hidden' of lstm .* \[2, B, F\] = \[2, 2, 3\]", (X, normal(B, F), WEIGHTS["lstm", 2], "lstm", True), {}),
        ("arguments 'lengths' and 'segment_ids'", (X, None, W1), {"lengths": [1, 2], "segment_ids": IDS}),
        (r"'lengths' must be integers \[B\] = \[2\]", (X, None, W1), {"lengths": [1]}),
        (
            "'segment_ids' and 'cum_seqlens' both define",
            (X[:1], None, W1),
            {"cu_seqlens": CUTS, "segment_ids": IDS[:1]},
        ),
        ("'cum_seqlens' splits one packed row", (X, None, W1), {"cu_seqlens": CUTS}),
        ("'hidden' and 'initial_state' are two names", (X, normal(B, F), W1), {"initial_state": normal(B, F)}),
    ],
)
def test_a_wrong_call_is_a_value_error(said, args, options):
    with pytest.raises(ValueError, match=f"recurrent: argument.*{said}" if "argument" not in said else said):
        recurrent(*args, **options)


@pytest.mark.parametrize(
    ("said", "arrays"),
    [
        (r"'k' must be a float array \[B, T, D\]", {"k": normal(T, F)}),
        ("'v' of shape", {"v": normal(B, T, F + 1)}),
        ("'u' of shape", {"u": normal(F + 1)}),
        (r"'initial_state' must be a float array \[B, ...\] = \[2, 3, 3\]", {"state": normal(B, F)}),
    ],
)
def test_a_wrong_call_of_rwkv4_is_a_value_error(said, arrays):
    good = {"w": normal(F), "u": normal(F), "k": normal(B, T, F), "v": normal(B, T, F)}
    with pytest.raises(ValueError, match=f"rwkv4: argument {said}"):
        rwkv4(**good | arrays)
