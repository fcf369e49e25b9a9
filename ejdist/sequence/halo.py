"""The halo of a window: a rank's queries see keys of other ranks only just before each of its runs of tokens. Those come from
the ranks that hold them, and one attention takes them with the rank's own.

A window may reach over several runs before a run, of other ranks or of this one. A rank's own runs are not sent, and no token
comes twice: what lies before a run ends where the rank's own run before it does. A stripe is a run, and what lies before the
stripes of a rank comes from the rank before it in one transfer, around: the first rank's from the last, a stripe later.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.order import Order
from ejdist.sequence import exchange
from ejdist.sequence.local import KEY_FIELDS, Local
from ejdist.sequence.schedule import run_length
from kernels.engines.attention.masks import MaskInfo
from kernels.engines.attention.ranges import ends_at, interval_of
from kernels.framework.dispatch import vary_alike

# Before every position; sums with distances fit in int32.
_NOWHERE = -(2**29)
# Kernels visit tiles of so many keys: a run begins with one.
_TILE = 128


@dataclass(frozen=True)
class Piece:
    """One transfer of the halo: the last tokens of some of the sender's runs, which lie before runs of the receiver.

    Attributes:
      run, source: the first of a rank's runs that it is for, and of the sender's that it is of. count: how many, one after
        another, of each.
      start, tokens: where it begins, counted in tokens before the run that it is for, and how many of a run there are.
      pairs: (sender, receiver).
      around: how many of the first ranks are sent it by the last ones. It lies before their next runs, and what is of the last
        run before none.
    """

    run: int
    source: int
    count: int
    start: int
    tokens: int
    pairs: tuple[tuple[int, int], ...]
    around: int = 0


_AT_ONCE = 2**22  # queries that are asked at once how far they see: a plan may be of a billion tokens


def reach_of(mask: MaskInfo | None, length: int) -> int | None:
    """Returns how many tokens before its own a query of a sequence of that length sees at most; None where the rules set no
    limit or need an array, and where a query sees later tokens.

    What is counted from the start of a segment reaches as far as from the start of the sequence.

    Args:
      mask: before `resolved`, which turns chunks into segments.
    """
    if mask is None or not mask.rules_are_static:
        return None
    return _reach_of_rules(mask.replace(**dict.fromkeys(mask.data_fields)), length)


@functools.lru_cache(maxsize=1024)
def _reach_of_rules(rules: MaskInfo, length: int) -> int | None:
    """Returns `reach_of` a mask without arrays, which can be hashed."""
    farthest = 0
    for start in range(0, length, _AT_ONCE):
        q = np.arange(start, min(start + _AT_ONCE, length), dtype=np.int64)[None]
        ends = interval_of(rules, q)
        if ends.low is None or ends.high is None or np.any(ends_at(ends.high, q) > q):
            return None
        farthest = max(farthest, int(np.max(q - ends_at(ends.low, q))))
    return farthest


@functools.lru_cache(maxsize=1024)
def pieces(order: Order, length: int, reach: int) -> tuple[Piece, ...]:
    """Returns what is sent so that every rank has the `reach` tokens before each of its runs, of an order that `has_runs`."""
    n, run = order.shards, run_length(order, length)
    tokens = {back: min(run, reach - (back - 1) * run) for back in range(1, -(-reach // run) + 1)}
    if not order.in_parts:
        every = [(back, tuple((s, (s + back) % n) for s in range(n))) for back in tokens]
        count = length // n // run
        return tuple(Piece(0, 0, count, (b - 1) * run + tokens[b], tokens[b], pairs, b) for b, pairs in every)
    runs = order.runs(length // n)  # ascending on each rank
    place = {int(part): (rank, index) for (rank, index), part in np.ndenumerate(runs)}
    listed: list[Piece] = []
    for back, some in tokens.items():
        for index in range(runs.shape[1]):
            sent: dict[int, list[tuple[int, int]]] = {}
            for rank in range(n):
                wanted, held = int(runs[rank, index]) - back, int(runs[rank, index - 1]) if index else -1
                if wanted > held:  # else it is this rank's own, or before it, or nowhere
                    sender, source = place[wanted]
                    sent.setdefault(source, []).append((sender, rank))
            start = (back - 1) * run + some
            listed += [Piece(index, source, 1, start, some, tuple(pairs)) for source, pairs in sorted(sent.items())]
    return tuple(listed)


def _front(reach: int, run: int) -> int:
    """Returns how many tokens a halo has before each run: whole tiles where runs are."""
    return reach if run % _TILE else -(-reach // _TILE) * _TILE


def has_runs(order: Order, length: int, reach: int) -> bool:
    """Whether the tokens of a rank are runs, and what lies before each of them is little. Of stripes it is where they are few
    enough to be looked at one by one, and no halo reaches back to the rank's own stripe before."""
    if order.in_parts or order.carried or order.shards == 1:
        return order.in_parts
    run = run_length(order, length)
    return run == order.stripe and _front(reach, run) <= (order.shards - 1) * run


def sent(order: Order, length: int, reach: int | None) -> tuple[float, int] | None:
    """Returns the tokens that a rank sends at most for the halo of that reach, over its own, and in how many transfers; None
    where there is no halo, and where it would be the whole sequence."""
    if reach is None or reach >= length - 1 or order.shards == 1 or not has_runs(order, length, reach):
        return None
    parts = pieces(order, length, reach)
    return sum(piece.count * piece.tokens for piece in parts) * order.shards / length, len(parts)


@dataclass(frozen=True)
class HaloCall:
    """The halo of a call. front: tokens before each run, of which the first may be padding. first: int32 [runs], where in the
    sequence each of this rank's runs begins, traced."""

    local: Local
    reach: int
    front: int
    run: int
    runs: int
    first: jax.Array

    @classmethod
    def of(cls, local: Local) -> HaloCall | None:
        """Returns that of a call; None where there is none, see `sent`, or where nothing is sent.

        Raises:
          ValueError: it would be the whole sequence.
        """
        static, order = local.static, local.static.order
        tokens, reach = local.query.shape[1], static.reach
        if reach is None or len(static.hops) == 1 or not local.is_flash:
            return None
        if not has_runs(order, length := tokens * local.ranks, reach):
            return None
        if reach >= length - 1:
            raise ValueError(
                f"{static.op.name}: a halo has the keys just before a rank's own, and the window or chunk of this call reaches "
                f"{reach} tokens back in a sequence of {length}: use scheme 'ring', or a window of at most {length - 1}"
            )
        run = run_length(order, length)
        first = order.positions(exchange.rank(local.axis), length)[::run]
        return cls(local, reach, _front(reach, run), run, tokens // run, first)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return pieces(self.local.static.order, self.run * self.runs * self.local.ranks, self.reach)

    def mask(self) -> MaskInfo:
        """Returns the mask of this rank's queries over `keys`: each token's position, and what its field has there."""
        local, order, span = self.local, self.local.static.order, self.front + self.run
        positions = self.first[:, None] - self.front + jnp.arange(span, dtype=jnp.int32)
        # Tokens before the sequence, those that the rank has already, and padding.
        held = jnp.concatenate([jnp.zeros_like(self.first[:1]), self.first[:-1] + self.run])
        there = (positions >= jnp.maximum(held, self.first - self.reach)[:, None]).reshape(1, -1)
        changes: dict[str, Any] = {
            "q_positions": order.positions(exchange.rank(local.axis), self.run * self.runs * local.ranks)[None],
            "kv_positions": jnp.where(there, positions.reshape(1, -1), _NOWHERE),
        }
        for name in KEY_FIELDS:
            x = getattr(local.mask, name)
            if x is not None:
                changes[name] = jnp.where(there, self._around_runs(order.inverse(x)), -1)
        return local.mask.replace(**changes)

    def _around_runs(self, x: jax.Array) -> jax.Array:
        """Returns [B, runs * (front + run)], each run with what lies before it, of an array [B, T] in the order of the text."""
        span, apart, slices = self.front + self.run, self.run * self.local.ranks, jax.lax.dynamic_slice_in_dim
        text = jnp.pad(x, ((0, 0), (self.front, apart)))
        if self.local.static.order.in_parts:
            return jnp.concatenate([slices(text, start, span, 1) for start in self.first], 1)
        # Stripes of a rank are equally far apart, and no halo is longer than that.
        rows = slices(text, self.first[0], self.runs * apart, 1).reshape(x.shape[0], self.runs, apart)
        return rows[:, :, :span].reshape(x.shape[0], -1)

    def keys(self) -> dict[str, jax.Array]:
        """Returns keys and values [B, runs * (front + run), ...]: each run of this rank's behind what lies before it."""
        runs = {n: x.reshape(x.shape[0], self.runs, self.run, *x.shape[2:]) for n, x in self.local.keys.items()}
        before = {n: jnp.zeros_like(x, shape=(*x.shape[:2], self.front, *x.shape[3:])) for n, x in runs.items()}
        before = vary_alike(before, runs)
        for piece in self.pieces:
            part = {n: _part(x, piece.source, piece.count, self.run - piece.tokens, self.run) for n, x in runs.items()}
            arrived = exchange.send(part, self.local.axis, piece.pairs)
            start = self.front - piece.start
            # Of the senders whose run this may be a rank has one; from the others it has zeros.
            for n, x in arrived.items():
                before[n] = _added(before[n], piece.run, piece.count, start, self._turned(x, piece, 1))
        return {n: jnp.concatenate([before[n], x], 2).reshape(x.shape[0], -1, *x.shape[3:]) for n, x in runs.items()}

    def home(self, grads: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the gradients, float32, of the rank's own keys and values from those of `keys`."""
        every = {n: x.reshape(x.shape[0], self.runs, -1, *x.shape[2:]) for n, x in grads.items()}
        total = {n: x[:, :, self.front :].astype(jnp.float32) for n, x in every.items()}
        for piece in self.pieces:
            start = self.front - piece.start
            part = {n: _part(x, piece.run, piece.count, start, start + piece.tokens) for n, x in every.items()}
            part = {n: self._turned(x, piece, -1) for n, x in part.items()}
            arrived = exchange.send(part, self.local.axis, tuple((to, sender) for sender, to in piece.pairs))
            for n, x in arrived.items():
                total[n] = _added(total[n], piece.source, piece.count, self.run - piece.tokens, x)
        return {n: x.reshape(x.shape[0], -1, *x.shape[3:]) for n, x in total.items()}

    def _turned(self, x: jax.Array, piece: Piece, runs: int) -> jax.Array:
        """Returns a part of a piece, `runs` later where this rank is one that it comes around to: 1 of keys that came, -1 of
        gradients that go back. Zeros take the place of the run that is missing."""
        if not piece.around:
            return x
        here, edges = exchange.rank(self.local.axis) < piece.around, [(0, 0)] * x.ndim
        edges[1] = (piece.tokens, 0) if runs > 0 else (0, piece.tokens)
        some = x[:, : -piece.tokens] if runs > 0 else x[:, piece.tokens :]
        return jnp.where(here, jnp.pad(some, edges), x)


def _part(x: jax.Array, run: int, count: int, start: int, stop: int) -> jax.Array:
    """Returns [B, count * tokens, ...], tokens from `start` to `stop` of some runs of x [B, runs, tokens, ...]."""
    return x[:, run : run + count, start:stop].reshape(x.shape[0], count * (stop - start), *x.shape[3:])


def _added(x: jax.Array, run: int, count: int, start: int, part: jax.Array) -> jax.Array:
    """Returns x [B, runs, tokens, ...] with a part, as of `_part`, added to the tokens of some runs from `start` on."""
    part = part.reshape(x.shape[0], count, -1, *x.shape[3:])
    part = part + x[:, run : run + count, start : start + part.shape[2]]
    return jax.lax.dynamic_update_slice(x, part.astype(x.dtype), (0, run, start, *(0,) * (x.ndim - 3)))


def forward(halo: HaloCall) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse), float32, of a rank's queries over the keys that they see."""
    out, lse = halo.local.attend_to(halo.keys(), halo.mask())
    return out.astype(jnp.float32), lse


def backward(halo: HaloCall, saved: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the gradients by argument name."""
    grads = halo.local.pull_from(saved, halo.keys(), halo.mask())
    return grads | halo.home({n: grads[n] for n in halo.local.keys})
