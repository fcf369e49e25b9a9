"""Options of a benchmark's command line, written name=value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def read(defaults: Mapping[str, Any], argv: Sequence[str]) -> dict[str, Any]:
    """Returns the options, each of the type of its default. Ends the command at a word that is none of them."""
    found, rest = split(defaults, argv)
    if rest:
        raise SystemExit(f"{rest[0]!r}: write name=value, of {', '.join(defaults)}")
    return found


def split(defaults: Mapping[str, Any], argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns (the options, the words that are none of them). Ends the command at a value that is not of its option's type, and
    at an option that is given twice."""
    found, rest, given = dict(defaults), [], set()
    for word in argv:
        name, equals, value = word.partition("=")
        if not equals or name not in defaults:
            rest.append(word)
            continue
        if name in given:
            raise SystemExit(f"{word!r}: {name} is given twice; give it once")
        given.add(name)
        kind = type(defaults[name])
        try:
            found[name] = kind(value)
        except ValueError:
            raise SystemExit(f"{word!r}: {name} must be of type {kind.__name__}") from None
    return found, rest


def recorded(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that results keep: not where they were written."""
    return {name: value for name, value in options.items() if name != "out"}
