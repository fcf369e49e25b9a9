"""The sections of the page about what a run is made from and what it leaves: recipe, documents, checkpoints, pictures."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from ejdist.training.recorded import told_changes
from launch.reporting.folder import DOCUMENTS, RunFolder
from launch.reporting.html import Markup, table, tag


def dot(n: int, runs: Sequence[RunFolder]) -> Markup:
    """Returns the colour of a run, where there are several."""
    return tag("span", tag("i", style=f"background:var(--c{n})"), class_="key") if len(runs) > 1 else Markup()


def headed(runs: Sequence[RunFolder], make: Callable[[RunFolder], Any]) -> list[Any]:
    """Returns the content for each run, under its name if there are several."""
    return [[tag("h3", dot(n, runs), run.name) if len(runs) > 1 else "", make(run)] for n, run in enumerate(runs)]


def exact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value


def recipe(runs: Sequence[RunFolder], defaults: dict[str, Any]) -> Any:
    """Returns the recipes of the runs as tables, with what is not the default's marked."""
    if not any(run.recipe for run in runs):
        return tag("p", "No recipe was found.")
    default_values = json.loads(json.dumps(defaults, default=str))
    keys = list(dict.fromkeys(key for run in runs for key in run.recipe))
    sections: dict[str, list[str]] = {}
    for key in keys:
        sections.setdefault(key.partition(".")[0] if "." in key else "", []).append(key)
    parts = []
    for name, inside in sections.items():
        rows = [_line(key, runs, default_values, len(name) + 1 if name else 0) for key in inside]
        parts.append(tag("div", tag("h3", name or "other keys"), Markup(_body(runs, rows))))
    marked = "not as the schema has it by default" if len(runs) == 1 else "not the same in all of these runs"
    sources = [
        tag("p", dot(n, runs), f"From {run.recipe_from}." if run.recipe_from else "No recipe was found.", class_="soft")
        for n, run in enumerate(runs)
    ]
    changes = [
        tag("p", dot(n, runs), "Changed on resume: ", "; ".join(lines), ".")
        for n, run in enumerate(runs)
        if (lines := told_changes(run.changes))
    ]
    return (
        sources,
        changes,
        tag("p", tag("mark", "Marked"), f": {marked}."),
        tag("div", parts, class_="columns" if len(runs) == 1 else None),
    )


def _body(runs: Sequence[RunFolder], rows: list[Markup]) -> Markup:
    head = [tag("th", name, scope="col") for name in ("", *(run.name for run in runs))] if len(runs) > 1 else []
    top = tag("thead", tag("tr", head)) if head else ""
    return tag("div", tag("table", top, tag("tbody", rows), class_="recipe"), class_="scroll")


def _line(key: str, runs: Sequence[RunFolder], defaults: dict[str, Any], cut: int) -> Markup:
    values = [run.recipe.get(key, _NOT_THERE) if run.recipe else _NOT_THERE for run in runs]
    usual = defaults.get(key, _NOT_THERE)
    present = [v for v in values if v is not _NOT_THERE]  # an unknown value is not a difference
    changed = values[0] != usual if len(runs) == 1 else any(v != present[0] for v in present)
    was = f"by default {exact(usual)}" if usual is not _NOT_THERE else "no key of this version"
    cells = [tag("td", "–" if v is _NOT_THERE else exact(v), data_key=key, title=was) for v in values]
    return tag("tr", tag("th", key[cut:], scope="row"), cells, class_="changed" if changed else None)


_NOT_THERE = object()


def documents(runs: Sequence[RunFolder]) -> Any:
    def of(run: RunFolder) -> Any:
        if not run.documents:
            return tag("p", f"None of {', '.join(DOCUMENTS)} is in the folder.")
        return [[tag("h3", name), _value(content)] for name, content in run.documents.items()]

    return headed(runs, of)


def _value(content: Any, depth: int = 0) -> Any:
    """Returns a value of JSON: tables as far as they can be read, and below that its text."""
    if isinstance(content, dict) and content and depth < _DEEP:
        return table([], [[str(key), _value(value, depth + 1)] for key, value in content.items()])
    if isinstance(content, list) and content and depth < _DEEP and all(isinstance(row, dict) for row in content):
        keys = list(dict.fromkeys(str(key) for row in content for key in row))
        rows = [
            [str(n), *(_value(row[key], depth + 1) if key in row else "–" for key in keys)]
            for n, row in enumerate(content, 1)
        ]
        return table(["", *keys], rows)
    if isinstance(content, str):
        return tag("pre", content) if "\n" in content else content
    return json.dumps(content, ensure_ascii=False)


_DEEP = 3


def checkpoints(runs: Sequence[RunFolder]) -> Any:
    def of(run: RunFolder) -> Any:
        rows = [
            [f"step {step:,}", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(saved_at))]
            for step, saved_at in run.checkpoints.items()
        ]
        aside = tag("p", f"Set aside, or cut off: {', '.join(run.set_aside)}.", class_="bad") if run.set_aside else ""
        none = f"Kept in {run.kept_in} (checkpoint.dir)." if run.kept_in else "There is no checkpoint."
        return (table([], rows) if rows else tag("p", none)), aside

    return headed(runs, of)


def pictures(runs: Sequence[RunFolder]) -> Any:
    def of(run: RunFolder) -> Any:
        if not run.pictures:
            return tag("p", "The run has drawn none.")
        return [
            tag("img", src=f"data:image/png;base64,{base64.b64encode(content).decode()}", alt=f"{name} of {run.name}")
            for name, content in run.pictures.items()
        ]

    return headed(runs, of)
