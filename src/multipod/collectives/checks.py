"""Refusals that several builders share."""

from collections.abc import Sequence

from multipod.collectives.schedule import Collective, peers
from multipod.errors import ScheduleError
from multipod.topology.topology import ChipName, Topology


def check_whole(name: str, topology: Topology) -> tuple[str, ...]:
    """Notes on failed links, which single hops then go around.

    Raises:
      ScheduleError: chips have failed.
    """
    if topology.failed_chips:
        raise ScheduleError(
            f"{name} needs every chip of the grid, and on {topology} {len(topology.failed_chips)} of {topology.size} "
            "have failed. Use one that does not: detour-ring, tree-packing, double-tree, halving-doubling, ring."
        )
    if topology.failed_links:
        links = ", ".join(f"{a}-{b}" for a, b in sorted(topology.failed_links)[:8])
        return (
            f"links have failed ({links}): hops over them take a way around; detour-ring looks for a ring without them",
        )
    return ()


def check_no_root(name: str, collective: Collective, root: ChipName | None) -> None:
    """Refuses a root that would be ignored.

    Raises:
      ScheduleError: there is a root, and the collective is not broadcast.
    """
    if root is not None:
        raise ScheduleError(f"{name}: {collective} has no root, and root={root} was given. Only broadcast has one.")


def check_segments(name: str, segments: int) -> None:
    """Refuses a number of segments that is none.

    Raises:
      ScheduleError: fewer than one.
    """
    if not isinstance(segments, int) or segments < 1:
        raise ScheduleError(f"{name}: segments={segments} cuts nothing. Give a whole number of 1 or more.")


def find_root(name: str, topology: Topology, root: ChipName | None) -> int:
    """The number of the chip `root`, or of the first live chip.

    Raises:
      TopologyError: there is no such chip.
      ScheduleError: it has failed.
    """
    if root is None:
        return topology.chips[0]
    number = topology.number(root)
    if number not in topology.rank:
        raise ScheduleError(f"{name}: the root {root} has failed on {topology}. Give a live chip.")
    return number


def tile_peers(
    name: str, topology: Topology, collective: Collective, tile: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """The groups of chips that are summed with each other when peers of a tile are skipped.

    Raises:
      ScheduleError: a tile that does not fit the machine or the collective.
    """
    if tile:
        if collective != "all-reduce":
            raise ScheduleError(f"{name}: a tile is skipped by all-reduce only, not by {collective}. Leave tile out.")
        fits = len(tile) == len(topology.shape) and all(isinstance(t, int) and t > 0 for t in tile)
        if not fits or any(n % t for n, t in zip(topology.shape, tile, strict=True)):
            raise ScheduleError(
                f"{name}: tile={tuple(tile)} does not tile {topology} of shape {topology.shape}. "
                "Give one size for each dimension that divides it."
            )
    return peers(topology, tuple(tile))
