"""What a detector found in test images at the end of a run, kept in its folder for the report."""

import json
from pathlib import Path

import jax
import numpy as np

from multipod.data.detection.drawing import Panel, draw_panels
from multipod.data.pillow import Image
from multipod.data.source import HasGroundTruth, Source
from multipod.metrics.coco import CURVES, Detections, precision_recall
from multipod.metrics.misses import ImageResult, judge_images
from multipod.metrics.objective import Detects
from multipod.step.program import Program
from multipod.step.state import State
from multipod.train.evaluation import detect
from multipod.train.run_folder import RunFolder

LOOKED_AT = 200
"""Test images that are looked at, the first ones."""
SHOWN = 6
"""Of them shown: so many of the first with objects, and so many of the worst."""


def write_pictures(folder: RunFolder, program: Program, state: State) -> None:
    """Writes `detections/` into the run's folder: what the report shows of test images; nothing of other objectives.

    All processes call it: detections are gathered.
    """
    objective, test = program.recipe.objective, program.recipe.data.test()
    if not isinstance(objective, Detects) or not isinstance(test, HasGroundTruth):
        return
    found = detect(program, state, test, LOOKED_AT)
    if jax.process_index() == 0:
        save_pictures(folder.path / "detections", int(state.update), test, found, objective.kinds)


def save_pictures(folder: Path, update: int, test: Source, found: Detections, kinds: tuple[str, ...]) -> None:
    """Writes curves and pictures of detections in the first images of `test`."""
    assert isinstance(test, HasGroundTruth)
    truth = test.ground_truth("mask" in kinds)
    images = truth["images"][:LOOKED_AT]
    known = {one["id"] for one in images}
    truth = truth | {"images": images, "annotations": [o for o in truth["annotations"] if o["image_id"] in known]}
    curves = {}
    if truth["annotations"]:
        for kind in kinds:
            by_overlap = precision_recall(truth, found, kind)
            curves[kind] = {name: np.round(by_overlap[name], 4).tolist() for name in CURVES}
    results = judge_images(truth, found)
    folder.mkdir(exist_ok=True)
    first = [number for number, result in enumerate(results) if result.truth][:SHOWN]
    worst = np.argsort([-result.faults for result in results], kind="stable").tolist()
    worst = [number for number in worst[:SHOWN] if results[number].faults]
    groups = {"test images": first, "worst misses": worst}
    names = {one["id"]: one.get("name") or str(one["id"]) for one in truth["categories"]}
    pictures = [
        {"group": group, "file": _draw(folder, number, test, results[number], found, names), "caption": caption(result)}
        for group, numbers in groups.items()
        for number in numbers
        for result in [results[number]]
    ]
    page = {"update": update, "images": len(images), "curves": curves, "pictures": pictures}
    (folder / "detections.json").write_text(json.dumps(page, indent=1))


def caption(result: ImageResult) -> str:
    """How many objects an image has, how many were missed, how many detections are false."""
    objects = f"{len(result.truth)} object{'' if len(result.truth) == 1 else 's'}"
    return f"image {result.image}: {objects}, {result.missed.sum()} missed, {result.false.sum()} false"


def _draw(
    folder: Path, number: int, test: Source, result: ImageResult, found: Detections, names: dict[int, str]
) -> str:
    """Writes the picture of an image, what is there on the left and what was found on the right; returns its name."""
    rows = result.found
    truth = Panel(
        np.array([one["bbox"] for one in result.truth], float).reshape(-1, 4),
        [names[one["category_id"]] for one in result.truth],
        [one["category_id"] for one in result.truth],
        ~result.missed,
        [one["segmentation"] for one in result.truth if "segmentation" in one],
    )
    labels = found.category[rows].tolist()
    told = [f"{names[label]} {score:.2f}" for label, score in zip(labels, found.score[rows].tolist(), strict=True)]
    masks = [found.mask[row] for row in rows.tolist()] if found.mask else ()
    name = f"{number + 1:06d}.png"
    drawn = draw_panels(
        test.read(np.array([number])), [truth, Panel(found.box[rows], told, labels, ~result.false, masks)]
    )
    Image.fromarray(drawn).save(folder / name)
    return name
