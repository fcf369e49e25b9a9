"""The Pallas kernels of the causal convolution: blocks of every length, documents, packed states, wide windows."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, value_and_gradients
from test_conv_triton import arguments_of
from test_delta_triton import spoiled

import kernels
from kernels.framework.interpret import interpret
from kernels.ops.state_space import conv_op
from kernels.ops.state_space.contract import ConvConfig

SMALL = ConvConfig(block_f=128, span=16, backward_block_f=128, backward_span=16)


def against_xla(arguments, clean=None, allowed=2e-6, cfg=SMALL):
    """Asserts that outputs and gradients through the interpreter are those of XLA given `clean` arguments."""
    wanted, gradients, d = value_and_gradients(functools.partial(conv_op, platform="xla"), clean or arguments)
    with interpret():
        got, found, _ = value_and_gradients(functools.partial(conv_op, platform="pallas", cfg=cfg), arguments, d)
    for what, a, b in [*zip(conv_op.outputs, got, wanted), *((n, found[n], gradients[n]) for n in gradients)]:
        assert np.isfinite(np.asarray(b)).all(), what
        assert error(a, b) <= allowed, f"{what}: off by {error(a, b):.2e}"


@pytest.mark.slow  # packed sequences have many blocks
@pytest.mark.parametrize(("T", "W"), [(37, 4), (32, 2), (9, 16), (2, 4), (1, 3)])
def test_rows_of_many_blocks(T, W):
    against_xla(arguments_of(np.random.default_rng(0), 2, T, W))


@pytest.mark.slow  # a subset of the quick ones
def test_no_bias_no_activation_no_state():
    arguments = arguments_of(np.random.default_rng(1), 1, 21, 3, state=0, activation=None)
    del arguments["bias"]
    against_xla(arguments)


@pytest.mark.slow  # packed sequences have padding with NaN too
@pytest.mark.parametrize("state", [1, 0])
def test_documents_whose_padding_holds_anything(state):
    rng = np.random.default_rng(2)
    ids = np.cumsum(rng.random((4, 53)) < 0.2, axis=1).astype(np.int32)
    ids[0, rng.random(53) < 0.2] = -1
    ids[0, :3] = ids[0, 30:36] = ids[0, -5:] = -1
    ids[1, 10:30], ids[2] = -1, -1
    ids[1, 30:] = ids[1, 9]  # goes on behind more padding than a block has
    clean = arguments_of(rng, 4, 53, 4, state, segment_ids=jnp.asarray(ids))
    against_xla(spoiled(clean, ids, "x"), clean=clean)


@pytest.mark.parametrize("state", [5, pytest.param(0, marks=pytest.mark.slow)])
def test_packed_sequences(state):
    rng = np.random.default_rng(3)
    ids = np.sort(rng.choice([0, 1, 3, 4], (2, 45)), axis=1).astype(np.int32)  # sequence 2 is empty
    ids[0, :4] = ids[0, 14:16] = ids[:, -5:] = -1
    ids[1] = np.where(ids[1] < 0, -1, 4 - ids[1])  # in another order
    ids[1, 6:] = np.where(ids[1, 6:] == 4, 3, ids[1, 6:])  # one shorter than a window
    clean = arguments_of(rng, 2, 45, 4, state, segment_ids=jnp.asarray(ids), num_states=5)
    against_xla(spoiled(clean, ids, "x"), clean=clean)


@pytest.mark.slow  # a subset of the quick ones
def test_several_states_without_ids():
    against_xla(arguments_of(np.random.default_rng(4), 1, 6, 4, 3, num_states=3))


@pytest.mark.slow
@pytest.mark.parametrize("documents_of", [4, 40])
def test_bfloat16_of_several_columns_and_blocks(documents_of):
    """Tokens that are moved together, and those that stay, in the dtype that models have; more channels than a block."""
    rng = np.random.default_rng(5)
    ids = np.cumsum(rng.random((1, 300)) < 1 / documents_of, axis=1).astype(np.int32)
    ids[0, 200:203] = -1
    shapes = {"x": (1, 300, 300), "weight": (300, 4), "bias": (300,)}
    arrays = {n: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for n, shape in shapes.items()}
    arguments = arrays | {"segment_ids": jnp.asarray(ids), "activation": "silu"}
    clean = {n: x.astype(jnp.float32) if n in arrays else x for n, x in arguments.items()}
    cfg = ConvConfig(block_f=256, span=128, backward_block_f=256, backward_span=64)
    against_xla(arguments, clean, 1.6e-2, cfg)


def test_what_the_kernels_cannot_do_is_refused_by_name():
    with interpret():
        with pytest.raises(kernels.Unsupported, match="W = 17 exceeds 16"):
            conv_op(jnp.ones((1, 5, 4)), jnp.ones((4, 17)), platform="pallas")
        with pytest.raises(kernels.Unsupported, match="KiB of scalar memory"):
            conv_op(jnp.ones((9000, 1, 1)), jnp.ones((1, 16)), platform="pallas")
        with pytest.raises(
            ValueError, match="span = 8 tokens and block_f = 64 channels; the Pallas kernels take at least 16"
        ):
            conv_op(jnp.ones((1, 5, 4)), jnp.ones((4, 2)), platform="pallas", cfg=ConvConfig(block_f=64, span=8))
