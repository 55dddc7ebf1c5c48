"""Runs a schedule on the links of a machine, without devices: how long it takes and what each link carries.

The model is alpha-beta on full-duplex links. An *arc* is one direction of a link (or of a port to a
switch): it has a latency and a bandwidth and serves one message at a time. A message holds all arcs of
its way for bytes / (bandwidth of the slowest) and arrives the latencies of its way later (cut-through:
the arcs are held together, not one after the other). A message of 0 bytes still arrives no sooner than
its latencies: it stands for the word that the data are there.

Two modes. `stepped`: each step is a barrier and lasts the longest latency among its ways plus the
longest transfer on one arc. `pipelined`: a message leaves when all that earlier steps wrote to its
pieces has arrived at its sender and the arcs of its way are free; every arc serves its messages in the order of
the schedule: by step, then by (dst, src, first, stop, op). That order belongs to the messages and not to their place
in a step, so listing the sends of a step differently changes nothing. What is not modelled: the
arithmetic of the chips, a sender's or receiver's overhead per message, and the memory in which a chip
keeps what arrives before it has sent the older value on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from multipod.collectives.schedule import Schedule, Step
from multipod.errors import ScheduleError, TopologyError
from multipod.simulate.bounds import Bounds, bounds
from multipod.simulate.ways import Round, StepWays, Ways
from multipod.topology.topology import Number, Topology

Mode = Literal["pipelined", "stepped"]
MODES: tuple[Mode, ...] = ("pipelined", "stepped")

CELLS = 2**28
"""Most cells (chip, piece) that pipelined mode follows: 2 GiB of times."""
CELLS_AT_ONCE = 2**21
"""Most cells of one step whose times are looked up together."""
RECORDS = 20_000_000
"""Most messages of a timeline: 1.2 GB of arrays, twice that while they are joined."""


class Timeline(NamedTuple):
    """Every message of a simulation, in the order of the schedule, as equally long arrays.

    A message leaves at `start_s`, holds the arcs of its way until `end_s`, and has arrived at `arrival_s`.
    """

    step: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    op: np.ndarray
    nbytes: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    arrival_s: np.ndarray


@dataclass(frozen=True, eq=False)
class Simulation:
    """What came of a schedule on a machine.

    Attributes:
      schedule: what was run.
      topology: on what.
      nbytes: of the vector on each chip.
      mode: "pipelined" or "stepped".
      exact: whether the numbers are exact fractions.
      seconds: until the last message has arrived.
      steps: of the schedule.
      messages: sent, all in all.
      arcs: (tail, head) of every arc that works; numbers from topology.size on are switches and their ports.
      arc_bytes: what each arc carried.
      arc_busy_s: for how long each arc was held.
    """

    schedule: Schedule = field(repr=False)
    topology: Topology = field(repr=False)
    nbytes: Number
    mode: Mode
    exact: bool
    seconds: float | Fraction
    steps: int
    messages: int
    arcs: tuple[tuple[int, int], ...] = field(repr=False)
    arc_bytes: np.ndarray = field(repr=False)
    arc_busy_s: np.ndarray = field(repr=False)

    @cached_property
    def link_bytes(self) -> dict[tuple[int, int], float | Fraction]:
        """{(tail, head): bytes carried} for every arc that works, idle ones included."""
        return dict(zip(self.arcs, self.arc_bytes.tolist(), strict=True))

    @cached_property
    def busiest(self) -> tuple[int, int] | None:
        """The arc that was held longest, the first of them if there are several; None if none carried anything."""
        held = max(self.arc_busy_s, default=0)
        return self.arcs[self.arc_busy_s.tolist().index(held)] if held else None

    @cached_property
    def chip_busy_s(self) -> np.ndarray:
        """[topology.size] for how long the arcs out of each chip were held, added over its arcs.

        A chip with four links can so be busy for up to four times `seconds`. What it only passes on counts too.
        """
        busy = np.zeros(self.topology.size, self.arc_busy_s.dtype)
        tails = np.array([tail for tail, _ in self.arcs], np.int64)
        chips = tails < self.topology.size
        np.add.at(busy, tails[chips], self.arc_busy_s[chips])
        return busy

    @cached_property
    def bounds(self) -> Bounds:
        """What no schedule of this collective can beat on this machine; worked out when first asked for."""
        return bounds(self.topology, self.nbytes, self.schedule.collective, self.schedule.tile)

    @property
    def percent_of_bound(self) -> float:
        """100 if this is as fast as the best bound allows, 50 if it takes twice as long."""
        return float(100 * self.bounds.seconds / self.seconds) if self.seconds else 100.0

    def timeline(self) -> Timeline:
        """When each message left and arrived: the simulation is run again and written down.

        In stepped mode all messages of a step last as long as the step.

        Raises:
          ScheduleError: more than 20 million messages.
        """
        if self.messages > RECORDS:
            raise ScheduleError(
                f"{self.schedule}: a timeline of {self.messages:,} messages does not fit in memory. "
                f"Take a smaller machine or an algorithm with fewer than {RECORDS:,} messages."
            )
        return _Run(self.schedule, self.topology, self.nbytes, self.mode, self.exact).timeline()


def simulate(
    schedule: Schedule, topology: Topology, nbytes: Number, mode: Mode = "pipelined", exact: bool = False
) -> Simulation:
    """Runs `schedule` on the links of `topology` with a vector of `nbytes` on each chip.

    The sizes of pieces are not rounded to elements, so any size will do. Proving the schedule is not done here:
    that is `verify`'s. The machine may be another than the schedule was built for as long as its grid and its live
    chips are the same; messages over links that it lacks take a way around. Time and memory: some 30 ns a message
    and 10 ns a cell sent; pipelined mode keeps 8 bytes for each chip and piece.

    Args:
      schedule: what to run.
      topology: on what.
      nbytes: 0 or more; 0 gives the latency of the schedule.
      mode: "pipelined" or "stepped", see the top of this file.
      exact: reckon in fractions. Numbers of the machine that were given as float are taken as they are in
        binary. A few times slower.

    Raises:
      ScheduleError: a schedule for other chips, sends that cannot be, a size that is negative or no finite
        number, too many cells for pipelined mode.
      TopologyError: two chips that have no way to each other.
    """
    if mode not in MODES:
        raise ScheduleError(f"mode={mode!r} is no mode of simulation. Known: {', '.join(MODES)}.")
    nbytes = check_bytes(nbytes)
    run = _Run(schedule, topology, nbytes, mode, exact)
    for _ in run.steps():
        pass
    return Simulation(
        schedule=schedule,
        topology=topology,
        nbytes=nbytes,
        mode=mode,
        exact=exact,
        seconds=Fraction(run.clock.now * run.ways.tick_s) if exact else float(run.clock.now),
        steps=len(schedule.steps),
        messages=run.messages,
        arcs=tuple(run.ways.arcs),
        arc_bytes=run.arc_units * run.bytes_per_unit,
        arc_busy_s=run.clock.arc_busy * run.ways.tick_s,
    )


def check_bytes(nbytes: Number) -> Number:
    """`nbytes` if it is a size.

    Raises:
      ScheduleError: it is negative, infinite, or no number.
    """
    if isinstance(nbytes, np.generic):
        nbytes = nbytes.item()
    if not isinstance(nbytes, int | float | Fraction) or isinstance(nbytes, bool) or not 0 <= nbytes < float("inf"):
        raise ScheduleError(f"nbytes={nbytes!r} is no size of a vector. Give a finite number of bytes, 0 or more.")
    return nbytes


def _check_fits(schedule: Schedule, topology: Topology) -> None:
    built = schedule.topology
    if built.shape != topology.shape:
        differ = f"for a grid of {_times(built.shape)} chips, and {topology} is one of {_times(topology.shape)}"
    elif built.failed_chips != topology.failed_chips:
        chip = min(built.failed_chips ^ topology.failed_chips)
        failed, whole = ("there", "here") if chip in built.failed_chips else (f"on {topology}", "there")
        differ = f"for other chips: {topology.coordinates(chip)} has failed {failed}, and works {whole}"
    else:
        return
    raise ScheduleError(f"{schedule} is {differ}. Build the schedule for this machine.")


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


class _Run:
    """One pass through the steps of a schedule."""

    def __init__(self, schedule: Schedule, topology: Topology, nbytes: Number, mode: Mode, exact: bool) -> None:
        _check_fits(schedule, topology)
        self.schedule, self.topology = schedule, topology
        self.bytes_per_unit = Fraction(nbytes) / schedule.denominator if exact else float(nbytes) / schedule.denominator
        self.ways = Ways(topology, self.bytes_per_unit, exact)
        self.clock = (_Pipelined if mode == "pipelined" else _Stepped)(schedule, self.ways)
        self.arc_units: np.ndarray = np.zeros(len(self.ways.arcs), self.ways.dtype)
        self.messages = 0

    def steps(self) -> Iterator[tuple[int, Step, np.ndarray, "Times"]]:
        """Runs the steps that send anything, yielding number, sends, units and times of each."""
        for number, given in enumerate(self.schedule.steps):
            if not len(given.src):
                continue
            self._check(number, given)
            step, plan = self._plan(number, given)
            units = (self.schedule.bounds[step.stop] - self.schedule.bounds[step.first]).astype(self.ways.dtype)
            self.arc_units += self.ways.sum(plan.ways.arcs, np.repeat(units, plan.ways.hops))
            self.messages += len(units)
            yield number, step, units, self.clock.run(step, plan, units)

    def timeline(self) -> Timeline:
        """Runs the steps and writes down every message."""
        parts = [
            Timeline(
                np.full(len(units), number), *step, units * self.bytes_per_unit, *(t * self.ways.tick_s for t in times)
            )
            for number, step, units, times in self.steps()
        ]
        if not parts:
            none = np.empty(0, np.int64)
            return Timeline(*[none] * 6, *[none.astype(self.ways.dtype)] * 4)
        return Timeline(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def _check(self, number: int, step: Step) -> None:
        """Refuses what would read outside of the arrays; whether the sums come out right is `verify`'s question."""
        size, pieces = self.topology.size, self.schedule.pieces
        ends = np.concatenate([step.src, step.dst])
        if ends.min() < 0 or ends.max() >= size:
            raise ScheduleError(
                f"{self.schedule}, step {number}: there is no chip {ends[(ends < 0) | (ends >= size)][0]}. "
                f"Chips are numbered 0 to {size - 1}."
            )
        if step.first.min() < 0 or step.stop.max() > pieces or (step.first >= step.stop).any():
            k = int(np.argmax((step.first < 0) | (step.stop > pieces) | (step.first >= step.stop)))
            raise ScheduleError(
                f"{self.schedule}, step {number}: chip {step.src[k]} sends the pieces from {step.first[k]} to before "
                f"{step.stop[k]} to chip {step.dst[k]}. Send at least one of the pieces 0 to {pieces - 1}."
            )

    def _plan(self, number: int, step: Step) -> tuple[Step, StepWays]:
        """The step with its ways. Where messages share an arc they stand in the order in which the arc serves them."""
        try:
            plan = self.ways.plan(step.src, step.dst)
        except (ScheduleError, TopologyError) as error:
            raise type(error)(f"{self.schedule}, step {number}: {error}") from error
        if not plan.shared:
            return step, plan
        order = np.lexsort((step.op, step.stop, step.first, step.src, step.dst))
        step = Step(*(column[order] for column in step))
        return step, self.ways.plan(step.src, step.dst)


Times = tuple[np.ndarray, np.ndarray, np.ndarray]
"""When each message of a step leaves, sets its arcs free, and arrives; in ticks."""


class _Stepped:
    """Every step is a barrier."""

    def __init__(self, schedule: Schedule, ways: Ways) -> None:
        self.ways = ways
        self.now = 0
        self.arc_busy: np.ndarray = np.zeros(len(ways.arcs), ways.dtype)

    def run(self, step: Step, plan: StepWays, units: np.ndarray) -> Times:
        """Takes the step; returns the same times for all of its messages."""
        load = self.ways.sum(plan.ways.arcs, np.repeat(units, plan.ways.hops)) * self.ways.unit_time
        self.arc_busy += load
        begin = self.now
        self.now = begin + plan.latency.max() + load.max()
        start: np.ndarray = np.full(len(units), begin, self.ways.dtype)
        end: np.ndarray = np.full(len(units), self.now, self.ways.dtype)
        return start, end, end


class _Pipelined:
    """Messages leave when their pieces and their arcs are ready, in the order of the schedule on every arc."""

    def __init__(self, schedule: Schedule, ways: Ways) -> None:
        self.ways = ways
        self.pieces = schedule.pieces
        cells = ways.topology.size * self.pieces
        if cells > CELLS:
            raise ScheduleError(
                f"{schedule}: pipelined mode follows {ways.topology.size:,} chips x {self.pieces:,} pieces, "
                f"which needs {8 * cells / 2**30:.1f} GiB. Use the stepped mode, which needs none of it."
            )
        self.ready: np.ndarray = np.zeros(
            cells, ways.dtype
        )  # when each cell's value is there; cell = chip * pieces + piece
        self.free: np.ndarray = np.zeros(len(ways.arcs), ways.dtype)  # when each arc has served all that it was given
        self.now = 0
        self.arc_busy: np.ndarray = np.zeros(len(ways.arcs), ways.dtype)

    def run(self, step: Step, plan: StepWays, units: np.ndarray) -> Times:
        """Takes the step; returns the times of its messages."""
        hold = units * plan.unit_time
        start = self._when_there(step)  # of the state before the step: nothing of this step is written yet
        for part in plan.rounds:
            self._serve(part, start, hold)
        end = start + hold
        arrival = end + plan.latency
        self._write(step, arrival)
        self.arc_busy += self.ways.sum(plan.ways.arcs, np.repeat(hold, plan.ways.hops))
        self.now = max(self.now, arrival.max())
        return start, end, arrival

    def _serve(self, part: Round, start: np.ndarray, hold: np.ndarray) -> None:
        """Puts off `start` until the arcs are free, and holds them."""
        free = self.free[part.arcs]
        if not part.single:
            free = np.maximum.reduceat(free, part.starts)
        begin = start[part.messages] = np.maximum(start[part.messages], free)
        end = begin + hold[part.messages]
        self.free[part.arcs] = end if part.single else np.repeat(end, part.hops)

    def _when_there(self, step: Step) -> np.ndarray:
        """When the last of each message's pieces is at its sender."""
        there: np.ndarray = np.empty(len(step.src), self.ways.dtype)
        for part, cells, starts in self._cells(step.src, step.first, step.stop):
            times = self.ready[cells]
            there[part] = times if len(starts) == len(cells) else np.maximum.reduceat(times, starts)
        return there

    def _write(self, step: Step, arrival: np.ndarray) -> None:
        for part, cells, starts in self._cells(step.dst, step.first, step.stop):
            times = arrival[part]
            if len(starts) < len(cells):
                times = np.repeat(times, (step.stop - step.first)[part])
            np.maximum.at(self.ready, cells, times)  # not `ready[cells] = ...`: a bad schedule may name a cell twice

    def _cells(
        self, chip: np.ndarray, first: np.ndarray, stop: np.ndarray
    ) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """(which messages, their cells one message after the other, where each begins), some messages at a time."""
        begin = chip.astype(np.int64) * self.pieces + first
        counts = (stop - first).astype(np.int64)
        ends = np.cumsum(counts)
        if ends[-1] == len(chip):
            yield slice(None), begin, ends - 1
            return
        done = 0
        while done < len(chip):
            before = int(ends[done - 1]) if done else 0
            until = max(done + 1, int(np.searchsorted(ends, before + CELLS_AT_ONCE, side="right")))
            part = slice(done, until)
            starts = ends[part] - counts[part] - before
            within = np.arange(int(ends[until - 1]) - before) - np.repeat(starts, counts[part])
            yield part, np.repeat(begin[part], counts[part]) + within, starts
            done = until
