"""Schemes of sequence parallelism: what travels between the ranks, and when. A scheme is a class here and its name below."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejdist.costs import ALL_GATHER, ALL_TO_ALL, PERMUTE, PERMUTE_BOTH, REDUCE_SCATTER, Traffic
from ejdist.order import AUTO, Order
from ejdist.sequence import both_ways, halo, hops, in_place, trips, two_level, ulysses
from ejdist.sequence.cost import AttentionShape, Axes, SchemeBytes
from ejdist.sequence.gathered import Gathered, check_groups, groups_of, pulled_by_hops
from ejdist.sequence.group_cast import GroupCast
from ejdist.sequence.local import Local
from ejdist.sequence.reshard import undivided
from ejdist.sequence.scheme import WAITED, Scheme
from ejdist.sequence.way import by_batch, check_hops, few_hops


@dataclass(frozen=True)
class Ring(Scheme):
    """Keys and values go around the ring, and their gradients follow: O(T / ranks) memory.

    gradients: the dtype in which sums of gradients travel: float32, or bfloat16, which halves the bytes and rounds a sum at
    each hop. Gradients of float32 keys always travel in float32.
    hops: which hops are made: "mask", all that the mask's rules allow; "batch", only those that the documents of a batch need;
    "auto", which is "batch" where a rank has one long run of the text. The result is the same.
    levels: 1, or 2 over several axes: keys go round inside of the last axis, and meanwhile between its groups, see
    `two_level.py`; then all hops are made.
    directions: 1, or 2, half of the heads each way round; "auto" is 2 where links form a ring, see `both_ways.py`.
    """

    gradients: str = "float32"
    hops: str = AUTO
    levels: int = 1
    directions: int | str = AUTO

    hides = True
    latents = AUTO

    def __post_init__(self) -> None:
        if self.gradients not in (known := ("float32", "bfloat16")):
            raise ValueError(
                f"Ring: argument 'gradients' = {self.gradients!r} is unknown; use one of {', '.join(known)}"
            )
        check_hops("Ring: argument 'hops'", self.hops)
        two_level.check(self.levels, self.hops)
        both_ways.check(self.directions, self.levels, self.hops)

    def forward(self, local: Local) -> tuple[jax.Array, jax.Array]:
        results = self._around(local, {}, in_place.attending)
        return results["out"], results["lse"]

    def backward(self, local: Local, saved: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return self._around(local, saved, in_place.pulling, jnp.float32 if self.gradients == "float32" else None)

    def _around(self, local: Local, saved: Any, work: Any, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
        if both_ways.asked(self.directions, local, self.levels == 1 and not self.counts_hops(local)):
            return both_ways.around(local, saved, work, dtype)
        hop = work(local, saved)
        return hop.results(*two_level.over_hops_by(self.levels)(hop.local, hop.body, dtype))

    def rejects(self, heads: int, over: Axes) -> str | None:
        return two_level.refused(over) if self.levels > 1 else None

    def counts_hops(self, local: Local) -> bool:
        return self.levels == 1 and by_batch(self.hops, few_hops(local.static.order, local.query.shape[1]))

    def expansions(self, shape: AttentionShape) -> float:
        return 1 + shape.hops

    def cost(self, shape: AttentionShape) -> Traffic:
        if self.levels == 2 and shape.hops:
            return two_level.traffic(shape, self._wide(shape))
        sent, keys, hops = Traffic(), shape.travelling, shape.sent_on(self.hops)
        both = both_ways.goes(self.directions, shape, not by_batch(self.hops, shape.few_hops))
        collective, arrays = (PERMUTE_BOTH, 4) if both else (PERMUTE, 2)
        if hops:
            passes = shape.forwards + 1  # keys and values travel in the backward too
            sent.add(shape.axis, collective, passes * keys * hops, arrays * passes * hops)
            # Their gradients by other ranks follow them by a hop, and go home in the dtype of the keys.
            sent.add(shape.axis, collective, (self._wide(shape) * (hops - 1) + 1) * keys, arrays * hops)
        return sent

    def passes(self, shape: AttentionShape) -> float:
        # What there is so far is read and written at each hop after the first, in float32, and the sums of gradients. Kernels
        # that add in place round the first of two hops.
        hops = shape.sent_on(self.hops)
        rounded = hops == 1 and shape.tiles
        merged = shape.float32 * (shape.query + shape.travelling)
        merged += (1 if rounded else shape.float32) * shape.forwards * shape.out
        return hops * (2 * merged + shape.travelling)

    def memory(self, shape: AttentionShape) -> SchemeBytes:
        held = _held(
            shape, sets=1 + 2 * self.levels
        )  # with gradients that stay at home, and what travels between groups
        return replace(held, work=held.work - (shape.float32 - self._wide(shape)) * shape.travelling, in_place=True)

    def _wide(self, shape: AttentionShape) -> int:
        """Returns how many times as large as what travels its gradients are, on their way."""
        return shape.float32 if self.gradients == "float32" else 1


def _held(shape: AttentionShape, sets: int) -> SchemeBytes:
    """Returns the bytes of that many sets of what travels, and of the sums over ranks of all gradients, in float32."""
    keys, wide = shape.travelling, shape.float32
    # Two kernels, forward and backward, have sums of the size of their output.
    return SchemeBytes((sets + wide) * keys + wide * shape.query, gpu_zeros=2 * wide * shape.out)


def _check_groups(groups: Any) -> None:
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ValueError(f"sequence.head_groups = {groups!r} must be an integer of at least 1")


@dataclass(frozen=True)
class AllGather(Scheme):
    """Every rank gathers all keys and values, and each rank's gradients are summed on it: O(T) memory, one exchange.

    Where kernels add in place, keys come in groups of heads, see `gathered.py`. Elsewhere, where no mask is compared pair by
    pair, hops run one after another, the first beside the exchange; else one attention takes all keys. `hops` as of a `Ring`: a
    batch that needs the keys of few ranks gets them hop by hop. head_groups: a divisor of the heads of keys on a device; None:
    as many as leave each enough tiles of queries to keep a GPU busy. Elsewhere keys come at once, whatever it is.
    """

    hops: str = AUTO
    head_groups: int | None = None

    hides = False
    latents = AUTO

    def __post_init__(self) -> None:
        check_hops("AllGather: argument 'hops'", self.hops)
        if self.head_groups is not None:
            _check_groups(self.head_groups)

    def forward(self, local: Local) -> tuple[jax.Array, jax.Array]:
        if len(local.hops) == 1:  # no rank needs the keys of another, and a ring of one hop sends nothing
            return Ring().forward(local)
        check_groups(self.head_groups, local.sizes.get("K", 0))
        if (call := Gathered.of(local, self.head_groups, forward=True)) is not None:
            return call.forward()
        if local.plain:
            return trips.over_gathered(local, lambda *at: hops.attended(local, *at))
        out, lse = local.attend(*local.in_order(trips.gathered(local)))
        return out.astype(jnp.float32), lse

    def backward(self, local: Local, saved: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if len(local.hops) == 1:
            return Ring().backward(local, saved)
        if (call := Gathered.of(local, self.head_groups, forward=False)) is not None:
            return call.backward(saved)
        if local.plain:
            grads, parts = pulled_by_hops(local, saved)
        else:
            grads = local.pull(saved, *local.in_order(trips.gathered(local)))
            parts = {n: local.of_ranks(grads[n].astype(jnp.float32)) for n in local.keys}
        return grads | trips.scattered(local, parts)

    def takes_sinks(self, local: Local) -> bool:
        return len(local.hops) > 1 and not local.plain and Gathered.of(local, self.head_groups, forward=True) is None

    def counts_hops(self, local: Local) -> bool:
        return by_batch(self.hops, few_hops(local.static.order, local.query.shape[1]))

    def expansions(self, shape: AttentionShape) -> float:
        return shape.ranks if shape.hops else 1

    def cost(self, shape: AttentionShape) -> Traffic:
        sent, passes = Traffic(), shape.forwards + 1  # the backward gathers keys and values again
        keys, others, hops = shape.travelling, shape.ranks - 1, shape.sent_on(self.hops)
        if hops and hops < min(others, shape.hops):
            sent.add(shape.axis, PERMUTE, (passes + shape.float32) * keys * hops, 2 * (passes + 1) * hops)
        elif hops and (groups := self._groups(shape)):
            # Keys and values are one array; in the backward all groups but the first come at once. Gradients have their dtype.
            calls = shape.forwards * self._groups(shape, forward=True) + min(groups, 2)
            sent.add(shape.axis, ALL_GATHER, passes * keys * others, calls)
            sent.add(shape.axis, ALL_TO_ALL, keys * others, groups)
        elif hops:
            sent.add(shape.axis, ALL_GATHER, passes * keys * others, 2 * passes)
            sent.add(shape.axis, REDUCE_SCATTER, shape.float32 * keys * others, 2)
        return sent

    def waited(self, shape: AttentionShape) -> float:
        # Of groups that come beside attention the first is waited for, and on their way back the last. Two groups wait for as
        # much as a ring does: 0.30 forward and 0.25 backward on two H200s, 8,192 tokens each.
        # Each direction has its own number of groups; the backward gathers keys, and sends as many bytes of gradients back.
        whole = super().waited(shape)
        parts = ((self._groups(shape, forward=True), shape.forwards), (self._groups(shape), 2))
        waits = [times * (2 * WAITED[True] / groups if groups > 1 else whole) for groups, times in parts]
        return sum(waits) / (shape.forwards + 2)

    def passes(self, shape: AttentionShape) -> float:
        keys, times = shape.travelling, shape.forwards + 1
        if not shape.hops:
            return 0.0
        if self._groups(shape):  # keys beside their values; and gradients of all keys, written and summed
            return 2 * times * keys + 2 * (shape.ranks - 1) * keys
        return 2 * times * shape.ranks * keys + 3 * shape.ranks * shape.float32 * keys  # put in the order of the text

    def _groups(self, shape: AttentionShape, forward: bool = False) -> int:
        """Returns in how many groups of heads keys come, by default in the backward; 0: at once."""
        if not shape.tiles or not shape.sent_on(self.hops) >= min(shape.ranks - 1, shape.hops):
            return 0
        return self.head_groups or groups_of(shape.tiles, shape.ranks, shape.heads, shape.kv_heads, forward)

    def memory(self, shape: AttentionShape) -> SchemeBytes:
        held = _held(shape, sets=shape.ranks)
        # Where one attention takes all keys, those that are made of latents are there at once, and their gradients.
        expanded = 2 * (shape.ranks - 1) * (shape.key + shape.value) if shape.latents else 0
        return replace(held, work=held.work + expanded)


@dataclass(frozen=True)
class Ulysses(Scheme):
    """Each rank exchanges tokens for heads over the last axis of the sequence, and attends whole sequences with its part of the
    heads: the work is even whatever the mask and the documents. Over the axes before it, which may be slower, goes another
    scheme. Where there are fewer heads of keys than ranks, they are repeated.

    Attributes:
      outer: the scheme over the other axes.
      head_groups: how many groups a rank's heads are cut into. A group is exchanged while the one before attends, and at most
        two are held.
    """

    outer: Scheme = Ring()
    head_groups: int = 1

    hides = False
    all_ids = False
    latents = AUTO

    def __post_init__(self) -> None:
        if not isinstance(self.outer, Scheme):
            raise ValueError(f"Ulysses: argument 'outer' = {self.outer!r} must be a Scheme, such as Ring()")
        _check_groups(self.head_groups)

    def forward(self, local: Local) -> tuple[jax.Array, jax.Array]:
        return ulysses.forward(local, self.outer, self.head_groups)

    def backward(self, local: Local, saved: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return ulysses.backward(local, saved, self.outer, self.head_groups)

    def rejects(self, heads: int, over: Axes) -> str | None:
        (axis, ranks), before = over[-1], over[:-1]
        outer = math.prod(n for _, n in before)
        if reason := undivided(heads, axis, ranks, self.head_groups, outer):
            return reason
        return self.outer.rejects(heads // ranks // self.head_groups, before) if before else None

    def uneven(self, order: Order, over: Axes) -> Order:
        return self.outer.uneven(order.of_groups(over[-1][1]), over[:-1])

    def expansions(self, shape: AttentionShape) -> float:
        # A rank has its part of the heads, of as many times the tokens.
        inside = ulysses.after(shape, self.head_groups)
        return self.outer.expansions(inside) if inside.ranks > 1 else 1

    def cost(self, shape: AttentionShape) -> Traffic:
        return ulysses.traffic(shape, self.outer, self.head_groups)

    def passes(self, shape: AttentionShape) -> float:
        inside = ulysses.after(shape, self.head_groups)
        between = self.head_groups * self.outer.passes(inside) if inside.ranks > 1 else 0.0
        # What is sent is put in the order in which it goes, and what arrives in that of the text.
        arrays = (shape.forwards + 2) * (shape.query + shape.key + shape.value) + (shape.forwards + 1) * shape.out
        return between + 2 * arrays

    def memory(self, shape: AttentionShape) -> SchemeBytes:
        return ulysses.held(shape, self.outer, self.head_groups)


@dataclass(frozen=True)
class Halo(Scheme):
    """For windows and chunks: a rank gets the keys just before each of its runs of consecutive tokens from the ranks that hold
    them, and makes one attention over those and its own.

    Three kinds of calls take the scheme `otherwise`: those whose mask sets no such limit, those of more than 256 stripes a
    rank, and those whose window reaches back to a rank's own stripe before.
    """

    otherwise: Scheme = Ring()

    hides = False
    latents = AUTO

    def forward(self, local: Local) -> tuple[jax.Array, jax.Array]:
        call = halo.HaloCall.of(local)
        return self.otherwise.forward(local) if call is None else halo.forward(call)

    def backward(self, local: Local, saved: dict[str, jax.Array]) -> dict[str, jax.Array]:
        call = halo.HaloCall.of(local)
        return self.otherwise.backward(local, saved) if call is None else halo.backward(call, saved)

    @property
    def blocks(self) -> float | None:  # pyrefly: ignore[bad-override]
        return self.otherwise.blocks

    def takes_sinks(self, local: Local) -> bool:
        return halo.HaloCall.of(local) is not None or self.otherwise.takes_sinks(local)

    def counts_hops(self, local: Local) -> bool:
        return halo.HaloCall.of(local) is None and self.otherwise.counts_hops(local)

    def rejects(self, heads: int, over: Axes) -> str | None:
        return self.otherwise.rejects(heads, over)

    def expansions(self, shape: AttentionShape) -> float:
        return self.otherwise.expansions(shape) if shape.halo is None or not shape.hops else 1 + shape.halo[0]

    def cost(self, shape: AttentionShape) -> Traffic:
        if shape.halo is None or not shape.hops:
            return self.otherwise.cost(shape)
        sent, (part, times) = Traffic(), shape.halo
        # Keys and values forward and again backward, and then their gradients the other way.
        passes = shape.forwards + 2
        sent.add(shape.axis, PERMUTE, passes * part * shape.travelling, 2 * passes * times)
        return sent

    def waited(self, shape: AttentionShape) -> float:
        return super().waited(shape) if shape.halo is not None and shape.hops else self.otherwise.waited(shape)

    def passes(self, shape: AttentionShape) -> float:
        return 0.0 if shape.halo is not None and shape.hops else self.otherwise.passes(shape)

    def memory(self, shape: AttentionShape) -> SchemeBytes:
        return self.otherwise.memory(shape)


# The first is where a plan begins.
SCHEMES: dict[str, type[Scheme]] = {
    "ring": Ring, "all_gather": AllGather, "ulysses": Ulysses, "halo": Halo, "group_cast": GroupCast,
}  # fmt: skip


def scheme_of(scheme: str | Scheme, **options: Any) -> Scheme:
    """Returns the scheme by name, or the one given.

    Args:
      options: of the named scheme, such as `outer`, a scheme by name, or `head_groups`; None: its own default.

    Raises:
      ValueError: the name is unknown, or that scheme has no such option.
    """
    if isinstance(scheme, Scheme):
        return scheme
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        raise ValueError(
            f"ring_attention: argument 'scheme' = {scheme!r} is unknown; use one of {', '.join(SCHEMES)}, or a Scheme such as "
            "Ring()"
        )
    asked = {name: value for name, value in options.items() if value is not None}
    for name, value in asked.items():
        if name not in options_of(SCHEMES[scheme]):
            having = " or ".join(other for other, kind in SCHEMES.items() if name in options_of(kind))
            raise ValueError(
                f"sequence.{name} = {value!r} is no option of the scheme {scheme!r}: use sequence.scheme={having}, or leave it "
                "out"
            )
    return SCHEMES[scheme](**{n: scheme_of(value) if n == "outer" else value for n, value in asked.items()})


def options_of(scheme: type[Scheme]) -> set[str]:
    """Returns the names of its options."""
    return {field.name for field in fields(scheme)} if is_dataclass(scheme) else set()
