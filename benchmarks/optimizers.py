"""`python -m benchmarks.optimizers [steps=300] [seeds=3] [rates=1e-3,3e-3,1e-2,3e-2] [out=FILE] [commit=] [KEY=VALUE ...]`: in
how many steps Muon reaches AdamW's loss.

Trains nano, or what other keys of a recipe say, on the text of Python's standard library. Both are tuned alike: each takes the
best of the same rates, in as many steps. Then Muon trains with its rate in fewer steps, whose schedule ends there, and AdamW in
all of them, each from the same seeds. A loss is the mean of the last steps of a run. Writes every loss, and a picture of the
curves beside them. Runs anywhere, in a quarter of an hour on two cores.
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
from ejdist.training.optimizer import ADAMW, MUON

HERE = Path(__file__).parent
OPTIONS = {"steps": 300, "seeds": 3, "rates": "1e-3,3e-3,1e-2,3e-2", "out": "", "commit": ""}
RECIPE = (
    "recipe=long_context data=stdlib mesh=single data.sequence_length=128 data.global_batch=8 accumulation=1 "
    "checkpoint.every=0"
)
SHARES = (0.5, 0.6, 0.7)  # of the steps that AdamW takes
LAST = 30


def last_of(losses: list[float]) -> float:
    """Returns the mean loss of the last steps of a run."""
    return float(np.mean(losses[-LAST:]))


def compared(steps: int, seeds: int, rates: list[str], keys: str = "") -> dict[str, Any]:
    """Returns the runs of both optimizers, and the smallest share of AdamW's steps in which Muon reaches its loss, by the means
    over the seeds; None where it takes more than the largest of `SHARES`."""
    runs: list[dict[str, Any]] = []

    def run(name: str, rate: str, count: int, seed: int = 0) -> float:
        key = {"optimizer": name, "rate": rate, "steps": count, "seed": seed}
        for one in runs:
            if key == {n: one[n] for n in key}:
                return one["last"]
        words = f"{keys} optimizer={name} optimizer.learning_rate={rate} optimizer.warmup_steps={count // 10} run.seed={seed}"
        losses = losses_of(words, count, RECIPE)
        runs.append({**key, "last": last_of(losses), "losses": [round(x, 4) for x in losses]})
        print(f"{name} rate {rate} steps {count} seed {seed}: {runs[-1]['last']:.4f}", flush=True)
        return runs[-1]["last"]

    best = {name: min(rates, key=lambda rate: run(name, rate, steps)) for name in (ADAMW, MUON)}

    def mean(name: str, count: int) -> float:
        return float(np.mean([run(name, best[name], count, seed) for seed in range(seeds)]))

    target = mean(ADAMW, steps)
    ends = {share: mean(MUON, round(share * steps)) for share in SHARES}
    reached = next((share for share, last in ends.items() if last <= target), None)
    return {"best": best, "target": target, "ends": ends, "reached": reached, "runs": runs}


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the curves as PNG: of each optimizer at its best rate, in all steps and, of Muon, in the share that suffices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    share = result["reached"] or max(SHARES)
    curves = [(ADAMW, result["steps"], "#737373"), (MUON, result["steps"], "#9ecae1")]
    for name, count, colour in [*curves, (MUON, round(share * result["steps"]), "#08519c")]:
        mine = [
            r["losses"]
            for r in result["runs"]
            if (r["optimizer"], r["rate"], r["steps"]) == (name, result["best"][name], count)
        ]
        if mine:
            smooth = np.convolve(np.mean(mine, 0), np.ones(10) / 10, "valid")
            label = f"{name}, rate {result['best'][name]}, {count} steps"
            panel.plot(np.arange(len(smooth)) + 10, smooth, color=colour, label=label)
    panel.axhline(result["target"], color="#333333", linewidth=0.8, linestyle=":")
    panel.set(xlabel="step", ylabel="loss, mean of 10 steps and of the seeds", ylim=(None, result["target"] + 1.5))
    panel.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def table(result: dict[str, Any]) -> str:
    """Returns the Markdown of a result."""
    steps, best = result["steps"], result["best"]
    rows = [(ADAMW, steps, result["target"])] + [(MUON, round(float(s) * steps), x) for s, x in result["ends"].items()]
    lines = ["| optimizer | rate | steps | share | loss at the end |", "|---|---|---|---|---|"]
    lines += [f"| {name} | {best[name]} | {n} | {n / steps:.2f} | {loss:.3f} |" for name, n, loss in rows]
    tuned = {(r["optimizer"], r["rate"]): r["last"] for r in result["runs"] if not r["seed"] and r["steps"] == steps}
    of_rates = "; ".join(
        f"{name} {', '.join(f'{r} {x:.3f}' for (n, r), x in tuned.items() if n == name)}" for name in (ADAMW, MUON)
    )
    share = result["reached"]
    told = (
        f"Muon reaches AdamW's loss in {share:.2f} of its steps."
        if share
        else "Muon does not reach AdamW's loss in these steps."
    )
    return "\n".join([*lines, "", told, "", f"At each rate, in {steps} steps: {of_rates}."])


def main(argv: list[str]) -> None:
    o, keys = split(OPTIONS, argv)
    result = compared(o["steps"], o["seeds"], o["rates"].split(","), " ".join(keys))
    device = jax.devices()[0].device_kind
    said = {**provenance(o["commit"]), "device": device, "recipe": RECIPE, "keys": keys, "last_steps": LAST}
    result = {**said, "steps": o["steps"], "seeds": o["seeds"], **result}
    out = Path(o["out"]) if o["out"] else HERE / "results" / "optimizers" / "nano.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result) + "\n")
    draw(result, out.with_suffix(".png"))
    print(table(json.loads(out.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
