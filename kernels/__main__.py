"""`python -m kernels`: prints what each backend supports. `--write` puts the rows of each operation into its README."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from kernels import operations
from kernels.framework.backend import Backend
from kernels.framework.contract import Op

BEGIN, END = "<!-- support: begin -->", "<!-- support: end -->"
_COLUMNS = ("operation", "backend", "platforms", "dtypes", "backward", "symbolic dims", "refuses")


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def refused(op: Op, backend: Backend) -> list[str]:
    """Lists what a backend rejects: options that its functions do not take, features that it does not declare, and
    whether it also checks each call."""
    rejected = [f"`{n}`" for n in op.options if n not in backend.names()]
    if backend.backward is not None:
        forward_alone = backend.names() - backend.names(backward=True)
        rejected += [f"gradients with `{n}`" for n in op.options if n in forward_alone]
    rejected += [n for n in op.features if n not in backend.features]
    return rejected + (["some calls (it says why)"] if backend.rejects else [])


def rows(op: Op) -> list[str]:
    """Returns the rows of an operation, one per backend, fastest first."""
    lines = []
    for b in op.backends.values():
        backward = "native" if b.backward else "none"
        refuses = ", ".join(refused(op, b)) or "nothing"
        dtypes = _names(d.replace("float", "f") for d in b.dtypes)
        cells = (f"`{op.name}`", b.name, _names(b.platforms), dtypes, backward, _names(b.symbolic), refuses)
        lines.append(f"| {' | '.join(cells)} |")
    for name, reason in op.unavailable().items():
        lines.append(f"| `{op.name}` | {name} | not available here: {reason} |{' |' * (len(_COLUMNS) - 3)}")
    return lines


def table(ops: Iterable[Op]) -> str:
    """Returns the support table of some operations in Markdown, from the backends' registrations."""
    lines = [f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}"]
    return "\n".join([*lines, *(row for op in ops for row in rows(op))])


def readmes() -> dict[Path, list[Op]]:
    """Returns the README of each folder with operations, with these operations."""
    by_readme: dict[Path, list[Op]] = {}
    for op in operations().values():
        folder = Path(str(sys.modules[op.function.__module__].__file__)).parent
        by_readme.setdefault(folder / "README.md", []).append(op)
    return by_readme


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of the command."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    if argv not in ([], ["--write"]):
        print(f"cannot read {' '.join(argv)!r}: usage is python -m kernels [--write]", file=sys.stderr)
        return 2
    if not argv:
        print(table(operations().values()))
        return 0
    for path, ops in readmes().items():
        before, begin, rest = path.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        if not (begin and end):
            print(f"{path} has no place for the table: add {BEGIN} and {END}", file=sys.stderr)
            return 1
        path.write_text(f"{before}{BEGIN}\n{table(ops)}\n{END}{after}")
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as `head` may close the pipe early
    sys.exit(main())
