"""Root mean square normalisation."""

from __future__ import annotations

from jaxtyping import Array, Float

from kernels.rms_norm.contract import RMSNormConfig, op

__all__ = ["RMSNormConfig", "op", "rms_norm"]


def rms_norm(
    x: Float[Array, "*lead D"],
    weight: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    platform: str | None = None,
    cfg: RMSNormConfig | None = None,
) -> Float[Array, "*lead D"]:
    """Returns x / sqrt(mean(x², over D) + eps) * weight, computed in float32, in the dtype of x.

    Args:
      weight: one factor for each feature, of any float dtype; None for none.
      eps: added to the mean square.
      zero_centered: the factor is 1 + weight, as in Gemma.
      platform: None for the fastest backend of what this is compiled for; or "xla", "triton", "pallas".
      cfg: tunables for this call.

    Raises:
      ValueError: shapes disagree, or `zero_centered` without `weight`. Unsupported: the platform asked for cannot do it.

    >>> import jax.numpy as jnp
    >>> print(rms_norm(jnp.array([3.0, 4.0])).round(3))
    [0.849 1.131]
    """
    return op(x, weight, eps=eps, zero_centered=zero_centered, platform=platform, cfg=cfg)[0]
