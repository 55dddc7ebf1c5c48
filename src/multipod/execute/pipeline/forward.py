"""A pipeline that only goes forward: evaluation, with every part of the model where training keeps it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from multipod.execute.pipeline.in_flight import drop_first_dim, read_at, replace_item, run_in_turn, write_at
from multipod.execute.pipeline.packing import SlotPacking, Slots, assign_slots
from multipod.execute.pipeline.passes import PartFunction
from multipod.execute.pipeline.pipe import Pipe


def go_forward(
    pipe: Pipe, functions: Sequence[PartFunction], weights: tuple[Slots, ...], batches: Any
) -> tuple[Any, Any]:
    """(sums, each): what the last part says of all micro-batches; to be called inside `jax.jit`.

    functions: (weights, x, aux) to (y, extra) for each part of `pipe`; the last part's y is not used, and its extra is
    a pair: sums, which are added over micro-batches and data devices, and arrays of the micro-batch's rows, which come
    back in the order of the rows, split over the data axes. batches: the `aux` of any number M of micro-batches,
    [M, rows over all data devices, ...]; they need not have the shapes of training. Takes M + parts - 1 ticks; nothing
    is kept but the messages.
    """
    split = PartitionSpec(None, pipe.data_axes or None)
    held = jax.tree.map(lambda _: PartitionSpec(pipe.stage_axis), weights)

    def local(weights: tuple[Slots, ...], batches: Any) -> tuple[Any, Any]:
        found = _ForwardLoop(pipe, functions, drop_first_dim(weights), batches).found()
        sums, each = lax.psum(found, pipe.stage_axis)  # zero, but for the device of the last part
        sums = jax.tree.map(lambda leaf: leaf.sum(0, dtype=leaf.dtype), sums)
        sums = lax.psum(sums, pipe.data_axes) if pipe.data_axes else sums
        return sums, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), each)

    rows = PartitionSpec(pipe.data_axes or None)
    return jax.shard_map(
        local,
        mesh=pipe.mesh,
        in_specs=(held, jax.tree.map(lambda _: split, batches)),
        out_specs=(PartitionSpec(), rows),
        axis_names={pipe.stage_axis, *pipe.data_axes},
        check_vma=False,
    )(weights, batches)


class _ForwardLoop:
    """The loop on one device: part n treats micro-batch j in tick n + j."""

    def __init__(self, pipe: Pipe, functions: Sequence[PartFunction], weights: tuple[Slots, ...], batches: Any) -> None:
        self.pipe, self.functions, self.weights, self.batches = pipe, functions, weights, batches
        self.count = len(jax.tree.leaves(batches)[0])
        self.stage = lax.axis_index(pipe.stage_axis)
        made: list[Any] = []
        x: Any = ()
        aux = jax.eval_shape(drop_first_dim, batches)
        for function, own in zip(functions, pipe.weights, strict=True):
            x, self.extra = jax.eval_shape(function, own, x, aux)
            made.append(x)
        self.messages: SlotPacking = assign_slots(made[:-1])

    def found(self) -> Any:
        """The last part's extra of each micro-batch, on its device; zeros on the others."""
        chunks = range(self.pipe.proof.schedule.chunks)
        empty = tuple(self._nothing() for _ in chunks)
        results = jax.tree.map(lambda leaf: jnp.zeros((self.count, *leaf.shape), leaf.dtype), self.extra)
        ticks = self.count + len(self.functions) - 1
        return lax.fori_loop(0, ticks, self._tick, (empty, empty, results))[2]

    def _tick(self, t: jax.Array, carry: Any) -> Any:
        pipe = self.pipe
        stages, chunks = pipe.proof.schedule.stages, pipe.proof.schedule.chunks
        turn = jnp.zeros((), jnp.int32)
        for c in range(chunks):
            j = t - (c * stages + self.stage)
            carry, turn = run_in_turn((j >= 0) & (j < self.count), partial(self._pass, c, j), carry, turn)
        inbox, outbox, results = carry
        pairs = [(p, p + 1) for p in range(stages - 1)] + [(stages - 1, 0)] * (chunks > 1)
        came = jax.tree.map(lambda leaf: lax.ppermute(leaf, pipe.stage_axis, pairs), outbox)
        # What the last stage sends is for the first stage's next chunk.
        later = tuple(came[max(c - 1, 0)] for c in range(chunks))
        inbox = jax.tree.map(lambda here, before: jnp.where(self.stage == 0, before, here), came, later)
        return inbox, outbox, results

    def _pass(self, c: int, j: jax.Array, zero: jax.Array, carry: Any) -> Any:
        inbox, outbox, results = carry
        j = j + zero
        aux = jax.tree.map(lambda leaf: read_at(j, leaf), self.batches)

        def branch(stage: int, own: Slots, arrived: Slots, aux: Any) -> Any:
            part = self.pipe.proof.schedule.part(stage, c)
            x = self.messages.unpack(part - 1, arrived) if part else ()
            y, extra = self.functions[part](self.pipe.packed[c].unpack(stage, own), x, aux)
            last = part == len(self.functions) - 1
            none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.extra)
            return (self._nothing(), extra) if last else (self.messages.pack(part, y), none)

        # By the part: functions of evaluation say nothing of their kinds.
        arrived = tuple(jnp.where(zero == 0, slot, 0) for slot in inbox[c])  # else what it computes leaves the loop
        out, extra = self.pipe.switch(c, self.stage, branch, self.weights[c], arrived, aux, by=lambda part: part)
        here = self.stage == self.pipe.proof.schedule.stages - 1
        if c == self.pipe.proof.schedule.chunks - 1:
            results = jax.tree.map(
                lambda kept, value: write_at(j, kept, jnp.where(here, value, read_at(j, kept))), results, extra
            )
        return inbox, replace_item(outbox, c, out), results

    def _nothing(self) -> Slots:
        return tuple(jnp.zeros(slot.shape, slot.dtype) for slot in self.messages.slots)
