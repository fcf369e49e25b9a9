"""Segment ids: which packed sequence a token belongs to, as int32 [batch, length]; negative for padding. O(S log S)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.framework.dispatch import vary_alike
from kernels.framework.requests import known

_MOST = np.iinfo(np.int32).max


def narrowed(array: Any, name: str, owner: str = "") -> Any:
    """Returns integers of any dtype as int32; NumPy arrays stay NumPy arrays, and anything else is returned unchanged.

    A plain cast could turn values beyond int32 negative, which means padding. For JAX arrays, whose values may be
    unknown, the high bits are dropped instead, and negative values stay negative.

    Args:
      owner: prefix of the message.

    Raises:
      ValueError: names the argument, if a NumPy array has values beyond int32.
    """
    if not isinstance(array, (jax.Array, np.ndarray)) or not jnp.issubdtype(array.dtype, np.integer):
        return array
    if isinstance(array, jax.Array) and array.dtype == np.int32 and not array.weak_type:
        return array  # what a cast would return, after tens of microseconds
    if np.can_cast(array.dtype, np.int32):
        return array.astype(np.int32)
    if isinstance(array, np.ndarray) and (array > _MOST).any():
        raise ValueError(f"{owner}argument {name!r} must be at most {_MOST}, got {array.max()}; renumber them")
    if not jnp.issubdtype(array.dtype, np.signedinteger):
        return (array & _MOST).astype(np.int32)
    xp: Any = np if isinstance(array, np.ndarray) else jnp
    return xp.where(array < 0, xp.maximum(array, np.iinfo(np.int32).min), array & _MOST).astype(np.int32)


def indices(values: Any, outside: int = _MOST) -> jax.Array:
    """Returns integers of any dtype as int32, with `outside` in place of values beyond int32 (a plain cast turns 2**32
    into index 0). Arrays of other dtypes are returned unchanged."""
    array = values if isinstance(values, jax.Array) else np.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        return jnp.asarray(array)
    cast = array.astype(np.int32)
    if not np.can_cast(array.dtype, np.int32):
        xp: Any = jnp if isinstance(array, jax.Array) else np
        low = -_MOST if jnp.issubdtype(array.dtype, jnp.signedinteger) else 0
        cast = xp.where((array < low) | (array > _MOST), np.int32(outside), cast)
    return jnp.asarray(cast)


def integers(value: Any, name: str) -> jax.Array:
    """Returns the ids as int32 [B, L]. Raises ValueError naming the argument if they are not integers of that shape."""
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"argument {name!r} must hold integers, got {array.dtype}")
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2:
        raise ValueError(f"argument {name!r} must be [batch, length], got {array.shape}")
    array = narrowed(array, name)
    return array if isinstance(array, jax.Array) else jnp.asarray(array)


# Jitted, as what follows is: for a call outside of any jit a loop would be compiled anew every time, and the rest op by op.
@functools.partial(jax.jit, static_argnames="side")
def searchsorted(ordered: jax.Array, values: jax.Array, side: str = "left") -> jax.Array:
    """Returns `jnp.searchsorted` as int32. That of JAX 0.11 fails an internal assertion inside a `shard_map` over some
    axes of a mesh, so code that is traced there, such as contracts, calls this one."""
    size, below = ordered.shape[0], jnp.less if side == "left" else jnp.less_equal

    def halved(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, last = bounds
        middle = (first + last) // 2
        after = (middle < last) & below(ordered[middle], values)
        return jnp.where(after, middle + 1, first), jnp.where(after, last, middle)

    first = jnp.zeros(values.shape, jnp.int32)
    bounds = vary_alike((first, first + size), ordered, values)
    steps = size.bit_length() if isinstance(size, int) else 31
    # Even a loop of zero steps is traced, and would index an empty array.
    return jax.lax.fori_loop(0, steps, halved, bounds)[0] if steps else bounds[0]


def of_cuts(cuts: Any, total: int) -> jax.Array:
    """Returns the ids [1, total] for cumulative lengths [0, n1, n1 + n2, ...]; tokens past the last one are padding."""
    cuts = jnp.asarray(cuts)
    if cuts.ndim != 1 or cuts.shape[0] < 2 or not jnp.issubdtype(cuts.dtype, jnp.integer):
        raise ValueError(
            "cumulative lengths (cum_seqlens_q, cum_seqlens_k) must be integers [0, n1, n1 + n2, ...] of length batch + 1, "
            f"got {cuts.dtype} of shape {cuts.shape}"
        )
    ids = searchsorted(cuts, jnp.arange(total), side="right") - 1
    return jnp.where(ids < cuts.shape[0] - 1, ids, -1).astype(jnp.int32)[None]


def check_cuts(name: str, cuts: Any, total: Any, owner: str = "") -> None:
    """Raises ValueError if the values of cumulative lengths are known and do not rise from 0 to at most `total`.
    `owner` is the prefix of the message."""
    values = known(cuts)
    if values is None or not isinstance(total, int):
        return
    if values[0] != 0 or (values[1:] < values[:-1]).any() or values[-1] > total:
        raise ValueError(
            f"{owner}argument {name!r} must rise from 0 to at most {total}, [0, n1, n1 + n2, ...], got {values.tolist()[:8]}; "
            "pass cumulative sums of the lengths, not the lengths"
        )


@jax.jit
def joint(a_q: Any, a_k: Any, b_q: Any, b_k: Any) -> tuple[jax.Array, jax.Array]:
    """Returns ids (q, kv) under which a pair attends iff it does under both (a_q, a_k) and (b_q, b_k).

    An id is the rank of the pair (a, b) in its row, so ids preserve the order of `a` and cannot overflow.
    """
    batch = max(x.shape[0] for x in (a_q, a_k, b_q, b_k))
    a, b = (
        jnp.concatenate([jnp.broadcast_to(x, (batch, x.shape[1])) for x in sides], 1)
        for sides in ((a_q, a_k), (b_q, b_k))
    )
    order = jnp.lexsort((b, a), axis=1)
    changes = [jnp.diff(jnp.take_along_axis(x, order, 1), axis=1) != 0 for x in (a, b)]
    ranks = jnp.pad(jnp.cumsum(changes[0] | changes[1], axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    ids = jnp.where((a >= 0) & (b >= 0), jnp.take_along_axis(ranks, jnp.argsort(order, axis=1), 1), -1)
    return ids[:, : a_q.shape[1]], ids[:, a_q.shape[1] :]


@jax.jit
def rank(ids: jax.Array, order: Any = None) -> jax.Array:
    """Returns int32 [B, L]: the number of earlier tokens in the row with the same id.

    Args:
      order: int [L], each token's position in the sequence, if the row is permuted.
    """
    if order is not None:
        return jnp.take(rank(jnp.take(ids, jnp.argsort(jnp.asarray(order)), axis=1)), jnp.asarray(order), axis=1)
    by_id = jnp.argsort(ids, axis=1, stable=True)
    ordered = jnp.take_along_axis(ids, by_id, 1)
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    first = jnp.pad(ordered[:, 1:] != ordered[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    ranks = index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)
    return jnp.take_along_axis(ranks, jnp.argsort(by_id, axis=1), 1)


@jax.jit
def occurrences(ids: jax.Array, among: jax.Array) -> jax.Array:
    """Returns int32 [B, L]: how often each id of `ids` occurs in the same row of `among`."""
    batch = max(ids.shape[0], among.shape[0])
    ids, among = (jnp.broadcast_to(x, (batch, x.shape[1])) for x in (ids, jnp.sort(among, axis=1)))
    first = jax.vmap(searchsorted)(among, ids)
    last = jax.vmap(lambda row, x: searchsorted(row, x, side="right"))(among, ids)
    return last - first
