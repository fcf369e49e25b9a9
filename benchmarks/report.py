"""What was measured, as files: a JSON file for each operation and device, a picture beside it, and tables in README.md."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.race import DIRECTIONS

HERE = Path(__file__).resolve().parent
RESULTS, README = HERE / "results", HERE / "README.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
FORMAT = 2


def slug(device_kind: str) -> str:
    """Returns a device's name for a file: "NVIDIA H200" is h200."""
    return device_kind.lower().removeprefix("nvidia ").replace(" ", "_").replace("/", "_")


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def writable(folder: Path) -> None:
    """Makes a folder where there is none. Raises OSError where no file can be written in it."""
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def keep(path: Path, op_name: str, device: str, block: dict[str, Any]) -> dict[str, Any]:
    """Returns the results in `path` with this case's block in them, written: it replaces one of the same case and dtype."""
    result = read(path) or {"format": FORMAT, "op": op_name, "device": device, "cases": []}
    key = (block["case"], block["dtype"])
    cases = [b for b in result["cases"] if (b["case"], b["dtype"]) != key]
    result = {**result, "device": device, "cases": [*cases, block]}
    write_atomically(path, json.dumps(result, indent=1) + "\n")
    return result


def read(path: Path) -> dict[str, Any] | None:
    """Returns the results in a file; None where there are none, or they were written by an older command."""
    if not path.exists():
        return None
    result = json.loads(path.read_text())
    return result if result.get("format") == FORMAT else None


def dims_of(block: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={'x'.join(map(str, size)) if isinstance(size, list) else size}" for name, size in block["dims"].items()
    )


def _cell(times: dict[str, Any] | None, basis: str) -> str:
    """Returns one direction of one contestant: median and quartiles, share of the roofline, ratio to the best peer."""
    if not times:
        return ""
    low, median, high = times[basis]
    text = f"{_digits(median)} ({_digits(low)} to {_digits(high)})"
    if "of_roofline" in times:
        text += f", {times['of_roofline']:.2f}"
    if "times_as_fast_as_best_peer" in times:
        text += f", {times['times_as_fast_as_best_peer']:.2f}x {times['best_peer']}"
    return text


def _digits(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def _name(row: dict[str, Any]) -> str:
    return row["contestant"] + (" (tuned)" if "tuned" in row else "")


def lines(block: dict[str, Any]) -> str:
    """Returns a case as it is printed while the run goes on: a line for each contestant."""
    text = [f"{block['case']} {dims_of(block)}" + (" (scaled down)" if block["scaled"] else "")]
    for row in block["rows"]:
        cells = [f"{d} {_cell(row[d], block['basis'])}" for d in DIRECTIONS if d in row]
        text.append(f"  {_name(row):24} " + ("   ".join(cells) or f"{row['status']}: {row['reason']}"))
    return "\n".join(text)


def table(name: str, result: dict[str, Any]) -> str:
    """Returns the Markdown of one result file."""
    lines = [f"### `{result['op']}` on {result['device']}", ""]
    if (RESULTS / f"{name}.png").exists():
        lines += [f"![{result['op']} on {result['device']}](results/{name}.png)", ""]
    origins: dict[tuple, list[str]] = {}
    for b in result["cases"]:
        origins.setdefault((b["date"], b["commit"][:9], *b["versions"].items()), []).append(b["case"])
    for (date, commit, *versions), cases in sorted(origins.items()):
        which = f" ({', '.join(dict.fromkeys(cases))})" if len(origins) > 1 else ""
        lines += [f"Measured {date} at `{commit}` with {', '.join(f'{p} {v}' for p, v in versions)}{which}.", ""]
    lines += ["| case | contestant | forward µs | backward µs | both µs | largest error |", "|---|---|---|---|---|---|"]
    out: dict[str, list[str]] = {}
    for block in result["cases"]:
        label = f"{block['case']} {block['dtype']}" + (" (scaled down)" if block["scaled"] else "")
        for row in block["rows"]:
            if row["status"] != "timed":
                out.setdefault(f"{row['contestant']} {row['status']}: {row['reason']}", []).append(block["case"])
                continue
            cells = [_cell(row.get(d), block["basis"]) for d in DIRECTIONS]
            # A peer that makes itself for one shape was compared on the whole case alone.
            worst = max(row.get("error", row.get("error_of_whole")).values())
            lines.append(f"| {label} | {_name(row)} | {' | '.join(cells)} | {worst:.1e} |")
    lines += ["", "Cases: " + "; ".join(_case(block) for block in result["cases"]) + "."]
    if out:
        lines += ["", "Not timed: " + "; ".join(f"{why} ({', '.join(cases)})" for why, cases in out.items()) + "."]
    return "\n".join(lines)


def _case(block: dict[str, Any]) -> str:
    checked = block["checked"]
    against = f"checked at {dims_of(checked)}" if checked["dims"] != block["dims"] else "checked"
    whole = f" and as a whole against {checked['whole_case_against']}" if "whole_case_against" in checked else ""
    basis = "kernel" if block["basis"] == "kernel_us" else "wall"
    return (
        f"{block['case']} {dims_of(block)}, {against}{whole}, {basis} times, "
        f"matmul {block['matmul_TFLOP_s']} TFLOP/s, copy {block['copy_GB_s']} GB/s"
    )


def tables(folder: Path) -> str:
    """Returns the Markdown of every result file of a folder."""
    parts, older = [], []
    for path in sorted(folder.glob("*.json")):
        result = read(path)
        if result is None:
            older.append(path.name)
        else:
            parts.append(table(path.stem, result))
    if older:
        parts.append(f"Written by an older command, and not shown: {', '.join(f'`{name}`' for name in older)}.")
    more = (
        small_operations(folder / "small_operations"),
        pages(folder / "pages"),
        steps(folder / "steps"),
        sequences(folder / "sequences"),
        tokenizing(folder / "tokenize"),
        rows_read(folder / "rows"),
        of_hosts(folder / "hosts"),
        of_dealing(folder / "dealing"),
        resumed(folder / "resumed"),
        optimizers(folder / "optimizers"),
        precisions(folder / "precisions"),
    )
    parts += [section for section in more if section]
    return "\n\n".join(parts) or "Nothing has been measured yet."


def _origin(found: dict[str, Any]) -> str:
    return f"{found['date']} `{found['commit'][:9]}`"


def small_operations(folder: Path) -> str:
    """Returns the Markdown of the results of `benchmarks.small_operations` in a folder; empty where there are none."""
    from benchmarks.small_operations import table as rows_of

    parts = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        when = f"Measured {_origin(found)}." if "commit" in found else "Measured at a commit that was not written down."
        parts.append(f"### Operations beside attention on {found['device']}\n\n{rows_of(found['rows'])}\n\n{when}")
    return "\n\n".join(parts)


def optimizers(folder: Path) -> str:
    """Returns the Markdown of the results of `benchmarks.optimizers` in a folder; empty where there are none."""
    from benchmarks.optimizers import table

    return _curves(folder, "Muon and AdamW", "losses of both optimizers", table)


def precisions(folder: Path) -> str:
    """Returns the Markdown of the results of `benchmarks.precisions` in a folder; empty where there are none."""
    from benchmarks.precisions import table

    return _curves(folder, "Losses of products in 8 bits", "losses of each precision", table)


def _curves(folder: Path, what: str, shown: str, rows_of: Callable[[dict[str, Any]], str]) -> str:
    parts = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        picture = f"![{shown}](results/{folder.name}/{path.stem}.png)"
        title = f"### {what}: {path.stem} on {found['device']}"
        parts.append(f"{title}\n\n{picture}\n\n{rows_of(found)}\n\nMeasured {_origin(found)}.")
    return "\n\n".join(parts)


def pages(folder: Path) -> str:
    """Returns the Markdown of the results of `paged_decode`, `latent_decode` and `sparse_attention` of `benchmarks.comparisons`
    in a folder; empty where there are none. Names of files begin with `latent` or `sparse` where the attention is."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        heads = list(dict.fromkeys(name for row in found["rows"] for name in row))
        cells = [[_figure(row[name]) if name in row else "" for name in heads] for row in found["rows"]]
        lines = [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *cells)]
        what = _ATTENTION.get(path.stem.split("_")[0], "Attention over pages")
        parts.append("\n".join([f"### {what} on {found['device']}", "", *lines, "", f"Measured {_origin(found)}."]))
    return "\n\n".join(parts)


_ATTENTION = {
    "latent": "Latent attention over pages",
    "sparse": "Native sparse attention, and flash attention of the same queries",
}


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.2f}" if value >= 0.01 else f"{value:.1e}"
    return str(value)


def steps(folder: Path) -> str:
    """Returns the Markdown of the results of `benchmarks.step` in a folder, a row each; empty where there are none."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        times: dict[str, float] = {}  # of a CPU there are none
        if "classes" in found:
            # Kernels inside a CUDA graph are known by their names alone, and are no class.
            times = {r["kernel"]: r["ms"] for r in found["largest"] if r["class"] == "unknown"}
            times |= {name: x["ms"] for name, x in found["classes"].items() if name != "unknown"}
            times |= {"collectives, exposed": found["exposed_collectives"]["ms"], "gaps": found["gaps"]["ms"]}
        largest = sorted(times.items(), key=lambda item: -item[1])[:6]
        share = ", ".join(f"{name} {ms / found['window_ms']:.1%}" for name, ms in largest)
        mfu = "" if found["mfu_causal"] is None else f"{found['mfu_causal']:.1%} ({found['mfu_full']:.1%})"
        cells = (
            f"`{' '.join(found['recipe'])}`", f"{found['devices']} x {found['device']}", f"{found['step_ms']:.1f}",
            f"{found['tokens_per_second']:,.0f}", f"{found['tflops_causal']:.0f}", mfu, share, _origin(found),
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    if not rows:
        return ""
    heads = (
        "recipe",
        "devices",
        "ms",
        "tokens/s",
        "TFLOP/s a device",
        "MFU causal (full)",
        "share of the step",
        "measured",
    )
    return "\n".join(["### Training steps", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows])


def sequences(folder: Path) -> str:
    """Returns the Markdown of the results of `benchmarks.sequence` in a folder; empty where there are none."""
    from benchmarks.sequence import table as rows_of

    parts = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        title = f"### Attention over {found['ranks']} x {found['device']}, {found['processes']} processes"
        parts.append(f"{title}\n\n{rows_of(found['rows'])}\n\nMeasured {_origin(found)}.")
    return "\n\n".join(parts)


def tokenizing(folder: Path) -> str:
    """Returns the Markdown of the results of `benchmarks.tokenize` in a folder; empty where there are none."""
    from benchmarks.tokenize import table as rows_of

    parts = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        title = f"### Tokenizing {found['mb']:,.0f} MB with {found['tokenizer']}"
        where = f"{found['machine']}, load {found['load']} at the end"
        parts.append(f"{title}\n\n{rows_of(found)}\n\nMeasured {_origin(found)} on {where}.")
    return "\n\n".join(parts)


def rows_read(folder: Path) -> str:
    """Returns the Markdown of the results of `benchmarks.rows` in a folder; empty where there are none."""
    from benchmarks.rows import table as tables_of

    parts = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        where = f"{found['machine']}, load {found['load']} at the end"
        parts.append(
            f"### What a host reads of a dataset\n\n{tables_of(found)}\n\nMeasured {_origin(found)} on {where}."
        )
    return "\n\n".join(parts)


def of_hosts(folder: Path) -> str:
    """Returns the Markdown of the results of `benchmarks.hosts` in a folder; empty where there are none."""
    from benchmarks.hosts import table as tables_of

    parts = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        where = f"{found['machine']}, which do the work of all hosts, load {found['load']} at the end"
        parts.append(f"### What hosts agree on\n\n{tables_of(found)}\n\nMeasured {_origin(found)} on {where}.")
    return "\n\n".join(parts)


def of_dealing(folder: Path) -> str:
    """Returns the Markdown of the results of `benchmarks.dealing` in a folder; empty where there are none."""
    from benchmarks.dealing import table as rows_of

    parts = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        title = f"### The busiest group of devices over the mean, of {found['batches']} batches, model={found['model']}"
        parts.append(f"{title}\n\n{rows_of(found)}\n\nMeasured {_origin(found)} on {found['machine']}.")
    return "\n\n".join(parts)


def resumed(folder: Path) -> str:
    """Returns the Markdown of the results of `benchmarks.resumed` in a folder; empty where there are none."""
    from benchmarks.resumed import table as rows_of

    parts = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        title = f"### Killed and started again: {found['device']}, {found['processes']} processes"
        recipe = ", ".join(f"{key} {value}" for key, value in found["recipe"].items())
        text = f"Checkpoints of {found['checkpoint_gb']:.1f} GB; {recipe}."
        parts.append(f"{title}\n\n{text}\n\n{rows_of(found)}\n\nMeasured {_origin(found)}.")
    return "\n\n".join(parts)


def write(folder: Path = RESULTS, readme: Path = README) -> None:
    """Draws every picture of the folder anew, and puts its tables into the README.

    Raises:
      ValueError: the README has no place for them.
    """
    from benchmarks.picture import draw

    for path in sorted(folder.glob("*.json")):
        result = read(path)
        if result is not None:
            draw(result, path.with_suffix(".png"))
    text = readme.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{readme.name} must have the lines {BEGIN} and {END}; add them where the tables belong")
    write_atomically(readme, f"{before}{BEGIN}\n{tables(folder)}\n{END}{after}")
