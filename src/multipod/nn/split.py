"""Which rows of an image lie on which device, and which of other devices' an operation needs. Plain integers, no JAX.

A *row* is one index of the dim that is split: a line of pixels if that is the height, a column if it is the width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from multipod.errors import LayoutError


@dataclass(frozen=True)
class Split:
    """One dim of an image, cut into equal blocks over the devices of a mesh axis.

    Device i holds rows i * block to (i + 1) * block - 1. Rows from `size` on are no part of the image: they are
    padding that makes the blocks equal, may hold anything, and count nowhere. Late, small layers may leave
    devices with nothing but padding.

    Attributes:
      size: rows of the whole image.
      parts: devices along the axis.
      axis: the mesh axis; None where the dim is whole on every device, in one part.
    """

    size: int
    parts: int = 1
    axis: str | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or self.parts < 1:
            raise LayoutError(f"{self}: an image has at least one row, and lies in at least one part. Give both.")
        if self.axis is None and self.parts > 1:
            raise LayoutError(f"{self}: {self.parts} parts lie along some mesh axis. Name it, or leave parts out.")

    @property
    def block(self) -> int:
        """Rows that each device holds, padding included: ceil(size / parts)."""
        return -(-self.size // self.parts)

    @property
    def padded(self) -> int:
        """Rows on all devices together; `padded - size` of them are padding."""
        return self.block * self.parts

    def rows(self, part: int) -> range:
        """The rows of the image that lie on device `part`; empty where it holds padding alone."""
        first = min(part * self.block, self.size)
        return range(first, min(first + self.block, self.size))


@dataclass(frozen=True)
class Window:
    """How a window slides along one dim: output row r reads rows r * stride - before + dilation * (0 ... size - 1).

    Attributes:
      size: rows that a window reads.
      stride: rows between two windows.
      dilation: rows between two that one window reads.
      before: rows of padding in front of the image, which the operation asks for (unlike a split's).
      after: the same behind it.
    """

    size: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0

    @property
    def reach(self) -> int:
        """Rows from the first that a window reads to the last."""
        return (self.size - 1) * self.dilation + 1

    def outputs(self, rows: int) -> int:
        """How many windows fit into `rows` rows; not positive if none."""
        return (rows + self.before + self.after - self.reach) // self.stride + 1


@dataclass(frozen=True)
class Reads:
    """The rows that each device needs for its block of an output, and where they come from.

    `before` rows come from the devices in front, `after` from those behind: the most that any device needs, because
    all run one program. Put together as lead + before + block + after + trail rows, of which lead and trail are made
    on the spot, device i cuts out `count` rows at `offsets[i]`: those of the image from `starts[i]` on.

    Attributes:
      before: rows of halo from the devices in front.
      after: rows of halo from the devices behind.
      lead: rows of padding before the halo.
      trail: rows of padding behind it.
      count: rows that each device reads.
      offsets: where its rows begin among those put together, for each device.
      starts: which rows of the image they are, for each device; before row 0 and from `size` on they are padding.
    """

    before: int
    after: int
    lead: int
    trail: int
    count: int
    offsets: tuple[int, ...]
    starts: tuple[int, ...]

    def hops(self, block: int) -> int:
        """Messages that each device sends: one for each neighbour's block that a halo enters."""
        return -(-self.before // block) + -(-self.after // block)


def slide(split: Split, window: Window) -> tuple[Split, Reads]:
    """The split of a window operation's output, and what each device must read for its block of it.

    With b input and o output rows on a device, device i reads from row i o stride - before on, for
    (o - 1) stride + reach rows. Where b = o stride the halo is the same everywhere; else it grows along
    the axis, by |b - o stride| rows a device, and may reach over several neighbours.

    Source: arXiv:2105.04663 (GSPMD), halo exchange with sizes that differ between devices. There the most that
    any device needs is exchanged as if all sizes were full; here devices whose output is padding, and rows
    outside the image, ask for nothing.

    Raises:
      LayoutError: not one window fits.
    """
    size = window.outputs(split.size)
    if size < 1:
        raise LayoutError(
            f"a window that reaches over {window.reach} rows does not fit into {split.size} rows of image and "
            f"{window.before} + {window.after} of padding. Pad (SAME), or take a smaller kernel or dilation."
        )
    out = replace(split, size=size)
    starts = [part * out.block * window.stride - window.before for part in range(split.parts)]
    return out, reads(split, out, starts, (out.block - 1) * window.stride + window.reach)


def reads(split: Split, out: Split, starts: Sequence[int], count: int) -> Reads:
    """How device i comes by `count` rows from `starts[i]` on, for each i whose block of `out` is not all padding."""
    block = split.block
    live = -(-out.size // out.block)
    # A device without output reads at the last live one's place in its own block; what it finds there is never used.
    starts = [*starts[:live], *(starts[live - 1] + (part - live + 1) * block for part in range(live, split.parts))]
    inside = [(max(start, 0), min(start + count, split.size)) for start in starts[:live]]
    before = max(0, *(part * block - first for part, (first, _) in enumerate(inside)))
    after = max(0, *(end - (part + 1) * block for part, (_, end) in enumerate(inside)))
    offsets = [start - (part * block - before) for part, start in enumerate(starts)]
    lead = max(0, -min(offsets))
    trail = max(0, max(offsets) + count - (before + block + after))
    return Reads(before, after, lead, trail, count, tuple(offset + lead for offset in offsets), tuple(starts))


@dataclass(frozen=True)
class Taps:
    """Enlarging one dim: output row r is (1 - t) x[lower] + t x[upper], with these for each r.

    Where the nearest row is taken, lower = upper and t = 0.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    t: tuple[float, ...]


def enlarge(split: Split, size: int, linear: bool) -> tuple[Split, Reads, Taps]:
    """The split of `size` rows interpolated from those of `split`, what each device reads, and the taps of every row.

    Rows are samples at their middles: row r of the output lies at (r + 1/2) rows / size - 1/2 of the input, as in
    `jax.image.resize`; outside the first and the last row the image continues with these.

    Raises:
      LayoutError: fewer rows than there are.
    """
    if size < split.size:
        raise LayoutError(f"upsampling {split.size} rows to {size} would lose some. Pool or convolve with a stride.")
    out = replace(split, size=size)
    if linear:
        # In units of 1 / (2 size) rows, so that nothing is rounded before the division for t.
        places = [min(max((2 * r + 1) * split.size - size, 0), 2 * size * (split.size - 1)) for r in range(size)]
        lower = [place // (2 * size) for place in places]
        t = [place / (2 * size) - row for place, row in zip(places, lower, strict=True)]
        upper = [min(row + 1, split.size - 1) for row in lower]
    else:
        lower = upper = [(2 * r + 1) * split.size // (2 * size) for r in range(size)]
        t = [0.0] * size
    ranges = [out.rows(part) for part in range(out.parts)]
    starts = [lower[rows[0]] if rows else 0 for rows in ranges]
    count = max(upper[rows[-1]] + 1 - start for rows, start in zip(ranges, starts, strict=True) if rows)
    return out, reads(split, out, starts, count), Taps(tuple(lower), tuple(upper), tuple(t))
