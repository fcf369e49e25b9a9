"""Cross entropy against optax and NumPy float64; blocks, vocabulary shards, and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kernels.ops.cross_entropy import (
    CrossEntropyConfig,
    fused_cross_entropy,
    fused_token_losses,
)

T, D, V = 23, 8, 37


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    hidden, head = rng.standard_normal((T, D)), rng.standard_normal((D, V))
    targets = rng.integers(0, V, T)
    targets[[0, 7, 22]] = -1
    return hidden, head, targets, rng.random(T)


def oracle(hidden, head, targets, weights=None, smoothing=0.0, z_loss=0.0, cap=None):
    """Returns (mean loss, d hidden, d head) in float64, a token at a time."""
    total, count = 0.0, 0.0
    d_hidden, d_head = np.zeros_like(hidden), np.zeros_like(head)
    for t, target in enumerate(targets):
        if target == -1:
            continue
        w = 1.0 if weights is None else weights[t]
        raw = hidden[t] @ head
        z = raw if cap is None else cap * np.tanh(raw / cap)
        lse = np.log(np.sum(np.exp(z - z.max()))) + z.max()
        goal = np.full(V, smoothing / V)
        goal[target] += 1 - smoothing
        total += w * (np.sum(goal * (lse - z)) + z_loss * lse**2)
        count += w
        dz = w * ((1 + 2 * z_loss * lse) * np.exp(z - lse) - goal)
        dz = dz if cap is None else dz * (1 - np.tanh(raw / cap) ** 2)
        d_hidden[t], d_head = head @ dz, d_head + np.outer(hidden[t], dz)
    return total / count, d_hidden / count, d_head / count


OPTIONS = {
    "plain": {},
    "smoothing": {"smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "cap": {"cap": 3.0},
    "all": {"smoothing": 0.2, "z_loss": 1e-3, "cap": 5.0},
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("block_rows", [None, 7])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_against_float64(options, block_rows, weighted):
    hidden, head, targets, weights = inputs()
    weights = weights if weighted else None
    wanted = oracle(hidden, head, targets, weights, **options)

    def loss(hidden, head, **how):
        return fused_cross_entropy(
            hidden,
            head,
            jnp.asarray(targets),
            weights=None if weights is None else jnp.asarray(weights, jnp.float32),
            label_smoothing=options.get("smoothing", 0.0),
            z_loss=options.get("z_loss", 0.0),
            logits_soft_cap=options.get("cap"),
            **how,
        )

    x, w = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)
    value, gradients = jax.value_and_grad(loss, (0, 1))(x, w, cfg=CrossEntropyConfig(block_rows))
    np.testing.assert_allclose(value, wanted[0], rtol=1e-5)
    for got, want in zip(gradients, wanted[1:], strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6, rtol=1e-4)
    # The same loss from logits that exist.

    def through(x, w):
        return loss(None, None, logits=jnp.dot(x, w, precision="highest"))

    again, gradients = jax.value_and_grad(through, (0, 1))(x, w)
    np.testing.assert_allclose(again, wanted[0], rtol=1e-5)
    for got, want in zip(gradients, wanted[1:], strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6, rtol=1e-4)


def test_against_optax():
    hidden, head, targets, _ = inputs()
    x, w, keep = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32), targets >= 0
    logits = jnp.dot(x, w, precision="highest")
    each = optax.losses.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    got = fused_cross_entropy(x, w, jnp.asarray(targets), reduction="none")
    np.testing.assert_allclose(got, jnp.where(keep, each, 0), rtol=1e-5, atol=1e-6)
    smooth = optax.losses.softmax_cross_entropy(
        logits, optax.losses.smooth_labels(jax.nn.one_hot(jnp.maximum(targets, 0), V), 0.1)
    )
    got = fused_cross_entropy(x, w, jnp.asarray(targets), label_smoothing=0.1, reduction="sum")
    np.testing.assert_allclose(got, jnp.sum(jnp.where(keep, smooth, 0)), rtol=1e-5)


def test_ignored_tokens_never_count():
    hidden, head, targets, _ = inputs()
    x, w = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)
    for index in (-1, -100, 5):
        marked = np.where(targets == -1, index, np.where(targets == index, 6, targets))
        got = fused_cross_entropy(x, w, jnp.asarray(marked), ignore_index=index, z_loss=0.1)
        kept = fused_cross_entropy(
            x[targets >= 0], w, jnp.asarray(marked[targets >= 0]), ignore_index=index, z_loss=0.1
        )
        np.testing.assert_allclose(got, kept, rtol=1e-6)
    nothing = jnp.full(T, -1)
    value, gradient = jax.value_and_grad(lambda x: fused_cross_entropy(x, w, nothing, z_loss=1.0))(x)
    assert value == 0 and not np.any(gradient)


def test_a_stray_target_is_not_a_silent_zero():
    hidden, head, targets, _ = inputs()
    x, w = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)
    for stray in (V, -2):
        marked = jnp.asarray(targets).at[3].set(stray)
        assert np.flatnonzero(np.isnan(fused_token_losses(x, w, marked).loss)).tolist() == [3]
        gradient = jax.grad(lambda x: fused_cross_entropy(x, w, marked))(x)  # noqa: B023
        assert np.isnan(gradient[3]).all() and np.isfinite(np.delete(gradient, 3, axis=0)).all()


def test_minus_one_hundred_is_ignored_too():
    hidden, head, targets, _ = inputs()
    x, w = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)
    usual = fused_cross_entropy(x, w, jnp.asarray(targets), z_loss=0.1)
    assert fused_cross_entropy(x, w, jnp.asarray(np.where(targets == -1, -100, targets)), z_loss=0.1) == usual


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    """Compiled scratch memory of forward and backward, beside what scales with tokens times D."""
    width, vocabulary, rows = 8, 4096, 128

    def scratch(tokens):
        def f(h, w, t):
            return fused_cross_entropy(h, w, t, cfg=CrossEntropyConfig(block_rows=rows))

        args = (
            jax.ShapeDtypeStruct((tokens, width), jnp.float32),
            jax.ShapeDtypeStruct((width, vocabulary), jnp.float32),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
        )
        return jax.jit(jax.value_and_grad(f, (0, 1))).lower(*args).compile().memory_analysis().temp_size_in_bytes

    small, large = scratch(512), scratch(8192)
    logits = 4 * 8192 * vocabulary
    assert large < logits / 8
    assert large - small < 4 * (8192 - 512) * 10 * width  # rows of hidden and per-token numbers only


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda h, w, t: fused_cross_entropy(h, w), "'targets' is missing"),
        (lambda h, w, t: fused_cross_entropy(h, targets=t), "either 'hidden' and 'lm_head', or 'logits'"),
        (lambda h, w, t: fused_cross_entropy(h, w, t[1:]), "'targets' must have shape"),
        (lambda h, w, t: fused_cross_entropy(h, w, t, reduction="avg"), "mean, sum or none"),
        (lambda h, w, t: fused_cross_entropy(h, w, t, label_smoothing=1.0), "label_smoothing"),
        (lambda h, w, t: fused_cross_entropy(h, w, t, logits_soft_cap=0.0), "logits_soft_cap"),
        (lambda h, w, t: fused_cross_entropy(h, w, t, weights=jnp.ones(2)), "'weights' must have shape"),
        (lambda h, w, t: fused_cross_entropy(h, w[1:], t), "'lm_head'.*D"),
        (lambda h, w, t: fused_cross_entropy(h.astype(jnp.bfloat16), w, t), "'lm_head' is float32"),
    ],
)
def test_errors_name_the_argument(call, words):
    with pytest.raises(ValueError, match=words):
        call(jnp.ones((4, 8)), jnp.ones((8, 6)), jnp.zeros(4, jnp.int32))
