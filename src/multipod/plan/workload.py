"""A `Workload`: what the predictor knows of a model and of its run, from a recipe or from a table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from multipod.plan.work import Work

UPDATE_BYTES = {"sgd": 20, "momentum": 20, "lars": 28, "adam": 28, "adamw": 28, "lamb": 40, "sm3": 16, "rmsprop": 36}
"""Bytes that an update moves for each float32 parameter: gradient, weight and slots are read, weight and slots written;
LARS reads weight and gradient once more for their norms, LAMB also writes its update down and reads it again."""

SLOTS = {"sgd": 0, "momentum": 1, "lars": 1, "adam": 2, "adamw": 2, "lamb": 2, "sm3": 1, "rmsprop": 2}
"""Arrays of the parameters' size in the optimizer's state."""


@dataclass(frozen=True)
class Split:
    """How the model of one replica lies on devices beside the data axes.

    Attributes:
      spatial: devices that share the rows of an image.
      model: devices that share heads, hidden features and vocabulary.
    """

    spatial: int = 1
    model: int = 1

    @property
    def devices(self) -> int:
        """Of one replica."""
        return self.spatial * self.model

    def __str__(self) -> str:
        return " x ".join(f"{name} {n}" for name, n in (("spatial", self.spatial), ("model", self.model)) if n > 1)


Build = Callable[[float, Split, int], Work]
"""(examples of a replica, its split, lanes) to the work of the device of the replica that has most."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation costs.

    Attributes:
      examples: in the test set.
      work: of one replica's examples, forward only; None for a third of a training step's.
      host_s: that the hosts need for one, in the way of the next step unless it overlaps.
      overlaps: whether the hosts' part runs beside training.
    """

    examples: int = 0
    work: Build | None = None
    host_s: float = 0.0
    overlaps: bool = True


@dataclass(frozen=True)
class Workload:
    """A model with what a step and a run of it ask for.

    Attributes:
      name: one word.
      parameters: trained.
      build: the work of a step.
      optimizer: a name of `UPDATE_BYTES`.
      wire_bytes: of a parameter's gradient between devices.
      splits_weights: whether the model axis splits the weights (and so the gradients); a spatial split never does.
      norm_group_messages: sums of statistics in a step, forward and backward, where batch norm spans devices.
      norm_bytes: of one such sum.
      state_bytes: statistics.
      batch_bytes: of one example on a device.
      evaluation: see there.
      unsplit_s: seconds a replica's example takes beside all that, in operators that are not counted (Mask R-CNN's
        choice of regions); a spatial split leaves them as they are unless `splits_all`.
      splits_all: whether a spatial split divides those too.
      axes: beside the data axes, those that `build` can split over: "spatial", "model".
      splits: those that `build` knows, where it does not know all of `axes`.
      dtype: of products.
      source: where the numbers are from.
    """

    name: str
    parameters: float
    build: Build
    optimizer: str = "sgd"
    wire_bytes: int = 4
    splits_weights: bool = True
    norm_group_messages: float = 0.0
    norm_bytes: float = 0.0
    state_bytes: float = 0.0
    batch_bytes: float = 0.0
    evaluation: Evaluation = Evaluation()
    unsplit_s: float = 0.0
    splits_all: bool = False
    axes: tuple[str, ...] = ()
    splits: tuple[Split, ...] = ()
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    source: str = ""
