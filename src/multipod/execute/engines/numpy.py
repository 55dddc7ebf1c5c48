"""Runs a schedule on NumPy arrays in one process: the reference that every other engine must agree with."""

from collections.abc import Iterable, Mapping

import numpy as np

from multipod.collectives.schedule import ADASUM, ADD, Schedule
from multipod.errors import ScheduleError
from multipod.execute.adasum.arithmetic import Arithmetic, flag_broken
from multipod.execute.adasum.operator import Layers, refuse_poisoned
from multipod.execute.adasum.ranks import combine_in_lockstep


def run(schedule: Schedule, vectors: Mapping[int, np.ndarray], layers: Layers | None = None) -> dict[int, np.ndarray]:
    """What each live chip holds when the schedule is done, if it began with `vectors[chip]`.

    Piece k is the elements `ends[k]` to `ends[k + 1]` for `ends = schedule.elements(n)`; pieces of short vectors may
    be empty. In a step all messages are read before any is applied, then each receiver does
    `its = its + incoming`, or `its = incoming`. So the sums have one order, and all engines round alike.

    The results are whole vectors. After a reduce-scatter only the part i/p to (i+1)/p of the vector of the chip of
    rank i is the sum (`schedule.elements`), the rest is what happened to be there; an all-gather reads only
    that part of each input. A schedule that `verify` would refuse gives what it gives.

    Args:
      schedule: to run.
      vectors: one-dimensional, for every live chip by its number, all of one length and one dtype; any dtype that adds.
        They stay as they are.
      layers: of the vectors, for schedules that combine by Adasum (`multipod.execute.adasum.operator`).

    Raises:
      ScheduleError: vectors that do not fit the schedule, or one that combines without layers.
      PoisonedError: it combines, and a layer of some chip is not finite; names it and the rank.
    """
    held = {chip: vector.copy() for chip, vector in _check_vectors(schedule, vectors).items()}
    count = len(next(iter(held.values())))
    ends = schedule.elements(count).tolist()
    if layers is not None:
        layers.check(count)
        flags = np.array([flag_broken(Arithmetic(), vector, layers) for vector in held.values()])
        refuse_poisoned(str(schedule), flags, layers.names)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaNs pass through, as in any sum
        for number, step in enumerate(schedule.steps):
            if (step.op == ADASUM).any():
                if layers is None:
                    raise ScheduleError(
                        f"{schedule}: step {number} combines by adasum, which needs to know the layers of the vector. "
                        "Give layers, or run a schedule of add and copy."
                    )
                combine_in_lockstep(schedule, number, held, layers, run)
                continue
            sends = [
                (dst, slice(ends[first], ends[stop]), op, held[src][ends[first] : ends[stop]].copy())
                for src, dst, first, stop, op in zip(*(column.tolist() for column in step), strict=True)
            ]
            for dst, part, op, incoming in sends:
                if op == ADD:
                    held[dst][part] += incoming
                else:
                    held[dst][part] = incoming
    return held


def _check_vectors(schedule: Schedule, vectors: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """The vectors as arrays, by live chip in order."""
    chips = schedule.topology.chips
    missing = [chip for chip in chips if chip not in vectors]
    extra = [chip for chip in vectors if chip not in schedule.topology.rank]
    if missing or extra:
        wrong = [f"chips {_abridge(missing)} have none"] if missing else []
        wrong += [f"chips {_abridge(extra)} are not live"] if extra else []
        raise ScheduleError(
            f"{schedule}: the vectors are not those of the {len(chips)} live chips: {' and '.join(wrong)}. "
            "Give one vector for each of topology.chips."
        )
    arrays = {chip: np.asarray(vectors[chip]) for chip in chips}
    first = arrays[chips[0]]
    for chip, array in arrays.items():
        if array.ndim != 1:
            raise ScheduleError(
                f"{schedule}: the vector of chip {chip} has shape {array.shape}. Flatten it to one dimension."
            )
        if (array.shape, array.dtype) != (first.shape, first.dtype):
            raise ScheduleError(
                f"{schedule}: chip {chip} has {len(array)} elements of {array.dtype}, and chip {chips[0]} has "
                f"{len(first)} of {first.dtype}. Give all the same length and dtype."
            )
    try:
        np.add(first[:0], first[:0])
    except TypeError as error:
        raise ScheduleError(f"{schedule}: vectors of {first.dtype} cannot be added. Give numbers.") from error
    return arrays


def _abridge(chips: Iterable[int]) -> str:
    names = [str(chip) for chip in chips]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
