"""The routes of a machine as arrays, and the order in which the messages of a step pass over them."""

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from multipod.errors import ScheduleError
from multipod.topology.routes import Routes, routes
from multipod.topology.topology import Number, Topology

PLANS_KEPT = 64
"""How many patterns of (src, dst) are remembered: a ring repeats one in every step, a torus a handful."""


class Round(NamedTuple):
    """Messages of a step of which no two share an arc: they are worked out at once.

    Attributes:
      messages: their places in the step, an index array or a slice.
      arcs: the arcs of their ways, way after way.
      starts: where each way begins in `arcs`.
      hops: the length of each way.
    """

    messages: np.ndarray | slice
    arcs: np.ndarray
    starts: np.ndarray
    hops: np.ndarray

    @property
    def single(self) -> bool:
        """Whether every message crosses one arc."""
        return len(self.arcs) == len(self.hops)

    def split(self, messages: np.ndarray) -> "Round":
        """The ways of some of the messages, in the order given."""
        hops = self.hops[messages]
        if (hops == 1).all():
            return Round(messages, self.arcs[self.starts[messages]], np.arange(len(hops)), hops)
        ends = np.cumsum(hops)
        starts = ends - hops
        within = np.arange(int(ends[-1])) - np.repeat(starts, hops)
        return Round(messages, self.arcs[np.repeat(self.starts[messages], hops) + within], starts, hops)


class StepWays:
    """The ways of a step's messages, whatever they carry.

    Attributes:
      ways: all of them, as one `Round` (although they may share arcs).
      latency: of each message's way, added over its arcs.
      unit_time: for how long one unit of the vector holds each way: that of its slowest arc.
    """

    def __init__(self, ways: Round, latency: np.ndarray, unit_time: np.ndarray, arcs: int) -> None:
        self.ways, self.latency, self.unit_time = ways, latency, unit_time
        self._arcs = arcs
        self.shared = len(ways.arcs) > 0 and int(np.bincount(ways.arcs).max()) > 1

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The messages in rounds: each as early as it can be after all earlier ones that share an arc with it."""
        return tuple(self._peel()) if self.shared else (self.ways,)

    def _peel(self) -> Iterator[Round]:
        left = np.arange(len(self.ways.hops))
        first = np.empty(self._arcs, np.int64)
        while len(left):
            ways = self.ways.split(left)
            message = np.repeat(left, ways.hops)
            first[ways.arcs[::-1]] = message[::-1]  # the last value stays: the earliest message of each arc
            free = np.logical_and.reduceat(first[ways.arcs] == message, ways.starts)
            yield self.ways.split(left[free])
            left = left[~free]


class Ways:
    """The ways between the chips of `topology`, looked up for all messages of a step at once.

    Times are in ticks. A tick is a second if numbers are floats. In exact reckoning it is such a
    fraction of one that all times are whole: sums of Python's integers are many times faster than
    sums of fractions.

    Attributes:
      topology: the machine.
      exact: whether numbers are exact.
      dtype: of arrays of numbers; object if exact.
      tick_s: how long a tick is.
      arcs: (tail, head) of each arc, in the order of `routes(topology).arcs`.
      latency: of each arc.
      unit_time: for how long one unit of the vector holds each arc.
    """

    def __init__(self, topology: Topology, bytes_per_unit: Number, exact: bool = False) -> None:
        self.topology = topology
        self.exact = exact
        self.dtype: np.dtype = np.dtype(object if exact else float)
        self._routes: Routes = routes(topology)
        arcs = self._routes.arcs
        self.arcs = [(arc.tail, arc.head) for arc in arcs]
        latency = [arc.latency_s for arc in arcs]
        if exact:
            unit_s = _each(lambda speed: Fraction(bytes_per_unit) / Fraction(speed), [arc.bytes_per_s for arc in arcs])
            exactly = _each(lambda seconds: Fraction(seconds), latency)
            ticks = math.lcm(*(number.denominator for number in {*exactly, *unit_s}))
            self.tick_s: Number = Fraction(1, ticks)
            self.latency = np.array(_each(lambda seconds: int(seconds * ticks), exactly), object)
            self.unit_time = np.array(_each(lambda seconds: int(seconds * ticks), unit_s), object)
        else:
            self.tick_s = 1.0
            self.latency = np.array([float(seconds) for seconds in latency])
            self.unit_time = np.array([float(bytes_per_unit) / float(arc.bytes_per_s) for arc in arcs])
        self._pairs = np.empty(0, np.int64)  # sorted; src * size + dst of every pair seen
        self._place = np.empty(0, np.int64)  # where the way of each is in the lists below
        self._all = Round(slice(None), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))
        self._latency = self._slowest = np.empty(0, self.dtype)
        self._plans: dict[tuple[bytes, bytes], StepWays] = {}

    def plan(self, src: np.ndarray, dst: np.ndarray) -> StepWays:
        """The plan of a step's messages.

        Raises:
          ScheduleError: a message to its own sender.
          TopologyError: there is no way between two chips.
        """
        key = src.tobytes(), dst.tobytes()
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= PLANS_KEPT:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[key] = self._make(src, dst)
        return plan

    def sum(self, arcs: np.ndarray, values: np.ndarray) -> np.ndarray:
        """For every arc of the machine, the sum of the `values` that stand beside it in `arcs`."""
        if not self.exact:
            return np.bincount(arcs, values, len(self.arcs))
        total = np.zeros(len(self.arcs), object)
        np.add.at(total, arcs, values)
        return total

    def _make(self, src: np.ndarray, dst: np.ndarray) -> StepWays:
        pairs = src.astype(np.int64) * self.topology.size + dst
        found = np.searchsorted(self._pairs, pairs)
        known = found < len(self._pairs)
        known[known] = self._pairs[found[known]] == pairs[known]
        if not known.all():
            self._learn(np.unique(pairs[~known]))
            found = np.searchsorted(self._pairs, pairs)
        place = self._place[found]
        ways = self._all.split(place)._replace(messages=slice(None))
        return StepWays(ways, self._latency[place], self._slowest[place], len(self.arcs))

    def _learn(self, pairs: np.ndarray) -> None:
        """Asks for the ways of new pairs and appends them to the lists."""
        for pair in pairs:
            if pair // self.topology.size == pair % self.topology.size:
                raise ScheduleError(
                    f"{self.topology}: chip {pair % self.topology.size} sends to itself. "
                    "Leave that send out: a chip has what it has."
                )
        ways = [self._routes.route(*map(int, divmod(pair, self.topology.size))) for pair in pairs]
        hops = np.concatenate([self._all.hops, np.array([len(way) for way in ways], np.int64)])
        arcs = np.concatenate([self._all.arcs, *(np.array(way, np.int64) for way in ways)])
        starts = np.cumsum(hops) - hops
        self._all = Round(slice(None), arcs, starts, hops)
        self._latency = np.add.reduceat(self.latency[arcs], starts)
        self._slowest = np.maximum.reduceat(self.unit_time[arcs], starts)
        self._place = np.concatenate([self._place, len(self._place) + np.arange(len(pairs))])
        self._pairs = np.concatenate([self._pairs, pairs])
        order = np.argsort(self._pairs)
        self._pairs, self._place = self._pairs[order], self._place[order]


Value = TypeVar("Value")
Result = TypeVar("Result")


def _each(change: Callable[[Value], Result], values: Sequence[Value]) -> list[Result]:
    """`change` of every value, worked out once for equal ones: there are many arcs of few kinds."""
    known = {value: change(value) for value in set(values)}
    return [known[value] for value in values]
