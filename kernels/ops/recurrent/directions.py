"""What every backend of recurrent cells has: the directions of a call, its tokens by segment, and gradients of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.engines.scan.recurrence import last_valid_before, resets
from kernels.ops.recurrent.contract import CELLS, check_weights, of_direction


def dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a product of arrays of the same dtype, in the second's, accumulated in float32."""
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a.astype(b.dtype), b, precision=precision, preferred_element_type=jnp.float32)


class Tokens(NamedTuple):
    """Per token, [T, B]; all None if each row is one segment.

    Attributes:
      valid: whether it is not padding.
      begins: whether the state is reset before it.
      owner: with several states, the index of its state; `num_states` for none.
      ends: with several states, whether it is the last of its segment.
    """

    valid: Any = None
    begins: Any = None
    owner: Any = None
    ends: Any = None


def tokens_of(segment_ids: jax.Array | None, num_states: int) -> Tokens:
    """Returns where segments begin and end, of a call with so many states."""
    if segment_ids is None:
        return Tokens()
    valid = segment_ids >= 0
    if num_states == 1:
        return Tokens(valid.T, resets(segment_ids).T)
    valid &= segment_ids < num_states
    ids = jnp.where(valid, segment_ids, -1)
    begins = valid & (ids != last_valid_before(ids))
    ends = valid & (ids != last_valid_before(ids[:, ::-1])[:, ::-1])
    return Tokens(valid.T, begins.T, jnp.where(valid, ids, num_states).T, ends.T)


class Direction(NamedTuple):
    """One direction of a call.

    Attributes:
      end: suffix of the names of its weights. way: its step in time.
      inputs: [B, T, D] in its order, 0 for padding. weights: by their names without the suffix.
      initial: the states that sequences start from, float32 [B, G, n, F].
    """

    end: str
    way: int
    inputs: jax.Array
    weights: dict[str, Any]
    tokens: Tokens
    initial: jax.Array


def directions(
    inputs: jax.Array,
    weights: Mapping[str, Any],
    segment_ids: jax.Array | None,
    initial_state: jax.Array | None,
    cell_type: str,
    activation: str,
    bidirectional: bool,
    num_states: int,
) -> Iterator[Direction]:
    """Yields the directions of a call."""
    F = check_weights(weights, inputs.shape[2], cell_type, activation, bidirectional)
    n = CELLS[cell_type][1]
    for i, end in enumerate(("", "_reverse") if bidirectional else ("",)):
        way, rows = -1 if end else 1, slice(i * n, (i + 1) * n)
        ids = None if segment_ids is None else segment_ids[:, ::way]
        zeros = jnp.zeros((inputs.shape[0], num_states, n, F), jnp.float32)
        layer_state = zeros if initial_state is None else initial_state[:, :, rows]
        tokens = tokens_of(ids, num_states)
        x = inputs[:, ::way]
        x = x if ids is None else jnp.where((ids >= 0)[..., None], x, 0)
        yield Direction(end, way, x, of_direction(weights, end), tokens, layer_state.astype(jnp.float32))


def gradients_of_weights(
    d_x: jax.Array, d_gates: jax.Array, inputs: jax.Array, hidden: jax.Array, weights: Mapping[str, Any]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the gradients of the inputs [B, T, D] and of the weights, one matmul each.

    Args:
      d_x, d_gates: gradients of the gates of the input and of the hidden state, [T, B, gates F].
      hidden: the hidden state before each token, [T, B, F].
    """
    d = {
        "weight_ih": dot("tbg,btd->gd", d_x, inputs),
        "weight_hh": dot("tbg,tbf->gf", d_gates, hidden.astype(inputs.dtype)),
        "bias_ih": jnp.sum(d_x, axis=(0, 1), dtype=jnp.float32),
        "bias_hh": jnp.sum(d_gates, axis=(0, 1), dtype=jnp.float32),
    }
    return jnp.moveaxis(dot("tbg,gd->tbd", d_x, weights["weight_ih"]), 0, 1), {n: d[n] for n in weights}


def merged(parts: list, segment_ids: jax.Array | None, initial_state: jax.Array | None) -> dict[str, Any]:
    """Returns the gradients of a call. parts: of each direction (itself, d_inputs, d_weights, d_initial)."""
    d_inputs = sum(dx[:, :: of.way] for of, dx, _, _ in parts)
    if segment_ids is not None:
        d_inputs = jnp.where((segment_ids >= 0)[..., None], d_inputs, 0)
    gradients = {"inputs": d_inputs, "weights": {n + of.end: g for of, _, dw, _ in parts for n, g in dw.items()}}
    d_initial = [d for _, _, _, d in parts]
    return gradients | ({} if initial_state is None else {"initial_state": jnp.concatenate(d_initial, axis=2)})
