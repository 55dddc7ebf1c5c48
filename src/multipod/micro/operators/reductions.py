"""Sums, means and extremes over dims, sums along one, and the place of the largest."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from multipod.micro.graph import Op
from multipod.micro.lowering.constants import ints, shape_of
from multipod.micro.lowering.lower import CannotLowerError, Lowering, PrimitiveRule, Value
from multipod.micro.lowering.moves import emit_reshape
from multipod.micro.match import Const, Match, Rewrite, is_all, node
from multipod.micro.operators.operator import AnyScale, Operator, Options, SameScale

REDUCE = Options(27, {"keep_dims": (0, "bool", 0)})


def _reduce(kind: str) -> PrimitiveRule:
    def rule(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
        x = low.tensor(inputs[0])
        if kind != "REDUCE_ALL" and x.dtype != "float32":
            raise CannotLowerError(f"reduces {x.dtype}; TFLM reduces floats")
        return emit_reduction(low, kind, x, tuple(eqn.params["axes"]))

    return rule


def emit_reduction(low: Lowering, kind: str, x: Value, axes: tuple[int, ...]) -> Value:
    """Reduces x over axes, which are dropped; dims are merged where TFLM's four are not enough."""
    shape = tuple(size for dim, size in enumerate(x.shape) if dim not in axes)
    if all(x.shape[axis] == 1 for axis in axes):
        return emit_reshape(low, x, shape)
    if len(x.shape) > 4:
        axes = tuple(sorted(axes))
        if axes != tuple(range(axes[0], axes[-1] + 1)):
            raise CannotLowerError(f"reduces scattered dims of {len(x.shape)}, and TFLM knows four")
        sizes = [x.shape[: axes[0]], x.shape[axes[0] : axes[-1] + 1], x.shape[axes[-1] + 1 :]]
        sizes = sizes if sizes[2] else sizes[:2]
        x, axes = emit_reshape(low, x, tuple(int(np.prod(part)) for part in sizes)), (1,)
    kept = tuple(1 if dim in axes else size for dim, size in enumerate(x.shape))
    y = low.emit(kind, [x, ints(axes)], kept, keep_dims=True)
    return emit_reshape(low, y, shape)


def lower_reduce_or(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """Becomes not all(not x)."""
    x = low.tensor(inputs[0])
    none = emit_reduction(low, "REDUCE_ALL", low.emit("LOGICAL_NOT", [x], x.shape), tuple(eqn.params["axes"]))
    return low.emit("LOGICAL_NOT", [none], none.shape)


def _arg(kind: str) -> PrimitiveRule:
    def rule(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
        (axis,) = eqn.params["axes"]
        return low.emit(kind, [inputs[0], np.asarray(axis, np.int32)], shape_of(eqn), "int32", output_type="int32")

    return rule


def lower_cumsum(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """Becomes CUMSUM."""
    axis = np.asarray(eqn.params["axis"], np.int32)
    return low.emit("CUMSUM", [inputs[0], axis], shape_of(eqn), exclusive=False, reverse=eqn.params["reverse"])


def _mean(match: Match) -> list[Op] | None:
    x, total = match["x"], match.ops["sum"]
    count = np.prod([x.shape[int(axis)] for axis in np.ravel(match["axes"].values)])
    if not is_all(match["c"], 1 / count):
        return None
    return [Op("MEAN", total.inputs, (match.op.output,), total.options, total.source)]


def _evaluate_cumsum(op: Op, xs: Any) -> Any:
    return lax.cumsum(xs[0], int(np.ravel(xs[1])[0]), reverse=op.options.get("reverse", False))


def _reduction(name: str, function: Callable[..., Any], primitive: str = "", **fields: Any) -> Operator:
    def evaluate(op: Op, xs: Any) -> Any:
        axes = tuple(int(axis) for axis in np.ravel(xs[1]))
        return function(xs[0], axis=axes, keepdims=op.options.get("keep_dims", False))

    primitives = {"primitives": {primitive: _reduce(name)}} if primitive else {}
    return Operator(name, REDUCE, **(primitives | fields), evaluate=evaluate)


def _place(name: str, number: int, primitive: str, function: Callable[..., Any]) -> Operator:
    return Operator(
        name, Options(number, {"output_type": (0, "dtype", 0)}), since="1.9.0", quantised=AnyScale(("int8",)),
        evaluate=lambda op, xs: function(xs[0], int(xs[1])).astype(jnp.int32), primitives={primitive: _arg(name)},
    )  # fmt: skip


OPERATORS = (
    _reduction(
        "SUM", jnp.sum, "reduce_sum", since="1.10.0", versions={"int8": (2, "1.15.0")}, quantised=AnyScale(("int8",))
    ),
    _reduction(
        "MEAN", jnp.mean, since="1.6.0", versions={"int8": (2, "1.14.0"), "int16": (3, "2.4.0")}, quantised=AnyScale(),
        recognised=(
            Rewrite("mean", node("MUL", node("SUM", "x", Const("axes"), name="sum"), Const("c")), _mean),
        ),
    ),
    _reduction(
        "REDUCE_MAX", jnp.max, "reduce_max", since="1.11.0", versions={"int8": (2, "1.14.0")},
        quantised=SameScale(("int8",)),
    ),
    _reduction(
        "REDUCE_MIN", jnp.min, "reduce_min", since="1.11.0", versions={"int8": (2, "1.14.0")},
        quantised=SameScale(("int8",)),
    ),
    _reduction(
        "REDUCE_ALL", jnp.all, since="2.6.0",
        primitives={"reduce_and": _reduce("REDUCE_ALL"), "reduce_or": lower_reduce_or},
    ),
    _place("ARG_MAX", 40, "argmax", jnp.argmax),
    _place("ARG_MIN", 57, "argmin", jnp.argmin),
    Operator(
        "CUMSUM", Options(102, {"exclusive": (0, "bool", 0), "reverse": (1, "bool", 0)}), since="2.4.0",
        evaluate=_evaluate_cumsum, primitives={"cumsum": lower_cumsum},
    ),
)  # fmt: skip
