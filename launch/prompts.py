"""The prompts of `launch.generate`: of the command line, a file or stdin, and their tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CONVERSATIONS = ("messages", "completion")  # formats of rows that a chat template writes


@dataclass(frozen=True)
class Prompt:
    """A text, or the messages of a conversation, which go through a chat template. answers: texts of which one is to be in
    the answer; none where that is not asked. wrong: why a row of a file is no prompt."""

    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    answers: tuple[str, ...] = ()
    wrong: str = ""

    def is_right(self, text: str) -> bool:
        """Returns whether an answer has one of the right ones in it, in capitals or not."""
        return self.is_exact(text) or any(one.casefold() in text.casefold() for one in self.answers)

    def is_exact(self, text: str) -> bool:
        """Returns whether an answer is one of the right ones, in capitals or not and whatever space is around it."""
        return text.strip().casefold() in {one.strip().casefold() for one in self.answers}

    @property
    def shown(self) -> Any:
        """What a row of the output has of it."""
        return list(self.messages) if self.messages else self.text


def read_prompts(prompt: str | None, file: str | None) -> list[Prompt]:
    """Returns the prompt of the command line, those of a file, or those of stdin (`prompts=-`, or neither). A row that is no
    prompt keeps its number, and the others go on: what is wrong with it is raised where it is encoded, with its line.

    Raises:
      ValueError: there is no prompt, or the file cannot be read.
    """
    if prompt is not None:
        return [Prompt(prompt)]
    if file is None and sys.stdin.isatty():
        raise ValueError("give prompt=TEXT, prompts=FILE, or prompts on stdin, one a line")
    if file in (None, "-"):
        name, content = "stdin", sys.stdin.buffer.read()
    else:
        try:
            name, content = file, Path(file).expanduser().read_bytes()
        except OSError as error:
            raise ValueError(f"prompts = {file!r} cannot be read ({error.strerror}): name a file of prompts") from error
    read = _of_row if name.endswith(".jsonl") else _of_line
    prompts = [_read(read, line, f"{name}, line {i}") for i, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{name} has no prompts: give one a line{', or prompt=TEXT' * (file is None)}")
    return prompts


def _read(read: Callable[[str, str], Prompt], line: bytes, where: str) -> Prompt:
    try:
        return read(line.decode("utf-8"), where)
    except UnicodeDecodeError as error:
        return Prompt(wrong=f"{where} is not UTF-8 (byte {error.start}); prompts are text, or JSON rows in FILE.jsonl")
    except UnicodeEncodeError:
        return Prompt(
            wrong=f"{where} has half of a character, a surrogate without the other one: write the character itself"
        )
    except ValueError as error:
        return Prompt(wrong=str(error))


def _of_line(line: str, where: str) -> Prompt:
    return Prompt(line.removesuffix("\r"))


def _of_row(line: str, where: str) -> Prompt:
    remedy = (
        'write {"prompt": "..."}, or {"messages": [{"role": "user", "content": "..."}]}, and "answer" where it is known'
    )
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error.msg}); {remedy}") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply; {remedy}") from None
    json.dumps(row, ensure_ascii=False).encode("utf-8")  # no tokenizer takes half of a character
    if isinstance(row, str):
        return Prompt(row)
    if not isinstance(row, dict):
        raise ValueError(f"{where} has no prompt; {remedy}")
    answers = row.get("answer", [])
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not all(isinstance(one, str) and one for one in answers):
        raise ValueError(f"{where}: 'answer' must be a text that is not empty, or a list of them")
    if isinstance(row.get("prompt"), str):
        return Prompt(row["prompt"], answers=tuple(answers))
    messages = row.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages):
        return Prompt(messages=tuple(messages), answers=tuple(answers))
    raise ValueError(f"{where} has no prompt; {remedy}")


def encoder(tokenizer: Any, template: Any) -> Callable[[Prompt], np.ndarray]:
    """Returns the function from a prompt to its tokens, BOS first where the tokenizer has one. It raises ValueError for a wrong
    prompt, and for one that the template does not take.

    Args:
      template: `ChatTemplate`, through which every prompt goes, a text as the user's; None for none.
    """
    from ejdist.training.chats.special_tokens import begun

    def encode(prompt: Prompt) -> np.ndarray:
        if prompt.wrong:
            raise ValueError(prompt.wrong)
        text = prompt.text
        if not prompt.messages and not text:
            return np.zeros(0, np.int32)
        if prompt.messages and template is None:
            raise ValueError(
                "messages need a chat template, and there is none: give data.chat_template=FILE, or chatml"
            )
        if template is not None:
            text, _ = template.render(prompt.messages or [{"role": "user", "content": text}], prompt=True)
        return begun(tokenizer, tokenizer.encode(text))

    return encode


def template_of(chat: str, where_trained: Sequence[str], recipe: Any, is_run: bool) -> Any:
    """Returns the chat template that prompts go through; None for none.

    Args:
      chat: "auto": that of a published folder which has one, and of a run on conversations; "true" or "false".
      where_trained: the formats of rows that are conversations.

    Raises:
      ValueError: chat=true, and there is none.
    """
    from datetime import date

    from ejdist.training.chats.folder import templates_of, tokens_of
    from ejdist.training.chats.template import ChatTemplate

    asked = recipe.data.chat_template
    if chat == "false" or (chat == "auto" and is_run and recipe.data.format not in where_trained and asked is None):
        return None
    try:
        source = templates_of(asked, recipe.data.tokenizer)["default"]
    except ValueError:
        if chat == "auto" and asked is None:
            return None
        raise
    variables = tokens_of(recipe.data.tokenizer) | dict(recipe.data.chat_template_kwargs or {})
    return ChatTemplate(source, variables, recipe.data.chat_date or date.today().isoformat())
