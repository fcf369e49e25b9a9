"""Contracts of rms_norm, alone and fused with the residual add before it or the projection after it, its cotangents, and
their cases."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.engines.rows.norms import Norm, NormConfig, outputs, projected, work, work_of_cotangents, work_of_linear
from kernels.framework.backend import Case
from kernels.framework.binding import Call
from kernels.framework.contract import Op
from kernels.framework.measured import bucket, power_of_two


def norm_of(eps: float, zero_centered: bool) -> Norm:
    return Norm(eps, centered=False, zero_centered=zero_centered)


def _check(weight: object, zero_centered: bool) -> None:
    if zero_centered and weight is None:
        raise ValueError(
            "rms_norm: argument 'zero_centered' applies to 'weight', which is None; pass 'weight' or omit it"
        )


def rms_norm(
    x: Float[Array, "*lead D"],
    weight: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead"]]:
    """Returns (x * rstd * weight, rstd) with rstd = 1 / sqrt(mean(x², over D) + eps).

    Everything is computed in float32, the weight included, and rounded once to the dtype of x; rstd is float32. The
    dtype of weight may differ from that of x. With `zero_centered` the scale is 1 + weight (Gemma).
    Source: Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.

    Raises:
      ValueError: `zero_centered` without `weight`.
    """
    _check(weight, zero_centered)
    return outputs(x, None, weight, None, norm_of(eps, zero_centered))


def fused_add_rms_norm(
    x: Float[Array, "*lead D"],
    residual: Float[Array, "*lead D"],
    weight: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead D"], Float[Array, "*lead"]]:
    """Returns (out, stream, rstd): stream = x + residual, and out and rstd are `rms_norm` of it.

    The sum is computed in float32 and rounded once to the dtype of residual. The norm is of the rounded stream, so out
    is exactly a function of the returned stream. out has the dtype of x.

    Raises:
      ValueError: `zero_centered` without `weight`.
    """
    _check(weight, zero_centered)
    return outputs(x, residual, weight, None, norm_of(eps, zero_centered))


def rms_norm_linear(
    x: Float[Array, "*lead D"],
    weight: Float[Array, " D"] | None,
    projection: Float[Array, "D F"],
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> Float[Array, "*lead F"]:
    """Returns rms_norm(x) times projection, the norm rounded to the dtype of x before the matmul.

    Raises:
      ValueError: `zero_centered` without `weight`.
    """
    return projected(rms_norm(x, weight, eps=eps, zero_centered=zero_centered)[0], projection)


def rms_norm_cotangents(
    x: Float[Array, "*lead D"],
    weight: Float[Array, " D"],
    rstd: Float[Array, "*lead"],
    d: Float[Array, "*lead D"],
) -> tuple[Float[Array, "*lead D"], Float[Array, " D"]]:
    """Returns the cotangents of x and weight, given d, that of `rms_norm`'s out, and its rstd.

    With g = d * weight that of x is g * rstd - x * rstd³ * mean(g * x), and that of weight the sum over rows of d * x * rstd;
    computed in float32, and rounded once to the dtypes of x and of weight.
    """
    compute = jnp.promote_types(x.dtype, jnp.float32)
    wide, slope, by = x.astype(compute), d.astype(compute), rstd.astype(compute)[..., None]
    g = slope * weight.astype(compute)
    dx = g * by - wide * by**3 * jnp.mean(g * wide, axis=-1, keepdims=True)
    dweight = jnp.sum(slope * wide * by, axis=tuple(range(x.ndim - 1)))
    return dx.astype(x.dtype), dweight.astype(weight.dtype)


def autotune_key(call: Call) -> str:
    """Returns the autotune key: the width of a tile, and a bucket of the number of rows."""
    rows = call.x.size // call.dims["D"]
    return f"{call.dtype} width<={power_of_two(call.dims['D'])} rows{bucket(rows, 512, 8192)}"


op = Op(
    rms_norm,
    outputs=("out", "rstd"),
    residuals=("rstd",),
    local_dims={"lead"},
    autotune_key=autotune_key,
    config=NormConfig,
    cases=(
        Case("small", {"lead": (2, 5), "D": 64}, arrays=("weight",), tags=frozenset({"smoke"})),
        Case("odd", {"lead": (37,), "D": 100}, {"eps": 1e-3}, arrays=("weight",), tags=frozenset({"code"})),
        Case("no_weight", {"lead": (3, 7), "D": 96}),
        Case("zero_centered", {"lead": (2, 3, 4), "D": 48}, {"zero_centered": True}, arrays=("weight",)),
        Case("one_row", {"lead": (), "D": 33}, arrays=("weight",)),
        Case("many_rows", {"lead": (517,), "D": 128}, arrays=("weight",)),
        Case("five_chunks", {"lead": (9,), "D": 1280}, arrays=("weight",)),
        Case("narrow_chunks", {"lead": (11,), "D": 520}, arrays=("weight",), tags=frozenset({"code"})),
        Case("wide", {"lead": (3,), "D": 8200}, arrays=("weight",)),
        Case("qk_norm", {"lead": (1, 16384, 32), "D": 128}, arrays=("weight",), tags=frozenset({"bench"})),
        Case("model_1k", {"lead": (65536,), "D": 1024}, arrays=("weight",), tags=frozenset({"bench"})),
        Case("model_2k", {"lead": (32768,), "D": 2048}, arrays=("weight",), tags=frozenset({"bench"})),
        Case("model_4k", {"lead": (16384,), "D": 4096}, arrays=("weight",), tags=frozenset({"bench", "code"})),
        Case("model_5120", {"lead": (16384,), "D": 5120}, arrays=("weight",), tags=frozenset({"bench"})),
        Case("model_8k", {"lead": (16384,), "D": 8192}, arrays=("weight",), tags=frozenset({"bench", "code"})),
        Case("model_16k", {"lead": (8192,), "D": 16384}, arrays=("weight",), tags=frozenset({"bench"})),
    ),
    work=work,
)

add_op = Op(
    fused_add_rms_norm,
    outputs=("out", "stream", "rstd"),
    residuals=("stream", "rstd"),
    local_dims={"lead"},
    config=NormConfig,
    cases=(
        Case("small", {"lead": (2, 5), "D": 24}, arrays=("weight",), tags=frozenset({"smoke"})),
        Case(
            "odd", {"lead": (7,), "D": 33}, {"zero_centered": True, "eps": 1e-3}, ("weight",), tags=frozenset({"slow"})
        ),
        Case("no_weight", {"lead": (2, 3), "D": 16}, tags=frozenset({"slow"})),
        Case("five_chunks", {"lead": (9,), "D": 1280}, arrays=("weight",), tags=frozenset({"code"})),
        Case("model_4k", {"lead": (16384,), "D": 4096}, arrays=("weight",), tags=frozenset({"bench", "code"})),
        Case("model_8k", {"lead": (16384,), "D": 8192}, arrays=("weight",), tags=frozenset({"bench", "code"})),
    ),
    work=work,
)

cotangents_op = Op(
    rms_norm_cotangents,
    outputs=("dx", "dweight"),
    no_gradient=("x", "weight", "rstd", "d"),
    same_dtype=("x", "d"),
    config=NormConfig,
    cases=(
        Case("small", {"lead": (2, 5), "D": 24}, tags=frozenset({"smoke"})),
        Case("five_chunks", {"lead": (9,), "D": 1280}, tags=frozenset({"code"})),
        Case("model_2k", {"lead": (32768,), "D": 2048}, tags=frozenset({"bench", "code"})),
    ),
    work=work_of_cotangents,
)

linear_op = Op(
    rms_norm_linear,
    local_dims={"lead", "F"},
    weights=("projection",),
    same_dtype=("x", "projection"),
    cases=(
        Case("small", {"lead": (2, 5), "D": 24, "F": 10}, tags=frozenset({"smoke"})),
        Case("odd", {"lead": (7,), "D": 33, "F": 5}, {"zero_centered": True, "eps": 1e-3}, tags=frozenset({"slow"})),
        Case("qkv_8b", {"lead": (16384,), "D": 4096, "F": 6144}, tags=frozenset({"bench"})),
    ),
    work=work_of_linear,
)
