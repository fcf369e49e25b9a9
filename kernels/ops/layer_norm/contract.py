"""The contracts of layer_norm, alone and fused with what stands before and after it, and the cases they are held to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.engines.rows.norms import NormConfig
from kernels.framework.backend import Case
from kernels.framework.binding import Call
from kernels.framework.contract import Op
from kernels.framework.work import Work, nbytes


def layer_norm(
    x: Float[Array, "*lead D"],
    weight: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead"], Float[Array, "*lead"]]:
    """Returns ((x - mean) * rstd * weight + bias, mean, rstd) with rstd = 1 / sqrt(variance of x over D + eps).

    All of it is computed in float32, weight and bias included, and rounded once to the dtype of x; mean and rstd are float32.
    The variance is the mean of (x - mean)², not mean(x²) - mean², which cancels where the mean is large.
    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450, eq. 3.
    """
    compute = jnp.promote_types(x.dtype, jnp.float32)
    wide = x.astype(compute)
    mean = jnp.mean(wide, axis=-1)
    apart = wide - mean[..., None]
    rstd = jax.lax.rsqrt(jnp.mean(apart * apart, axis=-1) + eps)
    out = apart * rstd[..., None]
    out = out if weight is None else out * weight.astype(compute)
    out = out if bias is None else out + bias.astype(compute)
    return out.astype(x.dtype), mean, rstd


def fused_add_layer_norm(
    x: Float[Array, "*lead D"],
    residual: Float[Array, "*lead D"],
    weight: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead D"], Float[Array, "*lead"], Float[Array, "*lead"]]:
    """Returns (out, stream, mean, rstd): stream = x + residual, and the others are those of `layer_norm` of it.

    The sum is added in float32 and rounded once to the dtype of residual, and what is normalised is the rounded stream, so
    out is to the bit a function of the stream that goes on; out has the dtype of x.
    """
    compute = jnp.promote_types(jnp.promote_types(x.dtype, residual.dtype), jnp.float32)
    stream = (x.astype(compute) + residual.astype(compute)).astype(residual.dtype)
    out, mean, rstd = layer_norm(stream.astype(compute), weight, bias, eps=eps)
    return out.astype(x.dtype), stream, mean, rstd


def layer_norm_linear(
    x: Float[Array, "*lead D"],
    weight: Float[Array, " D"] | None,
    bias: Float[Array, " D"] | None,
    projection: Float[Array, "D F"],
    *,
    eps: float = 1e-5,
) -> Float[Array, "*lead F"]:
    """Returns layer_norm(x) times projection, the norm rounded to the dtype of x before the matmul."""
    normal, _, _ = layer_norm(x, weight, bias, eps=eps)
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.dot(normal, projection, preferred_element_type=accumulate).astype(x.dtype)


def work(call: Call) -> tuple[Work, Work]:
    """Returns the work of both directions: each reads and writes its arrays once, 2 of [M, D] forward and 3 backward."""
    size, rows = call.x.size, 8 * call.x.size // call.dims["D"]  # mean and rstd are float32
    features = nbytes(call.weight, call.bias)
    return Work(7 * size, 2 * nbytes(call.x) + features + rows), Work(
        11 * size, 3 * nbytes(call.x) + 2 * features + rows
    )


def work_of_add(call: Call) -> tuple[Work, Work]:
    """Returns the work of both directions. Forward: x and residual read, out and stream written. Backward: the stream and two
    cotangents read, and the gradient of x and residual written, once where they have one dtype."""
    size, rows = call.x.size, 8 * call.x.size // call.dims["D"]
    narrow, wide, features = nbytes(call.x), nbytes(call.residual), nbytes(call.weight, call.bias)
    forward = Work(8 * size, 2 * narrow + 2 * wide + features + rows)
    again = 0 if call.x.dtype == call.residual.dtype else narrow
    return forward, Work(12 * size, narrow + 3 * wide + again + 2 * features + rows)


def work_of_linear(call: Call) -> tuple[Work, Work]:
    """Returns the work of the matmuls, one forward and two backward; the norm, which is computed again, is not counted."""
    matmul, out = 2 * call.x.size * call.dims["F"], nbytes(call.x) // call.dims["D"] * call.dims["F"]
    weights = nbytes(call.weight, call.bias, call.projection)
    return Work(matmul, nbytes(call.x) + out + weights), Work(2 * matmul, 2 * nbytes(call.x) + out + 2 * weights)


_BOTH = ("weight", "bias")
_SMOKE, _SLOW, _BENCH, _CODE = (frozenset({tag}) for tag in ("smoke", "slow", "bench", "code"))

op = Op(
    layer_norm,
    outputs=("out", "mean", "rstd"),
    residuals=("mean", "rstd"),
    local_dims={"lead"},
    config=NormConfig,
    cases=(
        Case("small", {"lead": (2, 5), "D": 24}, arrays=_BOTH, tags=_SMOKE),
        Case("odd", {"lead": (37,), "D": 101}, {"eps": 1e-3}, arrays=_BOTH, tags=_CODE),
        Case("no_bias", {"lead": (3, 7), "D": 40}, arrays=("weight",), tags=_SLOW),
        Case("plain", {"lead": (), "D": 33}),
        Case("five_chunks", {"lead": (9,), "D": 1280}, arrays=_BOTH),
        Case("model_4k", {"lead": (16384,), "D": 4096}, arrays=_BOTH, tags=_BENCH | _CODE),
        Case("model_8k", {"lead": (16384,), "D": 8192}, arrays=_BOTH, tags=_BENCH | _CODE),
    ),
    work=work,
)

add_op = Op(
    fused_add_layer_norm,
    outputs=("out", "stream", "mean", "rstd"),
    residuals=("stream", "mean", "rstd"),
    local_dims={"lead"},
    config=NormConfig,
    cases=(
        Case("small", {"lead": (2, 5), "D": 24}, {"eps": 1e-3}, arrays=_BOTH, tags=_SMOKE),
        Case("plain", {"lead": (7,), "D": 33}, tags=_SLOW),
        Case("five_chunks", {"lead": (9,), "D": 1280}, arrays=_BOTH, tags=_CODE),
        Case("model_4k", {"lead": (16384,), "D": 4096}, arrays=_BOTH, tags=_BENCH | _CODE),
        Case("model_8k", {"lead": (16384,), "D": 8192}, arrays=_BOTH, tags=_BENCH | _CODE),
    ),
    work=work_of_add,
)

linear_op = Op(
    layer_norm_linear,
    local_dims={"lead", "F"},
    weights=("projection",),
    same_dtype=("x", "projection"),
    cases=(
        Case("small", {"lead": (2, 5), "D": 24, "F": 10}, {"eps": 1e-3}, tags=_SMOKE),
        Case("qkv_8b", {"lead": (16384,), "D": 4096, "F": 6144}, tags=_BENCH),
    ),
    work=work_of_linear,
)
