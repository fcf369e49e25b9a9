"""Differential attention and the mixture of heads, composed of public operations.

With the backend `composed`, dispatch chooses the backend of each operation for the platform being lowered for. The
backend `xla` is the same program with every operation on XLA, since a caller who requests XLA gets nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from kernels.engines.matmul.permutation import permuted, spread
from kernels.framework.execute import backward_of
from kernels.ops.attention_variants.contract import differential_op, mixture_op, routed
from kernels.ops.flash_attention import flash_attention
from kernels.ops.grouped_matmul import grouped_matmul

# Not the CPU, where every operation inside would run on XLA, as in the backend `xla`.
ACCELERATORS: Any = {"platforms": {"cuda", "rocm", "tpu"}, "dtypes": {"float32", "bfloat16", "float16"}}


def flash_of(platform: str | None) -> Callable:
    """Returns flash attention on a toolchain; None lets dispatch choose."""

    def flash(query, key, value, mask, softmax_scale, **options):
        options |= {"mask_info": mask, "softmax_scale": softmax_scale, "platform": platform}
        return flash_attention(query, key, value, **options)

    return flash


def differential(platform: str | None) -> tuple[Callable, Callable]:
    """Returns (forward, backward) of differential attention, with its attentions on a toolchain; None lets dispatch
    choose."""
    flash = flash_of(platform)

    def forward(query, key, query_2, key_2, value, lambda_, mask, softmax_scale):
        first, lse = flash(query, key, value, mask, softmax_scale, return_lse=True)
        second, lse_2 = flash(query_2, key_2, value, mask, softmax_scale, return_lse=True)
        upcast = first.astype(jnp.float32) - lambda_.astype(jnp.float32)[:, None] * second.astype(jnp.float32)
        return upcast.astype(query.dtype), second, lse, lse_2

    def backward(saved, query, key, query_2, key_2, value, lambda_, mask, softmax_scale):
        """Both attentions use the saved lse; the first one's output is out + lambda_ out_2."""
        weight = lambda_.astype(jnp.float32)[:, None]
        d, second = saved.d_out.astype(jnp.float32), saved.out_2.astype(jnp.float32)
        d_second = saved.d_out_2.astype(jnp.float32) - weight * d
        first = saved.out.astype(jnp.float32) + weight * second

        def gradients(q, k, d, out, lse, d_lse):
            call = flash_attention.prepare(q, k, value, mask_info=mask, softmax_scale=softmax_scale).call
            residuals = {"d_out": d.astype(q.dtype), "lse": lse, "delta": jnp.sum(d * out, axis=-1) - d_lse}
            return flash_attention.op.backward(residuals, **call.arguments, platform=platform)

        one = gradients(query, key, d, first, saved.lse, saved.d_lse)
        two = gradients(query_2, key_2, d_second, second, saved.lse_2, saved.d_lse_2)
        return {
            "query": one["query"],
            "key": one["key"],
            "query_2": two["query"],
            "key_2": two["key"],
            "value": one["value"].astype(jnp.float32) + two["value"].astype(jnp.float32),
            "lambda_": -jnp.sum(d * second, axis=(0, 1, 3)),
        }

    return forward, backward


def mixture(platform: str | None) -> tuple[Callable, Callable]:
    """Returns (forward, backward) of the mixture of heads, with its operations on a toolchain; None lets dispatch
    choose."""
    flash = flash_of(platform)

    def forward(x, key, value, router_logits, w_query, w_out, mask, top_k, softmax_scale):
        """A token's slots, one per expert, are sorted by expert for the two projections, and are heads in between."""
        B, T, D = x.shape
        gates, chosen = routed(router_logits, top_k)
        expert = chosen.reshape(-1)
        order = jnp.argsort(expert, stable=True)
        back = jnp.argsort(order)
        sizes = jnp.sum(expert[:, None] == jnp.arange(w_query.shape[0]), axis=0, dtype=jnp.int32)

        def projected(rows, weights):
            return permuted(grouped_matmul(rows, weights, sizes, platform=platform), back, order)

        # Slots gather from their tokens: the rows of all slots exist once, sorted by expert.
        query = projected(spread(x.reshape(-1, D), order, back, top_k), w_query).reshape(B, T, top_k, -1)
        heads = flash(query, key[:, :, None], value[:, :, None], mask, softmax_scale)
        each = projected(permuted(heads.reshape(B * T * top_k, -1), order, back), w_out).reshape(B, T, top_k, D)
        return jnp.sum(gates[..., None] * each, axis=2).astype(x.dtype)

    return forward, backward_of(mixture_op, forward)


differential_op.register(*differential(None), name="composed", symbolic={"B"}, **ACCELERATORS)
mixture_op.register(*mixture(None), name="composed", symbolic={"B"}, **ACCELERATORS)
