"""Calls of the kernels in `triton_dplr.py` and `triton_dplr_steps.py`. The walks are those of a delta rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.engines.scan import triton_channel_calls as channels
from kernels.engines.scan import triton_delta_calls as delta
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.layout import FORGETS
from kernels.engines.scan.triton_calls import LEAST, gradient_tiles, precisions
from kernels.engines.scan.triton_dplr import dplr_chunks_kernel, dplr_written_kernel
from kernels.engines.scan.triton_dplr_steps import dplr_gradients_kernel
from kernels.framework.binding import Call
from kernels.framework.measured import power_of_two
from kernels.framework.work import Work
from kernels.toolchains.triton import compute_capability, triton_launch

WARPS = 8  # of a program of one chunk
GRADIENTS = (32, 8)  # channels and warps of a program of gradients through decays


class Tokens(NamedTuple):
    """Arguments of `S_t = diag(exp w_t) S_{t-1} + b_t (S_{t-1}ᵀ a_t)ᵀ + k_t v_tᵀ`, `out_t = scale · S_tᵀ q_t`.

    Attributes:
      q, w, k, a, b: [B, T, N, H]. v: [B, T, N, Hv].
      segment_ids: int [B, T], or None.
      entries: float32 [B, G, N, H, Hv], states that sequences start from, or None for 0.
    """

    q: jax.Array
    w: jax.Array
    k: jax.Array
    v: jax.Array
    a: jax.Array
    b: jax.Array
    segment_ids: jax.Array | None
    entries: jax.Array | None


class Launches(delta.Launches):
    """The launches of one call.

    Args:
      differentiated: whether `gradients` follows, which needs what only the chunks' inverses are in.
    """

    def __init__(
        self, x: Tokens, num_states: int, scale: float, cfg: ChunkConfig, work: Work | None, differentiated: bool
    ):
        beta: Any = None
        walked = delta.Tokens(x.q, x.k, x.v, beta, x.w, x.segment_ids, x.entries)
        super().__init__(walked, num_states, scale, cfg, work)
        self.tokens, self.differentiated = x, differentiated
        self.decays_of = channels.chunks_of(walked, None, None, self, scale, cfg)

    def log_decay(self) -> None:
        return None

    def pairs(self) -> tuple[jax.Array, None]:
        """Returns (what outputs read of b, None: products with inverses are taken); sets what walks read and write."""
        x, of = self.tokens, self.decays_of
        tokens, square = of.tokens(), of.squares()
        inverses = (square, square) if self.differentiated else ()
        unused: dict[str, Any] = {} if inverses else {"solve_ptr": None, "product_ptr": None}
        outputs = of.launch(
            dplr_chunks_kernel,
            x.q,
            x.k,
            x.v,
            x.w,
            x.a,
            x.b,
            self.layout.runs,
            self.layout.table,
            out_shape=(
                of.tokens(jnp.float32),
                jax.ShapeDtypeStruct((*of.shape, of.decays["BLOCKS"]), jnp.int32),
                of.per_channel(),
                *[tokens] * 4,
                jax.ShapeDtypeStruct(x.v.shape, x.k.dtype),
                square,
                square,
                *inverses,
                jax.ShapeDtypeStruct((*square.shape[:-1], 16), jnp.float32),
            ),
            num_warps=WARPS,
            num_stages=1,
            Hv=x.v.shape[3],
            FORGETS=FORGETS if of.decays["EXACT"] else channels.FORGETS_CHANNEL,
            PRECISION=precisions(x.k.dtype)[0],
            BLOCK_V=min(64, max(LEAST, power_of_two(x.v.shape[3]))),
            **of.decays,
            **unused,
        )
        sums, first, whole, self.reads, self.writes, leaves, self.keeps, self.values, weights, others = outputs[:10]
        self.fades, self.decays, self.inverses = (None, None, whole), (sums, whole, first), outputs[10:-1]
        self.beside = (x.v, leaves, others)
        return weights, None

    def gradients(self, d_out: Any, found: dict[str, Any], of_end: dict[str, Any]) -> dict[str, Any]:
        """Returns the gradients of q, w, k, v, a and b. See `delta.Launches.gradients`."""
        x, of, valid = self.tokens, self.decays_of, self.layout.valid
        states, written, (v, leaves, others) = found["states"], found["written"], self.beside
        tokens, square, precision = of.tokens(), of.squares(), precisions(x.k.dtype)[1]
        of_states = of.states(written, d_out, states, of_end["d_states"])
        *of_written, dv = of.launch(
            dplr_written_kernel,
            v,
            leaves,
            self.layout.runs,
            self.layout.table,
            *self.inverses,
            others,
            d_out,
            written,
            of_end["du"],
            states,
            of_end["d_states"],
            out_shape=(square, square, square, tokens, tokens, jax.ShapeDtypeStruct(v.shape, v.dtype)),
            Hv=v.shape[3],
            PRECISION=precision,
            **gradient_tiles(self.cfg, x.k.dtype, v.shape[3], 8),
        )
        most, num_warps = GRADIENTS
        width = min(most if compute_capability() >= 90 else most // 2, of.decays["BLOCK_H"])
        names = ("q", "k", "a", "b", "w")
        shapes = [jax.ShapeDtypeStruct(getattr(x, name).shape, getattr(x, name).dtype) for name in names]
        results = of.launch(
            dplr_gradients_kernel,
            x.q,
            x.k,
            x.a,
            x.b,
            *self.decays,
            self.layout.runs,
            self.layout.table,
            *of_states,
            *of_written,
            out_shape=tuple(shapes),
            num_warps=num_warps,
            num_stages=1,
            blocks=-(-x.q.shape[3] // width),
            PRECISION=precision,
            WIDTH=of.decays["BLOCK_H"],
            **of.decays | {"BLOCK_H": width},
        )
        d: dict[str, Any] = dict(zip(names, results, strict=True))
        if valid is not None:
            d["w"] = jnp.where(valid[..., None, None], d["w"], 0)
        return d | {"v": dv}


def heuristic(call: Call, platform: str) -> ChunkConfig:
    """Returns the default tiles of a call: those of one decay per head."""
    return delta.heuristic(call, platform)


def candidates(call: Call) -> list[ChunkConfig]:
    """Returns the configurations to tune over."""
    best = heuristic(call, "cuda")
    if call.dtype == "float32":
        return [best]
    found = [
        delta.tiles(call, chunk, block_v, num_warps, stages)
        for chunk in (32, 64)
        for block_v, num_warps in ((16, 4), (32, 4), (64, 4), (64, 8))
        for stages in (2, 3)
    ]
    return list(dict.fromkeys([best, *found, *(replace(best, splits=splits) for splits in (1, 2, 4))]))
