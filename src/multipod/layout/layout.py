"""The `Layout`: how a run lies on a mesh, as plain data."""

from dataclasses import dataclass

from multipod.collectives.build import ALGORITHMS
from multipod.errors import LayoutError, nearest

DATA_AXES = ("y", "x")
"""The mesh axes that split the batch: rows and columns of the chip mesh."""

BUILT_IN_SUMS = ("xla", "torus", "ordered", "direct")
"""The sums that are no schedules: the names of `multipod.execute.sums.SUMS`, which lies on this floor."""

COMBINATIONS = ("adasum", "adasum-rows", "adasum-gradients")
"""The ways of combining that are no sums, and change what is learnt: Adasum of the changes that every device's own
optimizer makes; the same between rows of the mesh, with the mean inside each row; Adasum of the gradients."""


@dataclass(frozen=True)
class Layout:
    """Mesh axes with their sizes, how gradients are summed over them, and what the update splits.

    Attributes:
      mesh: rows and columns of chips, (y, x); empty follows the number of devices (`default_shape`).
      gradient_sum: a name in `BUILT_IN_SUMS`, or a schedule's in `multipod.collectives.build.ALGORITHMS`, or one in
        `COMBINATIONS`.
      shard_update: leave the gradient sum scattered, let each device update its share of the
        weights and of the optimizer state, then gather the weights (arXiv:2004.13336).
      report_orthogonality: (with Adasum) report |combined|^2 / sum |g_i|^2 of each tensor at every update: 1 where
        the devices' gradients are orthogonal, 1 / devices where they are equal.
      failed: (row, column) of chips of the mesh that are not to be used. Training goes on over the
        others, in one row; a batch that does not divide over them is padded.
    """

    mesh: tuple[int, ...] = ()
    gradient_sum: str = "xla"
    shard_update: bool = False
    failed: tuple[tuple[int, int], ...] = ()
    report_orthogonality: bool = False

    def __post_init__(self) -> None:
        if self.mesh and (len(self.mesh) != 2 or min(self.mesh) < 1):
            raise LayoutError(f"layout.mesh={self.mesh} is no mesh of rows x columns. Give two positive sizes, as 2x4.")
        known = (*BUILT_IN_SUMS, *ALGORITHMS, *COMBINATIONS)
        if self.gradient_sum not in known:
            raise LayoutError(
                f"layout.gradient_sum: no sum is called {self.gradient_sum!r}. {nearest(self.gradient_sum, known)}"
            )
        if self.report_orthogonality and not self.combines:
            raise LayoutError(
                f"layout.report_orthogonality: gradient_sum={self.gradient_sum} is a sum and knows nothing of angles. "
                f"Take {', '.join(COMBINATIONS)}, or leave the report out."
            )
        if self.gradient_sum == "adasum-rows" and self.failed:
            raise LayoutError(
                "layout.gradient_sum=adasum-rows: with failed chips the mesh is a single row, of which this is the "
                "mean. Take adasum, which works with any number of chips."
            )

    @property
    def combines(self) -> bool:
        """Whether gradients are combined by Adasum, and not summed."""
        return self.gradient_sum in COMBINATIONS

    @property
    def local_state(self) -> bool:
        """Whether every device has an optimizer state of its own."""
        return self.gradient_sum in ("adasum", "adasum-rows")


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
