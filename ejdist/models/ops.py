"""The operations that a model is given. What they do on a mesh, and on which backend, is decided by who binds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kernels.cross_entropy import fused_token_losses
from kernels.flash_attention import flash_attention
from kernels.gated_mlp import gated_mlp
from kernels.rms_norm import rms_norm
from kernels.rotary_embedding import rotary_embedding


def take_rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns table[tokens], [B, T, D] of [V, D]; a token outside the vocabulary gives NaN, not a neighbour's row."""
    return jnp.take(table, tokens, axis=0, mode="fill")


def _anywhere(x: jax.Array, dims: str) -> jax.Array:
    return x


@dataclass(frozen=True)
class Ops:
    """What a decoder calls. All arrays are global; dims are B T D N K H F V.

    Attributes:
      attention: (query [B T N H], key [B T K H], value [B T K H], *, segment_ids [B T] or None, window: int or None,
        softmax_scale, logits_soft_cap) -> [B T N H]. Causal. Knows where each row of T sits in the sequence.
      rms_norm: (x, weight, *, eps) -> x's shape and dtype.
      rotary_embedding: (x [B T N H], positions [B T], *, base, scaling) -> x's shape and dtype.
      gated_mlp: (x [B T D], gate [D F], up [D F], down [F D], *, activation) -> [B T D].
      cross_entropy: (hidden [B T D], lm_head [D V], targets [B T], *, z_loss, logits_soft_cap) -> `TokenLosses`, each
        [B T] and float32, zero where the target is -1.
      embed: (table [V D], tokens [B T]) -> [B T D].
      constrain: (x, dims such as "B T D") -> x, placed.
    """

    attention: Callable[..., jax.Array]
    rms_norm: Callable[..., jax.Array]
    rotary_embedding: Callable[..., jax.Array]
    gated_mlp: Callable[..., jax.Array]
    cross_entropy: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    embed: Callable[..., jax.Array] = take_rows
    constrain: Callable[[jax.Array, str], jax.Array] = _anywhere


def local_ops(platform: str | None = None) -> Ops:
    """Returns the operations of `kernels` on unsharded arrays, on the backend that `platform` asks for."""

    def attention(query, key, value, *, segment_ids, window, softmax_scale, logits_soft_cap):
        return flash_attention(
            query,
            key,
            value,
            causal=True,
            sliding_window=window,
            q_segment_ids=segment_ids,
            kv_segment_ids=segment_ids,
            softmax_scale=softmax_scale,
            logits_soft_cap=logits_soft_cap,
            platform=platform,
        )

    def on(function: Callable) -> Callable:
        return lambda *args, **kwargs: function(*args, **kwargs, platform=platform)

    return Ops(
        attention=attention,
        rms_norm=on(rms_norm),
        rotary_embedding=on(rotary_embedding),
        gated_mlp=on(gated_mlp),
        cross_entropy=on(fused_token_losses),
    )
