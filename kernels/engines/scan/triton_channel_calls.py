"""Calls of the kernels in `triton_channels.py`: the walks are those of one decay per head, between other pairs and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.scan import triton_scalar_calls as scalar
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.layout import FORGETS
from kernels.engines.scan.triton_calls import gradient_tiles, heads_of, precisions, reads_diagonals
from kernels.engines.scan.triton_channels import channel_dk_kernel, channel_dq_kernel, channel_pairs_kernel
from kernels.framework.work import Work
from kernels.toolchains.triton import triton_launch

# The least log decay where a sum over an interval is a difference of two: of 64 tokens with it, differences still have the
# digits of bfloat16, and its exponential is 0.
FORGETS_CHANNEL = -100.0


def constants(dtype: Any, chunk: int, scale: float) -> dict[str, Any]:
    """Returns the constants that all kernels of channels have."""
    return {"SCALE": scale, "EXACT": dtype == jnp.float32, "LEVELS": chunk.bit_length() - 1}


def pairs(x: Any, beta: jax.Array | None, layout: Any, common: dict[str, Any], N: int) -> tuple[jax.Array, ...]:
    """Returns the outputs of `channel_pairs_kernel`, in its order; the last three only with `beta`.

    Args:
      x: `Tokens` of the scalar or of the delta rule, with q, k and log decays a [B, T, N, H].
    """
    (B, T, KQ, H), C, dtype = x.q.shape, common["BLOCK_C"], x.k.dtype
    square = jax.ShapeDtypeStruct((B, N, layout.chunks, C, C), dtype)
    tokens = jax.ShapeDtypeStruct((B, T, N, H), dtype)
    whole = jax.ShapeDtypeStruct((B, N, layout.chunks, H), jnp.float32)
    shapes: tuple[Any, ...] = (square, jax.ShapeDtypeStruct(tokens.shape, jnp.float32), tokens, tokens, whole)
    unused: dict[str, Any] = {}
    if beta is None:
        unused = dict.fromkeys(("keeps_ptr", "solve_ptr", "scratch_ptr"))
    else:
        shapes += (tokens, square, jax.ShapeDtypeStruct((*square.shape[:-1], 16), jnp.float32))
    names = ("T", "N", "H", "CHUNKS", "PRECISION", "EXACT", "LEVELS", "SCALE", "BLOCK_C", "BLOCK_H")
    return triton_launch(
        channel_pairs_kernel,
        x.q,
        x.k,
        x.a.astype(jnp.float32),
        beta,
        getattr(x, "bonus", None),
        layout.runs,
        layout.table,
        out_shape=shapes,
        grid=(B * N * layout.chunks,),
        num_warps=4 if C * common["BLOCK_H"] <= 2048 else 8,
        KQ=KQ,
        KK=x.k.shape[2],
        FORGETS=FORGETS if common["EXACT"] else FORGETS_CHANNEL,
        **{name: common[name] for name in names},
        **unused,
    )


def gradients(
    x: Any,
    v: jax.Array,
    layout: Any,
    common: dict[str, Any],
    cfg: ChunkConfig,
    sums: jax.Array,
    whole: jax.Array,
    d_out: jax.Array,
    states: jax.Array,
    d_states: jax.Array,
    wide_keys: bool = False,
) -> dict[str, Any]:
    """Returns the gradients of q and k [B, T, N, H], of a in float32 with anything for padding, and of the bonus.

    Args:
      wide_keys: return that of k in float32.
      v: what is written, [B, T, KV, Hv].
      sums, whole: of `pairs`.
      states, d_states: before each chunk, and their gradients after each.
    """
    (B, T), N, H = x.q.shape[:2], common["N"], common["H"]
    bonus = getattr(x, "bonus", None)
    shape = (B, T, N, H)
    constants = common | {
        "PRECISION": precisions(x.q.dtype)[1],
        "KQ": x.q.shape[2],
        "KK": x.k.shape[2],
        "KV": v.shape[2],
        "Hv": v.shape[3],
    }
    tiles = gradient_tiles(cfg, x.q.dtype, v.shape[3], 8)
    grid = (B * N * layout.chunks,)
    wide = jax.ShapeDtypeStruct(shape, jnp.float32)

    def of(y: jax.Array, parts_only: bool = False) -> Any:
        return jax.ShapeDtypeStruct(shape, y.dtype if y.shape[2] == N and not parts_only else jnp.float32)

    own: tuple[Any, ...] = () if bonus is None else (jax.ShapeDtypeStruct((B, N, T), jnp.float32),)
    unused: dict[str, Any] = {"d_own_ptr": None} if bonus is None else {}
    arrays = (x.q, x.k, v, bonus, sums)
    shapes: Any = (of(x.q), wide, *own)
    rows = (layout.runs, layout.table, d_out, states)
    dq, da, *d_own = triton_launch(
        channel_dq_kernel, *arrays, *rows, out_shape=shapes, grid=grid, **constants, **tiles, **unused
    )
    dk, da = triton_launch(
        channel_dk_kernel,
        *arrays,
        whole,
        *rows,
        d_states,
        da,
        out_shape=(of(x.k, wide_keys), wide),
        grid=grid,
        DIAGONAL=reads_diagonals(x.q.dtype),
        **constants,
        **tiles,
    )
    d: dict[str, Any] = {"q": dq, "k": dk, "a": da, "bonus": None}
    if bonus is not None:
        q, k = (jnp.repeat(y.astype(jnp.float32), N // y.shape[2], axis=2) for y in (x.q, x.k))
        each = jnp.swapaxes(d_own[0], 1, 2)[..., None] * q * k
        d["bonus"] = jnp.sum(each if layout.valid is None else jnp.where(layout.valid[..., None, None], each, 0), (0, 1))
    return d


class Launches(scalar.Launches):
    """The launches of one call with a decay for each channel: a of `Tokens` is [B, T, N, H], w and skip are None."""

    def __init__(self, x: scalar.Tokens, N: int, num_states: int, scale: float, cfg: ChunkConfig, work: Work | None):
        super().__init__(x, N, num_states, scale, cfg, work)
        self.rows = x.q.shape[-1]
        self.constants = self.common | constants(x.q.dtype, self.chunk, scale)

    def log_decay(self) -> None:
        return None

    def pairs(self) -> jax.Array:
        """Returns what the output of each token of a chunk reads of each value; sets what walks read and write."""
        weights, self.sums, self.reads, self.writes, whole = pairs(
            self.x, None, self.layout, self.constants, self.heads[1]
        )
        self.fades = (None, None, whole)
        return weights

    def gradients(self, d_out: Any, states: Any, d_states: Any, parts_of_keys: bool = False) -> dict[str, Any]:
        """Returns the gradients of q, k, a, and bonus, None for what is None."""
        x, common = self.x, {name: value for name, value in self.constants.items() if name != "BLOCK_V"}
        d = gradients(x, x.v, self.layout, common, self.cfg, self.sums, self.fades[2], d_out, states, d_states)
        valid = self.layout.valid
        da = d["a"] if valid is None else jnp.where(valid[..., None, None], d["a"], 0)
        shared = {"q": heads_of(d["q"], x.q.shape[2]), "k": heads_of(d["k"], x.k.shape[2])}
        return d | shared | {"a": da, "w": None, "skip": None}
