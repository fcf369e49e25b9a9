"""Ulysses, in groups of heads: tokens are exchanged for heads, and while a rank attends with one group the next one travels.

`schemes.py` has the scheme; here is what it does, between any groups of ranks that another scheme joins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.costs import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, Traffic
from ejdist.sequence import exchange
from ejdist.sequence.cost import AttentionShape, SchemeBytes
from ejdist.sequence.local import Local, needed_of, of_all_ranks, without_padding, work_of
from ejdist.sequence.reshard import Reshard, cuts_of, dealt
from ejdist.sequence.schedule import hops
from kernels.framework.binding import is_float_array

# The dims that are split, and those that are made whole.
_HEADS, _TOKENS = ("N", "K"), ("T", "S")

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Exchange:
    """A call whose heads are exchanged for tokens over the last axis of the sequence.

    Attributes:
      arrays: the arguments, of this rank's tokens.
      frame: the call after the exchange, but for its arrays: its mask, and its order and axes, which are those before the
        last; over none of them a rank has whole sequences.
    """

    arrays: Arrays
    frame: Local
    way: Reshard

    @classmethod
    def of(cls, local: Local, groups: int, between: Any) -> Exchange:
        """Returns the exchange of a call in groups of heads; `between` is the scheme of the groups of ranks.

        Raises:
          ValueError: heads do not divide; names the remedy.
          Unsupported: an argument whose dims the contract does not name.
        """
        static, op = local.static, local.static.op
        axes = (static.axis,) if isinstance(static.axis, str) else static.axis
        outer, inner, ranks = axes[:-1], axes[-1], exchange.size(axes[-1])
        arrays = {**local.own, **local.keys}
        cuts = cuts_of(op, arrays, _HEADS, inner, ranks, groups, local.ranks // ranks)
        way = Reshard(op, inner, static.order.of_members(ranks), _HEADS, _TOKENS, cuts, groups)
        mask, order = way.mask(local.own_mask).replace(padded_by_zeros=True), static.order.of_groups(ranks)
        length = local.query.shape[1] * local.ranks
        needed = hops(order, length, mask, known=mask.rules_are_static)
        static = replace(static, axis=outer[0] if len(outer) == 1 else outer, order=order, hops=needed)
        whole, mine = (mask, mask) if order.shards == 1 else of_all_ranks(mask, order, static.axis)
        work = work_of(static, length // order.shards, whole)
        frame = replace(local, static=static, mask=whole, own_mask=mine, work=work)
        # Asked of as many tokens as a rank has after the exchange.
        after: dict[str, Any] = {
            n: jax.ShapeDtypeStruct((x.shape[0], x.shape[1] * ranks, *x.shape[2:]), x.dtype)
            for n, x in arrays.items()
            if x.ndim > 2
        }
        asked = replace(frame, own={n: after.get(n, x) for n, x in frame.own.items()}, keys=after)
        needed = needed_of(frame) if order.shards > 1 and between.counts_hops(asked) else None
        return cls(arrays, replace(frame, needed=needed), way)

    def groups(self, saved: Arrays) -> Iterator[tuple[Local, Arrays, Callable[[jax.Array], None]]]:
        """Yields (the call, what is saved of it, done) of each group of heads, exchanged. `done` takes a result of it, for
        which the exchange after the next waits, so that no more than two groups are on their way or at work."""
        moved: dict[tuple[str, int], jax.Array] = {}
        results: list[jax.Array] = []

        def there(group: int) -> tuple[Local, Arrays]:
            known = {n: self.way.number(n, x, group) for n, x in {**self.arrays, **saved}.items()}
            new = {n: x for n, x in {**self.arrays, **saved}.items() if (n, known[n]) not in moved}
            if group > 1:
                new, _ = jax.lax.optimization_barrier((new, results[group - 2]))
            # One by one: what joins the copies of two arrays needs room for both of both.
            fresh = {
                (n, known[n]): jax.lax.optimization_barrier(self.way.there(n, x, known[n])) for n, x in new.items()
            }
            for key in [key for key in moved if key != (key[0], known[key[0]])]:
                del moved[key]
            moved.update(fresh)
            keys, queries = ({n: moved[n, known[n]] for n in names} for names in (self.frame.keys, self.frame.own))
            return replace(self.frame, own=queries, keys=keys), {n: moved[n, known[n]] for n in saved}

        coming = there(0)
        for group in range(self.way.groups):
            here, coming = coming, there(group + 1) if group + 1 < self.way.groups else coming
            yield *here, results.append

    def back(self, name: str, parts: list[jax.Array], dtype: Any) -> jax.Array:
        """Returns an output, or the gradient of an argument, of this rank's tokens and all heads.

        Args:
          parts: that of each group. Groups that have the same heads of keys have a term each of their gradient.
        """
        sums: dict[int, jax.Array] = {}
        for group, part in enumerate(parts):
            number = self.way.number(name, part, group)
            sums[number] = sums[number].astype(jnp.float32) + part if number in sums else part
        return self.way.joined(name, [self.way.back(name, x, dtype) for x in sums.values()])


def forward(local: Local, outer: Any, groups: int) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) of this rank's queries, float32; `outer` is the scheme between the groups of ranks."""
    call, parts = Exchange.of(without_padding(local)[0], groups, outer), []
    for here, _, done in call.groups({}):
        parts.append(here.attend(here.keys, None) if here.ranks == 1 else outer.forward(here))
        done(parts[-1][1])
    outs, lses = map(list, zip(*parts, strict=True))
    return call.back("out", outs, local.query.dtype).astype(jnp.float32), call.back("lse", lses, jnp.float32)


def backward(local: Local, saved: Arrays, outer: Any, groups: int) -> Arrays:
    """Returns the gradients of this rank's floats, by argument. Of what is saved, delta is sent and the output is not."""
    local, saved = without_padding(local, saved)
    call, parts = Exchange.of(local, groups, outer), []
    for here, sent, done in call.groups({n: x for n, x in saved.items() if n != "out"}):
        parts.append(here.pull(sent, here.keys, None) if here.ranks == 1 else outer.backward(here, sent))
        done(parts[-1]["query"])
    floats = {n: x for n, x in call.arrays.items() if is_float_array(x)}
    return {n: call.back(n, [grads[n] for grads in parts], x.dtype) for n, x in floats.items()}


def traffic(shape: AttentionShape, outer: Any, groups: int) -> Traffic:
    """Returns what a rank sends, see `Scheme.cost`."""
    sent, (axis, ranks), here = Traffic(), shape.over[-1], after(shape, groups)
    copies, _, _, each = dealt(shape.heads, shape.kv_heads, ranks, groups)
    keys, moved = 0 if shape.latents else copies * (shape.key + shape.value), (ranks - 1) / ranks
    # The backward has queries, keys, values and the cotangent of out, lse and delta, and sends three gradients.
    forward = shape.query + keys + shape.out + shape.lse
    backward = 2 * (shape.query + keys) + shape.out + 2 * shape.lse
    if ranks > 1:
        parts = 2 if shape.latents else 1  # a query's head is in two arrays then
        calls = shape.forwards * (2 + parts) * groups + (3 + 2 * parts) * groups
        calls += 0 if shape.latents else (2 * shape.forwards + 4) * each
        sent.add(axis, ALL_TO_ALL, moved * (shape.forwards * forward + backward), calls)
    if (
        ranks > 1 and shape.latents
    ):  # without heads: every rank gets all of them, and their gradient is a sum over the ranks
        passes = shape.forwards + 1
        sent.add(axis, ALL_GATHER, passes * shape.latents * (ranks - 1), 2 * passes)
        sent.add(axis, REDUCE_SCATTER, shape.float32 * shape.latents * (ranks - 1), 2)
    if here.ranks > 1:
        sent.add_all(outer.cost(here), groups)
    return sent


def held(shape: AttentionShape, outer: Any, groups: int) -> SchemeBytes:
    """Returns what a rank holds, see `Scheme.memory`: of two groups of heads at most, what was exchanged of queries, keys,
    values, the cotangent of out, lse and delta."""
    here = after(shape, groups)
    inside = outer.memory(here) if here.ranks > 1 else SchemeBytes(0)
    exchanged = here.query + here.travelling + here.out + 2 * here.lse
    return replace(inside, work=inside.work + min(groups, 2) * exchanged)


def after(shape: AttentionShape, groups: int) -> AttentionShape:
    """Returns the attention of a group of heads after the exchange: over the other axes, of more tokens and fewer heads."""
    ranks, over = shape.over[-1][1], shape.over[:-1]
    copies, part, kv_part, each = dealt(shape.heads, shape.kv_heads, ranks, groups)
    # At most: a group of ranks is no farther than its ranks.
    hops = min(shape.hops, math.prod(n for _, n in over) - 1)
    by_batch = None if shape.by_batch is None else min(shape.by_batch, hops)
    return replace(
        shape, over=over, hops=hops, by_batch=by_batch, chunks=None, query=shape.query // groups,
        key=copies * shape.key // each, value=copies * shape.value // each, out=shape.out // groups,
        lse=shape.lse // groups, heads=part // groups,
        kv_heads=kv_part // each, latents=ranks * shape.latents, expansion=shape.expansion // each,
    )  # fmt: skip
