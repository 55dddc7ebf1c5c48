"""What else a layout must keep beside its updates: its first state, its bits, its share of memory, its evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from multipod.data.source import HasGroundTruth, HostBatch, Source
from multipod.layout.mesh import data_devices
from multipod.models.pixels import behind_pixels
from multipod.step.program import Program
from multipod.step.state import PortableState, State, device_bytes
from multipod.train.evaluation import evaluate
from multipod.verify.moving import HostStates
from multipod.verify.reference import Reference
from multipod.verify.rounding import EPS, EPS_OF, LIMIT, difference, may_differ_by_one

SHARE, ROOM = 1.02, 1024
"""A split state takes its share times `SHARE`, and `ROOM` bytes for each tensor (`docs/design/layouts.md`)."""


SUMS = 4
"""Roundings of a sum of an evaluation: that of a batch, and that of the batches, in the layout and on one device."""


@dataclass(frozen=True)
class FirstExamples:
    """The first examples of a test set: one more than an evaluation's batch, so that the last one is mostly padding."""

    source: Source
    count: int

    def __len__(self) -> int:
        return min(self.count, len(self.source))

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The examples with these numbers."""
        return self.source.read(numbers)

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch as it is: nothing is trained on."""
        return batch


@dataclass(frozen=True)
class FirstImages(FirstExamples):
    """The first images of a test set with objects; what is not detected in the others counts in every layout alike."""

    source: Any

    def ground_truth(self, masks: bool) -> dict[str, Any]:
        """COCO's annotations of all images, with outlines if `masks`."""
        annotations: dict[str, Any] = self.source.ground_truth(masks)
        return annotations

    def categories(self, labels: np.ndarray) -> np.ndarray:
        """The categories' ids in the ground truth that these labels stand for."""
        return np.asarray(self.source.categories(labels))


def same_beginning(first: PortableState, reference: Reference) -> Iterator[str]:
    """Whether the parameters are one device's before the first update, bit for bit."""
    name = difference(first.params, reference.walk.first.params)
    if name:
        yield f"before the first update {name} has not the bits that it has on one device"


def replicas_agree(state: State) -> Iterator[str]:
    """Whether devices that hold the same part of a tensor hold the same bits."""
    for part, tree in zip(State._fields, state, strict=True):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            seen: dict[str, tuple[int, bytes]] = {}
            for shard in leaf.addressable_shards:
                bits = np.asarray(shard.data).tobytes()
                device, same = seen.setdefault(str(shard.index), (shard.device.id, bits))
                if bits != same:
                    name = jax.tree_util.keystr(path, simple=True, separator="/")
                    yield f"devices {device} and {shard.device.id} hold other bits of the same part of {part} {name}"
                    return


def repeats(states: HostStates, before: PortableState, after: PortableState, reference: Reference) -> Iterator[str]:
    """Whether the last update, done again from its state as saved, makes the same bits."""
    batch = states.batch(reference.source, reference.updates - 1)
    _, again = states.made(states.write(before), batch)
    name = difference(again.state, after)
    if name:
        yield f"update {reference.updates - 1}, done again from its state as saved, makes another {name}"


def evaluates(states: HostStates, state: PortableState, reference: Reference) -> Iterator[str]:
    """Whether the evaluation of a state says what one device says of it, and counts each example once.

    A sum may be off by what it changes where each parameter is off by a rounding of float32, and by a rounding of the
    type that the model computes in of each example, which go to either side and so grow with the root of their number.
    Sums of whole numbers, such as right answers, may differ by one: two classes can be told equally well.
    """
    recipe = reference.recipe
    source, count = recipe.data.test(), recipe.evaluation_batch + 1
    test = (FirstImages if isinstance(source, HasGroundTruth) else FirstExamples)(source, count)
    eps = EPS_OF.get(str(getattr(behind_pixels(recipe.model), "dtype", "")), EPS)
    ours = evaluate(states.program, states.write(state), test)
    alone = evaluate(reference.states.program, reference.states.write(state), test)
    shaken = evaluate(reference.states.program, reference.states.write(reference.shaken(state)), test)
    for name, value in alone.items():
        each = max(SUMS * EPS, eps / np.sqrt(len(test))) * abs(value)
        room = max(abs(shaken[name] - value), each) * LIMIT
        room = 0.0 if name == "count" else max(room, 1.0) if may_differ_by_one(name, value) else room
        if not abs(ours[name] - value) <= room:
            yield f"the evaluation's {name} is {ours[name]:.9g}, on one device {value:.9g}"


def optimizer_bytes(program: Program, state: State) -> tuple[int, int]:
    """Bytes of the optimizer's state that a device was promised to hold, and that the fullest holds.

    What a split says that it leaves whole (`Program.unshared`) is part of the promise.
    """
    promised = device_bytes(program.shapes.optimizer)
    layout, leaves = program.recipe.layout, jax.tree.leaves(state.optimizer)
    if layout.sync.shards_update and layout.weight_devices == 1:
        equal = sum(leaf.nbytes for leaf in leaves) / data_devices(program.mesh)
        promised = int(equal * SHARE) + ROOM * len(leaves) + sum(program.unshared.values())
    held: dict[int, int] = {}
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return promised, max(held.values(), default=0)
