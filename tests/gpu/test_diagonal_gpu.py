"""Mamba-1's scan and RWKV-4's time mix on a CUDA device, at the widths of models. Run with the command in CONTRIBUTING.md."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error, value_and_gradients
from test_operations_gpu import has_cuda

from kernels.framework.binding import is_float_array
from kernels.ops.recurrent import rwkv4_op
from kernels.ops.state_space import v1_op

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason="JAX sees no CUDA device here")]

OPS = {op.name: op for op in (v1_op, rwkv4_op)}
KINDS = ("rows", "documents", "packed")
# What may be 16-bit floats; the rest are parameters and states.
OF_TOKENS = {"x", "dt", "B", "C", "k", "v"}


def arguments_of(name, kind, T=459, F=1096, H=16):
    """Returns float32 arguments of two rows with states; a length that no chunk divides, and decays of every size."""
    rng = np.random.default_rng(0)
    states = 3 if kind == "packed" else 1
    if name == "rwkv4":
        x = {"w": rng.uniform(-6, 3, F), "u": rng.standard_normal(F)}
        x |= {"k": 2 * rng.standard_normal((2, T, F)), "v": rng.standard_normal((2, T, F))}
        state = rng.standard_normal((2, states, 3, F))
        state[:, :, 1] = np.abs(state[:, :, 1]) + 0.5
    else:
        x = {"x": rng.standard_normal((2, T, F)), "dt": np.exp(rng.uniform(-6, 0, (2, T, F)))}
        x |= {"A": -np.exp(rng.uniform(-4, 2, (F, H))), "D": rng.standard_normal(F)}
        x |= {n: rng.standard_normal((2, T, H)) for n in "BC"}
        x["dt"][:, ::50] = rng.choice([0.0, 20.0, 100.0], x["dt"][:, ::50].shape)
        state = rng.standard_normal((2, states, F, H))
    ids = np.cumsum(rng.random((2, T)) < 0.01, axis=1)
    if kind == "packed":
        ids = np.sort(ids % 2 * 2, axis=1)
    ids[:, 100:103] = ids[:, -2:] = -1
    arguments = {n: jnp.asarray(y, jnp.float32) for n, y in x.items()} | {
        "initial_state": jnp.asarray(state, jnp.float32)
    }
    arguments |= {} if kind == "rows" else {"segment_ids": jnp.asarray(ids, jnp.int32)}
    return arguments | ({"num_states": states} if states > 1 else {})


def in_dtype(arguments, dtype):
    return {n: y.astype(dtype) if n in OF_TOKENS else y for n, y in arguments.items()}


def off(name, kind, dtype, *cfgs, **sizes):
    """Returns what is farther from XLA's backend in float32 than twice that one's rounding, by name and configuration: the loop
    of the contract, which tests on a CPU compare both with, takes most of a minute here."""
    op, arguments = OPS[name], in_dtype(arguments_of(name, kind, **sizes), dtype)
    exact = {n: y.astype(jnp.float32) if is_float_array(y) else y for n, y in arguments.items()}
    with jax.default_matmul_precision("highest"):
        xla = functools.partial(op, platform="xla")
        truth, true_gradients, d = value_and_gradients(xla, exact)
        rounded, rounded_gradients, _ = value_and_gradients(xla, arguments, d)
    bad = []
    for cfg in cfgs or (None,):
        got, gradients, _ = value_and_gradients(functools.partial(op, platform="triton", cfg=cfg), arguments, d)
        rows = [*zip(op.outputs, got, truth, rounded)]
        rows += [(f"d_{n}", gradients[n], true_gradients[n], rounded_gradients[n]) for n in true_gradients]
        bad += [
            (what, f"{error(a, w):.2e}", cfg)
            for what, a, w, y in rows
            if not error(a, w) <= 2 * error(y, w) + FLOOR[dtype]
        ]
    return bad


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers(name, kind, dtype):
    assert not off(name, kind, dtype)


@pytest.mark.parametrize(("F", "H"), [(1000, 8), (1023, 5), (70, 32)])
def test_numbers_of_odd_widths(F, H):
    assert not off("state_space_v1", "documents", "bfloat16", F=F, H=H)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("kind", ["rows", "documents"])
def test_numbers_of_every_tuning_candidate(name, kind):
    op = OPS[name]
    call = op.bind(**in_dtype(arguments_of(name, kind), "bfloat16"))
    candidates = op.backends["triton_gpu"].candidates(call)
    assert len(candidates) > 3
    assert not off(name, kind, "bfloat16", *candidates, *(replace(cfg, splits=5, chunk=32) for cfg in candidates[:2]))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_call_gives_the_same_bits(name, kind):
    arguments = in_dtype(arguments_of(name, kind), "bfloat16")
    runs = [value_and_gradients(functools.partial(OPS[name], platform="triton"), arguments) for _ in range(2)]
    for first, second in zip(*map(jax.tree.leaves, runs), strict=True):
        assert np.asarray(first).tobytes() == np.asarray(second).tobytes()


@pytest.mark.parametrize(("T", "F"), [(131072, 8320), (262144, 4160)])
def test_more_than_two_to_the_31_elements(T, F):
    """The last tokens of the second of two long rows are those of a short row that begins where a strong decay has left
    nothing; with weak decays before, they depend on a token 16,384 before."""
    last, back, H = 64, 16384, 2
    x = (
        jax.random.normal(jax.random.key(0), (2, T, F), jnp.bfloat16).at[:, -back - 1].set(0)
    )  # or its step would add 200 x
    dt = jnp.full((2, T, 1), 1e-6, jnp.bfloat16).at[:, -back].set(1.0)
    dt = jnp.broadcast_to(dt, x.shape).at[:, -back - 1].set(200.0)
    B, C = (jax.random.normal(jax.random.key(i), (2, T, H), jnp.bfloat16) for i in (1, 2))
    A = -jnp.ones((F, H))
    assert x.size > 2**31
    # Not a function of the outputs: a sine of them would make much of how each was rounded.
    weights = jnp.cos(jnp.arange(last * F, dtype=jnp.float32)).reshape(last, F)

    @jax.jit
    def run(x, dt, B, C):
        def loss(x):
            out = v1_op(x, dt, A, B, C, platform="triton")[0][-1, -last:]
            return jnp.sum(out.astype(jnp.float32) * weights), out

        dx, out = jax.grad(loss, has_aux=True)(x)
        return out, dx[-1, -last:], dx[-1, -back]

    got, wanted = run(x, dt, B, C), run(*(y[-1:, -back:] for y in (x, dt, B, C)))
    for a, b in zip(got, wanted, strict=True):
        assert error(a, b) < 1e-2 and np.any(np.asarray(b))
