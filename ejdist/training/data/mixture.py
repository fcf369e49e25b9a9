"""A mixture: rows of several sources by weight, exact and computable for any row.

Rows come in blocks of `BLOCK`. Of each block a source has a fixed number, its weight to one part in `BLOCK`, at places that
are shuffled with the seed and the block; it has its rows there in turn. So the source of a row and its number follow from the
row's number alone; the shares are exact at the end of a block, and those of a random order before. Each source has epochs of
its own.

Weights are shares of rows, or of tokens (`data.weights_by`). A source whose rows hold half as many tokens, because the rest is
padding, then has twice as many rows: its mean over an epoch is known, so shares of tokens are exact over whole epochs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ejdist.training.data.packing import Rows, rows_of
from ejdist.training.data.shuffle import Shuffle
from ejdist.training.data.tokenizer import Tokenizer

BLOCK = 1 << 16
# What the order of rows began with before version 0.2.0, when the rows of a source in a block were shuffled.
MIXTURE_BEFORE = "mixture of"
_OPTIONAL = ("text_key", "format", "loss_on", "chat_template")
_MOST = 1e300  # of a weight, so that the sum of all is a number


@dataclass(frozen=True)
class Mixture:
    """Sources and their shares.

    Attributes:
      parts: each a corpus or a dataset.
      counts: rows of each part in a block, where all rows hold equally many tokens.
      weights: of each part, if they are shares of tokens; None if they are shares of rows.
    """

    parts: tuple[Any, ...]
    counts: tuple[int, ...]
    weights: tuple[float, ...] | None = None

    def counts_for(self, rows: Sequence[Rows]) -> tuple[int, ...]:
        """Returns how many rows of a block each part has, of these rows of the parts.

        Raises:
          ValueError: a part would have less than one row of a block.
        """
        if self.weights is None:
            return self.counts
        return counts_of([w / r.tokens_per_row for w, r in zip(self.weights, rows, strict=True)], self.weights)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.parts[0].tokenizer

    @property
    def num_tokens(self) -> int:
        return sum(p.num_tokens for p in self.parts)

    @property
    def num_documents(self) -> int:
        return sum(p.num_documents for p in self.parts)

    @property
    def fingerprint(self) -> str:
        by = [] if self.weights is None else ["tokens"]
        content = json.dumps([[p.fingerprint for p in self.parts], self.counts, *by])
        return hashlib.sha256(content.encode()).hexdigest()[:24]


def counts_of(weights: Sequence[Any], named: Sequence[Any] | None = None) -> tuple[int, ...]:
    """Returns how many rows of a block each weight has; the largest remainders are rounded up.

    Args:
      named: the weights as the recipe has them, for messages; default: these.

    Raises:
      ValueError: a weight is no positive number, or too small a share to have a row.
    """
    for i, weight in enumerate(weights):
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (number and 0 < weight < _MOST):
            raise ValueError(
                f"data.mixture[{i}].weight must be a number above 0 and below {_MOST:g}, got {weight!r}; leave a source out "
                "for 0"
            )
    shares = [weight / math.fsum(weights) * BLOCK for weight in weights]
    counts = [math.floor(s) for s in shares]
    remainders = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in remainders[: BLOCK - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        i = counts.index(0)
        raise ValueError(
            f"data.mixture[{i}].weight = {(named or weights)[i]} is less than one row in {BLOCK:,} of the mixture; raise "
            "it, or leave the source out"
        )
    return tuple(counts)


def check_sections(mixture: Any, source: Any) -> list[dict[str, Any]]:
    """Returns the sources of `data.mixture`, each with source and weight.

    Raises:
      ValueError: it is not a list of them, or `data.source` is set beside it.
    """
    example = "data.mixture='[{source: web, weight: 0.7}, {source: code, weight: 0.3}]'"
    if source is not None:
        raise ValueError(
            f"data.mixture and data.source = {source!r} are both set; name the sources in data.mixture alone, with data=files"
        )
    if not isinstance(mixture, list) or not mixture or not all(isinstance(part, dict) for part in mixture):
        raise ValueError(f"data.mixture = {mixture!r}: give a list of sources with weights, for example {example}")
    for i, part in enumerate(mixture):
        missing, unknown = (
            {"source", "weight"} - set(part),
            sorted(map(str, set(part) - {"source", "weight", *_OPTIONAL})),
        )
        if missing or unknown:
            wrong = f"has no {sorted(missing)[0]}" if missing else f"has an unknown key {unknown[0]!r}"
            raise ValueError(
                f"data.mixture[{i}] {wrong}; a source has source, weight, and {', '.join(_OPTIONAL)} where it differs"
            )
    return mixture


class MixedRows:
    """Rows of a mixture. `first`: the row of each part that its rows begin with; default: 0."""

    def __init__(
        self, parts: Sequence[Rows], counts: Sequence[int], seed: int, first: Sequence[int] | None = None
    ) -> None:
        self.parts, self.counts = parts, counts
        self.first = [0] * len(parts) if first is None else list(first)
        self.length = parts[0].length
        self.rows_per_epoch = sum(p.rows_per_epoch for p in parts)
        self.order = f"mixture in turn of {', '.join(p.order for p in parts)}"
        self.seed = seed
        self._block = functools.lru_cache(maxsize=4)(self._make_block)

    def _make_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (the part of each row of a block, how many rows of that part are before it in the block)."""
        slots = Shuffle(BLOCK, self.seed, "mixture", block).first(BLOCK)
        parts = np.searchsorted(np.cumsum(self.counts), slots, side="right")
        before = np.empty(BLOCK, np.int64)
        for part, count in enumerate(self.counts):
            before[parts == part] = np.arange(count)
        return parts, before

    def place(self, index: int) -> tuple[int, int]:
        """Returns (source, the number of its row) for a row of the mixture."""
        block, offset = divmod(index, BLOCK)
        parts, before = self._block(block)
        part = int(parts[offset])
        return part, self.first[part] + block * self.counts[part] + int(before[offset])

    def rows_of_parts(self, count: int) -> list[int]:
        """Returns how many of the first `count` rows are of each part."""
        blocks, rest = divmod(count, BLOCK)
        partial = np.bincount(self._block(blocks)[0][:rest], minlength=len(self.parts))
        return [blocks * whole + int(more) for whole, more in zip(self.counts, partial, strict=True)]

    @property
    def tokens_per_row(self) -> float:
        """Mean tokens of a row, without padding."""
        total = sum(count * part.tokens_per_row for count, part in zip(self.counts, self.parts, strict=True))
        return total / sum(self.counts)

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Returns the row of that number; see `filled_row`."""
        return self.rows([index])[0]

    def rows(self, indices: Iterable[int]) -> list[dict[str, np.ndarray]]:
        """Returns the rows of those numbers; those of a part are read together."""
        places = [self.place(index) for index in indices]
        made = {
            part: iter(rows_of(self.parts[part], [number for of, number in places if of == part]))
            for part in {part for part, _ in places}
        }
        return [next(made[part]) for part, _ in places]

    @property
    def bytes_of_lengths(self) -> int:
        return sum(getattr(part, "bytes_of_lengths", 0) for part in self.parts)

    def squares(self, numbers: Sequence[int]) -> np.ndarray:
        """Returns of each of those rows the sum of the squares of the lengths of its documents, where all parts say; see
        `Rows`."""
        places, found = np.array([self.place(index) for index in numbers]), np.empty(len(numbers))
        for part in np.unique(places[:, 0]):
            of = places[:, 0] == part
            found[of] = self.parts[part].squares(places[of, 1].tolist())  # pyrefly: ignore[missing-attribute]
        return found
