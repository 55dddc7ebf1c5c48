"""A pipeline that only goes forward: evaluation, with every part of the model where training keeps it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from multipod.execute.pipeline.in_flight import drop_first_dim, make_zeros, read_at, replace_item, run_in_turn, write_at
from multipod.execute.pipeline.packing import SlotPacking, Slots, assign_slots
from multipod.execute.pipeline.passes import PartFunction
from multipod.execute.pipeline.slots import StageSlots
from multipod.execute.pipeline.switch import switch_stages
from multipod.pytrees import Pytree, Shapes

ForwardCarry = tuple[tuple[Slots, ...], tuple[Slots, ...], Pytree]
"""Inbox and outbox of each chunk, and the results."""


def run_forward(
    slots: StageSlots, functions: Sequence[PartFunction], weights: tuple[Slots, ...], batches: Pytree
) -> tuple[Pytree, Pytree]:
    """Evaluates all micro-batches; to be called inside `jax.jit`. Returns (sums, each) of what the last part gives.

    functions: (weights, x, aux) to (y, extra) for each part; the last part's y is not used, and its extra is
    a pair: sums, which are added over micro-batches and data devices, and arrays of the micro-batch's rows, which come
    back in the order of the rows, split over the data axes. batches: the `aux` of any number M of micro-batches,
    [M, rows over all data devices, ...]; they need not have the shapes of training. Takes M + parts - 1 ticks; nothing
    is kept but the messages.
    """
    setup = slots.setup
    split = PartitionSpec(None, setup.data_axes or None)
    held = jax.tree.map(lambda _: PartitionSpec(setup.stage_axis), weights)

    def local(weights: tuple[Slots, ...], batches: Pytree) -> tuple[Pytree, Pytree]:
        results = _start_loop(slots, functions, drop_first_dim(weights), batches).run()
        sums, each = lax.psum(results, setup.stage_axis)  # zero, but for the device of the last part
        sums = jax.tree.map(lambda leaf: leaf.sum(0, dtype=leaf.dtype), sums)
        sums = lax.psum(sums, setup.data_axes) if setup.data_axes else sums
        return sums, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), each)

    rows = PartitionSpec(setup.data_axes or None)
    return jax.shard_map(
        local,
        mesh=setup.mesh,
        in_specs=(held, jax.tree.map(lambda _: split, batches)),
        out_specs=(PartitionSpec(), rows),
        axis_names=set(setup.manual_axes),
        check_vma=False,
    )(weights, batches)


def _start_loop(
    slots: StageSlots, functions: Sequence[PartFunction], weights: tuple[Slots, ...], batches: Pytree
) -> "_ForwardLoop":
    stage = lax.axis_index(slots.setup.stage_axis)
    outputs: list[Shapes] = []
    x: Pytree = ()
    extra: Shapes = {}
    aux = jax.eval_shape(drop_first_dim, batches)
    for function, shapes in zip(functions, slots.setup.weights, strict=True):
        x, extra = jax.eval_shape(function, shapes, x, aux)
        outputs.append(x)
    return _ForwardLoop(slots, functions, weights, batches, stage, extra, assign_slots(outputs[:-1]))


@dataclass(frozen=True, eq=False)
class _ForwardLoop:
    """The loop on one device: part n treats micro-batch j in tick n + j."""

    slots: StageSlots
    functions: Sequence[PartFunction]
    weights: tuple[Slots, ...]
    batches: Pytree
    stage: jax.Array
    extra: Shapes
    messages: SlotPacking

    @property
    def count(self) -> int:
        """Micro-batches."""
        return len(jax.tree.leaves(self.batches)[0])

    def run(self) -> Pytree:
        """Returns the last part's extra of each micro-batch, on its device; zeros on the others."""
        empty = tuple(make_zeros(self.messages.slots) for _ in self.slots.setup.chunks)
        results = make_zeros(self.extra, self.count)
        ticks = self.count + len(self.functions) - 1
        return lax.fori_loop(0, ticks, self._tick, (empty, empty, results))[2]

    def _tick(self, t: jax.Array, carry: ForwardCarry) -> ForwardCarry:
        setup = self.slots.setup
        stages, chunks = setup.schedule.stages, setup.schedule.chunks
        turn = jnp.zeros((), jnp.int32)
        for c in range(chunks):
            j = t - (c * stages + self.stage)
            carry, turn = run_in_turn((j >= 0) & (j < self.count), partial(self._run_part, c, j), carry, turn)
        inbox, outbox, results = carry
        pairs = [(p, p + 1) for p in range(stages - 1)] + [(stages - 1, 0)] * (chunks > 1)
        came = jax.tree.map(lambda leaf: lax.ppermute(leaf, setup.stage_axis, pairs), outbox)
        # What the last stage sends is for the first stage's next chunk.
        later = tuple(came[max(c - 1, 0)] for c in range(chunks))
        inbox = jax.tree.map(lambda here, before: jnp.where(self.stage == 0, before, here), came, later)
        return inbox, outbox, results

    def _run_part(self, c: int, j: jax.Array, zero: jax.Array, carry: ForwardCarry) -> ForwardCarry:
        setup, (inbox, outbox, results) = self.slots.setup, carry
        j = j + zero
        aux = jax.tree.map(lambda leaf: read_at(j, leaf), self.batches)

        def branch(stage: int, weights: Slots, arrived: Slots, aux: Pytree) -> Pytree:
            part = setup.schedule.part(stage, c)
            x = self.messages.unpack(part - 1, arrived) if part else ()
            y, extra = self.functions[part](self.slots.weights[c].unpack(stage, weights), x, aux)
            if part == len(self.functions) - 1:
                return make_zeros(self.messages.slots), extra
            return self.messages.pack(part, y), make_zeros(self.extra)

        arrived = tuple(jnp.where(zero == 0, slot, 0) for slot in inbox[c])  # else what it computes leaves the loop
        # By the part: functions of evaluation say nothing of their kinds.
        out, extra = switch_stages(setup, c, self.stage, lambda part: part, branch, self.weights[c], arrived, aux)
        here = self.stage == setup.schedule.stages - 1
        if c == setup.schedule.chunks - 1:
            results = jax.tree.map(
                lambda kept, value: write_at(j, kept, jnp.where(here, value, read_at(j, kept))), results, extra
            )
        return inbox, replace_item(outbox, c, out), results
