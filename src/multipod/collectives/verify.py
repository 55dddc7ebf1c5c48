"""`verify`: proves that a schedule does what its collective promises, by following every contribution."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple, NoReturn

import numpy as np

from multipod.collectives.adasum import combinations
from multipod.collectives.checks import tile_peers
from multipod.collectives.schedule import ADASUM, COPY, OPS, Schedule, Step
from multipod.collectives.tally import Tally
from multipod.errors import ScheduleError, TopologyError
from multipod.topology.routes import Routes, dependency_cycle, routes
from multipod.topology.topology import Topology

BATCH_SENDS = 1 << 21
BATCH_CELLS = 1 << 22
STATE_BYTES = 1 << 25
"""How much is looked at together: pieces sent and cells (chip, piece) of one batch, bytes of contribution sets. With
these a proof stays below some 300 MB, whatever the schedule's size."""

MOST_CHIPS = 1 << 15
"""Above it the contribution sets of a single piece would take more than 128 MiB, and a proof some ten times that."""

WIRING = ("shape", "wrap", "failed_chips", "failed_links", "switched", "shared")
"""The fields of a topology on which it depends whether a schedule is right; the others only make it slow or fast."""

SHOWN = 8


@dataclass(frozen=True)
class Proof:
    """What `verify` found out about a schedule that is right.

    Attributes:
      schedule: its name.
      chips: that are live.
      steps: of the schedule.
      sends: messages.
      pieces: that the vector is cut into.
      pieces_sent: by all messages together.
      patterns: different ways in which a piece travels; each is followed once.
      root: of a broadcast; None for other collectives.
      longest_way_hops: of any message; 1 if all go to neighbours, 0 if there are none.
      multi_hop_sends: messages that pass over other chips.
      busiest_link: (tail, head) of the arc that carries most, nodes as in `multipod.topology.routes`, or None.
      busiest_share: of the vector, that it carries.
      deadlock: arcs that messages could hold while they wait for each other in a circle, if each arc has one
        buffer; () when that cannot happen.
    """

    schedule: str
    chips: int
    steps: int
    sends: int
    pieces: int
    pieces_sent: int
    patterns: int
    root: int | None
    longest_way_hops: int
    multi_hop_sends: int
    busiest_link: tuple[int, int] | None
    busiest_share: Fraction
    deadlock: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        parts = [
            f"proven on {_counted(self.chips, 'chip')}",
            _counted(self.steps, "step"),
            _counted(self.sends, "send"),
        ]
        parts.append(f"{_counted(self.pieces, 'piece')} in {_counted(self.patterns, 'pattern')}")
        if self.root is not None:
            parts.append(f"root {self.root}")
        if self.longest_way_hops > 1:
            parts.append(f"{_counted(self.multi_hop_sends, 'send')} over up to {self.longest_way_hops} hops")
        elif self.sends:
            parts.append("single hops")
        if self.busiest_link is not None:
            tail, head = self.busiest_link
            parts.append(f"busiest link {tail}->{head} carries {float(self.busiest_share):.6g} of the vector")
        if self.deadlock:
            parts.append("its routes can deadlock unless arcs have more than one buffer")
        return f"{self.schedule}: " + ", ".join(parts)


def verify(schedule: Schedule, topology: Topology | None = None) -> Proof:
    """Proves that `schedule` does its collective on its topology.

    Follows the set of chips whose contribution each cell (chip, piece) holds. Nothing may be missing at the end,
    nothing may be added twice on the way (to add sets that overlap is refused, to copy over them is not),
    no cell written twice in a step, and every message needs two live ends and a live way between them.
    `adasum` counts contributions as `add` does; besides, the slices that are combined in a step must make up two whole
    vectors, each place once, on the chips that these come from: else nobody could know their dot products. The root of
    a broadcast is the chip that all hold at the end.
    Pieces of no width hold nothing, so nothing is asked of them.

    Pieces never meet, so each is followed alone, and of pieces that travel alike only the first. Costs
    some 0.2 us for each piece sent, and chips / 64 words for each piece sent in a pattern of its own.

    Args:
      schedule: to prove; its steps are made several times over, if they are made lazily.
      topology: the machine that it will run on, if that is not taken from the schedule; their wiring must be equal.

    Raises:
      ScheduleError: it is wrong; names the step, the chip, the piece, and who is missing or counted twice.
    """
    if topology is not None:
        _check_same_wiring(schedule, topology)
    if len(schedule.topology.chips) > MOST_CHIPS:
        raise ScheduleError(
            f"{schedule}: {len(schedule.topology.chips):,} chips are too many to prove; the most are {MOST_CHIPS:,}. "
            "Prove its algorithm on a smaller machine."
        )
    tile_peers(schedule.algorithm, schedule.topology, schedule.collective, schedule.tile)
    survey = _Survey(schedule)
    goal = _Goal(schedule)
    patterns = 0
    for first, stop in _batches(survey.sends_of_piece, len(schedule.topology.chips)):
        patterns += _prove_pieces(schedule, survey, goal, first, stop)
    if survey.combines:
        combinations(schedule)
    return _proof(schedule, survey, goal, patterns)


def _check_same_wiring(schedule: Schedule, topology: Topology) -> None:
    other = [name for name in WIRING if getattr(schedule.topology, name) != getattr(topology, name)]
    if other:
        raise ScheduleError(
            f"{schedule}: a schedule for another topology than {topology}: {', '.join(other)} differ. "
            "Build one for this machine."
        )


class _Survey:
    """One look at all sends: refuses what needs no memory of other sends, and counts the rest.

    Attributes:
      rank: int64 [topology size]; -1 for failed chips.
      sends_of_piece: int64 [pieces].
      combines: whether any step combines by Adasum.
      span: (first piece, last piece + 1) that each step sends; (0, 0) for none.
      pairs: (src * size + dst, messages, width) of each pair of chips in use; the width is what all its messages
        carry of the vector, over the denominator.
      ways: the route of each pair.
    """

    def __init__(self, schedule: Schedule) -> None:
        topology = schedule.topology
        self.size = topology.size
        self.rank = np.full(self.size, -1, np.int64)
        self.rank[list(topology.chips)] = np.arange(len(topology.chips))
        self.sends = 0
        self.combines = False
        self.span: list[tuple[int, int]] = []
        # Sums of widths may exceed 64 bits where the denominator is large, so they are kept in two halves.
        tally = Tally(3)
        changes = np.zeros(schedule.pieces + 1, np.int64)
        for number, step in enumerate(schedule.steps):
            _check_step(schedule, number, step, self.rank)
            if not len(step.src):
                self.span.append((0, 0))
                continue
            self.combines |= bool((step.op == ADASUM).any())
            self.span.append((int(step.first.min()), int(step.stop.max())))
            code = step.src.astype(np.int64) * self.size + step.dst
            width = schedule.bounds[step.stop] - schedule.bounds[step.first]
            tally.add(code, np.ones_like(code), width & 0x7FFFFFFF, width >> 31)
            # Not `bincount`, which costs as much as there are pieces: a file may have a million, and as many steps.
            np.add.at(changes, step.first, 1)
            np.add.at(changes, step.stop, -1)
            self.sends += len(step.src)
        self.sends_of_piece = np.cumsum(changes)[:-1]
        sums = zip(*(column.tolist() for column in tally.sums()), strict=True)
        self.pairs = [(code, messages, high * 2**31 + low) for code, messages, low, high in sums]
        self.routes = routes(topology)
        self.ways = [_way(schedule, self.routes, *divmod(code, self.size)) for code, *_ in self.pairs]

    def steps_with(self, first: int, stop: int) -> Iterator[int]:
        """The numbers of the steps that may send one of the pieces `first` to `stop - 1`."""
        return (number for number, (low, high) in enumerate(self.span) if low < stop and first < high)


def _check_step(schedule: Schedule, number: int, step: Step, rank: np.ndarray) -> None:
    """Refuses sends of step `number` that are wrong by themselves."""
    size, pieces = len(rank), schedule.pieces
    if len({np.shape(column) for column in step}) != 1 or np.ndim(step.src) != 1:
        raise ScheduleError(f"{schedule}: step {number} has columns of unequal length. Make it with make_step.")
    if not len(step.src):
        return

    def refuse(wrong: np.ndarray, what: str) -> None:
        if wrong.any():
            send = {name: int(column[np.argmax(wrong)]) for name, column in step._asdict().items()}
            raise ScheduleError(f"{schedule}: step {number}: " + what.format(**send, last=send["stop"] - 1))

    message = "the send {src}->{dst} of pieces {first} to {last} "
    for end in (step.src, step.dst):
        refuse((end < 0) | (end >= size), message + f"leaves the machine, whose chips are 0 to {size - 1}.")
    refuse(rank[step.src] < 0, message + "begins at chip {src}, which has failed. Send between live chips only.")
    refuse(rank[step.dst] < 0, message + "ends at chip {dst}, which has failed. Send between live chips only.")
    refuse(step.src == step.dst, message + "goes nowhere. Leave it out.")
    refuse((step.first < 0) | (step.stop > pieces), message + f"leaves the vector, whose pieces are 0 to {pieces - 1}.")
    refuse(step.first >= step.stop, message + "carries nothing. Leave it out.")
    refuse((step.op < 0) | (step.op >= len(OPS)), message + f"has op {{op}}; there are 0 to {len(OPS) - 1}: {OPS}.")


def _way(schedule: Schedule, found: Routes, src: int, dst: int) -> tuple[int, ...]:
    try:
        return found.route(src, dst)
    except TopologyError as error:
        meant = (number for number, sent in enumerate(schedule.steps) if ((sent.src == src) & (sent.dst == dst)).any())
        step = next(meant)
        raise ScheduleError(f"{schedule}: step {step}: chip {src} cannot send to chip {dst}. {error}") from error


def _batches(sends_of_piece: np.ndarray, chips: int) -> Iterator[tuple[int, int]]:
    """Ranges of pieces that are looked at together: few enough sends and cells each."""
    ends = np.cumsum(sends_of_piece)
    most = max(1, min(BATCH_CELLS // chips, 1 << 16))
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        stop = int(np.searchsorted(ends, before + BATCH_SENDS, side="right"))
        stop = min(max(stop, first + 1), first + most)
        yield first, stop
        first = stop


class _Sends(NamedTuple):
    """Single pieces sent, ordered by (piece, level, dst), as equally long arrays.

    All of one piece and level happen at once, and levels one after the other. `piece` counts from
    the first of the batch; `src` and `dst` are ranks.
    """

    piece: np.ndarray
    level: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    op: np.ndarray
    step: np.ndarray

    def at(self, chosen: np.ndarray) -> "_Sends":
        return _Sends(*(column[chosen] for column in self))


def _prove_pieces(schedule: Schedule, survey: _Survey, goal: "_Goal", first: int, stop: int) -> int:
    """Proves the pieces `first` to `stop - 1`, and returns how many patterns they have."""
    sends = _collect(schedule, survey, first, stop)
    ends = np.searchsorted(sends.piece, np.arange(stop - first + 1))
    alike = np.stack([sends.level, sends.src, sends.dst, sends.op], axis=1, dtype=np.int32)
    seen: dict[tuple[bytes, tuple[int, int]], int] = {}
    for k in range(stop - first):
        if schedule.bounds[first + k] < schedule.bounds[first + k + 1]:
            seen.setdefault((alike[ends[k] : ends[k + 1]].tobytes(), goal.owners(first + k)), k)
    chosen = np.fromiter(seen.values(), np.int64, len(seen))
    del alike, seen
    chips = len(schedule.topology.chips)
    together = max(1, STATE_BYTES // (chips * goal.words * 8))
    for few in (chosen[at : at + together] for at in range(0, len(chosen), together)):
        rows = np.concatenate([np.arange(ends[k], ends[k + 1]) for k in few])
        part = sends.at(rows)
        local = np.repeat(np.arange(len(few)), ends[few + 1] - ends[few])
        state = _follow(schedule, part._replace(piece=local), few + first, goal)
        goal.check(state, few + first)
    return len(chosen)


def _collect(schedule: Schedule, survey: _Survey, first: int, stop: int) -> _Sends:
    """The sends of pieces `first` to `stop - 1`, one a piece, levelled and ordered.

    The level of a send is the least that keeps what it reads and what it must not overtake: it comes
    after the writes that it reads, and not before reads of what it overwrites. So pieces that travel alike at
    different times have equal levels, and the outcome is that of the steps.
    """
    rank, chips = survey.rank, len(schedule.topology.chips)
    cells = (stop - first) * chips
    written, read, last = (np.zeros(cells, np.int32) for _ in range(3))
    found: list[_Sends] = []
    for number in survey.steps_with(first, stop):
        step = schedule.steps[number]
        row, piece = _single_pieces(step, first, stop)
        if not len(row):
            continue
        src, dst = rank[step.src[row]], rank[step.dst[row]]
        source, target = piece * chips + src, piece * chips + dst
        count = np.arange(len(row), dtype=np.int32)
        last[target] = count
        if (last[target] != count).any():
            one, two = _first_double(target)
            _refuse_double(schedule, number, step, row[one], row[two], first + int(piece[one]))
        level = np.maximum(np.maximum(written[source], written[target]) + 1, read[target])
        while True:  # reads of this step, too, come no later than the writes over what they read
            np.maximum.at(read, source, level)
            later = np.maximum(level, read[target])
            if (later == level).all():
                break
            level = later
        written[target] = level
        columns = (piece, level, src, dst, step.op[row], np.full(len(row), number))
        found.append(_Sends(*(column.astype(np.int32) for column in columns)))
    if not found:
        return _Sends(*(np.zeros(0, np.int32) for _ in _Sends._fields))
    del written, read, last
    whole = [np.concatenate(columns) for columns in zip(*found, strict=True)]
    found.clear()
    sends = _Sends(*whole)
    # No two of a piece and level have one target, so the order is total.
    key = (sends.piece.astype(np.int64) * (int(sends.level.max()) + 1) + sends.level) * chips + sends.dst
    return sends.at(np.argsort(key))


def _single_pieces(step: Step, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """(send, piece - first) for each piece in the range that the step sends."""
    begin, end = np.maximum(step.first, first), np.minimum(step.stop, stop)
    row = np.flatnonzero(end > begin)
    count = (end - begin)[row]
    begin = begin[row].astype(np.int64) - first
    if (count == 1).all():
        return row, begin
    before = np.cumsum(count) - count
    return np.repeat(row, count), np.repeat(begin - before, count) + np.arange(count.sum())


def _first_double(target: np.ndarray) -> tuple[int, int]:
    order = np.argsort(target, kind="stable")
    at = int(np.argmax(target[order][1:] == target[order][:-1]))
    return int(order[at]), int(order[at + 1])


def _refuse_double(schedule: Schedule, number: int, step: Step, one: int, two: int, piece: int) -> NoReturn:
    raise ScheduleError(
        f"{schedule}: step {number}: chip {step.dst[one]} is sent piece {piece} twice in one step, by chips "
        f"{step.src[one]} and {step.src[two]}. Put one of these sends into another step."
    )


def _follow(schedule: Schedule, sends: _Sends, pieces: np.ndarray, goal: "_Goal") -> np.ndarray:
    """The set of contributions in each cell after the last step: uint64 [pieces, chips, words].

    `pieces` are the numbers in the schedule of those that `sends` numbers from 0.
    """
    state = np.tile(goal.alone, (len(pieces), 1, 1))
    flat = state.reshape(-1, goal.words)
    order = np.argsort(sends.level, kind="stable")
    ends = np.cumsum(np.bincount(sends.level)).tolist()
    chips = len(goal.chips)
    source, target = sends.piece * chips + sends.src, sends.piece * chips + sends.dst
    copies = sends.op == COPY
    for begin, end in pairwise(ends):
        now = order[begin:end]
        carried, adds = flat[source[now]], np.flatnonzero(~copies[now])
        if len(adds):
            more = carried if len(adds) == len(now) else carried[adds]
            held = flat[target[now[adds]]]
            both = more & held
            if both.any():
                twice = now[adds[np.argmax(both.any(axis=1))]]
                _refuse_twice(schedule, sends.at(twice[None]), int(pieces[sends.piece[twice]]), goal, both)
            carried[adds] = more | held
        flat[target[now]] = carried
    return state


def _refuse_twice(schedule: Schedule, send: _Sends, piece: int, goal: "_Goal", both: np.ndarray) -> NoReturn:
    src, dst = goal.chips[int(send.src[0])], goal.chips[int(send.dst[0])]
    twice = goal.members(both[np.argmax(both.any(axis=1))])
    raise ScheduleError(
        f"{schedule}: step {send.step[0]}: chip {dst} adds piece {piece} from chip {src}, and both hold the "
        f"contribution of {_named(twice)} already, which would count twice. Leave this send out, or let it copy."
    )


class _Goal:
    """What each chip must hold at the end, as bit sets of ranks."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.chips = schedule.topology.chips
        self.words = -(-len(self.chips) // 64)
        self.root: int | None = None
        ranks = np.arange(len(self.chips))
        self.alone = np.zeros((len(ranks), self.words), np.uint64)
        self.alone[ranks, ranks // 64] = np.uint64(1) << (ranks % 64).astype(np.uint64)
        self.sums = np.zeros_like(self.alone)
        for group in schedule.groups:
            members = [schedule.topology.rank[chip] for chip in group]
            self.sums[members] = np.bitwise_or.reduce(self.alone[members], axis=0)

    def owners(self, piece: int) -> tuple[int, int]:
        """The ranks, first and last, whose part of the vector has some of `piece`; (0, 0) where that plays no role."""
        if self.schedule.collective not in ("reduce-scatter", "all-gather"):
            return 0, 0
        p, denominator = len(self.chips), self.schedule.denominator
        begin, end = (int(bound) * p for bound in self.schedule.bounds[piece : piece + 2])
        return begin // denominator, -(-end // denominator) - 1

    def check(self, state: np.ndarray, pieces: np.ndarray) -> None:
        """Refuses a final state, uint64 [pieces, chips, words], that is not the goal."""
        kind = self.schedule.collective
        if kind == "all-reduce":
            self._compare(state, self.sums, pieces, slice(None))
        elif kind == "broadcast":
            self._compare(state, self._root_of(state, pieces), pieces, slice(None))
        else:
            for k, piece in enumerate(pieces.tolist()):
                first, last = self.owners(piece)
                if kind == "reduce-scatter":
                    self._compare(state[k : k + 1], self.sums, pieces[k : k + 1], slice(first, last + 1))
                else:
                    self._check_one_owner(piece, first, last)
                    self._compare(state[k : k + 1], self.alone[first], pieces[k : k + 1], slice(None))

    def members(self, value: np.ndarray) -> list[int]:
        """The chips in a set."""
        bits = np.unpackbits(value.astype("<u8").view(np.uint8), bitorder="little")
        return [self.chips[rank] for rank in np.flatnonzero(bits)]

    def _root_of(self, state: np.ndarray, pieces: np.ndarray) -> np.ndarray:
        """The set of the root alone; every piece must come from the same chip."""
        for k, piece in enumerate(pieces.tolist()):
            held = self.members(state[k, 0])
            if len(held) != 1:
                self._refuse(0, piece, f"the sum over {_named(held)}, and a broadcast sums nothing. Use copies only.")
            if self.root is None:
                self.root = held[0]
            elif self.root != held[0]:
                self._refuse(
                    0, piece, f"what chip {held[0]} began with, and other pieces come from {self.root}. "
                    "Let all pieces come from one root."
                )  # fmt: skip
        return self.alone[0] if self.root is None else self.alone[self.schedule.topology.rank[self.root]]

    def _check_one_owner(self, piece: int, first: int, last: int) -> None:
        if first != last:
            raise ScheduleError(
                f"{self.schedule}: piece {piece} has parts that begin on {_named(self.chips[first : last + 1])}, so no "
                f"chip begins with it whole. Cut the vector at all multiples of 1/{len(self.chips)}."
            )

    def _compare(self, state: np.ndarray, goal: np.ndarray, pieces: np.ndarray, ranks: slice) -> None:
        wanted = np.broadcast_to(goal, state.shape)[:, ranks]
        held = state[:, ranks]
        if np.array_equal(held, wanted):
            return
        k, row = (int(at[0]) for at in np.nonzero((held != wanted).any(axis=2)))
        missing = self.members(wanted[k, row] & ~held[k, row])
        extra = self.members(held[k, row] & ~wanted[k, row])
        what = []
        if missing:
            what.append(f"without the contribution of {_named(missing)}")
        if extra:
            what.append(f"with that of {_named(extra)}, which does not belong there")
        self._refuse((ranks.start or 0) + row, int(pieces[k]), " and ".join(what) + ". Send what it lacks.")

    def _refuse(self, rank: int, piece: int, what: str) -> NoReturn:
        raise ScheduleError(f"{self.schedule}: chip {self.chips[rank]} ends with piece {piece} {what}")


def _proof(schedule: Schedule, survey: _Survey, goal: _Goal, patterns: int) -> Proof:
    size, arcs = survey.size, survey.routes.arcs
    hops = [sum(arcs[arc].head < size for arc in way) for way in survey.ways]
    load: dict[int, int] = {}
    for way, (*_, width) in zip(survey.ways, survey.pairs, strict=True):
        for arc in way:
            load[arc] = load.get(arc, 0) + width
    busiest = max(load, key=lambda arc: (load[arc], -arc), default=None)
    cycle = dependency_cycle(survey.ways) or ()
    root = goal.root
    if schedule.collective == "broadcast" and root is None:
        root = schedule.topology.chips[0]
    return Proof(
        schedule=str(schedule),
        chips=len(goal.chips),
        steps=len(survey.span),
        sends=survey.sends,
        pieces=schedule.pieces,
        pieces_sent=int(survey.sends_of_piece.sum()),
        patterns=patterns,
        root=root,
        longest_way_hops=max(hops, default=0),
        multi_hop_sends=sum(messages for (_, messages, _), far in zip(survey.pairs, hops, strict=True) if far > 1),
        busiest_link=None if busiest is None else (arcs[busiest].tail, arcs[busiest].head),
        busiest_share=Fraction(0 if busiest is None else load[busiest], schedule.denominator or 1),
        deadlock=tuple((arcs[arc].tail, arcs[arc].head) for arc in cycle),
    )


def _named(chips: Sequence[int]) -> str:
    if not chips:
        return "no chip"
    more = f" and {len(chips) - SHOWN} more" if len(chips) > SHOWN else ""
    return f"chip{'s' * (len(chips) > 1)} {', '.join(map(str, chips[:SHOWN]))}{more}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
