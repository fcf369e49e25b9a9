"""Calls of the delta rule with a decay for each channel: its walks are those of one decay per head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.scan import triton_channel_calls as channels
from kernels.engines.scan import triton_delta_calls as delta
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.triton_calls import gradient_tiles, heads_of, precisions, reads_diagonals
from kernels.engines.scan.triton_channels_delta import channel_delta_bwd_kernel
from kernels.framework.work import Work
from kernels.toolchains.triton import triton_launch


class Launches(delta.Launches):
    """The launches of one call; log decays a of `Tokens` are [B, T, N, H]."""

    def __init__(self, x: delta.Tokens, num_states: int, scale: float, cfg: ChunkConfig, work: Work | None):
        super().__init__(x, num_states, scale, cfg, work)
        self.constants = self.common | channels.constants(x.q.dtype, self.common["BLOCK_C"], scale)
        self.constants |= {"N": self.chunks[1]}

    def log_decay(self) -> None:
        return None

    def pairs(self) -> tuple[jax.Array, jax.Array]:
        """Returns (what outputs read of writes, the inverses); sets what walks read and write."""
        weights, self.sums, self.reads, self.writes, whole, self.keeps, solve, _ = channels.pairs(
            self.x, self.beta, self.layout, self.constants, self.chunks[1]
        )
        self.fades = (None, None, whole)
        return weights, solve

    def gradients(self, d_out: Any, found: dict[str, Any], of_end: dict[str, Any]) -> dict[str, Any]:
        """Returns the gradients of q, k, v, beta and a. See `delta.Launches.gradients`."""
        x, layout, (B, N, chunks), (T, K, H) = self.x, self.layout, self.chunks, self.x.q.shape[1:]
        common = {name: value for name, value in self.constants.items() if name != "K"}
        states, written = found["states"], found["written"]
        d = channels.gradients(
            x, written, layout, common, self.cfg, self.sums, self.fades[2], d_out, states, of_end["d_states"], True
        )
        per_token, tokens = jax.ShapeDtypeStruct((B, N, T), jnp.float32), (B, T, N, H)
        dk, dv, dbeta, da = triton_launch(
            channel_delta_bwd_kernel,
            x.k,
            x.v,
            self.beta,
            self.sums,
            layout.runs,
            layout.table,
            written,
            of_end["du"],
            states,
            d["k"],
            d["a"],
            out_shape=(
                jax.ShapeDtypeStruct(tokens, x.k.dtype if K == N else jnp.float32),
                jax.ShapeDtypeStruct(x.v.shape, x.v.dtype),
                per_token,
                jax.ShapeDtypeStruct(tokens, jnp.float32),
            ),
            grid=(B * N * chunks,),
            DIAGONAL=reads_diagonals(x.q.dtype),
            **{name: value for name, value in self.constants.items() if name not in ("SCALE", "PRECISION")},
            PRECISION=precisions(x.q.dtype)[1],
            **self.columns | gradient_tiles(self.cfg, x.q.dtype, x.v.shape[-1], 8),
        )
        da = da if layout.valid is None else jnp.where(layout.valid[..., None, None], da, 0)
        return {
            "q": heads_of(d["q"], K),
            "k": heads_of(dk, K),
            "v": dv,
            "beta": layout.of_tokens(dbeta),
            "a": da,
        }
