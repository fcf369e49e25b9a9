"""The Triton kernels of the causal convolution: spans of every shape, documents, packed states, wide windows, offsets."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from grid import error, value_and_gradients

import ejdist
import kernels
from ejdist import make_mesh
from kernels.framework.interpret import interpret
from kernels.ops.state_space import conv_op, triton_conv, triton_conv_calls
from kernels.ops.state_space.contract import ConvConfig
from kernels.ops.state_space.conv_rows import NOTHING, rows
from kernels.toolchains.triton import triton_launch

# Several blocks of channels, of which the last is not full, and spans that end within a load of the last.
SMALL = ConvConfig(16, 4, 1, 16, 16, 2, 1, 8)
F = 20


def arguments_of(rng, B, T, W, state=1, **more):
    """Returns arguments with a bias; `state` is the number of initial states, 0 for none."""
    shapes = {"x": (B, T, F), "weight": (F, W), "bias": (F,)}
    shapes |= {"initial_state": (B, state, F, W - 1)} if state else {}
    arrays = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    return {n: jnp.asarray(x) for n, x in arrays.items()} | {"activation": "silu"} | more


def against_xla(arguments, cfg=SMALL, clean=None, allowed=2e-6):
    """Asserts that outputs and gradients through the interpreter are those of XLA given `clean` arguments."""
    wanted, gradients, d = value_and_gradients(functools.partial(conv_op, platform="xla"), clean or arguments)
    with interpret():
        run = functools.partial(conv_op, platform="triton", cfg=cfg)
        got, found, _ = value_and_gradients(run, arguments, d)
    for what, a, b in [*zip(conv_op.outputs, got, wanted), *((n, found[n], gradients[n]) for n in gradients)]:
        assert np.isfinite(np.asarray(b)).all(), what
        assert error(a, b) <= allowed, f"{what}: off by {error(a, b):.2e}"


@pytest.mark.parametrize(
    ("T", "W", "cfg"),
    [
        pytest.param(37, 4, SMALL, marks=pytest.mark.slow),
        pytest.param(32, 2, replace(SMALL, backward_tokens=8), marks=pytest.mark.slow),
        (9, 16, replace(SMALL, tokens=16, backward_span=2)),  # a window longer than a span, and than the row
    ],
)
def test_rows_of_many_spans(T, W, cfg):
    against_xla(arguments_of(np.random.default_rng(0), 2, T, W), cfg)


def test_no_bias_no_activation_no_state():
    arguments = arguments_of(np.random.default_rng(1), 1, 21, 3, state=0, activation=None)
    del arguments["bias"]
    against_xla(arguments)


@pytest.mark.slow  # so does that of packed sequences, below
@pytest.mark.parametrize("state", [1, 0])
def test_documents_whose_padding_holds_anything(state):
    rng = np.random.default_rng(2)
    ids = np.cumsum(rng.random((3, 27)) < 0.2, axis=1).astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1
    ids[0, :3] = ids[0, -5:] = -1
    ids[1], ids[2] = np.where(ids[1] < 0, -1, 5), -1  # one document, and padding alone
    clean = arguments_of(rng, 3, 27, 4, state, segment_ids=jnp.asarray(ids))
    x = jnp.where(jnp.asarray(ids)[..., None] < 0, jnp.nan, clean["x"])
    against_xla(clean | {"x": x}, clean=clean)


def test_one_token_of_a_document():
    """As in a step of a generation: a token that goes on from a state, and padding alone."""
    arguments = arguments_of(np.random.default_rng(5), 2, 1, 4, segment_ids=jnp.asarray([[0], [-1]], jnp.int32))
    against_xla(arguments)


@pytest.mark.parametrize("state", [5, pytest.param(0, marks=pytest.mark.slow)])
def test_packed_sequences(state):
    rng = np.random.default_rng(3)
    ids = np.sort(rng.choice([0, 1, 3, 4], (2, 29)), axis=1).astype(np.int32)  # sequence 2 is empty
    ids[0, :4] = ids[0, 14:16] = ids[:, -5:] = -1
    ids[1] = np.where(ids[1] < 0, -1, 4 - ids[1])  # in another order
    ids[1, 6:] = np.where(ids[1, 6:] == 4, 3, ids[1, 6:])  # one shorter than a window
    arguments = arguments_of(rng, 2, 29, 4, state, segment_ids=jnp.asarray(ids), num_states=5)
    against_xla(arguments)


@pytest.mark.slow  # packed sequences have several states
def test_several_states_without_ids():
    """All tokens continue the first; the others leave as they entered."""
    arguments = arguments_of(np.random.default_rng(4), 1, 6, 4, 3, num_states=3)
    against_xla(arguments)
    out, final = conv_op.function(**arguments)
    for a, b in zip(conv_op(**arguments, platform="xla"), (out, final)):
        assert error(a, b) < 2e-6


@pytest.mark.slow
def test_rows_of_documents():
    """The last is shorter than a window, and what was before it does not leave."""
    found = rows(jnp.asarray([[4, -1, 4, 4, -1, -1, 7]], jnp.int32), (1, 7), 1, 2, True)
    assert found.source.tolist() == [[-1, -2, 0, 2, 3, 6, 1, 4, 5]]
    assert found.seen.tolist() == [[0, 1, 2, 3, 4, 0, -1, -1, -1]]
    assert found.leaves.tolist() == [[-1, -1, -1, -1, -1, 1, -1, -1, -1]]
    assert found.final.tolist() == [[NOTHING, 6]]


@pytest.mark.slow  # packed sequences need it
def test_rows_of_packed_sequences():
    ids = jnp.asarray([[2, 2, 2, -1, 0]], jnp.int32)
    found = rows(ids, (1, 5), 3, 2, True)
    rows_of = sorted(zip(found.source[0].tolist(), found.seen[0].tolist(), found.leaves[0].tolist()))
    states = [(-6, 1, -1), (-5, 0, -1), (-4, 1, 3), (-3, 0, 2), (-2, 1, 0), (-1, 0, -1)]
    assert rows_of == [*states, (0, 2, -1), (1, 3, 4), (2, 4, 5), (3, -1, -1), (4, 2, 1)]
    assert found.final.tolist() == [[-2, 4, -3, -4, 1, 2]]
    none = rows(ids, (1, 5), 3, 2, False)
    assert none.source.tolist() == [[0, 1, 2, 4, 3]]
    assert none.final.tolist() == [[NOTHING, 4, NOTHING, NOTHING, 1, 2]]


@pytest.mark.parametrize("documents", [pytest.param(False, marks=pytest.mark.slow), True])
def test_with_the_sequence_split(documents):
    rng = np.random.default_rng(5)
    x, weight, state = (rng.standard_normal(s).astype(np.float32) for s in ((1, 16, 4), (4, 4), (1, 4, 3)))
    where = {"segment_ids": np.repeat([[0, 1, 2]], [7, 1, 8], axis=1)} if documents else {}

    def run(module, **more):
        def loss(x, weight, state):
            out, final = module.causal_conv1d(
                x, weight, activation="silu", state=state, return_state=True, **where, **more
            )
            return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)) + jnp.sum(final**2), (out, final)

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(x, weight, state)

    with interpret():
        got = run(ejdist, mesh=make_mesh(sp=2, devices=jax.devices()[:2]), platform="triton")
    for a, b in zip(*map(jax.tree.leaves, (got, run(kernels))), strict=True):
        assert error(a, b) < 2e-6


@triton.jit
def _offsets_kernel(o_ptr, F: tl.constexpr, PART: tl.constexpr):
    last = tl.max(triton_conv._at(tl.program_id(0) + 2**21, tl.arange(0, 16), F))
    tl.store(o_ptr, (last // PART).to(tl.int32))


def test_offsets_of_long_rows_do_not_overflow():
    channels, part = 8192, 4096
    with interpret():
        out_shape = (jax.ShapeDtypeStruct((1,), jnp.int32),)
        (got,) = triton_launch(_offsets_kernel, out_shape=out_shape, grid=(1,), F=channels, PART=part)
    assert got.tolist() == [(2**21 * channels + 15) // part]


@pytest.mark.parametrize(
    ("shape", "W", "words"),
    [
        ((1, 5, 4), 1, "W = 1: without a window"),
        ((1, 5, 4), 17, "W = 17 exceeds 16"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_by_name(shape, W, words):
    with interpret(), pytest.raises(kernels.Unsupported, match=words):
        conv_op(jnp.ones(shape), jnp.ones((shape[2], W)), platform="triton")


def test_a_program_has_no_fewer_tokens_than_it_loads_at_once():
    with (
        interpret(),
        pytest.raises(ValueError, match="tokens = 32, which a program loads at once, must not exceed its span = 16"),
    ):
        conv_op(jnp.ones((1, 5, 4)), jnp.ones((4, 2)), platform="triton", cfg=replace(SMALL, tokens=32))
    with pytest.raises(ValueError, match=r"ConvConfig\.backward_span = 24 is not a power of 2"):
        replace(SMALL, backward_span=24)


def test_candidates_are_tiles_that_a_call_can_have():
    """Of few channels or tokens too; the default is the first."""
    for case in conv_op.cases:
        for dtype in ("bfloat16", "float32"):
            call = conv_op.bind(**conv_op.case_inputs(case, dtype=dtype, shapes_only=True))
            found = triton_conv_calls.candidates(call)
            assert found[0] == triton_conv_calls.heuristic(call, "cuda") and len(set(found)) == len(found) >= 1
            for backward in (False, True):
                tiles = [triton_conv_calls.tile_of(cfg, backward) for cfg in found]
                assert all(tile.span % tile.tokens == 0 and tile.block_f >= 16 for tile in tiles)
            if "bench" in case.tags:
                assert len(found) == triton_conv_calls.CANDIDATES


# Rows, tokens, channels, whether there is a bias and whether documents, and the backward's rows at once and in all that were
# fastest on an H200, of 8 or 16 and 64 to 256, with 64 channels; two where they were within 1%.
FASTEST = [
    ((1, 8192, 8192, False, False), {(8, 256)}),
    ((2, 8192, 4352, True, False), {(16, 128)}),
    ((2, 8192, 6144, True, False), {(16, 256)}),
    ((1, 4096, 2816, True, False), {(16, 64)}),
    ((1, 32768, 4096, False, False), {(8, 256)}),
    ((2, 8192, 4352, True, True), {(8, 64), (8, 128)}),
]


@pytest.mark.parametrize(("sizes", "fastest"), FASTEST)
def test_the_default_of_the_backward_is_the_tile_that_was_fastest(sizes, fastest):
    B, T, F, bias, documents = sizes
    x, weight, taken = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((B, T, F), (F, 4), (F,)))
    ids = jax.ShapeDtypeStruct((B, T), "int32") if documents else None
    call = conv_op.bind(x, weight, bias=taken if bias else None, segment_ids=ids, activation="silu")
    tile = triton_conv_calls.tile_of(triton_conv_calls.heuristic(call, "cuda"), True)
    assert tile[::2] == (64, 1) and (tile.tokens, tile.span) in fastest


def test_of_a_short_sequence_spans_are_short():
    x, weight = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((1, 1024, 4096), (4096, 4)))
    cfg = triton_conv_calls.heuristic(conv_op.bind(x, weight), "cuda")
    assert (cfg.span, cfg.backward_span) == tuple(triton_conv_calls.SPANS[backward][0] for backward in (False, True))
