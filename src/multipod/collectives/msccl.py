"""Export to MSCCL: the XML that Microsoft's executors for NCCL and RCCL run on GPUs.

A GPU there runs *thread blocks*. Each has one peer to send to or to receive from and a list of instructions
that it does in order: `s` sends a chunk, `r` receives one over what is there, `rrc` receives one and adds it.
Across thread blocks there are only dependencies: an instruction may wait for one of another block of its GPU
(`depid`, `deps`), and for more of them through a `nop` each before it.

MSCCL has no chunks of unequal size, no Adasum, no tile that is skipped, and no more than `MOST_STEPS` instructions in a
block and `MOST_BLOCKS` blocks on a GPU: such schedules are refused. It has no links, speeds, failures or
routes: these are lost. Chips become ranks, in the order of the live chips; a broadcast must be called with the
schedule's root; buffers are in place.

Source: Cowan et al., 2022, arXiv:2201.11840; the readers in github.com/microsoft/msccl and
github.com/Azure/msccl-scheduler, which differ in how they spell reduce-scatter (here as in the former).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

import numpy as np

from multipod.collectives.files import save
from multipod.collectives.schedule import ADASUM, ADD, Schedule, Step
from multipod.collectives.tally import Tally
from multipod.errors import ScheduleError

MOST_STEPS = 256
MOST_BLOCKS = 216
MOST_BLOCKS_OF_CHANNEL = 32
MOST_CHANNELS = 32
MOST_COUNT = 64
"""What the readers take: instructions a block, blocks a GPU, blocks a channel, channels, chunks a message."""

NAMES = {
    "all-reduce": "allreduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "allgather",
    "broadcast": "broadcast",
}
MOST_BYTES = 1 << 40


class _Message(NamedTuple):
    """Chunks `first` to `stop - 1` from rank `src` to rank `dst`, added or copied."""

    src: int
    dst: int
    first: int
    stop: int
    add: bool


class _Instruction(NamedTuple):
    """`kind` on chunks `first` to `stop - 1`, after the instructions `after`: {block: number there}."""

    kind: str
    first: int
    stop: int
    after: dict[int, int]


class _Gpu:
    """The thread blocks of one GPU, (send, recv, channel) to instructions, while they are being filled."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int, int], list[_Instruction]] = {}
        self._number: dict[tuple[int, int, int], int] = {}
        self._writer: dict[int, tuple[int, int]] = {}
        self._readers: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._waited: dict[int, dict[int, int]] = defaultdict(dict)

    def send(self, message: _Message, channel: int) -> None:
        """Sends, once the chunks have been written."""
        chunks = range(message.first, message.stop)
        after = [self._writer[chunk] for chunk in chunks if chunk in self._writer]
        place = self._append((message.dst, -1, channel), "s", message, after)
        for chunk in chunks:
            self._readers[chunk].append(place)

    def receive(self, message: _Message, channel: int) -> None:
        """Receives, once what is there has been written and read."""
        chunks = range(message.first, message.stop)
        after = [self._writer[chunk] for chunk in chunks if chunk in self._writer]
        after += [reader for chunk in chunks for reader in self._readers[chunk]]
        place = self._append((-1, message.src, channel), "rrc" if message.add else "r", message, after)
        for chunk in chunks:
            self._writer[chunk] = place
            self._readers[chunk] = []

    def _append(
        self, key: tuple[int, int, int], kind: str, message: _Message, after: Sequence[tuple[int, int]]
    ) -> tuple[int, int]:
        block = self._number.setdefault(key, len(self._number))
        steps = self.blocks.setdefault(key, [])
        waited = self._waited[block]
        needs: dict[int, int] = {}
        for other, number in after:
            # A block does its instructions in order: its latest is enough, and so is having waited for a later one.
            if other != block and number > max(waited.get(other, -1), needs.get(other, -1)):
                needs[other] = number
        waited |= needs
        steps += [_Instruction("nop", 0, 0, {other: number}) for other, number in list(needs.items())[:-1]]
        steps.append(_Instruction(kind, message.first, message.stop, dict(list(needs.items())[-1:])))
        return block, len(steps) - 1


def write(schedule: Schedule, file: str | Path) -> None:
    """Writes `to_xml(schedule)` to a file, which is replaced when the new one is whole.

    Raises:
      ScheduleError: MSCCL cannot say it.
      OSError: it cannot be written.
    """
    save(file, (line.encode() for line in _lines(schedule, *_filled(schedule))))


def to_xml(schedule: Schedule) -> str:
    """The schedule as an MSCCL algorithm, with as few channels (a power of two) as its length allows.

    No order of events makes it deadlock as long as each connection of two blocks holds one message: with instructions
    ordered by (step, chunk, sends before receives), everything waits for something earlier only. Takes some 40 us and
    2 KB for each message.

    Raises:
      ScheduleError: MSCCL cannot say it; says why.
    """
    return "".join(_lines(schedule, *_filled(schedule)))


def _filled(schedule: Schedule) -> tuple[list[_Gpu], int]:
    """The thread blocks of each GPU, and the number of channels."""
    _check_sayable(schedule)
    channels = _least_channels(schedule)
    messages = list(_messages(schedule))
    while True:
        gpus = _fill(messages, len(schedule.topology.chips), channels)
        longest = max((len(steps) for gpu in gpus for steps in gpu.blocks.values()), default=0)
        if longest <= MOST_STEPS:
            break
        _check_more_channels(schedule, longest, channels)
        channels *= 2
    for rank, gpu in enumerate(gpus):
        of_channel = [sum(key[2] == channel for key in gpu.blocks) for channel in range(channels)]
        _check_blocks(schedule, rank, len(gpu.blocks), max(of_channel), channels)
    return gpus, channels


def _least_channels(schedule: Schedule) -> int:
    """The number of channels that is enough but for instructions that only wait; what can never do is refused early."""
    size = schedule.topology.size
    tally = Tally(1)
    for step in schedule.steps:
        wire = step.src.astype(np.int64) * size + step.dst
        tally.add(wire * MOST_CHANNELS + step.first % MOST_CHANNELS, -(-(step.stop - step.first) // MOST_COUNT))
    keys, messages = tally.sums()
    channels = 1
    while True:
        # Chunk k goes over channel k % channels.
        blocks, which = np.unique(keys // MOST_CHANNELS * channels + keys % channels, return_inverse=True)
        longest = int(np.bincount(which, messages).max(initial=0))
        if longest <= MOST_STEPS:
            break
        _check_more_channels(schedule, longest, channels)
        channels *= 2
    wires, channel = np.divmod(blocks, channels)
    ends = np.concatenate(np.divmod(wires, size))  # a block at each end
    of_channel, count = np.unique(ends * channels + np.tile(channel, 2), return_counts=True)
    chips, number = np.unique(ends, return_counts=True)
    for chip, blocks_of_chip in zip(chips.tolist(), number.tolist(), strict=True):
        most = int(count[of_channel // channels == chip].max())
        _check_blocks(schedule, schedule.topology.rank[chip], blocks_of_chip, most, channels)
    return channels


def _check_more_channels(schedule: Schedule, longest: int, channels: int) -> None:
    if channels == MOST_CHANNELS:
        raise ScheduleError(
            f"{schedule}: MSCCL takes {MOST_STEPS} instructions in a thread block, and with {channels} channels "
            f"the longest would have {longest}. Use an algorithm of fewer steps or pieces."
        )


def _check_blocks(schedule: Schedule, rank: int, blocks: int, of_channel: int, channels: int) -> None:
    if blocks > MOST_BLOCKS or of_channel > MOST_BLOCKS_OF_CHANNEL:
        raise ScheduleError(
            f"{schedule}: rank {rank} would need {blocks} thread blocks on {channels} channels, up to {of_channel} on "
            f"one; MSCCL takes {MOST_BLOCKS} and {MOST_BLOCKS_OF_CHANNEL}. Use an algorithm with fewer peers or steps."
        )


def _check_sayable(schedule: Schedule) -> None:
    chips = len(schedule.topology.chips)
    widths = np.diff(schedule.bounds)
    if (widths != widths[0]).any():
        raise ScheduleError(
            f"{schedule}: MSCCL has chunks of one size only, and here pieces are from {widths.min()} to {widths.max()} "
            f"parts of {schedule.denominator}. Build it with equal pieces."
        )
    if schedule.tile:
        raise ScheduleError(f"{schedule}: MSCCL sums over all GPUs, and here a tile is skipped. Build it without tile.")
    if schedule.collective in ("reduce-scatter", "all-gather") and schedule.pieces % chips:
        raise ScheduleError(
            f"{schedule}: MSCCL gives each GPU whole chunks, and {schedule.pieces} pieces do not split over {chips} "
            "chips. Build it with a multiple."
        )
    for number, step in enumerate(schedule.steps):
        if (step.op == ADASUM).any():
            raise ScheduleError(f"{schedule}: step {number} has adasum, which MSCCL does not know. Build it with add.")


def _messages(schedule: Schedule) -> Iterator[list[_Message]]:
    """Groups of messages that do not disturb each other: all of a group may send before any of it receives."""
    rank = schedule.topology.rank
    for step in schedule.steps:
        sent = [
            _Message(rank[src], rank[dst], first, stop, op == ADD)
            for src, dst, first, stop, op in zip(*(column.tolist() for column in step), strict=True)
        ]
        if _reads_what_it_writes(step):
            # Only chunk by chunk it is certain that nothing waits in a circle (see `to_xml`).
            single = [m._replace(first=k, stop=k + 1) for m in sent for k in range(m.first, m.stop)]
            for chunk in sorted({m.first for m in single}):
                yield [m for m in single if m.first == chunk]
        else:
            yield sorted(
                (
                    m._replace(first=k, stop=min(k + MOST_COUNT, m.stop))
                    for m in sent
                    for k in range(m.first, m.stop, MOST_COUNT)
                ),
                key=lambda m: m.first,
            )


def _reads_what_it_writes(step: Step) -> bool:
    def cells(chip: np.ndarray) -> set[tuple[int, int]]:
        ranges = zip(chip.tolist(), step.first.tolist(), step.stop.tolist(), strict=True)
        return {(c, piece) for c, first, stop in ranges for piece in range(first, stop)}

    return not cells(step.src).isdisjoint(cells(step.dst))


def _fill(groups: Sequence[Sequence[_Message]], ranks: int, channels: int) -> list[_Gpu]:
    gpus = [_Gpu() for _ in range(ranks)]
    for group in groups:
        for message in group:
            gpus[message.src].send(message, message.first % channels)
        for message in group:
            gpus[message.dst].receive(message, message.first % channels)
    return gpus


def _lines(schedule: Schedule, gpus: Sequence[_Gpu], channels: int) -> Iterator[str]:
    """The XML as the readers want it: no declaration, no space before `/>`, a fixed order of attributes."""
    pieces, kind = schedule.pieces, schedule.collective
    buffer = "i" if kind in ("all-reduce", "reduce-scatter") else "o"
    name = quoteattr(schedule.algorithm).encode("ascii", "xmlcharrefreplace").decode()
    yield (
        f'<algo name={name} proto="Simple" nchannels="{channels}" nchunksperloop="{pieces}" '
        f'ngpus="{len(gpus)}" coll="{NAMES[kind]}" inplace="1" outofplace="0" minBytes="0" maxBytes="{MOST_BYTES}">\n'
    )
    for rank, gpu in enumerate(gpus):
        i_chunks = pieces // len(gpus) if kind == "all-gather" else pieces
        o_chunks = pieces // len(gpus) if kind == "reduce-scatter" else pieces
        yield f'  <gpu id="{rank}" i_chunks="{i_chunks}" o_chunks="{o_chunks}" s_chunks="0">\n'
        awaited = {place for steps in gpu.blocks.values() for one in steps for place in one.after.items()}
        for block, ((send, recv, channel), steps) in enumerate(gpu.blocks.items()):
            yield f'    <tb id="{block}" send="{send}" recv="{recv}" chan="{channel}">\n'
            for number, one in enumerate(steps):
                depid, deps = next(iter(one.after.items()), (-1, -1))
                offset = -1 if one.kind == "nop" else one.first
                yield (
                    f'      <step s="{number}" type="{one.kind}" srcbuf="{buffer}" srcoff="{offset}" dstbuf="{buffer}" '
                    f'dstoff="{offset}" cnt="{one.stop - one.first}" depid="{depid}" deps="{deps}" '
                    f'hasdep="{int((block, number) in awaited)}"/>\n'
                )
            yield "    </tb>\n"
        yield "  </gpu>\n"
    yield "</algo>\n"
