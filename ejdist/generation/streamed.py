"""The text of tokens as they come: what is certain not to change."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Streamed:
    """Text that grows with its tokens. Held back: a character that is not whole, and what may begin a string that stops it."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._tokens: list[int] = []
        self._shown = 0  # characters that were returned

    def add(self, token: int) -> str:
        """Returns the text that is certain after this token."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        certain = len(text)
        while certain and text[certain - 1] == "\ufffd":
            certain -= 1
        for one in self._stop:
            ends = (n for n in range(min(len(one), certain), 0, -1) if text[:certain].endswith(one[:n]))
            certain = min(certain, len(text[:certain]) - next(ends, 0))
        new, self._shown = text[self._shown : certain], max(self._shown, certain)
        return new

    def rest(self, text: str) -> str:
        """Returns what is missing of the finished text."""
        return text[self._shown :]
