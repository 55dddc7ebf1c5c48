"""Where a model in pipeline stages, and its batches, lie on a mesh, as plain data."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from multipod.data.source import example_of
from multipod.execute.bucketing import all_reduce_tree
from multipod.execute.pipeline.pipe import Pipe
from multipod.layout.check import place_tensors
from multipod.layout.mesh import batch_sharding, data_axes, data_devices, padded_batch, replicated, splits_of, to_spec
from multipod.layout.rules import ParamTensor
from multipod.layout.split import PipelineSplit
from multipod.layout.stages import Cut, micro_batches
from multipod.nn.by_example import NUMBERS
from multipod.nn.dims import dims_of
from multipod.nn.layered import shapes_of
from multipod.pipelines.build import build
from multipod.pipelines.check import PipelineProof, check
from multipod.pytrees import Shapes
from multipod.recipe.recipe import Recipe
from multipod.step.checks import check_recipe
from multipod.step.staged.pipe import cut_of, layers_of, pipe_of, split_params
from multipod.step.staged.state import Piped, pipe_state, with_pipe_state
from multipod.step.state import State, fresh_state
from multipod.step.sync.reduction import vector_sum


@dataclass(frozen=True)
class StagePlacement:
    """A recipe's model in stages: the proven schedule, the cut, the pipeline, and how the state lies in it."""

    recipe: Recipe
    mesh: Mesh | AbstractMesh

    @property
    def split(self) -> PipelineSplit:
        """The stages of the layout."""
        assert self.recipe.layout.pipeline is not None, "program_of makes this program for layouts with stages"
        return self.recipe.layout.pipeline

    @cached_property
    def rows(self) -> int:
        """The rows of a batch on this mesh.

        Raises:
          LayoutError: the batch does not divide over a whole mesh.
        """
        rows = padded_batch(self.recipe.batch, self.recipe.layout, self.mesh)
        if not self.recipe.layout.failed:
            return rows
        pieces = self.devices * (self.split.micro_batches or 1)
        return -(-rows // pieces) * pieces

    @property
    def padded(self) -> bool:
        """Whether batches hold padding."""
        return self.rows > self.recipe.batch

    @property
    def devices(self) -> int:
        """The number of data devices: those that hold the same stage and split the batch."""
        return data_devices(self.mesh)

    @property
    def micro_batches(self) -> int:
        """The number of parts in which a device's rows travel through the stages."""
        return self.proof.schedule.micro_batches

    @cached_property
    def proof(self) -> PipelineProof:
        """The schedule, proven.

        Raises:
          LayoutError: micro-batches that do not divide the rows.
          ScheduleError: what the schedule's builder refuses.
        """
        split, rows = self.split, self.rows // self.devices
        count = micro_batches(split.micro_batches, split.stages, rows, rounds=split.in_rounds)
        # Of an asynchronous pipeline so many updates that it is full, and its delays known.
        updates = 3 + 2 * -(-2 * split.stages // count) if split.asynchronous else 1
        return check(build(split.schedule, split.stages, count, updates, **split.options))

    @cached_property
    def cut(self) -> Cut:
        """Which layers lie in which part."""
        return cut_of(self.recipe, self.proof.schedule.parts)

    @cached_property
    def pipe(self) -> Pipe:
        """The recipe's model, objective and optimizer in a pipeline.

        Raises:
          RecipeError: a model that cannot be cut.
          LayoutError, ScheduleError: what does not fit.
        """
        layers_of(self.recipe)
        check_recipe(self.recipe)
        return pipe_of(
            self.recipe,
            self.proof,
            self.mesh,
            example_of(self.recipe.data, "train") | ({"mask": np.ones(1, bool)} if self.padded else {}),
            data_axes=data_axes(self.mesh),
            techniques=self.recipe.pipemare,
            rows=self.rows,
            over_data=self._over_data(),
            specs=self.specs,
            splits=self.splits,
        )

    def _over_data(self) -> Callable[[Any], Any] | None:
        """The layout's own sum over the data axes; None leaves it to the pipeline, which takes XLA's."""
        layout = self.recipe.layout
        if layout.sync.gradient_sum == "xla":
            return None
        total = vector_sum(layout, self.mesh, data_axes(self.mesh))
        return partial(all_reduce_tree, total=total, devices=self.devices)

    @cached_property
    def specs(self) -> dict[str, PartitionSpec]:
        """How the axis `model` splits each parameter inside its stage; empty if nothing is split there.

        Raises:
          LayoutError: all that is wrong with the layout for this model.
        """
        if self.recipe.layout.split.model == 1:
            return {}
        dims = dims_of(self.recipe.model)
        shapes: dict[str, Any] = shapes_of(self.recipe.model)  # type: ignore[arg-type]
        tensors = {name: ParamTensor(s.shape, dims.get(name, ()), s.dtype.itemsize) for name, s in shapes.items()}
        return {name: to_spec(placed.axes) for name, placed in place_tensors(self.recipe.layout, tensors).items()}

    @cached_property
    def splits(self) -> dict[str, tuple[str, ...]]:
        """The axes inside a stage that split dims of a name, of activations."""
        return splits_of(self.recipe.layout, self.mesh)

    def fresh(self) -> State:
        """The state before the first update, for use inside `jax.jit`."""
        state = fresh_state(self.recipe, self.recipe.optimizer.build(self.recipe.updates))
        return with_pipe_state(state, self.pipe.fresh(split_params(self.pipe, state.params)))

    @cached_property
    def shapes(self) -> State:
        """The state as shapes with shardings."""
        shapes = jax.eval_shape(self.fresh)
        placed = self.pipe.shardings(pipe_state(shapes))
        whole: Any = replicated(self.mesh)
        optimizer = Piped(placed.optimizer, placed.flight, placed.tick, placed.started)
        shardings = State(placed.weights, {}, optimizer, whole, whole, whole)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
        )

    @property
    def shardings(self) -> Any:
        """The shardings of `shapes`."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.shapes)

    def batch_shapes(self) -> dict[str, Shapes]:
        """A batch of the run, as shapes with shardings: rows over the data axes, the same for all stages."""
        rows = batch_sharding(self.mesh)
        return {
            name: jax.ShapeDtypeStruct((self.rows, *leaf.shape[1:]), leaf.dtype, sharding=rows)
            for name, leaf in self.pipe.setup.aux["batch"].items()
            if name != NUMBERS
        }
