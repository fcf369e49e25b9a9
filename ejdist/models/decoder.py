"""A decoder of the Llama and Qwen families: parameters, forward and loss. It names no mesh axis and no backend.

Dtypes. Parameters are float32 (the master weights). The matrices are cast to the compute dtype once a step, outside the
loop over layers: what a mesh gathers is the narrow copy, and every gradient returns to float32 before it is accumulated
or used. Norm scales, and the embedding that rows are taken from, stay float32: they cost nothing, and the gradient of a
frequent token is a long sum. Float32 compute is true float32 on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ejdist.models.config import DecoderConfig
from ejdist.models.ops import Ops
from ejdist.models.parameters import Param, initialise
from ejdist.models.remat import LAYER_INPUT, rematerialised

Batch = Mapping[str, jax.Array]


def declare(config: DecoderConfig) -> dict[str, Any]:
    """Returns the parameters as a tree of `Param`. Those of all layers are stacked, in the order of the layers."""
    c = config
    L, D, N, K, H, F, V = c.num_layers, c.model_dim, c.num_heads, c.num_kv_heads, c.head_dim, c.ffn_dim, c.vocab_size
    # Deviations keep activations at 1; what is added to the residual stream shrinks with depth (Radford et al., GPT-2).
    depth = (2 * L) ** -0.5
    layers = {
        "attention_norm": Param((L, D), "layers D", "ones"),
        "query": Param((L, D, N, H), "layers D N H", D**-0.5),
        "key": Param((L, D, K, H), "layers D K H", D**-0.5),
        "value": Param((L, D, K, H), "layers D K H", D**-0.5),
        "output": Param((L, N, H, D), "layers N H D", (N * H) ** -0.5 * depth),
        "mlp_norm": Param((L, D), "layers D", "ones"),
        "gate": Param((L, D, F), "layers D F", D**-0.5),
        "up": Param((L, D, F), "layers D F", D**-0.5),
        "down": Param((L, F, D), "layers F D", F**-0.5 * depth),
    }
    if c.attention_bias:
        layers |= {
            "query_bias": Param((L, N, H), "layers N H", "zeros"),
            "key_bias": Param((L, K, H), "layers K H", "zeros"),
            "value_bias": Param((L, K, H), "layers K H", "zeros"),
        }
    if c.qk_norm:
        layers |= {
            "query_norm": Param((L, H), "layers H", "ones"),
            "key_norm": Param((L, H), "layers H", "ones"),
        }
    tree = {
        "embedding": Param((V, D), "V D", 0.02),
        "layers": layers,
        "final_norm": Param((D,), "D", "ones"),
    }
    if not c.tie_embeddings:
        tree["lm_head"] = Param((D, V), "D V", D**-0.5)
    return tree


def init(config: DecoderConfig, key: jax.Array) -> dict[str, Any]:
    """Returns the initial parameters: the same for a key on every mesh."""
    return initialise(declare(config), key)


def num_parameters(config: DecoderConfig) -> int:
    """Returns the number of trained numbers; a tied embedding is counted once."""
    return sum(p.size for p in jax.tree.leaves(declare(config)))


def _einsum(subscripts: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, x, weight, precision=precision)


def _narrow(params: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """Returns the parameters cast to the compute dtype, except the scales of norms."""
    return {name: w if name.endswith("norm") else w.astype(dtype) for name, w in params.items()}


def _layer(
    x: jax.Array,
    weights: dict[str, jax.Array],
    positions: jax.Array,
    segment_ids: jax.Array | None,
    *,
    window: int | None,
    config: DecoderConfig,
    ops: Ops,
) -> jax.Array:
    """Returns x [B T D] after one layer, attention and MLP, each with a norm before and a residual around."""
    x = checkpoint_name(x, LAYER_INPUT)
    h = ops.rms_norm(x, weights["attention_norm"], eps=config.norm_eps)
    heads = {}
    for name, dims in (("query", "B T N H"), ("key", "B S K H"), ("value", "B S K H")):
        y = _einsum("btd,dnh->btnh", h, weights[name])
        if config.attention_bias:
            y = y + weights[f"{name}_bias"]
        if name != "value":
            if config.qk_norm:
                y = ops.rms_norm(y, weights[f"{name}_norm"], eps=config.norm_eps)
            y = ops.rotary_embedding(y, positions, base=config.rope_base, scaling=config.rope_scaling)
        heads[name] = ops.constrain(y, dims)
    attended = ops.attention(
        **heads,
        segment_ids=segment_ids,
        window=window,
        softmax_scale=config.softmax_scale,
        logits_soft_cap=config.attention_logits_soft_cap,
    )
    x = x + ops.constrain(_einsum("btnh,nhd->btd", attended, weights["output"]), "B T D")
    h = ops.rms_norm(x, weights["mlp_norm"], eps=config.norm_eps)
    y = ops.gated_mlp(h, weights["gate"], weights["up"], weights["down"], activation=config.activation)
    return x + ops.constrain(y, "B T D")


def forward(
    params: dict[str, Any],
    batch: Batch,
    config: DecoderConfig,
    ops: Ops,
    *,
    compute_dtype: str = "bfloat16",
    remat: str = "attention",
) -> jax.Array:
    """Returns the last hidden states, normalised, [B, T, D] in the compute dtype.

    Args:
      batch: int32 [B, T]: tokens; positions, for RoPE (absent: 0 ... T-1); segment_ids, documents that do not see each
        other, -1 for padding (absent: one document a row).
      compute_dtype: dtype of activations and of the matrices they meet.
      remat: what layers keep for the backward, one of `REMAT_POLICIES`.
    """
    tokens, segment_ids = batch["tokens"], batch.get("segment_ids")
    positions = batch.get("positions", jnp.arange(tokens.shape[1], dtype=jnp.int32)[None])
    positions = jnp.broadcast_to(positions, tokens.shape)
    x = ops.constrain(ops.embed(params["embedding"], tokens).astype(compute_dtype), "B T D")
    layers = [
        rematerialised(partial(_layer, window=window, config=config, ops=ops), remat) for window in config.windows
    ]
    weights, period = _narrow(params["layers"], compute_dtype), len(layers)
    rounds = config.num_layers // period

    def one_round(x: jax.Array, group: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        for i, layer in enumerate(layers):
            x = layer(x, {name: w[i] for name, w in group.items()}, positions, segment_ids)
        return x, None

    grouped = {name: w[: rounds * period].reshape(rounds, period, *w.shape[1:]) for name, w in weights.items()}
    x, _ = jax.lax.scan(one_round, x, grouped)
    for i in range(rounds * period, config.num_layers):  # the pattern's last, incomplete round
        x = layers[i % period](x, {name: w[i] for name, w in weights.items()}, positions, segment_ids)
    return ops.rms_norm(x, params["final_norm"], eps=config.norm_eps)


def loss(
    params: dict[str, Any],
    batch: Batch,
    config: DecoderConfig,
    ops: Ops,
    *,
    z_loss: float = 0.0,
    compute_dtype: str = "bfloat16",
    remat: str = "attention",
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (what to differentiate, terms): sums over the counted tokens of the batch, float32 scalars.

    Sums, not means, so that the parts of a batch, over devices or over time, add up to the loss of the whole. The first
    is cross entropy plus z-loss. The terms are "loss" (cross entropy), "z_loss" and "tokens", how many targets count.
    """
    hidden = forward(params, batch, config, ops, compute_dtype=compute_dtype, remat=remat)
    lm_head = params["embedding"].T if config.tie_embeddings else params["lm_head"]
    each = ops.cross_entropy(
        hidden,
        lm_head.astype(compute_dtype),
        batch["targets"],
        z_loss=z_loss,
        logits_soft_cap=config.logits_soft_cap,
    )
    terms = {name: jnp.sum(value) for name, value in zip(("loss", "z_loss", "tokens"), each, strict=True)}
    return terms["loss"] + terms["z_loss"], terms
