"""The `Layout`: how a run lies on a mesh, as plain data."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from multipod.collectives.build import ALGORITHMS
from multipod.errors import LayoutError, nearest
from multipod.layout.rules import DEFAULT_RULES, Rule, parse_rule
from multipod.pipelines.build import PIPELINES

DATA_AXES = ("y", "x")
"""The mesh axes that split the batch: rows and columns of the chip mesh."""

TILE_AXES = ("stage", "spatial", "width", "model", "expert")
"""The mesh axes whose devices lie side by side in a tile of the chip mesh; of these `expert` splits the batch too.
Stages are first, so that what a stage splits between devices, which talk at every layer, lies closest, as inside one
host."""

BUILT_IN_SUMS = ("xla", "torus", "ordered", "direct")
"""The sums that are no schedules: the names of `multipod.execute.sums.SUMS`, which lies on this floor."""

ASYNCHRONOUS = ("pipemare", "pipedream")
"""The pipelines that never drain: what they learn depends on the stages, the micro-batches and the schedule."""

COMBINATIONS = ("adasum", "adasum-rows", "adasum-gradients")
"""The ways of combining that are no sums, and change what is learnt: Adasum of the changes that every device's own
optimizer makes; the same between rows of the mesh, with the mean inside each row; Adasum of the gradients."""


@dataclass(frozen=True)
class Layout:
    """Mesh axes with their sizes, what they split, how gradients are summed over them, and what the update splits.

    The mesh of devices is cut in equal tiles. The devices of a tile share one part of the batch and split the model or
    the image between them; the tiles, y rows and x columns of them, split the batch.

    Attributes:
      mesh: rows and columns of tiles, (y, x); empty follows the number of devices (`default_shape`). A tile is one
        device where nothing but the batch is split.
      gradient_sum: a name in `BUILT_IN_SUMS`, or a schedule's in `multipod.collectives.build.ALGORITHMS`, or one in
        `COMBINATIONS`.
      shard_update: leave the gradient sum scattered, let each device update its share of the
        weights and of the optimizer state, then gather the weights (arXiv:2004.13336).
      failed: (row, column) of tiles of the mesh that are not to be used. Training goes on over the
        others, in one row; a batch that does not divide over them is padded.
      report_orthogonality: (with Adasum) report |combined|^2 / sum |g_i|^2 of each tensor at every update: 1 where
        the devices' gradients are orthogonal, 1 / devices where they are equal.
      spatial: parts that the height of images is cut in, or of height and width, as (4,) or (2, 2).
      model: devices that split the dims which `rules` give to the axis `model`.
      expert: devices of a tile that split the experts, or the tables of a recommendation model; they split the batch
        too, so they count as data devices for everything else.
      stage: stages of a pipeline, each on a device of its own, or on `model` devices that split its layers
        (`multipod.step.staged`).
      schedule: (stage) when which stage treats which micro-batch: a name in `multipod.pipelines.build.PIPELINES`.
      micro_batches: (stage) parts of the batch that travel through the stages; 0: four for each stage, or the most
        below that which divide a device's rows (`multipod.layout.stages.micro_batches`).
      chunks: (stage, `interleaved`) parts of the model on each device.
      cut: (stage) how many of the model's layers each part has, in order; empty balances the parts by the layers'
        estimated costs. `multipod show --time-layers` measures them.
      tile: rows and columns of a tile; empty takes the squarest, 1x2, 2x2, 2x4, 4x4.
      rules: which axis splits what (`multipod.layout.rules.Rule`); they go before `DEFAULT_RULES`.
      shard_weights: keep the weights split over the data axes, too; gather those of a layer before they are used, and
        again in the backward pass (arXiv:1910.02054, stage 3). Their gradients are summed where they are made.
      gather_dtype: weights travel as this type and are used as this type, while what is kept and updated stays float32
        and split; with `shard_update` or `shard_weights`.
      sum_dtype: the type that gradients have on the wire; empty is their own. They are added in it.
      bucket_bytes: sums gradients in messages of about so many bytes, in the order in which the backward pass makes
        them, so that the sum of one overlaps the making of the next; 0 sums all in one message.
    """

    mesh: tuple[int, ...] = ()
    gradient_sum: str = "xla"
    shard_update: bool = False
    failed: tuple[tuple[int, int], ...] = ()
    report_orthogonality: bool = False
    spatial: tuple[int, ...] = ()
    model: int = 1
    expert: int = 1
    stage: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 0
    chunks: int = 2
    cut: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    rules: tuple[str, ...] = ()
    shard_weights: bool = False
    gather_dtype: Literal["", "bfloat16"] = ""
    sum_dtype: Literal["", "float32", "bfloat16"] = ""
    bucket_bytes: int = 0

    def __post_init__(self) -> None:
        wrong = [*_wrong_sizes(self), *_wrong_choices(self)]
        if wrong:
            raise LayoutError("\n".join(wrong))

    @property
    def combines(self) -> bool:
        """Whether gradients are combined by Adasum, and not summed."""
        return self.gradient_sum in COMBINATIONS

    @property
    def local_state(self) -> bool:
        """Whether every device has an optimizer state of its own."""
        return self.gradient_sum in ("adasum", "adasum-rows")

    @property
    def asynchronous(self) -> bool:
        """Whether stages update at moments of their own, so that passes are under way between updates."""
        return self.stage > 1 and self.schedule in ASYNCHRONOUS

    @property
    def splits_update(self) -> bool:
        """Whether each device updates only its share of the weights."""
        return self.shard_update or self.shard_weights

    @property
    def keeps_shares(self) -> bool:
        """Whether the weights stay split between updates."""
        return self.shard_weights or (self.shard_update and bool(self.gather_dtype))

    @cached_property
    def tile_sizes(self) -> dict[str, int]:
        """The sizes of the axes inside a tile, those of size 1 left out, in the order of `TILE_AXES`."""
        height, width = (*self.spatial, 1, 1)[:2]
        sizes = dict(zip(TILE_AXES, (self.stage, height, width, self.model, self.expert), strict=True))
        return {axis: size for axis, size in sizes.items() if size > 1}

    @property
    def tile_devices(self) -> int:
        """The number of devices of a tile."""
        return math.prod(self.tile_sizes.values())

    @property
    def tile_shape(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        rows, columns = self.tile or default_shape(self.tile_devices)
        return rows, columns

    @cached_property
    def table(self) -> tuple[Rule, ...]:
        """All rules, the layout's own first."""
        return tuple(map(parse_rule, (*self.rules, *DEFAULT_RULES)))

    def mesh_shape(self, devices: int) -> tuple[int, int]:
        """Rows and columns of tiles on so many devices: `mesh`, or the squarest that uses them.

        Raises:
          LayoutError: the tiles do not divide the devices.
        """
        if self.mesh:
            rows, columns = self.mesh
            return rows, columns
        if devices % self.tile_devices:
            raise LayoutError(
                f"{self.spelled_tile} is {self.tile_devices} devices, which do not divide the {devices} there are. "
                f"Halve an axis, or use {-(-devices // self.tile_devices) * self.tile_devices} devices."
            )
        return default_shape(devices // self.tile_devices)

    @property
    def spelled_tile(self) -> str:
        """The axes of a tile as text: `spatial=2 x model=4`."""
        return " x ".join(f"{axis}={size}" for axis, size in self.tile_sizes.items()) or "a tile of one device"


def _wrong_sizes(layout: Layout) -> list[str]:
    wrong = []
    if layout.mesh and (len(layout.mesh) != 2 or min(layout.mesh) < 1):
        wrong.append(f"layout.mesh={layout.mesh} is no mesh of rows x columns. Give two positive sizes, as 2x4.")
    if len(layout.spatial) > 2 or any(size < 1 for size in layout.spatial):
        wrong.append(
            f"layout.spatial={layout.spatial}: give parts of the height, as 4, or of height and width, as 2x2."
        )
        return wrong
    least = {"model": 1, "expert": 1, "stage": 1, "chunks": 1, "bucket_bytes": 0, "micro_batches": 0}
    small = [f"{name}={getattr(layout, name)}" for name, n in least.items() if getattr(layout, name) < n]
    if small:
        wrong.append(f"layout: {', '.join(small)}. Sizes are 1 or more; bucket_bytes and micro_batches 0 or more.")
        return wrong
    if layout.tile and (len(layout.tile) != 2 or math.prod(layout.tile) != layout.tile_devices):
        wrong.append(
            f"layout.tile={layout.tile} is not {layout.tile_devices} devices, as {layout.spelled_tile} needs. "
            f"Give rows and columns whose product is {layout.tile_devices}, or leave it out."
        )
    return wrong


def _wrong_choices(layout: Layout) -> list[str]:
    wrong = []
    known = (*BUILT_IN_SUMS, *ALGORITHMS, *COMBINATIONS)
    name = f"layout.gradient_sum={layout.gradient_sum}"
    if layout.gradient_sum not in known:
        wrong.append(
            f"layout.gradient_sum: no sum is called {layout.gradient_sum!r}. {nearest(layout.gradient_sum, known)}"
        )
    if layout.schedule not in PIPELINES:
        wrong.append(
            f"layout.schedule: no pipeline is called {layout.schedule!r}. {nearest(layout.schedule, PIPELINES)}"
        )
    if layout.report_orthogonality and not layout.combines:
        wrong.append(
            f"layout.report_orthogonality: gradient_sum={layout.gradient_sum} is a sum and knows nothing of angles. "
            f"Take {', '.join(COMBINATIONS)}, or leave the report out."
        )
    if layout.gradient_sum == "adasum-rows" and layout.failed:
        wrong.append(
            f"{name}: with failed chips the mesh is a single row, of which this is the "
            "mean. Take adasum, which works with any number of chips."
        )
    if layout.combines and (layout.shard_weights or layout.tile_sizes.keys() & {"model", "expert", "stage"}):
        wrong.append(
            f"{name} needs the angles of whole tensors on each device, which shard_weights and the axes model, expert "
            "and stage split. Take a sum, or split the batch and images only."
        )
    if layout.combines and (layout.bucket_bytes or layout.sum_dtype or layout.gather_dtype):
        wrong.append(f"{name} has no buckets and types of its own: leave bucket_bytes, sum_dtype and gather_dtype out.")
    if layout.gather_dtype and not layout.splits_update:
        wrong.append(
            f"layout.gather_dtype={layout.gather_dtype}: nothing is gathered. Set shard_update=true or "
            "shard_weights=true, or leave it out."
        )
    for text in layout.rules:
        try:
            _check_axes(parse_rule(text))
        except LayoutError as error:
            wrong.append(str(error))
    return wrong


def _check_axes(rule: Rule) -> None:
    known = (*DATA_AXES, *TILE_AXES)
    for axis in (axis for axes in rule.axes for axis in axes):
        if axis not in known:
            raise LayoutError(f"layout.rules: {rule.text!r} names axis {axis!r}. {nearest(axis, known)}")
        if axis in DATA_AXES:
            raise LayoutError(
                f"layout.rules: {rule.text!r} splits weights over the data axis {axis}. shard_weights=true does "
                "that, for all of them; experts go to the axis expert."
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
