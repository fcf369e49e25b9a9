"""What keys and groups mean, for `--help KEY`: the text of a key is the comment on its field, of a variant that at its head,
and of a command's own option its entry in the text of --help."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import itertools
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ejdist.weights.match import written
from recipes.arguments import RecipeError, key_of, read
from recipes.plugins import load_plugins
from recipes.schema import GROUPS, compose, keys_of, recipe_type, variants_of
from recipes.words import MEANT, last_part, meaning

_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Any: "a text or a list"}


def sentence_of(kind: type, name: str) -> str:
    """Returns what the comment on a field of a dataclass says: above the field, then after it. Empty without one."""
    for owner in kind.__mro__:
        if name in inspect.get_annotations(owner):
            return _comments(owner).get(name, "")
    raise KeyError(name)


@functools.cache
def _comments(owner: type) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(owner))
    comments: dict[int, tuple[str, bool]] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            comments[token.start[0]] = token.string.lstrip("# ").rstrip(), alone
    by_field = {}
    for field in ast.parse(source).body[0].body:  # pyrefly: ignore[missing-attribute]
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        above, line = [], field.lineno - 1
        while line in comments and comments[line][1]:
            above.insert(0, comments[line][0])
            line -= 1
        lines = range(field.lineno, (field.end_lineno or field.lineno) + 1)
        after = [comments[line][0] for line in lines if line in comments]
        by_field[field.target.id] = " ".join(filter(None, (_sentence(" ".join(above)), _sentence(" ".join(after)))))
    return by_field


def _sentence(text: str) -> str:
    return "" if not text else text[0].upper() + text[1:] + "." * (text[-1] not in ".?!")


def _field(key: str) -> tuple[type, dataclasses.Field[Any], Any]:
    """Returns (the section that declares a key, its field, the type that it declares)."""
    section: Any = recipe_type()()
    *inside, name = key.split(".")
    for part in inside:
        section = getattr(section, part)
    declared = {f.name: f for f in dataclasses.fields(section)}[name]
    return type(section), declared, typing.get_type_hints(type(section))[name]


def option(usage: str, name: str) -> str | None:
    """Returns the entry of a command's own option in its text of --help, None if it has none: a line that begins with NAME=,
    and those below it that begin further to the right."""
    lines = usage.splitlines()
    for i, line in enumerate(lines):
        head = re.match(r"( *)((?:[\w.-]+=\S* *,? *)*[\w.-]+=\S*?)(:? |$|(?<=:))", line)
        options = head[2].replace(",", " ").split() if head else []
        if head and name in [one.partition("=")[0].removesuffix(".NAME") for one in options]:
            further = re.compile(rf" {{{len(head[1]) + 4},}}\S")
            return textwrap.dedent("\n".join([line, *itertools.takewhile(further.match, lines[i + 1 :])]))
    return None


def text(usage: str, words: Sequence[str], arguments: Sequence[str], *, recipe: bool) -> str:
    """Returns what `--help KEY ...` prints.

    Args:
      usage: the command's text of --help, where its own options stand.
      words: the keys asked about.
      arguments: the rest of the command line; the text includes the values that it gives.
      recipe: the command takes keys of a recipe.

    Raises:
      RecipeError: there is no such option, key or group; names the nearest.
    """
    if recipe:
        load_plugins(read(arguments, every=True))
    parts = []
    for word in words:
        name = key_of(word)
        description = option(usage, name)
        theirs = next((one for one in MEANT.get(last_part(name), ()) if option(usage, one) is not None), None)
        if description is None and theirs is not None and name not in (*keys_of(), *GROUPS):
            description = f"{name}: {theirs} here\n\n{option(usage, theirs)}"
        if description is None and not recipe:
            raise RecipeError(f"unknown key {name!r}; --help lists the keys")
        parts.append(describe(word, arguments) if description is None else description)
    return "\n\n".join(parts)


def describe(key: str, arguments: Sequence[str] = ()) -> str:
    """Returns the text about a key or a group: what it takes, its default, a sentence.

    Args:
      arguments: of the command line; the text includes the value that they give the key.

    Raises:
      RecipeError: there is no such key or group; names the nearest.
    """
    name = key_of(key)
    if name not in keys_of() and name not in GROUPS and any(one.startswith(f"{name}.") for one in keys_of()):
        return _keys_in(name)
    if name in GROUPS:
        return _group(name)
    if name not in keys_of():
        meant = meaning(name, [*keys_of(), *GROUPS])
        ours = re.search(r"did you mean '([^']+)'", meant or "")
        if ours is None:
            tail = [one for one in keys_of() if one.rpartition(".")[2] == last_part(name)]
            if len(tail) != 1:
                raise RecipeError(f"unknown key {name!r}; {meant or '--help lists the keys'}")
            return describe(tail[0], arguments)
        return f"{name}: {ours[1]} here\n\n{describe(ours[1], arguments)}"
    owner, declared, kind = _field(name)
    lines = [f"{name}={_kind(kind)}", *textwrap.wrap(sentence_of(owner, declared.name), 112)]
    default = declared.default if declared.default is not dataclasses.MISSING else declared.default_factory()  # pyrefly: ignore[not-callable]
    lines.append(f"default: {written(default)}" + _given(name, default, arguments))
    return "\n  ".join(lines)


def _given(name: str, default: Any, arguments: Sequence[str]) -> str:
    value: Any = compose(arguments)
    for part in name.split("."):
        value = getattr(value, part)
    if value == default or name == "curriculum":
        return ""
    return f"; {'of this command line' if arguments else 'of a run without further keys'}: {written(value)}"


def _kind(kind: Any) -> str:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        inner = [one for one in typing.get_args(kind) if one is not type(None)]
        return " or ".join([*map(_kind, inner), "null"])
    if typing.get_origin(kind) in (list, tuple):
        return "a list of " + {"a whole number": "whole numbers", "a text": "texts"}.get(
            _kind(typing.get_args(kind)[0]), "stages"
        )
    return _KINDS.get(kind, "keys of a section")


def _keys_in(section: str) -> str:
    inside = [key for key in keys_of() if key.startswith(f"{section}.")]
    lines = []
    for key in inside:
        owner, declared, _ = _field(key)
        lines.append(f"  {key}\n      {_first(sentence_of(owner, declared.name))}")
    return "\n".join([f"keys of {section}:", *lines])


def _first(text: str) -> str:
    return textwrap.shorten(text, 110, placeholder=" ...")


def _group(group: str) -> str:
    lines = [f"  {group}={name}\n      {_first(head_of(group, name))}" for name in variants_of(group)]
    text = "\n".join([f"{group}=NAME, one of:", *lines])
    return text if not any(key.startswith(f"{group}.") for key in keys_of()) else f"{text}\n\n{_keys_in(group)}"


def head_of(group: str, name: str, config_dir: Path | None = None) -> str:
    """Returns the comment at the head of a variant's file."""
    user_file = None if config_dir is None else config_dir / group / f"{name}.yaml"
    file = (
        user_file
        if user_file is not None and user_file.exists()
        else resources.files("recipes") / group / f"{name}.yaml"
    )
    lines = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines += [] if line.startswith("# @package") else [line.lstrip("# ")]
    return " ".join(lines)
