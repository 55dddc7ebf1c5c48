"""The objective of models with sparse layers: tokens, the routers' losses, and what the routers say of themselves."""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from multipod.errors import PoisonedError
from multipod.metrics.objective import Sums, TokenClassification, Values, means
from multipod.pytrees import Batch, Outputs

REPORTED = ("balance", "z", "dropped", "served_first", "served_second", "entropy", "confidence")
"""Of each router's report, as `NAME/LAYER`; beside them `load/LAYER/EXPERT`, the share of first choices."""


@dataclass(frozen=True)
class SparseTokens:
    """Cross-entropy of tokens and the routers' losses, of `multipod.models.st_moe.StMoe` and its like.

    Reported are those of `TokenClassification`, `exact` (the share of examples with every token right, each told from
    the right tokens before it), and for every sparse layer `REPORTED` and the load of its experts.

    Attributes:
      tokens: the objective of the tokens.
      z: coefficient of the mean squared log-sum-exp of the vocabulary's logits.
    """

    tokens: TokenClassification = field(default_factory=TokenClassification)
    z: float = 0.0

    def __call__(self, outputs: dict[str, Outputs], batch: Batch) -> Values:
        """From `logits`, `auxiliary` and `routers`, with `label` and the weights of the batch."""
        logits = outputs["logits"]
        values = self.tokens(logits, batch)
        loss = values["loss"] + outputs["auxiliary"]
        if self.z:
            counts = batch[self.tokens.weight] != 0 if self.tokens.weight else jnp.ones(logits.shape[:2], bool)
            z = jnp.where(counts, jnp.square(jax.nn.logsumexp(logits, -1)), 0).sum(-1)
            loss += self.z * z / jnp.maximum(values["tokens"], 1)
        values |= {"loss": loss, "exact": values["right"] == values["tokens"]}
        one_each = {
            f"{name}/{layer}": report[name]
            for layer, report in outputs["routers"].items()
            for name in (*REPORTED, "broken")
        }
        for layer, report in outputs["routers"].items():
            one_each |= {f"load/{layer}/{expert}": share for expert, share in enumerate(report["load"])}
        # A device's report counts for each of its examples, so that means over examples are means over devices.
        return values | {name: jnp.broadcast_to(value, loss.shape) for name, value in one_each.items()}

    def finish(self, sums: Sums) -> dict[str, float]:
        """Means over examples, over tokens, and over devices.

        Raises:
          PoisonedError: a router's logits, or the loss, are not finite; names the layers.
          MetricError: no example or no token was counted.
        """
        broken = [name.removeprefix("broken/") for name, value in sums.items() if _is_broken(name, float(value))]
        if broken:
            raise PoisonedError(
                f"NaN in the router of {', '.join(broken)}: its logits are not finite. Lower the rate, raise "
                "routing.z, or see which examples do that."
            )
        if not math.isfinite(float(sums["loss"])):
            raise PoisonedError(
                "the loss is not finite, and every router's logits are: it began behind the last sparse layer. Lower "
                "the rate, or see which examples do that."
            )
        own = self.tokens.finish(sums)
        skip = {"nats", "right", "tokens"} | {name for name in sums if name.startswith("broken/")}
        return own | {name: value for name, value in means(sums).items() if name not in own | dict.fromkeys(skip)}


def _is_broken(name: str, value: float) -> bool:
    return name.startswith("broken/") and value != 0
