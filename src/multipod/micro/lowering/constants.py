"""Constants among the values that are lowered, and the shapes of what is made."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from multipod.micro.graph import Tensor
from multipod.micro.lowering.lower import Value

INFINITE = 3.0e38
"""Stands for infinity in constants: a kernel may subtract from it."""


def shape_of(eqn: Any) -> tuple[int, ...]:
    """The shape of an equation's first output."""
    return tuple(eqn.outvars[0].aval.shape)


def ints(values: Iterable[Any]) -> np.ndarray:
    """A constant int32 vector."""
    return np.asarray(list(values), np.int32)


def compress(value: Value) -> Value:
    """A constant without the dims along which it does not change: operators broadcast it back."""
    return value if isinstance(value, Tensor) else shrink(value)


def shrink(value: np.ndarray) -> np.ndarray:
    """An array without the dims along which it does not change."""
    for dim in range(value.ndim):
        first = np.take(value, [0], dim) if value.shape[dim] else value
        if value.shape[dim] > 1 and np.array_equal(np.broadcast_to(first, value.shape), value, equal_nan=True):
            value = first
    while value.ndim and value.shape[0] == 1:
        value = value[0]
    return value


def fit_operands(values: list[Value], shape: tuple[int, ...]) -> list[Value]:
    """Operands with compressed constants, except where the constant is what gives the result its shape."""
    smallest = [make_finite(compress(value)) for value in values]
    if np.broadcast_shapes(*(tuple(value.shape) for value in smallest)) == tuple(shape):
        return smallest
    return [make_finite(value) for value in values]


def make_finite(value: Value) -> Value:
    """A constant with `INFINITE` in place of infinity."""
    if isinstance(value, Tensor) or value.dtype.kind != "f":
        return value
    return np.clip(value, -INFINITE, INFINITE).astype(np.float32)
