"""Which characters of a rendered conversation the model is to say.

A template that marks them by {% generation %} is trusted. For any other, a turn is found by rendering the conversation up to
it, with the prompt after which the model speaks: what follows that, in the whole, is the turn.

- It ends where the conversation that ends with it does. Templates that write the last turn otherwise than those before (one
  that leaves out the reasoning of earlier turns, or ends the last one with a token of its own) need another way: what follows
  the turn in the whole is what follows the conversation up to it when the turn is left out.
- What cannot be found in either way is refused: no place is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ejdist.training.chats.template import ChatTemplate, Spans

_OWN = "give data.chat_template=FILE, a template that marks the assistant's text by {% generation %}"


@dataclass(frozen=True)
class Chat:
    """A conversation.

    Attributes:
      train: for each message, from its row: None, whether it is trained, or the [begin, end) of its content, in characters.
      arguments: variables of the template, from the row.
    """

    messages: list[dict[str, Any]]
    train: list[bool | Spans | None]
    tools: list[Any] | None
    arguments: Mapping[str, Any]


def rendered(template: ChatTemplate, chat: Chat, loss_on: str) -> tuple[str, Spans]:
    """Returns (the text of a conversation, the characters that are trained).

    Args:
      loss_on: all; assistant: every turn of the assistant, but those that the row says are not trained; last: the last of
        these; spans: what the row says, and nothing else.

    Raises:
      ValueError: the template fails, a turn cannot be found, or nothing is trained.
    """
    turns = _Turns(template, chat)
    if loss_on == "all":
        return turns.text, [(0, len(turns.text))]
    spoken = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if not spoken:
        raise ValueError("no message is the assistant's, so nothing is trained")
    candidates = spoken[-1:] if loss_on == "last" else spoken
    chosen = [i for i in candidates if chat.train[i] or (chat.train[i] is None and loss_on != "spans")]
    if not chosen:
        raise ValueError("nothing of it is trained: no message of the assistant says so by 'train' or 'weight'")
    if template.marks and chosen == spoken and not any(isinstance(chat.train[i], list) for i in chosen):
        spans = turns.marked
    else:
        spans = [span for i in chosen for span in turns.trained(i)]
    if not spans:
        raise ValueError(f"the chat template marks no text as the assistant's; {_OWN}")
    return turns.text, spans


class _Turns:
    """The turns of a conversation in its text."""

    def __init__(self, template: ChatTemplate, chat: Chat) -> None:
        self._template, self._chat = template, chat
        self.text, self.marked = self._render(chat.messages)

    def _render(self, messages: list[dict[str, Any]], prompt: bool = False) -> tuple[str, Spans]:
        chat = self._chat
        return self._template.render(messages, prompt=prompt, tools=chat.tools, arguments=chat.arguments)

    def trained(self, i: int) -> Spans:
        """Returns the characters of message i that are trained. Raises ValueError: they cannot be found."""
        turn = self._marked_in(i) if self._template.marks else [self._found(i)]
        chosen = self._chat.train[i]
        if not isinstance(chosen, list):
            return turn
        content, (begin, end) = self._chat.messages[i].get("content") or "", (turn[0][0], turn[-1][1])
        offset = self.text.find(content, begin, end)
        if offset < 0 or self.text.find(content, offset + 1, end) >= 0:
            raise ValueError(
                f"message {i}: 'train' has places in its content, which the chat template does not write there once and "
                "unchanged"
            )
        return [(offset + first, offset + last) for first, last in chosen]

    def _marked_in(self, i: int) -> Spans:
        """Returns what the template marks in message i: what it marks up to it, less what it marks before it."""
        before = self._render(self._chat.messages[:i])[1] if i else []
        up_to = self.marked if i + 1 == len(self._chat.messages) else self._render(self._chat.messages[: i + 1])[1]
        turn = self.marked[len(before) : len(up_to)]
        if not turn or self.marked[: len(before)] != before:
            raise ValueError(
                f"message {i}: the chat template marks other text of the messages before it than of the whole, so the turn "
                "cannot be told from them; use data.loss_on=assistant"
            )
        return turn

    def _found(self, i: int) -> tuple[int, int]:
        messages, text = self._chat.messages, self.text
        before = messages[:i]
        start = self._render(before, prompt=True)[0]
        if not text.startswith(start):
            raise ValueError(
                f"message {i}: the conversation up to it, with the prompt of its turn, is not how the whole begins, so the "
                f"turn cannot be found; {_OWN}"
            )
        begin, end = len(start), len(text)
        if i + 1 < len(messages):
            up_to = self._render(messages[: i + 1])[0]
            end = len(up_to) if text.startswith(up_to) else self._end_without(i)
        if end <= begin:
            raise ValueError(f"message {i}: the end of the turn cannot be found in the whole conversation; {_OWN}")
        return begin, end

    def _end_without(self, i: int) -> int:
        """Returns where turn i ends, by what follows when it is left out; 0 if that is inconclusive."""
        messages = self._chat.messages
        try:
            before = self._render(messages[:i])[0]
            without = self._render(messages[:i] + messages[i + 1 :])[0]
        except ValueError:  # a template may refuse two users in a row
            return 0
        rest = without[len(before) :]
        matches = rest and without.startswith(before) and self.text.endswith(rest)
        return len(self.text) - len(rest) if matches else 0
