"""What a step asks of one device: operators, messages between devices, bytes. Everything the predictor prices."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["convolution", "matmul", "vector", "memory"]
KINDS: tuple[Kind, ...] = ("convolution", "matmul", "vector", "memory")
"""Products on images; other products; arithmetic element by element; what only moves data (gather, sort, copy)."""

Pattern = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "neighbour"]


@dataclass(frozen=True)
class Operation:
    """Operators of one kind and size.

    Attributes:
      name: for `--explain`; equal names are shown together.
      kind: decides which of the machine's efficiencies counts.
      flops: of all of them together, without padding.
      nbytes: that all of them together move between the device and its memory.
      fill: the share of the matrix unit that their sizes fill, at most 1.
      count: how many the device starts.
    """

    name: str
    kind: Kind
    flops: float
    nbytes: float
    fill: float = 1.0
    count: float = 1.0


@dataclass(frozen=True)
class Message:
    """Collectives inside the forward and backward pass, which wait for them: halos, batch norm, sums of split products.

    Attributes:
      name: for `--explain`.
      pattern: what is done with the vector; `neighbour` sends it to the next device only.
      nbytes: of the vector on each device, of one of them.
      peers: devices that take part in one.
      count: how many in a step.
    """

    name: str
    pattern: Pattern
    nbytes: float
    peers: int
    count: float


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one device."""

    parameters: float = 0.0
    optimizer: float = 0.0
    gradients: float = 0.0
    activations: float = 0.0
    batch: float = 0.0

    @property
    def total(self) -> float:
        """All of them; the peak of a step."""
        return self.parameters + self.optimizer + self.gradients + self.activations + self.batch


@dataclass(frozen=True)
class Work:
    """A step on one device, up to the gradients.

    Attributes:
      ops: the operators, forward and backward.
      messages: what devices say to each other meanwhile.
      activation_bytes: kept from the forward for the backward pass.
    """

    ops: tuple[Operation, ...]
    messages: tuple[Message, ...] = ()
    activation_bytes: float = 0.0

    @property
    def flops(self) -> float:
        """Floating-point operations of all operators."""
        return sum(op.flops for op in self.ops)

    @property
    def nbytes(self) -> float:
        """Bytes that all operators read and write."""
        return sum(op.nbytes for op in self.ops)

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.ops + other.ops, self.messages + other.messages, self.activation_bytes + other.activation_bytes
        )

    def times(self, factor: float) -> "Work":
        """All operators and messages `factor` times."""
        return Work(
            tuple(
                Operation(op.name, op.kind, op.flops * factor, op.nbytes * factor, op.fill, op.count * factor)
                for op in self.ops
            ),
            tuple(replace(message, count=message.count * factor) for message in self.messages),
            self.activation_bytes * factor,
        )


def together(parts: Iterable[Work]) -> Work:
    """The work of all parts."""
    total = Work(())
    for part in parts:
        total = total + part
    return total


def merged(work: Work) -> Work:
    """The work with operators of one name, kind and bottleneck as one: quick to price again and again.

    Operators are merged only when they are alike in FLOPs a byte, so that a roofline sees no difference.
    """
    found: dict[tuple[str, Kind, float, float], list[float]] = {}
    first: dict[tuple[str, Kind, float, float], Operation] = {}
    for op in work.ops:
        ratio = round(math.log2((op.flops + 1) / (op.nbytes + 1)) * 4)
        key = (op.name.partition(" ")[0], op.kind, round(op.fill, 4), ratio)
        first.setdefault(key, op)
        sums = found.setdefault(key, [0.0, 0.0, 0.0])
        sums[0], sums[1], sums[2] = sums[0] + op.flops, sums[1] + op.nbytes, sums[2] + op.count
    ops = []
    for where, op in first.items():
        flops, nbytes, count = found[where]
        ops.append(Operation(op.name, op.kind, flops, nbytes, op.fill, count))
    return Work(tuple(ops), work.messages, work.activation_bytes)
