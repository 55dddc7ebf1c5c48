"""The table of algorithms, and `build`, which makes a schedule by an algorithm's name."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from multipod.collectives.dimensions import halving_doubling, multi_ring, row_column, row_pairs, torus_2d
from multipod.collectives.double_tree import double_tree
from multipod.collectives.rings import bidirectional_ring, detour_ring, ring
from multipod.collectives.schedule import COLLECTIVES, Collective, Schedule
from multipod.collectives.tree_packing import tree_packing
from multipod.errors import ScheduleError, nearest
from multipod.topology.topology import Topology

HALVES: tuple[Collective, ...] = ("all-reduce", "reduce-scatter", "all-gather")


@dataclass(frozen=True)
class Builder:
    """An algorithm: the function that builds its schedule, and what a user chooses it by.

    Attributes:
      function: `(topology, collective, **options) -> Schedule`; its docstring gives steps and bound.
      collectives: those that it can do.
      summary: one line.
      source: arXiv number or DOI.
      broken: whether it works with failed chips.
    """

    function: Callable[..., Schedule]
    collectives: tuple[Collective, ...]
    summary: str
    source: str
    broken: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """The names of its options."""
        return tuple(inspect.signature(self.function).parameters)[2:]


ALGORITHMS: dict[str, Builder] = {
    "ring": Builder(
        ring,
        COLLECTIVES,
        "one ring over the chips in order of their number",
        "doi:10.1016/j.jpdc.2008.09.002",
        broken=True,
    ),
    "bidirectional-ring": Builder(
        bidirectional_ring, HALVES, "both ways around a Hamiltonian cycle of the mesh", "doi:10.1016/j.jpdc.2008.09.002"
    ),
    "row-column": Builder(
        row_column, ("all-reduce",), "half of the vector along rows first, half along columns first", "arXiv:1909.09756"
    ),
    "row-pairs": Builder(
        row_pairs, ("all-reduce",), "rings around pairs of rows, then columns over the pairs", "arXiv:2011.03605"
    ),
    "torus-2d": Builder(
        torus_2d, HALVES, "one dimension after the other, closed ones first: the multipod's", "arXiv:2011.03641"
    ),
    "multi-ring": Builder(
        multi_ring, HALVES, "rings in tiers such as 4x4x16, several at once if asked", "arXiv:1708.02188", broken=True
    ),
    "halving-doubling": Builder(
        halving_doubling, HALVES, "exchanges at distances of powers of two", "doi:10.1177/1094342005051521", broken=True
    ),
    "detour-ring": Builder(
        detour_ring,
        HALVES,
        "both ways around a ring that walks around the holes",
        "doi:10.1023/A:1016610507833",
        broken=True,
    ),
    "tree-packing": Builder(
        tree_packing,
        ("all-reduce",),
        "up and down a packing of spanning trees: as fast as the network's strength allows",
        "doi:10.1112/jlms/s1-36.1.445",
        broken=True,
    ),
    "double-tree": Builder(
        double_tree,
        ("all-reduce", "broadcast"),
        "two complementary binary trees, pipelined",
        "doi:10.1016/j.parco.2009.09.001",
        broken=True,
    ),
}
"""Every algorithm by name. What stands here is tested, simulated, benchmarked and offered by the command line."""


def build(name: str, topology: Topology, collective: Collective = "all-reduce", **options: object) -> Schedule:
    """The schedule of algorithm `name` for `collective` on `topology`; it is not proven here (see `verify`).

    Raises:
      ScheduleError: no such algorithm, collective or option; or the algorithm does not fit the machine.
      TopologyError: the machine is cut in parts.
    """
    builder = _find(name, ALGORITHMS)
    if collective not in COLLECTIVES:
        raise ScheduleError(f"{collective!r} is no collective. {nearest(str(collective), COLLECTIVES)}")
    if collective not in builder.collectives:
        others = [other for other, row in ALGORITHMS.items() if collective in row.collectives]
        raise ScheduleError(
            f"{name} does {', '.join(builder.collectives)}, not {collective}. For {collective} use {', '.join(others)}."
        )
    unknown = sorted(set(options) - set(builder.options))
    if unknown:
        known = f"It has {', '.join(builder.options)}." if builder.options else "It has none."
        raise ScheduleError(f"{name} has no option {', '.join(unknown)}. {known}")
    topology.check_connected()
    return builder.function(topology, collective, **options)


def _find(name: str, algorithms: Mapping[str, Builder]) -> Builder:
    if name not in algorithms:
        raise ScheduleError(f"There is no algorithm {name!r}. {nearest(str(name), algorithms)}")
    return algorithms[name]
