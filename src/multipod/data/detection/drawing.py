"""Pictures of images with their boxes and masks, for people."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from multipod.data.detection.objects import Outline
from multipod.data.detection.outlines import bitmap
from multipod.data.pillow import Image, ImageDraw
from multipod.data.source import HostBatch

SIDE = 288
"""Pixels of the longer side of a picture, about."""
COLORS = ((255, 64, 64), (64, 220, 64), (80, 140, 255), (255, 200, 0), (255, 80, 255), (0, 220, 220), (255, 140, 0))
"""Of classes, in turn."""


def draw_objects(batch: HostBatch, most: int) -> np.ndarray:
    """The first images of a batch of `DetectionImages` with boxes, classes and masks, uint8 [n, height, width, 3].

    A crowd's box is drawn thin.
    """
    n = min(most, len(batch["image"]))
    masks = batch.get("object_mask")
    return np.stack([_with_objects(batch, k, None if masks is None else masks[k]) for k in range(n)])


class Panel(NamedTuple):
    """What is drawn over one copy of an image.

    Attributes:
      box: [n, 4], left, top, width, height in pixels of the original image.
      caption: in the corner of each box.
      label: of each box; its colour goes by it.
      faint: bool [n], boxes that are drawn thin.
      outline: masks in pixels of the original; () for none.
    """

    box: np.ndarray
    caption: Sequence[str]
    label: Sequence[int]
    faint: np.ndarray
    outline: Sequence[Outline] = ()


def draw_panels(batch: HostBatch, panels: Sequence[Panel]) -> np.ndarray:
    """The first image of a batch of `DetectionImages` once for each panel, side by side, uint8 [height, width, 3]."""
    return np.concatenate([_panel(batch, panel) for panel in panels], axis=1)


def _panel(batch: HostBatch, panel: Panel) -> np.ndarray:
    height, width = batch["extent"][0].tolist()
    picture, scale = enlarged(batch["image"][0, :height, :width])
    size = batch["size"][0].tolist()
    colors = [COLORS[label % len(COLORS)] for label in panel.label]
    for outline, color in zip(panel.outline, colors, strict=False):
        shown = Image.fromarray(bitmap(outline, *size) * 110).resize(picture.size)
        picture.paste(color, (0, 0), shown)
    boxes = np.concatenate([panel.box[:, :2], panel.box[:, :2] + panel.box[:, 2:]], 1)
    boxes = boxes * ([width / size[1] * scale, height / size[0] * scale] * 2)
    for box, text, color, faint in zip(boxes, panel.caption, colors, panel.faint.tolist(), strict=True):
        draw_boxes(picture, box[None], [text], [color], 1 if faint else 2)
    return np.pad(np.asarray(picture), ((0, 0), (0, 4), (0, 0)), constant_values=255)


def draw_boxes(
    picture: "Image.Image",
    boxes: np.ndarray,
    captions: Sequence[str],
    colors: Sequence[tuple[int, int, int]],
    width: int = 2,
) -> None:
    """Draws boxes, [n, 4] of left, top, right and bottom in pixels, and a caption in the corner of each."""
    pen = ImageDraw.Draw(picture)
    for box, caption, color in zip(boxes.tolist(), captions, colors, strict=True):
        pen.rectangle(box, outline=color, width=width)
        pen.text((box[0] + width + 1, box[1] + width), caption, fill=color)


def enlarged(image: np.ndarray) -> tuple["Image.Image", float]:
    """An image, uint8 [height, width, 3], near to `SIDE` pixels, and how many times as large it is."""
    scale = SIDE / max(image.shape[:2])
    scale = float(int(scale)) if scale >= 1 else scale
    size = max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale))
    return Image.fromarray(image).resize(size, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX), scale


def _with_objects(batch: HostBatch, row: int, masks: np.ndarray | None) -> np.ndarray:
    picture, scale = enlarged(batch["image"][row])
    count = int(batch["count"][row])
    boxes, labels = batch["box"][row, :count] * scale, batch["label"][row, :count].tolist()
    colors = [COLORS[label % len(COLORS)] for label in labels]
    for box, mask, color in zip(boxes, masks[:count] if masks is not None else (), colors, strict=False):
        _tint(picture, box, mask, color)
    for box, label, color, crowd in zip(boxes, labels, colors, batch["crowd"][row].tolist(), strict=False):
        draw_boxes(picture, box[None], [str(label)], [color], 1 if crowd else 2)
    return np.asarray(picture)


def _tint(picture: "Image.Image", box: np.ndarray, mask: np.ndarray, color: tuple[int, int, int]) -> None:
    """Lays a mask of a box over it, half transparent."""
    left, top, right, bottom = np.round(box).astype(int).tolist()
    if right > left and bottom > top:
        shown = Image.fromarray(mask.astype(np.uint8) * 110).resize((right - left, bottom - top))
        picture.paste(color, (left, top), shown)
