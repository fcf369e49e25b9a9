"""The training step, its accumulation, the optimizer and its schedules."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ejdist.models.decoder import DecoderConfig, declare
from ejdist.models.decoder import loss as decoder_loss
from ejdist.models.model import Metric
from ejdist.models.parameters import initialise, map_declared
from ejdist.operations import bind_ops
from ejdist.training.optimizer import OptimizerSection, Rate, make_optimizer, make_schedule
from ejdist.training.step import TrainState, init_state, make_train_step

CONFIG = DecoderConfig(32, 2, 16, 2, 1, 8, 24, attention_bias=True, qk_norm=True)


def causal_attention(query, key, value, **_):
    """Returns plain causal attention; a step does not care which."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


OPS = bind_ops(None).replace(attention=causal_attention)
SECTION = OptimizerSection(learning_rate=1e-2, warmup_steps=2, weight_decay=0.1)
LOSS = partial(decoder_loss, c=CONFIG, ops=OPS, z_loss=1e-3)
DECAYED = map_declared(lambda _, p: p.decay, declare(CONFIG))


def parameters():
    return initialise(declare(CONFIG), jax.random.key(0))


def batch_of(rows=8, length=12, seed=0):
    """Returns a batch whose rows count very different numbers of tokens, so that a mean of means is not the mean."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, CONFIG.vocab_size, (rows, length))
    targets = np.roll(tokens, -1, axis=1)
    for row in range(rows):
        targets[row, 1 + (row * 5) % length :] = -1
    batch = {
        "tokens": tokens,
        "targets": targets,
        "positions": np.broadcast_to(np.arange(length), tokens.shape),
        "segment_ids": np.zeros_like(tokens),
    }
    return {k: jnp.asarray(v, jnp.int32) for k, v in batch.items()}


SGD = optax.sgd(1.0)  # its update is the gradient itself


@pytest.mark.slow  # steps of layers accumulate too
def test_accumulation_is_the_whole_batch():
    params, batch = parameters(), batch_of()
    results = []
    for parts in (1, 4):
        step = jax.jit(make_train_step(LOSS, SGD, accumulation=parts))
        state, metrics = step(init_state(params, SGD), batch)
        gradient = jax.tree.map(lambda a, b: a - b, params, state.params)
        results.append((gradient, metrics))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)
    assert results[0][1]["tokens"] == int(jnp.sum(batch["targets"] >= 0))


@pytest.mark.slow  # held against NumPy in test_moe_model.py
def test_the_loss_is_a_mean_over_tokens_not_over_rows():
    params, batch = parameters(), batch_of()
    row_terms = jax.jit(lambda p, b: LOSS(p, b)[1])
    terms = [row_terms(params, {k: v[i : i + 1] for k, v in batch.items()}) for i in range(8)]
    tokens = sum(float(t["tokens"].value) for t in terms)
    _, metrics = jax.jit(make_train_step(LOSS, SGD, accumulation=2))(init_state(params, SGD), batch)
    for name in ("loss", "z_loss"):
        assert float(metrics[name]) == pytest.approx(sum(float(t[name].value) for t in terms) / tokens, rel=1e-5)
    assert float(metrics["z_loss"]) > 0
    of_rows = np.mean([float(t["loss"].value / t["tokens"].value) for t in terms])
    assert abs(of_rows - float(metrics["loss"])) > 1e-3


@pytest.mark.slow  # so does every run
def test_training_lowers_the_loss_and_counts_steps():
    optimizer, schedule = make_optimizer(SECTION, 30, DECAYED)
    step = jax.jit(make_train_step(LOSS, optimizer, accumulation=2), donate_argnums=0)
    state, batch, losses = init_state(parameters(), optimizer), batch_of(), []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    assert int(state.step) == 20 and isinstance(state, TrainState)
    assert {"loss", "z_loss", "grad_norm", "tokens"} <= set(metrics)
    assert all(x.shape == () for x in metrics.values())
    assert float(schedule(19)) == pytest.approx(float(make_schedule(SECTION, 30)(19)))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.params))


@pytest.mark.slow
def test_moments_are_float32_and_a_step_is_reproducible_bit_for_bit():
    (optimizer, _), batch = make_optimizer(SECTION, 10, DECAYED), batch_of()
    loss = partial(decoder_loss, c=dataclasses.replace(CONFIG, compute_dtype="bfloat16"), ops=OPS)
    step = jax.jit(make_train_step(loss, optimizer))
    states = [step(init_state(parameters(), optimizer), batch)[0] for _ in range(2)]
    floats = [x for x in jax.tree.leaves(states[0].opt_state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert len(floats) == 2 * len(jax.tree.leaves(states[0].params))
    assert all(x.dtype == jnp.float32 for x in floats)
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_batch_without_a_counted_token_changes_nothing_but_decay():
    batch = batch_of()
    batch["targets"] = jnp.full_like(batch["targets"], -1)
    params = parameters()
    state, metrics = jax.jit(make_train_step(LOSS, SGD))(init_state(params, SGD), batch)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["tokens"] == 0
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_that_cannot_be_split_are_refused():
    step = make_train_step(LOSS, SGD, accumulation=3)
    with pytest.raises(ValueError, match="8 rows cannot be split into 3"):
        step(init_state(parameters(), SGD), batch_of())


def test_clipping_bounds_the_update_and_not_the_metric():
    params, gradient = {"w": jnp.zeros(4)}, {"w": jnp.full(4, 100.0)}

    def loss(p, b, *, context):
        return jnp.sum(p["w"] * gradient["w"]), {"tokens": Metric(jnp.float32(1))}

    section = OptimizerSection(learning_rate=1.0, schedule="constant", warmup_steps=0, weight_decay=0.0, eps=1e6)
    batch = {"tokens": jnp.zeros((1, 1))}
    moved = {}
    for clip in (1.0, 0.0):
        optimizer, _ = make_optimizer(dataclasses.replace(section, clip_norm=clip), 10, {"w": True})
        state, metrics = make_train_step(loss, optimizer)(init_state(params, optimizer), batch)
        assert float(metrics["grad_norm"]) == pytest.approx(200.0)
        # With a huge eps the first Adam update is the gradient over eps.
        moved[clip] = float(optax.tree.norm(state.params)) * 1e6
    assert moved[1.0] == pytest.approx(1.0, rel=1e-3) and moved[0.0] == pytest.approx(200.0, rel=1e-3)


def test_weight_decay_spares_norms_and_biases():
    params = jax.tree.map(jnp.ones_like, parameters())
    section = OptimizerSection(learning_rate=0.5, schedule="constant", warmup_steps=0, weight_decay=0.1)
    optimizer, _ = make_optimizer(section, 10, DECAYED)
    updates, _ = jax.jit(lambda p: optimizer.update(jax.tree.map(jnp.zeros_like, p), optimizer.init(p), p))(params)
    for path, u in jax.tree_util.tree_leaves_with_path(updates):
        spared = str(path[-1].key).endswith(("norm", "bias"))
        np.testing.assert_allclose(u, 0.0 if spared else -0.05, rtol=1e-6)


def test_schedules():
    section = OptimizerSection(learning_rate=1.0, warmup_steps=10, final_ratio=0.1)

    def rates(**change):
        return np.array([float(make_schedule(dataclasses.replace(section, **change), 110)(s)) for s in range(110)])

    cosine = rates()
    np.testing.assert_allclose(cosine[:10], np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(cosine[10:], 0.55 + 0.45 * np.cos(np.pi * np.arange(100) / 99), rtol=1e-5)
    wsd = rates(schedule="wsd", decay_fraction=20 / 110)
    np.testing.assert_allclose(wsd[:10], np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(wsd[10:90], 1.0)
    np.testing.assert_allclose(wsd[89:], 1 - 0.9 * np.arange(21) / 20, rtol=1e-5)
    constant = rates(schedule="constant")
    np.testing.assert_allclose(constant[10:], 1.0)
    np.testing.assert_allclose(rates(schedule="constant", warmup_steps=0), 1.0)
    assert rates(warmup_steps=1)[0] == 1.0


@pytest.mark.parametrize(
    ("asked", "steps", "words"),
    [(9, 10, None), (10, 10, "10 steps: the warmup takes 9,"), (0, 1, None), (5, 1, "1 step: the warmup takes 0,")],
)
def test_a_warmup_that_is_cut_short_is_told(asked, steps, words):
    notes = Rate(OptimizerSection(warmup_steps=asked), steps).notes
    assert len(notes) == (words is not None)
    if words is not None:
        assert f"optimizer.warmup_steps = {asked} does not fit into {words}" in notes[0]


@pytest.mark.parametrize("steps", [2, 3, 5, 100])
@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("name", ["wsd", "warmup_cosine"])
def test_the_last_step_has_the_last_rate(name, warmup, steps):
    """Short runs too, as far as there is a step after the warmup's peak."""
    section = OptimizerSection(learning_rate=1.0, schedule=name, warmup_steps=warmup, final_ratio=0.1)
    rates = [float(make_schedule(section, steps)(s)) for s in range(steps)]
    assert rates[-1] == pytest.approx(0.1 if steps - 1 > min(warmup, steps - 1) else 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schedule": "linear"}, "optimizer.schedule.*warmup_cosine, wsd, constant"),
        ({"warmup_steps": -1}, "optimizer.warmup_steps"),
        ({"schedule": "wsd", "decay_fraction": 1.5}, "optimizer.decay_fraction"),
        ({"learning_rate": 0.0}, "optimizer.learning_rate"),
        ({"final_ratio": 2.0}, "optimizer.final_ratio"),
        ({"clip_norm": -1.0}, "optimizer.clip_norm"),
        ({"weight_decay": -1.0}, "optimizer.weight_decay"),
        ({"b2": 1.0}, "optimizer.b2"),
        ({"b1": 0.99999999999}, "optimizer.b1.* which is 1 in float32"),
        ({"eps": 1e39}, "optimizer.eps.* which is inf in float32"),
        ({"clip_norm": 1e-50}, "optimizer.clip_norm.* which is 0 in float32"),
        ({"learning_rate": 1e39}, "optimizer.learning_rate.* which is inf in float32"),
    ],
)
def test_a_wrong_section_names_the_field(change, words):
    with pytest.raises(ValueError, match=words):
        make_optimizer(dataclasses.replace(SECTION, **change), 50, DECAYED)
