"""The commands of the project's documents: read from fenced blocks, checked without running them, and run.

    python tests/documents.py [PAGE ...]    # runs tutorials from top to bottom, each in an empty folder

| block | what it is |
|---|---|
| `bash` | commands. Those of a tutorial run on this machine, in order, in one folder |
| `sh` | commands for another machine, or for once before: checked like the others, and not run |
| `text` | after `bash`: lines that it prints, in order, some left out. A number stands for any; `...` ends a line cut short |
| `python` | run by tests/test_readmes.py; if its first line is `# NAME.py`, a file that later commands use |
| others | such as `py`, code of another environment: only shown |
"""

from __future__ import annotations

import ast
import glob
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import published_loop

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = sorted(p for p in (ROOT / "docs" / "tutorials").glob("*.md") if p.name != "README.md")
SHELLS = ("bash", "sh")
# What is not a command of the project, and is left to the shell.
OTHERS = {
    "cat",
    "cd",
    "cp",
    "echo",
    "git",
    "head",
    "kubectl",
    "ls",
    "mkdir",
    "openssl",
    "pip",
    "pytest",
    "tail",
    "false",
}
BUILT_IN = {"stdlib", "example_chats", "bytes", "dataset", "chatml"}  # what keys that name files also take


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the document that it begins on."""

    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """Returns the name of the file that a block of Python is, if its first line says so."""
        found = re.match(r"# (\w+\.py)\n", self.text) if self.language == "python" else None
        return found and found[1]


def blocks_of(text: str) -> list[Block]:
    """Returns the fenced blocks of a document that have a language."""
    found = re.finditer(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [Block(m[1], m[2], text[: m.start()].count("\n") + 1) for m in found]


@dataclass(frozen=True)
class Command:
    """A command of a shell: its words, what it reads from a here-document, and the file that its output goes to."""

    words: list[str]
    stdin: str | None = None
    to: str | None = None


def commands_of(text: str) -> Iterator[Command]:
    """Yields the commands of a block. Raises ValueError where a quote or a here-document does not end."""
    lines = iter(text.replace("\\\n", " ").splitlines())
    for line in lines:
        while True:
            try:
                words = shlex.split(line, comments=True)
                break
            except ValueError as error:
                if (more := next(lines, None)) is None:
                    raise ValueError(f"{error}: {line}") from None
                line += f"\n{more}"
        stdin = None
        if here := [word for word in words if word.startswith("<<")]:
            ending, body = here[0][2:], []
            while (row := next(lines, None)) != ending:
                if row is None:
                    raise ValueError(f"no line is {ending}, which {line!r} waits for")
                body.append(row)
            stdin = "\n".join(body) + "\n"
            words.remove(here[0])
        for part in _split(words, ("&&", "||", ";", "|")):
            while part and re.fullmatch(r"[A-Z_]+=.*", part[0], re.DOTALL):  # a variable of the environment
                part = part[1:]
            to = part[part.index(">") + 1] if ">" in part else None
            if part:
                yield Command(part[: part.index(">")] if to else part, stdin, to)


def _split(words: Sequence[str], at: Sequence[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word in at:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


# -- checked without running -----------------------------------------------------------------------------------------------


@dataclass
class Page:
    """A document whose commands are checked in the current folder, an empty one. What a command would leave there is put
    there as far as later ones ask for it: a folder, with a config.json if it is of a model.

    Attributes:
      complete: every file that a command names must have come from one before, as in a page that is run.
    """

    complete: bool
    checked: list[str] = field(default_factory=list)
    quoted: set[str] = field(default_factory=set)  # texts in the scripts so far: what they write is among them

    def check(self, text: str) -> None:
        """Raises AssertionError, or what a command raises for what is wrong with its arguments, with the line."""
        for block in blocks_of(text):
            if block.file:
                self._script(block.text)
                Path(block.file).write_text(block.text)
            if block.language not in SHELLS:
                continue
            said = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, text=True).stderr
            assert not said, f"line {block.line}: {said}"
            for command in commands_of(block.text):
                try:
                    self._check(command, self.complete and block.language == "bash")
                except Exception as error:
                    error.add_note(f"line {block.line}: {shlex.join(command.words)}")
                    raise

    def _check(self, command: Command, complete: bool) -> None:
        program, *rest = command.words
        said = ""
        if program == "python" and rest[:1] == ["-m"] and rest[1].startswith("launch."):
            name, words = rest[1].removeprefix("launch."), rest[2:]
            assert name in CHECKS, f"launch.{name} is not a command"
            said = CHECKS[name](words, self, complete) or ""
            program = name
        elif program == "python" and rest[:1] == ["-m"]:
            assert importlib.util.find_spec(rest[1]), f"there is no module {rest[1]}"
        elif program == "python" and rest[:1] in (["-"], ["-c"]):
            self._script(command.stdin if rest[0] == "-" else rest[1])
        elif program == "python":
            self.needs(rest[0])
        else:
            assert program in OTHERS, f"nothing checks a command {program!r}: see tests/documents.py"
            self.folders(*(option for option in rest if program == "mkdir" and not option.startswith("-")))
        if command.to:
            self.folders(os.path.dirname(command.to))
            Path(command.to).write_text(command.stdin or said)
        self.checked.append(program)

    def _script(self, text: str) -> None:
        tree = ast.parse(text)
        self.quoted |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}

    def needs(self, *names: Any) -> None:
        """Raises AssertionError for a file that neither a command before nor the project has."""
        for name in names:
            if not isinstance(name, str) or name in BUILT_IN or name.startswith("bpe:"):
                continue
            path = re.sub(r"^\w+:(?!//)", "", name)  # of a source of a plugin
            written = {path, Path(path).parts[0]} & self.quoted
            assert written or glob.glob(path) or (ROOT / path).exists(), f"nothing before has made {path}"

    def folders(self, *names: str) -> None:
        """Makes folders, but none outside the current one, such as on the disk of a cluster."""
        for name in names:
            if not os.path.isabs(name):
                Path(name).mkdir(parents=True, exist_ok=True)

    def makes(self, folder: str) -> None:
        """Puts a folder there, as of a model."""
        self.folders(folder)
        if Path(folder).is_dir():
            (Path(folder) / "config.json").write_text(json.dumps(published_loop.MODELS["qwen3"]))

    def folders_of_models(self, words: Sequence[str]) -> None:
        """Puts the published folders there that a page leaves to its reader."""
        for word in words:
            if (found := re.match(r"(?:model\.init_from=|model=hf:)(\w.*)", word)) and not Path(found[1]).exists():
                self.makes(found[1])


def _composed(words: Sequence[str], page: Page, complete: bool) -> Any:
    """Returns the recipe of a command line, all its stages checked."""
    from plugged import plugins_of_a_test

    from ejdist.sections import validate
    from ejdist.training.curriculum import stages_of
    from recipes.schema import compose

    if not complete:
        page.folders_of_models(words)
    with plugins_of_a_test():
        recipe = compose(words)
        validate(recipe)
        stages_of(recipe)
    if complete:
        data = recipe.data
        listed = data.source if isinstance(data.source, list) else [data.source]
        page.needs(recipe.model.init_from, recipe.evaluation.data, data.tokenizer, data.chat_template, *listed)
        page.needs(*(part["source"] for part in data.mixture or []))
    return recipe


def _train(words: list[str], page: Page, complete: bool) -> str | None:
    from recipes.arguments import jobs_of, read
    from recipes.schema import text_of, texts_of

    given = read(words, every=True)
    if given.shown:
        return text_of(given)
    if given.multirun:
        runs = [list(job.overrides) for job in jobs_of(given.overrides, texts_of())]
    else:
        runs = [words]
    for run in runs:
        page.folders(_composed(run, page, complete).run.dir)


def _plan(words: list[str], page: Page, complete: bool) -> None:
    from launch.plan import parse

    _composed(parse(words).recipe, page, complete)


def _evaluate(words: list[str], page: Page, complete: bool) -> None:
    from launch.evaluate import parse

    page.folders(*(os.path.dirname(word.removeprefix("to=")) for word in words if word.startswith("to=")))
    _, where, recipe = parse(words)
    if complete:
        page.needs(where)
    _composed(recipe, page, complete)


def _generate(words: list[str], page: Page, complete: bool) -> None:
    from launch.generate import parse

    page.folders(*(os.path.dirname(word.removeprefix("to=")) for word in words if word.startswith("to=")))
    _, where, recipe = parse(words)
    if complete:
        page.needs(where)
    _composed(recipe, page, complete)


def _export(words: list[str], page: Page, complete: bool) -> None:
    from launch.export import _keys

    keys = _keys(words)
    if complete:
        page.needs(keys.get("run.dir", keys.get("from")))
    if "to" in keys:
        page.makes(keys["to"])


def _report(words: list[str], page: Page, complete: bool) -> None:
    from launch.report import _keys

    keys = _keys(words)
    if complete:
        page.needs(*keys["run.dir"].split(","))


def _tokenize(words: list[str], page: Page, complete: bool) -> None:
    from launch.tokenize import _options

    options = _options(words)
    if complete:
        source = options["source"]
        page.needs(*(source if isinstance(source, list) else [source]), options["tokenizer"])
    if options["show"] is None:
        page.folders(options["to"])


def _launcher(name: str) -> Callable[[list[str], Page, bool], None]:
    def check(words: list[str], page: Page, complete: bool) -> None:
        from launch.options import read

        module = importlib.import_module(f"launch.{name}")
        page.folders_of_models(words)
        _, rest = module.parse(words) if hasattr(module, "parse") else read(module.Options, words)
        _composed(rest, page, complete)

    return check


def _rehearse(words: list[str], page: Page, complete: bool) -> None:
    from launch.rehearse import parse

    parse(words)


# How a command's arguments are checked: (words, page, whether all files must be there) -> what it prints, if that is read.
CHECKS: dict[str, Callable[[list[str], Page, bool], str | None]] = {
    "train": _train, "plan": _plan, "evaluate": _evaluate, "export": _export, "report": _report, "tokenize": _tokenize,
    "generate": _generate, "rehearse": _rehearse,
    **{name: _launcher(name) for name in ("local", "slurm", "gke", "tpu_vm", "doctor")},
}  # fmt: skip


# -- run -------------------------------------------------------------------------------------------------------------------


def like(line: str) -> str:
    """Returns a line with every number and digest replaced, so that two which differ in nothing else are equal."""
    return " ".join(re.sub(r"\b[0-9a-f]{12,}\b|\d[\d,.:]*(e[+-]?\d+)?", "#", line).split())


def missing_line(shown: str, printed: str) -> str | None:
    """Returns the first line of a `text` block that a command did not print after the lines before it."""
    lines = iter(map(like, printed.splitlines()))
    for line in filter(str.strip, shown.splitlines()):
        begins = like(line).removesuffix("...")
        if begins and not any(other.startswith(begins) if begins != like(line) else other == begins for other in lines):
            return line
    return None


def run_page(path: Path, folder: Path, show: Callable[[str], Any] = lambda text: None) -> None:
    """Runs a tutorial from top to bottom.

    Args:
      folder: an empty one. It gets the examples, which a reader has beside the page.
      show: takes what is run and what it prints.

    Raises:
      AssertionError: a command fails, or does not print what the page shows.
    """
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # those of the tests
    paths = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(ROOT)}
    own |= {name: os.pathsep.join([first, *filter(None, [own.get(name)])]) for name, first in paths.items()}
    printed = ""
    for block in blocks_of(path.read_text()):
        where = f"{path.relative_to(ROOT)}, line {block.line}"
        if block.file:
            (folder / block.file).write_text(block.text)
        elif block.language == "bash":
            show(f"$ {block.text}")
            command = ["bash", "-euo", "pipefail", "-c", block.text]
            run = subprocess.Popen(
                command, cwd=folder, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            printed = ""
            for line in run.stdout or ():
                printed += line
                show(line)
            assert run.wait() == 0, f"{where}: exit code {run.returncode}\n{block.text}\n{printed}"
        elif block.language == "text":
            line = missing_line(block.text, printed)
            assert line is None, f"{where}: this is not printed: {line}\n\n{printed}"


def main(names: Sequence[str]) -> int:
    """Runs the tutorials that are named, or all, and returns the exit code."""
    unknown = set(names) - {path.stem for path in TUTORIALS}
    if unknown:
        print(f"there is no tutorial {min(unknown)}; there are {', '.join(p.stem for p in TUTORIALS)}", file=sys.stderr)
        return 2
    for path in TUTORIALS:
        if not names or path.stem in names:
            with tempfile.TemporaryDirectory() as folder:
                run_page(path, Path(folder), lambda text: print(text, end="", flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
