"""`multipod data`, and a run whose data are files: recipes, damaged examples, labels, other data."""

import json
import pickle
import re
from dataclasses import dataclass, replace

import jax
import numpy as np
import pictures
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from multipod.cli.data import data as command
from multipod.data.batches import TrainBatches
from multipod.data.clicks.prepare import Settings, prepare
from multipod.data.clicks.synthetic import Synthetic, criteo_lines
from multipod.data.convert import NOTE, WRITERS, convert
from multipod.data.files.formats import FORMATS, open_records
from multipod.data.images.files import ImageFiles
from multipod.data.inspect import array_rows, contact_sheet
from multipod.data.order import InBlocks, generator
from multipod.data.reading import InputOptions
from multipod.data.tables import Tables
from multipod.errors import DataError, MetricError, RunFolderError
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.metrics.objective import Classification
from multipod.models.pixels import Normalized
from multipod.models.resnet import SmallResNet
from multipod.optim.lars import Lars
from multipod.optim.rates import Cosine, WarmUp
from multipod.optim.rmsprop import RmsProp
from multipod.optim.sgd import Sgd
from multipod.recipe.override import override
from multipod.recipe.recipe import Recipe
from multipod.recipe.text import differences, to_text
from multipod.recipes.find import load
from multipod.runs.facts import data_identities
from multipod.runs.request import reading_arguments
from multipod.step.program import program_of
from multipod.train.context import RunContext
from multipod.train.events import Ended, Skipped
from multipod.train.loop import train
from multipod.train.observers import jsonl
from multipod.train.run_folder import RunFolder, check_data


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    return pictures.write_folder(tmp_path / "images", 20)


@pytest.mark.parametrize("kind", sorted(set(WRITERS) - {"arrays"}))
def test_a_conversion_holds_the_same_records_and_leaves_out_the_damaged(kind, folder, tmp_path):
    pytest.importorskip({"tfrecord": "google_crc32c", "parquet": "pyarrow"}.get(kind, "numpy"))
    source, done = open_records(str(folder)), []
    converted = convert(source, tmp_path / "out", kind, 6, done.append)
    assert (converted.records, converted.shards, converted.damaged) == (20, 4, {})
    assert done[-1] == 20
    target = open_records(str(tmp_path / "out"))
    assert len(target) == 20
    images = ImageFiles(str(folder), str(tmp_path / "out"), pixels=16)
    expected, found = replace(images, test_files=str(folder)).test(), images.test()
    for name, array in expected.read(np.arange(20)).items():
        np.testing.assert_array_equal(found.read(np.arange(20))[name], array)


def test_an_interrupted_conversion_goes_on(folder, tmp_path):
    source, out = open_records(str(folder)), tmp_path / "out"

    def stop(done):
        if done >= 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, "array-record", 6, stop)
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    assert sorted(kept) == ["part-00000-of-00004.array_record", "part-00001-of-00004.array_record"]
    assert convert(source, out, "array-record", 6).records == 20
    assert all((out / name).stat().st_mtime_ns == time for name, time in kept.items())
    assert len(open_records(str(out))) == 20
    with pytest.raises(
        DataError, match=r"out holds another conversion: kind was array-record, now tar; per_shard was 6"
    ):
        convert(source, out, "tar", 7)
    with pytest.raises(DataError, match="is not empty, and no conversion began there"):
        convert(source, folder, "tar")
    with pytest.raises(DataError, match=r"records cannot be written as 'tarr'. Nearest: tar"):
        convert(source, tmp_path / "other", "tarr")


def test_clicks_become_arrays_that_a_run_reads_block_by_block(tmp_path):
    """Criteo's form: shuffled once when written, then one record is one batch: three contiguous copies from the map."""
    (tmp_path / "clicks.txt").write_bytes(b"".join(criteo_lines(Synthetic(rows=(300, 40, 5), examples=600), 600)))
    prepare(Settings((str(tmp_path / "clicks.txt"),), (1000,) * 26, part_lines=250), tmp_path / "clicks")
    source, out = open_records(str(tmp_path / "clicks")), tmp_path / "out"

    def stop(done):
        if done >= 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, "arrays", 150, stop, shuffle=5)
    assert convert(source, out, "arrays", 150, shuffle=5).records == 600
    whole, order = source.read(np.arange(600)), generator(5, 0).permutation(600)
    rows = Tables(str(out), str(out), block=64).train()
    for name, array in rows.read(np.arange(600)).items():
        np.testing.assert_array_equal(array, whole[name][order])
    batches = TrainBatches(rows, 64, 0, np.arange(64))
    numbers = [batches.numbers(k) for k in range(9)]
    assert len(set(np.concatenate(numbers).tolist())) == 9 * 64
    assert sum((np.diff(one) == 1).sum() for one in numbers) >= 9 * 64 - 30  # whole blocks, but for the short one
    for k in range(9):
        np.testing.assert_array_equal(batches[k]["ids"], whole["ids"][order][numbers[k]])
    with pytest.raises(DataError, match="now 6"):
        convert(source, out, "arrays", 150, shuffle=6)
    with pytest.raises(DataError, match="image hold no numbers"):
        convert(open_records(str(pictures.write_folder(tmp_path / "images", 2))), tmp_path / "x", "arrays")
    with pytest.raises(DataError, match="image hold no numbers"):
        Tables(str(tmp_path / "images")).train()
    with pytest.raises(DataError, match="does not say where its tables are"):
        Tables().train()
    with pytest.raises(DataError, match="at least one example"):
        InBlocks(0)


@given(count=st.integers(1, 90), block=st.integers(1, 40), epoch=st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_blocks_are_read_whole_and_everything_once(count, block, epoch):
    order = InBlocks(block).epoch(np.array([count]), 1, epoch)
    assert sorted(order) == list(range(count))
    assert (np.diff(order) != 1).sum() <= -(-count // block) - 1


def test_convert_on_the_command_line(tmp_path, folder):
    np.save(tmp_path / "x.npy", np.zeros(1))
    answer = CliRunner().invoke(command, ["convert", str(folder), str(tmp_path / "out"), "--to", "tar"])
    assert answer.exit_code == 0, answer.output
    assert "20 records in 1 files" in answer.output
    assert json.loads((tmp_path / "out" / NOTE).read_text())["kind"] == "tar"
    listed = CliRunner().invoke(command, ["formats"]).output
    assert [line.split()[0] for line in listed.splitlines()] == list(FORMATS)


def test_stragglers_on_the_command_line():
    answer = CliRunner().invoke(command, ["stragglers", "--hosts", "2,8", "--threads", "4", "--image-ms", "0.5"])
    assert answer.exit_code == 0, answer.output
    assert [line.split()[1] for line in answer.output.splitlines() if "%" in line] == ["2", "8"]
    assert "16,64,512" in CliRunner().invoke(command, ["stragglers", "--hosts", "2;8"]).output


def test_options_of_reading_come_back():
    reading = InputOptions(3, 0, 2, 10**9, "a b", 60.0, "HWCN")
    assert reading_arguments(reading) == (
        " --read-threads 3 --read-ahead 2 --read-limit 60.0 --image-order HWCN --decoded-cache 1000000000"
        " --decoded-cache-folder 'a b'"
    )
    assert reading_arguments(InputOptions()) == ""


def test_a_run_goes_on_where_its_data_were_moved(tmp_path):
    recipe = small(tmp_path)
    moved = replace(recipe, data=replace(recipe.data, train_files="elsewhere"))
    assert differences(to_text(recipe), to_text(moved)) == []
    other = replace(recipe, data=replace(recipe.data, pixels=32))
    assert differences(to_text(recipe), to_text(other)) == ["data.pixels: 16, now 32"]


def test_inspect_draws_a_batch_and_says_what_was_left_out(folder, tmp_path):
    (folder / "cat" / "0004.jpg").write_bytes(b"")
    sheet = tmp_path / "sheet.png"
    options = ["--set", f"data.train_files={folder}", "--set", "data.pixels=32", "--rows", "12", "--batches", "3"]
    answer = CliRunner().invoke(command, ["inspect", "resnet50", *options, "--out", str(sheet)])
    assert answer.exit_code == 0, answer.output
    for part in (
        "20 images",
        "12x32x32x3 uint8",
        "2 different",
        "correlation",
        "examples/s",
        "decode",
        "it has no bytes",
    ):
        assert part in answer.output
    with Image.open(sheet) as drawn:
        assert drawn.size == (8 * 70 + 6, 2 * (64 + 14 + 6) + 6)


def test_what_a_contact_sheet_and_the_table_show():
    grey = np.linspace(-1, 1, 2 * 64 * 64, dtype=np.float32).reshape(2, 64, 64, 1)
    pixels = np.asarray(contact_sheet(grey, ["a", "b"]))
    assert tuple(pixels[6, 6]) == (0, 0, 0)
    assert tuple(pixels[6 + 63, 6 + 70 + 63]) == (255, 255, 255)
    [row] = array_rows({"label": np.array([1, 3])})
    assert row == ("label", "2 int64", "1 to 3", "2 ± 1")


@dataclass(frozen=True)
class Linear:
    """A model that compiles at once."""

    classes: int = 2

    def init(self, key):
        return {"w": jax.random.normal(key, (16 * 16 * 3, self.classes)) / 30}, {}

    def apply(self, params, statistics, batch, *, train, key):
        return batch["image"].reshape(-1, 16 * 16 * 3) @ params["w"], statistics


def small(folder, **how):
    return Recipe(
        "small",
        Normalized(Linear()),
        ImageFiles(str(folder), str(folder), pixels=16, **how),
        Classification(),
        Sgd(WarmUp(Cosine(0.05), 0.1)),
        batch=8,
        updates=4,
        evaluation_batch=8,
        layout=Layout((1, 2)),
    )


def run(recipe, reading=None):
    events = []
    program = program_of(recipe, make_mesh(recipe.layout))
    state, _ = train(program, RunContext(observers=[events.append], reading=reading or InputOptions()))
    return state, events


def test_a_run_on_files_counts_what_it_left_out_and_is_the_same_with_other_readers(folder):
    (folder / "dog" / "0005.jpg").write_bytes(pictures.as_jpeg(5)[:300])
    state, events = run(small(folder))
    skipped = [event for event in events if isinstance(event, Skipped)]
    assert {event.name for event in skipped} == {str(folder / "dog" / "0005.jpg")}
    [ended] = [event for event in events if isinstance(event, Ended)]
    assert ended.skipped == len(skipped) == 2  # by training and by evaluation
    for event in skipped:
        assert jsonl.decode(json.loads(jsonl.encode(event))) == event
    other, _ = run(small(folder), InputOptions(threads=3, ahead=4))
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_labels_outside_the_classes_are_refused_before_the_first_update(folder):
    (folder / "emu").mkdir()
    for k in range(6):
        (folder / "emu" / f"{k}.jpg").write_bytes(pictures.as_jpeg(k))
    with pytest.raises(MetricError, match=r"rank 0: label\[\d\] is 2, the first of \d outside the 2 classes 0 to 1"):
        run(small(folder))


def test_a_run_goes_on_only_on_its_own_data(folder, tmp_path):
    recipe = small(folder)
    facts = {"data": data_identities(recipe)}
    check_data(RunFolder(tmp_path), facts, data_identities(recipe))
    check_data(RunFolder(tmp_path), {}, data_identities(recipe))  # of a run that did not say
    other = pictures.write_folder(tmp_path / "other", 22)
    pattern = (
        rf"{tmp_path} began on other data:\n  train: 20 images \w+, now 22 images \w+\n  test: .*checkpoints are whole"
    )
    with pytest.raises(RunFolderError, match=re.compile(pattern, re.DOTALL)):
        check_data(RunFolder(tmp_path), facts, data_identities(small(other)))


def test_the_imagenet_recipes_have_the_published_numbers():
    resnet, efficient = load("resnet50"), load("efficientnet-b0")
    assert (resnet.batch, resnet.updates, type(resnet.optimizer)) == (8192, 8764, Lars)
    assert (efficient.batch, type(efficient.optimizer), efficient.data.augment) == (4096, RmsProp, "autoaugment")
    for recipe in (resnet, efficient):
        assert recipe.model.classes == 1000
        assert "train_files" in to_text(recipe)
        with pytest.raises(DataError, match="does not say where its images are"):
            recipe.data.train()


@pytest.mark.parametrize("kind", ["folder", "tfrecord", "tar"])
@pytest.mark.parametrize("name", ["resnet50", "efficientnet-b3"])
def test_the_imagenet_recipes_read_each_kind_of_files(name, kind, folder, tmp_path):
    where = folder
    if kind != "folder":
        if kind == "tfrecord":
            pytest.importorskip("google_crc32c")
        where = tmp_path / "out"
        convert(open_records(str(folder)), where, kind, 6)
    recipe = override(load(name), [f"data.train_files={where}", f"data.test_files={where}"])
    train = TrainBatches(recipe.data.train(), 4, recipe.seed, np.arange(4))[0]
    pixels = recipe.data.pixels
    assert pixels == {"resnet50": 224, "efficientnet-b3": 300}[name]
    assert train["image"].shape == (4, pixels, pixels, 3)
    assert train["image"].dtype == np.uint8
    assert set(train["label"].tolist()) <= {0, 1}
    test = recipe.data.test()
    assert len(test) == 20
    assert test.read(np.arange(2))["image"].shape == (2, pixels, pixels, 3)


def test_pixels_are_normalised_on_the_device():
    class Same:
        def init(self, key):
            return {}, {}

        def apply(self, params, statistics, batch, *, train, key):
            return batch["image"], statistics

    image = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3)).astype(np.uint8)
    model = Normalized(Same())
    found, _ = jax.jit(lambda batch: model.apply({}, {}, batch, train=True, key=None))({"image": image})
    expected = (image / 255 - np.array(model.mean)) / np.array(model.std)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert pickle.loads(pickle.dumps(Normalized(SmallResNet()))) == Normalized(SmallResNet())
    with pytest.raises(ValueError, match="need as many numbers"):
        Normalized(Same(), (0.5,), (0.0,))
