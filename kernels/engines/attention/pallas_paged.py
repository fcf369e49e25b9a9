"""Attention over pages on TPUs: a step of the grid owns a tile of one request, up to `tokens` queries with all of their heads,
and loops over blocks of keys that it looks up in the request's table of pages.

The device computes a list of tiles from the lengths (`pallas_paged_calls`); it is in scalar memory, like the tables. Pages are
copied from main memory into a ring of `buffers` blocks. Copies run ahead of the computation, from one tile into the next, so a
step does not wait for its first pages (`pallas_paged_copies`).

The kernel has two forms. `flat` is for tiles of few queries. A page stores the keys of all heads side by side, and one product
takes them in this layout, [queries x heads, slots x key heads]; a row keeps the columns of its own head. With few rows, the
time is that of loading keys into the matrix unit, so the redundant products cost little, and no head needs to be extracted.
The other form, for tiles of many queries, extracts the keys of one head at a time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.engines.attention.pallas_paged_copies import LANES, LOG2E, Copies, Paged, Tile

__all__ = ["paged_kernel"]


class _Kernel(Copies):
    """One step of the grid."""

    def run(self) -> None:
        o, refs = self.o, self.refs
        part, step = pl.program_id(0), pl.program_id(1)
        total, index = refs["total"][0], step * o.parts + part
        ahead = refs["ahead"]

        @pl.when(index < total)
        def _() -> None:
            t = self.tile(index)

            @pl.when(step == 0)
            def _() -> None:
                ahead[0], ahead[1], ahead[2], ahead[3], ahead[4] = index, t.begin, 0, 0, 0
                lax.fori_loop(0, o.buffers - 1, lambda _, x: (self.advance(total), x)[1], 0)

            self.begin(t, lax.rem(step, o.buffers))

            def block(number: Any, _: Any) -> Any:
                self.advance(total)
                count = ahead[3]
                slot = lax.rem(count, o.buffers)
                self.wait_for_block(t, number, slot)
                self.clear(t, number, slot)
                self.spread(slot)
                for unit in range(o.units):
                    self.attend(t, number, slot, unit)
                ahead[3] = count + 1
                return 0

            lax.fori_loop(t.begin, t.end, block, 0)
            self.finish(t)

            @pl.when(index + o.parts >= total)
            def _() -> None:
                self.outputs(t.row, t.tokens, lambda copy: copy.wait())

    def begin(self, t: Tile, slot: Any) -> None:
        """Arranges the queries by rows, and initialises the sums."""
        o, refs = self.o, self.refs
        self.queries(t, slot, lambda copy: copy.wait())
        ring, G = refs["query_ring"].at[slot], o.N // o.K
        for unit in range(o.units):
            if o.flat:
                refs["rows"][0] = ring[0]
            elif G == 1:
                refs["rows"][unit] = ring[:, unit, :]
            else:
                x = ring[:, unit * G : (unit + 1) * G, :].astype(jnp.float32)
                refs["rows"][unit] = x.reshape(o.rows, o.H).astype(refs["rows"].dtype)
        shape = refs["largest"].shape
        if o.sinks:  # they act as one key before the first, with value zero
            sinks = refs["sinks"][...]
            refs["largest"][...] = jnp.broadcast_to(sinks, shape)
            refs["weight"][...] = jnp.broadcast_to(jnp.where(sinks == -jnp.inf, 0.0, 1 / LANES), shape)
        else:
            refs["largest"][...] = jnp.full(shape, -jnp.inf)
            refs["weight"][...] = jnp.zeros(shape)
        refs["sum"][...] = jnp.zeros(refs["sum"].shape)

    def clear(self, t: Tile, number: Any, slot: Any) -> None:
        """Zeroes the slots of a block that no query of the tile sees: they may hold NaN."""
        o = self.o
        ring = self.refs["value_ring" if o.form == "apart" else "key_ring"]
        start = number * o.keys
        if o.rows_of_slots:  # slots are parts of a word, or of a tile: the block is written anew

            @pl.when((t.first > start) | (t.last < start + o.keys))
            def _() -> None:
                shape = o.block, o.C, 1
                n = start + o.C * lax.broadcasted_iota(jnp.int32, shape, 0) + lax.broadcasted_iota(jnp.int32, shape, 1)
                x = ring[slot]
                ring[slot] = jnp.where((n >= t.first) & (n < t.last), x, jnp.zeros_like(x))

            return
        zeros = jnp.zeros(ring.shape[-2:], ring.dtype)

        def zero(j: Any, _: Any) -> Any:
            ring[slot, lax.div(j, o.C), lax.rem(j, o.C)] = zeros
            return 0

        lax.fori_loop(0, jnp.clip(t.first - start, 0, o.keys), zero, 0)
        lax.fori_loop(jnp.clip(t.last - start, 0, o.keys), o.keys, zero, 0)

    def spread(self, slot: Any) -> None:
        """Stores a block as 32-bit words: a strided load of every n-th row then gives the keys of a head."""
        o, dtype = self.o, self.refs["rows"].dtype
        for name in ("key", "value"):
            if f"{name}_words" in self.refs:
                ring = self.refs[f"{name}_ring"].at[slot]
                x = _numbers(ring[...].reshape(o.keys * o.heads, ring.shape[-1]), dtype)
                self.refs[f"{name}_words"][...] = x if dtype == jnp.float32 else pltpu.bitcast(x, jnp.uint32)

    def of_head(self, name: str, slot: Any, head: int) -> Any:
        """Returns a head of a block, [slots, width], in the dtype of the queries."""
        o, dtype = self.o, self.refs["rows"].dtype
        if f"{name}_words" not in self.refs:
            ring = self.refs[f"{name}_ring"].at[slot]
            x = ring[...] if o.rows_of_slots else ring[:, :, head, :]
            return _numbers(x.reshape(o.keys, ring.shape[-1]), dtype)
        words = self.refs[f"{name}_words"]
        if dtype == jnp.float32:
            return words[pl.ds(head, o.keys, stride=o.heads), :]
        pair = words[pl.ds(head // 2, o.keys, stride=o.heads // 2), :]
        pair = pair & jnp.uint32(0xFFFF0000) if head % 2 else pair << 16
        return lax.bitcast_convert_type(pair, jnp.float32).astype(dtype)

    def picked(self, slot: Any, unit: int) -> tuple[Any, Any]:
        """Returns the keys and values of a product, [columns, H and HV]; "paired", those of all heads are the same array."""
        o, dtype = self.o, self.refs["rows"].dtype
        names = ["key", "value"][: 2 if o.form == "apart" else 1]
        if o.flat:
            rings = [self.refs[f"{name}_ring"].at[slot] for name in names]
            each = [_numbers(ring[...].reshape(o.keys * o.heads, ring.shape[-1]), dtype) for ring in rings]
        elif o.form == "paired":
            each = [self.of_head("key", slot, 2 * unit), self.of_head("key", slot, 2 * unit + 1)]
        else:
            each = [self.of_head(name, slot, unit) for name in names]
        if o.form == "joined":
            each = [each[0][:, : o.H], each[0][:, o.H :]]
        elif o.form == "within":
            each = [each[0], each[0][:, : o.HV]]
        return each[0], each[-1]

    def scales(self, name: str, slot: Any, unit: int) -> Any:
        """Returns the scales of the columns of a product, [1, columns]."""
        ring = self.refs[f"{name}_ring"]
        return jnp.concatenate([ring[slot, p, unit : unit + 1, :] for p in range(self.o.block)], axis=1)

    def attend(self, t: Tile, number: Any, slot: Any, unit: int) -> None:
        o, refs = self.o, self.refs
        q = refs["rows"][unit]
        key, value = self.picked(slot, unit)
        x = _dot(q, key, 1)
        if o.k_scales:
            x = x * self.scales("k_scale", slot, unit)
        x = x * (o.scale * LOG2E) if o.cap is None else jnp.tanh(x * (o.scale / o.cap)) * (o.cap * LOG2E)
        column = lax.broadcasted_iota(jnp.int32, (1, x.shape[1]), 1)
        j = lax.div(column, o.stride) if o.stride > 1 else column
        start = number * o.keys
        first, last = t.first - start, t.last - start
        position = t.position - start
        if o.tokens > 1:
            row = lax.broadcasted_iota(jnp.int32, (o.rows, 1), 0)
            position = position + lax.div(row, o.rows // o.tokens)
        if o.low is not None:
            first = jnp.maximum(first, position + o.low)
        if o.high is not None:
            last = jnp.minimum(last, position + o.high + 1)
        if o.slopes:
            x = x - refs["slopes"][unit] * jnp.abs(position - j).astype(jnp.float32)
        if o.stride > 1:  # columns of another head are beyond every key
            row = lax.broadcasted_iota(jnp.int32, (o.rows, 1), 0)
            head = lax.div(lax.rem(row, o.N), o.N // o.K) * (o.heads // o.K)
            j = jnp.where(lax.rem(column, o.stride) == head, j, 2**30)
        x = jnp.where((j >= first) & (j < last), x, -jnp.inf)
        before = refs["largest"][unit]
        largest = jnp.maximum(before, jnp.max(x, axis=1, keepdims=True))
        anchor = jnp.where(largest == -jnp.inf, 0.0, largest)  # a row that has not seen any key yet
        p = jnp.exp2(x - _across(anchor, x.shape[1]))
        rescale = jnp.exp2(before - anchor)
        refs["largest"][unit] = largest
        refs["weight"][unit] = refs["weight"][unit] * rescale + _by_lane(p)
        if o.v_scales:  # those of slots that are not seen may be anything
            p = jnp.where(p == 0, 0.0, p * self.scales("v_scale", slot, unit))
        if o.flat and o.form == "paired":  # the value is the head after the key
            p = pltpu.roll(p, 1, axis=1)
        refs["sum"][unit] = refs["sum"][unit] * _across(rescale, o.HV) + _dot(p.astype(value.dtype), value, 0)

    def finish(self, t: Tile) -> None:
        """Writes the outputs of the tile, after those of the previous tile are written."""
        o, refs, G = self.o, self.refs, self.o.N // self.o.K
        ahead, result = refs["ahead"], refs["result"]

        @pl.when(ahead[4] > 0)
        def _() -> None:
            self.outputs(0, ahead[4], lambda copy: copy.wait())

        for unit in range(o.units):
            weight = jnp.sum(refs["weight"][unit], axis=1, keepdims=True)
            y = refs["sum"][unit] / jnp.where(weight == 0, 1.0, weight)
            if o.flat:
                result[0] = y.astype(result.dtype)
            elif G == 1:
                result[:, unit, :] = y.astype(result.dtype)
            else:
                result[:, unit * G : (unit + 1) * G, :] = y.reshape(o.tokens, G, o.HV).astype(result.dtype)
            if o.lse:
                logs = (refs["largest"][unit] + jnp.log2(jnp.broadcast_to(weight, refs["largest"].shape[1:]))) / LOG2E
                if o.flat:
                    refs["logs"][0] = logs
                else:
                    refs["logs"][:, unit * G : (unit + 1) * G, :] = logs.reshape(o.tokens, G, LANES)
        self.outputs(t.row, t.tokens, lambda copy: copy.start())
        ahead[4] = t.tokens


def _dot(a: Any, b: Any, over: int) -> Any:
    # float32 means true float32, without bfloat16 passes.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (over,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _across(x: Any, width: int) -> Any:
    """Returns x [rows, LANES], which is equal in all lanes of a row, with `width` columns."""
    if width % LANES == 0:
        return jnp.concatenate([x] * (width // LANES), axis=1)
    return x[:, :width] if width < LANES else x[:, :1]


def _by_lane(x: Any) -> Any:
    """Returns partial sums of rows, [rows, LANES]; the lanes are added once, at the end."""
    if x.shape[1] % LANES:
        return jnp.broadcast_to(jnp.sum(x, axis=1, keepdims=True) * (1 / LANES), (x.shape[0], LANES))
    return sum(x[:, n : n + LANES] for n in range(0, x.shape[1], LANES))


def _numbers(x: Any, dtype: Any) -> Any:
    """Returns cached numbers in the dtype of the queries, which holds 8 bits exactly."""
    if x.dtype == dtype:
        return x
    if x.dtype == jnp.int8:
        x = x.astype(jnp.int32)
    return x.astype(jnp.float32).astype(dtype)


def paged_kernel(o: Paged, names: list[str], *refs: jax.Array) -> None:
    """A step of the grid, with references by name."""
    _Kernel(o, dict(zip(names, refs, strict=True))).run()
