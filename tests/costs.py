"""`python tests/costs.py [--write | --lines ROW]`: what an addition costs, in the sources now and in those of BASE, as a table.

Each row stands for something that exists. Its cost is the code that is there for it alone, in files and in lines. Sources are
read as syntax trees, so comments, docstrings, blank lines and the words of messages cost nothing, and a renamed variable
changes nothing unless its name says what the row is about. Counted are

- whole files that the addition has to itself;
- functions and classes named after it, whole;
- each line on which its name is an identifier: a variable, an attribute, a parameter, an argument, an import;
- each line with a string that is its name, which is how registries, recipes and options are asked for it;
- what is under an `if` that asks for it alone.

A name counts wherever its words stand together in an identifier: `slope` is in `alibi_slope`, `SLOPE_BATCH` and `d_slope`.
A row lists every name that the addition goes by, in the sources now and in those of BASE; tests are not counted.

`--write` puts the table between the marks in CONTRIBUTING.md. Where git does not have BASE, as in a shallow clone, what the
table there says of it is kept. `--lines` shows what a row counts.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = "f966479"
PAGE = ROOT / "CONTRIBUTING.md"
MARKS = ("<!-- costs: python tests/costs.py --write -->", "<!-- /costs -->")
PACKAGES = ("kernels", "ejdist", "recipes", "launch", "benchmarks")
HEAD = "| to add | counted for | files before | lines before | files now | lines now |\n|---|---|---|---|---|---|"


@dataclass(frozen=True)
class Source:
    """A file. It is parsed where a row may count something in it."""

    text: str

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @functools.cached_property
    def lower(self) -> str:
        return self.text.lower()

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the syntax tree."""
        return [*ast.walk(ast.parse(self.text))]

    @functools.cached_property
    def code(self) -> frozenset[int]:
        """The numbers of the lines that hold code."""
        docstrings = {
            i
            for node in self.nodes
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None
            for i in range(node.body[0].lineno, node.body[0].end_lineno + 1)
        }
        code = {i for i, line in enumerate(self.lines, 1) if line.strip() and not line.strip().startswith("#")}
        return frozenset(code - docstrings)

    def may_name(self, names: tuple[str, ...]) -> bool:
        """Whether the words of one of the names are somewhere in the text."""
        return any(all(word in self.lower for word in words_of(name)) for name in names)

    @functools.cached_property
    def identifiers(self) -> list[tuple[str, int]]:
        """What is named, and on which line."""
        return [found for node in self.nodes for found in _identifiers(node)]

    @functools.cached_property
    def blocks(self) -> list[ast.stmt]:
        """Functions, classes and conditions: the statements that may cost as a whole."""
        return [node for node in self.nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.If))]


Sources = Mapping[str, Source]  # by path
Lines = frozenset[tuple[str, int]]  # (path, number of a line of code)
NOTHING: Lines = frozenset()


def sources_now() -> Sources:
    """Returns the packages as they are here."""
    paths = [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]
    return {p.relative_to(ROOT).as_posix(): Source(p.read_text()) for p in paths}


def sources_at(revision: str) -> Sources | None:
    """Returns the packages at a revision; None where git does not have it."""
    run = subprocess.run(["git", "-C", str(ROOT), "archive", revision, *PACKAGES], capture_output=True, check=False)
    if run.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(run.stdout)) as archive:
        files = [m for m in archive.getmembers() if m.isfile() and m.name.endswith(".py")]
        return {m.name: Source(archive.extractfile(m).read().decode()) for m in files}


@functools.cache
def words_of(identifier: str) -> list[str]:
    """Returns the words of an identifier, in lower case: `GatedMLPConfig` is gated, mlp and config."""
    return [w.lower() for w in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z0-9]+", identifier)]


@functools.cache
def _says(identifier: str, names: tuple[str, ...]) -> bool:
    """Whether the words of a name stand together in an identifier, or in a part of one with dots."""
    wanted = [words_of(name) for name in names]
    parts = [words_of(part) for part in identifier.split(".")]
    return any(part[i : i + len(name)] == name for part in parts for name in wanted for i in range(len(part)))


def _identifiers(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields (identifier, line) for what a node itself names, without the nodes below it."""
    if isinstance(node, ast.Name):
        yield node.id, node.lineno
    elif isinstance(node, ast.Attribute):
        yield node.attr, node.end_lineno
    elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
        yield node.arg, node.lineno
    elif isinstance(node, ast.alias):
        yield from ((name, node.lineno) for name in (node.name, node.asname) if name)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module, node.lineno
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
        yield node.value, node.lineno


def _branch(node: ast.If, names: tuple[str, ...]) -> list[ast.stmt]:
    """Returns the statements under a condition that asks for a name alone, whether it holds or not."""
    test, body = node.test, node.body
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, body = test.operand, node.orelse
    elif isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.Eq)):
        value = test.comparators[0]
        body = node.orelse if isinstance(value, ast.Constant) and value.value is None else body
    said = any(_says(word, names) for part in ast.walk(test) for word, _ in _identifiers(part))
    return body if said and not any(isinstance(part, ast.BoolOp) for part in ast.walk(test)) else []


def whole(sources: Sources, pattern: str) -> Lines:
    """Returns the code of the files whose paths match."""
    return frozenset((path, i) for path, source in sources.items() if re.search(pattern, path) for i in source.code)


def naming(sources: Sources, *names: str, where: str = "", but: str = "$.") -> Lines:
    """Returns the code with one of these names, in files whose paths match `where` and not `but`: see the top of this file."""
    found = set()
    for path, source in sources.items():
        if not re.search(where, path) or re.search(but, path) or not source.may_name(names):
            continue
        spans = [(line, line) for word, line in source.identifiers if _says(word, names)]
        for node in source.blocks:
            if isinstance(node, ast.If):
                spans += map(_span, _branch(node, names))
            elif _says(node.name, names):
                spans.append(_span(node))
        found |= {(path, i) for first, last in spans for i in range(first, last + 1) if i in source.code}
    return frozenset(found)


def _span(node: ast.stmt) -> tuple[int, int]:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]), node.end_lineno


def keywords(sources: Sources, *names: str, where: str) -> Lines:
    """Returns the lines of the keyword arguments of these names, with their values."""
    nodes = [(path, node) for path, source in sources.items() if re.search(where, path) for node in source.nodes]
    return frozenset(
        (path, i)
        for path, node in nodes
        if isinstance(node, ast.keyword) and node.arg in names
        for i in range(node.lineno, node.value.end_lineno + 1)
    )


def strings(sources: Sources, word: str, *beside: str, where: str, but: str = "$.") -> Lines:
    """Returns the lines where the word, as a string, is compared or listed together with one of the names `beside`.

    For a word that means other things elsewhere in the code.
    """
    found = set()
    for path, source in sources.items():
        if re.search(where, path) and not re.search(but, path) and word in source.text:
            for node in source.nodes:
                if isinstance(node, (ast.Compare, ast.Tuple, ast.List, ast.Set, ast.Dict)):
                    parts = [*(ast.walk if isinstance(node, ast.Compare) else ast.iter_child_nodes)(node)]
                    if any(_says(name, beside) for part in parts for name, _ in _identifiers(part)):
                        found |= {(path, x.lineno) for x in parts if isinstance(x, ast.Constant) and x.value == word}
    return frozenset(found)


MLP = r"^kernels/ops/gated_mlp/"
ATTENTION = r"^kernels/(_core/|engines/attention/|ops/flash_attention/)|^ejdist/(sequence/|placement|training/flops)"


def operation(s: Sources) -> Lines:
    # A model that uses it is not part of it. Backends other than XLA have rows of their own.
    own = whole(s, rf"{MLP}(?!triton_gpu|pallas_tpu)")
    return own | naming(s, "gated_mlp", where=r"^(kernels|ejdist)/", but=rf"{MLP}|^ejdist/models/")


def backend(name: str) -> Callable[[Sources], Lines]:
    return lambda s: whole(s, rf"{MLP}{name}\.py$") | naming(s, name, where=MLP)


def sharded(s: Sources) -> Lines:
    # What a function on a mesh needs beside the operation are facts of its contract.
    facts = ("local_dims", "sum_dims", "tied_dims", "offset_of", "weights", "ordered")
    return keywords(s, *facts, where=rf"{MLP}contract\.py$")


def benchmark(s: Sources) -> Lines:
    # Its cases and its work, which the contract declares; peers to compare with are a choice.
    declared = naming(s, "work", "bench", where=rf"{MLP}contract\.py$")
    return declared | naming(s, "gated_mlp", where=r"^benchmarks/", but=r"/(peers|comparisons|small_operations)")


def rule(s: Sources) -> Lines:
    return naming(s, "prefix", where=ATTENTION, but=r"/trees\.py$")  # where it is that of a tree of tokens


def slopes(s: Sources) -> Lines:
    found = naming(s, "alibi", "slopes", where=ATTENTION)
    return found | naming(s, "slope", where=ATTENTION, but=r"/xla\.py$")  # where it is that of the soft cap


def scheme(s: Sources) -> Lines:
    # A collective and a dispatch of experts have the same name. Before schemes were asked, the planner had flags of this one.
    own = naming(s, "AllGather", where=r"^ejdist/sequence/schemes\.py$")
    asked = strings(s, "all_gather", "scheme", "ring", where=r"^ejdist/(sequence|planning)/", but=r"/step_time\.py$")
    flags = r"^ejdist/planning/(activations|memory)\.py$"
    return own | asked | (naming(s, "gathers", where=flags) - naming(s, "gathers_tokens", where=flags))


def layer(s: Sources) -> Lines:
    # Checkpoints of published models that have it are additions of their own.
    return naming(s, "latent", where=r"^ejdist/(models|planning)/|^recipes/")


ROWS: tuple[tuple[str, str, Callable[[Sources], Lines]], ...] = (
    ("an operation", "`gated_mlp`, on XLA", operation),
    ("a Triton form of it", "`gated_mlp`", backend("triton_gpu")),
    ("a Pallas form of it", "`gated_mlp`", backend("pallas_tpu")),
    ("its form on a mesh", "`gated_mlp`, with a sum over devices", sharded),
    ("a benchmark of it", "`gated_mlp`", benchmark),
    ("a mask rule", "`prefix`", rule),
    (
        "an option",
        "`interleaved` of `rotary_embedding`",
        lambda s: naming(s, "interleaved", but="^(benchmarks|ejdist)/"),
    ),
    ("an option of attention, on a ring too", "`alibi_slopes`", slopes),
    ("a scheme of sequence parallelism", "`all_gather`", scheme),
    ("a kind of layer", "`latent_attention`", layer),
    ("a key of recipes", "`accumulation`", lambda s: naming(s, "accumulation", where="^(ejdist|recipes|launch)/")),
    ("an axis of the mesh", "`ep`", lambda s: naming(s, "ep", where=r"^(ejdist|recipes|launch)/")),
)


def cells(lines: Lines) -> list[str]:
    """Returns how many files and how many lines these are."""
    return [str(len({path for path, _ in lines})), str(len(lines))]


def written() -> dict[str, list[str]]:
    """Returns row -> cells of the table that CONTRIBUTING.md has."""
    text = PAGE.read_text()
    table = text[text.find(MARKS[0]) : text.find(MARKS[1])] if MARKS[0] in text else ""
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[1:]}


def table() -> str:
    """Returns the table, in Markdown."""
    now, base, have = sources_now(), sources_at(BASE), written()
    lines = [HEAD]
    for what, example, count in ROWS:
        before = cells(count(base)) if base else have.get(what, ["", "?", "?"])[1:3]
        lines.append(f"| {what} | {example} | {' | '.join([*before, *cells(count(now))])} |")
    return "\n".join(lines)


def shown(what: str) -> str:
    """Returns the lines that a row counts now, each with its file and number."""
    now = sources_now()
    count = next((count for row, _, count in ROWS if row == what), None)
    if count is None:
        raise SystemExit(f"there is no row {what!r}; there are {', '.join(repr(row) for row, *_ in ROWS)}")
    return "\n".join(f"{path}:{i}: {now[path].lines[i - 1].strip()}" for path, i in sorted(count(now)))


def main(arguments: list[str]) -> int:
    if len(arguments) == 2 and arguments[0] == "--lines":
        print(shown(arguments[1]))
        return 0
    if arguments not in ([], ["--write"]):
        print(__doc__)
        return 2
    text, found = PAGE.read_text(), table()
    print(found)
    if arguments:
        if not all(mark in text for mark in MARKS):
            print(f"{PAGE.name} lacks the marks {' and '.join(MARKS)}", file=sys.stderr)
            return 1
        before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
        PAGE.write_text(f"{before}{MARKS[0]}\n{found}\n{MARKS[1]}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
