"""A layer kind of one's own: a mixer that is a gated causal convolution, with a section of sizes, joined with any feed-forward.

python -m launch.train plugins=[examples.own_layer] recipe=long_context sequence.order=contiguous \
    "model.layer_pattern=[short_conv+mlp,full+mlp]" model.short_conv.taps=3 run.dir=outputs/own_layer
python -m launch.train plugins=[examples.own_layer] --help model.short_conv.taps
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from ejdist.models.config import DecoderShape
from ejdist.models.model import Flops, Metrics
from ejdist.models.parameters import Param
from ejdist.models.part import LayerContext, Part, residual_std
from ejdist.plugins import register_layer, sizes_of


@dataclass(unsafe_hash=True)
class ShortConvSection:
    """The section `model.short_conv` of a recipe."""

    taps: int = 4  # tokens that the convolution sees, this one and those before it
    expand: int = 1  # width of the convolution, as a multiple of the model's

    def validate(self) -> None:
        for name in ("taps", "expand"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.short_conv.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class ShortConv(Part):
    """RMSNorm, a convolution over the last tokens of the document, a gate, output projection."""

    role = "mixer"
    name = "short_conv"

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        sizes = sizes_of(c, ShortConvSection)
        D, F = c.model_dim, sizes.expand * c.model_dim
        return {
            "short_conv_norm": Param((D,), "_", "ones", decay=False, cast=False),
            "short_conv_in": Param((D, F), "D F", std=c.init_std),
            "short_conv_gate": Param((D, F), "D F", std=c.init_std),
            "short_conv_taps": Param((F, sizes.taps), "F _", std=sizes.taps**-0.5, cast=False),
            "short_conv_out": Param((F, D), "F D", std=residual_std(c)),
        }

    def apply(self, x: jax.Array, params: dict[str, jax.Array], ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        ops = ctx.ops
        h = ops.rms_norm(x, self.norms(params, ctx)["short_conv_norm"], eps=ctx.config.norm_eps)
        inputs, gate = (ops.project(h, params[f"short_conv_{name}"], "btd,df->btf") for name in ("in", "gate"))
        seen = ops.causal_conv1d(inputs, params["short_conv_taps"], segment_ids=ctx.batch["segment_ids"])
        return x + ops.project(seen * jax.nn.silu(gate), params["short_conv_out"], "btf,fd->btd"), {}

    def flops(self, c: DecoderShape) -> Flops:
        sizes = sizes_of(c, ShortConvSection)
        return Flops(2 * sizes.expand * c.model_dim * (3 * c.model_dim + sizes.taps))


register_layer("short_conv", ShortConv(), ShortConvSection)
