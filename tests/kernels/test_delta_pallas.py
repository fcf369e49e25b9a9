"""Pallas kernels of the gated delta rule: correlated keys, the inverse, decays of every size, documents, packed sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, value_and_gradients
from jax.experimental import pallas as pl
from test_delta_triton import arguments_of, keys, spoiled

from kernels import Unsupported
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.pallas_delta_parts import CHUNK, inverses
from kernels.engines.scan.pallas_visits import visits
from kernels.framework.interpret import interpret
from kernels.ops.delta_rule import op
from kernels.toolchains.pallas import pallas_launch
from kernels.toolchains.simulate.ahead_of_time import compile_tpu, mosaic_calls

TOKENS = ("query", "key", "value")


def compared(arguments, options, clean=None, allowed=3e-6, dtype=None):
    """Asserts that outputs and gradients through the interpreter are those of the XLA backend, and finite.

    Args:
      clean: the arguments for XLA, where they differ.
      dtype: of the tokens for the kernels; XLA has them in float32, after rounding.
    """
    rounded = {n: x.astype(dtype).astype(jnp.float32) if dtype and n in TOKENS else x for n, x in arguments.items()}
    reference = functools.partial(op, **options, platform="xla", cfg=ChunkConfig(chunk=16))
    wanted, gradients, d = value_and_gradients(reference, clean or rounded)
    given = {n: x.astype(dtype) if dtype and n in TOKENS else x for n, x in arguments.items()}
    with interpret():
        got, found, _ = value_and_gradients(functools.partial(op, **options, platform="pallas"), given, d)
    for what, a, b in [*zip(op.outputs, got, wanted), *((n, found[n], gradients[n]) for n in gradients)]:
        assert np.isfinite(np.asarray(b)).all(), f"{what}: the reference is not finite"
        assert error(a, b) <= allowed, f"{what}: off by {error(a, b):.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize(
    ("cosine", "beta"), [pytest.param(*x, marks=pytest.mark.slow) for x in ((0.9, 2.0), (0.99, 2.0))]
)
def test_correlated_keys_and_reflections(cosine, beta):
    """The matrices of a chunk are then far from the identity, and a series for their inverse diverges."""
    rng = np.random.default_rng(0)
    state = rng.standard_normal((1, 1, 2, 16, 8)).astype(np.float32)
    arguments = arguments_of(rng, 1, 300, 1, 2, 16, 8, cosine, beta, initial_state=state)
    compared(arguments, {}, allowed=1e-5)


@pytest.mark.slow  # documents are decays too
@pytest.mark.parametrize("decay", [0.0, -20.0, -100.0, -np.inf])
def test_decays_of_every_size(decay):
    rng = np.random.default_rng(1)
    state = rng.standard_normal((1, 1, 2, 8, 20)).astype(np.float32)
    arguments = arguments_of(rng, 1, 300, 1, 2, 8, 20, 0.5, 1.0, decay, initial_state=state)
    compared(arguments, {"use_qk_l2norm": True, "softmax_scale": 0.7})


@pytest.mark.slow  # sixteen heads in one body
@pytest.mark.parametrize("cosine", [0.5, 0.9])
@pytest.mark.parametrize("sizes", [(16, 32, 16, 8), (2, 4, 130, 200)])
def test_bfloat16_of_many_heads_and_of_wide_ones(sizes, cosine):
    """Heads in words of two, in two groups of a program; channels of more than one tile of lanes."""
    rng = np.random.default_rng(2)
    compared(arguments_of(rng, 1, 200, *sizes, cosine, 1.0), {}, allowed=1.6e-2, dtype=jnp.bfloat16)


@pytest.mark.slow  # compiles for half a minute
@pytest.mark.parametrize(("dtype", "K", "N"), [("bfloat16", 16, 32), ("float32", 3, 3)])
def test_the_map_of_a_rank_compiles_for_tpus(dtype, K, N):
    """Over a split sequence values are [v | 0] and states [0 | I], so values are twice as wide as keys."""
    tokens = {"query": (K, 128), "key": (K, 128), "value": (N, 256), "beta": (N,), "g": (N, 1)}
    arguments = {n: jax.ShapeDtypeStruct((1, 512, *shape), dtype) for n, shape in tokens.items()}
    arguments["initial_state"] = jax.ShapeDtypeStruct((1, 1, N, 128, 256), jnp.float32)

    def gradients(x):
        outputs, pull = jax.vjp(lambda x: op(**x, platform="pallas"), x)
        return pull(jax.tree.map(jnp.ones_like, outputs))

    assert mosaic_calls(compile_tpu(gradients, arguments, topology="v5p:2x2x1")) == 2


@pytest.mark.slow  # the grid has no decay too
def test_no_decay_no_state_and_an_odd_number_of_heads():
    rng = np.random.default_rng(3)
    arguments = arguments_of(rng, 1, 140, 3, 3, 8, 4, 0.5)
    del arguments["g"]
    compared(arguments, {})


@pytest.mark.slow  # packed sequences have padding with NaN too
def test_documents_and_padding():
    rng = np.random.default_rng(4)
    ids = np.cumsum(rng.random((2, 300)) < 0.03, axis=1).astype(np.int32)
    ids[:, 126:131] = 77  # over the end of a chunk
    ids[:, :2] = ids[:, -3:] = ids[:, 30:33] = -1
    state = rng.standard_normal((2, 1, 2, 8, 4)).astype(np.float32)
    clean = arguments_of(rng, 2, 300, 1, 2, 8, 4, 0.5, initial_state=state, segment_ids=ids)
    compared(spoiled(clean, ids, "query", "key", "value", "beta"), {}, clean)


def test_packed_sequences_with_states():
    rng = np.random.default_rng(5)
    ids = np.sort(rng.choice([0, 1, 3, 4], (2, 300)), axis=1).astype(np.int32)  # sequence 2 is empty
    ids[0, :4] = ids[0, 130:134] = ids[:, -5:] = -1
    ids[1] = np.where(ids[1] < 0, -1, 4 - ids[1])  # in another order
    ids[0, 134:] = np.where(ids[0, 134:] == 1, 3, ids[0, 134:])
    state = rng.standard_normal((2, 5, 2, 8, 4)).astype(np.float32)
    clean = arguments_of(rng, 2, 300, 1, 2, 8, 4, 0.5, initial_state=state, segment_ids=ids)
    compared(spoiled(clean, ids, "query", "key", "value", "beta"), {"num_states": 5}, clean)


@pytest.mark.parametrize(
    ("lengths", "states"),
    [((128, 128), (0, 1)), ((100, 28, 156), (2, 0, 1)), ((1, 1, 1), (0, 1, 2)), ((257,), (1,)), ((), ())],
)
def test_every_token_is_in_one_visit_of_its_sequence(lengths, states):
    G, T = 3, 300
    ids = np.full(T, -1, np.int32)
    ids[: sum(lengths)] = np.repeat(states, lengths)
    table, layout = visits(1, T, jnp.asarray(ids[None]), G, CHUNK)
    seen, began, ended = np.full(T, -1), [], []
    for block, first, last, state, flags in np.asarray(table).reshape(-1, 5):
        assert 0 <= block < -(-T // CHUNK) and last <= CHUNK
        tokens = slice(block * CHUNK + first, block * CHUNK + last)
        assert (seen[tokens] == -1).all()
        seen[tokens] = state
        if last > first and flags & 1:
            began.append(state)
            assert tokens.start in (0, list(ids).index(state) if state in states else 0)
        if last > first and flags & 2:
            ended.append(state)
    assert (seen >= 0).all() and (seen == ids)[ids >= 0].all()
    wanted = list(states) or [0]  # a row of padding belongs to a sequence that has no token
    assert began == ended == wanted
    assert (np.asarray(layout.empty[0]) == ~np.isin(np.arange(G), states)).all()


@pytest.mark.parametrize(
    ("cosine", "beta"), [*(pytest.param(*x, marks=pytest.mark.slow) for x in ((0.0, 1.0), (0.9, 2.0))), (0.99, 2.0)]
)
def test_the_inverse_as_matrix_units_compute_it(cosine, beta):
    """In three passes of bfloat16, whose products are exact, on any machine."""
    rng = np.random.default_rng(6)
    A, count = [], 3
    for _ in range(count):
        k = keys(rng, cosine, CHUNK, 128).astype(np.float64)
        A.append(np.tril(beta * rng.uniform(0.95, 1, (CHUNK, 1)) * (k @ k.T), -1))

    def kernel(a_ref, o_ref):
        for j, x in enumerate(inverses([a_ref[j] for j in range(count)], False)):
            o_ref[j] = x

    spec = pl.BlockSpec((count, CHUNK, CHUNK), lambda i: (0, 0, 0))
    shape = jax.ShapeDtypeStruct((count, CHUNK, CHUNK), jnp.float32)
    options = {"in_specs": [spec], "out_specs": spec, "dimension_semantics": ("arbitrary",)}
    with interpret():
        got = pallas_launch(kernel, jnp.asarray(np.stack(A), jnp.float32), out_shape=shape, grid=(1,), **options)
    for a, x in zip(A, np.asarray(got), strict=True):
        wanted = np.linalg.inv(np.eye(CHUNK) + a)
        off = np.linalg.norm(x - wanted, 2) / np.linalg.norm(wanted, 2)
        assert off <= 1e-3, off


@pytest.mark.slow  # many chunks, interpreted
def test_a_result_that_depends_on_a_token_far_back():
    T = 16384 + 40
    x = {n: np.zeros((1, T, 1, 16), np.float32) for n in TOKENS}
    rng = np.random.default_rng(7)
    x["key"][0, :, 0, 8] = 1.0  # another direction than that of the token that is remembered
    x["key"][0, 3] = np.eye(16)[2]
    x["value"][0, 3] = rng.standard_normal(16)
    x["query"][0, -1, 0, 2] = 1.0
    x |= {"beta": np.full((1, T, 1), 0.5, np.float32), "g": np.full((1, T, 1, 1), -1e-5, np.float32)}
    with interpret():
        out, _ = op(**{n: jnp.asarray(y) for n, y in x.items()}, platform="pallas")
    wanted = 0.25 * 0.5 * x["value"][0, 3, 0].astype(np.float64) * np.exp(-1e-5 * (T - 1 - 3))
    assert np.abs(wanted).max() > 0.05
    assert error(out[0, -1, 0], wanted) < 1e-5


def test_what_is_left_to_xla_is_refused_by_name():
    rng = np.random.default_rng(8)
    arguments = arguments_of(rng, 1, 3, 1, 2, 8, 4)
    wide, many = arguments_of(rng, 1, 3, 8, 128, 8, 512), arguments_of(rng, 1, 3, 1, 32, 8, 4)
    # Decays of channels have kernels with sizes of their own: heads of 512 by 64 fit those of a decay of a head alone, and
    # these take as many heads of values on a key's as there are.
    deep = arguments_of(rng, 1, 3, 8, 8, 512, 64)
    per_channel = [x | {"g": np.repeat(x["g"], x["query"].shape[-1], -1)} for x in (deep, many)]
    with interpret():
        refused = (
            (wide, "MiB of VMEM"),
            (many, "share one"),
            (per_channel[0], "8 heads of 512 by 64 take"),
        )
        for accepted in (deep, per_channel[1]):
            jax.eval_shape(functools.partial(op, platform="pallas"), **accepted)
        for given, why in refused:
            with pytest.raises(Unsupported, match=why):
                op(**given, platform="pallas")
        with pytest.raises(ValueError, match="chunk = 64"):
            op(**arguments, platform="pallas", cfg=ChunkConfig(chunk=64))
