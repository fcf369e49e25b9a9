"""Pallas kernels of recurrences with one decay per head: decays of every size, documents, packed sequences, shared keys."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, value_and_gradients

import kernels
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.pallas_linear_calls import blocks_of
from kernels.framework.interpret import interpret

OPS = kernels.operations()
DECAYS = {"0": 0.0, "-20": -20.0, "-100": -100.0, "-inf": -np.inf}


def against_xla(name, arguments, clean=None, allowed=3e-6, **cfg):
    """Asserts that outputs and gradients through the interpreter are those of XLA given `clean` arguments, and finite."""
    op = OPS[name]
    wanted, gradients, d = value_and_gradients(lambda **a: op(**a, platform="xla"), clean or arguments)
    with interpret():
        run = functools.partial(op, platform="pallas", cfg=ChunkConfig(**cfg))
        got, found, _ = value_and_gradients(run, arguments, d)
    for what, a, b in [*zip(op.outputs, got, wanted), *((n, found[n], gradients[n]) for n in gradients)]:
        assert np.isfinite(np.asarray(b, np.float32)).all(), f"{what}: the reference is not finite"
        assert error(a, b) <= allowed, f"{what}: off by {error(a, b):.2e}"


def linear_attention_of(rng, B, T, N, K, H, Hv, decay=None, dtype=np.float32, **more):
    """Returns arguments of linear_attention; a third of the log decays are `decay`, the others mild."""
    g = -np.exp(rng.standard_normal((B, T, N)) - 3)
    if decay is not None:
        g = np.where(rng.random((B, T, N)) < 0.3, decay, g)
    shapes = {"query": (B, T, N, H), "key": (B, T, K, H), "value": (B, T, K, Hv)}
    arrays = {name: jnp.asarray(rng.standard_normal(shape).astype(dtype)) for name, shape in shapes.items()}
    return {**arrays, "g": jnp.asarray(g, jnp.float32), **{n: jnp.asarray(x) for n, x in more.items()}}


def documents(rng, B, T):
    """Returns ids of documents of many lengths, one of a single token, with padding in the middle and at the ends."""
    ids = np.cumsum(rng.random((B, T)) < 0.06, axis=1)
    ids[:, 40], ids[:, 41:45] = 77, 78
    ids[:, :2] = ids[:, -3:] = ids[:, 30:33] = -1
    return ids.astype(np.int32)


@pytest.mark.parametrize("decay", [pytest.param(d, marks=pytest.mark.slow) for d in DECAYS.values()], ids=DECAYS)
def test_decays_of_every_size(decay):
    rng = np.random.default_rng(0)
    state = rng.standard_normal((1, 1, 2, 8, 20)).astype(np.float32)
    against_xla("linear_attention", linear_attention_of(rng, 1, 150, 2, 1, 8, 20, decay, initial_state=state))


@pytest.mark.slow
def test_chunks_of_256_tokens():
    rng = np.random.default_rng(8)
    state = rng.standard_normal((1, 1, 2, 8, 128)).astype(np.float32)
    arguments = linear_attention_of(rng, 1, 600, 2, 1, 8, 128, -100.0, initial_state=state)
    against_xla("linear_attention", arguments, chunk=256)


# Channels of 128 lie after the tokens, others before them.
@pytest.mark.slow  # packed sequences are quick in test_ops.py
@pytest.mark.parametrize("H", [128, 8])
def test_documents_and_what_padding_holds(H):
    rng = np.random.default_rng(1)
    ids, state = documents(rng, 1, 150), rng.standard_normal((1, 1, 2, H, 4)).astype(np.float32)
    clean = linear_attention_of(rng, 1, 150, 2, 2, H, 4, -1.0, initial_state=state, segment_ids=ids)
    padded, arguments = jnp.asarray(ids < 0)[..., None, None], dict(clean)
    for name in ("query", "key", "value"):
        arguments[name] = jnp.where(padded, jnp.nan, arguments[name])
    against_xla("linear_attention", arguments, clean)


@pytest.mark.slow
def test_packed_sequences_with_states():
    rng = np.random.default_rng(2)
    ids = np.sort(rng.choice([0, 1, 3, 4], (2, 301)), axis=1).astype(np.int32)  # sequence 2 is empty
    ids[0, :4] = ids[0, 50:52] = ids[:, -5:] = -1
    ids[1] = np.where(ids[1] < 0, -1, 4 - ids[1])  # in another order
    state = rng.standard_normal((2, 5, 2, 8, 4)).astype(np.float32)
    arguments = linear_attention_of(rng, 2, 301, 2, 2, 8, 4, initial_state=state, segment_ids=ids)
    against_xla("linear_attention", arguments | {"num_states": 5})


@pytest.mark.slow
def test_a_row_without_a_valid_token_returns_its_states():
    rng = np.random.default_rng(3)
    ids, state = np.full((1, 20), -1, np.int32), rng.standard_normal((1, 3, 1, 8, 4)).astype(np.float32)
    arguments = linear_attention_of(rng, 1, 20, 1, 1, 8, 4, initial_state=state, segment_ids=ids)
    against_xla("linear_attention", arguments | {"num_states": 3})


# Heads, of queries and keys, and their widths. 16 of 2 keys are two programs, each of which loads its key by an index; 6 of 3,
# and one of one, are single ones.
SHARED = ((16, 2, 128, 128), (16, 2, 4, 128), (16, 1, 4, 4), (6, 3, 128, 128), (1, 1, 128, 128), (8, 8, 128, 256))


@pytest.mark.parametrize(
    ("N", "K", "H", "Hv", "dtype"),
    [
        (16, 2, 128, 4, "bfloat16"),
        *(pytest.param(*x, dtype, marks=pytest.mark.slow) for x in SHARED for dtype in ("float32", "bfloat16")),
    ],
)
def test_heads_that_share_keys(N, K, H, Hv, dtype):
    rng = np.random.default_rng(4)
    state = rng.standard_normal((1, 1, N, H, Hv)).astype(np.float32)
    arguments = linear_attention_of(rng, 1, 140, N, K, H, Hv, -1.0, jnp.dtype(dtype), initial_state=state)
    against_xla("linear_attention", arguments, allowed={"float32": 3e-6, "bfloat16": 1.6e-2}[dtype])


@pytest.mark.slow
@pytest.mark.parametrize(("N", "K"), [(16, 2), (6, 2), (16, 1)])
def test_gradients_of_what_heads_share_are_summed(N, K):
    op = OPS["state_space_v2"]
    case = next(c for c in op.cases if c.name == "documents")
    sizes = {"B": 1, "T": 140, "N": N, "K": K, "H": 8, "Hv": 4, "G": 1}
    arguments = op.case_inputs(type(case)(case.name, sizes, case.options, case.arrays, case.make))
    # The gradient of A is a sum over tokens of both signs.
    against_xla("state_space_v2", arguments, allowed=6e-6)


@pytest.mark.slow  # many chunks, interpreted
def test_a_result_that_depends_on_a_token_far_back():
    T, rng = 16384 + 40, np.random.default_rng(5)
    x = {n: np.zeros((1, T, 1, 16), np.float32) for n in ("query", "key", "value")}
    for n in ("key", "value"):
        x[n][0, 3] = rng.standard_normal((1, 16))
    x["query"][0, -2:] = rng.standard_normal((2, 1, 16))
    x["g"] = np.full((1, T, 1), -1e-5, np.float32)
    with interpret():
        got = OPS["linear_attention"](
            **{n: jnp.asarray(y) for n, y in x.items()}, platform="pallas", cfg=ChunkConfig(256)
        )
    k, v, q = (np.asarray(x[n][0, at, 0], np.float64) for n, at in (("key", 3), ("value", 3), ("query", -1)))
    wanted = 0.25 * (q @ k) * v * np.exp(-1e-5 * (T - 1 - 3))
    assert np.abs(wanted).max() > 0.05
    assert error(got[0][0, -1, 0], wanted) < 1e-5


def test_heads_are_dealt_in_whole_sublanes_or_all():
    assert blocks_of(16, 16) == (8, 1, 8)
    assert blocks_of(32, 8) == (32, 1, 8)
    assert blocks_of(64, 1) == (8, 8, 1)
    assert blocks_of(128, 8) == (8, 16, 8)
    assert blocks_of(12, 4) == (12, 1, 4)


def test_what_the_kernels_cannot_do_is_refused_by_name():
    rng = np.random.default_rng(7)
    arguments = linear_attention_of(rng, 1, 4, 1, 1, 8, 4)
    mixed = {**arguments, "value": arguments["value"].astype(jnp.bfloat16)}
    many = linear_attention_of(rng, 1, 4, 36, 36, 8, 4)
    wide = linear_attention_of(rng, 1, 4, 8, 8, 512, 512)
    for call, words in (
        (mixed, "dtypes bfloat16, float32"),
        (many, "N = 36 heads make blocks of 36"),
        (wide, "MiB of VMEM"),
    ):
        with interpret(), pytest.raises(kernels.Unsupported, match=words):
            OPS["linear_attention"](**call, platform="pallas")
    with (
        interpret(),
        pytest.raises(ValueError, match="chunk = 64, but the chunks of the Pallas kernels have 128 or 256"),
    ):
        OPS["linear_attention"](**arguments, platform="pallas", cfg=ChunkConfig(64))
