"""The rules of the house, held by reading the sources: who may import whom, and which file alone may do a thing."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import budget
import isolation
import memory
import pytest

import kernels

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "ejdist", "recipes", "launch")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
OPERATIONS = sorted(p.parent.name for p in (ROOT / "kernels" / "ops").glob("*/contract.py"))


@functools.cache
def read(path: Path) -> tuple[frozenset[str], list[str], list[str]]:
    """Returns (what a file imports, the public functions and classes that it defines, those without a docstring); each file is
    parsed once."""
    tree = ast.parse(path.read_text())
    return imported(path, tree), public_names(tree), undocumented(path, tree)


def imports(path: Path) -> frozenset[str]:
    return read(path)[0]


def imported(path: Path, tree: ast.Module) -> frozenset[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = relative(path).split("/")[: -node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def code_of(path: Path) -> str:
    """Returns the source without comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body
            if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                node.body = body[1:] or [ast.Pass()]
    return ast.unparse(tree)


ALLOWED = {
    "kernels": {"kernels"},
    "ejdist": {"kernels", "ejdist"},
    "recipes": {"ejdist", "recipes"},
    "launch": set(PACKAGES),
}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_arrows(path):
    package = relative(path).split("/")[0]
    ours = {name for name in imports(path) if name.split(".")[0] in PACKAGES}
    wrong = {name for name in ours if name.split(".")[0] not in ALLOWED[package]}
    assert not wrong, f"{relative(path)} imports {sorted(wrong)}; {package} may import {sorted(ALLOWED[package])}"


def of_operations() -> list[Path]:
    return [p for p in SOURCES if relative(p).startswith("kernels/ops/") and p.parent.name != "ops"]


@pytest.mark.parametrize("path", of_operations(), ids=relative)
def test_an_operation_knows_itself_and_what_it_stands_on(path):
    """And public functions of other operations, each from its own package: `kernels` itself imports every operation."""
    mine = f"kernels.ops.{path.parent.name}"
    public = {f"{function.ops[0].package}.{name}" for name, function in kernels.public_functions().items()}
    for name in imports(path):
        if name.split(".")[0] != "kernels":
            continue
        assert name.startswith((f"{mine}.", *BELOW["ops"])) or name in public, (
            f"{relative(path)} imports {name}; an operation imports itself, its engine, the framework, a toolchain, and public "
            "functions from the package of their operation"
        )


@pytest.mark.parametrize("path", [p for p in SOURCES if not relative(p).startswith("kernels/")], ids=relative)
def test_of_an_operation_others_import_what_its_package_exports(path):
    """Neither from its contract nor from the file of a backend, which may change without notice."""
    for name in imports(path):
        if name.startswith("kernels.ops."):
            operation, *attribute = name.split(".")[2:]
            exported = getattr(kernels.ops, operation).__all__
            assert not attribute or (len(attribute) == 1 and attribute[0] in exported), (
                f"{relative(path)} imports {name}; kernels.ops.{operation} exports {', '.join(exported)}"
            )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_has_one_engine(operation):
    """Beside that of products, which every engine stands on."""
    engines = {
        name.split(".")[2]
        for path in (ROOT / "kernels" / "ops" / operation).glob("*.py")
        for name in imports(path)
        if name.startswith("kernels.engines.")
    }
    assert len(engines - {"matmul"}) <= 1, f"{operation} stands on {sorted(engines)}"


# The rooms of kernels/, from the ground: what each may import beside itself.
ROOMS = ("framework", "toolchains", "engines", "ops")
BELOW = {room: tuple(f"kernels.{lower}." for lower in ROOMS[:i]) for i, room in enumerate(ROOMS)}


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if relative(p).startswith("kernels/") and len(relative(p).split("/")) > 2], ids=relative
)
def test_rooms_stand_on_those_below(path):
    parts = relative(path).split("/")
    room, engine = parts[1], parts[2]
    mine = (f"kernels.{room}.",) if room != "engines" else (f"kernels.engines.{engine}.", "kernels.engines.matmul.")
    ours = {name for name in imports(path) if name.startswith("kernels.")}
    if room == "ops":  # see above
        ours = {name for name in ours if name.split(".")[1] in ROOMS[:-1]}
    wrong = {name for name in ours if not name.startswith((*mine, *BELOW[room]))}
    assert not wrong, f"{relative(path)} imports {sorted(wrong)}; kernels/{room} stands on {BELOW[room]}"


TOOLCHAINS = {"triton", "jax_triton"}


@pytest.mark.parametrize("path", [p for p in SOURCES if relative(p).startswith("kernels/framework/")], ids=relative)
def test_the_framework_knows_no_toolchain_and_no_mask(path):
    packages = {name.split(".")[0] for name in imports(path)}
    pallas = {name for name in imports(path) if name.startswith("jax.experimental.pallas")}
    assert not packages & TOOLCHAINS and not pallas, (
        f"{relative(path)} imports {sorted(packages & TOOLCHAINS | pallas)}"
    )
    assert "MaskInfo" not in code_of(path), f"{relative(path)} knows masks"


def module_of(path: Path) -> str:
    return relative(path)[:-3].removesuffix("/__init__").replace("/", ".")


def graph_of(files: list[Path]) -> dict[str, set[str]]:
    """Returns module -> modules of these files that it imports, wherever in the file and for types alone too.

    A package stands for its `__init__.py`; importing a module does not count as importing the packages above it.
    """
    modules = {module_of(p): p for p in files}
    graph = {}
    for module, path in modules.items():
        found = {next((n for n in (name, name.rpartition(".")[0]) if n in modules), "") for name in imports(path)}
        graph[module] = found - {"", module}
    return graph


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Returns the modules of a circle, or nothing."""
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if found := visit(other, [*way, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := visit(module, []))), [])


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package):
    graph = graph_of([p for p in SOURCES if relative(p).startswith(f"{package}/")])
    assert any(graph.values()), "no module imports another: the test reads nothing"
    circle = circle_in(graph)
    assert not circle, f"a circle of imports (types count): {' -> '.join(circle)}"


def folder_of(path: Path) -> str:
    """Returns the folder of a file. A file directly in one of the four packages stands alone, as a folder of one file."""
    return relative(path if path.parent.parent == ROOT else path.parent)


def folders_of(files: list[Path]) -> dict[str, set[str]]:
    """Returns folder -> other folders that its files import from."""
    folders = {module_of(p): folder_of(p) for p in files}
    graph: dict[str, set[str]] = {folder: set() for folder in folders.values()}
    for module, others in graph_of(files).items():
        graph[folders[module]] |= {folders[other] for other in others} - {folders[module]}
    return graph


def test_folders_import_one_way():
    """What two folders need of each other belongs below both."""
    graph = folders_of(SOURCES)
    for package in PACKAGES:
        assert any(others for folder, others in graph.items() if folder.startswith(f"{package}/")), package
    circle = circle_in(graph)
    assert not circle, f"a circle of folders (types count): {' -> '.join(circle)}"


def test_a_circle_is_found():
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


# What may be done in these files alone, and why.
ONLY = {
    r"\bjax\.shard_map\b|import shard_map": {"ejdist/mapped.py"},
    r"\bPartitionSpec\b|\b(jax|sharding)\.P\b|sharding import .*\bP\b": {
        "ejdist/layout.py",
        "ejdist/mapped.py",
        "ejdist/placement.py",
        "ejdist/execution.py",
        "kernels/framework/dispatch.py",  # the spec of no axis, in the types of results
    },
    r"\bcustom_vjp\b": {
        "ejdist/collective_matmul.py",
        "ejdist/compression.py",
        "ejdist/experts/dispatch.py",
        "ejdist/experts/products.py",  # as of ejdist/precision.py
        "ejdist/layout.py",
        "ejdist/mapped.py",
        "ejdist/narrow_loss.py",  # as of ejdist/precision.py
        "ejdist/precision.py",  # gradients in 8 bits, of operands that are quantised anew
        "ejdist/models/in_turn.py",  # gradients of a layer before those of the one before it
        "kernels/engines/matmul/permutation.py",
        "kernels/engines/scan/pallas_channel.py",  # inside of a kernel: the inverse of a chunk is not differentiated
        "kernels/engines/scan/pallas_steps.py",  # inside of a kernel: products in their dtype both ways, rows that are moved
        "ejdist/sequence/attention.py",
        "ejdist/sequence/selected.py",
        "kernels/framework/execute.py",
    },
    r"[\"'](dp|fsdp|ep|sp|tp)[\"']": {"ejdist/mesh.py"},
    # What JAX does not make public, which any release may move.
    r"\bjax\._src\b": {
        "kernels/__init__.py",  # the part of Pallas that adds to what JAX knows traces by
        "kernels/framework/dispatch.py",  # whether values are checked for NaN, for an error that names the operation
        "kernels/toolchains/simulate/ahead_of_time.py",  # MLIR's Python API, to read the kernels out of an exported program
        "ejdist/cluster/hosts.py",  # the store of JAX's coordinator, which has no public name
        "launch/cluster.py",  # what JAX detects of the cluster around a process, to be asked before it joins
        "ejdist/mesh.py",  # the mesh of `with mesh:`, for which there is no public question
    },
}


@pytest.mark.parametrize("pattern", ONLY)
def test_only_these_files(pattern):
    # Code is looked at without comments, on one line where an import has several: of the files that may have it at all.
    perhaps = [p for p in SOURCES if re.search(pattern, re.sub(r"[()\s]+", " ", p.read_text()))]
    users = {relative(p) for p in perhaps if re.search(pattern, code_of(p))}
    assert users <= ONLY[pattern], f"{sorted(users - ONLY[pattern])} use {pattern}; only {sorted(ONLY[pattern])} may"
    if pattern.startswith(r"\bjax\._src"):
        assert users == ONLY[pattern], f"{sorted(ONLY[pattern] - users)} use it no more: take them off the list"


def is_backend(path: Path) -> bool:
    return path.stem.endswith(("_gpu", "_tpu")) or path.stem == "xla"


# Of a file, at most. CONTRIBUTING.md states them, and the test below compares.
LINES, BACKEND_LINES = 400, 800
PUBLIC_NAMES = 20  # functions and classes
MODULES = 24  # of the project, that it imports
GATHER = {"kernels/__init__.py"}  # its subject is all operations


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_stay_small(path):
    limit = BACKEND_LINES if is_backend(path) else LINES
    lines = len(path.read_text().splitlines())
    assert lines <= limit, f"{relative(path)} has {lines} lines, past {limit}: it is asking for a seam"


def public_names(tree: ast.Module) -> list[str]:
    return [n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_")]


MODULES_OF_OURS = {relative(p)[:-3].removesuffix("/__init__").replace("/", ".") for p in SOURCES} - set(PACKAGES)


def modules_imported(names: set[str]) -> set[str]:
    """Returns the modules of the project among imported names, each of which may be one, or be what one defines."""
    return {module for name in names for module in (name, name.rpartition(".")[0]) if module in MODULES_OF_OURS}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_have_one_subject(path):
    """What a reader must know: the names that a file offers, and the files that it stands on."""
    names, modules = read(path)[1], modules_imported(imports(path))
    assert len(names) <= PUBLIC_NAMES, f"{relative(path)} offers {len(names)} names, past {PUBLIC_NAMES}"
    assert len(modules) <= MODULES or relative(path) in GATHER, (
        f"{relative(path)} imports {len(modules)} modules of the project, past {MODULES}: it has several subjects"
    )


def test_what_a_file_offers_and_imports_is_counted():
    source = "X = 1\ndef _a(): pass\n@f\ndef b():\n    def c(): pass\nclass D:\n    def e(self): pass\n"
    assert public_names(ast.parse(source)) == ["b", "D"]
    names = {"ejdist.mesh.AXES", "ejdist.mesh.SP", "ejdist.layout", "jax.numpy", "ejdist.models", "kernels.rms_norm"}
    assert modules_imported(names) == {"ejdist.mesh", "ejdist.layout", "ejdist.models"}


def limits() -> dict[str, tuple[float, ...]]:
    """Returns sentence of CONTRIBUTING.md, as a pattern -> the numbers in it, from what holds them."""
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    return {
        r"Files stay at (\d+) lines at most, backends at (\d+)": (LINES, BACKEND_LINES),
        r"offers at most (\d+) functions and classes and imports at most (\d+) modules": (PUBLIC_NAMES, MODULES),
        r"Code is (\d+) characters wide at most, a sentence (\d+)": (
            ruff["line-length"],
            ruff["lint"]["pycodestyle"]["max-line-length"],
        ),
        r"A worker of `pytest` holds at most ([\d.]+) GiB": (memory.LIMIT / 2**30,),
        r"each operation has (\d+) seconds of CPU": (budget.SECONDS,),
    }


def test_the_limits_that_are_stated_are_those_that_are_held():
    """And CONTRIBUTING.md states no other limit: a number with a unit is in one of these sentences."""
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    for sentence, numbers in limits().items():
        (stated,) = re.finditer(sentence, text)
        assert tuple(map(float, stated.groups())) == numbers, f"CONTRIBUTING.md says: {stated[0]}; held are {numbers}"
        text = text.replace(stated[0], "")
    units = r"lines|characters|functions|modules|files|names|seconds|minutes|hours|[KMG]i?B|bytes|%"
    others = re.findall(rf"\b\d[\d.]* ?(?:{units})(?!\w)", text)
    assert not others, f"CONTRIBUTING.md says {others}: add the sentence and what holds it to `limits`"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_complete(operation):
    here = ROOT / "kernels" / "ops" / operation
    for needed in ("__init__.py", "contract.py", "xla.py", "README.md"):
        assert (here / needed).exists(), f"kernels/ops/{operation}/{needed} is missing"
    assert list((ROOT / "tests" / "kernels").glob(f"test_{operation}*.py")), (
        f"tests/kernels/test_{operation}.py is missing"
    )
    assert any(op.package == f"kernels.ops.{operation}" for op in kernels.operations().values()), (
        "kernels/__init__.py lacks it"
    )


@pytest.mark.parametrize("path", [p for p in of_operations() if is_backend(p)], ids=relative)
def test_a_backend_file_registers_a_backend(path):
    """And the contract's `order` knows it: else no call would load the file."""
    package = f"kernels.ops.{path.parent.name}"
    ops = [op for op in kernels.operations().values() if op.package == package]
    assert any(path.stem in op.backends for op in ops), f"{relative(path)} registers no backend of {package}"
    assert any(path.stem in op.priority for op in ops)


def undocumented(path: Path, tree: ast.Module) -> list[str]:
    missing = []
    for node in tree.body:
        public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
        tiny = isinstance(node, ast.FunctionDef) and len(node.body) <= 3
        backend = is_backend(path)  # they do what their contract says
        takes_it = bool(getattr(node, "decorator_list", []))  # from the function that it wraps
        if public and not tiny and not backend and not takes_it and ast.get_docstring(node) is None:
            missing.append(f"{relative(path)}:{node.lineno} {node.name}")
    return missing


def test_every_public_function_has_a_docstring():
    missing = [line for path in SOURCES for line in read(path)[2]]
    assert not missing, "\n".join(missing)


IMPORT_PROBE = """
import os, sys, pathlib
home = pathlib.Path(sys.argv[1]); os.environ["HOME"] = str(home); os.chdir(home)
import jax
def settings(): return {k: v for k, v in jax.config.values.items()}
before, environment = settings(), dict(os.environ)
import kernels, ejdist, ejdist.types, ejdist.ops, recipes.schema, launch.train, ejdist.training.loop
import ejdist.training.data, ejdist.models.decoder, ejdist.sequence, kernels.toolchains.simulate.ahead_of_time
from jax._src import config
known_by = config.trace_context()
for op in kernels.operations().values(): op.backends
assert config.trace_context() == known_by, "a backend, once loaded, has programs traced again"
assert settings() == before, "an import changed jax.config"
assert dict(os.environ) == environment, "an import changed the environment"
from jax._src import xla_bridge
assert not xla_bridge._backends, f"an import initialised {list(xla_bridge._backends)}"
left = [p for p in home.rglob("*")]
assert not left, f"an import created {left}"
"""


def test_importing_has_no_side_effects(tmp_path):
    """No file, no jax setting, no environment variable, no device: importing is only importing."""
    run = subprocess.run(
        [sys.executable, "-B", "-c", IMPORT_PROBE, str(tmp_path)],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"} | isolation.watched(),
    )
    assert run.returncode == 0, run.stderr
