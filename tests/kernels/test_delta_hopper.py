"""Hopper's kernels of the gradients of a delta rule's chunks: interpreted, against the reference and the kernels in Triton."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, value_and_gradients
from hopper import interpreted
from test_delta_triton import arguments_of, spoiled

from kernels.engines.scan import gluon_delta_calls
from kernels.engines.scan import triton_channel_calls as channels
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.delta_tokens import Tokens
from kernels.framework.interpret import interpret
from kernels.ops.delta_rule import op
from kernels.toolchains.simulate.ahead_of_time import call_of, export_cuda
from kernels.toolchains.triton import SHARED_MEMORY

TILES = ChunkConfig(chunk=64, block_v=64, num_warps=4, num_stages=1, splits=1, heads=2, backward_num_warps=8)
PADDED = ("query", "key", "value")
IN_TRITON = {"channel_pairs_kernel", "channel_states_kernel", "channel_written_kernel", "channel_gradients_kernel"}


def drawn(B, T, K, N, dtype, ids, decay, states=1):
    """Returns arguments in a dtype; decays, rates and states stay in float32."""
    rng = np.random.default_rng(3)
    more = {"initial_state": rng.standard_normal((B, states, N, 128, 128)).astype(np.float32)}
    more |= {} if ids is None else {"segment_ids": ids}
    x = arguments_of(rng, B, T, K, N, 128, 128, 0.5, 1.5, decay, **more)
    return x | {name: x[name].astype(dtype) for name in PADDED}


def decays_of_channels(arguments):
    """Returns the arguments with a decay for each channel, some of them strong, and as many heads of keys as of values."""
    rng, (B, T, N, _) = np.random.default_rng(4), arguments["value"].shape
    g = np.where(rng.random((B, T, N, 128)) < 0.01, -20.0, -np.exp(rng.standard_normal((B, T, N, 128)) - 4))
    return arguments | {"g": jnp.asarray(g.astype(np.float32))}


def gradients_of(arguments, d, in_one, **options):
    cfg = replace(TILES, in_one=in_one, keeps=True)
    return value_and_gradients(functools.partial(op, platform="triton", cfg=cfg, **options), arguments, d)[1]


@pytest.mark.parametrize(
    ("dtype", "documents", "gate", "heads"),
    [
        ("bfloat16", True, "head", (2, 4)),
        ("bfloat16", True, "channel", (1, 2)),
        pytest.param("float16", False, None, (1, 2), marks=pytest.mark.slow),
        pytest.param("bfloat16", False, "head", (1, 3), marks=pytest.mark.slow),
        pytest.param("float16", False, "channel", (3, 3), marks=pytest.mark.slow),
    ],
)
def test_all_gradients_are_those_of_three_kernels(monkeypatch, dtype, documents, gate, heads):
    """Decays of -inf or mild ones, keys that heads share, states in and out, and NaN in padding at both ends and inside."""
    T = 192
    ids = np.repeat([[-1, 0, 1, -1, 2, -1]], [5, 30, 40, 4, 104, 9], axis=1).astype(np.int32) if documents else None
    clean = drawn(1, T, *heads, dtype, ids, -np.inf if documents else None)  # mild decays leave something of a state
    if gate is None:
        del clean["g"]
    elif gate == "channel":
        clean = decays_of_channels(clean)
    wide = {n: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for n, x in clean.items()}
    wanted, d = value_and_gradients(functools.partial(op, platform="xla"), wide)[1:]
    arguments = clean if ids is None else spoiled(clean, ids, *PADDED)
    if documents:
        d = (jnp.where(jnp.asarray(ids < 0)[..., None, None], jnp.nan, d[0]), *d[1:])
    # Of decays of channels these are the products with states: pairs, and what decays do to gradients, are tested below.
    in_triton = channels.Chunks.gradients
    monkeypatch.setattr(channels.Chunks, "gradients", lambda self, *args: in_triton(self, *args[:5]))
    monkeypatch.setattr(gluon_delta_calls, "channel_pairs", channels.Chunks.pairs)
    with interpreted(monkeypatch, op, gluon_delta_calls):
        monkeypatch.setattr(gluon_delta_calls, "MULTIPROCESSORS", 1)  # which has more chunks than slots for their keys
        three, one = (gradients_of(arguments, d, in_one) for in_one in (False, True))
    for name in wanted:
        assert error(one[name], wanted[name]) <= min(1e-2, 1.1 * error(three[name], wanted[name])), name
        assert error(one[name], three[name]) <= 2e-4, name


def decays_of_every_step(arguments):
    """Returns the arguments with decays for which chunks of 64 tokens have blocks of 64, 32 and 16 tokens, and none."""
    rng, (B, T, N, _) = np.random.default_rng(4), arguments["value"].shape
    mild, strong = (-np.exp(rng.uniform(np.log(1e-4), np.log(most), (B, T, N, 128))) for most in (1, 20))
    some = rng.choice([0.0, -20.0, -100.0, -np.inf, -1e-3], mild.shape, p=[0.3, 0.1, 0.02, 0.01, 0.57])
    of_chunks = np.repeat(np.arange(T // 64) % 4, 64)[:, None, None]
    g = np.select([of_chunks == 0, of_chunks == 1, of_chunks == 2], [mild, strong, 2 * strong], some)
    return arguments | {"g": jnp.asarray(g.astype(np.float32))}


@pytest.mark.parametrize(
    ("dtype", "documents", "heads", "cosine"),
    [
        ("bfloat16", True, (1, 2), 0.5),
        pytest.param("bfloat16", False, (2, 2), 0.99, marks=pytest.mark.slow),
        pytest.param("float16", True, (2, 2), 0.9, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_decays_of_channels(monkeypatch, dtype, documents, heads, cosine):
    """Blocks of every size and levels alone, decays of 0 and of -inf, keys that heads share or that are alike, documents, and
    NaN in padding. A scale that is a power of 2 is rounded nowhere: then gradients of queries are those in Triton, up to sums.
    Those of keys and decays have rates at other factors, and differ less from Triton's than these from the reference."""
    T, scale = 256, {"softmax_scale": 1 / 16}
    ids = np.repeat([[-1, 0, 1, -1, 2, -1]], [5, 30, 40, 4, 168, 9], axis=1).astype(np.int32) if documents else None
    clean = decays_of_every_step(drawn(1, T, *heads, dtype, ids, None))
    keys_alike = arguments_of(np.random.default_rng(5), 1, T, *heads, 128, 128, cosine)["key"].astype(dtype)
    clean |= {"key": keys_alike}
    wide = {n: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for n, x in clean.items()}
    wanted, d = value_and_gradients(functools.partial(op, platform="xla", **scale), wide)[1:]
    arguments = clean if ids is None else spoiled(clean, ids, *PADDED)
    monkeypatch.setattr(gluon_delta_calls, "channel_pairs", channels.Chunks.pairs)
    with interpreted(monkeypatch, op, gluon_delta_calls):
        monkeypatch.setattr(gluon_delta_calls, "MULTIPROCESSORS", 1)  # so that programs have several items
        several, one = (gradients_of(arguments, d, in_one, **scale) for in_one in (False, True))
    for name in wanted:
        off = error(several[name], wanted[name])
        assert error(one[name], wanted[name]) <= 1.1 * off, name
        alike = name in ("query", "value", "initial_state")
        assert error(one[name], several[name]) <= (0.1 if alike else 0.6) * off, name


@pytest.mark.parametrize(
    ("dtype", "documents", "heads"),
    [("bfloat16", True, (1, 2)), pytest.param("float16", False, (2, 2), marks=pytest.mark.slow)],
)
def test_pairs_of_decays_of_channels(monkeypatch, dtype, documents, heads):
    """Factors are rounded as in Triton, and sums are in another order: a few of the results are rounded to the next number."""
    T = 256
    ids = np.repeat([[-1, 0, 1, -1, 2, -1]], [5, 30, 40, 4, 168, 9], axis=1).astype(np.int32) if documents else None
    x = decays_of_every_step(drawn(1, T, *heads, dtype, ids, None))
    if documents:
        x = spoiled(x, ids, *PADDED)
    monkeypatch.setattr(gluon_delta_calls, "MULTIPROCESSORS", 1)  # so that programs have several items
    with interpret(90):
        segments = None if ids is None else jnp.asarray(ids)
        tokens = Tokens(x["query"], x["key"], x["value"], x["beta"], x["g"], segments, None)
        run = channels.DeltaLaunches(tokens, 1, 0.1, TILES, None)
        sums, first = run.decay_tokens()
        assert set(np.unique(first)) >= ({0, 5, 6} if dtype == "bfloat16" else {0})
        wanted, found = (
            pairs(run.decays_of, sums, first) for pairs in (channels.Chunks.pairs, gluon_delta_calls.channel_pairs)
        )
        for a, b in zip(found, wanted, strict=True):
            assert error(a, b) <= (5e-4 if dtype == "bfloat16" else 1e-4)


@pytest.mark.parametrize(
    ("changed", "there"),
    [
        ({}, True),
        ({"T": 96}, True),
        ({"T": 96, "channels": 128}, False),
        ({"Hv": 64}, False),
        ({"dtype": "float32"}, False),
        ({"channels": 128}, True),
        ({"chunk": 32}, False),
        ({"states": 2}, True),
        ({"states": 2, "channels": 128}, False),
        ({"capability": 80}, False),
    ],
    ids=str,
)
def test_which_calls_it_has(changed, there):
    """Chunks of 64 tokens, heads of 128 channels, 16 bits, on Hopper; with decays of channels whole chunks, and one state."""
    how = {
        "T": 128,
        "Hv": 128,
        "dtype": "bfloat16",
        "channels": None,
        "chunk": 64,
        "states": 1,
        "capability": 90,
    } | changed
    T, dtype = how["T"], how["dtype"]
    q, v = (jax.ShapeDtypeStruct((1, T, 1, width), dtype) for width in (128, how["Hv"]))
    a = jax.ShapeDtypeStruct((1, T, 1) if how["channels"] is None else (1, T, 1, how["channels"]), "float32")
    with interpret(how["capability"]):
        assert gluon_delta_calls.fits(Tokens(q, q, v, None, a, None, None), how["chunk"], how["states"]) == there


@pytest.mark.parametrize(("scale", "there"), [(1 / 16, True), (0.0, False), (-1.0, False), (1e-4, False), (1e4, False)])
def test_which_scales_kernels_of_channels_have(scale, there):
    q, a = (jax.ShapeDtypeStruct((1, 128, 1, 128), dtype) for dtype in ("bfloat16", "float32"))
    with interpret(90):
        tokens = Tokens(q, q, q, jnp.ones((1, 128, 1)), a, None, None)
        assert channels.DeltaLaunches(tokens, 1, scale, replace(TILES, in_one=True), None).in_one == there


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_chunks_of_fewer_tokens(monkeypatch, packed):
    """Packed sequences with states, of which one is empty, and two rows that end within a chunk: tokens past it are others'."""
    rng, T = np.random.default_rng(5), 100
    ids, states = None, 1
    if packed:
        ids, states = np.repeat([[-1, 0, 3, -1, 1, -1]], [5, 30, 20, 4, 34, 7], axis=1).astype(np.int32), 4
        ids = np.concatenate([ids, np.sort(rng.choice([0, 2, 3], (1, T)), axis=1).astype(np.int32)])
    clean, options = drawn(2, T, 1, 2, "bfloat16", ids, -20.0, states), {"num_states": states}
    wide = {n: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for n, x in clean.items()}
    wanted, d = value_and_gradients(functools.partial(op, platform="xla", **options), wide)[1:]
    arguments = clean if ids is None else spoiled(clean, ids, *PADDED)
    with interpreted(monkeypatch, op, gluon_delta_calls):
        three, one = (gradients_of(arguments, d, in_one, **options) for in_one in (False, True))
    for name in wanted:
        assert error(one[name], wanted[name]) <= min(1e-2, 1.1 * error(three[name], wanted[name])), name
        assert error(one[name], three[name]) <= 2e-4, name


@pytest.mark.slow
def test_two_programs_of_gradients_of_channels_fit_a_multiprocessor():
    """At the width of Kimi Linear: what is spilled are addresses and rows, outside products."""
    case = next(c for c in op.cases if c.name == "kimi_linear")
    tiles = replace(TILES, block_v=32, num_stages=2, in_one=True, keeps=True)
    report = export_cuda(*call_of(op, case, platform="triton", cfg=tiles)).kernels
    assert not IN_TRITON & {k.name for k in report}
    (kernel,) = (k for k in report if k.name == "channel_gradients_hopper_kernel")
    assert not kernel.resources["serialized"]
    assert kernel.resources["spill_stores"] <= 492, kernel.resources
    assert 2 * (kernel.shared_memory_bytes + 1024) <= SHARED_MEMORY[90] + 1024
    for pairs in (k for k in report if k.name == "channel_pairs_hopper_kernel"):
        assert not pairs.resources["serialized"]
        assert not pairs.resources["spill_stores"], pairs.resources


@pytest.mark.slow
def test_it_fits_a_multiprocessor():
    """At the width of Qwen3-Next: no product waits for the one before; what is spilled are addresses, around the inner loop."""
    case = next(c for c in op.cases if c.name == "qwen3_next")
    call, shapes = call_of(op, case, platform="triton", cfg=replace(TILES, block_v=32, in_one=True, keeps=True))
    report = export_cuda(call, shapes).kernels
    names = [kernel.name for kernel in report]
    assert not {"scalar_dq_kernel", "scalar_dk_kernel", "delta_bwd_kernel"} & set(names), names
    (kernel,) = (k for k in report if k.name == "delta_gradients_kernel")
    assert not kernel.resources["serialized"]
    assert kernel.resources["spill_stores"] <= 164, kernel.resources
    assert kernel.shared_memory_bytes <= SHARED_MEMORY[90]
