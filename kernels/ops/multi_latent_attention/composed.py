"""Latent attention for training and prefill: the up-projections, around `flash_attention`, with O(S) memory.

Training and prefill compute keys and values of each head, since a pair then takes H + Hr + Hv multiplications instead
of 2 R + Hr. The backward recomputes them from the latent: nothing of width N (H + Hv) is stored.

With the backend `composed`, dispatch chooses attention's backend for the platform being lowered for. The backend `xla`
is the same program with attention on XLA, since a caller who requests XLA gets nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from kernels.engines.matmul.dot import dot
from kernels.ops.flash_attention import flash_attention
from kernels.ops.multi_latent_attention.contract import op, scale_of
from kernels.ops.multi_latent_attention.heads import joined_heads

# Not the CPU, where attention would run on XLA, as in the backend `xla`.
ACCELERATORS: Any = {"platforms": {"cuda", "rocm", "tpu"}, "dtypes": {"float32", "bfloat16", "float16"}}


def _attention(heads, mask, softmax_aux, scale, cap, deterministic):
    """Returns the bound call of flash attention."""
    options = {"mask_info": mask, "softmax_aux": softmax_aux, "softmax_scale": scale, "logits_soft_cap": cap}
    options |= {"deterministic": True} if deterministic else {}
    return flash_attention.prepare(*heads, **options, return_lse=True).call


def attend_joined(platform: str | None) -> Callable:
    """Returns the attention of heads whose parts are joined first, on a toolchain."""

    def attend(parts, *options):
        return flash_attention.op.run(_attention(joined_heads(*parts), *options), platform=platform)

    return attend


def mla(platform: str | None, attend: Callable | None = None) -> tuple[Callable, Callable]:
    """Returns (forward, backward) of `flash_mla`, with attention on a toolchain; None lets dispatch choose.

    Args:
      attend: computes the forward from the arguments of `joined_heads`, mask, sinks, scale, cap and `deterministic`. None
        joins the heads.
    """
    attend = attend or attend_joined(platform)

    def forward(
        query,
        key_value,
        w_kc,
        w_vc,
        query_rope,
        key_rope,
        mask,
        softmax_aux,
        softmax_scale,
        logits_soft_cap,
        deterministic,
    ):
        parts = (query, key_value, w_kc, w_vc, query_rope, key_rope)
        scale = scale_of(softmax_scale, query, query_rope)
        return attend(parts, mask, softmax_aux, scale, logits_soft_cap, deterministic)

    def backward(
        saved,
        query,
        key_value,
        w_kc,
        w_vc,
        query_rope,
        key_rope,
        mask,
        softmax_aux,
        softmax_scale,
        logits_soft_cap,
        deterministic,
    ):
        H = query.shape[-1]
        scale = scale_of(softmax_scale, query, query_rope)
        heads = joined_heads(query, key_value, w_kc, w_vc, query_rope, key_rope)
        call = _attention(heads, mask, softmax_aux, scale, logits_soft_cap, deterministic)
        residuals = {"d_out": saved.d_out.astype(query.dtype), "lse": saved.lse, "delta": saved.delta}
        heads_gradients = flash_attention.op.backward(residuals, **call.arguments, platform=platform)
        dq, dk, dv = (heads_gradients[n] for n in ("query", "key", "value"))
        dk_up = dk[..., :H]
        gradients = {
            "query": dq[..., :H],
            "key_value": dot("bskh,rkh->bsr", dk_up, w_kc) + dot("bskv,rkv->bsr", dv, w_vc),
            "w_kc": dot("bsr,bskh->rkh", key_value, dk_up),
            "w_vc": dot("bsr,bskv->rkv", key_value, dv),
        }
        if query_rope is not None:
            gradients["query_rope"] = dq[..., H:]
            gradients["key_rope"] = jnp.sum(dk[..., H:], axis=2, dtype=jnp.float32)
        if softmax_aux is not None:
            gradients["softmax_aux"] = heads_gradients["softmax_aux"]
        return gradients

    return forward, backward


op.register(*mla(None), name="composed", symbolic={"B"}, **ACCELERATORS)
