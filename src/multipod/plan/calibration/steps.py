"""Steps that somebody measured, in a file: what `multipod plan calibrate FILE --on MACHINE` fits a machine to.

    {"format": "multipod-steps-1", "steps": [
      {"model": "bert", "on": "dgx-a100", "batch": 256, "step_ms": 412.0},
      {"model": "bert", "on": "dgx-a100:4", "batch": 1024, "layout": "model=8,sum=ring", "step_ms": 700}]}

`model` is a published table or a recipe; `on` may be left out where it is the machine itself. `layout` is as for `train
--layout`, "model=8,sum=ring"; or it is said by the fields that it had before (`multipod.plan.saved.former_layout`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from multipod.errors import MultipodError, PlanError, nearest
from multipod.layout.layout import Layout
from multipod.plan.asked import layout_of
from multipod.plan.calibration.fit import Fit, Measurement, fit
from multipod.plan.files import read_object
from multipod.plan.machine import Machine, find
from multipod.plan.network import network_of
from multipod.plan.predict import examples_of, layout_words, predict_step
from multipod.plan.price import work_of
from multipod.plan.saved import FORMER_FIELDS, FORMER_SPLIT, former_layout
from multipod.plan.workload import Dtype, Workload

FORMAT = "multipod-steps-1"

ORDER = ("matmul", "convolution", "memory", "op_s", "link", "vector", "message_s")
"""What is fitted, as far as the steps hold any of it and are as many: what most steps are made of comes first."""

FIELDS = ("model", "on", "step_ms", "batch", "layout", "norm_group", "dtype", "split", *FORMER_FIELDS)

HOW = f'Write {{"format": "{FORMAT}", "steps": [{{"model": "bert", "batch": 256, "step_ms": 412}}, ...]}}.'


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step: of which model, where ("" is the machine that is fitted), how it lay, how long it took."""

    model: str
    on: str
    layout: Layout
    batch: int
    step_ms: float
    norm_group: int = 1
    dtype: Dtype | Literal[""] = ""

    def __str__(self) -> str:
        words = layout_words(self.layout, self.batch, self.dtype)
        return f"{self.model}{' on ' + self.on if self.on else ''}, {words}"


def read_steps(file: Path) -> list[MeasuredStep]:
    """The steps in a file.

    Raises:
      PlanError: no such file, or all that is wrong in it.
    """
    data = read_object(file, (FORMAT,), "file of measured steps", HOW)
    if not isinstance(data.get("steps"), list):
        raise PlanError(f"{file} holds no measured steps. {HOW}")
    found, wrong = [], []
    for number, one in enumerate(data["steps"], 1):
        try:
            found.append(_step(one))
        except MultipodError as error:
            wrong.append(f"step {number}: {error}")
        except (TypeError, ValueError, KeyError) as error:
            wrong.append(f"step {number}: {type(error).__name__}: {error}")
    if wrong:
        raise PlanError(f"{file}:\n" + "\n".join(wrong) + f"\n{HOW}")
    return found


def _step(data: dict[str, Any]) -> MeasuredStep:
    """One entry, checked.

    Raises:
      PlanError: a field that is none, or one that is missing.
    """
    for name in data:
        if name not in FIELDS:
            raise PlanError(f"there is no field {name!r}. {nearest(name, FIELDS)}")
    missing = [name for name in ("model", "batch", "step_ms") if name not in data]
    if missing:
        raise PlanError(f"it says no {', '.join(missing)}.")
    for name, kind in (("batch", int), ("step_ms", (int, float))):
        if not isinstance(data[name], kind) or isinstance(data[name], bool) or not data[name] > 0:
            raise PlanError(f"{name}={data[name]!r} is no number above 0.")
    for name in data.get("split", {}):
        if name not in FORMER_SPLIT:
            raise PlanError(f"nothing is split over {name!r}. {nearest(name, FORMER_SPLIT)}")
    layout = layout_of(data["layout"]) if "layout" in data else former_layout(data)
    plain = (str(data["model"]), str(data.get("on", "")), layout, data["batch"], float(data["step_ms"]))
    return MeasuredStep(*plain, data.get("norm_group", 1), data.get("dtype", ""))


def fit_steps(steps: Sequence[MeasuredStep], machine: Machine, workload: Callable[[str], Workload]) -> Fit:
    """The constants of `machine` that fit the steps, with the fit's errors.

    Args:
      steps: as `read_steps` gives them.
      machine: whose constants are fitted, and where steps ran that do not say a machine.
      workload: from a model's name.

    Raises:
      PlanError: fewer than two steps, layouts that cannot be, or steps that contradict each other.
    """
    if len(steps) < 2:
        raise PlanError(f"calibration: {len(steps)} measured steps fix no constants. Give two at the least.")
    measurements = [
        Measurement(str(step), step.step_ms / 1e3, partial(_priced, workload(step.model), step)) for step in steps
    ]
    kinds = {op for step in steps for op in _kinds(workload(step.model), step, machine)}
    names = [name for name in ORDER if name in kinds or name in ("memory", "op_s")][: len(steps) - 1]
    found = fit(machine, measurements, names)
    source = f"{', '.join(names)} fitted to {len(steps)} measured steps, median error {found.median_error:.0%}"
    return replace(found, machine=replace(found.machine, calibration=replace(found.machine.calibration, source=source)))


def _priced(workload: Workload, step: MeasuredStep, machine: Machine) -> float:
    on = _on(step, machine)
    return predict_step(workload, step.layout, step.batch, on, step.norm_group, step.dtype).step_s


def _on(step: MeasuredStep, machine: Machine) -> Machine:
    return machine.of(find(step.on).topology) if step.on else machine


def _kinds(workload: Workload, step: MeasuredStep, machine: Machine) -> set[str]:
    """The constants that a step's time depends on."""
    on = _on(step, machine)
    examples = examples_of(step.layout, step.batch, on)
    work = work_of(workload.of(step.dtype), examples, step.layout.split, on.lanes)
    return {op.kind for op in work.ops} | network_of(on)
