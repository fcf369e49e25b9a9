"""One token of a recurrence in Pallas for TPUs, of rows and of requests with states in a pool: against XLA."""

import jax.numpy as jnp
import numpy as np
import pytest
from grid import error, value_and_gradients
from test_decode_triton import MADE, PADDED, B, H, Hv, N, state
from test_scan_triton import OPS

from kernels.framework.interpret import interpret
from kernels.ops.delta_rule import pool_op
from kernels.toolchains.simulate.ahead_of_time import TPU_TOPOLOGIES, call_of, compile_tpu, mosaic_calls

SLOW = [n for n in MADE if n not in ("linear_attention with a bonus", "rwkv7")]
EACH = [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in MADE]


@pytest.mark.parametrize("name", EACH)
def test_a_token_after_a_state_with_padding(name):
    """Padding hands its state on, and what it holds is not read; gradients are those of the contract."""
    op, rng = OPS[name.split()[0]], np.random.default_rng(11)
    made = MADE[name](rng, initial_state=state(rng, B, 1, N, H, Hv), segment_ids=jnp.asarray(PADDED))
    wanted, gradients, d = value_and_gradients(lambda **a: op(**a, platform="xla"), made)
    with interpret():
        got, found, _ = value_and_gradients(lambda **a: op(**a, platform="pallas"), made, d)
    for a, b in [*zip(got, wanted, strict=True), *((found[n], gradients[n]) for n in gradients)]:
        assert error(a, b) <= 3e-6


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n != "state_space_v2" else n for n in MADE]
)
def test_the_first_token(name):
    op, made = OPS[name.split()[0]], MADE[name](np.random.default_rng(1))
    with interpret():
        got = op(**made, platform="pallas")
    for a, b in zip(got, op(**made, platform="xla"), strict=True):
        assert error(a, b) <= 3e-6


@pytest.mark.slow
@pytest.mark.parametrize("heads", [11, 16])
def test_heads_of_more_than_one_tile(heads):
    """Eleven: a tile of eight in a loop, and three heads of another."""
    rng = np.random.default_rng(2)
    shapes = {"query": (heads, 8), "key": (1, 8), "value": (1, 4), "g": (heads,)}
    made = {n: jnp.asarray(rng.standard_normal((2, 1, *x)), jnp.float32) for n, x in shapes.items()}
    made |= {"initial_state": state(rng, 2, 1, heads, 8, 4)}
    with interpret():
        got = OPS["linear_attention"](**made, platform="pallas")
    for a, b in zip(got, OPS["linear_attention"](**made, platform="xla"), strict=True):
        assert error(a, b) <= 3e-6


def ragged(rng, slots, dtype=jnp.float32, **more):
    """Returns tokens of requests whose states are in a pool of six, of which those of no request are NaN, but for the first."""
    M = len(slots)
    shapes = {"query": (M, 1, H), "key": (M, 1, H), "value": (M, N, Hv), "beta": (M, N), "g": (M, N, 1)}
    made = {n: jnp.asarray(rng.standard_normal(x), jnp.float32) for n, x in shapes.items()}
    made |= {"beta": jnp.abs(made["beta"]) / 2, "g": -jnp.abs(made["g"]), "use_qk_l2norm": True}
    pool = rng.standard_normal((6, N, H, Hv)).astype(np.float32)
    pool[[i for i in range(1, 6) if i not in slots]] = np.nan
    return made | {"state_pool": jnp.asarray(pool, dtype), "state_indices": jnp.asarray(slots, jnp.int32)} | more


@pytest.mark.parametrize(
    "slots",
    [
        [-1, 7, 4, -1, 0, 2],
        pytest.param([5, -1, -1, 1], marks=pytest.mark.slow),
        pytest.param([3, 2, 1, 0], marks=pytest.mark.slow),
        pytest.param([-1, 6], marks=pytest.mark.slow),
    ],
)
def test_requests_change_their_slots_alone(slots):
    """Padding first, between, last and alone writes nothing."""
    made = ragged(np.random.default_rng(3), slots)
    with interpret():
        out, pool = pool_op(**made, platform="pallas")
    wanted = pool_op(**made, platform="xla")
    used = [i for i in slots if 0 <= i < 6]
    assert error(out, wanted[0]) <= 3e-6 and not np.asarray(out)[[not 0 <= i < 6 for i in slots]].any()
    if used:
        assert error(pool[jnp.asarray(used)], wanted[1][jnp.asarray(used)]) <= 3e-6
    rest = np.asarray([i for i in range(6) if i not in used])
    np.testing.assert_array_equal(np.asarray(pool)[rest], np.asarray(made["state_pool"])[rest])


@pytest.mark.slow
def test_gradients_of_a_pool():
    made = ragged(np.random.default_rng(5), [3, -1, 0])
    made["state_pool"] = jnp.nan_to_num(made["state_pool"])
    wanted, gradients, d = value_and_gradients(lambda **a: pool_op(**a, platform="xla"), made)
    with interpret():
        _, found, _ = value_and_gradients(lambda **a: pool_op(**a, platform="pallas"), made, d)
    for n in gradients:
        assert error(found[n], gradients[n]) <= 3e-6, n


def test_a_narrow_pool_and_slots_without_a_state():
    made = ragged(np.random.default_rng(4), [1, -1, 3, 0], jnp.bfloat16)
    begun = jnp.asarray([True, True, False, True])
    made["state_pool"] = made["state_pool"].at[3].set(jnp.nan)
    with interpret():
        got = pool_op(**made, has_initial_state=begun, platform="pallas")
    for a, b in zip(got, pool_op(**made, has_initial_state=begun, platform="xla"), strict=True):
        rows = slice(None) if a.ndim == 3 else jnp.asarray([1, 3, 0])
        assert a.dtype == b.dtype and error(a[rows], b[rows]) <= (3e-6 if a.ndim == 3 else 4e-3)


@pytest.mark.parametrize(
    "topology",
    [TPU_TOPOLOGIES[1], *(pytest.param(t, marks=pytest.mark.slow) for t in TPU_TOPOLOGIES if t != TPU_TOPOLOGIES[1])],
)
def test_a_pool_that_is_donated_is_updated_where_it_is(topology):
    """Compiled: nothing as large as the pool is made beside it, and no state is moved but those of the tokens."""
    case = next(case for case in pool_op.cases if case.name == "decode")
    function, arguments = call_of(pool_op, case, platform="pallas", backward=False)
    pool = arguments.pop("state_pool")
    made = compile_tpu(
        lambda pool, x: function(x | {"state_pool": pool}), pool, arguments, topology=topology, donate_argnums=0
    )
    size = int(np.prod(pool.shape)) * pool.dtype.itemsize
    assert mosaic_calls(made) == 1 and made.memory_analysis().alias_size_in_bytes >= size
    assert made.memory_analysis().temp_size_in_bytes < size / 32
