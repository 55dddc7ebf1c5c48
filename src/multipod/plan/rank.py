"""The order of priced layouts: the quickest first, but for what may as well be as quick. Such layouts are ties."""

from collections.abc import Iterable

from multipod.plan.machine import Machine
from multipod.plan.predict import Prediction

NOISE = 0.01
"""Of a step: layouts that differ by less are ties, whatever is known of their prices."""


def tied(quick: Prediction, slow: Prediction, machine: Machine) -> bool:
    """Whether `slow` may as well be as quick as `quick`, by what is not known of their prices.

    A sum is known to `Calibration.sum_error`, and the engine's own to the range of `network.own_sum` as well; two
    layouts with one way of summing share that error. Layouts that split a replica otherwise, or multiply in another
    type, differ by `Calibration.step_error` of a step, too.
    """
    doubt_s = 0.0 if quick.layout.sync.gradient_sum == slow.layout.sync.gradient_sum else slow.sum_doubt_s
    if _replica(quick) != _replica(slow):
        doubt_s += machine.calibration.step_error * slow.step_s
    return slow.step_s - max(doubt_s, NOISE * slow.step_s) <= quick.step_s


def ranked(steps: Iterable[Prediction], machine: Machine) -> list[Prediction]:
    """Orders layouts that fit in memory by their time, then all others; the engine's sum goes before its ties.

    A schedule of ours is another program than the engine's, and buckets are a setting: either takes the place of the
    engine's sum as it is only where it gains more than its uncertainty.
    """
    listed = list(steps)
    leads: dict[tuple[object, ...], Prediction] = {}
    for step in listed:
        lead = leads.setdefault(_family(step), step)
        if (not step.fits, step.step_s) < (not lead.fits, lead.step_s):
            leads[_family(step)] = step

    def place(step: Prediction) -> tuple[bool, float, bool, str]:
        lead, sync = leads[_family(step)], step.layout.sync
        plain = sync.gradient_sum == "xla" and not sync.bucket_bytes
        first = plain and step.fits == lead.fits and tied(lead, step, machine)
        return not step.fits, lead.step_s if first else step.step_s, not first, step.words

    return sorted(listed, key=place)


def _family(step: Prediction) -> tuple[object, ...]:
    """What layouts share that differ in who sums, and in how many messages."""
    sync = step.layout.sync
    return sync.sharding, sync.gather_dtype, sync.sum_dtype, *_replica(step)


def _replica(step: Prediction) -> tuple[object, ...]:
    """How a replica is split, and what it multiplies."""
    return step.layout.split, step.layout.pipeline, step.dtype
