"""Cuts a model, given as a sequence of layers, into the parts of a pipeline. No JAX: numbers and names.

The embedding is the first layer and the head the last, so they come to lie at the ends by themselves. Layers may differ
in cost and in shape, and so may the parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multipod.errors import LayoutError
from multipod.pipelines.check import check_tied
from multipod.pipelines.schedule import PipelineSchedule


@dataclass(frozen=True)
class Layer:
    """What a cut needs to know of a layer.

    Attributes:
      name: of the layer, for messages.
      cost: of a forward and backward pass, in any unit.
      weights: names of its weights; one that several layers name is tied.
      batch_statistics: whether it normalises over the examples of a batch.
    """

    name: str
    cost: float = 1.0
    weights: tuple[str, ...] = ()
    batch_statistics: bool = False


@dataclass(frozen=True)
class Cut:
    """A model in parts.

    Attributes:
      layers: of the whole model.
      starts: the first layer of each part, and the number of layers at the end.
    """

    layers: tuple[Layer, ...]
    starts: tuple[int, ...]

    @property
    def parts(self) -> tuple[tuple[Layer, ...], ...]:
        """The layers of each part."""
        return tuple(self.layers[a:b] for a, b in zip(self.starts, self.starts[1:], strict=False))

    @property
    def costs(self) -> tuple[float, ...]:
        """The cost of each part."""
        return tuple(sum(layer.cost for layer in part) for part in self.parts)

    @property
    def balance(self) -> float:
        """The mean cost over the highest: the share of the time that a full pipe works, 1 at the best."""
        return sum(self.costs) / len(self.costs) / max(self.costs) if max(self.costs) > 0 else 1.0

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Weights that several parts hold, with those parts."""
        holders: dict[str, list[int]] = {}
        for n, part in enumerate(self.parts):
            for name in {name for layer in part for name in layer.weights}:
                holders.setdefault(name, []).append(n)
        return {name: tuple(parts) for name, parts in sorted(holders.items()) if len(parts) > 1}


def balanced(layers: Sequence[Layer], parts: int) -> Cut:
    """The cut into consecutive parts, none empty, whose costliest part is cheapest.

    Dynamic programming over (layers so far, parts so far): O(layers^2 * parts). Among equals it takes the cut with the
    smallest sum of squared costs, so that the other parts are even too.

    Raises:
      LayoutError: more parts than layers, or a cost below 0.
    """
    _checked(layers, parts)
    before = [0.0]
    for layer in layers:
        before.append(before[-1] + layer.cost)
    n = len(layers)
    # best[k][end]: (highest cost, sum of squares, start of the last part) of the first `end` layers in k parts.
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]
    for k in range(1, parts + 1):
        row = {}
        for end in range(k, n - (parts - k) + 1):
            row[end] = min(
                (max(most, before[end] - before[start]), squares + (before[end] - before[start]) ** 2, start)
                for start, (most, squares, _) in best[k - 1].items()
                if start < end
            )
        best.append(row)
    starts = [n]
    for k in range(parts, 0, -1):
        starts.append(best[k][starts[-1]][2])
    return Cut(tuple(layers), tuple(reversed(starts)))


def equal(layers: Sequence[Layer], parts: int) -> Cut:
    """The cut into parts of equally many layers; where they do not divide, the first parts have one more.

    Raises:
      LayoutError: more parts than layers.
    """
    _checked(layers, parts)
    each, more = divmod(len(layers), parts)
    starts = [n * each + min(n, more) for n in range(parts + 1)]
    return Cut(tuple(layers), tuple(starts))


def as_asked(layers: Sequence[Layer], parts: int, counts: Sequence[int]) -> Cut:
    """The cut into parts of `counts` layers.

    Raises:
      LayoutError: other parts than asked for, or other layers than the model's.
    """
    _checked(layers, parts)
    text = "x".join(map(str, counts))
    if len(counts) != parts or min(counts) < 1 or sum(counts) != len(layers):
        fits = "x".join(str(len(part)) for part in balanced(layers, parts).parts)
        raise LayoutError(
            f"layout.cut={text}: {len(counts)} parts of {sum(counts)} layers, and there are {parts} parts of a model "
            f"of {len(layers)} layers. Give each part its number of layers, as {fits}, or leave it out."
        )
    return Cut(tuple(layers), tuple(sum(counts[:n]) for n in range(parts + 1)))


def micro_batches(asked: int, stages: int, rows: int, *, rounds: bool = False) -> int:
    """How many micro-batches go through `stages` in an update, of a data device's `rows`.

    `asked`; or, if that is 0, the most up to four for each stage that divide the rows: a pipe that drains then works
    4 P / (5 P - 1) of the time. rounds: (interleaved) only multiples of the stages.

    Raises:
      LayoutError: none divides the rows; with the nearest batch that does.
    """
    step = stages if rounds else 1
    found = asked or next((n for n in range(4 * stages, 0, -1) if n % step == 0 and rows % n == 0), 0)
    if not found or rows % found:
        wanted = found or stages
        near = " or ".join(map(str, sorted({rows // wanted * wanted, -(-rows // wanted) * wanted} - {0})))
        fitting = [str(n) for n in range(1, 4 * stages + 1) if n % step == 0 and rows % n == 0]
        way = f"Take {', '.join(fitting)} micro-batches, or" if fitting else "Take"
        raise LayoutError(
            f"layout: {wanted} micro-batches do not divide the {rows} rows of a data device. {way} {near} rows."
        )
    return found


def check_cut(cut: Cut, schedule: PipelineSchedule, batch: int, data_devices: int = 1) -> int:
    """Refuses a cut, a batch and a schedule that do not train together; returns the rows of a micro-batch on a device.

    Raises:
      LayoutError: a batch that does not divide, another number of parts, or batch statistics in micro-batches.
      ScheduleError: tied weights that the schedule cannot keep equal.
    """
    wrong = []
    if len(cut.parts) != schedule.parts:
        wrong.append(f"the model is cut into {len(cut.parts)} parts, and the schedule has {schedule.parts}")
    pieces = schedule.micro_batches * data_devices
    if batch < 1 or batch % pieces:
        near = sorted({batch // pieces * pieces, -(-batch // pieces) * pieces} - {0}) or [pieces]
        wrong.append(
            f"batch={batch} does not divide into {schedule.micro_batches} micro-batches "
            f"on {data_devices} data devices; "
            f"batch={' or '.join(map(str, near))} does"
        )
    normed = [layer.name for layer in cut.layers if layer.batch_statistics]
    if normed and schedule.micro_batches > 1:
        wrong.append(
            f"{', '.join(normed[:4])} normalise over the batch: in a pipeline that is a micro-batch of "
            f"{max(batch // pieces, 1)} examples, so the model would learn something else than unpipelined. "
            "Take group or layer norm, or one micro-batch"
        )
    if wrong:
        raise LayoutError(f"{schedule}: {'; '.join(wrong)}.")
    check_tied(schedule, cut.tied)
    return batch // pieces


def tied_places(cut: Cut) -> tuple[tuple[tuple[int, str], ...], ...]:
    """The tied weights as `multipod.execute.pipeline.pipe.Pipe` takes them."""
    return tuple(tuple((part, name) for part in parts) for name, parts in cut.tied.items())


def of_part(cut: Cut, part: int, weights: Mapping[str, object]) -> dict[str, object]:
    """The weights that a part holds, out of the whole model's."""
    return {name: weights[name] for layer in cut.parts[part] for name in layer.weights}


def _checked(layers: Sequence[Layer], parts: int) -> None:
    if not 1 <= parts <= len(layers):
        raise LayoutError(
            f"{parts} stages for {len(layers)} layers: every stage needs one. Take 1 to {len(layers)} stages."
        )
    below = [layer.name for layer in layers if not layer.cost >= 0]
    if below:
        raise LayoutError(f"layers {', '.join(below)} have costs that are no numbers from 0 on. Measure them again.")
