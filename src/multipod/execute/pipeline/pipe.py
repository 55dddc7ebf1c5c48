"""Runs a pipeline schedule in one program over a `stage` axis of the mesh, beside the axes that split the batch.

Every device runs the same loop over ticks; a table says what it does in each. Messages travel by `ppermute` between
ticks. A pass that a device has not to do in a tick is a loop of no rounds: unlike a conditional, XLA runs a loop in
place, and one of no rounds costs nothing (docs/design/pipelines.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from multipod.execute.pipeline.in_flight import (
    InFlight,
    PipeState,
    add_first_dim,
    drop_first_dim,
    make_zeros,
    read_at,
    replace_item,
    run_if,
    run_in_turn,
    specs_of,
    write_all_at,
    write_at,
)
from multipod.execute.pipeline.packing import Slots
from multipod.execute.pipeline.places import Places
from multipod.execute.pipeline.tables import StagePairs, steady_pairs


class _Now(NamedTuple):
    """What a tick reads of its surroundings."""

    stage: jax.Array
    started: jax.Array
    on: jax.Array


@dataclass(frozen=True, eq=False)
class Pipe(Places):
    """A pipeline that runs; see `Places` for its fields. Nothing is compiled before a method is called."""

    # What a run calls.

    def begin(self, weights: Sequence[Any]) -> PipeState:
        """The state before the first update, on the mesh, from each part's weights."""
        shardings = self.shardings(jax.eval_shape(self.fresh, weights))
        return jax.jit(self.fresh, out_shardings=shardings)(weights)

    def fresh(self, weights: Sequence[Any], states: Sequence[Any] | None = None) -> PipeState:
        """`begin`, for use inside `jax.jit`; with the `states` that each part's optimizer has come to, if it has."""
        if states is None:
            states = [part.optimizer.init(tree) for part, tree in zip(self.parts, weights, strict=True)]
        lead = self.proof.schedule.stages, self._data_devices
        return PipeState(
            self._stacked(self.packed, weights),
            self._stacked(self.packed_states, states),
            self._empty(lead) if self.asynchronous else (),
            *(jnp.zeros((), jnp.int32) for _ in range(3)),
        )

    def update(self, state: PipeState, batches: Any, delayed: jax.Array | bool = True) -> tuple[PipeState, Any]:
        """One update's worth of ticks; to be called inside `jax.jit`, the state given up.

        batches: the `aux` of all micro-batches, [N, rows over all data devices, ...]. Returns the new state and the
        sums of `extra` over what reached the last part in these ticks. delayed: (asynchronous) false fills the pipe,
        empties it again and updates synchronously; only while the pipe is empty. It may be traced: T3 compiles
        nothing anew.
        """
        ticks: Any = self.tables.span
        if self.asynchronous:
            ticks = jnp.where(jnp.asarray(delayed), self.tables.stride, self.tables.span)
        return self._run(state, batches, ticks, jnp.asarray(delayed), begins=True)

    def compiled(self, weights: Sequence[Any]) -> Callable[[PipeState, Any, Any], tuple[PipeState, Any]]:
        """`update` as a jitted function that keeps the state where it is and gives up the one passed in."""
        shardings = self.shardings(jax.eval_shape(self.fresh, weights))
        return jax.jit(self.update, donate_argnums=0, out_shardings=(shardings, None))

    def drain(self, state: PipeState) -> tuple[PipeState, Any]:
        """Finishes what is under way and begins nothing: all parts then have had the same updates.

        Evaluate on a drained copy: the run itself then learns the same however often it is evaluated.
        """
        if not self.asynchronous:
            return state, make_zeros(self.passes[-1].extra)
        left = jnp.where(state.started > 0, self.tables.span - self.tables.stride, 0)
        return self._run(state, None, left, jnp.asarray(True), begins=False)

    # The loop.

    def _run(self, state: PipeState, batches: Any, ticks: Any, on: jax.Array, begins: bool) -> tuple[PipeState, Any]:
        specs = specs_of(jax.eval_shape(lambda: state), self.stage_axis, self.data_axes)
        split = jax.tree.map(lambda _: PartitionSpec(None, self.data_axes or None), batches)

        def local(state: PipeState, batches: Any, ticks: Any, on: jax.Array) -> tuple[PipeState, Any]:
            weights = self._laid(self.packed, drop_first_dim(state.weights))
            optimizer = self._laid(self.packed_states, drop_first_dim(state.optimizer))
            flight = drop_first_dim(drop_first_dim(state.flight)) if self.asynchronous else self._empty(())
            flight = flight._replace(gradients=self._laid(self.packed, flight.gradients))
            if self.asynchronous:
                flight = flight._replace(sums=make_zeros(self.passes[-1].extra))
            if begins:
                place = state.started % self.tables.batches
                held = jax.tree.map(partial(write_at, place), flight.batches, batches)
                flight = flight._replace(batches=held)
            if flight.stash:  # version 0 is the one that the pipe begins with
                fresh = state.started == 0
                stash = tuple(
                    jnp.where(fresh, s.at[0].set(w), s) for s, w in zip(flight.stash, weights[0], strict=True)
                )
                flight = flight._replace(stash=stash)
            started = state.started + begins
            now = _Now(lax.axis_index(self.stage_axis), started, on.astype(jnp.float32))
            carry = weights, optimizer, flight
            carry = self._steady(carry, now, state.tick, ticks) if self.asynchronous else self._whole(carry, now)
            weights, optimizer, flight = carry
            sums = lax.psum(flight.sums, (self.stage_axis, *self.data_axes))
            empties = jnp.logical_not(on) if begins else jnp.asarray(True)
            if not self.asynchronous:
                empties = jnp.asarray(True)
            zero = jnp.zeros((), jnp.int32)
            new = PipeState(
                add_first_dim(weights),
                add_first_dim(optimizer),
                add_first_dim(add_first_dim(flight)) if self.asynchronous else (),
                jnp.where(empties, zero, state.tick + ticks),
                jnp.where(empties, zero, started),
                state.updates + begins,
            )
            return new, sums

        whole = PartitionSpec()
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(specs, split, whole, whole),
            out_specs=(specs, whole),
            axis_names={self.stage_axis, *self.data_axes},
            check_vma=False,
        )(state, batches, jnp.asarray(ticks), on)

    def _steady(self, carry: Any, now: _Now, first: jax.Array, ticks: Any) -> Any:
        pairs = steady_pairs(self.proof.schedule)

        def tick(n: jax.Array, carry: Any) -> Any:
            carry, turn = self._passes_of(carry, first + n, now, True, True)
            carry = self._updates_of(carry, first + n, now, turn)
            return self._sent(carry, first + n, now, *pairs)

        return lax.fori_loop(0, ticks, tick, carry)

    def _whole(self, carry: Any, now: _Now) -> Any:
        for segment in self.tables.segments:
            period = len(segment.forward)

            def group(n: jax.Array, carry: Any, segment: Any = segment, period: int = period) -> Any:
                for place in range(period):
                    t = segment.start + n * period + place
                    carry, _ = self._passes_of(carry, t, now, segment.has_forward, segment.has_backward)
                    carry = self._sent(carry, t, now, segment.forward[place], segment.backward[place])
                return carry

            carry = lax.fori_loop(0, (segment.stop - segment.start) // period, group, carry)
        weights, optimizer, flight = carry
        gradients = self._same(self.summed(flight.gradients), now.stage)
        done = [self._updated(c, weights[c], optimizer[c], gradients[c], now.stage) for c in self._chunks]
        return tuple(w for w, _ in done), tuple(o for _, o in done), flight

    def _entry(self, table: np.ndarray, t: jax.Array, now: _Now) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """What `table` has for this device: whether there is anything, its update, micro-batch, and number m."""
        n, stride = self.proof.schedule.micro_batches, self.tables.stride
        entry = jnp.asarray(table)[t % stride, now.stage]
        k = t // stride - entry // n
        valid = (entry >= 0) & (k >= 0) & (k < now.started)
        return valid, k, entry % n, k * n + entry % n

    def _passes_of(self, carry: Any, t: jax.Array, now: _Now, forward: bool, backward: bool) -> tuple[Any, jax.Array]:
        # The backward pass comes first: it frees the place of what the forward pass keeps.
        turn = jnp.zeros((), jnp.int32)
        for c in self._chunks:
            if backward:
                found = self._entry(self.tables.backward[c], t, now)
                carry, turn = run_in_turn(found[0], partial(self._backward, c, found, now), carry, turn)
        for c in self._chunks:
            if forward:
                found = self._entry(self.tables.forward[c], t, now)
                carry, turn = run_in_turn(found[0], partial(self._forward, c, found, now), carry, turn)
        return carry, turn

    def _forward(self, c: int, found: Any, now: _Now, zero: jax.Array, carry: Any) -> Any:
        weights, optimizer, flight = carry
        k, j, m = (number + zero for number in found[1:])
        aux = jax.tree.map(lambda b: read_at(j, read_at(k % self.tables.batches, b)), flight.batches)
        arrived = tuple(read_at(m % slot.shape[0] + zero, slot) for slot in flight.inbox[0][c])

        def branch(n: int, own: Slots, arrived: Slots, aux: Any) -> Any:
            part = self._part(c, n)
            x = self.messages.unpack(part - 1, arrived) if part else ()
            y, extra, saved = self.passes[part].forward(self.packed[c].unpack(n, own), x, aux)
            last = part == len(self.parts) - 1
            out = make_zeros(self.messages.slots) if last else self.messages.pack(part, y)
            return out, extra if last else make_zeros(self.passes[-1].extra), self.packed_saved[c].pack(n, saved)

        out, extra, saved = self.switch(c, now.stage, branch, weights[c], arrived, aux)
        kept = tuple(write_at(m % ring.shape[0], ring, leaf) for ring, leaf in zip(flight.saved[c], saved, strict=True))
        flight = flight._replace(
            saved=replace_item(flight.saved, c, kept),
            outbox=(out, flight.outbox[1]),
            sums=jax.tree.map(jnp.add, flight.sums, extra),
        )
        return weights, optimizer, flight

    def _backward(self, c: int, found: Any, now: _Now, zero: jax.Array, carry: Any) -> Any:
        weights, optimizer, flight = carry
        k, j, m = (number + zero for number in found[1:])
        used = self._backward_weights(c, weights[c], optimizer[c], flight, k, j, now)
        saved = tuple(read_at(m % ring.shape[0] + zero, ring) for ring in flight.saved[c])
        arrived = tuple(read_at(m % slot.shape[0] + zero, slot) for slot in flight.inbox[1][c])

        def branch(n: int, used: Slots, saved: Slots, arrived: Slots) -> Any:
            part = self._part(c, n)
            last = part == len(self.parts) - 1
            dy = jnp.ones((), self.passes[part].y.dtype) if last else self.messages.unpack(part, arrived)
            mine = self.packed_saved[c].unpack(n, saved)
            own, dx = self.passes[part].backward(self.packed[c].unpack(n, used), mine, dy)
            return self.packed[c].pack(n, own), self.messages.pack(part - 1, dx) if part else make_zeros(
                self.messages.slots
            )

        own, out = self.switch(c, now.stage, branch, used, saved, arrived)
        gradients = replace_item(flight.gradients, c, jax.tree.map(jnp.add, flight.gradients[c], own))
        return weights, optimizer, flight._replace(gradients=gradients, outbox=(flight.outbox[0], out))

    def _backward_weights(
        self, c: int, weights: Slots, optimizer: Slots, flight: InFlight, k: jax.Array, j: jax.Array, now: _Now
    ) -> Slots:
        if flight.stash:
            delay = jnp.asarray(self.tables.delays)[now.stage, j] * (now.on > 0)
            version = jnp.maximum(k - delay, 0)
            return tuple(read_at(version % slot.shape[0], slot) for slot in flight.stash)
        if all(part.backward_weights is None for part in self.parts):
            return weights

        def branch(n: int, weights: Slots, optimizer: Slots) -> Slots:
            part = self.parts[self._part(c, n)]
            own = self.packed[c].unpack(n, weights)
            if part.backward_weights is not None:
                own = part.backward_weights(own, self.packed_states[c].unpack(n, optimizer), now.on)
            return self.packed[c].pack(n, own)

        return self.switch(c, now.stage, branch, weights, optimizer, by=self._optimizer_kinds)

    def _updates_of(self, carry: Any, t: jax.Array, now: _Now, turn: jax.Array) -> Any:
        """Each part's update, when its minibatch is through; an asynchronous pipeline has one chunk."""
        age = jnp.asarray(self.tables.update)[t % self.tables.stride, now.stage]
        k = t // self.tables.stride - age

        def updated(_: jax.Array, carry: Any) -> Any:
            weights, optimizer, flight = carry
            gradients = self.summed(flight.gradients)
            new, state = self._updated(0, weights[0], optimizer[0], gradients[0], now.stage)
            zeros = jax.tree.map(jnp.zeros_like, flight.gradients)
            stash = tuple(
                write_at((k + 1) % s.shape[0], s, w) for s, w in zip(flight.stash, new, strict=bool(flight.stash))
            )
            return (new,), (state,), flight._replace(gradients=zeros, stash=stash)

        return run_in_turn((age >= 0) & (k >= 0) & (k < now.started), updated, carry, turn)[0]

    def _updated(self, c: int, weights: Slots, optimizer: Slots, gradients: Slots, stage: jax.Array) -> Any:
        def branch(n: int, weights: Slots, optimizer: Slots, gradients: Slots) -> Any:
            part = self.parts[self._part(c, n)]
            own, state = self.packed[c].unpack(n, weights), self.packed_states[c].unpack(n, optimizer)
            changes, state = part.optimizer.update(self.packed[c].unpack(n, gradients), state, own)
            new = optax.apply_updates(own, changes)
            return self.packed[c].pack(n, new), self.packed_states[c].pack(n, state)

        return self.switch(c, stage, branch, weights, optimizer, gradients, by=self._optimizer_kinds)

    def _sent(self, carry: Any, t: jax.Array, now: _Now, forward: StagePairs, backward: StagePairs) -> Any:
        weights, optimizer, flight = carry
        inbox = list(flight.inbox)
        for way, pairs in enumerate((forward, backward)):
            if not pairs:
                continue
            came = tuple(lax.ppermute(slot, self.stage_axis, pairs) for slot in flight.outbox[way])
            if self._immediate:  # read in the next tick or never
                inbox[way] = (tuple(slot[None] for slot in came),)
                continue
            for c in self._chunks:
                valid, _, _, m = self._entry(self.tables.arrivals[way][c], t, now)
                put = partial(write_all_at, m, came)
                inbox[way] = replace_item(inbox[way], c, run_if(valid, put, inbox[way][c]))
        return weights, optimizer, flight._replace(inbox=tuple(inbox))
