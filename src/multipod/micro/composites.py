"""Functions that TFLM has no operator for, written with those it has, for float32 models."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from multipod.micro.graph import Graph, Op, Tensor, constant, inner_graphs

TAIL = (0.3275911, (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429))
"""erfc(a) = (t c1 + t^2 c2 + ... + t^5 c5) exp(-a^2), t = 1 / (1 + p a), for a >= 0; error below 1.5e-7.

Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
"""


class _Writer:
    """Writes operators one after the other, all for one composite."""

    def __init__(self, op: Op) -> None:
        self.op, self.ops = op, list[Op]()

    def put(self, kind: str, *inputs: Tensor | float, dtype: str = "float32", **options: object) -> Tensor:
        tensors = tuple(i if isinstance(i, Tensor) else constant(np.float32(i)) for i in inputs)
        shape = np.broadcast_shapes(*(tensor.shape for tensor in tensors))
        output = Tensor(f"{self.op.output.name}_{len(self.ops)}", shape, dtype)
        self.ops.append(Op(kind, tensors, (output,), options, self.op.source))
        return output

    def tail(self, a: Tensor) -> Tensor:
        """erfc of what is not negative."""
        p, coefficients = TAIL
        t = self.put("DIV", constant(np.ones((), np.float32)), self.put("ADD", self.put("MUL", a, p), 1.0))
        total = self.put("MUL", t, coefficients[-1])
        for c in reversed(coefficients[:-1]):
            total = self.put("MUL", self.put("ADD", total, c), t)
        return self.put("MUL", total, self.put("EXP", self.put("MUL", self.put("MUL", a, a), -1.0)))


def _erfc(w: _Writer, x: Tensor) -> Tensor:
    tail = w.tail(w.put("ABS", x))
    return w.put("SELECT_V2", w.put("LESS", x, 0.0, dtype="bool"), w.put("SUB", 2.0, tail), tail)


def _erf(w: _Writer, x: Tensor) -> Tensor:
    near = w.put("SUB", 1.0, w.tail(w.put("ABS", x)))
    return w.put("SELECT_V2", w.put("LESS", x, 0.0, dtype="bool"), w.put("MUL", near, -1.0), near)


def _gelu(w: _Writer, x: Tensor) -> Tensor:
    """x Phi(x) = max(x, 0) - |x| Phi(-|x|), or with tanh as Hendrycks and Gimpel (arXiv:1606.08415) approximate it."""
    if w.op.options["approximate"]:
        cube = w.put("MUL", w.put("MUL", x, x), x)
        inner = w.put("MUL", w.put("ADD", x, w.put("MUL", cube, 0.044715)), math.sqrt(2 / math.pi))
        gate = w.put("MUL", w.put("ADD", w.put("TANH", inner), 1.0), 0.5)
        return w.put("MUL", x, gate)
    size = w.put("ABS", x)
    tail = w.put("MUL", w.put("MUL", w.tail(w.put("MUL", size, math.sqrt(0.5))), 0.5), size)
    return w.put("SUB", w.put("RELU", x), tail)


def _softplus(w: _Writer, x: Tensor) -> Tensor:
    rest = w.put("LOG", w.put("ADD", w.put("EXP", w.put("MUL", w.put("ABS", x), -1.0)), 1.0))
    return w.put("ADD", w.put("RELU", x), rest)


def _sign(w: _Writer, x: Tensor) -> Tensor:
    casts = [
        w.put("CAST", w.put(kind, x, 0.0, dtype="bool"), in_data_type="bool", out_data_type="float32")
        for kind in ("GREATER", "LESS")
    ]
    return w.put("SUB", *casts)


FORMULAS: dict[str, Callable[[_Writer, Tensor], Tensor]] = {
    "ERF": _erf,
    "ERFC": _erfc,
    "GELU": _gelu,
    "SOFTPLUS": _softplus,
    "SIGN": _sign,
    "RELU_N1_TO_1": lambda w, x: w.put("MINIMUM", w.put("MAXIMUM", x, -1.0), 1.0),
    "LOG1P": lambda w, x: w.put("LOG", w.put("ADD", x, 1.0)),
    "EXPM1": lambda w, x: w.put("ADD", w.put("EXP", x), -1.0),
    "RECIPROCAL": lambda w, x: w.put("DIV", constant(np.ones((), np.float32)), x),
}


def expanded(graph: Graph) -> Graph:
    """The graph with every composite taken apart into operators of TFLite."""
    ops: list[Op] = []
    for op in graph.ops:
        if op.kind in FORMULAS:
            ops += _taken_apart(op)
        elif op.kind == "SELECT_V2" and op.output.dtype in CHOICES:
            ops += _chosen(op)
        elif inner_graphs(op):
            deep = {k: expanded(v) if isinstance(v, Graph) else v for k, v in op.options.items()}
            ops.append(replace(op, options=deep))
        else:
            ops.append(op)
    return replace(graph, ops=tuple(ops))


CHOICES = {"int32": ("MUL", "ADD"), "bool": ("LOGICAL_AND", "LOGICAL_OR")}
"""TFLM chooses among floats only. c ? x : y is c x + (not c) y for integers, and the like for bools."""


def _chosen(op: Op) -> list[Op]:
    writer, dtype = _Writer(op), op.output.dtype
    times, plus = CHOICES[dtype]
    cases = []
    for which, case in zip(
        (op.input(0), writer.put("LOGICAL_NOT", op.input(0), dtype="bool")), op.inputs[1:], strict=True
    ):
        gate = which
        if dtype != "bool":
            gate = writer.put("CAST", which, dtype=dtype, in_data_type="bool", out_data_type=dtype)
        assert case is not None
        cases.append(writer.put(times, gate, case, dtype=dtype))
    writer.put(plus, *cases, dtype=dtype)
    *before, last = writer.ops
    return [*before, replace(last, outputs=op.outputs)]


def _taken_apart(op: Op) -> list[Op]:
    writer = _Writer(op)
    FORMULAS[op.kind](writer, op.input(0))
    *before, last = writer.ops
    return [*before, replace(last, outputs=op.outputs)]
