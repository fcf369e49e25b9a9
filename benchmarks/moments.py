"""`python -m benchmarks.moments [of=moments|lora] [steps=300] [out=FILE] [commit=]`: losses of other ways to train.

To keep moments in bfloat16, to sum gradients in bfloat16, and to keep moments on the host; or to train adapters.
Trains nano on the text of Python's standard library, once for each way, from the same seed and on the same batches; and once
from another seed, as the measure of what a difference is worth. `of=lora` trains it so once, and then each way from there on
another text: the READMEs of this project. Runs anywhere, in a few minutes on two cores.
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

HERE = Path(__file__).parent
OPTIONS = {"of": "moments", "steps": 300, "out": "", "commit": ""}
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


# A text of another kind than the one that the base is trained on.
TUNED = "data=files data.source={root}/**/README.md data.cache_dir={folder}/cache model.init_from={folder}/base"
# Of these, full training and rank 16 each get the best; the others get that of their kind.
RATES = ("3e-3", "1e-2", "3e-2", "1e-1")
LORA = {
    REFERENCE: "",
    "another seed": "run.seed=1",
    "rank 16": "lora.rank=16",
    "rank 4": "lora.rank=4",
    "rank 64": "lora.rank=64",
    "rank 16, query and value": "lora.rank=16 lora.targets=[query,value]",
    "rank 16, base in bfloat16": "lora.rank=16 lora.base=bfloat16",
    "rank 16, base in int8": "lora.rank=16 lora.base=int8",
}


def losses_of(words: str, steps: int, recipe: str = RECIPE, directory: Path | None = None) -> list[float]:
    """Returns the loss of each step of a run, which is kept if it has a directory."""
    with tempfile.TemporaryDirectory() as folder:
        directory = directory or Path(folder) / "run"
        keys = [*recipe.split(), *words.split(), f"run.steps={steps}", f"run.dir={directory}"]
        train(compose(keys), log=lambda line: None)
        return [row["loss"] for row in read_rows(directory / "metrics.jsonl") if "loss" in row]


def of_moments(steps: int) -> dict[str, tuple[str, list[float]]]:
    """Returns way -> (its keys, the losses of each step)."""
    return {name: (words, losses_of(words, steps)) for name, words in WAYS.items()}


def of_lora(steps: int) -> dict[str, tuple[str, list[float]]]:
    """Returns way -> (its keys, the losses of each step), each from the same base."""
    found: dict[str, tuple[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        losses_of("", steps, directory=Path(folder) / "base")
        recipe = RECIPE.replace("data=stdlib", TUNED.format(root=HERE.parent, folder=folder))
        rates: dict[bool, str] = {}  # whether adapters are trained -> the rate
        for name, words in LORA.items():
            adapted = "lora.rank" in words
            tried = {}
            for rate in [rates[adapted]] if adapted in rates else RATES:
                keys = f"{words} optimizer.learning_rate={rate}".strip()
                tried[rate] = keys, losses_of(keys, steps, recipe)
            rates[adapted] = min(tried, key=lambda rate: np.mean(tried[rate][1][-LAST:]))
            found[name] = tried[rates[adapted]]
            print(f"{name}: {rates[adapted]}", flush=True)
    return found


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
    made = {"moments": ("nano", of_moments), "lora": ("lora", of_lora)}
    if o["of"] not in made:
        raise SystemExit(f"of = {o['of']!r} is unknown; use {', '.join(made)}")
    name, measure = made[o["of"]]
    ways = measure(o["steps"])
    rows = {way: {"keys": words} | compared(losses, ways[REFERENCE][1]) for way, (words, losses) in ways.items()}
    for way, row in rows.items():
        print(f"{way}: {row['last']:.4f}, {row['last_difference']:+.5f}", flush=True)
    result = {
        **provenance(o["commit"]),
        "device": jax.devices()[0].device_kind,
        "recipe": RECIPE,
        "steps": o["steps"],
        "ways": rows,
    }
    if o["of"] == "lora":
        result["tuned on"] = TUNED
    out = Path(o["out"]) if o["out"] else HERE / "results" / "moments" / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
