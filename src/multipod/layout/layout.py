"""The `Layout`: how a run lies on a mesh, as plain data."""

from dataclasses import dataclass
from typing import Literal

from multipod.errors import LayoutError

DATA_AXES = ("y", "x")
"""The mesh axes that split the batch: rows and columns of the chip mesh."""


@dataclass(frozen=True)
class Layout:
    """Mesh axes with their sizes, how gradients are summed over them, and what the update splits.

    Attributes:
      mesh: rows and columns, (y, x); empty follows the number of devices (`default_shape`).
      gradient_sum: a name in `multipod.execute.sums.SUMS`.
      shard_update: leave the gradient sum scattered, let each device update its share of the
        weights and of the optimizer state, then gather the weights (arXiv:2004.13336).
    """

    mesh: tuple[int, ...] = ()
    gradient_sum: Literal["xla", "torus", "ordered", "direct"] = "xla"
    shard_update: bool = False

    def __post_init__(self) -> None:
        if self.mesh and (len(self.mesh) != 2 or min(self.mesh) < 1):
            raise LayoutError(f"layout.mesh={self.mesh} is no mesh of rows x columns. Give two positive sizes, as 2x4.")


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
