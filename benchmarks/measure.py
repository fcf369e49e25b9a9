"""One run: every case checked, and only then every case timed and its result kept."""

from __future__ import annotations

import datetime
import math
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import peers
from benchmarks.cases import contract_fits, scaled, split, within
from benchmarks.check import Oracle, errors
from benchmarks.contestants import Contestant, dispatched, first_line, ours, out_of_memory, theirs, tune
from benchmarks.race import DIRECTIONS, copies, race, warm_up
from benchmarks.timing import COPIED, cache_bytes, ceilings, has_kernel_times
from kernels.framework.backend import Case
from kernels.framework.contract import Op
from kernels.framework.work import Work

PACKAGES = ("jax", "jaxlib", "triton", "jax-triton", "torch", "tokamax", "flash-linear-attention", "optax")


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
      dtype: of the float arrays.
      rounds: in each of which every contestant runs once.
      seconds: of one sample, about.
      gflop, mebibytes: what a case's forward may do and its arrays may take before it is scaled down; None for any.
      oracle_bytes: the largest array that the contract may make, before numbers are checked on a smaller case.
      contestants: who runs of ours: every backend ("backends"), or what a call without `platform=` takes ("dispatch").
      candidates: beside the latter, so many of the configurations that the tuner would try.
      tune: whether our backends run with the fastest of their candidates for each case, and not as they do for everyone.
    """

    dtype: str
    rounds: int = 7
    seconds: float = 0.05
    gflop: float | None = None
    mebibytes: float | None = None
    oracle_bytes: float = 2**28
    tune: bool = False
    contestants: str = "backends"
    candidates: int = 0


class Red(Exception):
    """A backend of ours is wrong, or takes a call that it cannot run: nothing may be reported."""


@dataclass
class Prepared:
    """A case whose numbers have been checked: `rows` and `cotangents` by contestant, and those that may be timed."""

    case: Case
    scaled: bool
    arguments: dict[str, Any]
    checked: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    able: list[Contestant] = field(default_factory=list)
    cotangents: dict[str, tuple] = field(default_factory=dict)

    def moved(self, move: Callable[[Any], Any]) -> Prepared:
        """Returns the same with `move` of every array, such as `jax.device_get`, and `jax.device_put` of what that returned."""

        def of_array(x: Any) -> Any:
            return move(x) if isinstance(x, (jax.Array, np.ndarray)) else x

        arguments = {name: of_array(x) for name, x in self.arguments.items()}
        return replace(self, arguments=arguments, cotangents=jax.tree.map(of_array, self.cotangents))


def prepare(op: Op, case: Case, settings: Settings, chosen: dict[str, Any]) -> Prepared:
    """Returns the case ready to be timed.

    Raises:
      Red: naming the backends of ours that are wrong, and by how much.
    """
    whole, dtype = case, settings.dtype
    if settings.gflop is not None or settings.mebibytes is not None:
        limits = (math.inf if x is None else x for x in (settings.gflop, settings.mebibytes))
        case = scaled(op, case, within(op, dtype, *limits))
    small = scaled(op, case, contract_fits(op, settings.oracle_bytes))
    arguments = op.case_inputs(case, dtype=dtype)
    tuned = tune(op, arguments) if settings.tune else {}
    rivals = theirs(op, arguments, chosen)
    # Where all peers give the first output alone, ours are asked for no more, and differentiate no more.
    given = {c.of for c in rivals if c.programs is not None}
    asked = peers.first if given == {peers.first} else None

    def our(arguments: dict[str, Any], candidates: int) -> list[Contestant]:
        if settings.contestants == "backends":
            return ours(op, arguments, tuned, asked)
        return dispatched(op, arguments, candidates, asked)

    field_ = [*our(arguments, settings.candidates), *rivals]
    rows = {c.name: {"contestant": c.name, "ours": c.ours, "status": "cannot", "reason": c.reason} for c in field_}
    for c in field_:
        if c.tuned is not None:
            rows[c.name]["tuned"] = c.tuned
    able = [c for c in field_ if c.programs is not None]
    checked: dict[str, Any] = {"dims": _plain(small.dims), "against": "the contract in float32"}
    if small is case:
        oracle = Oracle(op, arguments)
        able = _check(op, able, arguments, oracle, rows)
    else:
        # Ours on a smaller case against the contract, with programs of their own: they are made for their shapes. Peers are
        # compared with ours, on the whole case alone: what tunes itself would do so again for the smaller one.
        few = op.case_inputs(small, dtype=dtype)
        truth = Oracle(op, few)
        both = [*our(few, 0), *theirs(op, few, chosen)]
        same = {c.name: c for c in both if c.programs is not None}
        good = {c.name for c in _check(op, [same[c.name] for c in able if c.ours and c.name in same], few, truth, rows)}
        # Candidates are other tiles of the same kernels: they are compared on the whole case only.
        same |= {c.name: same[able[0].name] for c in able if c.ours and c.name not in same}
        for c in able:
            if c.name not in same:
                rows[c.name]["reason"] = "it cannot express the smaller call that ours is checked on"
        able = [c for c in able if c.name in same and (not c.ours or same[c.name].name in good)]
        # By whole-case `of`: a peer makes one for each call, and what it gives may be off by what it may be off here.
        by_of = {c.of: truth.reference(same[c.name].of).allowed for c in able}
        first = next((c for c in able if c.ours and c.name == "xla"), next((c for c in able if c.ours), None))
        if first is None:
            why = "; ".join(f"{c.name}: {rows[c.name]['reason']}" for c in field_ if c.ours)
            raise Red(f"{op.name}, case {case.name}: no backend of ours runs here, so nothing can be compared ({why})")
        checked["whole_case_against"] = first.name

        def allowed(of: Any) -> dict[str, float]:
            return {name: 2 * value for name, value in by_of[of].items()}  # the backend compared with is off too

        def reference(*, _name: str = first.name, **arrays: Any) -> Any:
            return op(**arrays, platform=None if settings.contestants != "backends" else _name)

        oracle = Oracle(op, arguments, reference, allowed)
        able = _check(op, able, arguments, oracle, rows, "error_of_whole")
    for contestant in able:
        rows[contestant.name]["status"] = "right"
    sent = {c.name: oracle.reference(c.of).cotangents for c in able}
    for contestant in able:
        warm_up(contestant, arguments, sent[contestant.name])
    return Prepared(case, case is not whole, arguments, checked, rows, able, sent)


def _check(
    op: Op, able: list[Contestant], arguments: dict, oracle: Oracle, rows: dict, entry: str = "error"
) -> list[Contestant]:
    """Returns those whose numbers are right; marks the others in `rows`, and writes how far each is off as `entry`."""
    right, red = [], []
    for contestant in able:
        row, reason = rows[contestant.name], ""
        try:
            found, reason = errors(contestant, arguments, oracle)
            row[entry] = {n: short(e) for n, e in found.items()}
            status = "wrong"
        except Exception as error:  # a kernel may fail in any way; one of ours that lacks memory is no wrong number
            reason, status = first_line(error), "failed"
            if contestant.ours and not out_of_memory(error):
                red.append(f"{contestant.name}: {reason}")
        if not reason:
            right.append(contestant)
            row["reason"] = ""
            continue
        row |= {"status": status, "reason": reason}
        if contestant.ours and status == "wrong":
            red.append(f"{contestant.name}: {reason}")
    if red:
        raise Red(f"{op.name} is wrong, so nothing is reported. " + " | ".join(red))
    return right


def measure(op: Op, prepared: Prepared, settings: Settings, ceiling: tuple[float, float]) -> dict[str, Any]:
    """Returns the block of one case, as it stands in the JSON file: see README.md for what the entries mean."""
    matmul, copy = ceiling
    work = _work(op, prepared.arguments)
    bound = {d: max(w.flops / matmul, w.bytes / copy) for d, w in work.items()}
    memory_bound = not work or work["forward"].bytes / copy >= work["forward"].flops / matmul
    floats, data, _ = split(prepared.arguments)
    number = copies((floats, data), cache_bytes(), memory_bound)
    timed = race(
        prepared.able,
        prepared.arguments,
        lambda contestant: prepared.cotangents[contestant.name],
        number=number,
        rounds=settings.rounds,
        seconds=settings.seconds,
    )
    for name, times in timed.items():
        row = prepared.rows[name]
        if "failed" in times:
            row |= {"status": "failed", "reason": times["failed"]}
            continue
        row |= {"status": "timed", **times}
    basis = "kernel_us" if has_kernel_times() else "wall_us"
    _compare(prepared.rows, work, bound, basis)
    return {
        "case": prepared.case.name,
        "dims": _plain(prepared.case.dims),
        "scaled": prepared.scaled,
        "dtype": settings.dtype,
        "checked": prepared.checked,
        "copies": number,
        "rounds": settings.rounds,
        "basis": basis,
        "matmul_TFLOP_s": short(matmul / 1e12),
        "copy_GB_s": short(copy / 1e9),
        "copied": COPIED,
        "work": {
            d: {"flops": w.flops, "bytes": w.bytes, "roofline_us": short(bound[d] * 1e6)} for d, w in work.items()
        },
        "rows": list(prepared.rows.values()),
    }


def _work(op: Op, arguments: dict[str, Any]) -> dict[str, Work]:
    if op.work is None:
        return {}
    forward, backward = op.work(op.bind(**arguments))
    return {"forward": forward, "backward": backward, "both": forward + backward}


def _compare(rows: dict[str, Any], work: dict[str, Work], bound: dict[str, float], basis: str) -> None:
    """Adds to every timed direction what its time means: rates, the share of the roofline, and the best peer."""
    for direction in DIRECTIONS:
        timed = {name: row[direction] for name, row in rows.items() if direction in row}
        medians = {name: times[basis][1] for name, times in timed.items()}
        rivals = {name: t for name, t in medians.items() if not rows[name]["ours"]}
        best = min(rivals, key=rivals.__getitem__) if rivals else None
        for name, times in timed.items():
            seconds = medians[name] * 1e-6
            if direction in work:
                times["TFLOP_s"] = short(work[direction].flops / seconds / 1e12)
                times["GB_s"] = short(work[direction].bytes / seconds / 1e9)
                times["of_roofline"] = short(bound[direction] / seconds)
            if best is not None and rows[name]["ours"]:
                times |= {"best_peer": best, "times_as_fast_as_best_peer": short(medians[best] / medians[name])}
            for key in ("wall_us", "kernel_us"):
                times[key] = times[key] and [short(t) for t in times[key]]


def short(x: float) -> float:
    """Returns x to four significant digits, which is more than a time has."""
    return float(f"{x:.4g}")


def _plain(dims: Any) -> dict[str, Any]:
    return {name: list(size) if isinstance(size, tuple) else size for name, size in dims.items()}


def provenance(commit: str | None) -> dict[str, Any]:
    """Returns when, with what and from which commit: "+" after it where files differ from it."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": today, "commit": commit or _commit(), "versions": versions}


def provenance_on_cpu() -> dict[str, Any]:
    """Returns `provenance` for what only the host's processors measure: the machine too, and its load."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    return {**provenance(None), "machine": machine, "load": round(os.getloadavg()[0], 2)}


def _commit() -> str:
    def git(*arguments: str) -> str:
        here = Path(__file__).resolve().parent
        run = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=False)
        return run.stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "") if head else "unknown"
    except FileNotFoundError:
        return "unknown"


def run(
    op: Op,
    cases: list[Case],
    settings: Settings,
    chosen: dict[str, Any] | None = None,
    *,
    commit: str | None = None,
    say: Callable[[str], None] = print,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Checks every case, then times every case and gives `keep` the block of each as it is done.

    Raises:
      Red: a backend of ours is wrong; nothing was timed and `keep` was not called.
    """
    chosen = peers.all_peers() if chosen is None else chosen
    prepared = []
    for case in cases:
        prepared.append(prepare(op, case, settings, chosen))
        right = ", ".join(c.name for c in prepared[-1].able)
        say(f"{op.name} {case.name} {settings.dtype}: numbers right for {right or 'nobody'}")
        for row in prepared[-1].rows.values():
            if not row["ours"] and row["status"] != "right":
                say(f"  {row['contestant']} {row['status']}: {row['reason']}")
    ceiling = ceilings(settings.dtype)
    kind = jax.devices()[0].device_kind
    say(f"{kind}: matmul {ceiling[0] / 1e12:.3g} TFLOP/s, copy {ceiling[1] / 1e9:.4g} GB/s, both measured now")
    origin = provenance(commit)
    while prepared:  # each case's arrays go when it has been timed
        keep({**measure(op, prepared.pop(0), settings, ceiling), **origin})
