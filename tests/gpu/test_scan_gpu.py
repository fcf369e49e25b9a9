"""Triton kernels of recurrences on a CUDA device, at the widths of models. Run with the command in CONTRIBUTING.md.

Small cases are in test_operations_gpu.py: there a state is one tile of 16, here tiles are those of matrix units.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error, value_and_gradients
from hopper import spoil_memory
from test_operations_gpu import has_cuda

import kernels
from kernels.framework.binding import is_float_array

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason="JAX sees no CUDA device here")]

OPS = kernels.operations()
B, T, N, K, H = 2, 459, 4, 2, 128


def documents(rng):
    ids = np.cumsum(rng.random((B, T)) < 0.01, axis=1).astype(np.int32)
    ids[:, 100:103] = ids[:, -2:] = -1
    return ids


def unit(rng, cosine, heads):
    """Returns unit vectors, any two of which have about this cosine."""
    x = np.sqrt(cosine) * rng.standard_normal(H) + np.sqrt(1 - cosine) * rng.standard_normal((B, T, heads, H))
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def decays(rng, *channels):
    """Returns log decays: mild, with a few that forget, and where channels have their own half of the chunks mild alone."""
    shape = (B, T, N, *channels)
    g = -np.exp(rng.standard_normal(shape) - 3)
    strong = rng.choice([-20.0, -100.0, -np.inf], shape)
    few = rng.random(shape) < 0.02
    if channels:
        few &= (np.arange(T) // 64 % 2 == 0)[:, None, None]
    return np.where(few, strong, g)


def arguments_of(name, width, cosine=0.9):
    """Returns float32 arguments: documents, a state, shared heads, decays of every size, and keys of this cosine."""
    rng = np.random.default_rng(0)
    x = {"segment_ids": documents(rng), "initial_state": rng.standard_normal((B, 1, N, H, width))}
    if name.startswith("linear_attention"):
        x |= {"query": rng.standard_normal((B, T, N, H)), "key": rng.standard_normal((B, T, K, H)), "g": decays(rng)}
        x["value"] = rng.standard_normal((B, T, K, width))
    elif name.startswith("rwkv7"):
        key = unit(rng, 0.9, N)
        x |= {"r": unit(rng, 0.0, N), "k": unit(rng, 0.5, N), "v": rng.standard_normal((B, T, N, width))}
        x |= {"w": decays(rng, H), "a": -key, "b": key * rng.uniform(0.1, 1.5, (B, T, N, H))}
    elif name.startswith("delta_rule"):
        x |= {"query": unit(rng, 0.0, K), "key": unit(rng, cosine, K), "g": decays(rng)[..., None]}
        x |= {"value": rng.standard_normal((B, T, N, width)), "beta": rng.uniform(0.1, 1.9, (B, T, N))}
    else:
        x |= {"x": rng.standard_normal((B, T, N, width)), "dt": np.exp(rng.uniform(-5, 0, (B, T, N)))}
        x |= {"A": -rng.uniform(0.05, 1.5, N), "D": rng.standard_normal(N)}
        x |= {n: rng.standard_normal((B, T, K, H)) for n in "BC"}
    if name == "linear_attention of whole chunks":  # Hopper's kernel has as many values as heads
        x |= {n: rng.standard_normal((B, T, N, width)) for n in ("key", "value")}
    if name == "linear_attention of channels":
        x |= {"gk": decays(rng, H), "bonus": rng.standard_normal((N, H))}
    elif name.startswith("delta_rule of channels"):
        x |= {"g": decays(rng, H)}
    if name == "rwkv7 of 64 channels":
        x |= {n: x[n][..., :64] for n in "rwkab"} | {"initial_state": x["initial_state"][:, :, :, :64]}
    if name.endswith("whole chunks"):  # for which Hopper has kernels of its own
        x = {n: y[:, : T // 64 * 64] for n, y in x.items()}
    return {n: jnp.asarray(y, jnp.int32 if n == "segment_ids" else jnp.float32) for n, y in x.items()}


def in_dtype(arguments, dtype):
    of_tokens = {"query", "key", "value", "x", "B", "C", "r", "k", "v", "a", "b"}
    return {n: y.astype(dtype) if n in of_tokens and is_float_array(y) else y for n, y in arguments.items()}


def off(name, width, dtype, *cfgs, cosine=0.9):
    """Returns what is farther from the contract in float32 than twice its own rounding, by name and configuration."""
    op, arguments = OPS[name.split()[0]], in_dtype(arguments_of(name, width, cosine), dtype)
    exact = {n: y.astype(jnp.float32) if is_float_array(y) else y for n, y in arguments.items()}
    with jax.default_matmul_precision("highest"):
        truth, true_gradients, d = value_and_gradients(op.function, exact)
        rounded, rounded_gradients, _ = value_and_gradients(op.function, arguments, d)
    bad = []
    for cfg in cfgs:
        got, gradients, _ = value_and_gradients(functools.partial(op, platform="triton", cfg=cfg), arguments, d)
        rows = [*zip(op.outputs, got, truth, rounded)]
        rows += [(f"d_{n}", gradients[n], true_gradients[n], rounded_gradients[n]) for n in true_gradients]
        bad += [
            (what, f"{error(a, w):.2e}", cfg)
            for what, a, w, y in rows
            if not error(a, w) <= 2 * error(y, w) + FLOOR[dtype]
        ]
    return bad


SIZES = [("linear_attention", 128), ("state_space_v2", 64), ("delta_rule", 128), ("delta_rule", 64)]
SIZES += [("linear_attention of channels", 128), ("delta_rule of channels", 128)]
SIZES += [("delta_rule of channels in whole chunks", 128)]
SIZES += [("linear_attention of whole chunks", 128)]
SIZES += [("delta_rule of whole chunks", 128), ("rwkv7", 128), ("rwkv7 of 64 channels", 64)]


@pytest.mark.parametrize(("name", "width"), SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numbers(name, width, dtype):
    assert not off(name, width, dtype, None)


@pytest.mark.parametrize("name", ["delta_rule of whole chunks", "delta_rule of channels in whole chunks"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cosine", [0.0, 0.99])
def test_keys_that_are_alike_and_keys_that_are_not(name, dtype, cosine):
    assert not off(name, 128, dtype, None, cosine=cosine)


@pytest.mark.parametrize(("name", "width"), SIZES)
def test_numbers_of_every_tuning_candidate(name, width):
    op = OPS[name.split()[0]]
    call = op.bind(**in_dtype(arguments_of(name, width), "bfloat16"))
    candidates = op.backends["triton_gpu"].candidates(call)
    assert len(candidates) > 3
    assert not off(name, width, "bfloat16", *candidates, *(replace(cfg, splits=3) for cfg in candidates[:2]))


@pytest.mark.parametrize(("name", "width"), SIZES)
def test_the_same_call_gives_the_same_bits(name, width):
    op, arguments = OPS[name.split()[0]], in_dtype(arguments_of(name, width), "bfloat16")
    runs = [value_and_gradients(functools.partial(op, platform="triton"), arguments) for _ in range(2)]
    for first, second in zip(*map(jax.tree.leaves, runs), strict=True):
        assert np.asarray(first).tobytes() == np.asarray(second).tobytes()


@pytest.mark.parametrize("name", ["linear_attention", "delta_rule", "linear_attention of channels"])
def test_more_than_two_to_the_31_elements(name):
    """The last heads and tokens of a row of 131,072 tokens, of which only the last 2,048 count: decays forget the others."""
    length, heads, last = 131072, 129, 2048
    op, keys = OPS[name.split()[0]], jax.random.split(jax.random.key(0), 3)
    x = dict(
        zip(
            ("query", "key", "value"),
            (jax.random.normal(key, (1, length, heads, H), jnp.bfloat16) for key in keys),
            strict=True,
        )
    )
    g = jnp.full((1, length, heads), -0.1)
    if name == "delta_rule":
        x["key"] = x["key"] / 16
        x |= {"g": g[..., None], "beta": jnp.full((1, length, heads), 0.5)}
    elif name == "linear_attention of channels":
        x["gk"] = jnp.broadcast_to(g[..., None], x["query"].shape)
    else:
        x["g"] = g
    assert x["value"].size > 2**31
    out, state = op(**x, platform="triton")
    part = {n: y[:, -last:, -1:] for n, y in x.items()}
    wanted, wanted_state = op(**part, platform="xla")
    assert error(out[:, -1024:, -1:], wanted[:, -1024:]) <= FLOOR["bfloat16"]
    assert error(state[:, :, -1:], wanted_state) <= FLOOR["bfloat16"]


@pytest.mark.parametrize("name", ["linear_attention of whole chunks", "delta_rule of whole chunks"])
def test_many_runs_give_the_same_bits(name):
    """Of Hopper's walks, whose warps wait for each other; memory that was freed holds NaN."""
    op, arguments = OPS[name.split()[0]], in_dtype(arguments_of(name, 128), "bfloat16")
    run = functools.partial(value_and_gradients, functools.partial(op, platform="triton"), arguments)
    first = jax.tree.leaves(run())
    for _ in range(50):
        spoil_memory(first)
        for one, other in zip(first, jax.tree.leaves(run()), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
