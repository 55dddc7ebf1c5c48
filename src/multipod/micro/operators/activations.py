"""Activations and softmaxes: found in what JAX writes, by patterns."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from multipod.micro.graph import Op, Tensor, constant
from multipod.micro.match import Builder, Const, Match, Rewrite, becomes, change_op, make_op, node
from multipod.micro.operators.arithmetic import FUSED
from multipod.micro.operators.formula import FormulaWriter, formula_of
from multipod.micro.operators.operator import AnyScale, AsTable, FixedScale, Operator, Options, SameScale
from multipod.micro.operators.values import ACTIVATIONS, elementwise

# --- what is recognised ---------------------------------------------------------------------------------------------


def _bounds(kind: str, low: float, high: float) -> tuple[Rewrite, Rewrite]:
    """Rules for a function that keeps its input between two numbers, in either order."""

    def build(match: Match) -> list[Op] | None:
        bounds = zip((match["low"].values, match["high"].values), (low, high), strict=True)
        if not all(values.size == 1 and (values == number).all() for values, number in bounds):
            return None
        return [make_op(kind, [match["x"]], match.op.output, match.op.source)]

    name = kind.lower()
    return (
        Rewrite(name, node("MINIMUM", node("MAXIMUM", "x", Const("low")), Const("high")), build),
        Rewrite(f"{name}, the other way", node("MAXIMUM", node("MINIMUM", "x", Const("high")), Const("low")), build),
    )


def _relu(match: Match) -> list[Op] | None:
    if match["x"].dtype != "float32":
        return None
    return [make_op("RELU", [match["x"]], match.op.output, match.op.source)]


def _leaky(match: Match) -> list[Op] | None:
    slope = match["a"].values
    if slope.size != 1 or not 0 < slope.ravel()[0] < 1:
        return None
    return [make_op("LEAKY_RELU", [match["x"]], match.op.output, match.op.source, alpha=float(slope.ravel()[0]))]


def _softmax(kind: str, **options: float) -> Builder:
    """A softmax over the last dim; over another one between two transposes."""

    def build(match: Match) -> list[Op] | None:
        x, op = match["x"], match.op
        axes = [int(axis) % len(x.shape) for axis in np.ravel(match["axes"].values)]
        if len(axes) != 1 or (
            "axes2" in match.tensors and not np.array_equal(match["axes2"].values, match["axes"].values)
        ):
            return None
        last = len(x.shape) - 1
        if axes == [last]:
            return [make_op(kind, [x], op.output, op.source, **options)]
        order = [dim for dim in range(len(x.shape)) if dim != axes[0]] + axes
        turned = Tensor(x.name + "_t", tuple(x.shape[dim] for dim in order))
        result = Tensor(op.output.name + "_t", turned.shape)
        back = np.argsort(order).astype(np.int32)
        return [
            make_op("TRANSPOSE", [x, constant(np.asarray(order, np.int32))], turned, op.source),
            make_op(kind, [turned], result, op.source, **options),
            make_op("TRANSPOSE", [result, constant(back)], op.output, op.source),
        ]

    return build


def _beta(match: Match) -> list[Op] | None:
    """softmax(c x) = softmax with beta c, for one positive number c."""
    c = match["c"].values
    if c.size != 1 or c.ravel()[0] <= 0 or match["x"].shape != match.op.output.shape:
        return None
    return [change_op(match.op, [match["x"]], match.op.output, beta=match.op.options["beta"] * float(c.ravel()[0]))]


_BELOW = node("MUL", "x", Const("a"))
_POSITIVE = node("GREATER|GREATER_EQUAL", "x", Const(number=0.0))
_SHIFTED6 = node("RELU6", node("ADD", "x", Const(number=3.0)))
_EXP = node("EXP", node("SUB", "x", node("REDUCE_MAX", "x", Const("axes"))), name="exp")
_FREE_EXP = node("EXP", "x", name="exp")
_HALF, _ROOT_HALF = 0.5, math.sqrt(0.5)
_CUBE = node("MUL", "x", node("SQUARE", "x"))
_TANH_GATE = node("TANH", node("MUL", node("ADD", "x", node("MUL", _CUBE, Const(number=0.044715))),
                               Const(number=math.sqrt(2 / math.pi))))  # fmt: skip
_ERF_GATE = node("ERF", node("MUL", "x", Const(number=_ROOT_HALF)))

_GELU = (
    Rewrite("gelu by erfc", node("MUL", node("MUL", "x", Const(number=_HALF)),
                              node("ERFC", node("MUL", "x", Const(number=-_ROOT_HALF)))),
         becomes("GELU", "x", approximate=False)),
    *(Rewrite(f"gelu by {name}, {where}", pattern, becomes("GELU", "x", approximate=name == "tanh"))
      for name, gate in (("tanh", _TANH_GATE), ("erf", _ERF_GATE))
      for where, pattern in {
          "half inside": node("MUL", "x", node("MUL", node("ADD", gate, Const(number=1.0)), Const(number=_HALF))),
          "half first": node("MUL", node("MUL", "x", Const(number=_HALF)), node("ADD", gate, Const(number=1.0))),
          "half last": node("MUL", node("MUL", "x", node("ADD", gate, Const(number=1.0))), Const(number=_HALF)),
      }.items()),
)  # fmt: skip

# --- what is computed -----------------------------------------------------------------------------------------------


def _l2_normalization(op: Op, xs: Any) -> Any:
    return xs[0] * lax.rsqrt(jnp.maximum(jnp.sum(xs[0] * xs[0], axis=-1, keepdims=True), 1e-6))


def _gelu(w: FormulaWriter, x: Tensor) -> Tensor:
    """x Phi(x) = max(x, 0) - |x| Phi(-|x|), or with tanh as Hendrycks and Gimpel (arXiv:1606.08415) approximate it."""
    if w.op.options["approximate"]:
        cube = w.put("MUL", w.put("MUL", x, x), x)
        inner = w.put("MUL", w.put("ADD", x, w.put("MUL", cube, 0.044715)), math.sqrt(2 / math.pi))
        gate = w.put("MUL", w.put("ADD", w.put("TANH", inner), 1.0), 0.5)
        return w.put("MUL", x, gate)
    size = w.put("ABS", x)
    tail = w.put("MUL", w.put("MUL", w.tail(w.put("MUL", size, math.sqrt(0.5))), 0.5), size)
    return w.put("SUB", w.put("RELU", x), tail)


def _softplus(w: FormulaWriter, x: Tensor) -> Tensor:
    rest = w.put("LOG", w.put("ADD", w.put("EXP", w.put("MUL", w.put("ABS", x), -1.0)), 1.0))
    return w.put("ADD", w.put("RELU", x), rest)


def _unit_relu(w: FormulaWriter, x: Tensor) -> Tensor:
    return w.put("MINIMUM", w.put("MAXIMUM", x, -1.0), 1.0)


def _activation(name: str, function: Callable[[Any], Any], **fields: Any) -> Operator:
    return Operator(name, evaluate=elementwise(function), elementwise=1, **fields)


OPERATORS = (  # RELU6 before RELU: of max(min(x, 6), 0) both match the maximum
    _activation(
        "RELU6", ACTIVATIONS["RELU6"], versions={"int8": (2, "1.14.0"), "int16": (3, "2.5.0")},
        quantised=SameScale(("int8",)), in_place=True,
        recognised=(
            *_bounds("RELU6", 0.0, 6.0),
            Rewrite("relu6 of relu", node("MINIMUM", node("RELU", "x"), Const(number=6.0)), becomes("RELU6", "x")),
        ),
    ),
    _activation(
        "RELU_N1_TO_1", ACTIVATIONS["RELU_N1_TO_1"], quantised=AsTable(), formula=formula_of(_unit_relu),
        recognised=_bounds("RELU_N1_TO_1", -1.0, 1.0),
    ),
    _activation(
        "RELU", jax.nn.relu, versions={"int8": (2, "2.1.0"), "int16": (3, "2.5.0")}, quantised=AnyScale(("int8",)),
        in_place=True, recognised=(Rewrite("relu", node("MAXIMUM", "x", Const(number=0.0)), _relu),),
    ),
    Operator(
        "LEAKY_RELU", Options(75, {"alpha": (0, "float32", 0)}), since="1.13.1", elementwise=1, in_place=True,
        versions={"int8": (2, "2.3.0"), "int16": (2, "2.3.0")}, quantised=AnyScale(),
        evaluate=lambda op, xs: jnp.where(xs[0] >= 0, xs[0], op.options["alpha"] * xs[0]),
        recognised=(
            Rewrite("leaky relu", node("SELECT_V2", _POSITIVE, "x", _BELOW), _leaky),
            Rewrite("leaky relu as a maximum", node("MAXIMUM", "x", _BELOW), _leaky),
        ),
    ),
    _activation(
        "ELU", jax.nn.elu, since="1.14.0", quantised=AnyScale(("int8",)),
        recognised=(Rewrite("elu", node("SELECT_V2", _POSITIVE, "x",
                                     node("EXPM1", node("SELECT_V2", _POSITIVE, Const(number=0.0), "x"))),
                         becomes("ELU", "x")),),
    ),
    _activation(
        "HARD_SWISH", jax.nn.hard_swish, options=Options(91), since="1.15.0", quantised=AnyScale(("int8",)),
        in_place=True,
        recognised=(
            Rewrite("hard swish", node("MUL", "x", node("MUL", _SHIFTED6, Const(number=1 / 6))),
                 becomes("HARD_SWISH", "x")),
            Rewrite("hard swish, later", node("MUL", node("MUL", "x", _SHIFTED6), Const(number=1 / 6)),
                 becomes("HARD_SWISH", "x")),
        ),
    ),
    Operator(
        "GELU", quantised=AsTable(), elementwise=1, recognised=_GELU, formula=formula_of(_gelu),
        evaluate=lambda op, xs: jax.nn.gelu(xs[0], approximate=op.options["approximate"]),
    ),
    _activation(
        "SOFTPLUS", jax.nn.softplus, quantised=AsTable(), formula=formula_of(_softplus),
        recognised=(Rewrite("softplus", node("ADD", node("RELU", "x"), node("LOG1P", node("EXP", node(
            "MUL", node("ABS", "x"), Const(number=-1.0))))), becomes("SOFTPLUS", "x")),),
    ),
    Operator(
        "SOFTMAX", Options(9, {"beta": (0, "float32", 0)}), versions={"int8": (2, "1.14.0"), "int16": (3, "2.3.0")},
        evaluate=lambda op, xs: jax.nn.softmax(op.options["beta"] * xs[0], axis=-1),
        quantised=FixedScale({"int8": (1 / 256, -128), "int16": (1 / 32768, 0)}),
        recognised=(
            Rewrite("softmax", node("DIV", _EXP, node("SUM", _EXP, Const("axes2"))), _softmax("SOFTMAX", beta=1.0)),
            Rewrite("softmax without a maximum", node("DIV", _FREE_EXP, node("SUM", _FREE_EXP, Const("axes"))),
                 _softmax("SOFTMAX", beta=1.0)),
            Rewrite("softmax of a multiple", node("SOFTMAX", node("MUL", "x", Const("c"))), _beta),
        ),
    ),
    Operator(
        "LOG_SOFTMAX", Options(36), since="1.14.0", versions={"int8": (2, "1.14.0")},
        evaluate=lambda op, xs: jax.nn.log_softmax(xs[0], axis=-1), quantised=FixedScale({"int8": (16 / 256, 127)}),
        recognised=(Rewrite("log softmax", node("SUB", node("SUB", "x", node("REDUCE_MAX", "x", Const("axes"))),
                                             node("LOG", node("SUM", _EXP, Const("axes2")))),
                         _softmax("LOG_SOFTMAX")),),
    ),
    Operator("L2_NORMALIZATION", Options(12, FUSED), evaluate=_l2_normalization),
)  # fmt: skip
