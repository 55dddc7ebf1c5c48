"""MLPerf's DLRM on 256 chips: the place of its tables that was published beside those that the planner prices."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from multipod.data.source import ArraySource
from multipod.experiments.outcome import Section
from multipod.layout.layout import Layout
from multipod.layout.split import ModelSplit
from multipod.layout.sync import Sync
from multipod.metrics.binary import BinaryClassification
from multipod.models.dlrm_published import mlperf
from multipod.models.dlrm_tables import Placement, TablePlacement
from multipod.optim.rates import Constant
from multipod.optim.sgd import Sgd
from multipod.plan.machine import Machine
from multipod.plan.predict import Prediction, predict_step
from multipod.plan.tables.published import pod
from multipod.plan.traced.program import workload_of
from multipod.recipe.recipe import Recipe

CHIPS, BATCH = 256, 65_536
"""Of the published run; 65,536 is the largest batch that converges (arXiv:2011.03641, section 4.6)."""

PUBLISHED: tuple[Placement, int] = "auto", 2 * CHIPS
"""The 13 largest tables split by rows over all devices, the 13 smallest in one table that each device has."""

TRIED: tuple[tuple[Placement, int], ...] = (
    PUBLISHED,
    ("row", 2 * CHIPS),
    ("auto", 64),
    ("auto", 32),
    ("column", 64),
    ("column", 32),
    ("table", 16),
)
"""Places of the tables, and the devices that share them."""


@dataclass(frozen=True)
class _OneClick:
    """An example of the shapes of Criteo's logs: a plan reads nothing else."""

    @cached_property
    def _source(self) -> ArraySource:
        ids, dense = np.zeros((1, 26), np.int32), np.zeros((1, 13), np.float32)
        return ArraySource({"dense": dense, "ids": ids, "label": np.zeros(1, np.int32)})

    def train(self) -> ArraySource:
        """The example."""
        return self._source

    def test(self) -> ArraySource:
        """The example."""
        return self._source


def priced(place: Placement, devices: int, machine: Machine) -> Prediction:
    """The step with the tables so placed and shared by so many devices, under SGD as it was run.

    Raises:
      MultipodError: a place that cannot be.
    """
    model = mlperf(tables=TablePlacement(place, parts=devices))
    recipe = Recipe("dlrm", model, _OneClick(), BinaryClassification(), Sgd(Constant(1.0)), BATCH, 1)
    return predict_step(workload_of(recipe), Layout(split=ModelSplit(expert=devices), sync=Sync("xla")), BATCH, machine)


def section(machine: Machine) -> Section:
    """The placements of `TRIED`, priced by the constants of `machine`."""
    on = machine.of(pod(CHIPS).topology)
    steps = {(place, devices): priced(place, devices, on) for place, devices in TRIED}
    quickest = min((one for one, step in steps.items() if step.fits), key=lambda one: steps[one].step_s)
    verdict = "the same" if quickest == PUBLISHED else f"{quickest[0]} over {quickest[1]} devices"
    text = (
        "MLPerf's DLRM (187.8 M rows of 128 features, 96 GB in 26 tables) at batch 65,536 on 256 chips, as "
        "arXiv:2011.03641 ran it: the 13 largest tables split by rows over all chips, the 13 smallest in one table "
        "that every device has (`auto`, 512 devices). No time of a step or of the run is known here from a source, so "
        f"nothing is claimed. The quickest of these by our prices: {verdict}. The steps are those of this library's "
        "program: its gradient of a split table is of the table's own size, and SGD passes all of the table, where the "
        "published run's embedding engine touches the rows of the batch. By table every device has the room of the "
        "fullest."
    )
    head = ("place", "devices that share", "step, ms", "parts, ms", "GiB a device", "fits")
    return Section("DLRM's tables", text, head, [_row(place, n, step) for (place, n), step in steps.items()])


def _row(place: Placement, devices: int, step: Prediction) -> tuple[str, ...]:
    parts = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in step.parts[:4])
    published = " (published)" if (place, devices) == PUBLISHED else ""
    memory = f"{step.memory.total / 2**30:.1f}"
    return place + published, str(devices), f"{1e3 * step.step_s:.2f}", parts, memory, "yes" if step.fits else "no"
