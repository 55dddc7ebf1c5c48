"""Adasum by ranks that pass messages: what the engines of NumPy, PyTorch and MPI are made of.

There are two forms. The *tree* runs the schedule: in each step that combines, two nodes' vectors are exchanged, their
dots are taken piece by piece as the pieces arrive, while they are in the cache, then summed over the nodes' ranks, and
then the vectors are blended. The *Gram form* has no levels: every rank gets its share of all vectors, the p x p dots of
each tensor are summed over all ranks, and of these follow the weights of the one sum that is left to do. Both take the
bytes of a sum; `choose_form` chooses.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from multipod.collectives.adasum import combinations, dot_sums, group_sum, halving, split
from multipod.collectives.schedule import ADD, COPY, Schedule, even_bounds, make_step
from multipod.errors import ScheduleError
from multipod.execute.adasum.arithmetic import Arithmetic, flag_broken
from multipod.execute.adasum.operator import Layers, coefficients, gram_weights, refuse_poisoned

PIECE_BYTES = 1 << 20
"""Messages are cut to this, so that their dots are taken while they are in the cache."""

Form = Literal["tree", "gram"]

GRAM_MOST = 16
"""Ranks up to which there is the Gram form on hosts: its arithmetic grows with their number, for each element."""

GRAM_BYTES = 1 << 20
"""Vectors of up to so many bytes are combined by the Gram form: it waits less often, and does more arithmetic. Over
MPI, 4 ranks on two shared cores, it was ahead of the tree at 16 KiB, 256 KiB and 1 MiB (2026-11-21)."""


class Span(NamedTuple):
    """Elements `begin` to `end` - 1, that travel from or to rank `peer`."""

    peer: int
    begin: int
    end: int


class Engine(Protocol):
    """What a transport brings to `combine_vector`."""

    @property
    def piece_bytes(self) -> int:
        """Messages are cut to this; 0: they travel whole."""
        ...

    def exchange(self, vector: Any, sends: Sequence[Span], receives: Sequence[Span]) -> Iterator[Any]:
        """Sends spans of the vector, and gives what arrived for each of `receives`, in their order.

        What it gave stays until the next exchange. At its end all has left.
        """
        ...

    def run(self, vector: Any, schedule: Schedule) -> None:
        """Does this rank's part of a schedule of sums and copies, in place."""
        ...


def combine_vector(
    engine: Engine,
    math: Arithmetic,
    vector: Any,
    schedule: Schedule,
    rank: int,
    layers: Layers,
    form: Form | None = None,
) -> None:
    """Runs one rank's part of a schedule that combines, in place; by default in the form that `choose_form` says.

    Raises:
      PoisonedError: on all ranks, if a tensor of any is not finite; the vector is then of no use.
      ScheduleError: layers that do not fit the vector, or the Gram form of a schedule that has none.
    """
    layers.check(len(vector))
    chosen = form or choose_form(schedule, len(vector) * math.itemsize(vector))
    if chosen == "gram" and not has_gram(schedule):
        raise ScheduleError(
            f"{schedule}: no Gram form: it is for 2 to {GRAM_MOST} ranks that combine along the tree of their numbers, "
            'without means inside nodes. Ask for form="tree".'
        )
    flags, good = (_combine_by_gram if chosen == "gram" else _combine_by_tree)(
        engine, math, vector, schedule, rank, layers
    )
    ranks = len(schedule.topology.chips)
    if ranks == 1:
        refuse_poisoned(str(schedule), flags[None], layers.names)
    elif not good:
        table = math.zeros(vector, ranks * len(flags))
        for layer in np.flatnonzero(flags).tolist():
            table[rank * len(flags) + layer] = 1
        engine.run(table, build_flag_sum(schedule))
        refuse_poisoned(f"{schedule} on rank {rank}", math.numbers(table).reshape(ranks, -1), layers.names)


def choose_form(schedule: Schedule, nbytes: int) -> Form:
    """Chooses the faster form for a vector of `nbytes`; of two ranks both send the same messages."""
    few = 2 < len(schedule.topology.chips) <= GRAM_MOST
    return "gram" if few and nbytes <= GRAM_BYTES and has_gram(schedule) else "tree"


def describe_combination(layers: Layers | None, form: Form | None) -> str:
    """Describes a combination in the text that ranks compare before the first of a kind; empty for a plain sum."""
    return "" if layers is None else layers.text + (f" by {form}" if form else "")


# The tree.


def _combine_by_tree(
    engine: Engine, math: Arithmetic, vector: Any, schedule: Schedule, rank: int, layers: Layers
) -> tuple[np.ndarray, bool]:
    """Returns which of this rank's tensors are not finite, and whether all of all ranks are."""
    # The first combination tells whether this rank's tensors are finite, if its vector is its own until then.
    flags = None if begins_alone(schedule, rank) else flag_broken(math, vector, layers)
    good, piece = True, engine.piece_bytes // math.itemsize(vector)
    for number, steps in split(schedule):
        if steps is not None:
            engine.run(vector, steps)
            continue
        part = find_rank_combination(schedule, number, rank, layers, piece)
        dots = math.zeros(vector, 3 * len(layers.sizes))
        arrived = []
        if part is not None:
            arriving = engine.exchange(vector, part.sends, part.receives)
            for span, cuts, theirs in zip(part.receives, part.cuts, arriving, strict=True):
                math.add_dots(dots, vector[span.begin : span.end], theirs, cuts, part.left)
                arrived.append(theirs)
        adder = dot_sums(schedule)[number]
        if adder is not None:
            engine.run(dots, adder)
        if part is None:
            continue
        sums = math.numbers(dots).reshape(-1, 3)
        if flags is None:
            flags = ~np.isfinite(sums[:, 1 if part.left else 2])
        # What is not finite on one rank makes the dots of all combinations that it is part of infinite or NaN.
        good = _blend(math, vector, part, arrived, dots)
    assert flags is not None
    return flags, good


class RankCombination(NamedTuple):
    """What one rank does in a step that combines.

    Attributes:
      sends, receives: pieces, in an order that is the same at both ends.
      cuts: of each that is received, int64 [parts, 3]: tensor, from, to, counted from the beginning of the piece.
      left: its own vector is the left one.
      own, others: how many leaves are under its own vector, and under the other.
    """

    sends: tuple[Span, ...]
    receives: tuple[Span, ...]
    cuts: tuple[np.ndarray, ...]
    left: bool
    own: int
    others: int


@lru_cache(maxsize=256)
def find_rank_combination(
    schedule: Schedule, number: int, rank: int, layers: Layers, piece: int = 0
) -> RankCombination | None:
    """Finds the part of `rank` in step `number`, None if it has none; in pieces of `piece` elements (0: uncut)."""
    mine = next((met for met in combinations(schedule)[number] if rank in met.left or rank in met.right), None)
    if mine is None:
        return None
    step, elements, ranks = schedule.steps[number], schedule.elements(layers.ends[-1]), schedule.topology.rank
    chip = schedule.topology.chips[rank]

    def spans(ours: np.ndarray, theirs: np.ndarray) -> tuple[Span, ...]:
        uncut = sorted(
            Span(ranks[int(theirs[k])], int(elements[step.first[k]]), int(elements[step.stop[k]]))
            for k in np.flatnonzero(ours == chip).tolist()
        )
        return tuple(part for span in uncut for part in cut_span(span, piece))

    left = rank in mine.left
    sizes = len(mine.left), len(mine.right)
    receives = spans(step.dst, step.src)
    cuts = tuple(cut_at_layers(layers, span) for span in receives)
    return RankCombination(spans(step.src, step.dst), receives, cuts, left, *(sizes if left else sizes[::-1]))


def cut_span(span: Span, most: int) -> list[Span]:
    """Cuts a span into pieces of at most `most` elements (0: uncut); none if it is empty."""
    begins = range(span.begin, span.end, most or max(1, span.end - span.begin))
    return [span._replace(begin=begin, end=min(begin + (most or span.end), span.end)) for begin in begins]


def cut_at_layers(layers: Layers, span: Span) -> np.ndarray:
    """int64 [parts, 3]: tensor, from, to of each tensor's part of a span, counted from its beginning."""
    parts = [(layer, begin - span.begin, end - span.begin) for layer, begin, end in layers.cut(span.begin, span.end)]
    return np.array(parts, np.int64).reshape(-1, 3)


def _blend(math: Arithmetic, vector: Any, part: RankCombination, arrived: Sequence[Any], dots: Any) -> bool:
    """Combines what arrived into `vector`, given the sums of dots; returns whether all of these are finite."""
    leaves = (part.own, part.others) if part.left else (part.others, part.own)
    own, other = coefficients(dots.reshape(-1, 3), *leaves, math.xp)[:: 1 if part.left else -1]
    # The last pieces first: they are what the cache still holds.
    for span, cuts, theirs in reversed([*zip(part.receives, part.cuts, arrived, strict=True)]):
        math.blend(vector[span.begin : span.end], theirs, cuts, own, other)
    return bool(np.isfinite(math.numbers(dots)).all())


def combine_in_lockstep(
    schedule: Schedule,
    number: int,
    held: dict[int, np.ndarray],
    layers: Layers,
    run: Callable[[Schedule, dict[int, np.ndarray]], dict[int, np.ndarray]],
) -> None:
    """Runs step `number`, which combines, for all chips at once, in place on `held`; `run` adds dots by a schedule."""
    math, chips = Arithmetic(), schedule.topology.chips
    piece = PIECE_BYTES // held[chips[0]].itemsize
    parts = {chip: find_rank_combination(schedule, number, rank, layers, piece) for rank, chip in enumerate(chips)}
    arrived = {
        chip: [held[chips[span.peer]][span.begin : span.end].copy() for span in part.receives] if part else []
        for chip, part in parts.items()
    }
    dots = {chip: math.zeros(held[chip], 3 * len(layers.sizes)) for chip in chips}
    for chip, part in parts.items():
        for span, cuts, theirs in zip(part.receives, part.cuts, arrived[chip], strict=True) if part else ():
            math.add_dots(dots[chip], held[chip][span.begin : span.end], theirs, cuts, part is not None and part.left)
    adder = dot_sums(schedule)[number]
    sums = dots if adder is None else run(adder, dots)
    for chip, part in parts.items():
        if part is not None:
            _blend(math, held[chip], part, arrived[chip], sums[chip])


@lru_cache(maxsize=256)
def begins_alone(schedule: Schedule, rank: int) -> bool:
    """Whether the first combination of `rank` has its own vector alone on one side."""
    for step in combinations(schedule):
        for met in step:
            if rank in met.members:
                return met.left == (rank,) or met.right == (rank,)
    return False


@lru_cache(maxsize=64)
def build_flag_sum(schedule: Schedule) -> Schedule:
    """Builds a schedule that sums a short vector over all ranks."""
    return Schedule("all-reduce", "flags", schedule.topology, 1, np.arange(2), group_sum(schedule.topology.chips))


# The Gram form.


@lru_cache(maxsize=64)
def has_gram(schedule: Schedule) -> bool:
    """Whether the schedule combines 2 to `GRAM_MOST` single ranks along the tree of their numbers."""
    if not 2 <= len(schedule.topology.chips) <= GRAM_MOST or any((step.op == ADD).any() for step in schedule.steps):
        return False

    def tree(combining: Schedule) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
        return {(met.left, met.right) for step in combinations(combining) for met in step}

    return tree(schedule) == tree(halving(schedule.topology))


def _combine_by_gram(
    engine: Engine, math: Arithmetic, vector: Any, schedule: Schedule, rank: int, layers: Layers
) -> tuple[np.ndarray, bool]:
    """Returns which of this rank's tensors are not finite, and whether all of all ranks are."""
    ranks, back = len(schedule.topology.chips), build_share_broadcast(schedule)
    part = _build_gram_exchange(schedule, rank, layers, engine.piece_bytes // math.itemsize(vector))
    arriving = engine.exchange(vector, part.sends, part.receives)
    gram = math.zeros(vector, len(layers.sizes) * ranks * ranks)
    rows: list[list[Any]] = []
    for span, cuts in zip(part.own, part.cuts, strict=True):
        rows.append([vector[span.begin : span.end] if peer == rank else next(arriving) for peer in range(ranks)])
        math.add_gram(gram, rows[-1], cuts)
    list(arriving)  # no more comes, and at its end all has left
    engine.run(gram, build_flag_sum(schedule))
    dots = math.numbers(gram).reshape(-1, ranks, ranks)
    good = bool(np.isfinite(dots).all())
    if good:
        weights = gram_weights(dots, schedule.topology.chips)
        for span, cuts, pieces in zip(part.own, part.cuts, rows, strict=True):
            math.mix(vector[span.begin : span.end], pieces, cuts, weights)
        engine.run(vector, back)
    return ~np.isfinite(dots[:, rank, rank]), good


class GramExchange(NamedTuple):
    """The pieces of all vectors that go to the rank that adds them up. `own`: of its share; `cuts` of each."""

    sends: tuple[Span, ...]
    receives: tuple[Span, ...]
    own: tuple[Span, ...]
    cuts: tuple[np.ndarray, ...]


@lru_cache(maxsize=256)
def _build_gram_exchange(schedule: Schedule, rank: int, layers: Layers, piece: int) -> GramExchange:
    ends = build_share_broadcast(schedule).elements(layers.ends[-1]).tolist()
    all_shares = [cut_span(Span(peer, *ends[peer : peer + 2]), piece) for peer in range(len(ends) - 1)]
    turns = itertools.zip_longest(*(share for peer, share in enumerate(all_shares) if peer != rank))
    sends = tuple(span for turn in turns for span in turn if span is not None)
    others = [peer for peer in range(len(all_shares)) if peer != rank]
    receives = tuple(span._replace(peer=peer) for span in all_shares[rank] for peer in others)
    mine = tuple(all_shares[rank])
    return GramExchange(sends, receives, mine, tuple(cut_at_layers(layers, span) for span in mine))


@lru_cache(maxsize=64)
def build_share_broadcast(schedule: Schedule) -> Schedule:
    """Builds a schedule that copies share r of the vector from rank r to all others."""
    chips = schedule.topology.chips
    pairs = [(src, dst, k) for k, src in enumerate(chips) for dst in chips if src != dst]
    src, dst, shares = zip(*pairs, strict=True)
    step = make_step(src, dst, shares, None, COPY)
    return Schedule("broadcast", "shares", schedule.topology, len(chips), even_bounds(len(chips)), [step])
