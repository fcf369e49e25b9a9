"""`python -m benchmarks.precisions [steps=2000] [precisions=bf16,fp8_block,fp8_row] [out=FILE] [commit=] [KEY=VALUE ...]`:
losses of products in 8 bits beside those of bfloat16.

Trains nano, or what other keys of a recipe say, on the text of Python's standard library, once with each `model.precision`,
from the same seed and on the same batches; and once more in bfloat16 from another seed, as the measure of what a difference is
worth. A loss is the mean of 100 steps. Writes every loss, and a picture of the curves beside them. On a Hopper GPU in about a
minute; a CPU computes products in 8 bits in float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.measure import provenance
from benchmarks.moments import losses_of
from benchmarks.options import split
from ejdist.precision import BF16

HERE = Path(__file__).parent
OPTIONS = {"steps": 2000, "precisions": "bf16,fp8_block,fp8_row", "out": "", "commit": ""}
RECIPE = (
    "recipe=long_context data=stdlib mesh=single data.sequence_length=256 data.global_batch=8 accumulation=1 "
    "checkpoint.every=0 model.compute_dtype=bfloat16"
)
SPAN = 100  # steps of a mean
OTHER = f"{BF16}, another seed"
COLOURS = ("#333333", "#08519c", "#d94801", "#6baed6", "#8c6d31")


def means_of(losses: list[float]) -> np.ndarray:
    """Returns the mean loss of each span of steps."""
    whole = len(losses) // SPAN * SPAN
    return np.asarray(losses[:whole]).reshape(-1, SPAN).mean(1)


def compared(steps: int, precisions: list[str], keys: str = "") -> dict[str, list[float]]:
    """Returns the losses of each step of each run, by name; those of bfloat16 first, and from another seed last."""
    curves = {}
    for name in dict.fromkeys([BF16, *precisions, OTHER]):
        precision, seed = (BF16, 1) if name == OTHER else (name, 0)
        losses = losses_of(f"{keys} model.precision={precision} run.seed={seed}", steps, RECIPE)
        curves[name] = [round(x, 4) for x in losses]
        print(f"{name}: {np.mean(losses[-SPAN:]):.4f}", flush=True)
    return curves


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the curves as PNG, and below them how far each is from bfloat16's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    base = means_of(result["losses"][BF16])
    at = SPAN * (np.arange(len(base)) + 1)
    for (name, losses), colour in zip(result["losses"].items(), COLOURS):
        style = {"color": colour, "linewidth": 1, "linestyle": ":" if name == OTHER else "-"}
        above.plot(at, means_of(losses), label=name, **style)
        below.plot(at, 100 * (means_of(losses) / base - 1), **style)
    above.set(ylabel=f"loss, mean of {SPAN} steps", ylim=(None, float(base[min(2, len(base) - 1)]) + 0.2))
    later = [means_of(x)[len(base) // 2 :] for x in result["losses"].values()]
    most = max(1.0, *(110 * abs(x / base[len(base) // 2 :] - 1).max() for x in later))
    below.set(xlabel="step", ylabel="of bf16's, %", ylim=(-most, most))
    above.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def table(result: dict[str, Any]) -> str:
    """Returns the Markdown of a result."""
    base, span = means_of(result["losses"][BF16]), result["span"]
    lines = [
        f"| model.precision | loss, last {span} steps | of bf16's | farthest mean of {span} steps in the second half |",
        "|---|---|---|---|",
    ]
    for name, losses in result["losses"].items():
        means = means_of(losses)
        far = max((means / base - 1)[len(base) // 2 :], key=abs)
        lines.append(f"| {name} | {means[-1]:.4f} | {means[-1] / base[-1] - 1:+.2%} | {far:+.2%} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    o, keys = split(OPTIONS, argv)
    said = {**provenance(o["commit"]), "device": jax.devices()[0].device_kind, "recipe": RECIPE, "keys": keys}
    losses = compared(o["steps"], o["precisions"].split(","), " ".join(keys))
    out = Path(o["out"]) if o["out"] else HERE / "results" / "precisions" / "nano.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**said, "steps": o["steps"], "span": SPAN, "losses": losses}) + "\n")
    draw(json.loads(out.read_text()), out.with_suffix(".png"))
    print(table(json.loads(out.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
