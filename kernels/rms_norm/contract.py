"""The meaning of RMS normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels._core.contract import Case, Op


@dataclass(frozen=True)
class RMSNormConfig:
    """Tunables of the kernels: rows that one program handles, and warps of a Triton program. None: chosen."""

    block_rows: int | None = None
    num_warps: int | None = None


def rms_norm(
    x: Float[Array, "*lead D"],
    weight: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> tuple[Float[Array, "*lead D"], Float[Array, "*lead"]]:
    """Returns (out, rstd): out = x * rstd * weight in x's dtype, rstd = 1 / sqrt(mean(x^2) + eps) in float32.

    Computed in float32 whatever the dtypes. With `zero_centered` the scale is 1 + weight.
    """
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    wide = x.astype(accumulate)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1) + eps)
    out = wide * rstd[..., None]
    if weight is not None:
        scale = weight.astype(accumulate)
        out = out * (1 + scale if zero_centered else scale)
    return out.astype(x.dtype), rstd


op = Op(
    rms_norm,
    outputs=("out", "rstd"),
    residuals=("rstd",),
    local_dims={"lead"},
    order=("triton_gpu", "pallas_tpu", "xla"),
    config=RMSNormConfig,
    cases=(
        Case("small", {"lead": (2, 5), "D": 64}, arrays=("weight",), tags=frozenset({"smoke"})),
        Case("odd", {"lead": (3, 7), "D": 100}, {"eps": 1e-3}, arrays=("weight",)),
        Case("no_weight", {"lead": (4,), "D": 96}),
        Case("zero_centered", {"lead": (2, 3, 4), "D": 48}, {"zero_centered": True}, arrays=("weight",)),
        Case("one_row", {"lead": (), "D": 33}, arrays=("weight",)),
        Case("many_rows", {"lead": (517,), "D": 128}, arrays=("weight",)),
        Case("wide", {"lead": (3,), "D": 8192}, arrays=("weight",)),
        Case("qk_norm", {"lead": (8, 4096, 32), "D": 128}, arrays=("weight",), tags=frozenset({"bench"})),
        Case("model_4k", {"lead": (16384,), "D": 4096}, arrays=("weight",), tags=frozenset({"bench"})),
        Case("model_8k", {"lead": (16384,), "D": 8192}, arrays=("weight",), tags=frozenset({"bench"})),
        Case("model_5120", {"lead": (16384,), "D": 5120}, arrays=("weight",), tags=frozenset({"bench"})),
    ),
)
