"""Functions that TFLM has no operator for, written with those it has, for float32 models."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from multipod.micro.graph import Op, Tensor, constant
from multipod.micro.operators.operator import Formula

TAIL = (0.3275911, (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429))
"""erfc(a) = (t c1 + t^2 c2 + ... + t^5 c5) exp(-a^2), t = 1 / (1 + p a), for a >= 0; error below 1.5e-7.

Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
"""


class FormulaWriter:
    """Writes operators one after the other, all in place of one."""

    def __init__(self, op: Op) -> None:
        self.op, self.ops = op, list[Op]()

    def put(self, kind: str, *inputs: Tensor | float, dtype: str = "float32", **options: object) -> Tensor:
        """Adds an operator of these inputs, and returns its output."""
        tensors = tuple(i if isinstance(i, Tensor) else constant(np.float32(i)) for i in inputs)
        shape = np.broadcast_shapes(*(tensor.shape for tensor in tensors))
        output = Tensor(f"{self.op.output.name}_{len(self.ops)}", shape, dtype)
        self.ops.append(Op(kind, tensors, (output,), options, self.op.source))
        return output

    def tail(self, a: Tensor) -> Tensor:
        """Writes erfc of what is not negative."""
        p, coefficients = TAIL
        t = self.put("DIV", constant(np.ones((), np.float32)), self.put("ADD", self.put("MUL", a, p), 1.0))
        total = self.put("MUL", t, coefficients[-1])
        for c in reversed(coefficients[:-1]):
            total = self.put("MUL", self.put("ADD", total, c), t)
        return self.put("MUL", total, self.put("EXP", self.put("MUL", self.put("MUL", a, a), -1.0)))

    def finished(self) -> list[Op]:
        """The operators, the last of which makes the output of the one that they stand for."""
        *before, last = self.ops
        return [*before, replace(last, outputs=self.op.outputs)]


def formula_of(function: Callable[[FormulaWriter, Tensor], Tensor]) -> Formula:
    """The formula of a function of one tensor."""

    def formula(op: Op) -> list[Op]:
        writer = FormulaWriter(op)
        function(writer, op.input(0))
        return writer.finished()

    return formula
