"""Charts of numbers over steps, as SVG. They stretch with the page, and labels stand beside them as text of its own size.

Of many steps a chart draws at most `MOST` places, each from the smallest to the largest number of its steps, with their mean:
no peak is lost, and a run of any length makes a small page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launch.reporting.html import Markup, tag

MOST = 400
_HOVERS = 80  # columns with tooltips
_MOST_NUMBER = 1e300  # a larger number has no scale, and no run has one
_SIDE = 1000.0  # of the drawing, whatever its size on the page
_SMOOTHED = 25  # a running mean is over the 25th part of a curve
_WIDE_RANGE = 30.0  # ratio of largest to smallest beyond which a scale is logarithmic


@dataclass(frozen=True)
class Series:
    """One curve: its numbers, all [N]. `low` and `high` are those of several at each place, as of layers; else `middle`."""

    label: str
    x: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray
    color: int = 0

    @classmethod
    def of(cls, label: str, x: Sequence[float], values: Sequence[Any], color: int = 0) -> Series:
        """Returns the curve of numbers, or of lists of numbers; anything else is a gap."""
        try:
            whole = np.array(values, float).reshape(len(values), -1)  # None is nan
            whole[~(np.abs(whole) < _MOST_NUMBER).all(axis=1)] = math.nan
            low, middle, high = whole.min(axis=1), whole.mean(axis=1), whole.max(axis=1)
            return cls(label, np.asarray(x, float), middle, low, high, color)
        except (ValueError, TypeError, OverflowError):  # a word, a list among numbers, or lists of several lengths
            parts = [_numbers(v) for v in values]
        low, middle, high = (
            np.array([how(p) if p.size else math.nan for p in parts]) for how in (np.min, np.mean, np.max)
        )
        return cls(label, np.asarray(x, float), middle, low, high, color)

    def reduced(self, first: float, last: float) -> tuple[Series, int]:
        """Returns the curve with at most MOST places between two ends, and how many numbers the fullest place is of."""
        if len(self.x) <= MOST:
            return self, 1
        place = np.minimum(((self.x - first) / (last - first) * MOST).astype(int), MOST - 1)
        used, index = np.unique(place, return_inverse=True)
        counts = np.bincount(index)
        low, high = np.full(len(used), math.inf), np.full(len(used), -math.inf)
        good = np.isfinite(self.middle)
        np.minimum.at(low, index[good], self.low[good])
        np.maximum.at(high, index[good], self.high[good])
        number = np.bincount(index[good], minlength=len(used))
        with np.errstate(invalid="ignore", divide="ignore"):
            middle = np.bincount(index[good], self.middle[good], len(used)) / number
        low[number == 0] = high[number == 0] = math.nan
        x = np.bincount(index, self.x) / counts
        return Series(self.label, x, middle, low, high, self.color), int(counts.max())


def _numbers(value: Any) -> np.ndarray:
    flat = value if isinstance(value, list) else [value]
    whole = all(isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < _MOST_NUMBER for v in flat)
    return np.array(flat, float) if whole and flat else np.empty(0)


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the mean of each number and those before it, `width` in all, without gaps."""
    good = np.isfinite(values)
    total, count = (np.concatenate(([0.0], np.cumsum(a))) for a in (np.where(good, values, 0), good))
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - width, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(good, (total[last] - total[first]) / (count[last] - count[first]), math.nan)


@dataclass(frozen=True)
class Scale:
    """From numbers to 0 ... 1."""

    first: float
    last: float
    log: bool = False

    def __call__(self, value: Any) -> Any:
        if self.log:
            return np.log(np.asarray(value) / self.first) / math.log(self.last / self.first)
        return (np.asarray(value) - self.first) / (self.last - self.first)

    def ticks(self, most: int) -> list[float]:
        """Returns round numbers on it."""
        if self.log:
            powers = range(math.floor(math.log10(self.first)), math.ceil(math.log10(self.last)) + 1)
            for factors in ((1, 2, 5), (1, 3), (1,)):
                values = [f * 10.0**p for p in powers for f in factors if self.first <= f * 10.0**p <= self.last]
                if len(values) <= most + 2:
                    break
            return values if len(values) <= most + 2 else values[:: math.ceil(len(values) / most)]
        rough = (self.last - self.first) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * (1 - 1e-9))
        start = math.ceil(self.first / step - 1e-9)
        return [n * step for n in range(start, math.floor(self.last / step + 1e-9) + 1)]


def _scale(values: np.ndarray, zero: bool, of: tuple[float, float] = (0, 100)) -> Scale:
    """Returns the scale of numbers between two of their percentiles."""
    low, high = (float(v) for v in np.percentile(values, of))
    if low > 0 and high / low > _WIDE_RANGE and not zero:
        return Scale(low / 1.05, high * 1.05, log=True)
    low = min(low, 0.0) if zero else low
    if not high > low + 1e-9 * max(abs(high), abs(low)):
        pad = abs(low) * 0.1 or 1.0
        return Scale(low if zero else low - pad, high + pad)
    pad = (high - low) * 0.05
    return Scale(low if zero else low - pad, high + pad)


def text_of(value: float) -> str:
    """Returns a number as people write it: 1.23M, 45.6k, 0.0123, 3e-05."""
    size = abs(value)
    if not math.isfinite(value) or size == 0:
        return "0" if size == 0 else str(value)
    for least, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= least:
            return f"{value / (1e3 if unit == 'k' else least):.4g}{unit}"
    return f"{value:.4g}"


def chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    *,
    zero: bool = False,
    smooth: bool = False,
    closer: bool = False,
    wide: bool = False,
    note: str = "",
) -> Markup:
    """Returns a figure.

    Args:
      unit: of the numbers, for the caption.
      zero: the axis begins at 0, and is not logarithmic.
      closer: without the highest and the lowest of every hundred numbers, where they hide the others; else nothing is drawn.
      smooth: if a point is one step, the points are thin and a running mean is drawn over them.
    """
    drawn = [s for s in series if np.isfinite(s.middle).any()]
    if not drawn:
        return tag("figure", tag("figcaption", tag("b", title), " has no number"))
    ends = [float(f(s.x)) for f in (np.min, np.max) for s in drawn]
    across = Scale(min(ends), max(ends) if max(ends) > min(ends) else min(ends) + 1)
    every = np.concatenate([v[np.isfinite(v)] for s in drawn for v in (s.low, s.high)])
    up = _scale(every, zero)
    if closer:
        whole, up = up, _scale(every, zero, (1, 99))
        if whole.last - whole.first < 3 * (up.last - up.first):
            return Markup()
    parts, most = [], 1
    for value in up.ticks(5):
        y = _y(up, value)
        parts.append(tag("path", d=f"M0 {y:.1f}H{_SIDE:g}", class_="grid"))
    reduced = []
    for s in drawn:
        small, of = s.reduced(across.first, across.last)
        most = max(most, of)
        reduced.append(small)
        parts += _curves(small, across, up, smooth and of == 1) + _holes(s, across)
    parts += _hovers(drawn, across)
    labels = [tag("span", text_of(v), class_="tick y", style=f"top:{_y(up, v) / 10:.2f}%") for v in up.ticks(5)]
    labels += [
        tag("span", f"{v:,.0f}", class_="tick x", style=f"left:{float(across(v)) * 100:.2f}%")
        for v in across.ticks(4)
        if v == round(v)
    ]
    says = [unit] if unit else []
    says += ["logarithmic"] if up.log else []
    says += [note] if note else []
    says += [f"mean and range of up to {most:,} steps"] if most > 1 else []
    says += (
        ["thin: each step, thick: running mean"] if smooth and max(len(s.x) for s in reduced) >= 2 * _SMOOTHED else []
    )
    svg = tag(
        "svg",
        parts,
        viewBox=f"0 0 {_SIDE:g} {_SIDE:g}",
        preserveAspectRatio="none",
        role="img",
        aria_label=title,
        style="overflow:hidden" if closer else None,
    )
    keys = [
        tag("span", tag("i", style=f"background:var(--c{s.color})"), s.label, class_="key")
        for s in drawn
        if len(series) > 1
    ]
    caption = tag("figcaption", tag("b", title), f" {', '.join(says)}" if says else "")
    plot = tag("div", svg, labels, tag("span", "step", class_="tick of"), class_="plot")
    return tag(
        "figure", caption, plot, tag("div", keys, class_="keys") if keys else "", class_="wide" if wide else None
    )


def _y(up: Scale, value: Any) -> Any:
    return _SIDE * (1 - up(value))


def _path(x: np.ndarray, y: np.ndarray) -> str:
    """Returns the d of a line that is broken at gaps; a number alone is a dot."""
    words, joined = [], False
    for px, py in zip(x, y, strict=True):
        if not math.isfinite(py):
            joined = False
            continue
        words.append(f"{'L' if joined else 'M'}{px:.1f} {py:.1f}" + ("" if joined else "h0"))
        joined = True
    return "".join(words)


def _curves(s: Series, across: Scale, up: Scale, smooth: bool) -> list[Markup]:
    x, color = _SIDE * across(s.x), f"stroke:var(--c{s.color})"
    paths = []
    if (s.high > s.low).any():
        for part in _unbroken(np.isfinite(s.middle)):
            top, low = _y(up, s.high[part]), _y(up, s.low[part])
            corners = [*zip(x[part], top, strict=True), *zip(x[part][::-1], low[::-1], strict=True)]
            if len(corners) > 2:
                d = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in corners) + "Z"
                paths.append(tag("path", d=d, class_="band", style=f"fill:var(--c{s.color});{color}"))
    y = _y(up, s.middle)
    width = max(1, len(s.x) // _SMOOTHED)
    if smooth and width > 1:
        paths.append(tag("path", d=_path(x, y), class_="curve thin", style=color))
        y = _y(up, running_mean(s.middle, width))
    paths.append(tag("path", d=_path(x, y), class_="curve", style=color))
    return paths


def _holes(s: Series, across: Scale) -> list[Markup]:
    """Returns marks at the steps that have no number, even where neighbours share their place."""
    positions = np.unique(np.round(_SIDE * across(s.x[~np.isfinite(s.middle)])))
    lines = "".join(f"M{px:g} 0V{_SIDE:g}" for px in positions)
    return [tag("path", tag("title", f"{s.label}: no number here"), d=lines, class_="hole")] if lines else []


def _unbroken(good: np.ndarray) -> list[slice]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], good.astype(int), [0]))))
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _hovers(series: Sequence[Series], across: Scale) -> list[Markup]:
    """Returns invisible columns that show the numbers below the pointer."""
    edges = np.linspace(across.first, across.last, _HOVERS + 1)
    edges[-1] = math.inf
    bounds = [np.searchsorted(s.x, edges) for s in series]
    columns = []
    for n in range(_HOVERS):
        lines = []
        for s, indices in zip(series, bounds, strict=True):
            part = slice(indices[n], indices[n + 1])
            good = np.isfinite(s.middle[part])
            if not good.any():
                continue
            x, mean = s.x[part], s.middle[part][good].mean()
            low, high = s.low[part][good].min(), s.high[part][good].max()
            where = f"step {x[0]:,.0f}" if len(x) == 1 else f"steps {x[0]:,.0f} to {x[-1]:,.0f}"
            spread = f" ({text_of(low)} to {text_of(high)})" if high > low else ""
            lines.append(f"{s.label}, {where}: {text_of(mean)}{spread}")
        if lines:
            box = {"x": f"{n * _SIDE / _HOVERS:g}", "y": "0", "width": f"{_SIDE / _HOVERS:g}", "height": f"{_SIDE:g}"}
            columns.append(tag("rect", tag("title", "\n".join(lines)), **box, class_="hover"))
    return columns
