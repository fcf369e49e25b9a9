"""Calls of the kernels in `triton_delta.py`: and what a backward computes again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import triton

from kernels.engines.scan import gluon_delta_calls as gluon
from kernels.engines.scan import gluon_walk_calls as hopper
from kernels.engines.scan import triton_scalar_calls as scalar
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.delta_tokens import Tokens
from kernels.engines.scan.layout import layout
from kernels.engines.scan.triton_calls import (
    LEAST,
    check_chunk,
    columns_here,
    fade_shapes,
    gradient_tiles,
    heads_of,
    precisions,
    reads_diagonals,
)
from kernels.engines.scan.triton_delta import (
    delta_bwd_kernel,
    delta_pairs_kernel,
    delta_reverse_kernel,
    delta_walk_kernel,
)
from kernels.engines.scan.triton_delta_both import delta_both_kernel
from kernels.engines.scan.triton_delta_kept import KEPT, KEPT_OF_PARTS, KEPT_OF_WALK, keeps_parts, parts_of
from kernels.engines.scan.triton_delta_tiles import NARROW, WIDE
from kernels.engines.scan.triton_join import delta_join_kernel
from kernels.framework.measured import power_of_two
from kernels.framework.target import MULTIPROCESSORS
from kernels.framework.work import Work
from kernels.toolchains.triton import triton_launch


class Launches:
    """The launches of one call."""

    names_kept: tuple[str, ...] = KEPT

    def __init__(self, x: Tokens, num_states: int, scale: float, cfg: ChunkConfig, work: Work | None):
        self.x, self.cfg, self.work = x, cfg, work
        self.fades: Any = ()  # see `scalar.Launches`
        (B, T, K, H), (N, Hv), chunk = x.q.shape, x.v.shape[2:], check_chunk(cfg.chunk)
        self.layout = layout(B, T, chunk, x.segment_ids, num_states)
        self.beta, self.a = self.layout.per_token(x.beta), self.log_decay()
        chunks = self.layout.chunks
        self.chunks, self.states = (B, N, chunks), (B, num_states, N, H, Hv)
        block_v = columns_here(cfg.block_v, Hv)
        self.splits = parts_of(chunks, cfg)
        self.tiles = triton.cdiv(Hv, block_v)
        self.walks = (B * N * self.splits, self.tiles)
        self.common: dict[str, Any] = {
            "T": T,
            "N": N,
            "K": K,
            "H": H,
            "CHUNKS": chunks,
            "SCALE": scale,
            "PRECISION": precisions(x.q.dtype)[0],
            "BLOCK_C": chunk,
            "BLOCK_H": max(LEAST, power_of_two(H)),
        }
        self.columns: dict[str, Any] = {"Hv": Hv, "BLOCK_V": block_v}
        # What reads and writes a state: queries, keys, and keys that write where they differ from those that read.
        self.reads, self.keeps, self.writes = x.q, x.k, None
        self.hopper_walks = bool(cfg.hopper_walks) and hopper.fits(x, chunk, num_states)
        self.at_once = bool(cfg.at_once) and self.splits == 1 and not self.hopper_walks
        self.in_one = bool(cfg.in_one) and gluon.fits(x, chunk, num_states)
        self.scale, self.stages = scale, {"num_warps": cfg.num_warps or 4, "num_stages": cfg.num_stages or 3}

    def log_decay(self) -> jax.Array | None:
        return self.layout.log_decay(self.x.a)

    def of_chunks(self, *dims: int) -> Any:
        return jax.ShapeDtypeStruct((*self.chunks, *dims), self.x.k.dtype)

    def pairs(self) -> tuple[jax.Array, jax.Array]:
        """Returns (what outputs read of writes, the inverses), both [B, N, CHUNKS, C, C]; sets `fades`."""
        x, C = self.x, self.common["BLOCK_C"]
        scratch = jax.ShapeDtypeStruct((*self.chunks, C, 16), jnp.float32)
        weights, solve, *self.fades, _ = triton_launch(
            delta_pairs_kernel,
            x.q,
            x.k,
            self.beta,
            self.a,
            self.layout.runs,
            self.layout.table,
            out_shape=(
                self.of_chunks(C, C),
                self.of_chunks(C, C),
                *fade_shapes(*self.chunks, self.common["T"]),
                scratch,
            ),
            grid=(math.prod(self.chunks),),
            num_warps=4,
            **self.common,
        )
        return weights, solve

    def pairs_of(self, kept: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Returns `pairs`, as a forward has kept them; sets `fades`."""
        weights, solve, *self.fades = (kept[name] for name in KEPT)
        return weights, solve

    def shapes(self) -> dict[str, Any]:
        """Returns the shape and dtype of what walks write, by name."""
        x, (B, _, N, H, Hv) = self.x, self.states
        state, tokens = jax.ShapeDtypeStruct(self.states, jnp.float32), jax.ShapeDtypeStruct(x.v.shape, x.k.dtype)
        width = self.tiles * self.columns["BLOCK_V"] + H
        return {
            "out": jax.ShapeDtypeStruct(x.v.shape, x.v.dtype),
            "written": tokens,
            "states": self.of_chunks(H, Hv),
            "exits": state,
            "maps": jax.ShapeDtypeStruct((B, N, self.splits, H, width), jnp.float32),
            "du": tokens,
            "d_states": self.of_chunks(H, Hv),
            "d_entries": state,
            "added": jax.ShapeDtypeStruct((B, N, self.splits, H, Hv), jnp.float32),
        }

    def walk(self, weights: Any, solve: Any, wanted: tuple[str, ...], starts: Any = None) -> dict[str, jax.Array]:
        """Returns what is `wanted` of a walk over the rows: "out", "written", "states", "exits", or "maps" of its parts."""
        if self.hopper_walks and "maps" not in wanted:
            return hopper.walk(self, weights, solve, wanted, starts)
        x, every = self.x, self.shapes()
        shapes = {name: every[name] for name in ("out", "written", "states", "exits", "maps")}
        unused: dict[str, Any] = {f"{name}_ptr": None for name in shapes if name not in wanted}
        reads = "out" in wanted
        units = triton.cdiv(self.states[3], self.columns["BLOCK_V"]) if "maps" in wanted else 0
        outputs = triton_launch(
            delta_walk_kernel,
            self.reads if reads else None,
            self.keeps,
            self.writes,
            x.v,
            weights if reads else None,
            solve,
            self.beta,
            *self.fades,
            self.layout.runs,
            self.layout.table,
            x.entries,
            starts,
            out_shape=tuple(shape for name, shape in shapes.items() if name in wanted),
            grid=(self.walks[0], self.tiles + units),
            work=self.work if reads else None,
            G=self.states[1],
            SPLITS=self.splits,
            COLUMNS=self.tiles,
            **self.walked(),
            **self.columns,
            **self.stages_of(reads),
            **unused,
        )
        return dict(zip([name for name in shapes if name in wanted], outputs, strict=True))

    def maps(self, solve: Any) -> jax.Array | None:
        """Returns the maps of the parts of the rows, None for one part."""
        own = self.columns, self.tiles
        narrow = self.writes is None and self.cfg.block_v == own[0]["BLOCK_V"] == NARROW
        if narrow and self.states[4] % WIDE == 0 and self.x.k.dtype != jnp.float32:
            self.columns, self.tiles = own[0] | {"BLOCK_V": WIDE}, self.states[4] // WIDE
        maps = None if self.splits == 1 else self.walk(None, solve, ("maps",))["maps"]
        self.columns, self.tiles = own
        return maps

    def starts(self, maps: Any, added: Any = None) -> jax.Array | None:
        """Returns the state before each part, or, given what each part adds to it, the gradient after each."""
        if maps is None:
            return None
        (B, _, N, H, Hv), block = self.states, self.columns["BLOCK_V"]
        (starts,) = triton_launch(
            delta_join_kernel,
            maps,
            added,
            out_shape=(jax.ShapeDtypeStruct((B, N, self.splits, H, Hv), jnp.float32),),
            grid=(B * N, self.tiles),
            num_warps=4,
            num_stages=1,
            H=H,
            Hv=Hv,
            WIDTH=self.tiles * block,
            SPLITS=self.splits,
            REVERSE=added is not None,
            PRECISION="tf32x3",
            BLOCK_H=self.common["BLOCK_H"],
            BLOCK_V=block,
            BLOCK_K=LEAST,
        )
        return starts

    def parts(self, solve: Any, kept: Any = None) -> tuple[Any, Any]:
        """Returns (`maps`, `starts`), as a forward has kept them if it has."""
        if kept is not None and KEPT_OF_PARTS[0] in kept:
            return kept[KEPT_OF_PARTS[0]], kept[KEPT_OF_PARTS[1]]
        maps = self.maps(solve)
        return maps, self.starts(maps)

    def reverse(self, weights: Any, solve: Any, d_out: Any, d_exits: Any, wanted: tuple[str, ...], starts: Any) -> Any:
        """Returns what is `wanted` of a walk from the end: "du", "d_states", "d_entries", or what parts have "added"."""
        if self.hopper_walks:
            return hopper.reverse(self, weights, solve, d_out, d_exits, wanted, starts)
        every = self.shapes()
        shapes = {name: every[name] for name in ("du", "d_states", "d_entries", "added")}
        unused: dict[str, Any] = {f"{name}_ptr": None for name in shapes if name not in wanted}
        outputs = triton_launch(
            delta_reverse_kernel,
            self.reads,
            self.keeps,
            self.writes,
            weights,
            solve,
            self.beta,
            *self.fades,
            self.layout.runs,
            self.layout.table,
            d_out,
            d_exits,
            starts,
            out_shape=tuple(shape for name, shape in shapes.items() if name in wanted),
            grid=self.walks,
            work=self.work,
            G=self.states[1],
            SPLITS=self.splits,
            **self.walked(),
            **self.columns,
            **self.stages_of(True),
            **unused,
        )
        return dict(zip([name for name in shapes if name in wanted], outputs, strict=True))

    def both_walks(self, weights: Any, solve: Any, d_out: Any, d_exits: Any) -> dict[str, jax.Array]:
        """Returns what a backward takes of walks of rows that are not split, in one launch; of two stages a program for each
        direction fits a multiprocessor."""
        every = self.shapes()
        shapes = {name: every[name] for name in ("written", "states", "du", "d_states", "d_entries")}
        outputs = triton_launch(
            delta_both_kernel,
            self.reads,
            self.keeps,
            self.writes,
            self.x.v,
            weights,
            solve,
            self.beta,
            *self.fades,
            self.layout.runs,
            self.layout.table,
            self.x.entries,
            d_out,
            d_exits,
            out_shape=tuple(shapes.values()),
            grid=(*self.walks, 2),
            work=self.work,
            G=self.states[1],
            COLUMNS=self.tiles,
            **self.walked(),
            **self.columns,
            num_warps=self.stages["num_warps"],
            num_stages=min(2, self.stages["num_stages"]),
        )
        return dict(zip(shapes, outputs, strict=True))

    def stages_of(self, long: bool) -> dict[str, Any]:
        """Returns warps and stages of a walk. With two stages, two programs of a `long` walk fit on a multiprocessor; that
        pays where rows have many parts and decays are of heads: few_heads_32k on an H200 took 326 us for 436 from the end, and
        181 for 201 with outputs, but 166 for 133 without."""
        two = long and self.splits > 1 and self.writes is None and math.prod(self.walks) > MULTIPROCESSORS
        return self.stages | ({"num_stages": min(2, self.stages["num_stages"])} if two else {})

    def walked(self) -> dict[str, Any]:
        """Returns the constants of a walk."""
        return self.common | {"K": self.keeps.shape[2]}

    def gradients(self, d_out: Any, walked: dict[str, Any], of_end: dict[str, Any]) -> dict[str, Any]:
        """Returns the gradients of q, k, v, beta and a, None for what is None.

        Args:
          walked: "written" and "states" of `walk`.
          of_end: "du" and "d_states" of `reverse`.
        """
        if self.in_one:
            return gluon.gradients(self, d_out, walked, of_end)
        x, cfg, (B, N, chunks), (T, K) = self.x, self.cfg, self.chunks, self.x.q.shape[1:3]
        read = scalar.Tokens(x.q, x.k, walked["written"], x.a, None, None, x.segment_ids, None)
        of_reads = scalar.Launches(read, N, self.states[1], self.scale, cfg, None, self.fades)
        d = of_reads.gradients(d_out, walked["states"], of_end["d_states"], parts_of_keys=True)
        each = math.gcd(cfg.heads or 1, N // K)
        per_token = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
        shapes = {
            "k": jax.ShapeDtypeStruct(d["k"].shape, x.k.dtype if d["k"].shape[2] == K else jnp.float32),
            "v": jax.ShapeDtypeStruct(x.v.shape, x.v.dtype),
            "beta": per_token,
        } | ({} if x.a is None else {"a": per_token})
        unused: dict[str, Any] = {"da_ptr": None} if x.a is None else {}
        results = triton_launch(
            delta_bwd_kernel,
            x.k,
            x.v,
            self.beta,
            self.a,
            self.fades[0],
            self.layout.runs,
            self.layout.table,
            walked["written"],
            of_end["du"],
            walked["states"],
            d["k"],
            out_shape=tuple(shapes.values()),
            grid=(chunks * B * (N // each),),
            HEADS=each,
            DIAGONAL=reads_diagonals(x.q.dtype),
            **{name: value for name, value in self.common.items() if name not in ("SCALE", "PRECISION")},
            PRECISION=precisions(x.q.dtype)[1],
            **self.columns | gradient_tiles(cfg, x.q.dtype, x.v.shape[-1]),
            **unused,
        )
        through: dict[str, Any] = dict(zip(shapes, results, strict=True))
        return {
            "q": d["q"],
            "k": heads_of(through["k"], K),
            "v": through["v"],
            "beta": self.layout.of_tokens(through["beta"]),
            "a": None if x.a is None else d["a"] + self.layout.of_tokens(through["a"]),
        }


def forward(run: Launches) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, T, N, Hv], final states [B, G, N, H, Hv])."""
    return keeping(run, differentiated=False)[0]


def keeping(run: Launches, differentiated: bool = True) -> tuple[tuple[jax.Array, jax.Array], dict[str, jax.Array]]:
    """Returns (what `forward` does, what `backward` takes of it: see `triton_delta_kept.kept_of`)."""
    pairs = run.pairs()
    parts = run.parts(pairs[1])
    of_walk = KEPT_OF_WALK if differentiated and run.cfg.keeps and run.cfg.keeps_states else ()
    walked = run.walk(*pairs, ("out", "exits", *of_walk), parts[1])
    outputs = walked["out"], run.layout.exits(walked["exits"], run.x.entries)
    kept = dict(zip(run.names_kept, (*pairs, *run.fades), strict=False)) | {name: walked[name] for name in of_walk}
    if keeps_parts(run.chunks[-1], run.states[-1], run.cfg):
        kept |= dict(zip(KEPT_OF_PARTS, parts, strict=True))
    return outputs, kept


def backward(run: Launches, d_out: jax.Array, d_exits: jax.Array, kept: Any = None) -> dict[str, Any]:
    """Returns the gradients by the names of `Tokens`, None for what is None; of beta, a and entries in float32.

    Args:
      kept: what `keeping` kept, or None.
    """
    d_exits = d_exits.astype(jnp.float32)
    weights, solve = run.pairs() if kept is None else run.pairs_of(kept)
    has_states = kept is not None and KEPT_OF_WALK[0] in kept
    if run.at_once and not has_states:
        walked = of_end = run.both_walks(weights, solve, d_out, d_exits)
    else:
        maps, starts = run.parts(solve, kept)
        walked = kept if has_states else run.walk(None, solve, KEPT_OF_WALK, starts)
        if maps is not None:
            added = run.reverse(weights, solve, d_out, d_exits, ("added",), None)["added"]
            starts = run.starts(maps, added)
        of_end = run.reverse(weights, solve, d_out, d_exits, ("du", "d_states", "d_entries"), starts)
    entries = None if run.x.entries is None else run.layout.exits(of_end["d_entries"], d_exits)
    return run.gradients(d_out, walked, of_end) | {"entries": entries}
