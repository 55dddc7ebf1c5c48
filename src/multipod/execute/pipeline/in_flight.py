"""What is under way in a pipe, the state of a run, and the small steps that its loop is made of."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from multipod.execute.pipeline.packing import Slots
from multipod.pytrees import Pytree, Shapes, Specs

Carry = TypeVar("Carry")
Item = TypeVar("Item")


class InFlight(NamedTuple):
    """What is under way in a pipe, on one device.

    Attributes:
      gradients: for each chunk, the sum so far.
      saved: for each chunk, what forward passes kept; the first dim counts micro-batches.
      inbox: messages that have come, (forward, backward), for each chunk; the first dim counts micro-batches.
      outbox: the message of this tick, (forward, backward).
      sums: of the last part's `extra` so far.
      batches: minibatches that forward passes still need, [minibatches, N, ...].
      stash: (PipeDream) old versions of the weights, the first dim counts versions.
    """

    gradients: tuple[Slots, ...]
    saved: tuple[Slots, ...]
    inbox: tuple[tuple[Slots, ...], tuple[Slots, ...]]
    outbox: tuple[Slots, Slots]
    sums: Pytree
    batches: Pytree
    stash: Slots


class PipeState(NamedTuple):
    """The state of a pipeline, as global arrays: saved whole, it goes on with the same bits, even half-way.

    Attributes:
      weights: for each chunk, slots (`SlotPacking`) with a first dim of stages.
      optimizer: for each chunk, slots of the optimizers' states, with a first dim of stages.
      flight: of an asynchronous pipeline, a `InFlight` with first dims of stages and of data devices; else ().
      tick, started: ticks, and updates begun, since the pipe was empty; int32.
      updates: updates begun, int32.
    """

    weights: tuple[Slots, ...]
    optimizer: tuple[Slots, ...]
    flight: Pytree
    tick: jax.Array
    started: jax.Array
    updates: jax.Array


def make_zeros(shapes: Shapes, *lead: int) -> Pytree:
    """Makes arrays of zeros with these shapes, behind the first dims `lead`."""
    return jax.tree.map(lambda leaf: jnp.zeros((*lead, *leaf.shape), leaf.dtype), shapes)


def specs_of(state: PipeState, stage_axis: str, data_axes: tuple[str, ...]) -> Specs:
    """How a state lies on the mesh: all over the stages, what is under way over the data axes too."""
    stage, replicated = PartitionSpec(stage_axis), PartitionSpec()
    both = PartitionSpec(stage_axis, data_axes or None)
    weights, optimizer = (jax.tree.map(lambda _: stage, tree) for tree in (state.weights, state.optimizer))
    flight = jax.tree.map(lambda _: both, state.flight)
    specs: Specs = (weights, optimizer, flight, replicated, replicated, replicated)
    return PipeState(*specs)


def run_if(condition: jax.Array, function: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`function(carry)` if `condition`, in place: a loop of one round or none. For small things: see `run_in_turn`."""
    return lax.fori_loop(0, condition.astype(jnp.int32), lambda _, inner: function(inner), carry)


def run_in_turn(
    condition: jax.Array, function: Callable[[jax.Array, Carry], Carry], carry: Carry, turn: jax.Array
) -> tuple[Carry, jax.Array]:
    """`function(0, carry)` if `condition`, after all that `turn` came from; returns the carry and the next turn.

    Turns begin with 0. Two things keep XLA (JAX 0.10.2, 2026-11-21) from undoing what a loop of one round or none is
    for; both are numbers of which only we know that they are 0:

    - What a loop computes from values that do not change in it is computed before it, whether it has a round or not. In
      1F1B that was all passes of all stages in every tick. `function` gets the loop's own counter, and is to read
      everything at places that it is added to.
    - What a loop only passes through is left out of it. A loop that reads an array and the next that overwrites it then
      do not depend on each other, and the array is copied so that either may go first: all that is kept of every
      micro-batch, twice a tick. `turn` comes out of the one and goes into the other.
    """
    each = lambda n, inner: (function(n, inner[0]), jnp.minimum(inner[1], n))  # noqa: E731
    return lax.fori_loop(0, condition.astype(jnp.int32) + turn, each, (carry, turn))


def read_at(index: jax.Array, array: jax.Array) -> jax.Array:
    """Reads `array[index]`."""
    return lax.dynamic_index_in_dim(array, index, 0, keepdims=False)


def write_at(index: jax.Array, array: jax.Array, value: jax.Array) -> jax.Array:
    """Returns `array` with `value` at `index`."""
    return lax.dynamic_update_index_in_dim(array, value.astype(array.dtype), index, 0)


def write_all_at(m: jax.Array, values: Slots, arrays: Slots) -> Slots:
    """Returns each array with its value at index m, counted around."""
    return tuple(write_at(m % array.shape[0], array, value) for array, value in zip(arrays, values, strict=True))


def replace_item(items: tuple[Item, ...], n: int, item: Item) -> tuple[Item, ...]:
    """Returns `items` with another item at index n."""
    return (*items[:n], item, *items[n + 1 :])


def trace_inside(mesh: Mesh | AbstractMesh, axes: tuple[str, ...], function: Callable[[], Item]) -> Item:
    """Calls `function` while JAX traces a program that is manual over `axes`: what names a mesh then names that one."""
    if not jax.sharding.get_abstract_mesh().empty:  # it does already
        return function()
    results: list[Item] = []

    def traced(nothing: jax.Array) -> jax.Array:
        results.append(function())
        return nothing

    spec = PartitionSpec()
    local = jax.shard_map(traced, mesh=mesh, in_specs=(spec,), out_specs=spec, axis_names=set(axes), check_vma=False)
    jax.eval_shape(local, jax.ShapeDtypeStruct((), jnp.float32))
    return results[0]


def drop_first_dim(tree: Pytree) -> Pytree:
    """Takes the first of the first dim of each leaf: what the device itself holds."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def add_first_dim(tree: Pytree) -> Pytree:
    """Gives each leaf a first dim of one: the opposite of `drop_first_dim`."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


def find_leaf(tree: Pytree, name: str) -> int:
    """Finds the number of a leaf among a tree's leaves, by its path."""
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]
    return paths.index(name)
