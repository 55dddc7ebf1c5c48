"""The programs of a run whose model lies in pipeline stages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from multipod.data.global_arrays import to_mesh
from multipod.data.source import HostBatch
from multipod.errors import LayoutError
from multipod.execute.pipeline.in_flight import add_first_dim, drop_first_dim
from multipod.layout.mesh import batch_sharding, replicated
from multipod.nn.by_example import numbered
from multipod.pytrees import Batch, Grads, Params, Shapes
from multipod.recipe.recipe import Recipe
from multipod.step.guard import NO_LIMITS, Controls, Unguarded
from multipod.step.memory_layout import InputFormats, MemoryLayout, lower_update
from multipod.step.several import SeveralUpdates, several
from multipod.step.staged.convert import StagedConversion
from multipod.step.staged.evaluate import StagedEvaluation
from multipod.step.staged.micro_batches import STAGE_AXIS, cut_rows, micro_keys, over_stages
from multipod.step.staged.pipe import join_params
from multipod.step.staged.placement import StagePlacement
from multipod.step.staged.state import pipe_state, with_pipe_state
from multipod.step.state import State, Sums


@dataclass(frozen=True)
class StagedProgram:
    """`Program` of a model in stages.

    Rows of a batch go to data devices, and there through the stages, as `UnstagedProgram` would take them with an
    `accumulate` of that many: so the two learn the same, dropout included.
    """

    recipe: Recipe
    mesh: Mesh | AbstractMesh
    faulty = False
    watched = False
    replay = None
    examination = None

    @cached_property
    def placement(self) -> StagePlacement:
        """Where everything lies."""
        return StagePlacement(self.recipe, self.mesh)

    @property
    def rows(self) -> int:
        """The rows of a batch on this mesh."""
        return self.placement.rows

    @property
    def padded(self) -> bool:
        """Whether batches hold padding."""
        return self.placement.padded

    # What is kept.

    @property
    def shapes(self) -> State:
        """The state as shapes with shardings."""
        return self.placement.shapes

    @property
    def state_parts(self) -> dict[str, Shapes]:
        """The parts of the state by their names; of an asynchronous pipeline also what is under way."""
        shapes = self.shapes
        parts = {"parameters": shapes.params, "optimizer": shapes.optimizer.states}
        return parts | ({"under way": shapes.optimizer.flight} if self.recipe.layout.asynchronous else {})

    @property
    def unshared(self) -> dict[str, int]:
        """Returns nothing: a stage's weights and state are whole on its data devices."""
        return {}

    def init(self) -> State:
        """The state before the first update, on the mesh."""
        return jax.jit(self.placement.fresh, out_shardings=self.placement.shardings)()

    @property
    def conversion(self) -> StagedConversion:
        """The way into other layouts."""
        return StagedConversion(self.placement)

    def full_params(self, state: State) -> Params:
        """The model's parameters after all updates, each whole on every device."""
        join = jax.jit(
            lambda slots: join_params(self.placement.pipe.unpack(slots)), out_shardings=replicated(self.mesh)
        )
        return join(self.evaluation.prepare(state).params)

    # What is given to an update.

    def controls(
        self,
        stop: int = 0,
        limits: tuple[float, float] = NO_LIMITS,
        flip: int = 0,
        halt: jax.Array | None = None,
    ) -> Controls:
        """What an update is told beside its batch: flags alone."""
        return self._guard.controls(stop, limits, flip, halt)

    @cached_property
    def _guard(self) -> Unguarded:
        return Unguarded(self.mesh)

    def place_batch(self, host: HostBatch, rows: np.ndarray, total: int, formats: InputFormats | None = None) -> Batch:
        """A host batch on the mesh."""
        return to_mesh(host, rows, total, dict.fromkeys(host, batch_sharding(self.mesh)))

    # The programs.

    def update(self, state: State, batch: Batch, controls: Controls) -> tuple[State, Sums]:
        """One update's worth of ticks. Returns the new state and the sums of the values of what was finished.

        The sums also hold `stop`: how many data devices asked for one. In an asynchronous pipeline they are those of
        the micro-batches that came to its end, at first none (`count` 0).
        """
        count = self.placement.micro_batches
        aux = {"batch": cut_rows(numbered(batch), self.mesh, count), "key": micro_keys(state, self.mesh, count)}
        delayed = state.update >= self.recipe.pipemare.warmup
        inner, sums = self.placement.pipe.update(pipe_state(state), aux, delayed)
        new = with_pipe_state(state, inner)._replace(update=state.update + 1, position=state.position + 1)
        return new, sums | {"stop": controls.stop.sum()}

    @cached_property
    def lowered(self) -> jax.stages.Lowered:
        """`update`, traced but not compiled."""
        out = self.placement.shardings, replicated(self.mesh)
        return lower_update(self.update, self.shapes, self.placement.batch_shapes(), self._guard.control_shapes(), out)

    def compile_update(self, layout: MemoryLayout = "") -> Callable[[State, Batch, Controls], tuple[State, Sums]]:
        """`update`, compiled.

        Raises:
          LayoutError: a memory layout was asked for.
        """
        if layout:
            raise LayoutError(f"a run in stages takes images row by row, not {layout}. Leave out --image-order.")
        return self.lowered.compile()

    def compile_several(self, count: int) -> SeveralUpdates:
        """So many updates, compiled as one program."""
        out, batches = (self.placement.shardings, replicated(self.mesh)), (self.placement.batch_shapes(),) * count
        return lower_update(several(self.update), self.shapes, batches, self._guard.control_shapes(), out).compile()

    def check(self, sums: Sums) -> None:
        """Nothing: Adasum, whose sums tell of tensors that are not finite, is refused in stages."""

    def sum_alone(self) -> Callable[[Grads], Grads]:
        """The gradient sum over the data axes as a program of its own, to be timed."""
        stage = jax.tree.map(lambda _: PartitionSpec(STAGE_AXIS), self.shapes.params)
        summed = lambda gradients: add_first_dim(self.placement.pipe.sum_gradients(drop_first_dim(gradients)))  # noqa: E731
        return jax.jit(over_stages(summed, self.mesh, (stage,), stage))

    @cached_property
    def evaluation(self) -> StagedEvaluation:
        """How a state is evaluated."""
        return StagedEvaluation(self.placement)
