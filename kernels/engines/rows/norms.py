"""The norm of whole rows behind rms_norm and layer_norm: its definition, arithmetic, work and tunables.

layer_norm centers a row and may add a bias; rms_norm does neither. With a residual, x + residual is normalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.framework.binding import Call
from kernels.framework.config import Tunables
from kernels.framework.work import Work, nbytes


@dataclass(frozen=True)
class NormConfig(Tunables):
    """Tunables of the kernels; None leaves the choice to the configuration chain.

    Attributes:
      block_rows, num_warps: rows that a program of the forward handles at once, and its warps (Triton).
      backward_block_rows, backward_num_warps: the same for the backward.
      backward_programs: programs of the Triton backward, each with one partial sum of the gradient of each weight.
      backward_num_stages: tiles of rows that such a program has in flight in shared memory; 1: no prefetch.
    """

    block_rows: int | None = None
    num_warps: int | None = None
    backward_block_rows: int | None = None
    backward_num_warps: int | None = None
    backward_programs: int | None = None
    backward_num_stages: int | None = None


class Norm(NamedTuple):
    """The kind of norm: static, compiled into every kernel."""

    eps: float
    centered: bool  # whether the mean is subtracted first, and is an output
    zero_centered: bool = False  # whether rows are multiplied by 1 + weight

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the per-row statistics."""
        return ("mean", "rstd") if self.centered else ("rstd",)


def outputs(
    x: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array | None,
    bias: jax.Array | None,
    norm: Norm,
    compute: Any = None,
) -> Any:
    """Returns the outputs of the contracts: out, the stream if there is a residual, the mean if the norm centers, and rstd.

    The stream is rounded to the dtype of residual before it is normalised.

    Args:
      x, residual: [*lead, D].
      weight, bias: [D].
      compute: the dtype to compute in; by default the promoted dtype of x and residual, at least float32.
    """
    if compute is None:
        inputs = x.dtype if residual is None else jnp.promote_types(x.dtype, residual.dtype)
        compute = jnp.promote_types(inputs, jnp.float32)
    wide, stream = x.astype(compute), ()
    if residual is not None:
        stream = ((wide + residual.astype(compute)).astype(residual.dtype),)
        wide = stream[0].astype(compute)
    out, *statistics = normalise(wide, weight, bias, norm)
    return out.astype(x.dtype), *stream, *[y[..., 0] for y in statistics]


def normalise(x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, norm: Norm) -> list[jax.Array]:
    """Returns [out, mean if the norm centers, rstd] of rows [..., D] in the compute dtype; statistics are [..., 1]."""
    means = []
    if norm.centered:
        means = [jnp.mean(x, axis=-1, keepdims=True)]
        x = x - means[0]
    rstd = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + norm.eps)
    out = x * rstd
    if weight is not None:
        out = out * _factor(weight, norm, x.dtype)
    if bias is not None:
        out = out + bias.astype(x.dtype)
    return [out, *means, rstd]


def _factor(weight: jax.Array, norm: Norm, compute: Any) -> jax.Array:
    weight = weight.astype(compute)
    return weight + 1.0 if norm.zero_centered else weight


def normal(x: jax.Array, statistics: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns (x, minus its mean if the norm centers; that times rstd) for the normalised input x, float32 [..., D]."""
    x = x - statistics["mean"] if "mean" in statistics else x
    return x, x * statistics["rstd"]


def pull(
    x: jax.Array,
    normalised: jax.Array,
    d_out: jax.Array,
    statistics: Mapping[str, jax.Array],
    weight: jax.Array | None,
    norm: Norm,
) -> jax.Array:
    """Returns the gradient of the normalised input, float32 [..., D].

    The gradient of the weight is the sum over rows of `d_out * normalised`, that of the bias the sum of d_out.

    Args:
      x, normalised: what `normal` returns.
      d_out: float32 [..., D].
      statistics: those of the norm and their cotangents, `d_rstd` and so on, [..., 1] each.
    """
    rstd, D = statistics["rstd"], x.shape[-1]
    g = d_out if weight is None else d_out * _factor(weight, norm, jnp.float32)
    # rstd is also an output, with d rstd / dx = -rstd² normalised / D. The two sums here differ only in rounding.
    if not norm.centered:
        through_rstd = (jnp.sum(g * x, axis=-1, keepdims=True) + statistics["d_rstd"]) * rstd * rstd / D
        return g * rstd - normalised * through_rstd
    through_mean = (jnp.sum(g, axis=-1, keepdims=True) * rstd - statistics["d_mean"]) / D
    through_rstd = (jnp.sum(g * normalised, axis=-1, keepdims=True) + statistics["d_rstd"] * rstd) * rstd / D
    return g * rstd - through_mean - normalised * through_rstd


def projected(normalised: jax.Array, projection: jax.Array) -> jax.Array:
    """Returns the normalised rows, which are already rounded, times the projection, [*lead, F]."""
    accumulate = jnp.promote_types(normalised.dtype, jnp.float32)
    return jnp.dot(normalised, projection, preferred_element_type=accumulate).astype(normalised.dtype)


def cost(x: Any, residual: Any, weight: Any, bias: Any, centered: bool) -> tuple[Work, Work]:
    """Returns the work of both directions, each of which reads or writes every array once.

    Forward: reads x and writes out; with a residual, also reads it and writes the stream. Backward: reads the normalised
    input and the cotangents, and writes the gradient of x and residual, once if they share a dtype.
    """
    size, rows = x.size, x.size // x.shape[-1]
    narrow, features = nbytes(x), nbytes(weight, bias)
    statistics = 4 * rows * (2 if centered else 1)  # float32
    flops = size * (3 * centered + (residual is not None))
    if residual is None:
        forward, backward = 2 * narrow, 3 * narrow
    else:
        wide = nbytes(residual)
        forward, backward = 2 * narrow + 2 * wide, narrow + 3 * wide + (0 if x.dtype == residual.dtype else narrow)
    return (
        Work(4 * size + flops, forward + features + statistics),
        Work(8 * size + flops, backward + 2 * features + statistics),
    )


def centers(call: Call) -> bool:
    """Returns whether the norm of a call centers."""
    return "bias" in call.arguments


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of a call, see `cost`."""
    residual, bias = call.arguments.get("residual"), call.arguments.get("bias")
    return cost(call.x, residual, call.weight, bias, centers(call))


def work_of_cotangents(call: Call) -> tuple[Work, Work]:
    """Returns the work of a backward without a residual as a call of its own."""
    return cost(call.x, None, call.weight, None, False)[1], Work(0, 0)


def work_of_linear(call: Call) -> tuple[Work, Work]:
    """Returns the work of the matmuls, one forward and two backward. The recomputed norm is not counted."""
    matmul, out = 2 * call.x.size * call.dims["F"], nbytes(call.x) // call.dims["D"] * call.dims["F"]
    weights = nbytes(call.weight, call.arguments.get("bias"), call.projection)
    return Work(matmul, nbytes(call.x) + out + weights), Work(2 * matmul, 2 * nbytes(call.x) + out + 2 * weights)
