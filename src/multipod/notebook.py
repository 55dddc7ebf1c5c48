"""How values draw themselves in a notebook: small pieces of HTML without scripts, in light and in dark.

A class has a method `_repr_html_` that returns a `card` of rows and of what else helps to see it at a glance. All text
is escaped here; what the functions return is HTML, and what they take is not, but for the `parts` of a card.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from html import escape
from typing import Any

Row = tuple[str, object]
"""A name and a value of a card; the value is shown as `str` has it."""

LONGEST = 160
"""Characters of a value that are shown; the rest is in its tooltip."""

CELLS = 64
"""The most rows and columns of a grid that is drawn."""

POINTS = 200
"""The most points of a curve, and bars of a chart, that are drawn."""

STYLE = """<style>
.multipod-card { --mp-ink: #1f2328; --mp-soft: #59636e; --mp-line: #d1d9e0; --mp-back: #ffffff; --mp-mark: #0969da;
  --mp-fault: #d1242f; color: var(--jp-content-font-color1, var(--vscode-editor-foreground, var(--mp-ink)));
  background: var(--jp-layout-color0, var(--vscode-editor-background, var(--mp-back)));
  border: 1px solid var(--jp-border-color2, var(--vscode-panel-border, var(--mp-line))); border-radius: 6px;
  display: inline-block; max-width: 860px; padding: 10px 14px; font: 13px/1.45 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { .multipod-card { --mp-ink: #e6edf3; --mp-soft: #9198a1; --mp-line: #3d444d;
  --mp-back: #0d1117; --mp-mark: #4493f8; --mp-fault: #f85149; } }
.multipod-card b.mp-title { font-size: 14px; }
.multipod-card .mp-kind, .multipod-card th, .multipod-card summary { color: var(--jp-content-font-color2,
  var(--vscode-descriptionForeground, var(--mp-soft))); font-weight: normal; }
.multipod-card table { border-collapse: collapse; margin: 4px 0 0; font-size: 13px; }
.multipod-card th, .multipod-card td { background: none; border: 0; padding: 1px 14px 1px 0; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
.multipod-card td.mp-number { text-align: right; font-variant-numeric: tabular-nums; }
.multipod-card details { margin: 2px 0 0; } .multipod-card details details,
.multipod-card details table { margin-left: 14px; }
.multipod-card figure { display: inline-block; margin: 8px 18px 0 0; vertical-align: top; }
.multipod-card figcaption { color: var(--mp-soft); font-size: 12px; }
.multipod-card svg { display: block; }
</style>"""


def card(kind: str, title: str, rows: Iterable[Row], *parts: str) -> str:
    """A frame with a title, what kind of thing it is, rows of names and values, and `parts`: HTML of this module."""
    head = f'<b class="mp-title">{_text(title)}</b> <span class="mp-kind">{_text(kind)}</span>'
    return f'<div class="multipod-card">{STYLE}{head}{rows_table(rows)}{"".join(parts)}</div>'


def rows_table(rows: Iterable[Row]) -> str:
    """A table of a name and a value each; empty without rows. Values that are None are left out."""
    lines = [f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows if value is not None]
    return f"<table>{''.join(lines)}</table>" if lines else ""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with names above its columns; numbers stand to the right."""
    cells = ("".join(_cell(value) for value in row) for row in rows)
    names = "".join(f"<th>{_text(name)}</th>" for name in head)
    return f"<table><tr>{names}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def fields(name: str, value: Any) -> str:
    """A dataclass behind its name, to be unfolded: its fields that are not the default, dataclasses in them likewise.

    Any other value is a line.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return rows_table([(name, value)])
    shown = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if _is_set(field, value)]
    nested = [one for one in shown if dataclasses.is_dataclass(one[1]) and not isinstance(one[1], type)]
    plain = [one for one in shown if one not in nested]
    brief = ", ".join(f"{field}={_brief(one)}" for field, one in plain)
    summary = f"{_text(name)}: {_text(type(value).__name__)} <small>{_text(brief)}</small>"
    inner = rows_table(plain) + "".join(fields(field, one) for field, one in nested)
    return (
        f"<details><summary>{summary}</summary>{inner}</details>"
        if inner
        else rows_table([(name, type(value).__name__)])
    )


def curve(values: Sequence[float], caption: str, width: int = 260, height: int = 60) -> str:
    """A line through the values that are finite, at equal distances; with the least and the largest below."""
    finite = [(k, float(value)) for k, value in enumerate(values) if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    step = -(-len(finite) // POINTS)
    finite = [*finite[::step], finite[-1]]
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    last, span = max(finite[-1][0], 1), (high - low) or 1.0
    points = " ".join(
        f"{3 + (width - 6) * k / last:.1f},{height - 3 - (height - 6) * (value - low) / span:.1f}"
        for k, value in finite
    )
    line = f'<polyline points="{points}" fill="none" stroke="var(--mp-mark)" stroke-width="1.5"/>'
    return _figure(line, width, height, f"{caption}: {low:.4g} to {high:.4g}, last {finite[-1][1]:.4g}")


def bars(values: Sequence[float], caption: str, width: int = 260, height: int = 60) -> str:
    """A bar for each value, none below 0; where there are very many, for the largest of neighbours."""
    if not values or not max(values) > 0:
        return ""
    step = -(-len(values) // POINTS)
    heights = [max(group) for group in (values[k : k + step] for k in range(0, len(values), step))]
    each, high = width / len(heights), max(heights)
    rects = "".join(
        f'<rect x="{k * each:.2f}" y="{height * (1 - value / high):.2f}" width="{max(each - 0.6, 0.4):.2f}" '
        f'height="{height * value / high:.2f}" fill="var(--mp-mark)"/>'
        for k, value in enumerate(heights)
    )
    return _figure(rects, width, height, caption)


def grid(rows: int, columns: int, faulty: Collection[tuple[int, int]], caption: str) -> str:
    """Squares in rows and columns, those that are `faulty` crossed out; empty where it would be over `CELLS`."""
    if max(rows, columns) > CELLS:
        return ""
    side = max(5, min(18, 260 // max(columns, 1)))
    places = [(row, column) for row in range(rows) for column in range(columns)]
    whole = "".join(_square(place, side) for place in places if place not in faulty)
    crossed = "".join(_square(place, side) + _cross(side) for place in places if place in faulty)
    drawing = f'<path d="{whole}" fill="var(--mp-mark)" fill-opacity="0.28" stroke="var(--mp-mark)"/>'
    drawing += f'<path d="{crossed}" fill="none" stroke="var(--mp-fault)"/>' if crossed else ""
    return _figure(drawing, columns * side + 1, rows * side + 1, caption)


def _square(place: tuple[int, int], side: int) -> str:
    row, column = place
    return f"M{column * side + 1} {row * side + 1}h{side - 2}v{side - 2}h{2 - side}z"


def _cross(side: int) -> str:
    """Both diagonals of the square that was drawn last."""
    return f"l{side - 2} {side - 2}m0 {2 - side}l{2 - side} {side - 2}"


def _figure(drawing: str, width: float, height: float, caption: str) -> str:
    opening = f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img"'
    label = _text(caption)
    return f'<figure>{opening} aria-label="{label}">{drawing}</svg><figcaption>{label}</figcaption></figure>'


def _cell(value: object) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    shown = f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if number else value
    return f'<td class="mp-number">{_text(shown)}</td>' if number else f"<td>{_text(value)}</td>"


def _text(value: object) -> str:
    """The value as text, shortened and escaped."""
    shown = str(value)
    if len(shown) <= LONGEST:
        return escape(shown)
    return escape(shown[: LONGEST - 1]) + "…"


def _brief(value: object) -> str:
    shown = str(value)
    return shown if len(shown) <= 40 else f"{shown[:39]}…"


def _is_set(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether a field is shown, and has another value than its default."""
    if not field.repr:
        return False
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    try:
        return default is dataclasses.MISSING or not bool(getattr(value, field.name) == default)
    except (TypeError, ValueError):  # arrays do not say it in one word
        return True
