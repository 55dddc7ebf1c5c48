"""The fastest algorithm for a machine and a size, by simulated time."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from multipod.collectives.build import ALGORITHMS, build
from multipod.collectives.schedule import Collective, Schedule
from multipod.errors import MultipodError, ScheduleError
from multipod.simulate.simulate import Mode, Simulation, check_bytes, simulate
from multipod.topology.topology import Number, Topology


@dataclass(frozen=True)
class Comparison:
    """What became of every algorithm that was tried.

    Attributes:
      simulations: by name, the fastest first; of equally fast ones that with fewer steps.
      refusals: by name, why an algorithm does not fit the machine, the collective or the simulator.
    """

    simulations: dict[str, Simulation]
    refusals: dict[str, str] = field(default_factory=dict)


def best(
    topology: Topology,
    nbytes: Number,
    collective: Collective = "all-reduce",
    algorithms: Iterable[str] | None = None,
    mode: Mode = "pipelined",
) -> Schedule:
    """The schedule that `compare` puts first.

    Raises:
      ScheduleError: no algorithm fits; every reason is in the message.
    """
    compared = compare(topology, nbytes, collective, algorithms, mode)
    for simulation in compared.simulations.values():
        return simulation.schedule
    raise no_algorithm(topology, collective, compared)


def no_algorithm(topology: Topology, collective: Collective, compared: Comparison) -> ScheduleError:
    """What to raise when everything was refused."""
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in compared.refusals.items())
    return ScheduleError(f"No algorithm that was tried builds {collective} on {topology}. Their reasons:{reasons}")


def compare(
    topology: Topology,
    nbytes: Number,
    collective: Collective = "all-reduce",
    algorithms: Iterable[str] | None = None,
    mode: Mode = "pipelined",
    exact: bool = False,
) -> Comparison:
    """Builds and simulates each of `algorithms` (all if None) for a vector of `nbytes` on each chip.

    An algorithm that refuses is passed over, and its reason kept. Takes as long as building and simulating all.

    Raises:
      ScheduleError: a size that is none, an algorithm that is not known.
      TopologyError: the machine is cut in parts.
    """
    check_bytes(nbytes)
    topology.check_connected()
    simulations: dict[str, Simulation] = {}
    refusals: dict[str, str] = {}
    for name in ALGORITHMS if algorithms is None else algorithms:
        try:
            schedule = build(name, topology, collective, **sizes(name, nbytes))
            simulations[name] = simulate(schedule, topology, nbytes, mode, exact)
        except MultipodError as refusal:
            if name not in ALGORITHMS:
                raise
            refusals[name] = str(refusal)
    order = sorted(simulations, key=lambda name: (simulations[name].seconds, simulations[name].steps, name))
    return Comparison({name: simulations[name] for name in order}, refusals)


def sizes(name: str, nbytes: Number) -> dict[str, Number]:
    """The options by which an algorithm is told the size of the vector; most of them do not ask."""
    return {"nbytes": nbytes} if name in ALGORITHMS and "nbytes" in ALGORITHMS[name].options else {}
