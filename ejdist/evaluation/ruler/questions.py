"""Questions about documents, from the files of SQuAD 2.0 and HotpotQA, which the user names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILES = {"squad": "dev-v2.0.json of SQuAD 2.0", "hotpotqa": "hotpot_dev_distractor_v1.json of HotpotQA"}


@dataclass(frozen=True)
class Question:
    """A question.

    Attributes:
      answers: each of which is right.
      own: indices of the documents that belong to it: that of the answer, in HotpotQA all ten of its context.
      near: those of the same article, which are its first distractors.
    """

    question: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """The documents of a file, in alphabetical order and each once, and the questions about them, in the order of the file."""

    documents: tuple[str, ...]
    items: tuple[Question, ...]

    def digest(self) -> str:
        """Returns what tells these from others."""
        content = json.dumps([self.documents, [[i.question, i.answers, i.own] for i in self.items]])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @classmethod
    def read(cls, key: str, path: str) -> Questions:
        """Returns those of a file.

        Args:
          key: "squad" or "hotpotqa": its format, and what errors call it.

        Raises:
          ValueError: the file cannot be read, has another format, or no question with an answer.
        """
        what = f"name {_FILES[key]}"
        try:
            content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{key} = {path!r} cannot be read: {error.strerror}; {what}") from None
        except ValueError:
            raise ValueError(f"{key} = {path!r} is not JSON; {what}") from None
        try:
            rows = _READERS[key](content)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise ValueError(f"{key} = {path!r} has another format; {what}") from None
        if not rows:
            raise ValueError(f"{key} = {path!r} has no question with an answer; {what}")
        documents = sorted({text for _, _, relevant, near in rows for text in (*relevant, *near)})
        places = {text: i for i, text in enumerate(documents)}
        items = [
            Question(
                question,
                answers,
                tuple(places[t] for t in relevant),
                tuple(places[t] for t in near if t not in relevant),
            )
            for question, answers, relevant, near in rows
        ]
        return cls(tuple(documents), tuple(items))


_Rows = list[tuple[str, tuple[str, ...], list[str], list[str]]]  # question, answers, own documents, near ones


def _squad(content: Any) -> _Rows:
    rows: _Rows = []
    for article in content["data"]:
        texts = [p["context"] for p in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            for one in paragraph["qas"]:
                answers = tuple(dict.fromkeys(str(a["text"]) for a in one["answers"] if a["text"]))
                if answers and not one.get("is_impossible", False):
                    rows.append((str(one["question"]), answers, [paragraph["context"]], texts))
    return rows


def _hotpotqa(content: Any) -> _Rows:
    rows: _Rows = []
    for one in content:
        documents = list(dict.fromkeys(f"{title}\n{''.join(sentences)}" for title, sentences in one["context"]))
        if documents and one["answer"]:
            rows.append((str(one["question"]), (str(one["answer"]),), documents, []))
    return rows


_READERS: dict[str, Callable[[Any], _Rows]] = {"squad": _squad, "hotpotqa": _hotpotqa}
