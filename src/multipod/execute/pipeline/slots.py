"""Where each array of a pipeline lies: parts of different structure in equal tuples of arrays on every device."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from multipod.execute.pipeline.in_flight import InFlight, PipeState, make_zeros, specs_of
from multipod.execute.pipeline.packing import SlotPacking, Slots, assign_slots
from multipod.execute.pipeline.setup import PipelineSetup
from multipod.pytrees import Pytree, Shapes, Shardings, Specs


@dataclass(frozen=True, eq=False)
class StageSlots:
    """The slots of a pipeline's weights, optimizer states, kept activations and messages."""

    setup: PipelineSetup

    @cached_property
    def messages(self) -> SlotPacking:
        """What part n sends to part n + 1, and gets back as a gradient."""
        return assign_slots([p.y for p in self.setup.passes[:-1]])

    @cached_property
    def weights(self) -> tuple[SlotPacking, ...]:
        """For each chunk, the stages' weights."""
        return self._assign(self.setup.weights, self.setup.splits and self.setup.splits[0])

    @cached_property
    def states(self) -> tuple[SlotPacking, ...]:
        """For each chunk, the states of the stages' optimizers."""
        pairs = zip(self.setup.parts, self.setup.weights, strict=True)
        states = [jax.eval_shape(part.optimizer.init, weights) for part, weights in pairs]
        return self._assign(states, self.setup.splits and self.setup.splits[1])

    @cached_property
    def saved(self) -> tuple[SlotPacking, ...]:
        """For each chunk, what the stages' forward passes keep of a micro-batch."""
        return self._assign([p.saved for p in self.setup.passes], None)

    def _assign(self, trees: Sequence[Shapes], splits: Sequence[Specs] | None) -> tuple[SlotPacking, ...]:
        select = self.setup.select_chunk
        return tuple(assign_slots(select(trees, c), select(splits, c) if splits else None) for c in self.setup.chunks)

    def unpack(self, packings: tuple[SlotPacking, ...], chunks: tuple[Slots, ...]) -> list[Pytree]:
        """Unpacks each part's tree from slots that have a first dim of stages."""
        stages = self.setup.schedule.stages
        return [
            packings[n // stages].unpack(n % stages, [slot[n % stages] for slot in chunks[n // stages]])
            for n in range(len(self.setup.parts))
        ]

    def stack(self, packings: tuple[SlotPacking, ...], trees: Sequence[Pytree]) -> tuple[Slots, ...]:
        """Packs each part's tree into its chunk's slots, with a first dim of stages."""
        chunks = []
        for c in self.setup.chunks:
            each = [packings[c].pack(p, tree) for p, tree in enumerate(self.setup.select_chunk(trees, c))]
            chunks.append(tuple(jnp.stack(slot) for slot in zip(*each, strict=True)))
        return tuple(chunks)

    def shardings(self, state: PipeState) -> Shardings:
        """Where each array of a state lies."""
        setup = self.setup
        specs = specs_of(state, setup.stage_axis, setup.data_axes)

        def split(packings: tuple[SlotPacking, ...]) -> Specs:
            return tuple(tuple(PartitionSpec(setup.stage_axis, *spec) for spec in p.splits) for p in packings)

        specs = specs._replace(weights=split(self.weights), optimizer=split(self.states))
        return jax.tree.map(lambda spec: NamedSharding(setup.mesh, spec), specs)

    def constrain(self, packings: tuple[SlotPacking, ...], chunks: tuple[Slots, ...]) -> tuple[Slots, ...]:
        """Inside `shard_map`: splits each chunk's slots over the other axes as they are kept."""
        if not self.setup.splits:
            return chunks
        mesh = jax.sharding.get_abstract_mesh()
        return tuple(
            tuple(lax.with_sharding_constraint(a, NamedSharding(mesh, s)) for a, s in zip(slots, p.splits, strict=True))
            for p, slots in zip(packings, chunks, strict=True)
        )

    def make_empty(self, lead: tuple[int, ...]) -> InFlight:
        """Makes the in-flight state of an empty pipe, with these first dims."""
        setup, tables = self.setup, self.setup.tables
        saved = []
        for c in setup.chunks:
            packing, keep = self.saved[c], tables.keep[c]
            # A slot is as deep as the stages need that use it: what the head keeps is not kept by the first stage.
            depths = [max(keep[p] for p in packing.users(slot)) for slot in range(len(packing.slots))]
            saved.append(
                tuple(make_zeros(shape, *lead, depth) for shape, depth in zip(packing.slots, depths, strict=True))
            )
        inbox = [tuple(make_zeros(self.messages.slots, *lead, depth) for depth in way) for way in tables.inbox]
        stash: Slots = ()
        if setup.schedule.backward_weights == "stashed":
            stash = make_zeros(self.weights[0].slots, *lead, int(tables.delays.max()) + 1)
        return InFlight(
            tuple(make_zeros(self.weights[c].slots, *lead) for c in setup.chunks),
            tuple(saved),
            (inbox[0], inbox[1]),
            (make_zeros(self.messages.slots, *lead), make_zeros(self.messages.slots, *lead)),
            make_zeros(setup.passes[-1].extra, *lead),
            make_zeros(setup.aux, *lead, tables.batches, setup.schedule.micro_batches),
            stash,
        )
