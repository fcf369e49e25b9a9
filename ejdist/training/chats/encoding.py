"""Conversations to tokens, and beside each token whether the model is to say it.

The mask is of characters first. A token is trained if it has a character that is: so one that a span begins or ends within
counts, and of a character that several tokens make, as bytes do, every one of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from ejdist.training.chats.rows import chat_of, ids_of
from ejdist.training.chats.special_tokens import begun, ended
from ejdist.training.chats.template import ChatTemplate, Spans, reads_date
from ejdist.training.chats.turns import Chat, rendered

_BATCH = 1 << 20  # characters that go to the tokenizer together


@dataclass(frozen=True)
class Chats:
    """How the conversations of a source become tokens: everything that decides it except the rows and the tokenizer.

    Attributes:
      format: messages, completion or ids.
      key: of the messages in a row.
      templates: name -> template; none for ids.
      tokens: the special tokens that templates read.
      given_date: data.chat_date. today: the date that a template writes, where it does.
    """

    format: str
    key: str
    loss_on: str
    on_error: str
    templates: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    given_date: str | None = None
    today: str | None = None

    @property
    def key_of_cache(self) -> dict[str, Any]:
        """Returns what two runs must share to read the same tokens. Today's date is left out, so that tokens made on one day
        are read on the next."""
        return {name: value for name, value in asdict(self).items() if name != "today"}

    def as_json(self) -> dict[str, Any]:
        """Returns the arguments of `Chats` that make an equal one."""
        return asdict(self)

    @property
    def template_digest(self) -> str:
        """Returns what identifies the templates and the variables that they are rendered with."""
        content = json.dumps([self.templates, self.tokens, self.arguments], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def description(self) -> dict[str, Any]:
        """Returns what a run compares when it resumes, beside the tokens themselves."""
        template = {"template": self.template_digest} if self.templates else {}
        return {"format": self.format, "loss_on": self.loss_on, **template} | (
            {"date": self.today} if self.today is not None else {}
        )

    def describe(self) -> str:
        """Returns a phrase about how the rows are read."""
        how = {
            "messages": f"conversations (key {self.key!r})",
            "completion": "prompts and completions",
            "ids": "token ids with what of them is trained",
        }[self.format]
        if not self.templates:
            return f"{how}, loss on {self.loss_on}"
        marks = "{% generation %}" if ChatTemplate(self.templates["default"], {}, None).marks else "prefixes"
        date = f", dated {self.today} (data.chat_date)" if self.today is not None else ""
        return f"{how}, chat template {self.template_digest} (turns by {marks}){date}, loss on {self.loss_on}"


class Tokenizer(Protocol):
    """What this module needs of a tokenizer."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None

    def encode_places(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]: ...


class Encoded(NamedTuple):
    """Tokens of a conversation."""

    ids: np.ndarray
    mask: np.ndarray  # bool, like ids
    place: tuple[int, int]  # which source of its shard, and which row there


@dataclass
class Skipped:
    """Rows that were wrong and passed over."""

    count: int = 0
    rows: int = 0  # of all
    first: str = ""


class Encoder:
    """Encodes rows. Raises ValueError if a template is not valid Jinja."""

    def __init__(self, chats: Chats, tokenizer: Tokenizer) -> None:
        self._chats, self._tokenizer = chats, tokenizer
        self._templates = {
            name: ChatTemplate(text, chats.tokens, chats.today, f"data.chat_template ({name})")
            for name, text in chats.templates.items()
        }
        self._source = "".join(chats.templates.values())

    def encode_all(
        self, rows: Iterable[tuple[str, tuple[int, int], Any]], skipped: Skipped, report: Callable[[int], Any]
    ) -> Iterator[Encoded]:
        """Yields the conversations of rows, in order.

        Args:
          rows: (what an error calls the row, its place, the row or the error of reading it).
          skipped: gets those that are wrong, with on_error=skip.
          report: called with the number of characters done since the last call.

        Raises:
          ValueError: a row is wrong, and on_error=stop; names it and says what is wrong.
        """
        batch: list[tuple[str, tuple[int, int], Any]] = []
        size = 0
        for where, place, row in rows:
            skipped.rows += 1
            try:
                if isinstance(row, Exception):
                    raise row
                prepared = self._prepared(row)
            except ValueError as error:
                self._wrong(str(error) if isinstance(row, Exception) else f"{where}: {error}", skipped)
                continue
            batch.append((where, place, prepared))
            size += len(prepared[0])
            if size >= _BATCH:
                yield from self._encoded(batch, skipped)
                report(size)
                batch, size = [], 0
        yield from self._encoded(batch, skipped)
        report(size)

    def _wrong(self, message: str, skipped: Skipped) -> None:
        message = message.removesuffix("; remove or fix the line")  # of a line that cannot be parsed
        if self._chats.on_error == "stop":
            raise ValueError(f"{message}; fix or remove it, or pass over such rows with data.on_error=skip")
        skipped.count += 1
        skipped.first = skipped.first or message

    def _prepared(self, row: Any) -> tuple[Any, Any, bool]:
        """Returns (a text, its trained characters, whether the end of a document follows), or (ids, which are trained, _)."""
        chats = self._chats
        if chats.format == "ids":
            return *ids_of(row, self._tokenizer.vocab_size, chats.loss_on), False
        chat = chat_of(row, chats.format, chats.key, self._source)
        if isinstance(chat, Chat):
            template = self._templates["tool_use" if chat.tools and "tool_use" in self._templates else "default"]
            arguments = {**chats.arguments, **chat.arguments}
            text, spans = rendered(template, Chat(chat.messages, chat.train, chat.tools, arguments), chats.loss_on)
            return text, spans, False
        text, completion, spans = chat
        if chats.loss_on == "spans" and not spans:
            raise ValueError("nothing of it is trained: it has no 'spans'")
        return text, {"all": [(0, len(text))], "spans": spans}.get(chats.loss_on, completion), True

    def _encoded(self, batch: Sequence[tuple[str, tuple[int, int], Any]], skipped: Skipped) -> Iterator[Encoded]:
        texts = [prepared[0] for _, _, prepared in batch if isinstance(prepared[0], str)]
        encoded = iter(self._tokenizer.encode_places(texts) if texts else ())
        for where, place, (content, trained, ends) in batch:
            if isinstance(content, str):
                token_ids, places = next(encoded)
                ids = begun(self._tokenizer, token_ids)  # a template may have written BOS itself
                mask = np.append(np.zeros(len(ids) - len(token_ids), bool), mask_of(places, trained))
            else:
                ids, mask = np.asarray(content, np.int64), np.asarray(trained, bool)
            if ends and (not len(ids) or ids[-1] != self._tokenizer.eos_id):
                ids = ended(self._tokenizer, ids)
                mask = np.append(mask, np.full(len(ids) - len(mask), self._chats.loss_on != "spans"))
            if mask[1:].any():
                yield Encoded(ids, mask, place)
            else:  # the first token follows nothing that could predict it
                self._wrong(
                    f"{where}: nothing of it is trained: none of its {len(ids)} tokens, past the first", skipped
                )


def mask_of(places: np.ndarray, spans: Spans) -> np.ndarray:
    """Returns bool [tokens]: which tokens have a character of a span.

    Args:
      places: int [tokens, 2], the characters [begin, end) of each token.
      spans: in order, apart from each other.
    """
    begins, ends = (np.asarray([span[i] for span in spans], np.int64) for i in (0, 1))
    span = np.searchsorted(ends, places[:, 0], side="right")  # the first that ends past the token's begin
    begins = np.append(begins, np.iinfo(np.int64).max)
    return places[:, 1] > begins[span]


def date_of(templates: dict[str, str], chat_date: str | None, today: str) -> str | None:
    """Returns the date that templates write: the one that is given, else today's; None where they write none."""
    return (chat_date or today) if any(map(reads_date, templates.values())) else None
