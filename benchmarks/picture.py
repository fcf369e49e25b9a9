"""The picture of a result file: for each case, every contestant's share of the roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.race import DIRECTIONS

TITLES = {"forward": "forward", "backward": "backward", "both": "forward and backward in one program"}
# Ours in blues, peers in warm and grey tones: who is who is seen without reading the legend.
OURS = ("#08519c", "#3182bd", "#6baed6", "#9ecae1", "#c6dbef")
PEERS = ("#d94801", "#fd8d3c", "#fdbe85", "#737373", "#a6a6a6", "#cfcfcf", "#8c6d31", "#bd9e39")


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the picture as PNG: a panel for each direction, a group of bars for each case, quartiles as whiskers.

    Without declared work there is no roofline: bars are then relative to the fastest.
    """
    from matplotlib.figure import Figure

    blocks = result["cases"]
    rows = [{row["contestant"]: row for row in block["rows"] if row["status"] == "timed"} for block in blocks]
    names = {name: row["ours"] for group in rows for name, row in group.items()}
    order = sorted(names, key=lambda name: not names[name])
    colours = dict(zip((n for n in order if names[n]), OURS * len(order), strict=False))
    colours |= dict(zip((n for n in order if not names[n]), PEERS * len(order), strict=False))
    panels = [d for d in DIRECTIONS if any(d in row for group in rows for row in group.values())] or ["forward"]
    width = max(7.0, 1.6 + 0.34 * sum(len(group) for group in rows) + 0.4 * len(blocks))
    figure = Figure(figsize=(min(width, 18.0), 1.1 + 2.3 * len(panels)), layout="constrained")
    roofline = all(block["work"] for block in blocks)
    for panel, direction in zip(figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0], panels, strict=True):
        centres, at = [], 0.0
        for block, group in zip(blocks, rows, strict=True):
            present = [name for name in order if name in group and direction in group[name]]
            fastest = min((group[name][direction][block["basis"]][1] for name in present), default=1.0)
            places = [at + n for n in range(len(present))]
            for place, name in zip(places, present, strict=True):
                low, median, high = group[name][direction][block["basis"]]
                best = block["work"][direction]["roofline_us"] if roofline else fastest
                height = best / median
                whiskers = [[height - best / high], [best / low - height]]
                panel.bar(place, height, 0.86, color=colours[name], yerr=whiskers, ecolor="#333333", capsize=2)
                panel.annotate(
                    f"{height:.2f}", (place, best / low), (0, 2), textcoords="offset points", ha="center", fontsize=7
                )
            centres.append(at + (len(group) - 1) / 2)
            at += len(group) + 0.9
        panel.set_title(TITLES[direction], fontsize=9, loc="left")
        # Names that do not fit beside one another lean.
        lean = {"rotation": 20, "ha": "right", "rotation_mode": "anchor"} if len(blocks) > 12 else {}
        panel.set_xticks(centres, [_label(block) for block in blocks], fontsize=8, **lean)
        panel.axhline(1.0, color="#333333", linewidth=0.8, linestyle=":")
        panel.set_ylabel("of the roofline" if roofline else "of the fastest", fontsize=8)
        panel.margins(y=0.12)
        panel.spines[["top", "right"]].set_visible(False)
    handles = [matplotlib_patch(colours[name], name) for name in order]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(6, max(1, len(order))), fontsize=8, frameon=False
    )
    basis = "kernel times" if all(b["basis"] == "kernel_us" for b in blocks) else "wall times"
    figure.suptitle(f"{result['op']} on {result['device']}, {basis}: higher is faster", fontsize=10)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def matplotlib_patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _label(block: dict[str, Any]) -> str:
    dtype = block["dtype"].replace("bfloat", "bf").replace("float", "f")
    return f"{block['case']}\n{dtype}" + (", scaled down" if block["scaled"] else "")
