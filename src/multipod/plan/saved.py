"""Plans in files: what `multipod plan --save` writes, and `multipod train --layout PLAN.json` reads."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from multipod.errors import LayoutError, PlanError
from multipod.layout.fields import FLAT_NAMES, TYPES, changes_to, from_fields, to_fields
from multipod.layout.layout import Layout
from multipod.plan.files import read_object
from multipod.plan.placing import with_mesh

FORMAT = "multipod-plan-3"

FORMER = ("multipod-plan-2", "multipod-plan-1")
"""The formats before: 2 held no field of the recipe but the layout's, the batch and the type of products, and 1 had the
layout as a `choice`, see `former_layout`."""

SILENT = "batch norm's span, the number of updates, the preset of the rate, accumulation, and what the model keeps"
"""What plans of the former formats do not hold."""

UNPLANNED = ("failed", "rules", "report_orthogonality")
"""Flat fields of a layout that a plan leaves as the recipe and the run have them."""

HOW = "Write one with `multipod plan RECIPE --on MACHINE --save FILE`."


@dataclass(frozen=True)
class SavedPlan:
    """A plan as it is written down.

    Attributes:
      name: of the recipe or table.
      machine: as on the command line.
      layout: with its mesh; without one where replicas of this form do not fill the machine.
      batch: examples in an update.
      prediction: what `Prediction.data` says, and of the run, if it was planned.
      settings: changes to the recipe beside its layout and batch, each `name=value`.
      fields: of the recipe so changed, by their names for `--set`, those that the prediction rests on
        (`multipod.plan.pinned`); {} for a published table, and for a plan of a former format.
    """

    name: str
    machine: str
    layout: Layout
    batch: int
    prediction: dict[str, Any]
    settings: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)

    def changes(self) -> list[str]:
        """What a recipe must be changed by to be trained like this: for `multipod train --set`."""
        return [f"batch={self.batch}", *self.settings, *self.layout_changes()]

    def layout_changes(self) -> list[str]:
        """The changes to the recipe's layout; without a mesh where the plan has none."""
        if not self.fields:
            return changes_to(self.layout, always=("gradient_sum", "shard_update"))
        idle = (
            {flat for path, flat in FLAT_NAMES.items() if path.startswith("pipeline.")}
            if not self.layout.pipeline
            else set()
        )
        said = TYPES.keys() - {*UNPLANNED, *([] if self.layout.mesh else ["mesh", "tile"])} - (idle - {"stage"})
        return changes_to(self.layout, always=said)

    @property
    def silent(self) -> str:
        """What the plan does not hold, in words; empty where it holds all that its prediction rests on."""
        return "" if self.fields else SILENT


def write_plan(plan: SavedPlan, file: Path) -> None:
    """Writes a plan as JSON."""
    data = {name: getattr(plan, name) for name in SavedPlan.__dataclass_fields__} | {"layout": to_fields(plan.layout)}
    file.write_text(json.dumps({"format": FORMAT, **data}, indent=1) + "\n")


def read_plan(file: Path) -> SavedPlan:
    """The plan in a file, of today's format or of a former one.

    Raises:
      PlanError: there is none in it.
    """
    data = read_object(file, (FORMAT, *FORMER), "plan", HOW)
    try:
        if "choice" in data:
            choice = data["choice"]
            layout = with_mesh(former_layout(choice), tuple(data["mesh"]))
            data |= {"batch": choice["batch"], "dtype": choice.get("dtype", "")}
        else:
            layout = from_fields({name: msgspec.convert(value, TYPES[name]) for name, value in data["layout"].items()})
        plain = (data["name"], data["machine"], layout, data["batch"], dict(data["prediction"]))
        former = [f"{name}={data['dtype']}" for name in data.get("precision", ())]
        return SavedPlan(*plain, tuple(data.get("settings", former)), dict(data.get("fields", {})))
    except (KeyError, TypeError, LayoutError, msgspec.ValidationError) as error:
        raise PlanError(f"{file} is no whole plan: {error}. {HOW}") from error


FORMER_FIELDS = {
    "schedule": "gradient_sum",
    "shard_update": "shard_update",
    "pipeline": "schedule",
    "micro_batches": "micro_batches",
    "chunks": "chunks",
}
"""Fields of a former choice, and the flat names that a layout has for them."""

FORMER_SPLIT = ("spatial", "model", "expert", "stage")


def former_layout(choice: dict[str, Any]) -> Layout:
    """The layout of a choice as plans and measured steps were written before, where the sum was called `schedule`.

    Raises:
      LayoutError: one that cannot be.
    """
    values = {"gradient_sum": "torus-2d", "shard_update": True}
    values |= {FORMER_FIELDS[name]: value for name, value in choice.items() if name in FORMER_FIELDS}
    split = choice.get("split", {})
    values |= split | {"spatial": (split["spatial"],) if split.get("spatial", 1) > 1 else ()}
    if values.get("stage", 1) == 1:
        values = {name: value for name, value in values.items() if name not in ("schedule", "micro_batches", "chunks")}
    return from_fields(values)
