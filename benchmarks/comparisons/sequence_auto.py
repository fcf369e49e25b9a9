"""What `sequence.scheme=auto` and `sequence.order=auto` are expected to take, beside every choice that pins them.

    python -m benchmarks.comparisons.sequence_auto [tokens=2048,8192,32768] [documents=4096,long_tail,mixture] [ranks=8]
        [devices="NVIDIA H200,TPU v5"] [recipe words ...]

By the costs that schemes declare and the rates of links that are known, for one row over the ranks: no device runs. Tokens are
of a device; documents as of `benchmarks.sequence`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from benchmarks.sequence.calls import segment_ids
from ejdist.models.lora import build
from ejdist.order import NAMES
from ejdist.sequence.schemes import SCHEMES
from ejdist.training.attending import Pair
from ejdist.training.choices import PairChoice, choose_pair
from recipes.schema import compose

MODEL = "model=8b model.num_layers=1 data.global_batch=1"


@dataclass(frozen=True)
class Row:
    """A case: milliseconds of a step's attention by what auto takes, and of each scheme and order that is pinned."""

    kind: str
    tokens: int
    documents: str
    pair: Pair
    auto: float
    pinned: dict[Pair, float]

    @property
    def over(self) -> float:
        """What auto takes over the best pinned choice."""
        return self.auto / min(self.pinned.values())


def chosen(kind: str, ranks: int, words: Sequence[str], ids: np.ndarray) -> PairChoice:
    """Returns what a recipe takes on that many devices of a kind."""
    sections = compose([*MODEL.split(), f"mesh.sp={ranks}", f"data.sequence_length={ids.shape[1]}", *words])
    device = SimpleNamespace(device_kind=kind, platform="tpu" if kind.startswith("TPU") else "gpu")
    mesh = SimpleNamespace(shape={"sp": ranks}, devices=np.array([device]))
    return choose_pair(sections, mesh, build(sections.model, sections.lora), ids)


def rows(
    tokens: Sequence[int] = (2048, 8192, 32768),
    documents: Sequence[str] = ("4096", "long_tail", "mixture"),
    kinds: Sequence[str] = ("NVIDIA H200", "TPU v5"),
    ranks: int = 8,
    words: Sequence[str] = (),
) -> Iterator[Row]:
    """Yields each case. What auto does not take, since no device has timed it or for its memory, is not beside it."""
    for kind in kinds:
        for each in tokens:
            for of in documents:
                ids = segment_ids(of, each * ranks, 0)[None]
                auto = chosen(kind, ranks, ["sequence.scheme=auto", *words], ids)
                taken = {scheme for scheme, _ in auto.seconds}
                pinned = {}
                for scheme in (name for name in SCHEMES if name in taken):
                    for order in NAMES:
                        how = [f"sequence.scheme={scheme}", f"sequence.order={order}", *words]
                        pinned |= chosen(kind, ranks, how, ids).seconds
                pair, seconds = next(iter(auto.seconds.items()))
                yield Row(kind, each, of, pair, 1e3 * seconds, {p: 1e3 * value for p, value in pinned.items()})


def main(arguments: list[str]) -> None:
    options = {"tokens": "2048,8192,32768", "documents": "4096,long_tail,mixture", "ranks": "8"}
    options["devices"] = "NVIDIA H200,TPU v5"
    asked = [word for word in arguments if word.partition("=")[0] in options]
    options |= dict(word.split("=", 1) for word in asked)
    words = [word for word in arguments if word not in asked]
    tokens = [int(n) for n in options["tokens"].split(",")]
    cases = rows(tokens, options["documents"].split(","), options["devices"].split(","), int(options["ranks"]), words)
    print(
        "| device | tokens | documents | auto | ms | best pinned | ms | auto over it |\n|---|---|---|---|---|---|---|---|"
    )
    for row in cases:
        best = min(row.pinned, key=lambda pair: row.pinned[pair])
        cells = [row.kind, f"{row.tokens:,}", row.documents, " ".join(row.pair), f"{row.auto:,.3g}"]
        print(f"| {' | '.join([*cells, ' '.join(best), f'{row.pinned[best]:,.3g}', f'{row.over:.3f}'])} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
