"""The runs of a rank: tokens that follow one another. Contiguous order has one, a zigzag two, stripes many.

What depends on the order of tokens takes each run as a row of its own, and passes on between runs what it would between
ranks; or the tokens are exchanged, so that every rank has one run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.order import Order
from ejdist.sequence import exchange
from kernels.engines.scan.recurrence import last_valid_before


@dataclass(frozen=True)
class Runs:
    """The runs of every rank. Of arrays [B, T, ...] of a rank's tokens the rows are [runs * B, run, ...], the first run first.

    Attributes:
      order: one that is the same for all rows. own: a rank's tokens. axis: the mesh axes that split the sequence.
    """

    order: Order
    own: int
    axis: Any

    @cached_property
    def parts(self) -> np.ndarray:
        """int [ranks, runs]: which part of the text each run is."""
        return self.order.runs(self.own)

    @property
    def count(self) -> int:
        """How many runs a rank has."""
        return self.parts.shape[1]

    @cached_property
    def ways(self) -> tuple[int, ...]:
        """For each place on a rank: 1 where the runs of the ranks ascend, -1 where they descend. The next place goes on."""
        n, ways = len(self.parts), np.where(self.parts[0] < self.parts[-1], 1, -1)
        whole = np.sort(self.parts, axis=0) == np.arange(n)[:, None] + n * np.arange(self.count)
        assert whole.all() and (np.diff(self.parts, axis=0) == ways).all(), self.order
        return tuple(int(way) for way in ways)

    def rows(self, x: jax.Array) -> jax.Array:
        """Returns [runs * B, run, ...] of an array [B, T, ...]."""
        x = x.reshape(x.shape[0], self.count, self.own // self.count, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(-1, *x.shape[2:])

    def back(self, x: jax.Array) -> jax.Array:
        """Returns [B, T, ...] of the rows of `rows`."""
        x = self.apart(x).swapaxes(0, 1)
        return x.reshape(x.shape[0], self.own, *x.shape[3:])

    def apart(self, x: jax.Array) -> jax.Array:
        """Returns [runs, B, ...] of an array [runs * B, ...]."""
        return x.reshape(self.count, -1, *x.shape[1:])

    def repeated(self, x: jax.Array) -> jax.Array:
        """Returns [runs * B, ...] of an array [B, ...] that every run has."""
        return jnp.tile(x, (self.count, *(1,) * (x.ndim - 1)))

    def here(self) -> jax.Array:
        """Returns int32 [runs]: which parts of the text this rank has."""
        return jnp.asarray(self.parts, jnp.int32)[exchange.rank(self.axis)]

    def last_id_before(self, last: jax.Array) -> jax.Array:
        """Returns [runs * B]: the id of the last valid token before each run, -1 where there is none.

        Args:
          last: [runs * B]: the id of the last valid token of each run, -1 where there is none.
        """
        every = jax.lax.all_gather(self.apart(last), self.axis)  # [ranks, runs, B]
        every = every.reshape(self.parts.size, -1)[np.argsort(self.parts.ravel())]
        return last_valid_before(every.T).T[self.here()].reshape(-1)

    def exchanged(self, x: jax.Array) -> jax.Array:
        """Returns [B, T, ...] of a rank's tokens in contiguous order, of an array in this one."""
        return self._moved(x, back=False)

    def home(self, x: jax.Array) -> jax.Array:
        """Returns what `exchanged` took."""
        return self._moved(x, back=True)

    def _moved(self, x: jax.Array, back: bool) -> jax.Array:
        n, m = self.parts.shape
        x = x.reshape(x.shape[0], m, self.own // m, *x.shape[2:])
        if m % n == 0 and all(way > 0 for way in self.ways):
            x = self._all_at_once(x, n, m, back)
        else:
            x = self._one_by_one(x, m, back)
        return x.reshape(x.shape[0], self.own, *x.shape[3:])

    def _all_at_once(self, x: jax.Array, n: int, m: int, back: bool) -> jax.Array:
        """Every rank has as many parts for every other. What it gets is parts of all ranks in turn, one round after another."""
        if back:
            x = x.reshape(x.shape[0], m // n, n, *x.shape[2:]).swapaxes(1, 2)
            x = x.reshape(x.shape[0], m, *x.shape[3:])
        x = exchange.all_to_all(x, self.axis, split=1, join=1)
        if back:
            return x
        x = x.reshape(x.shape[0], n, m // n, *x.shape[2:]).swapaxes(1, 2)
        return x.reshape(x.shape[0], m, *x.shape[3:])

    def _one_by_one(self, x: jax.Array, m: int, back: bool) -> jax.Array:
        """Of each place on a rank, and each place where its part goes, one transfer between all ranks that have such."""
        placed: list[Any] = [0] * m
        for step in range(m):
            for to in range(m):
                pairs = [(r, int(p) // m) for r, p in enumerate(self.parts[:, step]) if p % m == to]
                if pairs and back:
                    placed[step] += exchange.send(x[:, to], self.axis, [(there, here) for here, there in pairs])
                elif pairs:
                    placed[to] += exchange.send(x[:, step], self.axis, pairs)
        return jnp.stack(placed, 1)
