"""`python tests/changed.py [BASE]`: everything, slow tests too, for the operations that changed since a git revision.

BASE is the merge base with main, or the commit before where that is this commit itself. Changes that are not committed count.
An operation has changed if its folder, its own tests or an engine that it imports has; all have if the framework has, or a
toolchain, or what tests every operation.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Tests that are parametrised by operation.
GENERIC = ("tests/test_ops.py", "tests/test_transformations.py", "tests/test_code.py", "tests/test_sharded.py")
# What every operation stands on: a path, or the beginning of one.
COMMON = (
    "kernels/framework/",
    "kernels/toolchains/",
    "kernels/__init__.py",
    "ejdist/sharded.py",
    "ejdist/execution.py",
    "ejdist/placement.py",
    "ejdist/layout.py",
    "tests/grid.py",
)
EVERYTHING = ("-m", "(slow or not slow) and not gpu")


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def base_of(given: str | None) -> str:
    """Returns the revision to compare with."""
    if given:
        return git("rev-parse", "--verify", f"{given}^{{commit}}")
    head = git("rev-parse", "HEAD")
    for main in ("main", "origin/main"):
        try:
            found = git("merge-base", main, "HEAD")
        except subprocess.CalledProcessError:
            continue
        if found != head:
            return found
    return git("rev-parse", "HEAD~1")


def changed_files(base: str) -> list[str]:
    """Returns the paths that differ from `base` here, those that git does not know yet included."""
    return sorted({*git("diff", "--name-only", base).split(), *git("ls-files", "-o", "--exclude-standard").split()})


def folders() -> list[str]:
    """Returns the folders of operations."""
    return sorted(p.parent.name for p in (ROOT / "kernels" / "ops").glob("*/contract.py"))


def on_engine(engine: str, operations: Collection[str]) -> set[str]:
    """Returns the operations whose folder imports the engine."""
    return {
        name
        for name in operations
        if any(f"kernels.engines.{engine}" in p.read_text() for p in (ROOT / "kernels" / "ops" / name).glob("*.py"))
    }


def changed_operations(files: Iterable[str], operations: Collection[str]) -> list[str]:
    """Returns the folders of the operations that those files are of; all, where every operation stands on one of them."""
    found = set()
    for file in files:
        if file.startswith((*COMMON, *GENERIC)):
            return sorted(operations)
        parts = file.split("/")
        if parts[:2] == ["kernels", "engines"] and len(parts) > 3 and not file.endswith(".md"):
            found |= on_engine(parts[2], operations)
        if parts[:2] == ["kernels", "ops"] and len(parts) > 3 and parts[2] in operations and not file.endswith(".md"):
            found.add(parts[2])
        if parts[:2] in (["tests", "kernels"], ["tests", "gpu"]):
            mine = [name for name in operations if parts[2].startswith(f"test_{name}")]
            found |= {max(mine, key=len)} if mine else set()
    return sorted(found)


def names_of(operation: str) -> list[str]:
    """Returns the names that a folder's operations and functions have in the ids of tests."""
    import kernels

    functions = [f for f in kernels.public_functions().values() if any(_folder(op) == operation for op in f.ops)]
    ops = [name for name, op in kernels.operations().items() if _folder(op) == operation]
    return sorted({operation, *ops, *(f.__name__ for f in functions)})


def _folder(op) -> str:
    return op.package.rpartition(".")[2]


def commands(changed: Collection[str], operations: Collection[str]) -> list[list[str]]:
    """Returns the arguments of pytest for each run: the operations' own tests, and their rows of the generic ones."""
    generic = [file for file in GENERIC if (ROOT / file).exists()]
    if not changed:
        return []
    own = [
        str(p.relative_to(ROOT)) for name in changed for p in sorted((ROOT / "tests/kernels").glob(f"test_{name}*.py"))
    ]
    if set(changed) == set(operations):
        return [[*EVERYTHING, *own, *generic]]
    words = " or ".join(sorted({word for name in changed for word in names_of(name)}))
    return [[*EVERYTHING, *own], [*EVERYTHING, "-k", words, *generic]]


def main(arguments: list[str]) -> int:
    if any(a.startswith("-") for a in arguments) or len(arguments) > 1:
        print(__doc__)
        return 2
    base, operations = base_of(arguments[0] if arguments else None), folders()
    changed = changed_operations(changed_files(base), operations)
    print(f"changed since {base[:10]}: {', '.join(changed) or 'no operation'}", flush=True)
    codes = []
    for command in commands(changed, operations):
        print("pytest", *command, flush=True)
        codes.append(subprocess.run([sys.executable, "-m", "pytest", *command], cwd=ROOT, check=False).returncode)
    return max(codes, default=0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
