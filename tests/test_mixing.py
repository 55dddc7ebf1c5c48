"""Mixup, CutMix and their labels against the published formulas; the same batch for every way of reading it."""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from PIL import Image

from multipod.data.batches import TrainBatches
from multipod.data.images.files import ImageFiles
from multipod.data.mixing import Mix, Mixing, cut_box, mixing_of, partners
from multipod.data.reading import InputOptions
from multipod.data.source import HostBatch
from multipod.errors import DataError
from multipod.metrics.objective import Classification
from multipod.recipe.override import override
from multipod.recipes.find import load


@dataclass(frozen=True)
class Noise:
    """Bytes as images, in memory."""

    mixing: Mixing | None
    count: int = 40

    def __len__(self) -> int:
        return self.count

    def read(self, numbers: np.ndarray) -> HostBatch:
        images = np.random.default_rng(0).integers(0, 256, (self.count, 6, 8, 3), np.uint8)
        return {"image": images[numbers], "label": numbers.astype(np.int32) % 10}

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        return batch | {"image": batch["image"] + rng.integers(0, 9, (rows.max() + 1, 1, 1, 1))[rows].astype(np.uint8)}


def images_and_labels() -> HostBatch:
    return Noise(None).read(np.arange(4))


def test_mixup_is_the_formula() -> None:
    """x = lam x_i + (1 - lam) x_j, to the nearest byte; the labels' shares are lam and 1 - lam."""
    before = images_and_labels()
    mixed = Mix(0.7071, None).apply({k: v.copy() for k, v in before.items()}, np.array([1, 0, 3, 2]))
    x = before["image"].astype(np.float64)
    np.testing.assert_array_equal(mixed["image"][0], np.rint(0.7071 * x[0] + 0.2929 * x[1]))
    np.testing.assert_array_equal(mixed["image"][3], np.rint(0.7071 * x[3] + 0.2929 * x[2]))
    np.testing.assert_array_equal(mixed["mixed_label"], [1, 0, 3, 2])
    np.testing.assert_allclose(mixed["mixed_share"], 0.2929, rtol=1e-6)


@pytest.mark.parametrize(("own", "y", "x"), [(0.75, 3, 4), (0.2, 0, 7), (0.9, 5, 0), (0.0, 3, 4), (1.0, 2, 2)])
def test_cutmix_is_the_box_of_torchvision(own: float, y: int, x: int) -> None:
    """torchvision.transforms.v2.CutMix: half sides int(sqrt(1 - lam) / 2 * size), cut at the edges, lam by the area."""
    height, width = 6, 8
    half = 0.5 * (1 - own) ** 0.5
    x1, y1 = max(x - int(half * width), 0), max(y - int(half * height), 0)
    x2, y2 = min(x + int(half * width), width), min(y + int(half * height), height)
    before = images_and_labels()
    mix = cut_box(own, y, x, height, width)
    mixed = mix.apply({k: v.copy() for k, v in before.items()}, np.array([1, 0, 3, 2]))
    expected = before["image"].copy()
    expected[:, y1:y2, x1:x2] = before["image"][[1, 0, 3, 2], y1:y2, x1:x2]
    np.testing.assert_array_equal(mixed["image"], expected)
    np.testing.assert_allclose(mixed["mixed_share"], (x2 - x1) * (y2 - y1) / 48, rtol=1e-6, atol=1e-7)


def test_a_row_without_a_partner_stays_as_it_is() -> None:
    np.testing.assert_array_equal(partners(np.arange(5), 5), [1, 0, 3, 2, 4])
    before = images_and_labels()
    mixed = Mix(0.3, None).apply({k: v.copy() for k, v in before.items()}, np.array([1, 0, 2, 3]))
    np.testing.assert_array_equal(mixed["image"][2:], before["image"][2:])
    np.testing.assert_array_equal(mixed["mixed_share"][2:], 0)


def test_draws_follow_their_distributions() -> None:
    rng = np.random.default_rng(0)
    mixes = [Mixing(0.4, 1.0, switch=0.25, probability=0.8).draw(rng, 32, 32) for _ in range(4000)]
    cut = np.mean([mix.box is not None for mix in mixes])
    plain = np.mean([mix == (1.0, None) for mix in mixes])
    shares = np.array([mix.own for mix in mixes if mix.box is None and mix.own < 1])
    assert (cut, plain) == (pytest.approx(0.2, abs=0.02), pytest.approx(0.2, abs=0.02))
    assert shares.mean() == pytest.approx(0.5, abs=0.02)
    assert shares.var() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), abs=0.01)  # of Beta(a, a)
    assert Mixing().draw(rng, 8, 8) == Mix(1.0, None)


@pytest.mark.parametrize("mixing", [Mixing(mixup=0.3), Mixing(cutmix=1.0)], ids=["mixup", "cutmix"])
def test_every_way_of_reading_gives_the_same_batch(mixing: Mixing) -> None:
    """One host, four hosts, odd shares, padding, and a start in the middle, as a resumed run has it."""
    source, batch = Noise(mixing), 13
    whole = TrainBatches(source, batch, 5, np.arange(batch))
    for position in (0, 7):
        expected = whole[position]
        for rows in (*np.array_split(np.arange(batch), 4), np.array([2, 5, 12])):
            part = TrainBatches(source, batch, 5, rows)[position]
            jax.tree.map(np.testing.assert_array_equal, part, {k: v[rows] for k, v in expected.items()})
        padded = TrainBatches(source, batch, 5, np.arange(11, 16), padded=True)[position]
        np.testing.assert_array_equal(padded["image"][:2], expected["image"][11:])
    assert not np.array_equal(whole[0]["image"], TrainBatches(Noise(None), batch, 5, np.arange(batch))[0]["image"])
    read = whole.start(7, InputOptions(threads=2))
    jax.tree.map(np.testing.assert_array_equal, next(read), whole[7])
    read.close()


def test_the_loss_is_that_of_soft_labels() -> None:
    """timm's mixup_target: smoothed one-hot labels by their shares; test batches, which are not mixed, as ever."""
    logits = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
    batch = {"label": np.array([0, 3, 4]), "mixed_label": np.array([3, 0, 4])}
    batch["mixed_share"] = np.array([0.3, 0.3, 0.0], np.float32)
    smooth = lambda labels: np.eye(5)[labels] * 0.9 + 0.1 / 5  # noqa: E731
    targets = 0.7 * smooth([0, 3, 4]) + 0.3 * smooth([3, 0, 4])
    expected = optax.softmax_cross_entropy(logits, targets)
    np.testing.assert_allclose(Classification(0.1)(logits, batch)["loss"], expected, rtol=1e-5)
    plain = Classification(0.1)(logits, {"label": batch["label"]})["loss"]
    np.testing.assert_allclose(plain, optax.softmax_cross_entropy(logits, smooth([0, 3, 4])), rtol=1e-5)


def test_image_files_mix_by_a_field_of_the_recipe(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(4):
            colour = (40 * number, 200 * (name == "b"), 90)
            Image.new("RGB", (20, 20), colour).save(tmp_path / name / f"{number}.png")
    recipe = override(load("resnet50"), [f"data.train_files={tmp_path}", "data.pixels=8", "data.mixing.mixup=0.4"])
    data = recipe.data
    assert isinstance(data, ImageFiles)
    source = data.train()
    assert mixing_of(source) == Mixing(mixup=0.4)
    batch = TrainBatches(source, 4, 0, np.arange(4))[0]
    example = data.example()
    assert {k: (v.shape[1:], v.dtype) for k, v in batch.items()} == {
        k: (v.shape[1:], v.dtype) for k, v in example.items()
    }
    assert "mixed_label" not in data.__class__(train_files=str(tmp_path), pixels=8).example()
    with pytest.raises(DataError, match=r"mixing: mixup=-1.0 \(at least 0\), switch=2.0 \(0 to 1\)"):
        override(recipe, ["data.mixing.mixup=-1", "data.mixing.switch=2"])
