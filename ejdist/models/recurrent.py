"""The mixers of a layer that are recurrences: Gated DeltaNet, Kimi Delta Attention, Mamba-2 and lightning attention here, gated
linear attention and RWKV-7 in the files beside this one. Their work grows with the sequence and not with its square, and what
the ranks of a sequence send to each other does not grow with it.

Each is a norm, projections, the recurrence inside documents, a norm and a gate of its result, and an output projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ejdist.costs import Traffic
from ejdist.models.config import DecoderShape
from ejdist.models.kept import Kept
from ejdist.models.model import Flops, Metrics
from ejdist.models.parameters import Param
from ejdist.models.part import LayerContext, Part, norm_weight, residual_std
from ejdist.models.recurrent_size import LANES, LONGER, Size, in_lanes
from ejdist.models.remat import PartBytes, Remat
from ejdist.models.share import Share

RATES = (1.0, 16.0)  # between which A starts, the rate of a head's decay
STEPS = (1e-3, 1e-1)  # between which the step size of a head starts


def _decaying(heads: int, name: str, *channels: int) -> dict[str, Param]:
    """Returns the parameters of a head's decay exp(-exp(a_log) softplus(. + dt_bias)), as Mamba-2 starts them, the bias of each
    of its channels if they are given. One nearer to 0 is no simpler, so that weight decay leaves them."""
    each = {"decay": False, "cast": False}
    dims = "N H" if channels else "N"
    return {
        f"{name}_a_log": Param((heads,), "N", "log", between=RATES, **each),
        f"{name}_dt_bias": Param((heads, *channels), dims, "inverse_softplus", between=STEPS, **each),
    }


def _taps(shape: tuple[int, ...], dims: str) -> Param:
    """Returns the taps of a convolution, of the variance that they are published with: uniform within 1/sqrt(taps)."""
    return Param(shape, dims, std=(3 * shape[-1]) ** -0.5)


def _rates(params: dict[str, jax.Array], ctx: LayerContext, name: str) -> tuple[jax.Array, jax.Array]:
    """Returns (the rate of each head's decay, < 0; the bias of its step size), both [N] in float32; of a decay per channel
    [N, 1] and [N, H]."""
    a_log, bias = params[f"{name}_a_log"], params[f"{name}_dt_bias"]
    rate = -jnp.exp(ctx.ops.gather(a_log, "N"))
    if bias.ndim == 1:
        return rate, ctx.ops.gather(bias, "N")
    return rate[:, None], ctx.ops.gather(bias, "N H")


def _convolved(x: jax.Array, taps: jax.Array, bias: jax.Array | None, ctx: LayerContext) -> jax.Array:
    """Returns x [B, T, heads, width] after the convolution of its channels and SiLU, inside documents."""
    flat, ids = ctx.ops.constrain(x.reshape(*x.shape[:2], -1), "B T F"), ctx.batch["segment_ids"]
    bias = None if bias is None else bias.reshape(-1)
    taps = taps.reshape(-1, taps.shape[-1])
    return ctx.ops.causal_conv1d(flat, taps, bias, activation="silu", segment_ids=ids).reshape(x.shape)


def _normed(x: jax.Array, weight: jax.Array, groups: int, eps: float, gate: jax.Array | None = None) -> jax.Array:
    """Returns RMSNorm of x [B, T, N, H], or of x silu(gate), over the channels of each group of heads. In float32 and rounded
    once. Plain JAX: a group may be split over devices, which then sum one number per token."""
    wide = x.astype(jnp.float32)
    if gate is not None:
        wide = wide * jax.nn.silu(gate.astype(jnp.float32))
    square = jnp.mean(wide * wide, axis=-1)
    mean = jnp.mean(square.reshape(*square.shape[:2], groups, -1), axis=-1)
    mean = jnp.repeat(mean, x.shape[2] // groups, axis=-1)
    return (wide * jax.lax.rsqrt(mean + eps)[..., None] * weight).astype(x.dtype)


@dataclass(frozen=True)
class Recurrence(Part):
    """What all of them do around the recurrence, and what they cost, which follows from their sizes."""

    role = "mixer"
    fixed_order = True

    def mixed(
        self, h: jax.Array, params: dict[str, jax.Array], norms: dict[str, jax.Array], ctx: LayerContext
    ) -> jax.Array:
        """Returns [B, T, N, H], the gated result of the recurrence over h [B, T, D], the norm of the layer's input."""
        raise NotImplementedError

    def size(self, c: DecoderShape) -> Size:
        """Returns how many numbers a layer has."""
        raise NotImplementedError

    def apply(self, x: jax.Array, params: dict[str, jax.Array], ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        norms = self.norms(params, ctx)
        h = ctx.ops.rms_norm(x, norms[f"{self.name}_norm"], eps=ctx.config.norm_eps)
        out = self.mixed(h, params, norms, ctx)
        return x + ctx.ops.project(out, params[f"{self.name}_output"], "btnh,nhd->btd"), {}

    def flops(self, c: DecoderShape) -> Flops:
        return self.size(c).flops(c)

    def memory(self, c: DecoderShape, share: Share) -> PartBytes:
        return self.size(c).memory(c, share)

    def traffic(self, c: DecoderShape, share: Share) -> Traffic:
        return self.size(c).traffic(c, share)

    def recomputed(self, remat: Remat) -> float:
        return float(not remat.products)


@dataclass(frozen=True)
class GatedDelta(Recurrence):
    """Gated DeltaNet, as Qwen3-Next has it: of a state S [H, Hv] of each value head, with q, k and v after a convolution,

        S' = exp(g_t) S_{t-1}, g = -A softplus(a + dt_bias)      S_t = S' + sigmoid(b_t) k_t (v_t - S'ᵀ k_t)ᵀ
        o_t = S_tᵀ q_t / sqrt(H)                                 out = (rms_norm(o) * silu(z)) W

    with q and k of norm 1. The projection of a key head has its query, its key, and the values of the heads that share them
    beside each other, so that one convolution, with one exchange between ranks, serves all three.
    Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, arXiv:2412.06464.
    """

    name = "gated_delta"
    offloads = ("gated_delta.out",)

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        m, D, std = c.gated_delta, c.model_dim, c.init_std
        K, N, Hv, wide = m.num_key_heads, m.num_value_heads, m.value_dim, self._width(c)
        return {
            "gated_delta_norm": norm_weight(c, D),
            "gated_delta_in": Param((D, K, wide), "D K H", std=std, inputs="D", adapts=True),
            "gated_delta_gate": Param((D, N, Hv), "D N H", std=std, inputs="D", adapts=True),
            "gated_delta_rates": Param((D, N, 2), "D N H", std=std, inputs="D", adapts=True),
            "gated_delta_taps": _taps((K, wide, m.conv_width), "K H _"),
            **_decaying(N, "gated_delta"),
            "gated_delta_out_norm": Param((Hv,), "_", "ones", decay=False, cast=False),
            "gated_delta_output": Param((N, Hv, D), "N H D", std=residual_std(c), inputs="N H", adapts=True),
        }

    def keeps(self, c: DecoderShape) -> dict[str, Kept]:
        m = c.gated_delta
        taps = m.num_key_heads * self._width(c), m.conv_width - 1
        state = m.num_value_heads, m.key_dim, m.value_dim
        return {"causal_conv1d": Kept.state(taps, "F _"), "gated_delta_rule": Kept.state(state, "N _ _")}

    def mixed(
        self, h: jax.Array, params: dict[str, jax.Array], norms: dict[str, jax.Array], ctx: LayerContext
    ) -> jax.Array:
        c, ops, m = ctx.config, ctx.ops, ctx.config.gated_delta
        mixed = ops.project(h, params["gated_delta_in"], "btd,dkh->btkh")
        mixed = _convolved(mixed, params["gated_delta_taps"], None, ctx)
        q, k, v = jnp.split(mixed, [m.key_dim, 2 * m.key_dim], axis=-1)
        v = v.reshape(*v.shape[:2], m.num_value_heads, m.value_dim)
        rates = ops.project(h, params["gated_delta_rates"], "btd,dnh->btnh").astype(jnp.float32)
        rate, bias = _rates(params, ctx, "gated_delta")
        g = rate * jax.nn.softplus(rates[..., 1] + bias)
        ids = ctx.batch["segment_ids"]
        out = ops.gated_delta_rule(q, k, v, jax.nn.sigmoid(rates[..., 0]), g, segment_ids=ids, use_qk_l2norm=True)
        out = checkpoint_name(out, "gated_delta.out")
        z = ops.project(h, params["gated_delta_gate"], "btd,dnh->btnh")
        out = ops.rms_norm(out, norms["gated_delta_out_norm"], eps=c.norm_eps) * jax.nn.silu(z)
        return out

    def split(self, c: DecoderShape) -> dict[str, tuple[str, int]]:
        return {"gated_delta.num_key_heads": ("K", c.gated_delta.num_key_heads)}

    @staticmethod
    def _width(c: DecoderShape) -> int:
        """Returns how many numbers of queries, keys and values a key head has."""
        m = c.gated_delta
        return 2 * m.key_dim + m.num_value_heads // m.num_key_heads * m.value_dim

    def size(self, c: DecoderShape) -> Size:
        m, mixed = c.gated_delta, c.gated_delta.num_key_heads * self._width(c)
        N, out = m.num_value_heads, m.num_value_heads * m.value_dim
        # The state of a key is read, replaced in part, and read by the query. A map has a matrix [H, H] beside a state.
        state, a, wide = N * m.key_dim * m.value_dim, N * m.key_dim**2, N * max(m.key_dim, m.value_dim)
        reads, repeated = mixed + 2 * N, 2 * N * m.key_dim
        stored = N * in_lanes(m.key_dim) * in_lanes(m.value_dim)
        return Size(
            reads + out, out, reads, state, state + a, 3, wide, 20, mixed, m.conv_width, repeated,
            beside=2 * out, exact=m.num_key_heads * m.key_dim, key=m.key_dim, value=m.value_dim,
            stored=stored, inverses=N * LANES, pairs=N,
        )  # fmt: skip


@dataclass(frozen=True)
class KimiDelta(Recurrence):
    """Kimi Delta Attention, as Kimi Linear has it: a delta rule as in `GatedDelta`, of as many keys as values, whose decay is
    one for each channel of a key, and of a state S [H, Hv] of each head

        S' = exp(g_t)[:, None] * S_{t-1}, g = -A softplus(f + dt_bias)      out = (rms_norm(o) * sigmoid(z)) W

    with f [H] and z [Hv] of every head from two vectors of `rank` numbers a token, which come from one product. The projection
    of a head has its query, its key and its value beside each other, so that one convolution serves all three.
    Kimi Team, Kimi Linear, 2025, arXiv:2510.26692, section 3; flash-linear-attention, fla/layers/kda.py.
    """

    name = "kda"
    offloads = ("kda.out",)

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        m, D, std = c.kda, c.model_dim, c.init_std
        N, H, Hv, R, wide = m.num_heads, m.key_dim, m.value_dim, m.rank, 2 * m.key_dim + m.value_dim
        declared = {
            "kda_norm": norm_weight(c, D),
            "kda_in": Param((D, N, wide), "D N H", std=std, inputs="D", adapts=True),
            "kda_beta": Param((D, N), "D N", std=std, inputs="D", adapts=True),
            "kda_down": Param((D, 2 * R), "D R", std=std, inputs="D", adapts=True),
            "kda_decay": Param((R, N, H), "R N H", std=std, inputs="R", adapts=True),
            "kda_gate": Param((R, N, Hv), "R N H", std=std, inputs="R", adapts=True),
            "kda_taps": _taps((N, wide, m.conv_width), "N H _"),
            **_decaying(N, "kda", H),
            "kda_out_norm": Param((Hv,), "_", "ones", decay=False, cast=False),
            "kda_output": Param((N, Hv, D), "N H D", std=residual_std(c), inputs="N H", adapts=True),
        }
        if m.gate_bias:
            declared["kda_gate_bias"] = Param((N, Hv), "N H", "zeros", decay=False)
        return declared

    def keeps(self, c: DecoderShape) -> dict[str, Kept]:
        m = c.kda
        taps = m.num_heads * (2 * m.key_dim + m.value_dim), m.conv_width - 1
        state = m.num_heads, m.key_dim, m.value_dim
        return {"causal_conv1d": Kept.state(taps, "F _"), "kernel_delta_attention": Kept.state(state, "N _ _")}

    def mixed(
        self, h: jax.Array, params: dict[str, jax.Array], norms: dict[str, jax.Array], ctx: LayerContext
    ) -> jax.Array:
        c, ops, m = ctx.config, ctx.ops, ctx.config.kda
        mixed = _convolved(ops.project(h, params["kda_in"], "btd,dnh->btnh"), params["kda_taps"], None, ctx)
        q, k, v = jnp.split(mixed, [m.key_dim, 2 * m.key_dim], axis=-1)
        f, z = jnp.split(ops.project(h, params["kda_down"], "btd,dr->btr"), 2, axis=-1)
        rate, bias = _rates(params, ctx, "kda")
        g = rate * jax.nn.softplus(ops.project(f, params["kda_decay"], "btr,rnh->btnh").astype(jnp.float32) + bias)
        beta = jax.nn.sigmoid(ops.project(h, params["kda_beta"], "btd,dn->btn").astype(jnp.float32))
        ids = ctx.batch["segment_ids"]
        out = ops.kernel_delta_attention(q, k, v, beta, g, segment_ids=ids, use_qk_l2norm=True)
        out = checkpoint_name(out, "kda.out")
        z = ops.project(z, params["kda_gate"], "btr,rnh->btnh", bias=params.get("kda_gate_bias"))
        return ops.rms_norm(out, norms["kda_out_norm"], eps=c.norm_eps) * jax.nn.sigmoid(z)

    def split(self, c: DecoderShape) -> dict[str, tuple[str, int]]:
        return {"kda.num_heads": ("N", c.kda.num_heads)}

    def size(self, c: DecoderShape) -> Size:
        m = c.kda
        N, out, decays = m.num_heads, m.num_heads * m.value_dim, m.num_heads * m.key_dim
        mixed, state, wide = 2 * decays + out, decays * m.value_dim, N * max(m.key_dim, m.value_dim)
        reads, a = mixed + N, decays * m.key_dim
        return Size(
            reads, out, reads, state, state + a, 3, wide, 20, mixed, m.conv_width,
            beside=2 * out, exact=decays, turned=3 * decays, key=m.key_dim, value=m.value_dim,
            narrow=2 * m.rank, raised=decays + out, lifted=m.rank * (decays + out), decays=decays,
            stored=N * in_lanes(m.key_dim) * in_lanes(m.value_dim), inverses=N * LANES, squares=N,
        )  # fmt: skip


@dataclass(frozen=True)
class Mamba2(Recurrence):
    """Mamba-2, as Nemotron-H has it: of a state [S, P] of each head, with x, B and C after a convolution,

        h_t = exp(-A dt_t) h_{t-1} + dt_t B_t x_tᵀ, dt = softplus(d + dt_bias)      y_t = h_tᵀ C_t + skip x_t
        out = rms_norm(y * silu(z)) W, the norm over the heads of each group

    The convolution's channels are, of each group of heads, their x, then B and C.
    Dao and Gu, Transformers are SSMs, 2024, arXiv:2405.21060.
    """

    name = "mamba2"
    offloads = ("mamba2.out",)

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        m, D, std = c.mamba2, c.model_dim, c.init_std
        N, P, K, S, W = m.num_heads, m.head_dim, m.num_groups, m.state_dim, m.conv_width
        return {
            "mamba2_norm": norm_weight(c, D),
            "mamba2_in": Param((D, N, P), "D N H", std=std, inputs="D", adapts=True),
            "mamba2_gate": Param((D, N, P), "D N H", std=std, inputs="D", adapts=True),
            "mamba2_bc": Param((D, K, 2 * S), "D K H", std=std, inputs="D", adapts=True),
            "mamba2_dt": Param((D, N), "D N", std=std, inputs="D", adapts=True),
            "mamba2_taps": _taps((K, N // K * P + 2 * S, W), "K H _"),
            "mamba2_taps_bias": Param((K, N // K * P + 2 * S), "K H", "zeros", decay=False),
            **_decaying(N, "mamba2"),
            "mamba2_skip": Param((N,), "N", "ones", decay=False, cast=False),
            "mamba2_out_norm": Param((N, P), "N H", "ones", decay=False, cast=False),
            "mamba2_output": Param((N, P, D), "N H D", std=residual_std(c), inputs="N H", adapts=True),
        }

    def keeps(self, c: DecoderShape) -> dict[str, Kept]:
        m = c.mamba2
        taps = m.num_heads * m.head_dim + 2 * m.num_groups * m.state_dim, m.conv_width - 1
        state = m.num_heads, m.state_dim, m.head_dim
        return {"causal_conv1d": Kept.state(taps, "F _"), "state_space_v2": Kept.state(state, "N _ _")}

    def mixed(
        self, h: jax.Array, params: dict[str, jax.Array], norms: dict[str, jax.Array], ctx: LayerContext
    ) -> jax.Array:
        c, ops, m = ctx.config, ctx.ops, ctx.config.mamba2
        values = ops.project(h, params["mamba2_in"], "btd,dnh->btnh")
        # Beside each other by group, so that ranks exchange what one convolution needs.
        mixed = ops.project(h, params["mamba2_bc"], "btd,dkh->btkh")
        mixed = jnp.concatenate([values.reshape(*mixed.shape[:3], -1), mixed], axis=-1)
        mixed = _convolved(mixed, params["mamba2_taps"], params["mamba2_taps_bias"], ctx)
        values, B, C = jnp.split(mixed, [mixed.shape[-1] - 2 * m.state_dim, mixed.shape[-1] - m.state_dim], axis=-1)
        values = values.reshape(*h.shape[:2], m.num_heads, m.head_dim)
        rate, bias = _rates(params, ctx, "mamba2")
        dt = ops.project(h, params["mamba2_dt"], "btd,dn->btn").astype(jnp.float32)
        dt, skip = jax.nn.softplus(dt + bias), ops.gather(params["mamba2_skip"], "N")
        out = ops.state_space_v2(values, dt, rate, B, C, skip, segment_ids=ctx.batch["segment_ids"])
        out = checkpoint_name(out, "mamba2.out")
        z = ops.project(h, params["mamba2_gate"], "btd,dnh->btnh")
        return _normed(out, norms["mamba2_out_norm"], m.num_groups, c.norm_eps, z)

    def split(self, c: DecoderShape) -> dict[str, tuple[str, int]]:
        return {"mamba2.num_heads": ("N", c.mamba2.num_heads), "mamba2.num_groups": ("K", c.mamba2.num_groups)}

    def size(self, c: DecoderShape) -> Size:
        m = c.mamba2
        N, out, mixed = m.num_heads, m.num_heads * m.head_dim, 2 * m.num_groups * m.state_dim
        state, reads = out * m.state_dim, out + mixed
        wide = N * max(m.head_dim, m.state_dim)
        projected = 2 * out + mixed + N
        return Size(
            projected, out, reads + N, state, state + N, 2, wide, 14, reads, m.conv_width,
            key=m.state_dim, value=m.head_dim, stored=state, lasting=LONGER,
        )  # fmt: skip


@dataclass(frozen=True)
class Lightning(Recurrence):
    """Lightning attention, as MiniMax-01 has it: linear attention whose head n = 1, ... forgets at a fixed rate,

        S_t = exp(-r) S_{t-1} + k_t v_tᵀ, r = 2^(-8 n / N) (1 - layer / (layers - 1))      o_t = S_tᵀ q_t
        out = (rms_norm(o) * sigmoid(z)) W, the norm over all heads

    with q, k and v after SiLU. Qin et al., Lightning Attention-2, 2024, arXiv:2401.04658; MiniMax-01, 2025, arXiv:2501.08313.
    """

    name = "lightning"
    offloads = ("lightning.out",)

    def declare(self, c: DecoderShape) -> dict[str, Param]:
        D, N, H, std = c.model_dim, c.lightning.num_heads, c.lightning.head_dim, c.init_std
        return {
            "lightning_norm": norm_weight(c, D),
            "lightning_in": Param((D, N, 3 * H), "D N H", std=std, inputs="D", adapts=True),
            "lightning_gate": Param((D, N, H), "D N H", std=std, inputs="D", adapts=True),
            "lightning_out_norm": Param((N, H), "N H", "ones", decay=False, cast=False),
            "lightning_output": Param((N, H, D), "N H D", std=residual_std(c), inputs="N H", adapts=True),
        }

    def keeps(self, c: DecoderShape) -> dict[str, Kept]:
        m = c.lightning
        return {"lightning_attention": Kept.state((m.num_heads, m.head_dim, m.head_dim), "N _ _")}

    def mixed(
        self, h: jax.Array, params: dict[str, jax.Array], norms: dict[str, jax.Array], ctx: LayerContext
    ) -> jax.Array:
        c, ops = ctx.config, ctx.ops
        mixed = jax.nn.silu(ops.project(h, params["lightning_in"], "btd,dnh->btnh"))
        q, k, v = jnp.split(mixed, 3, axis=-1)
        # The published rates: the small numbers keep a model of one layer, and the last layer of any, from 0.
        slower = 1 - ctx.layer / (c.num_layers - 1 + 1e-5) + 1e-5
        decay = slower * 2.0 ** (-8 / q.shape[2] * jnp.arange(1, q.shape[2] + 1, dtype=jnp.float32))
        ids = ctx.batch["segment_ids"]
        out = ops.lightning_attention(q, k, v, decay=decay, softmax_scale=1.0, segment_ids=ids)
        out = _normed(checkpoint_name(out, "lightning.out"), norms["lightning_out_norm"], 1, c.norm_eps)
        out = out * jax.nn.sigmoid(ops.project(h, params["lightning_gate"], "btd,dnh->btnh"))
        return out

    def split(self, c: DecoderShape) -> dict[str, tuple[str, int]]:
        return {"lightning.num_heads": ("N", c.lightning.num_heads)}

    def size(self, c: DecoderShape) -> Size:
        m = c.lightning
        wide = m.num_heads * m.head_dim
        state = wide * m.head_dim
        made = 4 * wide, wide, 3 * wide, state, state + m.num_heads, 2, wide, 10
        return Size(*made, key=m.head_dim, value=m.head_dim, stored=state, lasting=LONGER)
