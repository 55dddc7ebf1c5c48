"""The time of collectives: the very schedules of a layout, simulated on the machine's links; or the engine's own sum.

In the simulator's model the time of a schedule scales: it depends on the links' latency and on the seconds that the
vector takes over one link, and on nothing else. So a schedule is simulated twice, without bytes and without
latency, and `Cost` adds the two: exact for schedules whose steps wait for each other, and for others an upper
bound, by less than a tenth (a test holds it against the simulator). Whoever wants the exact time asks `simulated`.
Beside that, each step of a schedule is a message of its own that is started; the engine's sum (`own_sum`) is one.
What the engine refuses to run, as too long a program, has no price.
"""

import hashlib
import json
import math
import os
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from pathlib import Path

from multipod.collectives.build import ALGORITHMS, build
from multipod.collectives.schedule import COPY, Collective, Schedule, even_bounds, make_step
from multipod.errors import MultipodError, ScheduleError
from multipod.execute.engines.rounds import build_rounds
from multipod.plan.machine import Machine, slowest
from multipod.simulate.simulate import CELLS, Mode, simulate
from multipod.topology.topology import Topology

NAMES = {"torus": "torus-2d"}
"""What stands for sums that are no schedules of ours."""

ENGINES = ("xla", "ordered", "direct")
"""Sums that are one collective of the engine's, or two: `own_sum` prices them."""


@dataclass(frozen=True)
class Cost:
    """What a collective costs on a machine of equal links.

    Attributes:
      hops: times a link's latency.
      vectors: times the vector's bytes over a link's bandwidth.
      rounds: messages that are started one after the other.
      sent: what all chips send together, in vectors: of the same schedule that `vectors` is the time of.
    """

    hops: float
    vectors: float
    rounds: float = 1.0
    sent: float = 0.0

    def seconds(self, machine: Machine, nbytes: float, bytes_per_s: float = 0.0) -> float:
        """On this machine, calibrated; `bytes_per_s` of the slowest link that is used, if not the machine's."""
        constants, speed = machine.calibration, bytes_per_s or machine.link_bytes_per_s
        return self.rounds * constants.message_s + self.hops * constants.hop_s + self.vectors * nbytes / speed


@dataclass(frozen=True)
class OwnSum:
    """The all-reduce of the engine itself: XLA's over a TPU's links, NCCL's over NVLink and InfiniBand.

    Attributes:
      cost: as it is priced.
      least: what the best algorithm that the engine is known for would cost: nobody here can see which one it takes.
    """

    cost: Cost
    least: Cost


def own_sum(topology: Topology, tile: tuple[int, ...] = ()) -> OwnSum:
    """The engine's own sum over a whole machine, in closed form; with a `tile`, over those at the same place of theirs.

    On links: a reduce-scatter along each dimension in turn, closed ones first, by rings both ways (or lines), and the
    gathers back: 2 (n - 1) hops and 2 (n - 1) / n of what is left of the vector for a dimension of n, half of it where
    it is closed. At best the vector is cut in as many parts as there are dimensions and each begins with another one.
    On switches: rings through all chips, a network card for each, or trees between the boxes, whichever has fewer hops.
    Rings past the peers of a tile share wires, and their steps are as many hops long as the tile is.

    Source: arXiv:2011.03641 (closed dimensions first) and arXiv:1811.06992 (two halves); NCCL's rings and trees:
    doi:10.1016/j.parco.2009.09.001 and developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4.

    Raises:
      ScheduleError: chips or links have failed on a machine of links, which no engine sums over.
    """
    whole = not topology.failed_chips | topology.failed_links
    if not whole and not all(topology.switched):
        raise ScheduleError(f"{topology}: the engine's own sum needs every chip and link. Take a schedule.")
    scaled, tile = _scaled(topology), tile or (1,) * len(topology.shape)
    if any(n % k for n, k in zip(topology.shape, tile, strict=True)):
        raise ScheduleError(f"{topology}: tiles of {tile} do not divide it. Take a split whose tiles do.")
    return _own_on_switches(scaled, tile) if all(topology.switched) else _own_on_links(scaled, tile)


@lru_cache(maxsize=1024)
def _own_on_links(topology: Topology, tile: tuple[int, ...]) -> OwnSum:
    dims = sorted((dim for dim, n in enumerate(topology.shape) if n > 1), key=lambda dim: not topology.wrap[dim])
    peers = [topology.shape[dim] // tile[dim] for dim in dims]
    hops = sum(2.0 * (n - 1) * tile[dim] * float(topology.latency_s[dim]) for n, dim in zip(peers, dims, strict=True))

    def loads(order: list[int], part: float) -> dict[int, float]:
        """Vectors over the links of each dimension, of a part of the vector that takes them in this order."""
        found = {}
        for dim in order:
            n = topology.shape[dim] // tile[dim]
            ways = 2 if topology.wrap[dim] and topology.shape[dim] > 2 else 1
            found[dim] = 2 * (n - 1) / n * part * tile[dim] / ways / float(topology.bytes_per_s[dim])
            part /= n
        return found

    turns = [loads(dims[k:] + dims[:k], 1 / len(dims)) for k in range(len(dims))]
    least = max((sum(turn[dim] for turn in turns) for dim in dims), default=0.0)
    in_turn, sent = sum(loads(dims, 1.0).values()), _sent_by_halves(math.prod(peers), topology.size)
    return OwnSum(Cost(hops, in_turn, sent=sent), Cost(hops, min(least, in_turn), sent=sent))


def _sent_by_halves(peers: int, chips: int) -> float:
    """Vectors that `chips` send for a reduce-scatter and a gather between so many peers, in whatever order of dims."""
    return 2 * (peers - 1) / peers * chips


@lru_cache(maxsize=1024)
def _own_on_switches(topology: Topology, tile: tuple[int, ...]) -> OwnSum:
    """A ring goes through each box once: its latency is that of all hops, its load that of the slowest port."""
    shape = [n // k for n, k in zip(topology.shape, tile, strict=True)]
    ring = tree = load = 0.0
    groups, inside = 1, math.prod(shape)  # of chips that differ in later dimensions only
    for dim, n in enumerate(shape):
        inside //= n
        latency, ports = float(topology.latency_s[dim]), 1 if topology.shared[dim] else inside
        ring += 2 * latency * groups * (n - 1)
        tree += 2 * latency * (n - 1 if dim == len(shape) - 1 else math.ceil(math.log2(n)) if n > 1 else 0)
        load = max(load, 2 * (n - 1) / n / ports / float(topology.bytes_per_s[dim]))
        groups *= n
    cost = Cost(min(ring, tree), load, sent=_sent_by_halves(math.prod(shape), topology.size))
    return OwnSum(cost, cost)


def all_reduce_range_s(
    machine: Machine, algorithm: str, nbytes: float, tile: tuple[int, ...] = ()
) -> tuple[float, float]:
    """`all_reduce_s`, and the least that it may really be: of the engine's own sum nobody knows the algorithm.

    Raises:
      ScheduleError: see `all_reduce_s`.
    """
    seconds = all_reduce_s(machine, algorithm, nbytes, tile)
    if algorithm not in ENGINES or machine.network == "shared" or machine.chips == 1:
        return seconds, seconds
    least = own_sum(machine.topology, tile).least.seconds(machine, nbytes)
    return seconds, max(on_chip_s(machine, nbytes), least)


def all_reduce_s(machine: Machine, algorithm: str, nbytes: float, tile: tuple[int, ...] = ()) -> float:
    """The sum of `nbytes` over all chips, or over those at the same place of their tiles, by `algorithm`.

    Each chip's devices add their vectors first, through the chip's memory, while earlier parts travel: the slower of
    the two counts. On a `shared` machine all messages pass one memory, one after the other.

    Raises:
      ScheduleError: the algorithm does not fit the machine.
    """
    if machine.network == "shared":
        return shared_s(machine, machine.devices, 2 * nbytes * machine.devices, 1)
    inside = on_chip_s(machine, nbytes)
    if machine.chips == 1:
        return inside
    return max(inside, _sum_cost(machine, algorithm, nbytes, tile).seconds(machine, nbytes))


def all_reduce_sent(machine: Machine, algorithm: str, nbytes: float, tile: tuple[int, ...] = ()) -> float:
    """Bytes that a chip sends to others, in the mean, in the sum that `all_reduce_s` is the time of.

    Raises:
      ScheduleError: see `all_reduce_s`.
    """
    if machine.network == "shared" or machine.chips == 1:
        return 0.0
    return _sum_cost(machine, algorithm, nbytes, tile).sent * nbytes / machine.chips


def _sum_cost(machine: Machine, algorithm: str, nbytes: float, tile: tuple[int, ...]) -> Cost:
    if algorithm in ENGINES:
        return own_sum(machine.topology, tile).cost
    return cost(machine.topology, algorithm, "all-reduce", tile, nbytes)


def on_chip_s(machine: Machine, nbytes: float) -> float:
    """The devices of a chip add their vectors: each is read twice and written once."""
    if machine.devices_per_chip == 1:
        return 0.0
    return 3 * nbytes / (machine.memory_bytes_per_s * machine.calibration.memory)


def shared_s(machine: Machine, devices: int, nbytes: float, rounds: float) -> float:
    """Messages of `nbytes` in all between devices that share one memory, in `rounds`."""
    return (
        rounds * (machine.calibration.message_s + machine.calibration.hop_s * devices)
        + nbytes / machine.link_bytes_per_s
    )


def group_s(machine: Machine, pattern: str, nbytes: float, peers: int) -> float:
    """A collective among `peers` neighbouring devices: those of a chip first, then a compact block of chips."""
    if peers <= 1:
        return 0.0
    if machine.network == "shared":
        moved = nbytes * machine.devices * (2 if pattern == "all-reduce" else 1)
        return shared_s(machine, machine.devices, moved, 1)
    if pattern == "neighbour":
        return machine.calibration.message_s + machine.calibration.hop_s + nbytes / machine.link_bytes_per_s
    chips = -(-peers // machine.devices_per_chip)
    inside = on_chip_s(machine, nbytes)
    if chips == 1:
        return machine.calibration.message_s + inside
    if pattern == "all-to-all":
        return inside + all_to_all_s(machine, block(chips, machine.topology), nbytes)
    whole = inside + quickest_s(machine, block(chips, machine.topology), nbytes)
    return whole if pattern == "all-reduce" else whole / 2


def all_to_all_s(machine: Machine, on: Topology, nbytes: float) -> float:
    """Every chip of a block sends each an equal part of `nbytes` for each of its devices.

    Half of what the chips on one side of the middle have crosses it: that is the bound, and dimension-ordered routes on
    an open block reach it. On a switch all but a chip's own part leaves by its port.
    """
    shape, longest, constants = on.shape, max(on.shape), machine.calibration
    nbytes *= machine.devices_per_chip
    if any(on.switched):
        leaving, hops = nbytes * (1 - 1 / on.size), 2
    else:
        side = longest // 2
        leaving, hops = side * (longest - side) / longest * nbytes, sum(size - 1 for size in shape)
    return constants.message_s + hops * constants.hop_s + leaving / (constants.link * slowest(on))


def to_next_host_s(machine: Machine, nbytes: float) -> float:
    """The first chip of each host sends `nbytes` to the first chip of the next, all at once and around the last."""
    if machine.hosts == 1:
        return 0.0
    return _around_hosts(_scaled(machine.topology), machine.chips_per_host).seconds(machine, nbytes)


@lru_cache(maxsize=256)
def _around_hosts(topology: Topology, chips_per_host: int) -> Cost:
    """Chips are a host's in the order of their numbers. Messages that share a link share its time, as packets do."""
    first = topology.chips[::chips_per_host]
    step = make_step(first, (*first[1:], first[0]), 0, op=COPY)
    shift = Schedule("broadcast", "to the next host", topology, 1, even_bounds(1), [step])
    free = replace(topology, latency_s=(0.0,) * len(topology.shape))
    hops, vectors = simulate(shift, topology, 0, "stepped"), simulate(shift, free, 1.0, "stepped")
    return Cost(float(hops.seconds), float(vectors.seconds))


def network_of(machine: Machine) -> set[str]:
    """The constants that say what messages take on this machine; none on a single device."""
    return set() if machine.devices == 1 else {"link", "message_s"} if machine.chips > 1 else {"message_s"}


QUICK = ("torus-2d", "halving-doubling")
"""What stands for the engine's sums around holes: for long and for short vectors."""


def quickest_s(machine: Machine, topology: Topology, nbytes: float) -> float:
    """The engine's sum over a part of the machine, or over all of it; around holes the quicker of `QUICK`."""
    speed = machine.calibration.link * slowest(topology)
    if not topology.failed_chips | topology.failed_links:
        return own_sum(topology).cost.seconds(machine, nbytes, speed)
    found = []
    for algorithm in QUICK:
        with suppress(ScheduleError):
            found.append(replace(cost(topology, algorithm), rounds=1).seconds(machine, nbytes, speed))
    return min(found, default=0.0)


@lru_cache(maxsize=1024)
def block(chips: int, topology: Topology) -> Topology:
    """The squarest open block of so many chips; on switches, as few boxes as hold them."""
    if any(topology.switched):
        inner = min(chips, topology.shape[-1])
        return replace(topology, shape=(*(1,) * (len(topology.shape) - 2), -(-chips // inner), inner), name="")
    rows = next(rows for rows in range(math.isqrt(chips), 0, -1) if chips % rows == 0)
    shape = (rows, chips // rows) if len(topology.shape) > 1 else (chips,)
    speed, latency = slowest(topology), max(map(float, topology.latency_s))
    return Topology(shape, chip=topology.chip, latency_s=(latency,) * len(shape), bytes_per_s=(speed,) * len(shape))


def cost(
    topology: Topology,
    algorithm: str,
    collective: Collective = "all-reduce",
    tile: tuple[int, ...] = (),
    nbytes: float = 0.0,
) -> Cost:
    """What `algorithm` costs on `topology`, with the links of its slowest dimension everywhere.

    Two simulations, remembered; up to some seconds for thousands of chips the first time.

    nbytes: of the vector, for algorithms that cut it by its size, rounded up to a power of four of what a link carries
      in its latency; 0 is as good as endless.

    Raises:
      ScheduleError: it does not fit, or is too long a program for the devices (`build_rounds`).
    """
    name, scaled = NAMES.get(algorithm, algorithm), _scaled(topology)
    if nbytes and name in ALGORITHMS and "nbytes" in ALGORITHMS[name].options:
        late = max(map(float, topology.latency_s)) * slowest(topology)
        sized = min(4.0 ** math.ceil(math.log(max(1.0, nbytes / late), 4)), ENDLESS * scaled.size) if late else 0.0
    else:
        sized = 0.0
    found = _cost(scaled, name, collective, tile, sized)
    if isinstance(found, str):
        raise ScheduleError(found)
    return found


ENDLESS = 1e8
"""Bytes for each chip that are as good as endless for links of 1 B/s and 1 s."""


@lru_cache(maxsize=1024)
def _scaled(topology: Topology) -> Topology:
    """The machine in units of its slowest links."""
    used = [late for late, size in zip(topology.latency_s, topology.shape, strict=True) if size > 1]
    latency, speed = max(used, default=max(topology.latency_s)), slowest(topology)
    return replace(
        topology,
        latency_s=tuple(float(one / latency) if latency else 1.0 for one in topology.latency_s),
        bytes_per_s=tuple(float(one / speed) for one in topology.bytes_per_s),
        chip=None,
        name="",
    )


_file: Path | None = None
_known: dict[str, list[float] | str] = {}
"""Costs by their key, and the reasons of those that there are not."""


def remember(file: Path | None) -> None:
    """Keeps costs in a JSON file between processes. A file that cannot be read or written is done without."""
    global _file
    _file = file
    _known.clear()
    if file is not None:
        with suppress(OSError, ValueError):
            known = json.loads(file.read_text())
            _known.update(known if isinstance(known, dict) else {})


def _written(key: str, cost: Cost | str) -> Cost | str:
    if _file is not None:
        _known[key] = cost if isinstance(cost, str) else list(astuple(cost))
        with suppress(OSError):
            _file.parent.mkdir(parents=True, exist_ok=True)
            part = _file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(_known))
            part.replace(_file)
    return cost


@lru_cache(maxsize=4096)
def _cost(
    topology: Topology, algorithm: str, collective: Collective, tile: tuple[int, ...], nbytes: float
) -> Cost | str:
    key = (
        f"{VERSION} {algorithm} {collective} {tile} {nbytes} {hashlib.sha256(repr(topology).encode()).hexdigest()[:24]}"
    )
    if key in _known:
        known = _known[key]
        return known if isinstance(known, str) else Cost(*known)
    try:
        return _written(key, _simulated_cost(topology, algorithm, collective, tile, nbytes))
    except ScheduleError as error:
        return _written(key, str(error))


VERSION = 4
"""Of schedules and simulator: another number forgets all costs in files."""


ELEMENTS = 25_557_032
"""Of the vector whose messages are counted: ResNet-50's gradient. Rounding to whole elements is nothing then."""


def _simulated_cost(
    topology: Topology, algorithm: str, collective: Collective, tile: tuple[int, ...], nbytes: float
) -> Cost:
    options: dict[str, object] = {"tile": tile} if tile and max(tile) > 1 else {}
    if "nbytes" in ALGORITHMS[algorithm].options:
        options["nbytes"] = nbytes or ENDLESS * topology.size
    schedule = build(algorithm, topology, collective, **options)
    build_rounds(schedule, ELEMENTS)  # refuses what no device would run
    mode = mode_of(schedule, topology)
    hops = simulate(schedule, topology, 0, mode).seconds
    free = replace(topology, latency_s=(0.0,) * len(topology.shape))
    vectors = float(simulate(schedule, free, 1.0, mode).seconds)
    return Cost(float(hops), vectors, len(schedule.steps), schedule.sent(ELEMENTS) / ELEMENTS)


def simulated(machine: Machine, algorithm: str, nbytes: float, tile: tuple[int, ...] = ()) -> float:
    """What `all_reduce_s` gives between chips, by the simulator itself on the calibrated links."""
    constants = machine.calibration
    size = len(machine.topology.shape)
    links = replace(
        machine.topology,
        latency_s=(constants.hop_s,) * size,
        bytes_per_s=tuple(constants.link * float(one) for one in machine.topology.bytes_per_s),
    )
    name = NAMES.get(algorithm, algorithm)
    options: dict[str, object] = {"tile": tile} if tile and max(tile) > 1 else {}
    if "nbytes" in ALGORITHMS[name].options:
        options["nbytes"] = nbytes
    schedule = build(name, links, "all-reduce", **options)
    started_s = len(schedule.steps) * constants.message_s
    return started_s + float(simulate(schedule, links, nbytes, mode_of(schedule, links)).seconds)


def mode_of(schedule: Schedule, topology: Topology) -> Mode:
    """How the simulator runs a schedule here: pipelined, where it can.

    Rings that skip the peers of a model-parallel tile interleave on the same links. Pipelined, a message holds all
    links of its way at once, and such rings would go one after the other, which links that cut messages into
    packets do not.
    """
    strided = bool(schedule.tile) and max(schedule.tile) > 1
    return "stepped" if strided or topology.size * schedule.pieces > CELLS else "pipelined"


def fitting(topology: Topology, tile: tuple[int, ...] = ()) -> dict[str, Cost]:
    """Every algorithm that sums on this machine, with its cost; ring-like ones with long tails included."""
    found = {}
    for name, builder in ALGORITHMS.items():
        if "all-reduce" not in builder.collectives or (tile and max(tile) > 1 and "tile" not in builder.options):
            continue
        try:
            found[name] = cost(topology, name, "all-reduce", tile)
        except MultipodError:
            continue
    return found
