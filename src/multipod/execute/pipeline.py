"""Runs a pipeline schedule in one program over a `stage` axis of the mesh, beside the axes that split the batch.

Every device runs the same loop over ticks; a table says what it does in each. Messages travel by `ppermute` between
ticks. A pass that a device has not to do in a tick is a loop of no rounds: unlike a conditional, XLA runs a loop in
place, and one of no rounds costs nothing (docs/design/pipelines.md).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from multipod.errors import LayoutError
from multipod.execute.delays import Part
from multipod.execute.flight import (
    Flight,
    PipeState,
    at,
    first,
    in_turn,
    leaf_number,
    put,
    put_all,
    replaced,
    specs_of,
    when,
    with_first,
    zeros,
)
from multipod.execute.packing import Packing, Slots, packing
from multipod.execute.passes import Passes, passes
from multipod.execute.pipeline_tables import Pairs, Tables, steady_pairs, tables
from multipod.pipelines.check import Proof

Tied = tuple[tuple[tuple[int, str], ...], ...]
"""Groups of weights that are one: for each the (part, name) of its copies; a name is a path such as `tokens/table`."""


class _Now(NamedTuple):
    """What a tick reads of its surroundings."""

    stage: jax.Array
    started: jax.Array
    on: jax.Array


@dataclass(frozen=True, eq=False)
class Pipe:
    """A model in parts, a proven schedule, and a mesh. Nothing is compiled or allocated before a method is called.

    Attributes:
      proof: of the schedule; of an asynchronous one, with updates enough to fill the pipe (`Proof.settled`).
      parts: of the model, as many as `proof.schedule.parts`. A last part's loss is its share of the mean over all
        micro-batches and data devices: gradients are added over both.
      weights: each part's weights, as shapes.
      aux: what a part's function gets of one micro-batch on one data device, as shapes.
      mesh: has `stage_axis`, as long as the pipeline, and `data_axes`. Other axes are XLA's.
      tied: weights that several parts hold (synchronous schedules only).
      over_data: inside `shard_map`, sums a tree over `data_axes`; None: XLA's sum. (An asynchronous pipeline's stages
        sum at moments of their own, which only XLA's sum can: in it nobody waits for other stages.)

    Raises:
      LayoutError: parts or a mesh that do not fit the schedule.
    """

    proof: Proof
    parts: Sequence[Part]
    weights: Sequence[Any]
    aux: Any
    mesh: Mesh | AbstractMesh
    stage_axis: str = "stage"
    data_axes: tuple[str, ...] = ()
    tied: Tied = ()
    over_data: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        made, wrong = self.proof.schedule, []
        if len(self.parts) != made.parts:
            wrong.append(f"the model is in {len(self.parts)} parts, and the schedule has {made.parts}")
        if self.mesh.shape.get(self.stage_axis) != made.stages:
            wrong.append(f"mesh axis {self.stage_axis} has {self.mesh.shape.get(self.stage_axis, 0)} devices")
        if not made.synchronous and not self.proof.settled:
            wrong.append(f"{made.updates} updates do not fill the pipe, so its delays are not known")
        if not made.synchronous and self.tied:
            wrong.append("an asynchronous pipeline cannot keep tied weights equal")
        if not made.synchronous and self.over_data is not None:
            wrong.append("an asynchronous pipeline's gradients are summed by XLA alone")
        if wrong:
            raise LayoutError(f"{made}: {'; '.join(wrong)}. Cut the model, the mesh and the schedule alike.")

    # What is where.

    @cached_property
    def tables(self) -> Tables:
        """The schedule, as the loop reads it."""
        return tables(self.proof)

    @property
    def asynchronous(self) -> bool:
        """Whether passes are under way between updates."""
        return not self.proof.schedule.synchronous

    @cached_property
    def passes(self) -> tuple[Passes, ...]:
        """The two passes of each part; parts of one kind share theirs."""
        found: list[Passes] = []
        known: dict[Hashable, Passes] = {}
        x: Any = ()
        for n, (part, weights) in enumerate(zip(self.parts, self.weights, strict=True)):
            key = n if part.kind is None else ("kind", part.kind)
            if key not in known:
                known[key] = passes(part.function, weights, x, self.aux)
            found.append(known[key])
            x = found[-1].y
        return tuple(found)

    @cached_property
    def messages(self) -> Packing:
        """What part n sends to part n + 1, and gets back as a gradient."""
        return packing([p.y for p in self.passes[:-1]])

    @cached_property
    def packed(self) -> tuple[Packing, ...]:
        """For each chunk, the stages' weights."""
        return tuple(packing(self._of_chunk(self.weights, c)) for c in self._chunks)

    @cached_property
    def packed_states(self) -> tuple[Packing, ...]:
        """For each chunk, the states of the stages' optimizers."""
        states = [jax.eval_shape(p.optimizer.init, w) for p, w in zip(self.parts, self.weights, strict=True)]
        return tuple(packing(self._of_chunk(states, c)) for c in self._chunks)

    @cached_property
    def packed_saved(self) -> tuple[Packing, ...]:
        """For each chunk, what the stages' forward passes keep of a micro-batch."""
        return tuple(packing(self._of_chunk([p.saved for p in self.passes], c)) for c in self._chunks)

    def unpack(self, weights: tuple[Slots, ...]) -> list[Any]:
        """Each part's weights out of a state's; inside `jax.jit` for arrays of other processes."""
        stages = self.proof.schedule.stages
        return [
            self.packed[n // stages].unpack(n % stages, [slot[n % stages] for slot in weights[n // stages]])
            for n in range(len(self.parts))
        ]

    # What a run calls.

    def begin(self, weights: Sequence[Any]) -> PipeState:
        """The state before the first update, on the mesh, from each part's weights."""
        shardings = self.shardings(jax.eval_shape(self.fresh, weights))
        return jax.jit(self.fresh, out_shardings=shardings)(weights)

    def fresh(self, weights: Sequence[Any]) -> PipeState:
        """`begin`, for use inside `jax.jit`."""
        states = [part.optimizer.init(tree) for part, tree in zip(self.parts, weights, strict=True)]
        lead = self.proof.schedule.stages, self._data_devices
        return PipeState(
            self._stacked(self.packed, weights),
            self._stacked(self.packed_states, states),
            self._empty(lead) if self.asynchronous else (),
            *(jnp.zeros((), jnp.int32) for _ in range(3)),
        )

    def shardings(self, state: PipeState) -> Any:
        """Where each array of a state lies."""
        specs = specs_of(state, self.stage_axis, self.data_axes)
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

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
            return state, zeros(self.passes[-1].extra)
        left = jnp.where(state.started > 0, self.tables.span - self.tables.stride, 0)
        return self._run(state, None, left, jnp.asarray(True), begins=False)

    # The loop.

    def _run(self, state: PipeState, batches: Any, ticks: Any, on: jax.Array, begins: bool) -> tuple[PipeState, Any]:
        specs = specs_of(jax.eval_shape(lambda: state), self.stage_axis, self.data_axes)
        split = jax.tree.map(lambda _: PartitionSpec(None, self.data_axes or None), batches)

        def local(state: PipeState, batches: Any, ticks: Any, on: jax.Array) -> tuple[PipeState, Any]:
            weights, optimizer = first(state.weights), first(state.optimizer)
            flight = first(first(state.flight)) if self.asynchronous else self._empty(())
            if self.asynchronous:
                flight = flight._replace(sums=zeros(self.passes[-1].extra))
            if begins:
                place = state.started % self.tables.batches
                held = jax.tree.map(partial(put, place), flight.batches, batches)
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
                with_first(weights),
                with_first(optimizer),
                with_first(with_first(flight)) if self.asynchronous else (),
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
        gradients = self._same(self._over_data(flight.gradients), now.stage)
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
                carry, turn = in_turn(found[0], partial(self._backward, c, found, now), carry, turn)
        for c in self._chunks:
            if forward:
                found = self._entry(self.tables.forward[c], t, now)
                carry, turn = in_turn(found[0], partial(self._forward, c, found, now), carry, turn)
        return carry, turn

    def _forward(self, c: int, found: Any, now: _Now, zero: jax.Array, carry: Any) -> Any:
        weights, optimizer, flight = carry
        k, j, m = (number + zero for number in found[1:])
        aux = jax.tree.map(lambda b: at(j, at(k % self.tables.batches, b)), flight.batches)
        arrived = tuple(at(m % slot.shape[0] + zero, slot) for slot in flight.inbox[0][c])

        def branch(n: int, own: Slots, arrived: Slots, aux: Any) -> Any:
            part = self._part(c, n)
            x = self.messages.unpack(part - 1, arrived) if part else ()
            y, extra, saved = self.passes[part].forward(self.packed[c].unpack(n, own), x, aux)
            last = part == len(self.parts) - 1
            out = zeros(self.messages.slots) if last else self.messages.pack(part, y)
            return out, extra if last else zeros(self.passes[-1].extra), self.packed_saved[c].pack(n, saved)

        out, extra, saved = self.switch(c, now.stage, branch, weights[c], arrived, aux)
        kept = tuple(put(m % ring.shape[0], ring, leaf) for ring, leaf in zip(flight.saved[c], saved, strict=True))
        flight = flight._replace(
            saved=replaced(flight.saved, c, kept),
            outbox=(out, flight.outbox[1]),
            sums=jax.tree.map(jnp.add, flight.sums, extra),
        )
        return weights, optimizer, flight

    def _backward(self, c: int, found: Any, now: _Now, zero: jax.Array, carry: Any) -> Any:
        weights, optimizer, flight = carry
        k, j, m = (number + zero for number in found[1:])
        used = self._backward_weights(c, weights[c], optimizer[c], flight, k, j, now)
        saved = tuple(at(m % ring.shape[0] + zero, ring) for ring in flight.saved[c])
        arrived = tuple(at(m % slot.shape[0] + zero, slot) for slot in flight.inbox[1][c])

        def branch(n: int, used: Slots, saved: Slots, arrived: Slots) -> Any:
            part = self._part(c, n)
            last = part == len(self.parts) - 1
            dy = jnp.ones((), self.passes[part].y.dtype) if last else self.messages.unpack(part, arrived)
            mine = self.packed_saved[c].unpack(n, saved)
            own, dx = self.passes[part].backward(self.packed[c].unpack(n, used), mine, dy)
            return self.packed[c].pack(n, own), self.messages.pack(part - 1, dx) if part else zeros(self.messages.slots)

        own, out = self.switch(c, now.stage, branch, used, saved, arrived)
        gradients = replaced(flight.gradients, c, jax.tree.map(jnp.add, flight.gradients[c], own))
        return weights, optimizer, flight._replace(gradients=gradients, outbox=(flight.outbox[0], out))

    def _backward_weights(
        self, c: int, weights: Slots, optimizer: Slots, flight: Flight, k: jax.Array, j: jax.Array, now: _Now
    ) -> Slots:
        if flight.stash:
            delay = jnp.asarray(self.tables.delays)[now.stage, j] * (now.on > 0)
            version = jnp.maximum(k - delay, 0)
            return tuple(at(version % slot.shape[0], slot) for slot in flight.stash)
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
            gradients = self._over_data(flight.gradients)
            new, state = self._updated(0, weights[0], optimizer[0], gradients[0], now.stage)
            zeros = jax.tree.map(jnp.zeros_like, flight.gradients)
            stash = tuple(put((k + 1) % s.shape[0], s, w) for s, w in zip(flight.stash, new, strict=bool(flight.stash)))
            return (new,), (state,), flight._replace(gradients=zeros, stash=stash)

        return in_turn((age >= 0) & (k >= 0) & (k < now.started), updated, carry, turn)[0]

    def _updated(self, c: int, weights: Slots, optimizer: Slots, gradients: Slots, stage: jax.Array) -> Any:
        def branch(n: int, weights: Slots, optimizer: Slots, gradients: Slots) -> Any:
            part = self.parts[self._part(c, n)]
            own, state = self.packed[c].unpack(n, weights), self.packed_states[c].unpack(n, optimizer)
            changes, state = part.optimizer.update(self.packed[c].unpack(n, gradients), state, own)
            new = optax.apply_updates(own, changes)
            return self.packed[c].pack(n, new), self.packed_states[c].pack(n, state)

        return self.switch(c, stage, branch, weights, optimizer, gradients, by=self._optimizer_kinds)

    def _over_data(self, gradients: Any) -> Any:
        if self._data_devices == 1:
            return gradients
        return self.over_data(gradients) if self.over_data else lax.psum(gradients, self.data_axes)

    def _same(self, gradients: tuple[Slots, ...], stage: jax.Array) -> tuple[Slots, ...]:
        """Gradients with those of tied weights added over the parts that hold them."""
        changed = [list(slots) for slots in gradients]
        for group in self.tied:
            places = []
            for part, name in group:
                c, p = divmod(part, self.proof.schedule.stages)
                places.append((c, p, self.packed[c].places[p][leaf_number(self.weights[part], name)]))
            own = sum(jnp.where(stage == p, changed[c][slot], 0) for c, p, slot in places)
            total = lax.psum(own, self.stage_axis)
            for c, p, slot in places:
                changed[c][slot] = jnp.where(stage == p, total, changed[c][slot])
        return tuple(map(tuple, changed))

    def _sent(self, carry: Any, t: jax.Array, now: _Now, forward: Pairs, backward: Pairs) -> Any:
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
                put = partial(put_all, m, came)
                inbox[way] = replaced(inbox[way], c, when(valid, put, inbox[way][c]))
        return weights, optimizer, flight._replace(inbox=tuple(inbox))

    # Small things.

    @property
    def _chunks(self) -> range:
        return range(self.proof.schedule.chunks)

    @property
    def _immediate(self) -> bool:
        return len(self._chunks) == 1 and max(map(max, self.tables.inbox)) == 1

    @property
    def _data_devices(self) -> int:
        return int(np.prod([self.mesh.shape[axis] for axis in self.data_axes], dtype=int))

    def _part(self, c: int, stage: int) -> int:
        return self.proof.schedule.part(stage, c)

    def _of_chunk(self, each: Sequence[Any], c: int) -> list[Any]:
        return [each[self._part(c, p)] for p in range(self.proof.schedule.stages)]

    def _kinds(self, n: int) -> Hashable:
        return n if self.parts[n].kind is None else ("kind", self.parts[n].kind, n == 0, n == len(self.parts) - 1)

    def _optimizer_kinds(self, n: int) -> Hashable:
        return self._kinds(n), id(self.parts[n].optimizer), id(self.parts[n].backward_weights)

    def switch(
        self,
        c: int,
        stage: jax.Array,
        branch: Callable[..., Any],
        *operands: Any,
        by: Callable[[int], Hashable] | None = None,
    ) -> Any:
        """`branch(stage, *operands)` for the device's own stage, compiled once for each kind of part."""
        kinds = [(by or self._kinds)(self._part(c, p)) for p in range(self.proof.schedule.stages)]
        distinct = list(dict.fromkeys(kinds))
        branches = [partial(branch, kinds.index(kind)) for kind in distinct]
        if len(branches) == 1:
            return branches[0](*operands)
        which = jnp.asarray([distinct.index(kind) for kind in kinds], jnp.int32)[stage]
        return lax.switch(which, branches, *operands)

    def _empty(self, lead: tuple[int, ...]) -> Flight:
        """A flight of nothing, with these first dims."""
        n = self.proof.schedule.micro_batches
        saved = []
        for c in self._chunks:
            own, keep = self.packed_saved[c], self.tables.keep[c]
            # A slot is as deep as the stages need that use it: what the head keeps is not kept by the first stage.
            deep = [max(keep[p] for p in own.users(slot)) for slot in range(len(own.slots))]
            saved.append(tuple(zeros(shape, *lead, depth) for shape, depth in zip(own.slots, deep, strict=True)))
        inbox = [tuple(zeros(self.messages.slots, *lead, deep) for deep in way) for way in self.tables.inbox]
        stash: Slots = ()
        if self.proof.schedule.backward_weights == "stashed":
            stash = zeros(self.packed[0].slots, *lead, int(self.tables.delays.max()) + 2)
        return Flight(
            tuple(zeros(self.packed[c].slots, *lead) for c in self._chunks),
            tuple(saved),
            (inbox[0], inbox[1]),
            (zeros(self.messages.slots, *lead), zeros(self.messages.slots, *lead)),
            zeros(self.passes[-1].extra, *lead),
            zeros(self.aux, *lead, self.tables.batches, n),
            stash,
        )

    def _stacked(self, packings: tuple[Packing, ...], trees: Sequence[Any]) -> tuple[Slots, ...]:
        """Each chunk's slots, with a first dim of stages."""
        made = []
        for c in self._chunks:
            each = [packings[c].pack(p, tree) for p, tree in enumerate(self._of_chunk(trees, c))]
            made.append(tuple(jnp.stack(slot) for slot in zip(*each, strict=True)))
        return tuple(made)
