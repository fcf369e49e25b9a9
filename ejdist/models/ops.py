"""The operations a model calls, injected: a model knows neither mesh nor backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ops:
    """What a model is made of.

    Attributes:
      attention: (query [B,T,N,H], key, value [B,T,K,H], segment_ids int [B,T], window int or None, logits_soft_cap)
        -> [B,T,N,H]; causal over the tokens' places in the sequence.
      rms_norm: (x, weight, eps) -> x's shape.
      rotary_embedding: (x [B,T,N,H], positions int [B,T], base, scaling) -> x's shape.
      gated_mlp: (x [B,T,D], gate, up, down, activation) -> [B,T,D].
      cross_entropy: (hidden [B,T,D], lm_head [D,V], targets int [B,T], z_loss, logits_soft_cap) -> `TokenLosses`, [B,T].
      constrain: (x, "B T D") -> x, told where its dims lie.
      gather: (parameter, "D F") -> it, from where it is stored to where it is used; its gradient goes the other way.
    """

    attention: Callable
    rms_norm: Callable
    rotary_embedding: Callable
    gated_mlp: Callable
    cross_entropy: Callable
    constrain: Callable
    gather: Callable
