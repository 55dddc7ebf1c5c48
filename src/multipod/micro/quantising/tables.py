"""Functions without an int8 kernel, as tables of 256 bytes.

Any function of one int8 number is a table with an entry for each of its 256 values: exact to half a step, whatever
the function. TFLite has no operator for that, but GATHER looks up rows: the table has as many rows as there are
numbers, and the index is the number + 128. A chain such as 1 / sqrt(x + epsilon) becomes one table and is rounded once.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from multipod.micro.evaluate import run
from multipod.micro.graph import Graph, Op, Quant, Tensor, constant, sort_ops, substitute
from multipod.micro.match import Const, Rewrite, make_op, node, rewrite
from multipod.micro.quantising.kernels import becomes_table, is_joinable
from multipod.micro.quantising.ranges import FILL


def prepare(graph: Graph, keep_float: Sequence[str], activations: str) -> Graph:
    """The float graph written with what has integer kernels: squares as products, quotients as products, tables."""
    rules = [
        Rewrite("square", node("SQUARE", "x"), lambda f: [make_op("MUL", [f["x"], f["x"]], f.op.output, f.op.source)]),
        Rewrite("quotient of a constant", node("DIV", Const("c"), "y"), lambda f: _quotient(f.op, f["c"], f["y"])),
        Rewrite("quotient", node("DIV", "x", "y"), lambda f: _quotient(f.op, f["x"], f["y"])),
        # As in a log-sum-exp: there are no infinities among integers.
        Rewrite(
            "where it is finite",
            node("SELECT_V2", node("LESS_EQUAL", "x", Const("limit")), "finite", "other"),
            lambda f: f["finite"] if f["limit"].values.min() >= FILL else None,
        ),
    ]
    if activations == "int16":  # TFLM's RELU has no int16 kernel, its MAXIMUM has
        zero = constant(np.zeros((), np.float32))
        rules.append(
            Rewrite("relu", node("RELU", "x"), lambda f: [make_op("MAXIMUM", [f["x"], zero], f.op.output, f.op.source)])
        )
        rules.append(Rewrite("relu6", node("RELU6", "x"), lambda f: _relu6(f.op, f["x"])))
    graph = rewrite(graph, [rule for rule in rules if rule.pattern.kind not in keep_float])
    if activations == "int16":
        return graph
    ops = [_table(op) if becomes_table(op) and op.kind not in keep_float else op for op in graph.ops]
    return _join_all(replace(graph, ops=tuple(ops)))


def _quotient(op: Op, x: Tensor, y: Tensor) -> list[Op]:
    inverse = Tensor(op.output.name + "_inverse", y.shape)
    return [
        make_op("RECIPROCAL", [y], inverse, op.source),
        make_op("MUL", [inverse, x], op.output, op.source, **op.options),
    ]


def _relu6(op: Op, x: Tensor) -> list[Op]:
    low = Tensor(op.output.name + "_low", x.shape)
    return [
        make_op("MAXIMUM", [x, constant(np.zeros((), np.float32))], low, op.source),
        make_op("MINIMUM", [low, constant(np.full((), 6, np.float32))], op.output, op.source),
    ]


def _table(op: Op) -> Op:
    """TABLE: an operator whose option `function` is the graph that the table stands for."""
    x = next(tensor for tensor in op.tensors_in if not tensor.constant)
    return Op("TABLE", (x,), op.outputs, {"function": Graph((x,), op.outputs, (op,), "table")}, op.source)


def _moving_input(op: Op) -> Tensor | None:
    """The one input of a function of one number; None if it has more, or constants that are not numbers."""
    moving = {tensor for tensor in op.tensors_in if not tensor.constant}
    if not is_joinable(op) or len(moving) != 1 or any(t.values.size != 1 for t in op.tensors_in if t.constant):
        return None
    (x,) = moving
    return x if x.dtype == "float32" and x.shape == op.output.shape else None


def _join_all(graph: Graph) -> Graph:
    """The graph with functions of one number drawn into the tables that stand before or behind them."""
    while True:
        makers, uses = graph.producer, graph.uses
        for op in graph.ops:
            x = _moving_input(op)
            before = makers.get(x) if x is not None else None
            if before is None or x is None or uses[x] != len([t for t in op.tensors_in if t is x]):
                continue
            if "TABLE" in (op.kind, before.kind) and _moving_input(before) is not None:
                graph = _join(graph, before, op)
                break
        else:
            return graph


def _join(graph: Graph, before: Op, after: Op) -> Graph:
    first = before if before.kind == "TABLE" else _table(before)
    second = after if after.kind == "TABLE" else _table(after)
    f, g = first.options["function"], second.options["function"]
    chain = Graph(f.inputs, g.outputs, f.ops + g.ops, "table")
    joined = Op("TABLE", first.inputs, second.outputs, {"function": chain}, after.source)
    ops = [joined if op is after else op for op in graph.ops if op is not before]
    return replace(graph, ops=sort_ops(ops))


def expand_table(op: Op, x: Tensor, y: Tensor) -> list[Op]:
    """CAST, ADD 128, GATHER: the table of an operator TABLE between quantised tensors."""
    assert x.quant is not None
    assert y.quant is not None
    index, shifted = (Tensor(f"{y.name}_{part}", x.shape, "int32") for part in ("index", "row"))
    data = compute_table(op.options["function"], x.quant, y.quant)
    table = Tensor(f"{y.name}_table", (256,), "int8", data, y.quant)
    return [
        make_op("CAST", [x], index, op.source, in_data_type="int8", out_data_type="int32"),
        make_op(
            "ADD", [index, constant(np.asarray(128, np.int32))], shifted, op.source, fused_activation_function="NONE"
        ),
        make_op("GATHER", [table, shifted], y, op.source, axis=0, batch_dims=0),
    ]


def compute_table(function: Graph, x: Quant, y: Quant) -> np.ndarray:
    """The stored result for each stored input from -128 to 127."""
    flat = {tensor: replace(tensor, shape=(256,)) for tensor in function.tensors if not tensor.constant}
    real = (x.scale[0] * (np.arange(-128, 128) - x.zero_point)).astype(np.float32)
    (result,) = run(substitute(function, flat), real)
    finite = np.nan_to_num(result, nan=0.0, posinf=3e38, neginf=-3e38).astype(np.float64)
    return np.clip(np.round(finite / y.scale[0]) + y.zero_point, -128, 127).astype(np.int8)
