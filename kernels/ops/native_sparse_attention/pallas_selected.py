"""The selected branch on TPUs: attention of tiles of neighbouring queries over the union of their blocks, forward and backward.

A step of the grid has one resident tile and a list of others in scalar memory. It copies those from main memory into a ring in
VMEM, ahead of the computation and on into the next step's list, so that no step waits for its first copies. Forward and dq
have queries resident, dk and dv keys; each row is masked to its own blocks by a table of their first tokens. Tiles of logits
are [keys, rows], with what there is once a row along lanes. Sums are in the order of the lists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.engines.attention.pallas_calls import BEYOND
from kernels.engines.attention.pallas_kernels import dot
from kernels.engines.attention.pallas_passes import VMEM_BYTES
from kernels.framework.work import Work
from kernels.ops.native_sparse_attention import pallas_lists
from kernels.ops.native_sparse_attention.pallas_lists import (
    BEGINS,
    DELTA,
    ENDS,
    HEADER,
    LENGTH,
    LSE,
    OFFSET,
    POSITION,
    Selected,
    Sizes,
)
from kernels.toolchains.pallas import pallas_launch


class _Copies:
    """The copies of a step: its list and the next one's, `pieces` tiles at a time into a ring of `buffers`.

    `ahead` holds two integers that steps pass on: how many times the ring was filled before this list, and how many copies of
    this list have begun.
    """

    def __init__(self, refs: dict[str, Any], streamed: tuple[str, ...], pieces: int, tiles: int):
        self.refs, self.pieces = refs, pieces
        self.rings = [(refs[name], refs[f"{name}_ring"]) for name in streamed]
        self.buffers = self.rings[0][1].shape[0]
        self.begin = pl.program_id(0) * tiles

    def count(self, name: str) -> Any:
        return lax.div(self.refs[name][0, LENGTH] + self.pieces - 1, self.pieces)

    def start(self, name: str, step: Any, filled: Any) -> None:
        slot = lax.rem(filled, self.buffers)
        for p in range(self.pieces):
            tile = self.begin + self.refs[name][0, HEADER + step * self.pieces + p]
            for array, ring in self.rings:
                pltpu.make_async_copy(array.at[tile], ring.at[slot, p], self.refs["arrived"].at[slot]).start()

    def each(self, act: Callable[[Any, Any], None]) -> None:
        """Calls `act(step, slot of the ring)` for all steps of the list, when its tiles are there."""
        ahead, buffers = self.refs["ahead"], self.buffers
        last = pl.program_id(1) == pl.num_programs(1) - 1
        count, following = self.count("own"), jnp.where(last, 0, self.count("next"))

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            ahead[0], ahead[1] = 0, 0

        filled, begun = ahead[0], ahead[1]
        some = jnp.minimum(count, buffers)
        lax.fori_loop(begun, some, lambda n, _: (self.start("own", n, filled + n), 0)[1], 0)

        def step(n: Any, _: Any) -> Any:
            slot = lax.rem(filled + n, buffers)
            for _, ring in self.rings:  # a semaphore counts bytes
                pltpu.make_async_copy(ring.at[slot], ring.at[slot], self.refs["arrived"].at[slot]).wait()
            act(n, slot)

            # The slot is free for the next copies: of this list, or else of the one after it.
            @pl.when(n + buffers < count)
            def _() -> None:
                self.start("own", n + buffers, filled + n + buffers)

            after = n - (count - some)

            @pl.when((after >= 0) & (after < following))
            def _() -> None:
                self.start("next", after, filled + count + after)

            return 0

        lax.fori_loop(0, count, step, 0)
        ahead[0], ahead[1] = filled + count, jnp.minimum(some, following)


def _seen(o: Sizes, table: Any, tile: Any, nowhere: Any = 0) -> Any:
    """Returns which keys of a tile each row reads, bool [BLOCK_K, rows]; none of a tile that is `BEYOND`."""
    start = tile * o.BLOCK_K
    rest = table[o.named_rows :]
    # A tile may begin inside a block: how many keys of that block come before it.
    before = lax.rem(start, o.SIZE) - rest[OFFSET : OFFSET + 1]
    before = jnp.where(before < 0, before + o.SIZE, before)
    keys = lax.broadcasted_iota(jnp.int32, (o.BLOCK_K, 1), 0)
    reads = keys <= rest[POSITION : POSITION + 1] - (start + nowhere)
    within = []
    for n in range(o.inside):
        begin = n * o.SIZE - before
        named = jnp.max(jnp.where(table[: o.named_rows] == start + begin, 1, 0), axis=0, keepdims=True)
        inside = keys - jnp.where(named > 0, begin, BEYOND)
        within.append((inside >= 0) & (inside < o.SIZE))
    return reads & functools.reduce(jnp.logical_or, within)


def _nowhere(own: Any, n: Any) -> Any:
    """Returns `BEYOND` for an entry past the end of a list, else 0."""
    return jnp.where(n < own[0, LENGTH], 0, BEYOND)


def _joined(parts: list[Any], dim: int) -> Any:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=dim)


def _masked(x: Any, seen: list[Any], dim: int) -> Any:
    """Returns logits, -inf where a row does not read a key, for the masks of all pieces along a dim."""
    side = x.shape[dim] // len(seen)
    parts = [lax.slice_in_dim(x, p * side, (p + 1) * side, axis=dim) for p in range(len(seen))]
    return _joined([jnp.where(mask, part, -jnp.inf) for mask, part in zip(seen, parts, strict=True)], dim)


def _logits(o: Sizes, refs: dict[str, Any], keys: Any, step: Any) -> Any:
    """Returns the logits of all pieces, float32 [PIECES * BLOCK_K, rows]."""
    own, table, begin = refs["own"], refs["table"][...], step * o.PIECES
    seen = [_seen(o, table, own[0, HEADER + begin + p], _nowhere(own, begin + p)) for p in range(o.PIECES)]
    return _masked(dot(keys, refs["query"][...], 1, 1) * o.SCALE, seen, 0)


def _pieces(ring: Any, slot: Any) -> Any:
    """Returns what is in a slot of a ring, the pieces below each other."""
    return ring[slot].reshape(-1, ring.shape[-1])


def _of_row(o: Sizes, table: Any, row: int) -> Any:
    """Returns the numbers of a row of a table, float32 [1, rows]."""
    return lax.bitcast_convert_type(table[o.named_rows :][row : row + 1], jnp.float32)


def fwd_kernel(o: Sizes, refs: dict[str, Any]) -> None:
    """Writes the outputs and log-sum-exps of a tile of queries."""
    largest, total, turned = refs["largest"], refs["total"], refs["turned"]
    largest[...] = jnp.full_like(largest, -jnp.inf)
    total[...] = jnp.zeros_like(total)
    turned[...] = jnp.zeros_like(turned)

    def step(n: Any, slot: Any) -> None:
        x, value = _logits(o, refs, _pieces(refs["key_ring"], slot), n), _pieces(refs["value_ring"], slot)
        new = jnp.maximum(largest[...], jnp.max(x, axis=0, keepdims=True))
        anchor = jnp.where(new == -jnp.inf, 0.0, new)  # a row that has not seen any key yet
        p, rescale = jnp.exp(x - anchor), jnp.exp(largest[...] - anchor)
        largest[...] = new
        total[...] = total[...] * rescale + jnp.sum(p, axis=0, keepdims=True)
        turned[...] = turned[...] * rescale + dot(value, p.astype(value.dtype), 0, 0)

    _Copies(refs, ("key", "value"), o.PIECES, o.key_tiles).each(step)
    some = total[...] != 0  # true for NaN too, so that lse becomes NaN
    divisor = jnp.where(some, total[...], 1.0)
    refs["out"][...] = (turned[...] / divisor).T.astype(refs["out"].dtype)
    refs["lse"][...] = jnp.where(some, largest[...] + jnp.log(divisor), -jnp.inf)


def bwd_dq_kernel(o: Sizes, refs: dict[str, Any]) -> None:
    """Writes the gradient of a tile of queries."""
    turned = refs["turned"]
    turned[...] = jnp.zeros_like(turned)
    lse, delta = (_of_row(o, refs["table"][...], row) for row in (LSE, DELTA))

    def step(n: Any, slot: Any) -> None:
        key = _pieces(refs["key_ring"], slot)
        p = jnp.exp(_logits(o, refs, key, n) - lse)
        ds = p * (dot(_pieces(refs["value_ring"], slot), refs["d_out"][...], 1, 1) - delta)
        turned[...] += dot(key, ds.astype(key.dtype), 0, 0)

    _Copies(refs, ("key", "value"), o.PIECES, o.key_tiles).each(step)
    refs["d_query"][...] = (turned[...] * o.SCALE).T.astype(refs["d_query"].dtype)


def bwd_dkv_kernel(o: Sizes, refs: dict[str, Any]) -> None:
    """Adds what the queries of a list give to the gradients of a tile of keys, and writes them at the last list of it."""
    d_key, d_value, own = refs["key_sum"], refs["value_sum"], refs["own"]
    tile = refs["of_part"][pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)]

    @pl.when(own[0, BEGINS] > 0)
    def _() -> None:
        d_key[...] = jnp.zeros_like(d_key)
        d_value[...] = jnp.zeros_like(d_value)

    def step(n: Any, slot: Any) -> None:
        query, d_out = (_pieces(refs[f"{name}_ring"], slot) for name in ("query", "d_out"))
        tables = [refs["table_ring"][slot, p] for p in range(o.Q_PIECES)]
        lse, delta = (_joined([_of_row(o, table, row) for table in tables], 1) for row in (LSE, DELTA))
        seen = [_seen(o, x, tile, _nowhere(own, n * o.Q_PIECES + p)) for p, x in enumerate(tables)]
        p = jnp.exp(_masked(dot(refs["key"][...], query, 1, 1) * o.SCALE, seen, 1) - lse)
        d_value[...] += dot(p.astype(d_out.dtype), d_out, 1, 0)
        ds = p * (dot(refs["value"][...], d_out, 1, 1) - delta)
        d_key[...] += dot(ds.astype(query.dtype), query, 1, 0)

    _Copies(refs, ("query", "d_out", "table"), o.Q_PIECES, o.tiles).each(step)

    @pl.when(own[0, ENDS] > 0)
    def _() -> None:
        refs["d_key"][...] = d_key[...] * o.SCALE
        refs["d_value"][...] = d_value[...]


def _launch(
    kernel: Callable[[Sizes, dict[str, Any]], None],
    o: Sizes,
    lists: jax.Array,
    resident: dict[str, jax.Array],
    streamed: dict[str, jax.Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    scratch: dict[str, tuple[int, int]],
    pieces: int,
    buffers: int,
    work: Work,
    of_part: jax.Array | None = None,
) -> list[jax.Array]:
    """Runs a kernel over lists [rows of the batch and key heads, n, 1, entries].

    Args:
      resident, outputs: [tiles, ...], of which a step has one; streamed: those that its list names.
      of_part: the resident tile of each list, in scalar memory; by default each has its own.
    """
    rows, n, _, width = lists.shape
    flat = lists.reshape(rows * n, 1, width)
    scalars = {} if of_part is None else {"of_part": of_part}

    def place(r: Any, i: Any, *prefetched: Any) -> tuple:
        return (r * n + i if of_part is None else r * o.key_tiles + prefetched[0][r * n + i], 0, 0)

    def tile(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), place)

    def listed(after: int) -> pl.BlockSpec:
        def index_map(r: Any, i: Any, *_: Any) -> tuple:
            return (r * n + jnp.minimum(i + after, n - 1), 0, 0)

        return pl.BlockSpec((None, 1, width), index_map, memory_space=pltpu.SMEM)

    rooms = {f"{name}_ring": pltpu.VMEM((buffers, pieces, *x.shape[1:]), x.dtype) for name, x in streamed.items()}
    rooms |= {name: pltpu.VMEM(shape, jnp.float32) for name, shape in scratch.items()}
    rooms |= {"ahead": pltpu.SMEM((2,), jnp.int32), "arrived": pltpu.SemaphoreType.DMA((buffers,))}
    names = [*scalars, "own", "next", *resident, *streamed, *outputs, *rooms]
    return pallas_launch(
        lambda *refs: kernel(o, dict(zip(names, refs, strict=True))),
        *scalars.values(),
        flat,
        flat,
        *resident.values(),
        *streamed.values(),
        out_shape=list(outputs.values()),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(rows, n),
            in_specs=[listed(0), listed(1), *map(tile, resident.values())]
            + [pl.BlockSpec(memory_space=pl.ANY) for _ in streamed],
            out_specs=[tile(x) for x in outputs.values()],
            scratch_shapes=list(rooms.values()),
        ),
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=VMEM_BYTES,
        work=work,
        name=f"native_sparse_attention_{kernel.__name__}",
    )


def forward(
    query: jax.Array, key: jax.Array, value: jax.Array, what: Selected, lists: jax.Array, o: Sizes, cfg: Any, work: Work
) -> tuple[jax.Array, jax.Array]:
    """Returns (output, log-sum-exp) of the selected branch."""
    queries, keys, values = _tiles(query, key, value, o)
    count, wide = queries.shape[0], values.shape[2]
    out, lse = _launch(
        fwd_kernel,
        o,
        lists,
        {"query": queries, "table": pallas_lists.tables(what, o)},
        {"key": keys, "value": values},
        {
            "out": jax.ShapeDtypeStruct((count, o.rows, wide), query.dtype),
            "lse": jax.ShapeDtypeStruct((count, 1, o.rows), jnp.float32),
        },
        {"largest": (1, o.rows), "total": (1, o.rows), "turned": (wide, o.rows)},
        o.PIECES,
        cfg.num_stages,
        work,
    )
    return pallas_lists.of_tiles(out, o, o.HV), pallas_lists.of_tiles(lse.swapaxes(1, 2), o, 1)[..., 0]


def _tiles(query: jax.Array, key: jax.Array, value: jax.Array, o: Sizes) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys, values = (pallas_lists.tiles_of_keys(x, o) for x in (key, value))
    return pallas_lists.tiles_of_queries(query, o), keys, values


def backward(
    d_out: jax.Array, lse: jax.Array, delta: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, what: Selected,
    lists: jax.Array, o: Sizes, cfg: Any, work: Work,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Returns the gradients of query, and of key and value in float32."""
    queries, keys, values = _tiles(query, key, value, o)
    # A row without keys has no gradient, whatever the cotangents of its infinite lse are: its weights are exp(-inf).
    some = lse != -jnp.inf
    table = pallas_lists.tables(what, o, jnp.where(some, lse, jnp.inf), jnp.where(some, delta, 0))
    of_queries = {"query": queries, "d_out": pallas_lists.tiles_of_queries(d_out, o), "table": table}
    of_keys = {"key": keys, "value": values}
    wide = queries.shape[2], values.shape[2]
    launch = functools.partial(_launch, o=o, work=work)
    (dq,) = launch(
        bwd_dq_kernel,
        lists=lists,
        resident=of_queries,
        streamed=of_keys,
        outputs={"d_query": jax.ShapeDtypeStruct(queries.shape, query.dtype)},
        scratch={"turned": (wide[0], o.rows)},
        pieces=o.PIECES,
        buffers=cfg.num_stages,
    )
    parts, of_part = pallas_lists.by_keys(lists, o)
    dk, dv = launch(
        bwd_dkv_kernel,
        lists=parts,
        resident=of_keys,
        streamed=of_queries,
        outputs={f"d_{n}": jax.ShapeDtypeStruct(x.shape, jnp.float32) for n, x in of_keys.items()},
        scratch={"key_sum": (o.BLOCK_K, wide[0]), "value_sum": (o.BLOCK_K, wide[1])},
        pieces=o.Q_PIECES,
        buffers=cfg.backward_num_stages,
        of_part=of_part,
    )
    of_rows = pallas_lists.of_tiles(dq, o, o.H)
    return of_rows, pallas_lists.of_key_tiles(dk, o, o.H), pallas_lists.of_key_tiles(dv, o, o.HV)
