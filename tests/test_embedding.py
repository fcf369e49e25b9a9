"""Rows of a table whose width lies over devices that split the batch: the numbers and the gradient of one device."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejdist
from ejdist.embedding import embedding
from ejdist.planning.compiled import collectives_of

V, D, B, T = 16, 8, 8, 6


def both(mesh):
    table = jax.random.normal(jax.random.key(0), (V, D))
    tokens = jax.random.randint(jax.random.key(1), (B, T), 0, V)

    def total(table):
        rows = embedding(table, tokens, mesh=mesh)
        return jnp.sin(rows).sum(), rows

    run = jax.jit(jax.value_and_grad(total, has_aux=True)).lower(table).compile()
    (_, rows), gradient = run(table)
    return rows, gradient, run.as_text()


@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"fsdp": 2, "ep": 2, "tp": 2}, {"dp": 2, "fsdp": 2, "sp": 2}])
def test_it_is_the_table_of_one_device(sizes):
    mesh = ejdist.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    rows, gradient, text = both(mesh)
    wanted, wanted_gradient, _ = both(None)
    np.testing.assert_array_equal(rows, wanted)
    np.testing.assert_allclose(gradient, wanted_gradient, atol=1e-6)
    if len(sizes) > 1:  # the cotangents stay where the tokens are; the table alone is scattered
        assert collectives_of(text).get("reduce-scatter") or collectives_of(text).get("all-reduce")
        assert f"f32[{B},{T},{D}]" not in "".join(line for line in text.splitlines() if " all-gather(" in line)


@pytest.mark.parametrize(
    "sizes", [{"dp": 1}, {"fsdp": 2}, {"tp": 2}, {"dp": 2, "fsdp": 2}, {"dp": 2, "fsdp": 2, "tp": 2}]
)
def test_a_token_outside_of_the_vocabulary_is_nan_on_any_mesh(sizes):
    """And not a row of zeros, or that of another token, with which training would go on."""
    mesh = ejdist.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    tokens = jnp.zeros((B, T), jnp.int32).at[0, :4].set(jnp.asarray([-1, V - 1, V, 2**31 - 1]))
    rows = embedding(jnp.ones((V, D)), tokens, mesh=mesh)
    np.testing.assert_array_equal(np.isnan(rows).all(-1)[0], [True, False, True, True, False, False])
    assert np.isnan(rows).sum() == 3 * D
