"""What the results say of our backends, in the form that dispatch reads: `kernels/framework/measured/<kind of device>.json`."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.cases import abstract
from benchmarks.measure import short
from kernels.framework import measured
from kernels.framework.contract import Op

# Of a CPU the kind of device says "cpu", which is no machine in particular.
NO_KIND = ("cpu",)


def rankings(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns kind of device -> the data of its file, from all the results in a folder."""
    import kernels

    operations, found = kernels.operations(), {}
    for path in sorted(folder.glob("*.json")):
        result = report.read(path)
        op = operations.get(result["op"]) if result else None
        if result is None or op is None or result["device"] in NO_KIND:
            continue
        if classes := _classes(op, result["cases"]):
            empty = {"format": measured.FORMAT, "device": result["device"], "operations": {}}
            found.setdefault(result["device"], empty)["operations"][op.name] = classes
    return found


def _classes(op: Op, blocks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns class -> what was measured, of the classes in which two backends were timed."""
    of_class: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for block in blocks:
        if name := class_of(op, block):
            of_class[name].append(block)
    found = {name: _joined(op, sorted(of_class[name], key=lambda b: b["case"])) for name in sorted(of_class)}
    return {name: data for name, data in found.items() if len(data["forward"]) > 1}


def class_of(op: Op, block: dict[str, Any]) -> str | None:
    """Returns the class of a measured case; None where it is none of the operation's cases as they are now, or has no class."""
    if op.autotune_key is None or block["scaled"]:
        return None
    for case in op.cases:
        dims = {name: list(size) if isinstance(size, tuple) else size for name, size in case.dims.items()}
        if case.name == block["case"] and dims == block["dims"]:
            return op.autotune_key(op.bind(**abstract(op, case, block["dtype"])))
    return None


def _joined(op: Op, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what was measured of a class: of each backend that all of its cases have, the geometric mean of its medians, and
    the configuration that it was tuned to. One that was tuned otherwise for each case is left out: a class has one."""
    rows = [{r["contestant"]: r for r in b["rows"] if r["status"] == "timed"} for b in blocks]
    timed = [name for name in op.priority if all(name in r for r in rows)]
    names = [name for name in timed if all(r[name].get("tuned") == rows[0][name].get("tuned") for r in rows)]
    result: dict[str, Any] = {"forward": {}, "backward": {}, "configs": {}, "cases": []}
    for name in names:
        for direction in ("forward", "backward"):
            if all(direction in of_case[name] for of_case in rows):
                medians = [of_case[name][direction][b["basis"]][1] for of_case, b in zip(rows, blocks, strict=True)]
                result[direction][name] = short(math.exp(sum(map(math.log, medians)) / len(medians)))
        if tuned := rows[0][name].get("tuned"):
            result["configs"][name] = tuned
    result["cases"] = [{n: b[n] for n in ("case", "date", "commit")} for b in blocks]
    return result


def write(folder: Path = report.RESULTS) -> list[Path]:
    """Writes the file of every kind of device that has results in a folder, and returns them."""
    written = []
    for kind, data in rankings(folder).items():
        path = measured.path_of(kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        report.write_atomically(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        written.append(path)
    measured.of_device.cache_clear()
    return written
