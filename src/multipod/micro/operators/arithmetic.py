"""Sums, products, quotients and powers of two tensors, or of one and a number."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from multipod.micro.graph import Tensor
from multipod.micro.lowering.constants import compress, fit_operands, make_finite, shape_of
from multipod.micro.lowering.lower import CannotLowerError, Lowering, PrimitiveRule, Value
from multipod.micro.operators.operator import AnyScale, Operator, Options, SameScale
from multipod.micro.operators.values import elementwise

FUSED = {"fused_activation_function": (0, "activation", 0.0)}
WITH_SCALES = FUSED | {"pot_scale_int16": (1, "bool", 1)}


def _binary(kind: str) -> PrimitiveRule:
    return lambda low, eqn, inputs: _emit(low, kind, eqn, inputs)


def _emit(low: Lowering, kind: str, eqn: Any, inputs: list[Value]) -> Value:
    left, right = fit_operands(inputs, shape_of(eqn))
    return low.emit(kind, [left, right], shape_of(eqn), eqn.outvars[0].aval.dtype.name)


def _bound(kind: str, least: float) -> PrimitiveRule:
    """MAXIMUM or MINIMUM; nothing beside `least`: max(x, -inf) is x."""

    def rule(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
        for x, other in (inputs, inputs[::-1]):
            if isinstance(other, np.ndarray) and np.all(other == least) and tuple(x.shape) == shape_of(eqn):
                return x
        return _emit(low, kind, eqn, inputs)

    return rule


def lower_atan2(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """ATAN2, which unlike its neighbours here repeats no elements."""
    shape = shape_of(eqn)
    return low.emit("ATAN2", [np.broadcast_to(x, shape) if isinstance(x, np.ndarray) else x for x in inputs], shape)


def lower_div(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """DIV of floats, FLOOR_DIV of integers."""
    kind = "DIV" if eqn.outvars[0].aval.dtype.name == "float32" else "FLOOR_DIV"
    return _emit(low, kind, eqn, inputs)


def lower_neg(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """-x as a product, which has an int8 kernel; TFLite's NEG has none in TFLM."""
    dtype = eqn.invars[0].aval.dtype
    return low.emit("MUL", [inputs[0], np.array(-1, dtype)], shape_of(eqn))


def lower_integer_pow(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """Computes x^n by squaring, and 1 / x^n for a negative n."""
    return _to_integer(low, inputs[0], eqn.params["y"], shape_of(eqn))


def _to_integer(low: Lowering, x: Value, exponent: int, shape: tuple[int, ...]) -> Value:
    power, result = abs(exponent), None
    while power:
        if power & 1:
            result = x if result is None else low.emit("MUL", [result, x], shape)
        power >>= 1
        x = low.emit("SQUARE", [x], shape) if power else x
    if result is None:
        return np.ones(shape, np.float32)
    return result if exponent > 0 else low.emit("DIV", [np.array(1, np.float32), result], shape)


def lower_power(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """x^c for a constant c: a product, a root, or exp(c log x), which like JAX's power is NaN for x < 0."""
    base, exponent = inputs[0], compress(inputs[1])
    if isinstance(exponent, Tensor) or exponent.size != 1:
        raise CannotLowerError("has an exponent that is no constant number")
    value, shape = float(exponent.ravel()[0]), shape_of(eqn)
    if value.is_integer() and abs(value) <= 16:
        return _to_integer(low, base, int(value), shape)
    if abs(value) == 0.5:
        return low.emit("SQRT" if value > 0 else "RSQRT", [base], shape)
    log = low.emit("LOG", [base], shape)
    return low.emit("EXP", [low.emit("MUL", [log, np.array(value, np.float32)], shape)], shape)


def lower_rem(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """JAX's remainder has the sign of the dividend and TFLite's FLOOR_MOD that of the divisor: x - d trunc(x / d)."""
    x, d = inputs
    shape, dtype = shape_of(eqn), eqn.outvars[0].aval.dtype
    zero = np.zeros((), dtype)
    mod = low.emit("FLOOR_MOD", [x, compress(d)], shape)
    below = [low.emit("LESS", [value, zero], shape, "bool") for value in (x, mod)]
    signs = low.emit("NOT_EQUAL", below, shape, "bool")
    off = low.emit("LOGICAL_AND", [low.emit("NOT_EQUAL", [mod, zero], shape, "bool"), signs], shape, "bool")
    step = low.emit("MUL", [low.emit("CAST", [off], shape, dtype.name, in_data_type="bool", out_data_type=dtype.name),
                            compress(d)], shape)  # fmt: skip
    return low.emit("SUB", [mod, step], shape)


def lower_clamp(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """Becomes min(max(x, low), high)."""
    least, x, most = inputs
    raised = low.emit("MAXIMUM", [x, make_finite(compress(least))], shape_of(eqn))
    return low.emit("MINIMUM", [raised, make_finite(compress(most))], shape_of(eqn))


def _operator(name: str, function: Callable[..., Any], **fields: Any) -> Operator:
    """An operator of two tensors, the smaller of which it repeats."""
    return Operator(name, evaluate=elementwise(function), elementwise=2, broadcasts=True, **fields)


OPERATORS = (
    _operator(
        "ADD", jnp.add, options=Options(11, WITH_SCALES),
        versions={"int8": (2, "1.14.0"), "int16": (3, "2.4.0")}, quantised=AnyScale(), in_place=True, fuses=True,
        primitives={"add": _binary("ADD"), "add_any": _binary("ADD")},
    ),
    _operator(
        "SUB", jnp.subtract, options=Options(28, WITH_SCALES),
        versions={"int8": (2, "1.14.0"), "int16": (5, "2.4.0")}, quantised=AnyScale(), in_place=True, fuses=True,
        primitives={"sub": _binary("SUB")},
    ),
    _operator(
        "MUL", jnp.multiply, options=Options(21, FUSED),
        versions={"int8": (2, "1.14.0"), "int16": (4, "2.3.0")}, quantised=AnyScale(), in_place=True, fuses=True,
        primitives={"mul": _binary("MUL"), "neg": lower_neg, "integer_pow": lower_integer_pow, "pow": lower_power},
    ),
    _operator("DIV", jnp.divide, options=Options(29, FUSED), primitives={"div": lower_div}),
    _operator(
        "MAXIMUM", jnp.maximum, options=Options(39), since="1.14.0",
        versions={"int8": (2, "1.14.0"), "int16": (3, "2.3.0")}, quantised=SameScale(clips=True),
        primitives={"max": _bound("MAXIMUM", -np.inf)},
    ),
    _operator(
        "MINIMUM", jnp.minimum, options=Options(39), since="1.14.0",
        versions={"int8": (2, "1.14.0"), "int16": (3, "2.3.0")}, quantised=SameScale(clips=True),
        primitives={"min": _bound("MINIMUM", np.inf), "clamp": lower_clamp},
    ),
    Operator(
        "SQUARED_DIFFERENCE", options=Options(76), since="1.13.1", evaluate=elementwise(lambda x, y: (x - y) ** 2),
        quantised=AnyScale(("int8",)),
    ),
    Operator(
        "ATAN2", Options(122), since="2.10.0", evaluate=elementwise(jnp.arctan2), primitives={"atan2": lower_atan2}
    ),
    Operator("FLOOR_DIV", since="1.14.0", evaluate=elementwise(jnp.floor_divide)),
    Operator("FLOOR_MOD", since="1.13.0", evaluate=elementwise(jnp.mod), primitives={"rem": lower_rem}),
)  # fmt: skip
