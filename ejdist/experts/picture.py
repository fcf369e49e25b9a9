"""The picture of a run's experts: how evenly each layer used them, over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ejdist.training.metrics import save_picture

_COLUMNS = 5  # moments of the run that are shown whole


def draw_load(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes a picture: layers x experts at moments of the run, colored by tokens over the mean; below, the largest of it in
    each layer over the steps. Nothing is written where no row holds the tokens of the experts (experts.load_every = 0).

    Args:
      rows: of metrics.jsonl.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with_counts = [row for row in rows if row.get("experts/counts")]
    if not with_counts:
        return
    at = np.unique(np.linspace(0, len(with_counts) - 1, min(_COLUMNS, len(with_counts))).round().astype(int))
    shown = [with_counts[i] for i in at]
    counts = [np.asarray(row["experts/counts"], float) for row in shown]
    layers, experts = counts[0].shape
    figure = Figure(figsize=(2.6 * len(shown) + 1.2, 2.2 + min(0.25 * layers, 6) + 2.2), layout="constrained")
    grid = figure.add_gridspec(2, len(shown), height_ratios=[max(min(0.25 * layers, 6), 1.2), 1.8])
    image, first = None, None
    for i, (row, c) in enumerate(zip(shown, counts, strict=True)):
        axes = figure.add_subplot(grid[0, i], sharey=first)
        first = first or axes
        share = c / np.maximum(c.mean(1, keepdims=True), 1e-9)
        # Twice the mean and half of it are as far from white; an expert without a token is darkest.
        image = axes.imshow(
            np.log2(np.maximum(share, 1 / 8)), vmin=-3, vmax=3, cmap="RdBu_r", aspect="auto", interpolation="nearest"
        )
        axes.set(title=f"step {row['step']}", xlabel=f"expert, of {experts}")
        axes.tick_params(labelleft=i == 0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    assert first is not None and image is not None
    first.set(ylabel="layer with experts")
    bar = figure.colorbar(image, ax=figure.axes, ticks=range(-3, 4), label="tokens over the mean")
    bar.ax.set_yticklabels(["<= 1/8", "1/4", "1/2", "1", "2", "4", ">= 8"])
    below = figure.add_subplot(grid[1, :])
    worst = np.asarray([row["experts/max_violation"] for row in rows], float)
    for layer in range(layers):
        below.plot(
            [row["step"] for row in rows],
            worst[:, layer],
            linewidth=1,
            alpha=0.8,
            label=f"layer {layer}" if layers <= 8 else None,
        )
    below.set(xlabel="step", ylabel="largest over mean - 1", title="max violation of a step, by layer")
    below.set_ylim(bottom=0)
    below.grid(alpha=0.3)
    if layers <= 8:
        below.legend(frameon=False, ncols=4, fontsize="small")
    save_picture(figure, path)
