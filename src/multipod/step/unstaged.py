"""The programs of a run whose model is not cut into pipeline stages."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from multipod.data.source import HostBatch
from multipod.errors import DataError
from multipod.layout.mesh import replicated
from multipod.layout.shares import is_flat_tensor
from multipod.pytrees import Batch, Params, Shapes
from multipod.recipe.recipe import Recipe
from multipod.step.averaging import average_after
from multipod.step.evaluate import WholeEvaluation
from multipod.step.examine import Examination
from multipod.step.guard import NO_LIMITS, Controls, guard_of
from multipod.step.memory_layout import InputFormats, MemoryLayout, lower_update
from multipod.step.placement import MeshPlacement
from multipod.step.post_update import post_update_of
from multipod.step.replay import Replay, replay_of
from multipod.step.several import SeveralUpdates, several
from multipod.step.sizes import BySize
from multipod.step.specs import WHOLE, keep, sharded, whole_tensors
from multipod.step.state import PortableState, State, Sums, fresh_state
from multipod.step.sync.choose import sync_of
from multipod.step.sync.sync import GradientSync
from multipod.step.unshared import unshared_bytes
from multipod.step.update import UpdateStep


@dataclass(frozen=True)
class UnstagedProgram:
    """`Program` of a model that every replica runs whole, each layer split over its devices or not.

    With `faulty` an update can be asked to flip a bit of a gradient; it is then watched, whatever the recipe says.
    It has a method for each promise of the protocol, and hands nearly all of them on to its parts.
    """

    recipe: Recipe
    mesh: Mesh | AbstractMesh
    faulty: bool = False

    @cached_property
    def placement(self) -> MeshPlacement:
        """Where everything lies."""
        return MeshPlacement(self.recipe, self.mesh)

    @cached_property
    def sync(self) -> GradientSync:
        """How gradients are summed.

        Raises:
          LayoutError, RecipeError: what the recipe asks for does not go together.
        """
        return sync_of(self.placement)

    @property
    def rows(self) -> int:
        """The rows of a batch on this mesh."""
        return self.placement.batches.rows

    @property
    def padded(self) -> bool:
        """Whether batches hold padding."""
        return self.placement.batches.padded

    # What is kept.

    @cached_property
    def shapes(self) -> State:
        """The state as shapes with shardings."""
        shapes, sync = jax.eval_shape(self._fresh), self.sync
        specs = jax.tree.map(lambda _: WHOLE, shapes)
        optimizer = sync.optimizer_specs(shapes.optimizer)
        return sharded(shapes, self.mesh, specs._replace(params=sync.stored_specs, optimizer=optimizer))

    @property
    def state_parts(self) -> dict[str, Shapes]:
        """The parts of the state by their names."""
        shapes = self.shapes
        return {"parameters": shapes.params, "optimizer": shapes.optimizer, "statistics": shapes.statistics}

    @property
    def unshared(self) -> dict[str, int]:
        """Bytes on each device that sharding costs beyond equal shares."""
        return unshared_bytes(self.sync)

    def init(self) -> State:
        """The state before the first update, on the mesh."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.shapes)
        return jax.jit(self._fresh, out_shardings=shardings)()

    def _fresh(self) -> State:
        state = fresh_state(self.recipe, self.placement.optimizer)
        return self._kept(state)

    def _kept(self, state: State) -> State:
        """A state of whole tensors as it is kept."""
        params = keep(state.params, self.sync.stored_shares)
        return state._replace(params=params, optimizer=self.sync.fresh(state.optimizer))

    @property
    def conversion(self) -> "WholeConversion":
        """The way into other layouts."""
        return WholeConversion(self._kept)

    def full_params(self, state: State) -> Params:
        """The model's parameters, as the model takes them."""
        if not any(map(is_flat_tensor, jax.tree.leaves(state.params, is_leaf=is_flat_tensor))):
            return state.params
        placed = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.placement.base)
        return jax.jit(lambda params: whole_tensors(params, self.mesh), out_shardings=placed)(state.params)

    # What is given to an update.

    @property
    def watched(self) -> bool:
        """Whether an update looks at its own numbers (`step.guard`)."""
        return self.recipe.bad_updates.watches or self.faulty

    def controls(
        self,
        stop: int = 0,
        limits: tuple[float, float] = NO_LIMITS,
        flip: int = 0,
        halt: jax.Array | None = None,
    ) -> Controls:
        """What an update is told beside its batch."""
        return self.step.guard.controls(stop, limits, flip, halt)

    def place_batch(self, host: HostBatch, rows: np.ndarray, total: int, formats: InputFormats | None = None) -> Batch:
        """A host batch on the mesh."""
        return self.placement.batches.place(host, rows, total, formats)

    # The programs.

    @cached_property
    def step(self) -> UpdateStep:
        """The parts of an update."""
        post_update = average_after(post_update_of(self.recipe, self.placement.optimizer), self.sync)
        return UpdateStep(self.placement, self.sync, post_update, guard_of(self.recipe, self.mesh, self.faulty))

    def update(self, state: State, batch: Batch, controls: Controls) -> tuple[State, Sums]:
        """One update, to be compiled."""
        return self.step.update(state, batch, controls)

    @cached_property
    def lowered(self) -> jax.stages.Lowered:
        """`update`, traced but not compiled, for batches of the largest size."""
        return self._lowered(self.placement.batches.examples[-1])

    def _lowered(self, example: HostBatch, layout: MemoryLayout = "") -> jax.stages.Lowered:
        out = jax.tree.map(lambda leaf: leaf.sharding, self.shapes), replicated(self.mesh)
        batch = self.placement.batches.shapes(example)
        return lower_update(self.update, self.shapes, batch, self.step.guard.control_shapes(), out, layout)

    def compile_update(self, layout: MemoryLayout = "") -> Callable[[State, Batch, Controls], tuple[State, Sums]]:
        """`update`, compiled; for batches of several sizes, one program for each."""
        *smaller, largest = self.placement.batches.examples
        compiled = [self._lowered(example, layout).compile() for example in smaller]
        compiled.append((self._lowered(largest, layout) if layout else self.lowered).compile())
        return BySize(compiled) if smaller else compiled[0]

    def compile_several(self, count: int) -> SeveralUpdates:
        """So many updates, compiled as one program."""
        if len(self.placement.batches.examples) > 1:
            raise DataError("batches of several sizes cannot be used in one call. Leave out --steps-per-call.")
        out = jax.tree.map(lambda leaf: leaf.sharding, self.shapes), replicated(self.mesh)
        batches, controls = (self.placement.batches.shapes(),) * count, self.step.guard.control_shapes()
        return lower_update(several(self.update), self.shapes, batches, controls, out).compile()

    def check(self, sums: Sums) -> None:
        """Refuses an update of which the sums tell that a device's tensors were not finite (Adasum)."""
        self.sync.check(sums)

    def sum_alone(self) -> Callable[[Params], Params]:
        """The gradient sum (and the gathering of the weights) as a program of its own, to be timed."""
        return self.sync.sum_alone()

    @cached_property
    def evaluation(self) -> WholeEvaluation:
        """How a state is evaluated."""
        return WholeEvaluation(self.placement)

    @cached_property
    def replay(self) -> Replay | None:
        """Makes an update's gradients on other devices."""
        return replay_of(self.placement, self.sync)

    @cached_property
    def examination(self) -> Examination:
        """Looks closer at a bad update."""
        return Examination(self.step, self._fresh, jax.tree.map(lambda leaf: leaf.sharding, self.shapes))


@dataclass(frozen=True)
class WholeConversion:
    """`program.Conversion` of a model that is not cut into stages: its state is portable, but for flat tensors.

    Attributes:
      keep: a state of whole tensors to one as it is kept.
    """

    keep: Callable[[State], State]

    def drain(self, state: State) -> State:
        """`state` itself: nothing is under way between updates."""
        return state

    def to_portable(self, state: State) -> PortableState:
        """What `state` holds."""
        params, optimizer = whole_tensors((state.params, state.optimizer))
        return PortableState(params, optimizer, {}, state.statistics, state.key, state.update, state.position)

    def from_portable(self, portable: PortableState) -> State:
        """A state that goes on from `portable`."""
        return self.keep(
            State(
                portable.params,
                portable.statistics,
                portable.optimizer,
                portable.key,
                portable.update,
                portable.position,
            )
        )
