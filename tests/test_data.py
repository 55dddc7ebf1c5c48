"""The order of the data is a pure function of the seed and the position."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from multipod.data.batches import TrainBatches, evaluation_batches
from multipod.data.digits import Digits, shift_images
from multipod.data.global_arrays import SMALL_BYTES, owned_rows, to_mesh
from multipod.data.source import ArraySource
from multipod.layout.layout import Layout
from multipod.layout.mesh import batch_sharding, make_mesh

DIGITS = Digits()


def numbered(count):
    """A source whose examples are their own numbers."""
    return ArraySource({"number": np.arange(count)})


@given(count=st.integers(1, 60), batch=st.integers(1, 70), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_every_epoch_reads_every_example_once(count, batch, seed):
    batches = TrainBatches(numbered(count), batch, seed, np.arange(batch))
    read = np.concatenate([batches.numbers(k) for k in range(-(-3 * count // batch))])[: 3 * count]
    for epoch in read.reshape(3, count):
        assert sorted(epoch) == list(range(count))


@given(batch=st.integers(2, 24), position=st.integers(0, 40), parts=st.integers(1, 4), seed=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_who_reads_which_rows_changes_no_example(batch, position, parts, seed):
    whole = TrainBatches(DIGITS.train(), batch, seed, np.arange(batch))[position]
    shares = [
        TrainBatches(DIGITS.train(), batch, seed, rows) for rows in np.array_split(np.arange(batch), min(parts, batch))
    ]
    for name, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([share[position][name] for share in shares]), array)


def test_a_run_enters_the_sequence_at_any_place():
    batches = TrainBatches(DIGITS.train(), 32, 5, np.arange(32))
    from_start, later = batches.start(0), batches.start(7)
    for _ in range(7):
        next(from_start)
    for _ in range(60):  # past the end of an epoch
        a, b = next(from_start), next(later)
        assert all(np.array_equal(a[name], b[name]) for name in a)


def test_seeds_give_other_orders_and_epochs_other_orders():
    order = [TrainBatches(numbered(50), 50, seed, np.arange(50)).numbers(k) for seed, k in ((0, 0), (0, 1), (1, 0))]
    assert not np.array_equal(order[0], order[1])
    assert not np.array_equal(order[0], order[2])


def test_the_digits_are_split_with_equal_shares_of_each_class():
    train, test = DIGITS.train(), DIGITS.test()
    assert (len(train), len(test)) == (1437, 360)
    shares = [np.bincount(part.arrays["label"], minlength=10) / len(part) for part in (train, test)]
    np.testing.assert_allclose(*shares, atol=0.004)
    images = np.concatenate([train.arrays["image"], test.arrays["image"]])
    assert images.shape == (1797, 8, 8, 1)
    assert images.min() == 0
    assert images.max() == 1


@pytest.mark.parametrize(("share", "seed"), [(0.2, 0), (0.33, 7)])
def test_the_digits_and_their_split_are_those_of_scikit_learn(share, seed):
    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32)[..., None], digits.target.astype(np.int32)
    wanted = train_test_split(images, labels, test_size=share, stratify=labels, random_state=seed)
    data = Digits(test_share=share, split_seed=seed)
    train, test = data.train().arrays, data.test().arrays
    for ours, theirs in zip((train["image"], test["image"], train["label"], test["label"]), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)


def test_a_shift_moves_pixels_and_brings_in_zeros():
    image = np.arange(1, 10, dtype=np.float32).reshape(1, 3, 3, 1)
    moved = shift_images(np.repeat(image, 3, axis=0), np.array([[1, 1], [0, 1], [2, 0]]), 1)[..., 0]
    np.testing.assert_array_equal(moved[0], image[0, ..., 0])
    np.testing.assert_array_equal(moved[1], [[0, 0, 0], [1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(moved[2], [[0, 4, 5], [0, 7, 8], [0, 0, 0]])


@given(count=st.integers(1, 40), batch=st.integers(1, 16), parts=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_evaluation_counts_each_example_once(count, batch, parts):
    seen = []
    for rows in np.array_split(np.arange(batch), min(parts, batch)):
        for part in evaluation_batches(numbered(count), batch, rows):
            assert len(part["mask"]) == len(rows)
            seen.extend(part["number"][part["mask"]])
    assert sorted(seen) == list(range(count))


@pytest.mark.jax_version
@pytest.mark.parametrize("mesh", [(2, 4), (1, 7)])
def test_rows_reach_the_devices_they_belong_to(mesh):
    sharding = batch_sharding(make_mesh(Layout(mesh)))
    total = 14 * 4
    rows = owned_rows(sharding, total)
    np.testing.assert_array_equal(rows, np.arange(total))
    placed = to_mesh({"number": np.arange(total, dtype=np.int32)}, rows, total, sharding)["number"]
    np.testing.assert_array_equal(jax.device_get(placed), np.arange(total))


@pytest.mark.jax_version
@pytest.mark.parametrize("columns", [1, SMALL_BYTES // 64])
def test_a_batch_on_one_device_is_as_device_put_places_it(columns):
    sharding = batch_sharding(make_mesh(Layout((1, 1)), jax.devices()[3:4]))
    batch = {
        "image": np.random.default_rng(0).integers(0, 255, (32, columns), np.uint8),
        "label": np.arange(32),  # int64, which JAX makes int32
        "mask": np.arange(32) < 30,
    }
    again = {name: array + 1 for name, array in batch.items() if name != "mask"} | {"mask": ~batch["mask"]}
    for host in (batch, again):
        placed = to_mesh(host, np.arange(32), 32, sharding)
        for name, wanted in jax.device_put(host, dict.fromkeys(host, sharding)).items():
            assert (placed[name].sharding, placed[name].dtype) == (sharding, wanted.dtype)
            np.testing.assert_array_equal(placed[name], wanted)
