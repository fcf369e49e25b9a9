"""The tokens that begin and end a document: BOS and EOS, as `data.bos` and `data.eos` name them or a tokenizer's folder says.

A published folder says in several files what its tokens are, and whether a document begins with BOS:

- BOS and EOS are those of `tokenizer_config.json`, else of `special_tokens_map.json`, where a token is a text or an object with
  its `content`; else the ids of `generation_config.json`, else of `config.json`, of a list the first.
- Whether BOS is written says `add_bos_token` in `tokenizer_config.json`, else the post-processor of `tokenizer.json`.
- Generation ends at EOS, and at every id that `eos_token_id` lists in `generation_config.json` and `config.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ejdist.training.chats.folder import said_in, tokens_of

AUTO = "auto"
# Where no file names EOS: the first of these that the vocabulary has.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")
_BY_ID = ("generation_config.json", "config.json")


@dataclass(frozen=True)
class SpecialTokens:
    """What is asked for: a token's text; "auto" for what the tokenizer's files say; None for none."""

    bos: str | None = AUTO
    eos: str | None = AUTO

    def over(self, own: dict[str, str | None]) -> dict[str, str | None]:
        """Returns these texts, with those in `own` for "auto"."""
        return {key: own[key] if (asked := getattr(self, key)) == AUTO else asked for key in own}


BY_FILES = SpecialTokens()


class Vocabulary(Protocol):
    """What is asked of a `tokenizer.json`, as its library reads it."""

    def token_to_id(self, token: str) -> int | None: ...

    def id_to_token(self, id: int) -> str | None: ...

    def encode(self, sequence: str, /, *, add_special_tokens: bool = True) -> Any: ...


@dataclass(frozen=True)
class Ids:
    """bos, eos: of the token, None for none. stops: all that end generation, that of the text first."""

    bos: int | None
    eos: int | None
    stops: tuple[int, ...]


class Marked(Protocol):
    """A tokenizer, as far as documents begin and end with its tokens."""

    bos_id: int | None
    eos_id: int | None


class Named(Marked, Protocol):
    """One that has texts for its tokens."""

    def token_of(self, id: int | None) -> str | None: ...


def ends_of(tokenizer: Named, ids: dict[str, int | None] | None = None) -> dict[str, str | None]:
    """Returns the texts of a tokenizer's BOS and EOS, or of `ids`; None for none."""
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id} if ids is None else ids
    return {key: tokenizer.token_of(ids[key]) for key in ("bos", "eos")}


def begun(tokenizer: Marked, ids: np.ndarray) -> np.ndarray:
    """Returns the tokens of a document from its beginning, with BOS before them: once, if a template or the text has already
    written it; unchanged for a tokenizer without BOS."""
    if tokenizer.bos_id is None or (len(ids) and ids[0] == tokenizer.bos_id):
        return ids
    return np.concatenate([[tokenizer.bos_id], ids])


def ended(tokenizer: Marked, ids: np.ndarray) -> np.ndarray:
    """Returns the tokens of a document up to its end, with EOS after them; unchanged for a tokenizer without EOS."""
    return ids if tokenizer.eos_id is None else np.append(ids, tokenizer.eos_id)


def ids_of(asked: SpecialTokens, vocabulary: Vocabulary, beside: Path | None, argument: str) -> Ids:
    """Returns the ids that are asked for.

    Args:
      beside: the folder of the tokenizer, None for one that is not of a folder.
      argument: what names the tokenizer, for errors.

    Raises:
      ValueError: a token is not in the vocabulary, or no file names EOS; names the key.
    """
    named = {} if beside is None else tokens_of(str(beside))
    by_id = _ids_named(vocabulary, beside)
    ends = [] if asked.eos is None else [_eos(asked.eos, vocabulary, named, by_id["eos"], argument)]
    stops = tuple(dict.fromkeys([*ends, *by_id["eos"]]))
    return Ids(_bos(asked.bos, vocabulary, beside, named, by_id["bos"], argument), next(iter(ends), None), stops)


def _id(key: str, token: str, vocabulary: Vocabulary, argument: str) -> int:
    token_id = vocabulary.token_to_id(token)
    if token_id is None:
        raise ValueError(f"data.{key} = {token!r} is no token of {argument}; give one, auto, or null for none")
    return token_id


def _of_file(key: str, token: str, vocabulary: Vocabulary, argument: str) -> int:
    token_id = vocabulary.token_to_id(token)
    if token_id is None:
        raise ValueError(
            f"{argument}: the files beside it name {key}_token = {token!r}, which its vocabulary does not have; give "
            f"data.{key}=TOKEN, or null for none"
        )
    return token_id


def _eos(asked: str, vocabulary: Vocabulary, named: dict[str, Any], by_id: Sequence[int], argument: str) -> int:
    if asked != AUTO:
        return _id("eos", asked, vocabulary, argument)
    if (token := named.get("eos_token")) is not None:
        return _of_file("eos", token, vocabulary, argument)
    usual = (vocabulary.token_to_id(token) for token in ENDS)
    token_id = next((i for i in (*by_id, *usual) if i is not None), None)
    if token_id is None:
        raise ValueError(
            f"{argument} has none of {', '.join(ENDS)} to end a document, and no file beside it names another; give "
            "data.eos=TOKEN, or null for none"
        )
    return token_id


def _bos(
    asked: str | None,
    vocabulary: Vocabulary,
    beside: Path | None,
    named: dict[str, Any],
    by_id: Sequence[int],
    argument: str,
) -> int | None:
    if asked is None:
        return None
    if asked != AUTO:
        return _id("bos", asked, vocabulary, argument)
    token = named.get("bos_token")
    token_id = by_id[0] if token is None and by_id else None
    add_bos = None if beside is None else said_in(beside / "tokenizer_config.json").get("add_bos_token")
    if add_bos is False:
        return None
    if add_bos is True and token is not None:
        return _of_file("bos", token, vocabulary, argument)
    if add_bos is True and token_id is not None:
        return token_id
    # Encoding an empty text shows what the post-processor adds, which may be EOS alone.
    first, plain = (vocabulary.encode("", add_special_tokens=special).ids[:1] for special in (True, False))
    ends = {named.get("eos_token"), *ENDS}
    return None if first == plain or vocabulary.id_to_token(first[0]) in ends else first[0]


def _ids_named(vocabulary: Vocabulary, beside: Path | None) -> dict[str, list[int]]:
    """Returns the ids of bos and eos that files name by number and the vocabulary has."""
    ids_by_key: dict[str, list[int]] = {"bos": [], "eos": []}
    for content in () if beside is None else [said_in(beside / name) for name in _BY_ID]:
        for key, ids in ids_by_key.items():
            value = content.get(f"{key}_token_id")
            listed = value if isinstance(value, list) else [value]
            ids += [i for i in listed if type(i) is int and i >= 0 and vocabulary.id_to_token(i) is not None]
    return ids_by_key
