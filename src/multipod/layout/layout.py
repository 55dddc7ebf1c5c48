"""The `Layout`: how a run lies on a mesh, as plain data."""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from multipod import notebook
from multipod.errors import LayoutError
from multipod.layout.compatible import LayoutUse, conflicts
from multipod.layout.split import UNSPLIT, ModelSplit, PipelineSplit
from multipod.layout.sync import PLAIN, Sync


@dataclass(frozen=True)
class Layout:
    """How a run lies on the devices: the mesh, what a replica's devices split, and how replicas are kept the same.

    The mesh of devices is cut in equal replicas (model-parallel groups). The devices of a replica share one part of the
    batch and split the model or the image between them; the replicas, y rows and x columns of them, split the batch.

    Attributes:
      mesh: rows and columns of replicas, (y, x); empty follows the number of devices (`default_shape`). A replica is
        one device where nothing but the batch is split.
      split: what the devices of a replica, or of each stage of it, share.
      pipeline: the stages that its layers lie in; None where each device runs all of them.
      sync: how gradients are summed, and what each replica keeps.
      failed: (row, column) of replicas that are not to be used. Training goes on over the others, in one row; a batch
        that does not divide over them is padded.
      replica_shape: rows and columns of the devices of a replica; empty takes the squarest, 1x2, 2x2, 2x4, 4x4.
    """

    mesh: tuple[int, ...] = ()
    split: ModelSplit = UNSPLIT
    pipeline: PipelineSplit | None = None
    sync: Sync = PLAIN
    failed: tuple[tuple[int, int], ...] = ()
    replica_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        wrong = [*_wrong_shapes(self), *_conflicts(self.split, self.pipeline, self.sync, self.failed)]
        if wrong:
            raise LayoutError("\n".join(wrong))

    def _repr_html_(self) -> str:
        """Draws what is split over what, and the mesh of replicas, in a notebook."""
        mesh = "x".join(map(str, self.mesh)) or "any mesh"
        inside = f"{self.replica_text}, {self.replica_devices} devices" if self.replica_devices > 1 else "one device"
        rows = [
            ("replicas", mesh if self.mesh else "as many as there are devices for"),
            ("a replica", inside),
            ("failed", ", ".join(map(str, self.failed)) or None),
        ]
        shown = ["split"] * (self.split != UNSPLIT) + ["pipeline"] * (self.pipeline is not None)
        parts = [notebook.fields(name, getattr(self, name)) for name in [*shown, *["sync"] * (self.sync != PLAIN)]]
        drawn = notebook.grid(*self.mesh_shape(0), self.failed, "the mesh of replicas") if self.mesh else ""
        title = " x ".join([mesh, *(f"{axis}={size}" for axis, size in self.replica_sizes.items())])
        return notebook.card("layout", title, rows, *parts, drawn)

    @property
    def stages(self) -> int:
        """The stages of the pipeline; 1 where there is none."""
        return self.pipeline.stages if self.pipeline else 1

    @property
    def asynchronous(self) -> bool:
        """Whether stages update at moments of their own, so that passes are under way between updates."""
        return self.pipeline is not None and self.pipeline.asynchronous

    @cached_property
    def replica_sizes(self) -> dict[str, int]:
        """The sizes of the axes inside a replica, those of size 1 left out, in the order of `AXES`."""
        return {"stage": self.stages, **self.split.sizes} if self.stages > 1 else self.split.sizes

    @cached_property
    def replica_devices(self) -> int:
        """The number of devices of a replica."""
        return self.stages * self.split.devices

    @property
    def weight_devices(self) -> int:
        """Devices of a replica that hold different weights, at least in part."""
        return self.stages * self.split.weight_devices

    @property
    def replica_grid(self) -> tuple[int, int]:
        """Rows and columns of the devices of a replica."""
        rows, columns = self.replica_shape or default_shape(self.replica_devices)
        return rows, columns

    def mesh_shape(self, devices: int) -> tuple[int, int]:
        """Rows and columns of replicas on so many devices: `mesh`, or the squarest that uses them.

        Raises:
          LayoutError: the replicas do not divide the devices.
        """
        if self.mesh:
            rows, columns = self.mesh
            return rows, columns
        if devices % self.replica_devices:
            raise LayoutError(
                f"{self.replica_text} is {self.replica_devices} devices, which do not divide the {devices} there are. "
                f"Halve an axis, or use {-(-devices // self.replica_devices) * self.replica_devices} devices."
            )
        return default_shape(devices // self.replica_devices)

    @property
    def replica_text(self) -> str:
        """The axes of a replica as text: `spatial=2 x model=4`."""
        return " x ".join(f"{axis}={size}" for axis, size in self.replica_sizes.items()) or "a replica of one device"


@lru_cache(maxsize=4096)
def _conflicts(
    split: ModelSplit, pipeline: PipelineSplit | None, sync: Sync, failed: tuple[tuple[int, int], ...]
) -> tuple[str, ...]:
    """What does not go together in a layout; remembered, since a planner makes thousands."""
    return conflicts(LayoutUse(split, pipeline, sync, failed))


def _wrong_shapes(layout: Layout) -> list[str]:
    wrong: list[str] = []
    if not (layout.mesh or layout.replica_shape):
        return wrong
    if layout.mesh and (len(layout.mesh) != 2 or min(layout.mesh) < 1):
        wrong.append(f"layout.mesh={layout.mesh} is no mesh of rows x columns. Give two positive sizes, as 2x4.")
    shape, devices = layout.replica_shape, layout.replica_devices
    if shape and (len(shape) != 2 or math.prod(shape) != devices):
        wrong.append(
            f"layout.tile={shape} is not {devices} devices, as {layout.replica_text} needs. Give rows and columns "
            f"whose product is {devices}, or leave it out."
        )
    return wrong


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
