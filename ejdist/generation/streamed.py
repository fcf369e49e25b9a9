"""Decodes tokens as they arrive, up to the text that later tokens cannot change."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Streamed:
    """Text that grows with its tokens. An incomplete character, and what may be the start of a stop string, is held back."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        self._tokens: list[int] = []
        self._shown = 0  # characters returned so far

    def add(self, token: int) -> str:
        """Returns the new text that later tokens cannot change."""
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
        """Returns what was not returned yet of the finished text."""
        return text[self._shown :]
