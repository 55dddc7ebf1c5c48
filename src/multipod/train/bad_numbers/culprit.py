"""Tells whose fault a bad update is: a chip's, some examples', or that of weights that a high rate has moved."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from multipod.pytrees import Batch
from multipod.step.examine import Examination
from multipod.step.guard import Controls
from multipod.step.program import Program
from multipod.step.state import State
from multipod.train.bad_numbers.replay import find_cause

Fault = Literal["", "chip", "batch", "weights"]
"""Whose fault it is; "" where that was not found out."""

Numbers = Callable[[int], np.ndarray]
"""The numbers of the examples of the batch at a position, all rows of all processes."""

NAMED = 8
"""Examples and tensors that a line names, at most."""


@dataclass(frozen=True)
class Culprit:
    """What made an update bad.

    Attributes:
      text: one line that says it.
      examples: numbers of the examples that are at fault.
      tensors: names of the parameters whose gradient is not finite.
    """

    fault: Fault
    text: str
    examples: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class BatchEvidence:
    """What an examination saw of a batch of n examples.

    Attributes:
      numbers: of the examples, [n].
      losses: each example's own, at the weights before the update, float [n].
      first: the same at the weights before the first update.
      inputs: which examples have numbers that are not finite, bool [n], by the name of the field.
      gradients: whether the gradient of a tensor is finite, by its name.
      largest: the largest magnitude in each parameter, by its name.
    """

    numbers: np.ndarray
    losses: np.ndarray
    first: np.ndarray
    inputs: Mapping[str, np.ndarray]
    gradients: Mapping[str, bool]
    largest: Mapping[str, float]


def find_culprit(program: Program, before: State, batch: Batch, controls: Controls, numbers: Numbers) -> Culprit:
    """Looks for what made an update bad that was bad twice; `before` is the state before it.

    All processes call it at the same point, and all get the same. Compiles a few programs of the size of a gradient.
    """
    cause = find_cause(program, before, batch, controls)
    if cause.chip or program.examination is None:
        return Culprit("chip" if cause.chip else "", cause.text)
    try:
        evidence = _look(program.examination, before, batch, controls, numbers(int(before.position)))
    except Exception as error:  # a machine in trouble may have no room for this; the update is bad all the same
        return Culprit("", f"{cause.text}; not looked into further: {str(error).strip().splitlines()[0][:200]}")
    return judge(evidence)


def _look(look: Examination, state: State, batch: Batch, controls: Controls, numbers: np.ndarray) -> BatchEvidence:
    n = len(numbers)  # the rows behind are padding
    return BatchEvidence(
        numbers,
        look.losses(state, batch)[:n],
        look.losses(look.first(), batch)[:n],
        {name: rows[:n] for name, rows in look.inputs(batch).items()},
        look.gradients(state, batch, controls),
        look.largest(state),
    )


def judge(seen: BatchEvidence) -> Culprit:
    """Tells bad examples from weights that have moved too far.

    Examples are at fault whose inputs are not finite, or whose loss is not, at these weights and at the first ones. If
    there are none, and more than half of the examples have a higher loss than at the first weights, these weights
    are: what was learnt is lost. Else those examples are whose loss alone is not finite, or far above the others'.
    """
    broken = tuple(name for name, finite in seen.gradients.items() if not finite)
    finite, began = np.isfinite(seen.losses), np.isfinite(seen.first)
    spoiled = np.logical_or.reduce([~(finite | began), *seen.inputs.values()])
    worse = np.where(finite, seen.losses, np.inf) > np.where(began, seen.first, np.inf)
    if spoiled.any():
        return _blame_examples(seen, spoiled, "", broken)
    if worse.mean() > 0.5:
        return Culprit("weights", f"{_weights_text(seen, int(worse.sum()))}{_tensors_text(broken)}", (), broken)
    if not finite.all():
        return _blame_examples(seen, ~finite, ", at these weights alone", broken)
    top = np.argsort(-seen.losses)[:3]
    largest = ", ".join(f"{seen.numbers[row]} ({seen.losses[row]:.4g})" for row in top)
    text = f"bad batch: each example's own loss is finite; the largest are of examples {largest}"
    return Culprit("batch", text + _tensors_text(broken), tuple(int(seen.numbers[row]) for row in top), broken)


def _blame_examples(seen: BatchEvidence, rows: np.ndarray, when: str, broken: tuple[str, ...]) -> Culprit:
    """Names the examples in `rows` with what is wrong with each."""

    def reason(row: int) -> str:
        fields = [name for name, spoiled in seen.inputs.items() if spoiled[row]]
        return f"{' and '.join(fields)} not finite" if fields else f"loss not finite{when}"

    places = np.flatnonzero(rows)
    named = [f"{seen.numbers[row]} ({reason(row)})" for row in places[:NAMED]]
    more = f" and {len(places) - NAMED} more" if len(places) > NAMED else ""
    text = f"bad batch: example{'s' * (len(places) > 1)} {', '.join(named)}{more} of {len(rows)}"
    return Culprit("batch", text + _tensors_text(broken), tuple(int(seen.numbers[row]) for row in places), broken)


def _weights_text(seen: BatchEvidence, worse: int) -> str:
    name = max(seen.largest, key=lambda name: np.nan_to_num(seen.largest[name], nan=np.inf), default="")
    now, then = np.median(np.where(np.isfinite(seen.losses), seen.losses, np.inf)), np.median(seen.first)
    return (
        f"rate too high: {worse} of {len(seen.losses)} examples have a higher loss than at the first weights (median "
        f"{now:.4g}, then {then:.4g}), and none is bad by itself; the largest weight is {seen.largest[name]:.4g}, in "
        f"{name}"
    )


def _tensors_text(broken: tuple[str, ...]) -> str:
    if not broken:
        return ""
    others = f", and of {len(broken) - 1} other tensors" if len(broken) > 1 else ""
    return f"; the gradient of {broken[0]} is not finite{others}"
