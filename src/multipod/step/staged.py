"""The programs of a run whose model lies in pipeline stages: `Program`'s methods, with a `Pipe` behind them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from multipod.data.global_arrays import to_mesh
from multipod.data.source import HostBatch, example_of
from multipod.errors import LayoutError
from multipod.execute.bucketing import all_reduce_tree
from multipod.execute.pipeline.forward import run_forward
from multipod.execute.pipeline.in_flight import PipeState, add_first_dim, drop_first_dim
from multipod.execute.pipeline.pipe import Pipe
from multipod.layout.check import lay
from multipod.layout.mesh import batch_sharding, data_axes, data_devices, padded_batch, replicated, splits_of, to_spec
from multipod.layout.rules import Tensor
from multipod.layout.stages import Cut, micro_batches
from multipod.nn.dims import dims_of
from multipod.nn.layered import shapes_of
from multipod.pipelines.build import PIPELINES, build
from multipod.pipelines.check import PipelineProof, check
from multipod.recipe.recipe import Recipe
from multipod.step.gradients import vector_sum
from multipod.step.orders import Order
from multipod.step.pipeline import cut_of, evaluations, join_params, layers_of, pipe_of, split_params
from multipod.step.state import State, fresh_state

Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]


class Piped(NamedTuple):
    """What a pipeline keeps beside its weights: `State.optimizer` of a run in stages.

    Attributes:
      states: the optimizers' states, as `PipeState.optimizer`.
      flight: what is under way between updates; () of a synchronous pipeline, which drains in every update.
      tick, started: as of `PipeState`.
    """

    states: Any
    flight: Any
    tick: jax.Array
    started: jax.Array


@dataclass(frozen=True)
class StagedProgram:
    """The programs of a run in stages. Nothing is compiled or allocated before a method is called.

    Rows of a batch go to data devices, and there through the stages, as `multipod.step.program.Program` would take them
    with `accumulate` as many: so the two learn the same, dropout included.
    """

    recipe: Recipe
    mesh: Mesh | AbstractMesh

    @cached_property
    def rows(self) -> int:
        """The rows of a batch on this mesh. Those beyond `recipe.batch` are padding, and batches then have a `mask`.

        Raises:
          LayoutError: the batch does not divide over a whole mesh.
        """
        rows = padded_batch(self.recipe.batch, self.recipe.layout, self.mesh)
        if not self.recipe.layout.failed:
            return rows
        pieces = data_devices(self.mesh) * (self.recipe.layout.micro_batches or 1)
        return -(-rows // pieces) * pieces

    @property
    def padded(self) -> bool:
        """Whether batches hold padding."""
        return self.rows > self.recipe.batch

    @cached_property
    def proof(self) -> PipelineProof:
        """The schedule, proven.

        Raises:
          LayoutError: micro-batches that do not divide the rows.
          ScheduleError: what the schedule's builder refuses.
        """
        layout = self.recipe.layout
        rows = self.rows // data_devices(self.mesh)
        count = micro_batches(layout.micro_batches, layout.stage, rows, rounds=layout.schedule == "interleaved")
        # Of an asynchronous pipeline so many updates that it is full, and its delays known.
        updates = 3 + 2 * -(-2 * layout.stage // count) if layout.asynchronous else 1
        options = {name: getattr(layout, name) for name in PIPELINES[layout.schedule].options}
        return check(build(layout.schedule, layout.stage, count, updates, **options))

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
        self._check_step()
        layout, axes, over_data = self.recipe.layout, data_axes(self.mesh), None
        if layout.gradient_sum != "xla":
            total = vector_sum(layout, self.mesh, axes)
            over_data = partial(all_reduce_tree, total=total, devices=data_devices(self.mesh))
        example = example_of(self.recipe.data, "train") | ({"mask": np.ones(1, bool)} if self.padded else {})
        return pipe_of(
            self.recipe,
            self.proof,
            self.mesh,
            example,
            data_axes=axes,
            techniques=self.recipe.pipemare,
            rows=self.rows,
            over_data=over_data,
            specs=self.specs,
            splits=self.splits,
        )

    @cached_property
    def specs(self) -> dict[str, PartitionSpec]:
        """How the axis `model` splits each parameter inside its stage; empty if nothing is split there.

        Raises:
          LayoutError: all that is wrong with the layout for this model.
        """
        if self.recipe.layout.model == 1:
            return {}
        dims = dims_of(self.recipe.model)
        shapes: dict[str, Any] = shapes_of(self.recipe.model)  # type: ignore[arg-type]
        tensors = {name: Tensor(s.shape, dims.get(name, ()), s.dtype.itemsize) for name, s in shapes.items()}
        return {name: to_spec(placed.axes) for name, placed in lay(self.recipe.layout, tensors).items()}

    @cached_property
    def splits(self) -> dict[str, tuple[str, ...]]:
        """The axes inside a stage that split dims of a name, of activations."""
        return splits_of(self.recipe.layout, self.mesh)

    def _check_step(self) -> None:
        """Refuses what a layout may say and a pipeline has no way for, all at once.

        Raises:
          LayoutError: names the fields.
        """
        layers_of(self.recipe)
        layout, wrong = self.recipe.layout, []
        axes = [f"{axis}={size}" for axis, size in layout.tile_sizes.items() if axis not in ("stage", "model")]
        if axes:
            wrong.append(
                f"{', '.join(axes)}: inside a stage only model splits anything. Images are split for models with batch "
                "norm, which no pipeline takes, and experts trade tokens with data devices, for which no pass waits. "
                "Give these devices to model, to stage or to the batch"
            )
        unused = ("shard_update", "shard_weights", "gather_dtype", "sum_dtype", "bucket_bytes")
        asked = [f"{name}={getattr(layout, name)}" for name in unused if getattr(layout, name)]
        if asked:
            wrong.append(
                f"{', '.join(asked)}: a stage updates its own weights, which is a share already, and each data device "
                "all of them. Take more stages, or model, for memory, and leave these out"
            )
        if layout.asynchronous and layout.gradient_sum != "xla":
            wrong.append(
                f"gradient_sum={layout.gradient_sum}: stages of {layout.schedule} sum at different moments, and only "
                "xla waits for nobody else. Take xla, or 1f1b"
            )
        if self.recipe.accumulate > 1:
            wrong.append(
                f"accumulate={self.recipe.accumulate}: micro-batches are that already. Set accumulate=1 and "
                "layout.micro_batches"
            )
        if self.recipe.bad_updates.watches:
            wrong.append(
                f"bad_updates.action={self.recipe.bad_updates.action}: no stage sees the whole gradient that it "
                "judges. Take ignore"
            )
        if self.recipe.pipemare.warmup and layout.schedule not in ("pipemare", "pipedream"):
            wrong.append(
                f"pipemare.warmup={self.recipe.pipemare.warmup}: {layout.schedule} is synchronous. Leave it out"
            )
        if wrong:
            raise LayoutError("\n".join(f"layout.stage={layout.stage} with {line}." for line in wrong))

    @property
    def watched(self) -> bool:
        """Whether an update looks at its own numbers: none does, see `_check_step`."""
        return False

    # What is kept.

    @cached_property
    def shapes(self) -> State:
        """The state as shapes with shardings: what a checkpoint is restored into."""
        shapes = jax.eval_shape(self._fresh)
        placed = self.pipe.shardings(self._inner(shapes))
        whole: Any = replicated(self.mesh)
        optimizer = Piped(placed.optimizer, placed.flight, placed.tick, placed.started)
        shardings = State(placed.weights, {}, optimizer, whole, whole, whole)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
        )

    @property
    def kept(self) -> dict[str, Any]:
        """The parts of the state by their names, as shapes with shardings."""
        shapes = self.shapes
        held = {"parameters": shapes.params, "optimizer": shapes.optimizer.states, "under way": shapes.optimizer.flight}
        return held if self.recipe.layout.asynchronous else {name: held[name] for name in ("parameters", "optimizer")}

    @cached_property
    def parameters(self) -> int:
        """How many the model has."""
        return sum(math.prod(leaf.shape) for leaf in join_params(list(self.pipe.setup.weights)).values())

    def init(self) -> State:
        """The state before the first update, on the mesh."""
        return jax.jit(self._fresh, out_shardings=self._shardings)()

    @property
    def _shardings(self) -> Any:
        return jax.tree.map(lambda leaf: leaf.sharding, self.shapes)

    def _fresh(self) -> State:
        state = fresh_state(self.recipe, self.recipe.optimizer.build(self.recipe.updates))
        begun = self.pipe.fresh(split_params(self.recipe, self.pipe, state.params))
        return self.outer(begun, state)

    def _inner(self, state: State) -> PipeState:
        """The pipeline's part of a state."""
        own: Piped = state.optimizer
        return PipeState(state.params, own.states, own.flight, own.tick, own.started, state.update)

    def outer(self, inner: PipeState, state: State) -> State:
        """`state` with the pipeline's part in it."""
        piped = Piped(inner.optimizer, inner.flight, inner.tick, inner.started)
        return state._replace(params=inner.weights, optimizer=piped)

    # Batches.

    def evaluation_rows(self, examples: int) -> int:
        """The rows of a batch in evaluation, of a test set of so many examples."""
        pieces = data_devices(self.mesh) * self.proof.schedule.micro_batches
        return -(-min(self.recipe.evaluation_batch, examples) // pieces) * pieces

    def batch_shardings(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """How the arrays of a host batch lie on the mesh: rows over the data axes, the same for all stages."""
        return dict.fromkeys(batch, batch_sharding(self.mesh))

    def placed(self, host: HostBatch, rows: np.ndarray, total: int) -> Batch:
        """A host batch on the mesh, of which this process gives `rows` of `total`."""
        return to_mesh(host, rows, total, self.batch_shardings(host))

    def stop_flags(self, stop: int) -> jax.Array:
        """One int32 for each data device, 1 to ask for a stop, 0 for none; `update` tells every process their sum."""
        flag = np.full(1, stop, np.int32)
        return jax.make_array_from_callback((data_devices(self.mesh),), batch_sharding(self.mesh), lambda _: flag)

    def _cut_rows(self, batch: Batch) -> Batch:
        """[N, rows of a micro-batch over all data devices, ...]: each device's rows in as many parts."""
        count, axes = self.proof.schedule.micro_batches, data_axes(self.mesh)

        def local(batch: Batch) -> Batch:
            return jax.tree.map(lambda rows: rows.reshape(count, -1, *rows.shape[1:]), batch)

        return self._over_data(local, (PartitionSpec(axes),), PartitionSpec(None, axes))(batch)

    def _keys(self, state: State) -> jax.Array:
        """Key data of each micro-batch on each data device, [N, devices * 2], as `Program` draws them."""
        count, axes = self.proof.schedule.micro_batches, data_axes(self.mesh)
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.update)

        def local(data: jax.Array) -> jax.Array:
            own = jax.random.fold_in(jax.random.wrap_key_data(data), lax.axis_index(axes))
            # Without accumulation a whole batch has the device's own key.
            each = [jax.random.fold_in(own, number) for number in range(count)] if count > 1 else [own]
            return jnp.stack([jax.random.key_data(one) for one in each])

        return self._over_data(local, (PartitionSpec(),), PartitionSpec(None, axes))(jax.random.key_data(key))

    def _over_data(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        names = {*data_axes(self.mesh), "stage"}
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
        )

    # The programs.

    def update(self, state: State, batch: Batch, stop: jax.Array) -> tuple[State, Sums]:
        """One update's worth of ticks. Returns the new state and the sums of the values of what was finished.

        The sums also hold `stop`: how many data devices asked for one. In an asynchronous pipeline they are those of
        the micro-batches that came to its end, at first none (`count` 0).
        """
        aux = {"batch": self._cut_rows(batch), "key": self._keys(state)}
        delayed = state.update >= self.recipe.pipemare.warmup
        inner, sums = self.pipe.update(self._inner(state), aux, delayed)
        new = self.outer(inner, state)._replace(update=state.update + 1, position=state.position + 1)
        return new, sums | {"stop": stop.sum()}

    @cached_property
    def lowered(self) -> jax.stages.Lowered:
        """`update`, traced but not compiled; the state passed in is given up.

        Raises:
          RecipeError, LayoutError, ScheduleError: what does not fit.
        """
        rows = batch_sharding(self.mesh)
        flags = jax.ShapeDtypeStruct((data_devices(self.mesh),), jnp.int32, sharding=rows)
        held = self.pipe.setup.aux["batch"]
        batch = {n: jax.ShapeDtypeStruct((self.rows, *s.shape[1:]), s.dtype, sharding=rows) for n, s in held.items()}
        update = jax.jit(self.update, donate_argnums=0, out_shardings=(self._shardings, replicated(self.mesh)))
        return update.lower(self.shapes, batch, flags)

    def compile_update(self, order: Order = "") -> Callable[[State, Batch, jax.Array], tuple[State, Sums]]:
        """`update`, compiled.

        Raises:
          LayoutError: an order was asked for.
        """
        if order:
            raise LayoutError(f"a run in stages takes images row by row, not {order}. Leave out --image-order.")
        return self.lowered.compile()

    def to_evaluate(self, state: State) -> State:
        """What `evaluate` needs of a state: of an asynchronous pipeline a drained copy, all parts after all updates."""
        if state.optimizer is None or not self.recipe.layout.asynchronous:
            return state._replace(optimizer=None)
        return state._replace(params=self._drained(state.params, state.optimizer, state.update), optimizer=None)

    def drained(self, state: State) -> State:
        """`state` with nothing under way: all parts have had all updates. The run itself goes on undrained."""
        return self.outer(self.pipe.drain(self._inner(state))[0], state)

    @cached_property
    def _drained(self) -> Callable[..., Any]:
        def drained(params: Any, piped: Piped, update: jax.Array) -> Any:
            state = PipeState(params, piped.states, piped.flight, piped.tick, piped.started, update)
            return self.pipe.drain(state)[0].weights

        return jax.jit(drained, out_shardings=self._shardings.params)

    def evaluate(self, state: State, batch: Batch) -> Sums:
        """The sums of the values of those examples of `batch` where batch["mask"] is true; see `to_evaluate`."""
        return self._evaluated(state.params, batch)[0]

    def evaluate_and_score(self, state: State, batch: Batch) -> tuple[Sums, tuple[jax.Array, jax.Array]]:
        """The same, and the scores and labels of all examples, split as the batch is: of objectives that have them."""
        return self._evaluated(state.params, batch)

    @cached_property
    def _evaluated(self) -> Callable[[Any, Batch], tuple[Sums, Any]]:
        functions = evaluations(self.recipe, self.proof.schedule.parts, self.mesh, self.splits)
        return jax.jit(lambda params, batch: run_forward(self.pipe.slots, functions, params, self._cut_rows(batch)))

    def whole_params(self, state: State) -> dict[str, jax.Array]:
        """The model's parameters after all updates, each whole on every device."""
        unpack = jax.jit(lambda slots: join_params(self.pipe.unpack(slots)), out_shardings=replicated(self.mesh))
        return unpack(self.to_evaluate(state).params)

    def sum_alone(self) -> Callable[[Any], Any]:
        """The gradient sum over the data axes as a program of its own, to be timed; takes parameters for gradients."""
        stage = jax.tree.map(lambda _: PartitionSpec("stage"), self.shapes.params)
        summed = lambda gradients: add_first_dim(self.pipe.sum_gradients(drop_first_dim(gradients)))  # noqa: E731
        return jax.jit(self._over_data(summed, (stage,), stage))

    def check(self, sums: Sums) -> None:
        """Nothing: Adasum, whose sums tell of tensors that are not finite, is refused in stages."""
