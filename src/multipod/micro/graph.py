"""A model as a list of TFLite operators: the one value that lowering, rewriting, quantising and writing pass on."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

DTYPES = ("float32", "int8", "int16", "int32", "int64", "bool", "int4")
"""Element types a tensor may have. int4 data are held as int8 in [-7, 7] and packed when written."""


@dataclass(frozen=True)
class Quant:
    """real = scale[c] * (stored - zero_point), where c counts along `axis`; one scale if the axis is -1."""

    scale: tuple[float, ...]
    zero_point: int
    axis: int = -1


@dataclass(frozen=True, eq=False)
class Tensor:
    """An edge of the graph, known by identity. `data` is there for constants only; a scalar has shape ()."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    data: np.ndarray | None = None
    quant: Quant | None = None

    def __post_init__(self) -> None:
        assert self.dtype in DTYPES, self.dtype
        assert self.data is None or self.data.shape == self.shape, (self.name, self.shape)

    @property
    def constant(self) -> bool:
        """Whether its value is known."""
        return self.data is not None

    @property
    def values(self) -> np.ndarray:
        """The data of a constant."""
        assert self.data is not None, f"{self.name} is no constant"
        return self.data

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        count = int(np.prod(self.shape))
        return (count + 1) // 2 if self.dtype == "int4" else count * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, eq=False)
class Op:
    """One operator of a graph: `kind` is the name of its record (`operators.table.OPERATORS`).

    `options` are fields of TFLite's options table by name; for WHILE and IF they hold graphs. An input that is left
    out, such as a bias, is None. `source` is the user's line.
    """

    kind: str
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def output(self) -> Tensor:
        """The only output."""
        (only,) = self.outputs
        return only

    @property
    def tensors_in(self) -> tuple[Tensor, ...]:
        """The inputs, without those left out."""
        return tuple(tensor for tensor in self.inputs if tensor is not None)

    def input(self, number: int) -> Tensor:
        """The input with this number, which must be there."""
        tensor = self.inputs[number]
        assert tensor is not None
        return tensor


@dataclass(frozen=True, eq=False)
class Graph:
    """Operators in the order in which they run. `name` becomes the subgraph's name."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    name: str = "main"

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, each once: inputs first, then in the order of first use."""
        ordered: dict[Tensor, None] = dict.fromkeys(self.inputs)
        for op in self.ops:
            ordered |= dict.fromkeys((*op.tensors_in, *op.outputs))
        ordered |= dict.fromkeys(self.outputs)
        return list(ordered)

    @property
    def producer(self) -> dict[Tensor, Op]:
        """The operator that makes each tensor."""
        return {tensor: op for op in self.ops for tensor in op.outputs}

    @property
    def uses(self) -> dict[Tensor, int]:
        """How often each tensor is read, by operators and as an output of the graph."""
        count: dict[Tensor, int] = {}
        for tensor in (*(t for op in self.ops for t in op.tensors_in), *self.outputs):
            count[tensor] = count.get(tensor, 0) + 1
        return count

    @property
    def graphs(self) -> list["Graph"]:
        """This graph and those inside its operators, this one first."""
        return [self, *(deep for op in self.ops for inner in inner_graphs(op) for deep in inner.graphs)]


def inner_graphs(op: Op) -> list[Graph]:
    """The graphs that an operator runs."""
    return [value for value in op.options.values() if isinstance(value, Graph)]


def constant(value: Any, dtype: str | None = None, name: str = "constant") -> Tensor:
    """A tensor with this value; float64 becomes float32, and int64 int32."""
    array = np.asarray(value)
    small = {"float64": "float32", "float16": "float32", "bfloat16": "float32", "int64": "int32", "uint32": "int32"}
    array = array.astype(dtype or small.get(array.dtype.name, array.dtype.name))
    return Tensor(name, array.shape, array.dtype.name, array)


def drop_dead(graph: Graph) -> Graph:
    """The graph without operators whose outputs nothing reads."""
    needed: set[Tensor] = set(graph.outputs)
    needed_ops: list[Op] = []
    for op in reversed(graph.ops):
        if needed.intersection(op.outputs):
            needed_ops.append(op)
            needed.update(op.tensors_in)
    return replace(graph, ops=tuple(reversed(needed_ops)))


def substitute(graph: Graph, new: Mapping[Tensor, Tensor]) -> Graph:
    """The graph with tensors exchanged wherever they stand."""
    swap: Callable[[Tensor], Tensor] = lambda tensor: new.get(tensor, tensor)  # noqa: E731
    ops = (
        replace(
            op,
            inputs=tuple(None if tensor is None else swap(tensor) for tensor in op.inputs),
            outputs=tuple(map(swap, op.outputs)),
        )
        for op in graph.ops
    )
    return replace(
        graph, inputs=tuple(map(swap, graph.inputs)), outputs=tuple(map(swap, graph.outputs)), ops=tuple(ops)
    )


def merge_equal(graph: Graph) -> Graph:
    """The graph without operators that do what another has done already."""
    first: dict[Any, Op] = {}
    new: dict[Tensor, Tensor] = {}
    remaining: list[Op] = []
    for op in graph.ops:
        swapped = replace(op, inputs=tuple(None if t is None else new.get(t, t) for t in op.inputs))
        key = (op.kind, tuple(map(_identity, swapped.inputs)), repr(sorted(op.options.items())))
        same = None if inner_graphs(op) or set(op.outputs) & set(graph.outputs) else first.get(key)
        if same is None:
            first.setdefault(key, op)
            remaining.append(swapped)
        else:
            new.update(zip(op.outputs, same.outputs, strict=True))
    return replace(graph, ops=tuple(remaining))


def _identity(tensor: Tensor | None) -> Any:
    """What two tensors share if they are the same: for constants their value."""
    if tensor is None or tensor.data is None:
        return tensor
    return tensor.dtype, tensor.shape, tensor.data.tobytes()


def sort_ops(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Operators in an order in which each runs after what it reads; otherwise as given."""
    ops = list(ops)
    makers = {tensor: op for op in ops for tensor in op.outputs}
    done: dict[Op, None] = {}

    def visit(first: Op) -> None:
        stack: list[tuple[Op, Iterator[Tensor]]] = [(first, iter(first.tensors_in))]
        while stack:
            op, rest = stack[-1]
            for tensor in rest:
                maker = makers.get(tensor)
                if maker is not None and maker not in done and maker is not op:
                    stack.append((maker, iter(maker.tensors_in)))
                    break
            else:
                done[op] = None
                stack.pop()

    for op in ops:
        if op not in done:
            visit(op)
    return tuple(done)


def make_names_unique(graph: Graph) -> Graph:
    """The graph with a number after each name that stands twice."""
    seen: dict[str, int] = {}
    new: dict[Tensor, Tensor] = {}
    for tensor in graph.tensors:
        seen[tensor.name] = number = seen.get(tensor.name, -1) + 1
        if number:
            new[tensor] = replace(tensor, name=f"{tensor.name}_{number}")
    return substitute(graph, new)


def format_shapes(shapes: Sequence[Tensor | None]) -> str:
    """`float32[1,8,8,3], int32[2]`, for messages."""
    return ", ".join("-" if t is None else f"{t.dtype}[{','.join(map(str, t.shape))}]" for t in shapes)


def to_stored(value: Any, tensor: Tensor) -> np.ndarray:
    """Real numbers as a tensor of the file stores them."""
    if tensor.quant is None:
        return np.asarray(value, tensor.dtype)
    limits = np.iinfo(tensor.dtype)
    stored = np.round(np.asarray(value, np.float32) / np.float32(tensor.quant.scale[0])) + tensor.quant.zero_point
    return np.clip(stored, limits.min, limits.max).astype(tensor.dtype)


def to_real(stored: Any, tensor: Tensor) -> np.ndarray:
    """Stored numbers of a tensor of the file as real numbers."""
    if tensor.quant is None:
        return np.asarray(stored)
    wide = np.asarray(stored, np.float32) - tensor.quant.zero_point
    return (wide * np.float32(tensor.quant.scale[0])).astype(np.float32)
