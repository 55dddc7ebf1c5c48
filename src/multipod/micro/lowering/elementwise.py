"""Element-wise primitives, comparisons, choices and casts."""

from typing import Any

import numpy as np

from multipod.micro.graph import Tensor
from multipod.micro.lowering.lower import CannotLowerError, Lowering, Rule, Value

UNARY = {
    "exp": "EXP", "log": "LOG", "tanh": "TANH", "logistic": "LOGISTIC", "rsqrt": "RSQRT", "sqrt": "SQRT", "abs": "ABS",
    "sin": "SIN", "cos": "COS", "floor": "FLOOR", "ceil": "CEIL", "square": "SQUARE", "erf": "ERF", "erfc": "ERFC",
    "log1p": "LOG1P", "expm1": "EXPM1", "sign": "SIGN",
}  # fmt: skip
"""Functions of one float tensor; `rules.COMPOSITES` are taken apart, or become tables, later."""

BINARY = {"add": "ADD", "add_any": "ADD", "sub": "SUB", "mul": "MUL", "div": "DIV", "max": "MAXIMUM", "min": "MINIMUM"}
COMPARE = {"eq": "EQUAL", "ne": "NOT_EQUAL", "lt": "LESS", "le": "LESS_EQUAL", "gt": "GREATER", "ge": "GREATER_EQUAL"}
LOGIC = {"and": "LOGICAL_AND", "or": "LOGICAL_OR"}
INFINITE = 3.0e38


def compressed(value: Value) -> Value:
    """A constant without the dims along which it does not change: operators broadcast it back."""
    return value if isinstance(value, Tensor) else small(value)


def small(value: np.ndarray) -> np.ndarray:
    """See `compressed`."""
    for dim in range(value.ndim):
        first = np.take(value, [0], dim) if value.shape[dim] else value
        if value.shape[dim] > 1 and np.array_equal(np.broadcast_to(first, value.shape), value, equal_nan=True):
            value = first
    while value.ndim and value.shape[0] == 1:
        value = value[0]
    return value


def fitting(values: list[Value], shape: tuple[int, ...]) -> list[Value]:
    """Operands with compressed constants, except where the constant is what gives the result its shape."""
    small = [_finite(compressed(value)) for value in values]
    if np.broadcast_shapes(*(tuple(value.shape) for value in small)) == tuple(shape):
        return small
    return [_finite(value) for value in values]


def _finite(value: Value) -> Value:
    if isinstance(value, Tensor) or value.dtype.kind != "f":
        return value
    return np.clip(value, -INFINITE, INFINITE).astype(np.float32)


def _shape(eqn: Any) -> tuple[int, ...]:
    return tuple(eqn.outvars[0].aval.shape)


def _unary(kind: str) -> Rule:
    def rule(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
        if eqn.invars[0].aval.dtype.name != "float32":
            raise CannotLowerError(f"works on {eqn.invars[0].aval.dtype.name}, and TFLite's {kind} on float32")
        return low.emit(kind, [inputs[0]], _shape(eqn))

    return rule


def _binary(kind: str) -> Rule:
    def rule(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
        left, right = fitting(inputs, _shape(eqn))
        dtype = eqn.outvars[0].aval.dtype.name
        if kind in ("MAXIMUM", "MINIMUM"):  # max(x, -inf) is x
            for one, other in (inputs, inputs[::-1]):
                least = isinstance(other, np.ndarray) and np.all(other == (-np.inf if kind == "MAXIMUM" else np.inf))
                if least and tuple(one.shape) == _shape(eqn):
                    return one
        if kind == "DIV" and dtype != "float32":
            return low.emit("FLOOR_DIV", [left, right], _shape(eqn), dtype)
        return low.emit(kind, [left, right], _shape(eqn), dtype)

    return rule


def _compare(kind: str) -> Rule:
    def rule(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
        dtype = eqn.invars[0].aval.dtype.name
        if dtype == "bool" and kind not in ("EQUAL", "NOT_EQUAL"):
            raise CannotLowerError("orders bools")
        return low.emit(kind, fitting(inputs, _shape(eqn)), _shape(eqn), "bool")

    return rule


def _logic(kind: str) -> Rule:
    def rule(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
        if eqn.outvars[0].aval.dtype.name != "bool":
            raise CannotLowerError("works on the bits of integers")
        return low.emit(kind, inputs, _shape(eqn), "bool")

    return rule


def neg(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """-x as a product, which has an int8 kernel; TFLite's NEG has none in TFLM."""
    dtype = eqn.invars[0].aval.dtype
    return low.emit("MUL", [inputs[0], np.array(-1, dtype)], _shape(eqn))


def logical_not(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """`not` of bools."""
    if eqn.outvars[0].aval.dtype.name != "bool":
        raise CannotLowerError("works on the bits of integers")
    return low.emit("LOGICAL_NOT", inputs, _shape(eqn), "bool")


def integer_pow(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """x^n by squaring, and 1 / x^n for a negative one."""
    return _to_integer(low, inputs[0], eqn.params["y"], _shape(eqn))


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


def power(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """x^c for a constant c: a product, a root, or exp(c log x), which like JAX's power is NaN for x < 0."""
    base, exponent = inputs[0], compressed(inputs[1])
    if isinstance(exponent, Tensor) or exponent.size != 1:
        raise CannotLowerError("has an exponent that is no constant number")
    value, shape = float(exponent.ravel()[0]), _shape(eqn)
    if value.is_integer() and abs(value) <= 16:
        return _to_integer(low, base, int(value), shape)
    if abs(value) == 0.5:
        return low.emit("SQRT" if value > 0 else "RSQRT", [base], shape)
    log = low.emit("LOG", [base], shape)
    return low.emit("EXP", [low.emit("MUL", [log, np.array(value, np.float32)], shape)], shape)


def rem(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """JAX's remainder has the sign of the dividend and TFLite's FLOOR_MOD that of the divisor: x - d trunc(x / d)."""
    x, d = inputs
    shape, dtype = _shape(eqn), eqn.outvars[0].aval.dtype
    zero = np.zeros((), dtype)
    mod = low.emit("FLOOR_MOD", [x, compressed(d)], shape)
    below = [low.emit("LESS", [value, zero], shape, "bool") for value in (x, mod)]
    signs = low.emit("NOT_EQUAL", below, shape, "bool")
    off = low.emit("LOGICAL_AND", [low.emit("NOT_EQUAL", [mod, zero], shape, "bool"), signs], shape, "bool")
    step = low.emit("MUL", [low.emit("CAST", [off], shape, dtype.name, in_data_type="bool", out_data_type=dtype.name),
                            compressed(d)], shape)  # fmt: skip
    return low.emit("SUB", [mod, step], shape)


def clamp(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """min(max(x, low), high)."""
    least, x, most = inputs
    raised = low.emit("MAXIMUM", [x, _finite(compressed(least))], _shape(eqn))
    return low.emit("MINIMUM", [raised, _finite(compressed(most))], _shape(eqn))


def select_n(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """Chooses between two cases by a bool; a known choice is no operator."""
    which, *cases = inputs
    if len(cases) != 2 or eqn.invars[0].aval.dtype.name != "bool":
        raise CannotLowerError(f"chooses among {len(cases)} cases by an integer")
    if isinstance(which, np.ndarray) and which.size and (which == which.flat[0]).all():
        return cases[int(which.flat[0])]
    shape = _shape(eqn)
    if isinstance(which, Tensor) and which.shape != shape:
        padded = (*which.shape, *[1] * (len(shape) - len(which.shape)))
        which = low.emit("RESHAPE", [which, np.array(padded, np.int32)], padded)
    which, *cases = fitting([which, *reversed(cases)], shape)
    return low.emit("SELECT_V2", [which, *cases], shape, eqn.outvars[0].aval.dtype.name)


def convert(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """CAST, or nothing where the types are the same to us (int32 and int64)."""
    from multipod.micro.lowering.lower import edge_dtype

    tensor = low.tensor(inputs[0])
    new = edge_dtype(eqn.params["new_dtype"])
    if eqn.params["new_dtype"].name in ("bfloat16", "float16"):
        raise CannotLowerError(f"rounds to {eqn.params['new_dtype'].name}; export a float32 version of the model")
    if tensor.dtype == new:
        return tensor
    if new == "bool":
        return low.emit("NOT_EQUAL", [tensor, np.zeros((), tensor.dtype)], tensor.shape, "bool")
    return low.emit("CAST", [tensor], tensor.shape, new, in_data_type=tensor.dtype, out_data_type=new)


def same(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """Nothing: the value itself."""
    return inputs[0]


def round_(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """Rounds half to even, as TFLite's ROUND does."""
    from jax.lax import RoundingMethod

    if eqn.params["rounding_method"] != RoundingMethod.TO_NEAREST_EVEN:
        raise CannotLowerError("rounds half away from zero; TFLite rounds half to even (jnp.round)")
    return low.emit("ROUND", inputs, _shape(eqn))


def is_finite(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """|x| is below the largest float."""
    size = low.emit("ABS", inputs, _shape(eqn))
    return low.emit("LESS_EQUAL", [size, np.array(np.finfo(np.float32).max, np.float32)], _shape(eqn), "bool")


RULES: dict[str, Rule] = {
    **{name: _unary(kind) for name, kind in UNARY.items()},
    **{name: _binary(kind) for name, kind in BINARY.items()},
    **{name: _compare(kind) for name, kind in COMPARE.items()},
    **{name: _logic(kind) for name, kind in LOGIC.items()},
    "not": logical_not, "neg": neg, "integer_pow": integer_pow, "pow": power, "rem": rem, "clamp": clamp,
    "select_n": select_n, "convert_element_type": convert, "stop_gradient": same, "copy": same, "copy_p": same,
    "reduce_precision": same, "optimization_barrier": lambda low, eqn, inputs: list(inputs), "round": round_,
    "is_finite": is_finite, "pvary": same, "sharding_constraint": same, "name": same,
}  # fmt: skip
