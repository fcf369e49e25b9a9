"""The contract of the delta rules for decoding: one token of each of many requests, their states in a pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.engines.scan.chunks import ChunkConfig
from kernels.framework.binding import Call
from kernels.framework.contract import Op
from kernels.framework.measured import bucket, power_of_two
from kernels.framework.work import Work, nbytes
from kernels.ops.delta_rule import cases
from kernels.ops.delta_rule.contract import compute_dtype, normalized, scale_of


def used_slots(state_indices: jax.Array, slots: int) -> tuple[jax.Array, jax.Array]:
    """Returns (bool [M]: which tokens have a slot of the pool, int [M]: their slots, `slots` for those that have none)."""
    used = (state_indices >= 0) & (state_indices < slots)
    return used, jnp.where(used, state_indices, slots)


def ragged_delta_rule(
    query: Float[Array, "M K H"],
    key: Float[Array, "M K H"],
    value: Float[Array, "M N Hv"],
    beta: Float[Array, "M N"],
    state_pool: Float[Array, "slots N H Hv"],
    state_indices: Int[Array, " M"],
    g: Float[Array, "M N #H"] | None = None,
    has_initial_state: Bool[Array, " M"] | None = None,
    *,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = False,
) -> tuple[Float[Array, "M N Hv"], Float[Array, "slots N H Hv"]]:
    """Returns (out, new pool) of `delta_rule` for one token of each request, computed in float32.

    The state before token m is state_pool[state_indices[m]], or zeros where `has_initial_state` is false, whatever is there;
    the one after it is stored there in the dtype of the pool. All other slots are returned bit for bit. A token with a
    negative slot, or one past the pool, is padding: its output is 0, and it writes nothing. Two tokens with one slot are not
    allowed: the output and the state of either may be lost, or be of both.

    Args:
      g, softmax_scale, use_qk_l2norm: as in `delta_rule`.
    """
    dtype, (H, N) = compute_dtype(query, value, beta, g, state_pool), (query.shape[-1], value.shape[1])
    q, k = (x.astype(dtype) for x in (query, key))
    if use_qk_l2norm:
        q, k = normalized(q), normalized(k)
    q, k = (jnp.repeat(x, N // key.shape[1], axis=1) for x in (q * scale_of(softmax_scale, H), k))
    used, slots = used_slots(state_indices, state_pool.shape[0])
    begun = used if has_initial_state is None else used & has_initial_state
    state = jnp.where(begun[:, None, None, None], state_pool.at[slots].get(mode="clip").astype(dtype), 0)
    if g is not None:
        state = jnp.exp(g.astype(dtype))[..., None] * state
    highest = jax.lax.Precision.HIGHEST
    error = value.astype(dtype) - jnp.einsum("mnhv,mnh->mnv", state, k, precision=highest)
    state += k[..., None] * (beta.astype(dtype)[..., None] * error)[..., None, :]
    out = jnp.einsum("mnhv,mnh->mnv", state, q, precision=highest)
    pool = state_pool.at[slots].set(state.astype(state_pool.dtype), mode="drop")
    return jnp.where(used[:, None, None], out, 0).astype(value.dtype), pool


def pool_work(call: Call) -> tuple[Work, Work]:
    """Returns the work of both directions: as that of one token of `delta_rule`, with states in the dtype of the pool, of which
    the slots of the tokens alone are read and written. The gradient of the pool has all slots."""
    d = call.dims
    state = d["H"] * d["Hv"]
    flops = d["M"] * d["N"] * state * (6 + (call.g is not None))
    arrays = nbytes(*(call.arguments[name] for name in ("query", "key", "value", "beta", "g", "state_indices")))
    pool, out = nbytes(call.state_pool), nbytes(call.value)
    states = pool * d["M"] // d["slots"]
    return Work(flops, arrays + out + 2 * states), Work(3 * flops, 2 * arrays + out + states + 2 * pool)


def autotune_key(call: Call) -> str:
    """Returns the measurement key of a call: what decays, the dtype and the width of a state, and the number of heads."""
    kind = "channels" if call.g is not None and call.g.shape[-1] > 1 else "heads"
    width, heads = power_of_two(max(call.dims["H"], call.dims["Hv"])), bucket(call.dims["M"] * call.dims["N"], 64, 1024)
    return f"{call.dtype} {kind} {call.state_pool.dtype} width<={width} heads{heads}"


pool_op = Op(
    ragged_delta_rule,
    outputs=("out", "new_pool"),
    local_dims={"N", "K", "Hv"},
    tied_dims=(("N", "K"),),
    autotune_key=autotune_key,
    same_dtype=("query", "key", "value"),
    config=ChunkConfig,
    cases=cases.POOL,
    work=pool_work,
)
