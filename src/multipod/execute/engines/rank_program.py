"""What one rank does of a schedule, and the loop that does it over any transport with non-blocking messages.

Rank r is the live chip of rank r. There is no barrier between steps: a send waits for what it carries, and
nothing else. `torch.py` and `mpi.py` bring the transports.
"""

import threading
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from multipod.collectives.schedule import ADASUM, ADD, Schedule
from multipod.errors import ScheduleError

SEGMENT_BYTES = 2 << 20
"""Longer messages are cut to this, so that a segment is added and sent on while the next one travels. Over gloo, 16 MB
on 2 and 4 ranks on two cores, 2 and 4 MiB were the fastest of 256 KiB to whole messages (Xeon with AMX, 2026-11-21)."""

LATE_BYTES = 128 << 10
"""Shorter copies are received a step ahead into a scratch vector if their place is still in use; longer ones wait for
it. A copy of 8 MB costs more than to wait: over gloo on 2 ranks a fifth of the sum (Xeon with AMX, 2026-11-21)."""

IN_PLACE = -1
SCRATCHES = 3  # turns whose receives may be under way: the one before, this one, the next


class Send(NamedTuple):
    """Elements `start` to `stop - 1` go to rank `peer`, once the receives `needs` of the turn before are applied."""

    peer: int
    tag: int
    start: int
    stop: int
    needs: tuple[int, ...]


class Receive(NamedTuple):
    """Elements `start` to `stop - 1` come from rank `peer` and are added, or copied.

    They land at `scratch` in a scratch vector, or at once where they belong (`IN_PLACE`). From the scratch vector they
    are applied once the sends `after` of the same turn have left, which read what was there before. One that is `late`
    is posted only when the turn before is over.
    """

    peer: int
    tag: int
    start: int
    stop: int
    add: bool
    scratch: int
    after: tuple[int, ...]
    late: bool = False


class Turn(NamedTuple):
    """All that one rank does in one step."""

    receives: tuple[Receive, ...]
    sends: tuple[Send, ...]


@dataclass(frozen=True, eq=False)
class RankProgram:
    """One rank's part of a schedule, for a vector of one length: what it sends and receives, turn by turn.

    Attributes:
      turns: the steps in which the rank has something to do.
      scratch: elements that each of the `SCRATCHES` vectors must have which the turns use one after the other.
    """

    turns: tuple[Turn, ...]
    scratch: int


class Transfer(NamedTuple):
    """A segment on its way: `buffer` is a slice of the vector or of the scratch vector."""

    buffer: Any
    peer: int
    tag: int


Wait = Callable[[], object]
Post = Callable[[Sequence[Transfer], Sequence[Transfer]], Sequence[Wait]]
"""Starts receives and sends, and returns a function for each, receives first, that waits for its end."""


@lru_cache(maxsize=256)
def build_rank_program(schedule: Schedule, rank: int, count: int, segment: int, late: int = 1) -> RankProgram:
    """Builds the part of `rank` in `schedule` for a vector of `count` elements, its messages cut to `segment` elements.

    Copies of `late` elements and more may be posted late.

    `run_rank_program` ends turn t - 2 before it begins turn t, and then posts the receives of turn t + 1. So a send has
    to look for what it needs in the turn before alone, a receive for what may be in its way in two, and there are three
    scratch vectors.

    Raises:
      ScheduleError: an operator that these engines do not have.
    """
    elements = schedule.elements(count)
    tags: Counter[tuple[int, int]] = Counter()
    steps = (_messages_of_step(schedule, rank, k, elements, segment, tags) for k in range(len(schedule.steps)))
    turns: list[Turn] = []
    for part in steps:
        if part.receives or part.sends:
            needs = _overlaps(part.sends, turns[-1].receives if turns else ())
            sends = tuple(send._replace(needs=need) for send, need in zip(part.sends, needs, strict=True))
            turns.append(Turn(_choose_landings(part, turns[-2:], late), sends))
    landings = (r for turn in turns for r in turn.receives if r.scratch != IN_PLACE)
    return RankProgram(tuple(turns), max((r.scratch + r.stop - r.start for r in landings), default=0))


def get_rank_program(schedule: Schedule, rank: int, ranks: int, count: int, itemsize: int) -> RankProgram:
    """Returns the program of `rank` among `ranks` for a vector of `count` elements of `itemsize` bytes.

    Raises:
      ScheduleError: the schedule is for another number of ranks, or has an operator that these engines do not have.
    """
    chips = len(schedule.topology.chips)
    if chips != ranks:
        raise ScheduleError(
            f"{schedule} is for {chips} ranks, and the group has {ranks}. Build one for a machine of {ranks} live "
            "chips, or give the group that it was built for."
        )
    return build_rank_program(schedule, rank, count, max(1, SEGMENT_BYTES // itemsize), LATE_BYTES // itemsize)


NOTE_BYTES = 256
NOTE_TAG = 0
MESSAGE_TAGS = 1  # and up


class SumNote(NamedTuple):
    """What a rank sends before the first sum of a kind: `text` must be the same on all ranks.

    Messages of a sum have tags from `tag` on, other ones for other notes: should the ranks part later, their messages
    do not meet, and the time-out of the transport ends them.
    """

    text: bytes
    tag: int


@lru_cache(maxsize=256)
def make_note(schedule: Schedule, count: int, dtype: str, layers: str = "") -> SumNote:
    """Makes the note for a sum of `count` elements; its text has `NOTE_BYTES` bytes. `layers` names the tensors."""
    what = f"{count} x {dtype.removeprefix('torch.')}" + (f" in {layers}" if layers else "")
    text = f"{what} by {schedule}, {schedule.pieces} pieces, {len(schedule.steps)} steps"
    sent = text.encode("ascii", "replace")[:NOTE_BYTES].ljust(NOTE_BYTES)
    return SumNote(sent, MESSAGE_TAGS + zlib.crc32(schedule.bounds.tobytes(), zlib.crc32(sent)) % (1 << 30))


def assert_same_notes(
    note: SumNote,
    rank: int,
    ranks: int,
    post: Post,
    make: Callable[[bytes], Any],
    read: Callable[[Any], bytes],
    tensors: Sequence[str] = (),
) -> None:
    """Sends the note to all ranks, and refuses to go on unless all have sent the same one.

    Args:
      note: of this rank.
      rank: this one, among `ranks`.
      ranks: how many.
      post: of the transport.
      make: a flat array of the transport with these bytes.
      read: the bytes of such an array.
      tensors: what this rank's vector is made of, for the message; sent only if the notes differ.

    Raises:
      ScheduleError: the notes differ. Names each rank's note, and the first tensor that differs.
    """

    def all_gather(mine: bytes, lengths: Sequence[int]) -> list[bytes]:
        """The bytes of all ranks; rank r's are `lengths[r]`."""
        buffers = {peer: make(bytes(length)) for peer, length in enumerate(lengths) if peer != rank}
        incoming = [Transfer(buffer, peer, NOTE_TAG) for peer, buffer in buffers.items()]
        sent = make(mine)
        for wait in post(incoming, [Transfer(sent, peer, NOTE_TAG) for peer in buffers]):
            wait()
        return [mine if peer == rank else read(buffers[peer]) for peer in range(ranks)]

    texts = all_gather(note.text, [NOTE_BYTES] * ranks)
    if len({*texts}) == 1:
        return
    listing = "\n".join(tensors).encode() or b"\n"
    lengths = [
        int.from_bytes(length, "little") for length in all_gather(len(listing).to_bytes(8, "little"), [8] * ranks)
    ]
    lists = [text.decode().split("\n") for text in all_gather(listing, lengths)]
    each = "; ".join(f"rank {peer} {text.decode('ascii').strip()}" for peer, text in enumerate(texts))
    raise ScheduleError(
        f"all-reduce on rank {rank} of {ranks}: the ranks do not give the same: {each}"
        f"{describe_first_difference(lists)}. Give vectors of one length and dtype, and one schedule, on all ranks."
    )


def describe_first_difference(lists: Sequence[Sequence[str]]) -> str:
    """`; tensor 3 is head [37] on rank 2, and body [37] on rank 0`; empty if the lists are the same, or not known."""
    for peer, theirs in enumerate(lists):
        for number, (first, other) in enumerate(zip_longest(lists[0], theirs, fillvalue="absent")):
            if first != other and first and other:
                return f"; tensor {number} is {other} on rank {peer}, and {first} on rank 0"
    return ""


def run_rank_program(
    program: RankProgram, vector: Any, scratch: Sequence[Any], post: Post, *, grouped: bool = False
) -> None:
    """Runs one rank's program in place on `vector`, a flat array or tensor, with `scratch` vectors of its kind.

    With `grouped` all messages of a turn are posted in one call, as NCCL wants it. Else each send is posted as soon as
    it has what it needs, and receives are posted a turn ahead, but for the late ones, so that no sender has to wait for
    them. It cannot deadlock: before all messages of a step are posted, a rank waits only for those of earlier steps.

    Cost: the bytes of the schedule; one addition for each element that is received to be added.
    """
    older = before = _TurnInProgress(Turn((), ()), vector, scratch[0])
    states = (_TurnInProgress(turn, vector, scratch[t % SCRATCHES]) for t, turn in enumerate(program.turns))
    ahead = next(states, None)
    if ahead is not None and not grouped:
        ahead.receive(post, late=False)
    while ahead is not None:
        older.end()
        now, ahead = ahead, next(states, None)
        if grouped:
            before.apply(need for send in now.turn.sends for need in send.needs)
            if any(receive.late for receive in now.turn.receives):
                before.end()
            now.start(post)
        else:
            if ahead is not None:
                ahead.receive(post, late=False)
            for send, message in zip(now.turn.sends, now.outgoing(), strict=True):
                before.apply(send.needs)
                now.sends += post((), (message,))
            if any(receive.late for receive in now.turn.receives):
                before.end()
                now.receive(post, late=True)
        older, before = before, now
    older.end()
    before.end()


class Scratch(threading.local):
    """Scratch vectors, kept for the next sum of this thread: fresh memory costs a page fault for every 4 KiB.

    What is kept is `SCRATCHES` times what a rank receives in a step, for the longest vector so far of each kind.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}

    def take(self, kind: Hashable, length: int, make: Callable[[int], Any]) -> list[Any]:
        """`SCRATCHES` vectors of `length` elements; `make(n)` makes one of n elements of this kind."""
        kept = self._kept.get(kind)
        if kept is None or len(kept) < SCRATCHES * length:
            kept = self._kept[kind] = make(SCRATCHES * length)
        return [kept[k * length : (k + 1) * length] for k in range(SCRATCHES)]


class _TurnInProgress:
    """A turn under way."""

    def __init__(self, turn: Turn, vector: Any, scratch: Any) -> None:
        self.receives: list[Wait | None] = [None] * len(turn.receives)
        self.sends: list[Wait | None] = []
        self.turn, self._vector, self._scratch = turn, vector, scratch

    def receive(self, post: Post, *, late: bool) -> None:
        """Posts the receives that are late, or the others."""
        numbers = [k for k, receive in enumerate(self.turn.receives) if receive.late == late]
        for k, wait in zip(numbers, post([self._incoming(k) for k in numbers], ()), strict=True):
            self.receives[k] = wait

    def start(self, post: Post) -> None:
        """Posts all messages in one call."""
        count = len(self.receives)
        waits = post([self._incoming(k) for k in range(count)], self.outgoing())
        self.receives[:], self.sends[:] = waits[:count], waits[count:]

    def _incoming(self, k: int) -> Transfer:
        receive = self.turn.receives[k]
        return Transfer(self._landing(receive), receive.peer, receive.tag)

    def outgoing(self) -> list[Transfer]:
        return [Transfer(self._vector[send.start : send.stop], send.peer, send.tag) for send in self.turn.sends]

    def _landing(self, receive: Receive) -> Any:
        if receive.scratch == IN_PLACE:
            return self._vector[receive.start : receive.stop]
        return self._scratch[receive.scratch : receive.scratch + receive.stop - receive.start]

    def apply(self, numbers: Iterable[int]) -> None:
        """Waits for these receives and puts them where they belong, unless that was done before."""
        for k in numbers:
            wait, self.receives[k] = self.receives[k], None
            if wait is None:
                continue
            wait()
            receive = self.turn.receives[k]
            self._wait_for_sends(receive.after)
            if receive.scratch == IN_PLACE:
                continue
            target = self._vector[receive.start : receive.stop]
            if receive.add:
                target += self._landing(receive)
            else:
                target[:] = self._landing(receive)

    def end(self) -> None:
        self.apply(range(len(self.receives)))
        self._wait_for_sends(range(len(self.sends)))

    def _wait_for_sends(self, numbers: Iterable[int]) -> None:
        for k in numbers:
            wait, self.sends[k] = self.sends[k], None
            if wait is not None:
                wait()


def _messages_of_step(
    schedule: Schedule, rank: int, k: int, elements: np.ndarray, segment: int, tags: Counter[tuple[int, int]]
) -> Turn:
    """Step k as one rank sees it, before anything is known about what waits for what."""
    step, chip, ranks = schedule.steps[k], schedule.topology.chips[rank], schedule.topology.rank
    segments: list[tuple[int, int, int, int]] = []
    for send in np.flatnonzero((step.src == chip) | (step.dst == chip)).tolist():
        if step.op[send] == ADASUM:
            raise ScheduleError(
                f"{schedule}: step {k} combines by Adasum, and this engine only adds and copies. Run it on NumPy."
            )
        begin, end = int(elements[step.first[send]]), int(elements[step.stop[send]])
        lows = range(begin, end, segment)
        segments += [(i, send, low, min(low + segment, end)) for i, low in enumerate(lows)]
    receives, sends = [], []
    # First segments first, so that the messages of a step travel side by side. Both ends count the same tags.
    for _, send, low, stop in sorted(segments):
        src, dst = ranks[int(step.src[send])], ranks[int(step.dst[send])]
        tag = tags[src, dst]
        tags[src, dst] += 1
        if dst == rank:
            receives.append(Receive(src, tag, low, stop, bool(step.op[send] == ADD), IN_PLACE, ()))
        if src == rank:
            sends.append(Send(dst, tag, low, stop, ()))
    return Turn(tuple(receives), tuple(sends))


def _choose_landings(part: Turn, before: Sequence[Turn], late: int) -> tuple[Receive, ...]:
    """Chooses where each receive lands.

    In place if it is a copy, and nothing under way touches its elements, now or when a late one is posted; else in a
    scratch vector.
    """
    after_sends = _overlaps(part.receives, part.sends)
    under_way: list[Send | Receive] = []
    for turn in before:
        under_way += (*turn.sends, *turn.receives)
    busy = _overlaps(part.receives, under_way)
    landed, offset = [], 0
    for receive, after, others in zip(part.receives, after_sends, busy, strict=True):
        if not receive.add and not after and not others:
            landed.append(receive)
            continue
        if not receive.add and not after and receive.stop - receive.start >= late:
            landed.append(receive._replace(late=True))
            continue
        landed.append(receive._replace(scratch=offset, after=after))
        offset += receive.stop - receive.start
    return tuple(landed)


def _overlaps(ours: Sequence[Send | Receive], others: Sequence[Send | Receive]) -> list[tuple[int, ...]]:
    """For each of `ours`, the numbers of those among `others` that share an element with it."""
    if not ours or not others:
        return [()] * len(ours)
    starts, stops = (np.array([getattr(other, end) for other in others]) for end in ("start", "stop"))
    return [tuple(np.flatnonzero((starts < span.stop) & (stops > span.start)).tolist()) for span in ours]
