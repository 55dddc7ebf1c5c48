"""The curves of a run as SVG drawings that take their colours and fonts from the page around them."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from multipod.train.observers import text
from multipod.train.observers.history import RunHistory

POINTS = 2000
"""No curve is drawn with more points than this."""

COLUMNS, ROWS = 80, 16
"""Columns of a heat map, and rows of it that are named."""

Points = tuple[np.ndarray, np.ndarray]
"""x and y of a curve."""

# Colours that stand in the drawings for variables of the page's style sheet, which knows light from dark.
_INK, _FAINT, _TRAIN, _TEST, _DATA = "#010101", "#020202", "#030303", "#040404", "#050505"
_VARIABLES = {_INK: "muted", _FAINT: "line", _TRAIN: "train", _TEST: "test", _DATA: "data"}


@dataclass(frozen=True)
class Chart:
    """A drawing with its heading, its legend (name of a colour, text) and what to know about it."""

    title: str
    legend: list[tuple[str, str]]
    svg: Markup
    notes: list[str]
    wide: bool


def draw(history: RunHistory) -> list[Chart]:
    """A chart of each value, `loss` and `accuracy` first, and one of the step time; values in parts as heat maps.

    Values of updates that are named NAME/PART, such as the load of every expert, `load/encoder/1/3`, share one map of
    that NAME. Those that only evaluations have, such as the metrics of one task of several, are charts.
    """
    values = [e.values for e in history.updates] + [e.values for e in history.evaluations]
    every = list(dict.fromkeys(name for named in values for name in named))
    in_updates = {name for event in history.updates for name in event.values}
    names = [name for name in every if "/" not in name or (history.updates and name not in in_updates)]
    maps: dict[str, list[str]] = {}
    for name in every:
        if "/" in name and name in in_updates:
            maps.setdefault(name.split("/")[0], []).append(name)
    names.sort(key=lambda name: (name != "loss", name != "accuracy"))
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not what the user's matplotlibrc says: a page depends on its folder alone
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "multipod"})
        # Two stand side by side; an odd one takes the whole width.
        charts = [_value_chart(name, history, len(names) % 2 == 1 and name == names[0]) for name in names]
        charts += [_heat_map(name, parts, history) for name, parts in maps.items() if history.updates]
        return [*charts, _time_chart(history)] if history.updates else charts


def _value_chart(name: str, history: RunHistory, wide: bool) -> Chart:
    """A value over the updates, in training and on the test examples."""
    train = _series([e for e in history.updates if name in e.values], lambda event: event.values[name])
    test = _series([e for e in history.evaluations if name in e.values], lambda event: event.values[name])
    figure, axes = _axes(wide, history)
    legend, notes = [], []
    if len(train[0]):
        calm = _curve(axes, *train, _TRAIN, _running_mean, "mean of the last {:,}")
        legend.append(("train", f"training{calm}"))
    if len(test[0]):
        size = 3.2 if len(test[0]) < 60 else 0
        axes.plot(*thinned(*test), color=_TEST, linewidth=1.4, marker="o", markersize=size)
        legend.append(("test", "test"))
    every = np.concatenate([train[1], test[1]])
    if name == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.005))
    elif _spans_decades(every):
        axes.set_yscale("log")
        notes.append("logarithmic scale")
    notes += _not_finite(*train)
    return Chart(name, legend, _svg(figure, name), notes, wide)


def _heat_map(name: str, parts: list[str], history: RunHistory) -> Chart:
    """A row for each part, a column for each of at most `COLUMNS` stretches of updates; the darker, the larger."""
    events = [event for event in history.updates if parts[0] in event.values]
    stretches = np.array_split(np.arange(len(events)), min(COLUMNS, len(events)))
    table = np.array([[event.values.get(part, math.nan) for event in events] for part in parts])
    means = np.stack([table[:, stretch].mean(1) for stretch in stretches], 1)
    low, high = (float(function(means[np.isfinite(means)], initial=0)) for function in (np.min, np.max))
    figure, axes = _axes(True, history)
    axes.grid(visible=False)
    ends = [events[0].update - 1, *(events[stretch[-1]].update for stretch in stretches)]
    shades = LinearSegmentedColormap.from_list(name, [(*to_rgb(_TRAIN), 0.0), (*to_rgb(_TRAIN), 1.0)])
    axes.pcolormesh(ends, np.arange(len(parts) + 1), means, cmap=shades, vmin=low, vmax=high or 1)
    shown = range(0, len(parts), -(-len(parts) // ROWS))
    axes.set_yticks([row + 0.5 for row in shown], [parts[row].partition("/")[2] for row in shown])
    axes.invert_yaxis()
    return Chart(name, [("train", f"from {low:.3g} (clear) to {high:.3g}")], _svg(figure, name), [], wide=True)


def _time_chart(history: RunHistory) -> Chart:
    """Milliseconds of each update, and how many of them went by waiting for data."""
    timed = [event for event in history.timed if math.isfinite(event.step_s + event.data_s)]
    step = _series(timed, lambda event: 1000 * event.step_s)
    wait = _series(timed, lambda event: 1000 * event.data_s)
    figure, axes = _axes(True, history)
    axes.fill_between(*thinned(*wait), color=_DATA, alpha=0.55, linewidth=0)
    calm = _curve(axes, *step, _TRAIN, _medians, "median of each {:,}")
    median, high, top = (float(np.percentile(step[1], share)) if timed else 0.0 for share in (50, 99, 100))
    limit = max(2 * median, 1.25 * high)
    axes.set_ylim(0, 1.05 * min(top, limit) or 1.0)
    axes.set_ylabel("ms", color=_INK, fontsize=8)
    notes = [f"median {text.milliseconds(median / 1000)}"]
    above = int((step[1] > 1.05 * limit).sum())
    if above:
        longest = text.duration(top / 1000) if top >= 1000 else text.milliseconds(top / 1000)
        notes.append(f"{above:,} above the frame, the longest {longest}")
    if len(history.timed) < len(history.updates):
        notes.append("without the first update of a process")
    legend = [
        ("train", f"step{calm}"),
        ("data", f"of it waiting for data: {text.percent(history.data_share)} of the time"),
    ]
    return Chart("step time", legend, _svg(figure, "time"), notes, wide=True)


def draw_precisions(curves: Mapping[str, Mapping[str, Sequence[float]]], what: str) -> list[Chart]:
    """A precision-recall chart of each kind, `box` or `mask`: by IoU, 101 precisions at recalls from 0 to 1."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "multipod"})
        return [_precision_chart(kind, named, what, wide=len(curves) == 1) for kind, named in curves.items()]


def _precision_chart(kind: str, named: Mapping[str, Sequence[float]], what: str, wide: bool) -> Chart:
    figure, axes = _blank_axes(wide)
    legend = []
    for (name, precisions), colour in zip(named.items(), (_TRAIN, _DATA, _TEST), strict=False):
        axes.plot(np.linspace(0, 1, len(precisions)), precisions, color=colour, linewidth=1.4)
        legend.append((_VARIABLES[colour], f"IoU {name}: average {np.mean(precisions):.3f}"))
    axes.set(xlim=(0, 1.01), ylim=(0, 1.02))
    axes.set_xlabel("recall", fontsize=8, color=_INK)
    axes.set_ylabel("precision", fontsize=8, color=_INK)
    return Chart(f"precision of {kind}es" if kind == "box" else f"precision of {kind}s", legend,
                 _svg(figure, f"precision-{kind}"), [what], wide)  # fmt: skip


def _series(events: Sequence[Any], value: Callable[[Any], float]) -> Points:
    return np.array([e.update for e in events], float), np.array([value(e) for e in events], float)


def _blank_axes(wide: bool) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9.3 if wide else 4.5, 2.6), layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.grid(axis="y", color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", which="both", colors=_INK, labelsize=8, length=0)
    return figure, axes


def _axes(wide: bool, history: RunHistory) -> tuple[Figure, Axes]:
    figure, axes = _blank_axes(wide)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8 if wide else 5, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("update", fontsize=8, color=_INK)
    axes.set_xlim(0, max(1.02 * history.update, 2))
    for update in history.resumed:
        axes.axvline(update, color=_INK, linewidth=0.9, linestyle=(0, (1, 2)))
    return figure, axes


def _curve(
    axes: Axes,
    x: np.ndarray,
    y: np.ndarray,
    colour: str,
    calmed: Callable[[np.ndarray, np.ndarray, int], Points],
    what: str,
) -> str:
    """Draws a curve as it is, and from 150 points on also `calmed` by windows of a fiftieth of them.

    Returns what the legend should add: `what` with the window's width.
    """
    if len(x) < 150:
        mark = "o" if len(x) < 3 else ""
        axes.plot(*thinned(x, y), color=colour, linewidth=1.4, marker=mark, markersize=4)
        return ""
    window = max(5, len(x) // 50)
    axes.plot(*thinned(x, y), color=colour, linewidth=0.6, alpha=0.35 if len(x) <= POINTS else 0.2)
    axes.plot(*thinned(*calmed(x, y, window)), color=colour, linewidth=1.4)
    return f" (bold: {what.format(window)} updates)"


def _running_mean(x: np.ndarray, y: np.ndarray, window: int) -> Points:
    return x[window - 1 :], np.convolve(y, np.full(window, 1 / window), mode="valid")


def _medians(x: np.ndarray, y: np.ndarray, window: int) -> Points:
    """The median of each stretch of `window` points, at its middle; an incomplete last one is left out."""
    stretches = len(x) // window
    whole = stretches * window
    middles = x[:whole].reshape(stretches, window).mean(1)
    return middles, np.median(y[:whole].reshape(stretches, window), axis=1)


def thinned(x: np.ndarray, y: np.ndarray, points: int = POINTS) -> Points:
    """At most `points` of a curve: its ends, and the least and the greatest of each of equal stretches."""
    if len(x) <= points:
        return x, y
    stretches = np.array_split(np.arange(len(x)), points // 2 - 1)
    least = [part[np.argmin(np.where(np.isnan(y[part]), np.inf, y[part]))] for part in stretches]
    greatest = [part[np.argmax(np.where(np.isnan(y[part]), -np.inf, y[part]))] for part in stretches]
    kept = np.unique([0, len(x) - 1, *least, *greatest])
    return x[kept], y[kept]


def _spans_decades(values: np.ndarray) -> bool:
    finite = values[np.isfinite(values)]
    return len(finite) > 1 and finite.min() > 0 and finite.max() / finite.min() > 30


def _not_finite(x: np.ndarray, y: np.ndarray) -> list[str]:
    bad = x[~np.isfinite(y)]
    return [f"not finite at {len(bad):,} updates, first at update {bad[0]:,.0f}"] if len(bad) else []


def _svg(figure: Figure, name: str) -> Markup:
    """The drawing as markup for a page: colours are variables, the font is the page's, ids are its own."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(["Date", "Creator", "Format", "Type"])
    figure.savefig(buffer, format="svg", metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    own = re.sub(r"\W", "-", name)
    svg = re.sub(r' id="([^"]*)"', rf' id="{own}-\1"', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{own}-", svg)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    opening = f'<svg {box[0]} role="img" aria-label="{Markup.escape(name)} over updates">'
    return Markup(opening + svg[svg.index(">") + 1 :])
