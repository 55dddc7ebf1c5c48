"""The recipes of detectors: the published ones as they would start, and a few updates of the small one."""

from dataclasses import replace

import numpy as np
import pytest

from multipod.layout.mesh import make_mesh
from multipod.nn.detection.default_boxes import DefaultBoxes
from multipod.optim.presets import find_preset
from multipod.recipe.override import override
from multipod.recipe.text import from_text, to_text
from multipod.recipes.find import load
from multipod.step.program import program_of
from multipod.train.context import RunContext
from multipod.train.events import Evaluated, Updated
from multipod.train.loop import train

pytest.importorskip("pycocotools")


@pytest.mark.parametrize(
    ("name", "canvas", "preset"), [("ssd", (300, 300), "ssd-sgd"), ("mask-rcnn", (832, 1344), "mask-rcnn-sgd")]
)
def test_published_recipes_have_their_sizes_and_follow_the_batch(name, canvas, preset):
    recipe = load(name)
    assert recipe.data.example()["image"].shape == (1, *canvas, 3)
    assert from_text(to_text(recipe)) == recipe
    larger = override(recipe, [f"batch={2 * recipe.batch}"])
    chosen = find_preset(preset).at(2 * recipe.batch)
    assert (larger.optimizer, larger.updates) == (chosen.optimizer, chosen.updates)
    assert chosen is find_preset(preset).runs[1]


@pytest.mark.slow
def test_a_small_ssd_learns_and_is_judged():
    """A few updates lower the loss, and what an untrained detector finds is judged without a fault."""
    recipe = load("ssd-shapes")
    data = replace(recipe.data, train_images=24, test_images=9, pixels=32)
    # Two maps instead of four: most of the time is the compiler's.
    boxes = DefaultBoxes(32, (4, 2), (8, 16), (8, 14, 22), ((2,), (2,)))
    small = replace(recipe.model.model, width=8, boxes=boxes, extra=((8, 16, 2),))
    recipe = replace(recipe, model=replace(recipe.model, model=small))
    recipe = replace(recipe, data=data, batch=8, updates=8, evaluate_every=0, evaluation_batch=8, checkpoint_every=0)
    recipe = override(recipe, ["optimizer.warmup=0", "layout.mesh=1x1"])
    events = []
    train(program_of(recipe, make_mesh(recipe.layout)), RunContext(observers=[events.append]))
    losses = [event.values["loss"] for event in events if isinstance(event, Updated)]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    (judged,) = (event for event in events if isinstance(event, Evaluated))
    assert judged.count == 9
    assert -1 <= judged.values["box_AP"] < 0.5
    assert judged.values["loss"] > 0
