"""Mirrors: what would be lost with one failure domain is also kept in others, in the memory of their processes.

A domain is a process, a host or a rack (`multipod.elastic.domains`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from multipod.elastic.domains import choose_keepers, failure_domains, into_rounds
from multipod.elastic.worker.snapshots import (
    Key,
    Snapshot,
    nbytes_of,
    one_device_each,
    owners_of,
    read_bytes,
    rows_of,
    write_bytes,
)
from multipod.elastic.world import World
from multipod.pytrees import Shapes


@dataclass(frozen=True)
class MirrorPlan:
    """Who sends what to whom.

    Attributes:
      rounds: from sender to keeper, by process; in each nobody sends twice, or keeps for two.
      pieces: what each process sends, in every round in which it does, with shapes.
    """

    rounds: tuple[Mapping[int, int], ...]
    pieces: Mapping[int, Mapping[Key, tuple[int, ...]]]

    def sender_to(self, process: int, number: int) -> int | None:
        """Whose pieces a process receives in round `number`; None if it receives none."""
        return next((sender for sender, keeper in self.rounds[number].items() if keeper == process), None)

    def nbytes_sent(self, kinds: Sequence[np.dtype]) -> int:
        """Bytes that the busiest process sends at each copy, given the dtypes of the state's leaves."""
        sizes = {process: _nbytes(pieces, kinds) for process, pieces in self.pieces.items()}
        return max((size * sum(sender in sent for sent in self.rounds) for sender, size in sizes.items()), default=0)

    def nbytes_kept(self, process: int, kinds: Sequence[np.dtype]) -> int:
        """Bytes that a process keeps for others."""
        senders = [self.sender_to(process, number) for number in range(len(self.rounds))]
        return sum(_nbytes(self.pieces.get(sender, {}), kinds) for sender in senders if sender is not None)


def plan_mirror(
    owners: Mapping[Key, tuple[tuple[int, ...], set[int]]], places: Sequence[str], copies: int = 1
) -> MirrorPlan:
    """A plan by which every piece outlives any `copies` failure domains, or all but one where there are no more.

    A piece that is in more domains than may be lost is not sent; of the others the lowest owner sends all. Without
    several hosts or racks a domain is a process.

    Args:
      owners: the shape of each piece of the state, and the processes that hold it.
      places: of each process, as in `World`.
      copies: how many more domains are to have each piece.
    """
    domains = failure_domains(places)
    keepers = choose_keepers(domains, copies)
    pieces: dict[int, dict[Key, tuple[int, ...]]] = {}
    for key, (shape, holding) in owners.items():
        if len({domains[process] for process in holding}) <= len(keepers):
            pieces.setdefault(min(holding), {})[key] = shape
    rounds = [{a: b for a, b in sent.items() if a in pieces} for chosen in keepers for sent in into_rounds(chosen)]
    return MirrorPlan(tuple(sent for sent in rounds if sent), pieces)


def plan_in(world: World, shapes: Shapes) -> MirrorPlan:
    """The plan for a state of these shapes in this world."""
    places = world.places or ("",) * len(world.ranks)
    return plan_mirror(owners_of(shapes), places, world.mirror_copies)


class Mirror:
    """Sends pieces as a plan says: one `ppermute` a round. Nothing is sent where nothing would be lost."""

    def __init__(self, plan: MirrorPlan, shapes: Shapes, mesh: Mesh) -> None:
        self.plan = plan
        self.kinds = [leaf.dtype for leaf in jax.tree.leaves(shapes)]
        self.ring = one_device_each(mesh)
        self.size = -(-max((_nbytes(pieces, self.kinds) for pieces in plan.pieces.values()), default=0) // 4)
        spec = PartitionSpec("process")
        self._sends = []
        for sent in plan.rounds:
            send = partial(jax.lax.ppermute, axis_name="process", perm=sorted(sent.items()))
            self._sends.append(jax.jit(jax.shard_map(send, mesh=self.ring, in_specs=spec, out_specs=spec)))

    def __call__(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the pieces that this process keeps for others. All call it at the same update."""
        if not self._sends:
            return snapshot
        here = jax.process_index()
        row = np.zeros(self.size, np.uint32)
        write_bytes(row, (snapshot.pieces[key] for key in sorted(self.plan.pieces.get(here, {}))))
        rows = rows_of(self.ring, row)
        kept: dict[Key, np.ndarray] = {}
        for number, send in enumerate(self._sends):
            sent, sender = send(rows), self.plan.sender_to(here, number)
            if sender is not None:
                theirs = self.plan.pieces[sender]
                received = np.array(sent.addressable_shards[0].data)[0]
                parts = read_bytes(received, [(theirs[key], self.kinds[key[0]]) for key in sorted(theirs)])
                kept |= dict(zip(sorted(theirs), parts, strict=True))
        copies = frozenset(kept.keys() - snapshot.pieces.keys())
        return Snapshot(snapshot.stamp, {**kept, **snapshot.pieces}, copies, snapshot.shares)


def _nbytes(pieces: Mapping[Key, tuple[int, ...]], kinds: Sequence[np.dtype]) -> int:
    return sum(nbytes_of(shape, kinds[key[0]]) for key, shape in pieces.items())
