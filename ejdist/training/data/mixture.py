"""A mixture: rows of several sources by weight, exact and computable for any row.

Rows come in blocks of `BLOCK`. Of each block a source has a fixed number, its weight to one part in `BLOCK`, at places that
are shuffled with the seed and the block. So the source of a row, and how many rows of it came before, follow from the row's
number alone; the shares are exact at the end of a block, and those of a random order before. Each source has epochs of its
own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ejdist.training.data.packing import Rows
from ejdist.training.data.shuffle import Shuffle
from ejdist.training.data.tokenizer import Tokenizer

BLOCK = 1 << 16
_OPTIONAL = ("text_key", "format", "loss_on", "chat_template")
_MOST = 1e300  # of a weight, so that the sum of all is a number


@dataclass(frozen=True)
class Mixture:
    """Sources and how many rows of each block they have.

    Attributes:
      parts: each a corpus or a dataset.
      counts: rows of each part in a block.
    """

    parts: tuple[Any, ...]
    counts: tuple[int, ...]

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
        content = json.dumps([[p.fingerprint for p in self.parts], self.counts])
        return hashlib.sha256(content.encode()).hexdigest()[:24]


def counts_of(weights: Sequence[Any]) -> tuple[int, ...]:
    """Returns how many rows of a block each weight has; the largest remainders are rounded up.

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
            f"data.mixture[{i}].weight = {weights[i]} is less than one row in {BLOCK:,} of the mixture; raise it, or leave "
            "the source out"
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
    """Rows of a mixture."""

    def __init__(self, parts: Sequence[Rows], counts: Sequence[int], seed: int) -> None:
        self.parts, self.counts = parts, counts
        self.length = parts[0].length
        self.rows_per_epoch = sum(p.rows_per_epoch for p in parts)
        self.order = f"mixture of {', '.join(p.order for p in parts)}"
        self._ends = np.cumsum(counts)
        self._block = functools.lru_cache(maxsize=4)(lambda block: Shuffle(BLOCK, seed, "mixture", block))

    def place(self, index: int) -> tuple[int, int]:
        """Returns (source, the number of its row) for a row of the mixture."""
        block, at = divmod(index, BLOCK)
        slot = self._block(block)[at]
        part = int(np.searchsorted(self._ends, slot, side="right"))
        within = slot - int(self._ends[part]) + self.counts[part]
        return part, block * self.counts[part] + within

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Returns the row of that number; see `filled_row`."""
        part, number = self.place(index)
        return self.parts[part].row(number)
