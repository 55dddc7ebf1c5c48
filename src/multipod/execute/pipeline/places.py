"""Where everything of a pipeline lies: its parts, messages, states and what is under way, as arrays on a mesh."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from multipod.errors import LayoutError
from multipod.execute.pipeline.delays import PipelinePart
from multipod.execute.pipeline.in_flight import InFlight, PipeState, find_leaf, make_zeros, specs_of, trace_inside
from multipod.execute.pipeline.packing import SlotPacking, Slots, assign_slots
from multipod.execute.pipeline.passes import TracedPasses, trace_passes
from multipod.execute.pipeline.tables import TickTables, build_tables
from multipod.pipelines.check import Proof

Tied = tuple[tuple[tuple[int, str], ...], ...]
"""Groups of weights that are one: for each the (part, name) of its copies; a name is a path such as `tokens/table`."""


@dataclass(frozen=True, eq=False)
class Places:
    """A model in parts, a proven schedule, and a mesh. Nothing is compiled or allocated.

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
      splits: how the mesh's other axes split each part's weights, and its optimizer's state, as `PartitionSpec`s; None:
        they are whole in every stage.

    Raises:
      LayoutError: parts or a mesh that do not fit the schedule.
    """

    proof: Proof
    parts: Sequence[PipelinePart]
    weights: Sequence[Any]
    aux: Any
    mesh: Mesh | AbstractMesh
    stage_axis: str = "stage"
    data_axes: tuple[str, ...] = ()
    tied: Tied = ()
    over_data: Callable[[Any], Any] | None = None
    splits: tuple[Sequence[Any], Sequence[Any]] | None = None

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
    def tables(self) -> TickTables:
        """The schedule, as the loop reads it."""
        return build_tables(self.proof)

    @property
    def asynchronous(self) -> bool:
        """Whether passes are under way between updates."""
        return not self.proof.schedule.synchronous

    @cached_property
    def passes(self) -> tuple[TracedPasses, ...]:
        """The two passes of each part; parts of one kind share theirs."""
        return tuple(trace_inside(self.mesh, (self.stage_axis, *self.data_axes), self._passes))

    def _passes(self) -> list[TracedPasses]:
        found: list[TracedPasses] = []
        known: dict[Hashable, TracedPasses] = {}
        x: Any = ()
        for n, (part, weights) in enumerate(zip(self.parts, self.weights, strict=True)):
            key = n if part.kind is None else ("kind", part.kind)
            if key not in known:
                known[key] = trace_passes(part.function, weights, x, self.aux)
            found.append(known[key])
            x = found[-1].y
        return found

    @cached_property
    def messages(self) -> SlotPacking:
        """What part n sends to part n + 1, and gets back as a gradient."""
        return assign_slots([p.y for p in self.passes[:-1]])

    @cached_property
    def packed(self) -> tuple[SlotPacking, ...]:
        """For each chunk, the stages' weights."""
        return tuple(assign_slots(self._of_chunk(self.weights, c), self._splits_of(0, c)) for c in self._chunks)

    @cached_property
    def packed_states(self) -> tuple[SlotPacking, ...]:
        """For each chunk, the states of the stages' optimizers."""
        states = [jax.eval_shape(p.optimizer.init, w) for p, w in zip(self.parts, self.weights, strict=True)]
        return tuple(assign_slots(self._of_chunk(states, c), self._splits_of(1, c)) for c in self._chunks)

    @cached_property
    def packed_saved(self) -> tuple[SlotPacking, ...]:
        """For each chunk, what the stages' forward passes keep of a micro-batch."""
        return tuple(assign_slots(self._of_chunk([p.saved for p in self.passes], c)) for c in self._chunks)

    def unpack(self, weights: tuple[Slots, ...]) -> list[Any]:
        """Each part's weights out of a state's; inside `jax.jit` for arrays of other processes."""
        return self._unpacked(self.packed, weights)

    def unpack_states(self, states: tuple[Slots, ...]) -> list[Any]:
        """The same of the states of the parts' optimizers."""
        return self._unpacked(self.packed_states, states)

    def _unpacked(self, packings: tuple[SlotPacking, ...], chunks: tuple[Slots, ...]) -> list[Any]:
        stages = self.proof.schedule.stages
        return [
            packings[n // stages].unpack(n % stages, [slot[n % stages] for slot in chunks[n // stages]])
            for n in range(len(self.parts))
        ]

    def shardings(self, state: PipeState) -> Any:
        """Where each array of a state lies."""
        specs = specs_of(state, self.stage_axis, self.data_axes)

        def behind(packings: tuple[SlotPacking, ...]) -> Any:
            return tuple(tuple(PartitionSpec(self.stage_axis, *split) for split in p.splits) for p in packings)

        specs = specs._replace(weights=behind(self.packed), optimizer=behind(self.packed_states))
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def summed(self, gradients: tuple[Slots, ...]) -> tuple[Slots, ...]:
        """Inside `shard_map`: gradients, as slots of each chunk, added over the data axes."""
        if self._data_devices == 1:
            return gradients
        if self.over_data is None:
            return lax.psum(gradients, self.data_axes)
        if not self.splits:
            return self.over_data(gradients)
        # A tensor would be gathered over the other axes before it is packed into a message.
        specs = tuple(p.splits for p in self.packed)
        others = set(self.mesh.axis_names) - {self.stage_axis, *self.data_axes}
        return jax.shard_map(self.over_data, in_specs=(specs,), out_specs=specs, axis_names=others, check_vma=False)(
            gradients
        )

    def _same(self, gradients: tuple[Slots, ...], stage: jax.Array) -> tuple[Slots, ...]:
        """Gradients with those of tied weights added over the parts that hold them."""
        changed = [list(slots) for slots in gradients]
        for group in self.tied:
            places = []
            for part, name in group:
                c, p = divmod(part, self.proof.schedule.stages)
                places.append((c, p, self.packed[c].places[p][find_leaf(self.weights[part], name)]))
            own = sum(jnp.where(stage == p, changed[c][slot], 0) for c, p, slot in places)
            total = lax.psum(own, self.stage_axis)
            for c, p, slot in places:
                changed[c][slot] = jnp.where(stage == p, total, changed[c][slot])
        return tuple(map(tuple, changed))

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

    def _splits_of(self, which: int, c: int) -> list[Any] | None:
        return self._of_chunk(self.splits[which], c) if self.splits else None

    def _laid(self, packings: tuple[SlotPacking, ...], chunks: tuple[Slots, ...]) -> tuple[Slots, ...]:
        """Inside `shard_map`: each chunk's slots, split over the other axes as they are kept."""
        if not self.splits:
            return chunks
        mesh = jax.sharding.get_abstract_mesh()
        return tuple(
            tuple(lax.with_sharding_constraint(a, NamedSharding(mesh, s)) for a, s in zip(slots, p.splits, strict=True))
            for p, slots in zip(packings, chunks, strict=True)
        )

    def _of_chunk(self, each: Sequence[Any], c: int) -> list[Any]:
        return [each[self._part(c, p)] for p in range(self.proof.schedule.stages)]

    def _kinds(self, n: int) -> Hashable:
        return n if self.parts[n].kind is None else ("kind", self.parts[n].kind, n == 0, n == len(self.parts) - 1)

    def _optimizer_kinds(self, n: int) -> Hashable:
        """Parts of one such kind update alike, whatever their functions: one branch for all is no conditional.

        A conditional's results are new arrays, as large as the weights and the optimizer's state (JAX 0.10.2).
        """
        (c, p), part = divmod(n, self.proof.schedule.stages), self.parts[n]
        packings = self.packed[c], self.packed_states[c]
        trees = tuple((packing.places[p], packing.structures[p]) for packing in packings)
        return trees, id(part.optimizer), id(part.backward_weights)

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

    def _empty(self, lead: tuple[int, ...]) -> InFlight:
        """A flight of nothing, with these first dims."""
        n = self.proof.schedule.micro_batches
        saved = []
        for c in self._chunks:
            own, keep = self.packed_saved[c], self.tables.keep[c]
            # A slot is as deep as the stages need that use it: what the head keeps is not kept by the first stage.
            deep = [max(keep[p] for p in own.users(slot)) for slot in range(len(own.slots))]
            saved.append(tuple(make_zeros(shape, *lead, depth) for shape, depth in zip(own.slots, deep, strict=True)))
        inbox = [tuple(make_zeros(self.messages.slots, *lead, deep) for deep in way) for way in self.tables.inbox]
        stash: Slots = ()
        if self.proof.schedule.backward_weights == "stashed":
            stash = make_zeros(self.packed[0].slots, *lead, int(self.tables.delays.max()) + 1)
        return InFlight(
            tuple(make_zeros(self.packed[c].slots, *lead) for c in self._chunks),
            tuple(saved),
            (inbox[0], inbox[1]),
            (make_zeros(self.messages.slots, *lead), make_zeros(self.messages.slots, *lead)),
            make_zeros(self.passes[-1].extra, *lead),
            make_zeros(self.aux, *lead, self.tables.batches, n),
            stash,
        )

    def _stacked(self, packings: tuple[SlotPacking, ...], trees: Sequence[Any]) -> tuple[Slots, ...]:
        """Each chunk's slots, with a first dim of stages."""
        made = []
        for c in self._chunks:
            each = [packings[c].pack(p, tree) for p, tree in enumerate(self._of_chunk(trees, c))]
            made.append(tuple(jnp.stack(slot) for slot in zip(*each, strict=True)))
        return tuple(made)
