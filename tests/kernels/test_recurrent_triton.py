"""LSTMs in Triton, a launch a token: documents, both ways, states, tiles that are not full, what is kept, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, value_and_gradients

from kernels.framework.interpret import interpret
from kernels.framework.platforms import Unsupported
from kernels.ops.recurrent import op

GATES = {"lstm": 4, "gru": 3}


def drawn(B, T, D, F, ends=("",), dtype="float16", cell="lstm", states=True):
    """Returns arguments whose numbers a dtype of 16 bits holds."""
    rng, rows = np.random.default_rng(0), GATES[cell] * F
    shapes = {"weight_ih": (rows, D), "weight_hh": (rows, F), "bias_ih": (rows,), "bias_hh": (rows,)}
    x = {"inputs": rng.standard_normal((B, T, D))}
    x["weights"] = {n + end: rng.uniform(-0.7, 0.7, s) for end in ends for n, s in shapes.items()}
    x |= {"initial_state": rng.standard_normal((B, 1, 2 * len(ends), F))} if states else {}
    return jax.tree.map(lambda y: jnp.asarray(y, dtype), x)


def documents(B, T):
    """Returns ids of documents with padding at the beginning, inside, at the end of a document, and in a whole row."""
    ids = np.array([([-1] + [0] * 3 + [-1, 0, 3, 3, -1, 5] + [2] * T)[:T]] * B, np.int32)
    ids[-1] = -1
    ids[0, -1] = -1
    return jnp.asarray(ids)


def of_float32(arguments, options, d):
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype != jnp.int32 else x, arguments)
    return value_and_gradients(lambda **a: op(**a, **options, platform="xla"), wide, d)


@pytest.mark.parametrize(
    ("sizes", "ways", "with_documents"),
    [
        ((3, 14, 5, 20), 2, True),
        pytest.param((35, 3, 20, 4), 1, False, marks=pytest.mark.slow),
        pytest.param((2, 40, 5, 3), 1, True, marks=pytest.mark.slow),
    ],
)
def test_against_xla_in_float32(sizes, ways, with_documents):
    """Several tiles of rows, of units and of channels; states in and out; every gradient, and by what the forward kept."""
    arguments, options = drawn(*sizes, ("", "_reverse")[:ways]), {"bidirectional": ways == 2}
    arguments |= {"segment_ids": documents(*sizes[:2])} if with_documents else {}
    wanted, gradients, d = of_float32(arguments, options, None)
    with interpret():
        call = op.bind(**arguments, **options)
        assert len(op.plan(call, "triton", None, differentiated=True).kept) == 2 * ways
        found, through, _ = value_and_gradients(lambda **a: op(**a, **options, platform="triton"), arguments, d)
    for a, b in zip(jax.tree.leaves((found, through)), jax.tree.leaves((wanted, gradients)), strict=True):
        assert error(a, b) < 2e-3


def test_a_backward_without_what_a_forward_keeps():
    arguments = drawn(2, 4, 5, 6, states=False)
    d = {"d_out": jnp.ones((2, 4, 6), jnp.float16), "d_final_state": jnp.ones((2, 1, 2, 6), jnp.float32)}
    wanted = of_float32(arguments, {}, tuple(d.values()))[1]
    with interpret():
        found = op.backward(d, **arguments, platform="triton")
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert error(a, b) < 2e-3


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"cell_type": "gru"}, "its kernels are of an LSTM with tanh, and this is gru with tanh"),
        ({"activation": "relu"}, "this is lstm with relu"),
        ({"num_states": 2, "segment_ids": jnp.zeros((2, 3), jnp.int32)}, "it has several states a row"),
        (
            {"weights": drawn(2, 3, 4, 5, dtype="float32")["weights"]},
            "is float32 and its inputs are float16; cast",
        ),
        ({"inputs": jnp.ones((2, 3, 4))}, "float32"),
    ],
)
def test_what_the_kernels_cannot_run_is_refused(change, why):
    arguments = drawn(2, 3, 4, 5, cell=change.get("cell_type", "lstm"), states=False) | change
    with pytest.raises(Unsupported, match=why):
        op(**arguments, platform="triton")
