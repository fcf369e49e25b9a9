"""The walk over blocks of tokens: the matmuls, which are XLA's on every device, around what a backend does with the logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels._core.binding import Call

# Logits of one block of each model, in elements: 2^25 float32 are 128 MiB. Every block reads both heads and, in the backward,
# reads and writes a float32 gradient, so below about a thousand rows the matmuls wait for memory whatever the vocabulary.
_BLOCK_ELEMENTS, _LEAST_ROWS = 2**25, 1024
PER_ROW = ("student_lse", "teacher_lse", "gap", "d_student_lse", "d_gap")


def block_rows(call: Call) -> int:
    """Returns the tokens whose logits exist at one time."""
    rows = max(_LEAST_ROWS, _BLOCK_ELEMENTS // call.dims["V"] // 128 * 128)
    return max(1, min(math.prod(call.dims["lead"]), rows))


def candidates(call: Call) -> list[int]:
    """Returns the tokens of a block to choose from when tuning."""
    tokens = math.prod(call.dims["lead"])
    return [*(r for r in (256, 512, 1024, 2048, 4096) if r < tokens), max(1, tokens)]


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def _blocks(x: jax.Array, rows: int) -> jax.Array:
    """Returns [n, rows, ...] of x [T, ...], padded with zeros."""
    n = -(-x.shape[0] // rows)
    return jnp.pad(x, [(0, n * rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1)).reshape(n, rows, *x.shape[1:])


def forward_in_blocks(
    outputs_of: Callable,
    hidden: jax.Array,
    lm_head: jax.Array,
    teacher_hidden: jax.Array,
    teacher_lm_head: jax.Array,
    rows: int,
) -> Any:
    """Returns the outputs of the contract; `outputs_of` is (float32 logits [rows, V] of student, of teacher) -> those of a
    block."""
    lead = hidden.shape[:-1]
    flat = [x.reshape(-1, x.shape[-1]) for x in (hidden, teacher_hidden)]

    def block(_: None, x: Any) -> Any:
        return None, outputs_of(_dot("td,dv->tv", x[0], lm_head), _dot("td,dv->tv", x[1], teacher_lm_head))

    _, outputs = jax.lax.scan(block, None, tuple(_blocks(x, rows) for x in flat))
    return tuple(x.reshape(-1)[: flat[0].shape[0]].reshape(lead) for x in outputs)


def backward_in_blocks(
    pull: Callable,
    saved: Any,
    hidden: jax.Array,
    lm_head: jax.Array,
    teacher_hidden: jax.Array,
    teacher_lm_head: jax.Array,
    rows: int,
) -> dict[str, jax.Array]:
    """Returns the gradients; `pull` is (float32 logits [rows, V] of student, of teacher, {residual or cotangent: [rows]},
    dtype) -> the gradient of the student's logits in that dtype."""
    shape = hidden.shape
    hidden, teacher_hidden = (x.reshape(-1, x.shape[-1]) for x in (hidden, teacher_hidden))

    def block(d_head: jax.Array, x: Any) -> Any:
        h, t, row = x
        d = pull(_dot("td,dv->tv", h, lm_head), _dot("td,dv->tv", t, teacher_lm_head), row, h.dtype)
        return d_head + _dot("td,tv->dv", h, d), _dot("tv,dv->td", d, lm_head).astype(h.dtype)

    # A padded row has cotangents of zero, and residuals of zero keep its exponentials finite.
    row = {name: _blocks(saved[name].reshape(-1), rows) for name in PER_ROW}
    xs = (_blocks(hidden, rows), _blocks(teacher_hidden, rows), row)
    d_head, d_hidden = jax.lax.scan(block, jnp.zeros(lm_head.shape, jnp.float32), xs)
    return {"hidden": d_hidden.reshape(-1, shape[-1])[: hidden.shape[0]].reshape(shape), "lm_head": d_head}
