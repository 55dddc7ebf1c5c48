"""Export of detectors: a network, and behind it TFLite's own operator that makes a list of detections."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from multipod.errors import ExportError
from multipod.micro.exporter import Exported, convert, finish
from multipod.micro.graph import Graph, Op, Tensor, constant
from multipod.micro.quantising.options import Quantisation

OUTPUTS = ("boxes", "classes", "scores", "count")


def convert_detector(
    function: Callable[..., Any],
    example: Any,
    anchors: np.ndarray,
    *,
    calibration: Sequence[Any] | None = None,
    weights: tuple[float, float, float, float] = (10.0, 10.0, 5.0, 5.0),
    count: int = 100,
    each: int = 100,
    least_score: float = 0.05,
    overlap: float = 0.5,
) -> Exported:
    """The `.tflite` file of a detector that ends with the operator TFLite_Detection_PostProcess.

    Its outputs are float32: `boxes` [1, count, 4], top, left, bottom, right in shares of the image; `classes`
    [1, count], from 0, the background left out; `scores` [1, count], by falling score, and `count` [1], how many there
    are; behind the last stand zeros. Suppression is within each class.

    Args:
      function: from an image to offsets [1, anchors, 4], of x, y, width, height in a code with `weights` (as
        `multipod.nn.detection.boxes.BoxCode`), and scores [1, anchors, classes], probabilities, class 0 background.
      example: an image, or its shape and type.
      anchors: [anchors, 4], centre's x and y, width, height in shares of the image.
      calibration: images to quantise with, in int8; the image and the outputs stay float32. None: all is float32.
      weights: of x, y, width and height.
      count: how many detections.
      each: how many of a class.
      least_score: a score is no lower.
      overlap: above this IoU a box is suppressed by a better one of its class.

    Raises:
      ExportError: see `multipod.micro.exporter.convert`; or `function` returns something else.
    """

    def by_rows(image: Any) -> tuple[Any, Any]:
        offsets, scores = function(image)
        x, y, width, height = (offsets[..., k : k + 1] for k in range(4))
        return jnp.concatenate([y, x, height, width], -1), scores

    how = None if calibration is None else Quantisation(io="float32")
    network = convert(by_rows, example, calibration=calibration, quantisation=how, report=False)
    offsets, scores = network.graph.outputs
    if offsets.shape != (1, len(anchors), 4) or scores.shape[:2] != (1, len(anchors)):
        raise ExportError(
            f"export: the detector gives {offsets.shape} and {scores.shape}, and there are {len(anchors):,} anchors. "
            "It should give offsets [1, anchors, 4] and scores [1, anchors, classes]."
        )
    options = {
        "max_detections": count,
        "max_classes_per_detection": 1,
        "detections_per_class": each,
        "use_regular_nms": True,
        "nms_score_threshold": float(least_score),
        "nms_iou_threshold": float(overlap),
        "num_classes": scores.shape[-1] - 1,
        **dict(zip(("x_scale", "y_scale", "w_scale", "h_scale"), map(float, weights), strict=True)),
    }
    table = constant(anchors[:, [1, 0, 3, 2]].astype(np.float32), name="anchors")
    shapes = ((1, count, 4), (1, count), (1, count), (1,))
    made = tuple(Tensor(name, shape) for name, shape in zip(OUTPUTS, shapes, strict=True))
    last = Op("DETECTION_POSTPROCESS", (offsets, scores, table), made, options)
    whole = Graph(network.graph.inputs, made, (*network.graph.ops, last))
    return replace(finish(whole), quantised=network.quantised)
