"""Rotary embedding in plain XLA, any device."""

from __future__ import annotations

import jax.numpy as jnp

from kernels.ops.rotary_embedding.contract import (
    op,
    pair_op,
    rotary_embedding,
    rotary_embedding_pair,
    rotated_width,
    turned,
    turning,
)


def _back(d_out, positions, base, scaling, interleaved, rotary_dim, xpos, exact_from):
    """Returns the gradient of x: the transpose is the inverse rotation; the factors of YaRN and XPos are the same in both."""
    width = rotated_width(d_out.shape[-1], rotary_dim)
    accumulate = jnp.promote_types(d_out.dtype, jnp.float32)
    cos, sin, scale = turning(positions, width, base, scaling, xpos, exact_from, accumulate)
    return turned(d_out, cos * scale, -sin * scale, width, interleaved)


def backward(saved, positions, base, scaling, interleaved, rotary_dim, xpos, exact_from):
    return {"x": _back(saved.d_out, positions, base, scaling, interleaved, rotary_dim, xpos, exact_from)}


def backward_pair(saved, positions, base, scaling, interleaved, rotary_dim, xpos, exact_from):
    of_key = None if xpos is None else xpos.other()
    return {
        "x": _back(saved.d_query, positions, base, scaling, interleaved, rotary_dim, xpos, exact_from),
        "key": _back(saved.d_key, positions, base, scaling, interleaved, rotary_dim, of_key, exact_from),
    }


EVERYWHERE = {
    "name": "xla",
    "platforms": {"cpu", "cuda", "rocm", "tpu"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "symbolic": {"B", "T", "N"},
}
op.register(rotary_embedding, backward, **EVERYWHERE)
pair_op.register(rotary_embedding_pair, backward_pair, **{**EVERYWHERE, "symbolic": {"B", "T", "N", "K"}})
