"""The area under the ROC curve, exact to the last bit, over tens of millions of scores. Nothing here needs JAX.

The statistic that ranks hand to each other is the scores themselves, packed with their labels into one unsigned
integer each (`PackedScores`): as many bytes as the score alone. One sort of these integers in place, and one pass over
the result in pieces that fit the cache, give the area as a fraction of two integers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from multipod.errors import MetricError
from multipod.metrics.hosts import ALONE, ProcessGroup, gather_parts

ROW = 4096
CHUNK = 16 * ROW
"""Scores handled at once, outside of the sort: their temporaries, about a megabyte, stay in a core's cache."""

_NONE = np.empty(0, np.intp)
_PLACES = np.stack([np.arange(ROW, dtype=np.float64), np.ones(ROW)], axis=1)


@dataclass(frozen=True)
class PackedScores:
    """Scores with their labels, in any order: the mergeable form.

    A float has a sign bit, and among floats of one sign the other bits rank like the number. So all scores
    below zero stand first, all others after them, and the sign bit's place goes to the label: a key is the score's
    bits (complemented below zero, where larger bits mean smaller numbers) shifted left by one, plus the label. Minus
    zero is not below zero, and loses its sign by the shift: the two zeros tie.

    Attributes:
      keys: [scores], uint32 for scores that float32 can hold, uint64 for others.
      below: how many keys, at the front, belong to scores below zero.
    """

    keys: np.ndarray
    below: int

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class Won:
    """Pairs of a positive and a negative example, over scores of an interval.

    Attributes:
      positives: examples with label 1.
      negatives: examples with label 0.
      twice: two for each pair where the positive has the higher score, one for each tie.
    """

    positives: int = 0
    negatives: int = 0
    twice: int = 0

    def then(self, higher: "Won") -> "Won":
        """This interval together with one whose scores are all higher."""
        return Won(
            self.positives + higher.positives,
            self.negatives + higher.negatives,
            self.twice + higher.twice + 2 * self.negatives * higher.positives,
        )


def auc(labels: ArrayLike, scores: ArrayLike, mask: ArrayLike | None = None, hosts: ProcessGroup = ALONE) -> float:
    """The area under the ROC curve: how often a positive example scores higher than a negative one; a tie is half.

    The pairs are counted in integers and divided once, so the result is the exact value, correctly rounded, however
    many ties there are. Infinite scores rank above (below) all others. Takes about twice the time of sorting the
    scores; needs 4 bytes a score (8 where scores do not fit float32) and a megabyte. Over several hosts, each
    needs as much for all scores, twice.

    Args:
      labels: 0 or 1, or false or true, in any dtype; any shape.
      scores: as many; floats or integers, in any order.
      mask: as many booleans; only examples where it is true count, so that padding does not.
      hosts: who has the other examples. All call this, and get the same.

    Raises:
      MetricError: shapes differ, a label is neither 0 nor 1, a score is NaN (the rank is named), or there is only
        one class.
    """
    return area(merge_scores(gather_parts(lambda: pack_scores(labels, scores, mask), PackedScores, hosts)))


def pack_scores(labels: ArrayLike, scores: ArrayLike, mask: ArrayLike | None = None) -> PackedScores:
    """The scores and labels of one rank, see `auc`.

    Raises:
      MetricError: shapes differ, a label is neither 0 nor 1, or a score is NaN.
    """
    examples = _checked(labels, scores, mask)
    number = _float_for(examples.scores)
    key = np.dtype(f"u{number.itemsize}")
    keys = np.empty(examples.used, key)
    front, back = 0, len(keys)
    for label, score in _chunks(examples, number):
        bits = score.view(key)
        negative = np.flatnonzero(score < 0) if score.min() < 0 else _NONE
        if len(negative):
            _write(~bits[negative], label[negative], keys[front : front + len(negative)])
            front += len(negative)
            others = np.flatnonzero(score >= 0)
            bits, label = bits[others], label[others]
        _write(bits, label, keys[back - len(bits) : back])
        back -= len(bits)
    return PackedScores(keys, front)


def merge_scores(parts: Sequence[PackedScores]) -> PackedScores:
    """All scores of several ranks.

    Raises:
      MetricError: some ranks have scores in float32, others in float64: equal numbers would then differ.
    """
    kinds = {rank: part.keys.dtype for rank, part in enumerate(parts) if len(part)}
    first = next(iter(kinds), 0)
    odd = [rank for rank, kind in kinds.items() if kind != kinds[first]]
    if odd:
        names = [f"rank {rank} has float{8 * kinds[rank].itemsize} scores" for rank in (first, odd[0])]
        raise MetricError(f"auc: {', '.join(names)}. Score with one dtype on all ranks.")
    parts = [parts[rank] for rank in kinds] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    halves = [part.keys[: part.below] for part in parts] + [part.keys[part.below :] for part in parts]
    return PackedScores(np.concatenate(halves) if halves else np.empty(0, np.uint32), sum(part.below for part in parts))


def area(scores: PackedScores) -> float:
    """The area under the ROC curve, see `auc`. Sorts `scores.keys` in place (their order means nothing).

    Raises:
      MetricError: there are no scores, or all have the same label.
    """
    sides = scores.keys[: scores.below], scores.keys[scores.below :]
    for side in sides:
        side.sort()
    won = _won(sides[0]).then(_won(sides[1]))
    if not won.positives or not won.negatives:
        raise MetricError(_one_class(won))
    return won.twice / (2 * won.positives * won.negatives)  # of Python's integers: rounded once


def _one_class(won: Won) -> str:
    count = won.positives + won.negatives
    if not count:
        return "auc: there are no scores: the evaluation set is empty, or all of it is masked. Give it examples."
    label = 1 if won.positives else 0
    return (
        f"auc: all {count:,} labels are {label}, and the area needs examples of both classes. "
        "Evaluate on more examples, or merge all ranks' scores before the area is taken."
    )


def _write(bits: np.ndarray, label: np.ndarray, to: np.ndarray) -> None:
    np.left_shift(bits, 1, out=to)
    np.bitwise_or(to, label, out=to)


class _Examples(NamedTuple):
    """What was given, as arrays of one shape."""

    labels: np.ndarray
    scores: np.ndarray
    mask: np.ndarray | None

    @property
    def used(self) -> int:
        """How many are not masked."""
        return self.scores.size if self.mask is None else int(np.count_nonzero(self.mask))


def _checked(labels: ArrayLike, scores: ArrayLike, mask: ArrayLike | None) -> _Examples:
    given = _Examples(np.asarray(labels), np.asarray(scores), None if mask is None else np.asarray(mask, bool))
    shapes = {name: array.shape for name, array in given._asdict().items() if array is not None}
    if len(set(shapes.values())) > 1:
        named = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise MetricError(f"auc: shapes differ: {named}. Give one label and one score an example.")
    return given


def _chunks(examples: _Examples, number: np.dtype) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The examples that count, in pieces: labels as uint8, scores as `number`, both checked."""
    labels, scores, mask = (None if array is None else array.reshape(-1) for array in examples)
    assert labels is not None
    assert scores is not None
    for start in range(0, len(scores), CHUNK):
        label, score = labels[start : start + CHUNK], scores[start : start + CHUNK]
        if mask is not None:
            places = np.flatnonzero(mask[start : start + CHUNK])
            if not len(places):
                continue
            label, score = label[places], score[places]
        score = score.astype(number, copy=False)
        if np.isnan(score.min()):
            raise MetricError(_nan(examples))
        if not _are_labels(label):
            raise MetricError(_no_label(examples))
        yield label.astype(np.uint8), score


def _are_labels(label: np.ndarray) -> bool:
    if label.dtype == bool:
        return True
    if label.dtype.kind in "iu":
        return bool(label.min() >= 0 and label.max() <= 1)
    return bool(((label == 0) | (label == 1)).all())


def _float_for(scores: np.ndarray) -> np.dtype:
    """float32 or float64, whichever is the first that holds every score exactly."""
    for number in (np.dtype(np.float32), np.dtype(np.float64)):
        # NumPy calls 64-bit integers safe in float64; those beyond 2**53 would tie where they differ.
        if np.can_cast(scores.dtype, number) and not _is_too_long(scores):
            return number
    raise MetricError(
        f"auc: scores of dtype {scores.dtype} do not all fit float64, so some would tie that differ. "
        "Give floats of at most 64 bits, or integers of at most 53."
    )


def _is_too_long(scores: np.ndarray) -> bool:
    if scores.dtype.kind not in "iu" or scores.dtype.itemsize < 8 or not scores.size:
        return False
    return max(-int(scores.min()), int(scores.max())) > 2**53


def _nan(examples: _Examples) -> str:
    wrong = np.isnan(examples.scores)
    wrong = wrong if examples.mask is None else wrong & examples.mask
    return (
        f"auc: {_first('scores', wrong)} is NaN, the first of {np.count_nonzero(wrong):,} among "
        f"{examples.used:,}. Find what the model divides by or overflows there; a NaN has no rank."
    )


def _no_label(examples: _Examples) -> str:
    wrong = (examples.labels != 0) & (examples.labels != 1)
    wrong = wrong if examples.mask is None else wrong & examples.mask
    value = examples.labels[wrong][0]
    return f"auc: {_first('labels', wrong)} is {value}, not 0 or 1. Give one of two classes, and mask the padding."


def _first(name: str, wrong: np.ndarray) -> str:
    """The first true place, as Python would write it."""
    place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    return f"{name}[{', '.join(map(str, place))}]"


def _won(keys: np.ndarray) -> Won:
    """The pairs won among sorted keys. Pieces end where a score ends, so that no tie lies in two."""
    won, start, one = Won(), 0, keys.dtype.type(1)
    while start < len(keys):
        stop = min(start + CHUNK, len(keys))
        if stop < len(keys):
            stop = start + int(np.searchsorted(keys[start:stop], keys[stop] & ~one))
        if stop > start:
            won = won.then(_won_in_chunk(keys[start:stop]))
        else:  # one score fills the whole piece, and perhaps many more
            positive = keys[start] | one
            middle = start + int(np.searchsorted(keys[start:], positive))
            stop = start + int(np.searchsorted(keys[start:], positive, "right"))
            negatives, positives = middle - start, stop - middle
            won = won.then(Won(positives, negatives, positives * negatives))
        start = stop
    return won


def _won_in_chunk(keys: np.ndarray) -> Won:
    """In sorted keys the negatives of a score stand before its positives, as if they had lost; ties are taken back."""
    rows = np.zeros((-(-len(keys) // ROW), ROW))
    rows.reshape(-1)[: len(keys)] = keys & 1
    # Whole numbers below 2**53 all the way: the product is exact in any order of adding.
    sums = rows @ _PLACES
    places = int(sums[:, 0].sum()) + ROW * int(np.arange(len(rows)) @ sums[:, 1])
    positives = int(sums[:, 1].sum())
    before = places - positives * (positives - 1) // 2
    return Won(positives, len(keys) - positives, 2 * before - _ties(keys))


def _ties(keys: np.ndarray) -> int:
    """Pairs of a positive and a negative example with the same score, in sorted keys."""
    change = keys[1:] ^ keys[:-1]
    if not (change == 1).any():  # 1: the label changes, the score does not
        return 0
    last = np.flatnonzero(change != 0)  # the last place of each run of equal keys, but for the last run
    ends = np.concatenate([[-1], last, [len(keys) - 1]])
    lengths = np.diff(ends)
    mixed = np.flatnonzero(change[last] == 1)
    return int(lengths[mixed] @ lengths[mixed + 1])
