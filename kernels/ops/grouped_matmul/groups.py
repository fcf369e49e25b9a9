"""The rows of each matrix, the layouts of the weights, and the registration of kernels for all operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels.ops.combine_rows import combine_rows
from kernels.ops.grouped_matmul.contract import gathered_op, op, quantized_op

# Dtypes of weights that a kernel upcasts after loading.
UPCAST = ("int8", "float8_e4m3fn", "float8_e5m2")


def bounds(
    group_sizes: jax.Array, group_offset: jax.Array | None, experts: int, rows: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns int32 [E] twice: the first row of each matrix's group, and one past its last."""
    edges = jnp.minimum(jnp.pad(jnp.cumsum(group_sizes.astype(jnp.int32)), (1, 0)), rows)
    first = 0 if group_offset is None else group_offset.astype(jnp.int32)
    edges = edges[(first + jnp.arange(experts + 1)).clip(0, group_sizes.shape[0])]
    return edges[:-1], edges[1:]


def matrices(rhs: Any, rhs_transposed: Any) -> tuple[jax.Array, bool, bool]:
    """Returns (matrices [E, D, width], or [E, width, D]; whether transposed; whether a gate and an up projection)."""
    if rhs is None:
        E, D = rhs_transposed.shape[0], rhs_transposed.shape[-1]
        return rhs_transposed.reshape(E, -1, D), True, rhs_transposed.ndim == 4
    return rhs.reshape(*rhs.shape[:2], -1), False, rhs.ndim == 4


def gathered_rows(lhs: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the rows of lhs with some indices; zeros for a negative one."""
    return jnp.where((rows >= 0)[:, None], lhs[jnp.maximum(rows, 0)], 0)


def scales(what: str, scale: jax.Array | None) -> tuple[str, jax.Array] | None:
    """Returns (layout, scales) for a product, if there are scales: per "columns" of a matrix or, transposed, per
    "rows"."""
    return None if scale is None else (what, scale)


def rejects(call: Any) -> str | None:
    """Returns why a kernel cannot run a call, or None."""
    weights = call.rhs if call.rhs_transposed is None else call.rhs_transposed
    if weights is None:
        return "it needs one of rhs and rhs_transposed"
    of_rows = (*call.rows.shape, *call.slots.shape) if "rows" in call.arguments else ()
    if 0 in (*call.lhs.shape, *weights.shape, *call.group_sizes.shape, *of_rows):
        return "an array has no elements"
    return None


def rejects_quantized(call: Any) -> str | None:
    """Returns the same for 8-bit weights, which the kernels upcast after loading."""
    weights = call.rhs if call.rhs_transposed is None else call.rhs_transposed
    if weights is not None and str(weights.dtype) not in UPCAST:
        return f"it supports weights of {', '.join(UPCAST)}, but these are {weights.dtype}"
    if call.rhs_scale.shape[1] != 1:
        return f"it takes one scale per column, but these have {call.rhs_scale.shape[1]}"
    return rejects(call)


def register(
    forward: Callable,
    backward: Callable,
    contraction: Callable,
    *,
    refuses: Callable[[Any], str | None] = lambda call: None,
    gathers: bool = False,
    keeping: Callable | None = None,
    keeps: Callable | None = None,
    **facts: Any,
) -> None:
    """Adds a backend for all three operations, named after the file that defines its functions.

    Args:
      forward: (lhs, the weights as returned by `matrices`, group_sizes, group_offset, rhs_bias, activation, cfg,
        rhs_scale or None) -> result.
      backward: the same after `saved` -> (gradients of lhs and of the bias by name, the cotangent of the products,
        `where`).
      contraction: (a [M, P], b [M, Q], E, dtype, tile, `where`) -> [E, P, Q], a transposed times b over the rows of
        each group.
      refuses: call -> a reason to refuse it, in addition to `rejects`.
      gathers: the functions take `rows` last, the index in lhs, or in a, of each row [M], negative for one of zeros, and return
        the gradient of those rows for lhs. Else XLA gathers them before.
      keeping: as `forward`, without scales -> (result, the products that its activation is of); `backward` finds these in
        `saved`. keeps: as in `Op.register`; None if nothing is kept.
      facts: arguments of `Op.register`.
    """

    def run(lhs, rhs, rhs_transposed, group_sizes, group_offset, rhs_bias, activation, cfg):
        return forward(lhs, matrices(rhs, rhs_transposed), group_sizes, group_offset, rhs_bias, activation, cfg, None)

    def run_backward(saved, lhs, rhs, rhs_transposed, group_sizes, group_offset, rhs_bias, activation, cfg):
        weights = matrices(rhs, rhs_transposed)
        gradients, d, where = backward(saved, lhs, weights, group_sizes, group_offset, rhs_bias, activation, cfg, None)
        if rhs_transposed is None:
            name, weight, left, right = "rhs", rhs, lhs, d
        else:
            name, weight, left, right = "rhs_transposed", rhs_transposed, d, lhs
        d_rhs = contraction(left, right, weight.shape[0], weight.dtype, cfg.d_rhs, where)
        return gradients | {name: d_rhs.reshape(weight.shape)}

    def quantized(lhs, rhs, rhs_transposed, group_sizes, rhs_scale, group_offset, rhs_bias, activation, cfg):
        weights = matrices(rhs, rhs_transposed)
        return forward(lhs, weights, group_sizes, group_offset, rhs_bias, activation, cfg, rhs_scale)

    def quantized_backward(
        saved, lhs, rhs, rhs_transposed, group_sizes, rhs_scale, group_offset, rhs_bias, activation, cfg
    ):
        weights = matrices(rhs, rhs_transposed)
        return backward(saved, lhs, weights, group_sizes, group_offset, rhs_bias, activation, cfg, rhs_scale)[0]

    def gathered(lhs, rhs, rhs_transposed, group_sizes, rows, slots, group_offset, rhs_bias, activation, cfg):
        x, more = (lhs, (rows,)) if gathers else (gathered_rows(lhs, rows), ())
        weights = matrices(rhs, rhs_transposed)
        return forward(x, weights, group_sizes, group_offset, rhs_bias, activation, cfg, None, *more)

    def gathered_backward(
        saved, lhs, rhs, rhs_transposed, group_sizes, rows, slots, group_offset, rhs_bias, activation, cfg
    ):
        x, more = (lhs, (rows,)) if gathers else (gathered_rows(lhs, rows), ())
        weights = matrices(rhs, rhs_transposed)
        gradients, d, where = backward(
            saved, x, weights, group_sizes, group_offset, rhs_bias, activation, cfg, None, *more
        )
        if rhs_transposed is None:
            d_rhs = contraction(x, d, rhs.shape[0], rhs.dtype, cfg.d_rhs, where, *more)
            gradients["rhs"] = d_rhs.reshape(rhs.shape)
        elif gathers:
            # Rows that are read by index are those on the left: the matrices come turned, which are far fewer.
            turned = contraction(x, d, len(rhs_transposed), rhs_transposed.dtype, cfg.d_rhs, where, *more)
            gradients["rhs_transposed"] = turned.swapaxes(1, 2).reshape(rhs_transposed.shape)
        else:
            d_rhs = contraction(d, x, rhs_transposed.shape[0], rhs_transposed.dtype, cfg.d_rhs, where)
            gradients["rhs_transposed"] = d_rhs.reshape(rhs_transposed.shape)
        return gradients | {"lhs": combine_rows(gradients["lhs"], slots)}

    def run_keeping(lhs, rhs, rhs_transposed, group_sizes, group_offset, rhs_bias, activation, cfg):
        assert keeping is not None
        weights = matrices(rhs, rhs_transposed)
        out, products = keeping(lhs, weights, group_sizes, group_offset, rhs_bias, activation, cfg)
        return out, {"products": products}

    def gathered_keeping(lhs, rhs, rhs_transposed, group_sizes, rows, slots, group_offset, rhs_bias, activation, cfg):
        assert keeping is not None
        weights = matrices(rhs, rhs_transposed)
        out, products = keeping(lhs, weights, group_sizes, group_offset, rhs_bias, activation, cfg, rows)
        return out, {"products": products}

    def with_kept(function: Callable) -> dict[str, Any]:
        return {} if keeping is None else {"forward_with_residuals": function, "keeps": keeps}

    name = forward.__module__.rpartition(".")[2]
    refuse: dict[str, Any] = {"rejects": lambda call: refuses(call) or rejects(call), "name": name}
    op.register(run, run_backward, **with_kept(run_keeping), **refuse, **facts)
    gathered_op.register(gathered, gathered_backward, **with_kept(gathered_keeping), **refuse, **facts)
    also = {"rejects": lambda call: refuses(call) or rejects_quantized(call), "name": name}
    quantized_op.register(quantized, quantized_backward, **also, **facts)
