"""Gated linear attention as a layer kind of one's own, for hybrids with full attention: its work and its state do not grow with
the sequence, and over ranks of the sequence it sends states, not keys and values.

With S [H, H] the state of a head, g <= 0 its log decay, and r a gate of the output (Yang et al. 2023, arXiv:2312.06635,
section 4.4, here with one decay for each head):

    S_t = exp(g_t) S_{t-1} + k_t v_tᵀ      o_t = S_tᵀ q_t / sqrt(H)      out = (rms_norm(o) * silu(r)) W

python -m launch.train plugins=[examples.gla_layer] recipe=long_context sequence.order=contiguous \
    "model.layer_pattern=[simple_gla+mlp,simple_gla+mlp,simple_gla+mlp,full+mlp]" run.dir=outputs/hybrid
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejdist.costs import Traffic
from ejdist.models.config import DecoderShape
from ejdist.models.kept import Kept
from ejdist.models.model import Flops, Metrics
from ejdist.models.parameters import Param
from ejdist.models.part import LayerContext, Part, residual_std
from ejdist.models.remat import PartBytes, Remat
from ejdist.models.share import Share
from ejdist.plugins import register_layer, sizes_of
from ejdist.sequence.cost import states_sent

CHUNK = 64  # tokens between the states that the backward keeps, as the operation has it


@dataclass(unsafe_hash=True)
class SimpleGlaSection:
    """The section `model.simple_gla` of a recipe."""

    slowness: float = 16.0  # log decays are divided by it: the larger, the longer a state remembers

    def validate(self) -> None:
        if not 0 < self.slowness < float("inf"):
            raise ValueError(f"model.simple_gla.slowness must be positive, got {self.slowness}")


@dataclass(frozen=True)
class GatedLinearAttention(Part):
    """RMSNorm, gated linear attention inside documents, norm and gate of its result, output projection."""

    role = "mixer"
    name = "simple_gla"
    fixed_order = True  # states pass between runs of tokens that are the same for all rows

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        D, N, H, std = c.model_dim, c.num_heads, c.head_dim, c.init_std
        wide = {
            f"simple_gla_{name}": Param((D, N, H), "D N H", std=std, inputs="D")
            for name in ("query", "key", "value", "gate")
        }
        return {
            "simple_gla_norm": Param((D,), "_", "ones", decay=False, cast=False),
            **wide,
            "simple_gla_decay": Param((D, N), "D N", std=std, inputs="D"),
            "simple_gla_out_norm": Param((H,), "_", "ones", decay=False, cast=False),
            "simple_gla_output": Param((N, H, D), "N H D", std=residual_std(c), inputs="N H"),
        }

    def keeps(self, c: DecoderShape) -> dict[str, Kept]:
        """The state of each head, from which a text goes on."""
        return {"gla_attention": Kept.state((c.num_heads, c.head_dim, c.head_dim), "N _ _")}

    def apply(self, x: jax.Array, params: dict[str, jax.Array], ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        c, ops, norms = ctx.config, ctx.ops, self.norms(params, ctx)
        h = ops.rms_norm(x, norms["simple_gla_norm"], eps=c.norm_eps)
        q, k, v, r = (
            ops.project(h, params[f"simple_gla_{name}"], "btd,dnh->btnh") for name in ("query", "key", "value", "gate")
        )
        decay = ops.project(h, params["simple_gla_decay"], "btd,dn->btn").astype(jnp.float32)
        g = jax.nn.log_sigmoid(decay) / sizes_of(c, SimpleGlaSection).slowness
        out = ops.gla_attention(q, k, v, g, segment_ids=ctx.batch["segment_ids"])
        out = ops.rms_norm(out, norms["simple_gla_out_norm"], eps=c.norm_eps) * jax.nn.silu(r)
        return x + ops.project(out, params["simple_gla_output"], "btnh,nhd->btd"), {}

    def flops(self, c: DecoderShape) -> Flops:
        """Five projections, the decays, and the state: written and read once a token."""
        wide = c.num_heads * c.head_dim
        return Flops(2 * c.model_dim * (5 * wide + c.num_heads) + 4 * wide * c.head_dim)

    def memory(self, c: DecoderShape, share: Share) -> PartBytes:
        """Nothing that the layer computes has a name, so a policy keeps the products, everything, or nothing."""
        x = share.tokens * c.model_dim * share.itemsize
        wide = share.tokens * c.num_heads * c.head_dim // share.features * share.itemsize
        states = 4 * (share.tokens // CHUNK) * c.num_heads * c.head_dim**2 // share.features
        return PartBytes(0, 0, products=4 * wide, rest=2 * wide + x + states, work=12 * wide + 3 * x + 2 * states)

    def traffic(self, c: DecoderShape, share: Share) -> Traffic:
        """Sums over heads, as attention has them; and states and their decays, or tokens, between ranks: forward, once more
        where nothing is kept, and backward."""
        sent = share.sums_over_features(c.model_dim, 3 - share.remat.products)
        if not share.order.carried:  # with one the layer is refused when it runs
            rows, heads = max(1, share.tokens * share.sequence // share.length), c.num_heads // share.features
            state, token = 4 * rows * heads * (c.head_dim**2 + 1), heads * (4 * c.head_dim * share.itemsize + 4)
            passed = states_sent(share.order, share.length // share.sequence, state, share.tokens * token)
            sent.add_all(passed, 3 - share.remat.rest)
        return sent

    def recomputed(self, remat: Remat) -> float:
        return float(not remat.products)


register_layer("simple_gla", GatedLinearAttention(), SimpleGlaSection)
