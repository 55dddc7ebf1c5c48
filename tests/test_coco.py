"""Average precision of what many hosts found, against pycocotools on files, as its users call it."""

import contextlib
import copy
import io
import json
import re

import numpy as np
import pytest
from fake_hosts import on_hosts

from multipod.errors import MetricError
from multipod.metrics.coco import NAMES, Detections, average_precision, detections, merge_detections
from multipod.metrics.judge import Judge

SIDE, IMAGES, CATEGORIES = 160, 12, (1, 3, 90)
NOTHING = Detections(np.empty(0, int), np.empty((0, 4)), np.empty(0), np.empty(0, int))


def random_box(rng):
    width, height = rng.uniform(4, 130, 2)
    return [*rng.uniform(0, SIDE - np.array([width, height])), width, height]


def ground_truth(seed=0):
    """Objects of all sizes; some are crowds."""
    rng = np.random.default_rng(seed)
    annotations = []
    for image in range(1, IMAGES):  # the last image shows nothing
        for _ in range(rng.integers(1, 7)):
            x, y, w, h = box = random_box(rng)
            polygon = [[x, y, x + w, y, x + w, y + h * 0.8, x + w / 2, y + h, x, y + h * 0.9]]
            annotations.append({"image_id": image, "category_id": int(rng.choice(CATEGORIES)), "bbox": box})
            annotations[-1] |= {"segmentation": polygon, "area": w * h * 0.9, "iscrowd": int(rng.random() < 0.15)}
    for number, annotation in enumerate(annotations):
        annotation["id"] = number + 1
    images = [{"id": image, "height": SIDE, "width": SIDE} for image in range(1, IMAGES + 1)]
    return {"images": images, "annotations": annotations, "categories": [{"id": c, "name": str(c)} for c in CATEGORIES]}


def guesses(truth, seed=1, with_masks=False):
    """Most objects, somewhat beside, some twice; some things that are not there; scores that tie."""
    rng = np.random.default_rng(seed)
    rows = [(one["image_id"], one["bbox"] + rng.normal(0, 3, 4), one["category_id"]) for one in truth["annotations"]]
    rows = [row for row in rows * 2 if rng.random() < 0.7]
    rows += [(int(rng.integers(1, IMAGES + 1)), random_box(rng), int(rng.choice(CATEGORIES))) for _ in range(25)]
    image, box, category = map(np.array, zip(*rows, strict=True))
    box = np.concatenate([box[:, :2], np.maximum(box[:, 2:], 1)], axis=1)
    score = np.round(rng.random(len(rows)), 1)
    codes = tuple(code(one) for one in box) if with_masks else None
    return Detections(image, box, score, category, codes)


def code(box):
    from pycocotools import mask

    x, y, w, h = np.maximum(box, 0).astype(int)
    picture = np.zeros((SIDE, SIDE), np.uint8, order="F")
    picture[y : y + h + 1, x : x + w + 1] = 1
    return mask.encode(picture)


def reference(truth, found, kind, folder):
    """pycocotools, from files."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    rows = zip(found.image.tolist(), found.category.tolist(), found.score.tolist(), strict=True)
    results = [{"image_id": image, "category_id": category, "score": score} for image, category, score in rows]
    for k, one in enumerate(results):
        text = {"segmentation": {**found.mask[k], "counts": found.mask[k]["counts"].decode()}} if kind == "mask" else {}
        one |= text or {"bbox": found.box[k].tolist()}
    (folder / "truth.json").write_text(json.dumps(truth))
    (folder / "results.json").write_text(json.dumps(results))
    with contextlib.redirect_stdout(io.StringIO()):
        right = COCO(str(folder / "truth.json"))
        judged = COCOeval(right, right.loadRes(str(folder / "results.json")), {"box": "bbox", "mask": "segm"}[kind])
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
    return judged.stats.tolist()


def of_image(found, images):
    """The detections on some images."""
    chosen = np.isin(found.image, images)
    codes = None if found.mask is None else tuple(one for one, keep in zip(found.mask, chosen, strict=True) if keep)
    return Detections(found.image[chosen], found.box[chosen], found.score[chosen], found.category[chosen], codes)


@pytest.mark.parametrize("kind", ["box", "mask"])
@pytest.mark.parametrize("seed", [0, 1])
def test_it_equals_pycocotools(kind, seed, tmp_path, capsys):
    pytest.importorskip("pycocotools")
    truth = ground_truth(seed)
    found, untouched = guesses(truth, seed + 5, kind == "mask"), copy.deepcopy(truth)
    values = average_precision(truth, found, kind)
    assert tuple(values) == NAMES
    np.testing.assert_allclose(list(values.values()), reference(truth, found, kind, tmp_path), rtol=0, atol=1e-12)
    assert 0 < values["AP"] < values["AP50"] < 1
    assert truth == untouched
    assert capsys.readouterr().out == ""


def test_closed_forms():
    pytest.importorskip("pycocotools")
    truth = ground_truth()
    for one in truth["annotations"]:
        one["iscrowd"] = 0
    one = truth["annotations"]
    image, category = (np.array([a[name] for a in one]) for name in ("image_id", "category_id"))
    perfect = Detections(image, np.array([a["bbox"] for a in one]), np.ones(len(one)), category)
    assert average_precision(truth, perfect)["AP"] == pytest.approx(1, abs=1e-12)
    assert average_precision(truth, NOTHING)["AP"] == 0
    # Two objects of one category, one found: precision is 1 up to recall 0.5, which is 51 of the 101 points.
    two = {**truth, "annotations": [dict(one[0], category_id=1, id=1), dict(one[0], category_id=1, id=2, image_id=2)]}
    half = Detections(np.array([one[0]["image_id"]]), np.array([one[0]["bbox"]]), np.ones(1), np.array([1]))
    assert average_precision(two, half)["AP"] == pytest.approx(51 / 101, abs=1e-12)


def test_batches_leave_their_padding_behind():
    rng = np.random.default_rng(0)
    image, real = np.array([4, 9, 9]), np.array([True, True, False])
    box, score, category = rng.random((3, 5, 4)), rng.random((3, 5)), np.ones((3, 5), int)
    found = detections(image, box, score, category, real[:, None] & (score > 0.4))
    assert found.image.tolist() == sorted(found.image.tolist())
    np.testing.assert_array_equal(found.score, score[:2][score[:2] > 0.4])
    np.testing.assert_array_equal(found.box, box[:2][score[:2] > 0.4])
    assert len(detections(image, box, score, category, real)) == 10


def test_order_and_split_over_hosts_do_not_matter():
    pytest.importorskip("pycocotools")
    truth = ground_truth()
    found = guesses(truth, with_masks=True)
    distinct = np.random.default_rng(3).permutation(len(found)) / len(found)
    found = Detections(found.image, found.box, distinct, found.category, found.mask)
    parts = [of_image(found, images) for images in ([1, 5, 9], [], [2, 3, 4, 6], [7, 8, 10, 11, 12])]
    for kind in ("box", "mask"):
        assert average_precision(truth, merge_detections(parts), kind) == average_precision(truth, found, kind)


def test_hosts_judge_in_turn_and_all_hear_of_it():
    pytest.importorskip("pycocotools")
    truth = ground_truth()
    evaluations = [guesses(truth, seed) for seed in (1, 2, 3)]
    half = [range(1, 7), range(7, IMAGES + 1)]

    def work(host):
        with Judge(truth, ("box",), host) as judge:
            judges = [judge.submit(e, of_image(found, half[host.index])) for e, found in enumerate(evaluations)]
            return judges, judge.finished(wait=True), judge.finished(wait=True)

    answers = on_hosts(2, work)
    assert answers[0] == answers[1]
    judges, values, rest = answers[0]
    assert (judges, rest) == ([0, 1, 0], {})
    whole = [merge_detections([of_image(found, images) for images in half]) for found in evaluations]
    assert values == {e: {"box": average_precision(truth, found)} for e, found in enumerate(whole)}


def test_all_hosts_hear_of_a_judge_that_refuses():
    pytest.importorskip("pycocotools")
    strange = Detections(np.array([777]), np.ones((1, 4)), np.ones(1), np.array([1]))

    def work(host):
        with Judge(ground_truth(), ("box",), host) as judge:
            judge.submit(1, strange if host.index else NOTHING)
            return judge.finished(wait=True)

    answers = on_hosts(2, work)
    assert [str(answer).split(" of the")[0] for answer in answers] == ["rank 1: coco: image 777"] * 2
    assert all(isinstance(answer, MetricError) for answer in answers)


ONE = {"image": np.array([1]), "box": np.ones((1, 4)), "score": np.ones(1), "category": np.array([1])}
REFUSED = {
    "NaN": (
        {"score": np.array([np.nan])},
        "coco: detection 0 (image 1) has score nan and box [1.0, 1.0, 1.0, 1.0], the",
    ),
    "infinite": (
        {"box": np.array([[0, 0, np.inf, 1]])},
        "box [0.0, 0.0, inf, 1.0], the first of 1 that are not finite",
    ),
    "shape": ({"box": np.ones((2, 4))}, "coco: 1 images of detections, and shapes box (2, 4). Give one row each."),
    "masks": ({"mask": ()}, "coco: 1 images of detections, and shapes mask (0,)."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_detections_that_cannot_be_are_refused(case):
    change, text = REFUSED[case]
    with pytest.raises(MetricError, match=re.escape(text)):
        Detections(**{**ONE, **change})


def test_what_does_not_fit_is_refused():
    truth, found = ground_truth(), Detections(**ONE)
    strange = Detections(**{**ONE, "category": np.array([2])})
    cases = [
        ((truth, strange), "coco: category 2 of the detections is not in the ground truth, nor are 0 more. Map"),
        ((truth, found, "mask"), "coco: masks are to be judged, and the detections have none."),
        ((truth, found, "keypoints"), "coco: kind 'keypoints'. Known: box, mask."),
        (({**truth, "annotations": []}, found), "coco: the ground truth has no images or no annotations."),
    ]
    for arguments, text in cases:
        with pytest.raises(MetricError, match=re.escape(text)):
            average_precision(*arguments)
    with pytest.raises(MetricError, match=re.escape("coco: image 1 has detections in part 0 and in part 2: it was")):
        merge_detections([found, NOTHING, found])
    with pytest.raises(MetricError, match=re.escape("coco: part 1 has masks, part 0 none. Give masks for")):
        merge_detections([found, Detections(**{**ONE, "image": np.array([2])}, mask=({},))])
