"""HTML and SVG as text: whatever comes from a file is escaped, and a page needs nothing but itself."""

from __future__ import annotations

import html
from collections.abc import Iterable
from importlib import resources
from typing import Any

_EMPTY = {"meta", "img", "br", "rect", "path", "line"}


class Markup(str):
    """Text that is HTML already."""


def escaped(content: Any) -> str:
    if isinstance(content, Markup):
        return content
    if isinstance(content, str) or not isinstance(content, Iterable):
        # What a browser would not show, or take for the end of its input, is shown as a box.
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(content))
        return html.escape(text)
    return "".join(escaped(part) for part in content)


def tag(name: str, /, *content: Any, **attributes: Any) -> Markup:
    """Returns an element. An attribute is written with _ for -, and `class_` for class; None leaves it out."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-") if key != "viewBox" else key}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY and not content:
        return Markup(f"<{name}{pairs}/>")
    return Markup(f"<{name}{pairs}>{escaped(content)}</{name}>")


def table(head: list[Any], rows: Iterable[list[Any]], **attributes: Any) -> Markup:
    """Returns a table that scrolls by itself where the page is too narrow. The first cell of a row names it."""
    top = tag("thead", tag("tr", [tag("th", cell, scope="col") for cell in head])) if head else Markup()
    body = []
    for first, *others in rows:
        cells = [cell if isinstance(cell, Markup) and cell.startswith("<td") else tag("td", cell) for cell in others]
        body.append(tag("tr", tag("th", first, scope="row"), cells))
    return tag("div", tag("table", top, tag("tbody", body), **attributes), class_="scroll")


def page(title: str, *content: Any) -> str:
    """Returns a whole page, as text of a file in UTF-8."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup((resources.files("launch.reporting") / "style.css").read_text())),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', *content), lang='en')}\n"
