"""The parts of a layer that see each token alone: an MLP, with a gate or without, and a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.costs import Traffic
from ejdist.experts.cost import ExchangeShape, cost_of, memory_of
from ejdist.experts.halves import of_all
from ejdist.experts.layer import gated
from ejdist.experts.losses import update_bias
from ejdist.experts.metrics import Stats, dead_experts, max_violation
from ejdist.experts.products import stays
from ejdist.frozen import Frozen
from ejdist.models.config import RELU2, DecoderShape
from ejdist.models.model import Flops, Metric, Metrics
from ejdist.models.parameters import Param
from ejdist.models.part import LayerContext, Part, norm_weight, residual_std
from ejdist.models.remat import REMAT, PartBytes, Remat
from ejdist.models.share import Share
from ejdist.packed import Packed
from ejdist.precision import BF16, Narrow, Norm, Normed
from kernels.ops.gated_mlp import ACTIVATIONS, block_tokens


def _check_gated(name: str, activation: str, remedy: str) -> None:
    """Raises ValueError for the activation of MLPs without a gate in a part that has one."""
    if activation == RELU2:
        raise ValueError(
            f"model.activation = {RELU2!r} is of MLPs without a gate, and {name} has one: {remedy}, or put "
            f"{UngatedMLP.name} in the place of {name} in model.layer_pattern"
        )


@dataclass(frozen=True)
class MLP(Part):
    """RMSNorm and a gated MLP."""

    role = "feed_forward"
    name = "mlp"

    def check(self, c: DecoderShape) -> None:
        _check_gated(self.name, c.activation, f"use one of {', '.join(ACTIVATIONS)}")

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        D, F, std = c.model_dim, c.ffn_dim, c.init_std
        return {
            "mlp_norm": norm_weight(c, D),
            "gate": Param((D, F), "D F", std=std, inputs="D", adapts=True),
            "up": Param((D, F), "D F", std=std, inputs="D", adapts=True),
            "down": Param((F, D), "F D", std=residual_std(c), inputs="F", adapts=True),
        }

    def apply(self, x: jax.Array, params: dict[str, jax.Array], ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        c, ops = ctx.config, ctx.ops
        norm = Norm(self.norms(params, ctx)["mlp_norm"], c.norm_eps)
        h = ops.rms_norm(x, norm.weight, eps=norm.eps)
        matrices = {name: params[name] for name in ("gate", "up", "down")}
        plain = not any(isinstance(matrix, Frozen | Narrow | Packed) for matrix in matrices.values())
        if plain and not REMAT[c.remat].products:  # the operation gathers its own weights, and saves nothing of width F
            return x + ops.gated_mlp(h, **matrices, activation=c.activation), {}
        if all(isinstance(matrix, Narrow) for matrix in matrices.values()):
            return x + ops.project_mlp(Normed(h, x, norm), **matrices, activation=c.activation), {}
        # gated_mlp's backward would recompute two of the three products, which these policies save instead; and it knows no
        # adapter, no 8 bits and nothing packed.
        gate, up = ops.project_all(Normed(h, x, norm), [params["gate"], params["up"]], ["btd,df->btf"] * 2)
        product = ops.gated_activation(gate, up, activation=c.activation)
        return x + ops.project(product, params["down"], "btf,fd->btd"), {}

    def flops(self, c: DecoderShape) -> Flops:
        return Flops(2 * 3 * c.model_dim * c.ffn_dim)

    def memory(self, c: DecoderShape, share: Share) -> PartBytes:
        """Gate, up and their product are as wide as `ffn_dim`, and so are the three gradients: of a block of tokens, where the
        operation makes them, and then beside sums of the matrices' gradients."""
        width = c.ffn_dim // share.features
        x, f = share.tokens * c.model_dim * share.itemsize, share.tokens * width * share.itemsize
        rows = None if share.remat.products or share.frozen else block_tokens(share.tokens, width)
        wide = f if rows is None else rows * width * share.itemsize
        work = 5 * wide + 3 * x + 4 * x // share.itemsize + (rows is not None) * 4 * 3 * c.model_dim * width
        # On GPUs the kernel of the activation's product holds three results of that width and its three operands.
        waits = 3 * f if rows is None else 0
        narrow = 0 if c.precision == BF16 else (x + f) // share.itemsize
        return PartBytes(0, 0, products=2 * f + narrow, rest=f + x, work=work, gpu_work=wide, gpu_waits=waits)

    def traffic(self, c: DecoderShape, share: Share) -> Traffic:
        return share.sums_over_features(c.model_dim, 2)  # of the result, and of the input's gradient

    def recomputed(self, remat: Remat) -> float:
        return 2 / 3 * (not remat.products)  # the gradient needs two of the three products


@dataclass(frozen=True)
class UngatedMLP(Part):
    """RMSNorm and activation(x up) down, the activation in float32: Nemotron-H's, with the square of relu."""

    role = "feed_forward"
    name = "ungated_mlp"

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        D, F, std = c.model_dim, c.ffn_dim, c.init_std
        return {
            "ungated_mlp_norm": norm_weight(c, D),
            "ungated_up": Param((D, F), "D F", std=std, inputs="D", adapts=True),
            "ungated_down": Param((F, D), "F D", std=residual_std(c), inputs="F", adapts=True),
        }

    def apply(self, x: jax.Array, params: dict[str, jax.Array], ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        c, ops = ctx.config, ctx.ops
        norm = Norm(self.norms(params, ctx)["ungated_mlp_norm"], c.norm_eps)
        h = Normed(ops.rms_norm(x, norm.weight, eps=norm.eps), x, norm)
        (wide,) = ops.project_all(h, [params["ungated_up"]], ["btd,df->btf"])
        wide = wide.astype(jnp.float32)
        active = jnp.square(jax.nn.relu(wide)) if c.activation == RELU2 else ACTIVATIONS[c.activation](wide)
        return x + ops.project(active.astype(x.dtype), params["ungated_down"], "btf,fd->btd"), {}

    def flops(self, c: DecoderShape) -> Flops:
        return Flops(2 * 2 * c.model_dim * c.ffn_dim)

    def memory(self, c: DecoderShape, share: Share) -> PartBytes:
        """What is made of `up` and its activation are as wide as `ffn_dim`, and so are their gradients, of all tokens."""
        x, wide = (
            share.tokens * c.model_dim * share.itemsize,
            share.tokens * c.ffn_dim // share.features * share.itemsize,
        )
        work = 4 * wide + 3 * x + 4 * x // share.itemsize
        narrow = 0 if c.precision == BF16 else (x + wide) // share.itemsize
        return PartBytes(0, 0, products=wide + narrow, rest=wide + x, work=work)

    def traffic(self, c: DecoderShape, share: Share) -> Traffic:
        return share.sums_over_features(c.model_dim, 2)  # of the result, and of the input's gradient

    def recomputed(self, remat: Remat) -> float:
        return 1 / 2 * (not remat.products)  # the gradient needs the first of the two products


_ROUTED = ("experts_gate_up", "experts_down")
_SHARED = ("shared_gate", "shared_up", "shared_down")


@dataclass(frozen=True)
class Experts(Part):
    """RMSNorm and a mixture of experts, with or without a shared expert.

    Its losses are means over the tokens without padding, so each microbatch counts in proportion to its tokens.
    """

    role = "feed_forward"
    name = "experts"
    saves = ("route.experts",)  # recomputation may flip near-tied routing decisions, so save them

    def check(self, c: DecoderShape) -> None:
        _check_gated(self.name, c.experts.activation or c.activation, "give model.experts.activation")

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        m, D, std = c.experts, c.model_dim, c.init_std
        E, F, S = m.num, m.ffn_dim, m.shared_dim
        declared = {
            "experts_norm": norm_weight(c, D),
            # The choice of experts must not depend on the compute dtype.
            "router": Param((D, E), "D _", std=std, cast=False),
            "experts_gate_up": Param((E, D, 2, F), "E D _ F", std=std, inputs="D"),
            "experts_down": Param((E, F, D), "E F D", std=residual_std(c), inputs="F"),
        }
        if m.router_bias:
            declared["router_bias"] = Param((E,), "_", "zeros", decay=False, cast=False)
        if m.bias:
            declared["experts_gate_up_bias"] = Param((E, 2, F), "E _ F", "zeros", decay=False)
            declared["experts_down_bias"] = Param((E, D), "E D", "zeros", decay=False)
        if S:
            declared["shared_gate"] = Param((D, S), "D F", std=std, inputs="D")
            declared["shared_up"] = Param((D, S), "D F", std=std, inputs="D")
            declared["shared_down"] = Param((S, D), "F D", std=residual_std(c), inputs="F")
        if m.shared_gate:
            declared["shared_expert_gate"] = Param((D, 1), "D _", std=std)
        return declared

    def grouped(self, c: DecoderShape) -> dict[str, str | None]:
        m = c.experts
        why = stays(c.precision, c.model_dim, m.ffn_dim, m.activation or c.activation, m.bias)
        shared = _SHARED if m.shared_dim else ()
        always = dict.fromkeys(shared, "shared experts have no products in 8 bits")
        return dict.fromkeys(_ROUTED, why) | always

    def packs(self, c: DecoderShape) -> Collection[str]:
        return (*_ROUTED, *(_SHARED if c.experts.shared_dim else ()))

    def chosen(self, c: DecoderShape) -> float:
        return c.experts.top_k / c.experts.num

    def buffers(self, c: DecoderShape) -> dict[str, Param]:
        m, buffers = c.experts, {}
        if m.bias_rate:
            buffers["bias"] = Param((m.num,), "_", "zeros")
        if m.balance == "global":  # the counts of the previous step; uniform at first
            buffers["load"] = Param((m.num,), "_", "ones")
        return buffers

    def apply(self, x: jax.Array, params: dict[str, jax.Array], ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        (x,), metrics = self.apply_each([x], [params], [ctx])
        return x, metrics

    def apply_each(
        self, xs: list[jax.Array], params: list[dict[str, jax.Array]], ctxs: list[LayerContext]
    ) -> tuple[list[jax.Array], Metrics]:
        """The losses and statistics of several parts of a batch are those of its tokens together."""
        made = [self._mixed(x, own, ctx) for x, own, ctx in zip(xs, params, ctxs, strict=True)]
        load = ctxs[0].buffers.get("load")
        stats = of_all([stats for _, stats in made], ctxs[0].config.experts.balance, load)
        return [x for x, _ in made], self._metrics(stats, ctxs)

    def _mixed(self, x: jax.Array, params: dict[str, jax.Array], ctx: LayerContext) -> tuple[jax.Array, Stats]:
        c, ops, m = ctx.config, ctx.ops, ctx.config.experts
        narrow = all(isinstance(params[n], Narrow) for n in _ROUTED)  # packed ones are not, each by itself
        params = {n: w.values if isinstance(w, Narrow) else w for n, w in params.items()}
        whole = {
            n: ops.gather(params[n], d.dims)
            for n, d in self.declare(c).items()
            if n.startswith(("router", "shared_expert"))
        }
        key = None
        if m.jitter:
            key = jax.random.key(0)
            for number in (ctx.step, ctx.microbatch, ctx.layer, *([ctx.half] if ctx.half else [])):
                key = jax.random.fold_in(key, number)
        h = ops.rms_norm(x, self.norms(params, ctx)["experts_norm"], eps=c.norm_eps)
        shared = {n: params.get(n) for n in _SHARED} | {"shared_expert_gate": whole.get("shared_expert_gate")}
        packed = any(isinstance(w, Packed) for w in shared.values())  # `project` alone multiplies with them
        out, stats = ops.moe(
            h,
            whole["router"],
            params["experts_gate_up"],
            down=params["experts_down"],
            top_k=m.top_k,
            activation=m.activation or c.activation,
            precision=c.precision if narrow else BF16,
            gate_bias=params.get("experts_gate_up_bias"),
            down_bias=params.get("experts_down_bias"),
            **({} if packed else shared),
            segment_ids=ctx.batch["segment_ids"],
            score=m.score,
            normalize=m.normalize,
            bias=ctx.buffers.get("bias"),
            router_bias=whole.get("router_bias"),
            num_groups=m.num_groups,
            topk_groups=m.topk_groups,
            group_top=m.group_top,
            routed_scaling_factor=m.scaling_factor,
            balance=m.balance,
            load=ctx.buffers.get("load"),
            jitter=m.jitter,
            key=key,
            forced_balance=m.forced_balance,
        )
        return x + (out + self._always(h, shared, ctx) if packed else out), stats

    def _always(self, h: jax.Array, shared: dict[str, Any], ctx: LayerContext) -> jax.Array:
        """Returns the result of shared experts, some of whose matrices are packed, as `moe` has it of others."""
        m, ops = ctx.config.experts, ctx.ops
        h = jnp.where((ctx.batch["segment_ids"] >= 0)[..., None], h, 0)
        sides = ops.project_all(h, [shared["shared_gate"], shared["shared_up"]], ["btd,df->btf"] * 2)
        wide = ops.gated_activation(*sides, activation=m.activation or ctx.config.activation)
        out = ops.project(wide, shared["shared_down"], "btf,fd->btd")
        gate = shared["shared_expert_gate"]
        return (out if gate is None else gated(out, h, gate)).astype(h.dtype)

    def _metrics(self, stats: Stats, ctxs: list[LayerContext]) -> Metrics:
        c, tokens = ctxs[0].config, sum(ctx.tokens for ctx in ctxs)
        m = c.experts
        # From sums over tokens without padding to sums over the counted tokens, with the same mean.
        share = tokens / jnp.maximum(stats.tokens, 1)
        metrics = {
            "experts/balance_loss": Metric(stats.balance_loss * share, "mean", each=True),
            "experts/z_loss": Metric(stats.z_loss * share, "mean", each=True),
            "experts/entropy": Metric(stats.entropy * share, "mean", each=True),
            "experts/max_violation_micro": Metric(stats.max_violation, "max", each=True),
            "experts/extra_passes": Metric(stats.extra_passes, "sum", each=True),
            "experts/buffer_high_water": Metric(stats.high_water, "max", each=True),
            "experts/dropped": Metric(stats.dropped, "sum", each=True),
            "experts/counts": Metric(stats.counts, "sum", each=True),
            "experts/rank_counts": Metric(stats.rank_counts, "sum", each=True),
            "experts/host_counts": Metric(stats.host_counts, "sum", each=True),
        }
        if m.balance_loss or m.z_loss:
            loss = m.balance_loss * stats.balance_loss + m.z_loss * stats.z_loss
            metrics["experts/auxiliary_loss"] = Metric(loss * share, "loss")
        if self.buffers(c):
            metrics["counts"] = Metric(stats.counts, "update")
        return metrics

    def update(self, c: DecoderShape, buffers: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
        updated = dict(buffers)
        if "bias" in buffers:
            updated["bias"] = update_bias(buffers["bias"], seen["counts"], c.experts.bias_rate)
        if "load" in buffers:
            updated["load"] = seen["counts"].astype(buffers["load"].dtype)
        return updated

    def report(self, c: DecoderShape, numbers: dict[str, jax.Array]) -> dict[str, jax.Array]:
        counts, dropped = numbers["experts/counts"], numbers["experts/dropped"]
        chosen = jnp.maximum(counts.sum(-1), 1).astype(jnp.float32)
        return {
            "experts/max_violation": max_violation(counts),
            "experts/dead_experts": dead_experts(counts),
            "experts/rank_violation": max_violation(numbers["experts/rank_counts"]),
            "experts/host_violation": max_violation(numbers["experts/host_counts"]),
            "experts/dropped_fraction": dropped.astype(jnp.float32) / chosen,
        }

    def split(self, c: DecoderShape) -> dict[str, tuple[str, int]]:
        return {"experts.num": ("E", c.experts.num)}

    def flops(self, c: DecoderShape) -> Flops:
        m, D = c.experts, c.model_dim
        products = 2 * D * m.num + 2 * 3 * D * (m.top_k * m.ffn_dim + m.shared_dim) + 2 * D * m.shared_gate
        return Flops(products, grouped=True)

    def memory(self, c: DecoderShape, share: Share) -> PartBytes:
        """Rows of a pass are those of its buffer, on one device those of all choices; of two halves those of one, as loops of
        further passes run one after the other."""
        m, x = c.experts, share.tokens * c.model_dim * share.itemsize
        shape = self._shape(c, share)
        shared = share.tokens * m.shared_dim // share.features * share.itemsize
        choices = 4 * share.tokens * m.top_k
        # A byte for each number of the matrices is kept for the backward, and while both directions are made another one.
        in_8_bits = c.precision != BF16 and self.grouped(c)["experts_down"] is None
        ranks = math.prod(n for _, n in share.experts)
        eight = in_8_bits * 3 * m.num // ranks * c.model_dim * m.ffn_dim // share.features
        rest = 2 * shape.wide + 3 * shape.narrow + 3 * shared + eight
        at_once = replace(shape, tokens=share.half) if share.halved else shape
        rows = memory_of(share.dispatch, at_once)
        work = rows + 5 * shared + 3 * x + 4 * x // share.itemsize + 2 * eight
        moved = memory_of(share.dispatch, shape) - rows  # of the other half
        tpu_work = share.dispatch.tpu_memory(at_once)
        return PartBytes(choices, 0, products=0, rest=rest, work=work, moved=moved, tpu_work=tpu_work)

    def traffic(self, c: DecoderShape, share: Share) -> Traffic:
        sent = share.sums_over_features(c.model_dim, 2)  # of the result, and of the input's gradient
        if share.experts:
            parts, shape = 1 + share.halved, self._shape(c, share)
            sent.add_all(cost_of(share.dispatch, replace(shape, tokens=share.tokens // parts)), parts)
        return sent

    def recomputed(self, remat: Remat) -> float:
        return float(not remat.rest)

    @staticmethod
    def _shape(c: DecoderShape, share: Share) -> ExchangeShape:
        return share.exchange(c.experts.top_k, c.model_dim, c.experts.ffn_dim // share.features, c.experts.num)
