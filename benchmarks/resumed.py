"""`python -m benchmarks.resumed RUN_DIR device="2 x NVIDIA H200" processes=2 [commit=C] out=FILE`: what it costs to go on.

Reads the goodput ledger of a run that was stopped or killed and started again, and writes what each start took. Train as users
do, end one of its processes with `kill -9` after the first checkpoint, and start the same command again:

    python -m launch.local processes=2 gpus=0,1 recipe=long_context model=8b model.num_layers=4 mesh.sp=2 \\
      data.sequence_length=32768 data.global_batch=1 checkpoint.every=10 run.steps=40 run.dir=RUN_DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import provenance
from benchmarks.options import split
from ejdist.training.goodput import CLASSES, NAME, account, read

OPTIONS = {"device": "", "processes": 1, "checkpoint_gb": 0.0, "commit": "", "out": ""}
_SHOWN = ("model.num_layers", "model.model_dim", "model.vocab_size", "data.sequence_length", "data.global_batch")


def starts_of(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Returns of each start in a ledger: `made`, the last step that was handed over before it; `from`, the step that it goes
    on from; and seconds: `down_s` since the last sign of life, `compile_s`, `state_s` of making or reading the state, and
    `first_step_s` from the begin of the process until its first step was handed over."""
    found: list[dict[str, float]] = []
    begun, made, since = 0.0, 0, 0.0
    for before, row in zip([None, *rows], rows, strict=False):
        at, step = row["at"], row.get("step", 0)
        if row.get("start"):
            found.append({"made": made, "down_s": max(0.0, at - before["at"]) if before else 0.0})
            begun = at
        now = found[-1]
        if before and before.get("phase") == "compile" and "from" not in now:
            now["compile_s"] = at - before["at"]
            since = at
        if "resumed" in row:
            now |= {"from": row["resumed"], "state_s": at - since}
        elif "from" in now and step > now["from"] and "first_step_s" not in now:
            now["first_step_s"] = at - begun
        made = step or made
    return found


def main(argv: list[str]) -> None:
    o, rest = split(OPTIONS, argv)
    if len(rest) != 1 or not (Path(rest[0]) / NAME).is_file():
        raise SystemExit(
            f"{' '.join(rest)!r}: give the folder of a run, which has a {NAME}, and of {', '.join(OPTIONS)} what is to be "
            "written"
        )
    rows, recipe = read(Path(rest[0]) / NAME), json.loads((Path(rest[0]) / "recipe.json").read_text())
    mesh = {
        key: value for key, value in recipe.items() if key.startswith("mesh.") and isinstance(value, int) and value > 1
    }
    found = {
        **provenance(o["commit"]),
        **{key: o[key] for key in ("device", "processes", "checkpoint_gb")},
        "recipe": {key: recipe[key] for key in (*_SHOWN, "checkpoint.every", "run.steps") if key in recipe} | mesh,
        "starts": [{k: round(v, 3) for k, v in start.items()} for start in starts_of(rows)],
        "goodput": {k: round(v, 4) for k, v in account(rows).as_json().items()},
    }
    print(json.dumps(found, indent=1))
    if o["out"]:
        Path(o["out"]).write_text(json.dumps(found, indent=1) + "\n")


def table(found: dict[str, Any]) -> str:
    """Returns the Markdown of a result: a row for each start after the first, and what all of the time went into."""
    heads = "killed after step", "goes on from", "down s", "compile s", "restore s", "GB/s", "s to the first step"
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for start in found["starts"][1:]:
        speed = f"{found['checkpoint_gb'] / start['state_s']:.1f}" if found["checkpoint_gb"] else ""
        seconds = (f"{start[name]:.1f}" for name in ("down_s", "compile_s", "state_s"))
        cells = (str(start["made"]), str(start["from"]), *seconds, speed, f"{start['first_step_s']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    spent = dict.fromkeys(CLASSES, 0.0) | found["goodput"]  # a result may be older than a class
    shares = ", ".join(f"{name.replace('_', ' ')} {spent[name]:.1f}" for name in CLASSES if spent[name] >= 0.05)
    return "\n".join([*lines, "", f"Goodput {spent['fraction']:.1%} of {spent['wall']:.1f} s: {shares}."])


if __name__ == "__main__":
    main(sys.argv[1:])
