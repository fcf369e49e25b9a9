"""One rank of several on one device: what a scheme computes there, and nothing that travels; of a ring each hop too.

Keys that would arrive are the rank's own, wherever they would come from, and so is what a reference sees of them.

Beside it are timed one call of as many pairs, which is the start of the row, and of packed rows the whole row on one device:
that has the documents, and so the tiles that a mask cuts, which the ranks have together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sequence import calls
from benchmarks.sequence.calls import NO_IDS, Arrays, Attention
from benchmarks.sequence.devices import of, scheme_with, whole, words
from benchmarks.sequence.pairs import busiest, imbalances, of_hop, of_ranks, order_named, tokens_of
from benchmarks.sequence.rank_programs import (
    ARRIVE,
    begun,
    hop_programs,
    hops_made,
    programs,
    saved_of,
    with_arrived,
)
from benchmarks.sequence.rows import Rows, median
from benchmarks.timing import has_kernel_times, kernel_seconds_of_each, wall_seconds
from ejdist.documents import ONE
from ejdist.order import Order
from ejdist.sequence import AllGather, GroupCast, Halo, Ring, Scheme
from ejdist.sequence.schemes import SCHEMES

ROWS = 8  # of which the imbalance of an order is the mean
HOPS = ("forward", "backward")
LONGEST = 2**18  # tokens of a row that is timed whole on one device
# Schemes whose rank computes the same with copies of its own keys in the place of others'. Of Ulysses it would have copies of
# its queries too, and the lse of one rank's.
KNOWN = (Ring, AllGather, Halo, GroupCast)


def _as_float32(arrays: Arrays) -> Arrays:
    return {name: np.asarray(x, np.float32) for name, x in arrays.items()}


def _over_copies(call: Attention, order: Order, rank: int, ids: np.ndarray, mine: Arrays) -> Arrays:
    """Returns what a rank's programs compute, on one device in float32: its queries over the keys of all ranks, each of which
    has the same ones."""
    floats, keys, index = _as_float32(mine), {}, calls.index_of(call, ids, order)
    for name in ARRIVE:
        keys[name] = order.inverse(np.tile(floats.pop(name), (1, order.shards, 1, 1)), index=index)
    wanted = calls.reference(call)(floats, keys, _at(call, tokens_of(call, ids, order)[rank], ids))
    lie = {name: order.permute(np.asarray(wanted[name]), index=index) for name in ARRIVE}
    return wanted | {name: np.sum(np.split(x, order.shards, 1), 0) for name, x in lie.items()}


def _at(call: Attention, own: np.ndarray, ids: np.ndarray) -> Arrays:
    """Returns the mask of a rank's queries, which are at `own`, over all keys of a row in the order of the text."""
    at = {"q_positions": own[None], "kv_positions": np.arange(len(ids), dtype=np.int32)[None]}
    return at | ({"q_segment_ids": ids[own][None], "kv_segment_ids": ids[None]} if call.packed else {})


def checked(call: Attention, order: Order, scheme: Scheme, rank: int, ids: np.ndarray) -> float:
    """Returns the largest error of a rank's programs against one device in float32: of the whole, and of a ring's hops."""
    length = len(ids)
    drawn = {name: np.asarray(x) for name, x in calls.draw(call, length).items()}
    own = tokens_of(call, ids, order)[rank]
    mine = {name: x if name == "softmax_aux" else x[:, own] for name, x in drawn.items()}
    if isinstance(scheme, AllGather) and scheme.head_groups is None and call.kv_heads % 2 == 0:
        scheme = replace(scheme, head_groups=2)  # so few tokens have one
    run = programs(call, order, scheme, True)
    results = run.results("backward", mine, jax.device_put(_data(call, order, rank, ids)))
    worst = calls.worst_error(results, _over_copies(call, order, rank, ids, mine))
    return max(worst, _hops_checked(call, order, rank, ids, drawn)) if isinstance(scheme, Ring) else worst


def _hops_checked(call: Attention, order: Order, rank: int, ids: np.ndarray, drawn: Arrays) -> float:
    """Returns the largest error of a ring's hops one after another, and of the gradient of the keys at each, of keys that
    differ from rank to rank."""
    n, length, own, index = order.shards, len(ids), tokens_of(call, ids, order)[rank], calls.index_of(call, ids, order)
    call = replace(call, sinks=False)  # they join after the last hop
    mine = {name: x[:, own] for name, x in drawn.items() if name != "softmax_aux"}
    queries = _as_float32({name: x for name, x in mine.items() if name not in ARRIVE})
    keys = _as_float32({name: drawn[name] for name in ARRIVE})
    wanted = calls.reference(call)(queries, keys, _at(call, own, ids))

    data = _data(call, order, rank, ids)
    data = jax.device_put(
        data | {"whole": data["whole"] | {name: order.permute(drawn[name], index=index) for name in ARRIVE}}
    )
    run, state, made = hop_programs(call, order), begun("forward", mine), hops_made(call, order, length)
    for hop in made:
        state = run["forward"](np.int32(hop), data, mine, state, own=hop == 0)
    data["saved"] = saved_of(call, *state, mine["d_out"])
    grads, nothing = begun("backward", mine)
    home = {name: np.zeros((n, *x.shape), np.float32) for name, x in nothing.items()}
    for hop in made:
        grads, sums = run["backward"](np.int32(hop), data, mine, (grads, nothing), own=hop == 0)
        for name, x in sums.items():
            home[name][(rank - hop) % n] += np.asarray(x)
    got = {"out": np.asarray(state[0]), "query": np.asarray(run["of_query"](data, mine, grads["query"]))}
    got |= {name: order.inverse(np.concatenate(list(x), axis=1), index=index) for name, x in home.items()}
    return calls.worst_error(got, wanted)


def _data(call: Attention, order: Order, rank: int, ids: np.ndarray) -> dict[str, Any]:
    index = calls.index_of(call, ids, order)
    whole = {"kv_segment_ids": calls.placed(order.permute(ids[None], index=index)[0])} if call.packed else {}
    return {
        "rank": np.int32(rank),
        "whole": whole if index is None else whole | {"kv_positions": calls.placed(index[0])},
    }


def number_of(o: dict[str, Any], seen: np.ndarray, order: Order) -> int:
    """Returns the rank that is asked for.

    Raises:
      ValueError: rank= is no rank of the ring; names the remedy.
    """
    n = order.shards
    if o["rank"] == "worst":
        return busiest(seen, order)[0]
    if not o["rank"].isdigit() or int(o["rank"]) >= n:
        raise ValueError(f"rank = {o['rank']!r} is no rank of {n}; use a number from 0 to {n - 1}, 'worst' or 'all'")
    return int(o["rank"])


def balance(o: dict[str, Any], call: Attention, tokens: int, rows: Rows) -> None:
    """Adds a row for every order: the pairs of each rank over the mean."""
    n, here = o["ranks"], words(o, call, tokens)
    seen = call.keys_seen(calls.segment_ids(o["documents"], tokens * n, o["seed"]))
    for name, of_rows in imbalances(call, o["documents"], tokens * n, n, o["seed"], ROWS, o["stripe"]).items():
        order = order_named(name, n, tokens * n, o["stripe"])
        pairs = of_ranks(seen, order)
        rows.rows[f"{here} x {n}, {name}"] = {
            "kind": "balance", "ranks": n, "order": name, "tokens": tokens, "imbalance": float(pairs.max() / pairs.mean()),
            "mean_of_rows": float(np.mean(of_rows)), "of_rows": of_rows, "pairs_of_ranks": pairs.tolist(),
            "each": (pairs / pairs.mean()).tolist(), **({"stripe": order.stripe} if order.stripe > 1 else {}),
        }  # fmt: skip


def measure(o: dict[str, Any], call: Attention, tokens: int, rows: Rows) -> None:
    """Adds the balance of every order, and times the ranks that are asked for, unless that is all of them, beside one call of
    the same work."""
    balance(o, call, tokens, rows)
    if o["rank"] == "all":
        return
    for name in o["orders"].split(","):
        order = order_named(name, o["ranks"], tokens * o["ranks"], o["stripe"])
        for scheme in schemes_of(o):
            for backend in o["backends"].split(","):
                _measure(o, of(call, backend), tokens, order, scheme, backend, rows)


def schemes_of(o: dict[str, Any]) -> list[str]:
    """Returns the schemes whose ranks are timed: those that are named, or all of which one by itself is known. Without a window
    a halo is a ring.

    Raises:
      ValueError: one is named of which it is not; names the remedy.
    """
    known = [name for name, kind in SCHEMES.items() if kind in KNOWN and (kind is not Halo or o["window"])]
    named = known if o["schemes"] == ",".join(SCHEMES) else o["schemes"].split(",")
    for name in named:
        if name not in known:
            raise ValueError(
                f"schemes = {o['schemes']!r}: what one rank of {name!r} computes by itself is not known; use "
                f"{', '.join(known)}, or leave rank out"
            )
    return named


@dataclass(frozen=True)
class Rank:
    """One rank of several, and what it is timed with. ids: of the whole row. check: tokens of a rank that are compared."""

    call: Attention
    order: Order
    scheme: Scheme
    number: int
    ids: np.ndarray
    check: int

    @property
    def tokens(self) -> int:
        return len(self.ids) // self.order.shards

    @functools.cached_property
    def pairs(self) -> int:
        return int(of_ranks(self.call.keys_seen(self.ids), self.order)[self.number])

    @functools.cached_property
    def data(self) -> dict[str, Any]:
        data = jax.device_put(_data(self.call, self.order, self.number, self.ids))
        return with_arrived(self.call, self.order, self.scheme, self.arrays, data)

    @functools.cached_property
    def arrays(self) -> Arrays:
        return calls.draw(self.call, self.tokens)

    @functools.cached_property
    def same(self) -> tuple[Arrays, np.ndarray]:
        """(floats, segment ids) of the call that does as much: the start of the row."""
        length = calls.same_work(self.call.keys_seen(self.ids), self.pairs)
        return calls.draw(self.call, length), self.ids[:length]

    @functools.cached_property
    def share(self) -> float:
        """The pairs of this rank over those of the call that does as much."""
        return self.pairs / int(self.call.keys_seen(self.same[1]).sum())

    @functools.cached_property
    def error(self) -> float:
        few = calls.thinned(self.ids, self.check * self.order.shards)
        return checked(self.call.checked(self.check), self.order, self.scheme, self.number, few)

    def whole(self, direction: str) -> tuple[Callable, tuple, dict[str, Any]]:
        if not self.error <= calls.limit_of(self.call.dtype):
            raise ValueError(f"wrong by {self.error:.2g}")
        seen = self.call.keys_seen(self.ids)
        about = {
            "kind": "rank", "tokens": self.tokens, "ranks": self.order.shards, "rank": self.number, "order": self.order.name,
            "window": self.call.window, "sinks": self.call.sinks, "width": self.call.width, "direction": direction,
            "pairs": self.pairs, "imbalance": busiest(seen, self.order)[1], "length": len(self.same[1]), "share": self.share,
            "error": self.error,
        }  # fmt: skip
        return *programs(self.call, self.order, self.scheme).timed(direction, self.arrays, self.data), about

    def alone(self, direction: str) -> tuple[Callable, tuple, dict[str, Any]]:
        floats, ids = self.same
        return *whole(self.call).timed(direction, floats, calls.data_of(self.call, ids)), {}

    def row(self, direction: str) -> tuple[Callable, tuple, dict[str, Any]]:
        floats = calls.draw(self.call, len(self.ids))
        return *whole(self.call).timed(direction, floats, calls.data_of(self.call, self.ids)), {}

    @functools.cached_property
    def share_of_row(self) -> float:
        """The pairs of this rank over those of the row."""
        return self.pairs / int(self.call.keys_seen(self.ids).sum())

    def hops(self, direction: str) -> tuple[list[dict[str, Any]], str]:
        """Returns (number, pairs and ms of each hop, what ms is of): kernels where the profiler shows them, else the clock."""
        made = hops_made(self.call, self.order, len(self.ids))
        bare, state, data = replace(self.call, sinks=False), begun(direction, self.arrays), self.data
        if direction == "backward":
            out, lse = begun("forward", self.arrays)
            data = data | {"saved": saved_of(bare, out, jnp.zeros_like(lse), self.arrays["d_out"])}
        run = hop_programs(bare, self.order)[direction]

        def once(hop: int) -> Any:
            return run(np.int32(hop), data, self.arrays, state, own=hop == 0)

        for hop in made[:2]:  # the programs that there are
            jax.block_until_ready(once(hop))
        seconds, of_what = None, "the clock"
        if has_kernel_times():
            try:
                seconds, of_what = kernel_seconds_of_each([functools.partial(once, hop) for hop in made]), "kernels"
            except RuntimeError as error:  # of the profiler; the rest is timed by the clock all the same
                of_what = f"the clock: {error}"
        if seconds is None:
            seconds = [wall_seconds(lambda _, hop=hop: once(hop), jax.block_until_ready, 1) for hop in made]
        pairs = [of_hop(self.call, self.ids, self.order, self.number, hop) for hop in made]
        found = zip(made, pairs, seconds, strict=True)
        return [{"hop": hop, "pairs": p, "ms": 1e3 * s} for hop, p, s in found], of_what


def _measure(
    o: dict[str, Any], call: Attention, tokens: int, order: Order, scheme: str, backend: str, rows: Rows
) -> None:
    ids = calls.segment_ids(o["documents"], tokens * order.shards, o["seed"])
    number = number_of(o, call.keys_seen(ids), order)
    rank = Rank(call, order, scheme_with(scheme, o), number, ids, min(o["check"], tokens))
    here = f"{words(o, call, tokens)} x {order.shards}, {scheme}, {order.name}, {backend}, rank {number}"
    labels = {direction: f"{here}, {direction}" for direction in o["directions"].split(",")}
    for direction, label in labels.items():
        if not rows.add(label, "whole", functools.partial(rank.whole, direction)):
            continue
        rows.rows[label] |= {"documents": o["documents"], "backend": backend, "scheme": scheme}
        alone = rows.add(label, "alone", functools.partial(rank.alone, direction))
        if o["documents"] not in (ONE, NO_IDS) and len(ids) <= LONGEST:
            rows.add(label, "row", functools.partial(rank.row, direction))
        if alone and direction in HOPS and isinstance(rank.scheme, Ring):
            row = rows.rows[label]
            row["hops"], row["hops_by"] = rank.hops(direction)
            row["each"] = [hop["ms"] for hop in row["hops"]]
            row["hops_ms"] = sum(row["each"])
    rows.time(o["rounds"], seed=tokens)
    for label in labels.values():
        row = rows.rows[label]
        alone, made = median(row, "alone_ms"), median(row, "whole_ms")
        if made is not None and (of_row := median(row, "row_ms")) is not None:
            row["efficiency_of_row"] = of_row * rank.share_of_row / made
        if alone is not None and made is not None:
            row["efficiency"] = alone * row["share"] / made
            row["tflops"] = call.flops(row["direction"], row["pairs"]) / made / 1e9
            if "hops_ms" in row:
                row["efficiency_of_hops"] = alone * row["share"] / row["hops_ms"]
