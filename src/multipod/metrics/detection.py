"""The objective of models that find objects: the model tells its losses and detections, COCO's scorer judges."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from multipod.metrics.objective import Sums, Values, means
from multipod.pytrees import Batch

PRECISION = "_AP"
"""Ends the names of what is no mean over examples: `box_AP`, `mask_AP`; at one IoU or size more follows."""


@dataclass(frozen=True)
class Detection:
    """Losses of a detector, and COCO's average precision of what it finds (`multipod.metrics.coco`).

    The model's outputs are a dictionary. `loss` and any other value [examples] are reported as means. In evaluation
    there are also `box` [examples, slots, 4], left, top, right, bottom in pixels of batch["image"], `score` and `label`
    [examples, slots], score 0 for padding; with `masks`, `mask` [examples, slots, pixels, pixels].

    Attributes:
      masks: judge masks beside boxes.
    """

    masks: bool = False

    def __call__(self, outputs: dict[str, jax.Array], batch: Batch) -> Values:
        """All outputs of one number an example, `loss` among them, float32."""
        return {name: value.astype(jnp.float32) for name, value in outputs.items() if value.ndim == 1}

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is judged."""
        return ("box", "mask") if self.masks else ("box",)

    def detect(self, outputs: dict[str, jax.Array], batch: Batch) -> dict[str, jax.Array]:
        """Boxes in pixels of the original images, and what goes with them."""
        scale = (batch["size"] / batch["extent"]).astype(jnp.float32)[:, None, ::-1]  # of x, then of y
        low, high = outputs["box"][..., :2] * scale, outputs["box"][..., 2:] * scale
        found = {name: outputs[name] for name in ("score", "label", *(("mask",) if self.masks else ()))}
        found |= {"box": jnp.concatenate([low, high - low], -1), "kept": outputs["score"] > 0}
        return found | {"image_id": batch["image_id"], "size": batch["size"]}

    def finish(self, sums: Sums) -> dict[str, float]:
        """Means over the examples, and the precisions where there are some."""
        plain = {name: value for name, value in sums.items() if PRECISION not in name}
        return means(plain) | {name: float(value) for name, value in sums.items() if PRECISION in name}
