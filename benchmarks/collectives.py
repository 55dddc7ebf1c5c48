"""Every algorithm on every kind of machine: how far from the strength bound, in how many steps, built how fast.

    python benchmarks/collectives.py [--only TEXT] [--json FILE]

Nothing is run here but the simulator: link speeds are those of the machine's description (50 GB/s and 1 us
where it says nothing). `stepped` has a barrier after every step. Build and proof are CPU seconds in one process.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import machine

from multipod.collectives.build import ALGORITHMS, build
from multipod.collectives.schedule import Schedule
from multipod.collectives.strength import strength
from multipod.collectives.verify import verify
from multipod.errors import MultipodError
from multipod.simulate import simulate
from multipod.simulate.best import sizes
from multipod.topology.machines import parse
from multipod.topology.topology import Topology

SCATTERED = ["1,1", "3,6", "5,5", "6,2"]
MACHINES: dict[str, Topology] = {
    "4x4 mesh": parse("mesh:4x4"),
    "4x4 torus": parse("torus:4x4"),
    "8x8 mesh": parse("mesh:8x8"),
    "8x8 mesh, 2x2 hole": parse("mesh:8x8", ["2-3,2-3"]),
    "8x8 mesh, 4x2 hole": parse("mesh:8x8", ["2-5,2-3"]),
    "8x8 mesh, 4 scattered holes": parse("mesh:8x8", SCATTERED),
    "8x8 mesh, one link failed": parse("mesh:8x8", [], ["27-28"]),
    "8x8 mesh, rows 1.4 times as fast": Topology((8, 8), bytes_per_s=(50e9, 70e9)),
    "8x8 torus": parse("torus:8x8"),
    "8x8 torus, 4x2 hole": parse("torus:8x8", ["2-5,2-3"]),
    "16x32 mesh": parse("mesh:16x32"),
    "16x32 mesh, 4x2 hole": parse("mesh:16x32", ["4-7,8-9"]),
    "16x32 torus": parse("torus:16x32"),
    "32x32 mesh": parse("mesh:32x32"),
    "32x32 mesh, 4x2 hole": parse("mesh:32x32", ["6-9,10-11"]),
    "32x32 mesh, 4 scattered holes": parse("mesh:32x32", SCATTERED),
    "32x32 mesh, rows 1.4 times as fast": Topology((32, 32), bytes_per_s=(50e9, 70e9)),
    "32x32 torus": parse("torus:32x32"),
    "32x32 torus, 4x2 hole": parse("torus:32x32", ["6-9,10-11"]),
}
LARGE, SMALL = 10**10, 10**6


@dataclass(frozen=True)
class Figures:
    """What is measured of one algorithm on one machine; times over n / sigma, latency left out of the bound."""

    machine: str
    algorithm: str
    large: float = 0.0
    stepped: float = 0.0
    small: float = 0.0
    steps: int = 0
    sends: int = 0
    build_s: float = 0.0
    verify_s: float = 0.0
    refused: str = ""


def measure(name: str, algorithm: str, topology: Topology) -> Figures:
    """The schedule for large vectors built, proven and simulated; that for small ones simulated."""
    start = time.process_time()
    try:
        schedule = build(algorithm, topology)
    except MultipodError as refusal:
        return Figures(name, algorithm, refused=str(refusal))
    built = time.process_time()
    verify(schedule)
    proven = time.process_time()
    bound = strength(topology)
    small = build(algorithm, topology, **sizes(algorithm, SMALL))

    def over(made: Schedule, nbytes: int, mode: str = "pipelined") -> float:
        return float(simulate(made, topology, nbytes, mode).seconds / bound.seconds(nbytes))  # type: ignore[arg-type]

    return Figures(
        name,
        algorithm,
        over(schedule, LARGE),
        over(schedule, LARGE, "stepped"),
        over(small, SMALL),
        len(schedule.steps),
        sum(len(step.src) for step in schedule.steps),
        built - start,
        proven - built,
    )


HEAD = ["algorithm", "10 GB", "10 GB, stepped", "1 MB", "steps", "sends", "build s", "proof s"]


def cells(one: Figures) -> list[str]:
    """A row of the table."""
    times = [f"{value:.3f}" if value < 10 else f"{value:.1f}" for value in (one.large, one.stepped, one.small)]
    return [one.algorithm, *times, f"{one.steps:,}", f"{one.sends:,}", f"{one.build_s:.2f}", f"{one.verify_s:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="machines with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    print(machine.headline(machine.facts()), flush=True)
    found = []
    for name, topology in MACHINES.items():
        if options.only not in name:
            continue
        sigma = strength(topology)
        print(f"\n**{name}**: sigma = {sigma.value} = {float(sigma.value):.4f}\n", flush=True)
        figures = [measure(name, algorithm, topology) for algorithm in ALGORITHMS]
        found += figures
        ran = sorted((one for one in figures if not one.refused), key=lambda one: one.large)
        print(machine.table(HEAD, [cells(one) for one in ran]), flush=True)
        if refused := [one.algorithm for one in figures if one.refused]:
            print(f"\nNot for this machine: {', '.join(refused)}.", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1))


if __name__ == "__main__":
    main()
