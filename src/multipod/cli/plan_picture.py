"""Pictures of `multipod plan --draw`: a step's parts by layout, and what more chips gain and cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from multipod.plan.predict import Prediction
    from multipod.plan.run import RunPrediction

COLORS = {
    "compute": "C0", "collectives": "C1", "update": "C2", "input": "C3", "evaluation": "C4", "copies": "C5",
    "idle": "0.7",
}  # fmt: skip
"""Of a step's parts, the same in every picture."""


def draw_layouts(steps: Sequence["Prediction"], words: Sequence[str], name: str, file: Path) -> None:
    """One bar for each layout, of the parts of its step; the quickest on top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.4 + 0.34 * len(steps)), layout="constrained")
    axes = figure.add_subplot()
    _bars(axes, steps, across=True)
    for place, step in enumerate(steps):
        axes.text(1e3 * step.step_s, place, f" {1e3 * step.step_s:.3g} ms", va="center", fontsize="small")
    axes.set_yticks(range(len(steps)), words, fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="step, ms", title=name)
    figure.legend(fontsize="small", loc="outside right upper")
    _save(figure, file)


def draw_scaling(
    steps: Sequence["Prediction"], chips: Sequence[int], runs: Sequence["RunPrediction"], name: str, file: Path
) -> None:
    """What more chips gain: the step's parts, examples a second, and, if `runs` are known, their time and price."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * (2 + bool(runs)), 4), layout="constrained")
    panels = list(figure.subplots(1, 2 + bool(runs)))
    _bars(panels[0], steps)
    panels[0].set_xticks(range(len(steps)), [f"{count:,}" for count in chips], fontsize="small")
    panels[0].set(xlabel="chips", ylabel="step, ms", title=name)
    panels[0].legend(fontsize="small")
    rate = steps[0].examples_per_s / chips[0]
    panels[1].plot(chips, [step.examples_per_s for step in steps], "o-", label="predicted")
    panels[1].plot(chips, [count * rate for count in chips], "--", color="0.6", label="linear")
    panels[1].set(xscale="log", yscale="log", xlabel="chips", ylabel="examples a second")
    panels[1].legend()
    if runs:
        _runs(panels[2], chips, runs)
    _save(figure, file)


def _runs(axes: Any, chips: Sequence[int], runs: Sequence["RunPrediction"]) -> None:
    """Time to the target over chips; or, with prices, over the price: what is both dearer and slower is hollow."""
    seconds, price = np.array([run.seconds for run in runs]), np.array([run.price for run in runs])
    unit, name = (3600, "hours") if seconds.max() > 2 * 3600 else (60, "minutes")
    time, label = seconds / unit, f"{name} to the target"
    if not price.all():
        axes.plot(chips, time, "o-")
        axes.set(xscale="log", yscale="log", xlabel="chips", ylabel=label)
        return
    axes.plot(price, time, "-", color="0.8", zorder=0)
    for a, b, count in zip(price, time, chips, strict=True):
        beaten = np.any((price < a) & (time <= b))
        axes.plot(a, b, "o", color="C0", markerfacecolor="none" if beaten else "C0")
        axes.annotate(f"{count:,}", (a, b), textcoords="offset points", xytext=(5, 4), fontsize="small")
    axes.margins(x=0.1, y=0.1)
    axes.set(yscale="log", xlabel="price of the run", ylabel=label, title="by number of chips")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")


def _bars(axes: Any, steps: Sequence["Prediction"], across: bool = False) -> None:
    """Stacked parts, in ms, at places 0, 1, ..., upwards or `across`; parts that no step has are left out."""
    draw, start = (axes.barh, "left") if across else (axes.bar, "bottom")
    parts = [step.split() for step in steps]
    ends = np.zeros(len(steps))
    for part in parts[0]:
        sizes = 1e3 * np.array([one[part] for one in parts])
        if sizes.any():
            draw(range(len(steps)), sizes, label=WORDS.get(part, part), color=COLORS[part], **{start: ends})
            ends = ends + sizes


WORDS = {"collectives": "sums"}
"""Parts that tables call otherwise."""


def _save(figure: Any, file: Path) -> None:
    figure.savefig(file, bbox_inches="tight", metadata={"Date": None} if file.suffix == ".svg" else None)
