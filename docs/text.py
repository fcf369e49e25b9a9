"""Docstrings and signatures as Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

WIDTH = 100


def escaped(text: str) -> str:
    """Returns plain text as Markdown that shows it as it is; `code` stays code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([\\*_\[\]<>|#~$])", r"\\\1", p) for p in parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; its cells are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```"


def signature(name: str, function: Callable) -> str:
    """Returns the call as code, an argument a line where it is long."""
    try:
        found = inspect.signature(function)
    except ValueError:  # a class of C, or one without an initialiser of its own
        return code(f"{name}(...)")
    parameters = []
    for p in found.parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in parameters and not any(q.startswith("*") for q in parameters):
            parameters.append("*")
        text = str(p.replace(annotation=p.empty, default=p.empty))
        if p.annotation is not p.empty:
            text += f": {p.annotation if isinstance(p.annotation, str) else inspect.formatannotation(p.annotation)}"
        if p.default is not p.empty:
            default = p.default.__name__ if inspect.isclass(p.default) else repr(p.default)
            text += " = " + re.sub(r"<function (\S+) at \w+>", r"\1", default)  # where it lies changes with every run
        parameters.append(text)
    line = f"{name}({', '.join(parameters)})"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {p},\n" for p in parameters) + ")"
    return code(line)


def first_sentence(doc: str | None) -> str:
    """Returns the first sentence of a docstring."""
    paragraph = " ".join(inspect.cleandoc(doc or "").split("\n\n")[0].split())
    found = re.match(r".*?\.(?=\s+[A-Z`]|$)", paragraph)
    return found[0] if found else paragraph


def markdown(doc: str | None) -> str:
    """Returns a docstring of the project's form as Markdown: paragraphs, `Args:` and its like as lists, examples as code."""
    blocks: list[str] = []
    lines = inspect.cleandoc(doc or "").splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        if not line.strip():
            at += 1
        elif line.lstrip().startswith(">>>"):
            end = _until(lines, at, lambda text: not text.strip())
            blocks.append(code(inspect.cleandoc("\n".join(lines[at:end])), "pycon"))
            at = end
        elif line.endswith(":") and at + 1 < len(lines) and lines[at + 1].startswith("  "):
            end = _until(lines, at + 1, lambda text: bool(text.strip()) and not text.startswith(" "))
            blocks.append(f"**{escaped(line[:-1])}**")
            blocks.append(_items(lines[at + 1 : end]))
            at = end
        else:
            end = _until(lines, at, lambda text: not text.strip() or text.lstrip().startswith(">>>"))
            blocks.append(_paragraph(lines[at:end]))
            at = end
    return "\n\n".join(b for b in blocks if b)


def _until(lines: Sequence[str], at: int, ends: Callable[[str], bool]) -> int:
    return next((i for i in range(at + 1, len(lines)) if ends(lines[i])), len(lines))


def _paragraph(lines: Sequence[str]) -> str:
    """Returns a paragraph, or code where it stands indented, as a formula does."""
    if all(line.startswith("  ") for line in lines):
        return code(inspect.cleandoc("\n".join(lines)), "text")
    return escaped(" ".join(line.strip() for line in lines))


def _items(lines: Sequence[str]) -> str:
    lines = inspect.cleandoc("\n".join(lines)).splitlines()
    items: list[str] = []
    for line in lines:
        if not line.strip():
            continue
        if line.startswith(" ") and items:
            items[-1] += " " + line.strip()
        else:
            items.append(line.strip())
    return "\n".join(f"- {_item(item)}" for item in items)


def _item(text: str) -> str:
    name, colon, rest = text.partition(": ")
    names = re.fullmatch(r"[\w.*]+(, [\w.*]+)*", name)
    return f"**{escaped(name)}**: {escaped(rest)}" if colon and names else escaped(text)


def documented(name: str, thing: Any, level: int) -> str:
    """Returns the section of a function, or of a class with its public methods."""
    parts = [f"{'#' * level} {escaped(name)}", signature(name, thing), markdown(thing.__doc__)]
    if inspect.isclass(thing):
        for method, value in vars(thing).items():
            inner = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if method.startswith("_") or not inspect.isfunction(inner) or not inner.__doc__:
                continue
            parts += [signature(f"{name}.{method}", inner), markdown(inner.__doc__)]
    return "\n\n".join(p for p in parts if p)
