"""Rows of conversations: what they must have, and errors that say what is wrong with a row.

messages: a list of {role, content}, with `tools` beside it. completion: `prompt` and `completion`, two texts or two lists of
messages. ids: `input_ids`, with `labels` (-100: not trained) or a mask.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ejdist.training.chats.template import Spans
from ejdist.training.chats.turns import Chat

KINDS = ("messages", "completion", "ids")
MASKS = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask", "mask")
IGNORED = -100
ROLES = ("system", "developer", "user", "assistant", "tool")
_BESIDE = ("tools", "chat_template_kwargs", "prompt", "completion", "spans", "input_ids", "labels", *MASKS)


def columns(key: str) -> tuple[str, ...]:
    """Returns the columns of a table that conversations are read from."""
    return (key, *(name for name in _BESIDE if name != key))


def kinds_in(row: Mapping[str, Any], key: str) -> list[str]:
    """Returns the kinds that a row could be of, by what it has."""
    has = {name for name, value in row.items() if value is not None}
    if isinstance(_parsed(row.get(key)), str):  # the text of a row of text
        has.discard(key)
    needed = {"messages": {key}, "completion": {"prompt", "completion"}, "ids": {"input_ids"}}
    return [kind for kind in KINDS if needed[kind] <= has]


def chat_of(row: Any, kind: str, key: str, source: str) -> Chat | tuple[str, Spans, Spans]:
    """Returns the conversation of a row; of a prompt and a completion that are texts: (both, the completion, the row's spans).

    Args:
      key: of the messages.
      source: of the template: a role that it names is known.

    Raises:
      ValueError: the row is wrong.
    """
    _check_row(row)
    if kind == "completion":
        prompt, completion = (_parsed(_field(row, name)) for name in ("prompt", "completion"))
        if isinstance(prompt, str) and isinstance(completion, str):
            text = _text(prompt, "'prompt'") + _text(completion, "'completion'")
            if not completion:
                raise ValueError("'completion' is empty, so nothing is trained")
            offset, pairs = len(prompt), row.get("spans")
            spans = [] if pairs is None else _spans(pairs, len(completion), "'spans'")
            return text, [(offset, len(text))], [(offset + begin, offset + end) for begin, end in spans]
        if isinstance(prompt, str) or isinstance(completion, str):
            raise ValueError("'prompt' and 'completion' must both be texts, or both lists of messages")
        prompts, replies = _messages(prompt, "prompt", source), _messages(completion, "completion", source)
        if not any(message["role"] == "assistant" for message in replies):
            raise ValueError("'completion' has no message of the assistant, so nothing is trained")
        train = [*(False for _ in prompts), *(_train(message, i) for i, message in enumerate(replies))]
        messages = [*prompts, *replies]
    else:
        messages = _messages(_parsed(_field(row, key)), key, source)
        train = [_train(message, i) for i, message in enumerate(messages)]
    return Chat([_plain(m) for m in messages], train, _tools(row), _arguments(row))


def ids_of(row: Any, vocab_size: int, loss_on: str) -> tuple[list[int], list[bool]]:
    """Returns (ids, which are trained) of a row of kind ids.

    Raises:
      ValueError: the row is wrong.
    """
    _check_row(row)
    ids = _integers(_field(row, "input_ids"), "input_ids")
    if not ids:
        raise ValueError("'input_ids' is empty")
    if (wrong := next((i for i in ids if not 0 <= i < vocab_size), None)) is not None:
        raise ValueError(f"'input_ids' has {wrong}, and the tokenizer has the ids 0 to {vocab_size - 1}")
    present = [name for name in ("labels", *MASKS) if row.get(name) is not None]
    if len(present) > 1:
        raise ValueError(f"{present[0]!r} and {present[1]!r} both say what is trained; keep one")
    if loss_on == "all":
        return ids, [True] * len(ids)
    if not present:
        raise ValueError(
            f"neither 'labels' nor a mask ({', '.join(MASKS)}) says what is trained; add one, or set data.loss_on=all"
        )
    values = _integers(row[present[0]], present[0])
    if len(values) != len(ids):
        much = "longer" if len(values) > len(ids) else "shorter"
        raise ValueError(f"{present[0]!r} has {len(values)} numbers, {much} than the {len(ids)} of 'input_ids'")
    if present[0] == "labels":
        for i, (label, token) in enumerate(zip(values, ids, strict=True)):
            if label not in (IGNORED, token):
                raise ValueError(
                    f"labels[{i}] = {label} is neither {IGNORED} nor input_ids[{i}] = {token}; labels are not shifted here"
                )
        return ids, [label != IGNORED for label in values]
    if stray := next((v for v in values if v not in (0, 1)), None):
        raise ValueError(f"{present[0]!r} has {stray}; a mask has 0 and 1 only")
    return ids, [bool(value) for value in values]


def _check_row(row: Any) -> None:
    if not isinstance(row, Mapping):
        raise ValueError(f"{type(row).__name__}, not an object")


def _field(row: Mapping[str, Any], name: str) -> Any:
    if row.get(name) is None:
        present = ", ".join(list(row)[:12]) or "none"
        hint = "; set data.text_key to the key of the messages" if name == "messages" else ""
        raise ValueError(f"no key {name!r} (there is {present}){hint}")
    return row[name]


def _parsed(value: Any) -> Any:
    """Returns the messages that a table has as JSON in a text; another text as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            messages = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if isinstance(messages, list) and messages and all(isinstance(one, dict) and "role" in one for one in messages):
            return messages
    return value


def _text(value: str, what: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} has half of a surrogate pair at character {error.start}, which is not text") from None
    return value


def _messages(value: Any, name: str, source: str) -> list[dict[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{name!r} is {_kind(value)}, not a list of messages")
    return [_message(message, f"{name}[{i}]", source) for i, message in enumerate(value)]


def _message(message: Any, where: str, source: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} is {_kind(message)}, not an object with role and content")
    if "role" not in message:
        other = "; it has 'from' and 'value': rename these to role and content" if "from" in message else ""
        raise ValueError(f"{where} has no 'role'{other}")
    role = message["role"]
    if not isinstance(role, str) or (role not in ROLES and f"'{role}'" not in source and f'"{role}"' not in source):
        raise ValueError(
            f"{where} has the unknown role {role!r}; roles are {', '.join(ROLES)}, and what the template names"
        )
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        raise ValueError(f"{where}.tool_calls is {_kind(calls)}, not a list of objects")
    content = message.get("content")
    if content is None and not calls and role == "assistant":
        raise ValueError(f"{where} has no 'content' and no 'tool_calls'")
    if content is None and role != "assistant":
        raise ValueError(f"{where} has no 'content'")
    return dict(message) | ({"content": _content(content, where)} if content is not None else {})


def _content(content: Any, where: str) -> str:
    """Returns a text; of a list of parts the texts of them, one after another."""
    if isinstance(content, str):
        return _text(content, f"{where}.content")
    if not isinstance(content, list):
        raise ValueError(f"{where}.content is {_kind(content)}, neither a text nor a list of parts with text")
    texts = []
    for i, part in enumerate(content):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text" or not isinstance(text, str):
            raise ValueError(f"{where}.content[{i}] is of type {kind!r}; only parts of text can be trained")
        texts.append(_text(text, f"{where}.content[{i}]"))
    return "".join(texts)


def _train(message: Mapping[str, Any], number: int) -> bool | Spans | None:
    """Returns which part of a message is trained, from its 'train' or 'weight'; None if it has neither."""
    keys = [name for name in ("train", "weight") if message.get(name) is not None]
    if not keys:
        return None
    value, where = message[keys[0]], f"message {number}: {keys[0]!r}"
    if isinstance(value, list):
        if message["role"] != "assistant" or keys[0] == "weight":
            raise ValueError(f"{where} has places, which 'train' of a message of the assistant may have")
        return _spans(value, len(message.get("content") or ""), where)
    if value not in (0, 1):
        raise ValueError(f"{where} is {value!r}; it is true or false, or 1 or 0")
    if value and message["role"] != "assistant":
        raise ValueError(f"{where} is {value!r} for role {message['role']!r}; only turns of the assistant are trained")
    return bool(value)


def _spans(pairs: Any, length: int, where: str) -> Spans:
    good = isinstance(pairs, list) and all(isinstance(one, list) and len(one) == 2 for one in pairs)
    flat = [x for one in pairs for x in one] if good else []
    if not flat or any(type(x) is not int for x in flat) or sorted(flat) != flat or flat[0] < 0 or flat[-1] > length:
        raise ValueError(f"{where} must be [begin, end] pairs, in order, within the {length} characters of the text")
    if any(begin == end for begin, end in pairs):
        raise ValueError(f"{where} has an empty pair")
    return [(begin, end) for begin, end in pairs]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in ("train", "weight")}


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    tools = row.get("tools")
    if isinstance(tools, str):  # in tables, whose columns cannot hold a JSON schema
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise ValueError("'tools' is a text, but not JSON") from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError(f"'tools' is {_kind(tools)}, not a list of objects")
    return tools or None


def _arguments(row: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = row.get("chat_template_kwargs")
    if arguments is not None and not isinstance(arguments, Mapping):
        raise ValueError(f"'chat_template_kwargs' is {_kind(arguments)}, not an object")
    return arguments or {}


def _integers(values: Any, name: str) -> list[int]:
    if not isinstance(values, list) or any(type(x) not in (int, bool) for x in values):
        raise ValueError(f"{name!r} is not a list of whole numbers")
    return [int(x) for x in values]


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else type(value).__name__
