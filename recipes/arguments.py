"""The parts of a command line other than KEY=VALUE: flags, as in Hydra, and several values of a key."""

from __future__ import annotations

import argparse
import difflib
import functools
import hashlib
import itertools
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from recipes.words import of_flag


class RecipeError(ValueError):
    """A recipe cannot be composed; the message names the key and the nearest valid one."""


class NoFolder(RecipeError):
    """model=hf, and the folder of model.init_from, `folder`, is not on this machine."""

    def __init__(self, message: str, folder: str) -> None:
        super().__init__(message)
        self.folder = folder


@dataclass(frozen=True)
class Arguments:
    """A command line, read.

    Attributes:
      overrides: GROUP=VARIANT and KEY=VALUE, as they are written.
      config_dir: a folder with variants of the user's own, absolute.
      shown: the composed recipe is to be printed, with `package` of it, or all, and with interpolations resolved or not.
      multirun: every combination of the values given is a run.
    """

    overrides: tuple[str, ...]
    config_dir: Path | None = None
    shown: bool = False
    package: str | None = None
    resolve: bool = False
    multirun: bool = False

    def words(self) -> list[str]:
        """Returns the recipe as another command takes it, wherever it is started."""
        return [*self.overrides, *([] if self.config_dir is None else [f"--config-dir={self.config_dir}"])]


def key_of(word: str) -> str:
    """Returns the key of GROUP=VARIANT or KEY=VALUE, without the marks with which Hydra adds or removes one."""
    return word.partition("=")[0].lstrip("+~")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{message}; --help lists the keys")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", metavar="DIR")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--package", "-p")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    return parser


_FLAGS = ("--config-dir", "--cfg", "--package", "--resolve", "--multirun")


def read(arguments: Sequence[str], *, every: bool = False) -> Arguments:
    """Returns a command line, read.

    Args:
      every: every flag may be given; else only `--config-dir`, as to all commands but `launch.train`.

    Raises:
      RecipeError: a flag is unknown, has no place here, or names something that is not an existing folder.
    """
    flags, rest = _parser().parse_known_args(list(arguments))
    for i, word in enumerate(rest):
        if word.startswith("-"):
            _, equals, value = word.partition("=")
            after = (
                value
                if equals
                else next((w for w in rest[i + 1 : i + 2] if "=" not in w and not w.startswith("-")), None)
            )
            if meant := of_flag(word, after):
                raise RecipeError(f"unknown flag {word!r}: {meant}")
            near = difflib.get_close_matches(word.partition("=")[0], [*_FLAGS, "--help"], n=1, cutoff=0.5)
            raise RecipeError(f"unknown flag {word!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    more = {"--cfg": flags.cfg, "--package": flags.package, "--resolve": flags.resolve, "--multirun": flags.multirun}
    used = [name for name, value in more.items() if value]
    if used and not every:
        raise RecipeError(f"{used[0]} is not valid here: it is a flag of python -m launch.train")
    if (flags.package or flags.resolve) and not flags.cfg:
        raise RecipeError(f"{used[0]} selects what --cfg job prints, but --cfg job is missing")
    if flags.cfg and flags.multirun:
        raise RecipeError("--cfg job prints one recipe, but --multirun makes several: give one of them")
    folder = None if flags.config_dir is None else _folder(flags.config_dir)
    return Arguments(tuple(expanded(rest)), folder, bool(flags.cfg), flags.package, flags.resolve, flags.multirun)


def expanded(words: Sequence[str]) -> list[str]:
    """Returns a command line with model=hf model.init_from=DIR in the place of model=hf:DIR.

    Raises:
      RecipeError: there is no DIR, or two of them.
    """
    expansion: list[str] = []
    for word in words:
        name, _, value = word.partition("=")
        if name == "model" and value.startswith("hf:"):
            if not value.removeprefix("hf:"):
                raise RecipeError(f"{word} names no folder: write model=hf:DIR, with the config.json in DIR")
            if other := next((w for w in words if w is not word and key_of(w) == "model.init_from"), None):
                raise RecipeError(f"{word} and {other} both name the weights; give one of them")
            expansion += ["model=hf", assigned("model.init_from", value.removeprefix("hf:"))]
        else:
            expansion.append(word)
    return expansion


def _folder(name: str) -> Path:
    try:
        folder = Path(name).expanduser().absolute()
    except RuntimeError as error:
        raise RecipeError(f"--config-dir {name}: there is no such user here; give the whole path") from error
    if not name or not folder.is_dir():
        raise RecipeError(
            f"--config-dir {name}: {'is a file' if folder.is_file() else 'there is no such folder'}; name one with files such "
            "as recipe/mine.yaml or model/mine.yaml"
        )
    return folder


@dataclass(frozen=True)
class Job:
    """A run of a sweep: its name, which is that of its folder too, and its command line without one."""

    name: str
    overrides: tuple[str, ...]


def jobs_of(overrides: Sequence[str], texts: Collection[str] = ()) -> list[Job]:
    """Returns every combination of the values of a sweep, the last key changing first. Values are written as Hydra reads them:
    `key=1,2,3`, `key=range(1,4)`, `key=choice(a,b)`.

    Args:
      texts: the keys that take a text, of which 2024_11 is those letters, as in `check_values`.

    Raises:
      RecipeError: a value cannot be read, no key has several, or a folder is what is swept over.
    """
    from hydra.errors import HydraException

    columns: list[list[tuple[str, bool]]] = []
    swept: dict[str, str] = {}
    for override in map(_readable, overrides):
        parsed = _parsed(override)
        if parsed is None:
            raise RecipeError(unreadable(override))
        if before := swept.get(key_of(override)):
            raise RecipeError(
                f"{before} has several values, and {override}, which comes after it, would be that of every run: give "
                f"{key_of(override)} once"
            )
        if not parsed.is_sweep_override():
            columns.append([(override, False)])
            continue
        key = parsed.get_key_element()
        if key == "run.dir":
            raise RecipeError(f"{override}: run.dir is one folder, in which each run of a sweep gets its own")
        try:
            values = list(parsed.sweep_string_iterator())
        except HydraException as error:  # of an interval, which has no first value, and of glob
            raise RecipeError(f"{override}: give the values of a sweep as {key}=A,B or {key}=range(1,4)") from error
        swept[key_of(override)] = override
        if key_of(override) in texts and not re.search(r"[][(){}'\"\\]", override):
            # With nothing in brackets or quotes each word between commas is a value.
            values = [word.strip() for word in override.partition("=")[2].split(",")]
        columns.append([(f"{key}={value}", True) for value in dict.fromkeys(values)])
    if not swept:
        raise RecipeError("--multirun: no key has several values, for example optimizer.learning_rate=1e-3,3e-3")
    combined = itertools.product(*columns)
    return [Job(_name([word for word, named in row if named]), tuple(word for word, _ in row)) for row in combined]


_LONGEST = 120  # letters of the name of a folder


def _name(words: Sequence[str]) -> str:
    """Returns a name for a folder; two that are not the same words differ."""
    whole = ",".join(words)
    plain = re.sub(r"[^\w.,=+@-]+", "_", whole)[:_LONGEST]
    return plain if plain == whole else f"{plain}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


@functools.lru_cache(maxsize=512)  # each is asked for several times in one composition, and Hydra's parser is slow
def _parsed(override: str) -> Any:
    """Returns Hydra's reading of an override, None if it has none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(override)
    except HydraException:
        return None


def value_of(override: str) -> Any:
    """Returns the value of an override as Hydra reads it, None if it cannot."""
    parsed = _parsed(_readable(override))
    return None if parsed is None else parsed.value()


def _readable(override: str) -> str:
    """Returns an override as Hydra's grammar reads it: without line ends, as a list of stages may stand on several lines, and
    with a token such as <|im_end|> in quotes. The grammar has no place for either."""
    if _parsed(override) is not None:
        return override
    name, _, value = override.partition("=")
    return f"{name}={quoted(value)}" if re.fullmatch(r"<[^\s<>]+>", value) else " ".join(override.splitlines())


def unreadable(override: str) -> str:
    """Returns the sentence about a value that Hydra's grammar cannot read as one."""
    name, _, value = override.partition("=")
    whole = f'{name}="{value}"' if not re.search(r"[\\\"]", value) else f"{name}={quoted(value)}"
    return (
        f"cannot read the value of {override!r}: a list is written {name}=[a,b], and anything with special characters "
        f"in quotes inside those of the shell: {in_shell([whole])}; for a run with each of several values give --multirun (-m)"
    )


def check_values(overrides: Sequence[str], texts: Collection[str] = (), switches: Collection[str] = ()) -> list[str]:
    """Returns the overrides, each so written that it is read as what its key takes: of a key that takes a text, 2024_11 and
    1e3 are those letters, and neither 202411 nor 1000.0.

    Args:
      texts, switches: the keys that take a text, and those that are true or false.

    Raises:
      RecipeError: Hydra's grammar cannot read a value, or reads it as several to sweep over; or a switch is given a number.
    """
    checked = []
    for override in map(_readable, overrides):
        parsed = _parsed(override)
        if parsed is None or parsed.is_sweep_override():
            raise RecipeError(unreadable(override))
        key, value = key_of(override), parsed.value()
        if key in switches and type(value) is int and value not in (0, 1):
            raise RecipeError(f"{override}: {key} must be true or false")
        if key in texts and isinstance(value, int | float):
            name, _, written = override.partition("=")
            override = f"{name}={quoted(written.strip())}"
        checked.append(override)
    return checked


def assigned(key: str, text: str) -> str:
    """Returns KEY=VALUE for a text, in quotes where Hydra's grammar would read it otherwise."""
    plain = f"{key}={text}"
    parsed = _parsed(plain)
    return plain if parsed is not None and parsed.value() == text else f"{key}={quoted(text)}"


def quoted(text: str) -> str:
    """Returns a text as a value that Hydra's grammar reads as it is."""
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"(\\+)$", r"\1\1", text)) + "'"


def in_shell(words: Sequence[str]) -> str:
    """Returns a command line as a shell takes it. A word with single quotes, such as a value for Hydra's grammar, is in double
    ones: `shlex.quote` would write five quotes for each of its own."""
    return " ".join(f'"{w}"' if "'" in w and not re.search(r'["$`\\!\n]', w) else shlex.quote(w) for w in words)
