"""Triton kernels of RWKV-7: reads of a state that differ from its writes, decays of every size, documents, long memory."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, value_and_gradients
from test_channel_triton import FIRST, channels
from test_delta_triton import keys, spoiled

import kernels
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.triton_channel_calls import REACH
from kernels.framework.interpret import interpret
from kernels.ops.delta_rule import rwkv7_op as op

ROUNDED = ("r", "k", "v", "a", "b")  # w stays in float32 where they are rounded


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def arguments_of(rng, B, T, N, H, Hv, cosine=0.5, decay=None, rate=1.0, **more):
    """Returns arguments as a model has them: a = -kk, b = kk times rates of up to `rate`, any two kk at about this cosine."""
    kk = keys(rng, cosine, B, T, N, H)
    x = {"r": keys(rng, 0.0, B, T, N, H), "w": channels(rng, B, T, N, H, decay=decay), "k": keys(rng, 0.0, B, T, N, H)}
    x |= {"v": rng.standard_normal((B, T, N, Hv)), "a": -kk, "b": kk * rng.uniform(0.8 * rate, rate, kk.shape)}
    return {n: jnp.asarray(y, jnp.float32) for n, y in x.items()} | {n: jnp.asarray(y) for n, y in more.items()}


def compared(arguments, clean=None, allowed=3e-6, options=None, platform="triton", **cfg):
    """Asserts that outputs and gradients through the interpreter are those of the XLA backend in float32, and finite.

    Args:
      clean: the arguments for XLA, where they differ.
    """
    options = options or {}
    wide = {n: y.astype(jnp.float32) if n in ROUNDED else y for n, y in (clean or arguments).items()}
    reference = functools.partial(op, **options, platform="xla", cfg=ChunkConfig(chunk=16))
    wanted, gradients, d = value_and_gradients(reference, wide)
    with interpret():
        run = functools.partial(op, **options, platform=platform, cfg=ChunkConfig(**cfg) if cfg else None)
        got, found, _ = value_and_gradients(run, arguments, d)
    for what, x, y in [*zip(op.outputs, got, wanted), *((n, found[n], gradients[n]) for n in gradients)]:
        assert np.isfinite(np.asarray(y)).all(), f"{what}: the reference is not finite"
        assert error(x, y) <= allowed, f"{what}: off by {error(x, y):.2e}, allowed {allowed:.2e}"


def far_back(**how):
    """Asserts that the last of 16,000 tokens reads, in bfloat16, what the fourth wrote."""
    T = 16384 + 40
    rng = np.random.default_rng(9)
    x = {n: np.zeros((1, T, 1, 16), np.float32) for n in ("r", "k", "v", "a", "b")}
    x["a"][0, :, 0, 8], x["b"][0, :, 0, 8] = -1.0, 0.5  # another direction than that of the token that is remembered
    x["k"][0, 3], x["v"][0, 3] = np.eye(16)[2], rng.standard_normal(16)
    x["r"][0, -1, 0, 2] = 1.0
    x["w"] = np.full((1, T, 1, 16), -1e-5, np.float32)
    with interpret():
        arguments = {n: jnp.asarray(y, jnp.float32 if n == "w" else jnp.bfloat16) for n, y in x.items()}
        out, _ = op(**arguments, **how)
    wanted = 0.25 * np.asarray(arguments["v"][0, 3, 0], np.float64) * np.exp(-1e-5 * (T - 1 - 3))
    assert np.abs(wanted).max() > 0.05
    assert error(out[0, -1, 0], wanted) < 1e-2


@pytest.mark.parametrize("decay", [slow(0.0), slow(-20.0), slow(-100.0), slow(-np.inf)])
def test_decays_of_every_size(decay):
    rng = np.random.default_rng(0)
    state = rng.standard_normal((1, 1, 2, 8, 20)).astype(np.float32)
    arguments = arguments_of(rng, 1, 40, 2, 8, 20, decay=decay, initial_state=state)
    compared(arguments, options={"softmax_scale": 0.7}, chunk=16, block_v=16)


@pytest.mark.parametrize(("cosine", "rate"), [slow(0.9, 1.0), slow(0.9, 2.0), slow(0.99, 2.0)])
def test_correlated_reads_and_reflections(cosine, rate):
    """The inverses of a chunk of 64 tokens are then far from the identity, and a series for them diverges."""
    rng = np.random.default_rng(1)
    compared(arguments_of(rng, 1, 70, 1, 16, 8, cosine, rate=rate), allowed=1e-5, chunk=64)


@pytest.mark.slow  # in the delta rule it is quick
def test_channels_of_several_blocks():
    rng = np.random.default_rng(2)
    compared(arguments_of(rng, 1, 20, 1, 72, 20, decay=-5.0), chunk=16, block_v=16)


@pytest.mark.parametrize("splits", [slow(1), slow(2)])
def test_documents_and_padding(splits):
    rng = np.random.default_rng(3)
    ids = np.cumsum(rng.random((1, 61)) < 0.08, axis=1).astype(np.int32)
    ids[:, :2] = ids[:, -3:] = ids[:, 30:33] = -1
    ids[:, 20], ids[:, 21:25] = 77, 78
    state = rng.standard_normal((1, 1, 2, 8, 4)).astype(np.float32)
    clean = arguments_of(rng, 1, 61, 2, 8, 4, initial_state=state, segment_ids=ids)
    compared(spoiled(clean, ids, *ROUNDED, "w"), clean, chunk=16, splits=splits)


@pytest.mark.slow  # packed sequences in the same blocks are quick in test_delta_triton.py
@pytest.mark.parametrize("splits", [1, 2])
def test_packed_sequences_with_states(splits):
    rng = np.random.default_rng(4)
    ids = np.sort(rng.choice([0, 1, 3, 4], (1, 60)), axis=1).astype(np.int32)  # sequence 2 is empty
    ids[0, :4] = ids[0, 30:32] = ids[:, -5:] = -1
    state = rng.standard_normal((1, 5, 2, 8, 4)).astype(np.float32)
    clean = arguments_of(rng, 1, 60, 2, 8, 4, initial_state=state, segment_ids=ids)
    compared(spoiled(clean, ids, *ROUNDED, "w"), clean, options={"num_states": 5}, chunk=16, splits=splits)


@pytest.mark.slow
@pytest.mark.parametrize(("decay", "Hv"), [(0.0, 18), (-100.0, 16)])
def test_rows_that_are_split(decay, Hv):
    """By the map of each part, a matrix, from the state that enters it to the state that leaves."""
    rng = np.random.default_rng(5)
    state = rng.standard_normal((1, 1, 2, 20, Hv)).astype(np.float32)
    compared(arguments_of(rng, 1, 100, 2, 20, Hv, decay=decay, initial_state=state), chunk=16, splits=3, block_v=16)


@pytest.mark.parametrize(("first", "strong"), [slow(6, (1,)), slow(5, (1, 40)), slow(4, (1, 20)), slow(0, (1, 2))])
def test_results_in_bfloat16_whichever_blocks_the_sums_allow(first, strong):
    """Blocks of 64, 32 and 16 tokens, and levels alone: each within the digits of bfloat16."""
    assert FIRST[first] == strong
    rng = np.random.default_rng(6)
    arguments = arguments_of(rng, 1, 64, 1, 8, 16, 0.0, rate=0.3)
    w = np.full((64, 8), -0.01)
    w[list(strong), 3] = -0.6 * REACH if first else -REACH
    arguments["w"] = jnp.asarray(np.maximum(np.broadcast_to(w[None, :, None], (1, 64, 1, 8)), -60.0), jnp.float32)
    rounded = {n: y.astype(jnp.bfloat16) if n in ROUNDED else y for n, y in arguments.items()}
    compared(rounded, allowed=1e-2, chunk=64)


@pytest.mark.slow
def test_strong_decays_in_bfloat16():
    """Of every token, from a state and to one, by levels: a token's own decay counts, and what is not a pair may overflow."""
    rng = np.random.default_rng(11)
    state = rng.standard_normal((1, 1, 1, 8, 16)).astype(np.float32)
    arguments = arguments_of(rng, 1, 40, 1, 8, 16, 0.0, rate=0.3, initial_state=state)
    w = np.where(rng.random((1, 40, 1, 8)) < 0.2, rng.choice([-20.0, -100.0, -np.inf], (1, 40, 1, 8)), -0.3)
    rounded = {n: y.astype(jnp.bfloat16) if n in ROUNDED else y for n, y in arguments.items()}
    compared(rounded | {"w": jnp.asarray(w, jnp.float32)}, allowed=1e-2, chunk=32)


def test_the_map_of_a_part_of_a_row():
    """One call from the state [0 | I] with values [v | 0] ends in what a rank does to a state that enters it."""
    rng = np.random.default_rng(8)
    x, state = arguments_of(rng, 1, 40, 1, 8, 4), rng.standard_normal((1, 1, 1, 8, 4)).astype(np.float32)
    wanted, final = op(**x, initial_state=state, platform="xla")
    start = jnp.concatenate([jnp.zeros((1, 1, 1, 8, 4)), jnp.eye(8)[None, None, None]], -1)
    with interpret():
        run = functools.partial(op, platform="triton", cfg=ChunkConfig(chunk=16))
        out, after = run(**x | {"v": jnp.pad(x["v"], ((0, 0), (0, 0), (0, 0), (0, 8)))}, initial_state=start)
    assert error(after[..., :4] + after[..., 4:] @ state, final) <= 3e-6
    assert error(out[..., :4] + jnp.einsum("btnh,bnhv->btnv", out[..., 4:], state[:, 0]), wanted) <= 3e-6


@pytest.mark.slow  # many chunks, interpreted
def test_a_result_that_depends_on_a_token_far_back():
    far_back(platform="triton", cfg=ChunkConfig(chunk=128, splits=4))


def test_what_the_kernels_cannot_do_is_refused_by_name():
    wide = arguments_of(np.random.default_rng(10), 1, 4, 1, 160, 4)
    with interpret(), pytest.raises(kernels.Unsupported, match="H = 160 exceeds 128"):
        op(**wide, platform="triton")
