"""One token of a recurrence on a CUDA device, at the widths of models: numbers, and a pool that is updated where it is.

Run with the command in CONTRIBUTING.md. Small cases, every tuning candidate and the same bits twice are in
test_operations_gpu.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import FLOOR, error
from test_operations_gpu import has_cuda

import kernels
from kernels.ops.delta_rule import pool_op

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason="JAX sees no CUDA device here")]

OPS = kernels.operations()
M, N, K, H, SLOTS = 9, 8, 4, 128, 24


def token(channels, dtype, seed=0, requests=M):
    rng = np.random.default_rng(seed)
    x = {"query": rng.standard_normal((requests, K, H)), "key": rng.standard_normal((requests, K, H))}
    x["key"] /= np.linalg.norm(x["key"], axis=-1, keepdims=True)
    x |= {"value": rng.standard_normal((requests, N, H)), "beta": rng.uniform(0, 1, (requests, N))}
    x |= {"g": -np.exp(rng.standard_normal((requests, N, H if channels else 1)))}
    narrow = ("query", "key", "value")
    return {n: jnp.asarray(y, dtype if n in narrow else jnp.float32) for n, y in x.items()}


def slots(requests=M):
    found = np.random.default_rng(1).permutation(SLOTS)[:requests].astype(np.int32)
    found[2], found[5] = -1, SLOTS + 3
    return found


def pool(dtype):
    return jnp.asarray(np.random.default_rng(2).standard_normal((SLOTS, N, H, H)), dtype)


@pytest.mark.parametrize("name", ["delta_rule", "delta_rule of channels", "linear_attention", "state_space_v2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows(name, dtype):
    op, x = OPS[name.split()[0]], token(name == "delta_rule of channels", dtype)
    x = {n: y[:, None] for n, y in x.items()}
    if name == "linear_attention":
        x = {
            "query": jnp.repeat(x["query"], N // K, 2),
            "key": x["key"],
            "value": x["value"][:, :, :K],
            "g": x["g"][..., 0],
        }
    elif name == "state_space_v2":
        x = {
            "x": x["value"],
            "B": x["key"],
            "C": x["query"],
            "dt": x["beta"],
            "A": -jnp.linspace(0.1, 2, N),
            "D": jnp.ones(N),
        }
    for state in (None, jnp.asarray(np.random.default_rng(3).standard_normal((M, 1, N, H, H)), jnp.float32)):
        given = x if state is None else x | {"initial_state": state}
        with jax.default_matmul_precision("highest"):
            wanted = op.reference(**given)
        for a, b in zip(op(**given, platform="triton"), wanted, strict=True):
            assert error(a, b) <= FLOOR[str(a.dtype)]


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pool_is_updated_where_it_is(channels, dtype):
    """The output before the states in the launch: in the other order jax-triton writes it into the pool."""
    x, indices = token(channels, "bfloat16"), slots()
    before = pool(dtype)
    wanted_out, wanted = pool_op.reference(**x, state_pool=before, state_indices=jnp.asarray(indices))
    run = jax.jit(functools.partial(pool_op, platform="triton"), donate_argnames="state_pool")
    arguments = x | {"state_indices": jnp.asarray(indices)}
    compiled = run.lower(**arguments, state_pool=before).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= before.nbytes
    assert memory.temp_size_in_bytes < before.nbytes // SLOTS, "no state is copied"
    kept, where = np.asarray(before), before.unsafe_buffer_pointer()
    out, after = run(**arguments, state_pool=before)
    assert after.unsafe_buffer_pointer() == where
    assert error(out, wanted_out) <= FLOOR["bfloat16"]
    used = [slot for slot in indices if 0 <= slot < SLOTS]
    assert error(after[np.array(used)], wanted[np.array(used)]) <= FLOOR[dtype]
    for slot in {*range(SLOTS)} - {*used}:
        assert np.asarray(after[slot]).tobytes() == kept[slot].tobytes()
    assert not np.asarray(out, np.float32)[[2, 5]].any()


def test_a_pool_that_is_not_donated_stays():
    x, before = token(False, "bfloat16"), pool("float32")
    kept = np.asarray(before).copy()
    cuts = np.arange(M + 1)
    arrays = (x["query"], x["key"], x["value"], x["beta"], x["g"][..., 0], before, cuts, slots())
    out, after = kernels.ragged_gated_delta_rule(*arrays, max_query_len=1, platform="triton")
    wanted_out, wanted = kernels.ragged_gated_delta_rule(*arrays, max_query_len=1, platform="xla")
    assert np.asarray(before).tobytes() == kept.tobytes()
    assert error(out, wanted_out) <= FLOOR["bfloat16"] and error(after, wanted) <= FLOOR["float32"]


def test_many_steps_carry_a_pool():
    """In a loop of the program, whose carry is the pool: it is neither copied nor mistaken."""
    x, indices, steps = token(False, "bfloat16"), jnp.asarray(slots()), 20

    def loop(platform):
        def step(states, _):
            out, states = pool_op(**x, state_pool=states, state_indices=indices, platform=platform)
            return states, out

        return jax.jit(lambda states: jax.lax.scan(step, states, None, steps), donate_argnums=0)

    program = loop("triton")
    memory = program.lower(pool("float32")).compile().memory_analysis()
    assert memory.temp_size_in_bytes < pool("float32").nbytes // 4
    after, out = program(pool("float32"))
    wanted, wanted_out = loop("xla")(pool("float32"))
    assert error(after, wanted) <= 1e-5 and error(out, wanted_out) <= FLOOR["bfloat16"]


def test_more_than_two_to_the_31_elements():
    heads, many = 64, 2100
    x = token(False, "bfloat16", requests=3)
    x = {n: jnp.repeat(y, heads // N, 1) for n, y in x.items()}
    states = jnp.zeros((many, heads, H, H), jnp.bfloat16)
    assert states.size > 2**31
    last = jax.random.normal(jax.random.key(0), (heads, H, H), jnp.bfloat16)
    states = states.at[many - 1].set(last)
    indices = jnp.array([many - 1, 0, many - 2], jnp.int32)
    run = jax.jit(functools.partial(pool_op, platform="triton"), donate_argnames="state_pool")
    small = jnp.zeros((3, heads, H, H), jnp.bfloat16).at[0].set(last)
    wanted_out, wanted = pool_op(**x, state_pool=small, state_indices=jnp.arange(3), platform="xla")
    out, states = run(**x, state_pool=states, state_indices=indices)
    assert error(out, wanted_out) <= FLOOR["bfloat16"]
    assert error(states[indices], wanted) <= FLOOR["bfloat16"]
