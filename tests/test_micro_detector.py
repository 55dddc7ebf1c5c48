"""Detectors as files: TFLite's operator that makes detections, in our runtime, in LiteRT, and by plain loops."""

import shutil

import jax
import numpy as np
import pytest

from multipod.errors import ExportError, MicroError
from multipod.micro import Interpreter
from multipod.micro.detectors import convert_detector
from multipod.models.ssd import Ssd
from multipod.models.ssd_file import export_ssd
from multipod.nn.detection.boxes import SSD_CODE
from multipod.nn.detection.default_boxes import DefaultBoxes
from multipod.nn.detection.detections import best_of_each_class

pytest.importorskip("flatbuffers")
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

ANCHORS, CLASSES = 60, 4


def litert(model, image):
    module = pytest.importorskip("ai_edge_litert.interpreter")
    interpreter = module.Interpreter(
        model_content=model, experimental_op_resolver_type=module.OpResolverType.BUILTIN_REF
    )
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], image)
    interpreter.invoke()
    return [interpreter.get_tensor(one["index"]) for one in interpreter.get_output_details()]


def some_anchors(rng, n=ANCHORS):
    return np.concatenate([rng.uniform(0, 1, (n, 2)), rng.uniform(0.05, 0.4, (n, 2))], 1).astype(np.float32)


def apart(image):
    """A network of no layers: its image holds offsets and scores."""
    return image[..., :4], image[..., 4:]


def by_loops(image, anchors, *, count, each, least_score, overlap):
    """Rows of score, class, top, left, bottom, right."""
    boxes = np.asarray(jax.jit(SSD_CODE.decode)(image[0, :, :4], np.concatenate(
        [anchors[:, :2] - anchors[:, 2:] / 2, anchors[:, :2] + anchors[:, 2:] / 2], 1)))  # fmt: skip

    def iou(one, other):
        low, high = np.maximum(one[:2], other[:2]), np.minimum(one[2:], other[2:])
        shared = np.maximum(high - low, 0).prod()
        return shared / ((one[2:] - one[:2]).prod() + (other[2:] - other[:2]).prod() - shared)

    rows = []
    for label in range(1, image.shape[-1] - 4):
        scores = image[0, :, 4 + label]
        kept = []
        for k in np.argsort(-scores, kind="stable").tolist():
            if scores[k] >= least_score and len(kept) < each and all(iou(boxes[j], boxes[k]) <= overlap for j in kept):
                kept.append(k)
        rows += [(scores[k], label - 1, *boxes[k][[1, 0, 3, 2]]) for k in kept]
    return sorted(rows, key=lambda row: -row[0])[:count]


@pytest.mark.parametrize(
    ("count", "each", "least_score", "overlap"), [(100, 100, 0.05, 0.5), (10, 10, 0.0, 0.5), (20, 3, 0.3, 0.1)]
)
def test_the_operator_is_litert_s_and_a_plain_loop_s(count, each, least_score, overlap):
    rng = np.random.default_rng(count)
    anchors, shape = some_anchors(rng), (1, ANCHORS, 4 + CLASSES)
    options = {"count": count, "each": each, "least_score": least_score, "overlap": overlap}
    model = convert_detector(apart, jax.ShapeDtypeStruct(shape, "float32"), anchors, **options).model
    ours = Interpreter(model)
    for tie in (False, True):
        image = rng.normal(0, 2, shape).astype(np.float32)
        image[..., 4:] = rng.random((1, ANCHORS, CLASSES))
        if tie:
            image[..., 4:] = np.round(image[..., 4:], 1)
        boxes, classes, scores, number = found = ours.run(image)
        for mine, theirs in zip(found, litert(model, image), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        wanted = by_loops(image, anchors, **options)
        n = int(number[0])
        assert n == len(wanted)
        np.testing.assert_allclose(scores[0, :n], [row[0] for row in wanted])
        np.testing.assert_array_equal(classes[0, :n], [row[1] for row in wanted])
        np.testing.assert_allclose(boxes[0, :n], [row[2:] for row in wanted], rtol=1e-4, atol=1e-5)
        assert not boxes[0, n:].any()
        assert not scores[0, n:].any()


def test_what_is_no_detector_is_refused():
    anchors = some_anchors(np.random.default_rng(0))
    with pytest.raises(ExportError, match=r"there are 60 anchors.*should give offsets \[1, anchors, 4\]"):
        convert_detector(apart, jax.ShapeDtypeStruct((1, 30, 8), "float32"), anchors)
    good = convert_detector(apart, jax.ShapeDtypeStruct((1, ANCHORS, 8), "float32"), anchors).model
    for name, reason in ((b"use_regular_nms", "set use_regular_nms"), (b"max_detections", "out of range")):
        broken = good.replace(name + b"\0", b"x" * len(name) + b"\0")
        with pytest.raises(MicroError, match=reason):
            Interpreter(broken)


def small_ssd():
    boxes = DefaultBoxes(32, (4, 2), (8, 16), (8, 14, 22), ((2,), (2,)))
    spec = Ssd(18, classes=4, width=8, boxes=boxes, extra=((8, 16, 2),), reading="google")
    rng = np.random.default_rng(1)

    def draw(name, x):
        if x.ndim > 1:
            # Small heads: of scores that are nearly one the last digit would decide.
            size = (0.1 if name.startswith("heads") else 1) * np.sqrt(2 / np.prod(x.shape[:-1]))
            return rng.normal(0, size, x.shape).astype(np.float32)
        return np.full(x.shape, name.endswith(("scale", "var")), np.float32)

    shapes = jax.eval_shape(spec.init, jax.random.key(0))
    return spec, *({name: draw(name, x) for name, x in tensors.items()} for tensors in shapes)


@pytest.mark.slow
def test_a_small_ssd_finds_the_same_in_its_file():
    spec, params, statistics = small_ssd()
    images = np.random.default_rng(2).normal(size=(8, 1, 32, 32, 3)).astype(np.float32)
    outputs = jax.jit(
        lambda image: spec.apply(params, statistics, {"image": image}, train=False, key=jax.random.key(0))[0]
    )

    @jax.jit
    def found(outputs):
        boxes = SSD_CODE.decode(outputs["offsets"][0], spec.boxes.corners() * 32)
        return best_of_each_class(boxes, jax.nn.softmax(outputs["logits"][0]), each=80, count=20)

    exact = export_ssd(spec, params, statistics, count=20)
    runtime = Interpreter(exact.model)
    for image in images[:2]:
        wanted = found(outputs(image))
        boxes, classes, scores, number = runtime.run(image)
        n = int(number[0])
        assert n == int(wanted.kept.sum()) > 0
        np.testing.assert_allclose(scores[0], wanted.score, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(classes[0, :n] + 1, wanted.label[:n])
        np.testing.assert_allclose(boxes[0][:, [1, 0, 3, 2]] * 32, wanted.box, rtol=1e-4, atol=1e-3)
        for mine, theirs in zip((boxes, classes, scores, number), litert(exact.model, image), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    small = export_ssd(spec, params, statistics, calibration=list(images), count=20)
    assert len(small.model) < 0.45 * len(exact.model)
    quantised = Interpreter(small.model)
    for mine, theirs in zip(quantised.run(images[0]), litert(small.model, images[0]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    exactly, nearly = runtime.run(images[0])[2], quantised.run(images[0])[2]
    np.testing.assert_allclose(nearly, exactly, atol=0.1)
