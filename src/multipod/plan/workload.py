"""A `Workload`: what the predictor knows of a model and of its run, from a recipe or from a table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from multipod.errors import PlanError
from multipod.layout.split import ModelSplit
from multipod.plan.work import Work

Dtype = Literal["bfloat16", "float32"]

UPDATE_BYTES = {"sgd": 20, "momentum": 20, "lars": 28, "adam": 28, "adamw": 28, "lamb": 40, "sm3": 16, "rmsprop": 36}
"""Bytes that an update moves for each float32 parameter: gradient, weight and slots are read, weight and slots written;
LARS reads weight and gradient once more for their norms, LAMB also writes its update down and reads it again."""

SLOTS = {"sgd": 0, "momentum": 1, "lars": 1, "adam": 2, "adamw": 2, "lamb": 2, "sm3": 1, "rmsprop": 2}
"""Arrays of the parameters' size in the optimizer's state."""


Build = Callable[[float, ModelSplit, int], Work]
"""(examples of a replica, its split, lanes) to the work of the device of the replica that has most."""


Slots = tuple[tuple[str, float, float], ...]
"""Arrays by their shape: (the shape in any words, how many, the size of one)."""


@dataclass(frozen=True)
class Part:
    """A part of a model that is cut for a pipeline, with what one micro-batch asks of it.

    Attributes:
      forward: the forward pass.
      whole: forward and backward pass.
      weights: parameters, on one of the devices that split the part; tied ones are in every part that uses them.
      saved: bytes kept from the forward for the backward pass.
      sent_bytes: to the next part; as many come back as gradients.
      tied: names and parameters of weights that other parts may hold too.
    """

    forward: Work
    whole: Work
    weights: Slots
    saved: Slots
    sent_bytes: float
    tied: tuple[tuple[str, float], ...] = ()


Cut = Callable[[float, int, int, int], tuple[Part, ...]]
"""(examples of a micro-batch, parts, lanes, devices that split each part) to the parts of the model in their order."""


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


@dataclass(frozen=True, eq=False)
class Workload:
    """A model with what a step and a run of it ask for. Equal only to itself: it is looked up thousands of times.

    Attributes:
      name: one word.
      parameters: trained.
      build: the work of a step.
      optimizer: a name of `UPDATE_BYTES`.
      slots: arrays of the parameters' size in the optimizer's state, as its shapes have them; None: as `SLOTS` says.
      wire_bytes: of a parameter's gradient between devices.
      splits_weights: whether the model axis splits the weights (and so the gradients); a spatial split never does.
      norm_group_messages: sums of statistics in a step, forward and backward, where batch norm spans devices.
      norm_bytes: of one such sum.
      norm_examples: over which batch norm takes its statistics; 0: over all of a batch.
      norm_moving: what the moving moments of each layer take from all tiles in a step, see
        `multipod.nn.images.batch_norm.Moving`; "" if they take nothing.
      norm_replicas: replicas that batch norm spans, where that is settled; 0: as `norm_examples` says.
      value_messages: sums over all devices in a step, of values and of statistics that are each device's own.
      value_bytes: of one such sum.
      state_bytes: statistics.
      batch_bytes: of one example on a device.
      evaluation: see there.
      unsplit_s: seconds a replica's example takes beside all that, in operators that are not counted (Mask R-CNN's
        choice of regions); a spatial split leaves them as they are unless `splits_all`.
      splits_all: whether a spatial split divides those too.
      axes: beside the data axes, those that `build` can split over: "spatial", which stands for "width" too, "model".
      splits: those that `build` knows, where it does not know all of `axes`.
      unasked: splits that nobody has looked for, in words.
      expert_parameters: of `parameters`, those that an expert axis splits.
      held_by: the parameters on a device of a replica, by its split; None: as `splits_weights` says.
      tensors: the shapes of the parameters, each with how many have it; () where they are not known.
      flattens: whether the optimizer takes flat tensors (`optim.optimizer.TakesFlatTensors`).
      cut: the model in parts, for pipelines; None where it cannot be cut.
      layers: the most parts it can be cut into.
      dtype: of products.
      dtypes: that products can have, the model's own among them; () is that one alone.
      other: the same model with products of another of them; made when it is asked for.
      source: where the numbers are from.
    """

    name: str
    parameters: float
    build: Build
    optimizer: str = "sgd"
    slots: float | None = None
    wire_bytes: int = 4
    splits_weights: bool = True
    norm_group_messages: float = 0.0
    norm_bytes: float = 0.0
    norm_examples: int = 64
    norm_moving: str = ""
    norm_replicas: int = 0
    value_messages: float = 0.0
    value_bytes: float = 0.0
    state_bytes: float = 0.0
    batch_bytes: float = 0.0
    evaluation: Evaluation = Evaluation()
    unsplit_s: float = 0.0
    splits_all: bool = False
    axes: tuple[str, ...] = ()
    splits: tuple[ModelSplit, ...] = ()
    unasked: tuple[str, ...] = ()
    expert_parameters: float = 0.0
    held_by: Callable[[ModelSplit], float] | None = None
    tensors: tuple[tuple[tuple[int, ...], int], ...] = ()
    flattens: bool = True
    cut: Cut | None = None
    layers: int = 1
    dtype: Dtype = "bfloat16"
    dtypes: tuple[Dtype, ...] = ()
    other: Callable[[Dtype], "Workload"] | None = None
    source: str = ""

    def of(self, dtype: Dtype | Literal[""]) -> "Workload":
        """The model with products of this type; "" is its own.

        Raises:
          PlanError: it has no such form.
        """
        if not dtype or dtype == self.dtype:
            return self
        if self.other is None or dtype not in self.dtypes:
            raise PlanError(
                f"{self.name} is known with products of {', '.join(self.dtypes or (self.dtype,))} only. Leave "
                f"--precision {dtype} out, or plan a recipe whose model has a field dtype."
            )
        return self.other(dtype)

    @property
    def optimizer_slots(self) -> float:
        """Arrays of the parameters' size in the optimizer's state."""
        return SLOTS.get(self.optimizer, 2) if self.slots is None else self.slots

    @property
    def update_bytes(self) -> float:
        """Bytes an update moves for each parameter: by its name, or gradient, weight and slots, read and written."""
        return UPDATE_BYTES.get(self.optimizer, 3 * 4 + 2 * 4 * self.optimizer_slots)

    def held(self, split: ModelSplit) -> float:
        """Parameters on a device of a replica that is split so; of a pipeline its parts say."""
        if self.held_by is not None and split.devices > 1:
            return self.held_by(split)
        if not self.splits_weights:
            return self.parameters
        rest = self.parameters - self.expert_parameters
        return (rest + self.expert_parameters / split.expert) / split.model
