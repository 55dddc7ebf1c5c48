"""Random sets of failed chips and links: every connected mesh must get a proven schedule, every other one an error.

    python benchmarks/failures.py [--sets 1000] [--seed 0] [--only SHAPE] [--svg FILE]

For each set the schedules of `TRIED` are built and proven, tree packing is also mended from that of the whole
mesh, and its distance to the strength bound is taken. A set that cuts the mesh must be refused by a message that
names the parts; then the largest part is taken for the machine. Exits 1 at the first fault, and prints the set.
"""

import argparse
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import machine

from multipod.collectives.build import build
from multipod.collectives.repair import repair
from multipod.collectives.schedule import Schedule
from multipod.collectives.strength import strength
from multipod.collectives.tree_packing import excess
from multipod.collectives.verify import verify
from multipod.errors import TopologyError
from multipod.topology.topology import Topology

SHAPES = {(8, 8): 0.8, (16, 16): 0.13, (16, 32): 0.04, (32, 32): 0.03}
"""What share of the sets is drawn on each shape."""

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
"""Of chips that fail, on average; half as many links."""

TRIED = ("tree-packing", "detour-ring", "double-tree")
ROUNDS = 1  # all rounds are alike, so proving one of them is enough
WITHIN = 0.15  # few trees, so that thousands of sets take minutes


@dataclass(frozen=True)
class Outcome:
    """What became of one set.

    Attributes:
      shape: of the mesh.
      share: of chips that failed on average in such sets.
      whole: whether no chip had failed, only links.
      connected: whether all live chips could reach each other.
      largest: the live chips of the largest part, as a share of all chips of the mesh.
      speed: sigma of the largest part over that of the whole mesh.
      one_hop: whether the detour ring there needs no chip to be left out and no way of several links.
      packed: the period of the packing over the least that sigma allows, less 1; the same of the mended one.
    """

    shape: tuple[int, int]
    share: float
    whole: bool
    connected: bool
    largest: float
    speed: float
    one_hop: bool
    packed: float
    mended: float


def draw(shape: tuple[int, int], share: float, rng: random.Random) -> Topology:
    """The mesh with some failures; never all chips."""
    whole = Topology(shape, wrap=rng.choice([(False, False), (True, False), (True, True)]))
    chips = [chip for chip in range(whole.size) if rng.random() < share][: whole.size - 1]
    links = [(a, b) for a, b, _ in whole.links if rng.random() < share / 2]
    return whole.without(chips, links)


def distance(schedule: Schedule) -> float:
    """The excess of a packing's period."""
    return excess(schedule.origin.beat, strength(schedule.topology).value) if schedule.origin else 0.0


def check_refused(topology: Topology) -> None:
    """Asserts that a machine in parts is refused, by a message that names the first of them."""
    try:
        build("tree-packing", topology)
    except TopologyError as error:
        message = str(error)
    else:
        message = "it was not refused"
    expected = [f"is cut into {len(topology.parts)} parts", *(str(part[0]) for part in topology.parts[:4])]
    assert all(text in message for text in expected), message


def attempt(topology: Topology, share: float, whole: Schedule) -> Outcome:
    """Builds and proves everything for one machine.

    Raises:
      AssertionError: a machine cut in parts was not refused, or not by naming its parts.
      Exception: any fault of a builder, or of what it built.
    """
    connected, complete = len(topology.parts) == 1, not topology.failed_chips
    if not connected:
        check_refused(topology)
        topology = topology.without(chip for part in topology.parts[1:] for chip in part)
    several = len(topology.chips) > 1
    made = {}
    for name in TRIED:
        options = {"rounds": ROUNDS, "within": WITHIN} if name == "tree-packing" else {}
        made[name] = build(name, topology, **options)
        proof = verify(made[name], topology)
        if name == "detour-ring":
            one_hop = proof.longest_way_hops <= 1 and not made[name].notes
    mended = repair(whole, topology)
    verify(mended, topology)
    best = strength(Topology(topology.shape, topology.wrap)).value
    return Outcome(
        topology.shape,  # type: ignore[arg-type]
        share,
        complete,
        connected,
        len(topology.chips) / topology.size,
        float(strength(topology).value / best) if several else 0.0,
        one_hop,
        distance(made["tree-packing"]),
        distance(mended),
    )


def campaign(sets: int, seed: int, only: str) -> Iterator[Outcome]:
    """The outcomes of `sets` random sets, as they come."""
    rng = random.Random(seed)
    for shape, part in SHAPES.items():
        if only not in "x".join(map(str, shape)):
            continue
        wholes: dict[tuple[bool, ...], Schedule] = {}
        for number in range(round(part * sets)):
            share = SHARES[number % len(SHARES)]
            topology = draw(shape, share, rng)
            if topology.wrap not in wholes:
                wholes[topology.wrap] = build("tree-packing", Topology(shape, topology.wrap), rounds=ROUNDS)
            try:
                yield attempt(topology, share, wholes[topology.wrap])
            except Exception:
                print(f"{topology!r} failed:", file=sys.stderr)
                raise


def plot(outcomes: list[Outcome], out: Path) -> None:
    """Share of sets in which training can go on, by failed chips, and how fast the sum still is."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    rows = by_share(outcomes)
    percent = [100 * share for share in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    curves = {
        "proven schedule over all live chips": [one.connected for one in outcomes],
        "ring of single links over all live chips": [one.connected and one.one_hop for one in outcomes],
        "algorithms for whole grids": [one.connected and one.whole for one in outcomes],
    }
    for name, yes in curves.items():
        values = [
            100 * statistics.mean(y for y, o in zip(yes, outcomes, strict=True) if o.share == share) for share in rows
        ]
        left.plot(percent, values, marker="o", label=name)
    left.set(xlabel="failed chips, % (and half as many links)", ylabel="sets, %", ylim=(-4, 104))
    left.legend(fontsize=7)
    for name in ("largest", "speed"):
        values = [100 * statistics.median(getattr(one, name) for one in row) for row in rows.values()]
        label = {"largest": "chips in the largest part", "speed": "all-reduce bandwidth (sigma) there"}[name]
        right.plot(percent, values, marker="o", label=label)
    right.set(
        xlabel="failed chips, % (and half as many links)", ylabel="of the whole machine's, median, %", ylim=(0, 104)
    )
    right.legend(fontsize=7)
    figure.savefig(out, metadata={"Date": None})


def by_share(outcomes: list[Outcome]) -> dict[float, list[Outcome]]:
    """The outcomes by the share of failed chips."""
    rows = defaultdict(list)
    for one in outcomes:
        rows[one.share].append(one)
    return dict(sorted(rows.items()))


def row(label: str, outcomes: list[Outcome]) -> list[str]:
    """A row of the table."""

    def percent(values: list[bool] | list[float]) -> str:
        return f"{100 * statistics.mean(values):.1f}%"

    return [
        label,
        f"{len(outcomes):,}",
        percent([one.connected for one in outcomes]),
        percent([one.connected and one.one_hop for one in outcomes]),
        percent([one.connected and one.whole for one in outcomes]),
        f"{100 * statistics.median(one.largest for one in outcomes):.1f}%",
        f"{100 * statistics.median(one.speed for one in outcomes):.1f}%",
        f"{100 * statistics.median(one.packed for one in outcomes):.1f}%",
        f"{100 * statistics.median(one.mended for one in outcomes):.1f}%",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="SHAPE", help="such as 8x8")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the curves")
    options = parser.parse_args()
    print(machine.headline(machine.facts()), flush=True)
    start = time.process_time()
    outcomes = list(campaign(options.sets, options.seed, options.only))
    head = ["", "sets", "connected", "one-hop ring", "no chip failed", "largest part", "sigma", "packed", "mended"]
    rows = [row(f"{100 * share:.0f}% of chips", found) for share, found in by_share(outcomes).items()]
    for shape in SHAPES:
        if found := [one for one in outcomes if one.shape == shape]:
            rows.append(row("x".join(map(str, shape)), found))
    print(machine.table(head, rows))
    print(f"{len(outcomes):,} sets in {time.process_time() - start:.0f} CPU s, no fault.")
    if options.svg:
        plot(outcomes, options.svg)


if __name__ == "__main__":
    main()
