"""Where an update is wrong: in which of its stages, in which elements of a tensor, on which devices."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from multipod.step.state import PortableState, State
from multipod.verify.recording import gradient_in
from multipod.verify.rounding import CHANGE, GRADIENT, KEPT, LIMIT, STATISTIC, UpdateResult, made_of, named

SUMS = "sums of the objective"
KINDS = {GRADIENT: "gradients", CHANGE: "changes of parameters", KEPT: "of the optimizer's tensors",
         STATISTIC: "statistics"}  # fmt: skip
ROOM = 5.0
"""Times its share of a tensor's norm that rounding may put an element off."""


def stage_of(ratios: Mapping[str, float]) -> str:
    """In which stage an update goes wrong, and how many things of each stage do.

    The first stage with something wrong is it: what follows is made of what it made.

    Args:
      ratios: of each error to that of one device.
    """
    counts: dict[str, tuple[int, int]] = {}
    for name, ratio in ratios.items():
        kind = next((words for start, words in KINDS.items() if name.startswith(f"{start} ")), SUMS)
        wrong, all_of = counts.get(kind, (0, 0))
        counts[kind] = wrong + (not ratio <= LIMIT), all_of + 1
    told = ", ".join(f"{wrong} of {count} {kind}" for kind, (wrong, count) in counts.items() if wrong)
    return f"{_stage({kind for kind, (wrong, _) in counts.items() if wrong}, counts)} (wrong: {told})"


def _stage(wrong: set[str], counts: Mapping[str, Any]) -> str:
    if SUMS in wrong:
        return "the batch or the forward pass"
    if KINDS[GRADIENT] in wrong:
        return "the backward pass or the sum of gradients; the forward pass is right"
    if wrong == {KINDS[STATISTIC]}:
        return "the statistics alone"
    before = "the gradients are right" if KINDS[GRADIENT] in counts else "the forward pass is right"
    return f"the optimizer; {before}"


def place_of(name: str, made: UpdateResult, exact: UpdateResult, before: PortableState, state: State) -> str:
    """Which elements of a tensor are wrong, and which devices hold them; empty for what is no tensor.

    Args:
      name: as among the errors.
      before: the state that both began with.
      state: `made.state` where it lies. Where it is in another form (stages), no devices are said.
    """
    kind = next((start for start in KINDS if name.startswith(f"{start} ")), None)
    if kind is None:
        return ""
    path = name.removeprefix(f"{kind} ")
    ours, true = (np.asarray(named(made_of(one.state, before)[kind])[path], np.float64) for one in (made, exact))
    wrong = _wrong_elements(ours, true)
    told = _elements(wrong)
    held = {GRADIENT: gradient_in(state.optimizer), CHANGE: state.params, KEPT: state.optimizer,
            STATISTIC: state.statistics}[kind]  # fmt: skip
    leaf = named(held).get(path)
    if leaf is None or leaf.shape != wrong.shape:
        return told
    holders = [shard.device.id for shard in leaf.addressable_shards if wrong[shard.index].any()]
    everywhere = len(holders) == len(leaf.addressable_shards)
    return f"{told}, on {'all devices' if everywhere else 'devices ' + ', '.join(map(str, sorted(holders)))}"


def _wrong_elements(ours: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Elements that are off by more than their share of the largest one's rounding would put them."""
    off = np.abs(ours - true)
    near = np.finfo(np.float32).eps * LIMIT * ROOM * np.sqrt(np.mean(true**2))
    wrong = ~(off <= near)
    return wrong if wrong.any() else off == off.max()


def _elements(wrong: np.ndarray) -> str:
    """How many elements, and the box that they lie in."""
    if wrong.all():
        return "all of it"
    sides = [np.nonzero(wrong.any(axis=tuple(other for other in range(wrong.ndim) if other != dim)))[0]
             for dim in range(wrong.ndim)]  # fmt: skip
    box = ", ".join(
        ":" if side[-1] - side[0] + 1 == size else f"{side[0]}:{side[-1] + 1}"
        for side, size in zip(sides, wrong.shape, strict=True)
    )
    return f"{wrong.sum():,} of {wrong.size:,} elements, in [{box}]"
