"""`python -m benchmarks.moments [steps=300] [out=benchmarks/results/moments/nano.json] [commit=]`: what it does to the losses
to keep moments in bfloat16, to sum gradients in bfloat16, and to keep moments on the host.

Trains nano on the text of Python's standard library, once for each way, from the same seed and on the same batches; and once
from another seed, as the measure of what a difference is worth. Runs anywhere, in a few minutes on two cores.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.measure import provenance
from benchmarks.options import read
from ejdist.training.loop import train
from ejdist.training.metrics import read_rows
from recipes.schema import compose

OPTIONS = {"steps": 300, "out": "benchmarks/results/moments/nano.json", "commit": ""}
RECIPE = (
    "recipe=long_context data=stdlib mesh=single data.sequence_length=128 data.global_batch=4 accumulation=4 "
    "checkpoint.every=0"
)
REFERENCE, LAST = "float32", 20
WAYS = {
    REFERENCE: "",
    "another seed": "run.seed=1",
    "moments on the host": "optimizer.offload=host",
    "moments in bfloat16": "optimizer.moments=bfloat16",
    "sums in bfloat16": "optimizer.accumulate=bfloat16",
    "all three": "optimizer.offload=host optimizer.moments=bfloat16 optimizer.accumulate=bfloat16",
}


def losses_of(words: str, steps: int) -> list[float]:
    """Returns the loss of each step of a run."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [*RECIPE.split(), *words.split(), f"run.steps={steps}", f"run.dir={folder}/run"]
        train(compose(keys), log=lambda line: None)
        return [row["loss"] for row in read_rows(Path(folder) / "run" / "metrics.jsonl") if "loss" in row]


def compared(losses: list[float], reference: list[float]) -> dict[str, Any]:
    """Returns the last loss, a mean of several steps, and how far the losses of each step are from those of another run."""
    mine, other = np.array(losses), np.array(reference)
    return {
        "last": float(mine[-LAST:].mean()),
        "last_difference": float(mine[-LAST:].mean() - other[-LAST:].mean()),
        "mean_difference": float((mine - other).mean()),
        "largest_difference": float(np.abs(mine - other).max()),
        "losses": [round(float(x), 5) for x in mine],
    }


def main(argv: list[str]) -> None:
    o = read(OPTIONS, argv)
    found: dict[str, list[float]] = {}
    for name, words in WAYS.items():
        found[name] = losses_of(words, o["steps"])
        row = compared(found[name], found[REFERENCE])
        print(f"{name}: {row['last']:.4f}, {row['last_difference']:+.5f}", flush=True)
    result = {
        **provenance(o["commit"]),
        "device": jax.devices()[0].device_kind,
        "recipe": RECIPE,
        "steps": o["steps"],
        "ways": {name: {"keys": WAYS[name]} | compared(x, found[REFERENCE]) for name, x in found.items()},
    }
    Path(o["out"]).parent.mkdir(parents=True, exist_ok=True)
    Path(o["out"]).write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
