"""The options of a launcher, as opposed to those of the run: a dataclass whose fields are read from the command line."""

from __future__ import annotations

import difflib
import math
import os
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Collection, Sequence
from dataclasses import MISSING, field, fields
from pathlib import Path
from typing import Any

from launch.errors import DONE, WRONG

COMMANDS = ("train", "doctor")
# Of the field of a launcher's environment: env.NAME=VALUE.
VARIABLES = {"words": "an environment variable of every process"}
SECRETS = {"words": "an environment variable of every process, as SECRET/KEY of a secret of Kubernetes"}
# What a run may still say about its cluster where a launcher says how the processes find each other.
_FREE = ("cluster.timeout", "cluster.heartbeat", "cluster.tls")


def option(
    default: Any,
    words: str,
    *,
    least: int = 1,
    most: float = math.inf,
    choices: Sequence[str] = (),
    pattern: str = "",
    free: bool = False,
    program: bool = False,
) -> Any:
    """Returns a field of a dataclass of options, with what it takes.

    Args:
      words: what it is, for `--help`.
      least, most: of a number, the smallest and the largest that it may be.
      choices: of a string, all that it may be.
      pattern: of a string, the regular expression that all of it matches.
      free: a string may have spaces in it.
      program: a string is how a program is started: words with spaces between them, quoted as for a shell.
    """
    facts = {"words": words, "least": least, "most": most, "choices": choices, "pattern": pattern}
    return field(default=default, metadata=facts | {"free": free or program, "program": program})


def command_option() -> Any:
    """Returns the field that says which command the processes are to run."""
    return option("train", "what the processes run: launch.train, or launch.doctor for the same run", choices=COMMANDS)


def flags_option() -> Any:
    """Returns the field that says whether a launcher prints compiler flags."""
    return option(
        True, "the compiler flags documented for these devices (launch/CLUSTERS.md), unless env= or the image has some"
    )


def read[T](kind: type[T], argv: Sequence[str]) -> tuple[T, list[str]]:
    """Returns (the launcher's own options, the other arguments, which are the run's).

    A field that is a dict takes FIELD.NAME=VALUE, any number of times.

    Raises:
      ValueError: an option or flag that cannot be read, or an option without a default that was not given; names it.
    """
    from recipes import arguments as flags

    kinds, known = typing.get_type_hints(kind), {f.name: f for f in fields(kind)}  # pyrefly: ignore[bad-argument-type]
    values: dict[str, Any] = {}
    rest = []
    for argument in argv:
        name, equals, value = argument.partition("=")
        section, dot, inner = name.partition(".")
        if name in known:
            if name in values:
                raise ValueError(f"{name} is given twice; give it once")
            values[name] = _value(name, bool(equals), value, kinds[name], known[name].metadata)
        elif dot and section in known and _is_dict(kinds[section]):
            if not equals or not re.fullmatch(r"[A-Za-z_]\w*", inner) or "\n" in value:
                raise ValueError(f"{name} must be written {section}.NAME=VALUE")
            if inner in values.setdefault(section, {}):
                raise ValueError(f"{name} is given twice; give it once")
            values[section][inner] = value
        else:
            check_spelling(name, list(known))
            rest.append(argument)
    for f in known.values():
        if f.default is MISSING and f.default_factory is MISSING and f.name not in values:
            raise ValueError(f"{f.name}= is missing: {f.metadata['words']}")
    return kind(**values), flags.read(rest).words()


def check_spelling(name: str, known: Sequence[str]) -> None:
    """Raises ValueError for a name that is nearly one of a command's own options, or another trainer's word for one, and is no
    key of a recipe."""
    from recipes.schema import GROUPS, keys_of
    from recipes.words import meaning, of_flag

    keys = [*GROUPS, *keys_of()]
    if name.startswith("-"):
        if meant := of_flag(name, None, known):
            if "KEY=VALUE" in meant:
                raise ValueError(f"unknown flag {name!r}: {meant}")
        return
    meant = meaning(name, known)
    if name not in keys and meant and "did you mean" in meant:
        raise ValueError(f"unknown key {name!r}; {meant}")
    near = difflib.get_close_matches(name, [*known, *keys], n=1, cutoff=0.75)
    if name not in keys and near and near[0] in known:
        raise ValueError(f"unknown key {name!r}; did you mean {near[0]!r}?")


def _is_dict(kind: Any) -> bool:
    return typing.get_origin(kind) is dict


def _value(name: str, has_value: bool, value: str, kind: Any, facts: Any) -> Any:
    if _is_dict(kind):
        raise ValueError(f"{name} must be written {name}.NAME=VALUE")
    if kind is bool:
        if value not in ("true", "false"):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return value == "true"
    if int in (kind, *typing.get_args(kind)):
        if not re.fullmatch("[0-9]{1,18}", value) or not facts["least"] <= int(value) <= facts["most"]:
            until = "on" if math.isinf(facts["most"]) else f"to {facts['most']}"
            raise ValueError(f"{name} must be a number from {facts['least']} {until}, got {value!r}")
        return int(value)
    if not has_value or "\n" in value or (re.search(r"\s", value) and not facts["free"]):
        raise ValueError(f"{name} must be written {name}=VALUE, in one word")
    if not value:
        raise ValueError(f"{name} is empty; write {name}=VALUE, or leave it out")
    if facts["program"]:
        try:
            shlex.split(value)
        except ValueError as error:
            raise ValueError(f"{name} = {value!r} cannot be read as a shell does: {error}") from error
    if facts["choices"] and value not in facts["choices"]:
        raise ValueError(f"{name}={value} is unknown; use one of {', '.join(facts['choices'])}")
    if facts["pattern"] and not re.fullmatch(facts["pattern"], value):
        raise ValueError(f"{name} = {value!r} must be {facts['words']}")
    return value


def check_no_secret(key: str, name: str, instead: str) -> None:
    """Raises ValueError where a variable that is named as secrets are would be in clear; `instead`: how to give it."""
    from recipes.hostile import is_secret

    if is_secret(name):
        raise ValueError(f"{key} is named as secrets are, and everybody would see it there; give {instead}")


def help_of(kind: type) -> str:
    """Returns a line per option: its name, default and meaning."""
    lines = []
    for f in fields(kind):
        words = f.metadata["words"]
        if f.default_factory is not MISSING:
            lines.append(f"  {f.name}.NAME=VALUE: {words}")
        elif f.default in (MISSING, None, ""):
            lines.append(f"  {f.name}=: {words}")
        else:
            default = str(f.default).lower() if isinstance(f.default, bool) else f.default
            lines.append(f"  {f.name}={default}: {words}")
    return "\n".join(lines)


def file_of(key: str, value: str, suffix: str = "") -> Path:
    """Checks and returns the path of a file that a command will write, before the computation.

    Raises:
      ValueError: it is a URL, has another suffix, is a folder, or its folder is not there or cannot be written.
    """
    from ejdist.paths import check_folder

    check_folder(key, value)
    path = Path(value).expanduser()
    folder = path.absolute().parent
    if path.suffix != (suffix or path.suffix) or path.is_dir() or not folder.is_dir():
        raise ValueError(f"{key} = {value!r} must be a file {suffix} in an existing folder".replace("  ", " "))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{key} = {value!r}: {folder} cannot be written; name another folder, or fix its permissions")
    return path


def refuse_cluster(arguments: Sequence[str], how: str) -> None:
    """Raises ValueError where a run says itself how its processes find each other; `how`: who says it, as a sentence."""
    from recipes.arguments import key_of

    for argument in arguments:
        name = key_of(argument)
        if name == "cluster" or (name.startswith("cluster.") and name not in _FREE):
            raise ValueError(f"{argument} cannot be set here: {how}")


def check_run(arguments: Sequence[str], how: str, devices: int | None = None, slices: int = 1) -> Any:
    """Composes the recipe of a run, so that an invalid one is reported before a job is queued for it.

    Args:
      how: who says how the processes find each other, as a sentence.
      devices: how many the job will have, of all its TPU `slices`; None if that is not known here.

    Raises:
      ValueError: a key is wrong, the cluster's keys are given, or a size does not fit the devices.
    """
    from ejdist.mesh import abstract_mesh
    from ejdist.sections import validate
    from ejdist.training.curriculum import stages_of
    from ejdist.training.losses import trained_model
    from ejdist.training.program import check_sizes
    from recipes.arguments import NoFolder
    from recipes.schema import compose

    refuse_cluster(arguments, how)
    try:
        recipe = compose(arguments)
    except NoFolder as error:
        raise ValueError(
            f"model.init_from = {error.folder!r} is not on this machine, where model=hf is checked before the run starts: copy "
            "what the folder has beside its weights (config.json, the tokenizer's files, the chat template) to that path here, "
            "or start the command where the folder is"
        ) from None
    validate(recipe)
    for stage in stages_of(recipe):
        s = stage.sections
        model = trained_model(s)
        if devices is not None:
            check_sizes(s, model, abstract_mesh(s.mesh, devices, slices))
    return recipe


def shared_cache(arguments: Sequence[str], recipe: Any, environment: Collection[str]) -> list[str]:
    """Returns the argument by which all hosts keep compiled programs in one folder, beside run.dir: the first process writes
    it, and the others would compile again at each start. None where the run, or a variable of its `environment`, names one.
    """
    from recipes.arguments import assigned, key_of

    if "JAX_COMPILATION_CACHE_DIR" in environment or any(key_of(a) == "run.compile_cache" for a in arguments):
        return []
    return [assigned("run.compile_cache", os.path.join(os.path.dirname(os.path.normpath(recipe.run.dir)), "compiled"))]


def show_or_submit(text: str, submit: bool, command: Sequence[str]) -> int:
    """Prints a cluster's input, or pipes it to the command that submits it; returns an exit code.

    Raises:
      ValueError: the command is not here.
    """
    if not submit:
        print(text, end="")
        return DONE
    try:
        ran = subprocess.run([*command], input=text, text=True, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise ValueError(
            f"submit=true: there is no {command[0]} here; print with submit=false what it takes, and give it that where it is"
        ) from error
    print(ran.stdout, end="")
    print(ran.stderr, end="", file=sys.stderr)
    return DONE if ran.returncode == 0 else WRONG
