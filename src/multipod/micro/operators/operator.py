"""The record of one operator: everything that the exporter knows of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from multipod.micro.graph import Op
from multipod.micro.lowering.lower import PrimitiveRule
from multipod.micro.match import Rewrite
from multipod.micro.schema import FIRST_RUNTIME, NUMBERS

Evaluate = Callable[[Op, Sequence[Any]], Any]
"""Gets an operator and its inputs as real numbers, returns its output, or a list of them. Graphs among the operator's
options arrive as functions from inputs to a list of outputs."""

Formula = Callable[[Op], "Sequence[Op] | None"]
"""Takes an operator apart into operators that TFLM has; None where TFLM has this one as it stands."""


@dataclass(frozen=True)
class Options:
    """The options table of an operator: its number in the union, and each field's number, type and default.

    Types: `int8`, `int32`, `bool`, `float32`; `padding`, `activation`, `dtype` are int8 that stand for a name;
    `graph` is an int32 that stands for a subgraph.
    """

    number: int
    fields: Mapping[str, tuple[int, str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class AnyScale:
    """Integer kernels that take and give tensors of any scale."""

    activations: tuple[str, ...] = ("int8", "int16")


@dataclass(frozen=True)
class SameScale:
    """Integer kernels that copy or choose stored numbers: all their float tensors have one scale.

    `clips`: a constant bounds or fills, so that it does not widen the range and is clipped to it.
    """

    activations: tuple[str, ...] = ("int8", "int16")
    clips: bool = False


@dataclass(frozen=True)
class FixedScale:
    """Integer kernels that know one output scale and zero point, by the type of the activations."""

    grids: Mapping[str, tuple[float, int]]

    @property
    def activations(self) -> tuple[str, ...]:
        """The types that there are kernels for."""
        return tuple(self.grids)


@dataclass(frozen=True)
class Weighted:
    """Integer kernels with constant weights: which inputs are the data, the weights and the bias.

    `channel_dim` is the dim of the weights that counts output channels. `int4`: there is a kernel for such weights.
    """

    data: int = 0
    weights: int = 1
    bias: int = 2
    channel_dim: int = 0
    int4: bool = True
    activations: tuple[str, ...] = ("int8", "int16")


@dataclass(frozen=True)
class AsTable:
    """No integer kernel: a function of one number, which becomes a table of 256 bytes in int8."""

    activations: tuple[str, ...] = ()


Demands = AnyScale | SameScale | FixedScale | Weighted | AsTable
"""What the integer kernels of an operator demand of the scales around them. From TFLM's own checks."""


@dataclass(frozen=True)
class Operator:
    """An operator of TFLite, or a function that is written with several (`formula`).

    Attributes:
      name: TFLite's name, whose number is in `schema.NUMBERS`; or that of a function that TFLite lacks.
      options: its options table, if it has one.
      since: the first TensorFlow Lite runtime that has its version 1.
      versions: the version, and the first runtime that has it, by what `variant` returns; else 1 and `since`.
      variant: the type of its first input (of its weights, if these are int4), or what else decides its version.
      evaluate: what it computes, in plain JAX: the readable reference. None: the exporter does not write it.
      quantised: what its integer kernels demand; None: it has none.
      in_place: each element is read before what lies there is written, one by one, in every runtime.
      elementwise: 1 or 2: it computes each element from that of its input or of its two inputs, so that reshapes and
        transposes move below it.
      broadcasts: it repeats the elements of a smaller operand.
      fuses: it applies an activation to its result at no cost.
      primitives: what it lowers, by JAX's name of the primitive.
      recognised: patterns of other operators that it replaces.
      formula: how it is written with other operators in float32.
      custom: the name of one that is not in TFLite's schema and that runtimes have all the same; its options are a
        FlexBuffer map.
    """

    name: str
    options: Options | None = None
    since: str = FIRST_RUNTIME
    versions: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    variant: Callable[[Op, str], str] = lambda op, dtype: dtype
    evaluate: Evaluate | None = None
    quantised: Demands | None = None
    in_place: bool = False
    elementwise: int = 0
    broadcasts: bool = False
    fuses: bool = False
    primitives: Mapping[str, PrimitiveRule] = field(default_factory=dict)
    recognised: Sequence[Rewrite] = ()
    formula: Formula | None = None
    custom: str = ""

    def __post_init__(self) -> None:
        assert self.name in NUMBERS or self.evaluate or self.custom, (
            f"{self.name}: TFLite has no such operator, and nothing runs it"
        )
        assert self.evaluate or not (self.primitives or self.recognised), f"{self.name}: is written but not evaluated"

    @property
    def number(self) -> int:
        """The number of the operator in a file."""
        return NUMBERS["CUSTOM" if self.custom else self.name]

    def version(self, op: Op) -> tuple[int, str]:
        """The version of this operator that a runtime must have, and the first one that has it."""
        lead = op.inputs[0]
        dtype = "float32" if lead is None else lead.dtype
        if any(tensor.dtype == "int4" for tensor in op.tensors_in):
            dtype = "int4"
        return self.versions.get(self.variant(op, dtype), (1, self.since))
