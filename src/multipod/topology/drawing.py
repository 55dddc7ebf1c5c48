"""A topology drawn in text, with what has failed."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

from multipod.topology.topology import Topology

CHIP, FAILED, CUT = "o", "x", "/"
LEGEND = "o chip  x failed chip  - | link  / failed link  ~ link around to the other end"


def draw(topology: Topology, width: int = 100, height: int = 60) -> str:
    """The machine as lines of text, at most `width` wide and about `height` high.

    The last two dimensions are rows and columns; those before them are slices, drawn one below the other. What has
    no place left is left out between `..`: first the places far from failures. Links between slices are not
    drawn, and neither are switches; a line below says so.
    """
    planes = list(product(*map(range, topology.shape[:-2])))
    shown = _planes(topology, planes, height)
    lines: list[str] = []
    visible: set[int] = set()
    last = -1
    for plane in shown:
        skipped, last = planes.index(plane) - last - 1, planes.index(plane)
        lines += [f".. {_count(skipped, 'slice')} left out .."] if skipped else []
        drawn, chips = _draw_plane(topology, plane, width, height // len(shown) - 2)
        lines += [f"slice {', '.join(map(str, plane))}", *drawn] if plane else drawn
        visible |= chips
    rest = len(planes) - last - 1
    lines += [f".. {_count(rest, 'slice')} left out .."] if rest else []
    return "\n".join([*lines, "", *_notes(topology, visible)])


def _planes(topology: Topology, planes: list[tuple[int, ...]], height: int) -> list[tuple[int, ...]]:
    """The slices to draw: all if they fit, else the first and those with failures, as many as fit."""
    rows = topology.shape[-2] if len(topology.shape) > 1 else 1
    room = max(1, height // (min(2 * rows, 8) + 2))
    if len(planes) <= room:
        return planes
    broken = topology.failed_chips.union(*topology.failed_links)
    return sorted(dict.fromkeys([*sorted({topology.coordinates(chip)[:-2] for chip in broken}), planes[0]]))[:room]


def _draw_plane(topology: Topology, plane: tuple[int, ...], width: int, height: int) -> tuple[list[str], set[int]]:
    """The lines of one slice, and the chips that can be seen in them."""
    grid = _Plane(topology, plane)
    margin = len(str(grid.rows - 1)) + 3
    label = len(str(grid.columns - 1))
    columns = _keep(grid.columns, grid.marked(1), max(width - margin - max(label, 3), 12), gap=3)
    rows = _keep(grid.rows, grid.marked(0), max(height, 8), gap=0)
    around = [grid.link(0, grid.rows - 1, c, "~") if grid.wraps(0) else " " for c in columns]
    ends = [" " * margin + _across(columns, around, " ")] if any(mark != " " for mark in around) else []
    lines = [_header(columns, margin), *ends]
    for k, r in enumerate(rows):
        chips = [grid.chip(r, c) for c in columns]
        turn = grid.link(1, r, grid.columns - 1, "~") if grid.wraps(1) else " "
        links = [grid.link(1, r, c, "-") for c in columns]
        lines.append(f"{r:>{margin - 3}} {turn} " + _along(columns, chips, links) + f" {turn}".rstrip())
        if k + 1 < len(rows):
            whole = rows[k + 1] == r + 1
            below = _across(columns, [grid.link(0, r, c, "|") if whole else ":" for c in columns], " ")
            lines += [" " * margin + below] if below.strip() else []
    return [line.rstrip() for line in lines + ends], {grid.number(r, c) for r in rows for c in columns}


class _Plane:
    """The rows and columns of one slice: what is at each place and between two."""

    def __init__(self, topology: Topology, plane: tuple[int, ...]) -> None:
        self.topology, self.plane = topology, plane
        self.flat = len(topology.shape) == 1
        self.rows, self.columns = (1, *topology.shape) if self.flat else topology.shape[-2:]

    def number(self, r: int, c: int) -> int:
        return self.topology.number((c,) if self.flat else (*self.plane, r, c))

    def chip(self, r: int, c: int) -> str:
        return FAILED if self.number(r, c) in self.topology.failed_chips else CHIP

    def dim(self, axis: int) -> int | None:
        """The dimension behind rows (0) or columns (1); None if there is none."""
        return len(self.topology.shape) - 2 + axis if axis or not self.flat else None

    def wraps(self, axis: int) -> bool:
        dim = self.dim(axis)
        return dim is not None and self.topology.wrap[dim] and self.topology.shape[dim] > 2

    def link(self, axis: int, r: int, c: int, whole: str) -> str:
        """The link from a place to the next one along `axis`, around the end too; blank where there is none."""
        dim = self.dim(axis)
        if dim is None or self.topology.switched[dim]:
            return " "
        next_r, next_c = (r + (axis == 0)) % self.rows, (c + (axis == 1)) % self.columns
        a, b = sorted((self.number(r, c), self.number(next_r, next_c)))
        if a in self.topology.failed_chips or b in self.topology.failed_chips:
            return " "
        return CUT if (a, b) in self.topology.failed_links else whole

    def marked(self, axis: int) -> list[int]:
        """The rows (0) or columns (1) with something failed, in order."""
        broken = set(self.topology.failed_chips).union(*self.topology.failed_links)
        places = [self.topology.coordinates(chip) for chip in broken]
        here = [(0, *place) if self.flat else place for place in places if self.flat or place[:-2] == self.plane]
        return sorted({place[-2 + axis] for place in here})


def _keep(n: int, marked: Sequence[int], room: int, gap: int) -> list[int]:
    """Which of n places to draw: all if they fit, else the ends, the marked, what is beside them, and the first.

    Each takes two characters of the `room`, what is left out between two of them `gap` more.
    """
    beside = [c + side for c in marked for side in (-1, 1) if 0 <= c + side < n]
    kept: list[int] = []
    for c in range(n) if 2 * n <= room else dict.fromkeys((0, n - 1, *marked, *beside, *range(n))):
        tried = sorted({*kept, c})
        gaps = sum(after != before + 1 for before, after in pairwise(tried))
        if 2 * len(tried) + gap * gaps > room:
            break
        kept = tried
    return kept


def _cells(columns: Sequence[int], between: str) -> Iterator[tuple[int, str]]:
    """Each column with what stands to its right: nothing, `between`, or a gap."""
    for k, c in enumerate(columns):
        last = k + 1 == len(columns)
        yield c, "" if last else between if columns[k + 1] == c + 1 else " .. "


def _along(columns: Sequence[int], chips: Sequence[str], links: Sequence[str]) -> str:
    spaces = [space for _, space in _cells(columns, "-")]
    return "".join(c + (link if s == "-" else s) for c, link, s in zip(chips, links, spaces, strict=True))


def _across(columns: Sequence[int], marks: Sequence[str], between: str) -> str:
    spaces = ["    " if space == " .. " else space for _, space in _cells(columns, between)]
    return "".join(mark + space for mark, space in zip(marks, spaces, strict=True))


def _header(columns: Sequence[int], margin: int) -> str:
    """The numbers of the columns: the first, the last, those at gaps, and in between where there is room."""
    line, at = " " * margin, margin
    starts: list[tuple[int, int]] = []
    for c, space in _cells(columns, " "):
        starts.append((at, c))
        at += 1 + len(space)
    gaps = [k for k, (a, b) in enumerate(pairwise(columns)) if b != a + 1]
    first = {0, len(columns) - 1, *gaps, *(k + 1 for k in gaps)}
    taken: dict[int, int] = {}
    for k in (*sorted(first), *range(len(columns))):
        place, c = starts[k]
        text = len(str(c))
        if all(place + text < other or other + len(str(d)) < place for other, d in taken.items()):
            taken[place] = c
    for place in sorted(taken):
        line = line.ljust(place) + str(taken[place])
    return line


def _notes(topology: Topology, visible: set[int]) -> list[str]:
    """What the lines above cannot show."""
    notes = [LEGEND]
    for dim, n in enumerate(topology.shape):
        if n > 1 and topology.switched[dim]:
            port = "the chips behind one port share it" if topology.shared[dim] else "every chip has its own port"
            notes.append(f"dimension {dim}, of {n}, hangs on switches; {port}")
        elif n > 1 and dim < len(topology.shape) - 2:
            ring = ", closed into rings" if topology.wrap[dim] and n > 2 else ""
            notes.append(f"dimension {dim}, of {n}, links the slices{ring}")
    chips = len(topology.failed_chips - visible)
    slices = {chip: topology.coordinates(chip)[:-2] for chip in {end for link in topology.failed_links for end in link}}
    links = sum(not {a, b} <= visible or slices[a] != slices[b] for a, b in topology.failed_links)
    if chips or links:
        notes.append(f"not drawn: {_count(chips, 'failed chip')}, {_count(links, 'failed link')}")
    return notes


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"
