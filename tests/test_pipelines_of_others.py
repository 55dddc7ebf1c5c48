"""Data sets of the Hugging Face hub and pipelines of Grain, in our order."""

import grain
import numpy as np
import pictures
import pytest
from published_data import pairs

from multipod.data.batches import TrainBatches
from multipod.data.digits import Digits
from multipod.data.files.formats import open_records
from multipod.data.grain_pipelines import GrainSource, SourceElements
from multipod.errors import DataError
from multipod.recipe.override import override
from multipod.recipes.find import load


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_images_of_a_hub_are_read_as_those_of_files(tmp_path):
    datasets = pytest.importorskip("datasets")
    records = pictures.records(10)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = datasets.Dataset.from_list(
        [{"image": {"bytes": one["image"], "path": None}, "label": one["label"]} for one in records], features
    )
    rows.save_to_disk(str(tmp_path / "saved"))
    found = open_records(str(tmp_path / "saved"))
    assert [found.record(k) for k in range(10)] == records
    recipe = override(load("resnet50"), [f"data.{part}_files={tmp_path}/saved" for part in ("train", "test")])
    batch = TrainBatches(recipe.data.train(), 4, recipe.seed, np.arange(4))[0]
    assert batch["image"].shape == (4, 224, 224, 3)
    assert found.identity() == open_records(str(tmp_path / "saved")).identity()


def test_translations_of_a_hub_by_name_and_split(tmp_path):
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("tokenizers")
    (tmp_path / "wmt").mkdir()
    rows = datasets.Dataset.from_list([{"translation": {"en": one, "de": other}} for one, other in pairs()])
    rows.to_parquet(str(tmp_path / "wmt" / "train.parquet"))
    where = f"hub:{tmp_path}/wmt:train"
    assert open_records(where).record(3)["translation"]["de"] == pairs()[3][1]
    files = [f"data.train_files={where}", f"data.test_files={where}", "data.vocab=320"]
    source = override(load("transformer-big"), files).data.train()
    assert source.identity().startswith("60 pairs")
    with pytest.raises(DataError, match=r"cannot be loaded: .* Write hub:NAME:SPLIT"):
        open_records(f"hub:{tmp_path}/wmt:dev")


def test_pipelines_of_grain_come_in_and_go_out():
    digits = Digits().train()
    elements = grain.MapDataset.source(SourceElements(digits)).map(lambda one: one | {"label": one["label"] + 1})
    source = GrainSource(elements)
    assert len(source) == len(digits)
    ours, theirs = (TrainBatches(one, 16, 3, np.arange(16)).source.read(np.arange(5)) for one in (digits, source))
    np.testing.assert_array_equal(ours["image"], theirs["image"])
    np.testing.assert_array_equal(ours["label"] + 1, theirs["label"])
    with pytest.raises(DataError, match="element 0 of the Grain pipeline is int, not a dictionary"):
        GrainSource(grain.MapDataset.range(4)).read(np.arange(2))
