"""The objective of models that tell how likely a click is: cross-entropy of one logit, accuracy, exact AUC."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from multipod.metrics.objective import Sums, Values, means
from multipod.pytrees import Batch


@dataclass(frozen=True)
class BinaryClassification:
    """Logistic loss of logits [examples], with accuracy and the exact area under the ROC curve.

    Accuracy is that of the rounded probability, as DLRM's own code has it: a logit of 0 counts as no click.
    """

    def __call__(self, outputs: jax.Array, batch: Batch) -> Values:
        """`loss` and `accuracy` of each example; `label` is 0 or 1. Any other label makes the loss NaN."""
        logits, labels = outputs.astype(jnp.float32), batch["label"]
        known = (labels == 0) | (labels == 1)
        loss = optax.sigmoid_binary_cross_entropy(logits, labels.astype(jnp.float32))
        return {"loss": jnp.where(known, loss, jnp.nan), "accuracy": (logits > 0) == (labels == 1)}

    def score(self, outputs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Scores and labels of each example: an evaluation keeps them, and adds `auc` to its sums."""
        return outputs.astype(jnp.float32), batch["label"]

    def finish(self, sums: Sums) -> dict[str, float]:
        """Means, and `auc` where there is one."""
        values = means({name: value for name, value in sums.items() if name != "auc"})
        return values | ({"auc": float(sums["auc"])} if "auc" in sums else {})
