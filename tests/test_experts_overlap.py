"""Two halves of a batch that go through the layers side by side: the same losses, statistics and gradients as the whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_moe_model import STYLES, batch_of, state_of

from ejdist.mesh import make_mesh
from ejdist.models.decoder import loss
from ejdist.models.model import StepContext
from ejdist.operations import bind_ops

ROWS, DEVICES = 3, 4  # rows of a device: the halves are not equal


def step(name, overlap, **options):
    """Returns (loss, metrics, gradients) of a microbatch over four devices that have the experts between them."""
    c = dataclasses.replace(STYLES[name], compute_dtype="float32", **options)
    params, buffers = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), state_of(c))
    batch = {k: jnp.asarray(np.resize(x, (ROWS * DEVICES, x.shape[1])), jnp.int32) for k, x in batch_of(c).items()}
    # Rows that choose other experts, so that no half is as the whole.
    batch["tokens"] = (batch["tokens"] * (1 + jnp.arange(ROWS * DEVICES))[:, None]) % c.vocab_size
    mesh = make_mesh(ep=DEVICES, devices=jax.devices()[:DEVICES])
    ops = bind_ops(mesh, experts={"axes": ("ep",), "dispatch": "all_to_all", "overlap": overlap})
    context = StepContext(jnp.int32(3), jnp.int32(0), buffers)

    def of(params):
        return loss(params, batch, c, ops, context=context)

    (total, metrics), grads = jax.jit(jax.value_and_grad(of, has_aux=True))(params)
    return total, {name: m.value for name, m in metrics.items()}, grads


# Losses of the batch, of the global batch and of sequences; gathered attention, latent attention; a shared expert with a gate.
QUICK = [("mixtral", {}), ("mixed", {"remat": "attention"})]
OTHERS = [("deepseek", {}), ("qwen3", {"scan_layers": False, "remat": "full"}), ("gpt_oss", {"scan_layers": False})]


@pytest.mark.parametrize(
    ("name", "options"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_halves_are_the_batch(name, options):
    """Value, every metric and every gradient; passes are those of both halves."""
    plain, halves = (step(name, overlap, **options) for overlap in ("none", "halves"))
    np.testing.assert_allclose(halves[0], plain[0], rtol=1e-6)
    assert halves[1].keys() == plain[1].keys()
    for key, value in plain[1].items():
        if key not in ("experts/extra_passes", "experts/buffer_high_water"):  # each half has a buffer of its own
            np.testing.assert_allclose(halves[1][key], value, rtol=2e-5, err_msg=key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), halves[2], plain[2])
