"""The table of operators: a new one is a record in a file beside this."""

from multipod.micro.graph import Op
from multipod.micro.lowering.lower import PrimitiveRule
from multipod.micro.operators import (
    activations,
    arithmetic,
    comparisons,
    functions,
    joins,
    loops,
    only_runtime,
    pools,
    reductions,
    shapes,
    slices,
    types,
    weighted,
)
from multipod.micro.operators.operator import Operator, Weighted

FAMILIES = (
    arithmetic, functions, activations, comparisons, types, weighted, pools, reductions, shapes, slices, joins, loops,
    only_runtime,
)  # fmt: skip

OPERATORS: dict[str, Operator] = {operator.name: operator for family in FAMILIES for operator in family.OPERATORS}
"""Every operator of TensorFlow Lite Micro, and the functions that are written with several, by name."""

PRIMITIVES: dict[str, PrimitiveRule] = {
    name: rule for operator in OPERATORS.values() for name, rule in operator.primitives.items()
}
"""What each of JAX's primitives becomes."""

assert len(OPERATORS) == sum(len(family.OPERATORS) for family in FAMILIES), "two records of one operator"
assert len(PRIMITIVES) == sum(len(operator.primitives) for operator in OPERATORS.values()), "two rules of one primitive"


def weights_of(op: Op) -> Weighted | None:
    """Which inputs of an operator are the data, the weights and the bias; None for operators without weights."""
    quantised = OPERATORS[op.kind].quantised
    return quantised if isinstance(quantised, Weighted) else None
