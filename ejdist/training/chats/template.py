"""Chat templates: Jinja, rendered as transformers renders it, in a sandbox in which nothing can be changed.

`{% generation %} ... {% endgeneration %}` marks what the model is to say. Both ends are rendered as marks that no text has, and
are taken out of the result, so the places are right inside macros and captured blocks too.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from typing import Any

_NONCE = secrets.token_hex(8)
_OPEN, _CLOSE = f"\ue000{_NONCE}[", f"\ue000{_NONCE}]"
_REASONING = ("reasoning_content", "thinking", "reasoning")  # what templates call it, the usual name first

Spans = list[tuple[int, int]]  # [begin, end) in characters of a text, in order


class ChatTemplate:
    """A template, compiled.

    Attributes:
      marks: whether it says by {% generation %} what the model is to say.
      source: its text.

    Raises:
      ValueError: it is not valid Jinja; names the line.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, Any], today: str | None, what: str = "the chat template"
    ) -> None:
        from jinja2 import TemplateSyntaxError, nodes
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        generation_lines: list[int] = []

        class Generation(Extension):
            tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                generation_lines.append(line)
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

            def _marked(self, caller: Any) -> str:
                return f"{_OPEN}{caller()}{_CLOSE}"

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        def strftime_now(pattern: str) -> str:
            return datetime.combine(date.fromisoformat(today or ""), time()).strftime(pattern)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        names: dict[str, Any] = environment.globals  # its type names Jinja's own values
        names |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"{what} is not a Jinja template: line {error.lineno}: {error.message}") from None
        self.source, self.marks, self._tokens = source, bool(generation_lines), dict(tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: bool = False,
        tools: Sequence[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> tuple[str, Spans]:
        """Returns (the text of a conversation, what of it the template marks).

        Args:
          prompt: whether the beginning of the next turn follows, after which the model speaks (add_generation_prompt).
          arguments: more variables of the template.

        Raises:
          ValueError: the template raises, or fails.
        """
        variables = {**self._tokens, **(arguments or {})}
        prepared = [_with_reasoning(message) for message in messages]
        try:
            text = self._template.render(
                messages=prepared, tools=tools, documents=None, add_generation_prompt=prompt, **variables
            )
        except Exception as error:  # what a template computes may fail in any way
            reason = (str(error).splitlines() or [""])[0]
            raise ValueError(f"the chat template fails: {reason or type(error).__name__}") from None
        return _unmarked(text)


def reads_date(source: str) -> bool:
    """Returns whether a template writes the date, so that its text is another one every day."""
    return "strftime_now" in source


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own escapes what HTML reads."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the message with its reasoning under the names by which templates ask for it."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _unmarked(text: str) -> tuple[str, Spans]:
    if _OPEN not in text:
        return text, []
    parts, spans, offset = [], [], 0
    for piece in text.split(_OPEN):
        inside, closed, rest = piece.partition(_CLOSE)
        if closed:
            spans += [(offset, offset + len(inside))] if inside else []
        parts += [inside, rest]
        offset += len(inside) + len(rest)
    return "".join(parts), spans
