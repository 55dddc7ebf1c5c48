"""Objectives: from a model's outputs to one value an example, of which `loss` is minimised."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

Values = dict[str, jax.Array]
"""Named arrays of shape [examples]; `loss` is always among them. Booleans are counted exactly."""


class Objective(Protocol):
    """What training minimises and evaluation reports, example by example."""

    def __call__(self, outputs: Any, batch: dict[str, jax.Array]) -> Values:
        """The values of each example; their means over all examples are what a run reports."""
        ...


@dataclass(frozen=True)
class Classification:
    """Softmax cross-entropy with smoothed labels, and accuracy.

    Attributes:
      label_smoothing: the share of probability spread evenly over all classes (arXiv:1512.00567).
    """

    label_smoothing: float = 0.0

    def __call__(self, outputs: jax.Array, batch: dict[str, jax.Array]) -> Values:
        """`loss` (float32) and `accuracy` (bool) of each example, from logits [examples, classes] and the labels."""
        logits, labels = outputs.astype(jnp.float32), batch["label"]
        targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), self.label_smoothing)
        return {"loss": optax.softmax_cross_entropy(logits, targets), "accuracy": logits.argmax(-1) == labels}


def masked_sums(values: Values, mask: jax.Array | None = None) -> Values:
    """The sum of each value over the examples where `mask` is true, and their number as `count`.

    Booleans are summed as int32: counts of correct answers stay exact to the last example.
    """
    mask = jnp.ones(values["loss"].shape, bool) if mask is None else mask
    sums = {
        name: jnp.sum(value & mask, dtype=jnp.int32) if value.dtype == bool else jnp.where(mask, value, 0).sum()
        for name, value in values.items()
    }
    return sums | {"count": jnp.sum(mask, dtype=jnp.int32)}


def means(sums: dict[str, Any]) -> dict[str, float]:
    """The mean of each value, from sums that include `count`."""
    count = max(int(sums["count"]), 1)
    return {name: float(value) / count for name, value in sums.items() if name != "count"}
