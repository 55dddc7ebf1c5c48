"""Builds the programs of a run from its recipe and a mesh. `update` is the step of the whole project."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from multipod.data.global_arrays import to_mesh
from multipod.data.source import HostBatch, example_of, examples_of
from multipod.execute.adasum.operator import refuse_poisoned
from multipod.execute.bucketing import all_reduce_tree
from multipod.execute.sums import ordered
from multipod.layout.check import lay
from multipod.layout.mesh import (
    batch_sharding,
    batch_spec,
    data_axes,
    data_devices,
    padded_batch,
    replicated,
    splits_of,
    to_spec,
    update_spec,
)
from multipod.layout.rules import Placement, Tensor
from multipod.metrics.objective import masked_sums, scores_of
from multipod.nn.dims import dims_of, input_dims
from multipod.nn.logical_axes import logical_axis_rules
from multipod.nn.padding import padding_mask
from multipod.optim.sparse import RowGradient
from multipod.recipe.recipe import Recipe
from multipod.step.accumulate import accumulated
from multipod.step.between import rearranged
from multipod.step.checks import check_step
from multipod.step.gradients import (
    GATHERED,
    GradientPath,
    constrain,
    data_specs,
    gradient_path,
    order_made,
    over_data,
    state_specs,
    tensor_names,
)
from multipod.step.guard import Asked, chosen, flipped, judged, parts_of
from multipod.step.images import SplitImages
from multipod.step.orders import Order, Wishes, lowered
from multipod.step.sizes import BySize
from multipod.step.sparse import by_table, exchanged, row_tables, stepped, values, with_rows
from multipod.step.state import State, fresh_state

Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]

RESUME = "The weights are lost: lower the rate, or see which examples do that, and go on from the last checkpoint."


@dataclass(frozen=True)
class Program:
    """The programs of a run on a mesh. Nothing is compiled or allocated before a method is called.

    With `faulty` an update can be asked to flip a bit of a gradient; it is then watched, whatever the recipe says.
    """

    recipe: Recipe
    mesh: Mesh | AbstractMesh
    faulty: bool = False

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The recipe's Optax transformation."""
        return self.recipe.optimizer.build(self.recipe.updates)

    @cached_property
    def shapes(self) -> State:
        """The state as shapes with shardings: what a checkpoint is restored into."""
        shapes = self._bare_shapes
        specs = jax.tree.map(lambda _: PartitionSpec(), shapes)
        specs = specs._replace(params=self.stored_specs, optimizer=self._optimizer_specs(shapes.optimizer))
        return jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec)),
            shapes,
            specs,
        )

    @cached_property
    def _bare_shapes(self) -> State:
        return jax.eval_shape(self._fresh)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters by their path, in the order of the tree's leaves."""
        dims = dims_of(self.recipe.model)
        leaves = jax.tree_util.tree_flatten_with_path(self._bare_shapes.params)[0]
        named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
        return {name: Tensor(leaf.shape, dims.get(name, ()), leaf.dtype.itemsize) for name, leaf in named.items()}

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """How the axes inside the tiles split each parameter.

        Raises:
          LayoutError: all that is wrong with the layout for this model.
        """
        return lay(self.recipe.layout, self.tensors, set(self.images.dims))

    @cached_property
    def stored_specs(self) -> Any:
        """The `PartitionSpec` of each parameter between updates."""
        return self.path.specs if self.recipe.layout.keeps_shares else self.path.base

    @cached_property
    def images(self) -> SplitImages:
        """How the images of a batch are split inside the tiles."""
        return SplitImages(input_dims(self.recipe.model), self.splits, dict(self.mesh.shape))

    @cached_property
    def splits(self) -> dict[str, tuple[str, ...]]:
        """The inner axes that split dims of a name: of activations, and of the weights where no path says otherwise."""
        return splits_of(self.recipe.layout, self.mesh)

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
    def row_tables(self) -> tuple[str, ...]:
        """The tables of which touched rows alone have gradients (`step.sparse`)."""
        return row_tables(self.recipe)

    @cached_property
    def path(self) -> GradientPath:
        """How gradients travel."""
        check_step(self.recipe, lambda: self.rows // data_devices(self.mesh))
        params = self._bare_shapes.params
        structure: Any = jax.tree.structure(params)
        base = structure.unflatten([to_spec(placed.axes) for placed in self.placements.values()])
        order = self._order() if self.recipe.layout.bucket_bytes and not self.row_tables else ()
        return gradient_path(self.recipe.layout, self.mesh, params, base, order)

    def _order(self) -> tuple[int, ...]:
        """The parameters' places in the order in which the backward pass makes their gradients."""
        shapes, key = self._bare_shapes, jax.eval_shape(lambda: jax.random.key(0))
        rows = {name: (self.rows // data_devices(self.mesh), *leaf.shape[1:]) for name, leaf in self._batch().items()}
        batch = {name: jax.ShapeDtypeStruct(rows[name], leaf.dtype) for name, leaf in self._batch().items()}
        once = partial(self._micro_gradients, _as_they_are)
        return order_made(lambda *args: once(*args)[0], shapes.params, shapes.statistics, key, batch)

    @property
    def kept(self) -> dict[str, Any]:
        """The parts of the state by their names, as shapes with shardings."""
        shapes = self.shapes
        return {"parameters": shapes.params, "optimizer": shapes.optimizer, "statistics": shapes.statistics}

    @property
    def parameters(self) -> int:
        """How many the model has."""
        return sum(leaf.size for leaf in jax.tree.leaves(self._bare_shapes.params))

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
            return jax.tree.map(lambda _: batch_spec(self.mesh), optimizer)
        layout, sizes = self.recipe.layout, {axis: self.mesh.shape[axis] for axis in data_axes(self.mesh)}
        others = (lambda leaf: update_spec(leaf.shape, sizes)) if layout.splits_update else lambda _: PartitionSpec()
        return state_specs(optimizer, self._bare_shapes.params, self.path.specs, others)

    @property
    def watched(self) -> bool:
        """Whether an update looks at its own numbers (`step.guard`)."""
        return self.recipe.bad_updates.watches or self.faulty

    def stop_flags(self, stop: int) -> jax.Array:
        """One int32 for each device, 1 to ask for a stop, 0 for none; `update` tells every process their sum."""
        return self._each_device(np.full(1, stop, np.int32))

    def asked(self, stop: int, limits: tuple[float, float] = (math.inf, math.inf), flip: int = 0) -> Asked:
        """What a watched update takes in place of the flags.

        `flip` is of the first device of this process: see `Asked`.
        """
        bounds = np.asarray(limits, np.float32)
        laid = jax.make_array_from_callback((2,), replicated(self.mesh), lambda _: bounds)
        if not self.faulty:
            return Asked(self.stop_flags(stop), laid)
        first = min(device.id for device in self.mesh.devices.flat if device.process_index == jax.process_index())
        ids = [device.id for device in self.mesh.devices.reshape(data_devices(self.mesh), -1)[:, 0]]
        flips = np.array([flip if number == first else 0 for number in ids], np.int32)
        sharding = batch_sharding(self.mesh)
        each = jax.make_array_from_callback((len(ids),), sharding, lambda index: flips[index])
        return Asked(self.stop_flags(stop), laid, each)

    def _each_device(self, flag: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback((data_devices(self.mesh),), batch_sharding(self.mesh), lambda _: flag)

    @cached_property
    def lowered(self) -> jax.stages.Lowered:
        """`update`, traced but not compiled, for batches of the largest size; the state passed in is given up.

        Raises:
          LayoutError: the batch or a tile of the model does not fit the mesh.
        """
        return self._lowered(self._examples)

    def _lowered(self, example: HostBatch, order: Order = "") -> jax.stages.Lowered:
        flags: Any = jax.ShapeDtypeStruct((data_devices(self.mesh),), jnp.int32, sharding=batch_sharding(self.mesh))
        if self.watched:
            limits: Any = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=replicated(self.mesh))
            flags = Asked(flags, limits, flags if self.faulty else None)
        out = jax.tree.map(lambda leaf: leaf.sharding, self.shapes), replicated(self.mesh)
        return lowered(self.update, self.shapes, self._batch(example), flags, out, order)

    @cached_property
    def _examples(self) -> dict[str, np.ndarray]:
        return self._all_examples[-1]

    @cached_property
    def _all_examples(self) -> list[dict[str, np.ndarray]]:
        return examples_of(self.recipe.data, "train")

    @cached_property
    def _test_examples(self) -> dict[str, np.ndarray]:
        return example_of(self.recipe.data, "test")

    def _batch(self, example: HostBatch | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch of the run, of the largest size or that of `example`, as shapes with shardings."""
        example = self.images.padded(self._examples if example is None else example)
        example |= {"mask": np.ones(1, bool)} if self.padded else {}
        shardings = self.batch_shardings(example)
        return {
            name: jax.ShapeDtypeStruct((self.rows, *array.shape[1:]), array.dtype, sharding=shardings[name])
            for name, array in example.items()
        }

    def batch_shardings(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """How the arrays of a host batch lie on the mesh: rows over the data axes, images over the spatial ones."""
        axes = {name: self.images.axes(name, np.ndim(array)) for name, array in batch.items()}
        rows = data_axes(self.mesh)
        return {name: NamedSharding(self.mesh, PartitionSpec(rows, *inner)) for name, inner in axes.items()}

    def placed(self, host: HostBatch, rows: np.ndarray, total: int, wishes: Wishes | None = None) -> Batch:
        """A host batch on the mesh, of which this process gives `rows` of `total`; `wishes` are as of `step.orders`."""
        host = self.images.padded(host)
        return to_mesh(host, rows, total, {**self.batch_shardings(host), **(wishes or {})})

    def compile_update(self, order: Order = "") -> Callable[[State, Batch, Any], tuple[State, Sums]]:
        """`update`, compiled; for batches of several sizes, one program for each. `order` is that of its images."""
        smaller = [self._lowered(one, order).compile() for one in self._all_examples[:-1]]
        largest = (self._lowered(self._examples, order) if order else self.lowered).compile()
        return BySize([*smaller, largest]) if smaller else largest

    def update(self, state: State, batch: Batch, stop: jax.Array | Asked) -> tuple[State, Sums]:
        """One update. Returns the new state and the sums of the batch's values (`metrics.objective`).

        The sums also hold `stop`: how many devices asked for one; and, of a watched update, `bad`: then the state is
        the old one, but for the numbers of updates and batches.
        """
        asked = parts_of(stop)
        params = constrain(state.params, self.mesh, self.path.specs)
        if self.recipe.layout.local_state:
            updates, optimizer, statistics, sums = self._local_changes(state, batch, asked)
            travelled, params = updates, optax.apply_updates(params, updates)
        else:
            gradients, statistics, sums = self._gradients(state, batch, asked)
            travelled = values(gradients)
            params, optimizer = stepped(self.optimizer, gradients, state.optimizer, params)
        optimizer = constrain(optimizer, self.mesh, self._optimizer_specs(optimizer))
        params = constrain(params, self.mesh, self.path.specs)
        if not self.recipe.layout.keeps_shares:
            params = self.path.gather(params)
        whole = rearranged(self.recipe, self.optimizer, (params, statistics, optimizer), state.update + 1)
        params, statistics, optimizer = whole
        if self.watched:
            good, sums = judged(sums, travelled, asked.limits, self.recipe.bad_updates.watches)
            kept = state.params, state.statistics, state.optimizer
            params, statistics, optimizer = chosen(good, (params, statistics, optimizer), kept)
        return State(params, statistics, optimizer, state.key, state.update + 1, state.position + 1), sums

    def evaluation_rows(self, examples: int) -> int:
        """The rows of a batch in evaluation, of a test set of so many examples."""
        devices = data_devices(self.mesh)
        return -(-min(self.recipe.evaluation_batch, examples) // devices) * devices

    def to_evaluate(self, state: State) -> State:
        """What `evaluate` needs of a state. One program then serves every kind of evaluation."""
        return state._replace(optimizer=None)

    def whole_params(self, state: State) -> Any:
        """The model's parameters, as the model takes them."""
        return state.params

    @partial(jax.jit, static_argnums=0)
    def evaluate(self, state: State, batch: Batch) -> Sums:
        """The sums of the values of those examples of `batch` where batch["mask"] is true."""
        return self._evaluated(state, batch)[0]

    @partial(jax.jit, static_argnums=0)
    def evaluate_and_score(self, state: State, batch: Batch) -> tuple[Sums, tuple[jax.Array, jax.Array]]:
        """The same, and the scores and labels of all examples, split as the batch is: of objectives that have them."""
        return self._evaluated(state, batch)

    def _evaluated(self, state: State, batch: Batch) -> tuple[Sums, Any]:
        def local(params: Any, statistics: Any, batch: Batch) -> tuple[Sums, Any]:
            batch = dict(batch)
            mask, key = batch.pop("mask"), jax.random.key(0)
            with logical_axis_rules(self.mesh, self.splits):
                batch = self.images.cut(batch, self._test_examples)
                outputs, _ = self.recipe.model.apply(params, statistics, batch, train=False, key=key)
                sums = masked_sums(self.recipe.objective(outputs, batch), mask)
                scores = scores_of(self.recipe.objective, outputs, batch)
            return all_reduce_tree(sums, ordered(data_axes(self.mesh)), data_devices(self.mesh)), scores

        specs = data_specs(self.mesh, self.path.base), PartitionSpec(), batch_spec(self.mesh)
        function = over_data(local, self.mesh, specs, (PartitionSpec(), batch_spec(self.mesh)))
        return function(state.params, state.statistics, batch)

    def sum_alone(self) -> Callable[[Any], Any]:
        """The gradient sum (and the gathering of the weights) as a program of its own, to be timed.

        It takes parameters and treats them as each device's gradients.
        """
        whole, shares = data_specs(self.mesh, self.path.base), data_specs(self.mesh, self.path.specs)
        one_way = over_data(self.path.combine, self.mesh, (whole,), shares)
        if self.recipe.layout.keeps_shares:
            return jax.jit(lambda params: one_way(self.path.gather(params)))
        return jax.jit(lambda params: self.path.gather(one_way(params)))

    def _gradients(self, state: State, batch: Batch, asked: Asked) -> tuple[Any, Any, Sums]:
        def local(
            params: Any, statistics: Any, key: jax.Array, batch: Batch, stop: jax.Array, flip: jax.Array | None
        ) -> tuple[Any, Any, Sums]:
            key = jax.random.fold_in(key, lax.axis_index(data_axes(self.mesh)))
            gradients, (statistics, sums) = self._local_gradients(params, statistics, key, batch)
            gradients = flipped(gradients, flip)
            report: Sums = {}
            if not self.recipe.layout.shard_weights:  # else their derivative has summed them
                gradients, report = self._combined(self._before_sum(gradients))
            statistics, sums = self._agree(statistics, sums | {"stop": stop.sum()})
            return gradients, statistics, sums | _counted(report, sums)

        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.update)
        whole, rows = PartitionSpec(), batch_spec(self.mesh)
        in_specs = data_specs(self.mesh, self.stored_specs), whole, whole, rows, rows, rows
        specs = data_specs(self.mesh, self.path.specs)
        if self.row_tables:
            specs |= dict.fromkeys(self.row_tables, whole)
        function = over_data(local, self.mesh, in_specs, (specs, whole, whole))
        return function(state.params, state.statistics, key, batch, asked.stop, asked.flip)

    def _combined(self, gradients: Any) -> tuple[Any, Sums]:
        if not self.row_tables:
            return self.path.combine_and_report(gradients)
        rows = {name: self._bare_shapes.params[name].shape[0] for name in self.row_tables}
        sums = {name: exchanged(gradients[name], n, data_axes(self.mesh)) for name, n in rows.items()}
        trees = self._bare_shapes.params, self.path.base, gradients
        shapes, base, others = ({name: tree[name] for name in gradients if name not in rows} for tree in trees)
        return gradient_path(self.recipe.layout, self.mesh, shapes, base).combine(others) | sums, {}

    def _local_changes(self, state: State, batch: Batch, asked: Asked) -> tuple[Any, Any, Any, Sums]:
        """Combined changes of the parameters, the optimizers' states, statistics, sums.

        Each device's optimizer sees the gradient of its own mean loss, and keeps its state to itself: what is combined
        is the change that it makes (arXiv:2006.02924, section 4.1).
        """
        devices = data_devices(self.mesh)

        def local(
            params: Any, own: Any, statistics: Any, key: jax.Array, batch: Batch, stop: jax.Array
        ) -> tuple[Any, Any, Any, Sums]:
            key = jax.random.fold_in(key, lax.axis_index(data_axes(self.mesh)))
            gradients, (statistics, sums) = self._local_gradients(params, statistics, key, batch)
            gradients = jax.tree.map(lambda tensor: tensor * devices, self._before_sum(gradients))
            changes, own = self.optimizer.update(gradients, jax.tree.map(lambda leaf: leaf[0], own), params)
            changes, report = self.path.combine_and_report(changes)
            statistics, sums = self._agree(statistics, sums | {"stop": stop.sum()})
            return changes, jax.tree.map(lambda leaf: leaf[None], own), statistics, sums | _counted(report, sums)

        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.update)
        whole, split = PartitionSpec(), batch_spec(self.mesh)
        in_specs = whole, split, whole, whole, split, split
        function = over_data(local, self.mesh, in_specs, (self.path.specs, split, whole, whole))
        return function(state.params, state.optimizer, state.statistics, key, batch, asked.stop)

    def check(self, sums: Sums) -> None:
        """Refuses an update in which a device had tensors that are not finite, where the sums tell (Adasum).

        Raises:
          PoisonedError: names the tensors and the devices.
        """
        if "poisoned" in sums:
            refuse_poisoned("update", np.asarray(sums["poisoned"]), tensor_names(self.path.specs), RESUME)

    def _local_gradients(self, params: Any, statistics: Any, key: jax.Array, batch: Batch) -> tuple[Any, Any]:
        """Gradients of this device's share of the batch's mean loss, with new statistics and sums.

        `params` are as they are stored. With `shard_weights` the gradients are summed and split, else they are of whole
        weights. With `recipe.accumulate` above 1 the rows go through the model in so many parts, one after the other.
        """
        layout = self.recipe.layout
        use: Callable[[Any], Any] = _as_they_are
        if layout.shard_weights:
            use = self.path.use
        elif layout.keeps_shares:
            params = self.path.use(params)
        kinds = jax.tree.map(lambda leaf: leaf.dtype, self._bare_shapes.params)
        step = partial(self._micro_gradients, use)
        if self.recipe.accumulate == 1:
            gradients, aside = step(params, statistics, key, batch)
        else:
            gradients, aside = accumulated(step, params, statistics, key, batch, self.recipe.accumulate)
        return jax.tree.map(_as_kind, kinds, gradients), aside

    def _micro_gradients(
        self, use: Callable[[Any], Any], params: Any, statistics: Any, key: jax.Array, batch: Batch
    ) -> tuple[Any, Any]:
        """`_local_gradients` of rows that go through the model at once; `use` makes of `params` what it takes."""
        batch = dict(batch)
        mask = batch.pop("mask", None)

        def loss(params: Any) -> tuple[jax.Array, Any]:
            with padding_mask(mask), logical_axis_rules(self.mesh, self.splits):
                rows = self.images.cut(batch, self._examples)
                outputs, new = self.recipe.model.apply(use(params), statistics, rows, train=True, key=key)
                sums = masked_sums(self.recipe.objective(outputs, rows), mask)
            return sums["loss"] / self.recipe.batch, (new, sums)

        if self.recipe.layout.shard_weights:
            loss = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_anything_except_these_names(GATHERED))
        params, places = with_rows(self.recipe.model, self.row_tables, params, batch)
        gradients, aside = jax.grad(loss, has_aux=True)(params)
        return by_table(gradients, places), aside

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
        means, sums = all_reduce_tree((floats, sums), ordered(data_axes(self.mesh)), devices)
        averaged = iter(means)
        agreed = [next(averaged) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf for leaf in leaves]
        return structure.unflatten(agreed), sums


def _as_kind(kind: Any, gradient: Any) -> Any:
    """A gradient in the type of its parameter; of rows that are exchanged it is that already."""
    return gradient if isinstance(gradient, RowGradient) else gradient.astype(kind)


def _as_they_are(params: Any) -> Any:
    return params


def _counted(report: Sums, sums: Sums) -> Sums:
    """Numbers of a report times the count of examples, which means are divided by."""
    return {name: value * sums["count"] if value.ndim == 0 else value for name, value in report.items()}
