"""What a pipeline costs in theory: utilisation, weight copies and activations, in closed form.

P stages, i = 1 ... P; N micro-batches an update. `check` and `timed` count the same on a schedule.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from multipod.errors import ScheduleError, nearest

COPIES = {"sgd": 2, "momentum": 3, "adam": 4}
"""Weight-sized arrays that training holds without a pipeline: weights, gradients, and the optimizer's moments."""


@dataclass(frozen=True)
class PipelineCost:
    """What a pipeline costs.

    Attributes:
      utilisation: share of the devices' time that is used, in a long run.
      weight_copies: weight-sized arrays held, in multiples of the model's size, over all stages.
      activations: micro-batches (of one stage's activations) held, over all stages.
    """

    utilisation: Fraction
    weight_copies: Fraction
    activations: int


def tau(stages: int, micro_batches: int, stage: int) -> Fraction:
    """The mean delay of the forward pass at `stage` (from 1) in PipeMare, in updates: (2 (P - i) + 1) / N.

    Source: Yang et al., 2019, arXiv:1910.05124, table 1.
    """
    return Fraction(2 * (stages - stage) + 1, micro_batches)


def cost(
    name: str,
    stages: int,
    micro_batches: int,
    optimizer: str = "momentum",
    *,
    correction: bool = True,
    sizes: Sequence[float] = (),
) -> PipelineCost:
    """The closed forms for `gpipe`, `1f1b`, `eager-1f1b`, `pipemare` or `pipedream`.

    correction: (pipemare) whether there is the buffer of T2. sizes: weights of each stage, in any unit; equal if empty.
    PipeDream's stash is the mean delay times the stage's size: with equal sizes P / N copies (the whole versions that a
    schedule needs, ceil of each delay, are `PipelineProof.stashed`).
    Source: Yang et al., 2019, arXiv:1910.05124, table 1 and section 2.

    Raises:
      ScheduleError: an unknown name, or sizes that are not of these stages.
    """
    if optimizer not in COPIES:
        raise ScheduleError(f"pipeline cost: no optimizer {optimizer!r}. {nearest(optimizer, COPIES)}")
    if sizes and len(sizes) != stages:
        raise ScheduleError(f"pipeline cost: {len(sizes)} sizes for {stages} stages. Give one for each.")
    bubble = Fraction(micro_batches, micro_batches + stages - 1)
    copies = Fraction(COPIES[optimizer])
    one_way = range(1, stages + 1)
    known = {
        "gpipe": (bubble, copies, stages * micro_batches),
        "1f1b": (bubble, copies, sum(min(micro_batches, stages - i + 1) for i in one_way)),
        "eager-1f1b": (bubble, copies, sum(min(micro_batches, 2 * (stages - i) + 1) for i in one_way)),
        "pipemare": (Fraction(1), copies + correction, stages**2),
        "pipedream": (Fraction(1), copies + _stash(stages, micro_batches, sizes), stages**2),
    }
    if name not in known:
        raise ScheduleError(f"pipeline cost: no closed form for {name!r}. {nearest(name, known)}")
    return PipelineCost(*known[name])


def recompute(stages: int, segment: int) -> int:
    """Activations of PipeMare that keeps only the input of every `segment` stages and computes the others again.

    About P^2 / s + P s micro-batches, least at s = sqrt(P): O(P^1.5), for one more forward pass.
    Source: Yang et al., 2019, arXiv:1910.05124, appendix (recompute). Here: for each segment, its inputs over the
    first stage's delay, and one micro-batch's way through the segment and back for each of its stages.

    Raises:
      ScheduleError: no segment of 1 to P stages.
    """
    if not 1 <= segment <= stages:
        raise ScheduleError(
            f"pipeline cost: segments of {segment} stages in a pipeline of {stages}. Take 1 to {stages}."
        )
    kept = 0
    for first in range(1, stages + 1, segment):
        last = min(first + segment - 1, stages)
        kept += 2 * (stages - first) + 1
        kept += sum(2 * (last - i) + 1 for i in range(first, last + 1)) if segment > 1 else 0
    return kept


def best_segment(stages: int) -> int:
    """The segment with the fewest activations; about sqrt(P)."""
    return min(range(1, stages + 1), key=lambda s: recompute(stages, s))


def utilisation_with_warm_up(stages: int, micro_batches: int, synchronous: int, asynchronous: int) -> Fraction:
    """PipeMare's utilisation over a run that begins with `synchronous` epochs (T3) and goes on with `asynchronous`.

    Source: Yang et al., 2019, arXiv:1910.05124, section 3.3: a synchronous epoch takes (N + P - 1) / N as long.
    """
    total = synchronous + asynchronous
    return Fraction(total) / (synchronous * Fraction(micro_batches + stages - 1, micro_batches) + asynchronous)


def whole_versions(stages: int, micro_batches: int, stage: int) -> int:
    """Old versions that PipeDream's stage (from 1) keeps: ceil((2 (P - i) + 1) / N)."""
    return math.ceil(tau(stages, micro_batches, stage))


def _stash(stages: int, micro_batches: int, sizes: Sequence[float]) -> Fraction:
    weights = [Fraction(size) for size in sizes] or [Fraction(1)] * stages
    delays = [tau(stages, micro_batches, i) for i in range(1, stages + 1)]
    return sum((w * d for w, d in zip(weights, delays, strict=True)), Fraction(0)) / sum(weights)
