"""Link loads drawn on the machine, as an SVG picture: which links are busy, which are idle, and where the holes are."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

from multipod.simulate.simulate import Simulation
from multipod.topology.topology import Topology

RAMP = ((232, 234, 238), (250, 208, 110), (238, 118, 52), (190, 38, 62), (84, 10, 60))
"""Idle to busiest: rising in saturation and falling in lightness, so that it reads without colour too."""
SHADES = 24
"""Steps of the ramp; arcs of one shade are one path, so that 4,096 chips make a small file."""
TITLED = 3000
"""Up to so many arcs each is an element of its own that shows its figures under the pointer."""

INK, FAINT, CHIP, FAILED = "#20242c", "#6b7280", "#f8fafc", "#c2410c"
MARGIN, HEAD, FOOT = 36.0, 86.0, 84.0
LEAST_WIDTH = 700.0
SMALL = 20.0
"""Below this size of a cell, links are drawn longer and wider, and chips smaller."""

Point = tuple[float, float]


def write_picture(simulation: Simulation, path: Path) -> None:
    """Writes the picture of `simulation` to `path`."""
    path.write_text(draw(simulation), encoding="utf-8")


def draw(simulation: Simulation) -> str:
    """The picture as SVG text.

    The last two dimensions are rows and columns, those before them are panels. Each direction of a link
    is a stroke on its own right-hand side, coloured by how long it was held, from never to as long as the
    busiest. Links that close a ring, lead to another panel or to a switch are stubs at their chip.
    Ports shared by several chips have no chip to stand at: they are squares below.
    """
    plan = _Plan(simulation.topology)
    ports = _ports(simulation)
    per_line = max(1, int((plan.width - 2 * MARGIN) // 22))
    strip = 44 + 22 * math.ceil(len(ports) / per_line) if ports else 0
    height = plan.height + FOOT + strip
    svg = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {plan.width:g} {height:g}",
            "width": f"{plan.width:g}",
            "height": f"{height:g}",
            "font-family": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif",
        },
    )
    ET.SubElement(svg, "title").text = str(simulation.schedule)
    ET.SubElement(svg, "rect", {"width": "100%", "height": "100%", "fill": "#ffffff"})
    _heading(svg, simulation)
    _panels(svg, plan)
    _arcs(svg, plan, simulation)
    _chips(svg, plan)
    _legend(svg, simulation, plan.width, plan.height + 24)
    if ports:
        _port_strip(svg, simulation, ports, per_line, plan.height + FOOT)
    ET.indent(svg)
    return ET.tostring(svg, encoding="unicode") + "\n"


class _Plan:
    """Where the chips lie on the page."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.rows, self.columns = topology.shape[-2:] if len(topology.shape) > 1 else (1, topology.shape[0])
        outer = topology.shape[:-2]
        self.panels = math.prod(outer)
        self.across = math.ceil(math.sqrt(self.panels * self.rows / self.columns)) if self.panels > 1 else 1
        self.across = min(max(self.across, 1), self.panels)
        down = math.ceil(self.panels / self.across)
        self.cell = min(max(1500 / (self.columns * self.across), 11), 62)
        small = self.cell < SMALL
        self.half, self.gap, self.aside, self.thick = (0.15, 0.12, 0.11, 0.2) if small else (0.26, 0.29, 0.085, 0.13)
        self.panel_width, self.panel_height = (self.columns + 0.9) * self.cell, (self.rows + 0.9) * self.cell
        self.label = 18.0 if self.panels > 1 else 0.0
        grid_width = self.across * self.panel_width
        self.width = max(LEAST_WIDTH, 2 * MARGIN + grid_width)
        self.left = (self.width - grid_width) / 2
        self.height = HEAD + down * (self.panel_height + self.label)

    def corner(self, panel: int) -> Point:
        """The upper left corner of a panel."""
        row, column = divmod(panel, self.across)
        return self.left + column * self.panel_width, HEAD + row * (self.panel_height + self.label) + self.label

    def centre(self, chip: int) -> Point:
        panel, within = divmod(chip, self.rows * self.columns)
        row, column = divmod(within, self.columns)
        x, y = self.corner(panel)
        return x + (column + 0.95) * self.cell, y + (row + 0.95) * self.cell

    def stroke(self, tail: int, head: int, stub: int) -> tuple[Point, Point]:
        """From where to where an arc is drawn; `stub` tells apart the stubs of one chip that have no direction."""
        size = self.topology.size
        if tail < size and head < size:
            (x0, y0), (x1, y1) = self.centre(tail), self.centre(head)
            if math.hypot(x1 - x0, y1 - y0) < 1.01 * self.cell and self._same_panel(tail, head):
                return self._beside((x0, y0), (x1, y1), self.gap, 1 - self.gap)
            return self._stub(tail, *self._direction(tail, head), inwards=False)
        chip, inwards = (tail, False) if tail < size else (head, True)
        angle = math.radians(45 + 90 * stub)
        return self._stub(chip, math.cos(angle), -math.sin(angle), inwards)

    def far_stub(self, tail: int, head: int) -> tuple[Point, Point] | None:
        """Where an arc that ends in a stub comes in again at its head; None for arcs drawn whole."""
        (x0, y0), (x1, y1) = self.centre(tail), self.centre(head)
        if math.hypot(x1 - x0, y1 - y0) < 1.01 * self.cell and self._same_panel(tail, head):
            return None
        return self._stub(head, *self._direction(head, tail), inwards=True)

    def _same_panel(self, a: int, b: int) -> bool:
        return a // (self.rows * self.columns) == b // (self.rows * self.columns)

    def _direction(self, chip: int, other: int) -> Point:
        """Where the stub towards `other` points: outwards along the row or column, or aslant to other panels."""
        here, there = self.topology.coordinates(chip), self.topology.coordinates(other)
        dim = next(d for d, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)
        up = there[dim] > here[dim]
        if abs(there[dim] - here[dim]) > 1:  # around the end
            up = not up
        sign = 1.0 if up else -1.0
        behind = len(here) - 1 - dim
        if behind < 2:
            return (sign, 0.0) if behind == 0 else (0.0, sign)
        slant = math.radians(45 + 90 * (behind % 2))
        return sign * math.cos(slant), -sign * math.sin(slant)

    def _stub(self, chip: int, dx: float, dy: float, inwards: bool) -> tuple[Point, Point]:
        x, y = self.centre(chip)
        end = x + dx * self.cell, y + dy * self.cell
        if inwards:
            return self._beside(end, (x, y), 0.46, 1 - self.gap)
        return self._beside((x, y), end, self.gap, 0.54)

    def _beside(self, a: Point, b: Point, begin: float, end: float) -> tuple[Point, Point]:
        """The part of the way from a to b between two fractions of it, moved to its right-hand side."""
        dx, dy = b[0] - a[0], b[1] - a[1]
        length = math.hypot(dx, dy)
        aside = self.aside * self.cell
        x, y = a[0] - dy / length * aside, a[1] + dx / length * aside
        return (x + begin * dx, y + begin * dy), (x + end * dx, y + end * dy)


def _heading(svg: ET.Element, simulation: Simulation) -> None:
    _text(svg, MARGIN, 32, f"{simulation.schedule.algorithm} {simulation.schedule.collective}", 18, INK, weight="600")
    chips = len(simulation.topology.chips)
    machine = textwrap.shorten(str(simulation.topology), 70, placeholder=" ...")
    _text(svg, MARGIN, 52, f"{machine} · {chips:,} chips · {bytes_text(float(simulation.nbytes))} each", 12, FAINT)
    line = (
        f"{time_text(float(simulation.seconds))}, {simulation.mode} · {simulation.steps:,} steps · "
        f"{simulation.percent_of_bound:.1f} % of the speed that the bounds allow"
    )
    _text(svg, MARGIN, 69, line, 12, FAINT)


def _panels(svg: ET.Element, plan: _Plan) -> None:
    if plan.panels > 1:
        outer = plan.topology.shape[:-2]
        for panel in range(plan.panels):
            x, y = plan.corner(panel)
            place = []
            for n in reversed(outer):
                panel, c = divmod(panel, n)
                place.append(c)
            _text(svg, x + 0.7 * plan.cell, y + 2, ", ".join(map(str, reversed(place))), 11, FAINT)


def _arcs(svg: ET.Element, plan: _Plan, simulation: Simulation) -> None:
    """All strokes, idle ones first so that the busy ones lie on top."""
    width = max(plan.thick * plan.cell, 1.4)
    group = ET.SubElement(svg, "g", {"fill": "none", "stroke-width": f"{width:.2g}", "stroke-linecap": "butt"})
    strokes = sorted(_strokes(plan, simulation), key=lambda stroke: stroke[0])
    if len(simulation.arcs) <= TITLED:
        for shade, path, title in strokes:
            element = ET.SubElement(group, "path", {"d": path, "stroke": colour(shade / SHADES)})
            ET.SubElement(element, "title").text = title
        return
    for shade in sorted({shade for shade, _, _ in strokes}):
        path = "".join(path for own, path, _ in strokes if own == shade)
        ET.SubElement(group, "path", {"d": path, "stroke": colour(shade / SHADES)})


def _strokes(plan: _Plan, simulation: Simulation) -> Iterator[tuple[int, str, str]]:
    """(shade, path, title) of everything to draw for the arcs that touch a chip."""
    size = plan.topology.size
    stubs: dict[int, list[int]] = {}  # the switches of each chip, in order
    for (tail, head), nbytes, share in zip(simulation.arcs, simulation.arc_bytes, _shares(simulation), strict=True):
        if tail >= size and head >= size:
            continue
        shade = math.ceil(SHADES * share)
        title = f"{node_name(plan.topology, tail)} → {node_name(plan.topology, head)}: {bytes_text(float(nbytes))}"
        stub = 0
        if max(tail, head) >= size:
            own = stubs.setdefault(min(tail, head), [])
            own += [max(tail, head)] if max(tail, head) not in own else []
            stub = own.index(max(tail, head))
        yield shade, _path(*plan.stroke(tail, head, stub)), title
        if max(tail, head) < size:
            again = plan.far_stub(tail, head)
            if again:
                yield shade, _path(*again), title


def _shares(simulation: Simulation) -> list[float]:
    """How long each arc was held, from 0 to 1 for the busiest."""
    busy = [float(seconds) for seconds in simulation.arc_busy_s]
    most = max(busy, default=0) or 1
    return [seconds / most for seconds in busy]


def _chips(svg: ET.Element, plan: _Plan) -> None:
    """Live chips as squares, failed ones as crossed outlines, failed links as small crosses."""
    half = plan.half * plan.cell
    thin = max(0.02 * plan.cell, 0.5)
    live = "".join(_square(plan.centre(chip), half) for chip in plan.topology.chips)
    ET.SubElement(svg, "path", {"d": live, "fill": CHIP, "stroke": "#94a3b8", "stroke-width": f"{thin:.2g}"})
    lost = sorted(plan.topology.failed_chips)
    if lost:
        outline = "".join(_square(plan.centre(chip), half) for chip in lost)
        cross = "".join(_cross(plan.centre(chip), 0.6 * half) for chip in lost)
        look = {"stroke": FAILED, "stroke-width": f"{2 * thin:.2g}", "fill": "none", "stroke-linecap": "round"}
        ET.SubElement(svg, "path", {"d": outline, "fill": "#fff7ed", "stroke": FAILED, "stroke-width": f"{thin:.2g}"})
        ET.SubElement(svg, "path", {"d": cross, **look})
    broken = [link for link in plan.topology.failed_links if not plan.topology.failed_chips & {*link}]
    if broken:
        crosses = []
        for a, b in sorted(broken):
            (x0, y0), (x1, y1) = plan.centre(a), plan.centre(b)
            near = math.hypot(x1 - x0, y1 - y0) < 1.01 * plan.cell
            spots = [((x0 + x1) / 2, (y0 + y1) / 2)] if near else [_middle(plan, a, b), _middle(plan, b, a)]
            crosses += [_cross(spot, 0.1 * plan.cell) for spot in spots]
        look = {"stroke": FAILED, "stroke-width": f"{2 * thin:.2g}", "fill": "none", "stroke-linecap": "round"}
        ET.SubElement(svg, "path", {"d": "".join(crosses), **look})
    if plan.cell >= 34:
        for chip in plan.topology.chips:
            x, y = plan.centre(chip)
            _text(svg, x, y + 0.075 * plan.cell, str(chip), 0.2 * plan.cell, FAINT, anchor="middle")


def _middle(plan: _Plan, chip: int, other: int) -> Point:
    """Where the stub from `chip` towards `other` would be."""
    (x0, y0), (x1, y1) = plan.stroke(chip, other, 0)
    return (x0 + x1) / 2, (y0 + y1) / 2


def _legend(svg: ET.Element, simulation: Simulation, width: float, top: float) -> None:
    swatch = 7.0
    for k in range(SHADES + 1):
        x = MARGIN + k * swatch
        ET.SubElement(
            svg, "rect", {"x": f"{x:g}", "y": f"{top:g}", "width": "7.2", "height": "10", "fill": colour(k / SHADES)}
        )
    busiest = max(map(float, simulation.arc_busy_s), default=0.0)
    share = busiest / float(simulation.seconds) if simulation.seconds else 0.0
    most = max(map(float, simulation.arc_bytes), default=0.0)
    end = MARGIN + (SHADES + 1) * swatch
    _text(svg, MARGIN, top + 25, "idle", 11, FAINT)
    _text(svg, end, top + 25, f"held {100 * share:.0f} % of the time", 11, FAINT, anchor="end")
    note = f"A stroke is one direction of a link, on its right-hand side. Most on one: {bytes_text(most)}."
    _text(svg, end + 18, top + 9, note, 11, FAINT)
    if simulation.topology.failed_chips or simulation.topology.failed_links:
        counts = []
        for n, what in (
            (len(simulation.topology.failed_chips), "chip"),
            (len(simulation.topology.failed_links), "link"),
        ):
            counts += [f"{n} {what}{'s' * (n != 1)}"] if n else []
        _text(svg, end + 18, top + 25, f"Crossed: {' and '.join(counts)} failed.", 11, FAILED)


def _ports(simulation: Simulation) -> list[int]:
    """Arcs between two nodes that are no chips: ports that several chips share."""
    size = simulation.topology.size
    return [k for k, (tail, head) in enumerate(simulation.arcs) if tail >= size and head >= size]


def _port_strip(svg: ET.Element, simulation: Simulation, ports: Sequence[int], per_line: int, top: float) -> None:
    _text(svg, MARGIN, top + 14, "Shared ports, out and in:", 11, FAINT)
    shares = _shares(simulation)
    for place, arc in enumerate(ports):
        row, column = divmod(place, per_line)
        at = {"x": f"{MARGIN + 22 * column:g}", "y": f"{top + 24 + 22 * row:g}", "width": "18", "height": "18"}
        fill = colour(math.ceil(SHADES * shares[arc]) / SHADES)
        box = ET.SubElement(svg, "rect", {**at, "rx": "3", "fill": fill})
        tail, head = simulation.arcs[arc]
        text = f"{node_name(simulation.topology, tail)} → {node_name(simulation.topology, head)}"
        ET.SubElement(box, "title").text = f"{text}: {bytes_text(float(simulation.arc_bytes[arc]))}"


def colour(share: float) -> str:
    """The colour of a load from 0 to 1."""
    at = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    k = min(int(at), len(RAMP) - 2)
    low, high = list(pairwise(RAMP))[k]
    return "#" + "".join(f"{round(a + (at - k) * (b - a)):02x}" for a, b in zip(low, high, strict=True))


def node_name(topology: Topology, node: int) -> str:
    """A chip by its coordinates, a switch or shared port by its number among them."""
    if node >= topology.size:
        return f"switch {node - topology.size}"
    return ",".join(map(str, topology.coordinates(node)))


def bytes_text(nbytes: float) -> str:
    """`98.4 MB` for 98.4e6."""
    return _scaled(nbytes, "B", (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))


def time_text(seconds: float) -> str:
    """`1.25 ms` for 0.00125."""
    return _scaled(seconds, "s", (1, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


def _scaled(value: float, unit: str, *prefixes: tuple[float, str]) -> str:
    scale, prefix = next((pair for pair in prefixes if value >= pair[0]), prefixes[-1])
    return f"{value / scale:.4g} {prefix}{unit}"


def _path(a: Point, b: Point) -> str:
    return f"M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}"


def _square(centre: Point, half: float) -> str:
    x, y = centre
    return f"M{x - half:.1f} {y - half:.1f}h{2 * half:.1f}v{2 * half:.1f}h{-2 * half:.1f}z"


def _cross(centre: Point, half: float) -> str:
    x, y = centre
    return _path((x - half, y - half), (x + half, y + half)) + _path((x - half, y + half), (x + half, y - half))


def _text(
    svg: ET.Element, x: float, y: float, text: str, size: float, fill: str, anchor: str = "start", weight: str = "400"
) -> None:
    look = {"x": f"{x:.1f}", "y": f"{y:.1f}", "font-size": f"{size:.3g}", "fill": fill}
    ET.SubElement(svg, "text", {**look, "text-anchor": anchor, "font-weight": weight}).text = text
