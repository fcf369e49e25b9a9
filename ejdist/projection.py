"""A projection of activations by a stored parameter: where it is gathered, multiplied, and its result placed.

Every product of a layer with a matrix of its own goes through here, so that a way of doing it (a matmul that overlaps with its
gather, 8-bit or quantised weights, an adapter) is one place to write.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.layout import constrain, gather
from kernels.framework.dims import VOCABULARY


def project(
    x: jax.Array, weight: jax.Array, subscripts: str, *, bias: jax.Array | None = None, mesh: Any = None
) -> jax.Array:
    """Returns the product of x with a parameter, plus the bias, as the layout places activations of its dims.

    Args:
      x: activations.
      weight: a parameter, as the layout stores parameters; it is gathered here, and its gradient is scattered back.
      subscripts: of `jnp.einsum`, "btd,dnh->btnh"; each letter is the dim of that name in capitals, and says where the three
        arrays lie.
      bias: a parameter of the dims of the result that the weight has, in their order; stored like the weight.
      mesh: None for one device.

    Returns:
      the product, in the dtype that x and weight promote to; of float32 arrays in true float32 on every device.

    Raises:
      ValueError: the subscripts are not of this form, or the arrays do not fit them.
    """
    dims_x, dims_weight, dims_out = parsed(subscripts)
    for name, array, dims in (("x", x, dims_x), ("weight", weight, dims_weight)):
        if array.ndim != len(dims):
            raise ValueError(
                f"project: argument {name!r} of shape {array.shape} does not have the dims {' '.join(dims)}"
            )
    sizes = dict(zip(dims_x, x.shape))
    for dim, size in zip(dims_weight, weight.shape):
        if sizes.setdefault(dim, size) != size:
            raise ValueError(
                f"project: argument 'weight' of shape {weight.shape} has {dim} = {size}, but 'x' of shape {x.shape} has "
                f"{sizes[dim]} ({subscripts})"
            )
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = jnp.einsum(subscripts, x, gather(weight, " ".join(dims_weight), mesh), precision=precision)
    product = constrain(product, " ".join(dims_out), mesh)
    if bias is None:
        return product
    dims_bias = [dim for dim in dims_out if dim in dims_weight]
    if bias.shape != tuple(sizes[dim] for dim in dims_bias):
        raise ValueError(
            f"project: argument 'bias' of shape {bias.shape} must have the dims {' '.join(dims_bias)}, "
            f"{tuple(sizes[dim] for dim in dims_bias)}"
        )
    return product + gather(bias, " ".join(dims_bias), mesh)


def parsed(subscripts: str) -> tuple[list[str], list[str], list[str]]:
    """Returns the dims of x, of the weight and of the product.

    Raises:
      ValueError: the subscripts are not of two arrays and their product, or have a letter that no dim is named by.
    """
    match = re.fullmatch(r"([a-z]+),([a-z]+)->([a-z]+)", subscripts)
    if match is None:
        raise ValueError(f"project: argument 'subscripts' = {subscripts!r} must look like 'btd,dnh->btnh'")
    unknown = sorted({letter for part in match.groups() for letter in part if letter.upper() not in VOCABULARY})
    if unknown:
        raise ValueError(
            f"project: argument 'subscripts' = {subscripts!r} has the letters {', '.join(unknown)}, which name no dim; "
            f"there are {', '.join(name.lower() for name in VOCABULARY if len(name) == 1)}"
        )
    x, weight, out = (list(part.upper()) for part in match.groups())
    return x, weight, out
