"""Calls of the kernels in `triton_scalar.py`: how a row is split, what a backward computes again, and tile sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton

from kernels.engines.scan import gluon_scalar_calls as gluon
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.layout import layout
from kernels.engines.scan.triton_calls import (
    LEAST,
    check_chunk,
    columns,
    columns_here,
    fade_shapes,
    gradient_tiles,
    heads_of,
    longest_chunk,
    precisions,
    reads_diagonals,
)
from kernels.engines.scan.triton_join import scan_join_kernel
from kernels.engines.scan.triton_scalar import (
    scalar_dk_kernel,
    scalar_dq_kernel,
    scalar_pairs_kernel,
    scalar_walk_kernel,
)
from kernels.engines.scan.triton_sums import fades_kernel
from kernels.framework.binding import Call
from kernels.framework.measured import power_of_two
from kernels.framework.target import MULTIPROCESSORS
from kernels.framework.work import Work
from kernels.toolchains.triton import triton_launch

# Programs for each multiprocessor that a row is split for, and the fewest chunks of a part.
PROGRAMS_EACH = 2
LEAST_CHUNKS = 4
ENOUGH = 0.7  # programs for each multiprocessor of rows that are not split: a split costs another walk


class Tokens(NamedTuple):
    """Arguments of `S_t = exp(a_t) S_{t-1} + w_t k_t v_tᵀ`, `out_t = scale · S_tᵀ q_t + skip · v_t`.

    Head n of N reads head n // (N / K) of an array with K heads.

    Attributes:
      q: [B, T, KQ, H]. k: [B, T, KK, H]. v: [B, T, KV, Hv].
      a: log decays, [B, T, N], or None. w: weights of the writes, [B, T, N], or None for 1. skip: [N], or None for 0.
      segment_ids: int [B, T], or None.
      entries: float32 [B, G, N, H, Hv], states that sequences start from, or None for 0.
      bonus: float32 [N, H], of decays of channels alone: outputs read the state before their token, and k_t v_tᵀ weighed by it.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    a: jax.Array | None
    w: jax.Array | None
    skip: jax.Array | None
    segment_ids: jax.Array | None
    entries: jax.Array | None
    bonus: jax.Array | None = None


class Launches:
    """The launches of one call."""

    def __init__(
        self,
        x: Tokens,
        N: int,
        num_states: int,
        scale: float,
        cfg: ChunkConfig,
        work: Work | None,
        fades: Any = (),
    ):
        self.fades: Any = fades  # decays until each token, from each to the end of its chunk, and over each chunk
        self.x, self.cfg, self.chunk, self.work = x, cfg, check_chunk(cfg.chunk), work
        (B, T, _, H), Hv = x.q.shape, x.v.shape[-1]
        # Gradients of values that several heads share are summed afterwards.
        self.wide = x.v.dtype if x.v.shape[2] == N else jnp.float32
        self.skip = None if x.skip is None else x.skip.astype(jnp.float32)
        self.heads, self.states, self.layout = (
            (B, N),
            (B, num_states, N, H, Hv),
            layout(B, T, self.chunk, x.segment_ids, num_states),
        )
        self.reads, self.writes, self.rows = (
            x.q,
            x.k,
            1,
        )  # what reads and writes a state, and rows that decay by themselves
        self.a, self.w = self.log_decay(), self.layout.per_token(x.w)
        chunks = self.layout.chunks
        self.splits = -(-chunks // -(-chunks // min(cfg.splits or 1, chunks)))  # no part is empty
        block_v = columns_here(cfg.block_v, Hv)
        self.columns = triton.cdiv(Hv, block_v)
        self.sums: Any = None  # sums of log decays, where Hopper's walks compute pairs themselves
        self.hopper = bool(cfg.hopper_walks) and gluon.fits(x, N, self.chunk, num_states)
        self.common: dict[str, Any] = {
            "T": T,
            "N": N,
            "H": H,
            "Hv": Hv,
            "CHUNKS": chunks,
            "SCALE": scale,
            "PRECISION": precisions(x.q.dtype)[0],
            "BLOCK_C": self.chunk,
            "BLOCK_H": max(LEAST, power_of_two(H)),
            "BLOCK_V": block_v,
        }

    def log_decay(self) -> jax.Array | None:
        return self.layout.log_decay(self.x.a)

    def pairs(self) -> jax.Array | None:
        """Returns what the output of each token of a chunk reads of each value [B, N, CHUNKS, C, C]; sets `fades`.

        Of Hopper's walks it returns None, and sets `sums` too.
        """
        if self.hopper:
            shapes = fade_shapes(*self.heads, self.layout.chunks, self.common["T"])
            self.sums, *self.fades = triton_launch(
                fades_kernel,
                self.a,
                self.layout.runs,
                out_shape=(jax.ShapeDtypeStruct(shapes[0].shape, jnp.int32), *shapes),
                grid=(math.prod(self.heads) * self.layout.chunks,),
                num_warps=1,
                **{name: self.common[name] for name in ("T", "N", "CHUNKS", "BLOCK_C")},
            )
            return None
        common = {name: value for name, value in self.common.items() if name not in ("Hv", "BLOCK_V")}
        each = math.gcd(self.cfg.heads or 1, *(self.heads[1] // y.shape[2] for y in (self.x.q, self.x.k)))
        shape = (*self.heads, self.layout.chunks, self.chunk, self.chunk)
        weights, *self.fades = triton_launch(
            scalar_pairs_kernel,
            self.x.q,
            self.x.k,
            self.a,
            self.w,
            self.layout.runs,
            self.layout.table,
            out_shape=(jax.ShapeDtypeStruct(shape, self.x.v.dtype), *fade_shapes(*shape[:3], self.common["T"])),
            grid=(math.prod(shape[:3]) // each,),
            num_warps=4,
            HEADS=each,
            KQ=self.x.q.shape[2],
            KK=self.x.k.shape[2],
            **common,
        )
        return weights

    def shapes(self, x: jax.Array, reverse: bool) -> dict[str, Any]:
        """Returns the shapes of all that a walk over `x` can return."""
        parts, (B, T) = (*self.heads, self.splits), x.shape[:2]
        shapes = {
            "out": ((B, T, self.heads[1], x.shape[-1]), self.wide if reverse else x.dtype),
            "states": ((*self.heads, self.layout.chunks, *self.states[3:]), x.dtype),
            "exits": (self.states, jnp.float32),
            "added": ((*parts, *self.states[3:]), jnp.float32),
            "fade": ((*parts, self.rows), jnp.float32),
        }
        return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}

    def walk(
        self,
        x: Any,
        entries: Any,
        wanted: tuple[str, ...],
        reverse: bool = False,
        starts: Any = None,
        weights: Any = None,
    ) -> dict[str, jax.Array]:
        """Returns what is `wanted` of a walk over the rows: "out", "states", "exits", or "added" and "fade" of its parts.

        Args:
          x: values, or cotangents of the outputs if `reverse`.
          starts: states before each part.
          weights: what `pairs` returns, for "out".
        """
        if self.hopper:
            return gluon.walk(self, x, entries, wanted, reverse, starts)
        read, write = (self.writes, self.reads) if reverse else (self.reads, self.writes)
        parts, shapes = (*self.heads, self.splits), self.shapes(x, reverse)
        unused: dict[str, Any] = {f"{name}_ptr": None for name in shapes if name not in wanted}
        reads = "out" in wanted
        outputs = triton_launch(
            scalar_walk_kernel,
            read if reads else None,
            write,
            x,
            weights,
            *self.fades,
            self.w,
            self.skip if reads else None,
            self.layout.runs,
            self.layout.table,
            entries,
            starts,
            out_shape=tuple(shape for name, shape in shapes.items() if name in wanted),
            grid=(math.prod(parts), self.columns),
            num_warps=self.cfg.num_warps or 4,
            num_stages=self.cfg.num_stages or 3,
            work=self.work if reads else None,
            KR=read.shape[2],
            KK=write.shape[2],
            KX=x.shape[2],
            G=self.states[1],
            SPLITS=self.splits,
            REVERSE=reverse,
            **self.common,
            **unused,
        )
        return dict(zip([name for name in shapes if name in wanted], outputs, strict=True))

    def from_starts(
        self, x: Any, entries: Any, wanted: tuple[str, ...], reverse: bool = False, weights: Any = None
    ) -> Any:
        """Returns `walk` with every part of a row from the state that is exact."""
        if self.splits == 1:
            return self.walk(x, entries, wanted, reverse, None, weights)
        maps = self.walk(x, entries, ("added", "fade"), reverse)
        size = math.prod(self.states[3:])
        (starts,) = triton_launch(
            scan_join_kernel,
            maps["added"],
            maps["fade"],
            out_shape=(jax.ShapeDtypeStruct(maps["added"].shape, jnp.float32),),
            grid=(math.prod(self.heads), triton.cdiv(size, 1024)),
            num_warps=4,
            SPLITS=self.splits,
            SIZE=size,
            ROWS=self.rows,
            REVERSE=reverse,
            BLOCK=1024,
        )
        return self.walk(x, entries, wanted, reverse, starts, weights)

    def gradients(self, d_out: Any, states: Any, d_states: Any, parts_of_keys: bool = False) -> dict[str, Any]:
        """Returns the gradients of q, k, a, w and skip, None for what is None.

        They follow from the states before chunks and the gradients of those after them.

        Args:
          parts_of_keys: return that of k as float32 [B, T, N / heads of a program, H], before the sum over programs.
        """
        x, (B, N, chunks), T = self.x, (*self.heads, self.layout.chunks), d_out.shape[1]
        # Keys and queries that heads share are summed over the heads of a program, then over programs.
        shared = [N // y.shape[2] for y in (x.q, x.k) if y.shape[2] < N]
        each = math.gcd(self.cfg.heads or 1, *shared) if shared else 1

        def of(y: jax.Array, parts_only: bool = False) -> Any:
            parts = N if y.shape[2] == N else N // each
            rounded = parts == y.shape[2] and not parts_only
            return jax.ShapeDtypeStruct((B, T, parts, y.shape[3]), y.dtype if rounded else jnp.float32)

        per_token = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
        tokens = {name: per_token for name in ("a", "w") if getattr(x, name) is not None}
        skips = {} if x.skip is None else {"skip": jax.ShapeDtypeStruct((B, N, chunks), jnp.float32)}
        common = self.common | {"PRECISION": precisions(x.q.dtype)[1], "HEADS": each}

        def launch(
            kernel: Any,
            shapes: dict[str, Any],
            names: tuple[str, ...],
            num_warps: int | None,
            *states: Any,
            **more: Any,
        ) -> dict[str, jax.Array]:
            unused: dict[str, Any] = {f"d{name}_ptr": None for name in names if name not in shapes}
            results = triton_launch(
                kernel,
                x.q,
                x.k,
                x.v,
                self.a,
                self.w,
                *self.fades,
                self.layout.runs,
                self.layout.table,
                d_out,
                *states,
                out_shape=tuple(shapes.values()),
                grid=(chunks * B * (N // each),),
                KQ=x.q.shape[2],
                KK=x.k.shape[2],
                KV=x.v.shape[2],
                **common | gradient_tiles(self.cfg, x.q.dtype, x.v.shape[-1], num_warps),
                **unused | more,
            )
            return dict(zip(shapes, results, strict=True))

        # Without sums over heads a program of queries fits half of the warps.
        few = max(4, (self.cfg.backward_num_warps or 8) // 2) if each == 1 and reads_diagonals(x.q.dtype) else None
        queries = launch(scalar_dq_kernel, {"q": of(x.q)} | tokens | skips, ("a", "w", "skip"), few, states)
        before = None if x.a is None else states
        more = {"DIAGONAL": reads_diagonals(x.q.dtype)}
        keys = launch(
            scalar_dk_kernel, {"k": of(x.k, parts_of_keys)} | tokens, ("a", "w"), None, before, d_states, **more
        )
        d: dict[str, Any] = dict.fromkeys(("a", "w", "skip"))
        d |= {"q": heads_of(queries["q"], x.q.shape[2])}
        d |= {"k": keys["k"] if parts_of_keys else heads_of(keys["k"], x.k.shape[2])}
        d |= {name: self.layout.of_tokens(queries[name] + keys[name]) for name in tokens}
        return d if x.skip is None else d | {"skip": jnp.sum(queries["skip"], axis=(0, 2))}


def forward(run: Launches) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, N, Hv] in the dtype of v, final states [B, G, N, H, Hv])."""
    x, weights = run.x, run.pairs()
    found = run.from_starts(x.v, x.entries, ("out", "exits"), weights=weights)
    return found["out"], run.layout.exits(found["exits"], x.entries)


def backward(run: Launches, d_out: jax.Array, d_exits: jax.Array) -> dict[str, Any]:
    """Returns the gradients by the names of `Tokens`, None for what is None; of a, w, skip, bonus and entries in float32."""
    x, d_exits = run.x, d_exits.astype(jnp.float32)
    weights = run.pairs()
    states = run.from_starts(x.v, x.entries, ("states",))["states"]
    of_end = run.from_starts(d_out, d_exits, ("out", "states", "exits"), reverse=True, weights=weights)
    entries = None if x.entries is None else run.layout.exits(of_end["exits"], d_exits)
    found = run.gradients(d_out, states, of_end["states"])
    return found | {"v": heads_of(of_end["out"], x.v.shape[2]), "entries": entries}


def tiles(call: Call, chunk: int, block_v: int, num_warps: int, heads: int, num_stages: int) -> ChunkConfig:
    """Returns the tiles of a call: these sizes, if it has as many tokens, columns and heads, and what follows from them."""
    d = call.dims
    wide = call.dtype == "float32"
    chunk, block_v = min(chunk, longest_chunk(call)), columns(block_v, d["Hv"])
    programs = d["B"] * d["N"] * -(-d["Hv"] // block_v)
    chunks = (d["T"] + call.num_states * (chunk - 1)) // chunk
    splits = max(1, min(-(-PROGRAMS_EACH * MULTIPROCESSORS // programs), chunks // LEAST_CHUNKS))
    if programs >= ENOUGH * MULTIPROCESSORS:
        splits = 1
    shared = d["N"] // d["K"]  # heads of a group: enough of a backward's programs are left
    while heads > 1 and (shared % heads or d["B"] * chunks * d["N"] // heads < PROGRAMS_EACH * MULTIPROCESSORS):
        heads //= 2
    backward_num_warps = 8 if wide or d["H"] > 64 else 4
    return ChunkConfig(chunk, None, block_v, num_warps, num_stages, splits, heads, backward_num_warps)


def heuristic(call: Call, platform: str) -> ChunkConfig:
    """Returns the default tiles of a call."""
    if call.dtype == "float32":  # small tiles fit the registers
        return tiles(call, 16, 16, 8, 8, 1)
    return tiles(call, 64, 128, 8, 8, 3) if call.dims["Hv"] > 64 else tiles(call, 64, 64, 4, 8, 3)


def on_hopper(call: Call, cfg: ChunkConfig) -> ChunkConfig:
    """Returns tiles of a call without weights and `skip`, with Hopper's walks where they have it, and as many parts of a row as
    make at most one program for each multiprocessor; other GPUs have these parts, too."""
    d = call.dims
    whole = call.num_states == 1 and cfg.chunk == gluon.CHUNK and d["T"] % gluon.CHUNK == 0 and d["K"] == d["N"]
    if not whole or not d["H"] == d["Hv"] == gluon.WIDTH or call.dtype == "float32":
        return cfg
    parts = min(MULTIPROCESSORS // (d["B"] * d["N"]), d["T"] // gluon.CHUNK // LEAST_CHUNKS)
    return replace(cfg, hopper_walks=True, splits=max(1, parts))


def candidates(call: Call) -> list[ChunkConfig]:
    """Returns the configurations to tune over."""
    if call.dtype == "float32":
        return [heuristic(call, "cuda")]
    best = heuristic(call, "cuda")
    found = [
        tiles(call, chunk, block_v, num_warps, heads, num_stages)
        for chunk in (32, 64)
        for block_v, num_warps in ((32, 4), (64, 4), (64, 8), (128, 8))
        for heads in (8, 16)
        for num_stages in (2, 3)
    ]
    found += [replace(best, splits=splits) for splits in (max(1, (best.splits or 1) // 2), 2 * (best.splits or 1))]
    found += [replace(best, backward_num_warps=num_warps) for num_warps in (4, 8)]
    return list(dict.fromkeys([best, *found]))
