"""The `PipelineSchedule`: what every stage of a pipeline does, in order, as plain data.

A minibatch is cut into micro-batches that travel forward through the stages and back again. Four readers: `check`
proves a schedule and finds its delays, `timing` gives it a clock, `drawing` shows it, `multipod.execute.pipeline` runs
it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from multipod.errors import ScheduleError

Kind = Literal["forward", "backward", "update"]
KINDS: tuple[Kind, ...] = ("forward", "backward", "update")
BackwardWeights = Literal["current", "stashed"]


class PipelineOp(NamedTuple):
    """One thing that a device does.

    Attributes:
      kind: `forward` or `backward` of a micro-batch, or `update` of the device's weights.
      micro: number of the micro-batch, counted over all updates; of an update its own number.
      chunk: which of the device's parts of the model; always 0 where a device holds one part.
      tick: when, in lock-step: what is sent in a tick arrives before the next. A device does in one tick at most one
        backward, then at most one forward, then at most one update; all of them read the weights of the tick's start.
    """

    kind: Kind
    micro: int
    chunk: int
    tick: int


class PipelineStep(NamedTuple):
    """An operation among those of all devices.

    Attributes:
      device: that does it.
      kind: of what.
      part: of the model.
      need: the number of the step whose result must have arrived; -1: none.
    """

    device: int
    kind: Kind
    part: int
    need: int


@dataclass(frozen=True)
class PipelineSchedule:
    """A pipeline of `stages` devices over some updates.

    Device p (from 0) holds the chunks c = 0 ... chunks - 1 of the model: parts p, stages + p, 2 * stages + p, ... of
    stages * chunks parts, in the order of the layers.

    Attributes:
      name: the name of what built it.
      stages: devices.
      micro_batches: N, in the minibatch of an update. Micro-batch m belongs to update m // N.
      updates: how many are in `ops`.
      ops: for each device, what it does, in order.
      stride: ticks between the starts of two updates; what is done for update k + 1 is done `stride` ticks later
        than the same for update k.
      chunks: parts of the model on each device.
      backward_weights: `current`: the backward pass multiplies by the weights of its own moment; `stashed`: by those of
        the same micro-batch's forward pass, which are kept so long.
      synchronous: every pass of update k sees the weights after exactly k updates.

    Raises:
      ScheduleError: numbers below 1.
    """

    name: str
    stages: int
    micro_batches: int
    updates: int
    ops: tuple[tuple[PipelineOp, ...], ...]
    stride: int
    chunks: int = 1
    backward_weights: BackwardWeights = "current"
    synchronous: bool = True

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in ("stages", "micro_batches", "updates", "chunks", "stride")}
        wrong = [f"{name}={n}" for name, n in numbers.items() if n < 1]
        if wrong:
            raise ScheduleError(f"pipeline {self.name}: {', '.join(wrong)}. Give whole numbers from 1 on.")
        if len(self.ops) != self.stages:
            raise ScheduleError(
                f"pipeline {self.name}: operations for {len(self.ops)} devices, and stages={self.stages}. "
                "Give each stage its sequence."
            )

    def __str__(self) -> str:
        chunks = f", {self.chunks} chunks each" if self.chunks > 1 else ""
        return f"{self.name}: {self.stages} stages{chunks}, {self.micro_batches} micro-batches an update"

    @property
    def parts(self) -> int:
        """Parts that the model is cut into: stages * chunks."""
        return self.stages * self.chunks

    @cached_property
    def ticks(self) -> int:
        """Ticks from the first operation to the last."""
        return 1 + max((op.tick for ops in self.ops for op in ops), default=-1)

    @cached_property
    def flow(self) -> tuple["PipelineStep", ...]:
        """Every operation behind what it waits for, each device's in their own order.

        Raises:
          ScheduleError: devices that wait for each other for ever.
        """
        made: dict[tuple[Kind, int, int], int] = {}  # (kind, micro-batch, part) to the step whose result it is
        steps: list[PipelineStep] = []
        reached = [0] * self.stages
        moved = True
        while moved:
            moved = False
            for device, ops in enumerate(self.ops):
                while reached[device] < len(ops):
                    kind, micro, chunk, _ = ops[reached[device]]
                    part = self.part(device, chunk)
                    source = part - 1 if kind == "forward" else part + 1
                    waits = kind != "update" and 0 <= source < self.parts
                    need = made.get((kind, micro, source)) if waits else -1
                    if need is None:
                        break
                    made[kind, micro, part] = len(steps)
                    steps.append(PipelineStep(device, kind, part, need))
                    reached[device] += 1
                    moved = True
        stuck = [
            f"device {p} at {ops[n].kind} of {ops[n].micro}"
            for p, (ops, n) in enumerate(zip(self.ops, reached, strict=True))
            if n < len(ops)
        ]
        if stuck:
            raise ScheduleError(f"{self}: devices wait for each other: {', '.join(stuck[:6])}. Change their order.")
        return tuple(steps)

    @property
    def span(self) -> int:
        """Ticks from an update's first operation to its last: how long a pipe takes to fill, work and drain."""
        return self.ticks - (self.updates - 1) * self.stride

    def part(self, device: int, chunk: int) -> int:
        """The number of a part of the model, in the order of the layers."""
        return chunk * self.stages + device

    def update_of(self, micro: int) -> int:
        """The update that a micro-batch's gradient goes into."""
        return micro // self.micro_batches
