"""Words that occur most often: the tasks cwe and fwe."""

from __future__ import annotations

import math

import numpy as np

from ejdist.evaluation.ruler.samples import Case, Sources
from ejdist.evaluation.ruler.words import Rng, different, letters, word

_COMMON = 10  # words that the answer of cwe has
_SHORT = 4096  # tokens; a shorter prompt of cwe repeats its words less often
_NOISE = "..."
_TOP = 3  # words that the answer of fwe has
_ALPHA = 2.0
_ZETA = math.pi**2 / 6  # of _ALPHA
# From this amount on, the third coded word is there more often than the fourth, whatever is rounded.
_LEAST_CODED = math.ceil(_ZETA / (4**-_ALPHA - 5**-_ALPHA))


def common_words(rng: Rng, depth: float, number: int, length: int, sources: Sources) -> Case:
    """Returns a case of cwe: a numbered list in which ten words are more common, after an example with a shorter one."""
    often, seldom, shown_words, shown_often, shown_seldom = (6, 1, 20, 3, 1) if length < _SHORT else (30, 3, 40, 10, 3)
    seeds = rng.integers(2**32, size=2)

    def part(size: int, often: int, seldom: int, seed: int, taken: set[str]) -> tuple[str, list[str]]:
        # Words of six letters each: none is in another, so that no answer is right by chance.
        part_rng = np.random.default_rng(seed)
        words = different(lambda: word(part_rng, 3), size, taken)
        listed = np.asarray(words[:_COMMON] * often + words[_COMMON:] * seldom, object)
        listed = listed[part_rng.permutation(len(listed))]
        asked = (
            "The numbered list below has words that occur more often than the others. Remember those.\n"
            f"{' '.join(f'{i}. {w}' for i, w in enumerate(listed, 1))}\n"
            "Question: Which 10 words are the most common ones in this list? Answer: The 10 most common words in this list are:"
        )
        return asked, words[:_COMMON]

    taken: set[str] = set()
    shown, its_answer = part(shown_words, shown_often, shown_seldom, int(seeds[0]), taken)
    example = f"{shown}{_numbered(its_answer)}\n"
    first = part(_COMMON, often, seldom, int(seeds[1]), set(taken))[1]

    def text(size: int) -> str:
        return example + part(_COMMON + size, often, seldom, int(seeds[1]), set(taken))[0]

    return Case(tuple(first), _numbered(first), text, "words that are less common")


def _numbered(words: list[str]) -> str:
    return "".join(f" {i}. {w}" for i, w in enumerate(words, 1))


def frequent_words(rng: Rng, depth: float, number: int, length: int, sources: Sources) -> Case:
    """Returns a case of fwe: coded words as often as a zeta distribution has them, the most frequent of which is noise."""
    kinds = max(length // 50, _TOP + 2)
    words = [_NOISE, *different(lambda: letters(rng, 6), kinds - 1)]
    seed = int(rng.integers(2**32))

    def text(size: int) -> str:
        counts = (size * np.arange(1, kinds + 1) ** -_ALPHA / _ZETA).astype(int)
        listed = np.repeat(np.asarray(words, object), counts)
        listed = listed[np.random.default_rng(seed).permutation(len(listed))]
        return (
            "The text below is coded. Count how often each coded word is in it, and name the three most frequent ones. "
            f"{' '.join(listed)}\nQuestion: Which three words are the most frequent ones in the coded text above? Leave out "
            "the dots '...', and do not explain. Answer: The three most frequent words in the coded text above are:"
        )

    top = words[1 : _TOP + 1]
    return Case(tuple(top), f" {', '.join(top[:-1])}, and {top[-1]}.", text, "coded words", least=_LEAST_CODED)
