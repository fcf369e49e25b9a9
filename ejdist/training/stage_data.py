"""The data of a run's stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ejdist.training.chats.special_tokens import ends_of
from ejdist.training.curriculum import Stage
from ejdist.training.data import Data, DataSection
from ejdist.training.data import build as build_data
from ejdist.training.data.own_batches import OwnBatches
from ejdist.training.data.tokenizer import Tokenizer
from ejdist.training.program import TrainSections


def sizes_of(section: DataSection) -> dict[str, int]:
    return {"sequence_length": section.sequence_length, "global_batch": section.global_batch}


def own_batches(stages: Sequence[Stage], batches: Any) -> list[Data]:
    """Returns the caller's batches as the data of each stage.

    Raises:
      ValueError: they are wrong; a stage names data, which they replace; or the recipe measures what needs a tokenizer.
    """
    s = stages[0].sections
    if s.evaluation.every:
        raise ValueError(
            f"evaluation.every = {s.evaluation.every} reads held-out data with the tokenizer of the recipe's data, which "
            "batches replace; set it to 0"
        )
    for stage in stages:
        if stage.has_data:
            raise ValueError(
                f"{stage.where}data.source is not read: train() was called with batches; leave one of them out"
            )
    data = OwnBatches(batches, vocab_size=s.model.vocab_size, seed=s.run.seed, **sizes_of(s.data))  # pyrefly: ignore[bad-argument-type]
    return [data.resized(**sizes_of(stage.sections.data)) for stage in stages]


def data_of_stages(stages: Sequence[Stage]) -> list[Data]:
    """Returns the data of each stage, all with the tokenizer of the first; stages of one source share it.

    Raises:
      ValueError: as `data_of`; or a stage has another tokenizer, no data, or too little for a row. Names the stage.
    """
    datas: list[Data] = []
    sections: list[Any] = []
    for stage in stages:
        section = stage.sections.data
        alike = [i for i, other in enumerate(sections) if replace(section, **sizes_of(other)) == other]
        try:
            if alike:
                data = datas[alike[0]]
                if data.has_conversations:  # they must fit into the rows of every stage
                    data = data.resized(**sizes_of(section))
            else:
                data = data_of(stage.sections, datas[0].corpus.tokenizer if datas else None)
                if datas and data.corpus.tokenizer.fingerprint != datas[0].corpus.tokenizer.fingerprint:
                    raise ValueError(
                        "data.source has another tokenizer than the stages before; tokenize it with the same one"
                    )
                if datas and ends_of(data.corpus.tokenizer) != ends_of(datas[0].corpus.tokenizer):
                    raise ValueError(
                        "data.source was made with another BOS or EOS than the stages before; tokenize it with the same "
                        "data.bos and data.eos"
                    )
                if stage.has_data and (least := min(data.tokens_of_sources)) < section.sequence_length:
                    raise ValueError(
                        f"data.source has {least:,} tokens, fewer than a row of data.sequence_length = "
                        f"{section.sequence_length:,}; give more text, or shorter rows"
                    )
        except ValueError as error:
            raise ValueError(f"{stage.where}{error}") from error
        datas.append(data)
        sections.append(section)
    return datas


def data_of(s: TrainSections, tokenizer: Tokenizer | None = None) -> Data:
    """Returns the data of a recipe; files are read with `tokenizer` if it is not None. Raises ValueError if the model's
    vocabulary is smaller than the tokenizer's."""
    data = build_data(s.data, seed=s.run.seed, tokenizer=tokenizer)
    if data.vocab_size > s.model.vocab_size:
        raise ValueError(
            f"model.vocab_size = {s.model.vocab_size} is smaller than the {data.vocab_size} tokens of data.tokenizer = "
            f"{s.data.tokenizer!r}; make it at least that"
        )
    return data
