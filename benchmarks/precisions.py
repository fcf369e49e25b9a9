"""`python -m benchmarks.precisions [steps=2000] [seeds=2] [precisions=bf16,fp8_block,fp8_row] [out=FILE] [commit=]
[KEY=VALUE ...]`: losses of products in 8 bits beside those of bfloat16.

Trains nano, or what other keys of a recipe say, on the text of Python's standard library, from each seed once with each
`model.precision`, on the same batches; `fp8_block+head` also multiplies by the output projection so. Early steps part two runs
for good, so one pair of runs says little: the table has the mean of the pairs of one seed, its standard error, and how far
apart runs of bfloat16 from two seeds are. A loss is the mean of 100 steps. Writes every loss, and a picture of the curves
beside them. On a Hopper GPU a run of nano takes about half a minute; a CPU computes products in 8 bits in float32.
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
OPTIONS = {"steps": 2000, "seeds": 2, "precisions": "bf16,fp8_block,fp8_row", "out": "", "commit": ""}
RECIPE = (
    "recipe=long_context data=stdlib mesh=single data.sequence_length=256 data.global_batch=8 accumulation=1 "
    "checkpoint.every=0 model.compute_dtype=bfloat16"
)
HEAD = "+head"  # after a precision: of the output projection too
SPAN = 100  # steps of a mean
COLOURS = ("#333333", "#08519c", "#d94801", "#238b45", "#8c6d31")
Curves = dict[str, list[list[float]]]  # precision -> of each seed the loss of each step


def means_of(losses: list[float]) -> np.ndarray:
    """Returns the mean loss of each span of steps."""
    whole = len(losses) // SPAN * SPAN
    return np.asarray(losses[:whole]).reshape(-1, SPAN).mean(1)


def words_of(name: str) -> str:
    """Returns the keys of a precision."""
    precision, plus, _ = name.partition(HEAD)
    return f"model.precision={precision}" + (" model.precision_head=true" if plus else "")


def compared(steps: int, seeds: int, precisions: list[str], keys: str = "") -> Curves:
    """Returns the losses of each run, those of bfloat16 first."""
    curves: Curves = {}
    for name in dict.fromkeys([BF16, *precisions]):
        for seed in range(seeds):
            losses = losses_of(f"{keys} {words_of(name)} run.seed={seed}", steps, RECIPE)
            curves.setdefault(name, []).append([round(x, 4) for x in losses])
            print(f"{name}, seed {seed}: {np.mean(losses[-SPAN:]):.4f}", flush=True)
    return curves


def pairs_of(losses: Curves, name: str) -> np.ndarray:
    """Returns how far the means of a precision's runs are from those of bfloat16 from the same seed, [seeds, spans]."""
    pairs = zip(losses[name], losses[BF16], strict=False)
    return np.stack([means_of(of) / means_of(base) - 1 for of, base in pairs])


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the curves as PNG, and below them how far each is from bfloat16's of the same seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    losses = result["losses"]
    base = means_of(losses[BF16][0])
    at, late = SPAN * (np.arange(len(base)) + 1), len(base) // 2
    for (name, of), colour in zip(losses.items(), COLOURS):
        for i, each in enumerate(of):
            above.plot(at, means_of(each), color=colour, linewidth=1, label=None if i else name)
        for pair in pairs_of(losses, name):
            below.plot(at, 100 * pair, color=colour, linewidth=1)
    most = max(1.0, *(110 * abs(pairs_of(losses, name)[:, late:]).max() for name in losses))
    above.set(ylabel=f"loss, mean of {SPAN} steps", ylim=(None, float(base[min(2, len(base) - 1)]) + 0.2))
    below.set(xlabel="step", ylabel="of bf16's, %", ylim=(-most, most))
    above.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def table(result: dict[str, Any]) -> str:
    """Returns the Markdown of a result."""
    losses, span = result["losses"], result["span"]
    lines = [
        f"| model.precision | loss, last {span} steps, of each seed | of bf16's of the same seed, mean | standard error |",
        "|---|---|---|---|",
    ]
    for name, of in losses.items():
        last = [means_of(x)[-1] for x in of]
        each = ", ".join(f"{x:.4f}" for x in last)
        if name == BF16:
            apart = f"seeds are up to {max(last) / min(last) - 1:.2%} apart" if len(last) > 1 else ""
            lines.append(f"| {name} | {each} | {apart} | |")
        else:
            pairs = pairs_of(losses, name)[:, -1]
            error = f"{pairs.std(ddof=1) / len(pairs) ** 0.5:.2%}" if len(pairs) > 1 else "one pair has none"
            lines.append(f"| {name} | {each} | {pairs.mean():+.2%} | {error} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    o, keys = split(OPTIONS, argv)
    if o["seeds"] < 1 or o["steps"] < 2 * SPAN:
        raise SystemExit(f"seeds must be at least 1 and steps at least {2 * SPAN}, got {o['seeds']} and {o['steps']}")
    said = {**provenance(o["commit"]), "device": jax.devices()[0].device_kind, "recipe": RECIPE, "keys": keys}
    losses = compared(o["steps"], o["seeds"], o["precisions"].split(","), " ".join(keys))
    out = Path(o["out"]) if o["out"] else HERE / "results" / "precisions" / "nano.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**said, "steps": o["steps"], "span": SPAN, "losses": losses}) + "\n")
    draw(json.loads(out.read_text()), out.with_suffix(".png"))
    print(table(json.loads(out.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
