"""Draws a timed pipeline: a line of characters for each device, or an SVG picture."""

from pathlib import Path
from xml.etree import ElementTree as ET

from multipod.errors import ScheduleError
from multipod.pipelines.schedule import PipelineOp
from multipod.pipelines.timing import Timed

LEGEND = "0-9 forward, a-j backward of micro-batch 0-9 (mod 10), | update, . idle"

FORWARD = ("#dbeafe", "#93c5fd", "#60a5fa")
BACKWARD = ("#dcfce7", "#86efac", "#4ade80")
"""Shades of the passes of one update after the other."""
INK, FAINT, UPDATE = "#20242c", "#6b7280", "#c2410c"
MARGIN, HEAD, ROW, FOOT = 64.0, 56.0, 26.0, 44.0
LARGEST = 60_000
"""Operations that a picture may have."""


def draw(timed: Timed, width: int = 100) -> str:
    """One line for each device, one character for each unit of time, cut at `width` characters.

    An update is drawn in the column that follows it. Costs must be whole numbers.

    Raises:
      ScheduleError: costs that are no whole numbers.
    """
    if any(time != int(time) for ends in timed.ends for time in ends):
        raise ScheduleError(f"{timed.schedule}: drawn as text, costs are whole numbers. Scale them, or write an SVG.")
    label = len(str(timed.schedule.stages)) + len("stage  ")
    room = max(width - label, 16)
    total = int(timed.total) + 1
    lines = []
    for p, ops in enumerate(timed.schedule.ops):
        cells = ["."] * (total + 1)
        for op, start, end in zip(ops, timed.starts[p], timed.ends[p], strict=True):
            for t in range(int(start), int(end)):
                cells[t] = _letter(op)
            if op.kind == "update" and cells[int(end)] == ".":
                cells[int(end)] = "|"
        line = "".join(cells[:total])
        cut = line if total <= room else line[: room - 4] + " ..."
        lines.append(f"stage {p + 1:<{label - 7}} {cut}".rstrip())
    return "\n".join([*lines, LEGEND])


def write_picture(timed: Timed, path: Path) -> None:
    """Writes the SVG picture of `timed` to `path`.

    Raises:
      ScheduleError: too many operations to draw.
    """
    path.write_text(picture(timed), encoding="utf-8")


def picture(timed: Timed) -> str:
    """A row for each device, a box for each pass, a mark for each update; SVG text.

    Raises:
      ScheduleError: too many operations to draw.
    """
    count = sum(map(len, timed.schedule.ops))
    if count > LARGEST:
        raise ScheduleError(
            f"{timed.schedule}: {count:,} operations are too many for a picture. "
            f"Take fewer stages, micro-batches or updates: up to {LARGEST:,} operations."
        )
    total = float(timed.total)
    unit = min(max(1400 / max(total, 1), 3.0), 30.0)
    width, height = MARGIN + total * unit + 24, HEAD + timed.schedule.stages * ROW + FOOT
    svg = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {max(width, 640):g} {height:g}",
            "width": f"{max(width, 640):g}",
            "height": f"{height:g}",
            "font-family": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif",
        },
    )
    ET.SubElement(svg, "title").text = str(timed.schedule)
    ET.SubElement(svg, "rect", {"width": "100%", "height": "100%", "fill": "#ffffff"})
    _text(svg, MARGIN, 22, str(timed.schedule), INK, 15)
    _text(svg, MARGIN, 40, f"{float(timed.utilisation):.1%} of the time in use, from first fill to last drain", FAINT)
    for p in range(timed.schedule.stages):
        _row(svg, timed, p, unit)
    _legend(svg, HEAD + timed.schedule.stages * ROW + 24)
    ET.indent(svg)
    return ET.tostring(svg, encoding="unicode") + "\n"


def _row(svg: ET.Element, timed: Timed, p: int, unit: float) -> None:
    y = HEAD + p * ROW
    _text(svg, 8, y + ROW * 0.68, f"stage {p + 1}", FAINT)
    for op, start, end in zip(timed.schedule.ops[p], timed.starts[p], timed.ends[p], strict=True):
        x, wide = MARGIN + float(start) * unit, float(end - start) * unit
        if op.kind == "update":
            place = {"x1": f"{x:g}", "x2": f"{x:g}", "y1": f"{y:g}", "y2": f"{y + ROW - 2:g}"}
            mark = ET.SubElement(svg, "line", {**place, "stroke": UPDATE, "stroke-width": "2"})
            ET.SubElement(mark, "title").text = f"update {op.micro}"
            continue
        shades = FORWARD if op.kind == "forward" else BACKWARD
        shade = shades[timed.schedule.update_of(op.micro) % len(shades)]
        place = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{wide:g}", "height": f"{ROW - 2:g}"}
        box = ET.SubElement(svg, "rect", {**place, "fill": shade, "stroke": "#ffffff", "stroke-width": "0.6"})
        part = timed.schedule.part(p, op.chunk)
        ET.SubElement(box, "title").text = f"{op.kind} of micro-batch {op.micro}, part {part}"
        if wide >= 9 * len(str(op.micro)):
            _text(svg, x + wide / 2, y + ROW * 0.64, str(op.micro), INK, 11, "middle")


def _legend(svg: ET.Element, y: float) -> None:
    x = MARGIN
    for shades, what in ((FORWARD, "forward"), (BACKWARD, "backward")):
        for shade in shades:
            place = {"x": f"{x:g}", "y": f"{y - 11:g}", "width": "14", "height": "14"}
            ET.SubElement(svg, "rect", {**place, "fill": shade})
            x += 16
        _text(svg, x + 4, y, f"{what} (a shade for each update in turn)", FAINT)
        x += 240
    ET.SubElement(
        svg,
        "line",
        {
            "x1": f"{x:g}",
            "x2": f"{x:g}",
            "y1": f"{y - 12:g}",
            "y2": f"{y + 3:g}",
            "stroke": UPDATE,
            "stroke-width": "2",
        },
    )
    _text(svg, x + 8, y, "update", FAINT)


def _text(svg: ET.Element, x: float, y: float, text: str, colour: str, size: float = 12, anchor: str = "start") -> None:
    place = {"x": f"{x:g}", "y": f"{y:g}", "fill": colour, "font-size": f"{size:g}", "text-anchor": anchor}
    ET.SubElement(svg, "text", place).text = text


def _letter(op: PipelineOp) -> str:
    digit = op.micro % 10
    return str(digit) if op.kind == "forward" else "abcdefghij"[digit]
