"""What `python -m launch.evaluate` says of its results: lines about losses and recall, and the file with its picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def tell_loss(log: Callable[[str], Any], length: int, result: dict[str, Any], seconds: float) -> None:
    """Logs the loss at a length, and that of each octave."""
    if result["loss"] is None:
        return log(f"loss at {length:,} tokens: the batches have no token that is followed by another")
    log(f"loss at {length:,} tokens: {result['loss']:.4f} nats over {result['tokens']:,} tokens, {seconds:.1f} s")
    for place in ("document", "row"):
        parts = [f"{r['from']}: {r['loss']:.3f}" for r in result[place] if r["tokens"]]
        log(f"  by position in the {place}, octaves from {', '.join(parts)}")


def tell_cells(log: Callable[[str], Any], cells: Sequence[Any]) -> None:
    """Logs the recall of a task at a length, a line for each depth."""
    first = cells[0]
    for cell in cells:
        low, high = cell.interval
        log(
            f"{first.task} at {first.length:,} tokens, depth {cell.depth:g}: {cell.correct} of {cell.count} right "
            f"({cell.accuracy:.0%}, 95% in {low:.0%} to {high:.0%}), {cell.tokens_correct:.0%} of tokens, "
            f"log-probability {cell.log_probability:.2f}"
        )


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Writes all results as JSON, and a picture of them beside it."""
    from ejdist.pictures import draw_evaluation
    from ejdist.training.metrics import write_atomic

    write_atomic(path, json.dumps(results, indent=1, allow_nan=False) + "\n")
    form = "" if results["packed"] is None else f", weights={results['packed']}"
    draw_evaluation(results, path.with_suffix(".png"), results["weights"] + form)
