"""`python -m benchmarks.random_shapes OPERATION [shapes=40] [seed=0] [workers=4] [out=FILE]`: shapes that nobody chose.

Draws legal calls of an operation from the seed (`drawn.py`), checks the numbers of each, and times what a call without
`platform=` runs beside every peer that can express the call. It prints, for each direction, the geometric mean of (time of
the best peer / our time) and the worst calls. With candidates=N the first N configurations that the tuner would try of our
first backend take part too, by number: what a heuristic is fitted to.

`workers` processes compile and check their calls side by side, whose inputs then wait in the host's memory. After that each
call is timed while the others wait, and written at once: a command that is interrupted reports what it has. Other options:
against=PEER,... dtype=bfloat16 rounds=5 seconds=0.03 only=TEXT (names that contain it) commit=, and budget=0: seconds after
which no other call is timed, and 0.6 of which no other is prepared; 0 for all of them. Calls are added to
those in the file; a call that is measured again, by its seed and name, takes the place of the earlier one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.drawn import DRAWS, draw
from benchmarks.options import split
from benchmarks.peers import all_peers
from benchmarks.race import DIRECTIONS

OPTIONS = {
    "shapes": 40,
    "seed": 0,
    "workers": 4,
    "out": "",
    "against": "",
    "dtype": "bfloat16",
    "rounds": 5,
    "seconds": 0.03,
    "only": "",
    "candidates": 0,
    "budget": 0,
    "commit": "",
    "part": "",  # how a worker is started: NUMBER/WORKERS:FOLDER
}


def main(argv: list[str] | None = None) -> int:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    argv = sys.argv[1:] if argv is None else argv
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    options, words = split(OPTIONS, argv)
    if len(words) != 1 or words[0] not in DRAWS:
        raise SystemExit(f"{' '.join(words)!r}: name one operation of {', '.join(DRAWS)}, and options as name=value")
    unknown = {name for name in options["against"].split(",") if name not in ("", "none")} - set(all_peers())
    if unknown:
        raise SystemExit(f"against={','.join(sorted(unknown))}: must be of {', '.join(all_peers())}, or none")
    if options["shapes"] < 1 or options["workers"] < 1:
        raise SystemExit("shapes and workers must be at least 1")
    if options["part"]:
        return _work(words[0], options)
    try:
        before = recorded(Path(options["out"]), words[0], options["dtype"]) if options["out"] else []
    except ValueError as error:
        raise SystemExit(str(error)) from None
    return _lead(words[0], options, argv, before)


def recorded(path: Path, operation: str, dtype: str) -> list[dict[str, Any]]:
    """Returns the calls of a file, to which others are to be added; none where there is no file.

    Raises:
      ValueError: The file has calls of another operation or dtype.
    """
    if not path.exists():
        return []
    file = json.loads(path.read_text())
    if (file["operation"], file["dtype"]) != (operation, dtype):
        raise ValueError(
            f"out={path} has calls of {file['operation']} in {file['dtype']}; name another file for {operation} in {dtype}"
        )
    return [{"seed": file["seed"], **call} for call in file["calls"]]


def together(before: list[dict[str, Any]], seed: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the earlier calls that were not measured again, then those of this seed."""
    again = {(seed, row["case"]) for row in rows}
    return [call for call in before if (call["seed"], call["case"]) not in again] + [
        {"seed": seed, **row} for row in rows
    ]


def _lead(operation: str, options: dict[str, Any], argv: list[str], before: list[dict[str, Any]]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.random_shapes", *argv]
        environment = dict(os.environ)
        if operation in ("flash_attention", "grouped_matmul"):
            # No timed program of these has a product of XLA's own, and to try out those of the oracles takes minutes.
            environment.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false")
        # Of what a worker has freed its allocator keeps some, and one call of a peer may take tens of GB: others need room too.
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.7 / options['workers']:.3f}")
        parts = [f"part={i}/{options['workers']}:{folder}" for i in range(options["workers"])]
        running = [subprocess.Popen([*command, part], env=environment) for part in parts]
        try:
            codes = [worker.wait() for worker in running]
        except KeyboardInterrupt:
            print("interrupted: the other calls are left out", flush=True)
            for worker in running:
                worker.kill()
                worker.wait()
            codes = [130]
        # Without the line that a worker was killed at.
        written = "".join(path.read_text().rpartition("\n")[0] + "\n" for path in Path(folder).glob("*.jsonl"))
        rows = [json.loads(line) for line in written.splitlines() if line]
    rows.sort(key=lambda row: row["number"])
    print("\n".join(lines(rows)))
    if options["out"]:
        path, seed = Path(options["out"]), options["seed"]
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = together(before, seed, rows)
        seeds = sorted({row["seed"] for row in rows})
        about = {"operation": operation, "seed": seeds, "shapes": options["shapes"], "dtype": options["dtype"]}
        path.write_text(json.dumps({**about, "summary": summary(rows), "calls": rows}, indent=1) + "\n")
        print(f"written to {path}")
    return max(codes, default=0)


def _work(operation: str, options: dict[str, Any]) -> int:
    import jax

    import kernels
    from benchmarks.contestants import first_line
    from benchmarks.measure import Red, Settings, measure, prepare, provenance
    from benchmarks.timing import ceilings

    share, _, folder = options["part"].partition(":")
    part, workers = map(int, share.split("/"))
    op, every = kernels.operations()[operation], all_peers()
    names = [name for name in options["against"].split(",") if name != "none"] if options["against"] else list(every)
    cpu = jax.default_backend() == "cpu"
    settings = Settings(
        dtype=options["dtype"],
        rounds=options["rounds"],
        seconds=options["seconds"],
        # All pairs of attention in float32; matrices of experts, whose widths must not be halved.
        oracle_bytes=2**27 if operation == "flash_attention" else 2**31,
        gflop=2.0 if cpu else None,  # as `python -m benchmarks` scales cases down on a CPU
        mebibytes=64.0 if cpu else None,
        contestants="dispatch",
        candidates=options["candidates"],
    )
    cases = list(enumerate(draw(operation, options["shapes"], options["seed"])))
    turns, code, start = Turns(folder), 0, time.monotonic()
    origin, best = provenance(options["commit"] or None), Path(folder, "ceilings.json")
    # The first measures them for all. Who comes later asks for no turn: it would wait until others have prepared their calls.
    if not best.exists():
        with turns.alone():
            if not best.exists():
                measured = best.with_suffix(f".{part}")
                measured.write_text(json.dumps(ceilings(settings.dtype)))
                measured.rename(best)
    ceiling = tuple(json.loads(best.read_text()))

    def late(share: float, name: str) -> bool:
        over = options["budget"] and time.monotonic() - start > share * options["budget"]
        if over:
            print(f"out of time before {name}", flush=True)
        return bool(over)

    ready = []
    with turns.beside_others():  # all calls, so that nobody waits for the compiler of another while the device is free
        for number, case in cases[part::workers]:
            if options["only"] not in case.name:
                continue
            if late(0.6, case.name):
                break
            try:
                prepared = prepare(op, case, settings, {name: every[name] for name in names})
            except (Red, jax.errors.JaxRuntimeError) as error:
                print(f"{case.name}: {error if isinstance(error, Red) else first_line(error)}", flush=True)
                code = 1
                continue
            ready.append((number, prepared.moved(jax.device_get)))
            del prepared  # its arrays on the device, before those of the next call
            print(f"{case.name}: checked after {time.monotonic() - start:.0f} s", flush=True)
    with Path(folder, f"{part}.jsonl").open("w") as file:
        for number, prepared in ready:
            if late(1.0, prepared.case.name):
                break
            try:
                with turns.alone():
                    block = measure(op, prepared.moved(jax.device_put), settings, ceiling)
            except Exception as error:  # mostly memory, which the profiler needs too; other calls can still be timed
                print(f"{prepared.case.name}: not timed, {first_line(error)}", flush=True)
                code = 1
                continue
            row = {"number": number, **block, **origin}
            print(_line(row), flush=True)
            print(json.dumps(row), file=file, flush=True)
    return code


class Turns:
    """Turns on one device for several processes: any number that check, or one that measures. Whoever asks to measure comes
    next: nobody begins to check before it."""

    def __init__(self, folder: str | Path):
        self._gate, self._device = Path(folder, "gate"), Path(folder, "device")

    def beside_others(self) -> contextlib.AbstractContextManager[None]:
        return self._turn(fcntl.LOCK_SH)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return self._turn(fcntl.LOCK_EX)

    @contextlib.contextmanager
    def _turn(self, kind: int) -> Iterator[None]:
        with self._device.open("w") as device:
            with self._gate.open("w") as gate:
                fcntl.flock(gate, fcntl.LOCK_EX)
                fcntl.flock(device, kind)
            yield


def ratios(rows: list[dict[str, Any]], direction: str) -> Iterator[tuple[float, str, str]]:
    """Yields (time of the best peer / ours, the call, the peer) of each call that a peer can express."""
    for row in rows:
        for contestant in row["rows"]:
            times = contestant.get(direction, {})
            if contestant["contestant"] == "ejdist" and "best_peer" in times:
                yield times["times_as_fast_as_best_peer"], row["case"], times["best_peer"]


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns for each direction the number of calls with a peer, the geometric mean of the ratios, and the worst."""
    result = {}
    for direction in DIRECTIONS:
        with_peer = sorted(ratios(rows, direction))
        if with_peer:
            mean = math.exp(sum(math.log(ratio) for ratio, _, _ in with_peer) / len(with_peer))
            worst = [{"ratio": ratio, "call": call, "peer": peer} for ratio, call, peer in with_peer[:5]]
            result[direction] = {"calls": len(with_peer), "geometric_mean": float(f"{mean:.4g}"), "worst": worst}
    return result


def lines(rows: list[dict[str, Any]]) -> list[str]:
    text = [f"{len(rows)} calls"]
    for direction, result in summary(rows).items():
        worst = ", ".join(f"{w['ratio']:.2f} {w['call']} ({w['peer']})" for w in result["worst"])
        text.append(
            f"{direction}: {result['calls']} with a peer, geometric mean {result['geometric_mean']:.3f}; worst {worst}"
        )
    return text


def _line(row: dict[str, Any]) -> str:
    """Returns a call in one line: the median microseconds of everybody, each direction."""
    basis, parts = row["basis"], []
    for contestant in row["rows"]:
        times = [f"{contestant[d][basis][1]:.0f}" for d in DIRECTIONS if d in contestant]
        parts.append(f"{contestant['contestant']} {'/'.join(times) or contestant['status']}")
    return f"{row['case']}: " + ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
