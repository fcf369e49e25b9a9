"""The contracts of the delta rules: loops over time, one token per step, and the cases that backends are tested
with."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.recurrence import loop
from kernels.framework.binding import Call
from kernels.framework.contract import Op
from kernels.framework.measured import bucket, power_of_two
from kernels.framework.work import Work, nbytes
from kernels.ops.delta_rule import cases

# Added under the square root of the norm, as in models that normalise queries and keys.
NORM_EPS = 1e-6


def compute_dtype(*arrays: Any) -> Any:
    """Returns the dtype to compute in: float32, or float64 if any array has it."""
    return jnp.result_type(jnp.float32, *(x.dtype for x in arrays if x is not None))


def normalized(x: jax.Array) -> jax.Array:
    """Returns x / sqrt(|x|^2 + NORM_EPS) over the last dim."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)


def scale_of(softmax_scale: float | None, width: int) -> float:
    return width**-0.5 if softmax_scale is None else softmax_scale


def check_states(op: str, initial_state: Any, segment_ids: Any, num_states: int) -> None:
    """Raises ValueError if the initial states, segment ids and number of states are inconsistent."""
    if num_states < 1:
        raise ValueError(f"{op}: argument 'num_states' must be at least 1, got {num_states}")
    if initial_state is not None and initial_state.shape[1] != num_states:
        raise ValueError(
            f"{op}: argument 'initial_state' must be [B, num_states, N, H, Hv] with num_states = {num_states}, got "
            f"{initial_state.shape}"
        )
    if num_states > 1 and segment_ids is None:
        raise ValueError(
            f"{op}: argument 'segment_ids' must assign tokens to the num_states = {num_states} sequences, got None"
        )


def delta_rule(
    query: Float[Array, "B T K H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T N Hv"],
    beta: Float[Array, "B T N"],
    g: Float[Array, "B T N #H"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B G N H Hv"] | None = None,
    *,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = False,
    num_states: int = 1,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B G N H Hv"]]:
    """Returns (out, final_state) of the gated delta rule, with S_t [H, Hv] of each head

        S' = diag(exp g_t) S_{t-1},  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T,  out_t = softmax_scale * S_t^T q_t.

    Value head n uses head n // (N / K) of queries and keys. States are float32.

    Args:
      g: log decays, one per channel (last dim H) or one for all (1); None: no decay.
      segment_ids: with num_states == 1 the state is reset to zero where they change; the first segment continues from
        the initial state. A negative id is padding: its output is 0 and it leaves the state unchanged. With num_states
        == G > 1, segment i in [0, G) starts from initial_state[:, i] and ends in final_state[:, i].
      initial_state: None: zeros.
      softmax_scale: default 1 / sqrt(H).
      use_qk_l2norm: whether to normalise queries and keys first.
    """
    check_states("delta_rule", initial_state, segment_ids, num_states)
    dtype, (H, N) = compute_dtype(query, value, beta, g, initial_state), (query.shape[-1], value.shape[2])
    q, k = (jnp.repeat(x.astype(dtype), N // key.shape[2], axis=2) for x in (query, key))
    if use_qk_l2norm:
        q, k = normalized(q), normalized(k)
    xs = {"q": q * scale_of(softmax_scale, H), "k": k, "v": value.astype(dtype), "beta": beta.astype(dtype)}
    xs["g"] = jnp.zeros((*beta.shape, 1), dtype) if g is None else g.astype(dtype)

    def step(state: jax.Array, x: dict) -> tuple[jax.Array, jax.Array]:
        state = jnp.exp(x["g"])[..., None] * state
        error = x["v"] - jnp.einsum("bnhv,bnh->bnv", state, x["k"])
        state += jnp.einsum("bn,bnh,bnv->bnhv", x["beta"], x["k"], error)
        return state, jnp.einsum("bnhv,bnh->bnv", state, x["q"])

    start = jnp.zeros((value.shape[0], N, H, value.shape[-1]), dtype)
    out, final = loop(step, xs, start, segment_ids, initial_state, num_states)
    return out.astype(value.dtype), final


def rwkv7(
    r: Float[Array, "B T N H"],
    w: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N Hv"],
    a: Float[Array, "B T N H"],
    b: Float[Array, "B T N H"],
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B G N H Hv"] | None = None,
    *,
    softmax_scale: float | None = None,
    num_states: int = 1,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B G N H Hv"]]:
    """Returns (out, final_state) of the recurrence of RWKV-7, with S_t [H, Hv] of each head

        S_t = diag(exp w_t) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T,  out_t = softmax_scale * S_t^T r_t.

    So `a` reads the state before token t, and `b` writes back what was read. States are float32.

    Args:
      w: log decays.
      segment_ids, initial_state, softmax_scale, num_states: as in `delta_rule`.
    """
    check_states("rwkv7", initial_state, segment_ids, num_states)
    dtype, (_, _, N, H) = compute_dtype(r, w, k, v, a, b, initial_state), r.shape
    xs = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
    xs = {name: x.astype(dtype) for name, x in xs.items()}

    def step(state: jax.Array, x: dict) -> tuple[jax.Array, jax.Array]:
        read = jnp.einsum("bnhv,bnh->bnv", state, x["a"])
        state = jnp.exp(x["w"])[..., None] * state
        state += x["b"][..., None] * read[..., None, :] + x["k"][..., None] * x["v"][..., None, :]
        return state, jnp.einsum("bnhv,bnh->bnv", state, x["r"] * scale_of(softmax_scale, H))

    start = jnp.zeros((v.shape[0], N, H, v.shape[-1]), dtype)
    out, final = loop(step, xs, start, segment_ids, initial_state, num_states)
    return out.astype(v.dtype), final


def _bytes(call: Call, arrays: tuple[str, ...], states: tuple[int, ...]) -> tuple[int, int]:
    """Returns the bytes of (the arrays, both float32 states)."""
    return nbytes(*(call.arguments[name] for name in arrays)), 2 * 4 * math.prod(states)


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of both directions for the plain recurrence: the state decays, is read by k and q, and written
    by k. A chunked form does more arithmetic, on matrix units."""
    d = call.dims
    H, Hv = d["H"], d["Hv"]
    arrays = ("query", "key", "value", "beta", "g")
    moved, states = _bytes(call, arrays, (d["B"], call.num_states, d["N"], H, Hv))
    flops = d["B"] * d["T"] * d["N"] * H * Hv * (6 + (call.g is not None))
    out = nbytes(call.value)
    # The backward recomputes the states, and each product of the forward yields two.
    return Work(flops, moved + out + states), Work(3 * flops, 2 * moved + out + 2 * states)


def rwkv7_work(call: Call) -> tuple[Work, Work]:
    """Returns the work of both directions, as in `work`: the state is read by a and r, and written by b and k."""
    d = call.dims
    moved, states = _bytes(call, ("r", "w", "k", "v", "a", "b"), (d["B"], call.num_states, d["N"], d["H"], d["Hv"]))
    flops = d["B"] * d["T"] * d["N"] * d["H"] * d["Hv"] * 9
    out = nbytes(call.v)
    return Work(flops, moved + out + states), Work(3 * flops, 2 * moved + out + 2 * states)


def autotune_key(call: Call) -> str:
    """Returns the measurement key of a call: what decays, the width of a state, and the numbers of heads and of tokens."""
    kind = "channels" if call.g is not None and call.g.shape[-1] > 1 else "heads"
    width, heads = power_of_two(max(call.dims["H"], call.dims["Hv"])), bucket(call.dims["B"] * call.dims["N"], 16, 64)
    return f"{call.dtype} {kind} width<={width} heads{heads} tokens{bucket(call.dims['T'], 2, 64, 4096, 32768)}"


op = Op(
    delta_rule,
    outputs=("out", "final_state"),
    local_dims={"B", "N", "K", "Hv"},
    tied_dims=(("N", "K"),),
    see_also={"T": "gated_delta_rule"},
    ordered=True,
    autotune_key=autotune_key,
    same_dtype=("query", "key", "value"),
    config=ChunkConfig,
    cases=cases.DELTA,
    work=work,
)

rwkv7_op = Op(
    rwkv7,
    outputs=("out", "final_state"),
    local_dims={"B", "N", "Hv"},
    see_also={"T": "rwkv7"},
    ordered=True,
    same_dtype=("r", "k", "v"),
    config=ChunkConfig,
    cases=cases.RWKV7,
    work=rwkv7_work,
)
