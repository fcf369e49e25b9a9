"""A scheme with its work or its transfers left out, and one rank of several on one device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from ejdist.sequence import Scheme, exchange, hops
from ejdist.sequence.halo import HaloCall
from ejdist.sequence.local import Local
from kernels.framework.binding import is_float_array

Arrays = dict[str, jax.Array]


@contextlib.contextmanager
def one_rank(rank: Any, ranks: int, whole: Arrays, missing: dict[str, Any]) -> Iterator[None]:
    """A context in which code of a rank is traced for rank `rank` of `ranks`, and no axis of a mesh is asked.

    Args:
      rank: int32, may be traced.
      whole: what is gathered of all ranks, by name, [B, T, ...] in the order of the ranks; of keys by shape, see `named`.
      missing: is given the shape of what is gathered of keys and is not in `whole`, by name.
    """

    def arrived(name: str, x: jax.Array) -> jax.Array:
        if not is_float_array(x):
            return whole[name]
        shape = (x.shape[0], ranks * x.shape[1], *x.shape[2:])
        if named(shape) not in whole:
            missing[named(shape)] = jax.ShapeDtypeStruct(shape, x.dtype)
            return jnp.zeros(shape, x.dtype)
        # Not before what would be sent is there, and what it is sent after.
        return jax.lax.optimization_barrier((whole[named(shape)], x))[0]

    def gather(tree: Any, axis: Any, dim: int = 1) -> Any:
        # By itself comes a row's segment ids, of queries or of keys.
        return (
            {n: arrived(n, x) for n, x in tree.items()} if isinstance(tree, dict) else arrived("kv_segment_ids", tree)
        )

    def alike(numbers: Any, *_: Any, **__: Any) -> Any:
        return numbers  # which chunks others need is which ones this rank does, and it makes as many passes as it needs

    here = mock.patch.multiple(exchange, rank=lambda axis: rank, size=lambda axis: ranks, gather=gather)
    with here, mock.patch.multiple(exchange, all_to_all=alike, greatest=alike):
        yield


def named(shape: tuple[int, ...]) -> str:
    """Returns the name of keys of all ranks of that shape."""
    return "x".join(map(str, shape))


def of_rank(x: jax.Array, rank: Any, ranks: int) -> jax.Array:
    """Returns a rank's part of an array [B, T, ...] in the order of the ranks."""
    own = x.shape[1] // ranks
    return jax.lax.dynamic_slice_in_dim(x, rank * own, own, 1)


def _as(kind: type[Local], local: Local) -> Any:
    return kind(**{f.name: getattr(local, f.name) for f in fields(Local)})


@dataclass(frozen=True)
class Work(Scheme):
    """A scheme in whose place nothing travels but segment ids, by which kernels skip: what would arrive is this rank's own.

    sums: whether what is left of gradients that go to other ranks is all of them in one, so that results can be compared;
      else the rank's own.
    copies: whether keys of all ranks are copies of the rank's own; else they are gathered as the context has it.
    """

    scheme: Scheme
    sums: bool = False
    copies: bool = True

    def takes_sinks(self, local: Local) -> bool:
        return self.scheme.takes_sinks(local)

    def counts_hops(self, local: Local) -> bool:
        return self.scheme.counts_hops(local)

    def forward(self, local: Local) -> tuple[jax.Array, jax.Array]:
        with self._staying():
            return self.scheme.forward(local)

    def backward(self, local: Local, saved: Arrays) -> Arrays:
        with self._staying():
            return self.scheme.backward(local, saved)

    @contextlib.contextmanager
    def _staying(self) -> Iterator[None]:
        real, real_all_to_all, home, leaving = exchange.gather, exchange.all_to_all, HaloCall.home, []

        def stay(tree: Any, *_: Any, **__: Any) -> Any:
            # The compiler is not to see that a loop has the same keys every time.
            return jax.lax.optimization_barrier(tree) if jax.tree.leaves(tree) else tree

        def gather(tree: Any, axis: Any, dim: int = 1) -> Any:
            def copies(x: jax.Array) -> jax.Array:
                return jnp.concatenate([x] * exchange.size(axis), dim)

            if not self.copies:
                return real(tree, axis, dim)
            if not isinstance(tree, dict):
                return copies(tree) if is_float_array(tree) else real(tree, axis, dim)
            floats = {name: copies(x) for name, x in tree.items() if is_float_array(x)}
            return floats | real({name: x for name, x in tree.items() if name not in floats}, axis, dim)

        def scatter_sum(tree: Any, axis: Any) -> Any:
            def part(x: jax.Array) -> jax.Array:
                ranks = exchange.size(axis)
                of_ranks = x.reshape(x.shape[0], ranks, -1, *x.shape[2:])
                return of_ranks.sum(1) if self.sums else of_rank(x, exchange.rank(axis), ranks)

            return jax.tree.map(part, tree)

        def all_to_all(tree: Any, axis: Any, split: int, join: int) -> Any:
            times = exchange.size(axis)
            if not is_float_array(tree):  # which chunks of keys the ranks need
                return real_all_to_all(tree, axis, split, join)
            if split == join:
                return stay(tree)

            def move(x: jax.Array) -> jax.Array:
                part = jax.lax.slice_in_dim(x, 0, x.shape[split] // times, axis=split)
                return jnp.concatenate([part] * times, join)

            return jax.tree.map(move, tree)

        def send(tree: Any, axis: Any, pairs: Any) -> Any:
            # What arrives, and of gradients on their way home what leaves: those pairs are (the rank that had it, its owner).
            concerned = np.isin(np.arange(exchange.size(axis)), [pair[0 if leaving else 1] for pair in pairs])
            here = jnp.asarray(concerned)[exchange.rank(axis)]
            return stay(jax.tree.map(lambda x: jnp.where(here, x, 0), tree))

        def sent_home(halo: HaloCall, grads: Arrays) -> Arrays:
            leaving.append(True)
            try:
                return home(halo, grads)
            finally:
                leaving.pop()

        kept = functools.partial(mock.patch.multiple, exchange, shift=stay, send=send, gather=gather)
        with kept(scatter_sum=scatter_sum, all_to_all=all_to_all), mock.patch.object(HaloCall, "home", sent_home):
            yield


def _touched(x: jax.Array, arrived: Arrays, weight: int = 1) -> jax.Array:
    """Returns the array with a number added that depends on everything that arrived, so that none of it need not arrive.

    weight: different ones keep equal arrays from being sent as one.
    """
    numbers = (a[(0,) * a.ndim].astype(jnp.float32) for a in arrived.values())
    return x.at[(0,) * x.ndim].add((weight * sum(numbers, jnp.float32(0))).astype(x.dtype))


class _WithoutWork(Local):
    """A rank's part of a call that computes next to nothing of the keys that arrive."""

    in_place = False

    def _everything(self, keys: Arrays) -> Arrays:
        return {**keys, "query": self.query} | _ids(self)

    def attend(self, keys: Arrays, holders: Any) -> tuple[jax.Array, jax.Array]:
        shape, arrived = (*self.query.shape[:3], self.keys["value"].shape[3]), self._everything(keys)
        out = _touched(self.full(shape).astype(self.query.dtype), arrived)
        return out, _touched(self.full(shape[:3]), arrived)

    def attend_to(self, keys: Arrays, mask: Any) -> tuple[jax.Array, jax.Array]:
        return self.attend(keys, None)

    def pull_from(self, saved: Arrays, keys: Arrays, mask: Any) -> Arrays:
        return {**self.pull(saved, keys, None), **{n: _touched(x, keys, 7) for n, x in keys.items()}}

    def pull(self, saved: Arrays, keys: Arrays, holders: Any) -> Arrays:
        wide = {**self.own, "key": keys["key"], "value": keys["value"]}
        arrived = {**keys, "query": self.query} | saved
        if self.ranks == 1:  # else ids are those of the forward
            arrived |= _ids(self)
        return {
            n: _touched(self.full(x.shape).astype(x.dtype), arrived, weight)
            for weight, (n, x) in enumerate(wide.items(), 1)
            if is_float_array(x)
        }


def _ids(local: Local) -> Arrays:
    return {name: getattr(local.mask, name) for name in local.mask.data_fields}


def _attended(local: Local, hop: Any, keys: Arrays, sofar: Any, as_made: bool = False) -> tuple[jax.Array, jax.Array]:
    if sofar is None:
        shape = (*local.query.shape[:3], local.keys["value"].shape[3])
        sofar = _touched(local.full(shape), _ids(local)), local.full(shape[:3])
    return sofar[0], _touched(sofar[1], keys)


def _pulled(
    local: Local, saved: Arrays, hop: Any, keys: Arrays, own: Any, sums: Any, as_made: bool = False
) -> tuple[Arrays, Arrays]:
    if own is None:
        own = {n: local.full(x.shape) for n, x in local.own.items() if is_float_array(x)}
    if sums is None:
        sums = {n: local.full(x.shape) for n, x in local.keys.items()}
    return own, {n: _touched(x, keys, weight) for weight, (n, x) in enumerate(sums.items(), 1)}


@dataclass(frozen=True)
class Transfers(Scheme):
    """A scheme that sends what it sends and attends to nothing."""

    scheme: Scheme

    def counts_hops(self, local: Local) -> bool:
        return self.scheme.counts_hops(local)

    def forward(self, local: Local) -> tuple[jax.Array, jax.Array]:
        with _without_work():
            return self.scheme.forward(_as(_WithoutWork, local))

    def backward(self, local: Local, saved: Arrays) -> Arrays:
        with _without_work():
            return self.scheme.backward(_as(_WithoutWork, local), saved)


def _without_work() -> Any:
    return mock.patch.multiple(hops, attended=_attended, pulled=_pulled)
