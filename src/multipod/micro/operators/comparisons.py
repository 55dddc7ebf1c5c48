"""Comparisons, bools and choices."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from multipod.micro.graph import Op, Tensor
from multipod.micro.lowering.constants import fit_operands, shape_of
from multipod.micro.lowering.lower import CannotLowerError, Lowering, PrimitiveRule, Value
from multipod.micro.operators.formula import FormulaWriter
from multipod.micro.operators.operator import AnyScale, Operator, Options, SameScale
from multipod.micro.operators.values import elementwise


def _compare(kind: str) -> PrimitiveRule:
    def rule(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
        dtype = eqn.invars[0].aval.dtype.name
        if dtype == "bool" and kind not in ("EQUAL", "NOT_EQUAL"):
            raise CannotLowerError("orders bools")
        return low.emit(kind, fit_operands(inputs, shape_of(eqn)), shape_of(eqn), "bool")

    return rule


def _logic(kind: str) -> PrimitiveRule:
    def rule(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
        if eqn.outvars[0].aval.dtype.name != "bool":
            raise CannotLowerError("works on the bits of integers")
        return low.emit(kind, inputs, shape_of(eqn), "bool")

    return rule


def lower_is_finite(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """Whether |x| is at most the largest float."""
    size = low.emit("ABS", inputs, shape_of(eqn))
    return low.emit("LESS_EQUAL", [size, np.array(np.finfo(np.float32).max, np.float32)], shape_of(eqn), "bool")


def lower_select_n(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """Chooses between two cases by a bool; a known choice is no operator."""
    which, *cases = inputs
    if len(cases) != 2 or eqn.invars[0].aval.dtype.name != "bool":
        raise CannotLowerError(f"chooses among {len(cases)} cases by an integer")
    if isinstance(which, np.ndarray) and which.size and (which == which.flat[0]).all():
        return cases[int(which.flat[0])]
    shape = shape_of(eqn)
    if isinstance(which, Tensor) and which.shape != shape:
        padded = (*which.shape, *[1] * (len(shape) - len(which.shape)))
        which = low.emit("RESHAPE", [which, np.array(padded, np.int32)], padded)
    which, *cases = fit_operands([which, *reversed(cases)], shape)
    return low.emit("SELECT_V2", [which, *cases], shape, eqn.outvars[0].aval.dtype.name)


CHOICES = {"int32": ("MUL", "ADD"), "bool": ("LOGICAL_AND", "LOGICAL_OR")}
"""TFLM chooses among floats only. c ? x : y is c x + (not c) y for integers, and the like for bools."""


def _select_formula(op: Op) -> list[Op] | None:
    dtype = op.output.dtype
    if dtype not in CHOICES:
        return None
    writer, (times, plus) = FormulaWriter(op), CHOICES[dtype]
    which = (op.input(0), writer.put("LOGICAL_NOT", op.input(0), dtype="bool"))
    cases = []
    for gate, case in zip(which, (op.input(1), op.input(2)), strict=True):
        if dtype != "bool":
            gate = writer.put("CAST", gate, dtype=dtype, in_data_type="bool", out_data_type=dtype)
        cases.append(writer.put(times, gate, case, dtype=dtype))
    writer.put(plus, *cases, dtype=dtype)
    return writer.finished()


def _comparison(name: str, primitive: str, function: Callable[..., Any], **primitives: PrimitiveRule) -> Operator:
    return Operator(
        name, since="1.14.0", versions={"int8": (2, "1.14.0")}, evaluate=elementwise(function), broadcasts=True,
        quantised=AnyScale(("int8",)), primitives={primitive: _compare(name), **primitives},
    )  # fmt: skip


def _logical(name: str, primitive: str, function: Callable[..., Any]) -> Operator:
    return Operator(name, since="1.11.0", evaluate=elementwise(function), primitives={primitive: _logic(name)})


OPERATORS = (
    _comparison("EQUAL", "eq", jnp.equal),
    _comparison("NOT_EQUAL", "ne", jnp.not_equal),
    _comparison("LESS", "lt", jnp.less),
    _comparison("LESS_EQUAL", "le", jnp.less_equal, is_finite=lower_is_finite),
    _comparison("GREATER", "gt", jnp.greater),
    _comparison("GREATER_EQUAL", "ge", jnp.greater_equal),
    _logical("LOGICAL_AND", "and", jnp.logical_and),
    _logical("LOGICAL_OR", "or", jnp.logical_or),
    _logical("LOGICAL_NOT", "not", jnp.logical_not),
    Operator(
        "SELECT_V2", Options(98), since="2.2.0", versions={"int8": (2, "2.12.0"), "int16": (2, "2.12.0")},
        evaluate=lambda op, xs: jnp.where(*xs), quantised=SameScale(), primitives={"select_n": lower_select_n},
        formula=_select_formula,
    ),
)  # fmt: skip
