"""Copies of the state in the memory of the hosts, from which a run goes on when a process has died.

Each process keeps what its own devices hold. What no other process holds (shares of optimizer states and of weights
that the layout splits) is also kept by others (`multipod.elastic.worker.mirror`). The last two copies are kept, because
one process may have finished an update that another has not. When processes come together anew, each says what it has
(`manifest`), all choose the same newest copy that is whole between them, and who lacks a part gets it from one who has
it (`_Gathering`), by a sum to which only one process gives anything.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multipod.layout.shares import Share, is_flat_tensor
from multipod.pytrees import Pytree, Shapes

Key = tuple[int, tuple[int, ...]]
"""A piece of the state: the number of its leaf, and where it begins in each dim."""

Stamp = tuple[int, int]
"""Of a copy: updates done, and the generation of the world that did them."""

CHUNK_BYTES = 1 << 26


@dataclass(frozen=True)
class Snapshot:
    """The pieces of a state that one process keeps in its memory.

    Attributes:
      copies: the pieces that it keeps for another process.
      shares: of the leaves that are kept flat, how, by their numbers.
    """

    stamp: Stamp
    pieces: Mapping[Key, np.ndarray]
    copies: frozenset[Key] = frozenset()
    shares: Mapping[int, Share] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(piece.nbytes for piece in self.pieces.values())


@dataclass
class SnapshotMemory:
    """The last two snapshots of one process.

    Attributes:
      every: updates between two.
      snapshots: the snapshots, oldest first.
    """

    every: int = 1
    snapshots: list[Snapshot] = field(default_factory=list)

    def add(self, snapshot: Snapshot) -> None:
        """Keeps this one and the one before it, if it is of an earlier update: a run may go back to a checkpoint."""
        self.snapshots = [*(old for old in self.snapshots[-1:] if old.stamp[0] < snapshot.stamp[0]), snapshot]

    def manifest(self) -> str:
        """The pieces of all snapshots, as text for the other processes."""
        return json.dumps(
            [
                [
                    snapshot.stamp,
                    [(*key, snapshot.pieces[key].size, key in snapshot.copies) for key in sorted(snapshot.pieces)],
                    [(number, share.to_json()) for number, share in snapshot.shares.items()],
                ]
                for snapshot in self.snapshots
            ]
        )

    def at(self, stamp: Stamp) -> Snapshot | None:
        """The snapshot with this stamp."""
        return next((snapshot for snapshot in self.snapshots if snapshot.stamp == stamp), None)


@dataclass(frozen=True)
class CopyChoice:
    """What processes that come together go on from.

    Attributes:
      stamp: of the copy.
      holders: for each piece the processes that have it, lowest first.
      local: every process has every piece: nothing needs to be sent.
      mirrored: some piece is there only as the copy that was kept for a process that is no more.
      shares: of the leaves that were kept flat, how, by their numbers.
    """

    stamp: Stamp
    holders: Mapping[Key, tuple[int, ...]]
    local: bool
    mirrored: bool
    shares: Mapping[int, Share] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Where the state comes from, in the words of `Regrouped`."""
        return "mirror" if self.mirrored else "memory" if self.local else "peers"


def take_snapshot(state: Pytree, stamp: Stamp) -> Snapshot:
    """Copies what this process's devices hold of `state`, each piece once. Waits for the devices."""
    pieces: dict[Key, np.ndarray] = {}
    for number, leaf in enumerate(jax.tree.leaves(state)):
        for shard in leaf.addressable_shards:
            key = number, _begin(shard.index)
            if key not in pieces:
                pieces[key] = np.array(shard.data, copy=True)
    return Snapshot(stamp, pieces, shares=_shares(state))


def _shares(tree: Pytree) -> dict[int, Share]:
    """How those leaves are kept that are flat, by their numbers."""
    nodes = jax.tree.leaves(tree, is_leaf=is_flat_tensor)
    return {number: node.share for number, node in enumerate(nodes) if is_flat_tensor(node)}


def copy_bytes(shapes: Shapes) -> int:
    """Bytes of a copy of what this process's devices hold, each piece once."""
    kinds = [leaf.dtype for leaf in jax.tree.leaves(shapes)]
    here = jax.process_index()
    return sum(nbytes_of(shape, kinds[key[0]]) for key, (shape, owners) in owners_of(shapes).items() if here in owners)


def owners_of(
    shapes: Shapes, process_of: Callable[[jax.Device], int] = lambda device: device.process_index
) -> dict[Key, tuple[tuple[int, ...], set[int]]]:
    """The shape of each piece of a state, and the processes of which some device holds it."""
    owners: dict[Key, tuple[tuple[int, ...], set[int]]] = {}
    for number, leaf in enumerate(jax.tree.leaves(shapes)):
        part = leaf.sharding.shard_shape(leaf.shape)
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            owners.setdefault((number, _begin(index)), (part, set()))[1].add(process_of(device))
    return owners


def choose_copy(manifests: Sequence[str], shapes: Shapes) -> CopyChoice | None:
    """The newest copy that is whole between processes with these manifests; None if there is none.

    A pure function of its arguments: all processes choose alike.
    """
    holders: dict[Stamp, dict[Key, list[int]]] = {}
    volumes: dict[Stamp, dict[int, int]] = {}
    originals: dict[Stamp, set[Key]] = {}
    shares: dict[Stamp, dict[int, Share]] = {}
    for process, manifest in enumerate(manifests):
        for (update, generation), pieces, flat in json.loads(manifest):
            stamp = update, generation
            shares[stamp] = {number: Share.from_json(saved) for number, saved in flat}
            for number, begin, size, copied in pieces:
                key = number, tuple(begin)
                having = holders.setdefault(stamp, {}).setdefault(key, [])
                if not copied:
                    originals.setdefault(stamp, set()).add(key)
                if not having:
                    filled = volumes.setdefault(stamp, {})
                    filled[number] = filled.get(number, 0) + size
                having.append(process)
    wanted = [_whole_shape(node) for node in jax.tree.leaves(shapes, is_leaf=is_flat_tensor)]
    for stamp in sorted(holders, reverse=True):
        kept = [shares[stamp][k].kept if k in shares[stamp] else shape for k, shape in enumerate(wanted)]
        if volumes[stamp] == {number: math.prod(shape) for number, shape in enumerate(kept)}:
            pieces_of = {key: tuple(processes) for key, processes in holders[stamp].items()}
            local = all(len(processes) == len(manifests) for processes in pieces_of.values())
            mirrored = pieces_of.keys() != originals.get(stamp, set())
            return CopyChoice(stamp, pieces_of, local, mirrored, shares[stamp])
    return None


def restore_copy(choice: CopyChoice, snapshot: Snapshot | None, shapes: Shapes, mesh: Mesh) -> Pytree:
    """The state of `choice` on this mesh, split as `shapes` says. All processes of the mesh call it.

    Leaf after leaf becomes whole in the memory of the host, then the devices take their parts of it: a process needs
    room for `CHUNK_BYTES` or the largest leaf, whichever is more, twice.
    """
    leaves, structure = jax.tree.flatten(shapes)
    nodes = jax.tree.leaves(shapes, is_leaf=is_flat_tensor)
    saved = [_as_saved(node, choice.shares.get(number)) for number, node in enumerate(nodes)]
    gathering = _Gathering(choice, snapshot, mesh)
    results = []
    for batch in _chunks(saved):
        for number, full in zip(batch, gathering.gather([(number, saved[number]) for number in batch]), strict=True):
            leaf = leaves[number]
            full = _rearranged(full, choice.shares.get(number), nodes[number])
            results.append(jax.make_array_from_callback(leaf.shape, leaf.sharding, partial(_slice, full)))
    return jax.tree.unflatten(structure, results)


def _whole_shape(node: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = node.share.shape if is_flat_tensor(node) else node.shape
    return shape


def _as_saved(node: Any, share: Share | None) -> jax.ShapeDtypeStruct:
    """The shape in which a leaf was kept."""
    dtype = node.array.dtype if is_flat_tensor(node) else node.dtype
    return jax.ShapeDtypeStruct(share.kept if share else _whole_shape(node), dtype)


def _rearranged(full: np.ndarray, share: Share | None, node: Any) -> np.ndarray:
    """A leaf that was kept as `share` says as `node` keeps it."""
    whole = share.unflatten(full) if share else full
    kept: np.ndarray = node.share.flatten(whole) if is_flat_tensor(node) else whole
    return kept


class _Gathering:
    """Makes leaves whole on every process, of the pieces that each has."""

    def __init__(self, choice: CopyChoice, snapshot: Snapshot | None, mesh: Mesh) -> None:
        self.choice, self.snapshot = choice, snapshot
        self.ring = one_device_each(mesh)
        rows, replicated = (NamedSharding(self.ring, spec) for spec in (PartitionSpec("process"), PartitionSpec()))
        self._summed: Any = jax.jit(_sum_rows, in_shardings=rows, out_shardings=replicated)

    def gather(self, leaves: Sequence[tuple[int, jax.ShapeDtypeStruct]]) -> list[np.ndarray]:
        full = [np.zeros(leaf.shape, leaf.dtype) for _, leaf in leaves]
        here = jax.process_index()
        order = {number: index for index, (number, _) in enumerate(leaves)}
        for key, processes in self.choice.holders.items():
            if key[0] in order and here in processes and (self.choice.local or here == processes[0]):
                assert self.snapshot is not None
                piece = self.snapshot.pieces[key]
                full[order[key[0]]][_index(key[1], piece.shape)] = piece
        if self.choice.local:
            return full
        size = -(-sum(array.nbytes for array in full) // 4)
        row = np.zeros(1 << max(8, (size - 1).bit_length()), np.uint32)  # few sizes, so few programs
        write_bytes(row, full)
        total = np.array(self._summed(rows_of(self.ring, row)).addressable_shards[0].data)
        return read_bytes(total, [(leaf.shape, leaf.dtype) for _, leaf in leaves])


def _slice(full: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
    part: np.ndarray = full[index]
    return part


def _sum_rows(rows: jax.Array) -> jax.Array:
    return rows.sum(axis=0, dtype=jnp.uint32)


def _chunks(leaves: Sequence[jax.ShapeDtypeStruct]) -> Iterator[list[int]]:
    batch: list[int] = []
    filled = 0
    for number, leaf in enumerate(leaves):
        nbytes = nbytes_of(leaf.shape, leaf.dtype)
        if batch and filled + nbytes > CHUNK_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(number)
        filled += nbytes
    yield batch


def one_device_each(mesh: Mesh) -> Mesh:
    """A row of one device of each process."""
    first: dict[int, jax.Device] = {}
    for device in mesh.devices.flat:
        first.setdefault(device.process_index, device)
    return Mesh(np.array([first[process] for process in sorted(first)]), ("process",))


def rows_of(ring: Mesh, row: np.ndarray) -> jax.Array:
    """An array of one row a process, of which this one has `row`."""
    sharding = NamedSharding(ring, PartitionSpec("process"))
    return jax.make_array_from_callback((ring.size, len(row)), sharding, lambda index: row[None])


def write_bytes(row: np.ndarray, arrays: Iterable[np.ndarray]) -> None:
    """The bytes of `arrays`, one after the other, into `row`."""
    target, at = row.view(np.uint8), 0
    for array in arrays:
        target[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += array.nbytes


def read_bytes(row: np.ndarray, parts: Sequence[tuple[tuple[int, ...], np.dtype]]) -> list[np.ndarray]:
    """The inverse of `write_bytes`, given shapes and dtypes."""
    source, at, arrays = row.view(np.uint8), 0, []
    for shape, kind in parts:
        nbytes = nbytes_of(shape, kind)
        arrays.append(source[at : at + nbytes].view(kind).reshape(shape).copy())
        at += nbytes
    return arrays


def nbytes_of(shape: Sequence[int], kind: np.dtype) -> int:
    """Bytes of an array."""
    return math.prod(shape) * np.dtype(kind).itemsize


def _begin(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(side.start or 0 for side in index)


def _index(begin: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + n) for first, n in zip(begin, shape, strict=True))
