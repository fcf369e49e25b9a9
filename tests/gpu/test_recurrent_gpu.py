"""LSTMs by cuDNN on a CUDA device, beside XLA's: outputs, states, gradients.

Run with the command in CONTRIBUTING.md. Small cases, and the same bits twice, are in test_operations_gpu.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from test_operations_gpu import has_cuda

from kernels import recurrent
from kernels.ops.recurrent import op

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason="JAX sees no CUDA device here")]


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize(("dtype", "most"), [("float32", 3e-5), ("bfloat16", 2e-2)])
def test_cudnn_beside_xla(ways, dtype, most):
    rng, (B, T, D, F) = np.random.default_rng(0), (8, 65, 96, 128)
    shapes = {"weight_ih": (4 * F, D), "weight_hh": (4 * F, F), "bias_ih": (4 * F,)}
    ends = ("", "_reverse")[:ways]
    weights = {n + e: jnp.asarray(rng.uniform(-0.1, 0.1, s), jnp.float32) for n, s in shapes.items() for e in ends}
    x = jnp.asarray(rng.standard_normal((B, T, D)), dtype)
    states = [jnp.asarray(rng.standard_normal((2, B, F) if ways == 2 else (B, F)), jnp.float32) for _ in "hc"]

    def made(platform):
        def loss(x, weights, states):
            out, (h, c) = recurrent(
                x, tuple(states), weights, bidirectional=ways == 2, return_state=True, platform=platform
            )
            return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(jnp.sin(h)) + jnp.sum(c**2), (out, h, c)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(x, weights, states)

    for a, b in zip(jax.tree.leaves(made("cudnn")), jax.tree.leaves(made("xla")), strict=True):
        assert error(a, b) < most


def test_a_call_that_names_no_backend_is_cudnns():
    x, weights = jnp.ones((2, 3, 8)), {"weight_ih": jnp.ones((32, 8)), "weight_hh": jnp.ones((32, 8))}
    plan = {c.platform: c.backend.name for c in op.plan(op.bind(x, weights), None, None, differentiated=True).choices}
    assert plan["cuda"] == "cudnn_gpu"
    assert "cudnn_rnn" in jax.jit(lambda x: recurrent(x, None, weights)).lower(x).as_text()
