"""`Program`: a recipe on a mesh, as everything that trains, evaluates or saves it sees it."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from multipod.data.source import HostBatch
from multipod.pytrees import Batch, Params, Shapes
from multipod.recipe.recipe import Recipe
from multipod.step.evaluate import ScoredLabels
from multipod.step.examine import Examination
from multipod.step.guard import NO_LIMITS, Controls
from multipod.step.memory_layout import InputFormats, MemoryLayout
from multipod.step.replay import Replay
from multipod.step.several import SeveralUpdates
from multipod.step.staged.program import StagedProgram
from multipod.step.state import PortableState, State, Sums
from multipod.step.unstaged import UnstagedProgram


class Evaluator(Protocol):
    """How a program evaluates a state."""

    def rows(self, examples: int) -> int:
        """The rows of a batch in evaluation, of a test set of `examples`."""
        ...

    def prepare(self, state: State) -> State:
        """What `run` needs of a state: without the optimizer's part, all layers after all updates."""
        ...

    def run(self, state: State, batch: Batch) -> tuple[Sums, ScoredLabels]:
        """The sums of the values of those examples of `batch` where batch["mask"] is true, and scores.

        The scores and labels, or the detections, of all examples are split as the batch is; () of objectives that
        have none.
        """
        ...


class Conversion(Protocol):
    """How a program's state gets into another layout's form, and out of it (`step.convert`)."""

    def drain(self, state: State) -> State:
        """`state` with nothing under way: all layers have had all updates. For use inside `jax.jit`, on its mesh."""
        ...

    def to_portable(self, state: State) -> PortableState:
        """What a drained state holds, in names of the whole model; inside `jax.jit`, on any devices."""
        ...

    def from_portable(self, portable: PortableState) -> State:
        """A state that goes on from `portable`."""
        ...


class Program(Protocol):
    """The programs of a run on a mesh. Nothing is compiled or allocated before a method is called.

    What does not fit together, in the recipe or with the mesh, is refused by `shapes` and `lowered`. There is a promise
    for each thing that the loop, checkpoints, survival and `show` ask of a program.
    """

    @property
    def recipe(self) -> Recipe:
        """What is trained."""
        ...

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """Where: the mesh of the recipe's layout."""
        ...

    @property
    def faulty(self) -> bool:
        """Whether an update can be asked to flip a bit of a gradient."""
        ...

    @property
    def watched(self) -> bool:
        """Whether an update looks at its own numbers: then its sums hold `bad` and `gradient_norm`."""
        ...

    @property
    def rows(self) -> int:
        """The rows of a batch on this mesh. Those beyond `recipe.batch` are padding, and batches then have a `mask`.

        Raises:
          LayoutError: the batch does not divide over a whole mesh.
        """
        ...

    @property
    def padded(self) -> bool:
        """Whether batches hold padding."""
        ...

    @property
    def shapes(self) -> State:
        """The state as shapes with shardings: what a checkpoint is restored into.

        Raises:
          LayoutError, RecipeError, ScheduleError: what does not fit together.
        """
        ...

    @property
    def state_parts(self) -> dict[str, Shapes]:
        """The parts of the state by their names, as shapes with shardings; `optimizer` is one."""
        ...

    @property
    def unshared(self) -> dict[str, int]:
        """Bytes on each device that sharding costs beyond equal shares (`step.unshared`); empty without sharding."""
        ...

    def init(self) -> State:
        """The state before the first update, on the mesh."""
        ...

    def controls(
        self,
        stop: int = 0,
        limits: tuple[float, float] = NO_LIMITS,
        flip: int = 0,
        halt: jax.Array | None = None,
    ) -> Controls:
        """What an update is told beside its batch.

        Args:
          stop: 1 asks for a stop, 0 does not; every process is told the sum over the devices.
          limits: the highest loss and gradient norm of a good update; nothing to a program that is not `watched`.
          flip: 1 + the number of a bit to flip on the first device of this process; nothing to one not `faulty`.
          halt: `bad` of the update before, still on the devices: if that is 1 this update changes nothing at all. None
            where the host knows that it was good; nothing to a program that is not `watched`.
        """
        ...

    def place_batch(self, host: HostBatch, rows: np.ndarray, total: int, formats: InputFormats | None = None) -> Batch:
        """A host batch on the mesh, of which this process gives `rows` of `total`, in the memory layout `formats`."""
        ...

    def update(self, state: State, batch: Batch, controls: Controls) -> tuple[State, Sums]:
        """One update, to be compiled: the new state, and the sums of the batch's values (`metrics.objective`).

        The sums also hold `stop`: how many devices asked for one; and, of a watched update, `bad`: then the state is
        the old one, but for the numbers of updates and batches.
        """
        ...

    @property
    def lowered(self) -> jax.stages.Lowered:
        """`update`, traced but not compiled, for batches of the largest size; the state passed in is given up.

        Raises:
          LayoutError, RecipeError, ScheduleError: what does not fit together.
        """
        ...

    def compile_update(self, layout: MemoryLayout = "") -> Callable[[State, Batch, Controls], tuple[State, Sums]]:
        """`update`, compiled; `layout` is the memory layout of its images.

        Raises:
          LayoutError: as for `lowered`, or a memory layout that the program does not take.
        """
        ...

    def compile_several(self, count: int) -> SeveralUpdates:
        """So many updates, compiled as one program.

        Raises:
          DataError: the data have batches of several sizes.
        """
        ...

    def check(self, sums: Sums) -> None:
        """Refuses an update of which the sums tell that a device's tensors were not finite.

        Raises:
          PoisonedError: names the tensors and the devices.
        """
        ...

    def sum_alone(self) -> Callable[[Any], Any]:
        """The gradient sum as a program of its own, to be timed; takes stored parameters for gradients."""
        ...

    def full_params(self, state: State) -> Params:
        """The model's parameters after all updates, as the model takes them."""
        ...

    @property
    def evaluation(self) -> Evaluator:
        """How a state is evaluated."""
        ...

    @property
    def conversion(self) -> Conversion:
        """The way into other layouts."""
        ...

    @property
    def replay(self) -> Replay | None:
        """Makes an update's gradients on other devices; None where no device can work out a share of a batch alone."""
        ...

    @property
    def examination(self) -> Examination | None:
        """Looks closer at a bad update; None of a program that is never `watched`."""
        ...


def program_of(recipe: Recipe, mesh: Mesh | AbstractMesh, faulty: bool = False) -> Program:
    """The programs of `recipe` on `mesh`, which is its layout's. Nothing is compiled or checked yet.

    With `faulty` an update can be asked to flip a bit of a gradient; it is then watched, whatever the recipe says. No
    bit is flipped in stages.
    """
    return StagedProgram(recipe, mesh) if recipe.layout.stages > 1 else UnstagedProgram(recipe, mesh, faulty)
