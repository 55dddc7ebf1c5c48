"""The objective of BERT's pre-training: the tokens that were masked, and whether the second sentence follows."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import optax

from multipod.metrics.objective import Sums, TokenClassification, Values
from multipod.pytrees import Batch


@dataclass(frozen=True)
class Pretraining:
    """The sum of two cross-entropies, as in arXiv:1810.04805.

    Reported are the loss, `accuracy` and `perplexity` of masked tokens, and `next_accuracy`. MLPerf judges BERT by
    `accuracy` (target 0.712 in v0.7).

    Attributes:
      tokens: the objective of the masked tokens. The published loss is their mean over a device's batch: with
        `tokens_per_example` 0, as here, it is the mean over examples of each one's mean.
    """

    tokens: TokenClassification = field(default_factory=TokenClassification)

    def __call__(self, outputs: dict[str, jax.Array], batch: Batch) -> Values:
        """From `token` and `next` of `multipod.models.bert.Bert`, with `label`, `weight` and `next` of the batch."""
        values = self.tokens(outputs["token"], batch)
        logits = outputs["next"].astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
        return values | {"loss": values["loss"] + loss, "next_accuracy": logits.argmax(-1) == batch["next"]}

    def finish(self, sums: Sums) -> dict[str, float]:
        """Means over examples and over tokens.

        Raises:
          MetricError: no example or no token was counted.
        """
        return self.tokens.finish(sums) | {"next_accuracy": float(sums["next_accuracy"]) / int(sums["count"])}
