"""The causal convolution on a CUDA device, at the widths of models. Run with the command in CONTRIBUTING.md.

Small cases are in test_operations_gpu.py: there one program has all channels, here threads load whole vectors.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error, value_and_gradients
from test_operations_gpu import has_cuda

from kernels.framework.binding import is_float_array
from kernels.ops.state_space import conv_op

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason="JAX sees no CUDA device here")]

KINDS = ("rows", "documents", "packed")


def arguments_of(kind, T=459, F=4352, W=4):
    """Returns float32 arguments of two rows with a bias and states; a length that no span divides."""
    rng = np.random.default_rng(0)
    states = 3 if kind == "packed" else 1
    x = {"x": (2, T, F), "weight": (F, W), "bias": (F,), "initial_state": (2, states, F, W - 1)}
    arguments = {n: jnp.asarray(rng.standard_normal(shape), jnp.float32) for n, shape in x.items()}
    ids = np.cumsum(rng.random((2, T)) < 0.01, axis=1)
    if kind == "packed":
        ids, arguments["num_states"] = np.sort(ids % 2 * 2, axis=1), 3
    ids[:, 100:103] = ids[:, -2:] = -1
    return arguments | ({} if kind == "rows" else {"segment_ids": jnp.asarray(ids, jnp.int32)}) | {"activation": "silu"}


def in_dtype(arguments, dtype):
    return {n: y.astype(dtype) if n in ("x", "weight", "bias") else y for n, y in arguments.items()}


def off(kind, dtype, *cfgs, **sizes):
    """Returns what is farther from the contract in float32 than twice its own rounding, by name and configuration."""
    arguments = in_dtype(arguments_of(kind, **sizes), dtype)
    exact = {n: y.astype(jnp.float32) if is_float_array(y) else y for n, y in arguments.items()}
    truth, true_gradients, d = value_and_gradients(conv_op.function, exact)
    rounded, rounded_gradients, _ = value_and_gradients(conv_op.function, arguments, d)
    bad = []
    for cfg in cfgs or (None,):
        run = functools.partial(conv_op, platform="triton", cfg=cfg)
        got, gradients, _ = value_and_gradients(run, arguments, d)
        rows = [*zip(conv_op.outputs, got, truth, rounded)]
        rows += [(f"d_{n}", gradients[n], true_gradients[n], rounded_gradients[n]) for n in true_gradients]
        bad += [
            (what, f"{error(a, w):.2e}", cfg)
            for what, a, w, y in rows
            if not error(a, w) <= 2 * error(y, w) + FLOOR[dtype]
        ]
    return bad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers(kind, dtype):
    assert not off(kind, dtype)


@pytest.mark.parametrize("W", [2, 7, 16])
def test_numbers_of_other_windows(W):
    assert not off("documents", "bfloat16", W=W)


@pytest.mark.parametrize("F", [1000, 1023])  # a last block that is not full; rows that no vector divides
def test_numbers_of_odd_widths(F):
    assert not off("documents", "bfloat16", F=F)


@pytest.mark.parametrize("kind", ["rows", "documents"])
def test_numbers_of_every_tuning_candidate(kind):
    call = conv_op.bind(**in_dtype(arguments_of(kind), "bfloat16"))
    candidates = conv_op.backends["triton_gpu"].candidates(call)
    assert len(candidates) > 3
    assert not off(kind, "bfloat16", *candidates)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_call_gives_the_same_bits(kind):
    arguments = in_dtype(arguments_of(kind), "bfloat16")
    runs = [value_and_gradients(functools.partial(conv_op, platform="triton"), arguments) for _ in range(2)]
    for first, second in zip(*map(jax.tree.leaves, runs), strict=True):
        assert np.asarray(first).tobytes() == np.asarray(second).tobytes()


def test_more_than_two_to_the_31_elements():
    """The last tokens of the second of two long rows are those of a short row that ends so."""
    T, F, last = 131072, 8320, 64
    x = jax.random.normal(jax.random.key(0), (2, T, F), jnp.bfloat16)
    weight = jax.random.normal(jax.random.key(1), (F, 4), jnp.bfloat16)
    assert x.size > 2**31

    @jax.jit
    def run(x):
        def loss(x):
            out = conv_op(x, weight, activation="silu", platform="triton")[0][-1, -last:]
            return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

        dx, out = jax.grad(loss, has_aux=True)(x)
        return out, dx[-1, -last:]

    got, wanted = run(x), run(x[-1:, -last - 3 :])
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < 1e-3 and np.any(np.asarray(b))
