"""Builds the programs of a run from its recipe and a mesh. `update` is the step of the whole project."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multipod.execute.adasum import refuse_poisoned
from multipod.execute.sums import ordered
from multipod.execute.trees import all_reduce_tree
from multipod.layout.layout import DATA_AXES
from multipod.layout.mesh import batch_sharding, batch_spec, data_devices, padded_batch, replicated
from multipod.metrics.objective import masked_sums
from multipod.nn.padding import masked
from multipod.recipe.recipe import Recipe
from multipod.step.gradients import (
    GradientPath,
    constrain,
    gradient_path,
    over_data,
    tensor_names,
    update_specs,
)
from multipod.step.state import State, fresh_state

Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]

RESUME = "The weights are lost: lower the rate, or see which examples do that, and go on from the last checkpoint."


@dataclass(frozen=True)
class Program:
    """The programs of a run on a mesh. Nothing is compiled or allocated before a method is called."""

    recipe: Recipe
    mesh: Mesh

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The recipe's Optax transformation."""
        return self.recipe.optimizer.build(self.recipe.updates)

    @cached_property
    def shapes(self) -> State:
        """The state as shapes with shardings: what a checkpoint is restored into."""
        shapes = jax.eval_shape(self._fresh)
        specs = jax.tree.map(lambda _: PartitionSpec(), shapes)
        specs = specs._replace(optimizer=self._optimizer_specs(shapes.optimizer))
        return jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec)),
            shapes,
            specs,
        )

    @cached_property
    def rows(self) -> int:
        """The rows of a batch on this mesh. Those beyond `recipe.batch` are padding, and batches then have a `mask`.

        Raises:
          LayoutError: the batch does not divide over a whole mesh.
        """
        return padded_batch(self.recipe.batch, self.recipe.layout, self.mesh)

    @property
    def padded(self) -> bool:
        """Whether batches hold padding."""
        return self.rows > self.recipe.batch

    @cached_property
    def path(self) -> GradientPath:
        """How gradients travel."""
        return gradient_path(self.recipe.layout, self.mesh, self.shapes.params)

    def init(self) -> State:
        """The state before the first update, on the mesh."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.shapes)
        return jax.jit(self._fresh, out_shardings=shardings)()

    def _fresh(self) -> State:
        """The first state; an optimizer's state that is local has a first dim of devices (`layout.local_state`)."""
        state = fresh_state(self.recipe, self.optimizer)
        if not self.recipe.layout.local_state:
            return state
        devices = data_devices(self.mesh)
        each = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (devices, *leaf.shape)), state.optimizer)
        return state._replace(optimizer=each)

    def _optimizer_specs(self, optimizer: Any) -> Any:
        if self.recipe.layout.local_state:
            return jax.tree.map(lambda _: batch_spec(), optimizer)
        return update_specs(self.recipe.layout, self.mesh, optimizer)

    def stop_flags(self, stop: bool) -> jax.Array:
        """One int32 for each device, 1 to ask for a stop; `update` tells every process whether any did."""
        flag = np.full(1, stop, np.int32)
        return jax.make_array_from_callback((data_devices(self.mesh),), batch_sharding(self.mesh), lambda _: flag)

    @cached_property
    def lowered(self) -> jax.stages.Lowered:
        """`update`, traced but not compiled; the state passed in is given up.

        Raises:
          LayoutError: the batch or a tile of the model does not fit the mesh.
        """
        sharding = batch_sharding(self.mesh)
        example = self.recipe.data.train().read(np.arange(1))
        example |= {"mask": np.ones(1, bool)} if self.padded else {}
        shapes = {name: ((self.rows, *array.shape[1:]), array.dtype) for name, array in example.items()}
        batch = {name: jax.ShapeDtypeStruct(*shape, sharding=sharding) for name, shape in shapes.items()}
        flags = jax.ShapeDtypeStruct((data_devices(self.mesh),), jnp.int32, sharding=sharding)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.shapes)
        update = jax.jit(self.update, donate_argnums=0, out_shardings=(shardings, replicated(self.mesh)))
        return update.lower(self.shapes, batch, flags)

    def compile_update(self) -> Callable[[State, Batch, jax.Array], tuple[State, Sums]]:
        """`update`, compiled."""
        return self.lowered.compile()

    def update(self, state: State, batch: Batch, stop: jax.Array) -> tuple[State, Sums]:
        """One update. Returns the new state and the sums of the batch's values (`metrics.objective`).

        The sums also hold `stop`: how many devices asked for one.
        """
        params = constrain(state.params, self.mesh, self.path.specs)
        if self.recipe.layout.local_state:
            updates, optimizer, statistics, sums = self._local_changes(state, batch, stop)
        else:
            gradients, statistics, sums = self._gradients(state, batch, stop)
            updates, optimizer = self.optimizer.update(gradients, state.optimizer, params)
        optimizer = constrain(optimizer, self.mesh, self._optimizer_specs(optimizer))
        params = self.path.gather(constrain(optax.apply_updates(params, updates), self.mesh, self.path.specs))
        return State(params, statistics, optimizer, state.key, state.update + 1, state.position + 1), sums

    @partial(jax.jit, static_argnums=0)
    def evaluate(self, state: State, batch: Batch) -> Sums:
        """The sums of the values of those examples of `batch` where batch["mask"] is true."""

        def local(params: Any, statistics: Any, batch: Batch) -> Sums:
            batch = dict(batch)
            mask, key = batch.pop("mask"), jax.random.key(0)
            outputs, _ = self.recipe.model.apply(params, statistics, batch, train=False, key=key)
            sums = masked_sums(self.recipe.objective(outputs, batch), mask)
            return all_reduce_tree(sums, ordered(DATA_AXES), data_devices(self.mesh))

        specs = PartitionSpec(), PartitionSpec(), batch_spec()
        return over_data(local, self.mesh, specs, PartitionSpec())(state.params, state.statistics, batch)

    def sum_alone(self) -> Callable[[Any], Any]:
        """The gradient sum (and the gathering of the weights) as a program of its own, to be timed.

        It takes parameters and treats them as each device's gradients.
        """
        one_way = over_data(self.path.combine, self.mesh, (PartitionSpec(),), self.path.specs)
        return jax.jit(lambda params: self.path.gather(one_way(params)))

    def _gradients(self, state: State, batch: Batch, stop: jax.Array) -> tuple[Any, Any, Sums]:
        def local(params: Any, statistics: Any, key: jax.Array, batch: Batch, stop: jax.Array) -> tuple[Any, Any, Sums]:
            key = jax.random.fold_in(key, lax.axis_index(DATA_AXES))
            gradients, (statistics, sums) = self._local_gradients(params, statistics, key, batch)
            gradients, report = self.path.combine_and_report(self._before_sum(gradients))
            statistics, sums = self._agree(statistics, sums | {"stop": stop.sum()})
            return gradients, statistics, sums | _counted(report, sums)

        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.update)
        whole = PartitionSpec()
        in_specs = whole, whole, whole, batch_spec(), batch_spec()
        out_specs = self.path.specs, whole, whole
        return over_data(local, self.mesh, in_specs, out_specs)(state.params, state.statistics, key, batch, stop)

    def _local_changes(self, state: State, batch: Batch, stop: jax.Array) -> tuple[Any, Any, Any, Sums]:
        """Combined changes of the parameters, the optimizers' states, statistics, sums.

        Each device's optimizer sees the gradient of its own mean loss, and keeps its state to itself: what is combined
        is the change that it makes (arXiv:2006.02924, section 4.1).
        """
        devices = data_devices(self.mesh)

        def local(
            params: Any, own: Any, statistics: Any, key: jax.Array, batch: Batch, stop: jax.Array
        ) -> tuple[Any, Any, Any, Sums]:
            key = jax.random.fold_in(key, lax.axis_index(DATA_AXES))
            gradients, (statistics, sums) = self._local_gradients(params, statistics, key, batch)
            gradients = jax.tree.map(lambda tensor: tensor * devices, self._before_sum(gradients))
            changes, own = self.optimizer.update(gradients, jax.tree.map(lambda leaf: leaf[0], own), params)
            changes, report = self.path.combine_and_report(changes)
            statistics, sums = self._agree(statistics, sums | {"stop": stop.sum()})
            return changes, jax.tree.map(lambda leaf: leaf[None], own), statistics, sums | _counted(report, sums)

        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.update)
        whole, split = PartitionSpec(), batch_spec()
        in_specs = whole, split, whole, whole, split, split
        function = over_data(local, self.mesh, in_specs, (self.path.specs, split, whole, whole))
        return function(state.params, state.optimizer, state.statistics, key, batch, stop)

    def check(self, sums: Sums) -> None:
        """Refuses an update in which a device had tensors that are not finite, where the sums tell (Adasum).

        Raises:
          PoisonedError: names the tensors and the devices.
        """
        if "poisoned" in sums:
            refuse_poisoned("update", np.asarray(sums["poisoned"]), tensor_names(self.path.specs), RESUME)

    def _local_gradients(self, params: Any, statistics: Any, key: jax.Array, batch: Batch) -> tuple[Any, Any]:
        """Gradients of this device's share of the batch's mean loss, with new statistics and sums."""
        batch = dict(batch)
        mask = batch.pop("mask", None)

        def loss(params: Any) -> tuple[jax.Array, Any]:
            with masked(mask):
                outputs, new = self.recipe.model.apply(params, statistics, batch, train=True, key=key)
            sums = masked_sums(self.recipe.objective(outputs, batch), mask)
            return sums["loss"] / self.recipe.batch, (new, sums)

        return jax.grad(loss, has_aux=True)(params)

    def _before_sum(self, gradients: Any) -> Any:
        """What the optimizer does to each device's gradients before they are summed, if it has such a method."""
        before_sum = getattr(self.recipe.optimizer, "before_sum", None)
        return before_sum(gradients, data_devices(self.mesh)) if before_sum else gradients

    def _agree(self, statistics: Any, sums: Sums) -> tuple[Any, Sums]:
        """Statistics averaged and sums added over the mesh, in one message for each dtype.

        Statistics that pool over the mesh themselves are the same everywhere, and stay as they are.
        """
        devices = data_devices(self.mesh)
        leaves = jax.tree.leaves(statistics)
        structure: Any = jax.tree.structure(statistics)
        floats = [leaf / devices for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
        means, sums = all_reduce_tree((floats, sums), ordered(DATA_AXES), devices)
        averaged = iter(means)
        return (
            structure.unflatten(
                [next(averaged) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf for leaf in leaves]
            ),
            sums,
        )


def _counted(report: Sums, sums: Sums) -> Sums:
    """Numbers of a report times the count of examples, which means are divided by."""
    return {name: value * sums["count"] if value.ndim == 0 else value for name, value in report.items()}
