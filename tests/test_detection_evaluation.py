"""Average precision of a run: what a model finds on the mesh, judged in another process; padding does not count."""

import warnings
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_recipe import tiny

from multipod.data.detection.shapes import DrawnShapes, Shapes
from multipod.data.source import ArraySource
from multipod.errors import MetricError
from multipod.layout.mesh import make_mesh
from multipod.metrics.coco import Detections, average_precision
from multipod.metrics.coco_masks import encode_masks
from multipod.metrics.detection import Detection
from multipod.metrics.objective import report_of
from multipod.step.program import program_of
from multipod.train.context import RunContext
from multipod.train.evaluation import evaluate
from multipod.train.events import Evaluated
from multipod.train.loop import train

pytest.importorskip("pycocotools")

DATA = Shapes(train_images=16, test_images=21, pixels=32, most=3, mask_pixels=28, crop=False)


@dataclass(frozen=True)
class Oracle:
    """Says of each image what the batch says of it, and, if `wrong`, that the first object is of another class."""

    wrong: bool = False

    def init(self, key):
        return {"w": jnp.ones(())}, {}

    def apply(self, params, statistics, batch, *, train, key):
        label = batch["label"]
        real = jnp.arange(label.shape[1]) < batch["count"][:, None]
        if self.wrong:
            label = label.at[:, 0].set(label[:, 0] % 3 + 1)
        found = {"box": batch["box"], "label": label, "score": jnp.where(real, 0.9, 0) * params["w"]}
        found["mask"] = batch["object_mask"].astype(jnp.float32)
        return {"loss": params["w"] * batch["count"].astype(jnp.float32), **found}, statistics


def recipe_of(objective=None, **model):
    objective = objective or Detection(masks=True)
    recipe = replace(tiny(), model=Oracle(**model), data=DATA, objective=objective, batch=8, updates=2)
    return replace(recipe, evaluate_every=1, evaluation_batch=16, checkpoint_every=0)


@pytest.fixture(scope="module")
def program():
    recipe = recipe_of()
    return program_of(recipe, make_mesh(recipe.layout))


def test_ground_truth_fed_back_is_perfect_and_padding_counts_nothing(program):
    """21 test images are no multiple of 16 or of the devices: what pads the batches would be an image found twice."""
    sums = evaluate(program, program.init(), DATA.test())
    values = report_of(program.recipe.objective, sums)
    assert sums["count"] == 21
    assert values["box_AP"] == pytest.approx(1, abs=1e-12)
    assert 0.9 < values["mask_AP"] <= 1  # masks of 28 x 28 pixels
    assert values["loss"] == pytest.approx(np.mean(DATA.test().read(np.arange(21))["count"]))
    assert set(values) == {
        "loss",
        *(f"{kind}_AP{part}" for kind in ("box", "mask") for part in ("", "50", "75", "_small", "_medium", "_large")),
    }


@pytest.mark.slow
def test_it_is_judged_beside_training_too(program):
    recipe = recipe_of(wrong=True)
    told = []
    for beside in (False, True):
        events = []
        context = RunContext(observers=[events.append], evaluate_beside=beside)
        train(program_of(recipe, make_mesh(recipe.layout)), context)
        told.append([(e.update, e.values) for e in events if isinstance(e, Evaluated)])
    assert told[0] == told[1]
    assert [update for update, _ in told[0]] == [1, 2]
    assert 0 < told[0][0][1]["box_AP"] < 0.9


def test_a_run_ends_at_its_target():
    recipe = replace(recipe_of(Detection()), target="box_AP >= 0.99")
    events = []
    train(program_of(recipe, make_mesh(recipe.layout)), RunContext(observers=[events.append]))
    assert [e.update for e in events if isinstance(e, Evaluated)] == [1]


def test_data_without_ground_truth_are_refused(program):
    arrays = ArraySource(DATA.test().read(np.arange(4)))
    with pytest.raises(MetricError, match="ArraySource has no ground truth to judge detections by"):
        evaluate(program, program.init(), arrays)


def test_ground_truth_with_its_own_masks_is_perfect():
    drawn = DrawnShapes(12, side=64)
    truth = drawn.ground_truth(masks=True)
    ones = truth["annotations"]
    # A mask of all of its box, of objects that fill theirs.
    for one in ones:
        left, top, width, height = one["bbox"] = [*np.floor(one["bbox"][:2]).tolist(), 9.0, 6.0]
        one["segmentation"] = [[left, top, left + width, top, left + width, top + height, left, top + height]]
        one["area"] = 54.0
    boxes = np.array([one["bbox"] for one in ones])
    codes = encode_masks(np.ones((len(ones), 28, 28)), boxes, 64, 64)
    image, category = (np.array([one[name] for one in ones]) for name in ("image_id", "category_id"))
    found = Detections(image, boxes, np.ones(len(ones)), category, codes)
    assert average_precision(truth, found, "box")["AP"] == pytest.approx(1, abs=1e-12)
    assert average_precision(truth, found, "mask")["AP"] == pytest.approx(1, abs=1e-12)


def test_masks_are_stretched_over_their_boxes():
    from pycocotools.mask import decode

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pycocotools' decoder and NumPy's newest arrays
        boxes = np.array(
            [[3.0, 4, 8, 6], [3.4, 4.4, 8, 6], [-4, -3, 8, 6], [38, 28, 8, 6], [50, 50, 3, 3], [5, 5, 0, 0]]
        )
        full = [decode(code) for code in encode_masks(np.ones((6, 14, 14)), boxes, 30, 40)]
        assert [int(one.sum()) for one in full] == [48, 47, 12, 4, 0, 0]  # a corner is half out both ways
        assert full[0][4:10, 3:11].all()
        half = np.zeros((1, 14, 14))
        half[:, :7] = 1
        upper = decode(encode_masks(half, boxes[:1], 30, 40)[0])
        assert upper[4:7, 3:11].sum() == upper.sum() == 24
