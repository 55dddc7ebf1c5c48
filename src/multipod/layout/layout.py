"""The `Layout`: how a run lies on a mesh, as plain data."""

from dataclasses import dataclass

from multipod.collectives.build import ALGORITHMS
from multipod.errors import LayoutError, nearest

DATA_AXES = ("y", "x")
"""The mesh axes that split the batch: rows and columns of the chip mesh."""

BUILT_IN_SUMS = ("xla", "torus", "ordered", "direct")
"""The sums that are no schedules: the names of `multipod.execute.sums.SUMS`, which lies on this floor."""


@dataclass(frozen=True)
class Layout:
    """Mesh axes with their sizes, how gradients are summed over them, and what the update splits.

    Attributes:
      mesh: rows and columns of chips, (y, x); empty follows the number of devices (`default_shape`).
      gradient_sum: a name in `BUILT_IN_SUMS`, or a schedule's in `multipod.collectives.build.ALGORITHMS`.
      shard_update: leave the gradient sum scattered, let each device update its share of the
        weights and of the optimizer state, then gather the weights (arXiv:2004.13336).
      failed: (row, column) of chips of the mesh that are not to be used. Training goes on over the
        others, in one row; a batch that does not divide over them is padded.
    """

    mesh: tuple[int, ...] = ()
    gradient_sum: str = "xla"
    shard_update: bool = False
    failed: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.mesh and (len(self.mesh) != 2 or min(self.mesh) < 1):
            raise LayoutError(f"layout.mesh={self.mesh} is no mesh of rows x columns. Give two positive sizes, as 2x4.")
        known = (*BUILT_IN_SUMS, *ALGORITHMS)
        if self.gradient_sum not in known:
            raise LayoutError(
                f"layout.gradient_sum: no sum is called {self.gradient_sum!r}. {nearest(self.gradient_sum, known)}"
            )


def parse_shape(text: str) -> tuple[int, int]:
    """(rows, columns) of a mesh written as `2x4`.

    Raises:
      LayoutError: anything else.
    """
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise LayoutError(f"mesh {text!r} is not of the form ROWSxCOLUMNS. Write two positive numbers, as 2x4.")
    return int(parts[0]), int(parts[1])


def default_shape(devices: int) -> tuple[int, int]:
    """The squarest (rows, columns) with rows <= columns that uses all `devices`: 8 gives 2x4, 7 gives 1x7."""
    rows = next(rows for rows in range(int(devices**0.5), 0, -1) if devices % rows == 0)
    return rows, devices // rows
