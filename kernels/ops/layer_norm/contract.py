"""Contracts of layer_norm, alone and fused with the residual add before it or the projection after it, and their cases."""

from __future__ import annotations

from jaxtyping import Array, Float

from kernels.engines.rows.norms import Norm, NormConfig, outputs, projected, work, work_of_linear
from kernels.framework.backend import Case
from kernels.framework.contract import Op


def norm_of(eps: float) -> Norm:
    return Norm(eps, centered=True)


def layer_norm(
    x: Float[Array, "*lead D"],
    weight: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead"], Float[Array, "*lead"]]:
    """Returns ((x - mean) * rstd * weight + bias, mean, rstd) with rstd = 1 / sqrt(variance of x over D + eps).

    Everything is computed in float32, weight and bias included, and rounded once to the dtype of x; mean and rstd are float32.
    The variance is the mean of (x - mean)², not mean(x²) - mean², which cancels if the mean is large.
    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450, eq. 3.
    """
    return outputs(x, None, weight, bias, norm_of(eps))


def fused_add_layer_norm(
    x: Float[Array, "*lead D"],
    residual: Float[Array, "*lead D"],
    weight: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead D"], Float[Array, "*lead"], Float[Array, "*lead"]]:
    """Returns (out, stream, mean, rstd): stream = x + residual, and the others are `layer_norm` of it.

    The sum is computed in float32 and rounded once to the dtype of residual. The norm is of the rounded stream, so out
    is exactly a function of the returned stream. out has the dtype of x.
    """
    return outputs(x, residual, weight, bias, norm_of(eps))


def layer_norm_linear(
    x: Float[Array, "*lead D"],
    weight: Float[Array, " D"] | None,
    bias: Float[Array, " D"] | None,
    projection: Float[Array, "D F"],
    *,
    eps: float = 1e-5,
) -> Float[Array, "*lead F"]:
    """Returns layer_norm(x) times projection, the norm rounded to the dtype of x before the matmul."""
    return projected(layer_norm(x, weight, bias, eps=eps)[0], projection)


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
        Case("wide", {"lead": (3,), "D": 8200}, arrays=_BOTH),
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
    work=work,
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
