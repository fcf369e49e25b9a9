"""Triton kernels of recurrences whose channels have their own decays: all steps that take pairs, documents, long memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from grid import error, value_and_gradients
from test_delta_triton import arguments_of, compared, spoiled
from test_scan_triton import OPS, against_xla, documents, linear_attention_of

import kernels
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.triton_channel_calls import REACH
from kernels.engines.scan.triton_channel_steps import first_level
from kernels.framework.interpret import interpret
from kernels.toolchains.triton import triton_launch


def channels(rng, *shape, decay=None, mild=-3.0):
    """Returns log decays; a third of them `decay`, the others mild."""
    a = -np.exp(rng.standard_normal(shape) + mild)
    return jnp.asarray(a if decay is None else np.where(rng.random(shape) < 0.3, decay, a), jnp.float32)


def gla(rng, B, T, N, K, H, Hv, decay=None, **more):
    x = linear_attention_of(rng, B, T, N, K, H, Hv, **more)
    return x | {"gk": channels(rng, B, T, N, H, decay=decay)}


def kda(rng, B, T, K, N, H, Hv, cosine=0.5, beta=1.0, decay=None, **more):
    x = arguments_of(rng, B, T, K, N, H, Hv, cosine, beta, **more)
    return x | {"g": channels(rng, B, T, N, H, decay=decay)}


@pytest.mark.slow  # the delta rule's, below, has what this has
@pytest.mark.parametrize("decay", [-20.0, -np.inf])
def test_decays_of_every_size(decay):
    rng = np.random.default_rng(0)
    state = rng.standard_normal((1, 1, 2, 8, 20)).astype(np.float32)
    against_xla(
        "linear_attention", gla(rng, 1, 40, 2, 1, 8, 20, decay, initial_state=state), chunk=16, splits=2, block_v=16
    )


@pytest.mark.parametrize("decay", [pytest.param(-100.0, marks=pytest.mark.slow), -np.inf])
def test_decays_of_every_size_in_a_delta_rule(decay):
    rng = np.random.default_rng(0)
    state = rng.standard_normal((1, 1, 2, 8, 20)).astype(np.float32)
    arguments, both = kda(rng, 1, 40, 1, 2, 8, 20, decay=decay, initial_state=state), {"keeps": True, "at_once": True}
    compared(arguments, {"softmax_scale": 0.7}, chunk=16, block_v=16, **both)


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.0, -np.inf])
def test_a_bonus_reads_the_state_before_the_token(decay):
    rng = np.random.default_rng(1)
    arguments = gla(rng, 1, 40, 2, 2, 8, 4, decay)
    arguments["bonus"] = jnp.asarray(rng.standard_normal((2, 8)), jnp.float32)
    against_xla("linear_attention", arguments, chunk=32)


def test_a_bonus_without_decays():
    rng = np.random.default_rng(2)
    arguments = linear_attention_of(rng, 1, 40, 2, 1, 8, 4)
    del arguments["g"]
    arguments["bonus"] = jnp.asarray(rng.standard_normal((2, 8)), jnp.float32)
    against_xla("linear_attention", arguments, chunk=16)


@pytest.mark.parametrize(
    ("cosine", "beta"), [pytest.param(*x, marks=pytest.mark.slow) for x in ((0.9, 2.0), (0.99, 2.0))]
)
def test_correlated_keys_and_reflections(cosine, beta):
    rng = np.random.default_rng(3)
    compared(kda(rng, 1, 70, 1, 2, 16, 8, cosine, beta), {"use_qk_l2norm": True}, allowed=1e-5, chunk=64)


@pytest.mark.slow
def test_channels_of_several_blocks():
    rng = np.random.default_rng(4)
    compared(kda(rng, 1, 20, 1, 1, 72, 20, decay=-5.0), {}, chunk=16, block_v=16)
    arguments = gla(rng, 1, 20, 1, 1, 72, 20, -5.0)
    arguments["bonus"] = jnp.asarray(rng.standard_normal((1, 72)), jnp.float32)
    against_xla("linear_attention", arguments, chunk=16, block_v=16)


@pytest.mark.slow  # packed sequences have padding with NaN too
def test_documents_and_padding():
    rng = np.random.default_rng(5)
    ids, state = documents(rng, 1, 77), rng.standard_normal((1, 1, 2, 8, 4)).astype(np.float32)
    clean = kda(rng, 1, 77, 1, 2, 8, 4, initial_state=state, segment_ids=ids)
    compared(spoiled(clean, ids, "query", "key", "value", "g"), {}, clean, chunk=16, splits=2)
    clean = gla(rng, 1, 77, 2, 2, 8, 4, -1.0, initial_state=state, segment_ids=ids)
    given = spoiled(clean, ids, "query", "key", "value", "gk")
    op = OPS["linear_attention"]
    wanted, gradients, d = value_and_gradients(functools.partial(op, platform="xla"), clean)
    with interpret():
        run = functools.partial(op, platform="triton", cfg=ChunkConfig(chunk=16, splits=2))
        got, found, _ = value_and_gradients(run, given, d)
    for what, a, b in [*zip(op.outputs, got, wanted), *((n, found[n], gradients[n]) for n in gradients)]:
        assert error(a, b) <= 3e-6, what


@pytest.mark.slow  # packed sequences in the same blocks are quick in test_delta_triton.py
@pytest.mark.parametrize("name", ["linear_attention", "delta_rule"])
def test_packed_sequences_with_states(name):
    rng = np.random.default_rng(6)
    ids = np.sort(rng.choice([0, 1, 3, 4], (1, 90)), axis=1).astype(np.int32)  # sequence 2 is empty
    ids[0, :4] = ids[0, 50:52] = ids[:, -5:] = -1
    state = rng.standard_normal((1, 5, 2, 8, 4)).astype(np.float32)
    if name == "linear_attention":
        arguments = gla(rng, 1, 90, 2, 2, 8, 4, initial_state=state, segment_ids=ids)
        against_xla(name, arguments | {"num_states": 5}, chunk=16, splits=2)
        return
    clean = kda(rng, 1, 90, 1, 2, 8, 4, initial_state=state, segment_ids=ids)
    compared(spoiled(clean, ids, "query", "key", "value", "g"), {"num_states": 5}, clean, chunk=16)


@triton.jit
def _first_level_kernel(a_ptr, o_ptr, REACH: tl.constexpr):
    at = tl.arange(0, 64)[:, None] * 8 + tl.arange(0, 8)[None, :]
    a = tl.load(a_ptr + at)
    tl.store(o_ptr, first_level(a, tl.sum(a, 0), REACH, 6, 64, 8))


# The sums of one token that force each choice: blocks of 64, 32 and 16 tokens, and levels alone.
FIRST = {6: (1,), 5: (1, 40), 4: (1, 20), 0: (1, 2)}


@pytest.mark.parametrize(
    ("name", "first", "strong"),
    [
        pytest.param(name, *level, id=f"{name}-from level {level[0]}", marks=() if quick else pytest.mark.slow)
        for name in ("linear_attention", "delta_rule")
        for level in FIRST.items()
        for quick in [(name, level[0]) in (("linear_attention", 0), ("delta_rule", 4))]
    ],
)
def test_each_program_takes_the_largest_blocks_that_its_sums_allow(name, first, strong):
    """And its results are those of the levels, which hold for every decay, in the digits of bfloat16."""
    rng, op = np.random.default_rng(7), OPS[name]
    a = np.full((64, 8), -0.01)
    a[list(strong), 3] = -0.6 * REACH if first else -REACH
    with interpret():
        (found,) = triton_launch(
            _first_level_kernel,
            jnp.asarray(a, jnp.float32),
            out_shape=(jax.ShapeDtypeStruct((1,), jnp.int32),),
            grid=(1,),
            REACH=REACH,
        )
        assert int(found[0]) == first
    a = np.maximum(np.broadcast_to(a[None, :, None], (1, 64, 1, 8)), -60.0)
    if name == "delta_rule":
        arguments = kda(rng, 1, 64, 1, 1, 8, 16, 0.0, 0.3) | {"g": jnp.asarray(a, jnp.float32)}
    else:
        arguments = gla(rng, 1, 64, 1, 1, 8, 16) | {"gk": jnp.asarray(a, jnp.float32)}
        del arguments["g"]
    rounded = {n: y.astype(jnp.bfloat16) if n in ("query", "key", "value") else y for n, y in arguments.items()}
    exact = {n: y.astype(jnp.float32) for n, y in rounded.items()}
    wanted, gradients, d = value_and_gradients(functools.partial(op, platform="xla"), exact)
    with interpret():
        got, got_gradients, _ = value_and_gradients(
            functools.partial(op, platform="triton", cfg=ChunkConfig(chunk=64)), rounded, d
        )
    for what, a, b in [*zip(op.outputs, got, wanted), *((n, got_gradients[n], gradients[n]) for n in gradients)]:
        assert error(a, b) <= 1e-2, (what, error(a, b))


@pytest.mark.slow  # many chunks, interpreted
def test_a_result_that_depends_on_a_token_far_back():
    T = 16384 + 40
    rng = np.random.default_rng(8)
    x = {n: np.zeros((1, T, 1, 16), np.float32) for n in ("query", "key", "value")}
    x["key"][0, 3] = x["value"][0, 3] = rng.standard_normal((1, 16))
    x["query"][0, -1] = x["key"][0, 3]
    rates = np.linspace(1e-6, 3e-5, 16)
    x["gk"] = np.broadcast_to(-rates, (1, T, 1, 16)).astype(np.float32)
    rounded = {n: jnp.asarray(y, jnp.float32 if n == "gk" else jnp.bfloat16) for n, y in x.items()}
    with interpret():
        out, _ = OPS["linear_attention"](**rounded, platform="triton", cfg=ChunkConfig(chunk=128, splits=4))
    q, k, v = (np.asarray(rounded[n], np.float64)[0, at, 0] for n, at in (("query", -1), ("key", 3), ("value", 3)))
    wanted = 0.25 * np.sum(q * k * np.exp(-rates * (T - 1 - 3))) * v
    assert np.abs(wanted).max() > 0.05
    assert error(out[0, -1, 0], wanted) < 1e-2


def test_what_is_refused_says_why():
    rng = np.random.default_rng(9)
    arguments = gla(rng, 1, 4, 1, 1, 8, 4) | {"gv": channels(rng, 1, 4, 1, 4)}
    with interpret(), pytest.raises(kernels.Unsupported, match="triton_gpu: it does not support gv"):
        OPS["linear_attention"](**arguments, platform="triton")
