"""Functions of one float: TFLite's own, and those that are written with others."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from multipod.micro.graph import Tensor, constant
from multipod.micro.lowering.constants import shape_of
from multipod.micro.lowering.lower import CannotLowerError, Lowering, PrimitiveRule, Value
from multipod.micro.match import Const, Rewrite, becomes, node
from multipod.micro.operators.formula import FormulaWriter, formula_of
from multipod.micro.operators.operator import AsTable, FixedScale, Operator, Options
from multipod.micro.operators.values import elementwise

ONE = np.ones((), np.float32)
LOGISTIC = Rewrite(
    "logistic",
    node("DIV", Const(number=1.0), node("ADD", node("EXP", node("MUL", "x", Const(number=-1.0))), Const(number=1.0))),
    becomes("LOGISTIC", "x"),
)


def _unary(kind: str) -> PrimitiveRule:
    def rule(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
        if eqn.invars[0].aval.dtype.name != "float32":
            raise CannotLowerError(f"works on {eqn.invars[0].aval.dtype.name}, and TFLite's {kind} on float32")
        return low.emit(kind, [inputs[0]], shape_of(eqn))

    return rule


def lower_round(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """Rounds half to even, as TFLite's ROUND does."""
    if eqn.params["rounding_method"] != lax.RoundingMethod.TO_NEAREST_EVEN:
        raise CannotLowerError("rounds half away from zero; TFLite rounds half to even (jnp.round)")
    return low.emit("ROUND", inputs, shape_of(eqn))


def _erfc(w: FormulaWriter, x: Tensor) -> Tensor:
    tail = w.tail(w.put("ABS", x))
    return w.put("SELECT_V2", w.put("LESS", x, 0.0, dtype="bool"), w.put("SUB", 2.0, tail), tail)


def _erf(w: FormulaWriter, x: Tensor) -> Tensor:
    near = w.put("SUB", 1.0, w.tail(w.put("ABS", x)))
    return w.put("SELECT_V2", w.put("LESS", x, 0.0, dtype="bool"), w.put("MUL", near, -1.0), near)


def _sign(w: FormulaWriter, x: Tensor) -> Tensor:
    casts = [
        w.put("CAST", w.put(kind, x, 0.0, dtype="bool"), in_data_type="bool", out_data_type="float32")
        for kind in ("GREATER", "LESS")
    ]
    return w.put("SUB", *casts)


def _function(name: str, function: Callable[[Any], Any], primitive: str = "", **fields: Any) -> Operator:
    """A function of one tensor; in int8 it becomes a table, unless `quantised` says otherwise."""
    primitives = {"primitives": {primitive: _unary(name)}} if primitive else {}
    return Operator(
        name, **({"quantised": AsTable()} | primitives | fields), evaluate=elementwise(function), elementwise=1
    )


OPERATORS = (
    _function("EXP", jnp.exp, "exp", options=Options(33), since="1.7.0"),
    _function("LOG", jnp.log, "log", since="1.14.0"),
    _function("SQRT", jnp.sqrt, "sqrt", since="1.10.0"),
    _function("RSQRT", lax.rsqrt, "rsqrt", since="1.10.0"),
    _function("ABS", jnp.abs, "abs", since="1.13.0"),
    _function("SIN", jnp.sin, "sin", since="1.9.0"),
    _function("COS", jnp.cos, "cos", since="1.14.0"),
    _function("FLOOR", jnp.floor, "floor", since="1.9.0"),
    _function("CEIL", jnp.ceil, "ceil", since="1.14.0"),
    _function("ROUND", jnp.round, since="1.14.0", primitives={"round": lower_round}),
    _function("SQUARE", jnp.square, "square", since="1.12.0", quantised=None),
    _function(
        "TANH", jnp.tanh, "tanh", since="1.14.0", versions={"int8": (2, "1.14.0"), "int16": (3, "2.3.0")},
        quantised=FixedScale({"int8": (1 / 128, 0), "int16": (1 / 32768, 0)}), in_place=True,
    ),
    _function(
        "LOGISTIC", jax.nn.sigmoid, "logistic", since="1.14.0",
        versions={"int8": (2, "1.14.0"), "int16": (3, "2.3.0")},
        quantised=FixedScale({"int8": (1 / 256, -128), "int16": (1 / 32768, 0)}), in_place=True,
        recognised=(LOGISTIC,),
    ),
    _function("ERF", lax.erf, "erf", formula=formula_of(_erf)),
    _function("ERFC", lax.erfc, "erfc", formula=formula_of(_erfc)),
    _function("SIGN", jnp.sign, "sign", formula=formula_of(_sign)),
    _function("LOG1P", jnp.log1p, "log1p", formula=formula_of(lambda w, x: w.put("LOG", w.put("ADD", x, 1.0)))),
    _function("EXPM1", jnp.expm1, "expm1", formula=formula_of(lambda w, x: w.put("ADD", w.put("EXP", x), -1.0))),
    _function("RECIPROCAL", lambda x: 1 / x, formula=formula_of(lambda w, x: w.put("DIV", constant(ONE), x))),
)  # fmt: skip
