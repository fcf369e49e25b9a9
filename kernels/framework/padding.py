"""Padding: values at positions with negative segment ids, NaN and infinity included, never affect other positions.

Kernels give such positions zero weight, but 0 times NaN is NaN. So operands that would be multiplied are zeroed there:
here, once, for all backends of operations that declare `Op(padding=...)`. An array's dims tell which positions it has.
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
    """Returns x [B, L, ...] with zeros where its segment id, [B|1, L], is negative. Returns x itself without ids, or if
    their shape does not fit, which the contract reports."""
    if ids is None or ids.ndim != 2 or ids.shape[1] != x.shape[1] or ids.shape[0] not in (1, x.shape[0]):
        return x
    return jnp.where((ids >= 0).reshape(*ids.shape, *(1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))


def of_mask(mask: Any, **others: Any) -> dict[str, Any]:
    """Returns dim -> segment ids, of queries (T) and keys (S)."""
    return {} if mask is None or mask.padded_by_zeros else {"T": mask.q_segment_ids, "S": mask.kv_segment_ids}


@dataclass(frozen=True)
class Padding:
    """Which arguments of an operation are zeroed in padding.

    Attributes:
      forward: arguments whose padding would affect other positions in a forward. A backward gets all arguments zeroed.
      ids: function of the arguments, by name -> {dim T or S: ids [B|1, size]}, negative in padding; None for no
        padding.
    """

    forward: tuple[str, ...]
    ids: Callable[..., dict[str, Any]] = of_mask


def _ids_of(op: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns dim -> ids, given a call's arguments; the others have their defaults."""
    return op.padding.ids(**{name: arguments.get(name, p.default) for name, p in op.parameters.items()})


def _of(dims: tuple[Dim, ...], ids: Mapping[str, Any]) -> Any:
    """Returns the ids for an array with these dims if they start with B T or B S, else None."""
    if len(dims) < 2 or dims[0].name != "B":
        return None
    return ids.get(dims[1].name)


def of_forward(op: Any, arguments: dict[str, Any], names: Any = None) -> dict[str, Any]:
    """Returns the arguments with padding zeroed in those that the operation names for its forward, or in `names`."""
    if op.padding is None:
        return arguments
    ids, names = _ids_of(op, arguments), op.padding.forward if names is None else names
    some = {n: arguments[n] for n in names if is_float_array(arguments.get(n))}
    return arguments | {n: zeroed(x, _of(op.parameters[n].dims, ids)) for n, x in some.items()}


def of_backward(op: Any, saved: dict[str, Any], arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (saved, arguments) with padding zeroed in all inputs, in cotangents and in what is derived from them."""
    if op.padding is None:
        return saved, arguments
    ids, dims = _ids_of(op, arguments), {n: d for n, d in op.saved_dims.items() if n not in op.outputs}
    some = {n: zeroed(x, _of(dims[n], ids)) for n, x in saved.items() if n in dims and x is not None}
    return saved | some, of_forward(op, arguments, op.parameters)


def of_contract(op: Any, function: Callable) -> Callable:
    """Returns the contract with the same guarantee: padding is zeroed in its inputs and gets no cotangent in its
    outputs."""
    if op.padding is None:
        return function

    @functools.wraps(function)
    def contract(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(op.parameters, args, strict=False)), **kwargs}
        ids = _ids_of(op, arguments)
        result = function(**of_forward(op, arguments, op.parameters))
        outputs = result if isinstance(result, tuple) else (result,)
        masked_outputs = [_unmoved(y, _of(dims, ids)) for y, dims in zip(outputs, op.output_dims, strict=True)]
        return tuple(masked_outputs) if isinstance(result, tuple) else masked_outputs[0]

    return contract


def _unmoved(y: jax.Array, ids: jax.Array | None) -> jax.Array:
    if ids is None:
        return y
    return jnp.where((ids >= 0).reshape(*ids.shape, *(1,) * (y.ndim - 2)), y, jax.lax.stop_gradient(y))
