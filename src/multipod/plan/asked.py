"""A layout that a user writes as for `train --layout`: found among those that were searched, or priced anew."""

from collections.abc import Callable
from dataclasses import replace

from multipod.collectives.build import ALGORITHMS
from multipod.errors import PlanError
from multipod.layout.layout import Layout
from multipod.layout.split import PipelineSplit
from multipod.layout.text import BY_NAME, WORDS, layout_changes
from multipod.plan.machine import Machine
from multipod.plan.network import NAMES
from multipod.plan.predict import Choice, Prediction, micro_of, replicas_of
from multipod.plan.search import Every, Found, Plan, mesh_of, norm_group, priced, tile_of
from multipod.plan.workload import Split, Workload
from multipod.recipe.override import override

PRICED = ("data", "spatial", "model", "expert", "stage", "schedule", "micro", "chunks", "tile", "sum", "update")
"""The words of a layout that the planner knows the price of."""

SHOWN = {"mesh": "data", "gradient_sum": "sum", "shard_update": "update", "micro_batches": "micro"}
"""Fields whose words have other names."""


def asked_for(
    text: str, found: Found, workload: Workload, machine: Machine, batch: int, every: Every | None = None
) -> tuple[int, Prediction]:
    """The layout that `text` names, with its number in the table; 0 where it was not searched, and so priced now.

    text: that number, or words of a layout, `model=4,sum=torus-2d`. An axis that is not named is not split. Of what
    else is not named (sum, update, pipeline, micro-batches) the quickest that was searched is taken.

    Raises:
      PlanError: no such number; words without a price; a mesh, a tile or a layout that cannot be on this machine.
      LayoutError: words that are none, with the nearest; sizes that no layout can have.
    """
    if text.strip().isdecimal():
        number = int(text)
        if not 1 <= number <= len(found.predictions):
            raise PlanError(f"--explain {text}: there are {len(found.predictions)} layouts, from 1 on.")
        return number, found.predictions[number - 1]
    changes = layout_changes(text)
    said = {BY_NAME[part.partition("=")[0].strip()].names[0] for part in text.split(",") if part.strip()}
    layout = override(Layout(), [change.removeprefix("layout.") for change in changes])
    _check_words(layout, said, text)
    choice = _choice(layout, said, batch, found)
    _check_places(layout, choice, workload, machine, text)
    alike = _likeness(layout, said, machine)
    for number, step in enumerate(found.predictions, 1):
        if step.choice.split == choice.split and alike(step.choice):
            return number, step
    group = norm_group(workload, machine, batch, choice.split)
    return 0, priced(workload, replace(choice, norm_group=group), machine, every or Every())


def _check_words(layout: Layout, said: set[str], text: str) -> None:
    """Refuses words, or a way of combining, that have no price.

    Raises:
      PlanError: with those that have one.
    """
    unknown = sorted(said - set(PRICED))
    wrong = [f"nobody has priced {', '.join(unknown)}"] if unknown else []
    if layout.sync.gradient_sum not in (*ALGORITHMS, *NAMES):
        wrong.append(f"sum={layout.sync.gradient_sum} combines and does not sum, which has no price")
    if wrong:
        known = ", ".join(word.names[0] for word in WORDS if word.names[0] in PRICED)
        raise PlanError(f"--explain {text}: {'; '.join(wrong)}. Leave it out; what is priced: {known}.")


def _choice(layout: Layout, said: set[str], batch: int, found: Found) -> Choice:
    """The layout as the predictor sees it; where nothing is said of the sum, with that of the quickest split so."""
    split, pipeline = (
        Split(layout.split.spatial_devices, layout.split.model, layout.split.expert, layout.stages),
        layout.pipeline or PipelineSplit(1),
    )
    quickest = next((step.choice.schedule for step in found.predictions if step.choice.split == split), "torus-2d")
    return Choice(
        batch,
        split,
        layout.sync.gradient_sum if "sum" in said else quickest,
        layout.sync.zero1 if "update" in said else layout.stages == 1,
        pipeline=pipeline.schedule,
        micro_batches=pipeline.micro_batches,
        chunks=pipeline.chunks,
        dtype=found.best.choice.dtype,
    )


def _check_places(layout: Layout, choice: Choice, workload: Workload, machine: Machine, text: str) -> None:
    """Refuses an axis that the model has not, and a mesh or a tile that is not the one which a plan has here.

    Raises:
      PlanError: with what would do; or a replica that does not fit the machine.
    """
    split, replicas = choice.split, replicas_of(choice, machine)
    mesh, tile = mesh_of(machine, split), tile_of(split)
    able = {"stage"} if workload.cut is not None else set()
    able |= {*workload.axes, *(axis for one in workload.splits for axis in one.sizes)}
    wrong = [
        f"{axis}={n}: {workload.name} is known split over {', '.join(sorted(able)) or 'no axis'}"
        for axis, n in split.sizes.items()
        if axis not in able
    ]
    if layout.mesh and layout.mesh != mesh:
        these = f"data={_times(mesh)} on {machine}" if mesh else f"{replicas} replicas, which are no mesh on {machine}"
        wrong.append(f"data={_times(layout.mesh)} is not how a plan lies there: {these}")
    if layout.replica_shape and layout.replica_shape != tile:
        wrong.append(f"tile={_times(layout.replica_shape)} has no price: a plan's tile is {_times(tile)}")
    if wrong:
        raise PlanError(f"--explain {text}: {'; '.join(wrong)}. Change it, or leave it out.")


def _likeness(layout: Layout, said: set[str], machine: Machine) -> Callable[[Choice], bool]:
    """Whether a choice of the same split has all else that was said."""

    def alike(choice: Choice) -> bool:
        staged, pipeline = choice.split.stage > 1, layout.pipeline or PipelineSplit(1)
        wanted = {
            "sum": choice.schedule == layout.sync.gradient_sum,
            "update": choice.shard_update == layout.sync.zero1,
            "schedule": not staged or choice.pipeline == pipeline.schedule,
            "chunks": choice.pipeline != "interleaved" or choice.chunks == pipeline.chunks,
            "micro": not staged or not pipeline.micro_batches or micro_of(choice, machine) == pipeline.micro_batches,
        }
        return all(fits for word, fits in wanted.items() if word in said)

    return alike


def spelled(choice: Choice, machine: Machine) -> str:
    """The layout as `multipod train --layout` reads it."""
    plan = Plan("", str(machine), choice, mesh_of(machine, choice.split), {})
    fields = [change.removeprefix("layout.") for change in plan.changes() if change.startswith("layout.")]
    values = {SHOWN.get(name, name): value for name, _, value in (field.partition("=") for field in fields)}
    words = [f"{name}={values[name]}" for word in WORDS if (name := word.names[0]) in values]
    return ",".join(word for word in words if word != "micro=0")


def _times(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))
