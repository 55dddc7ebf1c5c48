"""What is under way in a pipe, the state of a run, and the small steps that its loop is made of."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from multipod.execute.pipeline.packing import Slots


class InFlight(NamedTuple):
    """What is under way in a pipe, on one device.

    Attributes:
      gradients: for each chunk, the sum so far.
      saved: for each chunk, what forward passes kept; the first dim counts micro-batches.
      inbox: messages that have come, (forward, backward), for each chunk; the first dim counts micro-batches.
      outbox: the message of this tick, (forward, backward).
      sums: of the last part's `extra`.
      batches: minibatches that forward passes still need, [minibatches, N, ...].
      stash: (PipeDream) old versions of the weights, the first dim counts versions.
    """

    gradients: tuple[Slots, ...]
    saved: tuple[Slots, ...]
    inbox: tuple[tuple[Slots, ...], tuple[Slots, ...]]
    outbox: tuple[Slots, Slots]
    sums: Any
    batches: Any
    stash: Slots


class PipeState(NamedTuple):
    """The state of a pipeline, as global arrays: saved whole, it goes on with the same bits, even half-way.

    Attributes:
      weights: for each chunk, slots (`SlotPacking`) with a first dim of stages.
      optimizer: the same of the optimizers' states.
      flight: of an asynchronous pipeline, a `InFlight` with first dims of stages and of data devices; else ().
      tick, started: ticks, and updates begun, since the pipe was empty; int32.
      updates: updates begun, int32.
    """

    weights: tuple[Slots, ...]
    optimizer: tuple[Slots, ...]
    flight: Any
    tick: jax.Array
    started: jax.Array
    updates: jax.Array


def make_zeros(shapes: Any, *lead: int) -> Any:
    """Arrays of zeros with these shapes, behind the first dims `lead`."""
    return jax.tree.map(lambda leaf: jnp.zeros((*lead, *leaf.shape), leaf.dtype), shapes)


def specs_of(state: PipeState, stage_axis: str, data_axes: tuple[str, ...]) -> Any:
    """How a state lies on the mesh: all over the stages, what is under way over the data axes too."""
    stage, whole = PartitionSpec(stage_axis), PartitionSpec()
    both = PartitionSpec(stage_axis, data_axes or None)
    weights, optimizer = (jax.tree.map(lambda _: stage, tree) for tree in (state.weights, state.optimizer))
    flight = jax.tree.map(lambda _: both, state.flight)
    specs: Any = (weights, optimizer, flight, whole, whole, whole)
    return PipeState(*specs)


def run_if(condition: jax.Array, function: Callable[[Any], Any], carry: Any) -> Any:
    """`function(carry)` if `condition`, in place: a loop of one round or none. For small things: see `run_in_turn`."""
    return lax.fori_loop(0, condition.astype(jnp.int32), lambda _, inner: function(inner), carry)


def run_in_turn(
    condition: jax.Array, function: Callable[[jax.Array, Any], Any], carry: Any, turn: jax.Array
) -> tuple[Any, jax.Array]:
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


def read_at(place: jax.Array, array: jax.Array) -> jax.Array:
    """`array[place]`."""
    return lax.dynamic_index_in_dim(array, place, 0, keepdims=False)


def write_at(place: jax.Array, array: jax.Array, value: jax.Array) -> jax.Array:
    """`array` with `value` at `place`."""
    return lax.dynamic_update_index_in_dim(array, value.astype(array.dtype), place, 0)


def write_all_at(m: jax.Array, values: Slots, arrays: Slots) -> Slots:
    """Each array with its value at place m, counted around."""
    return tuple(write_at(m % array.shape[0], array, value) for array, value in zip(arrays, values, strict=True))


def replace_item(items: tuple[Any, ...], n: int, item: Any) -> tuple[Any, ...]:
    """`items` with another one at place n."""
    return (*items[:n], item, *items[n + 1 :])


def trace_inside(mesh: Mesh | AbstractMesh, axes: tuple[str, ...], function: Callable[[], Any]) -> Any:
    """`function()` while JAX traces a program that is manual over `axes`: what names a mesh then names that one."""
    if not jax.sharding.get_abstract_mesh().empty:  # it does already
        return function()
    found: list[Any] = []

    def traced(nothing: jax.Array) -> jax.Array:
        found.append(function())
        return nothing

    whole = PartitionSpec()
    local = jax.shard_map(traced, mesh=mesh, in_specs=(whole,), out_specs=whole, axis_names=set(axes), check_vma=False)
    jax.eval_shape(local, jax.ShapeDtypeStruct((), jnp.float32))
    return found[0]


def drop_first_dim(tree: Any) -> Any:
    """The first of the first dim of each leaf: a device's own."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def add_first_dim(tree: Any) -> Any:
    """A first dim of one for each leaf: the opposite of `drop_first_dim`."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


def find_leaf(tree: Any, name: str) -> int:
    """The place of a leaf among a tree's leaves, by its path."""
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]
    return paths.index(name)
