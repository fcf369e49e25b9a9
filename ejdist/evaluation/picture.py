"""The picture of an evaluation: loss by position, and recall by length and depth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ejdist.training.metrics import save_picture

_COLOURS = ("#1f4e79", "#c55a11", "#548235", "#7f6000", "#7030a0", "#404040")


def draw_evaluation(found: Mapping[str, Any], path: Path, title: str) -> None:
    """Writes the picture of what `launch.evaluate` writes as JSON: "loss", by length, and "recall", a list of cells."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(cell["task"] for cell in found.get("recall", ())))
    panels = (["loss"] if found.get("loss") else []) + tasks
    figure = Figure(figsize=(5.5 * max(1, len(panels)), 4.5), layout="constrained")
    figure.suptitle(title)
    for i, name in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), i + 1)
        if name == "loss":
            _draw_loss(axes, found["loss"])
        else:
            _draw_cells(axes, figure, [cell for cell in found["recall"] if cell["task"] == name], name)
    save_picture(figure, path)


def _draw_loss(axes: Any, loss: Mapping[str, Any]) -> None:
    for colour, (length, of_length) in zip(_COLOURS * len(loss), loss.items(), strict=False):
        for style, place in (("-", "document"), (":", "row")):
            rows = [row for row in of_length[place] if row["tokens"]]
            name = f"{int(length):,} tokens, in the {place}"
            axes.plot([r["from"] for r in rows], [r["loss"] for r in rows], style, color=colour, marker=".", label=name)
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="place of the token, the octave from", ylabel="cross entropy, nats per token", title="loss by position"
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")


def _draw_cells(axes: Any, figure: Any, cells: list[dict[str, Any]], name: str) -> None:
    lengths, depths = (sorted({cell[key] for cell in cells}) for key in ("length", "depth"))
    square = np.full((len(depths), len(lengths)), np.nan)
    for cell in cells:
        y, x = depths.index(cell["depth"]), lengths.index(cell["length"])
        square[y, x] = cell["accuracy"]
        axes.text(x, y, f"{cell['correct']}/{cell['count']}", ha="center", va="center", fontsize="small")
    shown = axes.imshow(square, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto", alpha=0.8)
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.set_yticks(range(len(depths)), [f"{d:g}" for d in depths])
    title = {"needle": "a needle in text", "recall": "one of many pairs"}[name]
    axes.set(xlabel="tokens of the prompt", ylabel="depth (1: just before the question)", title=title)
    figure.colorbar(shown, ax=axes, label="right answers")
