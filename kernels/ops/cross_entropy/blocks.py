"""The walk over blocks of tokens: the matmuls, which are XLA's on every device, around what a backend does with the logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels._core.binding import Call

# Logits of one block, in elements: 2^26 float32 are 256 MiB. Every block reads lm_head and, in the backward, reads and
# writes its float32 gradient, so below about a thousand rows the matmuls wait for memory whatever the vocabulary.
_BLOCK_ELEMENTS, _LEAST_ROWS = 2**26, 1024


def block_rows(call: Call) -> int:
    """Returns the tokens whose logits exist at one time."""
    rows = max(_LEAST_ROWS, _BLOCK_ELEMENTS // call.dims["V"] // 128 * 128)
    return max(1, min(math.prod(call.dims["lead"]), rows))


def candidates(call: Call) -> list[int]:
    """Returns the tokens of a block to choose from when tuning."""
    tokens = math.prod(call.dims["lead"])
    return [*(r for r in (256, 512, 1024, 2048, 4096, 8192) if r < tokens), max(1, tokens)]


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def _blocks(x: jax.Array, rows: int, fill: int = 0) -> jax.Array:
    """Returns [n, rows, ...] of x [T, ...], padded."""
    n = -(-x.shape[0] // rows)
    x = jnp.pad(x, [(0, n * rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
    return x.reshape(n, rows, *x.shape[1:])


def forward_in_blocks(
    outputs_of: Callable, hidden: jax.Array, lm_head: jax.Array, targets: jax.Array, rows: int
) -> Any:
    """Returns the outputs of the contract; `outputs_of` is (float32 logits [rows, V], targets [rows]) -> those of a block."""
    lead = targets.shape
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)

    def block(_: None, x: Any) -> Any:
        h, t = x
        return None, outputs_of(_dot("td,dv->tv", h, lm_head), t)

    _, outputs = jax.lax.scan(block, None, (_blocks(hidden, rows), _blocks(targets, rows, -1)))
    return tuple(x.reshape(-1)[: hidden.shape[0]].reshape(lead) for x in outputs)


def backward_in_blocks(
    pull: Callable, saved: Any, hidden: jax.Array, lm_head: jax.Array, targets: jax.Array, rows: int
) -> dict[str, jax.Array]:
    """Returns the gradients; `pull` is (float32 logits [rows, V], targets, (lse, d_lse, d_target_logit, d_mean_logit), dtype)
    -> the gradient of the logits in that dtype."""
    shape = hidden.shape
    hidden, targets = hidden.reshape(-1, shape[-1]), targets.reshape(-1)

    def block(d_head: jax.Array, x: Any) -> Any:
        h, t, *per_token = x
        d = pull(_dot("td,dv->tv", h, lm_head), t, per_token, h.dtype)
        return d_head + _dot("td,tv->dv", h, d), _dot("tv,dv->td", d, lm_head).astype(h.dtype)

    # A padded row has cotangents of zero, and lse = 0 keeps its exponential finite.
    per_token = (saved[n].reshape(-1) for n in ("lse", "d_lse", "d_target_logit", "d_mean_logit"))
    xs = (_blocks(hidden, rows), _blocks(targets, rows, -1), *(_blocks(x, rows) for x in per_token))
    d_head, d_hidden = jax.lax.scan(block, jnp.zeros(lm_head.shape, jnp.float32), xs)
    return {"hidden": d_hidden.reshape(-1, shape[-1])[: hidden.shape[0]].reshape(shape), "lm_head": d_head}
