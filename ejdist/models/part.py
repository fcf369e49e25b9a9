"""The interface of a part, one block of a decoder's layer, and code that parts share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from ejdist.costs import Traffic, declared
from ejdist.models.config import DecoderShape
from ejdist.models.kept import Kept
from ejdist.models.model import Flops, Metrics
from ejdist.models.ops import Ops
from ejdist.models.parameters import Param
from ejdist.models.remat import PartBytes, Remat
from ejdist.models.share import Share


@dataclass(frozen=True)
class LayerContext:
    """What a part reads besides its input and parameters; nothing in it has a gradient."""

    config: DecoderShape
    ops: Ops
    batch: Mapping[
        str, jax.Array
    ]  # int32 [B, T]: tokens, positions, segment_ids (-1: padding), and targets in training
    tokens: Any  # counted tokens of this microbatch, over all devices; 0 where there are no targets
    layer: Any  # int32, index of the layer in the model
    step: Any  # int32, steps before this one
    microbatch: Any  # int32, index in this step
    buffers: Mapping[str, jax.Array]  # this part's buffers in this layer
    half: int = 0  # which half of a batch this is, where two go through the layers side by side


class Part:
    """One residual block of a layer.

    role: "mixer", which mixes tokens, or "feed_forward", which sees each token alone; a kind of layer has one of each, or one.
    name: parts with the same name share a stack of parameters, a row per layer, so they must declare the same parameters.
    saves: checkpoint names of residuals that are costly to recompute; policies with `Remat.asked` save them.
    offloads: names of large residuals, which a policy with `Remat.host` offloads to the host.
    selects: whether it sends the blocks that its queries select where a scheme has a buffer for these (`Scheme.blocks`).
    fixed_order: whether it has no form for an order that each row brings (`Order.carried`): that of a recurrence. Then neither
      `sequence.order=auto` nor a plan chooses one.

    `memory`, `traffic` and `recomputed` are only for the planner, which raises an error for a part that lacks them (`Costs`).
    Training does not need them.
    """

    role: str
    name: str
    saves: tuple[str, ...] = ()
    offloads: tuple[str, ...] = ()
    selects: bool = False
    fixed_order: bool = False

    def check(self, c: DecoderShape) -> None:
        """Raises ValueError, naming the key and the remedy, for an option of the model that this part does not have."""

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        """Returns the parameters of one layer. Their names are unique in the model."""
        raise NotImplementedError

    def grouped(self, c: DecoderShape) -> dict[str, str | None]:
        """Returns the matrices that other products than `ops.project` multiply with, and why they stay in the compute dtype
        beside products in 8 bits; None: they do not, and come as `Narrow`, all of them or none. Their own gradients are then
        products in the compute dtype."""
        return {}

    def packs(self, c: DecoderShape) -> Collection[str]:
        """Returns the matrices that a generation may have packed (`ejdist.packed`): `ops.project` alone multiplies with them,
        and in a step each is one product that sums over its inputs; or `ops.moe` does, those of dims that begin with E."""
        return [name for name, p in self.declare(c).items() if p.adapts]

    def chosen(self, c: DecoderShape) -> float:
        """Returns the share of the matrices in `grouped` that multiplies one token, for plans."""
        return 1.0

    def buffers(self, c: DecoderShape) -> dict[str, Param]:
        """Returns the buffers of one layer, which `update` changes."""
        return {}

    def keeps(self, c: DecoderShape) -> dict[str, Kept] | None:
        """Returns what a layer keeps of a request between the steps of a generation, by the operation of `ctx.ops` that reads
        and replaces it, which `apply` calls once; None: such a layer cannot generate. What sees each token alone keeps
        nothing."""
        return {} if self.role == "feed_forward" else None

    def apply(self, x: jax.Array, params: dict[str, jax.Array], ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        """Returns (x [B, T, D] with this part added, metrics). `params` are laid out as stored; matrices are in the compute
        dtype."""
        raise NotImplementedError

    def apply_each(
        self, xs: list[jax.Array], params: list[dict[str, jax.Array]], ctxs: list[LayerContext]
    ) -> tuple[list[jax.Array], Metrics]:
        """Returns (`apply` of each half of a batch, or of all of it; metrics of both together). They are added up as those of
        two microbatches; a part of which that is not the metric of the batch says what is."""
        made = [self.apply(x, own, ctx) for x, own, ctx in zip(xs, params, ctxs, strict=True)]
        of_all = made[0][1]
        for _, metrics in made[1:]:
            of_all = {name: m.plus(metrics[name]) for name, m in of_all.items()}
        return [x for x, _ in made], of_all

    def norms(self, params: dict[str, jax.Array], ctx: LayerContext) -> dict[str, jax.Array]:
        """Returns what the norms multiply by, from where it is stored to where it is used."""
        declared = {n: d for n, d in self.declare(ctx.config).items() if n.endswith("_norm")}
        return {n: added(ctx.ops.gather(params[n], d.dims), d) for n, d in declared.items()}

    def logit_scales(self, c: DecoderShape) -> dict[str, Any] | None:
        """Returns the parameters that a head's logits are products of -> the power of a factor of its logits that scales
        them, a number or one for each of the head's; nothing without such logits. `apply` then returns the metric
        "NAME/largest_logits", where `ctx.ops.tells_logits()`: of each head what no logit exceeds. None: it has logits, and
        does not."""
        return {}

    def update(self, c: DecoderShape, buffers: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
        """Returns the buffers of one layer after a step, from its "update" metrics, summed over the microbatches."""
        return buffers

    def report(self, c: DecoderShape, numbers: dict[str, Any]) -> dict[str, Any]:
        """Returns additional metrics, derived from those of all layers in a step."""
        return {}

    def split(self, c: DecoderShape) -> dict[str, tuple[str, int]]:
        """Returns key of the model's section -> (dim, size) that must divide over a mesh, as `Model.split`. What a part leaves
        out is refused by the name of its parameter, when a program is made."""
        return {}

    def flops(self, c: DecoderShape) -> Flops:
        """Returns the forward FLOPs of one layer."""
        raise NotImplementedError

    def memory(self, c: DecoderShape, share: Share) -> PartBytes:
        """Returns the bytes of one layer on a device, for one microbatch: what its backward reads, and what is alive there."""
        raise NotImplementedError

    def traffic(self, c: DecoderShape, share: Share) -> Traffic:
        """Returns what a device sends for one layer in one microbatch, forward and backward, beside the layer's weights, whose
        gathers and sums follow from `declare`: bytes along each axis, by collective."""
        raise NotImplementedError

    def recomputed(self, remat: Remat) -> float:
        """Returns the fraction of the forward's matmuls with parameters (`Flops.token`) that the backward recomputes."""
        raise NotImplementedError

    def repeated(self, c: DecoderShape, share: Share) -> float:
        """Returns the FLOPs a token of one layer, forward and backward, that devices do beside those of one device, because
        several compute the same; 0 unless a part says so."""
        return 0.0


@dataclass(frozen=True)
class Costs:
    """The costs of a part, refused by name where its class declares none, or overrides `apply` and inherits them."""

    part: Part

    def memory(self, c: DecoderShape, share: Share) -> PartBytes:
        """Returns `Part.memory`. Raises `Undeclared`."""
        return declared(self.part, "memory", ("apply",), "its ejdist.models.remat.PartBytes on a Share")(c, share)

    def traffic(self, c: DecoderShape, share: Share) -> Traffic:
        """Returns `Part.traffic`. Raises `Undeclared`."""
        return declared(self.part, "traffic", ("apply",), "the ejdist.costs.Traffic of a layer on a Share")(c, share)

    def recomputed(self, remat: Remat) -> float:
        """Returns `Part.recomputed`. Raises `Undeclared`."""
        return declared(self.part, "recomputed", ("apply",), "the share of its matmuls that run again")(remat)


LARGEST_LOGITS = "largest_logits"


def norm_weight(c: DecoderShape, width: int) -> Param:
    """Returns the weight of a norm of the residual stream, of a latent, or of query and key heads. Where the model's norms are
    zero-centered it is stored less 1. Plain norms of a recurrence's result are never stored so."""
    plain = Param((width,), "_", "ones", decay=False, cast=False)
    return replace(plain, init="zeros", added=1.0) if c.zero_centered_norms else plain


def added(weight: jax.Array, declared: Param) -> jax.Array:
    """Returns what a norm multiplies by, of its parameter."""
    return weight + declared.added if declared.added else weight


def residual_std(c: DecoderShape) -> float:
    """Returns the std of what is added to the residual stream: smaller by 1/sqrt(parts of all layers), of which a layer has two
    (GPT-2), or one (Nemotron-H)."""
    return c.init_std / sum(map(len, c.layers())) ** 0.5
