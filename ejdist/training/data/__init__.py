"""Text to batches. The global batch of a step is a pure function of (seed, step), whatever the number of hosts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ejdist.buckets import source_path
from ejdist.paths import check_folder
from ejdist.sections import compared, operational
from ejdist.training.chats.special_tokens import SpecialTokens, ends_of
from ejdist.training.data.batches import (
    AUTO,
    CURSOR,
    NONE,
    ROWS,
    Begin,
    Data,
    check_how,
    default_cache_dir,
    described,
    described_key,
)
from ejdist.training.data.conversation_keys import Asked, one_of
from ejdist.training.data.corpus import Corpus, build_corpus
from ejdist.training.data.dataset import OWN, Dataset, is_dataset, open_dataset
from ejdist.training.data.hub import is_stream
from ejdist.training.data.hub_dataset import hub_dataset
from ejdist.training.data.mixture import Mixture, check_sections, counts_of
from ejdist.training.data.own_source import OwnRows, own_source
from ejdist.training.data.tokenizer import Tokenizer

__all__ = [
    "CURSOR",
    "Begin",
    "Corpus",
    "Data",
    "DataSection",
    "build",
    "default_cache_dir",
    "described",
    "described_key",
]


@dataclass
class DataSection:
    """The `data` section of a recipe. What a run is compared by when it goes on is the data cursor of its checkpoint: the
    content of the corpus and the tokenizer, which may have moved."""

    # The folder of a dataset that launch.tokenize made; or "stdlib", "example_chats", a glob of files (text, jsonl, jsonl.gz,
    # parquet) or a list of globs, which are tokenized at the start; either in a bucket, gs://BUCKET/NAME; hf:NAME[:SPLIT]; or
    # NAME:REST of a source that a plugin registers.
    source: Any = compared("stdlib", recorded=True)
    # Instead of source: a list of {source, weight}, and text_key, format, loss_on and chat_template where they differ.
    mixture: Any = compared(None, recorded=True)
    weights_by: str = compared("rows", recorded=True)  # what the weights of a mixture are shares of: rows, or tokens
    # What rows are: text; messages, completion or ids, see the README; auto: what the first row has, which the run says.
    format: str = compared("text", recorded=True)
    # Of conversations. What is trained: assistant, last, all, or spans; null: assistant, and what rows of ids say.
    loss_on: str | None = compared(None, recorded=True)
    # A file, here or in gs://, or chatml; null: that of the tokenizer's folder.
    chat_template: str | None = compared(None, recorded=True)
    chat_template_kwargs: Any = compared(None)  # more variables of the template: {enable_thinking: false}
    # The date of templates that write one, as 2026-01-31; null: that of the first start.
    chat_date: str | None = compared(None)
    on_error: str = compared("stop")  # a row that is wrong: stop or skip
    too_long: str = compared("stop", recorded=True)  # a conversation that is longer than a row: stop, skip or truncate
    text_key: str = compared("text", recorded=True)  # the key or column of jsonl and parquet rows
    # How text becomes tokens: bytes, bpe:SIZE (trained on the corpus), a tokenizer.json or a folder that has one, here or in
    # gs://, or dataset: the dataset's own.
    tokenizer: str = compared("bytes", recorded=True)
    # The token before a document: auto, as the tokenizer's folder says; null for none.
    bos: str | None = compared("auto", recorded=True)
    # The token behind a document of text: auto, as its folder says; null for none.
    eos: str | None = compared("auto", recorded=True)
    # Documents in rows: cut, one after another and cut where a row ends; even, as full, each in the row in which attention is
    # least so far; whole: those that fit into a row are not cut.
    packing: str = compared("cut", recorded=True)
    sequence_length: int = compared(2048)  # tokens of a row
    global_batch: int = compared(4)  # rows of a step, over all devices
    # Which of a step's rows each group of devices and each microbatch has: rows, so that they have equal attention; none, as
    # they are drawn; auto: rows, where the rows say how long their documents are.
    balance: str = operational("auto")
    prefetch: int = operational(4)  # batches read ahead
    cache_dir: str | None = operational(
        None
    )  # folder for tokenized corpora; default: $EJDIST_CACHE_DIR or ~/.cache/ejdist

    def validate(self) -> None:
        """Raises ValueError naming the key and the remedy; what is wrong with the files is told where they are opened."""
        check_how(self.packing, self.prefetch, self.too_long)
        one_of("weights_by", self.weights_by, ("rows", "tokens"))
        one_of("balance", self.balance, (AUTO, ROWS, NONE))
        self.conversations().check()
        for key, least in (("sequence_length", 2), ("global_batch", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"data.{key} must be at least {least}, got {getattr(self, key)}")

    def special_tokens(self) -> SpecialTokens:
        """Returns what is asked for at both ends of a document."""
        return SpecialTokens(self.bos, self.eos)

    def conversations(self, part: dict[str, Any] | None = None) -> Asked:
        """Returns what this says of conversations, or what a source of a mixture says instead."""
        defaults = {f.name: getattr(self, f.name) for f in fields(Asked)}
        return Asked(**defaults | {name: value for name, value in (part or {}).items() if name in defaults})


def build(section: DataSection, *, seed: int, tokenizer: Tokenizer | None = None) -> Data:
    """Returns the data of a recipe's section.

    Args:
      tokenizer: for files, instead of the section's; default: the section's.

    Raises:
      ValueError: the files, the tokenizer or a size are wrong; names the key.
    """
    check_folder("data.cache_dir", section.cache_dir)
    cache = Path(section.cache_dir or default_cache_dir()).expanduser()
    if section.mixture is None:
        corpus = _open(section, section.source, section.text_key, cache, section.conversations(), tokenizer)
    else:
        parts = check_sections(section.mixture, section.source)
        weights = [part["weight"] for part in parts]
        counts = counts_of(weights)
        opened = []
        for i, part in enumerate(parts):
            text_key, asked = part.get("text_key", section.text_key), section.conversations(part)
            try:
                asked.check()
                opened.append(_open(section, part["source"], text_key, cache, asked, tokenizer))
            except ValueError as error:
                raise ValueError(f"data.mixture[{i}]: {error}") from error
        ends = ends_of(opened[0].tokenizer)
        for part, other in zip(parts[1:], opened[1:], strict=True):
            if other.tokenizer.fingerprint != opened[0].tokenizer.fingerprint:
                raise ValueError(
                    f"data.mixture: {part['source']!r} has another tokenizer than {parts[0]['source']!r}; tokenize all "
                    "sources with the same tokenizer.json, and name that in data.tokenizer"
                )
            if other_ends := [key for key, token in ends_of(other.tokenizer).items() if token != ends[key]]:
                raise ValueError(
                    f"data.mixture: {part['source']!r} was made with another {' and '.join(other_ends)} than "
                    f"{parts[0]['source']!r}; tokenize all sources with the same"
                )
        corpus = Mixture(tuple(opened), counts, tuple(weights) if section.weights_by == "tokens" else None)
    if all(one.chats is None for one in (corpus.parts if isinstance(corpus, Mixture) else (corpus,))):
        section.conversations().check_used()
    sizes = {"sequence_length": section.sequence_length, "global_batch": section.global_batch}
    how = {
        "packing": section.packing,
        "too_long": section.too_long,
        "cache_dir": cache,
        "guessed": section.format == "auto",
    }
    return Data(corpus, seed=seed, prefetch=section.prefetch, **how, **sizes)


def _open(
    section: DataSection, source: Any, text_key: str, cache: Path, asked: Asked, instead: Tokenizer | None = None
) -> Corpus | Dataset:
    """Returns what one source is: a dataset, or files that are tokenized now or were before. `instead`: for files, replaces the
    tokenizer of that name."""
    tokenizer, special_tokens = section.tokenizer, section.special_tokens()
    if (plugin := own_source(source)) is not None and plugin[0].value.rows is not None:
        return OwnRows(source, *plugin, tokenizer, special_tokens)  # pyrefly: ignore[bad-return]
    if is_stream(source):
        return hub_dataset(source, tokenizer, text_key, cache, asked=asked, special_tokens=special_tokens)
    for one in source if isinstance(source, (list, tuple)) else [source]:
        if isinstance(one, str):
            source_path("data.source", one)
    source_path("data.tokenizer", tokenizer)
    folder = source_path("data.source", source) if isinstance(source, str) else None
    if folder is not None and is_dataset(folder):
        return open_dataset(folder, tokenizer, text_key, asked=asked, special_tokens=special_tokens)
    joined = (
        [p for p in source if isinstance(p, str) and is_dataset(source_path("data.source", p))]
        if isinstance(source, list)
        else []
    )
    if joined:
        raise ValueError(
            f"data.source lists {joined[0]!r}, which is a dataset; join datasets with data.mixture, by weight"
        )
    if tokenizer == OWN and instead is None:
        reason = "data.source is not set" if source is None else f"data.source = {source!r} is not a dataset"
        raise ValueError(
            f"data.tokenizer = {OWN!r} is the tokenizer of a dataset, but {reason}: make one with python -m launch.tokenize "
            "and give its folder, or name a tokenizer"
        )
    chats = asked.chats(source, tokenizer, text_key)
    return build_corpus(source, instead or tokenizer, text_key, cache, chats=chats, asked=special_tokens)
