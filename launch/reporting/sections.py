"""The sections of the page about one run or several: each takes what is in their folders, and returns HTML."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from ejdist.training import goodput
from launch.reporting.chart import Series, chart, text_of
from launch.reporting.contents import checkpoints, documents, dot, exact, headed, pictures, recipe
from launch.reporting.folder import RunFolder, number
from launch.reporting.html import Markup, page, table, tag

MOST_RUNS = 8  # as many as there are colours

_KIND_COLORS = {name: n for n, name in enumerate(goodput.CLASSES)}
_WORDS = {
    "productive": "steps that are part of the run",
    "compile": "compiling the step",
    "data_wait": "waiting for a batch",
    "checkpoint": "waiting for a save",
    "evaluation": "evaluating held-out data",
    "restart": "from the start of a process to its first step",
    "lost": "steps that were made again after a start",
    "rewound": "steps that a guard has given up",
    "down": "no process was there",
}


def report(runs: Sequence[RunFolder], defaults: dict[str, Any]) -> str:
    """Returns the page about some runs.

    Args:
      defaults: key -> value of a recipe that says nothing.
    """
    title = "Run " + runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    sections = [
        _section("What is missing", _missing(runs)),
        _section("Summary", _summary(runs)),
        _section("Loss", _charts(runs, _LOSS + _skipped(runs))),
        _section("Throughput", _charts(runs, _THROUGHPUT + _mfu(runs))),
        _section("Balance of attention", _evenness(runs)),
        _section("Goodput", _goodput(runs)),
        _section("Balance of experts", _balance(runs)),
        _section("Recipe", recipe(runs, defaults)),
        _section("Plan, checks and evaluation", documents(runs)),
        _section("Checkpoints", checkpoints(runs)),
        _section("Pictures", pictures(runs)),
    ]
    status = [tag("p", dot(n, runs), tag("b", run.name), ": ", run.status()) for n, run in enumerate(runs)]
    return page(title, tag("h1", title), status, tag("p", f"This page was made at {now}.", class_="soft"), sections)


def _section(title: str, *content: Any) -> Markup:
    return tag("section", tag("h2", title), *content, id=title.split(",")[0].lower().replace(" ", "-"))


def _missing(runs: Sequence[RunFolder]) -> Any:
    def of(run: RunFolder) -> Markup:
        if not run.missing:
            return tag("p", "Nothing: every file was there and could be read.")
        return tag("ul", [tag("li", what) for what in run.missing], class_="bad")

    return headed(runs, of)


_CARDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("steps", "steps", "{:,.0f}".format),
    ("loss_first", "loss of the first step", "{:.4f}".format),
    ("loss_last", "loss, mean of the last ten", "{:.4f}".format),
    ("tokens_per_second", "tokens/s", "{:,.0f}".format),
    ("step_time", "s a step, median", text_of),
    ("tflops_per_device", "TFLOP/s a device", text_of),
    ("mfu_causal", "MFU, pairs of the mask", "{:.1%}".format),
    ("mfu_full", "MFU, T × T", "{:.1%}".format),
    ("parameters", "parameters", "{:,.0f}".format),
    ("devices", "devices", "{:,.0f}".format),
)


def _summary(runs: Sequence[RunFolder]) -> Any:
    if not any(run.summary for run in runs):
        return tag("p", "There is no summary.json; the charts below are of the steps that have been made.")
    cards = []
    if len(runs) == 1:
        s = runs[0].summary
        for key, label, write in _CARDS:
            if math.isfinite(number(s.get(key))):
                cards.append(
                    tag("div", tag("b", write(number(s[key]))), tag("span", label), class_="card", title=exact(s[key]))
                )
        if runs[0].goodput:
            share = goodput.account(runs[0].goodput).fraction
            cards.append(tag("div", tag("b", f"{share:.1%}"), tag("span", "goodput"), class_="card"))
    keys = list(dict.fromkeys(key for run in runs for key in run.summary))
    rows = [
        [key, *(tag("td", exact(run.summary[key]) if key in run.summary else "–", data_key=key) for run in runs)]
        for key in keys
    ]
    head = ["", *(run.name for run in runs)] if len(runs) > 1 else []
    return tag("div", cards, class_="cards") if cards else "", tag(
        "details", tag("summary", "All of summary.json"), table(head, rows), open=""
    )


def _of_rows(runs: Sequence[RunFolder], value: Callable[[dict[str, Any]], Any]) -> list[Series]:
    return [
        Series.of(run.name, [row["step"] for row in run.rows], [value(row) for row in run.rows], n)
        for n, run in enumerate(runs)
        if run.rows
    ]


# Title, unit, value of a row, how it is drawn.
_Chart = tuple[str, str, Callable[[dict[str, Any]], Any], dict[str, Any]]


def _key(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda row: row.get(name)


_LOSS: list[_Chart] = [
    ("Loss", "cross entropy, nats per token", _key("loss"), {"smooth": True, "wide": True}),
    (
        "Loss, closer",
        "without the highest and the lowest of every hundred",
        _key("loss"),
        {"smooth": True, "wide": True, "closer": True},
    ),
    ("Gradient norm", "before clipping", _key("grad_norm"), {}),
    ("Learning rate", "", _key("learning_rate"), {"zero": True}),
]
_THROUGHPUT: list[_Chart] = [
    ("Throughput", "tokens/s", _key("tokens_per_second"), {"zero": True}),
    ("Time of a step", "s", _key("step_time"), {}),
]


_EVEN: list[_Chart] = [
    ("Over a sequence", "attention of the busiest rank over the mean", _key("imbalance_sp"), {}),
    ("Over the batch", "attention of the busiest group over the mean", _key("imbalance_dp"), {}),
    ("Hops of a ring", "that the documents of a step need", _key("hops_sp"), {"zero": True}),
    ("Along a sequence", "bytes that a device sends in a step", _key("bytes_sp"), {"zero": True}),
    ("Passes of a group-cast", "that the documents of a step need", _key("passes_sp"), {"zero": True}),
    ("Padding", "share of tokens", _key("padding_share"), {"zero": True}),
]


def _evenness(runs: Sequence[RunFolder]) -> Any:
    """Returns the charts of how even attention is, if a run has them."""
    if not any("imbalance_sp" in row for run in runs for row in run.rows[-1:]):
        return tag("p", "metrics.jsonl does not say how even attention is.")
    return _charts(runs, _EVEN)


def _skipped(runs: Sequence[RunFolder]) -> list[_Chart]:
    """Returns the chart of updates that were not applied, where a guard watches them."""
    watched = any("skipped" in row for run in runs for row in run.rows[:1])
    return [("Skipped updates", "1 where a guard has skipped it", _key("skipped"), {"zero": True})] if watched else []


def _mfu(runs: Sequence[RunFolder]) -> list[_Chart]:
    """Returns the chart of the MFU of each step, where a summary says what the peak is."""
    peak, devices = (number(runs[0].summary.get(name)) for name in ("peak_tflops_per_device", "devices"))
    if len(runs) > 1 or not peak * devices > 0:
        return []

    def mfu(row: dict[str, Any]) -> float:
        # Its own devices: a run may go on with another mesh. Older rows, without it, count as the summary's.
        seconds, used = number(row.get("step_time")), number(row.get("devices", devices))
        return (
            number(row.get("flops_causal")) / seconds / (peak * used * 1e12) * 100 if seconds * used > 0 else math.nan
        )

    return [("MFU", "% of the peak, attention counted by the pairs of the mask", mfu, {"zero": True})]


def _charts(runs: Sequence[RunFolder], charts: Sequence[_Chart]) -> Any:
    if not any(run.rows for run in runs):
        return tag("p", "No step has been made.")
    return tag(
        "div", [chart(title, unit, _of_rows(runs, of), **how) for title, unit, of, how in charts], class_="charts"
    )


# -- goodput --------------------------------------------------------------------------------------------------------------


def _goodput(runs: Sequence[RunFolder]) -> Any:
    def of(run: RunFolder) -> Any:
        if not run.goodput:
            return tag("p", f"There is no {goodput.NAME}.")
        account = goodput.account(run.goodput)
        spent = {name: getattr(account, name) for name in goodput.CLASSES if getattr(account, name) > 0}
        whole = account.wall or 1.0
        bar = [
            tag(
                "div",
                title=f"{name.replace('_', ' ')}: {_seconds(s)}",
                style=f"flex:{s / whole:.6f};background:var(--c{_KIND_COLORS[name]})",
            )
            for name, s in spent.items()
        ]
        dot = {name: tag("i", class_="dot", style=f"background:var(--c{_KIND_COLORS[name]})") for name in spent}
        rows = [
            [
                name.replace("_", " "),
                [dot[name], _WORDS.get(name, "")],
                tag("td", _seconds(s), data_key=name),
                f"{s / whole:.1%}",
            ]
            for name, s in spent.items()
        ]
        rewinds = (
            f", {account.rewinds} time{'' if account.rewinds == 1 else 's'} back to an earlier step"
            if account.rewinds
            else ""
        )
        starts = f"{account.starts} start{'' if account.starts == 1 else 's'}"
        sentence = f"{account.fraction:.1%} of {_seconds(account.wall)} were productive, in {starts}{rewinds}."
        return tag("p", sentence), tag("div", bar, class_="bar"), table(["", "", "time", "share"], rows), _hosts(run)

    return headed(runs, of)


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


# Seconds a step: what the ledger calls them, and the heads of columns.
_OF_HOSTS = {
    "step_time": "s a step",
    "host": "own time",
    "data_wait": "waiting for data",
    "waits": "waiting for others and devices",
}


def _hosts(run: RunFolder) -> Any:
    """Returns what each host needed for itself, by the last row that says so, and how often it was slow."""
    reports = [row for row in run.goodput if isinstance(row.get("hosts"), dict)]
    if not reports:
        return ""
    last = reports[-1]
    slow = [str(host) for row in reports for host in (row["slow"] if isinstance(row.get("slow"), list) else [])]
    rows = []
    median = {f"median of {last.get('of')}": last["median"]} if isinstance(last.get("median"), dict) else {}
    for host, needed in ({f"host {host}": times for host, times in last["hosts"].items()} | median).items():
        needed = needed if isinstance(needed, dict) else {}
        times = [text_of(number(needed[name])) if name in needed else "–" for name in _OF_HOSTS]
        often = f"{slow.count(host.removeprefix('host '))} of {len(reports)}" if host not in median else ""
        rows.append([host, *times, often])
    head = [f"at step {last.get('step')}", *_OF_HOSTS.values(), "times that it was slow"]
    return tag("h3", "Hosts"), table(head, rows)


# -- experts --------------------------------------------------------------------------------------------------------------

_EXPERTS = (
    ("experts/max_violation", "Largest load", "over the mean load, less 1"),
    ("experts/rank_violation", "Largest load of a device", "over the mean load, less 1"),
    ("experts/entropy", "Entropy of the router", "nats"),
    ("experts/balance_loss", "Balance loss", "unweighted"),
    ("experts/z_loss", "Router z loss", "unweighted"),
    ("experts/dead_experts", "Dead experts", "experts of a layer without a token"),
    ("experts/dropped_fraction", "Dropped", "share of choices"),
    ("experts/extra_passes", "Extra passes", "a step"),
    ("experts/buffer_high_water", "Fullest place", "rows over room"),
)


def _balance(runs: Sequence[RunFolder]) -> Any:
    mixed = [run for run in runs if any("experts/" in key for row in run.rows[:1] for key in row)]
    if not mixed:
        return tag("p", "No metric of experts is in metrics.jsonl: the model has none.")
    note = "mean over layers, from the smallest to the largest"
    charts = []
    for key, title, unit in _EXPERTS:
        series = _of_rows(runs, _key(key))
        if any(key in row for run in mixed for row in run.rows[:1]):
            charts.append(chart(title, unit, series, zero=True, note=note))
    return tag("div", charts, class_="charts"), headed(mixed, _load)


def _load(run: RunFolder) -> Any:
    """Returns a map of the tokens of each expert in each layer, of the last row that has them."""
    row = next((row for row in reversed(run.rows) if isinstance(row.get("experts/counts"), list)), None)
    counts = (
        [[number(c) for c in layer] for layer in row["experts/counts"] if isinstance(layer, list) and layer]
        if row
        else []
    )
    if row is None or not counts:
        return tag("p", "No row has the tokens of each expert (experts.load_every).")
    cells = sum(map(len, counts))
    if cells > _MOST_CELLS:
        return tag("p", f"The load of {cells:,} experts in all layers is too large to draw here; experts.png has it.")
    body = []
    for n, layer in enumerate(counts):
        mean = sum(layer) / len(layer)
        body.append(
            tag("tr", tag("th", f"layer {n}", scope="row"), [_cell(n, e, c, mean) for e, c in enumerate(layer)])
        )
    caption = (
        f"Tokens of each expert at step {row['step']:,}: without colour none, full colour twice their mean, or more."
    )
    return tag("h3", "Load"), tag("p", caption, class_="soft"), tag("table", tag("tbody", body), class_="heat")


_MOST_CELLS = 4096


def _cell(layer: int, expert: int, count: float, mean: float) -> Markup:
    share = min(count / mean / 2, 1.0) if mean > 0 and math.isfinite(count) else 0.0
    title = f"layer {layer}, expert {expert}: {count:,.0f} tokens, {count / mean if mean > 0 else 0:.2f} of the mean"
    return tag("td", style=f"background:color-mix(in srgb, var(--c1) {share:.0%}, var(--back))", title=title)
