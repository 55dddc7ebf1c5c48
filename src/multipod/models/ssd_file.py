"""An SSD as a `.tflite` file that gives detections."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
from flax import nnx

from multipod.errors import ExportError
from multipod.micro.detectors import convert_detector
from multipod.micro.exporter import Exported
from multipod.models.images import check_image
from multipod.models.pixels import Normalized
from multipod.models.ssd import Ssd
from multipod.pytrees import Batch, Params, Statistics


def export_ssd(
    model: Ssd | Normalized,
    params: Params,
    statistics: Statistics,
    *,
    calibration: Sequence[Any] | None = None,
    count: int = 100,
) -> Exported:
    """The file of an SSD as `multipod.micro.detectors.convert_detector` makes it, float32 or, by `calibration`, int8.

    It suppresses among all boxes of a class as they are decoded; `ssd_detections` looks at the 200 best, and clips them
    to the image first.

    Args:
      model: an SSD, or one behind a `Normalized`, which then is part of the file.
      params: of the model.
      statistics: of the model.
      calibration: images, each float32 [1, pixels, pixels, channels].
      count: how many detections.

    Raises:
      ExportError: see `convert_detector`; or the model is none of these.
    """
    ssd = model.model if isinstance(model, Normalized) else model
    if not isinstance(ssd, Ssd):
        raise ExportError(f"export: {type(ssd).__name__} is no Ssd. Give an Ssd, or a Normalized of one.")
    plain = _Network(**{one.name: getattr(ssd, one.name) for one in fields(ssd)})
    whole = replace(model, model=plain) if isinstance(model, Normalized) else plain

    def network(image: jax.Array) -> tuple[jax.Array, jax.Array]:
        outputs, _ = whole.apply(params, statistics, {"image": image}, train=False, key=jax.random.key(0))
        return outputs["offsets"], jax.nn.softmax(outputs["logits"])

    side = ssd.boxes.pixels
    example = jax.ShapeDtypeStruct((1, side, side, ssd.channels), "float32")
    return convert_detector(
        network, example, ssd.boxes.centres(), calibration=calibration, count=count, least_score=ssd.least_score
    )


@dataclass(frozen=True)
class _Network(Ssd):
    """An SSD that tells logits and offsets alone: detections are made by the file's last operator."""

    def forward(self, module: nnx.Module, batch: Batch) -> dict[str, jax.Array]:
        """`logits` and `offsets`."""
        return module(check_image(self, batch["image"]))
