"""Pallas kernels of recurrences whose channels have their own decays: decays of every size, documents, packed sequences."""

import jax.numpy as jnp
import numpy as np
import pytest
from grid import error
from test_channel_triton import OPS, gla, kda
from test_delta_pallas import compared
from test_scan_pallas import against_xla, documents

import kernels
from kernels.framework.interpret import interpret

DECAYS = [-np.inf, *(pytest.param(d, marks=pytest.mark.slow) for d in (0.0, -20.0, -100.0))]


def with_bonus(rng, arguments):
    shape = (arguments["query"].shape[2], arguments["query"].shape[3])
    return arguments | {"bonus": jnp.asarray(rng.standard_normal(shape), jnp.float32)}


@pytest.mark.slow  # the next is the same kernels with more in them
@pytest.mark.parametrize("decay", [0.0, -20.0, -100.0, -np.inf])
def test_decays_of_every_size(decay):
    rng = np.random.default_rng(0)
    state = rng.standard_normal((1, 1, 2, 8, 20)).astype(np.float32)
    against_xla("linear_attention", gla(rng, 1, 150, 2, 1, 8, 20, decay, initial_state=state))


@pytest.mark.parametrize("decay", DECAYS)
def test_decays_of_every_size_in_a_delta_rule(decay):
    rng = np.random.default_rng(0)
    state = rng.standard_normal((1, 1, 2, 8, 20)).astype(np.float32)
    compared(kda(rng, 1, 150, 1, 2, 8, 20, decay=decay, initial_state=state), {"softmax_scale": 0.7})


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.slow
def test_a_bonus_reads_the_state_before_the_token(decay):
    rng = np.random.default_rng(1)
    state = rng.standard_normal((1, 1, 1, 8, 4)).astype(np.float32)
    against_xla("linear_attention", with_bonus(rng, gla(rng, 1, 140, 1, 1, 8, 4, decay, initial_state=state)))


@pytest.mark.slow
def test_a_bonus_without_decays():
    rng = np.random.default_rng(2)
    arguments = with_bonus(rng, gla(rng, 1, 40, 2, 1, 8, 4))
    del arguments["g"], arguments["gk"]
    against_xla("linear_attention", arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("cosine", "beta"), [(0.9, 2.0), (0.99, 2.0)])
def test_correlated_keys_and_reflections(cosine, beta):
    rng = np.random.default_rng(3)
    arguments = kda(rng, 1, 150, 1, 2, 16, 8, cosine, beta)
    compared(arguments, {"use_qk_l2norm": True}, allowed=1e-5)


@pytest.mark.slow
def test_documents_and_what_padding_holds():
    rng = np.random.default_rng(5)
    ids, state = documents(rng, 1, 150), rng.standard_normal((1, 1, 2, 8, 4)).astype(np.float32)
    padding = jnp.asarray(ids < 0)[..., None, None]
    clean = kda(rng, 1, 150, 1, 2, 8, 4, initial_state=state, segment_ids=jnp.asarray(ids))
    given = {n: jnp.where(padding, jnp.nan, y) if n in ("query", "key", "value", "g") else y for n, y in clean.items()}
    compared(given, {}, clean)
    clean = with_bonus(rng, gla(rng, 1, 150, 2, 2, 8, 4, -1.0, initial_state=state, segment_ids=ids))
    given = {n: jnp.where(padding, jnp.nan, y) if n in ("query", "key", "value", "gk") else y for n, y in clean.items()}
    against_xla("linear_attention", given, clean)


@pytest.mark.slow
def test_packed_sequences_with_states():
    rng = np.random.default_rng(6)
    ids = np.sort(rng.choice([0, 1, 3, 4], (2, 300)), axis=1).astype(np.int32)  # sequence 2 is empty
    ids[0, :4] = ids[0, 130:134] = ids[:, -5:] = -1
    ids[0, 134:] = np.where(ids[0, 134:] == 1, 3, ids[0, 134:])
    ids[1] = np.where(ids[1] < 0, -1, 4 - ids[1])  # in another order
    state = rng.standard_normal((2, 5, 2, 8, 4)).astype(np.float32)
    arguments = gla(rng, 2, 300, 2, 2, 8, 4, initial_state=state, segment_ids=ids)
    against_xla("linear_attention", with_bonus(rng, arguments) | {"num_states": 5})
    compared(kda(rng, 2, 300, 1, 2, 8, 4, initial_state=state, segment_ids=jnp.asarray(ids)), {"num_states": 5})


@pytest.mark.slow
@pytest.mark.parametrize("width", [-1.0, -20.0, -60.0])
def test_sums_of_decays_are_taken_either_way(width):
    """From the middle of 16 tokens, in levels, and each in another chunk: in bfloat16 all are as exact as it is."""
    rng = np.random.default_rng(7)
    arguments = kda(rng, 1, 260, 2, 2, 16, 16)  # an odd number of heads is computed in float32
    a = np.full((1, 260, 2, 16), -0.01, np.float32)
    a[:, 130:] = width * rng.random((1, 130, 2, 16))
    compared(arguments | {"g": jnp.asarray(a)}, {}, allowed=1.6e-2, dtype=jnp.bfloat16)


@pytest.mark.slow
def test_bfloat16_of_many_heads_and_of_wide_ones():
    """Two groups of eight heads, of decays in bfloat16 too; channels and values of more than one tile of lanes."""
    rng = np.random.default_rng(2)
    compared(kda(rng, 1, 140, 16, 16, 16, 8, 0.5, 1.0, -20.0), {}, allowed=1.6e-2, dtype=jnp.bfloat16)
    compared(kda(rng, 1, 140, 2, 2, 130, 200, 0.9, 1.0), {}, allowed=1.6e-2, dtype=jnp.bfloat16)


@pytest.mark.slow  # many chunks, interpreted
def test_a_result_that_depends_on_a_token_far_back():
    T, rng = 16384 + 40, np.random.default_rng(8)
    x = {n: np.zeros((1, T, 1, 16), np.float32) for n in ("query", "key", "value")}
    x["key"][0, 3] = x["value"][0, 3] = rng.standard_normal((1, 16))
    x["query"][0, -1] = x["key"][0, 3]
    rates = np.linspace(1e-6, 3e-5, 16)
    x["gk"] = np.broadcast_to(-rates, (1, T, 1, 16)).astype(np.float32)
    with interpret():
        out, _ = OPS["linear_attention"](**{n: jnp.asarray(y) for n, y in x.items()}, platform="pallas")
    q, k, v = (x[n].astype(np.float64)[0, i, 0] for n, i in (("query", -1), ("key", 3), ("value", 3)))
    wanted = 0.25 * np.sum(q * k * np.exp(-rates * (T - 1 - 3))) * v
    assert np.abs(wanted).max() > 0.05
    assert error(out[0, -1, 0], wanted) < 1e-5


def test_what_is_left_to_xla_is_refused_by_name():
    rng = np.random.default_rng(9)
    with interpret():
        for arguments, why in (
            (gla(rng, 1, 4, 1, 1, 8, 4) | {"gv": jnp.zeros((1, 4, 1, 4))}, "it does not support gv"),
            (gla(rng, 1, 4, 8, 8, 512, 512), "MiB of VMEM"),
        ):
            with pytest.raises(kernels.Unsupported, match=why):
                OPS["linear_attention"](**arguments, platform="pallas")
