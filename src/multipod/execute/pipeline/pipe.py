"""Runs a pipeline schedule in one program over a `stage` axis of the mesh, beside the axes that split the batch.

Every device runs the same loop over ticks (`loop.py`); a table says what it does in each. Messages travel by `ppermute`
between ticks. A pass that a device has not to do in a tick is a loop of no rounds: unlike a conditional, XLA runs a
loop in place, and one of no rounds costs nothing (docs/design/pipelines.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from multipod.execute.pipeline.gradients import sum_over_data
from multipod.execute.pipeline.in_flight import (
    PipeState,
    add_first_dim,
    drop_first_dim,
    make_zeros,
    specs_of,
    write_at,
)
from multipod.execute.pipeline.loop import TickCarry, TickLoop
from multipod.execute.pipeline.packing import Slots
from multipod.execute.pipeline.setup import PipelineSetup
from multipod.execute.pipeline.slots import StageSlots
from multipod.pytrees import OptState, Params, Pytree, Shardings


class _Span(NamedTuple):
    """The ticks of one program: how many, whether updates are delayed, and whether a new update begins."""

    ticks: jax.Array
    delayed: jax.Array
    begins: bool


@dataclass(frozen=True, eq=False)
class Pipe:
    """A pipeline that runs. Nothing is compiled before a method is called."""

    setup: PipelineSetup

    @cached_property
    def slots(self) -> StageSlots:
        """Where the pipeline's arrays lie."""
        return StageSlots(self.setup)

    def begin(self, weights: Sequence[Params]) -> PipeState:
        """The state before the first update, on the mesh, from each part's weights."""
        shardings = self.shardings(jax.eval_shape(self.fresh, weights))
        return jax.jit(self.fresh, out_shardings=shardings)(weights)

    def fresh(self, weights: Sequence[Params], states: Sequence[OptState] | None = None) -> PipeState:
        """`begin`, for use inside `jax.jit`; with the `states` that each part's optimizer has come to, if it has."""
        setup, slots = self.setup, self.slots
        if states is None:
            states = [part.optimizer.init(tree) for part, tree in zip(setup.parts, weights, strict=True)]
        lead = setup.schedule.stages, setup.data_devices
        return PipeState(
            slots.stack(slots.weights, weights),
            slots.stack(slots.states, states),
            slots.make_empty(lead) if setup.asynchronous else (),
            *(jnp.zeros((), jnp.int32) for _ in range(3)),
        )

    def update(self, state: PipeState, batches: Pytree, delayed: jax.Array | bool = True) -> tuple[PipeState, Pytree]:
        """One update's worth of ticks; to be called inside `jax.jit`, the state given up.

        batches: the `aux` of all micro-batches, [N, rows over all data devices, ...]. Returns the new state and the
        sums of `extra` over what reached the last part in these ticks. delayed: (asynchronous) false fills the pipe,
        empties it again and updates synchronously; only while the pipe is empty. It may be traced: T3 compiles
        nothing anew.
        """
        tables, on = self.setup.tables, jnp.asarray(delayed)
        ticks = jnp.where(on, tables.stride, tables.span) if self.setup.asynchronous else jnp.asarray(tables.span)
        return self._run(state, batches, _Span(ticks, jnp.asarray(delayed), begins=True))

    def compiled(self, weights: Sequence[Params]) -> Callable[[PipeState, Pytree, bool], tuple[PipeState, Pytree]]:
        """`update` as a jitted function that keeps the state where it is and gives up the one passed in."""
        shardings = self.shardings(jax.eval_shape(self.fresh, weights))
        return jax.jit(self.update, donate_argnums=0, out_shardings=(shardings, None))

    def drain(self, state: PipeState) -> tuple[PipeState, Pytree]:
        """Finishes what is under way and begins nothing: all parts then have had the same updates.

        Evaluate on a drained copy: the run itself then learns the same however often it is evaluated.
        """
        tables = self.setup.tables
        if not self.setup.asynchronous:
            return state, make_zeros(self.setup.passes[-1].extra)
        left = jnp.where(state.started > 0, tables.span - tables.stride, 0)
        return self._run(state, None, _Span(left, jnp.asarray(True), begins=False))

    def unpack(self, weights: tuple[Slots, ...]) -> list[Params]:
        """Each part's weights out of a state's; inside `jax.jit` for arrays of other processes."""
        return self.slots.unpack(self.slots.weights, weights)

    def unpack_states(self, states: tuple[Slots, ...]) -> list[OptState]:
        """Each part's optimizer state out of a state's; inside `jax.jit` for arrays of other processes."""
        return self.slots.unpack(self.slots.states, states)

    def shardings(self, state: PipeState) -> Shardings:
        """Where each array of a state lies."""
        return self.slots.shardings(state)

    def sum_gradients(self, gradients: tuple[Slots, ...]) -> tuple[Slots, ...]:
        """Adds gradients, as slots of each chunk, over the data axes; inside `shard_map`."""
        return sum_over_data(self.slots, gradients)

    def _run(self, state: PipeState, batches: Pytree, span: _Span) -> tuple[PipeState, Pytree]:
        setup = self.setup
        specs = specs_of(jax.eval_shape(lambda: state), setup.stage_axis, setup.data_axes)
        split = jax.tree.map(lambda _: PartitionSpec(None, setup.data_axes or None), batches)
        replicated = PartitionSpec()

        def local(state: PipeState, batches: Pytree, ticks: jax.Array, delayed: jax.Array) -> tuple[PipeState, Pytree]:
            return self._run_on_device(state, batches, _Span(ticks, delayed, span.begins))

        return jax.shard_map(
            local,
            mesh=setup.mesh,
            in_specs=(specs, split, replicated, replicated),
            out_specs=(specs, replicated),
            axis_names=set(setup.manual_axes),
            check_vma=False,
        )(state, batches, span.ticks, span.delayed)

    def _run_on_device(self, state: PipeState, batches: Pytree, span: _Span) -> tuple[PipeState, Pytree]:
        """Runs the loop inside `shard_map`; returns the device's new state, and the sums over all devices."""
        setup = self.setup
        carry = self._open(state, batches, span.begins)
        started = state.started + span.begins
        loop = TickLoop(self.slots, lax.axis_index(setup.stage_axis), started, span.delayed.astype(jnp.float32))
        if setup.asynchronous:
            carry = loop.run_asynchronous(carry, state.tick, span.ticks)
        else:
            carry = loop.run_synchronous(carry)
        sums = lax.psum(carry.flight.sums, setup.manual_axes)
        empties = jnp.logical_not(span.delayed) if span.begins and setup.asynchronous else jnp.asarray(True)
        zero = jnp.zeros((), jnp.int32)
        new = PipeState(
            add_first_dim(carry.weights),
            add_first_dim(carry.optimizer),
            add_first_dim(add_first_dim(carry.flight)) if setup.asynchronous else (),
            jnp.where(empties, zero, state.tick + span.ticks),
            jnp.where(empties, zero, started),
            state.updates + span.begins,
        )
        return new, sums

    def _open(self, state: PipeState, batches: Pytree, begins: bool) -> TickCarry:
        """Takes the device's own part of a state, and puts the batches of an update that begins beside it."""
        setup, slots = self.setup, self.slots
        weights = slots.constrain(slots.weights, drop_first_dim(state.weights))
        optimizer = slots.constrain(slots.states, drop_first_dim(state.optimizer))
        flight = drop_first_dim(drop_first_dim(state.flight)) if setup.asynchronous else slots.make_empty(())
        flight = flight._replace(gradients=slots.constrain(slots.weights, flight.gradients))
        if setup.asynchronous:
            flight = flight._replace(sums=make_zeros(setup.passes[-1].extra))
        if begins:
            slot = state.started % setup.tables.batches
            flight = flight._replace(batches=jax.tree.map(partial(write_at, slot), flight.batches, batches))
        if flight.stash:  # version 0 is the one that the pipe begins with
            empty = state.started == 0
            pairs = zip(flight.stash, weights[0], strict=True)
            flight = flight._replace(stash=tuple(jnp.where(empty, s.at[0].set(w), s) for s, w in pairs))
        return TickCarry(weights, optimizer, flight)
