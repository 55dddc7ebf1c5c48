"""Candidates for a workload on a machine, priced; the best first. What is not tried is said."""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from multipod.collectives.build import ALGORITHMS
from multipod.errors import MultipodError, PlanError, TopologyError
from multipod.layout.compatible import LayoutUse, conflicts
from multipod.layout.layout import Layout
from multipod.layout.split import UNSPLIT, ModelSplit, PipelineSplit
from multipod.layout.sync import Sharding, Sync
from multipod.plan import network
from multipod.plan.machine import Machine, find
from multipod.plan.mirror import with_copies
from multipod.plan.placing import norm_tile
from multipod.plan.predict import Prediction, layout_words, predict_step, with_evaluations
from multipod.plan.rank import ranked
from multipod.plan.sync import chips_of_weights
from multipod.plan.workload import Dtype, Workload
from multipod.topology.topology import Topology

SPLITS = (1, 2, 4, 8, 16)

IMAGES: tuple[tuple[int, ...], ...] = (
    (),
    *((n,) for n in SPLITS[1:]),
    *((2, n) for n in SPLITS[1:4]),
    (4, 2),
    (4, 4),
    (8, 2),
)
"""Devices that split the height of images, or height and width."""

INSIDE = SPLITS[1:4]
"""Devices that split the layers of a stage."""

SHARDINGS: tuple[Sharding, ...] = ("zero1", "none", "fsdp")
"""What each replica keeps: all forms learn the same."""

BUCKETS = (4 << 20, 25 << 20)
"""Bytes of a message of the gradient sum that are tried, too, where it can go on beside the backward pass; 25 MiB are
PyTorch's (arXiv:2006.15704)."""

SCHEDULES = ("1f1b", "gpipe", "interleaved")
"""What is tried of `multipod.pipelines.build.PIPELINES`: the synchronous ones, which learn what one device learns.

Not `eager-1f1b`: a clock that is not held to ticks cannot tell it from `1f1b`, and it keeps more."""

LARGEST = 16
"""Devices of a replica that are tried at first: larger ones cost simulations of minutes on thousands of chips, and are
tried only where nothing else fits in memory."""

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
      predictions: those that fit in memory in the order of `rank.ranked`, then the others.
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
        """The quickest that fits; of ties in who sums, the engine."""
        return self.predictions[0]


def sums(topology: Topology) -> tuple[str, ...]:
    """The ways of summing that are tried on a machine: the engine's own, unless it has failures, and schedules."""
    own = () if _broken(topology) and not all(topology.switched) else ("xla",)
    return own if topology.size == 1 else (*own, *schedules(topology))


def _broken(topology: Topology) -> bool:
    return bool(topology.failed_chips | topology.failed_links)


def schedules(topology: Topology) -> tuple[str, ...]:
    """The algorithms that are tried on a machine."""
    broken = _broken(topology)
    names = tuple(ALGORITHMS) if topology.size <= QUICK_ENOUGH else LARGE_BROKEN if broken else LARGE
    able = [name for name in names if "all-reduce" in ALGORITHMS[name].collectives]
    return tuple(name for name in able if ALGORITHMS[name].broken or not broken)


@dataclass(frozen=True)
class Candidate:
    """A layout that is tried, with what of the model changes its price.

    Attributes:
      layout: without a mesh.
      norm_group: devices that share batch norm's statistics.
      dtype: of products; "" is the workload's own.
    """

    layout: Layout
    norm_group: int = 1
    dtype: Dtype | Literal[""] = ""


def candidates(
    workload: Workload,
    machine: Machine,
    batch: int,
    dtypes: Sequence[Dtype | Literal[""]] = ("",),
    most: int = LARGEST,
) -> Iterator[Candidate]:
    """Every layout that the workload's axes allow: products of splits, pipelines, sums, sharding, buckets, precisions.

    Batch norm spans the devices that `norm_group` says.
    """
    names = sums(machine.topology)
    buckets = (0, *BUCKETS) if machine.overlaps and machine.chips > 1 else (0,)
    for dtype, (split, stages) in itertools.product(dtypes, _splits(workload, most)):
        if machine.devices % (split.devices * stages):
            continue
        replica = Layout(split=split, pipeline=_stages(stages))
        apart = workload.splits_weights and chips_of_weights(replica, machine)
        able = tuple(filter(_in_replicas, names)) if apart else names
        if stages > 1:
            for name, schedule in itertools.product(able, SCHEDULES):
                pipeline = PipelineSplit(stages, schedule)
                if pipeline.parts <= workload.layers:
                    yield Candidate(Layout(split=split, pipeline=pipeline, sync=Sync(name)), dtype=dtype)
            continue
        group = norm_group(workload, machine, batch, split.devices)
        for name, sharding, nbytes in itertools.product(able, SHARDINGS, buckets):
            yield Candidate(Layout(split=split, sync=Sync(name, sharding, bucket_bytes=nbytes)), group, dtype)


def _stages(stages: int) -> PipelineSplit | None:
    return PipelineSplit(stages) if stages > 1 else None


def norm_group(workload: Workload, machine: Machine, batch: int, each: int) -> int:
    """Devices that batch norm spans, with replicas of `each` devices: what is settled, or a tile with enough examples.

    1 for a model without it.
    """
    if not workload.norm_group_messages:
        return 1
    replicas = workload.norm_replicas
    if not replicas and workload.norm_examples:
        wanted = max(1, workload.norm_examples // max(1, batch * each // machine.devices))
        replicas = math.prod(norm_tile(each, wanted, machine))
    return min(each * replicas, machine.devices) if replicas else machine.devices


def _in_replicas(name: str) -> bool:
    """Whether a schedule sums between those at the same place of their replicas."""
    return name == "xla" or "tile" in ALGORITHMS[name].options


def _splits(workload: Workload, most: int = LARGEST) -> Iterator[tuple[ModelSplit, int]]:
    """What is tried to split a replica: its layers, and the stages that they lie in."""
    inside = [*_products(workload, most), *(split for split in workload.splits if split.devices <= most)]
    yield from ((split, 1) for split in dict.fromkeys(inside))
    if workload.cut is None:
        return
    alone = [split.model for split in workload.splits if split == ModelSplit(model=split.model)]
    within = INSIDE if "model" in workload.axes else sorted(alone)
    for stages in SPLITS[1:]:
        if stages <= workload.layers:
            yield UNSPLIT, stages
            yield from ((ModelSplit(model=m), stages) for m in within if m * stages <= most)


def _products(workload: Workload, most: int) -> Iterator[ModelSplit]:
    """Every product of the workload's axes, of at most as many devices as an axis alone may have, or `most`."""
    images = IMAGES if "spatial" in workload.axes else IMAGES[:1]
    models, experts = (SPLITS if axis in workload.axes else SPLITS[:1] for axis in ("model", "expert"))
    for spatial, model, expert in itertools.product(images, models, experts):
        if math.prod(spatial) * model * expert <= max(most, SPLITS[-1]):
            yield ModelSplit(spatial, model, expert)


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
    price = partial(_priced, workload, machine, batch, every=every, told=told)
    found, refused = price(choices)
    most = LARGEST
    if found and not any(step.fits for step in found):
        known, most = set(choices), machine.devices
        wider = candidates(workload, machine, batch, dtypes=dtypes, most=most)
        more = [candidate for candidate in wider if candidate not in known]
        steps, others = price(more)
        choices, found, refused = [*choices, *more], [*found, *steps], [*refused, *others]
    if not found:
        reasons = "".join(f"\n  {words}: {reason}" for words, reason in refused[:5])
        raise PlanError(f"{workload.name} with a batch of {batch:,} fits no layout of {machine}:{reasons}")
    if not any(step.fits for step in found):
        raise _too_large(workload, machine, batch, found)
    ordered = ranked(found, machine)
    left_out = () if machine.chips == 1 else _left_out(machine.topology)
    rounded = _rounded(workload, machine, ordered[0])
    return Found(
        tuple(ordered), len(choices), tuple(refused), (*left_out, *_unsearched(workload, dtypes, most), *rounded)
    )


def _priced(
    workload: Workload,
    machine: Machine,
    batch: int,
    choices: Sequence[Candidate],
    every: "Every",
    told: Callable[[int, int], None] | None,
) -> tuple[list[Prediction], list[tuple[str, str]]]:
    """The steps that can be, and the others with their reasons."""
    steps: list[Prediction] = []
    refused: list[tuple[str, str]] = []
    for done, candidate in enumerate(choices):
        if told is not None:
            told(done, len(choices))
        try:
            steps.append(priced(workload, candidate, batch, machine, every))
        except MultipodError as error:
            refused.append((layout_words(candidate.layout, batch, candidate.dtype), str(error)))
    return steps, refused


@dataclass(frozen=True)
class Every:
    """Updates between what a run does now and then; 0: never.

    Attributes:
      evaluation: of the model.
      mirror: copy of the state in the hosts' memories.
    """

    evaluation: float = 0.0
    mirror: int = 0


def priced(workload: Workload, candidate: Candidate, batch: int, machine: Machine, every: Every) -> Prediction:
    """A step with its share of what is done now and then.

    Raises:
      MultipodError: see `predict_step`.
    """
    step = predict_step(workload, candidate.layout, batch, machine, candidate.norm_group, candidate.dtype)
    if every.evaluation:
        step = with_evaluations(step, workload, machine, every.evaluation)[0]
    return with_copies(step, machine, every.mirror)


def _unsearched(workload: Workload, dtypes: Sequence[str], most: int) -> Iterator[str]:
    """What could be laid out and was not tried."""
    tried = [{*split.sizes, *["stage"] * (stages > 1)} for split, stages in _splits(workload, most)]
    axes = set[str]().union(*tried)
    if axes and most == LARGEST:
        yield f"replicas of more than {most} devices, which nothing here needs"
    if axes - {"spatial", "width"}:
        yield "schedules that know no replicas, for weights that are split over chips"
    pairs = [{*pair} for pair in itertools.combinations(sorted(axes - {"width"}), 2)]
    apart = [pair for pair in pairs if not any(pair <= one for one in tried)]
    for able, why in ((True, " in one replica"), (False, ", which exclude each other in a run")):
        named = [" x ".join(sorted(pair)) for pair in apart if _goes_together(pair) == able]
        if named:
            yield f"{', '.join(named)}{why}"
    yield from workload.unasked
    if workload.cut is not None:
        yield "pipelines that never drain (they learn something else)"
    rest = [
        dtype for dtype in workload.dtypes if dtype not in dtypes and not ("" in dtypes and dtype == workload.dtype)
    ]
    if rest:
        yield f"products in {', '.join(rest)} (they learn something else: --precision)"


def _goes_together(axes: Collection[str]) -> bool:
    """Whether the trainer has a layout whose replicas are split over all these axes."""
    split = ModelSplit((2,) if "spatial" in axes else (), 1 + ("model" in axes), 1 + ("expert" in axes))
    return not conflicts(LayoutUse(split, _stages(1 + ("stage" in axes))))


def _rounded(workload: Workload, machine: Machine, best: Prediction) -> Iterator[str]:
    """What the best layout would gain if less precise numbers travelled, which rounds what is learnt."""
    sync = best.layout.sync
    if machine.chips == 1 or best.layout.pipeline:
        return
    ways = []
    if workload.of(best.dtype).wire_bytes > 2:
        ways.append(("wire=bfloat16", replace(sync, sum_dtype="bfloat16")))
    if sync.shards_update:
        ways.append(("gather=bfloat16", replace(sync, gather_dtype="bfloat16")))
    for words, changed in ways:
        layout = replace(best.layout, sync=changed)
        step = predict_step(workload, layout, best.batch, machine, best.norm_group, best.dtype)
        change_s = step.step_s - (best.step_s - best.evaluation_s - best.copies_s)
        if change_s < -1e-6:
            yield f"{words}: {1e3 * change_s:+.2f} ms (it rounds what travels, so it learns something else)"


def _left_out(topology: Topology) -> tuple[str, ...]:
    """The algorithms that were not tried, by their reasons."""
    able = [name for name, builder in ALGORITHMS.items() if "all-reduce" in builder.collectives]
    whole = not topology.failed_chips | topology.failed_links
    able = [*([] if all(topology.switched) else ["xla"]), *able]
    broken = [] if whole else [name for name in able if name == "xla" or not ALGORITHMS[name].broken]
    slow = [name for name in able if name not in (*sums(topology), *broken)]
    reasons = ((broken, "need every chip"), (slow, f"take too long to build or to run beyond {QUICK_ENOUGH:,} chips"))
    return tuple(f"{', '.join(names)}, which {reason}" for names, reason in reasons if names)


def _too_large(workload: Workload, machine: Machine, batch: int, found: Sequence[Prediction]) -> PlanError:
    least = min(found, key=lambda step: step.memory.total)
    fitting = largest_batch(workload, least, machine)
    then = f"a batch of {fitting:,} would fit so" if fitting else "no batch fits: take more devices or a larger split"
    return PlanError(
        f"{workload.name} with a batch of {batch:,} needs {least.memory.total / 2**30:.1f} GiB a device on {machine} "
        f"at the least ({least.words}), and there are {least.memory_limit / 2**30:.1f} GiB; {then}."
    )


def largest_batch(workload: Workload, step: Prediction, machine: Machine) -> int:
    """The largest batch, in whole examples a replica, that fits in memory in the layout of `step`; 0 if none does."""
    replicas = machine.devices // step.layout.replica_devices
    low, high = 0, max(1, step.batch // replicas)

    def fits(examples: int) -> bool:
        batch = examples * replicas
        return predict_step(workload, step.layout, batch, machine, step.norm_group, step.dtype).fits

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


def remember_costs(folder: Path | None) -> None:
    """Keeps what schedules cost between processes, in a file of this folder; a second search is instant then."""
    network.remember(None if folder is None else folder / "costs.json")
