"""The pages: what there is to read of each operation and of the framework, from the sources and nothing else.

A page stands where the README is that it holds, so links between READMEs lead from page to page. Into a README of operations go
their functions, contracts and facts. An operation that is added has its page; nothing here names any.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import ejdist
import ejdist.ops
import ejdist.types
import kernels
from docs.text import documented, escaped, first_sentence, markdown, signature, table
from ejdist.operations import FUNCTIONS
from kernels.__main__ import BEGIN, END, readmes
from kernels.__main__ import table as support_table
from kernels.framework.contract import Op
from kernels.framework.dims import VOCABULARY, Dim
from kernels.framework.public import PublicFunction

ROOT = Path(__file__).resolve().parent.parent
FRONT, OPERATIONS, API = "README.md", "operations.md", "api.md"
# The parts of the navigation, and how the paths of their pages begin: the first that fits counts, and the last fits all.
PARTS = {
    "Tutorials": ("docs/tutorials/",),
    "Terms and calls": ("docs/",),
    "Operations": (OPERATIONS, "kernels/ops/"),
    "Framework": (API, "kernels/"),
    "Training": ("launch/", "ejdist/"),
    "Project": ("",),
}
_HIDDEN = {"outputs", "build", "dist", "tests"}


def documents() -> list[str]:
    """Returns the paths of all Markdown files of the project, the top ones first."""
    found = []
    for folder, within, files in ROOT.walk():
        # Not even looked into: runs may have left any number of files there.
        within[:] = [d for d in within if not d.startswith(".") and (folder != ROOT or d not in _HIDDEN)]
        found += [(folder / file).relative_to(ROOT).as_posix() for file in files if file.endswith(".md")]
    return sorted(found, key=lambda p: (p.count("/"), p))


def all_pages() -> dict[str, str]:
    """Returns path -> Markdown of every page."""
    of_operations = {path.relative_to(ROOT).as_posix(): ops for path, ops in readmes().items()}
    rest = {name: (ROOT / name).read_text() for name in documents() if name not in of_operations}
    pages = {name: operation_page((ROOT / name).read_text(), ops) for name, ops in sorted(of_operations.items())}
    for name, function in FUNCTIONS.items():
        if name not in kernels.public_functions():  # what is of `ejdist` alone stands with its code
            home = _readme_of(function, rest)
            head = "" if "## Functions" in rest[home] else "\n\n## Functions"
            rest[home] += f"{head}\n\n{documented(name, function, 3)}\n"
    made = {**pages, **rest, OPERATIONS: operations_page(rest), API: api_page()}
    return made | {FRONT: made[FRONT] + navigation(made)}


def _readme_of(thing: object, among: Iterable[str]) -> str:
    """Returns the README in the folder of the code of a function, or in the nearest folder above."""
    folder = PurePosixPath(Path(inspect.getfile(inspect.unwrap(thing))).resolve().relative_to(ROOT).as_posix()).parent
    names = set(among)
    return next(str(f / "README.md") for f in (folder, *folder.parents) if str(f / "README.md") in names)


def files_linked_to(pages: Mapping[str, str]) -> list[str]:
    """Returns the files of the project, other than pages, that pages link to or show."""
    found = set()
    for name, text in pages.items():
        for target in re.findall(r"\]\(([^)\s#]+)", text):
            path = (ROOT / name).parent / target
            if "://" not in target and path.is_file() and path.resolve().is_relative_to(ROOT):
                found.add(path.resolve().relative_to(ROOT).as_posix())
    return sorted(found - set(pages))


# -- an operation ------------------------------------------------------------------------------------------------------


def operation_page(readme: str, ops: list[Op]) -> str:
    """Returns a README of operations with their functions and contracts between its title and the rest."""
    title, _, body = readme.lstrip().partition("\n")
    before, begin, rest = body.partition(BEGIN)
    _, end, after = rest.partition(END)
    body = f"{before}\n\n{support_table(ops)}\n\n{after}" if begin and end else body
    own = {id(op) for op in ops}
    functions = [f for f in kernels.public_functions().values() if any(id(op) in own for op in f.ops)]
    parts = [title, "## Functions", *map(function_section, functions), "## Meaning", body.strip(), "## Contracts"]
    parts += ["What each operation takes and returns, and how it may lie on a mesh, as its contract declares it."]
    return "\n\n".join([*parts, *map(contract_section, ops)]) + "\n"


def function_section(function: PublicFunction) -> str:
    """Returns signature, documentation and example of a public function."""
    name = function.__name__
    where = f"Also the class `ejdist.{function.Module.__name__}`, for an `Executor`."
    if name in FUNCTIONS:
        call = signature(f"ejdist.{name}", FUNCTIONS[name])
        where += f" `kernels.{name}` is the same on a device's own arrays, without the last three arguments."
    else:
        call = signature(f"kernels.{name}", function)
    return "\n\n".join([f"### {escaped(name)}", call, markdown(function.__doc__), where])


def contract_section(op: Op) -> str:
    """Returns the arguments, outputs and sharding facts of an operation."""
    rows = []
    for p in op.parameters.values():
        default = "" if p.required else f"`{p.default!r}`"
        rows.append(
            (f"`{p.name}`", _kind(p.kind, p.static), _shape(p.dims) if p.kind else "", default, _gradient(op, p))
        )
    arguments = table(("argument", "what", "shape", "default", "gradient"), rows)
    kept = {True: "kept for the backward", False: ""}
    outputs = [
        (f"`{name}`", _shape(dims), kept[name in op.residuals])
        for name, dims in zip(op.outputs, op.output_dims, strict=True)
    ]
    parts = [f"### Operation {escaped(op.name)}", markdown(op.__doc__), arguments]
    parts += [table(("output", "shape", ""), outputs), _dims_in_words(op), "On a mesh:", sharding_in_words(op)]
    return "\n\n".join(p for p in parts if p)


def _kind(kind: str | None, static: bool) -> str:
    if kind is None:
        return "Python value, compiled in" if static else "option, or pytree of arrays"
    return {"any": "array"}.get(kind, f"{kind} array")


def _shape(dims: Iterable[Dim]) -> str:
    return f"`[{', '.join(map(str, dims))}]`"


def _gradient(op: Op, p) -> str:
    if p.kind == "float":
        return "none" if p.name in op.no_gradient else "yes"
    return "of its float leaves" if p.kind is None and not p.static and p.required else ""


def _names(op: Op) -> list[str]:
    dims = [d for p in op.parameters.values() for d in p.dims] + [d for output in op.output_dims for d in output]
    return list(dict.fromkeys(d.name for d in dims if d.name))


def _dims_in_words(op: Op) -> str:
    return "Dims: " + "; ".join(f"`{n}` {VOCABULARY[n]}" for n in _names(op)) + "."


def sharding_in_words(op: Op) -> str:
    """Returns what `Op` says of sharding, as a list of sentences."""

    def several(names: Iterable[str]) -> str:
        return ", ".join(f"`{n}`" for n in sorted(names))

    said = []
    if op.local_dims:
        said.append(f"{several(op.local_dims)} may be split: each device computes its part, with no communication.")
    if op.sum_dims:
        said.append(
            f"{several(op.sum_dims)} may be split: every output is a sum over it, and the parts of the devices are added."
        )
    for dim, function in sorted(op.see_also.items()):
        said.append(f"`{dim}` may be split by `ejdist.{function}`, which communicates.")
    for first, second in op.tied_dims:
        said.append(f"`{first}` and `{second}` are split alike or not at all; `{second}` may also be 1.")
    for argument, dim in op.offset_of.items():
        said.append(f"`{argument}` counts from the first entry of `{dim}` that a device has.")
    if op.weights:
        said.append(f"{several(op.weights)} may be stored split over any dim, as parameters are, and gathered here.")
    whole = set(_names(op)) - op.local_dims - op.sum_dims - set(op.see_also) - {s for _, s in op.tied_dims}
    if whole:
        said.append(f"{several(whole)} must be whole; a call that has it split is refused.")
    return "\n".join(f"- {text}" for text in said)


# -- the rest ----------------------------------------------------------------------------------------------------------


def api_page() -> str:
    """Returns what the framework offers beside operations: every public name that is not one, in the module to take it from."""
    parts = [
        "# Framework",
        "Executors, configurations, the registry, masks, meshes and orders: what is not an operation.",
    ]
    seen: set[tuple[str, int]] = set()
    for module in (ejdist, ejdist.ops, ejdist.types, kernels):
        found = [(name, getattr(module, name)) for name in module.__all__]
        found = [(n, x) for n, x in found if n not in FUNCTIONS and not _is_operation(x) and (n, id(x)) not in seen]
        seen |= {(n, id(x)) for n, x in found}
        if found:
            parts += [f"## {escaped(module.__name__)}", markdown(module.__doc__)]
            parts += [documented(n, x, 3) for n, x in sorted(found) if callable(x)]
    return "\n\n".join(parts) + "\n"


def _is_operation(thing: object) -> bool:
    """Returns whether it is a public function or its module class, which are documented with their operation."""
    modules = {f.Module for f in kernels.public_functions().values()} | set(ejdist.operations.MODULES.values())
    return isinstance(thing, PublicFunction) or thing in modules


def operations_page(rest: Mapping[str, str]) -> str:
    """Returns the page of all functions in one table.

    Args:
      rest: the pages that are not of operations with contracts.
    """
    home = {op.name: path.relative_to(ROOT).as_posix() for path, ops in readmes().items() for op in ops}
    rows = []
    for name, function in sorted(FUNCTIONS.items()):
        plain = kernels.public_functions().get(name)
        page = home[plain.op.name] if plain else _readme_of(function, rest)
        rows.append((f"[`{name}`]({page}#{_anchor(name)})", escaped(first_sentence((plain or function).__doc__))))
    package = sys.modules["ejdist"]
    return "\n\n".join(["# All operations", markdown(package.__doc__), table(("function", "returns"), rows)]) + "\n"


def navigation(pages: Iterable[str]) -> str:
    """Returns the contents of the site, for the end of its front page: every other page once, in the parts of `PARTS`."""
    parts: dict[str, list[str]] = {part: [] for part in PARTS}
    for name in pages:
        if name != FRONT:
            parts[next(part for part, begins in PARTS.items() if name.startswith(begins))].append(name)
    # A page of all before the pages of each.
    first = (OPERATIONS, API, "docs/tutorials/README.md", "launch/README.md")
    trees = []
    for part, names in parts.items():
        names.sort(key=lambda name: (name not in first, name))
        trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {part}", "", *names, "```"]))
    return "\n\n" + "\n\n".join(trees) + "\n"


def _anchor(name: str) -> str:
    """Returns the anchor of a function's heading, as MyST makes it."""
    return name.lower()
