"""Finds the loops in a schedule: steps that come again one after the other, or in a period."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from multipod.execute.engines.permutations import SplitStep

LONGEST_PERIOD = 256
"""Steps in which a schedule may repeat itself."""


class StepSpan(NamedTuple):
    """Steps that make one loop of `period` steps a trip; steps that do not repeat are one trip."""

    steps: list[SplitStep]
    period: int


class _Repeat(NamedTuple):
    start: int
    stop: int
    period: int


def find_spans(steps: Sequence[SplitStep], spare: float) -> Iterator[StepSpan]:
    """All steps in order, in spans: first what repeats longest, then what is before and after it in the same way.

    Pipelines fill and drain: before and after what repeats come steps that send a part of it. These join the loop, and
    on the pairs that they do not need send what nobody reads, while all such messages together are of at most
    `spare` elements.
    """
    keys = np.array([step.split.key for step in steps], np.int64)
    left = [spare]

    def cover(low: int, high: int) -> Iterator[StepSpan]:
        repeat = longest_repeat(keys[low:high])
        if repeat is None:
            if low < high:
                yield StepSpan(list(steps[low:high]), high - low)
            return
        start, stop, period = low + repeat.start, low + repeat.stop, repeat.period
        members, start, stop = _extend(steps, (start, stop, period), (low, high), left)
        yield from cover(low, start)
        yield StepSpan(members, period)
        yield from cover(stop, high)

    return cover(0, len(steps))


def longest_repeat(keys: np.ndarray) -> _Repeat | None:
    """Where the keys repeat with some period, and most would have to be written again without; None if nowhere."""
    best, most = None, (-1, 0)
    for period in range(1, min(len(keys) // 2, LONGEST_PERIOD) + 1):
        same = np.concatenate([[False], keys[period:] == keys[:-period], [False]])
        edges = np.flatnonzero(np.diff(same))
        if not len(edges):
            continue
        runs = edges[1::2] - edges[::2]
        longest = int(runs.argmax())
        trips = int(runs[longest]) // period + 1
        # Two trips are hardly a loop: A A B B A A B B is better four loops of two steps than one of four steps.
        if trips > 1 and (gain := ((trips - 2) * period, -period)) > most:
            most = gain
            best = _Repeat(int(edges[2 * longest]), int(edges[2 * longest + 1]) + period, period)
    return best


def _extend(
    steps: Sequence[SplitStep], repeat: tuple[int, int, int], within: tuple[int, int], left: list[float]
) -> tuple[list[SplitStep], int, int]:
    """The members of a loop and where it begins and ends, with steps on both sides that fit it, cheapest first."""
    start, stop, period = repeat
    low, high = within
    body = [steps[start + k].split for k in range(period)]
    first = start
    members = list(steps[start:stop])

    def offer(place: int) -> tuple[int, SplitStep] | None:
        if not low <= place < high:
            return None
        split = body[(place - first) % period]
        waste = split.elements - steps[place].split.elements
        fitted = steps[place].fit(split) if 0 <= waste <= left[0] else None
        return None if fitted is None else (waste, fitted)

    before, after = offer(start - 1), offer(stop)
    while before or after:
        if after is None or (before is not None and before[0] <= after[0]):
            assert before is not None
            left[0] -= before[0]
            members.insert(0, before[1])
            start -= 1
            before = offer(start - 1)
            after = offer(stop)
        else:
            left[0] -= after[0]
            members.append(after[1])
            stop += 1
            before = offer(start - 1)
            after = offer(stop)
    over = len(members) % period
    for member, step in zip(members[len(members) - over :], steps[stop - over : stop], strict=True):
        left[0] += member.split.elements - step.split.elements
    return members[: len(members) - over], start, stop - over
