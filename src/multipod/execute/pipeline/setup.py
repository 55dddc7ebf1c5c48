"""What a pipeline is made of: a model in parts, a proven schedule, a mesh; nothing in it is compiled or allocated."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from multipod.errors import LayoutError
from multipod.execute.pipeline.delays import PipelinePart
from multipod.execute.pipeline.in_flight import trace_inside
from multipod.execute.pipeline.passes import TracedPasses, trace_passes
from multipod.execute.pipeline.tables import TickTables, build_tables
from multipod.pipelines.check import PipelineProof
from multipod.pipelines.schedule import PipelineSchedule
from multipod.pytrees import Grads, Pytree, Shapes, Specs

Tied = tuple[tuple[tuple[int, str], ...], ...]
"""Groups of weights that are one: for each the (part, name) of its copies; a name is a path such as `tokens/table`."""


@dataclass(frozen=True, eq=False)
class PipelineSetup:
    """A model in parts, a proven schedule, and a mesh.

    Attributes:
      proof: of the schedule; of an asynchronous one, with updates enough to fill the pipe (`PipelineProof.settled`).
      parts: of the model, as many as `proof.schedule.parts`. A last part's loss is its share of the mean over all
        micro-batches and data devices: gradients are added over both.
      weights: each part's weights, as shapes.
      aux: what a part's function gets of one micro-batch on one data device, as shapes.
      mesh: has `stage_axis`, as long as the pipeline, and `data_axes`. Other axes are XLA's.
      tied: weights that several parts hold (synchronous schedules only).
      over_data: inside `shard_map`, sums a tree over `data_axes`; None: XLA's sum. (An asynchronous pipeline's stages
        sum at moments of their own, which only XLA's sum can: in it nobody waits for other stages.)
      splits: how the mesh's other axes split each part's weights, and its optimizer's state, as `PartitionSpec`s; None:
        they are whole in every stage.

    Raises:
      LayoutError: parts or a mesh that do not fit the schedule.
    """

    proof: PipelineProof
    parts: Sequence[PipelinePart]
    weights: Sequence[Shapes]
    aux: Shapes
    mesh: Mesh | AbstractMesh
    stage_axis: str = "stage"
    data_axes: tuple[str, ...] = ()
    tied: Tied = ()
    over_data: Callable[[Grads], Grads] | None = None
    splits: tuple[Sequence[Specs], Sequence[Specs]] | None = None

    def __post_init__(self) -> None:
        schedule, wrong = self.schedule, []
        if len(self.parts) != schedule.parts:
            wrong.append(f"the model is in {len(self.parts)} parts, and the schedule has {schedule.parts}")
        if self.mesh.shape.get(self.stage_axis) != schedule.stages:
            wrong.append(f"mesh axis {self.stage_axis} has {self.mesh.shape.get(self.stage_axis, 0)} devices")
        if not schedule.synchronous and not self.proof.settled:
            wrong.append(f"{schedule.updates} updates do not fill the pipe, so its delays are not known")
        if not schedule.synchronous and self.tied:
            wrong.append("an asynchronous pipeline cannot keep tied weights equal")
        if not schedule.synchronous and self.over_data is not None:
            wrong.append("an asynchronous pipeline's gradients are summed by XLA alone")
        if wrong:
            raise LayoutError(f"{schedule}: {'; '.join(wrong)}. Cut the model, the mesh and the schedule alike.")

    @property
    def schedule(self) -> PipelineSchedule:
        """The schedule that was proven."""
        return self.proof.schedule

    @cached_property
    def tables(self) -> TickTables:
        """The schedule in the form in which the loop reads it."""
        return build_tables(self.proof)

    @property
    def asynchronous(self) -> bool:
        """Whether passes are under way between updates."""
        return not self.schedule.synchronous

    @cached_property
    def passes(self) -> tuple[TracedPasses, ...]:
        """The two passes of each part; parts of one kind share theirs."""
        return tuple(trace_inside(self.mesh, self.manual_axes, self._trace_parts))

    def _trace_parts(self) -> list[TracedPasses]:
        each: list[TracedPasses] = []
        known: dict[Hashable, TracedPasses] = {}
        x: Pytree = ()
        for n, (part, weights) in enumerate(zip(self.parts, self.weights, strict=True)):
            key = n if part.kind is None else ("kind", part.kind)
            if key not in known:
                known[key] = trace_passes(part.function, weights, x, self.aux)
            each.append(known[key])
            x = each[-1].y
        return each

    @property
    def manual_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the pipeline's programs are manual."""
        return self.stage_axis, *self.data_axes

    @property
    def chunks(self) -> range:
        """The numbers of the chunks: a stage has one part of the model in each."""
        return range(self.schedule.chunks)

    @property
    def data_devices(self) -> int:
        """Devices over which a stage's batch is split."""
        return int(np.prod([self.mesh.shape[axis] for axis in self.data_axes], dtype=int))

    def select_chunk(self, each: Sequence[Pytree], chunk: int) -> list[Pytree]:
        """Selects from one item a part those of a chunk, by stage."""
        return [each[self.schedule.part(stage, chunk)] for stage in range(self.schedule.stages)]
