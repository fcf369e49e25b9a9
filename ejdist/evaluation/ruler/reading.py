"""Questions about one of many documents: the tasks qa_1 and qa_2."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ejdist.evaluation.ruler.questions import Questions
from ejdist.evaluation.ruler.samples import Case, Sources
from ejdist.evaluation.ruler.words import Rng

_ASKS = "Answer the question from the documents. Write the answer alone, and no other words."


@dataclass(frozen=True)
class Reading:
    """Draws what a prompt asks about documents.

    Attributes:
      source: the field of Sources with the questions.
    """

    source: str

    def __call__(self, rng: Rng, depth: float, number: int, length: int, sources: Sources) -> Case:
        """Returns the `number`-th question of the file, after the last one the first, with its documents and others that are
        drawn. Its only document stands at `depth`; several stand anywhere."""
        questions: Questions = getattr(sources, self.source)
        one = questions.items[number % len(questions.items)]
        near, far = rng.permutation(np.asarray(one.near, int)), np.arange(len(questions.documents))
        far = rng.permutation(far[~np.isin(far, [*one.own, *one.near])])
        others = np.concatenate([near, far])
        single = len(one.own) == 1
        seed = int(rng.integers(2**32))

        def text(size: int) -> str:
            added = size - len(one.own)
            mixed = np.random.default_rng(seed).permutation([*others[:added], *(() if single else one.own)]).astype(int)
            order = np.insert(mixed, round(depth * added), one.own[0]) if single else mixed
            context = "\n\n".join(f"Document {i}:\n{questions.documents[d]}" for i, d in enumerate(order, 1))
            return f"{_ASKS}\n\nThe documents:\n\n{context}\n\n{_ASKS}\n\nQuestion: {one.question} Answer:"

        least = len(one.own)
        return Case(
            one.answers,
            f" {one.answers[0]}",
            text,
            "documents",
            least=least,
            most=least + len(others),
            depth=depth if single else None,
        )
