"""Chooses blocks on TPUs: the best weights of the compressed softmax, averaged over the query heads of a key head.

A step has 128 queries of one key head along lanes, and the means of all its blocks. It goes over these twice for each query
head, for the log-sum-exp and for the weights, whose averages stay in VMEM; then it takes the largest one after another.
So main memory has the result alone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.engines.attention.pallas_calls import LANES
from kernels.engines.attention.pallas_kernels import dot
from kernels.engines.attention.pallas_passes import VMEM_BYTES
from kernels.framework.work import Work, nbytes
from kernels.ops.native_sparse_attention.pallas_lists import Sizes
from kernels.toolchains.pallas import pallas_launch

# Blocks that are chosen whatever their weights are: the query's own, the first, and the one before its own.
ALWAYS = 3
# Block means that are looked at together.
BLOCK = 128
# Rows of what is known of a query: its first slot, one past its last, and the last that is a candidate.
FIRST, END, LAST, FIELDS = 0, 1, 2, 8


def _slots(tile: Any) -> Any:
    return lax.broadcasted_iota(jnp.int32, (BLOCK, 1), 0) + tile * BLOCK


def choice_kernel(sizes: Sizes, refs: dict[str, Any]) -> None:
    """Writes the slots of the best blocks, a row of `chosen` each; -1 for none."""
    G, best_of = sizes.N // sizes.K, sizes.NAMED - ALWAYS
    step = lax.div(pl.program_id(0), sizes.K) * pl.num_programs(1) + pl.program_id(1)
    begin, end = refs["bounds"][2 * step], refs["bounds"][2 * step + 1]
    about, average = refs["about"], refs["average"]
    first, beyond = about[FIRST : FIRST + 1], about[END : END + 1]

    def logits(g: Any, tile: Any) -> Any:
        rows, query = pl.ds(pl.multiple_of(tile * BLOCK, BLOCK), BLOCK), refs["query"][g]
        x = sum(dot(refs[name][rows], query, 1, 1) for name in ("high", "low") if name in refs)
        slots = _slots(tile)
        return jnp.where((slots >= first) & (slots < beyond), x * sizes.SCALE, -jnp.inf)

    def clear(tile: Any, _: Any) -> Any:
        slots = _slots(tile)
        # Not those that are always chosen.
        candidate = (slots > first) & (slots <= about[LAST : LAST + 1])
        average[pl.ds(pl.multiple_of(tile * BLOCK, BLOCK), BLOCK)] = jnp.where(candidate, 0.0, -jnp.inf)
        return 0

    lax.fori_loop(begin, end, clear, 0)

    def head(g: Any, _: Any) -> Any:
        def sums(tile: Any, carry: tuple) -> tuple:
            largest, total = carry
            x = logits(g, tile)
            new = jnp.maximum(largest, jnp.max(x, axis=0, keepdims=True))
            anchor = jnp.where(new == -jnp.inf, 0.0, new)
            return new, total * jnp.exp(largest - anchor) + jnp.sum(jnp.exp(x - anchor), axis=0, keepdims=True)

        none = jnp.full((1, LANES), -jnp.inf), jnp.zeros((1, LANES))
        largest, total = lax.fori_loop(begin, end, sums, none)
        anchor = jnp.where(largest == -jnp.inf, 0.0, largest)
        share = jnp.where(total > 0, 1 / (G * jnp.where(total > 0, total, 1.0)), 0.0)

        def add(tile: Any, _: Any) -> Any:
            average[pl.ds(pl.multiple_of(tile * BLOCK, BLOCK), BLOCK)] += jnp.exp(logits(g, tile) - anchor) * share
            return 0

        return lax.fori_loop(begin, end, add, 0)

    lax.fori_loop(0, G, head, 0)
    chosen = refs["chosen"]
    chosen[...] = jnp.full_like(chosen, -1)

    def take(n: Any, previous: Any) -> Any:
        """Returns the best slot but those before, the first of equals."""

        def look(tile: Any, carry: tuple) -> tuple:
            best, where = carry
            rows, slots = pl.ds(pl.multiple_of(tile * BLOCK, BLOCK), BLOCK), _slots(tile)
            x = jnp.where(slots == previous, -jnp.inf, average[rows])
            average[rows] = x
            largest = jnp.max(x, axis=0, keepdims=True)
            here = jnp.min(jnp.where(x == largest, slots, tile * BLOCK + BLOCK), axis=0, keepdims=True)
            better = largest > best
            return jnp.where(better, largest, best), jnp.where(better, here, where)

        none = jnp.full((1, LANES), -jnp.inf), jnp.full((1, LANES), -1, jnp.int32)
        _, slot = lax.fori_loop(begin, end, look, none)
        chosen[pl.ds(n, 1)] = slot
        return slot

    lax.fori_loop(0, best_of, take, jnp.full((1, LANES), -1, jnp.int32))


def _best(query: jax.Array, of_keys: jax.Array, start: jax.Array, position: jax.Array, sizes: Sizes) -> jax.Array:
    """Returns int32 [B, T, K, NAMED - ALWAYS], the slots of the best blocks besides those that are always chosen."""
    o, G = sizes, sizes.N // sizes.K
    tiles, slots = -(-o.T // LANES), of_keys.shape[2]
    begin = (start + o.SIZE - 1) // o.SIZE
    end = jnp.where(start >= 0, begin + (position - start + 1) // o.SIZE, 0)
    last = jnp.where(start >= 0, begin + (position - start) // o.SIZE - 2, -1)
    room = ((0, 0), (0, tiles * LANES - o.T))
    about = jnp.stack([jnp.pad(x, room) for x in (begin, end, last)], axis=1)
    about = jnp.pad(about, ((0, 0), (0, FIELDS - about.shape[1]), (0, 0)))
    first = jnp.where(about[:, END] > about[:, FIRST], about[:, FIRST], slots).reshape(o.B, tiles, LANES).min(-1)
    most = about[:, END].reshape(o.B, tiles, LANES).max(-1)
    bounds = jnp.stack([first // BLOCK, -(-most // BLOCK)], axis=-1).astype(jnp.int32).reshape(-1)
    wide = -(-o.H // LANES) * LANES
    queries = jnp.pad(query, ((0, 0), room[1], (0, 0), (0, wide - o.H)))
    queries = queries.reshape(o.B, -1, o.K, G, wide).transpose(0, 2, 3, 1, 4).reshape(o.B * o.K, G, -1, wide)
    of_keys = jnp.pad(of_keys, ((0, 0), (0, 0), (0, -slots % BLOCK), (0, wide - o.H)))
    of_keys = of_keys.reshape(o.B * o.K, -1, wide)
    # In 16 bits a mean is a sum of two numbers, which loses nothing that ranks blocks.
    high = of_keys.astype(query.dtype)
    means = {"high": high}
    if query.dtype != jnp.float32:
        means["low"] = (of_keys - high.astype(jnp.float32)).astype(query.dtype)
    count = -(-(o.NAMED - ALWAYS) // 8) * 8
    shape = jax.ShapeDtypeStruct((o.B * o.K, count, tiles * LANES), jnp.int32)
    names = ["bounds", "query", *means, "about", "chosen", "average"]
    chosen = pallas_launch(
        lambda *refs: choice_kernel(o, dict(zip(names, refs, strict=True))),
        bounds,
        queries,
        *means.values(),
        about,
        out_shape=shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(o.B * o.K, tiles),
            in_specs=[
                pl.BlockSpec((None, G, LANES, wide), lambda r, i, _: (r, 0, i, 0)),
                *(pl.BlockSpec((None, *x.shape[1:]), lambda r, i, _: (r, 0, 0)) for x in means.values()),
                pl.BlockSpec((None, FIELDS, LANES), lambda r, i, _: (lax.div(r, o.K), 0, i)),
            ],
            out_specs=pl.BlockSpec((None, count, LANES), lambda r, i, _: (r, 0, i)),
            scratch_shapes=[pltpu.VMEM((high.shape[1], LANES), jnp.float32)],
        ),
        dimension_semantics=("parallel", "parallel"),
        vmem_limit_bytes=VMEM_BYTES,
        work=Work(4 * len(means) * o.B * o.T * o.N * slots * wide, nbytes(queries, *means.values(), shape)),
        name="native_sparse_attention_choice_kernel",
    )
    best = chosen.reshape(o.B, o.K, count, -1)[:, :, : o.NAMED - ALWAYS, : o.T]
    return best.transpose(0, 3, 1, 2)


def vmem_bytes(sizes: Sizes, itemsize: int) -> int:
    """Returns the VMEM of a step: two copies of the means, of queries, and the averages."""
    wide = -(-sizes.H // LANES) * LANES
    slots = -(-sizes.S // sizes.SIZE // BLOCK) * BLOCK
    means = slots * wide * (4 if itemsize == 4 else 2 * itemsize)
    return 2 * means + 2 * (sizes.N // sizes.K) * LANES * wide * itemsize + 4 * slots * LANES


def chosen_blocks(
    query: jax.Array, of_keys: jax.Array, start: jax.Array, position: jax.Array, sizes: Sizes
) -> jax.Array:
    """Returns int32 [B, T, K, NAMED], the chosen blocks, best first, -1 for none.

    Args:
      of_keys: float32 [B, K, slots, H], the means of the keys of complete blocks, see `blocks.py`.
      start: int32 [B, T], the first token of each query's document, -1 for padding. position: int32 [T].
    """
    o = sizes
    own = jnp.where(start >= 0, (position - start) // o.SIZE, -1)
    always = jnp.stack([own, jnp.where(own > 0, 0, -1), jnp.where(own > 1, own - 1, -1)], axis=-1)
    chosen = jnp.broadcast_to(always[:, :, None], (o.B, o.T, o.K, ALWAYS))
    if o.NAMED > ALWAYS:
        best = _best(query, of_keys, start, position, o)
        first = ((start + o.SIZE - 1) // o.SIZE)[..., None, None]
        chosen = jnp.concatenate([chosen, jnp.where(best >= 0, best - first, -1)], axis=-1)
    return chosen[..., : o.NAMED].astype(jnp.int32)
