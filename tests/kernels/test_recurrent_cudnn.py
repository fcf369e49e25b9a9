"""LSTMs by cuDNN: how weights and states are handed over, and what is refused; on GPUs see tests/gpu/test_recurrent_gpu.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from jax.experimental import rnn

from kernels import recurrent
from kernels.framework.interpret import interpret
from kernels.framework.platforms import Unsupported
from kernels.ops.recurrent import cudnn_gpu

B, T, D, F = 3, 7, 5, 4


def drawn(ways=1, biases=("bias_ih",), seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"weight_ih": (4 * F, D), "weight_hh": (4 * F, F)} | dict.fromkeys(biases, (4 * F,))
    weights = {n + end: rng.uniform(-1, 1, s) for n, s in shapes.items() for end in ("", "_reverse")[:ways]}
    states = [rng.standard_normal((2, B, F) if ways == 2 else (B, F)) for _ in "hc"]
    arrays = rng.standard_normal((B, T, D)), weights, states
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), arrays)


def gradients(arrays, **options):
    def loss(inputs, weights, states):
        out, (h, c) = recurrent(inputs, tuple(states), weights, return_state=True, **options)
        return jnp.sum(out**2) + jnp.sum(jnp.sin(h)) + jnp.sum(c**3), (out, h, c)

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)


@pytest.mark.parametrize("ways", [1, 2])
def test_what_cudnn_is_given(ways):
    """By JAX's reference of what cuDNN computes of its one vector of weights: outputs, states and gradients of each."""
    arrays, both = drawn(ways), {"bidirectional": ways == 2}
    wanted = gradients(arrays, platform="xla", **both)
    with interpret():
        found = gradients(arrays, platform="cudnn", **both)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert error(a, b) < 2e-6


@pytest.mark.parametrize(("dtype", "tf32"), [("float32", False), ("bfloat16", True)])
def test_a_program_for_gpus_calls_cudnn(monkeypatch, dtype, tf32):
    """Sizes are cuDNN's to say, which is not here. Products of float32 are not those of TF32."""
    asked = []
    monkeypatch.setattr(
        rnn.gpu_rnn, "compute_rnn_workspace_reserve_space_sizes", lambda *sizes: asked.append(sizes) or (16, 16)
    )
    monkeypatch.setattr(cudnn_gpu, "_has_cudnn", lambda: True)
    x, weights, _ = drawn()

    def step(x, weights):
        return jax.grad(lambda *a: jnp.sum(recurrent(a[0], None, a[1]).astype(jnp.float32)), argnums=(0, 1))(x, weights)

    names = ("cudnn_rnn_ffi", "cudnn_rnn_bwd_ffi")
    known = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
    made = jax.export.export(jax.jit(step), platforms=["cuda"], disabled_checks=known)(x.astype(dtype), weights)
    assert all(f"@{name}(" in made.mlir_module() for name in names)
    assert set(asked) == {(D, F, 1, B, T, 0.0, False, tf32)}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"cell_type": "gru"}, "LSTM with tanh alone, and this is gru with tanh"),
        ({"activation": "relu"}, "LSTM with tanh alone, and this is lstm with relu"),
        ({"lengths": np.array([7, 3, 1])}, "it has documents or padding"),
        ({}, "cuDNN is asked when a call is traced, and cannot be here"),
    ],
)
def test_what_cudnn_cannot_run_is_refused(monkeypatch, options, why):
    monkeypatch.setattr(cudnn_gpu, "_has_cudnn", lambda: False)
    x, weights, _ = drawn()
    if options.get("cell_type") == "gru":
        weights = {n: w[: 3 * F] for n, w in weights.items()}
    with pytest.raises(Unsupported, match=why):
        recurrent(x, None, weights, platform="cudnn", **options)
    assert recurrent(x, None, weights, **options).shape == (B, T, F)  # what nobody named is another's
