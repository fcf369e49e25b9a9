"""Gated linear attention, the mixer of a layer that is a recurrence without a delta rule."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ejdist.models.config import DecoderShape
from ejdist.models.kept import Kept
from ejdist.models.parameters import Param
from ejdist.models.part import LayerContext, norm_weight, residual_std
from ejdist.models.recurrent import Recurrence
from ejdist.models.recurrent_size import Size, in_lanes


@dataclass(frozen=True)
class GatedLinear(Recurrence):
    """Gated linear attention: of a state S [H, Hv] of each head, whose decay is one for each channel of a key,

        S_t = exp(g_t)[:, None] * S_{t-1} + k_t v_tᵀ, g = log_sigmoid(f) / normalizer      o_t = S_tᵀ q_t / sqrt(H)
        out = (rms_norm(o) * silu(z)) W

    with f [H] of every head from one vector of `rank` numbers a token, plus a bias. There is no convolution, and queries and
    keys are as projected. Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, 2023,
    arXiv:2312.06635, section 4.4; flash-linear-attention, fla/layers/gla.py, with its defaults.
    """

    name = "gla"
    offloads = ("gla.out",)

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        m, D, std = c.gla, c.model_dim, c.init_std
        N, H, Hv, R = m.num_heads, m.key_dim, m.value_dim, m.rank
        return {
            "gla_norm": norm_weight(c, D),
            "gla_in": Param((D, N, 2 * H + Hv), "D N H", std=std, inputs="D", adapts=True),
            "gla_gate": Param((D, N, Hv), "D N H", std=std, inputs="D", adapts=True),
            "gla_down": Param((D, R), "D R", std=std, inputs="D", adapts=True),
            "gla_decay": Param((R, N, H), "R N H", std=std, inputs="R", adapts=True),
            "gla_decay_bias": Param((N, H), "N H", "zeros", decay=False, cast=False),
            "gla_out_norm": Param((Hv,), "_", "ones", decay=False, cast=False),
            "gla_output": Param((N, Hv, D), "N H D", std=residual_std(c), inputs="N H", adapts=True),
        }

    def keeps(self, c: DecoderShape) -> dict[str, Kept]:
        m = c.gla
        return {"gla_attention": Kept.state((m.num_heads, m.key_dim, m.value_dim), "N _ _")}

    def mixed(
        self, h: jax.Array, params: dict[str, jax.Array], norms: dict[str, jax.Array], ctx: LayerContext
    ) -> jax.Array:
        c, ops, m = ctx.config, ctx.ops, ctx.config.gla
        q, k, v = jnp.split(ops.project(h, params["gla_in"], "btd,dnh->btnh"), [m.key_dim, 2 * m.key_dim], axis=-1)
        low = ops.project(h, params["gla_down"], "btd,dr->btr")
        f = ops.project(low, params["gla_decay"], "btr,rnh->btnh").astype(jnp.float32)
        g = jax.nn.log_sigmoid(f + ops.gather(params["gla_decay_bias"], "N H")) / m.normalizer
        out = checkpoint_name(ops.gla_attention(q, k, v, g, segment_ids=ctx.batch["segment_ids"]), "gla.out")
        z = ops.project(h, params["gla_gate"], "btd,dnh->btnh")
        return ops.rms_norm(out, norms["gla_out_norm"], eps=c.norm_eps) * jax.nn.silu(z)

    def split(self, c: DecoderShape) -> dict[str, tuple[str, int]]:
        return {"gla.num_heads": ("N", c.gla.num_heads)}

    def size(self, c: DecoderShape) -> Size:
        m = c.gla
        out, decays = m.num_heads * m.value_dim, m.num_heads * m.key_dim
        reads, state, wide = 2 * decays + out, decays * m.value_dim, m.num_heads * max(m.key_dim, m.value_dim)
        return Size(
            reads + out, out, reads, state, state + decays, 2, wide, 24,
            narrow=m.rank, raised=decays, lifted=m.rank * decays, decays=decays,
            key=m.key_dim, value=m.value_dim, stored=m.num_heads * in_lanes(m.key_dim) * in_lanes(m.value_dim),
        )  # fmt: skip
