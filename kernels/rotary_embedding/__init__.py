"""Rotary position embedding (RoPE), with linear, NTK, YaRN and Llama-3 scaling."""

from __future__ import annotations

import jax

from kernels.rotary_embedding.contract import RopeScaling, frequencies, op

__all__ = ["RopeScaling", "frequencies", "op", "rotary_embedding"]


def rotary_embedding(
    x: jax.Array,
    positions: jax.Array,
    *,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    platform: str | None = None,
    cfg: None = None,
) -> jax.Array:
    """Returns x with its pairs turned by position * frequency; the angles are computed in float32.

    Args:
      x: queries or keys, [B, T, N, H].
      positions: int [B, T] or [1, T].
      base: theta; frequencies are base^(-2i/H), or over `rotary_dim` if given.
      scaling: `RopeScaling` for contexts longer than those of pre-training.
      interleaved: pairs are (2i, 2i + 1), as in GPT-J, instead of (i, i + H/2), as in Llama.
      rotary_dim: only the first so many entries turn.

    Raises:
      ValueError: `rotary_dim` (or H) is odd, or a shape does not fit; naming the argument.

    Source: Su et al., RoFormer, 2021; Peng et al., YaRN, 2023.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 1, 1, 4))
    >>> bool((rotary_embedding(x, jnp.zeros((1, 1), jnp.int32)) == x).all())
    True
    """
    return op(
        x,
        positions,
        base=float(base),
        scaling=scaling,
        interleaved=interleaved,
        rotary_dim=rotary_dim,
        platform=platform,
        cfg=cfg,
    )
