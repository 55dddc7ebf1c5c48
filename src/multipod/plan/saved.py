"""Plans in files: what `multipod plan --save` writes, and `multipod train --layout PLAN.json` reads."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from multipod.errors import LayoutError, PlanError
from multipod.layout.fields import TYPES, changes_to, from_fields, to_fields
from multipod.layout.layout import Layout
from multipod.plan.files import read_object
from multipod.plan.placing import with_mesh
from multipod.plan.workload import Dtype

FORMAT = "multipod-plan-2"

FORMER = "multipod-plan-1"
"""The format before layouts were written as the trainer names their fields: with a `choice`, see `former_layout`."""

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
      dtype: of products; "" is the model's own.
      precision: fields of the recipe that are set to `dtype`; () leaves them.
    """

    name: str
    machine: str
    layout: Layout
    batch: int
    prediction: dict[str, Any]
    dtype: Dtype | Literal[""] = ""
    precision: tuple[str, ...] = ()

    def changes(self) -> list[str]:
        """What a recipe must be changed by to be trained like this: for `multipod train --set`."""
        return [
            *changes_to(self.layout, always=("gradient_sum", "shard_update")),
            f"batch={self.batch}",
            *(f"{name}={self.dtype}" for name in self.precision),
        ]


def write_plan(plan: SavedPlan, file: Path) -> None:
    """Writes a plan as JSON."""
    data = {name: getattr(plan, name) for name in SavedPlan.__dataclass_fields__} | {"layout": to_fields(plan.layout)}
    file.write_text(json.dumps({"format": FORMAT, **data}, indent=1) + "\n")


def read_plan(file: Path) -> SavedPlan:
    """The plan in a file, of today's format or of the one before.

    Raises:
      PlanError: there is none in it.
    """
    data = read_object(file, (FORMAT, FORMER), "plan", HOW)
    try:
        if "choice" in data:
            choice = data["choice"]
            layout = with_mesh(former_layout(choice), tuple(data["mesh"]))
            data |= {"batch": choice["batch"], "dtype": choice.get("dtype", "")}
        else:
            layout = from_fields({name: msgspec.convert(value, TYPES[name]) for name, value in data["layout"].items()})
        plain = (data["name"], data["machine"], layout, data["batch"], dict(data["prediction"]))
        return SavedPlan(*plain, data.get("dtype", ""), tuple(data.get("precision", ())))
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
