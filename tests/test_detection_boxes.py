"""Boxes, anchors, matching, hard negatives and suppression: against torchvision, and by their definitions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multipod.nn.detection.anchors import Anchors
from multipod.nn.detection.boxes import (
    SECOND_STAGE_CODE,
    SSD_CODE,
    BoxCode,
    box_iou,
    centres_to_corners,
    clip_boxes,
    corners_to_centres,
    flip_boxes,
)
from multipod.nn.detection.default_boxes import DefaultBoxes
from multipod.nn.detection.hard_negatives import hard_negatives, kth_largest
from multipod.nn.detection.matching import GOOGLE_SSD, REFERENCE_SSD, RPN_MATCHING, SECOND_STAGE_MATCHING
from multipod.nn.detection.nms import nms

close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def reference():
    from torchvision_reference import torch, torchvision

    return torch, torchvision


def some_boxes(rng, count, *, size=20, whole=True):
    """Boxes with ties, of no area, and partly outside of an image of 16 pixels."""
    corners = rng.integers(-4, size, (count, 2, 2)) if whole else rng.uniform(-4, size, (count, 2, 2))
    return np.sort(corners, 1).reshape(count, 4).astype(np.float32)


@pytest.mark.parametrize("whole", [True, False])
def test_areas_overlaps_and_clips_are_torchvisions(whole):
    torch, torchvision = reference()
    rng = np.random.default_rng(3)
    first, second = some_boxes(rng, 60, whole=whole), some_boxes(rng, 50, whole=whole)
    theirs = torchvision.ops.box_iou(torch.tensor(first), torch.tensor(second)).numpy()
    ours = jax.jit(box_iou)(first, second)
    close(ours, np.nan_to_num(theirs))
    assert np.isnan(theirs).any() == whole
    close(jax.vmap(box_iou)(first.reshape(5, 12, 4), second.reshape(5, 10, 4))[2], ours[24:36, 20:30])
    clipped = torchvision.ops.clip_boxes_to_image(torch.tensor(first), (11, 16)).numpy()
    close(clip_boxes(first, 11, 16), clipped)
    for ours, name in ((corners_to_centres, ("xyxy", "cxcywh")), (centres_to_corners, ("cxcywh", "xyxy"))):
        close(ours(first), torchvision.ops.box_convert(torch.tensor(first), *name).numpy())
    close(flip_boxes(flip_boxes(first, 16), 16), first)
    close(flip_boxes(first[:1] * 0 + np.array([1, 2, 5, 9]), 16), [[11, 2, 15, 9]])


def test_the_gradient_of_the_overlap_is_finite_for_empty_boxes():
    boxes = jnp.array([[0.0, 0, 0, 0], [1, 1, 3, 3], [3, 3, 1, 1]])
    assert np.isfinite(jax.jit(jax.grad(lambda x: box_iou(x, x).sum()))(boxes)).all()


@pytest.mark.parametrize("code", [SSD_CODE, SECOND_STAGE_CODE, BoxCode(), BoxCode(pixel=1)])
def test_codes_are_torchvisions_and_decode_to_the_box(code):
    rng = np.random.default_rng(4)
    boxes, anchors = (np.concatenate([xy, xy + rng.uniform(1, 60, (40, 2))], 1).astype(np.float32)
                      for xy in rng.uniform(0, 50, (2, 40, 2)))  # fmt: skip
    codes = jax.jit(code.encode)(boxes, anchors)
    np.testing.assert_allclose(code.decode(codes, anchors), boxes, rtol=1e-5, atol=1e-4)
    if code.pixel:
        return
    torch, _ = reference()
    from torchvision.models.detection._utils import BoxCoder

    theirs = BoxCoder(code.weights)
    close(codes, theirs.encode_single(torch.tensor(boxes), torch.tensor(anchors)).numpy())
    wild = rng.normal(0, 10, (40, 4)).astype(np.float32)
    if code.limit is not None:
        decoded = theirs.decode_single(torch.tensor(wild), torch.tensor(anchors)).numpy()
        np.testing.assert_allclose(code.decode(wild, anchors), decoded, rtol=1e-5, atol=1e-3)


def test_padding_is_coded_finitely():
    coded = jax.jit(jax.value_and_grad(lambda x: SSD_CODE.encode(x, jnp.array([[0.0, 0, 2, 2]])).sum()))
    codes, back = coded(jnp.zeros((1, 4)))
    assert np.isfinite(codes)
    assert np.isfinite(back).all()


def test_the_default_boxes_are_ssd300s():
    boxes = DefaultBoxes()
    centres = boxes.centres()[:, [1, 0, 3, 2]]  # cy, cx, h, w
    assert boxes.counts == (5776, 2166, 600, 150, 36, 4)
    assert centres.shape == (8732, 4)
    golden = {
        0: (0.013333, 0.013333, 0.07, 0.07),
        1: (0.013333, 0.04, 0.07, 0.07),
        38: (0.04, 0.013333, 0.07, 0.07),
        1444: (0.013333, 0.013333, 0.10247, 0.10247),
        2888: (0.013333, 0.013333, 0.049497, 0.098995),
        4332: (0.013333, 0.013333, 0.098995, 0.049497),
        5776: (0.026667, 0.026667, 0.15, 0.15),
        7942: (0.053333, 0.053333, 0.33, 0.33),
        8728: (0.5, 0.5, 0.87, 0.87),
        8731: (0.5, 0.5, 1, 0.615183),
    }
    np.testing.assert_allclose(centres[list(golden)], list(golden.values()), atol=1e-6)
    np.testing.assert_allclose(centres.sum(0, dtype=np.float64), [4443.1467] * 2 + [1171.9677] * 2, atol=1e-3)
    close(corners_to_centres(boxes.corners()), boxes.centres())


@pytest.mark.parametrize("reading", ["torchvision", "reference", "google"])
@pytest.mark.parametrize("sides", [(832, 1344), (1344, 832)])
def test_anchors_are_counted_as_published(reading, sides):
    counts = [len(level) for level in Anchors(reading=reading).levels(*sides)]
    assert counts == [209664, 52416, 13104, 3276, 819]
    assert sum(counts) == 279279


def test_anchors_are_where_each_reading_has_them():
    torch, _ = reference()
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.image_list import ImageList

    ours = Anchors()
    for height, width in ((128, 192), (800, 96)):
        theirs = AnchorGenerator(tuple((size,) for size in ours.sizes), (ours.ratios,) * 5)
        image = ImageList(torch.zeros(1, 3, height, width), [(height, width)])
        maps = [torch.zeros(1, 1, *grid) for grid in ours.grids(height, width)]
        close(np.concatenate(ours.levels(height, width)), theirs(image, maps)[0].numpy())
    google = Anchors(reading="google").levels(64, 64)
    close(google[0][:3], [[-14, -14, 18, 18], [-20.4, -9.2, 24.4, 13.2], [-9.2, -20.4, 13.2, 24.4]])
    close(google[0][3], [-10, -14, 22, 18])
    # Detectron's nine anchors of stride 16 are known: these are those of its scale 8.
    at_16 = Anchors((16,), (128,), reading="reference").levels(16, 16)[0]
    close(at_16, [[-84, -40, 99, 55], [-56, -56, 71, 71], [-36, -80, 51, 95]])


@pytest.mark.parametrize(("ours", "low"), [(RPN_MATCHING, 0.3), (SECOND_STAGE_MATCHING, 0.5)])
def test_two_thresholds_match_as_torchvision(ours, low):
    torch, torchvision = reference()
    from torchvision.models.detection._utils import Matcher

    rng = np.random.default_rng(5)
    theirs = Matcher(ours.high, low, allow_low_quality_matches=ours.keep_best)
    match = jax.jit(ours)
    for _ in range(20):
        boxes, truth = some_boxes(rng, 80, size=12), some_boxes(rng, 6, size=12)
        truth[:, 2:] += 1  # none of no area: theirs has no overlap then
        valid = np.arange(6) < rng.integers(1, 7)
        overlap = torch.nan_to_num(torchvision.ops.box_iou(torch.tensor(truth[valid]), torch.tensor(boxes)))
        # A ground truth that no box meets is matched by theirs to every box that meets it as little: ours to none.
        meets = (overlap.max(1).values > 0).numpy()
        if meets.all():
            np.testing.assert_array_equal(match(boxes, truth, valid), theirs(overlap).numpy())
    assert (match(boxes, truth, np.zeros(6, bool)) == -1).all()


def test_both_readings_of_ssds_matching():
    boxes = jnp.array([[0.0, 0, 2, 2], [0, 0, 2, 1], [5, 5, 6, 6], [8, 8, 9, 9]])
    truth = jnp.array([[0.0, 0, 2, 2], [5, 5, 7, 7], [5, 5, 7, 7.5], [8, 8, 9, 9]])
    valid = jnp.array([True, True, True, False])
    # Box 1 has IoU 0.5 exactly; truths 1 and 2 have the same best box, with less than 0.5.
    assert jax.jit(REFERENCE_SSD)(boxes, truth, valid).tolist() == [0, -1, 2, -1]
    assert jax.jit(GOOGLE_SSD)(boxes, truth, valid).tolist() == [0, 0, 1, -1]


def test_ssds_matching_is_the_loop_over_ground_truths():
    rng = np.random.default_rng(6)
    corners = DefaultBoxes().corners()[::37]
    xy = rng.uniform(0, 0.6, (7, 2))
    truth = np.concatenate([xy, xy + rng.uniform(0.02, 0.4, (7, 2))], 1).astype(np.float32)
    overlap = np.asarray(jax.jit(box_iou)(truth, corners))
    expected = np.where(overlap.max(0) > 0.5, overlap.argmax(0), -1)
    for number in range(7):
        expected[overlap[number].argmax()] = number
    np.testing.assert_array_equal(jax.jit(REFERENCE_SSD)(corners, truth, np.ones(7, bool)), expected)


def test_the_kth_largest_by_bisection_is_that_of_sorting():
    rng = np.random.default_rng(7)
    values = np.concatenate([rng.exponential(size=(4, 90)), np.zeros((4, 6)), np.full((4, 4), 1e-40)], 1)
    values[:, 40:50] = values[:, :10]
    values = values.astype(np.float32)
    down = -np.sort(-values, 1)
    for k in (1, 7, 96, 100):
        found = jax.jit(kth_largest)(values, jnp.full(4, k))
        np.testing.assert_array_equal(found, down[:, k - 1])


@pytest.mark.parametrize("ties", ["exact", "all"])
def test_hard_negatives_are_the_largest_losses_of_negatives(ties):
    rng = np.random.default_rng(8)
    losses = rng.exponential(size=(5, 40)).astype(np.float32)
    positive = np.arange(40) < np.array([0, 1, 5, 12, 40])[:, None]
    choose = jax.jit(partial(hard_negatives, ties=ties))
    chosen = np.asarray(choose(losses, positive))
    for row, mask, mine in zip(losses, positive, chosen, strict=True):
        wanted = min(3 * mask.sum(), (~mask).sum())
        assert set(np.flatnonzero(mine)) == set(sorted(np.flatnonzero(~mask), key=lambda k: -row[k])[:wanted])
    tied = np.asarray(choose(np.ones((5, 40), np.float32), positive | (np.arange(40) == 4)))
    assert tied.sum(1).tolist() == ([3, 6, 15, 28, 0] if ties == "exact" else [39, 38, 35, 28, 0])
    assert not tied[:, 4].any()


SUPPRESS = {tile: jax.jit(partial(nms, threshold=0.5, count=40, tile=tile, way="tiles")) for tile in (1, 16, 256)}
SUPPRESS["native"] = jax.jit(partial(nms, threshold=0.5, count=40, way="native"))
WAYS = ("tiles", "native")


@pytest.mark.parametrize("way", SUPPRESS)
def test_suppression_is_greedy(way):
    torch, torchvision = reference()
    rng = np.random.default_rng(9)
    for case in range(30):
        boxes, scores = some_boxes(rng, 70, size=(5, 20)[case % 2]), rng.integers(0, 20, 70).astype(np.float32)
        greedy = torchvision.ops.nms(torch.tensor(boxes), torch.tensor(scores), 0.5).numpy()[:40]
        found = SUPPRESS[way](boxes, scores)
        np.testing.assert_array_equal(found[: len(greedy)], greedy)
        assert (found[len(greedy) :] == -1).all()


@pytest.mark.parametrize("way", WAYS)
def test_suppression_keeps_to_groups_and_leaves_out_padding(way):
    torch, torchvision = reference()
    rng = np.random.default_rng(10)
    boxes, scores = some_boxes(rng, 2 * 70, size=8).reshape(2, 70, 4), rng.uniform(size=(2, 70)).astype(np.float32)
    groups, valid = rng.integers(0, 3, (2, 70)), rng.uniform(size=(2, 70)) < 0.7
    run = partial(nms, threshold=0.3, count=70, tile=16, way=way)
    each = jax.jit(jax.vmap(lambda b, s, v, g: run(b, s, valid=v, groups=g)))(boxes, scores, valid, groups)
    for number, found in enumerate(np.asarray(each)):
        real = np.flatnonzero(valid[number])
        args = (torch.tensor(x[number][real]) for x in (boxes, scores, groups))
        greedy = real[torchvision.ops.boxes._batched_nms_vanilla(*args, 0.3).numpy()]
        np.testing.assert_array_equal(found[found >= 0], greedy)


@pytest.mark.parametrize("way", WAYS)
def test_the_threshold_itself_suppresses_where_asked(way):
    boxes = jnp.array([[0.0, 0, 2, 2], [0, 0, 2, 1]])
    for inclusive, stay in ((False, [0, 1]), (True, [0, -1])):
        run = jax.jit(partial(nms, threshold=0.5, count=2, inclusive=inclusive, way=way))
        assert run(boxes, jnp.array([2.0, 1.0])).tolist() == stay


def grouped(way, threshold, count):
    """Suppression in the images of a batch, by groups."""
    run = partial(nms, threshold=threshold, count=count, way=way)
    return jax.jit(jax.vmap(lambda boxes, scores, valid, groups: run(boxes, scores, valid=valid, groups=groups)))


@pytest.mark.parametrize("kept", [3, 700])
def test_the_kernel_finds_what_the_tiles_find(kept):
    """Many boxes, so that the kernel packs what is left; not a number, and no area, and nothing valid, too."""
    rng = np.random.default_rng(11)
    centre, side = rng.uniform(0, 300, (2, 900, 2)), rng.uniform(5, 60, (2, 900, 2))
    boxes = np.concatenate([centre, centre + side], -1).astype(np.float32)
    boxes[0, ::50, 2:] = boxes[0, ::50, :2]
    boxes[0, 1::90] = np.nan
    scores, valid = rng.integers(0, 99, (2, 900)).astype(np.float32), rng.uniform(size=(2, 900)) < [[0.9], [0.0]]
    groups = rng.integers(0, 4, (2, 900))
    for threshold in (0.1, 0.5):
        tiles, native = (grouped(way, threshold, kept)(boxes, scores, valid, groups) for way in WAYS)
        np.testing.assert_array_equal(native, tiles)
        assert (native[0] >= 0).sum() > min(kept, 50) - 1
        assert (native[1] == -1).all()


def test_nothing_is_kept_of_no_boxes():
    for way in WAYS:
        assert nms(jnp.zeros((0, 4)), jnp.zeros(0), 0.5, count=3, way=way).tolist() == [-1, -1, -1]
