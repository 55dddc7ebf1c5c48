"""Candidates for a workload on a machine, priced; the best first. What is not tried is said."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from multipod.collectives.build import ALGORITHMS
from multipod.errors import MultipodError, PlanError, TopologyError
from multipod.plan import network
from multipod.plan.files import read_object
from multipod.plan.machine import Machine, find
from multipod.plan.mirror import with_copies
from multipod.plan.predict import WHOLE_MODEL, Choice, Prediction, predict_step, with_evaluations
from multipod.plan.predict import tile_of as tile_of_chips
from multipod.plan.workload import Dtype, Split, Workload
from multipod.topology.topology import Topology

SPLITS = (1, 2, 4, 8, 16)

PIPELINES = ("1f1b", "gpipe", "interleaved")
"""What is tried of `multipod.pipelines.build.PIPELINES`: the synchronous ones, which learn what one device learns.

Not `eager-1f1b`: a clock that is not held to ticks cannot tell it from `1f1b`, and it keeps more."""

LARGEST = 16
"""Devices of a replica that are tried at first: larger ones cost simulations of minutes on thousands of chips, and are
tried only where nothing else fits in memory."""

CHUNKS = 2
"""Parts of the model on each device of an interleaved pipeline."""

QUICK_ENOUGH = 1024
"""Chips up to which every algorithm is simulated; beyond, those that are known to be slow there are left out."""

LARGE = ("torus-2d", "row-column", "multi-ring", "halving-doubling")
"""What is tried beyond: packings of trees take minutes to build there, and plain rings take thousands of hops."""

LARGE_BROKEN = ("multi-ring", "halving-doubling", "detour-ring")
"""The same where chips or links failed: of what goes around a hole, one ring through all chips is tried there too."""


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
      predictions: those that fit in memory, the quickest first, then the others.
      tried: candidates priced.
      refused: (layout, reason) of those that cannot be.
      left_out: what was not tried, and why; empty if the search was exhaustive.
    """

    predictions: tuple[Prediction, ...]
    tried: int
    refused: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]

    @property
    def best(self) -> Prediction:
        """The quickest that fits."""
        return self.predictions[0]


def schedules(topology: Topology) -> tuple[str, ...]:
    """The algorithms that are tried on a machine."""
    broken = bool(topology.failed_chips | topology.failed_links)
    names = tuple(ALGORITHMS) if topology.size <= QUICK_ENOUGH else LARGE_BROKEN if broken else LARGE
    able = [name for name in names if "all-reduce" in ALGORITHMS[name].collectives]
    return tuple(name for name in able if ALGORITHMS[name].broken or not broken)


def candidates(
    workload: Workload,
    machine: Machine,
    batch: int,
    norm_examples: int = 64,
    dtypes: Sequence[Dtype | Literal[""]] = ("",),
    most: int = LARGEST,
) -> Iterator[Choice]:
    """Every layout that the workload's axes allow: splits, pipelines, schedules, update shared or not, precisions.

    Batch norm spans as many devices as it takes for `norm_examples` examples, where the model has any.
    """
    single = machine.chips == 1
    names: Sequence[str] = ("xla",) if single else schedules(machine.topology)
    for dtype, split in itertools.product(dtypes, _splits(workload, most)):
        if machine.devices % split.devices:
            continue
        able = (
            names
            if not (workload.splits_weights and tile_of_chips(split, machine))
            else tuple(filter(_in_tiles, names))
        )
        if split.stage > 1:
            for name, pipeline in itertools.product(able, PIPELINES):
                if split.stage * (CHUNKS if pipeline == "interleaved" else 1) <= workload.layers:
                    yield Choice(batch, split, name, False, pipeline=pipeline, chunks=CHUNKS, dtype=dtype)
            continue
        group = norm_group(workload, machine, batch, split, norm_examples)
        for name, shared in itertools.product(able, (True, False)):
            yield Choice(batch, split, name, shared, group, dtype=dtype)


def norm_group(workload: Workload, machine: Machine, batch: int, split: Split, norm_examples: int = 64) -> int:
    """Devices that batch norm spans so that it sees `norm_examples` examples; 1 for a model without it."""
    if not workload.norm_group_messages:
        return 1
    examples = max(1, batch * split.devices // machine.devices)
    return min(split.devices * max(1, norm_examples // examples), machine.devices)


def _in_tiles(name: str) -> bool:
    """Whether a schedule sums between those at the same place of their tiles."""
    return name == "xla" or "tile" in ALGORITHMS[name].options


def _splits(workload: Workload, most: int = LARGEST) -> Iterator[Split]:
    alone = [split.model for split in workload.splits if split == Split(model=split.model)]
    inside = SPLITS[1:4] if "model" in workload.axes else sorted(alone)  # of a stage
    yield Split()
    yield from workload.splits
    for n in SPLITS[1:]:
        if "spatial" in workload.axes:
            yield Split(spatial=n)
        if "model" in workload.axes:
            yield Split(model=n)
        if workload.cut is not None and n <= workload.layers:
            yield Split(stage=n)
            yield from (Split(model=m, stage=n) for m in inside if m * n <= most)


def search(
    workload: Workload,
    machine: Machine,
    batch: int,
    evaluate_every: float = 0.0,
    told: Callable[[int, int], None] | None = None,
    dtypes: Sequence[Dtype | Literal[""]] = ("",),
    mirror_every: int = 0,
) -> Found:
    """Prices every candidate. `told` hears (done, all) as it goes.

    dtypes: of products, those that are tried; "" is the model's own. Another one changes what a run learns.
    mirror_every: updates between copies of the state in the hosts' memories (`launch --survive`); 0: none are made.

    Raises:
      PlanError: none can be, with the reasons; or none fits in memory, with the largest batch that would.
    """
    choices = list(candidates(workload, machine, batch, dtypes=dtypes))
    every = Every(evaluate_every, mirror_every)
    found, refused = _priced(workload, machine, choices, every, told)
    most = LARGEST
    if found and not any(step.fits for step in found):
        known, most = set(choices), machine.devices
        more = [one for one in candidates(workload, machine, batch, dtypes=dtypes, most=most) if one not in known]
        steps, others = _priced(workload, machine, more, every, told)
        choices, found, refused = [*choices, *more], [*found, *steps], [*refused, *others]
    if not found:
        reasons = "".join(f"\n  {choice}: {reason}" for choice, reason in refused[:5])
        raise PlanError(f"{workload.name} with a batch of {batch:,} fits no layout of {machine}:{reasons}")
    if not any(step.fits for step in found):
        raise _too_large(workload, machine, batch, found)
    ordered = sorted(found, key=lambda step: (not step.fits, step.step_s, str(step.choice)))
    unsearched = (*(() if machine.chips == 1 else _left_out(machine.topology)), *_unsearched(workload, dtypes, most))
    return Found(tuple(ordered), len(choices), tuple(refused), unsearched)


def _priced(
    workload: Workload,
    machine: Machine,
    choices: Sequence[Choice],
    every: "Every",
    told: Callable[[int, int], None] | None,
) -> tuple[list[Prediction], list[tuple[str, str]]]:
    """The steps that can be, and the others with their reasons."""
    found: list[Prediction] = []
    refused: list[tuple[str, str]] = []
    for done, choice in enumerate(choices):
        if told is not None:
            told(done, len(choices))
        try:
            found.append(priced(workload, choice, machine, every))
        except MultipodError as error:
            refused.append((str(choice), str(error)))
    return found, refused


@dataclass(frozen=True)
class Every:
    """Updates between what a run does now and then; 0: never.

    Attributes:
      evaluation: of the model.
      mirror: copy of the state in the hosts' memories.
    """

    evaluation: float = 0.0
    mirror: int = 0


def priced(workload: Workload, choice: Choice, machine: Machine, every: Every) -> Prediction:
    """A step with its share of what is done now and then.

    Raises:
      MultipodError: as `predict_step`.
    """
    step = predict_step(workload, choice, machine)
    if every.evaluation:
        step = with_evaluations(step, workload, machine, every.evaluation)[0]
    return with_copies(step, machine, every.mirror)


def _unsearched(workload: Workload, dtypes: Sequence[str], most: int) -> Iterator[str]:
    """What could be laid out and was not tried."""
    axes = {axis for split in _splits(workload) for axis in split.sizes}
    if "model" in axes and workload.cut is not None and most == LARGEST:
        yield f"replicas of more than {most} devices, which nothing here needs"
    if axes - {"spatial"}:
        yield "schedules that know no tiles, for weights that are split over chips"
    if len(axes - {"stage"}) > 1:
        yield f"splits over several of {', '.join(sorted(axes - {'stage'}))} at once"
    if workload.cut is not None:
        yield "pipelines that never drain (they learn something else)"
    rest = [
        dtype for dtype in workload.dtypes if dtype not in dtypes and not ("" in dtypes and dtype == workload.dtype)
    ]
    if rest:
        yield f"products in {', '.join(rest)} (they learn something else: --precision)"


def _left_out(topology: Topology) -> tuple[str, ...]:
    """The algorithms that were not tried, by their reasons."""
    able = [name for name, builder in ALGORITHMS.items() if "all-reduce" in builder.collectives]
    whole = not topology.failed_chips | topology.failed_links
    broken = [] if whole else [name for name in able if not ALGORITHMS[name].broken]
    slow = [name for name in able if name not in (*schedules(topology), *broken)]
    reasons = ((broken, "need every chip"), (slow, f"take too long to build or to run beyond {QUICK_ENOUGH:,} chips"))
    return tuple(f"{', '.join(names)}, which {reason}" for names, reason in reasons if names)


def _too_large(workload: Workload, machine: Machine, batch: int, found: Sequence[Prediction]) -> PlanError:
    least = min(found, key=lambda step: step.memory.total)
    fitting = largest_batch(workload, machine, least.choice)
    then = f"a batch of {fitting:,} would fit so" if fitting else "no batch fits: take more devices or a larger split"
    return PlanError(
        f"{workload.name} with a batch of {batch:,} needs {least.memory.total / 2**30:.1f} GiB a device on {machine} "
        f"at "
        f"the least ({least.choice}), and there are {least.memory_limit / 2**30:.1f} GiB; {then}."
    )


def largest_batch(workload: Workload, machine: Machine, choice: Choice) -> int:
    """The largest batch, in whole examples a replica, that fits in memory in this layout; 0 if none does."""
    replicas = machine.devices // choice.split.devices
    low, high = 0, max(1, choice.batch // replicas)

    def fits(examples: int) -> bool:
        return predict_step(workload, replace(choice, batch=examples * replicas), machine).fits

    while fits(high) and high < 2**24:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * replicas


def scaling(workload: Workload, name: str, chips: Sequence[int], batch: int) -> list[Prediction]:
    """The best step on machines of each size, all with the same batch; sizes that cannot hold it are left out.

    Raises:
      PlanError: no size can.
    """
    steps = []
    for size in chips:
        try:
            steps.append(search(workload, of_size(name, size), batch).best)
        except (PlanError, TopologyError):
            continue
    if not steps:
        sizes = ", ".join(map(str, chips))
        raise PlanError(
            f"{workload.name} with a batch of {batch:,} fits on none of {sizes} chips. Change it, or add sizes."
        )
    return steps


def of_size(name: str, chips: int) -> Machine:
    """A machine of the kind of `name` with so many chips: the squarest slice, or the (half) multipod.

    Raises:
      TopologyError: the kind does not come in this size.
    """
    base = name.partition(":")[0]
    if base.startswith("tpu-v3"):
        if chips > QUICK_ENOUGH:
            return find(f"tpu-v3-multipod:32x{chips // 32}")
        base = "tpu-v3-pod"
    size = len(find(base).topology.shape)
    shape = [1] * size
    left = chips
    for dim in range(size):
        side = round(left ** (1 / (size - dim)))
        while left % side:
            side += 1
        shape[dim] = side
        left //= side
    return find(f"{base}:{'x'.join(map(str, sorted(shape, reverse=True)))}")


FORMAT = "multipod-plan-1"


@dataclass(frozen=True)
class Plan:
    """A plan as it is written down.

    Attributes:
      name: of the recipe or table.
      machine: as on the command line.
      choice: the layout.
      mesh: (rows, columns) of replicas; () where the machine has another form.
      prediction: what `Prediction.data` says, and of the run, if it was planned.
      precision: fields of the recipe that are set to the choice's type of products; () leaves them.
    """

    name: str
    machine: str
    choice: Choice
    mesh: tuple[int, ...]
    prediction: dict[str, Any]
    precision: tuple[str, ...] = ()

    def changes(self) -> list[str]:
        """What a recipe must be changed by to lie like this: for `multipod train --set`."""
        shared = str(self.choice.shard_update).lower()
        changes = [f"layout.gradient_sum={self.choice.schedule}", f"layout.shard_update={shared}"]
        changes.append(f"batch={self.choice.batch}")
        split = self.choice.split
        changes += [f"layout.{name}={n}" for name, n in split.sizes.items()]
        if split.stage > 1:
            changes += [f"layout.schedule={self.choice.pipeline}", f"layout.micro_batches={self.choice.micro_batches}"]
            changes += [f"layout.chunks={self.choice.chunks}"] if self.choice.pipeline == "interleaved" else []
        changes += [f"{name}={self.choice.dtype}" for name in self.precision]
        if split.devices > 1 and self.mesh:
            changes.append("layout.tile=" + "x".join(map(str, tile_of(split))))
        return [*changes, "layout.mesh=" + "x".join(map(str, self.mesh))] if self.mesh else changes


def tile_of(split: Split) -> tuple[int, int]:
    """Rows and columns of the devices of a replica: along the row up to four (two chips of two), in two rows beyond.

    As `predict.tile_of` prices them.
    """
    rows = 1 if split.devices < 8 else 2
    return rows, split.devices // rows


def mesh_of(machine: Machine, split: Split = WHOLE_MODEL) -> tuple[int, ...]:
    """The mesh of replicas: rows as the chips have them, a chip's devices side by side in its row.

    () where replicas of this form do not tile the machine.
    """
    rows, columns = _devices_of(machine)
    tall, wide = tile_of(split)
    return () if rows % tall or columns % wide else (rows // tall, columns // wide)


def _devices_of(machine: Machine) -> tuple[int, int]:
    shape = machine.topology.shape
    if len(shape) == 1:
        rows = next(r for r in range(math.isqrt(machine.devices), 0, -1) if machine.devices % r == 0)
        return (rows, machine.devices // rows)
    return (shape[0], machine.topology.size // shape[0] * machine.devices_per_chip)


def write_plan(plan: Plan, file: Path) -> None:
    """Writes a plan as JSON."""
    file.write_text(json.dumps({"format": FORMAT, **asdict(plan)}, indent=1) + "\n")


def read_plan(file: Path) -> Plan:
    """The plan in a file.

    Raises:
      PlanError: there is none in it.
    """
    data = read_object(file, FORMAT, "plan", HOW)
    try:
        choice = Choice(**{**data["choice"], "split": Split(**data["choice"]["split"])})
        precision = tuple(data.get("precision", ()))
        return Plan(data["name"], data["machine"], choice, tuple(data["mesh"]), dict(data["prediction"]), precision)
    except (KeyError, TypeError) as error:
        raise PlanError(f"{file} is no whole plan: {error}. {HOW}") from error


HOW = "Write one with `multipod plan RECIPE --on MACHINE --save FILE`."


def remember_costs(folder: Path | None) -> None:
    """Keeps what schedules cost between processes, in a file of this folder; a second search is instant then."""
    network.remember(None if folder is None else folder / "costs.json")
