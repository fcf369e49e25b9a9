"""Allocates cache pages to requests; requests whose prompts begin alike share pages."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ejdist.generation.sparse_step import units_of
from ejdist.models.kept import Kept


class Pages:
    """The pages of a cache. Requests take them, share those of a common prefix, and leave them cached until others need the
    room.

    A full page of a prompt is identified by a digest of all tokens up to its end, which determine its keys and values.

    Over several ranks each has as many pages, numbered rank after rank, and a run of each request: its first pages are on the
    first rank.
    """

    def __init__(self, count: int, page: int, shares: bool, ranks: int = 1, run: int | None = None) -> None:
        """Args:
        count: pages of all ranks. page: tokens of a page. shares: whether requests may share pages; not where layers keep
          more than pages. run: most pages of a request on a rank; default: all.
        """
        self.count, self.page, self.shares = count, page, shares
        self._run = run or count
        self.ranks, self._each = ranks, count // ranks
        self._free = [list(range(r * self._each, (r + 1) * self._each))[::-1] for r in range(ranks)]
        self._users: Counter[int] = Counter()
        self._known: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}  # of the identified pages
        # Of each rank: identified pages in no use, least recently used first.
        self._kept: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(ranks)]

    @property
    def room(self) -> int:
        """The number of pages that a request can take."""
        room = 0
        for free, kept in zip(self._free, self._kept, strict=True):
            there = len(free) + len(kept)
            room += min(there, self._run)
            if there < self._run:
                break
        return room

    def take(self, count: int) -> list[int]:
        """Returns pages for a request, in order; at most `room`."""
        pages = []
        for i in range(count):
            free, kept = self._free[i // self._run], self._kept[i // self._run]
            if not free:
                page, _ = kept.popitem(last=False)
                self._unknown(page)
                free.append(page)
            pages.append(free.pop())
        self._users.update(pages)
        return pages

    def release(self, pages: list[int]) -> None:
        """Releases the pages of a request."""
        for page in reversed(pages):  # the end of a prompt, which fewer requests share, is evicted first
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            rank = page // self._each
            if page in self._digests:
                self._kept[rank][page] = None
            else:
                self._free[rank].append(page)

    def shared(self, digests: list[bytes]) -> list[int]:
        """Returns the cached pages that match the start of a prompt, given the digests of its pages, and takes them."""
        pages = []
        for digest in digests:
            if digest not in self._known:
                break
            pages.append(self._known[digest])
        for page in pages:
            self._kept[page // self._each].pop(page, None)
        self._users.update(pages)
        return pages

    def publish(self, page: int, digest: bytes) -> None:
        """Lets later requests share a page; its keys and values must be written."""
        if self.shares and digest not in self._known:
            self._known[digest], self._digests[page] = page, digest

    def forget(self) -> None:
        """Lets no later request share the present pages: the parameters have changed."""
        for page in list(self._digests):
            self._unknown(page)
        for free, kept in zip(self._free, self._kept, strict=True):
            free += kept
            kept.clear()

    def digests(self, prompt: np.ndarray) -> list[bytes]:
        """Returns a digest of each page of a prompt that others may share: the full ones, without the last token, which is
        always computed, since its logits choose the next one."""
        if not self.shares:
            return []
        running, digests = hashlib.sha256(), []
        for end in range(self.page, len(prompt), self.page):
            running.update(prompt[end - self.page : end].astype(np.int32).tobytes())
            digests.append(running.digest())
        return digests

    def _unknown(self, page: int) -> None:
        del self._known[self._digests.pop(page)]


def ranks_of(cache: str, axes: Sequence[str], mesh: jax.sharding.Mesh | None, paged: bool) -> int:
    """Returns over how many ranks the pages of a request are spread.

    Args:
      cache: "whole" or "spread". axes: that split a sequence in training. paged: whether any layer keeps pages.

    Raises:
      ValueError: of argument `cache` of an engine.
    """
    if cache not in ("whole", "spread"):
        raise ValueError(f"Engine: argument 'cache' = {cache!r} must be 'whole' or 'spread'")
    if cache == "whole":
        return 1
    ranks = 1 if mesh is None else math.prod(mesh.shape.get(a, 1) for a in axes)
    if ranks == 1:
        raise ValueError(
            "Engine: argument 'cache' = 'spread' needs a mesh with several devices along an axis that splits a sequence in "
            "training (sp or cp): give one, or use 'whole'"
        )
    if not paged:
        raise ValueError(
            "Engine: argument 'cache' = 'spread' spreads keys and values, and no layer of this model keeps them: use 'whole'"
        )
    return ranks


def check_count(declared: Mapping[str, tuple[int, Mapping[str, Kept]]], count: int, page: int) -> None:
    """Raises ValueError if int32 cannot count the entries of the pages of all layers of a kind.

    Args:
      declared: of a kind of layer, how many there are and what they keep. count: of pages. page: entries of one.
    """
    for layers, kept in declared.values():
        if any(k.per_token for k in kept.values()) and layers * count * page >= 2**31:
            raise ValueError(
                f"Engine: {layers} layers with {count:,} pages of {page} tokens are {layers * count * page:,} entries, more "
                "than int32 counts: use fewer 'slots', a smaller 'length', or fewer 'pages'"
            )


def arrays_of(
    kept: Kept, layers: int, slots: int, pages: Pages, dtype: Any
) -> list[tuple[tuple[int, ...], list[str], Any]]:
    """Returns (shape, dims, dtype) of each array in which layers keep what an operation declares, for that many slots, or in
    pages, whose rows have that dtype."""
    each = [(shape, dims.split()) for shape, dims in kept.arrays]
    if not kept.per_token:
        return [((layers, slots, *shape), ["_", "_", *dims], np.float32) for shape, dims in each]
    lead = (pages.ranks, layers, pages.count // pages.ranks)
    beside = [(pages.page, dtype)]
    if kept.block is not None and pages.ranks == 1:
        beside.append((units_of(pages.page, kept.block), np.float32))
    return [
        ((*lead, count, *shape), ["pages", "_", "_", "_", *dims], kind)
        for count, kind in beside
        for shape, dims in each
    ]


def bytes_on_device(arrays: Any, places: Any) -> int:
    """Returns the bytes of arrays on each device. places: their shardings; None for one device."""
    leaves = jax.tree.leaves(arrays)
    shapes = [x.shape for x in leaves]
    if places is not None:
        shapes = [p.shard_shape(shape) for p, shape in zip(jax.tree.leaves(places), shapes, strict=True)]
    return sum(math.prod(shape) * x.dtype.itemsize for shape, x in zip(shapes, leaves, strict=True))
