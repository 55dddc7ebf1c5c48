"""What integer kernels demand of the scales around an operator, as its record says."""

from multipod.micro.graph import Op
from multipod.micro.operators.operator import AsTable, Demands, FixedScale, SameScale
from multipod.micro.operators.table import OPERATORS


def demands(op: Op) -> Demands | None:
    """The demands of an operator's integer kernels; None if it has none."""
    return OPERATORS[op.kind].quantised


def is_known(op: Op, activations: str) -> bool:
    """Whether an operator has a kernel for these activations."""
    kernel = demands(op)
    return kernel is not None and activations in kernel.activations


def shares_scale(op: Op) -> bool:
    """Whether an operator copies or chooses stored numbers, so that all its float tensors have one scale."""
    return isinstance(demands(op), SameScale)


def clips(op: Op) -> bool:
    """Whether a constant input of an operator bounds or fills, and is clipped to the range of the others."""
    kernel = demands(op)
    return isinstance(kernel, SameScale) and kernel.clips


def fixed_grid(op: Op, activations: str) -> tuple[float, int] | None:
    """The one output scale and zero point that an operator's kernel knows, if it is that kind."""
    kernel = demands(op)
    return kernel.grids.get(activations) if isinstance(kernel, FixedScale) else None


def becomes_table(op: Op) -> bool:
    """Whether an operator is a function of one number without an int8 kernel: a table of 256 bytes."""
    return isinstance(demands(op), AsTable)


def is_joinable(op: Op) -> bool:
    """Whether a table beside an operator takes it in, where all but one of its inputs are constant numbers."""
    return bool(OPERATORS[op.kind].elementwise) and demands(op) is not None
