"""Pictures of what a detector found: curves, worst misses, and the page of a run that has them."""

import json
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_recipe import tiny

from multipod.data.detection.shapes import Shapes
from multipod.errors import RunFolderError
from multipod.metrics.coco import CURVES, Detections, average_precision, precision_recall
from multipod.metrics.detection import Detection
from multipod.metrics.misses import judge_images
from multipod.runs.training import train_run
from multipod.train.observers.found import FoundPage, read_found

pytest.importorskip("pycocotools")

DATA = Shapes(train_images=8, test_images=9, pixels=32, most=3, mask_pixels=28, crop=False)


def truth_of(*boxes):
    """One image of 100 x 100 with objects: category, left, top, width, height."""
    annotations = [
        {
            "id": k + 1,
            "image_id": 7,
            "category_id": one[0],
            "bbox": list(one[1:]),
            "area": one[3] * one[4],
            "iscrowd": 0,
        }
        for k, one in enumerate(boxes)
    ]
    images = [{"id": 7, "height": 100, "width": 100}, {"id": 8, "height": 100, "width": 100}]
    return {"images": images, "annotations": annotations, "categories": [{"id": k, "name": str(k)} for k in (1, 2)]}


def found_of(*rows):
    """Detections in image 7: score, category, left, top, width, height."""
    rows = np.array(rows, float).reshape(-1, 6)
    return Detections(np.full(len(rows), 7), rows[:, 2:], rows[:, 0], rows[:, 1].astype(int))


def test_what_is_missed_and_what_is_false():
    truth = truth_of((1, 0, 0, 20, 20), (1, 50, 50, 20, 20), (2, 0, 50, 30, 30))
    truth["annotations"].append(truth["annotations"][0] | {"id": 9, "iscrowd": 1})
    found = found_of(
        (0.9, 1, 1, 1, 20, 20),  # the first
        (0.8, 1, 0, 0, 20, 20),  # the first again
        (0.7, 2, 50, 50, 20, 20),  # the second, as another class
        (0.4, 2, 0, 50, 30, 30),  # the third, but not sure
    )
    result, empty = judge_images(truth, found)
    assert result.image == 7
    assert result.found.tolist() == [0, 1, 2]
    assert result.missed.tolist() == [False, True, True]
    assert result.false.tolist() == [False, True, True]
    assert (result.faults, empty.faults, len(empty.truth)) == (4, 0, 0)


def test_the_mean_of_the_curves_is_the_average_precision():
    truth = truth_of((1, 0, 0, 20, 20), (1, 50, 50, 20, 20), (2, 0, 50, 30, 30))
    found = found_of((0.9, 1, 1, 1, 20, 20), (0.8, 1, 30, 0, 20, 20), (0.7, 2, 3, 50, 30, 30), (0.6, 1, 48, 50, 20, 20))
    curves, known = precision_recall(truth, found), average_precision(truth, found)
    assert {name: len(curve) for name, curve in curves.items()} == dict.fromkeys(CURVES, 101)
    for name, wanted in zip(CURVES, ("AP50", "AP75", "AP"), strict=True):
        assert curves[name].mean() == pytest.approx(known[wanted], abs=1e-12)
    assert curves["0.50"][0] == pytest.approx(1)


@dataclass(frozen=True)
class Oracle:
    """Says of each image what the batch says of it, but calls the first object another class."""

    def init(self, key):
        return {"w": jnp.ones(())}, {}

    def apply(self, params, statistics, batch, *, train, key):
        real = jnp.arange(batch["label"].shape[1]) < batch["count"][:, None]
        found = {"box": batch["box"], "label": batch["label"].at[:, 0].set(batch["label"][:, 0] % 3 + 1)}
        found |= {"score": jnp.where(real, 0.9, 0) * params["w"], "mask": batch["object_mask"].astype(jnp.float32)}
        return {"loss": params["w"] * batch["count"].astype(jnp.float32), **found}, statistics


def test_the_report_of_a_run_shows_pictures_and_curves(tmp_path):
    recipe = replace(tiny(), model=Oracle(), data=DATA, objective=Detection(masks=True), batch=8, updates=1)
    recipe = replace(recipe, evaluate_every=0, evaluation_batch=16, checkpoint_every=0)
    folder = train_run(recipe, out=tmp_path / "run").folder
    kept = json.loads((folder / "detections/detections.json").read_text())
    assert kept["images"] == 9
    assert set(kept["curves"]) == {"box", "mask"}
    worst = [one["caption"] for one in kept["pictures"] if one["group"] == "worst misses"]
    assert len(worst) == 6
    assert all(caption.endswith(", 1 missed, 1 false") for caption in worst)
    page = (folder / "report.html").read_text()
    shown = read_found(folder)
    assert page.count('<img src="data:image/png;base64,') == sum(len(ones) for _, ones in shown.groups) > 6
    for text in ("worst misses", "precision of boxes", "precision of masks", "the first 9 test images"):
        assert text in page
    (folder / "detections/detections.json").write_text("{")
    with pytest.raises(RunFolderError, match="Delete the folder `detections`"):
        read_found(folder)
    assert read_found(tmp_path) == FoundPage()
