"""Reads what people want to see of a `.tflite` file: operators, tensors, their names.

Nothing here is trusted: the C runtime checks the file, and this module only puts names to what it found. A
field that cannot be read is simply absent, so that a message about a broken file can still be written.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from multipod.micro.schema import NUMBERS, TYPES

OPERATOR_NAMES = {number: name for name, number in NUMBERS.items()}
TYPE_NAMES = {number: name for name, number in TYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the file describes it. `scale` 0: not quantised; `channels`: the number of its scales."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    scale: float
    zero_point: int
    channels: int
    constant: bool
    variable: bool

    def __str__(self) -> str:
        kind = " constant" if self.constant else " variable" if self.variable else ""
        scales = f" x{self.channels} scales" if self.channels > 1 else f" scale {self.scale:.6g}" if self.scale else ""
        return f"{self.dtype}{list(self.shape)}{kind}{scales}  {self.name}"


@dataclass(frozen=True)
class OperatorInfo:
    """An operator: its name and the numbers of its tensors; -1 stands for one left out."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class SubgraphInfo:
    """Operators in the order in which they run, and the tensors they speak of."""

    tensors: tuple[TensorInfo, ...]
    operators: tuple[OperatorInfo, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def read(model: bytes) -> tuple[SubgraphInfo, ...]:
    """The subgraphs of a file, the main one first; none of a file that is broken."""
    try:
        root = _Table(model, struct.unpack_from("<I", model, 0)[0])
        codes = [_code(code) for code in root.tables(1)]
        filled = [bool(buffer.vector(0, "B")) or bool(buffer.scalar(1, "Q", 0)) for buffer in root.tables(4)]
        return tuple(_subgraph(graph, codes, filled) for graph in root.tables(2))
    except (struct.error, IndexError, ValueError, OverflowError):
        return ()


def operator_name(model: bytes, subgraph: int, index: int) -> str:
    """`op 3 (CONV_2D)`, or without the name where it cannot be read."""
    graphs = read(model)
    if subgraph < len(graphs) and 0 <= index < len(graphs[subgraph].operators):
        return f"op {index} ({graphs[subgraph].operators[index].name})"
    return f"op {index}"


def _code(code: "_Table") -> str:
    number = max(code.scalar(0, "B", 0), code.scalar(3, "i", 0))
    if number == NUMBERS["CUSTOM"]:
        return "custom " + (code.text(1) or "without a name")
    return OPERATOR_NAMES.get(number, f"operator {number}")


def _subgraph(graph: "_Table", codes: list[str], filled: list[bool]) -> SubgraphInfo:
    operators = (
        OperatorInfo(codes[op.scalar(0, "I", 0)], tuple(op.vector(1, "i")), tuple(op.vector(2, "i")))
        for op in graph.tables(3)
    )
    return SubgraphInfo(
        tuple(_tensor(tensor, filled) for tensor in graph.tables(0)),
        tuple(operators),
        tuple(graph.vector(1, "i")),
        tuple(graph.vector(2, "i")),
    )


def _tensor(tensor: "_Table", filled: list[bool]) -> TensorInfo:
    quantization = tensor.table(4)
    scales = quantization.vector(2, "f") if quantization else []
    zeros = quantization.vector(3, "q") if quantization else []
    number = tensor.scalar(1, "b", 0)
    return TensorInfo(
        name=tensor.text(3),
        dtype=TYPE_NAMES.get(number, f"type {number}"),
        shape=tuple(tensor.vector(0, "i")),
        scale=scales[0] if scales else 0.0,
        zero_point=zeros[0] if zeros else 0,
        channels=len(scales),
        constant=filled[tensor.scalar(2, "I", 0)],
        variable=bool(tensor.scalar(5, "B", 0)),
    )


class _Table:
    """A table of a flatbuffer: fields by number."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        self.fields = at - struct.unpack_from("<i", data, at)[0]
        if self.fields < 0:
            raise ValueError("a table's fields lie before the file")
        self.size = struct.unpack_from("<H", data, self.fields)[0]

    def field(self, number: int) -> int:
        """Where the field is; 0: it is absent."""
        entry = 4 + 2 * number
        if entry + 2 > self.size:
            return 0
        offset = struct.unpack_from("<H", self.data, self.fields + entry)[0]
        return self.at + offset if offset else 0

    def scalar(self, number: int, form: str, otherwise: int) -> int:
        at = self.field(number)
        return struct.unpack_from("<" + form, self.data, at)[0] if at else otherwise

    def target(self, number: int) -> int:
        at = self.field(number)
        return at + struct.unpack_from("<I", self.data, at)[0] if at else 0

    def table(self, number: int) -> "_Table | None":
        at = self.target(number)
        return _Table(self.data, at) if at else None

    def vector(self, number: int, form: str) -> list:
        at = self.target(number)
        if not at:
            return []
        count = struct.unpack_from("<I", self.data, at)[0]
        return list(struct.unpack_from(f"<{count}{form}", self.data, at + 4))

    def text(self, number: int) -> str:
        return bytes(self.vector(number, "B")).decode(errors="replace")

    def tables(self, number: int) -> Iterator["_Table"]:
        at = self.target(number)
        for k, offset in enumerate(self.vector(number, "I")):
            yield _Table(self.data, at + 4 + 4 * k + offset)
