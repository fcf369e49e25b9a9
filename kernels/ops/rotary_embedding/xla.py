"""Rotary embedding in plain XLA, any device."""

from __future__ import annotations

import jax.numpy as jnp

from kernels.ops.rotary_embedding.contract import op, pair_op, rotary_embedding, rotary_embedding_pair


def _back(positions, base, scaling, interleaved, rotary_dim, xpos):
    """Returns the arguments of the transpose: the inverse rotation; the factors of YaRN and XPos are the same in both.

    The positions are converted to floats before they are negated, because unsigned integers have no negatives.
    """
    options = {"base": base, "scaling": scaling, "interleaved": interleaved, "rotary_dim": rotary_dim}
    return {"positions": -positions.astype(jnp.float32), **options, "xpos": None if xpos is None else xpos.reversed()}


def backward(saved, positions, base, scaling, interleaved, rotary_dim, xpos):
    back = _back(positions, base, scaling, interleaved, rotary_dim, xpos)
    return {"x": rotary_embedding(saved.d_out, **back)}


def backward_pair(saved, positions, base, scaling, interleaved, rotary_dim, xpos):
    back = _back(positions, base, scaling, interleaved, rotary_dim, xpos)
    query, key = rotary_embedding_pair(saved.d_query, saved.d_key, **back)
    return {"x": query, "key": key}


EVERYWHERE = {
    "name": "xla",
    "platforms": {"cpu", "cuda", "rocm", "tpu"},
    "dtypes": {"float32", "bfloat16", "float16"},
    "symbolic": {"B", "T", "N"},
}
op.register(rotary_embedding, backward, **EVERYWHERE)
pair_op.register(rotary_embedding_pair, backward_pair, **{**EVERYWHERE, "symbolic": {"B", "T", "N", "K"}})
