"""Where in the sources a fault is seeded: finds the code that a `Fault` of the new form names, and replaces it.

How anchors and patterns are written is in `faults/__init__.py`. Patterns are compared with syntax trees, so layout, comments
and brackets that change nothing do not count, and a line that moves inside its function is found where it is.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import functools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANY, MANY = "_any_", "_many_"  # what `$` and `$$` are for Python's parser
NOT_SEARCHED = {"tests", "outputs"}

Bound = dict[str, Any]  # the name, or the nodes, that each `$name` of a pattern stands for


class Stale(Exception):
    """A fault that cannot be seeded: its anchor or its pattern names nothing, or several things."""


@functools.lru_cache(maxsize=16)  # a fault's pattern and replacement are asked for several times each
def parse(code: str) -> list[ast.stmt]:
    """Returns the statements of a pattern or of a replacement. They are never changed in place."""
    marked = re.sub(r"\$\$(\w+)", rf"{MANY}\1", textwrap.dedent(code).strip())
    try:
        body = ast.parse(re.sub(r"\$(\w+)", rf"{ANY}\1", marked)).body
    except SyntaxError as error:
        raise Stale(f"{code!r} is not Python: {error.msg}; write whole expressions or statements") from None
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # a `$` in a string is a `$`
            node.value = node.value.replace(MANY, "$$").replace(ANY, "$")
    return body


def expression(body: list[ast.stmt]) -> ast.expr | None:
    """Returns the expression that the statements are, where they are one."""
    return body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None


def _many(node: Any) -> str:
    """Returns the name of a `$$name`, as a statement, an argument (also `**$$name`), a parameter, an import or an element."""
    if isinstance(node, ast.Expr) or (isinstance(node, ast.keyword) and node.arg is None):
        node = node.value
    name = next((x for field in ("id", "arg", "name") if (x := getattr(node, field, None))), None)
    return name if isinstance(name, str) and name.startswith(MANY) else ""


def match(pattern: Any, code: Any, bound: Bound) -> Bound | None:
    """Returns what the pattern's names stand for if it matches, beside what is bound already; else None."""
    if isinstance(pattern, ast.AST):
        if type(pattern) is not type(code):
            return None
        for field in pattern._fields:
            if field in ("ctx", "kind", "type_comment"):
                continue
            if (found := match(getattr(pattern, field, None), getattr(code, field, None), bound)) is None:
                return None
            bound = found
        return bound
    if isinstance(pattern, list):
        return _match_run(pattern, code, bound) if isinstance(code, list) else None
    if isinstance(pattern, str) and pattern.startswith(ANY):
        if not isinstance(code, str):
            return None
        if pattern in bound or code in bound.values():  # a renaming: two names stay two names
            return bound if bound.get(pattern) == code else None
        return bound | {pattern: code}
    return bound if type(pattern) is type(code) and pattern == code else None


def _match_run(pattern: list, code: list, bound: Bound) -> Bound | None:
    if not pattern:
        return None if code else bound
    head, rest = pattern[0], pattern[1:]
    if name := _many(head):
        for n in range(len(code) + 1):
            if (found := _match_run(rest, code[n:], bound | {name: code[:n]})) is not None:
                return found
        return None
    if not code or (found := match(head, code[0], bound)) is None:
        return None
    return _match_run(rest, code[1:], found)


def filled(node: Any, bound: Bound) -> Any:
    """Returns a replacement with what the pattern's names stand for in their place."""
    if isinstance(node, list):
        parts = [bound[name] if (name := _many(part)) else [filled(part, bound)] for part in node]
        return [part for several in parts for part in several]
    if isinstance(node, ast.AST):
        return type(node)(**{field: filled(value, bound) for field, value in ast.iter_fields(node)})
    return bound[node] if isinstance(node, str) and node.startswith((ANY, MANY)) else node


@dataclass(frozen=True)
class Spot:
    """Code that a pattern matches: a node's field, or a run of the statements in it."""

    holder: ast.AST
    field: str
    where: slice | int | None  # None: the field itself; a number: that element of it
    bound: Bound

    def replace(self, body: list[ast.stmt]) -> None:
        """Puts the replacement there."""
        new = filled(body, self.bound)
        if isinstance(self.where, slice):
            statements = getattr(self.holder, self.field)
            statements[self.where] = new
            if not statements and self.field == "body":
                statements.append(ast.Pass())
        elif self.where is None:
            setattr(self.holder, self.field, new[0].value)
        else:
            getattr(self.holder, self.field)[self.where] = new[0].value


def spots(pattern: list[ast.stmt], scope: ast.AST, as_statement: bool) -> Iterator[Spot]:
    """Yields every place in the scope that the pattern matches."""
    wanted = None if as_statement else expression(pattern)
    first = None if wanted is not None or _many(pattern[0]) else type(pattern[0])  # what any match begins with
    for node in ast.walk(scope):
        for field, value in ast.iter_fields(node):
            if wanted is not None:
                several = isinstance(value, list)
                for i, part in enumerate(value if several else [value]):
                    if type(part) is type(wanted) and (bound := match(wanted, part, {})) is not None:
                        yield Spot(node, field, i if several else None, bound)
            elif isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                for i in range(len(value)):
                    if first is not None and type(value[i]) is not first:
                        continue
                    ends = range(i + 1, len(value) + 1) if any(map(_many, pattern)) else (i + len(pattern),)
                    for j in ends:
                        if (bound := match(pattern, value[i:j], {})) is not None:
                            yield Spot(node, field, slice(i, j), bound)
                            break


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST, list[ast.stmt], int]]:
    """Yields (qualified name, holder, its statements, index) of each function, class and assigned name that is not a local."""

    def visit(holder: ast.AST, prefix: str, local: bool) -> Iterator[tuple[str, ast.AST, list[ast.stmt], int]]:
        for body in (getattr(holder, field, []) for field in ("body", "orelse", "finalbody", "handlers")):
            for i, node in enumerate(body if isinstance(body, list) else []):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    yield f"{prefix}{node.name}", holder, body, i
                    yield from visit(node, f"{prefix}{node.name}.", local or not isinstance(node, ast.ClassDef))
                elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and not local:
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    for name in {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}:
                        yield f"{prefix}{name}", holder, body, i
                else:
                    yield from visit(node, prefix, local)

    yield from visit(tree, "", False)


def _identifiers(*nodes: ast.AST) -> set[str]:
    """Returns the names of variables in code: what is read or assigned, parameters, and what is defined and imported."""
    names = set()
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                names.add(part.id)
            elif isinstance(part, BINDS):
                names |= _binds(part)
    return names


BINDS = (ast.alias, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.arg)  # and names


def _binds(node: ast.AST) -> set[str]:
    """Returns the names that a node itself binds: a target, a parameter, a definition, an import."""
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    if isinstance(node, ast.alias):
        return {(node.asname or node.name).partition(".")[0]}
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)):
        return {node.name} if node.name else set()
    return {node.arg} if isinstance(node, ast.arg) else set()


@functools.lru_cache(maxsize=64)
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


@functools.cache
def _known(text: str) -> frozenset[str]:
    """Returns the names that code in a file may use: its own, and Python's."""
    return frozenset(_identifiers(_tree(text)) | set(vars(builtins)))


@functools.cache
def _names_of(text: str) -> dict[str, None]:
    """Returns the qualified names that a file defines, each once."""
    return dict.fromkeys(name for name, *_ in definitions(_tree(text)))


@functools.lru_cache(maxsize=256)
def _scopes(tree: ast.Module, name: str) -> list[ast.AST]:
    """Returns what an anchor's name may stand for in a module: the module itself, where there is no name."""
    if not name:
        return [tree]
    # In a module of its own, so that the definition itself is a statement that a pattern can match.
    return [ast.Module([body[i]], []) for found, _, body, i in definitions(tree) if found == name]


class Project:
    """The sources below a folder, as they are now, and what tests stand on, which an anchor reaches by its whole path alone."""

    def __init__(self, root: Path):
        self.root = root
        # Folder by folder: what is not searched is not even listed, since no test may read what a run has left in `outputs/`.
        tops = sorted(top for top in root.iterdir() if top.name not in NOT_SEARCHED and not top.name.startswith("."))
        paths = [p for top in tops for p in ([top] if top.suffix == ".py" else sorted(top.rglob("*.py")))]
        kept = [p for p in paths if not any(part.startswith(".") for part in p.relative_to(root).parts)]
        self.sources = [path.relative_to(root).as_posix() for path in kept]
        beside = [path.relative_to(root).as_posix() for path in sorted((root / "tests").rglob("*.py"))]
        self.texts = {file: (root / file).read_text() for file in (*self.sources, *beside)}

    @functools.cached_property
    def defined(self) -> dict[str, list[str]]:
        """Qualified name -> the sources that define it."""
        found: dict[str, list[str]] = {}
        for file in self.sources:
            for name in _names_of(self.texts[file]):
                found.setdefault(name, []).append(file)
        return found

    @functools.cached_property
    def modules(self) -> dict[str, list[str]]:
        """Source -> the parts of the path that hints are compared with."""
        return {file: _module(file).split("/") for file in self.sources}

    def files(self, hint: str) -> list[str]:
        """Returns the files whose path ends in the hint; where none does, in what is left of it without its first folders."""
        parts = hint.split("/")
        if parts[0] == "tests":
            return [file for file in self.texts if _module(file) == hint]
        while parts:
            found = [file for file, folders in self.modules.items() if folders[-len(parts) :] == parts]
            if found:
                return found
            parts = parts[1:]
        return []

    def candidates(self, anchor: str) -> tuple[str, list[str]]:
        """Returns (the name in an anchor, the files that it may be in)."""
        hint, colon, name = anchor.rpartition(":")
        files = self.files(hint) if colon else self.defined.get(name, [])
        if colon and not files:
            raise Stale(f"no file's path ends in {hint}")
        if name and colon:
            files = [file for file in files if name in _names_of(self.texts[file])]
        elif not (name or colon):
            raise Stale("it has no anchor")
        if not files:
            near = difflib.get_close_matches(name, self.defined, 3, 0.75)
            elsewhere = [f"{file} has one" for file in self.defined.get(name, ())[:3]] or near
            hinted = f"; {', '.join(elsewhere)}" if elsewhere else ""
            raise Stale(f"nothing is defined as {name}{f' in {hint}' if hint else ''}{hinted}")
        return name, files

    def find(self, anchor: str, pattern: str, replacement: str = "") -> str:
        """Returns the one file in which the anchor's code matches the pattern."""
        name, files = self.candidates(anchor)
        body, as_statement = parse(pattern), expression(parse(replacement)) is None
        found = [
            file
            for file in files
            for scope in _scopes(_tree(self.texts[file]), name)
            for _ in spots(body, scope, as_statement)
        ]
        if not found:
            raise Stale(f"{anchor} ({', '.join(files)}) has no {pattern!r}")
        if len(found) > 1:
            where = ", ".join(f"{found.count(file)} in {file}" for file in dict.fromkeys(found))
            raise Stale(f"{anchor} has {len(found)} places that match {pattern!r}: {where}")
        self._check_names(body, parse(replacement), found[0])
        return found[0]

    def _check_names(self, pattern: list[ast.stmt], replacement: list[ast.stmt], file: str) -> None:
        """Refuses a replacement with names that are not there: it would turn tests red as a NameError, whatever it is for."""
        bound, new = _identifiers(*pattern), _identifiers(*replacement)
        bound_here = set().union(*(_binds(n) for part in replacement for n in ast.walk(part)))
        for name in sorted(new - bound):
            if name.startswith((ANY, MANY)):
                shown = name.replace(MANY, "$$").replace(ANY, "$")
                raise Stale(f"{shown} is in the replacement and not in the pattern")
            if name not in bound_here and name not in _known(self.texts[file]):
                raise Stale(f"{name} in the replacement is no name in {file}")

    def mutated(self, anchor: str, pattern: str, replacement: str) -> tuple[str, str]:
        """Returns (file, its source with the replacement in place of the pattern). Comments are lost, and layout."""
        file = self.find(anchor, pattern, replacement)
        tree, name = ast.parse(self.texts[file]), anchor.rpartition(":")[2]
        new = parse(replacement)
        as_statement = expression(new) is None
        if not name:
            next(spots(parse(pattern), tree, as_statement)).replace(new)
        for found, _, body, i in list(definitions(tree)):
            if name and found == name:
                scope = ast.Module([body[i]], [])
                if spot := next(spots(parse(pattern), scope, as_statement), None):
                    spot.replace(new)
                    body[i : i + 1] = scope.body
                    break
        return file, ast.unparse(ast.fix_missing_locations(tree))


def _module(file: str) -> str:
    """Returns the path that hints are compared with: without the suffix, and of a package that of its folder."""
    return file.removesuffix(".py").removesuffix("/__init__")
