"""`python -m benchmarks OP [case=NAME[,NAME]] [against=PEER[,PEER]|none] [dtype=NAME] [out=DIR]`: see README.md.

Without arguments it lists operations, cases and peers; with --write it makes the pictures, the tables of README.md and what
dispatch reads of our backends (kernels/framework/measured) anew from the results. Exit codes: 0; 1 where a backend of ours is
wrong, and then nothing is written; 2 for a wrong argument.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OPTIONS = ("case", "against", "dtype", "out", "rounds", "seconds", "gflop", "commit", "tune")
DTYPES = ("bfloat16", "float16", "float32")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code of the command."""
    argv = sys.argv[1:] if argv is None else argv
    # Peers of another framework share the device, so memory is taken as it is needed.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        if not argv or {"-h", "--help"} & set(argv):
            print("\n".join([*([__doc__ or ""] if argv else []), listing()]))
            return 0
        if "--write" in argv:
            return _write([a for a in argv if a != "--write"])
        return _run(argv)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def listing() -> str:
    """Returns the operations with their bench cases and backends, and the peers with why they cannot run here."""
    from benchmarks import peers

    lines = ["operations (cases; backends):"]
    for name, op in _operations().items():
        cases = ", ".join(case.name for case in _bench(op)) or "no bench case"
        lines.append(f"  {name}: {cases}; {', '.join(op.backends)}")
    lines.append("peers:")
    for name, peer in peers.all_peers().items():
        lines.append(f"  {name} ({', '.join(peer.OPERATIONS)}): {peer.available() or 'can run here'}")
    return "\n".join(lines)


def _operations() -> dict[str, Any]:
    import kernels

    return kernels.operations()


def _bench(op: Any) -> list[Any]:
    return [case for case in op.cases if "bench" in case.tags]


def _known(kind: str, name: str, names: Iterable[str]) -> str:
    """Returns the name. Raises ValueError with the nearest one where it is not among those there are."""
    names = list(names)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, 1, 0.3)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"{kind} {name!r} is unknown: {hint}there are {', '.join(names) or 'none'}")


def _options(arguments: list[str]) -> dict[str, str]:
    options = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not (equals and value):
            raise ValueError(f"argument {argument!r} must be written name=value, with one of {', '.join(OPTIONS)}")
        if name in options:
            raise ValueError(f"option {name!r} is given twice; give it once")
        options[_known("option", name, OPTIONS)] = value
    return options


def _number(options: dict[str, str], name: str, default: float | None, kind: type = float) -> Any:
    if name not in options:
        return default
    try:
        value = kind(options[name])
    except ValueError:
        value = 0
    if not 0 < value < math.inf:
        raise ValueError(f"option {name!r} must be a positive number, got {options[name]!r}")
    return value


def _write(arguments: list[str]) -> int:
    from benchmarks import ranking, report

    options = _options(arguments)
    if other := sorted(set(options) - {"out"}):
        raise ValueError(
            f"option {other[0]!r} has no place beside --write, which takes out= alone, a folder of results"
        )
    folder = Path(options.get("out", report.RESULTS))
    if not any(folder.glob("*.json")):
        raise ValueError(f"option 'out': {folder} has no results, and the tables of {report.README} would be emptied")
    report.write(folder)
    print(f"tables of {folder} written to {report.README}")
    for path in ranking.write(folder):
        print(f"backends ranked in {path}")
    return 0


def _settings(options: dict[str, str]) -> Any:
    import jax

    from benchmarks.measure import Settings

    cpu = jax.default_backend() == "cpu"
    dtype = _known("dtype", options.get("dtype", "float32" if cpu else "bfloat16"), DTYPES)
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    return Settings(
        dtype=dtype,
        rounds=_number(options, "rounds", 7, int),
        seconds=_number(options, "seconds", 0.05),
        # A bench case is made for an accelerator; a CPU gets one that it does in a moment.
        gflop=_number(options, "gflop", 2.0 if cpu else None),
        mebibytes=64.0 if cpu else None,
        # The dense contract and its gradient hold several arrays of the largest size at once, in two dtypes.
        oracle_bytes=memory / 24 if memory else 2**26,
        tune=_known("value of tune", options.get("tune", "false"), ("true", "false")) == "true",
    )


def _run(argv: list[str]) -> int:
    from benchmarks import peers, report
    from benchmarks.measure import Red, run

    operations = _operations()
    op = operations[_known("operation", argv[0], operations)]
    options = _options(argv[1:])
    bench = {case.name: case for case in _bench(op)}
    if not bench:
        raise ValueError(f"{op.name} has no case with the tag 'bench': add one to the cases of its contract")
    cases = [bench[_known(f"case of {op.name}", n, bench)] for n in options.get("case", ",".join(bench)).split(",")]
    every = peers.all_peers()
    against = options.get("against", ",".join(every))
    names = [] if against == "none" else against.split(",")
    chosen = {name: every[_known("peer", name, every)] for name in names}
    settings = _settings(options)

    import jax

    device = jax.devices()[0].device_kind
    path = Path(options.get("out", report.RESULTS)) / f"{op.name}_{report.slug(device)}.json"
    try:  # before anything is measured, which is then lost
        report.read(path)
        report.writable(path.parent)
    except (OSError, ValueError) as error:
        raise ValueError(f"option 'out': results cannot be kept in {path}: {error}") from error

    def keep(block: dict[str, Any]) -> None:
        result = report.keep(path, op.name, device, block)
        print(report.lines(block), flush=True)
        kept.append(result)

    kept: list[dict[str, Any]] = []
    try:
        run(
            op,
            cases,
            settings,
            chosen,
            commit=options.get("commit"),
            say=lambda text: print(text, flush=True),
            keep=keep,
        )
    except Red as red:
        print(red, file=sys.stderr)
        return 1
    from benchmarks.picture import draw

    draw(kept[-1], path.with_suffix(".png"))
    print(f"kept in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
