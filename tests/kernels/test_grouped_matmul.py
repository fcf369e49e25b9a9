"""grouped_matmul: against a NumPy loop and `lax.ragged_dot`, alone and on meshes; what is refused; memory of many experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import ejdist
import kernels
from ejdist import make_mesh
from kernels.ops.grouped_matmul import grouped_matmul, op, quantized_op

SLOPES = {  # name -> (function, derivative)
    None: (lambda z: z, np.ones_like),
    "relu": (lambda z: np.maximum(z, 0), lambda z: (z > 0).astype(float)),
    "silu": (lambda z: z / (1 + np.exp(-z)), lambda z: (1 + z / (1 + np.exp(z))) / (1 + np.exp(-z))),
}


def weighing(shape):
    return np.cos(np.arange(np.prod(shape))).reshape(shape)


def loop(lhs, rhs, group_sizes, group_offset=0, rhs_bias=None, activation=None):
    """Returns (out, gradients of sum(out * cos(0, 1, ...)) by name), float64, a group at a time; rhs as without transposing."""
    lhs, rhs = lhs.astype(np.float64), rhs.astype(np.float64)
    act, slope = SLOPES[activation]
    out, begin = np.zeros((lhs.shape[0], rhs.shape[-1])), 0
    d = weighing(out.shape)
    grads = {"lhs": np.zeros_like(lhs), "rhs": np.zeros_like(rhs)}
    grads |= {} if rhs_bias is None else {"rhs_bias": np.zeros_like(rhs_bias, np.float64)}
    for g, size in enumerate(group_sizes):
        rows, e = slice(begin, begin + size), g - group_offset
        begin += size
        if not 0 <= e < rhs.shape[0]:
            continue
        z = np.tensordot(lhs[rows], rhs[e], 1) + (0 if rhs_bias is None else rhs_bias[e])
        if rhs.ndim == 4:
            out[rows] = act(z[:, 0]) * z[:, 1]
            dz = np.stack([d[rows] * slope(z[:, 0]) * z[:, 1], d[rows] * act(z[:, 0])], 1)
        else:
            out[rows], dz = act(z), d[rows] * slope(z)
        flat = dz.reshape(len(dz), rhs[e][0].size)
        grads["lhs"][rows] = flat @ rhs[e].reshape(lhs.shape[1], -1).T
        grads["rhs"][e] = (lhs[rows].T @ flat).reshape(rhs[e].shape)
        if rhs_bias is not None:
            grads["rhs_bias"][e] = dz.sum(0)
    return out, grads


def value_and_gradients(function, floats, **others):
    @jax.jit
    def run(floats):
        def loss(floats):
            out = function(**floats, **others)
            return jnp.sum(out * weighing(out.shape)), out

        (_, out), grads = jax.value_and_grad(loss, has_aux=True)(floats)
        return out, grads

    return run(floats)


def inputs(M, D, E, F, *, gated=False, bias=False, seed=0):
    rng = np.random.default_rng(seed)
    columns = (2, F) if gated else (F,)
    made = {"lhs": rng.standard_normal((M, D)), "rhs": rng.standard_normal((E, D, *columns)) / np.sqrt(D)}
    made |= {"rhs_bias": rng.standard_normal((E, *columns))} if bias else {}
    return {n: x.astype(np.float32) for n, x in made.items()}


def check(got, want, tolerance=2e-6):
    assert error(got[0], want[0]) < tolerance
    assert set(got[1]) == set(want[1])
    for name, grad in want[1].items():
        assert error(got[1][name], grad) < tolerance, name


# -- numbers -----------------------------------------------------------------------------------------------------------

CALLS = {
    "plain": ({"M": 53, "D": 7, "E": 4, "F": 5}, [9, 0, 33, 4], {}),
    "offset, bias": (
        {"M": 20, "D": 6, "E": 2, "F": 3, "bias": True},
        [3, 4, 0, 5, 8],
        {"group_offset": 3, "activation": "relu"},
    ),
    "gated": ({"M": 19, "D": 5, "E": 3, "F": 4, "gated": True, "bias": True}, [2, 11, 1], {"activation": "silu"}),
}


@pytest.mark.parametrize("turned", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_against_numpy(name, turned):
    shape, sizes, options = CALLS[name]
    floats = inputs(**shape)
    want = loop(**floats, group_sizes=sizes, **options)
    if turned:
        floats["rhs"] = np.moveaxis(floats["rhs"], 1, -1)
        want[1]["rhs"] = np.moveaxis(want[1]["rhs"], 1, -1)
    check(
        value_and_gradients(grouped_matmul, floats, group_sizes=jnp.array(sizes), transpose_rhs=turned, **options), want
    )


@pytest.mark.parametrize("case", [c for c in op.cases if c.name in ("small", "long_groups")], ids=lambda c: c.name)
def test_contract_against_numpy(case):
    a = {n: x for n, x in op.case_inputs(case).items() if x is not None}
    want, _ = loop(np.asarray(a["lhs"]), np.asarray(a["rhs"]), np.asarray(a["group_sizes"]))
    assert error(op.reference(**{**a, "rhs_transposed": None}), want) < 2e-6


def test_ids_in_any_order():
    """The documented call, [total_tokens] ids, by keyword: the third argument is `group_sizes`."""
    inputs_, weights = (inputs(30, 6, 4, 5)[n] for n in ("lhs", "rhs"))
    ids = np.random.default_rng(1).integers(-1, 6, 30)  # -1, 4 and 5 have no matrix
    want = np.zeros((30, 5))
    for row, g in enumerate(ids):
        want[row] = inputs_[row] @ weights[g] if 0 <= g < 4 else 0
    run = jax.jit(lambda ids, x: grouped_matmul(x, weights, group_ids=ids))
    out, pull = jax.vjp(functools.partial(run, ids), inputs_)
    assert error(out, want) < 2e-6 and not np.asarray(out)[(ids < 0) | (ids > 3)].any()
    d = weighing(want.shape).astype(np.float32)
    d_want = np.stack([weights[g] @ d[row] if 0 <= g < 4 else np.zeros(6) for row, g in enumerate(ids)])
    assert error(pull(d)[0], d_want) < 2e-6
    moved = grouped_matmul(inputs_, weights, group_ids=ids + 2, group_offset=2)
    assert grouped_matmul(inputs_[:0], weights, group_ids=ids[:0]).shape == (0, weights.shape[-1])
    np.testing.assert_array_equal(moved, out)


def test_against_ragged_dot():
    floats, sizes = inputs(40, 8, 5, 6), jnp.array([7, 0, 20, 12, 1])
    theirs = functools.partial(jax.lax.ragged_dot, group_sizes=sizes, precision="highest")
    want = value_and_gradients(lambda lhs, rhs: theirs(lhs, rhs), floats)
    check(value_and_gradients(grouped_matmul, floats, group_sizes=sizes), want)


@pytest.mark.parametrize("activation", ["silu", pytest.param(None, marks=pytest.mark.slow)])
def test_rows_of_no_group_are_zero_whatever_is_in_them(activation):
    floats, sizes = inputs(24, 4, 3, 4, bias=True), [0, 9, 4]
    want = loop(**floats, group_sizes=sizes, activation=activation)
    floats["lhs"][13:] = np.nan
    check(value_and_gradients(grouped_matmul, floats, group_sizes=jnp.array(sizes), activation=activation), want)
    nothing = grouped_matmul(**floats, group_sizes=jnp.zeros(3, int), activation=activation)
    assert not nothing.any()


@functools.cache
def compiled(names, activation, transpose):
    return jax.jit(
        lambda floats, sizes, offset: value_and_gradients(
            grouped_matmul,
            floats,
            group_sizes=sizes,
            group_offset=offset,
            activation=activation,
            transpose_rhs=transpose,
        )
    )


@st.composite
def calls(draw):
    # Few shapes, so that many calls are of one program.
    M, (D, E, F) = draw(st.sampled_from([0, 9, 140])), draw(st.sampled_from([(8, 3, 5), (1, 1, 1)]))
    activation, gated = draw(st.sampled_from([(None, False), ("relu", False), ("silu", True)]))
    G = E + draw(st.sampled_from([0, 2]))
    cuts = sorted(draw(st.lists(st.integers(0, M), min_size=G, max_size=G)))
    floats = inputs(M, D, E, F, gated=gated, bias=draw(st.booleans()), seed=draw(st.integers(0, 9)))
    return floats, np.diff([0, *cuts]), draw(st.integers(0, G - E)), activation, draw(st.booleans())


def _random_call(call):
    floats, sizes, offset, activation, transpose = call
    want = loop(**floats, group_sizes=sizes, group_offset=offset, activation=activation)
    if transpose:
        floats["rhs"] = np.moveaxis(floats["rhs"], 1, -1)
        want[1]["rhs"] = np.moveaxis(want[1]["rhs"], 1, -1)
    run = compiled(tuple(floats), activation, transpose)
    out, grads = run(floats, jnp.asarray(sizes), jnp.int32(offset))
    for got, wanted in ((out, want[0]), *((grads[n], want[1][n]) for n in grads)):
        # A gradient may be one number, a sum over all rows that nearly cancels: it is exact to the size of such a sum.
        size = np.sqrt(wanted.size * max(1, len(floats["lhs"])))
        assert np.linalg.norm(got - wanted) <= 5e-6 * max(np.linalg.norm(wanted), size)


@pytest.mark.slow  # the calls above have all options; 300 random ones are slow
@settings(max_examples=2, deadline=None, derandomize=True)
@given(calls())
def test_some_random_calls(call):
    _random_call(call)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(calls())
def test_random_calls(call):
    _random_call(call)


# -- quantised weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("int8", marks=pytest.mark.slow),
        "float8_e4m3fn",
        *(pytest.param(d, marks=pytest.mark.slow) for d in ("int4", "float8_e5m2", "float4_e2m1fn")),
    ],
)
def test_quantised_weights(dtype):
    a, sizes = inputs(21, 8, 3, 5, bias=True), [4, 0, 15]
    codes = jnp.asarray(np.random.default_rng(2).uniform(-6, 6, (3, 8, 5))).astype(dtype)
    scale = np.random.default_rng(3).uniform(0.1, 2, (3, 4, 5)).astype(np.float32)
    floats, wide = {n: a[n] for n in ("lhs", "rhs_bias")}, np.asarray(codes.astype(jnp.float32))
    out, grads = loop(a["lhs"], wide * np.repeat(scale, 2, 1), sizes, rhs_bias=a["rhs_bias"])
    del grads["rhs"]
    options = {"group_sizes": jnp.array(sizes), "rhs": codes, "rhs_scale": scale}
    check(value_and_gradients(grouped_matmul, floats, **options), (out, grads))
    turned = {**options, "rhs": jnp.moveaxis(codes, 1, -1), "transpose_rhs": True}
    assert error(grouped_matmul(**floats, **{**turned, "rhs_scale": np.moveaxis(scale, 1, -1)}), out) < 2e-6
    out, _ = loop(a["lhs"], wide * scale[:, :1], sizes, rhs_bias=a["rhs_bias"])
    assert error(grouped_matmul(**floats, **{**turned, "rhs_scale": scale[:, 0]}), out) < 2e-6


def test_quantised_weights_have_no_gradient():
    a = quantized_op.case_inputs(quantized_op.cases[0])

    def run(scale):
        return grouped_matmul(a["lhs"], a["rhs"], a["group_sizes"], rhs_scale=scale).sum()

    assert not jax.grad(run)(a["rhs_scale"]).any()


# -- cost --------------------------------------------------------------------------------------------------------------


def temporary(M, E, D=64, F=64):
    """Returns the bytes of temporary memory of value and gradients, and of the arguments and results."""
    shapes = [jax.ShapeDtypeStruct(s, t) for s, t in (((M, D), "float32"), ((E, D, F), "float32"), ((E,), "int32"))]

    def run(lhs, rhs, sizes):
        out, pull = jax.vjp(lambda *a: grouped_matmul(*a, sizes), lhs, rhs)
        return out, pull(out)

    memory = jax.jit(run).lower(*shapes).compile().memory_analysis()
    return memory.temp_size_in_bytes, memory.argument_size_in_bytes + memory.output_size_in_bytes


@pytest.mark.slow  # memory; the numbers are quick
def test_memory_of_128_experts_is_that_of_the_arrays():
    few, arrays = temporary(2048, 128)
    assert few < arrays  # a product of every row with every matrix is 64 MiB here, thirteen times as much
    many, _ = temporary(4096, 128)
    assert many - few < 6 * 2048 * 64 * 4  # a row more costs rows, not matrices


# -- on a mesh ---------------------------------------------------------------------------------------------------------

SIZES = [5, 0, 14, 8, 3, 1]  # one row of 32 in no group
ROWS, EXPERTS, FEATURES = P("dp"), P("ep"), P(None, None, "tp")
ON_A_MESH = {
    "ep2": ({"ep": 2}, None, {"activation": "silu"}, True),
    "tp2": ({"tp": 2}, None, {"activation": "silu"}, True),
    "dp2_ep2": ({"dp": 2, "ep": 2}, (ROWS, EXPERTS), {"activation": "silu"}, True),
    "rows over two axes, dp2_tp2": ({"dp": 2, "tp": 2}, (P(("dp", "tp")), P()), {}, False),
    "D over tp2, rows over dp2": ({"dp": 2, "tp": 2}, (P("dp", "tp"), P(None, "tp")), {}, False),
    "fsdp2_ep2_tp2": (
        {"fsdp": 2, "ep": 2, "tp": 2},
        (P("fsdp"), P("ep", None, None, "tp")),
        {"activation": "silu"},
        True,
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "fsdp2_ep2_tp2")) for n in ON_A_MESH]
)
def test_on_a_mesh(name):
    sizes, specs, options, gated = ON_A_MESH[name]
    floats = inputs(32, 8, 6, 4, gated=gated, bias=True)
    want = loop(**floats, group_sizes=SIZES, **options)
    run = functools.partial(ejdist.grouped_matmul, mesh=make_mesh(**sizes), in_specs=specs)
    check(value_and_gradients(run, floats, group_sizes=jnp.array(SIZES), **options), want)


@pytest.mark.slow
def test_more_on_a_mesh():
    a = inputs(32, 8, 6, 4)
    codes, scale = jnp.asarray(a["rhs"] * 40).astype(jnp.int8), jnp.full((6, 4, 4), 0.025, jnp.float32)
    want = grouped_matmul(a["lhs"], codes, jnp.array(SIZES), rhs_scale=scale)
    mesh = make_mesh(dp=2, ep=2, tp=2)
    specs = (P("dp", "tp"), P("ep", "tp"))
    got = ejdist.grouped_matmul(a["lhs"], codes, jnp.array(SIZES), rhs_scale=scale, mesh=mesh, in_specs=specs)
    assert error(got, want) < 2e-6
    ids = np.random.default_rng(1).integers(-1, 6, 32)
    got = ejdist.grouped_matmul(a["lhs"], a["rhs"], group_ids=ids, mesh=make_mesh(ep=2))
    assert error(got, grouped_matmul(a["lhs"], a["rhs"], group_ids=ids)) < 2e-6


def test_sizes_of_a_narrow_dtype_on_a_mesh():
    a, sizes, mesh = inputs(240, 2, 3, 2), jnp.array([100, 100, 40]), make_mesh(dp=2)
    got = ejdist.grouped_matmul(a["lhs"], a["rhs"], sizes.astype(jnp.int8), mesh=mesh, in_specs=(P("dp"), P()))
    assert error(got, grouped_matmul(a["lhs"], a["rhs"], sizes)) < 2e-6


def test_on_a_mesh_it_refuses_by_name():
    a, mesh = inputs(32, 8, 6, 4), make_mesh(ep=2, tp=2)
    run = functools.partial(ejdist.grouped_matmul, a["lhs"], a["rhs"], jnp.array(SIZES), mesh=mesh)
    with pytest.raises(ValueError, match="'activation' is of whole products, and D is split"):
        run(in_specs=(P(None, "tp"), P(None, "tp")), activation="silu")
    with pytest.raises(ValueError, match="'ep' splits both dim"):
        run(in_specs=(P("ep"), P("ep")))


# -- what is refused ---------------------------------------------------------------------------------------------------

X, W, S = np.zeros((6, 4), np.float32), np.zeros((3, 4, 5), np.float32), np.array([1, 2, 3])
ROWS, SLOTS = np.array([1, 0, -1, 5, 1, 3]), np.array([[1, -1], [4, 0], [-1, -1], [5, -1], [-1, -1], [-1, 3]])
OTHER, TURNED = np.where(SLOTS == 5, -1, SLOTS), SLOTS[::-1]


@pytest.mark.parametrize(
    ("said", "args", "options"),
    [
        (r"'lhs' must be a float array \[M, D\], got float32 of shape \(1, 6, 4\); .*reshape", (X[None], W, S), {}),
        (r"'lhs' must be .* a batch of equal products use jnp.matmul", (np.zeros((2, 3, 6, 4)), np.zeros((2, 3, 4, 2))), {}),
        (r"'lhs' must be a float array \[M, D\], got int32", (X.astype(np.int32), W, S), {}),
        (r"'rhs' must be an array \[E, D, F\].*got float32 of shape \(4, 5\)", (X, W[0], S), {}),
        (r"'rhs' must be .* with D = 4 of 'lhs', got .* \(3, 5, 4\); 'transpose_rhs' must be True", (X, W.mT, S), {}),
        (r"'rhs' must be .* with D = 4", (X, W[:, :3], S), {}),
        (r"'rhs' must be .* a gate and an up projection", (X, np.zeros((3, 4, 3, 5), np.float32), S), {"activation": "silu"}),
        (r"'rhs' has a gate .* use one of silu", (X, np.zeros((3, 4, 2, 5), np.float32), S), {}),
        (r"'rhs' is bfloat16 but 'lhs' is float32; cast", (X, jnp.asarray(W, "bfloat16"), S), {}),
        (r"'rhs' of shape \(3, 4, 0\) has no elements", (X, W[..., :0], S), {}),
        (r"'rhs' of shape \(0, 4, 5\) has no elements", (X, W[:0], S[:0]), {}),
        (r"'activation' = 'swiglu' is unknown; .* rhs \[E, D, 2, F\]", (X, W, S), {"activation": "swiglu"}),
        (r"'transpose_rhs' must be True or False, got 1", (X, W, S), {"transpose_rhs": 1}),
        (r"'group_sizes' has 2 groups, but 'rhs' has E = 3 matrices; .* 'group_offset'", (X, W, S[:2]), {}),
        (r"'group_sizes' has 6 groups, .* E = 3 matrices; .* group_ids=", (X, W, np.zeros(6, int)), {}),
        (r"'group_sizes' has \d+ rows in total, but 'lhs' has \d+; .* not where groups begin or end", (X, W, np.cumsum(S)), {}),
        (r"'group_sizes' must be at least 0, got -1", (X, W, jnp.asarray([2, -1, 1])), {}),
        (r"'group_sizes' must be integers \[G\].* got float32", (X, W, S.astype(np.float32)), {}),
        (r"'group_sizes' or 'group_ids' .* neither is given", (X, W), {}),
        (r"'group_sizes' or 'group_ids' .* both are given", (X, W, S), {"group_ids": np.zeros(6, int)}),
        (r"'group_ids' must be integers \[M\] = \[6\]", (X, W), {"group_ids": S}),
        (r"'rhs_bias' must have the shape \(3, 5\), got .* \(5,\)", (X, W, S), {"rhs_bias": W[0, 0]}),
        (r"'rhs_scale' applies to a quantised rhs; multiply", (X, W, S), {"rhs_scale": W[:, 0]}),
        (r"'rhs_scale' is required for an rhs of int8", (X, W.astype(np.int8), S), {}),
        (r"'rhs_scale' must have the shape \(3, 5\).*got \(3, 3, 5\)", (X, W.astype(np.int8), S), {"rhs_scale": W[:, :3]}),
        (r"'rows' has row 105, but the last .* 'lhs' is 5; use -1", (X, W, S), {"rows": ROWS + 100, "slots": SLOTS}),
        (r"'slots' has row 105, but the last of the 6 rows is 5; use -1", (X, W, S), {"rows": ROWS, "slots": SLOTS + 100}),
        (r"'slots' has row 0 in 12 places", (X, W, S), {"rows": ROWS, "slots": SLOTS * 0}),
        (r"'slots' is not the inverse .* rows\[0\] = 1, but 0 is in slots\[4\]", (X, W, S), {"rows": ROWS, "slots": TURNED}),
        (r"'slots' is not .* rows\[5\] = 3, but 5 is in no slot", (X, W, S), {"rows": jnp.asarray(ROWS), "slots": OTHER}),
        (r"'group_sizes' has 6 rows in total, but 'rows' has 0", (X, W, S), {"rows": ROWS[:0], "slots": SLOTS * 0 - 1}),
    ],
)  # fmt: skip
def test_a_wrong_call_is_a_value_error(said, args, options):
    for function in (grouped_matmul, ejdist.grouped_matmul):
        with pytest.raises(ValueError, match=f"grouped_matmul: argument {said}"):
            function(*args, **options)


def test_rows_and_their_inverse_are_taken():
    """And of a trace nothing is checked."""
    for slots in (SLOTS, SLOTS[:, ::-1]):
        assert grouped_matmul(X, W, S, rows=ROWS, slots=slots).shape == (6, 5)
    traced = jax.eval_shape(lambda rows, slots: grouped_matmul(X, W, S, rows=rows, slots=slots), ROWS + 100, SLOTS)
    assert traced.shape == (6, 5)


def test_the_public_function():
    assert kernels.grouped_matmul is grouped_matmul and kernels.operations()["grouped_matmul"] is op
    out = ejdist.GroupedMatmul()(jnp.ones((6, 4)), jnp.ones((3, 4, 5)), S)
    assert out.shape == (6, 5) and (out == 4).all()
