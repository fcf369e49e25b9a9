"""RWKV-7's time mixing, the mixer of a layer that is a recurrence over tokens mixed with the token before."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ejdist.costs import ALL_GATHER, Traffic
from ejdist.mesh import TP
from ejdist.models.config import DecoderShape
from ejdist.models.kept import Kept
from ejdist.models.parameters import Param
from ejdist.models.part import LayerContext, norm_weight, residual_std
from ejdist.models.recurrent import Recurrence
from ejdist.models.recurrent_size import LANES, Size, in_lanes
from ejdist.models.remat import PartBytes
from ejdist.models.share import Share

STREAMS = 6  # inputs mixed of a token and the one before: of receptances, decays, keys, values, rates, gates
SUMMED = 3  # of them, those that products with all heads read: each has a gradient that devices sum over the heads
LARGEST = math.exp(-0.5)  # of the log decays, less their sign: no channel forgets faster
CHUNK = 32  # tokens of a chunk of the kernels for GPUs
SHIFT = 2  # taps of the convolution that shifts


def _shifted(h: jax.Array, ctx: LayerContext) -> jax.Array:
    """Returns [B, T, D] of each token the one before it in its document, 0 for the first: a convolution whose taps are 1 and 0,
    so that ranks of a sequence, and orders of its tokens, are its matter."""
    flat, ids = ctx.ops.constrain(h, "B T F"), ctx.batch["segment_ids"]
    taps = jnp.broadcast_to(jnp.array([1.0, 0.0], h.dtype), (h.shape[-1], SHIFT))
    return ctx.ops.constrain(ctx.ops.causal_conv1d(flat, taps, segment_ids=ids), "B T D")


def _normed(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Returns the norm of each head of x [B, T, N, H] over its channels: less their mean, of variance 1, then scaled."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + eps) * weight + bias).astype(x.dtype)


# The two below, and the norm, keep their arguments alone for the backward, as a fused kernel would.
def _written(
    w: jax.Array, rate: jax.Array, k: jax.Array, channels: list[jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns, all [B, T, N, H], (the log decays in float32, the keys as they are written, and the vectors that the state is
    read and written with where it is replaced).

    Args:
      w, rate, k: [B, T, N, H]. channels: [N, H], the two biases, the scale of keys and how much a rate has to do with them.
    """
    decay_bias, rate_bias, key_scale, key_rate = channels
    w = -LARGEST * jax.nn.sigmoid(w.astype(jnp.float32) + decay_bias)
    rate, exact = jax.nn.sigmoid(rate.astype(jnp.float32) + rate_bias), k.astype(jnp.float32)
    removed = exact * key_scale
    removed = removed * jax.lax.rsqrt(jnp.sum(removed * removed, axis=-1, keepdims=True) + 1e-6)
    written = exact * (1 + (rate - 1) * key_rate)
    return w, written.astype(k.dtype), (-removed).astype(k.dtype), (removed * rate).astype(k.dtype)


def _with_own(out: jax.Array, r: jax.Array, k: jax.Array, v: jax.Array, bonus: jax.Array) -> jax.Array:
    """Returns the result and, of each token, its own value, as far as it asks for its own key."""
    own = jnp.sum(r.astype(jnp.float32) * k.astype(jnp.float32) * bonus, axis=-1, keepdims=True)
    return out + own.astype(v.dtype) * v


@dataclass(frozen=True)
class Rwkv7(Recurrence):
    """RWKV-7's time mixing: of a state S [H, H] of each head,

        S_t = diag(exp w_t) S_{t-1} - (a_t * n_t) (S_{t-1}ᵀ n_t)ᵀ + k'_t v_tᵀ      o_t = S_tᵀ r_t
        out = ((norm(o) + (sum r k' bonus) v) * z) W

    with n = k * key_scale of norm 1, k' = k * (1 + (a - 1) * key_rate), w = -exp(-1/2) sigmoid(. + decay_bias), a = sigmoid(. +
    rate_bias). Decays (through tanh), rates and gates z (through sigmoid) come from vectors of a few numbers a token, and r, k
    and v from products with all heads. Each of the six reads an input of its own, h_t + mix * (h_{t-1} - h_t), in documents.
    Peng et al., RWKV-7 "Goose" with Expressive Dynamic State Evolution, 2025, arXiv:2503.14456, section 4;
    flash-linear-attention, fla/layers/rwkv7.py. Other than there, the norm before is the model's RMSNorm, and values are not
    mixed with those of the first layer.
    """

    name = "rwkv7"
    offloads = ("rwkv7.out",)

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        m, D, std = c.rwkv7, c.model_dim, c.init_std
        N, H = m.num_heads, m.head_dim

        def wide() -> Param:
            return Param((D, N, H), "D N H", std=std, inputs="D", adapts=True)

        def of_channels(first: float, last: float) -> Param:
            """From one number to the other along each head, near to what is published, where they also bend with the depth."""
            return Param((N, H), "N H", "ramp", between=(first, last), decay=False, cast=False)

        declared = {
            "rwkv7_norm": norm_weight(c, D),
            "rwkv7_mix": Param((STREAMS, D), "_ _", "ramp", between=(1.0, 0.0), decay=False),
            "rwkv7_receptance": wide(),
            "rwkv7_key": wide(),
            "rwkv7_value": wide(),
            "rwkv7_decay_bias": of_channels(-5.5, 0.5),
            "rwkv7_rate_bias": of_channels(-0.7, 0.3),
            "rwkv7_key_scale": of_channels(0.76, 0.66),
            "rwkv7_key_rate": of_channels(1.02, 1.02),
            "rwkv7_bonus": of_channels(-0.04, -0.04),
            "rwkv7_out_norm": Param((N, H), "N H", "ones", decay=False, cast=False),
            "rwkv7_out_bias": Param((N, H), "N H", "zeros", decay=False, cast=False),
            "rwkv7_output": Param((N, H, D), "N H D", std=residual_std(c), inputs="N H", adapts=True),
        }
        for name, rank in (("decay", m.decay_rank), ("rate", m.rate_rank), ("gate", m.gate_rank)):
            declared[f"rwkv7_{name}_down"] = Param((D, rank), "D R", std=std, inputs="D", adapts=True)
            declared[f"rwkv7_{name}_up"] = Param((rank, N, H), "R N H", std=std, inputs="R", adapts=True)
        return declared

    def keeps(self, c: DecoderShape) -> dict[str, Kept]:
        m = c.rwkv7
        state = m.num_heads, m.head_dim, m.head_dim
        return {"causal_conv1d": Kept.state((c.model_dim, SHIFT - 1), "F _"), "rwkv7": Kept.state(state, "N _ _")}

    def mixed(
        self, h: jax.Array, params: dict[str, jax.Array], norms: dict[str, jax.Array], ctx: LayerContext
    ) -> jax.Array:
        c, ops = ctx.config, ctx.ops
        mix, before = ops.gather(params["rwkv7_mix"], "_ _"), _shifted(h, ctx) - h
        x_r, x_w, x_k, x_v, x_a, x_z = (h + before * mix[i].astype(h.dtype) for i in range(STREAMS))

        def wide(x: jax.Array, name: str) -> jax.Array:
            return ops.project(x, params[f"rwkv7_{name}"], "btd,dnh->btnh")

        def narrow(x: jax.Array, name: str) -> jax.Array:
            return ops.project(x, params[f"rwkv7_{name}_down"], "btd,dr->btr")

        def up(x: jax.Array, name: str) -> jax.Array:
            return ops.project(x, params[f"rwkv7_{name}_up"], "btr,rnh->btnh")

        def of_channels(*names: str) -> list[jax.Array]:
            return [ops.gather(params[f"rwkv7_{name}"], "N H") for name in names]

        r, k, v = wide(x_r, "receptance"), wide(x_k, "key"), wide(x_v, "value")
        w, rate = up(jnp.tanh(narrow(x_w, "decay")), "decay"), up(narrow(x_a, "rate"), "rate")
        scales = of_channels("decay_bias", "rate_bias", "key_scale", "key_rate")
        w, k, reads, writes = jax.checkpoint(_written)(w, rate, k, scales)
        ids = ctx.batch["segment_ids"]
        out = ops.rwkv7(r, w, k, v, reads, writes, softmax_scale=1.0, segment_ids=ids)
        out, eps = checkpoint_name(out, "rwkv7.out"), c.rwkv7.head_dim * c.norm_eps
        out = jax.checkpoint(_normed, static_argnums=3)(out, norms["rwkv7_out_norm"], *of_channels("out_bias"), eps)
        out = jax.checkpoint(_with_own)(out, r, k, v, *of_channels("bonus"))
        out = out * up(jax.nn.sigmoid(narrow(x_z, "gate")), "gate")
        return jnp.where((ids >= 0)[..., None, None], out, 0)  # of padding nothing, which a bias would be

    def split(self, c: DecoderShape) -> dict[str, tuple[str, int]]:
        return {"rwkv7.num_heads": ("N", c.rwkv7.num_heads)}

    def size(self, c: DecoderShape) -> Size:
        m = c.rwkv7
        wide, ranks = m.num_heads * m.head_dim, m.decay_rank + m.rate_rank + m.gate_rank
        state = wide * m.head_dim
        squares = 7 * CHUNK * m.num_heads  # pairs of readers and writers, the inverse, and gradients
        pack = 2 if 2 * m.head_dim <= LANES else 1  # heads that lie side by side in the lanes of a TPU
        packs, lanes = -(-m.num_heads // pack), LANES if pack == 2 else in_lanes(m.head_dim)
        stored, inverses = packs * lanes**2, packs * pack * LANES
        return Size(
            3 * wide, wide, 5 * wide, state, 2 * state, 4, wide, 107, c.model_dim, SHIFT,
            beside=2 * wide, turned=squares, chunk=CHUNK, key=m.head_dim, value=m.head_dim,
            stored=stored, inverses=inverses,
            narrow=ranks, raised=3 * wide, lifted=ranks * wide, decays=wide,
        )  # fmt: skip

    def memory(self, c: DecoderShape, share: Share) -> PartBytes:
        """Returns the bytes, with those of the inputs of products and of the tokens before, which every device has whole."""
        made, inputs = super().memory(c, share), (STREAMS + 1) * share.tokens * c.model_dim * share.itemsize
        return replace(made, rest=made.rest + inputs, work=made.work + inputs)

    def traffic(self, c: DecoderShape, share: Share) -> Traffic:
        """Returns what recurrences send, and over heads: the tokens before, which are shifted a part on each device, so that
        they are gathered and their gradient is, and a sum for every input of a product with all heads instead of one."""
        sent, n = super().traffic(c, share), share.features
        sent.add_all(share.sums_over_features(c.model_dim, SUMMED - 1))
        if n > 1:
            times = 3 - share.remat.rest
            part = share.tokens * c.model_dim * share.itemsize * (n - 1) // n
            sent.add(TP, ALL_GATHER, times * part, times)
        return sent
