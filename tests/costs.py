"""`python tests/costs.py [--write]`: what an addition costs, counted in the sources now and in those of BASE, as a table.

Each row is one that exists already. Its cost is what a person would write for it: whole files that are its own, and every line
of code elsewhere in the packages that names it. Tests are not counted, nor are comments, docstrings and blank lines.
`--write` puts the table between the marks in CONTRIBUTING.md. Where git does not have BASE, as in a shallow clone, what the
table there says of it is kept.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASE = "057413e"
PAGE = ROOT / "CONTRIBUTING.md"
MARKS = ("<!-- costs: python tests/costs.py --write -->", "<!-- /costs -->")
PACKAGES = ("kernels", "ejdist", "recipes", "launch", "benchmarks")
HEAD = "| to add | counted for | files before | lines before | files now | lines now |\n|---|---|---|---|---|---|"

Sources = Mapping[str, str]  # path -> code


def code_of(text: str) -> str:
    """Returns the lines that hold code: what the parser sees, without docstrings, as it was laid out."""
    tree, lines = ast.parse(text), text.splitlines()
    drop = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            drop |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    kept = [
        line for i, line in enumerate(lines, 1) if i not in drop and line.strip() and not line.strip().startswith("#")
    ]
    return "\n".join(kept)


def sources_now() -> Sources:
    """Returns the code of the packages as it is here."""
    paths = [p for package in PACKAGES for p in sorted((ROOT / package).rglob("*.py"))]
    return {p.relative_to(ROOT).as_posix(): code_of(p.read_text()) for p in paths}


def sources_at(revision: str) -> Sources | None:
    """Returns the code of the packages at a revision; None where git does not have it."""
    run = subprocess.run(["git", "-C", str(ROOT), "archive", revision, *PACKAGES], capture_output=True, check=False)
    if run.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(run.stdout)) as archive:
        files = [m for m in archive.getmembers() if m.isfile() and m.name.endswith(".py")]
        return {m.name: code_of(archive.extractfile(m).read().decode()) for m in files}


@dataclass(frozen=True)
class Cost:
    """Files that are made or changed, and lines that are written."""

    files: int
    lines: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.files + other.files, self.lines + other.lines)


def whole(sources: Sources, pattern: str) -> Cost:
    """Returns the cost of the files whose paths match."""
    found = [text for path, text in sources.items() if re.search(pattern, path)]
    return Cost(len(found), sum(text.count("\n") + 1 for text in found))


def naming(sources: Sources, word: str, where: str = "", but: str = "$.") -> Cost:
    """Returns the cost of the lines that name a word, in files whose paths match `where` and not `but`."""
    found = {
        path: sum(bool(re.search(word, line)) for line in text.splitlines())
        for path, text in sources.items()
        if re.search(where, path) and not re.search(but, path)
    }
    return Cost(sum(map(bool, found.values())), sum(found.values()))


def body(sources: Sources, path: str, *names: str) -> Cost:
    """Returns the cost of functions or classes in a file; of nothing where the file is not there."""
    nodes = [n for n in ast.parse(sources.get(path, "")).body if getattr(n, "name", "") in names]
    first = [min([n.lineno, *(d.lineno for d in n.decorator_list)]) for n in nodes]
    return Cost(int(bool(nodes)), sum(n.end_lineno - start + 1 for n, start in zip(nodes, first)))


def operation(s: Sources) -> Cost:
    # A model that uses it is not part of it, nor is a peer to compare it with.
    folder = r"^kernels/(ops/)?gated_mlp/"
    own = rf"{folder}(?!triton_gpu|pallas_tpu)"  # other backends have a row of their own
    return whole(s, own) + naming(
        s, r"\bgated_mlp", r"^(kernels|ejdist)/", rf"{folder}|^ejdist/models/|^ejdist/(bound|operations)"
    )


def backend(s: Sources) -> Cost:
    return whole(s, r"rms_norm/pallas_tpu\.py$") + naming(s, "pallas_tpu", r"rms_norm/", r"pallas_tpu\.py$")


def sharded(s: Sources) -> Cost:
    # What a function on a mesh needs beside the operation: once a function of its own, now facts of the contract.
    facts = r"^ +(local_dims|sum_dims|tied_dims|elsewhere|offset_of|weights)="
    before = body(s, "ejdist/faces.py", "gated_mlp")
    return before if before.files else naming(s, facts, r"ops/gated_mlp/contract\.py$")


def scheme(s: Sources) -> Cost:
    own = body(s, "ejdist/sequence/schemes.py", "AllGather")
    if own.files:
        return Cost(own.files, own.lines + naming(s, '"all_gather"', r"sequence/schemes\.py$").lines)
    apart = r"gathers|all_gather|_gathered|scheme =="
    return naming(s, apart, r"^ejdist/") + Cost(0, _branches(s["ejdist/sequence/attention.py"]))


def _branches(text: str) -> int:
    """Returns the lines under the conditions on a scheme, beside the conditions."""
    tests = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.If) and "gathers" in ast.unparse(n.test)]
    return sum(n.body[-1].end_lineno - n.lineno for n in tests)


def benchmark(s: Sources) -> Cost:
    # With the operation's cases and work declared there is nothing to write; peers to compare with are a choice.
    return whole(s, r"^benchmarks/rms_norm\.py$") + naming(
        s, r"\brms_norm", r"^benchmarks/", r"benchmarks/(rms_norm|peers|comparisons|small_operations)"
    )


ROWS: tuple[tuple[str, str, Callable[[Sources], Cost]], ...] = (
    ("an operation", "`gated_mlp`, on XLA", operation),
    ("a backend of it", "`rms_norm` on Pallas", backend),
    ("an option", "`interleaved` of `rotary_embedding`", lambda s: naming(s, "interleaved", "", "^benchmarks/")),
    (
        "an option of attention, on a ring too",
        "`alibi_slopes`",
        lambda s: naming(s, "alibi_slopes", r"/flash_attention/|^ejdist/"),  # paged attention has one too
    ),
    ("its form on a mesh", "`gated_mlp`, with a sum over devices", sharded),
    ("a scheme of sequence parallelism", "`all_gather`", scheme),
    ("a benchmark of it", "`rms_norm`", benchmark),
)


def written() -> dict[str, list[str]]:
    """Returns row -> cells of the table that CONTRIBUTING.md has."""
    text = PAGE.read_text()
    table = text[text.find(MARKS[0]) : text.find(MARKS[1])] if MARKS[0] in text else ""
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")]
    return {c[0]: c[1:] for c in cells[1:]}


def table() -> str:
    """Returns the table, in Markdown."""
    now, base, have = sources_now(), sources_at(BASE), written()
    lines = [HEAD]
    for what, example, count in ROWS:
        then = [str(n) for n in (count(base).files, count(base).lines)] if base else have.get(what, ["", "?", "?"])[1:3]
        cost = count(now)
        lines.append(f"| {what} | {example} | {then[0]} | {then[1]} | {cost.files} | {cost.lines} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
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
