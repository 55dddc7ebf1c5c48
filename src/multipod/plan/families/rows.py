"""Rows of scaling families, in TOML: what was measured of a job on some accelerators, or is to be predicted there.

    [[row]]
    family = "our-resnet"        # the same model, software and machine
    benchmark = "resnet"         # a name of the public families, or one of your own
    accelerator = "A100"
    accelerators = 8
    scale_up = 8                 # of them share the fast network of a box; on TPUs all
    batch = 3264                 # samples of an update, on all accelerators
    throughput_per_s = 22525.2   # samples a second while training; without it the row is predicted
    samples = 52527847           # to the target
    run_s = 2366.7

`accumulation`, `epochs` and `init_s` may be given too. The names of MLCommons' logs are understood (`global_batch`,
`gradient_accumulation_steps`), and the number of `nodes` instead of `scale_up`.
"""

import math
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from multipod.errors import PlanError, nearest
from multipod.plan.tables.convergence import COUNTED, REFERENCE

MEASURED = ("throughput_per_s", "samples", "epochs", "run_s", "init_s")
FIELDS = ("family", "benchmark", "accelerator", "accelerators", "scale_up", "batch", "accumulation", *MEASURED)
FORMER = {"global_batch": "batch", "gradient_accumulation_steps": "accumulation", "grad_accum": "accumulation"}
"""Names of MLCommons' logs, and ours."""

REMARKS = (
    "system", "nodes", "round", "submitter", "division", "unit", "software", "file", "how", "note", "family_sizes",
    "duplicate_of", "score_s", "evals", "eval_s", "rate_run_per_s", "throughput_logged", "run_s_failed", "epochs_runs",
    "samples_runs", "runs_without_stop", "runs_log_missing",
)  # fmt: skip
"""What else a row may say. Only `nodes` is read, where there is no `scale_up`, and `system`, where no `accelerator`."""

KINDS = {
    "tpu": ("tpu",),
    "gpu": ("nvidia", "geforce", "tesla", "radeon", "instinct", "gpu", "a100", "h100", "h200", "b200", "v100", "mi300"),
    "cpu": ("cpu", "xeon", "epyc", "socket"),
    "npu": ("ascend", "gaudi", "npu", "ipu", "trainium"),
}
"""Kinds of accelerators by words of their names: of one kind the networks between boxes are alike."""

BOX = 8
"""Accelerators of a box where nobody says."""

LEAST_AROUND = 0.003
"""Share of a run that is outside of training at the least."""

HOW = "Write [[row]] tables with family, benchmark, accelerators, batch, and throughput_per_s where it was measured."


@dataclass(frozen=True)
class FamilyRow:
    """A job on some accelerators.

    Attributes:
      family: rows of one family are of the same model, software and machine.
      benchmark: the model and its target; families of one benchmark are alike.
      accelerator: its name.
      accelerators: number of them; chips of TPUs.
      scale_up: those that share the fast network of a box.
      batch: samples of an update on all accelerators.
      accumulation: passes whose gradients one update adds up.
      throughput_per_s: samples a second while training; None: not known.
      samples: to the target; None: not known.
      epochs: the same in epochs; None: not known.
      run_s: from the first update to the target, evaluations included; None: not known.
      init_s: before the first update; None: not known.
    """

    family: str
    benchmark: str
    accelerator: str
    accelerators: int
    scale_up: int
    batch: float
    accumulation: int = 1
    throughput_per_s: float | None = None
    samples: float | None = None
    epochs: float | None = None
    run_s: float | None = None
    init_s: float | None = None

    @property
    def measured(self) -> bool:
        """Whether the throughput is known: such a row is no question."""
        return self.throughput_per_s is not None

    def asked(self, samples: float | None = None) -> "FamilyRow":
        """Returns this job as a question: without what was measured, but with `samples` to the target if given."""
        return replace(self, throughput_per_s=None, samples=samples, epochs=None, run_s=None, init_s=None)

    @property
    def boxes(self) -> float:
        """Number of boxes with a fast network inside."""
        return max(1.0, self.accelerators / self.scale_up)

    @property
    def kind(self) -> str:
        """Kind of the accelerator; its name where it is of none that is known."""
        name = self.accelerator.lower()
        return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), name)

    @property
    def around_s(self) -> float | None:
        """Seconds of the run outside of training: evaluations, the first update's start, the end.

        Not less than `LEAST_AROUND` of the run: logs do not tell throughput more exactly than that.
        """
        if self.run_s is None or self.samples is None or self.throughput_per_s is None:
            return None
        return max(self.run_s - self.samples / self.throughput_per_s, LEAST_AROUND * self.run_s)


def read_rows(file: Path) -> list[FamilyRow]:
    """The rows in a TOML file.

    Raises:
      PlanError: no such file, or all that is wrong in it.
    """
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{file}: {error.strerror}. {HOW}") from error
    except ValueError as error:  # TOML's errors, and those of UTF-8
        raise PlanError(f"{file} is no TOML: {error}. {HOW}") from error
    return rows_of(data, str(file))


def rows_of(data: Mapping[str, Any], name: str) -> list[FamilyRow]:
    """The rows of a TOML document; `name` is for errors.

    Raises:
      PlanError: all that is wrong in them.
    """
    tables = data.get("row")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise PlanError(f"{name} holds no rows. {HOW}")
    rows, wrong = [], []
    for number, table in enumerate(tables, 1):
        try:
            rows.append(_row(table))
        except PlanError as error:
            wrong.append(f"row {number}: {error}")
    if wrong:
        raise PlanError(f"{name}:\n" + "\n".join(wrong))
    return rows


@cache
def public_rows() -> tuple[FamilyRow, ...]:
    """MLPerf Training v0.7 and v1.0: 40 families of nine benchmarks."""
    text = files("multipod.plan.families").joinpath("mlperf.toml").read_text(encoding="utf-8")
    return tuple(rows_of(tomllib.loads(text), "mlperf.toml"))


@cache
def reference_rows() -> tuple[FamilyRow, ...]:
    """MLPerf's reference convergence points, as rows with nothing but a batch and the samples to the target."""
    return tuple(
        FamilyRow(f"reference/{name}", _benchmark(name), "", 1, 1, point.batch, samples=point.epochs * COUNTED[name])
        for name, points in REFERENCE.items()
        for point in points
    )


def by_family(rows: Iterable[FamilyRow]) -> dict[str, list[FamilyRow]]:
    """The rows of each family, the smallest number of accelerators first."""
    families: dict[str, list[FamilyRow]] = {}
    for row in sorted(rows, key=lambda row: row.accelerators):
        families.setdefault(row.family, []).append(row)
    return families


def asked_rows(rows: Sequence[FamilyRow], sizes: Sequence[tuple[int, float | None]]) -> list[FamilyRow]:
    """Questions about other sizes of every family in `rows`.

    Args:
      rows: measured.
      sizes: accelerators and the batch; None: as many samples on each accelerator as in the family's largest row.
    """
    asked = []
    for family in by_family(row for row in rows if row.measured).values():
        last = family[-1]
        for accelerators, batch in sizes:
            batch = last.batch * accelerators / last.accelerators if batch is None else batch
            scale_up = accelerators if last.kind == "tpu" else last.scale_up
            asked.append(replace(last, accelerators=accelerators, batch=batch, scale_up=scale_up).asked())
    return asked


def _benchmark(model: str) -> str:
    return {"resnet50": "resnet"}.get(model, model)


def _row(table: Mapping[str, Any]) -> FamilyRow:
    """One table, checked.

    Raises:
      PlanError: a field that is none, is missing, or makes no sense.
    """
    data = {FORMER.get(name, name): value for name, value in table.items()}
    for name in data:
        if name not in (*FIELDS, *REMARKS):
            raise PlanError(f"there is no field {name!r}. {nearest(name, FIELDS)}")
    missing = [name for name in ("accelerators", "batch") if name not in data]
    if missing:
        raise PlanError(f"it says no {', '.join(missing)}. {HOW}")
    benchmark, accelerator = _name(data, "benchmark"), _name(data, "accelerator") or _name(data, "system")
    accelerators = _whole(data, "accelerators")
    return FamilyRow(
        _name(data, "family") or benchmark or "this job",
        benchmark,
        accelerator,
        accelerators,
        _scale_up(data, accelerator, accelerators),
        _positive(data, "batch"),
        _whole(data, "accumulation"),
        **{name: _positive(data, name) for name in MEASURED if name in data},
    )


def _scale_up(data: Mapping[str, Any], accelerator: str, accelerators: int) -> int:
    """Accelerators with a fast network: as said, or those of a node, or `BOX`; of TPUs all."""
    if "tpu" in accelerator.lower():
        return accelerators
    if "scale_up" in data:
        return _whole(data, "scale_up")
    return max(1, accelerators // _whole(data, "nodes")) if "nodes" in data else BOX


def _name(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name, "")
    if not isinstance(value, str):
        raise PlanError(f"{name} is {value!r}, and must be text.")
    return value


def _whole(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name, 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} is {value!r}, and must be a whole number from 1 on.")
    return value


def _positive(data: Mapping[str, Any], name: str) -> float:
    """A number; of a list, as of several runs, the median."""
    value = data[name]
    numbers = value if isinstance(value, list) and value else [value]
    if any(isinstance(one, bool) or not isinstance(one, int | float) for one in numbers):
        raise PlanError(f"{name} is {value!r}, and must be a number, or a list of them.")
    median = float(statistics.median(numbers))
    if not (math.isfinite(median) and median > 0):
        raise PlanError(f"{name} is {median:g}, and must be finite and above 0. Leave it out where it is not known.")
    return median
