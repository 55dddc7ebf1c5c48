"""Detectors: SSD and Mask R-CNN on COCO with published schedules, and small ones on drawn shapes.

    multipod train ssd --set data.train_files=coco/train2017 \\
        --set data.train_annotations=coco/annotations/instances_train2017.json --set data.test_files=coco/val2017 \\
        --set data.test_annotations=coco/annotations/instances_val2017.json

Another batch takes another row of the published runs. These began with the weights of a classifier trained on ImageNet;
these recipes begin with random ones, so that the published precision is not to be expected of them.
"""

from multipod.data.detection.files import CocoFiles
from multipod.data.detection.jitter import ColorJitter
from multipod.data.detection.shapes import Shapes
from multipod.data.detection.views import Fitted, SsdCrop, Stretched
from multipod.data.source import Data
from multipod.layout.layout import Layout
from multipod.metrics.detection import Detection
from multipod.models.mask_rcnn import MaskRcnn
from multipod.models.pixels import Normalized
from multipod.models.ssd import Ssd
from multipod.nn.detection.default_boxes import DefaultBoxes
from multipod.nn.model import Model
from multipod.optim.adamw import AdamW
from multipod.optim.detectors import COCO_EXAMPLES
from multipod.optim.presets import find_preset
from multipod.optim.rates import Cosine, WarmUp
from multipod.recipe.recipe import Recipe


def ssd() -> Recipe:
    """SSD-ResNet34, 300 x 300, on COCO, batch 1,024, 64 epochs (MLPerf v0.7). Needs data.train_files, ..."""
    model = Normalized(Ssd(reading="google", batch_norm_tile=64, dtype="bfloat16"), dtype="bfloat16")
    data = CocoFiles(shape=Stretched(300), crop=SsdCrop(), jitter=ColorJitter())
    return _published("ssd", model, data, Detection(), "box_AP >= 0.23", "ssd-sgd", 1024, epochs_between=5)


def mask_rcnn() -> Recipe:
    """Mask R-CNN R50-FPN, 800 to 1333, on COCO, batch 128, 20 epochs (MLPerf v0.7). Needs data.train_files, ..."""
    model = Normalized(MaskRcnn(reading="google", pairs=1000, roi_align="einsum", dtype="bfloat16"), dtype="bfloat16")
    data = CocoFiles(shape=Fitted(), mask_pixels=112, keep_ids=True)
    target = "box_AP >= 0.377 and mask_AP >= 0.339"
    return _published("mask-rcnn", model, data, Detection(masks=True), target, "mask-rcnn-sgd", 128, epochs_between=1)


def ssd_shapes() -> Recipe:
    """A small SSD, 96 x 96, on circles, triangles and rectangles that are drawn as they are needed."""
    boxes = DefaultBoxes(96, (12, 6, 3), (8, 16, 32), (20, 34, 56, 80), ((2,), (2,), (2,)))
    model = Ssd(depth=18, classes=4, width=16, boxes=boxes, extra=((64, 64, 2), (64, 64, 2)))
    return Recipe(
        name="ssd-shapes",
        model=Normalized(model),
        data=Shapes(train_images=4000, test_images=200, least_size=0.2, crop=False),
        objective=Detection(),
        optimizer=AdamW(WarmUp(Cosine(4e-3), 0.1), weight_decay=0.02),
        batch=16,
        updates=3000,
        evaluate_every=750,
        evaluation_batch=200,
        checkpoint_every=750,
    )


def mask_rcnn_shapes() -> Recipe:
    """A small Mask R-CNN, 96 x 96, that finds and outlines circles, triangles and rectangles."""
    model = MaskRcnn(
        classes=4,
        depth=18,
        width=16,
        features=32,
        hidden=128,
        sizes=(16, 28, 44, 64, 96),
        proposals=(40, 40),
        each=(100, 100),
        rpn_sample=(64, 32),
        sample=(32, 16),
        detections=20,
        roi_align="einsum",
        frozen=False,
    )
    return Recipe(
        name="mask-rcnn-shapes",
        model=Normalized(model),
        data=Shapes(train_images=4000, test_images=200, least_size=0.2, crop=False, mask_pixels=28),
        objective=Detection(masks=True),
        optimizer=AdamW(WarmUp(Cosine(2e-3), 0.1), weight_decay=0.02),
        batch=8,
        updates=1500,
        evaluate_every=500,
        evaluation_batch=50,
        checkpoint_every=500,
    )


def _published(
    name: str,
    model: Model,
    data: Data,
    objective: Detection,
    target: str,
    preset: str,
    batch: int,
    epochs_between: int,
) -> Recipe:
    known = find_preset(preset).at(batch)
    every = epochs_between * COCO_EXAMPLES // batch
    return Recipe(
        name=name,
        model=model,
        data=data,
        objective=objective,
        optimizer=known.optimizer,
        layout=Layout(),
        batch=batch,
        updates=known.updates,
        evaluate_every=every,
        evaluation_batch=batch,
        checkpoint_every=every,
        preset=preset,
        target=target,
    )
