"""A decoder of the Llama and Qwen3 family: RMSNorm, RoPE, GQA, SwiGLU, full or windowed attention by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.models.ops import Ops
from ejdist.models.parameters import Param
from kernels.rotary_embedding import RopeScaling

REMAT = ("none", "attention", "dots", "full")


@dataclass(unsafe_hash=True)
class DecoderConfig:
    """Shape and options of a decoder; also the `model` section of a recipe. Not frozen: recipes compose it."""

    vocab_size: int = 512
    num_layers: int = 4
    model_dim: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn_dim: int = 384
    activation: str = "silu"
    rope_base: float = 10000.0
    rope_scaling: str | None = None  # linear, ntk, yarn, llama3
    rope_factor: float = 1.0
    rope_original_length: int = 8192  # tokens of the context before scaling
    qk_norm: bool = False  # RMSNorm of each query and key head (Qwen3)
    attention_bias: bool = False  # biases of the q, k and v projections (Qwen2)
    tie_embeddings: bool = True
    layer_pattern: tuple[str, ...] = ("full",)  # repeated over the layers: full, window
    sliding_window: int | None = None  # keys that a windowed layer sees
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    norm_eps: float = 1e-6
    init_std: float = 0.02
    compute_dtype: str = "float32"  # of activations and matmuls; parameters stay float32
    remat: str = "attention"  # what the backward does not compute again: see `remat_policy`

    def __post_init__(self) -> None:
        self.layer_pattern = tuple(self.layer_pattern)

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy."""
        for name in ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads = {self.num_heads} must be a multiple of model.num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim = {self.head_dim} must be even: rotary embedding turns pairs")
        if not self.layer_pattern or set(self.layer_pattern) - {"full", "window"}:
            raise ValueError(f"model.layer_pattern = {list(self.layer_pattern)} must be made of full and window")
        if self.num_layers % len(self.layer_pattern):
            raise ValueError(
                f"model.num_layers = {self.num_layers} must be a multiple of the {len(self.layer_pattern)} layers of "
                "model.layer_pattern"
            )
        if "window" in self.layer_pattern and not self.sliding_window:
            raise ValueError("model.layer_pattern has windowed layers: give model.sliding_window, in keys")
        if self.remat not in REMAT:
            raise ValueError(f"model.remat = {self.remat!r} is unknown; use one of {', '.join(REMAT)}")
        if self.compute_dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"model.compute_dtype = {self.compute_dtype!r}: use float32, bfloat16 or float16")
        self.scaling()

    def scaling(self) -> RopeScaling | None:
        if self.rope_scaling is None:
            return None
        return RopeScaling(self.rope_scaling, self.rope_factor, self.rope_original_length)

    def windows(self) -> tuple[int | None, ...]:
        """Returns the window of each layer of the pattern; None is full attention."""
        return tuple(self.sliding_window if kind == "window" else None for kind in self.layer_pattern)


def declare(c: DecoderConfig) -> dict[str, Any]:
    """Returns the parameters, each a `Param`. The residual projections start smaller, by 1/sqrt(2 layers) (GPT-2)."""
    L, D, N, K, H, F, V = (
        c.num_layers, c.model_dim, c.num_heads, c.num_kv_heads, c.head_dim, c.ffn_dim, c.vocab_size,
    )  # fmt: skip
    std, small = c.init_std, c.init_std / (2 * L) ** 0.5
    layers = {
        "attention_norm": Param((L, D), "layers norm", "ones", decay=False),
        "query": Param((L, D, N, H), "layers D N H", std=std),
        "key": Param((L, D, K, H), "layers D K H", std=std),
        "value": Param((L, D, K, H), "layers D K H", std=std),
        "output": Param((L, N, H, D), "layers N H D", std=small),
        "mlp_norm": Param((L, D), "layers norm", "ones", decay=False),
        "gate": Param((L, D, F), "layers D F", std=std),
        "up": Param((L, D, F), "layers D F", std=std),
        "down": Param((L, F, D), "layers F D", std=small),
    }
    if c.qk_norm:
        layers["query_norm"] = Param((L, H), "layers norm", "ones", decay=False)
        layers["key_norm"] = Param((L, H), "layers norm", "ones", decay=False)
    if c.attention_bias:
        layers["query_bias"] = Param((L, N, H), "layers N H", "zeros", decay=False)
        layers["key_bias"] = Param((L, K, H), "layers K H", "zeros", decay=False)
        layers["value_bias"] = Param((L, K, H), "layers K H", "zeros", decay=False)
    declared = {
        "embedding": Param((V, D), "V D", std=std),
        "layers": layers,
        "final_norm": Param((D,), "norm", "ones", decay=False),
    }
    if not c.tie_embeddings:
        declared["lm_head"] = Param((D, V), "D V", std=std)
    return declared


def remat_policy(name: str) -> Any:
    """Returns what a layer's backward keeps instead of computing it again.

    "attention": the output and lse of attention, so that no attention runs twice. "dots": also the results of matmuls
    with parameters. "full": nothing. ("none" keeps everything and needs no policy.)
    """
    policies = jax.checkpoint_policies
    attention = policies.save_only_these_names("flash_attention.out", "flash_attention.lse")
    if name == "full":
        return policies.nothing_saveable
    if name == "attention":
        return attention
    return policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, attention)


def _einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision)


def _attention_block(x, p, batch, window: int | None, c: DecoderConfig, ops: Ops) -> jax.Array:
    h = ops.rms_norm(x, p["attention_norm"], c.norm_eps)
    q, k, v = (
        ops.constrain(_einsum(f"btd,d{n}h->bt{n}h", h, p[name]), f"B T {n.upper()} H")
        for name, n in (("query", "n"), ("key", "k"), ("value", "k"))
    )
    if c.attention_bias:
        q, k, v = q + p["query_bias"], k + p["key_bias"], v + p["value_bias"]
    if c.qk_norm:
        q, k = ops.rms_norm(q, p["query_norm"], c.norm_eps), ops.rms_norm(k, p["key_norm"], c.norm_eps)
    q, k = (ops.rotary_embedding(y, batch["positions"], c.rope_base, c.scaling()) for y in (q, k))
    out = ops.attention(q, k, v, batch["segment_ids"], window, c.attention_soft_cap)
    return ops.constrain(_einsum("btnh,nhd->btd", out, p["output"]), "B T D")


def hidden_states(params: dict, batch: dict[str, jax.Array], c: DecoderConfig, ops: Ops) -> jax.Array:
    """Returns the final hidden states, [B, T, D] in the compute dtype.

    batch has int32 [B, T]: tokens, positions (from 0 in each document), segment_ids (-1: padding).
    """
    dtype = jnp.dtype(c.compute_dtype)
    dims = {name: p.dims.replace("layers ", "") for name, p in declare(c)["layers"].items()}
    # Cast once, outside the scan, so that what is gathered layer by layer is already in the narrow type.
    layers = jax.tree.map(lambda p: p.astype(dtype), params["layers"])
    period = len(c.layer_pattern)
    layers = jax.tree.map(lambda p: p.reshape(c.num_layers // period, period, *p.shape[1:]), layers)
    table = ops.constrain(params["embedding"].astype(dtype), "V D")
    x = ops.constrain(jnp.take(table, batch["tokens"], axis=0), "B T D")

    def one_period(x: jax.Array, stacked: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        for i, window in enumerate(c.windows()):
            p = {name: ops.constrain(w[i], dims[name]) for name, w in stacked.items()}
            x = x + _attention_block(x, p, batch, window, c, ops)
            h = ops.rms_norm(x, p["mlp_norm"], c.norm_eps)
            x = x + ops.gated_mlp(h, p["gate"], p["up"], p["down"], c.activation)
        return x, None

    body = one_period
    if c.remat != "none":
        body = jax.checkpoint(one_period, policy=remat_policy(c.remat), prevent_cse=False)
    x, _ = jax.lax.scan(body, x, layers)
    return ops.rms_norm(x, params["final_norm"].astype(dtype), c.norm_eps)


def output_projection(params: dict, c: DecoderConfig) -> jax.Array:
    """Returns the matrix from hidden states to logits, [D, V] in the compute dtype."""
    head = params["embedding"].T if c.tie_embeddings else params["lm_head"]
    return head.astype(c.compute_dtype)


def loss(
    params: dict, batch: dict[str, jax.Array], c: DecoderConfig, ops: Ops, *, z_loss: float = 0.0
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (the sum over counted tokens of cross entropy and z-loss, {"loss", "z_loss", "tokens"} as sums).

    Sums, not means, so that microbatches and devices with different numbers of tokens add up to the exact mean.
    """
    hidden = hidden_states(params, batch, c, ops)
    head = ops.constrain(output_projection(params, c), "D V")
    terms = ops.cross_entropy(hidden, head, batch["targets"], z_loss, c.logits_soft_cap)
    sums = {"loss": jnp.sum(terms.loss), "z_loss": jnp.sum(terms.z_loss), "tokens": jnp.sum(terms.counted)}
    return sums["loss"] + sums["z_loss"], sums
