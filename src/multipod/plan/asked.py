"""A layout that a user writes as for `train --layout`: found among those that were searched, or priced anew."""

from collections.abc import Mapping
from typing import Any

from multipod.errors import PlanError
from multipod.layout.fields import from_fields, to_fields
from multipod.layout.layout import Layout
from multipod.layout.text import WORDS, layout_changes
from multipod.plan.machine import Machine
from multipod.plan.placing import block_of, on_machine
from multipod.plan.predict import Prediction, micro_of, replicas_of
from multipod.plan.search import Candidate, Every, Found, norm_group, priced
from multipod.plan.workload import Workload
from multipod.recipe.override import override

UNPRICED = ("cut",)
"""The words of a layout that the planner does not know the price of: it balances the parts of a model itself."""


def layout_of(text: str) -> Layout:
    """The layout that words spell, `model=4,sum=torus-2d`; what is not named is as usual.

    Raises:
      LayoutError: words that are none, with the nearest; sizes that no layout can have.
    """
    return override(Layout(), [change.removeprefix("layout.") for change in layout_changes(text)])


def asked_for(
    text: str, found: Found, workload: Workload, machine: Machine, batch: int, every: Every | None = None
) -> tuple[int, Prediction]:
    """The layout that `text` names, with its number in the table; 0 where it was not searched, and so priced now.

    text: that number, or words of a layout, `model=4,sum=torus-2d`. An axis that is not named is not split. Of what
    else is not named (sum, sharding, pipeline, micro-batches) the quickest that was searched is taken.

    Raises:
      PlanError: no such number; words without a price; a mesh, a replica or a layout that cannot be on this machine.
      LayoutError: words that are none, with the nearest; sizes that no layout can have.
    """
    if text.strip().isdecimal():
        number = int(text)
        if not 1 <= number <= len(found.predictions):
            raise PlanError(f"--explain {text}: there are {len(found.predictions)} layouts, from 1 on.")
        return number, found.predictions[number - 1]
    layout = layout_of(text)
    fields = [change.removeprefix("layout.").partition("=")[0] for change in layout_changes(text)]
    said = {name: value for name, value in to_fields(layout).items() if name in fields}
    _check_words(said, text)
    _check_places(layout, workload, machine, batch, text)
    alike = [step for step in found.predictions if step.layout.replica_sizes == layout.replica_sizes]
    for step in alike:
        if _has(step, said, machine):
            return found.predictions.index(step) + 1, step
    chosen = _completed(layout, said, alike)
    group = norm_group(workload, machine, batch, layout.replica_devices)
    candidate = Candidate(chosen, group, found.best.dtype)
    return 0, priced(workload, candidate, batch, machine, every or Every())


def _check_words(said: Mapping[str, Any], text: str) -> None:
    """Refuses words that have no price.

    Raises:
      PlanError: with those that have one.
    """
    unknown = sorted(name for name in UNPRICED if name in said)
    if unknown:
        known = ", ".join(word.names[0] for word in WORDS if word.field not in UNPRICED)
        raise PlanError(
            f"--explain {text}: nobody has priced {', '.join(unknown)}. Leave it out; what is priced: {known}."
        )


def _completed(layout: Layout, said: Mapping[str, Any], alike: list[Prediction]) -> Layout:
    """The layout with the sum of the quickest that is split so, and an update that is sharded where nothing is said."""
    values = to_fields(layout)
    if "gradient_sum" not in said:
        quickest = alike[0].layout.sync.gradient_sum if alike else "torus-2d"
        values["gradient_sum"] = "xla" if layout.asynchronous else quickest
    if not {"shard_update", "shard_weights"} & said.keys():
        values["shard_update"] = layout.pipeline is None
    return from_fields(values)


def _check_places(layout: Layout, workload: Workload, machine: Machine, batch: int, text: str) -> None:
    """Refuses an axis that the model has not, and a mesh or a replica that is not the one which a plan has here.

    Raises:
      PlanError: with what would do; or a replica that does not fit the machine.
    """
    replicas, placed = replicas_of(layout, batch, machine), on_machine(layout, machine)
    able = {"stage"} if workload.cut is not None else set()
    able |= {"width"} if "spatial" in workload.axes else set()
    able |= {*workload.axes, *(axis for split in workload.splits for axis in split.sizes)}
    wrong = [
        f"{axis}={n}: {workload.name} is known split over {', '.join(sorted(able)) or 'no axis'}"
        for axis, n in layout.replica_sizes.items()
        if axis not in able
    ]
    if layout.mesh and layout.mesh != placed.mesh:
        these = f"data={_times(placed.mesh)} on {machine}"
        these = these if placed.mesh else f"{replicas} replicas, which are no mesh on {machine}"
        wrong.append(f"data={_times(layout.mesh)} is not how a plan lies there: {these}")
    if layout.replica_shape and layout.replica_shape != block_of(layout):
        wrong.append(f"tile={_times(layout.replica_shape)} has no price: a plan's is {_times(block_of(layout))}")
    if wrong:
        raise PlanError(f"--explain {text}: {'; '.join(wrong)}. Change it, or leave it out.")


def _has(step: Prediction, said: Mapping[str, Any], machine: Machine) -> bool:
    """Whether a step of the same split has all else that was said."""
    values = to_fields(step.layout) | {"micro_batches": micro_of(step.layout, step.batch, machine)}
    elsewhere = {"mesh", "tile", *([] if said.get("micro_batches") else ["micro_batches"])}
    return all(values[name] == value for name, value in said.items() if name not in elsewhere)


def _times(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))
