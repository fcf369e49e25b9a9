"""Needles in a haystack, and variables that are assigned to each other: the tasks niah_* and vt."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from ejdist.evaluation.ruler.samples import Case, Sources
from ejdist.evaluation.ruler.words import KINDS, NOISE, Rng, different, digits, letters

_HOPS = 4  # assignments after the first one of a chain
_EXAMPLE = 5  # lines of noise in the example of vt


@dataclass(frozen=True)
class Needles:
    """The needles of a task: RULER's arguments of niah.

    Attributes:
      haystack: "noise", a line that repeats; "essay", sentences; "needle", needles with other keys and values.
      keys, values: "words", "numbers" or "uuids".
      num_keys: different keys in the prompt; those that are not asked for are distractors.
      num_values: values of each key, all of which are asked for.
      num_asked: keys that the question names.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_asked: int = 1

    def __call__(self, rng: Rng, depth: float, number: int, length: int, sources: Sources) -> Case:
        """Returns what a prompt hides and asks for. The first needle stands at `depth`, the others anywhere."""
        keys = different(lambda: KINDS[self.keys](rng), self.num_keys)
        drawn = different(lambda: KINDS[self.values](rng), self.num_keys * self.num_values)
        values = np.reshape(np.asarray(drawn, object), (self.num_keys, self.num_values))
        needles = [self._needle(k, v) for k, of_key in zip(keys, values, strict=True) for v in of_key]
        places = [depth, *rng.random(len(needles) - 1).tolist()]
        # The key whose needle stands at the depth is among those that are asked for.
        asked = [0, *(1 + rng.permutation(self.num_keys - 1)[: self.num_asked - 1]).tolist()]
        asked = [asked[i] for i in rng.permutation(len(asked))]
        references = tuple(str(v) for i in asked for v in values[i])
        one = len(references) == 1
        kind = self.values[:-1] if one else self.values
        query = _listed([keys[i] for i in asked])
        start = int(rng.integers(len(sources.essays.ends)))
        seed = int(rng.integers(2**32))

        def context(size: int) -> str:
            hidden = sorted(zip(places, needles, strict=True))
            if self.haystack == "essay":
                return sources.essays.hide(hidden, size, start)
            return "\n".join(_among(self._lines(size, seed, set(keys)), hidden))

        def text(size: int) -> str:
            is_hidden = f"A special magic {kind} is" if one else f"Several special magic {kind} are"
            asks = f"What is the special magic {kind}" if one else f"What are all the special magic {kind}"
            starts = f"The special magic {kind} for {query} in this text {'is' if one else 'are'}"
            return (
                f"{is_hidden} hidden in the text below. Read with care: you will be asked about the {kind} at its end.\n"
                f"{context(size)}\n{asks} for {query} in this text? {starts}"
            )

        unit = "words of text" if self.haystack == "essay" else "lines"
        return Case(references, f" {_listed(references)}.", text, unit, once=references, depth=depth)

    def _needle(self, key: str, value: str) -> str:
        return f"Remember that a special magic {self.values[:-1]} for {key} is {value}."

    def _lines(self, size: int, seed: int, keys: set[str]) -> list[str]:
        """Returns the lines of a haystack. Distractors never have a key of the prompt, nor each other's."""
        if self.haystack == "noise":
            return [NOISE] * size
        rng = np.random.default_rng(seed)
        return [
            self._needle(key, KINDS[self.values](rng)) for key in different(lambda: KINDS[self.keys](rng), size, keys)
        ]


def _among(lines: list[str], hidden: list[tuple[float, str]]) -> list[str]:
    """Returns the lines, with each needle at its depth: 0 before the first line, 1 after the last."""
    mixed: list[str] = []
    start = 0
    for depth, needle in hidden:
        stop = round(depth * len(lines))
        mixed += [*lines[start:stop], needle]
        start = stop
    return mixed + lines[start:]


def _listed(words: list[str] | tuple[str, ...]) -> str:
    """Returns "a", or "a, b, and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, and {words[-1]}"


def variable_tracking(rng: Rng, depth: float, number: int, length: int, sources: Sources) -> Case:
    """Returns a case of vt: one value, which five variables get from each other, and before it an example with another one."""
    names = different(lambda: letters(rng, 5, upper=True), 2 * (_HOPS + 1))
    values = different(lambda: digits(rng, 5), 2)
    asked, others = names[: _HOPS + 1], names[_HOPS + 1 :]
    # Sorted, so that a variable is assigned before it is used.
    places = [sorted(rng.random(_HOPS + 1).tolist()) for _ in range(2)]

    def part(variables: list[str], value: str, depths: list[float], size: int) -> str:
        chain = [f"VAR {variables[0]} = {value}"]
        chain += [f"VAR {later} = VAR {one}" for one, later in itertools.pairwise(variables)]
        context = "\n".join(_among([NOISE] * size, list(zip(depths, chain, strict=True))))
        return (
            "Somewhere in the text below variables are assigned, one after another. Keep track of them.\n\n"
            f"{context}\nQuestion: Which variables have the value {value} in the text above? "
            f"Answer: By the assignments in the text above, {len(variables)} variables have the value {value}, they are:"
        )

    answer = " " + " ".join(asked)
    example = part(others, values[1], places[1], _EXAMPLE) + " " + " ".join(others) + "\n\n"
    return Case(tuple(asked), answer, lambda size: example + part(asked, values[0], places[0], size), "lines")
