"""Activations kept small between forward and backward: rounded in blocks, while the forward itself is exact."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.matmul.magnitude import largest_magnitude
from kernels.framework.binding import is_float_array

# Largest magnitude that a block is scaled to, by the dtype that is kept.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Compressed:
    """An array in blocks along its last dim.

    Attributes:
      values: of a narrow dtype, [..., blocks, block]. scale: float32 [..., blocks, 1].
      width, dtype: last size and dtype of the array.
    """

    values: jax.Array
    scale: jax.Array
    width: int = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})


def compress(x: jax.Array, dtype: str = "int8", block: int = 128) -> Compressed:
    """Returns x rounded to `dtype` with a float32 scale for each block of its last dim.

    The error of an element is at most: int8, 1/254 of the largest magnitude in its block; float8_e4m3fn, 1/16 of the element,
    and float8_e5m2, 1/8 of it, down to the least normal number, about 2^-15 and 2^-30 of the block's largest, and below that
    of what it is there. Or, where that is more, float32's least normal number.
    """
    last = x.shape[-1]
    wide = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, -last % block)])
    wide = wide.reshape(*x.shape[:-1], wide.shape[-1] // block, block)
    largest = largest_magnitude(wide)
    # A smaller scale is 0 where such numbers are flushed, and 0 times the infinity that a number over it becomes is NaN.
    scale = jnp.maximum(largest / LARGEST[dtype], jnp.finfo(jnp.float32).tiny)
    scaled = wide / scale
    if dtype == "int8":
        scaled = jnp.round(scaled)
    return Compressed(scaled.astype(dtype), scale, last, x.dtype)


def decompress(x: Compressed) -> jax.Array:
    """Returns the array that was compressed."""
    wide = x.values.astype(jnp.float32) * x.scale
    *lead, blocks, block = wide.shape
    return wide.reshape(*lead, blocks * block)[..., : x.width].astype(x.dtype)


def _opened(function: Callable, args: Any) -> tuple[Callable, tuple[Any, ...]]:
    """Returns the function with what it closes over as further arguments, and these.

    `jax.closure_convert` leaves integers in it, as segment ids, whose trace has ended by the backward.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*args)

    def opened(*all_args: Any) -> Any:
        arguments, captured = all_args[: len(args)], all_args[len(args) :]
        flat = jax.core.eval_jaxpr(traced.jaxpr, captured, *jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), flat)

    return opened, tuple(traced.consts)


def compressed_checkpoint(
    function: Callable, *, arguments: Sequence[int] = (0,), dtype: str = "int8", block: int = 128
) -> Callable:
    """Returns the function, of which a backward keeps only its arguments, and those named in `arguments` compressed.

    As `jax.checkpoint` it is run again for its gradients, from what was kept: outputs are exact, gradients are those at the
    rounded arguments. For a layer `layer(x, weights)` the residual is x at 1 + 4 / block bytes an element in place of 2 or 4.
    `compress` states the error of each element; that of the gradients is this error times the second derivatives: of y = x w,
    dx is exact and dw has the relative error of x.

    Args:
      function: of positional arguments, arrays or pytrees of arrays. Arrays that it closes over are treated as arguments that
        are kept as they are, so they have gradients.
      arguments: places of those whose float leaves are compressed.
      dtype: "int8", "float8_e4m3fn" or "float8_e5m2".
      block: elements of the last dim that share a scale.

    Raises:
      ValueError: a dtype or block that does not exist; at the call, a place without an argument.

    Sources: Chen et al., ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed Training, 2021; Chen et al.,
    Training Deep Nets with Sublinear Memory Cost, 2016.

    >>> import jax, jax.numpy as jnp
    >>> layer = compressed_checkpoint(lambda x, w: jnp.tanh(x @ w))
    >>> x, w = jnp.ones((4, 8)), jnp.ones((8, 8)) / 8
    >>> bool(jnp.allclose(layer(x, w), jnp.tanh(1.0)))
    True
    """
    if dtype not in LARGEST:
        raise ValueError(
            f"compressed_checkpoint: argument 'dtype' = {dtype!r} is unknown; use one of {', '.join(LARGEST)}"
        )
    if not isinstance(block, int) or block < 1:
        raise ValueError(f"compressed_checkpoint: argument 'block' must be a positive integer, got {block!r}")
    if not isinstance(arguments, Sequence) or not all(isinstance(i, int) for i in arguments):
        raise ValueError(
            "compressed_checkpoint: argument 'arguments' must be indices of positional arguments, such as (0,), got "
            f"{arguments!r}"
        )
    places = frozenset(arguments)

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        if places - set(range(len(args))):
            raise ValueError(
                f"compressed_checkpoint: argument 'arguments' = {tuple(arguments)} names indices that a call with {len(args)} "
                "positional arguments does not have"
            )
        opened, captured = _opened(function, args)
        return kept_small(opened, args, captured)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def kept_small(opened: Callable, args: Any, captured: Any) -> Any:
        return opened(*args, *captured)

    def small(x: Any) -> Any:
        return compress(x, dtype, block) if is_float_array(x) and x.ndim else x

    def forward(opened: Callable, args: Any, captured: Any) -> Any:
        kept = tuple(jax.tree.map(small, a) if i in places else a for i, a in enumerate(args))
        return opened(*args, *captured), (kept, captured)

    def backward(opened: Callable, saved: Any, cotangents: Any) -> Any:
        kept, captured = saved
        args = jax.tree.map(
            lambda x: decompress(x) if isinstance(x, Compressed) else x,
            kept,
            is_leaf=lambda x: isinstance(x, Compressed),
        )
        gradients = jax.vjp(opened, *args, *captured)[1](cotangents)
        return gradients[: len(args)], gradients[len(args) :]

    kept_small.defvjp(forward, backward)
    return run
