"""Reshapes, transposes and repetitions."""

from typing import Any

import jax.numpy as jnp

from multipod.micro.lowering.constants import ints, shape_of
from multipod.micro.lowering.lower import CannotLowerError, Lowering, Value
from multipod.micro.lowering.moves import emit_reshape, emit_transpose
from multipod.micro.operators.operator import Operator, Options, SameScale


def lower_reshape(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """Becomes RESHAPE; squeeze and expand_dims do too."""
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        raise CannotLowerError("permutes dims while it reshapes; transpose first")
    return emit_reshape(low, inputs[0], shape_of(eqn))


def lower_transpose(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """Becomes TRANSPOSE."""
    return emit_transpose(low, inputs[0], eqn.params["permutation"])


def lower_broadcast_in_dim(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """Becomes a reshape, and BROADCAST_TO where elements repeat; element-wise readers drop the latter later."""
    x, shape = inputs[0], shape_of(eqn)
    wide = [1] * len(shape)
    for dim, position in enumerate(eqn.params["broadcast_dimensions"]):
        wide[position] = x.shape[dim]
    x = emit_reshape(low, x, tuple(wide))
    return x if tuple(wide) == shape else low.emit("BROADCAST_TO", [x, ints(shape)], shape)


OPERATORS = (
    Operator(
        "RESHAPE", Options(17), evaluate=lambda op, xs: jnp.reshape(xs[0], op.output.shape), quantised=SameScale(),
        in_place=True, primitives={"reshape": lower_reshape, "squeeze": lower_reshape, "expand_dims": lower_reshape},
    ),
    Operator(
        "TRANSPOSE", Options(26), since="1.6.0", versions={"int8": (2, "1.14.0"), "int16": (4, "2.3.0")},
        evaluate=lambda op, xs: jnp.transpose(xs[0], [int(dim) for dim in xs[1]]), quantised=SameScale(),
        primitives={"transpose": lower_transpose},
    ),
    Operator(
        "BROADCAST_TO", Options(104),
        versions=dict.fromkeys(("float32", "int8", "int16", "int32", "bool"), (2, "2.5.0")),
        evaluate=lambda op, xs: jnp.broadcast_to(xs[0], op.output.shape), quantised=SameScale(),
        primitives={"broadcast_in_dim": lower_broadcast_in_dim},
    ),
)  # fmt: skip
