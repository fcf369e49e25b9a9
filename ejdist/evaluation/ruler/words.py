"""Words, numbers and texts of RULER's prompts: drawn, or read from a file that the user names."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Rng = np.random.Generator

_CONSONANTS, _VOWELS = "bcdfghjklmnprstvz", "aeiou"
_SYLLABLES = [c + v for c in _CONSONANTS for v in _VOWELS]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

_WHO = (
    "The baker|My neighbour|An old sailor|The teacher|Our guide|A young painter|The mayor|The librarian|Her brother|A farmer|"
    "The engineer|A stranger|The gardener|His aunt|The clockmaker|A student|The nurse|The ferryman|Their cousin|The judge"
)
_DID = (
    "repaired|carried|described|sold|painted|remembered|borrowed|counted|hid|measured|washed|sketched|ordered|moved|"
    "praised|lost|wrapped|opened|admired|returned"
)
_WHAT = (
    "the wooden ladder|a map of the valley|seven blue plates|the kitchen window|an unfinished letter|the brass lamp|"
    "two heavy crates|a basket of pears|the station clock|a pair of boots|the green notebook|an empty bottle|the garden gate|"
    "a woollen coat|the old piano|three silver spoons|a small telescope|the broken cart|a recipe for soup|the painted sign"
)
_WHEN = (
    "before the rain began|after a long winter|on the way to the market|while the others slept|without saying a word|"
    "when the train was late|early in the morning|at the edge of the village|during the festival|under the bridge|"
    "because the road was closed|and then went home|as the snow melted|near the harbour|with great care|for no clear reason|"
    "in the last week of August|between two meetings|although nobody had asked|on the far side of the hill"
)
# One line of the haystack "noise".
NOISE = "The river is wide. The road is long. The wind is cold. We walk on. Then we walk back."
_GENERATED = 4000  # sentences of the text that is used where no file is named
_PIECE = 40  # words after which a needle may stand, in a text without an end of a sentence


def word(rng: Rng, syllables: int) -> str:
    """Returns a word that can be spoken, two letters a syllable: words of as many syllables never contain each other."""
    return "".join(_SYLLABLES[i] for i in rng.integers(len(_SYLLABLES), size=syllables))


def key_word(rng: Rng) -> str:
    """Returns two words with a hyphen."""
    return f"{word(rng, 2)}-{word(rng, 2)}"


def digits(rng: Rng, count: int = 7) -> str:
    """Returns a number with exactly that many digits."""
    return str(rng.integers(10 ** (count - 1), 10**count))


def identifier(rng: Rng) -> str:
    """Returns a random UUID, version 4."""
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def letters(rng: Rng, count: int, upper: bool = False) -> str:
    """Returns a string of random letters."""
    drawn = "".join(_LETTERS[i] for i in rng.integers(26, size=count))
    return drawn.upper() if upper else drawn


KINDS: dict[str, Callable[[Rng], str]] = {"words": key_word, "numbers": digits, "uuids": identifier}


def different(draw: Callable[[], str], count: int, taken: set[str] | None = None) -> list[str]:
    """Returns `count` draws, all different and none of them in `taken`, which they are added to."""
    taken = set() if taken is None else taken
    drawn: list[str] = []
    while len(drawn) < count:
        if (one := draw()) not in taken:
            taken.add(one)
            drawn.append(one)
    return drawn


@dataclass(frozen=True)
class Essays:
    """A text that needles are hidden in, without an end: past its last word comes its first.

    Attributes:
      name: where it comes from.
      words: those of the text, in order.
      ends: int [many], rising: after how many words a sentence ends; the last one is the number of words.
    """

    name: str
    words: tuple[str, ...]
    ends: np.ndarray

    @classmethod
    def of(cls, text: str, name: str) -> Essays:
        """Returns those of a text. Where no sentence ends for long, a needle may stand after every 40 words."""
        words, ends = tuple(text.split()), []
        for i, one in enumerate(words, 1):
            if re.search(r"[.!?][\"')\]]*$", one) or i - (ends[-1] if ends else 0) >= _PIECE or i == len(words):
                ends.append(i)
        return cls(name, words, np.asarray(ends, np.int64))

    @classmethod
    def read(cls, path: str, key: str = "essays") -> Essays:
        """Returns those of a text file. Raises ValueError, naming the key: it cannot be read, or has no words."""
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ValueError(f"{key} = {path!r} cannot be read: {why}; name a text file, or leave it out") from None
        if not text.split():
            raise ValueError(f"{key} = {path!r} has no words; name a text file, or leave it out")
        return cls.of(text, path)

    @classmethod
    def generated(cls) -> Essays:
        """Returns sentences from a small grammar, always the same ones: about 45,000 words."""
        rng = np.random.default_rng(20240409)
        parts = [part.split("|") for part in (_WHO, _DID, _WHAT, _WHEN)]
        drawn = zip(*(rng.integers(len(p), size=_GENERATED) for p in parts), strict=True)
        sentences = [" ".join(p[i] for p, i in zip(parts, picks, strict=True)) + "." for picks in drawn]
        return cls.of(" ".join(sentences), "generated sentences")

    def hide(self, needles: list[tuple[float, str]], size: int, start: int) -> str:
        """Returns that many words of the text, with each needle after the sentence that ends nearest to its depth.

        Args:
          needles: (depth from 0 to 1, sentence) of each.
          start: index into `ends` of the sentence that the text begins after.
        """
        total, first = len(self.words), int(self.ends[start])
        laps = np.arange((first + size) // total + 1)[:, None] * total
        places = np.unique(np.concatenate([[0], (self.ends + laps).reshape(-1) - first, [size]]))
        places = places[(places >= 0) & (places <= size)]
        position = 0
        parts: list[str] = []
        for depth, sentence in sorted(needles):
            stop = int(places[np.abs(places - depth * size).argmin()])
            parts += [*self._span(first + position, first + stop), sentence]
            position = stop
        return " ".join([*parts, *self._span(first + position, first + size)])

    def _span(self, start: int, stop: int) -> list[str]:
        total, words = len(self.words), []
        while start < stop:
            part = self.words[start % total : min(start % total + stop - start, total)]
            words += part
            start += len(part)
        return words
