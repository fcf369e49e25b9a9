r"""A layer kind of one's own: a mixer that is a gated causal convolution, joined with any feed-forward of the project.

python examples/own_layer.py launch.train recipe=long_context sequence.order=contiguous \
    "model.layer_pattern=[short_conv+mlp,full+mlp]" run.dir=outputs/own_layer

Every command that reads a model starts this way, `launch.evaluate` too. What starts processes of its own (`-m`, the launchers)
starts the project's modules in them, which do not know the layer: for those its line belongs in `ejdist/models/parts.py`.
Hosts compare the project's code, not this file; of this they compare the program that comes of it.
"""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass

import jax

from ejdist.models.config import DecoderShape
from ejdist.models.model import Flops, Metrics
from ejdist.models.parameters import Param
from ejdist.models.part import LayerContext, Part, residual_std
from ejdist.models.parts import PARTS

TAPS = 4


@dataclass(frozen=True)
class ShortConv(Part):
    """RMSNorm, a convolution over the last tokens of the document, a gate, output projection."""

    role = "mixer"
    name = "short_conv"

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        D = c.model_dim
        return {
            "short_conv_norm": Param((D,), "_", "ones", decay=False, cast=False),
            "short_conv_in": Param((D, D), "D F", std=c.init_std),
            "short_conv_gate": Param((D, D), "D F", std=c.init_std),
            "short_conv_taps": Param((D, TAPS), "F _", std=TAPS**-0.5, cast=False),
            "short_conv_out": Param((D, D), "F D", std=residual_std(c)),
        }

    def apply(self, x: jax.Array, params: dict[str, jax.Array], ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        ops = ctx.ops
        h = ops.rms_norm(x, self.norms(params, ctx)["short_conv_norm"], eps=ctx.config.norm_eps)
        inputs, gate = (ops.project(h, params[f"short_conv_{name}"], "btd,df->btf") for name in ("in", "gate"))
        seen = ops.causal_conv1d(inputs, params["short_conv_taps"], segment_ids=ctx.batch["segment_ids"])
        return x + ops.project(seen * jax.nn.silu(gate), params["short_conv_out"], "btf,fd->btd"), {}

    def flops(self, c: DecoderShape) -> Flops:
        return Flops(2 * 3 * c.model_dim**2 + 2 * TAPS * c.model_dim)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    PARTS["short_conv"] = ShortConv()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
