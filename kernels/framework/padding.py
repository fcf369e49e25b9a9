"""Padding: what lies at positions of negative segment ids reaches nothing else, NaN and infinities neither.

A kernel gives such a position no weight, but 0 times NaN is NaN. So it gets zeros there, of whatever would be multiplied: here,
once, for all backends of the operations that declare `Op(padding=...)`. Which arrays have which positions follows from dims.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kernels.framework.binding import is_float_array
from kernels.framework.dims import Dim


def zeroed(x: jax.Array, ids: jax.Array | None) -> jax.Array:
    """Returns x [B, L, ...] with zeros where its segment id, [B|1, L], is negative; x itself without ids, and where they do not
    fit, which the contract refuses."""
    if ids is None or ids.ndim != 2 or ids.shape[1] != x.shape[1] or ids.shape[0] not in (1, x.shape[0]):
        return x
    return jnp.where((ids >= 0).reshape(*ids.shape, *(1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))


def of_mask(mask: Any, **others: Any) -> dict[str, Any]:
    """Returns the segment ids of queries and of keys."""
    return {} if mask is None else {"T": mask.q_segment_ids, "S": mask.kv_segment_ids}


@dataclass(frozen=True)
class Padding:
    """What an operation promises of its padding.

    Attributes:
      forward: names of the arguments in which it would reach others in a forward. A backward is given all of them without it.
      ids: function of the arguments, by name -> dim, T or S, -> ids [B|1, its size], negative in padding; None: there is none.
    """

    forward: tuple[str, ...]
    ids: Callable[..., dict[str, Any]] = of_mask


def _ids_of(op: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ids, given the arguments that a call was given and the defaults of the others."""
    return op.padding.ids(**{name: arguments.get(name, p.default) for name, p in op.parameters.items()})


def _of(dims: tuple[Dim, ...], ids: Mapping[str, Any]) -> Any:
    """Returns the ids of the positions of an array with these dims: [B, T, ...] or [B, S, ...]; None of any other."""
    if len(dims) < 2 or dims[0].name != "B":
        return None
    return ids.get(dims[1].name)


def of_forward(op: Any, arguments: dict[str, Any], names: Any = None) -> dict[str, Any]:
    """Returns the arguments of a call, those that the operation names, or `names`, with zeros in padding."""
    if op.padding is None:
        return arguments
    ids, names = _ids_of(op, arguments), op.padding.forward if names is None else names
    some = {n: arguments[n] for n in names if is_float_array(arguments.get(n))}
    return arguments | {n: zeroed(x, _of(op.parameters[n].dims, ids)) for n, x in some.items()}


def of_backward(op: Any, saved: dict[str, Any], arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (what is saved, the arguments) with zeros in the padding of all inputs, cotangents and what is made of these."""
    if op.padding is None:
        return saved, arguments
    ids, dims = _ids_of(op, arguments), {n: d for n, d in op.saved_dims.items() if n not in op.outputs}
    some = {n: zeroed(x, _of(dims[n], ids)) for n, x in saved.items() if n in dims and x is not None}
    return saved | some, of_forward(op, arguments, op.parameters)


def of_contract(op: Any, function: Callable) -> Callable:
    """Returns the contract with the same promise: padding is zero in its inputs, and has no cotangent in its outputs."""
    if op.padding is None:
        return function

    @functools.wraps(function)
    def contract(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(op.parameters, args, strict=False)), **kwargs}
        ids = _ids_of(op, arguments)
        result = function(**of_forward(op, arguments, op.parameters))
        outputs = result if isinstance(result, tuple) else (result,)
        kept = [_unmoved(y, _of(dims, ids)) for y, dims in zip(outputs, op.output_dims, strict=True)]
        return tuple(kept) if isinstance(result, tuple) else kept[0]

    return contract


def _unmoved(y: jax.Array, ids: jax.Array | None) -> jax.Array:
    if ids is None:
        return y
    return jnp.where((ids >= 0).reshape(*ids.shape, *(1,) * (y.ndim - 2)), y, jax.lax.stop_gradient(y))
