"""The loop over ticks that every device of a pipeline runs: passes, updates, and messages between them."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from multipod.execute.pipeline.gradients import sum_over_data, sum_tied
from multipod.execute.pipeline.in_flight import (
    InFlight,
    make_zeros,
    read_at,
    replace_item,
    run_if,
    run_in_turn,
    write_all_at,
    write_at,
)
from multipod.execute.pipeline.packing import Slots
from multipod.execute.pipeline.setup import PipelineSetup
from multipod.execute.pipeline.slots import StageSlots
from multipod.execute.pipeline.switch import kind_by_function, kind_by_optimizer, switch_stages
from multipod.execute.pipeline.tables import StagePairs, TickSegment, steady_pairs
from multipod.pytrees import Pytree


class TickCarry(NamedTuple):
    """What the loop carries on one device: each chunk's weights and optimizer state, and what is under way."""

    weights: tuple[Slots, ...]
    optimizer: tuple[Slots, ...]
    flight: InFlight


class DuePass(NamedTuple):
    """What a table has for a device in a tick.

    Attributes:
      due: whether there is anything.
      update: the number of the update.
      micro: of the micro-batch in its minibatch.
      number: of the micro-batch since the pipe was empty.
    """

    due: jax.Array
    update: jax.Array
    micro: jax.Array
    number: jax.Array

    def read_in_loop(self, zero: jax.Array) -> "DuePass":
        """Adds the counter of the loop that the pass is in, which is 0; see `run_in_turn`."""
        return DuePass(self.due, self.update + zero, self.micro + zero, self.number + zero)


@dataclass(frozen=True, eq=False)
class TickLoop:
    """The loop on one device, inside `shard_map`.

    Attributes:
      slots: where the pipeline's arrays lie.
      stage: of this device.
      started: updates begun since the pipe was empty.
      delayed: 1.0, or 0.0 while updates are synchronous.
    """

    slots: StageSlots
    stage: jax.Array
    started: jax.Array
    delayed: jax.Array

    @property
    def _setup(self) -> PipelineSetup:
        return self.slots.setup

    def run_asynchronous(self, carry: TickCarry, first: jax.Array, ticks: jax.Array) -> TickCarry:
        """Runs `ticks` ticks of a pipe that never stops, from tick `first` on."""
        pairs = steady_pairs(self._setup.schedule)

        def tick(n: jax.Array, carry: TickCarry) -> TickCarry:
            carry, turn = self._run_passes(carry, first + n, True, True)
            carry = self._update_if_due(carry, first + n, turn)
            return self._send(carry, first + n, *pairs)

        return lax.fori_loop(0, ticks, tick, carry)

    def run_synchronous(self, carry: TickCarry) -> TickCarry:
        """Runs all ticks of one update, and then updates every part."""
        for segment in self._setup.tables.segments:
            period = len(segment.forward)

            def group(
                n: jax.Array, carry: TickCarry, segment: TickSegment = segment, period: int = period
            ) -> TickCarry:
                for offset in range(period):
                    t = segment.start + n * period + offset
                    carry, _ = self._run_passes(carry, t, segment.has_forward, segment.has_backward)
                    carry = self._send(carry, t, segment.forward[offset], segment.backward[offset])
                return carry

            carry = lax.fori_loop(0, (segment.stop - segment.start) // period, group, carry)
        weights, optimizer, flight = carry
        gradients = sum_tied(self.slots, sum_over_data(self.slots, flight.gradients), self.stage)
        done = [self._update_chunk(c, weights[c], optimizer[c], gradients[c]) for c in self._setup.chunks]
        return TickCarry(tuple(w for w, _ in done), tuple(o for _, o in done), flight)

    def _read_table(self, table: np.ndarray, t: jax.Array) -> DuePass:
        """Reads what `table` has for this device in tick t."""
        n, stride = self._setup.schedule.micro_batches, self._setup.tables.stride
        entry = jnp.asarray(table)[t % stride, self.stage]
        k = t // stride - entry // n
        due = (entry >= 0) & (k >= 0) & (k < self.started)
        return DuePass(due, k, entry % n, k * n + entry % n)

    def _run_passes(self, carry: TickCarry, t: jax.Array, forward: bool, backward: bool) -> tuple[TickCarry, jax.Array]:
        # The backward pass comes first: it frees the place of what the forward pass keeps.
        turn = jnp.zeros((), jnp.int32)
        for c in self._setup.chunks:
            if backward:
                entry = self._read_table(self._setup.tables.backward[c], t)
                carry, turn = run_in_turn(entry.due, partial(self._run_backward, c, entry), carry, turn)
        for c in self._setup.chunks:
            if forward:
                entry = self._read_table(self._setup.tables.forward[c], t)
                carry, turn = run_in_turn(entry.due, partial(self._run_forward, c, entry), carry, turn)
        return carry, turn

    def _run_forward(self, c: int, entry: DuePass, zero: jax.Array, carry: TickCarry) -> TickCarry:
        setup, slots = self._setup, self.slots
        flight = carry.flight
        _, k, j, m = entry.read_in_loop(zero)
        aux = jax.tree.map(lambda b: read_at(j, read_at(k % setup.tables.batches, b)), flight.batches)
        arrived = tuple(read_at(m % slot.shape[0] + zero, slot) for slot in flight.inbox[0][c])

        def branch(p: int, weights: Slots, arrived: Slots, aux: Pytree) -> Pytree:
            part = setup.schedule.part(p, c)
            x = slots.messages.unpack(part - 1, arrived) if part else ()
            y, extra, saved = setup.passes[part].forward(slots.weights[c].unpack(p, weights), x, aux)
            last = part == len(setup.parts) - 1
            out = make_zeros(slots.messages.slots) if last else slots.messages.pack(part, y)
            return out, extra if last else make_zeros(setup.passes[-1].extra), slots.saved[c].pack(p, saved)

        kind_of = partial(kind_by_function, setup)
        out, extra, saved = switch_stages(setup, c, self.stage, kind_of, branch, carry.weights[c], arrived, aux)
        kept = tuple(write_at(m % ring.shape[0], ring, leaf) for ring, leaf in zip(flight.saved[c], saved, strict=True))
        flight = flight._replace(
            saved=replace_item(flight.saved, c, kept),
            outbox=(out, flight.outbox[1]),
            sums=jax.tree.map(jnp.add, flight.sums, extra),
        )
        return carry._replace(flight=flight)

    def _run_backward(self, c: int, entry: DuePass, zero: jax.Array, carry: TickCarry) -> TickCarry:
        setup, slots = self._setup, self.slots
        flight = carry.flight
        entry = entry.read_in_loop(zero)
        m = entry.number
        used = self._choose_backward_weights(c, carry, entry)
        saved = tuple(read_at(m % ring.shape[0] + zero, ring) for ring in flight.saved[c])
        arrived = tuple(read_at(m % slot.shape[0] + zero, slot) for slot in flight.inbox[1][c])

        def branch(p: int, used: Slots, saved: Slots, arrived: Slots) -> Pytree:
            part = setup.schedule.part(p, c)
            last = part == len(setup.parts) - 1
            dy = jnp.ones((), setup.passes[part].y.dtype) if last else slots.messages.unpack(part, arrived)
            kept = slots.saved[c].unpack(p, saved)
            gradients, dx = setup.passes[part].backward(slots.weights[c].unpack(p, used), kept, dy)
            packed = slots.weights[c].pack(p, gradients)
            return packed, slots.messages.pack(part - 1, dx) if part else make_zeros(slots.messages.slots)

        kind_of = partial(kind_by_function, setup)
        changes, out = switch_stages(setup, c, self.stage, kind_of, branch, used, saved, arrived)
        gradients = replace_item(flight.gradients, c, jax.tree.map(jnp.add, flight.gradients[c], changes))
        return carry._replace(flight=flight._replace(gradients=gradients, outbox=(flight.outbox[0], out)))

    def _choose_backward_weights(self, c: int, carry: TickCarry, entry: DuePass) -> Slots:
        """Chooses the weights of a backward pass: stashed ones, the newest, or what the part makes of the newest."""
        setup, slots, stash = self._setup, self.slots, carry.flight.stash
        if stash:
            delay = jnp.asarray(setup.tables.delays)[self.stage, entry.micro] * (self.delayed > 0)
            version = jnp.maximum(entry.update - delay, 0)
            return tuple(read_at(version % slot.shape[0], slot) for slot in stash)
        if all(part.backward_weights is None for part in setup.parts):
            return carry.weights[c]

        def branch(p: int, weights: Slots, optimizer: Slots) -> Slots:
            part = setup.parts[setup.schedule.part(p, c)]
            tree = slots.weights[c].unpack(p, weights)
            if part.backward_weights is not None:
                tree = part.backward_weights(tree, slots.states[c].unpack(p, optimizer), self.delayed)
            return slots.weights[c].pack(p, tree)

        kind_of = partial(kind_by_optimizer, slots)
        return switch_stages(setup, c, self.stage, kind_of, branch, carry.weights[c], carry.optimizer[c])

    def _update_if_due(self, carry: TickCarry, t: jax.Array, turn: jax.Array) -> TickCarry:
        """Updates the device's part when its minibatch is through; an asynchronous pipeline has one chunk."""
        tables = self._setup.tables
        age = jnp.asarray(tables.update)[t % tables.stride, self.stage]
        k = t // tables.stride - age

        def update(_: jax.Array, carry: TickCarry) -> TickCarry:
            weights, optimizer, flight = carry
            gradients = sum_over_data(self.slots, flight.gradients)
            new, state = self._update_chunk(0, weights[0], optimizer[0], gradients[0])
            zeros = jax.tree.map(jnp.zeros_like, flight.gradients)
            pairs = zip(flight.stash, new, strict=bool(flight.stash))
            stash = tuple(write_at((k + 1) % slot.shape[0], slot, w) for slot, w in pairs)
            return TickCarry((new,), (state,), flight._replace(gradients=zeros, stash=stash))

        return run_in_turn((age >= 0) & (k >= 0) & (k < self.started), update, carry, turn)[0]

    def _update_chunk(self, c: int, weights: Slots, optimizer: Slots, gradients: Slots) -> tuple[Slots, Slots]:
        """Updates a chunk's weights; returns them and the optimizer's state."""
        setup, slots = self._setup, self.slots

        def branch(p: int, weights: Slots, optimizer: Slots, gradients: Slots) -> tuple[Slots, Slots]:
            part = setup.parts[setup.schedule.part(p, c)]
            tree, state = slots.weights[c].unpack(p, weights), slots.states[c].unpack(p, optimizer)
            changes, state = part.optimizer.update(slots.weights[c].unpack(p, gradients), state, tree)
            new = optax.apply_updates(tree, changes)
            return slots.weights[c].pack(p, new), slots.states[c].pack(p, state)

        kind_of = partial(kind_by_optimizer, slots)
        return switch_stages(setup, c, self.stage, kind_of, branch, weights, optimizer, gradients)

    def _send(self, carry: TickCarry, t: jax.Array, forward: StagePairs, backward: StagePairs) -> TickCarry:
        """Sends the messages of tick t, and puts those that arrive where a later tick reads them."""
        setup, flight = self._setup, carry.flight
        inbox = list(flight.inbox)
        for way, pairs in enumerate((forward, backward)):
            if not pairs:
                continue
            came = tuple(lax.ppermute(slot, setup.stage_axis, pairs) for slot in flight.outbox[way])
            if setup.tables.immediate:  # read in the next tick or never
                inbox[way] = (tuple(slot[None] for slot in came),)
                continue
            for c in setup.chunks:
                arrival = self._read_table(setup.tables.arrivals[way][c], t)
                write = partial(write_all_at, arrival.number, came)
                inbox[way] = replace_item(inbox[way], c, run_if(arrival.due, write, inbox[way][c]))
        return carry._replace(flight=flight._replace(inbox=(inbox[0], inbox[1])))
