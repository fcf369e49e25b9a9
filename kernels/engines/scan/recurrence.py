"""Recurrences over a sequence: arguments shared by their public functions, and where a state is reset.

All recurrences share one form of contract. Besides its own arrays, each takes

- `segment_ids` Int[B, T]: a token continues the last valid one of its row iff their ids are equal. A negative id is
  padding: its output is 0 and it leaves the state unchanged;
- `initial_state` Float[B, G, ...] and the option `num_states` = G;

and returns `(out, final_state [B, G, ...])`. With one state, it enters at a row's first token, leaves after its last,
and is reset where the id changes. With several (packed sequences), ids are in [0, G) and the tokens of a segment are
contiguous: segment g starts from initial_state[:, g] and ends in final_state[:, g]. A segment without tokens ends in
its initial state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from kernels.framework import segments
from kernels.framework.binding import is_array, is_float_array
from kernels.framework.contract import Op
from kernels.framework.dims import named
from kernels.framework.dispatch import vary_alike
from kernels.framework.public import Prepared

# -- arguments of public functions -------------------------------------------------------------------------------------


class Where(TypedDict, total=False):
    """Arguments of every public function of a recurrence that define its sequences.

    Every recurrence also takes:
      segment_ids: int [B, T]. The state is reset where the id changes. A token with a negative id is padding: its
        output is 0, and it leaves the state unchanged.
      cum_seqlens, cu_seqlens: two names for cumulative lengths [0, n1, n1 + n2, ...], int [sequences + 1], which split
        one packed row (B = 1) into sequences. The state then has dims [sequences, ...] instead of [B, ...].
      initial_state: another name for the state before the first token.
    """

    segment_ids: Any
    cum_seqlens: Any
    cu_seqlens: Any
    initial_state: Any


def either(op_name: str, **aliases: Any) -> Any:
    """Returns the value of an argument with several names; None if it is not given.

    Raises:
      ValueError: it is given under two names.
    """
    passed = {name: value for name, value in aliases.items() if value is not None}
    if len(passed) > 1:
        names = " and ".join(map(repr, passed))
        raise ValueError(f"{op_name}: arguments {names} are two names for the same argument; pass only one")
    return next(iter(passed.values()), None)


@dataclass(frozen=True)
class Sequences:
    """A public function's sequences and states, in the contract's form.

    Attributes:
      segment_ids: int32 [B, T]; None: each row is one sequence.
      initial_state: float32 [B, G, ...], or None for the operation's default.
      num_states: G of the contract.
      packed: whether the caller's states are [sequences, ...], with B = 1, instead of [B, ...].
    """

    segment_ids: jax.Array | None
    initial_state: jax.Array | None
    num_states: int
    packed: bool

    @property
    def arguments(self) -> dict[str, Any]:
        """The contract's arguments, by name. Those not needed are left out of the call, so that every backend supports
        it."""
        named = {"segment_ids": self.segment_ids, "initial_state": self.initial_state}
        return {n: v for n, v in named.items() if v is not None} | (
            {"num_states": self.num_states} if self.num_states > 1 else {}
        )

    @property
    def cuts(self) -> str:
        """Name of the argument with cumulative lengths, if given, for `Prepared`."""
        return "cum_seqlens" if self.packed else ""

    def state(self, final_state: jax.Array) -> jax.Array:
        """Converts the contract's state [B, G, ...] to the caller's [B, ...] or [sequences, ...]."""
        return final_state[0] if self.packed else final_state[:, 0]

    def state_dims(self, dims: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the dims of the caller's state, for `Prepared`, given the contract's dims after B and G."""
        return ("G" if self.packed else "B", *dims)


def sequences(
    op_name: str,
    shape: tuple[Any, Any],
    state_shape: tuple[Any, ...],
    *,
    segment_ids: Any = None,
    cum_seqlens: Any = None,
    cu_seqlens: Any = None,
    initial_state: Any = None,
    return_state: bool = False,
) -> Sequences:
    """Converts the arguments of a public function to the contract's form.

    Args:
      shape: (B, T) of the operation's arrays.
      state_shape: shape of one sequence's state.
      segment_ids: int [B, T] (or [T] if B = 1); padding is negative.
      cum_seqlens, cu_seqlens: int [sequences + 1], two names for cumulative lengths [0, n1, n1 + n2, ...] of the single
        row.
      initial_state: float [B, *state_shape], or with cumulative lengths [sequences, *state_shape].
      return_state: whether the caller wants the states.

    Raises:
      ValueError: names the argument.
    """
    B, T = shape
    cuts = either(op_name, cum_seqlens=cum_seqlens, cu_seqlens=cu_seqlens)
    if cuts is not None and segment_ids is not None:
        raise ValueError(
            f"{op_name}: arguments 'segment_ids' and 'cum_seqlens' both define where sequences begin; pass only one"
        )
    ids, count = None, B
    if cuts is not None:
        ids, count = _of_cuts(op_name, cuts, B, T)
    elif segment_ids is not None:
        ids = _ids(op_name, segment_ids, B, T)
    if initial_state is not None:
        initial_state = _state(op_name, initial_state, (count, *state_shape), cuts is not None)
    if cuts is None:
        initial_state = None if initial_state is None else initial_state[:, None]
        return Sequences(ids, initial_state, 1, packed=False)
    if initial_state is None and not return_state:
        return Sequences(ids, None, 1, packed=True)  # one state at a time is enough, as all sequences start alike
    return Sequences(ids, None if initial_state is None else initial_state[None], count, packed=True)


def sizes(
    op_name: str, arrays: Mapping[str, tuple[Any, str]], remedies: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Returns the size of each dim of the arrays, given as name -> (array, "B T N H").

    Args:
      remedies: name -> text to append to the error message about that array.

    Raises:
      ValueError: names the first array that is not a float array with its dims, is empty, or disagrees with an earlier
        one.
    """
    sizes_by_dim: dict[str, Any] = {}
    first: dict[str, str] = {}
    for name, (x, dims) in arrays.items():
        subject, remedy = f"{op_name}: argument {name!r}", (remedies or {}).get(name, "")
        if not is_array(x) or not is_float_array(x) or x.ndim != len(dims.split()):
            raise ValueError(f"{subject} must be a float array [{', '.join(dims.split())}], got {described(x)}{remedy}")
        if any(isinstance(n, int) and n == 0 for n in x.shape):
            raise ValueError(f"{subject} of shape {x.shape} has no elements; every dim must be at least 1")
        dims_of_array = dict(zip(dims.split(), x.shape, strict=True))
        expected = dims_of_array | {d: n for d, n in sizes_by_dim.items() if d in dims_of_array}
        for d in dims_of_array:
            if dims_of_array[d] != expected[d]:
                raise ValueError(
                    f"{subject} must have the shape {tuple(expected.values())} to match {first[d]!r} of shape "
                    f"{arrays[first[d]][0].shape}, got {x.shape}{remedy}"
                )
            first.setdefault(d, name)
        sizes_by_dim |= dims_of_array
    return sizes_by_dim


def array_of(value: Any) -> Any:
    """Returns the value as an array, a NumPy one unless it is an array already; None if it cannot be converted."""
    try:
        return value if is_array(value) else np.asarray(value)
    except ValueError:  # ragged lists
        return None


def integers(value: Any) -> Any:
    """Returns the value as an array of integers; None if it cannot be converted."""
    array = array_of(value)
    return None if array is None or not jnp.issubdtype(array.dtype, jnp.integer) else array


def described(x: Any) -> str:
    """Describes a value for an error message: dtype and shape, or the type."""
    return f"{x.dtype} of shape {x.shape}" if is_array(x) else type(x).__name__


def prepared(
    op: Op,
    op_name: str,
    arguments: Mapping[str, Any],
    shape: tuple[Any, ...],
    where: Mapping[str, Any],
    *,
    state: Any,
    return_state: bool,
    finish: Callable[[jax.Array], jax.Array] = lambda out: out,
) -> Prepared:
    """Returns the call of a recurrence, which returns the output, or with `return_state` (out, state).

    Args:
      op_name: name of the public function.
      arguments: arguments of the contract, by name, other than those of sequences and states; None is left out.
      shape: (B, T, and the dims of one state).
      where: the function's arguments from `Where`.
      finish: function applied to the output.

    Raises:
      ValueError: names the argument.
    """
    where = dict(where)
    first = either(op_name, initial_state=where.pop("initial_state", None), state=state)
    seqs = sequences(op_name, shape[:2], shape[2:], **where, initial_state=first, return_state=return_state)
    call = op.bind(**{n: x for n, x in arguments.items() if x is not None}, **seqs.arguments)
    dims, state_dims = (named(d, len(d)) for d in op.output_dims)

    def results(out: jax.Array, final_state: jax.Array) -> Any:
        return (finish(out), seqs.state(final_state)) if return_state else finish(out)

    result_dims = (dims, seqs.state_dims(state_dims[2:])) if return_state else dims
    return Prepared(call, finish=results, dims=result_dims, cuts=seqs.cuts)


def _ids(op_name: str, segment_ids: Any, B: Any, T: Any) -> jax.Array:
    ids = integers(segment_ids)
    if ids is None:
        raise ValueError(
            f"{op_name}: argument 'segment_ids' must hold integers [B, T], got {described(segment_ids)}; cast it"
        )
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.shape != (B, T):
        raise ValueError(f"{op_name}: argument 'segment_ids' must have the shape [B, T] = {(B, T)}, got {ids.shape}")
    return jnp.asarray(segments.narrowed(ids, "segment_ids", f"{op_name}: "))


def _of_cuts(op_name: str, cuts: Any, B: Any, T: Any) -> tuple[jax.Array, int]:
    values = integers(cuts)
    if values is None or values.ndim != 1 or values.shape[0] < 2:
        raise ValueError(
            f"{op_name}: argument 'cum_seqlens' must be integers [0, n1, n1 + n2, ...], with one more entry than "
            f"sequences, got {described(cuts if values is None else values)}"
        )
    if B != 1:
        raise ValueError(
            f"{op_name}: argument 'cum_seqlens' splits one packed row, but B = {B}; reshape the arrays to [1, B * T, "
            "...], or pass 'segment_ids'"
        )
    segments.check_cuts("cum_seqlens", values, T, f"{op_name}: ")
    return segments.of_cuts(jnp.asarray(values), T), values.shape[0] - 1


def _state(op_name: str, state: Any, expected: tuple, packed: bool) -> jax.Array:
    if not is_array(state) or not is_float_array(state) or state.shape != expected:
        raise ValueError(
            f"{op_name}: argument 'initial_state' must be a float array [{'sequences' if packed else 'B'}, ...] = "
            f"{list(expected)}, got {described(state)}"
        )
    return jnp.asarray(state, jnp.float32)


# -- segment ids -------------------------------------------------------------------------------------------------------


def last_valid_before(ids: jax.Array, before: jax.Array | None = None) -> jax.Array:
    """Returns int32 [B, T]: the id of the last valid token before each one; -1 if there is none.

    Args:
      before: int [B], the id that precedes the row.
    """
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    latest = jax.lax.cummax(jnp.where(ids >= 0, index, -1), axis=1)
    latest = jnp.pad(latest, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    first = jnp.int32(-1) if before is None else before[:, None].astype(jnp.int32)
    return jnp.where(latest < 0, first, jnp.take_along_axis(ids, jnp.maximum(latest, 0), axis=1))


def resets(ids: jax.Array) -> jax.Array:
    """Returns bool [B, T]: whether a valid token begins a segment that is not the first of its row."""
    before = last_valid_before(ids)
    return (ids >= 0) & (before >= 0) & (before != ids)


def last_run(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (bool [B, T]: valid tokens with no reset after them, bool [B]: whether the row has no reset at all)."""
    run = jnp.cumsum(resets(ids), axis=1)
    return (ids >= 0) & (run == run[:, -1:]), run[:, -1] == 0


# -- the oracle --------------------------------------------------------------------------------------------------------


def loop(
    step: Callable[[Any, Any], tuple[Any, Any]],
    xs: Any,
    start: jax.Array,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    num_states: int = 1,
) -> tuple[Any, jax.Array]:
    """Returns (outs [B, T, ...], final_state [B, G, ...]) of running a step (state [B, ...], x [B, ...]) -> (state,
    out) over time: the definition of every contract. One token at a time, O(T) steps.

    Args:
      xs: pytree of [B, T, ...].
      start: [B, ...], the state in which a sequence starts by default.
    """
    B, T = jax.tree.leaves(xs)[0].shape[:2]
    ids = jnp.zeros((B, T), jnp.int32) if segment_ids is None else segment_ids
    initial = jnp.repeat(start[:, None], num_states, axis=1) if initial_state is None else initial_state
    initial = initial.astype(start.dtype)
    xs, initial, start, ids = vary_alike((xs, initial, start, ids))
    new = resets(ids) if num_states == 1 else jnp.zeros(ids.shape, bool)

    def per_row(condition: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    def one(states: jax.Array, x: Any) -> tuple[jax.Array, Any]:
        x, ids, new = x
        g = jnp.zeros_like(ids) if num_states == 1 else jnp.clip(ids, 0, num_states - 1)
        state = per_row(new, start, states[jnp.arange(B), g])
        after, out = step(state, x)
        after = per_row(ids >= 0, after, state)
        out = jax.tree.map(lambda y: per_row(ids >= 0, y, jnp.zeros_like(y)), out)
        return states.at[jnp.arange(B), g].set(after), out

    over_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (xs, ids, new))
    final, outs = jax.lax.scan(one, initial, over_time)
    return jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1), outs), final
