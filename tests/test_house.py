"""The rules of the house, held by reading the sources: who may import whom, and which file alone may do a thing."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "ejdist", "recipes", "launch")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
ROOMS = sorted(p.parent.name for p in (ROOT / "kernels").glob("*/contract.py") if p.parent.name != "_core")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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


@pytest.mark.parametrize("path", [p for p in SOURCES if relative(p).startswith("kernels/")], ids=relative)
def test_rooms_do_not_know_each_other(path):
    parts = relative(path).split("/")
    if len(parts) == 2:  # kernels/__init__.py lists them all
        return
    rooms = {name.split(".")[1] for name in imports(path) if name.startswith("kernels.")}
    allowed = {parts[1], "_core"}
    assert rooms <= allowed, f"{relative(path)} imports {sorted(rooms - allowed)}; a room knows itself and _core"


ONLY = {
    r"\bjax\.shard_map\b|import shard_map": {"ejdist/sharded.py"},
    r"\b(PartitionSpec|PartitionSpec as P)\b": {"ejdist/layout.py", "ejdist/sharded.py"},
    r"\bcustom_vjp\b": {"kernels/_core/execute.py", "ejdist/layout.py", "ejdist/sequence/attention.py"},
    r"[\"'](dp|fsdp|ep)[\"']": {"ejdist/mesh.py", "ejdist/layout.py", "recipes/schema.py"},
}


@pytest.mark.parametrize("pattern", ONLY)
def test_only_these_files(pattern):
    users = {relative(p) for p in SOURCES if re.search(pattern, code_of(p))}
    assert users <= ONLY[pattern], f"{sorted(users - ONLY[pattern])} use {pattern}; only {sorted(ONLY[pattern])} may"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_stay_small(path):
    kernel_file = path.stem.endswith(("_gpu", "_tpu")) or path.stem == "xla"
    limit = 800 if kernel_file else 450
    lines = len(path.read_text().splitlines())
    assert lines <= limit, f"{relative(path)} has {lines} lines, past {limit}: it is asking for a seam"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_complete(room):
    here = ROOT / "kernels" / room
    for needed in ("__init__.py", "contract.py", "xla.py", "README.md"):
        assert (here / needed).exists(), f"kernels/{room}/{needed} is missing"
    assert list((ROOT / "tests" / "kernels").glob(f"test_{room}*.py")), f"tests/kernels/test_{room}.py is missing"


def test_every_public_function_has_a_docstring():
    missing = []
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            tiny = isinstance(node, ast.FunctionDef) and len(node.body) <= 3
            backend = path.stem.endswith(("_gpu", "_tpu")) or path.stem == "xla"  # they do what their contract says
            takes_it = bool(getattr(node, "decorator_list", []))  # from the function that it wraps
            if public and not tiny and not backend and not takes_it and ast.get_docstring(node) is None:
                missing.append(f"{relative(path)}:{node.lineno} {node.name}")
    assert not missing, "\n".join(missing)


IMPORT_PROBE = """
import os, sys, pathlib
home = pathlib.Path(sys.argv[1]); os.environ["HOME"] = str(home); os.chdir(home)
import jax
def settings(): return {k: v for k, v in jax.config.values.items()}
before, environment = settings(), dict(os.environ)
import kernels, ejdist, ejdist.types, ejdist.ops, recipes.schema, launch.train, ejdist.training.loop
import ejdist.training.data, ejdist.models.decoder, ejdist.sequence, kernels._core.ahead_of_time
for op in kernels.operations().values(): op.backends
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
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
