"""Calls of the kernels in `triton_channels.py` and `triton_channel_steps.py`. The walks are those of one decay per head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.engines.scan import gluon_delta_calls as gluon
from kernels.engines.scan import triton_delta_calls as delta
from kernels.engines.scan import triton_scalar_calls as scalar
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.layout import FORGETS, Layout
from kernels.engines.scan.triton_calls import LEAST, gradient_tiles, heads_of, precisions, reads_diagonals
from kernels.engines.scan.triton_channel_steps import channel_gradients_kernel
from kernels.engines.scan.triton_channels import (
    channel_decays_kernel,
    channel_pairs_kernel,
    channel_states_kernel,
    channel_written_kernel,
)
from kernels.engines.scan.triton_delta_kept import KEPT as OF_HEADS
from kernels.framework.binding import Call
from kernels.framework.work import Work
from kernels.toolchains.triton import compute_capability, triton_launch

# The least log decay where a sum over an interval is a difference of two: its exponential is below what any other term keeps.
FORGETS_CHANNEL = -60.0
# The widest sum of log decays whose two halves both have exponentials that bfloat16 holds, times queries and keys of 1e7.
REACH = 140.0
KEPT = OF_HEADS[:2]  # what a forward of a delta rule keeps
MOST_SCALE = 256.0  # of queries, and the inverse of the least, so that keys times it fit float16
WIDTH = 64  # channels of a tile with decays: several programs of a multiprocessor hide each other's loads


class Chunks(NamedTuple):
    """What the kernels of channels share: the arguments of a call, where its chunks are, and constants.

    Attributes:
      x: `Tokens` of the scalar or of the delta rule, with log decays a [B, T, N, H].
      beta: float32 [B, N, T] for a delta rule, or None. bonus: float32 [N, H], or None.
    """

    x: Any
    beta: jax.Array | None
    bonus: jax.Array | None
    layout: Layout
    cfg: ChunkConfig
    sizes: dict[str, Any]  # those of every kernel
    decays: dict[str, Any]  # those of kernels that have decays

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.x.q.shape[0], self.sizes["N"], self.sizes["CHUNKS"]

    def tokens(self, dtype: Any = None) -> Any:
        (B, N, _), (T, H) = self.shape, (self.sizes["T"], self.sizes["H"])
        return jax.ShapeDtypeStruct((B, T, N, H), dtype or self.x.k.dtype)

    def squares(self) -> Any:
        C = self.sizes["BLOCK_C"]
        return jax.ShapeDtypeStruct((*self.shape, C, C), self.x.k.dtype)

    def per_token(self) -> Any:
        B, N, _ = self.shape
        return jax.ShapeDtypeStruct((B, N, self.sizes["T"]), jnp.float32)

    def per_channel(self) -> Any:
        return jax.ShapeDtypeStruct((*self.shape, self.sizes["H"]), jnp.float32)

    def launch(
        self, kernel: Any, *arrays: Any, out_shape: tuple[Any, ...], blocks: int = 1, **constants: Any
    ) -> tuple[jax.Array, ...]:
        grid = (math.prod(self.shape), blocks)
        return triton_launch(kernel, *arrays, out_shape=out_shape, grid=grid, **self.sizes | constants)

    def decays_of_tokens(self) -> tuple[jax.Array, ...]:
        """Returns the outputs of `channel_decays_kernel`, in its order; the last only with `beta`."""
        x, tokens = self.x, self.tokens()
        first = jax.ShapeDtypeStruct((*self.shape, self.decays["BLOCKS"]), jnp.int32)
        shapes: tuple[Any, ...] = (self.tokens(jnp.float32), tokens, tokens, self.per_channel(), first)
        unused: dict[str, Any] = {"keeps_ptr": None} if self.beta is None else {}
        return self.launch(
            channel_decays_kernel,
            x.q,
            x.k,
            x.a,
            self.layout.runs,
            self.layout.table,
            out_shape=shapes if self.beta is None else (*shapes, tokens),
            blocks=self.decays["BLOCKS"],
            num_warps=4,
            KQ=x.q.shape[2],
            KK=x.k.shape[2],
            FORGETS=FORGETS if self.decays["EXACT"] else FORGETS_CHANNEL,
            BEFORE=self.bonus is not None,
            **self.decays,
            **unused,
        )

    def pairs(self, sums: jax.Array, first: jax.Array) -> tuple[jax.Array, ...]:
        """Returns what outputs read of writes and, with `beta`, the inverses, [B, N, CHUNKS, C, C]."""
        x, square = self.x, self.squares()
        unused: dict[str, Any] = {} if self.beta is not None else {"solve_ptr": None, "scratch_ptr": None}
        scratch = jax.ShapeDtypeStruct((*square.shape[:-1], 16), jnp.float32)
        return self.launch(
            channel_pairs_kernel,
            x.q,
            x.k,
            self.beta,
            self.bonus,
            sums,
            first,
            self.layout.runs,
            self.layout.table,
            out_shape=(square,) if self.beta is None else (square, square, scratch),
            num_warps=4,
            KQ=x.q.shape[2],
            KK=x.k.shape[2],
            PRECISION=precisions(x.q.dtype)[0],
            **self.decays,
            **unused,
        )[:2]

    def states(self, v: jax.Array, d_out: jax.Array, states: jax.Array, d_states: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the outputs of `channel_states_kernel`, given what is written, v [B, T, KV, Hv]."""
        return self.launch(
            channel_states_kernel,
            v,
            self.layout.runs,
            self.layout.table,
            d_out,
            states,
            d_states,
            out_shape=(self.squares(), self.tokens(), self.tokens(), self.per_channel()),
            KV=v.shape[2],
            **self.of_values(v),
        )

    def written(self, v: jax.Array, written: jax.Array, du: jax.Array, states: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the outputs of `channel_written_kernel`."""
        return self.launch(
            channel_written_kernel,
            v,
            self.beta,
            self.layout.runs,
            self.layout.table,
            written,
            du,
            states,
            out_shape=(self.squares(), self.tokens(), self.per_token(), jax.ShapeDtypeStruct(v.shape, v.dtype)),
            **self.of_values(v),
        )

    def of_values(self, v: jax.Array) -> dict[str, Any]:
        """Returns the constants of kernels that read values and states."""
        tiles = gradient_tiles(self.cfg, self.x.q.dtype, v.shape[3], 8)
        return tiles | {
            "Hv": v.shape[3],
            "DIAGONAL": reads_diagonals(self.x.q.dtype),
            "PRECISION": precisions(self.x.q.dtype)[1],
        }

    def gradients(
        self, sums: Any, whole: Any, first: Any, of_states: Any, of_written: Any = (None, None), hopper: bool = False
    ) -> dict[str, Any]:
        """Returns the gradients of q, k, a, and, None for what is None, of beta and the bonus.

        Args:
          sums, whole, first: of `decays_of_tokens`.
          of_states, of_written: what `states` and `written` return, without what is of values.
          hopper: whether Hopper's kernel computes them, which must have the call: see `gluon_delta_calls.fits`.
        """
        x, N, valid = self.x, self.sizes["N"], self.layout.valid
        # Of delta rules there are more products for each load; before Hopper their operands lie in registers.
        most, num_warps = (32, 4) if self.beta is None else (64, 8) if compute_capability() >= 90 else (16, 8)
        width = min(most, self.decays["BLOCK_H"])
        more, blocks = {"beta": self.beta, "own": self.bonus}, -(-self.sizes["H"] // width)
        extra = {name: self.per_token() for name, y in more.items() if y is not None}
        if self.beta is not None:
            extra["beta"] = jax.ShapeDtypeStruct((blocks, *self.per_token().shape), jnp.float32)
        unused: dict[str, Any] = {f"d_{name}_ptr": None for name in more if name not in extra}

        def of(y: jax.Array) -> Any:
            return self.tokens(y.dtype if y.shape[2] == N else jnp.float32)

        shapes = (of(x.q), of(x.k), self.tokens(x.a.dtype), *extra.values())
        if hopper:
            results = gluon.channel_gradients(self, sums, whole, first, of_states, of_written, shapes)
        else:
            results = self.launch(
                channel_gradients_kernel,
                x.q,
                x.k,
                self.bonus,
                self.beta,
                sums,
                whole,
                first,
                self.layout.runs,
                self.layout.table,
                *of_states,
                *of_written,
                out_shape=shapes,
                num_warps=num_warps,
                num_stages=1,
                blocks=blocks,
                KQ=x.q.shape[2],
                KK=x.k.shape[2],
                PRECISION=precisions(x.q.dtype)[1],
                WIDTH=self.decays["BLOCK_H"],
                **self.decays | {"BLOCK_H": width},
                **unused,
            )
        dq, dk, da, *rest = results
        d: dict[str, Any] = dict(zip(extra, rest, strict=True))
        bonus = None
        if self.bonus is not None:
            q, k = (jnp.repeat(y.astype(jnp.float32), N // y.shape[2], axis=2) for y in (x.q, x.k))
            each = jnp.swapaxes(d["own"], 1, 2)[..., None] * q * k
            bonus = jnp.sum(each if valid is None else jnp.where(valid[..., None, None], each, 0), (0, 1))
        return {
            "q": heads_of(dq, x.q.shape[2]),
            "k": heads_of(dk, x.k.shape[2]),
            "a": da if valid is None else jnp.where(valid[..., None, None], da, 0),
            "beta": None if self.beta is None else self.layout.of_tokens(jnp.sum(d["beta"], axis=0)),
            "bonus": bonus,
        }


def chunks_of(x: Any, beta: Any, bonus: Any, run: Any, scale: float, cfg: ChunkConfig) -> Chunks:
    """Returns what kernels of channels share, of the launches `run` of a call."""
    sizes = {name: run.common[name] for name in ("T", "N", "H", "CHUNKS", "BLOCK_C", "BLOCK_H")}
    exact, block = x.q.dtype == jnp.float32, min(WIDTH, sizes["BLOCK_H"])
    decays = {
        "SCALE": scale,
        "EXACT": exact,
        "REACH": REACH if x.q.dtype == jnp.bfloat16 and sizes["BLOCK_C"] > LEAST else 0.0,
        "LEVELS": sizes["BLOCK_C"].bit_length() - 1,
        "BLOCK_H": block,
        "BLOCKS": -(-sizes["H"] // block),
    }
    return Chunks(x, beta, bonus, run.layout, cfg, sizes, decays)


class Launches(scalar.Launches):
    """The launches of one call with a decay for each channel: a of `Tokens` is [B, T, N, H], w and skip are None."""

    def __init__(self, x: scalar.Tokens, N: int, num_states: int, scale: float, cfg: ChunkConfig, work: Work | None):
        super().__init__(x, N, num_states, scale, cfg, work)
        self.rows, self.of_chunks = x.q.shape[-1], chunks_of(x, None, x.bonus, self, scale, cfg)

    def log_decay(self) -> None:
        return None

    def pairs(self) -> jax.Array:
        """Returns what the output of each token of a chunk reads of each value; sets what walks read and write."""
        sums, self.reads, self.writes, whole, first = self.of_chunks.decays_of_tokens()
        self.fades, self.decays = (None, None, whole), (sums, whole, first)
        return self.of_chunks.pairs(sums, first)[0]

    def gradients(self, d_out: Any, states: Any, d_states: Any, parts_of_keys: bool = False) -> dict[str, Any]:
        """Returns the gradients of q, k, a, and bonus, None for what is None."""
        of_states = self.of_chunks.states(self.x.v, d_out, states, d_states)
        return self.of_chunks.gradients(*self.decays, of_states) | {"w": None, "skip": None}


class DeltaLaunches(delta.Launches):
    """The launches of one call of a delta rule with a decay for each channel: a of `Tokens` is [B, T, N, H]."""

    names_kept = KEPT  # what decays leave is as large as several arrays of tokens, and soon computed again

    def __init__(self, x: delta.Tokens, num_states: int, scale: float, cfg: ChunkConfig, work: Work | None):
        super().__init__(x, num_states, scale, cfg, work)
        self.decays_of = chunks_of(x, self.beta, None, self, scale, cfg)
        # Hopper's kernel of gradients divides rates by the scale, and has its logarithm.
        self.in_one = self.in_one and 1 / MOST_SCALE <= scale <= MOST_SCALE

    def log_decay(self) -> None:
        return None

    def pairs(self) -> tuple[jax.Array, jax.Array]:
        """Returns (what outputs read of writes, the inverses); sets what walks read and write."""
        sums, first = self.decay_tokens()
        if self.in_one:
            return gluon.channel_pairs(self.decays_of, sums, first)
        weights, solve = self.decays_of.pairs(sums, first)
        return weights, solve

    def pairs_of(self, kept: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Returns `pairs`, as a forward has kept them; sets what walks read and write."""
        self.decay_tokens()
        weights, solve = (kept[name] for name in KEPT)
        return weights, solve

    def decay_tokens(self) -> tuple[Any, Any]:
        sums, self.reads, self.writes, whole, first, self.keeps = self.decays_of.decays_of_tokens()
        self.fades, self.decays = (None, None, whole), (sums, whole, first)
        return sums, first

    def gradients(self, d_out: Any, walked: dict[str, Any], of_end: dict[str, Any]) -> dict[str, Any]:
        """Returns the gradients of q, k, v, beta and a. See `delta.Launches.gradients`."""
        states, written = walked["states"], walked["written"]
        if self.in_one:
            of_states, (*of_written, of_values, dv) = gluon.products(self, d_out, walked, of_end)
        else:
            of_states = self.decays_of.states(written, d_out, states, of_end["d_states"])
            *of_written, of_values, dv = self.decays_of.written(self.x.v, written, of_end["du"], states)
        d = self.decays_of.gradients(*self.decays, of_states, of_written, self.in_one)
        return d | {"v": dv, "beta": d["beta"] + self.layout.of_tokens(of_values)}


def heuristic(call: Call, platform: str) -> ChunkConfig:
    """Returns the default tiles of a call: those of one decay per head, but values of a walk stay in shared memory longer."""
    best = scalar.heuristic(call, platform)
    if call.dtype != "float32" and call.dims["Hv"] > 64:
        best = scalar.tiles(call, 64, 64, 4, 8, 3)
    return best


def candidates(call: Call) -> list[ChunkConfig]:
    """Returns the configurations to tune over."""
    best = heuristic(call, "cuda")
    if call.dtype == "float32":
        return [best]
    found = [
        scalar.tiles(call, chunk, block_v, 4, 8, stages)
        for chunk in (32, 64)
        for block_v in (32, 64)
        for stages in (2, 3)
    ]
    return list(dict.fromkeys([best, *found, replace(best, splits=1), replace(best, splits=2)]))
