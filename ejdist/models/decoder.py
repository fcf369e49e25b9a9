"""A decoder of the Llama and Qwen3 family: RMSNorm, RoPE, GQA, SwiGLU, full or windowed attention by layer.

Dtypes. Parameters are float32, the master weights. Matrices are cast to the compute dtype once a step, outside the scan
over layers, so that a mesh gathers the narrow copy. Norm scales, and the table that embeddings are taken from, stay
float32: they cost little, and a frequent token's gradient is a long sum, which bfloat16 stops adding to after some 256
equal terms. A matrix's gradient is summed over devices in the compute dtype, and over microbatches in float32. Float32
compute is true float32 on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ejdist.models.ops import Ops
from ejdist.models.parameters import Param
from kernels.ops.gated_mlp import ACTIVATIONS
from kernels.ops.rotary_embedding import RopeScaling

REMAT = ("none", "dots", "attention", "offload", "full")  # from most memory to least, see `rematerialised`
_LAYER_INPUT = "decoder.layer_input"


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
    remat: str = "attention"  # what the backward does not compute again: see `rematerialised`

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
        if self.num_layers < len(self.layer_pattern):
            raise ValueError(
                f"model.num_layers = {self.num_layers} is less than the {len(self.layer_pattern)} layers of "
                "model.layer_pattern: shorten it or add layers"
            )
        if "window" in self.layer_pattern and not self.sliding_window:
            raise ValueError("model.layer_pattern has windowed layers: give model.sliding_window, in keys")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"model.activation = {self.activation!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
        for name in ("sliding_window", "attention_soft_cap", "logits_soft_cap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"model.{name} must be positive, or null for none, got {value}")
        if self.sliding_window and "window" not in self.layer_pattern:
            raise ValueError(
                f"model.sliding_window = {self.sliding_window}, but no layer has a window: put one into "
                "model.layer_pattern, for example [window,full], or leave the window out"
            )
        for name in ("rope_base", "norm_eps", "init_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"model.{name} must be positive, got {getattr(self, name)}")
        if self.remat not in REMAT:
            raise ValueError(f"model.remat = {self.remat!r} is unknown; use one of {', '.join(REMAT)}")
        if self.compute_dtype not in ("float32", "bfloat16"):
            # float16 would need its loss scaled: gradients here are of sums over tokens, past its range.
            raise ValueError(f"model.compute_dtype = {self.compute_dtype!r}: use float32 or bfloat16")
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


def rematerialised(layer: Callable, policy: str, *, in_scan: bool) -> Callable:
    """Returns the layer under a policy for what its backward keeps, beside the layer's input.

    "none" keeps everything. "dots": the results of the projections, and attention's output and lse. "attention": the
    latter alone, so that no attention runs twice. "offload": the same, but attention's output and the layer's input wait
    in the host's memory. "full": nothing.
    """
    policies = jax.checkpoint_policies
    attention = policies.save_only_these_names("flash_attention.out", "flash_attention.lse")
    if policy == "none":
        return layer
    keep = {
        "dots": policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, attention),
        "attention": attention,
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["flash_attention.lse"],  # a number per query and head
            names_which_can_be_offloaded=["flash_attention.out", _LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        "full": policies.nothing_saveable,
    }[policy]
    # Forward and backward of a scan are separate loops. Elsewhere the compiler would merge the two computations.
    return jax.checkpoint(layer, policy=keep, prevent_cse=not in_scan)


def _einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision)


def _attention_block(x, p, batch, window: int | None, c: DecoderConfig, ops: Ops) -> jax.Array:
    h = ops.rms_norm(x, p["attention_norm"], eps=c.norm_eps)
    q, k, v = (
        ops.constrain(_einsum(f"btd,d{n}h->bt{n}h", h, p[name]), f"B T {n.upper()} H")
        for name, n in (("query", "n"), ("key", "k"), ("value", "k"))
    )
    if c.attention_bias:
        q, k, v = q + p["query_bias"], k + p["key_bias"], v + p["value_bias"]
    if c.qk_norm:
        q, k = (ops.rms_norm(y, p[f"{n}_norm"], eps=c.norm_eps) for y, n in ((q, "query"), (k, "key")))
    q, k = (ops.rotary_embedding(y, batch["positions"], base=float(c.rope_base), scaling=c.scaling()) for y in (q, k))
    out = ops.attention(
        q,
        k,
        v,
        causal=True,
        sliding_window=window,
        logits_soft_cap=c.attention_soft_cap,
        q_segment_ids=batch["segment_ids"],
        kv_segment_ids=batch["segment_ids"],
    )
    return ops.constrain(_einsum("btnh,nhd->btd", out, p["output"]), "B T D")


def _layer(x, weights, batch, window: int | None, c: DecoderConfig, ops: Ops, dims: dict[str, str]) -> jax.Array:
    x = checkpoint_name(x, _LAYER_INPUT)
    mlp = {name: weights[name] for name in ("gate", "up", "down")}  # which gathers them itself
    p = {name: ops.gather(w, dims[name]) for name, w in weights.items() if name not in mlp}
    with jax.named_scope("attention"):
        x = x + _attention_block(x, p, batch, window, c, ops)
    with jax.named_scope("mlp"):
        h = ops.rms_norm(x, p["mlp_norm"], eps=c.norm_eps)
        return x + ops.gated_mlp(h, **mlp, activation=c.activation)


def hidden_states(params: dict, batch: dict[str, jax.Array], c: DecoderConfig, ops: Ops) -> jax.Array:
    """Returns the final hidden states, [B, T, D] in the compute dtype.

    batch has int32 [B, T]: tokens, positions (from 0 in each document), segment_ids (-1: padding).
    """
    dtype = jnp.dtype(c.compute_dtype)
    dims = {name: p.dims.replace("layers ", "") for name, p in declare(c)["layers"].items()}
    layers = {name: w if name.endswith("norm") else w.astype(dtype) for name, w in params["layers"].items()}
    period, windows = len(c.layer_pattern), c.windows()
    rounds = c.num_layers // period
    table = ops.gather(params["embedding"], "V D")
    x = ops.constrain(jnp.take(table, batch["tokens"], axis=0).astype(dtype), "B T D")

    def run(x: jax.Array, stacked: dict[str, jax.Array], i: int, in_scan: bool) -> jax.Array:
        layer = partial(_layer, batch=batch, window=windows[i % period], c=c, ops=ops, dims=dims)
        with jax.named_scope("layer"):
            return rematerialised(layer, c.remat, in_scan=in_scan)(x, {name: w[i] for name, w in stacked.items()})

    def one_period(x: jax.Array, stacked: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        for i in range(period):
            x = run(x, stacked, i, in_scan=rounds > 1)
        return x, None

    whole = {name: w[: rounds * period].reshape(rounds, period, *w.shape[1:]) for name, w in layers.items()}
    x, _ = jax.lax.scan(one_period, x, whole)
    for i in range(rounds * period, c.num_layers):  # the pattern's last round, if it is not complete
        x = run(x, layers, i, in_scan=False)
    return ops.rms_norm(x, params["final_norm"], eps=c.norm_eps)


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
    terms = ops.fused_token_losses(
        hidden, output_projection(params, c), batch["targets"], z_loss=z_loss, logits_soft_cap=c.logits_soft_cap
    )
    sums = {"loss": jnp.sum(terms.loss), "z_loss": jnp.sum(terms.z_loss), "tokens": jnp.sum(terms.counted)}
    return sums["loss"] + sums["z_loss"], sums
