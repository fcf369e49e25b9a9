"""RMS normalisation: one read, one write, float32 inside."""

from __future__ import annotations

import jax

from kernels.rms_norm.contract import RMSNormConfig, op

__all__ = ["RMSNormConfig", "op", "rms_norm"]


def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    platform: str | None = None,
    cfg: RMSNormConfig | None = None,
) -> jax.Array:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dim, in x's dtype; computed in float32.

    Args:
      x: [..., D]. weight: [D], or None for none; its dtype may differ from x's.
      eps: added to the mean square.
      zero_centered: the scale is 1 + weight (Gemma).
      platform, cfg: see `Op.__call__`.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.

    >>> import jax.numpy as jnp
    >>> rms_norm(jnp.full((2, 4), 3.0)).tolist()[0]
    [1.0, 1.0, 1.0, 1.0]
    """
    return op(x, weight, eps=eps, zero_centered=zero_centered, platform=platform, cfg=cfg)[0]
