"""A memory plan as a picture: time to the right, one column an operator; addresses upwards."""

from collections.abc import Sequence
from html import escape

from multipod.micro.interpreter import PlannedBuffer

WIDTH, HEIGHT, MARGIN = 900, 420, 60
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")
SCRATCH_COLOUR = "#bab0ac"


def draw(plan: Sequence[PlannedBuffer], operators: Sequence[str], tensors: Sequence[str]) -> str:
    """The plan as SVG. Buffers that lie over others, in place of them, are hatched by a dashed edge."""
    steps = max(len(operators), 1)
    top = max((buffer.offset + buffer.size for buffer in plan), default=0) or 1
    x = (WIDTH - 2 * MARGIN) / steps
    y = (HEIGHT - 2 * MARGIN) / top
    body = [_box(buffer, steps, x, y, tensors) for buffer in sorted(plan, key=lambda buffer: buffer.shares)]
    body += [_label(k, name, x) for k, name in enumerate(operators) if steps <= 40]
    body.append(
        f'<text x="{MARGIN}" y="{MARGIN - 14}" font-size="13">{top:,} bytes at most, {len(plan)} buffers, '
        f"{len(operators)} operators</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + 60}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT + 60}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _box(buffer: PlannedBuffer, steps: int, x: float, y: float, tensors: Sequence[str]) -> str:
    last = min(buffer.last, steps - 1)
    name = "scratch" if buffer.tensor < 0 else tensors[buffer.tensor] if buffer.tensor < len(tensors) else ""
    colour = SCRATCH_COLOUR if buffer.tensor < 0 else COLOURS[buffer.tensor % len(COLOURS)]
    edge = ' stroke-dasharray="4 3"' if buffer.shares else ""
    return (
        f'<rect x="{MARGIN + buffer.first * x:.1f}" y="{HEIGHT - MARGIN - (buffer.offset + buffer.size) * y:.1f}" '
        f'width="{(last - buffer.first + 1) * x:.1f}" height="{max(buffer.size * y, 0.5):.1f}" fill="{colour}" '
        f'fill-opacity="0.75" stroke="#333" stroke-width="0.6"{edge}><title>{escape(name)}: {buffer.size:,} bytes at '
        f"{buffer.offset:,}, operators {buffer.first} to {last}</title></rect>"
    )


def _label(k: int, name: str, x: float) -> str:
    point = f"{MARGIN + (k + 0.5) * x:.1f},{HEIGHT - MARGIN + 8}"
    at_x, at_y = point.split(",")
    return f'<text x="{at_x}" y="{at_y}" font-size="8" transform="rotate(60 {point})">{k} {escape(name)}</text>'
