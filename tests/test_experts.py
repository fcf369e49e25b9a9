"""The router and the layer of experts, against a loop over tokens and experts in NumPy."""

import functools

import experts_loop as loop
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_loop import DEEPSEEK, IDS, SHARED, B, D, E, T, chosen, inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ejdist import moe, route
from ejdist.experts import (
    SCORES,
    balance_loss,
    merge,
    summary,
    update_bias,
)

CLAMPED = {"top_k": 2, "activation": "clamped_swiglu", "alpha": 1.5, "limit": 0.75}
LAYERS = {
    # name -> (other arrays, options, whether there is a bias that chooses)
    "mixtral": ((), {"top_k": 2}, False),
    "qwen2_moe": (SHARED, {"top_k": 3, "normalize": False, "activation": "gelu", "balance": "global"}, False),
    "deepseek": (SHARED[:3], {"top_k": 3, **DEEPSEEK}, True),
    "gpt_oss": (("fused", "router_bias", "gate_bias", "down_bias"), CLAMPED, False),
    "clamped": (("gate_bias", "up_bias", "down_bias"), CLAMPED, False),
    "sqrtsoftplus": ((), {"top_k": 2, "score": "sqrtsoftplus", "normalize": False}, True),
    "switch": (("fused",), {"top_k": 1, "normalize": False}, False),
}
RARE = ("clamped", "sqrtsoftplus", "mixtral", "deepseek", "switch")  # in the full run; random routes have all scores


def extras(options, bias):
    rng = np.random.default_rng(1)
    found = {"segment_ids": IDS}
    if bias:
        found["bias"] = rng.standard_normal(E).astype(np.float32)
    if options.get("balance") == "global":
        found["load"] = rng.integers(0, 50, E)
    return found


def value(arrays, run, weights, options):
    """Returns a number that depends on all of the result and on both losses."""
    out, stats = run(**arrays, **options)
    return (out * weights).sum() + 0.3 * stats.balance_loss + 0.2 * stats.z_loss


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in RARE else ()) for n in LAYERS])
def test_the_layer_is_the_loop(name):
    """Result, statistics and every gradient. The loop's gradients are finite differences in float64."""
    others, options, bias = LAYERS[name]
    arrays = chosen(inputs(), *others)
    options = options | extras(options, bias)
    weights = np.random.default_rng(2).standard_normal((B, T, D))

    def ours(arrays, more):
        return moe(**arrays, **more, **static)

    static = {k: v for k, v in options.items() if not isinstance(v, np.ndarray)}
    more = {k: jnp.asarray(v) for k, v in options.items() if isinstance(v, np.ndarray)}

    @jax.jit
    def both(arrays, more):
        def total(a):
            return value(a, lambda **kw: ours(kw, more), weights, {})

        return ours(arrays, more), jax.grad(total)(arrays)

    (out, stats), gradients = both(arrays, more)
    wide = {n: a.astype(np.float64) for n, a in arrays.items()}
    wanted, wanted_stats = loop.moe(**wide, **options)
    np.testing.assert_allclose(out, wanted, atol=2e-5, rtol=2e-5)
    for field, got in stats._asdict().items():
        np.testing.assert_allclose(got, getattr(wanted_stats, field), atol=1e-5, rtol=1e-5, err_msg=field)
    # A direction for each array: its slope is one number, which takes two runs of the loop.
    rng, step = np.random.default_rng(3), 1e-6
    for n in wide:
        direction = rng.standard_normal(wide[n].shape)
        ends = [value(wide | {n: wide[n] + s * direction}, loop.moe, weights, options) for s in (step, -step)]
        slope = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose((gradients[n] * direction).sum(), slope, rtol=2e-4, atol=2e-4, err_msg=n)
    assert np.all(np.asarray(gradients["x"])[IDS < 0] == 0) and np.all(np.asarray(out)[IDS < 0] == 0)


@pytest.mark.parametrize("capacity", [None, 2])
def test_the_gradients_of_the_loop_are_differences_of_its_results(capacity):
    """Those of the exchange, written out by hand: along a direction of each array, and all in one."""
    rng = np.random.default_rng(5)
    layer = loop.Layer.random(rng, 9, 3, 4)
    d_out = rng.standard_normal(layer.x.shape)
    _, gradients, dropped = loop.run(layer, d_out, capacity)
    assert (dropped > 0) == (capacity is not None)
    for n, gradient in gradients.items():
        direction = rng.standard_normal(gradient.shape)
        moved = [layer._replace(**{n: getattr(layer, n) + s * direction}) for s in (1e-6, -1e-6)]
        up, down = ((loop.run(m, d_out, capacity)[0] * d_out).sum() for m in moved)
        np.testing.assert_allclose((gradient * direction).sum(), (up - down) / 2e-6, rtol=1e-6, atol=1e-6, err_msg=n)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_every_entry_of_the_gradients(name):
    """One by one, against finite differences of the loop in float64."""
    others, options, bias = LAYERS[name]
    options = options | extras(options, bias)
    weights = np.random.default_rng(2).standard_normal((B, T, D))
    wide = chosen(inputs(), *others)
    gradients = jax.grad(value)(
        wide, moe, weights, {k: v if np.ndim(v) == 0 else jnp.asarray(v) for k, v in options.items()}
    )
    wide = {n: a.astype(np.float64) for n, a in wide.items()}
    for n, got in gradients.items():
        for at in np.ndindex(got.shape):
            ends = []
            for s in (1e-6, -1e-6):
                moved = wide[n].copy()
                moved[at] += s
                ends.append(value(wide | {n: moved}, loop.moe, weights, options))
            np.testing.assert_allclose(got[at], (ends[0] - ends[1]) / 2e-6, rtol=1e-3, atol=1e-3, err_msg=f"{n} {at}")


@st.composite
def calls(draw):
    """A legal call of the router, and its arrays."""
    groups, size = draw(st.sampled_from([(1, 1), (1, 5), (2, 2), (3, 4), (4, 1)]))
    kept = draw(st.integers(1, groups))
    options = {
        "top_k": draw(st.integers(1, kept * size)),
        "score": draw(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"])),
    }
    if groups > 1:
        options |= {"num_groups": groups, "topk_groups": kept, "group_top": draw(st.integers(1, size))}
    options |= {"normalize": draw(st.booleans()), "balance": draw(st.sampled_from(["batch", "sequence", "global"]))}
    options["forced_balance"] = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    rows, length, experts = draw(st.integers(1, 3)), draw(st.integers(1, 5)), groups * size
    arrays = {"x": rng.standard_normal((rows, length, 3)), "router": 3 * rng.standard_normal((3, experts))}
    if draw(st.booleans()):
        arrays["router_bias"] = rng.standard_normal(experts)
    if draw(st.booleans()) and not options["forced_balance"]:
        arrays["bias"] = rng.standard_normal(experts)
    if draw(st.booleans()):
        arrays["segment_ids"] = rng.integers(-1, 3, (rows, length))
    if options["balance"] == "global":
        arrays["load"] = rng.integers(0, 9, experts)
    return {n: a.astype(np.float32) if a.dtype.kind == "f" else a for n, a in arrays.items()}, options


def check_route(call):
    arrays, options = call
    got = jax.jit(functools.partial(route, **options))(**arrays)
    wide = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in arrays.items()}
    experts, weights, stats = loop.route(**wide, **options)
    np.testing.assert_array_equal(got.experts, experts)
    np.testing.assert_allclose(got.weights, weights, atol=1e-5)
    for name, x in got.stats._asdict().items():
        np.testing.assert_allclose(x, getattr(stats, name), rtol=2e-5, atol=2e-5, err_msg=name)


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@settings(max_examples=6, **QUIET)
@given(calls())
def test_random_routes(call):
    check_route(call)


@pytest.mark.slow
@settings(max_examples=300, **QUIET)
@given(calls())
def test_many_random_routes(call):
    check_route(call)


def test_documents_packed_in_rows_are_those_in_rows_of_their_own():
    """And whatever lies in padding, a NaN too, changes nothing, neither a value nor a gradient."""
    arrays, ids = chosen(inputs(), *SHARED), np.array([[0] * 4 + [1] * 3, [-1] * 7])
    static = {"top_k": 2, "balance": "sequence"}

    @jax.jit
    def run(arrays, ids):
        def total(a):
            return value(a, moe, 1.0, {"segment_ids": ids, **static})

        return moe(**arrays, segment_ids=ids, **static), jax.grad(total)(arrays)

    x = arrays["x"]  # of which the second row is padding
    apart = np.full((2, T, D), np.nan, np.float32)
    apart[0, :4], apart[1, 2:5] = x[0, :4], x[0, 4:]
    apart_ids = np.array([[0] * 4 + [-1] * 3, [-1] * 2 + [7] * 3 + [-5] * 2])
    (packed, stats), gradients = run(arrays, ids)
    (out, stats_apart), gradients_apart = run(arrays | {"x": apart}, apart_ids)
    np.testing.assert_allclose(np.concatenate([out[0, :4], out[1, 2:5]]), packed[0], atol=1e-5)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, stats, stats_apart)
    for name in gradients.keys() - {"x"}:
        close(gradients[name], gradients_apart[name], err_msg=name)
    d = gradients_apart["x"]
    close(np.concatenate([d[0, :4], d[1, 2:5]]), gradients["x"][0])
    assert np.isfinite(d).all() and not d[apart_ids < 0].any()


@pytest.mark.slow
def test_microbatches_layers_and_remat_count_once():
    """The losses of a global batch, in gradient too, from two microbatches; a rematerialised layer counts once."""
    arrays, static = inputs(), {"top_k": 2, "balance": "global"}
    names = ("router", "gate", "up", "down")
    ids = np.array([[0] * 5 + [-1] * 2, [0] * 7])
    params = {n: arrays[n] for n in names}

    @functools.partial(jax.jit, static_argnums=3)
    def run(params, x, ids, remat, load):
        def total(params):
            def layer(p):
                return moe(x, **p, segment_ids=ids, load=load, **static)

            out, stats = (jax.checkpoint(layer) if remat else layer)(params)
            return jnp.sin(out).sum() + 0.3 * stats.balance_loss + 0.2 * stats.z_loss, stats

        return jax.grad(total, has_aux=True)(params)

    x = arrays["x"]
    batch = jax.jit(functools.partial(route, top_k=2))(x, params["router"], segment_ids=ids).stats
    counts = batch.counts
    whole, stats = run(params, x, ids, False, counts)
    np.testing.assert_allclose(stats.balance_loss, batch.balance_loss, rtol=1e-6)
    parts = [run(params, x[i : i + 1], ids[i : i + 1], True, counts) for i in range(2)]
    for n in names:
        np.testing.assert_allclose(parts[0][0][n] + parts[1][0][n], whole[n], rtol=1e-4, atol=1e-5, err_msg=n)
    merged = merge(parts[0][1], parts[1][1])
    for n in ("tokens", "counts", "probabilities", "balance_loss", "z_loss", "entropy"):
        np.testing.assert_allclose(getattr(merged, n), getattr(stats, n), rtol=1e-5, err_msg=n)
    assert merged.tokens == 12 and merged.counts.sum() == 24
    assert merged.max_violation == max(part[1].max_violation for part in parts)
    assert merged.dead_experts == max(part[1].dead_experts for part in parts)
    np.testing.assert_allclose(balance_loss(merged.counts, merged.probabilities), stats.balance_loss, rtol=1e-5)
    said = summary(merged)
    np.testing.assert_allclose(said["balance_loss"], stats.balance_loss / 12, rtol=1e-5)
    np.testing.assert_allclose(said["load_violation"], stats.max_violation, atol=1e-6)
    assert said["unused_experts"] == stats.dead_experts


def test_remat_keeps_the_choice():
    def total(x, router):
        return route(x, router, top_k=2, score="sigmoid", num_groups=4, topk_groups=2).weights.sum()

    policy = jax.checkpoint_policies.save_only_these_names("route.experts")
    chosen = [
        str(jax.make_jaxpr(jax.grad(function))(*(inputs()[n] for n in ("x", "router")))).count("= argmax[")
        for function in (total, jax.checkpoint(total, policy=policy), jax.checkpoint(total))
    ]
    assert chosen == [6, 6, 12]  # of each two experts, groups, and experts of a group


def test_narrow_dtypes_route_in_float32():
    arrays = {n: jnp.asarray(a, jnp.bfloat16) for n, a in chosen(inputs(), *SHARED).items()}
    out, stats = jax.jit(functools.partial(moe, top_k=2))(**arrays)
    wide = {n: np.asarray(a, np.float64) for n, a in arrays.items()}
    wanted, wanted_stats = loop.moe(**wide, top_k=2)
    assert out.dtype == jnp.bfloat16 and stats.z_loss.dtype == jnp.float32
    np.testing.assert_array_equal(stats.counts, wanted_stats.counts)
    np.testing.assert_allclose(stats.z_loss, wanted_stats.z_loss, rtol=1e-5)
    assert np.linalg.norm(out - wanted) < 0.01 * np.linalg.norm(wanted)


@pytest.mark.slow
def test_jitter_and_forced_balance():
    arrays = inputs()
    # The logits of tokens of one 1 are the numbers that it is multiplied by, and 0.
    jittered = jax.jit(functools.partial(route, top_k=2, score="sigmoid", normalize=False, jitter=0.1))
    one, router = np.ones((1, 100, 1), np.float32), np.array([[1.0, 0.0]], np.float32)
    weights = [jittered(one, router, key=jax.random.key(i)).weights[0, :, 0] for i in (0, 0, 1)]
    factors = np.log(weights[0] / (1 - weights[0]))
    assert 0.899 < factors.min() < 0.92 and 1.08 < factors.max() < 1.101
    assert np.array_equal(*weights[:2]) and not np.array_equal(*weights[1:])
    in_turn = jax.jit(functools.partial(route, top_k=3, forced_balance=True))
    forced = in_turn(arrays["x"], arrays["router"], segment_ids=IDS)
    counted = IDS >= 0
    assert forced.stats.counts.max() - forced.stats.counts.min() <= 1 and forced.stats.counts.sum() == 3 * counted.sum()
    np.testing.assert_array_equal(np.asarray(forced.experts)[counted].reshape(-1), np.arange(3 * counted.sum()) % E)


def test_far_logits_have_finite_weights_and_gradients():
    x = jnp.asarray([[[300.0], [-300.0], [0.0], [30.0], [-30.0]]])
    router = jnp.asarray([[1.0, -1.0, 0.5, 0.9]])

    def total(x, router, score):
        _, weights, stats = route(x, router, top_k=2, score=score)
        return (weights**2).sum() + stats.balance_loss + stats.z_loss

    def both(x, router, score):
        weights = route(x, router, top_k=2, score=score, normalize=False).weights
        return weights, jax.value_and_grad(total, (0, 1))(x, router, score)

    every = jax.jit(lambda *a: {score: both(*a, score) for score in SCORES})
    for score, (weights, found) in every(x, router).items():
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found)), score
        wanted = loop.route(np.float64(x), np.float64(router), top_k=2, score=score, normalize=False)[1]
        np.testing.assert_allclose(weights, wanted, rtol=1e-4, atol=1e-36, err_msg=score)


def test_the_bias_brings_balance():
    """Experts that all tokens prefer lose them, step by step."""
    rng = np.random.default_rng(0)
    x, router = rng.standard_normal((1, 256, 8)), rng.standard_normal((8, 8))
    x[..., 0], router[0] = 1, np.linspace(-2, 2, 8)
    run = jax.jit(functools.partial(route, top_k=2, score="sigmoid"))
    bias, violations = jnp.zeros(8), []
    for _ in range(150):
        stats = run(x.astype(np.float32), router.astype(np.float32), bias=bias).stats
        bias = update_bias(bias, stats.counts, 0.01)
        violations.append(float(stats.max_violation))
    assert violations[0] > 0.8 and violations[-1] < 0.15, violations[::30]
    np.testing.assert_array_equal(update_bias(bias, jnp.zeros(8, jnp.int32), 0.01), bias)
    scheduled = jax.jit(update_bias)(jnp.zeros(3), jnp.array([1, 2, 3]), jnp.float32(0.5))
    np.testing.assert_array_equal(scheduled, [0.5, 0, -0.5])
    # The mean is 2**25 + 2/3: float32 has no integer between that and 2**25.
    large = update_bias(jnp.zeros(3), jnp.array([0, 1, 1]) + 2**25, 1.0)
    np.testing.assert_array_equal(large, [1, -1, -1])
    for counts in ([5, 0, 1], np.array([5, 0, 1], np.uint32)):
        np.testing.assert_array_equal(update_bias(jnp.zeros(3), counts, 1.0), [-1, 1, 1])


def test_empty_batches_and_batches_of_padding():
    arrays = chosen(inputs())
    for shape in ((0, T, D), (B, 0, D)):
        arrays_of_none = arrays | {"x": np.zeros(shape, np.float32)}
        out, stats = jax.jit(functools.partial(moe, top_k=2, **DEEPSEEK))(**arrays_of_none)
        assert out.shape == shape and stats.tokens == 0 and stats.dead_experts == E
    run = jax.jit(jax.value_and_grad(lambda a: value(a, moe, 1.0, {"top_k": 2, "segment_ids": jnp.full((B, T), -1)})))
    for leaf in jax.tree.leaves(run(arrays)):
        assert not np.asarray(leaf).any()


def test_every_expert_is_chosen():
    for experts in (1, 3):
        arrays = inputs(experts=experts)
        found, _, stats = jax.jit(functools.partial(route, top_k=experts))(arrays["x"] * 0, arrays["router"])
        assert np.array_equal(found, np.broadcast_to(np.arange(experts), (B, T, experts)))  # of equal ones the first
        assert stats.counts.tolist() == [B * T] * experts and stats.max_violation == 0 and stats.dead_experts == 0
