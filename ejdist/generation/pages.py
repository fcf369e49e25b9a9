"""Allocates cache pages to requests; requests whose prompts begin alike share pages."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict

import numpy as np


class Pages:
    """The pages of a cache. Requests take them, share those of a common prefix, and leave them cached until others need the
    room.

    A full page of a prompt is identified by a digest of all tokens up to its end, which determine its keys and values.
    """

    def __init__(self, count: int, page: int, shares: bool) -> None:
        """Args:
        page: tokens of a page. shares: whether requests may share pages; not where layers keep more than pages.
        """
        self.count, self.page, self.shares = count, page, shares
        self._free = list(range(count))[::-1]
        self._users: Counter[int] = Counter()
        self._known: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}  # of the identified pages
        self._kept: OrderedDict[int, None] = OrderedDict()  # identified pages in no use, least recently used first

    @property
    def room(self) -> int:
        """The number of pages that can be taken."""
        return len(self._free) + len(self._kept)

    def take(self, count: int) -> list[int]:
        """Returns pages for a request; at most `room`."""
        pages = []
        for _ in range(count):
            if not self._free:
                page, _ = self._kept.popitem(last=False)
                self._unknown(page)
                self._free.append(page)
            pages.append(self._free.pop())
        self._users.update(pages)
        return pages

    def release(self, pages: list[int]) -> None:
        """Releases the pages of a request."""
        for page in reversed(pages):  # the end of a prompt, which fewer requests share, is evicted first
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            if page in self._digests:
                self._kept[page] = None
            else:
                self._free.append(page)

    def shared(self, digests: list[bytes]) -> list[int]:
        """Returns the cached pages that match the start of a prompt, given the digests of its pages, and takes them."""
        pages = []
        for digest in digests:
            if digest not in self._known:
                break
            pages.append(self._known[digest])
        for page in pages:
            self._kept.pop(page, None)
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
        self._free += self._kept
        self._kept.clear()

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
