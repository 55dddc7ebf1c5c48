"""SSD: its sizes, loss and post-processing by plain loops, and images split over devices."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from multipod.models.ssd import Ssd, ssd_detections, ssd_loss
from multipod.nn.detection.boxes import SSD_CODE, box_iou
from multipod.nn.detection.default_boxes import DefaultBoxes
from multipod.nn.detection.matching import GOOGLE_SSD, REFERENCE_SSD
from multipod.nn.logical_axes import logical_axis_rules, with_logical_constraint

SMALL = DefaultBoxes(
    pixels=64, grids=(8, 4, 2), strides=(8, 16, 32), scales=(8, 16, 32, 60), ratios=((2,), (2, 3), (2,))
)


@pytest.mark.parametrize(("reading", "parameters"), [("reference", 19_972_534), ("google", 19_276_214)])
def test_parameters_are_counted_as_published(reading, parameters):
    params, _ = jax.eval_shape(Ssd(reading=reading).init, jax.random.key(0))
    of = lambda *names: sum(x.size for name, x in params.items() if name.startswith(names))  # noqa: E731
    assert of("") == parameters
    assert (of("stem", "blocks"), of("extra")) == (8_170_304, 3_574_400)


def test_maps_and_boxes_fit_each_other():
    spec = Ssd(18, width=8)
    shapes = jax.eval_shape(spec.init, jax.random.key(0))
    batch = {"image": jax.ShapeDtypeStruct((2, 300, 300, 3), jnp.float32)}
    outputs, _ = jax.eval_shape(partial(spec.apply, train=True, key=jax.random.key(0)), *shapes, batch)
    assert outputs["logits"].shape == (2, 8732, 81)
    assert outputs["offsets"].shape == (2, 8732, 4)


def some_batch(rng, boxes, *, classes=4, examples=3, truths=5):
    xy = rng.uniform(0, 0.6, (examples, truths, 2))
    truth = np.concatenate([xy, xy + rng.uniform(0.1, 0.4, (examples, truths, 2))], -1) * boxes.pixels
    label = rng.integers(1, classes, (examples, truths)) * (np.arange(truths) < [[3], [5], [0]])
    batch = {"box": (truth * (label > 0)[..., None]).astype(np.float32), "label": label.astype(np.int32)}
    logits = rng.normal(size=(examples, sum(boxes.counts), classes)).astype(np.float32)
    return batch, {"logits": logits, "offsets": rng.normal(size=(*logits.shape[:2], 4)).astype(np.float32)}


@pytest.mark.parametrize(("reading", "matching"), [("reference", REFERENCE_SSD), ("google", GOOGLE_SSD)])
def test_the_loss_is_that_of_a_plain_loop(reading, matching):
    batch, outputs = some_batch(np.random.default_rng(3), SMALL)
    ours = jax.jit(partial(ssd_loss, boxes=SMALL, reading=reading))(outputs, batch)
    defaults = SMALL.corners() * 64
    encode, matching = jax.jit(SSD_CODE.encode), jax.jit(matching)
    for k in range(3):
        match = np.asarray(matching(defaults, batch["box"][k], batch["label"][k] > 0))
        positive = np.flatnonzero(match >= 0)
        assert ours["positives"][k] == len(positive)
        if not len(positive):
            assert ours["loss"][k] == 0
            continue
        target = np.where(match >= 0, batch["label"][k][match], 0)
        logits = outputs["logits"][k].astype(np.float64)
        costs = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(target)), target]
        hard = np.sort(costs[match < 0])[::-1][: 3 * len(positive)]
        codes = np.asarray(encode(batch["box"][k][match], defaults))[positive]
        far = np.abs(outputs["offsets"][k][positive] - codes)
        box = np.where(far < 1, far**2 / 2, far - 0.5).sum()
        expected = (costs[positive].sum() + hard.sum() + box) / len(positive)
        np.testing.assert_allclose(ours["loss"][k], expected, rtol=1e-5)
        np.testing.assert_allclose(ours["class_loss"][k] + ours["box_loss"][k], expected, rtol=1e-5)


def test_detections_are_the_best_of_each_class():
    from torchvision_reference import greedy_nms, torch

    rng = np.random.default_rng(4)
    _, outputs = some_batch(rng, SMALL)
    outputs["logits"] *= 3
    found = jax.jit(partial(ssd_detections, boxes=SMALL, each=30, count=40))(outputs)
    decode = jax.jit(SSD_CODE.decode)
    for k in range(3):
        scores = torch.softmax(torch.tensor(outputs["logits"][k]), -1)
        boxes = torch.tensor(np.clip(decode(outputs["offsets"][k], SMALL.corners() * 64), 0, 64))
        rows = []
        for label in range(1, 4):
            score, place = scores[:, label].topk(30)
            score, place = score[score > 0.05], place[score > 0.05]
            stay = greedy_nms(boxes[place], score, 0.5)
            rows += [(float(score[j]), label, *boxes[place[j]].tolist()) for j in stay]
        rows = np.array(sorted(rows, key=lambda row: -row[0])[:40])
        n = len(rows)
        np.testing.assert_allclose(found.score[k, :n], rows[:, 0], rtol=1e-5)
        np.testing.assert_array_equal(found.label[k, :n], rows[:, 1])
        np.testing.assert_allclose(found.box[k, :n], rows[:, 2:], rtol=1e-4, atol=1e-4)
        assert found.kept[k].sum() == n
        assert (np.asarray(found.score[k, n:]) == 0).all()


def test_ground_truth_fed_back_is_found():
    batch, _ = some_batch(np.random.default_rng(5), SMALL)
    defaults = SMALL.corners() * 64

    @jax.jit
    def fed_back(boxes, labels):
        match = REFERENCE_SSD(defaults, boxes, labels > 0)
        logits = 20 * jax.nn.one_hot(jnp.where(match >= 0, labels[match], 0), 4)
        return ssd_detections({"logits": logits[None], "offsets": SSD_CODE.encode(boxes[match], defaults)[None]}, SMALL)

    found = fed_back(batch["box"][0], batch["label"][0])
    overlaps = np.asarray(jax.jit(box_iou)(batch["box"][0, :3], np.asarray(found.box)[0, : int(found.kept.sum())]))
    assert (overlaps.max(1) > 0.999).all()


@cache
def split_over(devices):
    """Loss, gradients and statistics of a narrow SSD300 whose images are split over so many devices."""
    extra = tuple((4, 8, stride) for stride in (2, 2, 2, 1, 1))
    spec = Ssd(18, classes=4, width=4, extra=extra)
    params, statistics = jax.jit(spec.init)(jax.random.key(1))
    rng = np.random.default_rng(6)
    batch, _ = some_batch(rng, spec.boxes, examples=3)
    batch |= {"image": rng.normal(size=(3, 300, 300, 3)).astype(np.float32)}

    def loss(params, batch):
        batch = batch | {"image": with_logical_constraint(batch["image"], "height", None, None)}
        outputs, new = spec.apply(params, statistics, batch, train=True, key=jax.random.key(0))
        return outputs["loss"].mean(), new

    mesh = jax.make_mesh((devices,), ("spatial",), axis_types=(AxisType.Auto,))
    with logical_axis_rules(mesh, {"height": ("spatial",)} if devices > 1 else {}):
        return jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_images_split_along_their_height_give_the_loss_and_gradients_of_whole_ones(devices):
    (loss, statistics), gradients = split_over(1)
    (split_loss, split_statistics), split_gradients = split_over(devices)
    np.testing.assert_allclose(split_loss, loss, rtol=1e-5)
    for whole, split in ((gradients, split_gradients), (statistics, split_statistics)):
        for name in whole:
            most = np.abs(whole[name]).max()
            np.testing.assert_allclose(split[name], whole[name], rtol=1e-5, atol=1e-5 * max(1, most), err_msg=name)
