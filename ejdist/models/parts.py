"""The parts of a decoder's layer. Each declares its parameters, applies itself, counts its FLOPs and says what remat keeps.

A new kind of layer is a `Part`, its line in `PARTS`, and a line in `KINDS` of ejdist/models/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.models.config import DecoderShape
from ejdist.models.model import Flops, Metrics
from ejdist.models.ops import Ops
from ejdist.models.parameters import Param


@dataclass(frozen=True)
class LayerContext:
    """What a part reads beside its input and parameters; nothing in it has a gradient."""

    config: DecoderShape
    ops: Ops
    batch: Mapping[
        str, jax.Array
    ]  # int32 [B, T]: tokens, positions, segment_ids (-1: padding), and targets in training
    tokens: Any  # counted tokens of this microbatch, over all devices; 0 where there are no targets
    layer: Any  # int32, which one of the model
    step: Any  # int32, steps made before this one
    microbatch: Any  # int32, of this step
    buffers: Mapping[str, jax.Array]  # this part's, in this layer


class Part:
    """One residual block of a layer.

    name: parts of one name share a stack of parameters, a row for each layer that has one, so they declare the same.
    saves: names of values that the backward needs and that are costly to compute again; every remat policy but "full" keeps
    them. offloads: the large ones among such, which wait in the host's memory under "offload".
    """

    name: str
    saves: tuple[str, ...] = ()
    offloads: tuple[str, ...] = ()

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        """Returns the parameters of one layer. Their names are unique in the model."""
        raise NotImplementedError

    def buffers(self, c: DecoderShape) -> dict[str, Param]:
        """Returns what `update` changes, of one layer."""
        return {}

    def apply(self, x: jax.Array, params: dict[str, jax.Array], at: LayerContext) -> tuple[jax.Array, Metrics]:
        """Returns (x [B, T, D] with this part added, metrics). `params` lie as they are stored; matrices are in the compute
        dtype."""
        raise NotImplementedError

    def update(self, c: DecoderShape, buffers: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
        """Returns the buffers of one layer after a step, from its "update" metrics, summed over the microbatches."""
        return buffers

    def flops(self, c: DecoderShape) -> Flops:
        """Returns the forward FLOPs of one layer."""
        raise NotImplementedError


def einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the product; of float32 arrays in true float32 on every device."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision)


def residual_std(c: DecoderShape) -> float:
    """Returns the std of what is added to the residual stream: smaller by 1/sqrt(2 layers) (GPT-2)."""
    return c.init_std / (2 * c.num_layers) ** 0.5


@dataclass(frozen=True)
class Attention(Part):
    """RMSNorm, q, k, v with RoPE, causal attention inside documents, output projection."""

    windowed: bool = False

    name = "attention"
    saves = ("flash_attention.lse",)  # a number per query and head
    offloads = ("flash_attention.out",)

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        D, N, K, H, std = c.model_dim, c.num_heads, c.num_kv_heads, c.head_dim, c.init_std
        declared = {
            "attention_norm": Param((D,), "norm", "ones", decay=False, cast=False),
            "query": Param((D, N, H), "D N H", std=std),
            "key": Param((D, K, H), "D K H", std=std),
            "value": Param((D, K, H), "D K H", std=std),
            "output": Param((N, H, D), "N H D", std=residual_std(c)),
        }
        if c.qk_norm:
            declared["query_norm"] = Param((H,), "norm", "ones", decay=False, cast=False)
            declared["key_norm"] = Param((H,), "norm", "ones", decay=False, cast=False)
        if c.attention_bias:
            declared["query_bias"] = Param((N, H), "N H", "zeros", decay=False)
            declared["key_bias"] = Param((K, H), "K H", "zeros", decay=False)
            declared["value_bias"] = Param((K, H), "K H", "zeros", decay=False)
        return declared

    def apply(self, x: jax.Array, params: dict[str, jax.Array], at: LayerContext) -> tuple[jax.Array, Metrics]:
        c, ops, batch = at.config, at.ops, at.batch
        declared = self.declare(c)
        p = {name: ops.gather(w, declared[name].dims) for name, w in params.items()}
        h = ops.rms_norm(x, p["attention_norm"], eps=c.norm_eps)
        q, k, v = (
            ops.constrain(einsum(f"btd,d{n}h->bt{n}h", h, p[name]), f"B T {n.upper()} H")
            for name, n in (("query", "n"), ("key", "k"), ("value", "k"))
        )
        if c.attention_bias:
            q, k, v = q + p["query_bias"], k + p["key_bias"], v + p["value_bias"]
        if c.qk_norm:
            q, k = (ops.rms_norm(y, p[f"{n}_norm"], eps=c.norm_eps) for y, n in ((q, "query"), (k, "key")))
        scaling = c.scaling()
        q, k = (ops.rotary_embedding(y, batch["positions"], base=float(c.rope_base), scaling=scaling) for y in (q, k))
        out = ops.attention(
            q,
            k,
            v,
            causal=True,
            sliding_window=self.window(c),
            logits_soft_cap=c.attention_soft_cap,
            q_segment_ids=batch["segment_ids"],
            kv_segment_ids=batch["segment_ids"],
        )
        return x + ops.constrain(einsum("btnh,nhd->btd", out, p["output"]), "B T D"), {}

    def window(self, c: DecoderShape) -> int | None:
        """Returns how many keys a query sees; None for all before it."""
        return c.sliding_window if self.windowed else None

    def flops(self, c: DecoderShape) -> Flops:
        projections = 2 * c.model_dim * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
        # Two matmuls of head_dim per pair and head.
        return Flops(projections, pair=2 * 2 * c.num_heads * c.head_dim, window=self.window(c))


@dataclass(frozen=True)
class MLP(Part):
    """RMSNorm and a gated MLP."""

    name = "mlp"

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        D, F, std = c.model_dim, c.ffn_dim, c.init_std
        return {
            "mlp_norm": Param((D,), "norm", "ones", decay=False, cast=False),
            "gate": Param((D, F), "D F", std=std),
            "up": Param((D, F), "D F", std=std),
            "down": Param((F, D), "F D", std=residual_std(c)),
        }

    def apply(self, x: jax.Array, params: dict[str, jax.Array], at: LayerContext) -> tuple[jax.Array, Metrics]:
        norm = at.ops.gather(params["mlp_norm"], "norm")
        matrices = {name: params[name] for name in ("gate", "up", "down")}  # which the operation gathers itself
        h = at.ops.rms_norm(x, norm, eps=at.config.norm_eps)
        return x + at.ops.gated_mlp(h, **matrices, activation=at.config.activation), {}

    def flops(self, c: DecoderShape) -> Flops:
        return Flops(2 * 3 * c.model_dim * c.ffn_dim)


PARTS: dict[str, Part] = {"attention": Attention(), "window_attention": Attention(windowed=True), "mlp": MLP()}
