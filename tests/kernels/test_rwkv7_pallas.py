"""Pallas kernels of RWKV-7: two heads in the lanes, decays of every size, documents, packed sequences, long memory."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import test_rwkv7_triton as of_triton
from test_rwkv7_triton import ROUNDED, arguments_of

import kernels
from kernels.engines.scan.pallas_dplr_calls import packed_states, packs_of
from kernels.framework.interpret import interpret
from kernels.ops.delta_rule import rwkv7_op as op

compared = functools.partial(of_triton.compared, platform="pallas")


@pytest.mark.slow  # the grid has decays to e^-20, documents and states, for 12 seconds
@pytest.mark.parametrize("decay", [0.0, -20.0, -100.0, -np.inf])
def test_decays_of_every_size(decay):
    rng = np.random.default_rng(0)
    state = rng.standard_normal((1, 1, 2, 8, 20)).astype(np.float32)
    arguments = arguments_of(rng, 1, 140, 2, 8, 20, decay=decay, initial_state=state)
    compared(arguments, options={"softmax_scale": 0.7})


@pytest.mark.slow
@pytest.mark.parametrize(("cosine", "rate"), [(0.9, 2.0), (0.99, 2.0)])
def test_correlated_reads_and_reflections_of_an_odd_number_of_heads(cosine, rate):
    """The inverses are then far from the identity; the last head shares its lanes with none."""
    compared(arguments_of(np.random.default_rng(1), 1, 150, 3, 16, 8, cosine, rate=rate), allowed=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("H", "Hv", "N"), [(72, 20, 2), (8, 136, 1), (64, 128, 1)])
def test_heads_that_fill_the_lanes(H, Hv, N):
    """One to a program's row of lanes, as over a split sequence, where values are [v | 0]."""
    compared(arguments_of(np.random.default_rng(2), 1, 140, N, H, Hv, decay=-5.0))


@pytest.mark.slow
def test_documents_and_padding():
    rng = np.random.default_rng(3)
    ids = np.cumsum(rng.random((1, 261)) < 0.04, axis=1).astype(np.int32)
    ids[:, :2] = ids[:, -3:] = ids[:, 30:33] = -1
    ids[:, 126:131] = 77  # over the end of a chunk
    state = rng.standard_normal((1, 1, 2, 8, 4)).astype(np.float32)
    clean = arguments_of(rng, 1, 261, 2, 8, 4, initial_state=state, segment_ids=ids)
    padding = jnp.asarray(ids < 0)[..., None, None]
    given = {n: jnp.where(padding, jnp.nan, y) if n in (*ROUNDED, "w") else y for n, y in clean.items()}
    compared(given, clean)


@pytest.mark.slow
def test_packed_sequences_with_states():
    rng = np.random.default_rng(4)
    ids = np.sort(rng.choice([0, 1, 3, 4], (2, 260)), axis=1).astype(np.int32)  # sequence 2 is empty
    ids[0, :4] = ids[0, 130:132] = ids[:, -5:] = -1
    ids[1] = np.where(ids[1] < 0, -1, 4 - ids[1])  # in another order
    state = rng.standard_normal((2, 5, 3, 8, 4)).astype(np.float32)
    arguments = arguments_of(rng, 2, 260, 3, 8, 4, initial_state=state, segment_ids=ids)
    compared(arguments, options={"num_states": 5})


@pytest.mark.slow
def test_sums_of_decays_are_taken_either_way_in_bfloat16():
    """From the middle of 16 tokens, and in levels where a sum is too wide, with w in float32 beside the others."""
    rng = np.random.default_rng(5)
    arguments = arguments_of(rng, 1, 260, 4, 16, 16, 0.0, rate=0.3)
    w = np.full((1, 260, 4, 16), -0.01, np.float32)
    w[:, 130:] = -20 * rng.random((1, 130, 4, 16))
    rounded = {n: y.astype(jnp.bfloat16) if n in ROUNDED else y for n, y in arguments.items()}
    compared(rounded | {"w": jnp.asarray(w)}, allowed=1.6e-2)


@pytest.mark.slow  # many chunks, interpreted
def test_a_result_that_depends_on_a_token_far_back():
    of_triton.far_back(platform="pallas")


def test_packs():
    """Four packs of two heads to a program where they divide, and a state of each head on the diagonal of its pack's."""
    assert [packs_of(count, 2) for count in (20, 6, 10, 7, 1)] == [4, 6, 5, 7, 1] and packs_of(16, 1) == 8
    state = np.arange(1, 13, dtype=np.float32).reshape(1, 1, 3, 2, 2)
    packs = np.asarray(packed_states(jnp.asarray(state), 2))
    assert packs.shape == (1, 1, 2, 128, 128) and packs.sum() == state.sum()
    np.testing.assert_array_equal(packs[0, 0, 0, 64:66, 64:66], state[0, 0, 1])


@pytest.mark.parametrize(
    ("sizes", "more", "why"),
    [
        ((1, 4, 8, 512, 512), {}, "MiB of VMEM"),
        ((1, 1, 64, 128, 1024), {}, "64 states of 128 by 1024 take 128 MiB of VMEM"),
        ((1, 1, 2, 8, 4), {"num_states": 2}, "one token would take the work of a chunk of 128"),
    ],
)
def test_what_is_left_to_xla_is_refused_by_name(sizes, more, why):
    ids = {"segment_ids": jnp.zeros((1, 1), jnp.int32)} if more else {}
    with interpret(), pytest.raises(kernels.Unsupported, match=why):
        op(**arguments_of(np.random.default_rng(10), *sizes, **ids), **more, platform="pallas")
