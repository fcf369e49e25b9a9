"""What a recipe says of conversations, and what the rows of its source are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ejdist.training.chats.encoding import Chats, date_of
from ejdist.training.chats.folder import templates_of, tokens_of
from ejdist.training.chats.rows import KINDS, columns, kinds_in
from ejdist.training.data.hub import hub_rows, is_stream
from ejdist.training.data.sources import files_of, is_text, rows

FORMATS = ("text", "auto", *KINDS)
LOSSES = ("assistant", "last", "all", "spans")
_LOOKED_AT = 100  # rows of a file to try, until one can be read


@dataclass(frozen=True)
class Asked:
    """The keys of `data` that say how conversations are read; see `DataSection`."""

    format: str = "text"
    loss_on: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: Any = None
    chat_date: str | None = None
    on_error: str = "stop"

    def check(self) -> None:
        """Raises ValueError, naming the key, for a value that is wrong whatever the rows are."""
        one_of("format", self.format, FORMATS)
        one_of("on_error", self.on_error, ("stop", "skip"))
        if self.loss_on is not None:
            one_of("loss_on", self.loss_on, LOSSES)
        if self.chat_template_kwargs is not None and not isinstance(self.chat_template_kwargs, Mapping):
            raise ValueError(
                f"data.chat_template_kwargs = {self.chat_template_kwargs!r}: write {{name: value}}, for example "
                "{enable_thinking: false}"
            )
        if self.chat_date is not None:
            try:
                date.fromisoformat(self.chat_date)
            except ValueError:
                raise ValueError(f"data.chat_date = {self.chat_date!r}: write it as 2026-01-31") from None

    def chats(self, source: Any, tokenizer: str, text_key: str) -> Chats | None:
        """Returns how the conversations of a source are read; None where its rows are text.

        Raises:
          ValueError: the rows are of no kind or of several, there is no template, or a key does not go with their kind.
        """
        key = "messages" if text_key == "text" else text_key
        kind = _kind_of(source, key, text_key) if self.format == "auto" else self.format
        if kind == "text":
            return None
        loss_on = self.loss_on or ("spans" if kind == "ids" else "assistant")
        if kind == "ids" and loss_on not in ("spans", "all"):
            raise ValueError(
                f"data.loss_on = {loss_on}: rows of token ids say themselves what is trained; leave the key out, or use all"
            )
        if tokenizer.startswith("bpe:"):
            raise ValueError(
                f"data.tokenizer = {tokenizer!r} is trained on text, and conversations are written with tokens of their own; "
                "give the tokenizer.json of the model, or bytes"
            )
        templates = {} if kind == "ids" else templates_of(self.chat_template, tokenizer)
        return Chats(
            format=kind,
            key=key,
            loss_on=loss_on,
            on_error=self.on_error,
            templates=templates,
            tokens=tokens_of(tokenizer) if templates else {},
            arguments=dict(self.chat_template_kwargs or {}),
            given_date=self.chat_date,
            today=date_of(templates, self.chat_date, date.today().isoformat()),
        )

    def check_made(self, chats: Chats | None, folder: Path) -> None:
        """Raises ValueError, naming the key, if a key differs from what a dataset was made with. Keys that are left out do
        not."""
        settings: dict[str, Any] = {"format": "text" if chats is None else chats.format}
        if chats is not None:
            settings |= {"loss_on": chats.loss_on, "chat_date": chats.today, "chat_template_kwargs": chats.arguments}
        for key, value in settings.items():
            asked = getattr(self, key)
            left_out = asked in ("text", "auto") if key == "format" else asked is None
            if not left_out and asked != value:
                raise ValueError(
                    f"data.{key} = {asked!r}, and {folder} was made with {value!r}; leave the key out, or tokenize the "
                    "files into another folder"
                )
        if self.chat_template is not None and chats is not None:
            if templates_of(self.chat_template, str(folder)) != chats.templates:
                raise ValueError(
                    f"data.chat_template = {self.chat_template!r} is not what {folder} was made with; leave the key out, or "
                    "tokenize the files into another folder"
                )

    def check_used(self) -> None:
        """Raises ValueError, naming the key, if a key about conversations is set. Call it if there are none."""
        for key in ("loss_on", "chat_template", "chat_template_kwargs", "chat_date"):
            value = getattr(self, key)
            if value is not None and (key, value) != ("loss_on", "all"):
                raise ValueError(
                    f"data.{key} = {value!r} is of conversations, and all rows are text; leave it out, or set data.format=auto"
                )


TEXT = Asked()  # of rows of text


def one_of(key: str, value: Any, known: tuple[str, ...]) -> None:
    """Raises ValueError, naming the key of `data`, for an unknown value."""
    if value not in known:
        raise ValueError(f"data.{key} = {value!r} is unknown; use {', '.join(known[:-1])} or {known[-1]}")


def _kind_of(source: Any, key: str, text_key: str) -> str:
    """Returns the kind of a source's rows: that of the first that can be read."""
    first, where = _first_row(source, key, text_key)
    if first is None:
        return "text"
    kinds = kinds_in(first, key)
    if len(kinds) > 1:
        raise ValueError(f"{where} has what {' and '.join(kinds)} need; say which with data.format={kinds[0]}")
    if kinds:
        return kinds[0]
    if isinstance(first.get(text_key), str):
        return "text"
    keys = ", ".join(list(first)[:12]) or "nothing"
    raise ValueError(
        f"{where} has {keys}: neither {key!r}, nor 'prompt' and 'completion', nor 'input_ids', nor {text_key!r}; set "
        "data.text_key to the key of the messages, or of the text"
    )


def _first_row(source: Any, key: str, text_key: str) -> tuple[Mapping[str, Any] | None, str]:
    candidates: Iterator[tuple[str, Any]]
    if is_stream(source):
        candidates = hub_rows(source, 0, 1)
    else:
        files = [path for path in files_of(source) if not is_text(path)]
        if not files:
            return None, ""
        read = dict.fromkeys((*columns(key), text_key))
        candidates = (
            (where, row) for path in files for _, where, row in itertools.islice(rows(path, list(read)), _LOOKED_AT)
        )
    wrong = ""
    for where, row in candidates:
        if isinstance(row, Mapping):
            return row, where
        wrong = wrong or (str(row) if isinstance(row, Exception) else f"{where}: {type(row).__name__}, not an object")
    raise ValueError(
        f"data.source = {source!r} has no row to tell data.format by{f': {wrong}' if wrong else '; give files that have rows'}"
    )
