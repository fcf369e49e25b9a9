"""The mixers of a layer that attend: attention, and multi-head latent attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.costs import Traffic
from ejdist.frozen import Frozen
from ejdist.models.config import DecoderShape
from ejdist.models.kept import Kept
from ejdist.models.model import CAUSAL, Flops, Metric, Metrics
from ejdist.models.parameters import Param
from ejdist.models.part import LARGEST_LOGITS, LayerContext, Part, norm_weight, residual_std
from ejdist.models.remat import PartBytes, Remat
from ejdist.models.share import Share
from ejdist.precision import BF16, Narrow, Norm, Normed
from ejdist.sequence.cost import AttentionShape
from kernels.engines.attention.masks import MaskInfo, window_of


def scaled(c: DecoderShape) -> dict[str, float]:
    return {} if c.attention_scale is None else {"softmax_scale": c.attention_scale}


def _turning(ctx: LayerContext, **options: Any) -> Callable[..., Any]:
    """Returns the rotary embedding of a batch, as the model has it."""
    c, how = ctx.config, {"positions": ctx.batch["positions"], **options}
    how |= {"base": float(c.rope_base), "scaling": c.scaling(), "exact_from": c.rope_exact_from}
    return functools.partial(ctx.ops.rotary_embedding, **how)


def _told(part: Part, lse: jax.Array, ctx: LayerContext) -> Metrics:
    """Returns the largest log-sum-exp of logits, [B, T, N], of each head: no logit is larger."""
    real = (ctx.batch["segment_ids"] >= 0)[..., None]
    most = jnp.max(jnp.where(real, jax.lax.stop_gradient(lse), -jnp.inf), axis=(0, 1))
    return {f"{part.name}/{LARGEST_LOGITS}": Metric(most, "max", each=True)}


def _of_layers(part: Part, numbers: dict[str, Any]) -> dict[str, Any]:
    """Returns the largest logit of each layer, over its heads, where layers report them."""
    told = numbers.get(f"{part.name}/{LARGEST_LOGITS}")
    return {} if told is None else {f"{part.name}/largest_logit": jnp.max(told, axis=1)}


def _memory(
    c: DecoderShape, share: Share, shape: AttentionShape, narrow: int = 0, normed: int = 0, plain: int | None = None
) -> PartBytes:
    """Returns the bytes of attention of that shape, `narrow` of products before its arrays, and `normed` of what norms make of
    them. `plain`: the width of heads of flash attention that is causal and no more; None for any other."""
    x, lse = share.tokens * c.model_dim * share.itemsize, 4 * share.tokens * c.num_heads // share.features
    arrays = shape.query + shape.key + shape.value
    # Inputs and gradients of queries, keys and values, of the output, and the residual stream with its gradient.
    work, zeros = 2 * arrays + 2 * shape.out + narrow + normed + 3 * x, 0
    if share.sequence > 1:
        held = share.scheme_bytes(shape)
        added = plain is not None and held.in_place and share.adds_in_place(plain)
        work, zeros = work + held.work, 0 if added else held.gpu_zeros
    # The projection of the output is a product as wide as the residual stream. Products in 8 bits keep what both read.
    narrow += 0 if c.precision == BF16 else (x + shape.out) // share.itemsize
    return PartBytes(lse, shape.out, arrays + narrow + x, normed + x, work, gpu_zeros=zeros)


def _traffic(c: DecoderShape, share: Share, shape: AttentionShape, mask: MaskInfo = CAUSAL) -> Traffic:
    """Returns the traffic of attention of that shape: sums of its result, of that computed again, and of its input's gradient;
    keys and values, and their gradients."""
    sent = share.sums_over_features(c.model_dim, 3 - share.remat.products)
    if share.sequence > 1:
        sent.add_all(share.scheme_traffic(shape, mask))
    return sent


def recomputed(remat: Remat) -> float:
    """Returns the share of the four projections that the backward computes again: all, or none where their results are kept."""
    return float(not remat.products)


@dataclass(frozen=True)
class Attention(Part):
    """RMSNorm, q, k, v, with RoPE or without, causal attention inside documents, output projection.

    prefix: of the names of its parameters; parts that share a stack have the same.
    reads_norm: whether `attended` reads the layer's input after its norm, beside queries, keys and values.
    """

    windowed: bool = False

    role = "mixer"
    name = "attention"
    operation = "attention"  # of `Ops`
    prefix = ""
    reads_norm = False
    saves = ("flash_attention.lse",)  # a number per query and head
    offloads = ("flash_attention.out",)

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        D, N, K, H, std = c.model_dim, c.num_heads, c.num_kv_heads, c.head_dim, c.init_std
        declared = {
            "attention_norm": norm_weight(c, D),
            "query": Param((D, N, H), "D N H", std=std, inputs="D", adapts=True),
            "key": Param((D, K, H), "D K H", std=std, inputs="D", adapts=True),
            "value": Param((D, K, H), "D K H", std=std, inputs="D", adapts=True),
            "output": Param((N, H, D), "N H D", std=residual_std(c), inputs="N H", adapts=True),
        }
        if c.qk_norm:
            declared["query_norm"] = norm_weight(c, H)
            declared["key_norm"] = norm_weight(c, H)
        if c.attention_gate:
            declared["query_gate"] = Param((D, N, H), "D N H", std=std, inputs="D", adapts=True)
        if c.attention_output_bias:
            declared["output_bias"] = Param((D,), "D", "zeros", decay=False)
        if c.attention_sinks:
            declared["sinks"] = Param((N, 1), "N _", "zeros", decay=False, cast=False)
        if c.attention_bias:
            declared["query_bias"] = Param((N, H), "N H", "zeros", decay=False)
            declared["key_bias"] = Param((K, H), "K H", "zeros", decay=False)
            declared["value_bias"] = Param((K, H), "K H", "zeros", decay=False)
        return {f"{self.prefix}{name}": p for name, p in declared.items()}

    def keeps(self, c: DecoderShape) -> dict[str, Kept]:
        head = (c.num_kv_heads, c.head_dim), "K _"
        return {self.operation: Kept((head, head), per_token=True)}

    def apply(self, x: jax.Array, params: dict[str, jax.Array], ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        c, ops = ctx.config, ctx.ops
        p = {name.removeprefix(self.prefix): w for name, w in (params | self.norms(params, ctx)).items()}
        h = ops.rms_norm(x, p["attention_norm"], eps=c.norm_eps)
        alone = not (c.attention_gate or self.reads_norm)
        names = ("query", "key", "value")
        q, k, v = ops.project_all(
            Normed(h, x, Norm(p["attention_norm"], c.norm_eps)) if alone else h,
            [p[name] for name in names],
            [f"btd,d{n}h->bt{n}h" for n in "nkk"],
            biases=[p.get(f"{name}_bias") for name in names],
        )
        if c.qk_norm:
            q, k = (ops.rms_norm(y, p[f"{n}_norm"], eps=c.norm_eps) for y, n in ((q, "query"), (k, "key")))
        if c.attention_rope:
            turned = _turning(ctx, rotary_dim=c.rotary_dim)
            # With one key head, every device holds it whole, however the query heads are sharded.
            q, k = turned(q, key=k) if c.num_kv_heads > 1 else (turned(q), turned(k))
        out, metrics = self.attended(h, q, k, v, p, ctx)
        if c.attention_gate:
            out = out * jax.nn.sigmoid(ops.project(h, p["query_gate"], "btd,dnh->btnh"))
        return x + ops.project(out, p["output"], "btnh,nhd->btd", bias=p.get("output_bias")), metrics

    def attended(
        self, h: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, p: dict[str, jax.Array], ctx: LayerContext
    ) -> tuple[jax.Array, Metrics]:
        """Returns (the attention of the queries, [B, T, N, H]; metrics).

        Args:
          h: the layer's input after its norm. p: the parameters, without the prefix of their names.
        """
        c, ops, ids = ctx.config, ctx.ops, ctx.batch["segment_ids"]
        attend = functools.partial(
            ops.attention,
            q,
            k,
            v,
            causal=True,
            sliding_window=self.window(c),
            logits_soft_cap=c.attention_soft_cap,
            **scaled(c),
            **({"softmax_aux": ops.gather(p["sinks"], "N _")} if c.attention_sinks else {}),
            q_segment_ids=ids,
            kv_segment_ids=ids,
        )
        if not ops.tells_logits():
            return attend(), {}
        out, lse = attend(return_lse=True)
        return out, _told(self, lse, ctx)

    def logit_scales(self, c: DecoderShape) -> dict[str, Any] | None:
        names = ("query", "key") + (("query_bias", "key_bias") if c.attention_bias else ())
        return {f"{self.prefix}{name}": 0.5 for name in names}

    def report(self, c: DecoderShape, numbers: dict[str, Any]) -> dict[str, Any]:
        return _of_layers(self, numbers)

    def window(self, c: DecoderShape) -> int | None:
        """Returns how many keys a query sees; None for all before it."""
        return c.sliding_window if self.windowed else None

    def mask(self, c: DecoderShape) -> MaskInfo:
        """Returns the mask rules within a document."""
        return MaskInfo(causal=True, window=window_of(self.window(c)))

    def flops(self, c: DecoderShape) -> Flops:
        projections = 2 * c.model_dim * c.head_dim * ((2 + c.attention_gate) * c.num_heads + 2 * c.num_kv_heads)
        # Two matmuls of head_dim per pair and head.
        return Flops(
            projections,
            pair=2 * 2 * c.num_heads * c.head_dim,
            mask=self.mask(c),
        )

    def memory(self, c: DecoderShape, share: Share) -> PartBytes:
        shape = self._shape(c, share)
        normed = shape.query + shape.key if c.qk_norm else 0
        plain = None if self.windowed or c.attention_sinks else c.head_dim
        made = _memory(c, share, shape, narrow=c.attention_gate * shape.query, normed=normed, plain=plain)
        # What the gate multiplies is kept, and so is the result of it.
        return replace(made, rest=made.rest + c.attention_gate * shape.out)

    def traffic(self, c: DecoderShape, share: Share) -> Traffic:
        return _traffic(c, share, self._shape(c, share), self.mask(c))

    def recomputed(self, remat: Remat) -> float:
        return recomputed(remat)

    @staticmethod
    def _shape(c: DecoderShape, share: Share) -> AttentionShape:
        head = c.head_dim * share.itemsize
        return share.attention(head, head, head, c.num_heads, c.num_kv_heads)


# The matrices that make keys and values of latents.
EXPANDING = ("key_up", "value_up")


@dataclass(frozen=True)
class LatentAttention(Part):
    """RMSNorm and multi-head latent attention in its expanded form, as in training (DeepSeek-V2, 2024, section 2.1).

    Keys and values of all heads are projected from one normalised vector of `kv_rank` entries a token. A head of a query and of
    a key is [without positions, with]; of the latter, the key's is one for all heads. RoPE turns pairs (2i, 2i + 1), or nothing
    (`latent.rope`: Kimi Linear, 2025, section 4.1, leaves positions to its recurrences).
    """

    role = "mixer"
    name = "latent_attention"
    saves = Attention.saves
    offloads = Attention.offloads

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        m, D, N, std = c.latent, c.model_dim, c.num_heads, c.init_std
        H, q = m.nope_dim + m.rope_dim, "R" if m.query_rank else "D"
        declared = {"latent_attention_norm": norm_weight(c, D)}
        if m.query_rank:
            declared["query_down"] = Param((D, m.query_rank), "D R", std=std, inputs="D", adapts=True)
            declared["query_latent_norm"] = norm_weight(c, m.query_rank)
        return declared | {
            "latent_query": Param((m.query_rank or D, N, H), f"{q} N H", std=std, inputs=q, adapts=True),
            "latent_down": Param((D, m.kv_rank + m.rope_dim), "D R", std=std, inputs="D", adapts=True),
            "latent_norm": norm_weight(c, m.kv_rank),
            "key_up": Param((m.kv_rank, N, m.nope_dim), "R N H", std=std, inputs="R", adapts=True),
            "value_up": Param((m.kv_rank, N, m.value_dim), "R N H", std=std, inputs="R", adapts=True),
            "latent_output": Param((N, m.value_dim, D), "N H D", std=residual_std(c), inputs="N H", adapts=True),
        }

    def packs(self, c: DecoderShape) -> Collection[str]:
        """Not what takes queries to the latent and back, head by head."""
        return [name for name in super().packs(c) if name not in EXPANDING]

    def keeps(self, c: DecoderShape) -> dict[str, Kept]:
        latent = (c.latent.kv_rank + c.latent.rope_dim,), "_"  # keys and values of all heads are made of it
        return {"flash_mla": Kept((latent,), per_token=True)}

    def apply(self, x: jax.Array, params: dict[str, jax.Array], ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        c, ops, batch, m, p, norms = ctx.config, ctx.ops, ctx.batch, ctx.config.latent, params, self.norms(params, ctx)
        norm = Norm(norms["latent_attention_norm"], c.norm_eps)
        h = Normed(ops.rms_norm(x, norm.weight, eps=norm.eps), x, norm)
        eps = c.norm_eps if m.norm_eps is None else m.norm_eps
        first, of_first = ("query_down", "btd,dr->btr") if m.query_rank else ("latent_query", "btd,dnh->btnh")
        q, latent = ops.project_all(h, [p[first], p["latent_down"]], [of_first, "btd,dr->btr"])
        if m.query_rank:
            q = ops.rms_norm(q, norms["query_latent_norm"], eps=eps)
            q = ops.project(q, p["latent_query"], "btr,rnh->btnh")
        latent, shared = jnp.split(latent, [m.kv_rank], axis=-1)
        latent = ops.rms_norm(latent, norms["latent_norm"], eps=eps)
        turned = _turning(ctx, interleaved=True) if m.rope else lambda y: y

        q, q_rope, shared = q[..., : m.nope_dim], turned(q[..., m.nope_dim :]), turned(shared[:, :, None])
        options = {"causal": True, "logits_soft_cap": c.attention_soft_cap, **scaled(c)}
        told = ops.tells_logits()
        options |= {"return_lse": True} if told else {}
        up = [p[name] for name in EXPANDING]
        adapted = any(isinstance(w, Frozen) and w.a is not None for w in up)  # `project` alone adds an adapter
        if ops.sends_latents(x.dtype.itemsize, adapted, **self.sizes(c)):
            up = [w.whole(x.dtype) if isinstance(w, Frozen | Narrow) else w for w in up]
            parts = q, latent, *up, q_rope, shared[:, :, 0]
            out = ops.flash_mla(*parts, segment_ids=batch["segment_ids"], **options)
        else:
            k, v = (ops.project(latent, w, "btr,rnh->btnh") for w in up)
            shared = jnp.broadcast_to(shared, (*k.shape[:3], m.rope_dim))
            k = ops.constrain(jnp.concatenate([k, shared], -1), "B T N H")
            ids = dict.fromkeys(("q_segment_ids", "kv_segment_ids"), batch["segment_ids"])
            out = ops.attention(jnp.concatenate([q, q_rope], -1), k, v, **ids, **options)
        out, metrics = (out[0], _told(self, out[1], ctx)) if told else (out, {})
        return x + ops.project(out, p["latent_output"], "btnh,nhd->btd"), metrics

    def logit_scales(self, c: DecoderShape) -> dict[str, Any] | None:
        # The key of what has positions is one for all heads.
        query = np.repeat([0.5, 1.0], [c.latent.nope_dim, c.latent.rope_dim])
        return {"latent_query": query, "key_up": 0.5}

    def report(self, c: DecoderShape, numbers: dict[str, Any]) -> dict[str, Any]:
        return _of_layers(self, numbers)

    @staticmethod
    def sizes(c: DecoderShape) -> dict[str, int]:
        """Returns the sizes of the dims of `flash_mla` in a layer, of all its heads."""
        m = c.latent
        sizes = {"H": m.nope_dim, "Hr": m.rope_dim, "Hv": m.value_dim, "R": m.kv_rank}
        return {"N": c.num_heads, "K": c.num_heads, **sizes}

    def flops(self, c: DecoderShape) -> Flops:
        m, D, N = c.latent, c.model_dim, c.num_heads
        H = m.nope_dim + m.rope_dim
        query = D * m.query_rank + m.query_rank * N * H if m.query_rank else D * N * H
        keys = D * (m.kv_rank + m.rope_dim) + m.kv_rank * N * (m.nope_dim + m.value_dim)
        return Flops(2 * (query + keys + N * m.value_dim * D), pair=2 * N * (H + m.value_dim))

    def memory(self, c: DecoderShape, share: Share) -> PartBytes:
        m, shape = c.latent, self._shape(c, share)
        narrow = share.tokens * share.itemsize * (m.query_rank + m.kv_rank + m.rope_dim)
        made = _memory(c, share, shape, narrow)
        # Where latents travel, keys and values are made inside of attention and never kept.
        return replace(made, products=made.products - (shape.key + shape.value if shape.latents else 0))

    def traffic(self, c: DecoderShape, share: Share) -> Traffic:
        return _traffic(c, share, self._shape(c, share))

    def recomputed(self, remat: Remat) -> float:
        return recomputed(remat)

    def repeated(self, c: DecoderShape, share: Share) -> float:
        m, shape = c.latent, self._shape(c, share)
        if not shape.latents:
            return 0.0
        # Each time forward and again backward, and there two products for each gradient; beside what one device does of them.
        passes = 3 + 1 + (not share.remat.asked)
        made = share.scheme.expansions(shape) * passes - (3 + self.recomputed(share.remat))
        return made * 2 * m.kv_rank * c.num_heads * (m.nope_dim + m.value_dim)

    @staticmethod
    def _shape(c: DecoderShape, share: Share) -> AttentionShape:
        m, b = c.latent, share.itemsize
        query = b * (m.nope_dim + m.rope_dim)
        shape = share.attention(query, query, b * m.value_dim, c.num_heads, c.num_heads)
        return share.with_latents(shape, b * (m.kv_rank + m.rope_dim), 2 * m.kv_rank * (m.nope_dim + m.value_dim))
