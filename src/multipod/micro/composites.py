"""Takes functions apart that TFLM has no operator for, for float32 models."""

from dataclasses import replace

from multipod.micro.graph import Graph, Op, inner_graphs
from multipod.micro.operators.table import OPERATORS


def expand(graph: Graph) -> Graph:
    """The graph with every composite taken apart into operators of TFLite."""
    return replace(graph, ops=tuple(part for op in graph.ops for part in _parts(op)))


def _parts(op: Op) -> list[Op]:
    formula = OPERATORS[op.kind].formula
    parts = formula(op) if formula else None
    if parts is not None:
        return list(parts)
    if not inner_graphs(op):
        return [op]
    return [replace(op, options={k: expand(v) if isinstance(v, Graph) else v for k, v in op.options.items()})]
