"""Triton kernels of the gated delta rule: correlated keys, the inverse, decays of every size, documents, long memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from grid import error, value_and_gradients
from kernel_names import names_of_kernels
from triton._C.libtriton import ir
from triton.runtime import interpreter

from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.triton_inverse import inverse
from kernels.framework.interpret import interpret
from kernels.ops.delta_rule import op
from kernels.toolchains.simulate.ahead_of_time import call_of, export_cuda
from kernels.toolchains.triton import triton_launch


def keys(rng, cosine, *shape):
    """Returns unit vectors, any two of which have about this cosine."""
    x = rng.standard_normal(shape)
    x = np.sqrt(cosine) * rng.standard_normal(shape[-1:]) + np.sqrt(1 - cosine) * x
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def arguments_of(rng, B, T, K, N, H, Hv, cosine=0.0, beta=1.0, decay=None, **more):
    """Returns arguments of the gated delta rule; a third of the log decays are `decay`, the others mild."""
    g = -np.exp(rng.standard_normal((B, T, N, 1)) - 3)
    if decay is not None:
        g = np.where(rng.random(g.shape) < 0.3, decay, g)
    x = {"query": keys(rng, 0.0, B, T, K, H), "key": keys(rng, cosine, B, T, K, H)}
    x |= {"value": rng.standard_normal((B, T, N, Hv)), "beta": beta * rng.uniform(0.9, 1, (B, T, N)), "g": g}
    return {n: jnp.asarray(y.astype(np.float32)) for n, y in x.items()} | {n: jnp.asarray(y) for n, y in more.items()}


def spoiled(arguments, ids, *names):
    """Returns the arguments with NaN in the padding of those that are named."""
    padding = jnp.asarray(ids < 0)
    masks = {n: padding.reshape(*padding.shape, *(1,) * (arguments[n].ndim - 2)) for n in names}
    return arguments | {n: jnp.where(mask, jnp.nan, arguments[n]) for n, mask in masks.items()}


def compared(arguments, options, clean=None, allowed=3e-6, **cfg):
    """Asserts that outputs and gradients through the interpreter are those of the XLA backend, and finite.

    Args:
      clean: the arguments for XLA, where they differ.
    """
    reference = functools.partial(op, **options, platform="xla", cfg=ChunkConfig(chunk=16))
    wanted, gradients, d = value_and_gradients(reference, clean or arguments)
    with interpret():
        run = functools.partial(op, **options, platform="triton", cfg=ChunkConfig(**cfg))
        got, found, _ = value_and_gradients(run, arguments, d)
    for what, a, b in [*zip(op.outputs, got, wanted), *((n, found[n], gradients[n]) for n in gradients)]:
        assert np.isfinite(np.asarray(b)).all(), f"{what}: the reference is not finite"
        assert error(a, b) <= allowed, f"{what}: off by {error(a, b):.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize(
    ("cosine", "beta"), [pytest.param(*x, marks=pytest.mark.slow) for x in ((0.9, 1.0), (0.9, 2.0), (0.99, 2.0))]
)
def test_correlated_keys_and_reflections(cosine, beta):
    """The matrices of a chunk are then far from the identity, and a series for their inverse diverges."""
    rng = np.random.default_rng(0)
    state = rng.standard_normal((1, 1, 2, 16, 8)).astype(np.float32)
    arguments = arguments_of(rng, 1, 100, 1, 2, 16, 8, cosine, beta, initial_state=state)
    compared(arguments, {}, allowed=1e-5, chunk=64)


@pytest.mark.parametrize("decay", [pytest.param(d, marks=pytest.mark.slow) for d in (0.0, -20.0, -100.0, -np.inf)])
def test_decays_of_every_size(decay):
    rng = np.random.default_rng(1)
    state = rng.standard_normal((1, 1, 2, 8, 20)).astype(np.float32)
    arguments = arguments_of(rng, 1, 75, 1, 2, 8, 20, 0.5, 1.0, decay, initial_state=state)
    compared(arguments, {"use_qk_l2norm": True, "softmax_scale": 0.7}, chunk=32, block_v=16, heads=2)


@pytest.mark.parametrize(
    ("packed", "states"), [(True, False), (False, True), pytest.param(False, False, marks=pytest.mark.slow)]
)
def test_both_ways_at_once_of_what_the_forward_kept(packed, states):
    """Documents, padding, states in and out, and keys that heads share."""
    rng = np.random.default_rng(12)
    ids = np.array([[0] * 9 + [-1] * 3 + [1] * 38], np.int32)
    state = rng.standard_normal((1, 1 + packed, 2, 8, 20)).astype(np.float32)
    arguments = arguments_of(rng, 1, 50, 1, 2, 8, 20, 0.5, 1.5, segment_ids=ids, initial_state=state)
    options = {"softmax_scale": 0.7, "num_states": 1 + packed}
    compared(arguments, options, chunk=16, block_v=16, at_once=True, keeps=True, keeps_states=states)


@pytest.mark.parametrize(
    ("case", "keeps", "at_once", "in_one", "hopper_walks"),
    [
        ("qwen3_next", True, True, True, True),
        ("many_heads_8k", True, False, True, False),
        ("few_heads_32k", True, False, True, True),
        ("packed_4_of_8k", True, True, False, False),
        ("kimi_linear", True, None, True, True),
    ],
)
def test_what_a_backward_takes_of_its_forward_and_which_kernels_it_joins(case, keeps, at_once, in_one, hopper_walks):
    """As was timed: both walks at once, of decays of heads, where programs leave half of each multiprocessor empty; Hopper's
    walks where programs of 64 columns leave half of the multiprocessors, or fill them once with parts of rows."""
    call = op.bind(**op.case_inputs(next(c for c in op.cases if c.name == case), dtype="bfloat16", shapes_only=True))
    cfg = op.backends["triton_gpu"].heuristic(call, "cuda")
    assert (cfg.keeps, cfg.at_once, cfg.in_one, cfg.hopper_walks) == (keeps, at_once, in_one, hopper_walks)
    assert not cfg.keeps_states


@pytest.mark.slow
def test_walks_at_once_fit_a_multiprocessor():
    """On Hopper at the width of Qwen3-Next: no spills, no product that waits for the one before, and pairs are taken once."""
    call = op.case_inputs(next(c for c in op.cases if c.name == "qwen3_next"), dtype="bfloat16")
    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in call.items() if hasattr(x, "dtype")}

    def step(x):
        out, pull = jax.vjp(lambda x: op(**x, platform="triton", cfg=ChunkConfig(hopper_walks=False)), x)
        return pull(out)

    report = export_cuda(step, shapes).kernels
    assert [k.name for k in report].count("delta_pairs_kernel") == 1
    (kernel,) = (k for k in report if k.name == "delta_both_kernel")
    assert not any(kernel.resources[n] for n in ("spill_stores", "spill_loads", "serialized")), kernel.resources
    assert 2 * (kernel.shared_memory_bytes + 1024) <= 228 * 1024


@pytest.mark.slow  # packed sequences are split in the quick tests
@pytest.mark.parametrize(("decay", "Hv"), [(0.0, 18), (-100.0, 16)])
def test_rows_that_are_split(decay, Hv):
    """By the map of each part, a matrix, from the state that enters it to the state that leaves."""
    rng = np.random.default_rng(8)
    state = rng.standard_normal((1, 1, 2, 20, Hv)).astype(np.float32)
    arguments = arguments_of(rng, 1, 100, 1, 2, 20, Hv, 0.5, 1.5, decay, initial_state=state)
    compared(arguments, {}, chunk=16, splits=3, block_v=16, keeps=True, keeps_states=decay == 0.0)


def test_sums_that_hopper_reads_from_diagonals():
    """Those of two states, for decays, and of values, for beta: the other form of the same sums, in bfloat16."""
    rng = np.random.default_rng(10)
    arguments = arguments_of(rng, 1, 40, 1, 2, 16, 20, 0.5)
    arguments = {n: x.astype(jnp.bfloat16) for n, x in arguments.items()}
    run = functools.partial(op, platform="triton", cfg=ChunkConfig(chunk=16, block_v=16))
    found, d = [], None
    for capability in (80, 90):
        with interpret(capability):
            _, gradients, d = value_and_gradients(run, arguments, d)
        found.append(gradients)
    for name in ("g", "beta"):
        assert error(found[1][name], found[0][name]) <= 2e-3, name
        assert np.abs(np.asarray(found[0][name], np.float32)).max() > 0.1, name


@pytest.mark.slow  # a case of the operation has neither
def test_no_decay_and_no_state():
    rng = np.random.default_rng(2)
    arguments = arguments_of(rng, 1, 40, 2, 2, 8, 4, 0.5)
    del arguments["g"]
    compared(arguments, {}, chunk=16)


@pytest.mark.slow  # packed sequences have padding with NaN too
def test_documents_and_padding():
    rng = np.random.default_rng(3)
    ids = np.cumsum(rng.random((2, 90)) < 0.06, axis=1).astype(np.int32)
    ids[:, 40], ids[:, 41:45] = 77, 78
    ids[:, :2] = ids[:, -3:] = ids[:, 30:33] = -1
    state = rng.standard_normal((2, 1, 2, 8, 4)).astype(np.float32)
    clean = arguments_of(rng, 2, 90, 1, 2, 8, 4, 0.5, initial_state=state, segment_ids=ids)
    compared(spoiled(clean, ids, "query", "key", "value", "beta"), {}, clean, chunk=16, splits=2)


@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_packed_sequences_with_states(splits):
    rng = np.random.default_rng(4)
    ids = np.sort(rng.choice([0, 1, 3, 4], (2, 60)), axis=1).astype(np.int32)  # sequence 2 is empty
    ids[0, :4] = ids[0, 30:32] = ids[:, -5:] = -1
    ids[1] = np.where(ids[1] < 0, -1, 4 - ids[1])  # in another order
    Hv, tiles = (
        (16, {"splits": splits, "keeps": True}) if splits > 1 else (4, {})
    )  # parts' maps are kept in whole tiles
    state = rng.standard_normal((2, 5, 2, 8, Hv)).astype(np.float32)
    clean = arguments_of(rng, 2, 60, 1, 2, 8, Hv, 0.5, initial_state=state, segment_ids=ids)
    compared(spoiled(clean, ids, "query", "key", "value", "beta"), {"num_states": 5}, clean, chunk=16, **tiles)


def test_maps_of_parts_are_taken_once():
    """In the forward of a differentiated call: the backward has two more walks from the end, and one from the beginning. Those
    of maps are Triton's."""
    case = next(c for c in op.cases if c.name == "few_heads_32k")
    names = names_of_kernels(*call_of(op, case, platform="triton"))
    assert [names.count(f"delta_{n}_kernel") for n in ("walk", "walk_hopper", "join", "reverse_hopper")] == [
        1,
        2,
        2,
        2,
    ], names


@pytest.mark.slow  # packed sequences that are split are quick
def test_a_sequence_that_ends_where_a_part_of_its_row_ends():
    rng = np.random.default_rng(9)
    ids = np.repeat(np.arange(2, dtype=np.int32), (160, 32))[None]  # 10 and 2 chunks, of 13 in three parts of 5
    state = rng.standard_normal((1, 2, 1, 8, 4)).astype(np.float32)
    arguments = arguments_of(rng, 1, 192, 1, 1, 8, 4, 0.5, initial_state=state, segment_ids=ids)
    compared(arguments, {"num_states": 2}, chunk=16, splits=3)


@pytest.mark.slow  # many chunks, interpreted
def test_a_result_that_depends_on_a_token_far_back():
    T = 8192 + 40
    x = {n: np.zeros((1, T, 1, 16), np.float32) for n in ("query", "key", "value")}
    rng = np.random.default_rng(5)
    x["key"][0, :, 0, 8] = 1.0  # another direction than that of the token that is remembered
    x["key"][0, 3] = np.eye(16)[2]
    x["value"][0, 3] = rng.standard_normal(16)
    x["query"][0, -1, 0, 2] = 1.0
    x |= {"beta": np.full((1, T, 1), 0.5, np.float32), "g": np.full((1, T, 1, 1), -1e-5, np.float32)}
    with interpret():
        arguments = {n: jnp.asarray(y) for n, y in x.items()}
        out, _ = op(**arguments, platform="triton", cfg=ChunkConfig(chunk=128))
    wanted = 0.25 * 0.5 * x["value"][0, 3, 0].astype(np.float64) * np.exp(-1e-5 * (T - 1 - 3))
    assert np.abs(wanted).max() > 0.05
    assert error(out[0, -1, 0], wanted) < 1e-5


@triton.jit
def _inverse_kernel(a_ptr, o_ptr, scratch_ptr, BLOCK_C: tl.constexpr):
    i = tl.arange(0, BLOCK_C)
    at = i[:, None] * BLOCK_C + i[None, :]
    tl.store(o_ptr + at, inverse(tl.load(a_ptr + at), scratch_ptr, BLOCK_C))


def _in_tf32(x):
    """Returns float32 numbers rounded to the 10 bits of TF32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize(
    ("size", "cosine", "beta"),
    [(64, 0.0, 1.0), (64, 0.9, 1.0), (64, 0.9, 2.0), (64, 0.99, 2.0), (32, 0.99, 2.0), (128, 0.9, 2.0)],
)
def test_the_inverse_as_matrix_units_compute_it(monkeypatch, size, cosine, beta):
    """The interpreter multiplies in float32. Here each product is what its precision makes of it on a GPU."""
    rng, plain = np.random.default_rng(6), interpreter.InterpreterBuilder.create_dot
    k = keys(rng, cosine, size, 128).astype(np.float64)
    A = np.tril(beta * rng.uniform(0.95, 1, (size, 1)) * (k @ k.T), -1)
    products = []

    def dot(self, a, b, d, precision, *rest):
        products.append(precision)
        (x, x_rest), (y, y_rest) = ((_in_tf32(z.data), _in_tf32(z.data - _in_tf32(z.data))) for z in (a, b))
        terms = ((x, y),) if precision == ir.INPUT_PRECISION.TF32 else ((x, y), (x_rest, y), (x, y_rest))
        for left, right in terms:
            d = plain(self, *(interpreter.TensorHandle(z, a.dtype.scalar) for z in (left, right)), d, precision, *rest)
        return d

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    with interpret():
        got, _ = triton_launch(
            _inverse_kernel,
            jnp.asarray(A + np.triu(rng.standard_normal(A.shape)), jnp.float32),
            out_shape=(jax.ShapeDtypeStruct((size, size), jnp.float32), jax.ShapeDtypeStruct((size, 16), jnp.float32)),
            grid=(1,),
            BLOCK_C=size,
        )
        got = np.asarray(got)
    assert len(products) == 2 * (int(np.log2(size)) - 4)
    wanted = np.linalg.inv(np.eye(size) + A)
    assert np.linalg.norm(got - wanted, 2) <= 3e-5 * np.linalg.norm(wanted, 2)
