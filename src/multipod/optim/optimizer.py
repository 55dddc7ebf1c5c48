"""What optimizers share: a rate, weight decay, a limit on the gradient, and which tensors they adapt.

Each optimizer is a dataclass in a file of its own, and `multipod.optim.optimizers.OPTIMIZERS` names them all.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import optax

from multipod.optim.layer_decay import scale_by_layer
from multipod.optim.numbers import not_negative, refuse
from multipod.optim.rates import Rate
from multipod.optim.tensors import TensorRules

RATE_ALIASES = {
    "name": "",
    "rate": "rate.peak",
    "decay": "rate",
    "warmup": "rate.share",
    "warmup_updates": "rate.updates",
    "warmup_start": "rate.start",
    "end_rate": "rate.end",
    "power": "rate.power",
    "decay_rate": "rate.factor",
    "decay_every": "rate.every",
    "decay_from_start": "rate.from_start",
    "drops": "rate.at",
}
"""Short names of the fields of a rate, as `--set optimizer.warmup=0.1`; `name` is the optimizer itself."""


class Builds(Protocol):
    """What a recipe needs of an optimizer: one of `OPTIMIZERS`, or your own dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def build(self, updates: int) -> optax.GradientTransformation:
        """Returns the Optax transformation for a run of `updates`."""
        ...


@runtime_checkable
class ActsBeforeSum(Protocol):
    """What an optimizer has if each device is to change its own gradients before they are summed."""

    def before_sum(self, gradients: Any, devices: int) -> Any:
        """Returns what a device sends into the sum over `devices`."""
        ...


@runtime_checkable
class Clips(Protocol):
    """What an optimizer has if it limits the global norm of the gradient."""

    clip: float


@runtime_checkable
class TakesFlatTensors(Protocol):
    """What an optimizer has whose update may be given tensors that are flattened and padded with zeros.

    Attributes:
      flattens: whether the update is the same on those: elementwise, but for norms of whole tensors.
    """

    flattens: bool

    def leading_dims(self, name: str) -> int:
        """Returns how many leading dims of the tensor of this name must stay as they are."""
        ...


def flattens(optimizer: Any) -> bool:
    """Whether an optimizer may be given tensors that are flattened and padded with zeros; no, if it does not say."""
    return isinstance(optimizer, TakesFlatTensors) and optimizer.flattens


def leading_dims(optimizer: Any, name: str) -> int:
    """How many leading dims of a tensor an optimizer that flattens must see as they are."""
    return optimizer.leading_dims(name) if isinstance(optimizer, TakesFlatTensors) else 0


def clip_of(optimizer: Builds) -> float:
    """The largest global norm of the gradient under this optimizer; 0 is no limit."""
    return optimizer.clip if isinstance(optimizer, Clips) else 0.0


@dataclass(frozen=True)
class Optimizer(ABC):
    """An optimizer with a rate, built into an Optax transformation.

    Attributes:
      rate: the learning rate over the run.
    """

    aliases: ClassVar[Mapping[str, str]] = RATE_ALIASES
    flattens: ClassVar[bool] = False
    """Whether `build` is elementwise but for norms of whole tensors (`TakesFlatTensors`). One that looks at rows,
    columns or the number of elements must say False, even if its parent says True."""

    rate: Rate

    def schedule(self, updates: int) -> optax.Schedule:
        """Returns the learning rate as a function of the update's number, over a run of `updates`."""
        return self.rate.schedule(updates)

    def leading_dims(self, name: str) -> int:
        """Returns how many leading dims of the tensor of this name `build` treats one by one."""
        return 0

    @abstractmethod
    def build(self, updates: int) -> optax.GradientTransformation:
        """Returns the Optax transformation for a run of `updates`, for gradients that have been summed."""


@dataclass(frozen=True)
class RegularizedOptimizer(Optimizer):
    """An optimizer with weight decay and a limit on the gradient; `step` is what each adds of its own.

    Attributes:
      weight_decay: applied to the tensors that `rules` adapt, so not to biases and batch norm; see `weight_decay_in`.
      weight_decay_in: `optimizer`, as the optimizer's own paper has it: decoupled in `AdamW`, `Lamb` and `Lion`,
        beside the gradient elsewhere. `loss`: weight_decay / 2 * |w|^2 in the loss, biases included and batch norm
        not. `both`: as EfficientNet was trained with LARS.
      clip: largest global norm of the gradient; 0 is no limit.
      clip_before_sum: each device clips the gradient of its own mean loss, before they are averaged.
      rules: which tensors are adapted and decayed, and which are stacks of layers.
      layer_decay: each layer below the head has the rate of the one above times this (`multipod.optim.layer_decay`);
        None: all have the same.
    """

    aliases: ClassVar[Mapping[str, str]] = RATE_ALIASES | {"skip": "rules.skip", "stacked": "rules.stacked"}

    _: KW_ONLY
    weight_decay: float = 0.0
    weight_decay_in: Literal["optimizer", "loss", "both"] = "optimizer"
    clip: float = 0.0
    clip_before_sum: bool = False
    rules: TensorRules = field(default_factory=TensorRules)
    layer_decay: float | None = None

    def __post_init__(self) -> None:
        refuse(self._wrong())

    def _wrong(self) -> list[str]:
        """What is wrong with the fields."""
        idle = self.clip_before_sum and not self.clip
        lowers = self.layer_decay is None or 0 < self.layer_decay <= 1
        stacks = self.layer_decay is not None and self.rules.stacked
        return [
            *([] if lowers else [f"optimizer.layer_decay={self.layer_decay} must be above 0 and at most 1"]),
            *(
                ["optimizer.layer_decay needs a tensor for each layer, and optimizer.stacked has many in one"]
                * bool(stacks)
            ),
            *not_negative(weight_decay=self.weight_decay, clip=self.clip),
            *(["optimizer.clip_before_sum=true limits nothing without optimizer.clip"] if idle else []),
        ]

    def leading_dims(self, name: str) -> int:
        """Returns 1 for a stack of layers, each slice of which has norms of its own, else 0."""
        return int(self.rules.is_stacked(name))

    @abstractmethod
    def step(self, rate: optax.Schedule) -> optax.GradientTransformation:
        """Returns the optimizer itself at this rate, with its own part of the weight decay."""

    def build(self, updates: int) -> optax.GradientTransformation:
        """Returns the Optax transformation for a run of `updates`, for gradients that have been summed."""
        parts = [self.step(self.schedule(updates))]
        if self.layer_decay is not None:
            parts.append(scale_by_layer(self.layer_decay))
        if self.clip and not self.clip_before_sum:
            parts.insert(0, optax.clip_by_global_norm(self.clip))
        if self.weight_decay and self.weight_decay_in != "optimizer":
            # First: it is part of the loss, so that a limit on the gradient counts it too.
            parts.insert(0, optax.add_decayed_weights(self.weight_decay, mask=self.rules.decayed_in_loss))
        return parts[0] if len(parts) == 1 else optax.chain(*parts)

    def before_sum(self, gradients: Any, devices: int) -> Any:
        """Returns what a device sends into the sum over `devices`: its gradients, clipped if `clip_before_sum` is set.

        They are the device's share of the gradient of the mean loss, 1 / devices of that of its own
        mean loss; it is the latter that `clip` limits. The sum is then the mean of the clipped gradients. BERT's
        published runs take their sum instead, which LAMB cannot tell but for its eps.
        """
        if not (self.clip and self.clip_before_sum):
            return gradients
        return optax.clip_by_global_norm(self.clip / devices).update(gradients, optax.EmptyState())[0]

    @property
    def own_decay(self) -> float:
        """The weight decay that is left to the optimizer."""
        return 0.0 if self.weight_decay_in == "loss" else self.weight_decay

    def add_decay(self) -> optax.GradientTransformation:
        """Returns the optimizer's own weight decay beside the gradient."""
        return optax.add_decayed_weights(self.own_decay, mask=self.rules.adapted)


@dataclass(frozen=True)
class SparseOptimizer(RegularizedOptimizer):
    """An optimizer under which a row without gradient stays as it is, and so does its state.

    Attributes:
      sparse: of tables of vectors (`multipod.nn.model.ReadsRows`) only the rows that a batch reads have gradients and
        are updated: the same values, at no cost for the others. Without momentum, decay and clip.
    """

    _: KW_ONLY
    sparse: bool = False

    def _wrong(self) -> list[str]:
        return super()._wrong() + (self._not_sparse() if self.sparse else [])

    def _not_sparse(self) -> list[str]:
        """What keeps the optimizer from updating touched rows alone."""
        numbers = {name: getattr(self, name, 0) for name in ("weight_decay", "clip", "momentum")}
        wrong = [f"optimizer.{name}={n} (0)" for name, n in numbers.items() if n]
        message = f"optimizer.sparse=true leaves rows without gradient as they are, with {', '.join(wrong)}"
        return [message] if wrong else []
