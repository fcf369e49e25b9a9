"""The experts' products with 8-bit operands, in blocks of 128, as DeepSeek-V3 has them.

A token is quantised once, and what its experts read is copies of its bytes. Forward and the gradients of rows are products in 8
bits of rows in blocks of 128 entries with matrices in blocks of 128 by 128. The gradients of matrices are products in the dtype
of x, of what was not quantised: they sum over the rows of a group, and groups end anywhere, so blocks of rows would need a
padded copy of both operands, turned. The matrices are quantised once for the forward and the backward that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kernels
from ejdist.precision import gathers_blocks
from kernels.framework.dispatch import vary_alike
from kernels.ops.gated_mlp import ACTIVATIONS

BLOCK = 128


def stays(precision: str, width: int, features: int, activation: str, bias: bool) -> str | None:
    """Returns why the experts' products stay in the compute dtype beside others of a precision in 8 bits, or None.

    Args:
      width: D of their matrices. features: F.
    """
    if not gathers_blocks(precision):
        return "grouped products in 8 bits are fp8_block's"
    if bias or activation not in ACTIVATIONS:
        return "grouped products in 8 bits have no bias, and of activations " + ", ".join(ACTIVATIONS)
    if width % BLOCK or features % BLOCK:
        return f"{BLOCK} must divide their inputs and outputs, {width} and {features}"
    return None


class _Matrices(NamedTuple):
    """Matrices [E, D, F] in 8 bits: as they are, and turned, [E, F, D]; the scales of their blocks of 128 by 128."""

    values: jax.Array
    scale: jax.Array
    turned: jax.Array
    turned_scale: jax.Array


def _matrices(w: jax.Array) -> _Matrices:
    E, D, F = w.shape
    flat = kernels.quantize_both_ways(w.reshape(E * D, F), rows=BLOCK, turned_rows=BLOCK, matrices=E)
    return _Matrices(*(y.reshape(E, y.shape[0] // E, y.shape[1]) for y in flat))


def _picked(values: jax.Array, scale: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns rows of an operand by index, zeros for a negative one. Four bytes at a time: a GPU copies single ones slower."""
    T, D = values.shape
    words = jax.lax.bitcast_convert_type(values.reshape(T, D // 4, 4), jnp.uint32)
    index, there = jnp.maximum(rows, 0), (rows >= 0)[:, None]
    words = jnp.where(there, words[index], 0)
    picked = jax.lax.bitcast_convert_type(words, values.dtype).reshape(len(rows), D)
    return picked, jnp.where(there, scale[index], 1)


def expert_mlp(
    params: dict[str, jax.Array],
    x: jax.Array,
    sizes: jax.Array,
    *,
    activation: str,
    platform: str | None,
    rows: jax.Array | None = None,
    slots: jax.Array | None = None,
) -> jax.Array:
    """Returns (activation(x gate) * (x up)) down of rows sorted by expert, products in 8 bits.

    Args:
      params: `gate` [E, D, 2, F] with the up projection, or `gate` and `up` [E, D, F]; and `down` [E, F, D].
      x: [M, D], or tokens with `rows` and `slots` as in `kernels.grouped_matmul`. sizes: rows of each expert.

    Raises:
      ValueError: 128 does not divide D, or the F of a device.
    """
    gate, down = params["gate"], params["down"]
    gate_up = jnp.concatenate([gate, params["up"]], -1) if "up" in params else gate.reshape(*gate.shape[:2], -1)
    E, F, D = down.shape
    if D % BLOCK or F % BLOCK:
        raise ValueError(
            f"moe: argument 'precision' has blocks of {BLOCK}, which must divide D = {D} and, of the part of a device, "
            f"F = {F}; name the matrices of experts in model.precision_keep, or split F over fewer devices"
        )
    x, gate_up, down = vary_alike((x, gate_up, down))
    return _expert_mlp(x, gate_up, down, (sizes, rows, slots), activation, platform)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _expert_mlp(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, places: Any, activation: str, platform: str | None
) -> jax.Array:
    return _forward(x, gate_up, down, places, activation, platform)[0]


def _forward(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, places: Any, activation: str, platform: str | None
) -> tuple[jax.Array, Any]:
    sizes, rows, _ = places
    times = partial(kernels.scaled_grouped_matmul, dtype=str(x.dtype), platform=platform)
    first, second = _matrices(gate_up), _matrices(down)
    values, scale = kernels.quantize_rows(x)
    if rows is not None:
        values, scale = _picked(values, scale, rows)
    z = times(values, first.turned, scale, first.turned_scale, sizes)
    z = z.reshape(z.shape[0], 2, -1)
    values, scale = kernels.activate_rows(z, activation=activation)
    out = times(values, second.turned, scale, second.turned_scale, sizes)
    return out, (x, z, gate_up, down, (first.values, first.scale), (second.values, second.scale), places)


def _backward(activation: str, platform: str | None, saved: Any, d: jax.Array) -> tuple[Any, ...]:
    x, z, gate_up, down, first, second, places = saved
    sizes, rows, slots = places
    times = partial(kernels.scaled_grouped_matmul, dtype=str(x.dtype), platform=platform)
    d_p = times(*_interleaved(kernels.quantize_rows(d), second), sizes)
    d_z, *d_z_8, p = kernels.activated_row_cotangents(z, d_p, activation=activation)
    d_x = times(*_interleaved(d_z_8, first), sizes)
    by_index = {} if rows is None else {"rows": rows, "slots": slots}
    if rows is not None:
        d_x = kernels.combine_rows(d_x, slots)
    gradients = (
        _contracted(x, gate_up, d_z.reshape(len(d_z), -1), sizes, platform, **by_index),
        _contracted(p, down, d, sizes, platform),
    )
    nothing = jax.tree.map(lambda i: np.zeros(i.shape, jax.dtypes.float0), places)
    return d_x, *gradients, nothing


def _interleaved(operand: Sequence[jax.Array], matrices: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the values of both, and then the scales of both."""
    return operand[0], matrices[0], operand[1], matrices[1]


def _contracted(
    x: jax.Array, w: jax.Array, d: jax.Array, sizes: jax.Array, platform: str | None, **by_index: Any
) -> Any:
    """Returns the gradient of matrices, not in 8 bits: of the product with them nothing else is computed."""
    _, pull = jax.vjp(lambda w: kernels.grouped_matmul(x, w, sizes, platform=platform, **by_index), w)
    return pull(d)[0]


_expert_mlp.defvjp(_forward, _backward)
