"""Concatenation, padding and reversal."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from multipod.micro.graph import Op, Tensor
from multipod.micro.lowering.constants import ints, shape_of
from multipod.micro.lowering.lower import CannotLowerError, Lowering, Value
from multipod.micro.lowering.moves import emit_concatenation, emit_pad
from multipod.micro.operators.operator import Operator, Options, SameScale


def lower_concatenate(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """Becomes CONCATENATION."""
    return emit_concatenation(low, inputs, eqn.params["dimension"], shape_of(eqn))


def lower_pad(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """PAD with zeros, PADV2 with another number; negative padding slices. Padding between elements is refused."""
    x, fill = inputs
    config = eqn.params["padding_config"]
    if any(inner for _, _, inner in config):
        raise CannotLowerError("pads between elements, for which TFLite has no operator")
    if isinstance(fill, Tensor):
        raise CannotLowerError("pads with a computed number")
    return emit_pad(low, x, [(before, after) for before, after, _ in config], float(fill))


def lower_rev(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """REVERSE_V2, one axis at a time."""
    x = inputs[0]
    for axis in eqn.params["dimensions"]:
        x = low.emit("REVERSE_V2", [x, ints([axis])], shape_of(eqn))
    return x


def _concatenation(op: Op, xs: Any) -> Any:
    return jnp.concatenate([jnp.asarray(x) for x in xs], op.options["axis"])


def _pad(op: Op, xs: Any) -> Any:
    return jnp.pad(xs[0], np.asarray(xs[1]), constant_values=xs[2] if len(xs) > 2 else 0)


OPERATORS = (
    Operator(
        "CONCATENATION", Options(10, {"axis": (0, "int32", 0), "fused_activation_function": (1, "activation", 0)}),
        versions={"int8": (2, "1.14.0"), "int16": (3, "2.3.0")}, evaluate=_concatenation, quantised=SameScale(),
        primitives={"concatenate": lower_concatenate},
    ),
    Operator(
        "PAD", Options(22), versions={"int8": (2, "1.14.0"), "int16": (3, "2.4.0")}, evaluate=_pad,
        quantised=SameScale(), primitives={"pad": lower_pad},
    ),
    Operator(
        "PADV2", Options(43), since="1.9.0", versions={"int8": (2, "1.14.0"), "int16": (3, "2.4.0")}, evaluate=_pad,
        quantised=SameScale(clips=True),
    ),
    Operator(
        "REVERSE_V2", Options(81), since="1.14.0", versions={"int8": (3, "2.5.0"), "int16": (3, "2.5.0")},
        evaluate=lambda op, xs: jnp.flip(xs[0], [int(axis) for axis in xs[1]]), quantised=SameScale(),
        primitives={"rev": lower_rev},
    ),
)  # fmt: skip
