"""Triton kernels of recurrences: rows that are split, decays of every size, long memory, sums over shared heads, offsets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from grid import error, value_and_gradients
from test_delta_triton import spoiled

import kernels
from kernels.engines.scan import triton_parts
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.layout import layout
from kernels.framework.interpret import interpret
from kernels.toolchains.triton import triton_launch

OPS = kernels.operations()
DECAYS = {"0": 0.0, "-20": -20.0, "-100": -100.0, "-inf": -np.inf}


def against_xla(name, arguments, clean=None, allowed=3e-6, **cfg):
    """Asserts that outputs and gradients through the interpreter are those of XLA given `clean` arguments, and finite."""
    op = OPS[name]
    wanted, gradients, d = value_and_gradients(lambda **a: op(**a, platform="xla"), clean or arguments)
    with interpret():
        run = functools.partial(op, platform="triton", cfg=ChunkConfig(**cfg))
        got, found, _ = value_and_gradients(run, arguments, d)
    for what, a, b in [*zip(op.outputs, got, wanted), *((n, found[n], gradients[n]) for n in gradients)]:
        assert np.isfinite(np.asarray(b)).all(), f"{what}: the reference is not finite"
        assert error(a, b) <= allowed, f"{what}: off by {error(a, b):.2e}"


def linear_attention_of(rng, B, T, N, K, H, Hv, decay=None, **more):
    """Returns arguments of linear_attention; a third of the log decays are `decay`, the others mild."""
    g = -np.exp(rng.standard_normal((B, T, N)) - 3)
    if decay is not None:
        g = np.where(rng.random((B, T, N)) < 0.3, decay, g)
    shapes = {"query": (B, T, N, H), "key": (B, T, K, H), "value": (B, T, K, Hv)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return {n: jnp.asarray(x) for n, x in {**arrays, "g": g.astype(np.float32), **more}.items()}


def documents(rng, B, T):
    """Returns ids of documents of many lengths, one of a single token, with padding in the middle and at the ends."""
    ids = np.cumsum(rng.random((B, T)) < 0.06, axis=1)
    ids[:, 40], ids[:, 41:45] = 77, 78
    ids[:, :2] = ids[:, -3:] = ids[:, 30:33] = -1
    return ids.astype(np.int32)


@pytest.mark.slow  # packed sequences are split, and chunks of XLA have every decay
@pytest.mark.parametrize("decay", DECAYS.values(), ids=DECAYS)
def test_rows_that_are_split_have_the_same_numbers_at_decays_of_every_size(decay):
    rng = np.random.default_rng(0)
    state = rng.standard_normal((1, 1, 2, 8, 20)).astype(np.float32)
    arguments = linear_attention_of(rng, 1, 150, 2, 1, 8, 20, decay, initial_state=state)
    against_xla("linear_attention", arguments, chunk=16, splits=3, block_v=16)


@pytest.mark.slow  # packed sequences that are split have padding with NaN too
def test_documents_and_padding_in_split_rows():
    rng = np.random.default_rng(1)
    ids, state = documents(rng, 2, 117), rng.standard_normal((2, 1, 2, 8, 4)).astype(np.float32)
    clean = linear_attention_of(rng, 2, 117, 2, 2, 8, 4, -1.0, initial_state=state, segment_ids=ids)
    against_xla("linear_attention", spoiled(clean, ids, "query", "key", "value"), clean, chunk=16, splits=2)


@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_packed_sequences_with_states(splits):
    rng = np.random.default_rng(2)
    ids = np.sort(rng.choice([0, 1, 3, 4], (2, 70)), axis=1).astype(np.int32)  # sequence 2 is empty
    ids[0, :4] = ids[0, 50:52] = ids[:, -5:] = -1
    ids[1] = np.where(ids[1] < 0, -1, 4 - ids[1])  # in another order
    state = rng.standard_normal((2, 5, 2, 8, 4)).astype(np.float32)
    clean = linear_attention_of(rng, 2, 70, 2, 2, 8, 4, initial_state=state, segment_ids=ids) | {"num_states": 5}
    against_xla("linear_attention", spoiled(clean, ids, "query", "key", "value"), clean, chunk=16, splits=splits)


@pytest.mark.slow  # a packed sequence without a token is quick
def test_a_row_without_a_valid_token_returns_its_states():
    rng = np.random.default_rng(3)
    ids = np.full((1, 20), -1, np.int32)
    state = rng.standard_normal((1, 3, 1, 8, 4)).astype(np.float32)
    arguments = linear_attention_of(rng, 1, 20, 1, 1, 8, 4, initial_state=state, segment_ids=ids)
    against_xla("linear_attention", arguments | {"num_states": 3}, chunk=16)


@pytest.mark.slow  # cases of the operation share heads
@pytest.mark.parametrize("heads", [1, 4])
def test_gradients_of_what_heads_share_are_summed(heads):
    op, rng = OPS["state_space_v2"], np.random.default_rng(4)
    sizes = {"B": 1, "T": 70, "N": 8, "K": 2, "H": 8, "Hv": 4, "G": 1}
    case = next(c for c in op.cases if c.name == "documents")
    case = type(case)(case.name, sizes, case.options, case.arrays, case.make)
    arguments = op.case_inputs(case)
    arguments["segment_ids"] = jnp.asarray(documents(rng, 1, 70))
    against_xla("state_space_v2", arguments, chunk=16, splits=2, heads=heads)


@pytest.mark.slow  # many chunks, interpreted
def test_a_result_that_depends_on_a_token_far_back():
    T = 16384 + 40
    rng = np.random.default_rng(5)
    x = {n: np.zeros((1, T, 1, 16), np.float32) for n in ("query", "key", "value")}
    for n in ("key", "value"):
        x[n][0, 3] = rng.standard_normal((1, 16))
    x["query"][0, -2:] = rng.standard_normal((2, 1, 16))
    x["g"] = np.full((1, T, 1), -1e-5, np.float32)
    x = {n: jnp.asarray(y) for n, y in x.items()}
    op = OPS["linear_attention"]
    with interpret():
        got = op(**x, platform="triton", cfg=ChunkConfig(chunk=128, splits=4))
    k, v, q = (np.asarray(x[n], np.float64)[0, at, 0] for n, at in (("key", 3), ("value", 3), ("query", -1)))
    wanted = 0.25 * (q @ k) * v * np.exp(-1e-5 * (T - 1 - 3))
    assert np.abs(wanted).max() > 0.05
    assert error(got[0][0, -1, 0], wanted) < 1e-5


@pytest.mark.slow  # packed sequences need it
def test_chunks_of_packed_rows_cover_every_token_once():
    ids = jnp.asarray([[-1, -1, 2, 2, 2, 2, 2, -1, 0, 0, -1, -1], [-1] * 12], jnp.int32)
    found = layout(2, 12, 4, ids, 3)
    assert found.chunks == 5
    for table in np.asarray(found.table):
        tokens = [t for first, count, _, _ in table for t in range(first, first + count)]
        assert tokens == list(range(12))
    first, second = np.asarray(found.table)
    assert first[:, 2].tolist()[:3] == [2, 2, 0]
    assert first[:, 3].tolist() == [1, 2, 3, 0, 0]
    assert second[:, 3].tolist() == [1, 0, 2, 0, 0]  # all padding is of a sequence without tokens
    assert np.asarray(found.empty)[0].tolist() == [False, True, False]


@triton.jit
def _offsets_kernel(x_ptr, o_ptr, T: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PART: tl.constexpr):
    row, lane, zero = tl.program_id(0) + 1, tl.arange(0, 16), x_ptr.to(tl.int64)
    first, head = row * T - 1, row * K - 1
    tokens = triton_parts.tokens_by_channels(x_ptr, row, first, head, T, K, D).to(tl.int64) - zero
    square = tl.max(triton_parts.square_at(x_ptr, row * T, 128).to(tl.int64)) - zero
    state = tl.max(triton_parts._state_at(x_ptr, row * T, lane, lane, D, D).to(tl.int64)) - zero
    tl.store(o_ptr + 0, tokens // PART)
    tl.store(o_ptr + 1, square // PART)
    tl.store(o_ptr + 2, state // PART)


def test_offsets_of_long_rows_do_not_overflow():
    T, K, D, part = 262144, 128, 128, 4096
    with interpret():
        (got,) = triton_launch(
            _offsets_kernel,
            jnp.zeros(16, jnp.float32),
            out_shape=(jax.ShapeDtypeStruct((3,), jnp.int32),),
            grid=(1,),
            T=T,
            K=K,
            D=D,
            PART=part,
        )
    tokens = (T + T - 1) * K * D + (K - 1) * D
    square, state = T * 128 * 128 + 128 * 128 - 1, T * D * D + 15 * D + 15
    assert min(tokens, square, state) > 2**31
    assert got.tolist() == [4 * n // part for n in (tokens, square, state)]


def test_a_chunk_that_is_shorter_than_a_product_is_refused():
    rng = np.random.default_rng(6)
    arguments = linear_attention_of(rng, 1, 20, 1, 1, 8, 4)
    with (
        interpret(),
        pytest.raises(ValueError, match="chunk = 8, but the chunks of the Triton kernels have 16 to 128 tokens"),
    ):
        OPS["linear_attention"](**arguments, platform="triton", cfg=ChunkConfig(chunk=8))


def test_what_the_kernels_cannot_do_is_refused_by_name():
    rng = np.random.default_rng(7)
    wide = linear_attention_of(rng, 1, 4, 1, 1, 160, 4)
    mixed = linear_attention_of(rng, 1, 4, 1, 1, 8, 4)
    mixed["value"] = mixed["value"].astype(jnp.bfloat16)
    for arguments, words in ((wide, "H = 160 exceeds 128"), (mixed, "dtypes bfloat16, float32")):
        with interpret(), pytest.raises(kernels.Unsupported, match=words):
            OPS["linear_attention"](**arguments, platform="triton")
