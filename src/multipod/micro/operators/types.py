"""Changes of type: casts, grids, and the tables that stand for functions of one number."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from multipod.micro.lowering.lower import CannotLowerError, Lowering, Value, edge_dtype
from multipod.micro.operators.operator import AnyScale, Operator, Options


def lower_convert(low: Lowering, eqn: Any, inputs: list[Value]) -> Value:
    """CAST, or nothing where the types are the same to us (int32 and int64)."""
    tensor = low.tensor(inputs[0])
    new = edge_dtype(eqn.params["new_dtype"])
    if eqn.params["new_dtype"].name in ("bfloat16", "float16"):
        raise CannotLowerError(f"rounds to {eqn.params['new_dtype'].name}; export a float32 version of the model")
    if tensor.dtype == new:
        return tensor
    if new == "bool":
        return low.emit("NOT_EQUAL", [tensor, np.zeros((), tensor.dtype)], tensor.shape, "bool")
    return low.emit("CAST", [tensor], tensor.shape, new, in_data_type=tensor.dtype, out_data_type=new)


OPERATORS = (
    Operator(
        "CAST", Options(37, {"in_data_type": (0, "dtype", 0), "out_data_type": (1, "dtype", 0)}),
        versions={"int8": (2, "2.7.0")}, evaluate=lambda op, xs: jnp.asarray(xs[0]).astype(op.output.dtype),
        primitives={"convert_element_type": lower_convert},
    ),
    Operator(
        "QUANTIZE", Options(89), since="1.14.0", versions={"int8": (2, "1.15.0"), "int16": (2, "1.15.0")},
        evaluate=lambda op, xs: xs[0], quantised=AnyScale(),
    ),
    Operator("DEQUANTIZE", versions={"int8": (2, "1.14.0"), "int16": (3, "1.15.0")}, evaluate=lambda op, xs: xs[0]),
    Operator(
        "TABLE", evaluate=lambda op, xs: op.options["function"](*xs)[0], elementwise=1,
        quantised=AnyScale(("int8",)),
    ),
)  # fmt: skip
