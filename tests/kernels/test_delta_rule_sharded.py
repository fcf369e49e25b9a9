"""The delta rules with the sequence split: the numbers and gradients of one device, and traffic that does not grow with it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from numpy_delta_rule import NAMES, STATE, arrays

import ejdist
import kernels
from ejdist import make_mesh

RNG = np.random.default_rng(0)
CUTS, SLOTS = np.array([0, 5, 5, 6, 20]), np.array([5, 2, -1, 0])
POOL = RNG.standard_normal((7, 2, 4, 3)).astype(np.float32)

# Documents that begin and end on any rank, one over all of them, and padding at a rank's edges.
ACROSS = np.array([[0] * 3 + [-1] * 2 + [1] * 8 + [2] * 2 + [-1], [-1] + [5] * 15])


def on_a_mesh(name, sizes, packed):
    a = arrays(name, B=1 if packed else 2, T=16, high=2.0)
    if packed:
        options = {"cum_seqlens": np.array([0, 3, 3, 13, 15])}
        states = np.random.default_rng(0).standard_normal((4, 2, 4, 3)).astype(np.float32)
    else:
        options, states = {"segment_ids": ACROSS}, STATE
        options |= {} if name == "rwkv7" else {"use_qk_l2norm": True, "softmax_scale": 0.3}
        a = {n: 3 * x if n == "key" else x for n, x in a.items()}  # so that its norm matters

    def run(function):
        def loss(x):
            outputs = function(*(x[n] for n in NAMES[name]), state=x["state"], return_state=True, **options)
            return sum(jnp.sum(jnp.sin(y)) for y in outputs), outputs

        return jax.jit(jax.value_and_grad(loss, has_aux=True))({**a, "state": states})

    got = run(functools.partial(getattr(ejdist, name), mesh=make_mesh(**sizes)))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(run(getattr(kernels, name))), strict=True):
        assert error(g, w) < 2e-6, error(g, w)


@pytest.mark.parametrize(
    ("name", "sizes", "packed"),
    [
        pytest.param("kernel_delta_attention", {"sp": 4}, False, marks=pytest.mark.slow),
        pytest.param("rwkv7", {"sp": 2, "tp": 2}, True, marks=pytest.mark.slow),
    ],
)
def test_with_the_sequence_split(name, sizes, packed):
    """Values and gradients, of the states too."""
    on_a_mesh(name, sizes, packed)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_with_the_sequence_split_over_any_number(name, ranks, packed):
    on_a_mesh(name, {"sp": ranks}, packed)


@pytest.mark.slow
def test_a_pool_on_a_mesh():
    a = {n: x[0] for n, x in arrays("gated_delta_rule", T=22).items()}
    given = (*a.values(), jnp.asarray(POOL), CUTS, SLOTS)
    got = ejdist.ragged_gated_delta_rule(*given, mesh=make_mesh(sp=2, tp=2))
    for g, w in zip(got, kernels.ragged_gated_delta_rule(*given), strict=True):
        assert error(g, w) < 2e-6


def test_a_pool_that_is_decoded_with_heads_split():
    """And with devices for a sequence, of which a request has one token."""
    a = {n: x[0] for n, x in arrays("gated_delta_rule", T=4, K=2).items()}
    given = (*a.values(), jnp.asarray(POOL), np.arange(5), SLOTS)
    got = ejdist.ragged_gated_delta_rule(*given, max_query_len=1, mesh=make_mesh(sp=2, tp=2))
    for g, w in zip(got, kernels.ragged_gated_delta_rule(*given, max_query_len=1), strict=True):
        assert error(g, w) < 2e-6


@pytest.mark.slow  # of the numbers the same traffic is quick
def test_traffic_does_not_depend_on_the_length():
    def traffic(T):
        shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in arrays("gated_delta_rule", T=T).items()}
        run = jax.jit(lambda a: ejdist.gated_delta_rule(**a, mesh=make_mesh(sp=4)))
        found = re.findall(
            r"= (\S+) (collective-permute|all-gather|all-reduce|all-to-all)\(", run.lower(shapes).compile().as_text()
        )
        return sorted(found)

    assert traffic(64) == traffic(256) != []
