"""The router and the layer of experts, against a loop over tokens and experts in NumPy."""

import contextlib
import doctest
import functools
import io
import re
import runpy
from pathlib import Path

import experts_loop as loop
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ejdist
from ejdist import moe, route
from ejdist.experts import (
    SCORES,
    balance_loss,
    merge,
    sequence_balance_loss,
    summary,
    update_bias,
    z_loss,
)

B, T, D, E, F, Fs = 2, 7, 5, 8, 3, 4
IDS = np.array([[4, 4, 4, 9, 9, -1, 4], [0, -1, 1, 1, 1, -1, -1]])  # a document that goes on, one of one token, padding
DEEPSEEK = {"score": "sigmoid", "num_groups": 4, "topk_groups": 2, "routed_scaling_factor": 2.5, "balance": "sequence"}


def inputs(seed=0, experts=E, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = {
        "x": (B, T, D), "router": (D, experts), "gate": (experts, D, F), "up": (experts, D, F), "down": (experts, F, D),
        "fused": (experts, D, 2, F), "fused_bias": (experts, 2, F),
        "router_bias": (experts,), "gate_bias": (experts, F), "up_bias": (experts, F), "down_bias": (experts, D),
        "shared_gate": (D, Fs), "shared_up": (D, Fs), "shared_down": (Fs, D), "shared_expert_gate": (D, 1),
    }  # fmt: skip
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def chosen(arrays, *names):
    if "fused" in names:  # gate and up in one array
        fused = {"gate": arrays["fused"]} | ({"gate_bias": arrays["fused_bias"]} if "gate_bias" in names else {})
        return {n: arrays[n] for n in ("x", "router", "down", *names) if n not in ("fused", "gate_bias")} | fused
    return {n: arrays[n] for n in ("x", "router", "gate", "up", "down", *names)}


CLAMPED = {"top_k": 2, "activation": "clamped_swiglu", "alpha": 1.5, "limit": 0.75}
SHARED = ("shared_gate", "shared_up", "shared_down", "shared_expert_gate")
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
RARE = ("clamped", "sqrtsoftplus")  # in the full run; random routes have all scores


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


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_every_entry_of_the_gradients(name):
    """One by one, in float64, which is what the layer computes in where it is given it."""
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
        str(jax.make_jaxpr(jax.grad(function))(*(inputs()[n] for n in ("x", "router")))).count("= top_k[")
        for function in (total, jax.checkpoint(total, policy=policy), jax.checkpoint(total))
    ]
    assert chosen == [3, 3, 6]


def test_rows_and_sequence_split_over_devices():
    """Arrays are global under jit: the same numbers, each token and each loss counted once."""
    mesh = ejdist.make_mesh(fsdp=2, sp=2, devices=jax.devices()[:4])
    arrays = chosen(inputs())
    ids = np.where(np.arange(6) < 4, [[0], [1]], -1)
    arrays["x"] = arrays["x"][:, :6]
    static = {"top_k": 2, "balance": "sequence"}

    @jax.jit
    def both(arrays, ids):
        def total(arrays):
            out, stats = moe(**arrays, segment_ids=ids, **static)
            return out.sum() + 0.3 * stats.balance_loss + 0.2 * stats.z_loss, stats

        return jax.value_and_grad(total, has_aux=True)(arrays)

    wanted = both(arrays, ids)
    where = ejdist.layout.sharding(mesh, ("B", "T"), ejdist.layout.ACTIVATIONS)
    spread = {**jax.device_put(arrays, ejdist.layout.sharding(mesh, (), ejdist.layout.ACTIVATIONS))}
    spread["x"] = jax.device_put(arrays["x"], where)
    got = both(spread, jax.device_put(ids, where))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, wanted)


def test_narrow_dtypes_route_in_float32():
    arrays = {n: jnp.asarray(a, jnp.bfloat16) for n, a in chosen(inputs(), *SHARED).items()}
    out, stats = jax.jit(functools.partial(moe, top_k=2))(**arrays)
    wide = {n: np.asarray(a, np.float64) for n, a in arrays.items()}
    wanted, wanted_stats = loop.moe(**wide, top_k=2)
    assert out.dtype == jnp.bfloat16 and stats.z_loss.dtype == jnp.float32
    np.testing.assert_array_equal(stats.counts, wanted_stats.counts)
    np.testing.assert_allclose(stats.z_loss, wanted_stats.z_loss, rtol=1e-5)
    assert np.linalg.norm(out - wanted) < 0.01 * np.linalg.norm(wanted)


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

    for score in SCORES:
        for found in jax.tree.leaves(jax.jit(jax.value_and_grad(total, (0, 1)), static_argnums=2)(x, router, score)):
            assert np.isfinite(found).all(), score


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
    np.testing.assert_allclose(scheduled, [0.5, 0, -0.5])


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
        arrays = chosen(inputs(experts=experts))
        stats = jax.jit(functools.partial(route, top_k=experts))(arrays["x"], arrays["router"]).stats
        assert stats.counts.tolist() == [B * T] * experts and stats.max_violation == 0 and stats.dead_experts == 0


@pytest.mark.slow
def test_memory_is_that_of_the_rows():
    """However many experts there are: nothing is tokens by experts by width."""

    def size(tokens, experts):
        shapes = {"x": (1, tokens, 64), "router": (64, experts), "gate": (experts, 64, 32), "up": (experts, 64, 32)}
        shapes["down"] = (experts, 32, 64)
        arrays = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
        compiled = jax.jit(functools.partial(moe, top_k=2)).lower(**arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, long, many = size(512, 4), size(2048, 4), size(2048, 32)
    assert long < 4.5 * small and many < long + 2048 * 32 * 4 * 8


GOOD = chosen(inputs())
ILLEGAL = {
    "top_k of more experts than there are": ({"top_k": 9}, "top_k"),
    "top_k of none": ({"top_k": 0}, "top_k"),
    "top_k that is no integer": ({"top_k": 2.0}, "top_k"),
    "top_k past the groups": ({"top_k": 5, "num_groups": 4, "topk_groups": 2}, "top_k"),
    "groups that do not divide": ({"num_groups": 3, "topk_groups": 1}, "num_groups"),
    "more groups than there are": ({"num_groups": 4, "topk_groups": 5}, "topk_groups"),
    "groups without a limit": ({"num_groups": 4}, "topk_groups"),
    "a limit without groups": ({"topk_groups": 2}, "topk_groups"),
    "best of more than a group has": ({"num_groups": 8, "topk_groups": 2}, "group_top"),
    "a score that is none": ({"score": "tanh"}, "score"),
    "a balance that is none": ({"balance": "rank"}, "balance"),
    "a global batch without its counts": ({"balance": "global"}, "load"),
    "counts of no global batch": ({"load": np.ones(E)}, "load"),
    "jitter without a key": ({"jitter": 0.1}, "key"),
    "a key without jitter": ({"key": jax.random.key(0)}, "key"),
    "jitter that is no number": ({"jitter": float("nan"), "key": jax.random.key(0)}, "jitter"),
    "jitter past 1": ({"jitter": 1.5, "key": jax.random.key(0)}, "jitter"),
    "a factor that is no number": ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor"),
    "a factor of 0": ({"routed_scaling_factor": 0.0}, "routed_scaling_factor"),
    "a key that is a number": ({"jitter": 0.1, "key": 3}, "key"),
    "several keys": ({"jitter": 0.1, "key": jax.random.split(jax.random.key(0))}, "key"),
    "a group's best without groups": ({"group_top": 3}, "group_top"),
    "a bias of integers": ({"bias": np.ones(E, int)}, "bias"),
    "a part of the experts on one device": ({n: GOOD[n][:4] for n in ("gate", "up", "down")}, "gate"),
    "an alpha without its activation": ({"alpha": 1.0}, "alpha"),
    "a limit that is no number": ({"activation": "clamped_swiglu", "limit": float("nan")}, "limit"),
    "a limit of 0": ({"activation": "clamped_swiglu", "limit": 0.0}, "limit"),
    "a dispatch that is a function": ({"dispatch": len}, "dispatch"),
    "a buffer of nothing": ({"buffer": 0.0}, "buffer"),
    "no chunks": ({"chunks": 0}, "chunks"),
    "a capacity below a choice of every token": ({"capacity": 0.4}, "capacity"),
    "an axis of no mesh": ({"axis": "ep"}, "axis"),
    "an axis twice": ({"axis": ("ep", "ep")}, "axis"),
    "a mesh that is none": ({"mesh": "ep"}, "mesh"),
    "specs without a mesh": ({"in_specs": jax.sharding.PartitionSpec("ep")}, "in_specs"),
    "a bias of other experts": ({"bias": np.ones(E + 1, np.float32)}, "bias"),
    "a router of another width": ({"router": np.ones((D + 1, E), np.float32)}, "router"),
    "a router of other experts": ({"router": np.ones((D, E + 1), np.float32)}, "gate"),
    "tokens without rows": ({"x": GOOD["x"][0]}, "x"),
    "ids of other tokens": ({"segment_ids": np.zeros((B, T + 1), int)}, "segment_ids"),
    "ids that are no integers": ({"segment_ids": np.zeros((B, T))}, "segment_ids"),
    "down of another width": ({"down": GOOD["down"][:, :-1]}, "down"),
    "no down": ({"down": None}, "down"),
    "no up": ({"up": None}, "gate"),
    "an up of another dtype": ({"up": GOOD["up"].astype(np.float16)}, "up"),
    "a bias of other features": ({"gate_bias": np.ones((E, F + 1), np.float32)}, "gate_bias"),
    "an activation that is none": ({"activation": "swish"}, "activation"),
    "a limit without a clamp": ({"limit": 1.0}, "limit"),
    "half of a shared expert": ({"shared_gate": np.ones((D, Fs), np.float32)}, "shared_up"),
    "the gate of no shared expert": ({"shared_expert_gate": np.ones((D, 1), np.float32)}, "shared_expert_gate"),
    "a dispatch that is none": ({"dispatch": "ring"}, "dispatch"),
    "a platform that is none": ({"platform": "abacus"}, "platform"),
}


@pytest.mark.parametrize("what", ILLEGAL)
def test_illegal_calls_are_refused_by_name(what):
    change, argument = ILLEGAL[what]
    arrays = {**GOOD, "top_k": 2, **change}
    with pytest.raises((ValueError, ejdist.Unsupported), match=rf"moe: .*'?{argument}'?"):
        jax.eval_shape(lambda: moe(**arrays))


def test_losses_refuse_by_name():
    for rate in (float("nan"), -1.0, "0.1"):
        with pytest.raises(ValueError, match="rate"):
            update_bias(jnp.zeros(3), jnp.zeros(3), rate)
    with pytest.raises(ValueError, match="rate"):
        update_bias(jnp.zeros(3), jnp.zeros(3), jnp.zeros(3))
    for call, argument in {
        lambda: update_bias(jnp.zeros(3), jnp.zeros(4), 0.1): "counts",
        lambda: balance_loss(jnp.zeros(4), jnp.zeros(3)): "counts",
        lambda: sequence_balance_loss(jnp.zeros((2, 3, 1), int), jnp.zeros((2, 4, 5))): "experts",
        lambda: sequence_balance_loss(jnp.zeros((2, 4, 1), int), jnp.zeros((2, 4, 5)), jnp.zeros(4)): "segment_ids",
        lambda: z_loss(jnp.zeros((2, 3, 4)), jnp.ones((3, 2), bool)): "counted",
    }.items():
        with pytest.raises(ValueError, match=f"'{argument}'"):
            call()


def test_an_option_that_is_none_is_no_option():
    with pytest.raises(TypeError, match="scoring"):
        moe(**GOOD, top_k=2, scoring="softmax")


def test_the_example_trains_and_balances():
    example = Path(__file__).resolve().parent.parent / "examples" / "moe_layer.py"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(example), run_name="__main__")
    losses, violations = (
        [float(x) for x in re.findall(pattern, said.getvalue())]
        for pattern in (r"step +\d+ loss ([\d.]+)", r"load_violation ([\d.]+)")
    )
    assert len(losses) == 5 and losses[-1] < 0.8 * losses[0], said.getvalue()
    assert violations[-1] < 0.7 * violations[0], said.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["route", "moe", "update_bias"])
def test_the_example_of_a_function_runs(name):
    function = getattr(ejdist.experts, name)
    example = doctest.DocTestParser().get_doctest(function.__doc__, {name: function}, name, None, None)
    assert example.examples and doctest.DocTestRunner().run(example).failed == 0
