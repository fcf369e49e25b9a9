"""The delta rules: against a float64 loop in NumPy, over long sequences, packed, in a pool of states, and on meshes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_delta_rule import IDS, NAMES, STATE, arrays, call, numpy_loop
from numpy_recurrence import calls, check_call

import kernels
from kernels.ops.delta_rule import op, rwkv7_op
from kernels.ops.delta_rule.chunk import inverse

RNG = np.random.default_rng(0)


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", NAMES)
def test_functions_against_numpy(name):
    """In value; with states, segments and padding."""
    a = arrays(name, B=2)
    options = {} if name == "rwkv7" else {"use_qk_l2norm": True}
    given = {"segment_ids": IDS, "initial_state": STATE, "softmax_scale": 0.7, **options}
    want = numpy_loop(name, a, STATE, IDS, 0.7, bool(options))
    for got, w in zip(call(name, a, **given, return_state=True), want, strict=True):
        assert error(got, w) < 2e-6


@pytest.mark.parametrize("name", ["kernel_delta_attention", pytest.param("rwkv7", marks=pytest.mark.slow)])
def test_gradients_against_finite_differences(name):
    """Of every input, on the float64 loop, along random ways."""
    a, rng = arrays(name, B=2, high=3.0), np.random.default_rng(5)
    given = {**a, "initial_state": STATE}
    d = rng.standard_normal((2, 9, 2, 3)), rng.standard_normal(STATE.shape)

    def loss(x):
        x = dict(x)
        outputs = call(name, x, initial_state=x.pop("initial_state"), segment_ids=IDS, return_state=True)
        return sum(jnp.vdot(y, c) for y, c in zip(outputs, d, strict=True))

    def exact(x):
        outputs = numpy_loop(name, x, x["initial_state"], IDS)
        return sum(np.vdot(y, c) for y, c in zip(outputs, d, strict=True))

    gradient = jax.jit(jax.grad(loss))(given)
    for argument, g in gradient.items():
        way, eps = rng.standard_normal(g.shape), 1e-5
        plus, minus = ({**given, argument: given[argument].astype(np.float64) + s * eps * way} for s in (1, -1))
        want = (exact(plus) - exact(minus)) / (2 * eps)
        np.testing.assert_allclose(np.vdot(g, way), want, rtol=1e-4, atol=1e-5, err_msg=argument)


@pytest.mark.parametrize("name", [*map(slow, ("delta_rule", "gated_delta_rule")), "kernel_delta_attention", "rwkv7"])
@pytest.mark.parametrize("block", [4, slow(1), slow(32)])
def test_chunks_of_any_size_are_the_loop(name, block):
    """With a length that is no multiple of it."""
    cfg = kernels.ChunkConfig(block)
    a = arrays(name, T=37)
    for got, want in zip(call(name, a, return_state=True, cfg=cfg), numpy_loop(name, a), strict=True):
        assert error(got, want) < 3e-6


@pytest.mark.parametrize("name", [slow("gated_delta_rule"), "kernel_delta_attention"])
def test_decays_of_zero_and_one(name):
    """Side by side: exp(-inf) forgets all, and what is summed up before such a token is in no sum after it."""
    a = arrays(name, T=40)
    a["g"] = np.where(RNG.random(a["g"].shape) < 0.5, 0, RNG.choice([-np.inf, -1e4, -1e-7], a["g"].shape)).astype("f4")
    want = numpy_loop(name, a)
    cfg = kernels.ChunkConfig(32)
    for got, w in zip(call(name, a, return_state=True, cfg=cfg), want, strict=True):
        assert error(got, w) < 2e-6
    gradients = jax.jit(jax.grad(lambda a: jnp.sum(call(name, a, cfg=cfg) ** 2)))(a)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


@pytest.mark.slow  # chunks against the loop need it
def test_the_inverse_of_a_chunk():
    A = np.tril(RNG.standard_normal((2, 16, 16)), -1)
    np.testing.assert_allclose(
        inverse(jnp.asarray(A, jnp.float32)), np.linalg.inv(np.eye(16) - A), rtol=1e-3, atol=1e-3
    )


# -- packed sequences, and a pool of states ----------------------------------------------------------------------------

CUTS = np.array([0, 5, 5, 6, 20])


@pytest.mark.parametrize("name", ["gated_delta_rule", slow("rwkv7")])
def test_packed_sequences_are_each_by_themselves(name):
    a, states = arrays(name, T=22), RNG.standard_normal((4, 2, 4, 3)).astype(np.float32)
    cfg = kernels.ChunkConfig(4)
    out, final = call(name, a, cu_seqlens=CUTS, state=states, return_state=True, cfg=cfg)
    for i, (begin, end) in enumerate(itertools.pairwise(CUTS)):
        one = {n: x[:, begin:end] for n, x in a.items()}
        want, state = numpy_loop(name, one, states[i : i + 1])
        assert end == begin or error(out[:, begin:end], want) < 2e-6
        assert error(final[i], state[0]) < 2e-6
    assert not out[:, 20:].any()
    np.testing.assert_array_equal(final[1], states[1])
    # Without states there is one at a time.
    again = call(name, a, cum_seqlens=list(CUTS), cfg=cfg)
    want, _ = numpy_loop(name, a, ids=np.searchsorted(CUTS, np.arange(22), side="right")[None] % 5 - 1)
    assert error(again[:, :20], want[:, :20]) < 2e-6 and not again[:, 20:].any()


POOL = RNG.standard_normal((7, 2, 4, 3)).astype(np.float32)
SLOTS = np.array([5, 2, -1, 0])


@pytest.mark.parametrize("longest", [None, pytest.param(14, marks=pytest.mark.slow)])
def test_requests_in_a_pool_of_states(longest):
    a = {n: x[0] for n, x in arrays("gated_delta_rule", T=22).items()}
    begun = np.array([True, False, True, False])
    given = (*a.values(), jnp.asarray(POOL), CUTS, SLOTS)
    out, pool = kernels.ragged_gated_delta_rule(*given, begun, max_query_len=longest)
    for i, (begin, end) in enumerate(itertools.pairwise(CUTS)):
        one = {n: x[None, begin:end] for n, x in a.items()}
        want, state = numpy_loop("gated_delta_rule", one, POOL[SLOTS[i]][None] if begun[i] else None)
        if SLOTS[i] < 0:
            assert not out[begin:end].any()
        elif end > begin:
            assert error(out[begin:end], want[0]) < 2e-6 and error(pool[SLOTS[i]], state[0]) < 2e-6
    assert not out[20:].any()
    for slot in (1, 2, 3, 4, 6):  # 2 is that of a request without tokens
        assert pool[slot].tobytes() == POOL[slot].tobytes()


def test_decoding_a_token_of_each_request():
    a = {n: x[0] for n, x in arrays("gated_delta_rule", T=4).items()}
    run = jax.jit(functools.partial(kernels.ragged_gated_delta_rule, max_query_len=1))
    narrow = jnp.asarray(POOL, jnp.bfloat16)
    out, pool = run(*a.values(), narrow, np.arange(5), np.array([6, 3, 1, 4]))
    assert pool.dtype == jnp.bfloat16 and out.dtype == jnp.float32
    for i, slot in enumerate((6, 3, 1, 4)):
        want, state = numpy_loop("gated_delta_rule", {n: x[None, i : i + 1] for n, x in a.items()}, narrow[slot][None])
        assert error(out[i], want[0, 0]) < 2e-6 and error(pool[slot], state[0]) < 4e-3
    for slot in (0, 2, 5):
        assert pool[slot].tobytes() == narrow[slot].tobytes()


# -- long sequences ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_65536_steps(name):
    """Nothing overflows, and errors do not pile up. Decays from 0.99999 to 0.05, beta up to 2."""
    spread = {} if name == "delta_rule" else {"low": 1e-5, "high": 3.0}
    a = arrays(name, T=65536, N=1, H=8, Hv=4, **spread)
    got, want = call(name, a, return_state=True), numpy_loop(name, a)
    for g, w in zip(got, want, strict=True):
        assert error(g, w) < 5e-6, error(g, w)


@pytest.mark.parametrize("name", [slow("gated_delta_rule"), slow("rwkv7")])
def test_memory_is_linear_in_the_length(name):
    def temporaries(T):
        shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in arrays(name, T=T, H=16, Hv=16).items()}
        run = jax.jit(jax.grad(lambda a: jnp.sum(call(name, a) ** 2)))
        return run.lower(shapes).compile().memory_analysis().temp_size_in_bytes

    short, long = temporaries(1024), temporaries(4096)
    assert long < 4.2 * short, (short, long)


@pytest.mark.parametrize("name", ["kernel_delta_attention"])
def test_narrow_inputs_have_a_state_in_float32(name):
    a = arrays(name, T=70)
    narrow = {n: jnp.asarray(x, jnp.bfloat16 if n != "g" else jnp.float32) for n, x in a.items()}
    out, state = call(name, narrow, return_state=True)
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    want = numpy_loop(name, {n: np.asarray(x, np.float32) for n, x in narrow.items()})
    assert error(out, want[0]) < 4e-3 and error(state, want[1]) < 3e-6


# -- random calls ------------------------------------------------------------------------------------------------------


def random_call(drawn, block):
    name, (N, K) = drawn["name"], drawn["heads"]
    a = arrays(name, T=drawn["T"], N=N, K=K, H=4, Hv=3, seed=drawn["seed"])
    a = {n: x if n in ("g", "beta", "w") else jnp.asarray(x, drawn["dtype"]) for n, x in a.items()}
    l2norm = name != "rwkv7" and drawn["some"]
    more = {"softmax_scale": drawn["scale"], **({"use_qk_l2norm": True} if l2norm else {})}

    def run(a, **given):
        return call(name, a, **given, **more, return_state=True, cfg=kernels.ChunkConfig(block))

    def reference(a, ids, state):
        out, final = numpy_loop(name, a, state, ids, drawn["scale"], l2norm)
        return out, final[0]

    check_call(run, reference, a, a.keys(), drawn, (N, 4, 3))


RANDOM = given(calls(list(NAMES)), st.sampled_from([1, 16]))
test_random_calls = pytest.mark.slow(
    settings(max_examples=2, deadline=None, derandomize=True, database=None)(RANDOM(random_call))
)
test_300_random_calls = pytest.mark.slow(settings(max_examples=300, deadline=None, database=None)(RANDOM(random_call)))


# -- what is refused ---------------------------------------------------------------------------------------------------

D, G, R = arrays("gated_delta_rule", B=2), arrays("kernel_delta_attention", B=2), arrays("rwkv7", B=2)
POOLED = [x[0] for x in D.values()]


def without(arrays, **changed):
    return {**arrays, **changed}


@pytest.mark.parametrize(
    ("name", "a", "options", "said"),
    [
        ("delta_rule", without(D, query=D["query"][0]), {}, r"'query' must be a float array \[B, T, K, H\]"),
        ("delta_rule", without(D, beta=D["beta"].astype(int)), {}, r"'beta' must be a float array .* got int"),
        (
            "delta_rule",
            without(D, beta=D["beta"][..., :1]),
            {},
            r"'beta' must have the shape \(2, 9, 2\) to match 'value'",
        ),
        ("delta_rule", without(D, key=G["value"][:, :, :, :3]), {}, r"'key'"),
        ("delta_rule", without(D, query=D["key"].repeat(2, 2)), {}, r"'key' must have as many heads as 'query'"),
        (
            "delta_rule",
            D,
            {"state": STATE, "initial_state": STATE},
            "'initial_state' and 'state' are two names for the same argument",
        ),
        ("delta_rule", D, {"state": STATE[:1]}, "'initial_state' must be"),
        ("delta_rule", D, {"cu_seqlens": CUTS}, "'cum_seqlens' splits one packed row"),
        ("delta_rule", D, {"softmax_scale": "x"}, "'softmax_scale' must be float or None"),
        ("delta_rule", D, {"use_qk_l2norm": "no"}, "'use_qk_l2norm' must be bool, got 'no'"),
        ("delta_rule", D, {"segment_ids": IDS[:, :3]}, "'segment_ids' must have the shape"),
        ("gated_delta_rule", without(D, g=G["g"]), {}, "'g' .* for decays per channel use kernel_delta_attention"),
        ("gated_delta_rule", without(D, g=None), {}, "'g' .* without decays it is delta_rule"),
        ("gated_delta_rule", D, {"decay": D["g"]}, "'g' and 'decay' are two names for the same argument"),
        ("kernel_delta_attention", D, {}, "'g' .* use gated_delta_rule"),
        (
            "kernel_delta_attention",
            without(G, g=G["g"][..., :2]),
            {},
            "'g' must have the shape .* use gated_delta_rule",
        ),
        ("rwkv7", without(R, w=R["w"][:, :, 0]), {}, r"'w' must be a float array \[B, T, N, H\]"),
        ("rwkv7", without(R, a=R["a"][:, :4]), {}, "'a'"),
    ],
)
def test_a_wrong_call_is_a_value_error(name, a, options, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        call(name, a, **options)


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, D["query"], r"'query' must be a float array \[M, K, H\]"),
        (5, POOL[:, :1], r"'state_pool' must have the shape \(7, 2, 4, 3\)"),
        (6, CUTS[:-1], r"'query_start_loc' must be integers \[requests \+ 1\] = \[5\]"),
        (6, np.array([0, 5, 4, 6, 9]), r"'query_start_loc' must rise from 0"),
        (7, np.array([2, 2, -1, 2]), r"'state_indices' has slot 2 for several requests"),
        (7, SLOTS.astype(float), r"'state_indices' must be integers \[requests\]"),
        (8, np.ones(4), r"'has_initial_state' must be bool \[requests\]"),
    ],
)
def test_a_wrong_call_of_a_pool_is_a_value_error(at, value, said):
    given = [*POOLED, POOL, np.array([0, 2, 2, 3, 9]), SLOTS, None]
    given[at] = value
    with pytest.raises(ValueError, match=f"ragged_gated_delta_rule: argument {said}"):
        kernels.ragged_gated_delta_rule(*given)
    with pytest.raises(ValueError, match="'max_query_len' must be an integer of at least 1, or None, got 0"):
        kernels.ragged_gated_delta_rule(*POOLED, POOL, CUTS, SLOTS, max_query_len=0)
    with pytest.raises(ValueError, match="'max_query_len' = 5, but a request has 6 tokens"):
        kernels.ragged_gated_delta_rule(*POOLED, POOL, [0, 2, 2, 3, 9], SLOTS, max_query_len=5)


def test_states_and_their_number_go_together():
    a = {n: x for n, x in D.items() if n != "g"}
    with pytest.raises(ValueError, match=r"'num_states' = 3 must equal the size G = 1"):
        op(**a, initial_state=jnp.zeros((2, 1, 2, 4, 3)), segment_ids=IDS, num_states=3)
    with pytest.raises(ValueError, match="'segment_ids' must assign"):
        rwkv7_op(**R, num_states=2)
    with pytest.raises(ValueError, match="chunk = 12 is not a power of 2; use one, or None"):
        kernels.ChunkConfig(12)


@pytest.mark.slow  # a crash of a compiler, at one width
def test_decays_of_channels_at_a_width_of_models():
    """As sums of more than five dims these chunks crash CPUs from some size on (see kernels/engines/scan/chunks.py)."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape).astype(np.float32))

    q, k, v, g = (normal(1, 128, 4, 32) for _ in range(4))
    given = {"query": q, "key": k / 6, "value": v, "beta": jax.nn.sigmoid(g[..., 0]), "g": -jax.nn.softplus(g)}
    for together in (1, 2):
        got = jax.jit(functools.partial(op, cfg=kernels.ChunkConfig(together=together)))(**given)
        np.testing.assert_allclose(got[0], op.function(**given)[0], rtol=1e-4, atol=1e-4)
