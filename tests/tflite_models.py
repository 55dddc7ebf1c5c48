"""Models of TensorFlow Lite Micro's own, where they are at hand, and a tiny writer of `.tflite` files for tests."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np

FOLDER = Path(__file__).parents[2] / "shared" / "data" / "tflite"
TYPES = {
    "float32": 0, "int32": 2, "uint8": 3, "int64": 4, "bool": 6, "int16": 7, "int8": 9, "uint64": 12, "resource": 13,
    "uint32": 15, "int4": 17,
}  # fmt: skip


def stored(name: str) -> tuple[bytes, dict[str, np.ndarray]]:
    """A model and TFLM's outputs for it."""
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return (FOLDER / f"{name}.tflite").read_bytes(), dict(arrays)


@dataclass(frozen=True)
class Tensor:
    """`data` makes it a constant; `scales` are one or as many as the dim `channel` has."""

    shape: Sequence[int]
    dtype: str = "float32"
    scales: Sequence[float] = ()
    zero: int = 0
    data: np.ndarray | bytes | None = None
    channel: int = 0
    variable: bool = False


@dataclass(frozen=True)
class Op:
    """`options` are (number, struct letter or `s` for text, value) of the options' table; `kind` is its number in the
    schema's union."""

    builtin: int
    inputs: Sequence[int]
    outputs: Sequence[int]
    options: Sequence[tuple[int, str, Any]] = ()
    kind: int = 0
    custom: str = ""
    custom_options: bytes = b""


@dataclass(frozen=True)
class Graph:
    tensors: Sequence[Tensor]
    ops: Sequence[Op]
    inputs: Sequence[int]
    outputs: Sequence[int]
    metadata: dict[str, bytes] = field(default_factory=dict)


def _vector(b: flatbuffers.Builder, values: Sequence[int | float], letter: str) -> int:
    size = struct.calcsize(letter)
    b.StartVector(size, len(values), size)
    b.head -= size * len(values)
    b.Bytes[b.head : b.head + size * len(values)] = struct.pack(f"<{len(values)}{letter}", *values)
    return b.EndVector()


def _data(b: flatbuffers.Builder, content: bytes) -> int:
    b.StartVector(1, len(content), 16)
    b.head -= len(content)
    b.Bytes[b.head : b.head + len(content)] = content
    return b.EndVector()


def _refs(b: flatbuffers.Builder, offsets: Sequence[int]) -> int:
    b.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        b.PrependUOffsetTRelative(offset)
    return b.EndVector()


def _table(b: flatbuffers.Builder, fields: Sequence[tuple[int, str, float]]) -> int:
    """Fields by number; the letter `o` is an offset, the others are struct's."""
    b.StartObject(max((number for number, _, _ in fields), default=-1) + 1)
    put = {
        "o": lambda slot, v: b.PrependUOffsetTRelativeSlot(slot, v, 0),
        "B": lambda slot, v: b.PrependUint8Slot(slot, v, 0),
        "b": lambda slot, v: b.PrependInt8Slot(slot, v, 0),
        "?": lambda slot, v: b.PrependBoolSlot(slot, v, False),
        "i": lambda slot, v: b.PrependInt32Slot(slot, v, -(2**31) + 12345),
        "I": lambda slot, v: b.PrependUint32Slot(slot, v, 2**32 - 12345),
        "f": lambda slot, v: b.PrependFloat32Slot(slot, v, 1e-38),
    }
    for number, letter, value in sorted(fields, key=lambda one: -struct.calcsize("I" if one[1] == "o" else one[1])):
        put[letter](number, value)
    return b.EndObject()


def _tensor(b: flatbuffers.Builder, tensor: Tensor, buffer: int, name: str) -> int:
    fields = [(0, "o", _vector(b, list(tensor.shape), "i")), (1, "b", TYPES[tensor.dtype]), (2, "I", buffer)]
    fields += [(3, "o", b.CreateString(name)), (5, "?", tensor.variable)]
    if tensor.scales:
        scales = _vector(b, list(tensor.scales), "f")
        zeros = _vector(b, [tensor.zero] * len(tensor.scales), "q")
        fields.append((4, "o", _table(b, [(2, "o", scales), (3, "o", zeros), (6, "i", tensor.channel)])))
    return _table(b, fields)


def _op(b: flatbuffers.Builder, op: Op, code: int) -> int:
    fields = [(0, "I", code), (1, "o", _vector(b, list(op.inputs), "i")), (2, "o", _vector(b, list(op.outputs), "i"))]
    if op.options or op.kind:
        options = [(n, "o", b.CreateString(v)) if letter == "s" else (n, letter, v) for n, letter, v in op.options]
        fields += [(3, "B", op.kind), (4, "o", _table(b, options))]
    if op.custom_options:
        fields.append((5, "o", _data(b, op.custom_options)))
    return _table(b, fields)


def build(*graphs: Graph) -> bytes:
    """A `.tflite` file of these subgraphs."""
    b = flatbuffers.Builder(1 << 16)
    contents: list[bytes] = [b""]
    codes: list[tuple[int, str]] = []
    made = []
    for graph in graphs:
        tensors = []
        for i, tensor in enumerate(graph.tensors):
            number = 0
            if tensor.data is not None:
                contents.append(
                    tensor.data if isinstance(tensor.data, bytes) else np.ascontiguousarray(tensor.data).tobytes()
                )
                number = len(contents) - 1
            tensors.append(_tensor(b, tensor, number, f"t{i}"))
        ops = []
        for op in graph.ops:
            if (op.builtin, op.custom) not in codes:
                codes.append((op.builtin, op.custom))
            ops.append(_op(b, op, codes.index((op.builtin, op.custom))))
        fields = [(0, "o", _refs(b, tensors)), (1, "o", _vector(b, list(graph.inputs), "i"))]
        fields += [(2, "o", _vector(b, list(graph.outputs), "i")), (3, "o", _refs(b, ops))]
        made.append(_table(b, fields))
    metadata = []
    for name, content in graphs[0].metadata.items():
        contents.append(content)
        metadata.append(_table(b, [(0, "o", b.CreateString(name)), (1, "I", len(contents) - 1)]))
    opcodes = []
    for builtin, custom in codes:
        fields = [(0, "b", min(builtin, 127)), (2, "i", 1), (3, "i", builtin)]
        opcodes.append(_table(b, fields + ([(1, "o", b.CreateString(custom))] if custom else [])))
    buffers = [_table(b, [(0, "o", _data(b, content))] if content else []) for content in contents]
    fields = [(0, "I", 3), (1, "o", _refs(b, opcodes)), (2, "o", _refs(b, made)), (4, "o", _refs(b, buffers))]
    if metadata:
        fields.append((6, "o", _refs(b, metadata)))
    b.Finish(_table(b, fields), b"TFL3")
    return bytes(b.Output())
