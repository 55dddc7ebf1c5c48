"""What a batch looks like, and how fast batches are made: for people, before the first update."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from multipod.data.batches import TrainBatches
from multipod.data.order import batch_correlation
from multipod.data.pillow import Image, ImageDraw
from multipod.data.reading import InputOptions, SkippedExample, statistics_of
from multipod.data.source import HostBatch

MARGIN, CAPTION = 6, 14


@dataclass(frozen=True)
class Inspection:
    """What was seen of the first batches.

    Attributes:
      batch: the first of them.
      batches: how many were read.
      rate: examples a second, all threads together, after the first batch.
      stages: seconds of one example in each stage, summed over threads: `read`, `decode`, `augment`, and `crop` of
        images that were in the cache.
      correlation: of the labels within a batch (`batch_correlation`); None without labels of one number an example.
      counts: how often each label was seen.
      skipped: examples that could not be read.
    """

    batch: HostBatch
    batches: int
    rate: float
    stages: dict[str, float]
    correlation: float | None
    counts: dict[int, int]
    skipped: list[SkippedExample]


def inspect(batches: TrainBatches, count: int, reading: InputOptions) -> Inspection:
    """Reads the first `count` batches as a run would."""
    feed = batches.start(0, reading)
    first = next(feed)
    seen, start = [first], time.perf_counter()
    for _ in range(count - 1):
        seen.append(next(feed))
    taken = time.perf_counter() - start
    feed.close()
    statistics = statistics_of(batches.source)
    made = max(statistics.counts.get("read", 0) + statistics.counts.get("crop", 0), 1)
    labels = [batch["label"] for batch in seen if "label" in batch and batch["label"].ndim == 1]
    joined = np.concatenate(labels) if labels else np.zeros(0, int)
    values, counts = np.unique(joined, return_counts=True)
    return Inspection(
        first,
        len(seen),
        (count - 1) * len(batches.rows) / taken if count > 1 else 0.0,
        {name: seconds / made for name, seconds in statistics.seconds.items()},
        batch_correlation(joined, batches.batch) if len(joined) and batches.batch > 1 else None,
        dict(zip(values.tolist(), counts.tolist(), strict=True)),
        list(statistics.skipped.values()),
    )


def array_rows(batch: HostBatch) -> list[tuple[str, str, str, str]]:
    """Each array: name, shape and dtype, least and largest value, mean and deviation (of each channel of images)."""
    rows = []
    for name, array in sorted(batch.items()):
        shape = f"{'x'.join(map(str, array.shape))} {array.dtype}"
        found = array_figures(name, array)
        if not found:
            rows.append((name, shape, "", ""))
            continue
        spread = "  ".join(f"{m:.4g} ± {d:.3g}" for m, d in zip(found["mean"], found["deviation"], strict=True))
        rows.append((name, shape, f"{found['least']:.4g} to {found['largest']:.4g}", spread))
    return rows


def array_figures(name: str, array: np.ndarray) -> dict[str, Any]:
    """Least and largest value of an array, and lists of its mean and deviation: one for each channel of images.

    Empty for an array without numbers.
    """
    numbers = array.astype(np.float64) if array.dtype.kind in "iufb" else np.zeros(0)
    if not numbers.size:
        return {}
    over = tuple(range(array.ndim - 1)) if name == "image" and array.ndim == 4 else None
    mean, deviation = np.atleast_1d(numbers.mean(over)), np.atleast_1d(numbers.std(over))
    return {
        "least": float(numbers.min()),
        "largest": float(numbers.max()),
        "mean": mean.tolist(),
        "deviation": deviation.tolist(),
    }


def contact_sheet(images: np.ndarray, captions: Sequence[str], columns: int = 8) -> "Image.Image":
    """Images [n, height, width, 1 or 3] side by side, each above its caption. Floats are stretched to 0 to 255."""
    if images.dtype != np.uint8:
        low, high = float(images.min()), float(images.max())
        images = ((images - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
    if images.shape[-1] == 1:
        images = np.repeat(images, 3, axis=-1)
    zoom = max(1, 64 // images.shape[1])
    height, width = images.shape[1] * zoom, images.shape[2] * zoom
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    size = (columns * (width + MARGIN) + MARGIN, rows * (height + CAPTION + MARGIN) + MARGIN)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left = MARGIN + place % columns * (width + MARGIN)
        top = MARGIN + place // columns * (height + CAPTION + MARGIN)
        sheet.paste(Image.fromarray(image).resize((width, height), Image.Resampling.NEAREST), (left, top))
        pen.text((left, top + height + 1), caption, fill="black")
    return sheet
