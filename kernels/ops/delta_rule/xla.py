"""The delta rules in plain XLA: chunks of a few matmuls, run forward and backward by
`kernels/engines/scan/chunks.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.scan import chunks as chunked
from kernels.engines.scan.chunks import Chunks, Step, Tokens
from kernels.framework.execute import Saved, backward_of
from kernels.ops.delta_rule import chunk
from kernels.ops.delta_rule.contract import check_states, normalized, op, rwkv7_op, scale_of
from kernels.ops.delta_rule.pool import pool_op, ragged_delta_rule

MOST_TOKENS = 64  # per chunk


def _precision(dtype: Any) -> Any:
    """Uses true float32 for float32 inputs; for lower precision the hardware's fast passes over float32 operands
    suffice."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype).itemsize > 2 else jax.lax.Precision.DEFAULT


def _per_head(x: jax.Array) -> jax.Array:
    """Returns x [B, C, N, ...] as float32 [B, N, C, ...]."""
    return jnp.swapaxes(x, 1, 2).astype(jnp.float32)


def _step(prepare: Callable[[None, dict[str, jax.Array], Tokens], chunk.Parts], dtype: Any, precision: Any) -> Step:
    def read(_: None, parts: chunk.Parts, state: jax.Array) -> jax.Array:
        return jnp.swapaxes(chunk.read(parts, state, precision=precision), 1, 2).astype(dtype)

    return Step(prepare, functools.partial(chunk.advance, precision=precision), read)


def _delta_step(softmax_scale: float | None, use_qk_l2norm: bool, dtype: Any) -> Step:
    precision = _precision(dtype)

    def prepare(_: None, x: dict[str, jax.Array], tokens: Tokens) -> chunk.Parts:
        q, k, v, beta = (_per_head(x[name]) for name in ("query", "key", "value", "beta"))
        if use_qk_l2norm:
            q, k = normalized(q), normalized(k)
        q = q * scale_of(softmax_scale, q.shape[-1])
        q, k = (jnp.repeat(y, v.shape[1] // k.shape[1], axis=1) for y in (q, k))
        g, beta = _per_head(x["g"]) if "g" in x else None, beta[..., None]
        return chunk.prepare(tokens.resets, g, q, k, beta * v, -beta * k, precision=precision)

    return _step(prepare, dtype, precision)


def _rwkv7_step(softmax_scale: float | None, dtype: Any) -> Step:
    precision = _precision(dtype)

    def prepare(_: None, x: dict[str, jax.Array], tokens: Tokens) -> chunk.Parts:
        r, w, k, v, a, b = (_per_head(x[name]) for name in "rwkvab")
        r = r * scale_of(softmax_scale, r.shape[-1])
        return chunk.prepare(tokens.resets, w, r, k, v, a, b, precision=precision)

    return _step(prepare, dtype, precision)


def _delta(query, key, value, beta, g, softmax_scale, use_qk_l2norm):
    """Returns (step, its arrays) for a call of delta_rule."""
    xs = {"query": query, "key": key, "value": value, "beta": beta} | ({} if g is None else {"g": g})
    return _delta_step(softmax_scale, use_qk_l2norm, value.dtype), xs


def _rwkv7(r, w, k, v, a, b, softmax_scale):
    return _rwkv7_step(softmax_scale, v.dtype), {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}


def _states(
    name: str, value: Any, width: int, segment_ids: Any, initial_state: Any, num_states: int, cfg: Any
) -> tuple[Chunks, jax.Array]:
    """Returns the chunks of `value` [B, T, N, Hv], and the initial states [B, num_states, N, H, Hv]."""
    check_states(name, initial_state, segment_ids, num_states)
    B, T, N, Hv = value.shape
    if initial_state is None:
        initial_state = jnp.zeros((B, num_states, N, width, Hv), jnp.float32)
    return Chunks(B, T, cfg, segment_ids, num_states), initial_state.astype(jnp.float32)


def _gradients(step: Step, states: Any, xs: dict[str, jax.Array], saved: Saved, initial_state: Any) -> dict[str, Any]:
    chunks, initial = states
    d_initial, gradients, _ = chunked.backward(step, chunks, initial, xs, saved.d_final_state, saved.d_out)
    return gradients | ({} if initial_state is None else {"initial_state": d_initial})


def forward(
    query, key, value, beta, g, segment_ids, initial_state, softmax_scale, use_qk_l2norm, num_states, cfg
):  # fmt: skip
    step, xs = _delta(query, key, value, beta, g, softmax_scale, use_qk_l2norm)
    chunks, initial = _states("delta_rule", value, key.shape[-1], segment_ids, initial_state, num_states, cfg)
    final, out = chunked.forward(step, chunks, initial, xs)
    return out, final


def backward(
    saved, query, key, value, beta, g, segment_ids, initial_state, softmax_scale, use_qk_l2norm, num_states, cfg
):  # fmt: skip
    step, xs = _delta(query, key, value, beta, g, softmax_scale, use_qk_l2norm)
    states = _states("delta_rule", value, key.shape[-1], segment_ids, initial_state, num_states, cfg)
    return _gradients(step, states, xs, saved, initial_state)


def rwkv7_forward(r, w, k, v, a, b, segment_ids, initial_state, softmax_scale, num_states, cfg):
    step, xs = _rwkv7(r, w, k, v, a, b, softmax_scale)
    chunks, initial = _states("rwkv7", v, k.shape[-1], segment_ids, initial_state, num_states, cfg)
    final, out = chunked.forward(step, chunks, initial, xs)
    return out, final


def rwkv7_backward(saved, r, w, k, v, a, b, segment_ids, initial_state, softmax_scale, num_states, cfg):
    step, xs = _rwkv7(r, w, k, v, a, b, softmax_scale)
    states = _states("rwkv7", v, k.shape[-1], segment_ids, initial_state, num_states, cfg)
    return _gradients(step, states, xs, saved, initial_state)


def pool_forward(
    query, key, value, beta, state_pool, state_indices, g, has_initial_state, softmax_scale, use_qk_l2norm
):  # fmt: skip
    """The contract itself, which is one token without a loop: XLA gathers states, and scatters them."""
    options = {"softmax_scale": softmax_scale, "use_qk_l2norm": use_qk_l2norm}
    return ragged_delta_rule(query, key, value, beta, state_pool, state_indices, g, has_initial_state, **options)


def rejects(call):
    return "an array has no elements" if 0 in call.dims.values() else None


_FACTS: dict[str, Any] = {
    "platforms": {"cpu", "cuda", "rocm", "tpu"},
    "dtypes": {"float32", "bfloat16", "float16"},
    **chunked.tunables(MOST_TOKENS, lambda d: d["B"] * d["N"] * max(d["H"], d["Hv"])),
    "rejects": rejects,
    "symbolic": {"B"},
}
op.register(forward, backward, **_FACTS)
rwkv7_op.register(rwkv7_forward, rwkv7_backward, **_FACTS)
pool_op.register(
    pool_forward,
    backward_of(pool_op, pool_forward),
    **{name: _FACTS[name] for name in ("platforms", "dtypes", "rejects")},
    symbolic={"M"},
)
