"""Every picture of a run: its loss, how evenly its experts were used, and the results of an evaluation."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_COLUMNS = 5  # moments of the run that are shown whole
_COLOURS = ("#1f4e79", "#c55a11", "#548235", "#7f6000", "#7030a0", "#404040")


def draw_loss(rows: list[dict[str, Any]], path: Path, title: str, evaluations: Sequence[dict[str, Any]] = ()) -> None:
    """Writes a picture of the loss over the steps, with a running mean, and of the held-out loss where the run evaluated it.

    Args:
      rows: of metrics.jsonl. evaluations: of evaluation.jsonl.
    """
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.get("loss") is not None]
    steps, losses = [row["step"] for row in shown], [row["loss"] for row in shown]
    width = max(1, len(shown) // 25)
    mean = [statistics.fmean(losses[max(0, i - width + 1) : i + 1]) for i in range(len(losses))]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="#9bb7d4", linewidth=1, label="loss of a step")
    if width > 1:
        axes.plot(steps, mean, color="#1f4e79", linewidth=2, label=f"mean of the last {width}")
    if held_out := [(row["step"], row["loss"]) for row in evaluations if row["loss"] is not None]:
        axes.plot(*zip(*held_out, strict=True), color="#c0504d", marker="o", markersize=4, label="held-out data")
    axes.set(xlabel="step", ylabel="cross entropy, nats per token", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_picture(figure, path)


def draw_load(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes a picture: layers x experts at moments of the run, colored by tokens over the mean; below, its maximum in
    each layer over the steps. Nothing is written where no row holds the tokens of the experts (experts.load_every = 0).

    Args:
      rows: of metrics.jsonl.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with_counts = [row for row in rows if row.get("experts/counts")]
    if not with_counts:
        return
    indices = np.unique(np.linspace(0, len(with_counts) - 1, min(_COLUMNS, len(with_counts))).round().astype(int))
    shown = [with_counts[i] for i in indices]
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


def draw_evaluation(found: Mapping[str, Any], path: Path, title: str) -> None:
    """Draws the JSON that `launch.evaluate` writes: "loss", by length, "recall", a list of cells, and
    "ruler", with a row for each task and length."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(cell["task"] for cell in found.get("recall", ())))
    panels = (["loss"] if found.get("loss") else []) + tasks + (["ruler"] if found.get("ruler") else [])
    figure = Figure(figsize=(5.5 * max(1, len(panels)), 4.5), layout="constrained")
    figure.suptitle(title)
    for i, name in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), i + 1)
        if name == "loss":
            _draw_loss_by_position(axes, found["loss"])
        elif name == "ruler":
            _draw_ruler(axes, figure, found["ruler"])
        else:
            _draw_cells(axes, figure, [cell for cell in found["recall"] if cell["task"] == name], name)
    save_picture(figure, path)


def _draw_loss_by_position(axes: Any, loss: Mapping[str, Any]) -> None:
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
    title = {"needle": "a needle in text", "recall": "one of many pairs", "spelled": "one of many, spelled out"}[name]
    axes.set(xlabel="tokens of the prompt", ylabel="depth (1: just before the question)", title=title)
    figure.colorbar(shown, ax=axes, label="right answers")


def _draw_ruler(axes: Any, figure: Any, ruler: Mapping[str, Any]) -> None:
    rows = ruler["rows"]
    lengths, tasks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("length", "task"))
    square = np.full((len(tasks), len(lengths)), np.nan)
    for row in rows:
        y, x = tasks.index(row["task"]), lengths.index(row["length"])
        square[y, x] = row["score"] if ruler["generate"] else 100 * row["teacher_forced"]["tokens_correct"]
        axes.text(x, y, f"{square[y, x]:.0f}", ha="center", va="center", fontsize="small")
    shown = axes.imshow(square, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto", alpha=0.8)
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.set_yticks(range(len(tasks)), tasks)
    axes.set(xlabel="tokens of prompt and answer", title="RULER")
    label = "string match, %" if ruler["generate"] else "tokens right, teacher-forced, %"
    figure.colorbar(shown, ax=axes, label=label)


def save_picture(figure: Any, path: Path) -> None:
    """Writes a figure of matplotlib so that its file is there whole or not at all."""
    temporary = path.with_name(f"tmp{os.getpid()}.{path.name}")
    try:
        figure.savefig(temporary, dpi=120)
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
