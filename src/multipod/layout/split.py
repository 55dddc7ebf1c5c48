"""How one replica of a model lies on several devices: `ModelSplit` inside its layers, `PipelineSplit` between them."""

import math
from dataclasses import dataclass, fields
from functools import cache, cached_property

from multipod.errors import LayoutError, nearest
from multipod.layout.axes import AXES, DATA_AXES
from multipod.layout.rules import DEFAULT_TABLE, Rule, parse_rule
from multipod.pipelines.build import PIPELINES

ASYNCHRONOUS = ("pipemare", "pipedream")
"""The pipelines that never drain: what they learn depends on the stages, the micro-batches and the schedule."""

CHUNKS = 2
"""Parts of the model on each device of an interleaved pipeline, where nobody says."""


@dataclass(frozen=True)
class ModelSplit:
    """The devices that share the layers of one replica, or of one stage of it, and what each axis splits.

    Attributes:
      spatial: parts that the height of images is cut in, or of height and width, as (4,) or (2, 2).
      model: tensor parallelism: devices that split the dims which `rules` give to the axis `model`.
      expert: expert parallelism: devices that split the experts, or the tables of a recommendation model; they split
        the batch too, so they count as data devices for everything else.
      rules: which axis splits what (`multipod.layout.rules.Rule`); they go before `DEFAULT_RULES`.
    """

    spatial: tuple[int, ...] = ()
    model: int = 1
    expert: int = 1
    rules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        wrong = [*_wrong_sizes(self), *_wrong_rules(self.rules)]
        if wrong:
            raise LayoutError("\n".join(wrong))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of its axes, those of size 1 left out, in the order of `AXES`."""
        sizes = {name: axis.size(self) for name, axis in AXES.items() if axis.size is not None}
        return {name: size for name, size in sizes.items() if size > 1}

    @cached_property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes.values())

    @cached_property
    def weight_devices(self) -> int:
        """Devices that hold different weights, at least in part."""
        return math.prod(size for axis, size in self.sizes.items() if AXES[axis].weights)

    @property
    def spatial_devices(self) -> int:
        """The devices that share an image."""
        return math.prod(self.spatial)

    @cached_property
    def table(self) -> tuple[Rule, ...]:
        """All rules, its own first."""
        return (*map(parse_rule, self.rules), *DEFAULT_TABLE) if self.rules else DEFAULT_TABLE

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())


def _wrong_sizes(split: ModelSplit) -> list[str]:
    wrong = []
    if len(split.spatial) > 2 or any(size < 1 for size in split.spatial):
        wrong.append(f"layout.spatial={split.spatial}: give parts of the height, as 4, or of height and width, as 2x2.")
    sizes = {field.name: getattr(split, field.name) for field in fields(split)}
    small = [f"{name}={size}" for name, size in sizes.items() if isinstance(size, int) and size < 1]
    if small:
        wrong.append(f"layout: {', '.join(small)}. Sizes are 1 or more.")
    return wrong


def _wrong_rules(rules: tuple[str, ...]) -> list[str]:
    wrong = []
    for text in rules:
        try:
            _check_axes(parse_rule(text))
        except LayoutError as error:
            wrong.append(str(error))
    return wrong


def _check_axes(rule: Rule) -> None:
    for axis in (axis for axes in rule.axes for axis in axes):
        if axis not in AXES:
            raise LayoutError(f"layout.rules: {rule.text!r} names axis {axis!r}. {nearest(axis, AXES)}")
        if axis in DATA_AXES:
            raise LayoutError(
                f"layout.rules: {rule.text!r} splits weights over the data axis {axis}. shard_weights=true does "
                "that, for all of them; experts go to the axis expert."
            )


UNSPLIT = ModelSplit()
"""Each replica on a device of its own."""


@dataclass(frozen=True)
class PipelineSplit:
    """A pipeline: the layers of a replica in consecutive stages, through which micro-batches travel.

    Attributes:
      stages: each on a device of its own, or on `ModelSplit.model` devices that split its layers.
      schedule: when which stage treats which micro-batch: a name in `multipod.pipelines.build.PIPELINES`.
      micro_batches: parts of the batch that travel through the stages; 0: four for each stage, or the most below that
        which divide a device's rows (`multipod.layout.stages.micro_batches`).
      chunks: (`interleaved`) parts of the model on each device.
      cut: how many of the model's layers each part has, in order; empty balances the parts by the layers' estimated
        costs. `multipod show --time-layers` measures them.
    """

    stages: int
    schedule: str = "1f1b"
    micro_batches: int = 0
    chunks: int = CHUNKS
    cut: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        wrong = _wrong_pipeline(self)
        if wrong:
            raise LayoutError("\n".join(wrong))

    @property
    def options(self) -> dict[str, int]:
        """What the builder of the schedule takes beside stages and micro-batches."""
        return {name: getattr(self, name) for name in _options(self.schedule)}

    @property
    def parts(self) -> int:
        """Parts that the model is cut into."""
        return self.stages * self.options.get("chunks", 1)

    @property
    def in_rounds(self) -> bool:
        """Whether micro-batches come in rounds of as many as there are stages."""
        return "chunks" in _options(self.schedule)

    @property
    def asynchronous(self) -> bool:
        """Whether stages update at moments of their own, so that passes are under way between updates."""
        return self.schedule in ASYNCHRONOUS


@cache
def _options(schedule: str) -> tuple[str, ...]:
    return tuple(PIPELINES[schedule].options)


def _wrong_pipeline(pipeline: PipelineSplit) -> list[str]:
    wrong = []
    if pipeline.stages < 1 or pipeline.chunks < 1 or pipeline.micro_batches < 0:
        wrong.append(
            f"layout: stage={pipeline.stages}, chunks={pipeline.chunks}, micro_batches={pipeline.micro_batches}. Sizes "
            "are 1 or more; micro_batches 0 or more."
        )
    if pipeline.schedule not in PIPELINES:
        wrong.append(
            f"layout.schedule: no pipeline is called {pipeline.schedule!r}. {nearest(pipeline.schedule, PIPELINES)}"
        )
    elif pipeline.chunks != CHUNKS and not pipeline.in_rounds:
        wrong.append(
            f"layout.chunks={pipeline.chunks}: {pipeline.schedule} has one part of the model on each device. Take "
            "schedule=interleaved, or leave it out."
        )
    return wrong
