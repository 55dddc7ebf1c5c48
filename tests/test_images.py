"""Images from files: decoded as others decode them, damaged ones left out, the same for every reader."""

import numpy as np
import pictures
import pytest
from PIL import Image

from multipod.data.batches import TrainBatches, evaluation_batches
from multipod.data.files.disk import Damaged
from multipod.data.images import jpeg
from multipod.data.images.augment import IMAGENET, RANDOM_OPS, AutoAugment, RandAugment, operate
from multipod.data.images.cache import DiskCache, MemoryCache
from multipod.data.images.crop import DRAWS, RandomCrop, middle_square
from multipod.data.images.decode import decode
from multipod.data.images.files import ImageFiles
from multipod.data.reading import InputOptions
from multipod.errors import DataError

WITHOUT = pytest.mark.skipif(jpeg.library() is None, reason="jpeg.c could not be compiled here")


def by_pillow(data, box, size, flip):
    edges = (box[0], box[1], box[0] + box[2], box[1] + box[3])
    import io

    image = Image.open(io.BytesIO(data)).convert("RGB").resize(size, Image.Resampling.BILINEAR, box=edges)
    return np.asarray(image)[:, ::-1] if flip else np.asarray(image)


BOXES = [(0, 0, 160, 120), (13, 7, 60, 44), (90.5, 60.25, 69.5, 59.75), (100, 0, 60, 120), (3, 3, 5, 4)]


@WITHOUT
@pytest.mark.parametrize("how", [{}, {"progressive": True}, {"subsampling": "4:4:4"}, {"subsampling": "4:2:2"}])
def test_a_crop_of_a_jpeg_is_what_pillow_cuts_out(how):
    data = pictures.as_file(pictures.picture(3, 160, 120), quality=90, **how)
    for number, box in enumerate(BOXES):
        out = np.empty((37, 41, 3), np.uint8)
        jpeg.crop(data, box, out, flip=bool(number % 2), exact=True)
        # Pillow may bring a libjpeg-turbo of another version: one step more than rounding.
        expected = by_pillow(data, box, (41, 37), number % 2).astype(int)
        assert np.abs(out - expected).max() <= 2
        pixels = np.empty_like(out)
        jpeg.crop_pixels(jpeg.decode(data), box, pixels, flip=bool(number % 2))
        assert np.abs(pixels - out.astype(int)).max() <= 1


@WITHOUT
@pytest.mark.parametrize(("height", "width"), [(300, 2), (2, 900), (40, 30), (5, 3)])
@pytest.mark.parametrize("to", [(1, 1), (8, 8), (17, 33), (64, 50)])
def test_many_crops_at_once_are_what_pillow_resizes(height, width, to):
    """From one pixel to more of them, from 450 pixels to one, and black and white stay what they are."""
    rng = np.random.default_rng(height)
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    images = [noise, np.full_like(noise, 255), np.zeros_like(noise)]
    boxes = [(0, 0, width, height), (0.5, 0.25, width - 1, height - 1.5), (width / 2, 0, 1.0, height / 2)]
    out = np.empty((4, *to, 3), np.uint8)
    jpeg.crop_many([images[0]] * 3, boxes, [False, True, False], out, [3, 0, 1])
    for row, box, flip in zip([3, 0, 1], boxes, [False, True, False], strict=True):
        edges = (box[0], box[1], box[0] + box[2], box[1] + box[3])
        expected = np.asarray(Image.fromarray(noise).resize(to[::-1], Image.Resampling.BILINEAR, box=edges))
        assert np.abs(out[row] - (expected[:, ::-1] if flip else expected).astype(int)).max() <= 1
    jpeg.crop_many(images[1:], boxes[:2], [False, True], out, [0, 1])
    assert out[0].min() == 255
    assert out[1].max() == 0


@WITHOUT
def test_a_crop_decoded_at_a_smaller_scale_looks_the_same():
    data = pictures.as_file(Image.fromarray(pictures.picture(1)).resize((640, 480), Image.Resampling.BICUBIC))
    out, exact = np.empty((2, 50, 60, 3), np.uint8)
    jpeg.crop(data, (30, 20, 560, 440), out)
    jpeg.crop(data, (30, 20, 560, 440), exact, exact=True)
    assert np.abs(out - exact.astype(int)).mean() < 1.5


def test_without_a_compiler_the_crops_are_the_same(monkeypatch):
    data, box = pictures.as_file(pictures.picture(3, 160, 120), quality=90), (13, 7, 60, 44)
    out, other = np.empty((2, 37, 41, 3), np.uint8)
    jpeg.crop(data, box, out, flip=True, exact=True)
    monkeypatch.setattr(jpeg, "library", lambda: None)
    jpeg.crop(data, box, other, flip=True)
    assert np.abs(out - other.astype(int)).max() <= 2
    assert jpeg.header(data) == (160, 120, True, 1)
    with pytest.raises(Damaged):
        jpeg.decode(data[:200])


@WITHOUT
def test_large_images_are_decoded_no_larger_than_their_smallest_crop_needs():
    data = pictures.as_file(pictures.picture(1, 640, 402), quality=95)
    sizes = {least: decode(data, least).shape[:2] for least in (0, 403, 402, 201, 101, 100, 50, 8)}
    assert sizes == {
        0: (402, 640), 403: (402, 640), 402: (402, 640), 201: (201, 320), 101: (201, 320), 100: (101, 160),
        50: (51, 80), 8: (51, 80),
    }  # fmt: skip


def turned(number, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return pictures.as_file(pictures.picture(number), quality=95, exif=exif)


ODD = {
    "grey": pictures.as_file(Image.fromarray(pictures.picture(1)).convert("L"), quality=95),
    "cmyk": pictures.as_file(Image.fromarray(pictures.picture(1)).convert("CMYK"), quality=95),
    "png": pictures.as_file(pictures.picture(1), "PNG"),
    "palette": pictures.as_file(Image.fromarray(pictures.picture(1)).quantize(250), "PNG"),
    "alpha": pictures.as_file(Image.fromarray(pictures.picture(1)).convert("RGBA"), "PNG"),
    "sixteen": pictures.as_file(Image.fromarray(pictures.picture(1)[..., 0].astype(np.uint16) * 257), "PNG"),
    "webp": pictures.as_file(pictures.picture(1), "WEBP", quality=95),
    "turned": turned(1, 3),
    "flipped": turned(1, 2),
    "on its side": turned(1, 6),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_images_are_handled(kind):
    image, expected = decode(ODD[kind]), pictures.picture(1)
    if kind in ("grey", "sixteen"):
        expected = np.repeat(np.asarray(Image.fromarray(expected).convert("L"))[..., None], 3, 2)
        expected = np.repeat(pictures.picture(1)[..., :1], 3, 2) if kind == "sixteen" else expected
    expected = {
        "turned": expected[::-1, ::-1],
        "flipped": expected[:, ::-1],
        "on its side": np.rot90(expected, -1),
    }.get(kind, expected)
    assert image.shape == expected.shape
    assert image.dtype == np.uint8
    assert np.abs(image - expected.astype(int)).mean() < (12 if kind in ("cmyk", "palette") else 4)


GOOD = pictures.as_jpeg(1)
DAMAGED = {
    "empty": b"",
    "cut": GOOD[: len(GOOD) // 2],
    "head only": GOOD[:30],
    "text": b"not an image",
    "scrambled": GOOD[:-120] + bytes(100) + b"\xff\xd0" + bytes(18),
    "cut png": pictures.as_file(pictures.picture(1), "PNG")[:300],
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_images_are_known_as_such(kind):
    with pytest.raises(Damaged, match=r"\w"):
        decode(DAMAGED[kind])


@pytest.fixture
def folder(tmp_path):
    return pictures.write_folder(tmp_path, 12)


def files(folder, **how):
    return ImageFiles(str(folder), str(folder), pixels=16, **how)


def test_damaged_files_are_replaced_in_training_masked_in_evaluation_and_named(folder):
    for name, kind in (("cat/0004.jpg", "empty"), ("dog/0007.jpg", "cut"), ("cat/0006.jpg", "text")):
        (folder / name).write_bytes(DAMAGED[kind])
    train, test = files(folder).train(), files(folder).test()
    batch = TrainBatches(train, 12, 0, np.arange(12))[0]
    assert set(batch) == {"image", "label"}
    assert {one.number for one in train.statistics.news()} == {2, 3, 9}
    assert train.statistics.news() == []
    [evaluated] = evaluation_batches(test, 16, np.arange(16))
    assert list(np.flatnonzero(~evaluated["mask"])) == [2, 3, 9, 12, 13, 14, 15]
    skipped = test.statistics.skipped[2]
    assert (skipped.name, skipped.reason) == (str(folder / "cat/0004.jpg"), "it has no bytes")


def test_evaluation_in_many_parts_is_that_of_one(folder, monkeypatch):
    source = files(folder).test()
    [whole] = evaluation_batches(source, 12, np.arange(12))
    monkeypatch.setattr("multipod.data.batches.PART", 2)
    [parts] = evaluation_batches(source, 12, np.arange(12), InputOptions(threads=3))
    for name, array in whole.items():
        np.testing.assert_array_equal(parts[name], array)
        assert len(array) == 12


def test_parts_of_large_batches_are_written_where_they_stay(folder, monkeypatch):
    """From the second batch on; also while the readers are tuned, and where an example is replaced by the next."""
    monkeypatch.setattr("multipod.data.batches.PART", 4)
    batches, join, joined = (
        TrainBatches(ImageFiles(str(folder), pixels=8).train(), 10, 0, np.arange(10)),
        np.concatenate,
        [],
    )
    monkeypatch.setattr(np, "concatenate", lambda parts, *more: joined.append(np.ndim(parts[0])) or join(parts, *more))
    feed = batches.start(0, InputOptions())
    feed.tuner.window, feed.tuner.cores = 2, 4
    for k in range(8):
        batch = next(feed)
        for name, array in batches[k].items():
            np.testing.assert_array_equal(batch[name], array)
        feed.adapt(0.5 / (k + 1), 1.0)
    assert feed.tuner.threads > 1
    assert joined.count(4) <= 3  # the first, and what was begun before it was there
    feed.close()


def test_data_of_which_nothing_can_be_read_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    for k in range(3):
        (tmp_path / "a" / f"{k}.jpg").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(DataError, match=r"3 examples in a row cannot be read, from .*jpg on; the last: .* See whether"):
        files(tmp_path).train().read(np.arange(1))


@pytest.mark.parametrize("how", [{}, {"decode": "whole"}, {"augment": "autoaugment"}, {"augment": "randaugment"}])
def test_who_reads_which_rows_changes_no_pixel(folder, how):
    (folder / "cat" / "0004.jpg").write_bytes(b"")
    rows, data = np.arange(10), files(folder, **how)
    whole = TrainBatches(data.train(), 10, 4, rows)[3]
    for parts in (2, 3):
        shares = [TrainBatches(data.train(), 10, 4, part)[3] for part in np.array_split(rows, parts)]
        for name, array in whole.items():
            np.testing.assert_array_equal(np.concatenate([share[name] for share in shares]), array)


def test_a_cache_changes_no_pixel_and_keeps_to_its_budget(folder, tmp_path):
    image_bytes = 40 * 30 * 3
    source = files(folder, decode="whole").train()
    expected = [TrainBatches(source, 12, 0, np.arange(12))[k]["image"] for k in range(2)]
    for folder_of in ("", str(tmp_path / "kept"), str(tmp_path / "kept")):
        cached = source.cached(5 * image_bytes + 7, folder_of)
        batches = TrainBatches(cached, 12, 0, np.arange(12))
        for k, images in enumerate(expected):
            np.testing.assert_array_equal(batches[k]["image"], images)
        held = cached.cache.held()
        assert (held.nbytes, held.images) == (5 * image_bytes, 5)
        assert held.hits >= 5
        if folder_of:
            cached.cache.close()
    with pytest.raises(DataError, match=r"Set data\.decode=whole"):
        files(folder).train().cached(10**6)


def test_a_cache_on_disk_survives_a_crash_and_belongs_to_one_process(tmp_path):
    image = pictures.picture(0)
    cache = DiskCache(10**6, tmp_path, "x")
    cache.offer(3, image, 7)
    with pytest.raises(DataError, match="another process keeps its decoded images there"):
        DiskCache(10**6, tmp_path, "x")
    cache.close()
    with (tmp_path / "x.entries").open("ab") as entries:
        entries.write(b"cut sho")
    again = DiskCache(10**6, tmp_path, "x")
    np.testing.assert_array_equal(again.get(3)[0], image)
    assert again.get(3)[1] == 7
    again.offer(4, image, 1)
    np.testing.assert_array_equal(again.get(4)[0], image)
    again.close()
    memory = MemoryCache(0)
    memory.offer(1, image, 0)
    assert memory.get(1) is None


def test_random_crops_are_as_published():
    crop = RandomCrop()
    draws = np.random.default_rng(0).random((4000, DRAWS))
    boxes, flips = zip(*[view(500, 375) for view in crop.views(draws)], strict=True)
    left, top, wide, high = np.array(boxes).T
    assert (left >= 0).all()
    assert (left + wide <= 500).all()
    assert (top + high <= 375).all()
    area, ratio = wide * high / (500 * 375), wide / high
    assert 0.075 < area.min() < area.max() <= 1
    assert 0.7 < ratio.min() < ratio.max() < 1.4
    assert abs(np.mean(flips) - 0.5) < 0.03
    assert np.median(np.log(ratio)) == pytest.approx(0, abs=0.08)  # wide ones fit more often
    assert crop.views(draws)[0](400, 4)[0] == (197, 0, 5, 4)  # no try fits: the largest middle box of a ratio that does
    assert middle_square(500, 375, 0.8) == (100, 37.5, 300, 300)
    with pytest.raises(DataError, match=r"area=\(0, 2\).*; ratio=\(2, 1\).*; flip=3"):
        RandomCrop((0, 2), (2, 1), 3)


def test_operations_of_augmentation():
    image = Image.fromarray(pictures.picture(2))
    pixels = np.asarray(image).astype(int)
    same = {"identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "solarize", "posterize"}
    same |= {"contrast", "color", "brightness", "sharpness"}
    for name in same:  # magnitude 0 changes nothing
        np.testing.assert_array_equal(np.asarray(operate(image, name, 0, False)), pixels)
    assert len(RANDOM_OPS) == 14
    assert len(IMAGENET) == 25
    assert {name for pair in IMAGENET for name, _, _ in pair} <= {*RANDOM_OPS, "invert"}
    np.testing.assert_array_equal(np.asarray(operate(image, "invert", 5, False)), 255 - pixels)
    np.testing.assert_array_equal(np.asarray(operate(image, "posterize", 10, False)), pixels & 0xF0)
    solarized = np.where(pixels < 128, pixels, 255 - pixels)
    np.testing.assert_array_equal(np.asarray(operate(image, "solarize", 5, False)), solarized)
    moved = np.asarray(operate(image, "translate_x", 10, False))
    assert np.abs(moved[:, :20] - pixels[:, 18:38]).max() < 4  # 150/331 of 40 pixels is 18.1
    changed = {name for name in RANDOM_OPS if (np.asarray(operate(image, name, 9, True)) != pixels).any()}
    assert changed >= set(RANDOM_OPS) - {"identity", "autocontrast"}


@pytest.mark.parametrize("policy", [RandAugment(), AutoAugment()])
def test_policies_are_pure_and_differ_between_rows(policy):
    image, draws = pictures.picture(2), np.random.default_rng(1).random((40, policy.draws))
    results = [pictures.checksum_of(policy.apply(image, row)) for row in draws]
    assert results == [pictures.checksum_of(policy.apply(image, row)) for row in draws]
    assert len(set(results)) > 10
    with pytest.raises(DataError, match="a magnitude from 0 to 10"):
        RandAugment(2, 11)


def test_fields_are_found_or_asked_for(tmp_path):
    np.save(tmp_path / "image.npy", np.zeros((3, 4), np.float32))
    np.save(tmp_path / "wine.npy", np.zeros(3))
    with pytest.raises(
        DataError, match=r"has the fields image, wine, and none is known as a label. Set data.image_field"
    ):
        files(tmp_path).train()
    with pytest.raises(DataError, match=r"Give --set data.train_files=FOLDER"):
        ImageFiles().train()
