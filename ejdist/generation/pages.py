"""Which pages of the cache requests have, and which of them hold the beginning of a prompt that others share."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict

import numpy as np


class Pages:
    """The pages of a cache: taken by requests, shared where prompts begin alike, and kept after a request as long as no other
    needs the room.

    A full page of a prompt is known by a digest of all tokens up to its end, on which its keys and values depend.
    """

    def __init__(self, count: int, page: int, shares: bool) -> None:
        """Args:
        page: tokens of a page. shares: whether requests may share pages; not where layers keep more than pages.
        """
        self.count, self.page, self.shares = count, page, shares
        self._free = list(range(count))[::-1]
        self._users: Counter[int] = Counter()
        self._known: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}  # of the known pages
        self._kept: OrderedDict[int, None] = OrderedDict()  # known pages that nobody uses, the longest unused first

    @property
    def room(self) -> int:
        """How many pages can be taken."""
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
        """Takes the pages of a request back."""
        for page in reversed(pages):  # of a prompt, what fewer others can share goes first
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            if page in self._digests:
                self._kept[page] = None
            else:
                self._free.append(page)

    def shared(self, digests: list[bytes]) -> list[int]:
        """Returns the known pages that a prompt begins with, of the digests of its pages; they are then also its own."""
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
        """Makes a page known, whose keys and values are written."""
        if self.shares and digest not in self._known:
            self._known[digest], self._digests[page] = page, digest

    def forget(self) -> None:
        """Makes all pages unknown, as when the parameters change."""
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
