"""The arguments of delta rules as their kernels take them, whatever their toolchain."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class Tokens(NamedTuple):
    """Arguments of a gated delta rule. Head n of N reads head n // (N / K) of q and k.

    Attributes:
      q, k: [B, T, K, H]. v: [B, T, N, Hv]. beta: [B, T, N]; None for linear attention, of kernels that have it too.
      a: log decays, [B, T, N], or of channels [B, T, N, H]; or None.
      segment_ids: int [B, T], or None.
      entries: float32 [B, G, N, H, Hv], states that sequences start from, or None for 0.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: Any
    a: jax.Array | None
    segment_ids: jax.Array | None
    entries: jax.Array | None


class DplrTokens(NamedTuple):
    """Arguments of `S_t = diag(exp w_t) S_{t-1} + b_t (S_{t-1}ᵀ a_t)ᵀ + k_t v_tᵀ`, `out_t = scale · S_tᵀ q_t`.

    Attributes:
      q, w, k, a, b: [B, T, N, H]. v: [B, T, N, Hv].
      segment_ids: int [B, T], or None.
      entries: float32 [B, G, N, H, Hv], states that sequences start from, or None for 0.
    """

    q: jax.Array
    w: jax.Array
    k: jax.Array
    v: jax.Array
    a: jax.Array
    b: jax.Array
    segment_ids: jax.Array | None
    entries: jax.Array | None
