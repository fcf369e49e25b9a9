"""`python -m benchmarks.precisions [steps=2000] [seeds=2] [first=0] [precisions=bf16,fp8_block,fp8_row] [out=FILE] [commit=]
[KEY=VALUE ...]`, or `join=FILE,... out=FILE`: losses of products in 8 bits beside those of bfloat16.

Trains nano, or what other keys of a recipe say, on the text of Python's standard library, from each seed once with each
`model.precision`, on the same batches; `fp8_block+head` also multiplies by the output projection so. Early steps part two runs
for good, so one pair of runs says little: the table has the mean of the pairs of one seed, its standard error, and how far
apart runs of bfloat16 from two seeds are. A loss is the mean of 100 steps. Writes every loss, and a picture of the curves
beside them. On a Hopper GPU a run of nano takes about half a minute; a CPU computes products in 8 bits in float32. `first` is
the first seed: devices may share the seeds, and `join` puts what they wrote into one result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.measure import provenance
from benchmarks.moments import losses_of
from benchmarks.options import split
from ejdist.precision import BF16, check_precision
from ejdist.training.metrics import write_atomic

HERE = Path(__file__).parent
OPTIONS = {
    "steps": 2000,
    "seeds": 2,
    "first": 0,
    "precisions": "bf16,fp8_block,fp8_row",
    "join": "",
    "out": "",
    "commit": "",
}
RECIPE = (
    "recipe=long_context data=stdlib mesh=single data.sequence_length=256 data.global_batch=8 accumulation=1 "
    "checkpoint.every=0 model.compute_dtype=bfloat16"
)
HEAD = "+head"  # after a precision: of the output projection too
SPAN = 100  # steps of a mean of the table
POINTS = 40  # of a curve
COLOURS = ("#333333", "#08519c", "#d94801", "#238b45", "#8c6d31")
Curves = dict[str, list[list[float]]]  # precision -> of each seed the loss of each step


def means_of(losses: list[float], span: int = SPAN) -> np.ndarray:
    """Returns the mean loss of each span of steps, the last of which is whole."""
    return np.asarray(losses[len(losses) % span :]).reshape(-1, span).mean(1)


def words_of(name: str) -> str:
    """Returns the keys of a precision."""
    precision, plus, _ = name.partition(HEAD)
    return f"model.precision={precision}" + (" model.precision_head=true" if plus else "")


def compared(steps: int, seeds: range, precisions: list[str], keys: str = "") -> Iterator[Curves]:
    """Yields, after each run, the losses of every run so far, those of bfloat16 first."""
    curves: Curves = {}
    for name in dict.fromkeys([BF16, *precisions]):
        for seed in seeds:
            losses = losses_of(f"{keys} {words_of(name)} run.seed={seed}", steps, RECIPE)
            curves.setdefault(name, []).append([round(x, 4) for x in losses])
            print(f"{name}, seed {seed}: {np.mean(losses[-SPAN:]):.4f}", flush=True)
            yield curves


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns results of one commit, recipe and number of steps as one, each from seeds of its own.

    Raises:
      SystemExit: a result lacks runs, two differ in more than their seeds, or have a seed in common.
    """
    for i, result in enumerate(results, 1):
        if "seeds" not in result:
            raise SystemExit(f"join: result {i} does not say its seeds; it is of an earlier version: measure it again")
        for name, of in result["losses"].items():
            if len(of) != len(result["seeds"]):
                raise SystemExit(
                    f"join: result {i} has {len(of)} of {len(result['seeds'])} runs of {name}: it was stopped; "
                    "measure the others from a first= and seeds= of their own"
                )
    whole, *others = results
    seeds, losses = list(whole["seeds"]), {name: list(of) for name, of in whole["losses"].items()}
    for other in others:
        for key in ("commit", "device", "recipe", "keys", "steps", "span"):
            if other[key] != whole[key]:
                raise SystemExit(f"join: {key} must be the same in all results, got {whole[key]} and {other[key]}")
        if set(other["losses"]) != set(losses):
            raise SystemExit(f"join: precisions must be the same, got {list(losses)} and {list(other['losses'])}")
        if common := set(seeds) & set(other["seeds"]):
            raise SystemExit(f"join: results must have seeds of their own; two have {sorted(common)}: give first=")
        seeds += other["seeds"]
        for name, of in other["losses"].items():
            losses[name] += of
    return {**whole, "seeds": seeds, "losses": losses}


def pairs_of(losses: Curves, name: str, span: int = SPAN) -> np.ndarray:
    """Returns how far the means of a precision's runs are from those of bfloat16 from the same seed, [seeds, spans]."""
    pairs = zip(losses[name], losses[BF16], strict=False)
    return np.stack([means_of(of, span) / means_of(base, span) - 1 for of, base in pairs])


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the curves as PNG, and below them how far each is from bfloat16's of the same seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    losses, span = result["losses"], max(1, result["steps"] // POINTS)
    base = means_of(losses[BF16][0], span)
    at, late = span * (np.arange(len(base)) + 1), len(base) // 2
    for (name, of), colour in zip(losses.items(), COLOURS):
        for i, each in enumerate(of):
            above.plot(at, means_of(each, span), color=colour, linewidth=0.7, label=None if i else name)
        pairs = 100 * pairs_of(losses, name, span)
        below.plot(at, pairs.T, color=colour, linewidth=0.4, alpha=0.5)
        below.plot(at, pairs.mean(0), color=colour, linewidth=1.5)
    most = max(1.0, *(110 * abs(pairs_of(losses, name, span)[:, late:]).max() for name in losses))
    above.set(ylabel=f"loss, mean of {span} steps", ylim=(None, float(base[min(POINTS // 8, len(base) - 1)]) + 0.2))
    below.set(xlabel="step", ylabel="of bf16's, %, and its mean", ylim=(-most, most))
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


def keep(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(result) + "\n")


def main(argv: list[str]) -> None:
    o, keys = split(OPTIONS, argv)
    if o["seeds"] < 1 or o["first"] < 0 or o["steps"] < 2 * SPAN:
        raise SystemExit(
            f"seeds must be at least 1, first at least 0 and steps at least {2 * SPAN}, got {o['seeds']}, {o['first']} and "
            f"{o['steps']}"
        )
    out = Path(o["out"]) if o["out"] else HERE / "results" / "precisions" / "nano.json"
    if o["join"]:
        others = [
            *keys,
            *(f"{name}={o[name]}" for name in OPTIONS if name not in ("join", "out") and o[name] != OPTIONS[name]),
        ]
        if others or not o["out"]:
            raise SystemExit(
                "join= takes results as they are, and out=FILE: "
                + (f"leave out {' '.join(others)}" if others else "give the file to write")
            )
        files = [Path(name) for name in o["join"].split(",")]
        if absent := [str(file) for file in files if not file.is_file()]:
            raise SystemExit(f"join: there is no file {absent[0]!r}; write join=FILE,FILE")
        result = joined([json.loads(file.read_text()) for file in files])
    else:
        names, seeds = o["precisions"].split(","), range(o["first"], o["first"] + o["seeds"])
        said = {**provenance(o["commit"]), "device": jax.devices()[0].device_kind, "recipe": RECIPE, "keys": keys}
        said |= {"steps": o["steps"], "span": SPAN, "seeds": list(seeds)}
        for name in names:
            check_precision(name.removesuffix(HEAD), ())
        for losses in compared(o["steps"], seeds, names, " ".join(keys)):
            result = {**said, "losses": losses}
            keep(result, out)  # should a later run be stopped
    keep(result, out)
    draw(result, out.with_suffix(".png"))
    print(table(result))


if __name__ == "__main__":
    main(sys.argv[1:])
