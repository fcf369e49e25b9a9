"""The chat template and the special tokens that lie beside a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ejdist.buckets import source_path

CHATML = "chatml"  # the name of a template that is always there
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def templates_of(chat_template: str | None, tokenizer: str) -> dict[str, str]:
    """Returns name -> template; "default" is for conversations, "tool_use", where there is one, for those with tools.

    Args:
      chat_template: data.chat_template: a file, "chatml", or one of the names that the folder of the tokenizer has; None for
        what that has.
      tokenizer: data.tokenizer.

    Raises:
      ValueError: there is none, or it cannot be read; names the remedy.
    """
    folder = folder_of(tokenizer)
    if chat_template == CHATML:
        return {"default": (Path(__file__).parent / "chatml.jinja").read_text("utf-8")}
    templates = {} if folder is None else _own(folder)
    if chat_template is not None:
        if chat_template in templates:
            return {"default": templates[chat_template]}
        path = source_path("data.chat_template", chat_template)
        if not path.is_file():
            names = f", {', '.join(sorted(templates))} (of {folder})" if templates else ""
            raise ValueError(
                f"data.chat_template = {chat_template!r}: no such file; give a Jinja template, {CHATML}{names}"
            )
        return {"default": _read(path)}
    if not templates:
        where = f"{folder} has neither chat_template.jinja nor one in tokenizer_config.json"
        raise ValueError(
            f"conversations need a chat template, but {where if folder else f'data.tokenizer = {tokenizer!r} has none'}: "
            f"give data.chat_template=FILE, or {CHATML}"
        )
    if "default" not in templates:
        raise ValueError(
            f"{folder} has the chat templates {', '.join(sorted(templates))}, and none is the default: name one in "
            "data.chat_template"
        )
    return {name: templates[name] for name in ("default", "tool_use") if name in templates}


def tokens_of(tokenizer: str) -> dict[str, Any]:
    """Returns the special tokens of a tokenizer's folder that templates read: bos_token, eos_token, ..."""
    folder = folder_of(tokenizer)
    config = (
        {}
        if folder is None
        else {**said_in(folder / "special_tokens_map.json"), **said_in(folder / "tokenizer_config.json")}
    )
    tokens: dict[str, Any] = {}
    for name in _TOKENS:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    more = config.get("additional_special_tokens")
    if isinstance(more, list):
        tokens["additional_special_tokens"] = [t.get("content") if isinstance(t, dict) else t for t in more]
    return tokens


def folder_of(tokenizer: str) -> Any:
    """Returns the folder of a tokenizer that is a file or a folder, a `Path` or a `BucketPath`; None for another."""
    path = source_path("data.tokenizer", tokenizer)
    return path if path.is_dir() else path.parent if path.is_file() else None


def _own(folder: Path) -> dict[str, str]:
    """Returns the templates of a folder, by name; a file of its own comes before what a configuration says."""
    declared = said_in(folder / "tokenizer_config.json").get("chat_template")
    declared = declared if declared is not None else said_in(folder / "chat_template.json").get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(declared, str):
        templates["default"] = declared
    elif isinstance(declared, list):
        entries = [one for one in declared if isinstance(one, dict)]
        templates = {str(one.get("name")): one["template"] for one in entries if isinstance(one.get("template"), str)}
    elif isinstance(declared, dict):
        templates = {str(name): text for name, text in declared.items() if isinstance(text, str)}
    if (alone := folder / "chat_template.jinja").is_file():
        templates["default"] = _read(alone)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read(path)
    return templates


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(
            f"data.chat_template: cannot read {path}: {reason}; give a template that can be read"
        ) from error


def said_in(path: Path) -> dict[str, Any]:
    """Returns the object that a JSON file beside a tokenizer holds; empty without one. Raises ValueError: it is not JSON."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error.msg}, line {error.lineno}); fix it, or copy it again") from None
    return content if isinstance(content, dict) else {}
