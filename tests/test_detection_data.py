"""Images with objects: COCO's files and drawn shapes as batches; boxes and masks follow what is shown."""

import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from tiny_recipe import tiny

from multipod.cli.data import data as command
from multipod.data.batches import TrainBatches, evaluation_batches
from multipod.data.detection.files import CocoFiles, write_coco
from multipod.data.detection.jitter import ColorJitter
from multipod.data.detection.outlines import bitmap, mask_in_box, run_length
from multipod.data.detection.shapes import DrawnShapes, Shapes
from multipod.data.detection.source import DetectionImages, Random
from multipod.data.detection.views import Crop, Fitted, SsdCrop, Stretched, centres_inside, overlaps
from multipod.data.files.tfrecord import write_tfrecord
from multipod.errors import DataError
from multipod.recipe.override import override
from multipod.recipe.text import from_text, to_text

SQUARE = [[10.0, 20.0, 40.0, 20.0, 40.0, 50.0, 10.0, 50.0]]


def philox(seed=0):
    return np.random.Generator(np.random.Philox(key=seed))


def annotation(number, image=1, category=7, bbox=(10, 20, 30, 30), **more):
    return {"id": number, "image_id": image, "category_id": category, "bbox": list(bbox), **more}


def write_files(folder, annotations, sizes=((80, 60), (50, 90)), categories=(3, 7)):
    """Images of these widths and heights, numbered from 1, and the file that says what is in them."""
    (folder / "images").mkdir(exist_ok=True)
    images = []
    for k, (width, height) in enumerate(sizes):
        name = f"{k + 1}.jpg"
        Image.fromarray(philox(k).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / "images" / name)
        images.append({"id": k + 1, "file_name": name, "width": width, "height": height})
    text = {"images": images, "annotations": annotations, "categories": [{"id": c, "name": str(c)} for c in categories]}
    (folder / "file.json").write_text(json.dumps(text))
    where = str(folder / "images"), str(folder / "file.json")
    return CocoFiles(*where, *where, shape=Stretched(100), limit=4)


def test_boxes_are_padded_and_tell_their_place_in_the_batch_image(tmp_path):
    wanted = [annotation(1), annotation(2, category=3, bbox=(-5, 0, 20, 200), iscrowd=1)]
    batch = write_files(tmp_path, wanted).test().read(np.arange(2))
    assert batch["image"].shape == (2, 100, 100, 3)
    np.testing.assert_allclose(batch["box"][0, :2], [[12.5, 100 / 3, 50, 250 / 3], [0, 0, 18.75, 100]], rtol=1e-6)
    assert batch["box"][0, 2:].tolist() == np.zeros((2, 4)).tolist() == batch["box"][1, :2].tolist()
    assert batch["label"].tolist() == [[2, 1, 0, 0], [0] * 4]
    assert batch["crowd"].tolist() == [[False, True, False, False], [False] * 4]
    assert (batch["count"].tolist(), batch["image_id"].tolist()) == ([2, 0], [1, 2])
    assert batch["size"].tolist() == [[60, 80], [90, 50]]
    assert batch["extent"].tolist() == [[100, 100]] * 2
    ids = replace(write_files(tmp_path, wanted), keep_ids=True).test().read(np.arange(1))
    assert ids["label"].tolist() == [[7, 3, 0, 0]]


def test_training_leaves_out_crowds_and_images_without_objects(tmp_path):
    data = write_files(tmp_path, [annotation(1), annotation(2, iscrowd=1), annotation(3, image=2, iscrowd=1)])
    train = data.train()
    assert (len(train), len(replace(data, train_empty=True).train()), len(data.test())) == (1, 2, 2)
    assert train.read_augmented(np.zeros(1, int), np.zeros(1, int), philox())["count"].tolist() == [1]


def test_of_more_objects_than_there_is_room_for_the_largest_are_kept(tmp_path):
    sides = [4, 30, 6, 20, 25, 3, 28]
    data = write_files(tmp_path, [annotation(k, bbox=(0, 0, side, side)) for k, side in enumerate(sides)])
    test = data.test()
    (note,) = test.statistics.skipped.values()
    assert note.reason == "1 images have more than 4 objects, of which the largest are kept: image 1"
    batch = test.read(np.zeros(1, int))
    widths = batch["box"][0, :, 2] * 0.8
    np.testing.assert_allclose(widths, [30, 20, 25, 28], rtol=1e-6)
    assert batch["count"].tolist() == [4]


BAD = [
    (annotation(9, image=77), "an image that is not in the file: 9 (image 77)"),
    (annotation(9, category=1), "a category that is not in the file: 9 (image 1)"),
    (annotation(9, bbox=(3, 3, 0, 5)), "a box of no area: 9"),
    (annotation(9, bbox=(3, 3, 5, -1)), "a box of no area: 9"),
    (annotation(9, bbox=(80, 3, 5, 5)), "a box outside the image: 9"),
    (annotation(9, bbox=(3, -9, 5, 9)), "a box outside the image: 9"),
    (annotation(9, segmentation={"size": [80, 60], "counts": [4800]}), "a mask of another size than the image: 9"),
    (annotation(9, segmentation={"size": [60, 80], "counts": [4799]}), "a run-length code that does not fill the"),
    (annotation(9, segmentation=[[1.0, 2.0, 3.0, 4.0]]), "a polygon of fewer than three points: 9"),
    (annotation(9), "no mask: 9"),
]


@pytest.mark.parametrize(("bad", "said"), BAD)
def test_bad_annotations_are_left_out_and_named(tmp_path, bad, said):
    masks = 8 if "segmentation" in bad or said.startswith("no mask") else 0
    good = annotation(1, segmentation=SQUARE)
    source = replace(write_files(tmp_path, [good, bad]), mask_pixels=masks).test()
    (note,) = source.statistics.skipped.values()
    assert note.name == str(tmp_path / "file.json")
    assert note.reason.startswith(f"1 annotations have {said}")
    assert source.read(np.arange(2))["count"].tolist() == [1, 0]
    assert [one["id"] for one in source.ground_truth()["annotations"]] == [1]


def test_a_file_that_cannot_be_used_is_refused(tmp_path):
    data = write_files(tmp_path, [annotation(k, category=1) for k in range(5)])
    with pytest.raises(DataError, match=re.escape("none of 5 annotations can be used: 5 annotations have a category")):
        data.test()
    texts = {
        '{"images": [],\n "categories"': "line 2 is no JSON",
        '{"images": [{"id": 1}], "categories": []}': "missing required field `file_name` - at `$.images[0]`",
        '{"images": [], "categories": []}': "lists no image",
        json.dumps({"images": [{"id": 1, "file_name": "a", "width": 1, "height": 1}] * 2, "categories": [{"id": 1}]}): (
            "image id 1 stands twice"
        ),
        json.dumps({"images": [], "categories": [], "annotations": [annotation(1, bbox=(1, 2))]}): (
            "at `$.annotations[0].bbox`"
        ),
    }
    for number, (text, said) in enumerate(texts.items()):
        file = tmp_path / f"bad{number}.json"
        file.write_text(text)
        with pytest.raises(DataError, match=re.escape(said)):
            replace(data, test_annotations=str(file)).test()
    for change, said in (
        ({"test_annotations": "missing.json"}, "missing.json cannot be read"),
        ({"test_files": "nowhere"}, "nowhere is no folder"),
        ({"test_files": ""}, "Give --set data.test_files=FOLDER"),
    ):
        with pytest.raises(DataError, match=re.escape(said)):
            replace(data, **change).test()


def test_images_that_cannot_be_read_are_replaced_or_masked(tmp_path):
    data = write_files(tmp_path, [annotation(k, image=k) for k in (1, 2, 3, 4)], sizes=[(80, 60)] * 4)
    (tmp_path / "images" / "2.jpg").unlink()
    cut = tmp_path / "images" / "3.jpg"
    cut.write_bytes(cut.read_bytes()[:400])
    Image.new("RGB", (60, 80)).save(tmp_path / "images" / "4.jpg")
    test, train = data.test(), data.train()
    read = test.read(np.arange(4))
    assert read["mask"].tolist() == [True, False, False, False]
    reasons = {name.rpartition("/")[2]: reason for _, name, reason in test.statistics.skipped.values()}
    assert reasons["2.jpg"].endswith("is gone")
    assert reasons["4.jpg"] == "it is 60 x 80, and file.json says 80 x 60"
    assert len(reasons) == 3
    batch = train.read_augmented(np.arange(1, 4), np.arange(3), philox())
    assert batch["image_id"].tolist() == [1, 1, 1]
    (tmp_path / "images" / "1.jpg").unlink()
    with pytest.raises(DataError, match="4 images in a row cannot be read"):
        train.read_augmented(np.arange(1), np.arange(1), philox())


def test_masks_of_polygons_and_run_length_codes_are_pycocotools():
    coco = pytest.importorskip("pycocotools.mask")
    drawn = bitmap(SQUARE, 60, 80)
    assert drawn.sum() == 900
    code = coco.encode(np.asfortranarray(drawn))
    flat, runs = drawn.ravel(order="F"), [0]
    for before, pixel in zip([0, *flat[:-1].tolist()], flat.tolist(), strict=True):
        runs.append(1) if pixel != before else runs.__setitem__(-1, runs[-1] + 1)
    for outline in (code, {**code, "counts": code["counts"].decode()}, {"size": [60, 80], "counts": runs}):
        np.testing.assert_array_equal(bitmap(outline, 60, 80), drawn)
        assert run_length(outline, 60, 80)["size"] == [60, 80]
        inside = mask_in_box(outline, (60, 80), (10, 20, 70, 50), 12)
        assert inside[:, :6].all()
        assert not inside[:, 6:].any()
    np.testing.assert_array_equal(mask_in_box(SQUARE, (60, 80), (10, 20, 70, 50), 12, flip=True), inside[:, ::-1])
    triangle = [[0.0, 0.0, 40.0, 0.0, 0.0, 40.0]]
    by_pixels = mask_in_box(coco.merge(coco.frPyObjects(triangle, 40, 40)), (40, 40), (0, 0, 40, 40), 28)
    assert np.mean(by_pixels != mask_in_box(triangle, (40, 40), (0, 0, 40, 40), 28)) < 0.03


def test_a_crop_shows_enough_of_every_object():
    rng, box = philox(), np.array([[40.0, 20, 160, 110], [60, 30, 150, 100]])
    for least in (0.0, 0.1, 0.3):
        crops = [SsdCrop(least=(least,)).crop(box, (120, 200), rng) for _ in range(60)]
        shown = [one for one in crops if one[:4] != (0, 0, 200, 120)]
        assert len(shown) > 5
        for left, top, width, height, _ in shown:
            part = np.array([[left, top, left + width, top + height]])
            assert 0.5 < width / height < 2
            assert min(width / 200, height / 120) >= 0.3 - 1e-9
            assert (overlaps(part, box) > least).all()
            assert centres_inside(box, part).any()
    whole = Crop(0, 0, 200, 120)
    assert SsdCrop().crop(np.zeros((0, 4)), (120, 200), rng) == whole
    corners = np.array([[0.0, 0, 2, 2], [198, 118, 200, 120]])
    assert SsdCrop(least=(0.9,)).crop(corners, (120, 200), rng) == whole
    for wrong in ({"tries": 0}, {"least": (1.0,)}):
        with pytest.raises(DataError, match="at least one try"):
            SsdCrop(**wrong)


def test_boxes_and_masks_follow_crop_flip_and_size():
    """What the batch says of each object, drawn, lies where the object's own colour is."""
    pytest.importorskip("pycocotools")
    drawn = DrawnShapes(40, side=128, most=1, least_size=0.3)
    source = DetectionImages(drawn, Stretched(96), 2, 48, Random(SsdCrop()))
    batch = source.read_augmented(np.arange(40), np.arange(40), philox(4))
    seen = 0
    for row in np.flatnonzero(batch["count"]):
        color = np.array(drawn.shapes(int(batch["image_id"][row]) - 1)[0].color)
        near = np.abs(batch["image"][row].astype(int) - color).max(-1) < 25
        left, top, right, bottom = np.round(batch["box"][row, 0]).astype(int)
        mask = np.zeros((96, 96), bool)
        shape = Image.fromarray(batch["object_mask"][row, 0]).resize((right - left, bottom - top))
        mask[top:bottom, left:right] = np.asarray(shape)
        assert near[mask].mean() > 0.9
        seen += 1
    assert seen > 12


def test_what_an_example_looks_like_depends_on_its_seed_and_place_alone():
    source = Shapes(train_images=50, pixels=32, crop=True, jitter=ColorJitter()).train()
    whole = TrainBatches(source, 12, 5, np.arange(12))[3]
    part = TrainBatches(source, 12, 5, np.array([4, 7, 8]))[3]
    again = TrainBatches(Shapes(50, pixels=32, jitter=ColorJitter()).train(), 12, 5, np.arange(12))[3]
    other = TrainBatches(source, 12, 6, np.arange(12))[3]
    for name in whole:
        np.testing.assert_array_equal(part[name], whole[name][[4, 7, 8]])
        np.testing.assert_array_equal(again[name], whole[name])
    assert (other["image"] != whole["image"]).any()


def test_jitter_of_nothing_changes_nothing_and_of_all_stays_in_range():
    image = philox().integers(0, 256, (20, 30, 3), dtype=np.uint8)
    still = ColorJitter(0, 0, 0, 0).apply(image, philox())
    assert np.abs(still.astype(int) - image).max() <= 6  # there and back through hue, saturation, value
    changed = [ColorJitter().apply(image, philox(k)) for k in range(4)]
    assert all(one.shape == image.shape and one.dtype == np.uint8 for one in changed)
    assert len({one.tobytes() for one in changed}) == 4
    with pytest.raises(DataError, match=r"hue from 0 to 0\.5"):
        ColorJitter(hue=0.6)


def test_images_that_lie_and_stand_have_batches_of_their_own():
    drawn = DrawnShapes(30, side=64, both_ways=True)
    source = DetectionImages(drawn, Fitted(96, 128, 32), 5, random=Random())
    sizes = {tuple(one.read(np.zeros(0, int))["image"].shape[1:3]) for one in source.sizes()}
    assert sizes == {(96, 128), (128, 96), (128, 128)}
    batches = TrainBatches(source, 6, 0, np.arange(6))
    shapes = [batches[k]["image"].shape[1:3] for k in range(5)]
    assert sorted(set(shapes)) == [(96, 128), (128, 96), (128, 128)]
    assert shapes.count((128, 128)) == 1  # what fills no batch of one kind
    read = next(iter(evaluation_batches(source, 4, np.arange(4))))
    assert read["image"].shape == (4, 128, 128, 3)
    assert read["extent"].tolist() == [[96, 128], [128, 96]] * 2
    assert not read["image"][0, 96:].any()
    with pytest.raises(DataError, match="the shorter side is 1 or more"):
        Fitted(20, 10)


def test_fitted_images_follow_both_limits():
    for (height, width), wanted in (((480, 640), (800, 1066)), ((400, 1000), (533, 1333)), ((333, 333), (800, 800))):
        frame = Fitted().frame(Crop(0, 0, width, height), (832, 1344))
        assert (frame.height, frame.width) == wanted
    assert Fitted().canvases() == ((832, 1344), (1344, 832), (1344, 1344))


def test_drawn_shapes_are_in_coco_s_files_what_they_are_in_memory(tmp_path):
    pytest.importorskip("pycocotools")
    done = CliRunner().invoke(
        command, ["shapes", "--out", str(tmp_path), "--train", "6", "--test", "3", "--side", "40", "--seed", "2"]
    )
    assert done.exit_code == 0, done.output
    where = {f"{part}_files": str(tmp_path / part) for part in ("train", "test")}
    files = {f"{part}_annotations": str(tmp_path / f"annotations/instances_{part}.json") for part in ("train", "test")}
    data = CocoFiles(**where, **files, shape=Stretched(40), limit=5, mask_pixels=12)
    memory = Shapes(6, 3, 40, seed=2, mask_pixels=12)
    for written, drawn in ((data.test(), memory.test()), (replace(data, train_empty=True).train(), memory.train())):
        numbers = np.arange(len(drawn))
        read, wanted = written.read(numbers), drawn.read(numbers)
        for name in wanted:
            np.testing.assert_array_equal(read[name], wanted[name], name)
        assert written.ground_truth(True) == drawn.ground_truth(True)
    assert data.example()["object_mask"].shape == memory.example()["object_mask"].shape == (1, 5, 12, 12)
    with pytest.raises(DataError, match="cannot be written"):
        write_coco(DrawnShapes(1), tmp_path / "train/000001.png", "train")
    with pytest.raises(DataError, match="at least 1 image of 16 pixels"):
        DrawnShapes(0)


def write_records(path, drawn, change=lambda number, record: record):
    """Drawn shapes in TFRecords, as MLPerf's submissions keep COCO."""
    records = []
    for number in range(len(drawn)):
        height, width = drawn.size(number)
        objects = drawn.objects(number)
        record = {"image/encoded": png(drawn.pixels(number)), "image/height": height, "image/width": width}
        record |= {"image/source_id": str(drawn.image_id(number)), "image/object/class/label": objects.label}
        for k, name in enumerate(("xmin", "ymin", "xmax", "ymax")):
            record[f"image/object/bbox/{name}"] = (objects.box[:, k] / (width, height)[k % 2]).astype(np.float32)
        masks = [png(255 * bitmap(outline, height, width)) for outline in objects.outline]
        records.append(change(number, record | ({"image/object/mask": masks} if masks else {})))
    write_tfrecord(path, records)


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def test_tfrecords_of_images_with_objects_are_the_images(tmp_path):
    pytest.importorskip("pycocotools")
    pytest.importorskip("google_crc32c")
    drawn = DrawnShapes(6, side=40)
    write_records(tmp_path / "test-0", drawn)
    where = str(tmp_path / "test-*")
    data = CocoFiles(where, "", where, "", Stretched(40), limit=5, mask_pixels=12, categories=(1, 2, 3))
    read, wanted = data.test(), DetectionImages(drawn, Stretched(40), 5, 12)
    numbers = np.arange(6)
    for name, array in wanted.read(numbers).items():
        found = read.read(numbers)[name]
        if name == "object_mask":  # of whole pixels now
            assert np.mean(found != array) < 0.05
        else:
            np.testing.assert_allclose(found, array, atol=1e-4, err_msg=name)
    truth, expected = (one.ground_truth(True)["annotations"] for one in (read, wanted))
    for one, other in zip(truth, expected, strict=True):
        np.testing.assert_allclose(one["bbox"], other["bbox"], atol=1e-4)
        assert (one["image_id"], one["category_id"]) == (other["image_id"], other["category_id"])
        assert bitmap(one["segmentation"], 40, 40).sum() == pytest.approx(bitmap(other["segmentation"], 40, 40).sum())
    assert len(data.train()) == sum(len(drawn.objects(k)) > 0 for k in range(6))


def test_tfrecords_that_are_wrong_are_named(tmp_path):
    pytest.importorskip("google_crc32c")
    drawn = DrawnShapes(4, side=40, most=3)
    first = next(k for k in range(4) if len(drawn.objects(k)))
    lacking = {"image/height": "'image/height'", "image/object/class/label": "its objects have"}
    for number, (field, said) in enumerate(lacking.items()):
        path = tmp_path / f"lacks-{number}"
        write_records(
            path, drawn, lambda k, record, field=field: {n: v for n, v in record.items() if n != field or k != first}
        )
        with pytest.raises(DataError, match=f"record {first} is no image with objects: {said}"):
            CocoFiles(str(path), test_files=str(path), categories=(1, 2, 3)).test()
    path = tmp_path / "damaged"
    write_records(path, drawn)
    path.write_bytes(path.read_bytes()[:-30])
    test = CocoFiles(test_files=str(path), categories=(1, 2, 3)).test()
    assert len(test) == 3
    with pytest.raises(DataError, match="no TFRecords there"):
        CocoFiles(test_files=str(tmp_path / "none-*")).test()


def test_inspection_draws_boxes(tmp_path):
    recipe = tmp_path / "boxes.py"
    recipe.write_text(
        "from dataclasses import replace\nfrom multipod.data.detection.shapes import Shapes\n"
        "from multipod.recipes.mlp_small import mlp_small\n\n"
        "def boxes():\n    return replace(mlp_small(), data=Shapes(40, pixels=32, crop=False))\n"
    )
    out = tmp_path / "batch.png"
    words = ["inspect", f"{recipe}:boxes", "--rows", "3", "--batches", "2", "--out", str(out)]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "3x5x4 float32" in done.output
    with Image.open(out) as sheet:
        assert sheet.width > 3 * 288


@pytest.mark.parametrize(
    "data", [Shapes(jitter=ColorJitter()), CocoFiles(crop=SsdCrop(1)), CocoFiles(shape=Fitted(), mask_pixels=112)]
)
def test_recipes_with_these_data_are_read_back(data):
    recipe = replace(tiny(), data=data)
    assert from_text(to_text(recipe)) == recipe
    assert override(recipe, ["data.jitter=none"]).data.jitter is None
