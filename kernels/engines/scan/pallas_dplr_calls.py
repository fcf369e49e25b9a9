"""Calls of the kernels in `pallas_dplr.py`: heads in packs, and what a backward takes of its forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kernels.engines.scan import pallas_dplr as kernels
from kernels.engines.scan.chunks import ChunkConfig
from kernels.engines.scan.delta_tokens import DplrTokens, Tokens
from kernels.engines.scan.pallas_channel_calls import with_begins
from kernels.engines.scan.pallas_delta_calls import Launches, group_of, too_large, widened
from kernels.engines.scan.pallas_delta_parts import CHUNK, LANES, SIDE_BY_SIDE, in_words
from kernels.engines.scan.pallas_visits import most_visits
from kernels.framework.work import Work


def pack_of(H: int, Hv: int) -> int:
    """Returns how many heads lie side by side in the lanes: two if their channels take half of them."""
    return 2 if 2 * max(H, Hv) <= LANES else 1


def packs_of(count: int, pack: int) -> int:
    """Returns the packs of a program: of two heads so many that their inverses are solved side by side, or next to it."""
    if pack == 1:
        return group_of(count, count)[0]
    most = SIDE_BY_SIDE // pack
    return most if count % most == 0 else max(n for n in range(1, 2 * most + 1) if count % n == 0)


def packed(x: jax.Array, pack: int) -> jax.Array:
    """Returns [B, T, N, D] as [B, T, packs, LANES], or as it is in packs of one; with a head of zeros if N is odd."""
    if pack == 1:
        return x
    B, T, N, D = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -N % pack), (0, LANES // pack - D)))
    return x.reshape(B, T, -1, LANES)


def packed_states(x: jax.Array, pack: int) -> jax.Array:
    """Returns [B, G, N, H, Hv] as [B, G, packs, LANES, LANES], the states of a pack on its diagonal."""
    if pack == 1:
        return x
    B, G, N, H, Hv = x.shape
    width = LANES // pack
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -N % pack), (0, width - H), (0, width - Hv)))
    x = x.reshape(B, G, -1, pack, width, 1, width)
    x = jnp.where(jnp.eye(pack, dtype=bool)[:, None, :, None], x, 0)
    return x.reshape(B, G, -1, LANES, LANES)


class DplrLaunches(Launches):
    """The launches of one call. To what it inherits a head is a pack of them."""

    def __init__(self, x: DplrTokens, num_states: int, scale: float, cfg: ChunkConfig, work: Work | None) -> None:
        (_, _, self.N, H), Hv = x.q.shape, x.v.shape[-1]
        self.pack = pack = pack_of(H, Hv)
        self.packs = {name: packed(getattr(x, name), pack) for name in ("w", "a", "b")}
        entries = None if x.entries is None else packed_states(x.entries, pack)
        beta: Any = None
        q, k, v = (packed(y, pack) for y in (x.q, x.k, x.v))
        super().__init__(Tokens(q, k, v, beta, None, x.segment_ids, entries), num_states, scale, cfg, work)
        self.widths, self.tokens_last = (H, Hv), pack > 1
        q, k, v = (self.laid(y) for y in self.x[:3])
        self.x, self.gates = self.x._replace(q=q, k=k, v=v), {name: self.laid(y) for name, y in self.gates.items()}

    def group(self, K: int, N: int) -> tuple[int, int, int]:
        return (packs_of(N, self.pack),) * 2 + (1,)

    def gates_of(self, x: Tokens) -> dict[str, jax.Array]:
        return {name: self.channels(y) for name, y in self.packs.items()}

    def channels(self, x: jax.Array) -> jax.Array:
        if self.pack == 1:
            return super().channels(x)
        return jnp.pad(x, ((0, 0), (0, max(0, CHUNK - x.shape[1])), (0, 0), (0, 0)))

    def laid(self, x: jax.Array) -> jax.Array:
        """Returns what `channels` does as the kernels read it: packs of several heads with tokens last, as XLA stores them."""
        return jnp.transpose(x, (0, 2, 3, 1)) if self.tokens_last else x

    def marked(self, valid: jax.Array) -> jax.Array:
        return with_begins(valid, self.begins)

    def buffers(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Returns scratch of packs by name: those of log decays are summed in float32, others are as they are read."""
        scratch = self.scratch({name: "values" if name in ("v", "dv", "d_out", "out") else "keys" for name in names})
        scratch = {name: y for name, y in scratch.items() if not (self.tokens_last and name.endswith("_words"))}
        for name in names:
            array = name.removeprefix("d")
            if array in self.gates:
                scratch[name] = (scratch[name][0], jnp.float32 if array == "w" else self.gates[array].dtype)
        return scratch

    def shapes(self) -> dict[str, Any]:
        (B, packs, _, _), dtype = self.shape, self.x.k.dtype
        return super().shapes() | {"solve": ((B, self.count, packs, self.pack * CHUNK, CHUNK), dtype)}

    def walk(self, wanted: tuple[str, ...]) -> dict[str, jax.Array]:
        """Returns what is `wanted` of a walk: "out", "exits", "states" and "solve", see `dplr_walk_kernel`."""
        p, reads, dtype = self.plan, "out" in wanted, self.x.k.dtype
        scratch = self.buffers((*kernels.ARRAYS, "out") if reads else kernels.ARRAYS[1:])
        squares = p.keys, self.pack * CHUNK, CHUNK
        scratch |= {"pairs": (squares, jnp.float32), "solve": (squares, dtype)}
        H, rows, side_by_side = self.shape[2], (1 + reads) * CHUNK, self.pack * CHUNK
        scratch |= dict.fromkeys(("ak", "qb", "qk")[: 1 + 2 * reads], ((p.keys, CHUNK, side_by_side), dtype))
        scratch |= {"readers": ((p.keys, rows, H), dtype), "writers": ((p.keys, 2 * CHUNK, H), dtype)}
        scratch["whole"] = (p.keys, H, CHUNK), jnp.float32
        inputs = self.inputs(q=self.x.q if reads else None, entries=self.widened_entries())
        shapes = self.shapes()
        return self.launch(kernels.dplr_walk_kernel, inputs, {name: shapes[name] for name in wanted}, scratch, False)

    def reverse(self, found: dict[str, Any], d_out: jax.Array, d_exits: jax.Array) -> dict[str, jax.Array]:
        """Returns the gradients, as the kernels have them, given "states" and "solve" of `walk`."""
        (B, N, H, Hv), x = self.shape, self.x
        inputs = self.inputs(q=x.q, d_out=self.laid(d_out), d_exits=widened(d_exits, (-2, -1)), **found)
        arrays = {"q": x.q, "k": x.k, "v": x.v} | self.gates
        outputs = {f"d{name}": (arrays[name].shape, arrays[name].dtype) for name in kernels.ARRAYS}
        outputs["d_entries"] = ((B, self.G, N, H, Hv), jnp.float32)
        scratch = self.buffers((*kernels.ARRAYS, "d_out", *(f"d{name}" for name in kernels.ARRAYS)))
        return self.launch(kernels.dplr_reverse_kernel, inputs, outputs, scratch, True)

    def tokens(self, x: jax.Array, width: int) -> jax.Array:
        x = (jnp.transpose(x, (0, 3, 1, 2)) if self.tokens_last else x)[:, : self.T]
        return x.reshape(*x.shape[:2], -1, x.shape[-1] // self.pack)[:, :, : self.N, :width]

    def states(self, x: jax.Array, entries: jax.Array | None) -> jax.Array:
        (H, Hv), pack = self.widths, self.pack
        x = self.layout.exits(x, None if entries is None else widened(entries, (-2, -1)))
        if pack > 1:
            x = x.reshape(*x.shape[:-2], pack, LANES // pack, pack, LANES // pack)
            x = jnp.stack([x[..., j, :, j, :] for j in range(pack)], axis=3)
            x = x.reshape(*x.shape[:2], -1, *x.shape[-2:])
        return x[:, :, : self.N, :H, :Hv]

    def _kept(self) -> tuple[str, ...]:
        return "states", "solve"

    def backward(self, d_out: jax.Array, d_exits: jax.Array, saved: Mapping[str, jax.Array]) -> dict[str, Any]:
        return super().backward(packed(d_out, self.pack), packed_states(d_exits, self.pack), saved)

    def gradients(self, d: dict[str, jax.Array]) -> dict[str, Any]:
        H, Hv = self.widths
        return {name: self.tokens(d[f"d{name}"], Hv if name == "v" else H) for name in kernels.ARRAYS}


def _sizes(d: Mapping[str, int]) -> tuple[int, int, int, int]:
    """Returns (heads of a pack, packs, their channels of keys and of values) of a call."""
    pack = pack_of(d["H"], d["Hv"])
    H, Hv = (-(-d[name] * pack // LANES) * LANES for name in ("H", "Hv"))
    return pack, -(-d["N"] // pack), H, Hv


def kept_of(dims: Mapping[str, int], num_states: int, dtype: str) -> dict[str, Any]:
    """Returns what `Launches.keeping` keeps of a call: the state before each visit of a row, and the inverses."""
    pack, packs, H, Hv = _sizes(dims)
    dtype = dtype if pack > 1 or in_words(dtype, packs) else "float32"
    of = dims["B"], most_visits(dims["T"], num_states, CHUNK), packs
    squares = {"states": (H, Hv), "solve": (pack * CHUNK, CHUNK)}
    return {name: jax.ShapeDtypeStruct((*of, *shape), dtype) for name, shape in squares.items()}


def refused(dims: Mapping[str, int], num_states: int, dtype: str) -> str | None:
    """Returns why the kernels cannot run a call of these sizes."""
    pack, packs, H, Hv = _sizes(dims)
    heads = packs_of(packs, pack)
    size = 4 if dtype == "float32" or (pack == 1 and packs % 2) else 2
    # Of the backward: blocks of tokens twice, and of decays in float32; heads of both; states, their gradients, and inverses.
    of_tokens = CHUNK * heads * (H * (10 * 3 * size + 2 * 8) + Hv * 3 * 3 * size)
    of_states = heads * (H * Hv * (2 * size + 5 * 4) + pack * CHUNK * CHUNK * 2 * size)
    return too_large(dims, num_states, heads * pack, of_tokens + of_states)
