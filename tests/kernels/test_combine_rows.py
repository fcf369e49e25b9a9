"""combine_rows and the order of rows by group: against NumPy, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import combine_rows
from kernels.engines.matmul import ordering_triton
from kernels.engines.matmul.ordering import group_order
from kernels.framework.interpret import interpret
from kernels.ops.combine_rows import op

RNG = np.random.default_rng(0)


def in_order(groups, num_groups):
    """Returns (slots, pairs, tokens, sizes) by loops."""
    T, k = groups.shape
    pairs = [i for g in range(num_groups) for i in range(T * k) if groups.flat[i] == g]
    slots = np.full(T * k, -1)
    slots[pairs] = np.arange(len(pairs))
    pairs = np.array(pairs + [-1] * (T * k - len(pairs)))
    sizes = np.array([(groups == g).sum() for g in range(num_groups)])
    return slots.reshape(T, k), pairs, np.where(pairs < 0, -1, pairs // k), sizes


@pytest.mark.parametrize("platform", ["xla", "triton"])
@pytest.mark.parametrize(("T", "k", "groups"), [(300, 3, 16), (40, 4, 200), (1, 1, 1)])
def test_choices_are_in_the_order_of_their_groups(T, k, groups, platform, monkeypatch):
    """More groups than a block has entries, several programs of several blocks, and choices of no group."""
    monkeypatch.setattr(ordering_triton, "MULTIPROCESSORS", 3)
    monkeypatch.setattr(ordering_triton, "MOST", 128)
    ids = RNG.integers(-2, groups + 2, (T, k))
    with interpret():
        order = group_order(jnp.int32(ids), groups, platform=platform)
    for name, got, want in zip(order._fields, order, in_order(ids, groups)):
        np.testing.assert_array_equal(got, want, err_msg=name)


@pytest.mark.parametrize("platform", ["xla", "triton"])
def test_a_sum_is_numpys_whatever_lies_elsewhere(platform):
    """A slot of none adds nothing, though its weight is NaN; rows of no token are NaN, and their gradient is 0."""
    rows, d = RNG.standard_normal((12, 40)).astype(np.float32), RNG.standard_normal((5, 40)).astype(np.float32)
    slots = np.array([[3, 0], [7, -1], [-1, -1], [11, 5], [2, 9]])
    weights = RNG.standard_normal((5, 2)).astype(np.float32)
    weights[slots < 0] = np.nan
    unused = ~np.isin(np.arange(12), slots)
    rows[unused] = np.nan
    want, d_rows, d_weights = np.zeros((5, 40)), np.zeros((12, 40)), np.zeros((5, 2))
    for t, j in np.argwhere(slots >= 0):
        want[t] += weights[t, j] * rows[slots[t, j]]
        d_rows[slots[t, j]] = weights[t, j] * d[t]
        d_weights[t, j] = d[t] @ rows[slots[t, j]]

    def run(rows, weights):
        return combine_rows(rows, jnp.int32(slots), weights=weights, platform=platform)

    with interpret():
        got, pull = jax.vjp(run, jnp.asarray(rows), jnp.asarray(weights))
        gradients = pull(jnp.asarray(d))
    for a, b in zip((got, *gradients), (want, d_rows, d_weights)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform", ["xla", "triton"])
def test_rows_are_added_to_a_total(platform):
    """Rows in any of the slots, or in none: then the total stays as it is, in bfloat16 too."""
    rows, total, weights = (jnp.asarray(RNG.standard_normal(s), jnp.bfloat16) for s in ((9, 48), (5, 48), (5, 3)))
    slots = np.array([[3, -1, 0], [-1, -1, -1], [-1, 7, -1], [-1, -1, 8], [-1, -1, -1]])

    def run(rows, total):
        return combine_rows(rows, jnp.int32(slots), weights=weights, total=total, platform=platform)

    with interpret():
        got, pull = jax.vjp(run, rows, total)
        d_rows, d_total = pull(total)
    wide = [np.asarray(a, np.float32) for a in (rows, total, weights)]
    want = wide[1].copy()
    for t, j in np.argwhere(slots >= 0):
        want[t] += wide[2][t, j] * wide[0][slots[t, j]]
    np.testing.assert_array_equal(got, jnp.asarray(want, jnp.bfloat16))
    np.testing.assert_array_equal(d_total, total)
    assert d_rows.shape == rows.shape and not np.asarray(d_rows[1], np.float32).any()


ROWS, SLOTS = np.ones((4, 8), np.float32), np.zeros((2, 2), np.int32)


@pytest.mark.parametrize("weighted", [False, True])
def test_sparse_slots(weighted):
    """Rows in any of the slots of a token, or in none."""
    slots = np.array([[3, -1, 0], [-1, -1, -1], [-1, 7, -1], [-1, -1, 8], [-1, 1, 2]])
    rows, d = (jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in ((9, 48), (5, 48)))
    weights = jnp.asarray(RNG.standard_normal((5, 3)), jnp.float32) if weighted else None
    with interpret():
        got, want = (
            jax.vjp(lambda r: combine_rows(r, jnp.int32(slots), weights=weights, platform=p), rows)  # noqa: B023
            for p in ("triton", "xla")
        )
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(got[1](d)[0], want[1](d)[0], rtol=1e-6)
    assert np.asarray(got[0]).any(axis=1).tolist() == [True, False, True, True, True]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: combine_rows(ROWS[0], SLOTS), r"argument 'rows' must be a float array \[M, D\]"),
        (lambda: combine_rows(ROWS, SLOTS * 1.0), r"argument 'slots' must be integers \[tokens, k\]"),
        (lambda: combine_rows(ROWS, SLOTS, SLOTS[0]), r"argument 'pairs' must be integers \[M\] = \(4,\)"),
        (
            lambda: combine_rows(ROWS, SLOTS, weights=ROWS),
            r"argument 'weights' must be a float array of the shape \(2, 2\)",
        ),
        (
            lambda: combine_rows(ROWS, SLOTS, total=ROWS),
            r"argument 'total' must be an array of float32 of shape \(2, 8\), \[tokens, D\]",
        ),
        (
            lambda: combine_rows(ROWS, SLOTS + 4),
            "argument 'slots' has row 4, but the last of the 4 rows is 3; use -1",
        ),
        (
            lambda: combine_rows(ROWS, jnp.asarray(SLOTS)),
            "argument 'slots' has row 0 in 4 places, and a row may be in one",
        ),
        (
            lambda: combine_rows(ROWS, np.array([[2, -1]]), np.array([-1, 0, -1, -1])),
            r"argument 'pairs' is not the inverse of 'slots': pairs\[1\] is 0 and must be -1",
        ),
    ],
)
def test_what_is_wrong_is_said(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.slow
def test_a_second_derivative_is_that_of_the_contract():
    slots = jnp.int32([[1, 0], [2, -1]])
    rows, weights = jnp.arange(12.0).reshape(3, 4), jnp.float32([[0.5, 2.0], [3.0, 4.0]])

    def loss(weights, combine):
        return jnp.sum(combine(jnp.square(rows) * jnp.sum(weights), weights) ** 2)

    def ours(rows, weights):
        return combine_rows(rows, slots, weights=weights)

    def contract(rows, weights):
        return op.function(rows, slots, None, weights)

    got, want = (jax.jacrev(jax.grad(lambda w, f=f: loss(w, f)))(weights) for f in (ours, contract))
    np.testing.assert_allclose(got, want, rtol=1e-4)
