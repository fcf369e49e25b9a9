"""QK-clip: what layers report of their logits, which heads become smaller and by how much, meshes, and what is refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejdist import bind_ops, make_mesh
from ejdist.models.attention_shapes import LatentShape
from ejdist.models.decoder import DecoderConfig
from ejdist.models.parameters import initialise
from ejdist.sections import validate
from ejdist.training.program import make_program
from ejdist.training.qk_clip import clipped
from recipes.schema import compose

PLAIN = DecoderConfig(
    vocab_size=64, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=32, init_std=0.3
)
LATENT = dataclasses.replace(
    PLAIN, num_kv_heads=4, layer_pattern=("latent+mlp",),
    latent=LatentShape(kv_rank=16, query_rank=8, nope_dim=8, rope_dim=4, value_dim=8),
)  # fmt: skip
B, T = 2, 48


def batch_of():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (B, T + 1))
    ids = np.where(np.arange(T) < 40, np.arange(T) // 20, -1)  # two documents and padding
    batch = {"tokens": tokens[:, :-1], "targets": np.where(ids < 0, -1, tokens[:, 1:])}
    batch |= {"positions": np.broadcast_to(np.arange(T) % 20, (B, T)), "segment_ids": np.broadcast_to(ids, (B, T))}
    return {name: jnp.asarray(x, jnp.int32) for name, x in batch.items()}


@functools.cache
def params_of(config):
    return initialise(config.build().declared, jax.random.key(0))


def reported(config, params, mesh=None):
    """Returns (name of the metric, its value) of a batch."""
    model, ops = config.build(), bind_ops(mesh, largest_logits=True)
    metrics = jax.jit(lambda p: model.loss(p, batch_of(), ops)[1])(params)
    ((name, metric),) = [(n, m) for n, m in metrics.items() if n.endswith("largest_logits")]
    return name, np.asarray(metric.value)


def seen(config, params):
    """Returns the logits of each layer by an attention that keeps them: [layers, heads, pairs], -inf where none are."""
    kept, ops = [], bind_ops(None)

    def attention(q, k, v, *, q_segment_ids, softmax_scale=None, **_):
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], 2) for y in (k, v))
        logits = jnp.einsum("btnh,bsnh->nbts", q, k, precision="highest") * scale
        ids = q_segment_ids
        sees = (ids[:, :, None] == ids[:, None]) & jnp.tril(jnp.ones((T, T), bool)) & (ids >= 0)[:, :, None]
        logits = jnp.where(sees, logits, -jnp.inf)
        kept.append(np.asarray(logits.reshape(logits.shape[0], -1)))
        weights = jnp.where(sees, jnp.exp(logits - logits.max(-1, keepdims=True, initial=-1e9)), 0)
        return jnp.einsum("nbts,bsnh->btnh", weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-9), v)

    plain = dataclasses.replace(config, scan_layers=False, remat="none").build()
    plain.loss(params, batch_of(), ops.replace(attention=attention))
    return np.stack(kept)


@pytest.mark.parametrize(
    "config", [pytest.param(PLAIN, id="plain", marks=pytest.mark.slow), pytest.param(LATENT, id="latent")]
)
def test_what_is_reported_is_at_least_the_largest_logit_and_at_most_log_keys_more(config):
    name, bound = reported(config, params_of(config))
    largest = seen(config, params_of(config)).max(-1)
    assert name == ("latent_attention" if config is LATENT else "attention") + "/largest_logits"
    assert bound.shape == largest.shape == (2, 4)
    assert (bound >= largest - 1e-4).all() and (bound <= largest + np.log(20) + 1e-4).all()
    assert (bound < largest + np.log(20) - 0.1).all()  # of documents of 20 tokens, no row has keys that are all alike


def test_padding_has_no_logits():
    def attention(q, *_, q_segment_ids, return_lse, **__):
        return q, jnp.broadcast_to(jnp.where(q_segment_ids < 0, 1e6, 2.0)[..., None], q.shape[:3])

    ops = bind_ops(None, largest_logits=True).replace(attention=attention)
    metrics = PLAIN.build().loss(params_of(PLAIN), batch_of(), ops)[1]
    np.testing.assert_array_equal(metrics["attention/largest_logits"].value, np.full((2, 4), 2.0))


@pytest.mark.parametrize(
    "config", [pytest.param(PLAIN, id="plain", marks=pytest.mark.slow), pytest.param(LATENT, id="latent")]
)
def test_logits_of_heads_that_passed_are_scaled_to_the_limit_and_no_others(config):
    params = params_of(config)
    name, bound = reported(config, params)
    of_groups = bound if config is LATENT else bound.reshape(2, 2, 2).max(-1).repeat(2, 1)
    tau = float(np.median(of_groups)) - 1e-3
    factor = np.where(of_groups > tau, tau / of_groups, 1)
    assert 0 < (factor < 1).sum() < factor.size
    new = clipped(config, tau, params, {name: jnp.asarray(bound)})
    one = dataclasses.replace(config, num_layers=1)  # so that what enters the layer is the same
    first = {**params, "layers": {k: w[:1] for k, w in params["layers"].items()}}
    after = {**new, "layers": {k: w[:1] for k, w in new["layers"].items()}}
    before, scaled = seen(one, first), seen(one, after)
    real = np.isfinite(before)
    wanted = np.where(real, before * factor[:1, :, None], 0)
    np.testing.assert_allclose(np.where(real, scaled, 0), wanted, rtol=2e-5, atol=2e-5)
    assert scaled.max(-1).max() <= tau + 1e-3
    touched = {"latent_query", "key_up"} if config is LATENT else {"query", "key"}
    assert {k for k, w in new["layers"].items() if not np.array_equal(w, params["layers"][k])} == touched


def test_biases_of_queries_and_keys_follow_their_matrices():
    config = dataclasses.replace(PLAIN, attention_bias=True)
    params = params_of(config)
    params["layers"] |= {k: params["layers"][k] + 0.3 for k in ("query_bias", "key_bias")}
    bound = np.full((2, 4), 8.0, np.float32)
    new = clipped(config, 2.0, params, {"attention/largest_logits": jnp.asarray(bound)})["layers"]
    for name in ("query", "key", "query_bias", "key_bias"):
        np.testing.assert_allclose(new[name], 0.5 * params["layers"][name], rtol=1e-6)
    np.testing.assert_array_equal(new["value_bias"], params["layers"]["value_bias"])


def test_what_is_not_finite_scales_nothing():
    params = params_of(PLAIN)
    bound = np.asarray([[np.inf, 1, np.nan, 1], [-np.inf, -np.inf, 1, 1]], np.float32)
    new = clipped(PLAIN, 2.0, params, {"attention/largest_logits": jnp.asarray(bound)})
    jax.tree.map(np.testing.assert_array_equal, new, params)


# -- runs --------------------------------------------------------------------------------------------------------------

WORDS = (
    "recipe=short_context model=nano optimizer=muon model.num_layers=2 model.qk_norm=false data.sequence_length=64 "
    "data.global_batch=4 run.steps=3 model.model_dim=32 model.ffn_dim=64 model.head_dim=8 model.init_std=0.7"
)


@functools.cache
def steps(more, mesh=None, count=2):
    """Returns (losses, parameters, largest logits) of a run's first steps."""
    sections = compose(f"{WORDS} {more}".split())
    devices = jax.devices()[: int(np.prod([n for _, n in mesh]))]
    program = make_program(sections, make_mesh(**dict(mesh), devices=devices))
    state, rng = program.init(), np.random.default_rng(0)
    losses, told = [], []
    for _ in range(count):
        tokens = rng.integers(0, 256, (4, 65))
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": np.tile(np.arange(64), (4, 1))}
        batch["segment_ids"] = np.zeros((4, 64))
        batch = {n: jax.device_put(x.astype(np.int32), program.batch[n].sharding) for n, x in batch.items()}
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
        told.append(metrics.get("attention/largest_logits"))
        if told[-1] is not None:
            np.testing.assert_array_equal(metrics["attention/largest_logit"], told[-1].max(1))
    return losses, jax.tree.map(np.asarray, state.params), told


ONE = (("dp", 1),)


@pytest.mark.slow
def test_a_run_in_which_no_head_passes_is_the_run_without_it():
    plain, high = steps("", ONE), steps("optimizer.qk_clip=1e6", ONE)
    assert plain[0] == high[0] and plain[2] == [None, None]
    jax.tree.map(np.testing.assert_array_equal, plain[1], high[1])
    assert all(np.asarray(table).shape == (2, 4) and (np.asarray(table) > 0).all() for table in high[2])


def test_a_run_is_clipped_after_each_step():
    (_, without, _), (_, clip, told) = steps("", ONE, count=1), steps("optimizer.qk_clip=30", ONE, count=1)
    of_groups = np.asarray(told[0]).reshape(2, 2, 2).max(-1)
    factor = np.where(of_groups > 30, 30 / of_groups, 1) ** 0.5
    assert (factor < 0.95).any()
    np.testing.assert_allclose(clip["layers"]["key"], without["layers"]["key"] * factor[:, None, :, None], rtol=1e-5)
    query = without["layers"]["query"] * factor.repeat(2, 1)[:, None, :, None]
    np.testing.assert_allclose(clip["layers"]["query"], query, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(("fsdp", 2), ("tp", 2)), (("sp", 2),)], ids=str)
def test_on_a_mesh_a_head_has_the_factor_of_one_device(mesh):
    losses, params, told = steps("optimizer.qk_clip=30", ONE)
    words = "optimizer.qk_clip=30 " + " ".join(f"mesh.{axis}={n}" for axis, n in mesh)
    over = steps(words, mesh)
    np.testing.assert_allclose(over[0], losses, rtol=1e-4)
    np.testing.assert_allclose(np.stack(over[2]), np.stack(told), rtol=2e-3)
    for name in ("query", "key"):
        np.testing.assert_allclose(over[1]["layers"][name], params["layers"][name], atol=2e-3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("optimizer.qk_clip=0", "optimizer.qk_clip must be positive, or null for none, got 0"),
        (
            "optimizer.qk_clip=8",
            "is 4.2 where 64 keys have logits of 0; give at least twice that, 8.4, or small heads would vanish",
        ),
        ("optimizer.qk_clip=100 optimizer=adamw", "goes with Muon, and optimizer.name = 'adamw'"),
        ("optimizer.qk_clip=100 model.qk_norm=true", "model.qk_norm = True: queries and keys are normalised"),
        ("optimizer.qk_clip=100 model.attention_soft_cap=50", "model.attention_soft_cap = 50.0: logits are bounded"),
        ("optimizer.qk_clip=100 model.attention_sinks=true", "has its sink in it; leave one of them out"),
        ("optimizer.qk_clip=100 model.mtp.modules=1", "the layer of multi-token prediction is not clipped"),
        ("optimizer.qk_clip=100 model=sparse_nano", "no layer of model.layer_pattern has logits that it could bound"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(words, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        validate(compose(f"{WORDS} {words}".split()))
