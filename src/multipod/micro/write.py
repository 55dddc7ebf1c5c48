"""Writes a graph as a `.tflite` file: a flatbuffer that LiteRT, TensorFlow Lite Micro and ours read in place."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from multipod.extras import import_optional
from multipod.micro import schema
from multipod.micro.graph import Graph, Op, Quant, Tensor
from multipod.micro.operators.operator import Options
from multipod.micro.operators.table import OPERATORS

ALIGNMENT = 16
"""Bytes to which every constant in the file is aligned: runtimes read weights where they lie."""


def write(graph: Graph, *, description: str = "", metadata: Mapping[str, bytes] | None = None) -> bytes:
    """The file for a graph of TFLite operators (composites taken apart), with metadata by name.

    `min_runtime_version` is added to the metadata. Tensors of a subgraph are numbered as `Graph.tensors` lists them.

    Raises:
      MissingPackageError: FlatBuffers' package is not installed.
    """
    return _File(graph, description, dict(metadata or {})).finish()


def min_runtime_version(graph: Graph) -> str:
    """The oldest TensorFlow Lite that has every operator of the graph."""
    known = [OPERATORS[op.kind].version(op)[1] for g in graph.graphs for op in g.ops]
    return max(known, key=lambda text: [*map(int, text.split("."))], default=schema.FIRST_RUNTIME)


def pack(tensor: Tensor) -> bytes:
    """The bytes of a constant as they lie in the file; two int4 to a byte, the first one low."""
    if tensor.dtype != "int4":
        return np.ascontiguousarray(tensor.values, np.dtype(tensor.dtype).newbyteorder("<")).tobytes()
    nibbles = (tensor.values.ravel().astype(np.int8) & 15).astype(np.uint8)
    nibbles = np.append(nibbles, np.zeros(len(nibbles) % 2, np.uint8))
    return (nibbles[0::2] | nibbles[1::2] << 4).tobytes()


@dataclass(frozen=True)
class _Field:
    """A field of a table: its number, how to prepend it, its value and its default."""

    number: int
    kind: str
    value: Any
    default: Any = 0


class _File:
    """A file under construction. Flatbuffers grow from the back, so the parts come before what refers to them."""

    def __init__(self, graph: Graph, description: str, metadata: dict[str, bytes]) -> None:
        flatbuffers = import_optional(".tflite files", "flatbuffers")
        self.builder = flatbuffers.Builder(1 << 16)
        self.graphs = graph.graphs
        self.description = description
        self.metadata = metadata | {"min_runtime_version": min_runtime_version(graph).encode().ljust(16, b"\0")}
        self.buffers: list[bytes] = [b""]
        self.buffer_numbers: dict[bytes, int] = {}
        ops = [op for g in self.graphs for op in g.ops]
        self.codes = list(dict.fromkeys((op.kind, OPERATORS[op.kind].version(op)[0]) for op in ops))

    def finish(self) -> bytes:
        subgraphs = self.offsets([self.subgraph(graph) for graph in self.graphs])
        metadata = self.offsets([self.metadatum(name, data) for name, data in self.metadata.items()])
        signature = self.offsets([self.signature(self.graphs[0])])
        codes = self.offsets([self.operator_code(*code) for code in self.codes])
        buffers = self.offsets([self.buffer(data) for data in self.buffers])
        description = self.builder.CreateString(self.description)
        model = self.table(
            _Field(0, "Uint32", schema.SCHEMA_VERSION),
            *(
                _Field(number, "UOffsetTRelative", offset)
                for number, offset in ((1, codes), (2, subgraphs), (3, description), (4, buffers), (6, metadata))
            ),
            _Field(7, "UOffsetTRelative", signature),
        )
        self.builder.Finish(model, file_identifier=schema.IDENTIFIER)
        return bytes(self.builder.Output())

    def table(self, *fields: _Field) -> int:
        self.builder.StartObject(max((field.number for field in fields), default=-1) + 1)
        for field in fields:
            getattr(self.builder, f"Prepend{field.kind}Slot")(field.number, field.value, field.default)
        return self.builder.EndObject()

    def vector(self, values: Sequence[Any], kind: str, size: int) -> int:
        self.builder.StartVector(size, len(values), size)
        put: Callable[[Any], None] = getattr(self.builder, f"Prepend{kind}")
        for value in reversed(values):
            put(value)
        return self.builder.EndVector()

    def offsets(self, values: Sequence[int]) -> int:
        return self.vector(values, "UOffsetTRelative", 4)

    def ints(self, values: Sequence[int]) -> int:
        return self.vector([int(value) for value in values], "Int32", 4)

    def buffer_number(self, data: bytes) -> int:
        """The number of the buffer that holds `data`; equal constants share one."""
        if data not in self.buffer_numbers:
            self.buffer_numbers[data] = len(self.buffers)
            self.buffers.append(data)
        return self.buffer_numbers[data]

    def buffer(self, data: bytes) -> int:
        if not data:
            return self.table()
        self.builder.StartVector(1, len(data), ALIGNMENT)
        self.builder.head = head = self.builder.Head() - len(data)
        self.builder.Bytes[head : head + len(data)] = data
        return self.table(_Field(0, "UOffsetTRelative", self.builder.EndVector()))

    def metadatum(self, name: str, data: bytes) -> int:
        return self.table(
            _Field(0, "UOffsetTRelative", self.builder.CreateString(name)),
            _Field(1, "Uint32", self.buffer_number(data)),
        )

    def operator_code(self, kind: str, version: int) -> int:
        record = OPERATORS[kind]
        fields = [_Field(0, "Int8", min(record.number, 127)), _Field(2, "Int32", version, 1)]
        if record.custom:
            fields.append(_Field(1, "UOffsetTRelative", self.builder.CreateString(record.custom)))
        return self.table(*fields, _Field(3, "Int32", record.number))

    def subgraph(self, graph: Graph) -> int:
        tensors = graph.tensors
        number = {tensor: index for index, tensor in enumerate(tensors)}
        parts = (
            self.offsets([self.tensor(tensor) for tensor in tensors]),
            self.ints([number[tensor] for tensor in graph.inputs]),
            self.ints([number[tensor] for tensor in graph.outputs]),
            self.offsets([self.operator(op, number) for op in graph.ops]),
            self.builder.CreateString(graph.name),
        )
        return self.table(*(_Field(number, "UOffsetTRelative", part) for number, part in enumerate(parts)))

    def tensor(self, tensor: Tensor) -> int:
        fields = [
            _Field(0, "UOffsetTRelative", self.ints(tensor.shape)),
            _Field(1, "Int8", schema.TYPES[tensor.dtype]),
            _Field(2, "Uint32", self.buffer_number(pack(tensor)) if tensor.constant else 0),
            _Field(3, "UOffsetTRelative", self.builder.CreateString(tensor.name)),
            _Field(8, "Bool", True, False),
        ]
        if tensor.quant is not None:
            fields.append(_Field(4, "UOffsetTRelative", self.quantization(tensor.quant)))
        return self.table(*fields)

    def quantization(self, quant: Quant) -> int:
        scale = self.vector(quant.scale, "Float32", 4)
        zero = self.vector([quant.zero_point] * len(quant.scale), "Int64", 8)
        return self.table(
            _Field(2, "UOffsetTRelative", scale),
            _Field(3, "UOffsetTRelative", zero),
            _Field(6, "Int32", max(quant.axis, 0)),
        )

    def operator(self, op: Op, number: Mapping[Tensor, int]) -> int:
        fields = [
            _Field(0, "Uint32", self.codes.index((op.kind, OPERATORS[op.kind].version(op)[0]))),
            _Field(1, "UOffsetTRelative", self.ints([-1 if t is None else number[t] for t in op.inputs])),
            _Field(2, "UOffsetTRelative", self.ints([number[t] for t in op.outputs])),
        ]
        options = OPERATORS[op.kind].options
        if OPERATORS[op.kind].custom:
            fields.append(_Field(5, "UOffsetTRelative", self.builder.CreateByteVector(_flexbuffer(op.options))))
        elif options is not None:
            table = self.table(*self.options(op, options))
            fields += [_Field(3, "Uint8", options.number), _Field(4, "UOffsetTRelative", table)]
        return self.table(*fields)

    def options(self, op: Op, options: Options) -> list[_Field]:
        unknown = set(op.options) - set(options.fields)
        assert not unknown, (op.kind, unknown)
        fields = []
        for name, value in op.options.items():
            slot_number, kind, default = options.fields[name]
            number = _NUMBERS[kind](value) if kind in _NUMBERS else value
            if kind == "graph":
                number = self.graphs.index(value)
            slot = {"bool": "Bool", "float32": "Float32", "int32": "Int32", "graph": "Int32"}.get(kind, "Int8")
            fields.append(_Field(slot_number, slot, number, default))
        return fields

    def signature(self, graph: Graph) -> int:
        number = {tensor: index for index, tensor in enumerate(graph.tensors)}
        maps = [
            self.offsets(
                [
                    self.table(
                        _Field(0, "UOffsetTRelative", self.builder.CreateString(tensor.name)),
                        _Field(1, "Uint32", number[tensor]),
                    )
                    for tensor in tensors
                ]
            )
            for tensors in (graph.inputs, graph.outputs)
        ]
        key = self.builder.CreateString("serving_default")
        return self.table(*(_Field(number, "UOffsetTRelative", part) for number, part in enumerate((*maps, key))))


def _flexbuffer(options: Mapping[str, Any]) -> bytes:
    return bytes(import_optional(".tflite files", "flatbuffers.flexbuffers").Dumps(dict(options)))


_NUMBERS: dict[str, Callable[[Any], int]] = {
    "padding": schema.PADDING.__getitem__,
    "activation": schema.ACTIVATIONS.__getitem__,
    "dtype": schema.TYPES.__getitem__,
}


def pack_offline_plan(offsets: Sequence[int], subgraph: int = 0) -> bytes:
    """The metadata entry `OfflineMemoryAllocation`: one arena offset in bytes for each tensor, -1 to leave it open."""
    return struct.pack(f"<{3 + len(offsets)}i", 1, subgraph, len(offsets), *offsets)
