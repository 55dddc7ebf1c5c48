"""Mask R-CNN with images and regions split over devices."""

from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from multipod.models.mask_rcnn import MaskRcnn
from multipod.nn.logical_axes import logical_axis_rules, with_logical_constraint

LYING, STANDING = (104, 168), (168, 104)
"""An eighth of 832 x 1344: maps of 26, 13, 7, 4 and 2 rows, or of 42, 21, 11, 6 and 3."""


def some_batch(images, height, width):
    rng = np.random.default_rng(3)
    truth = np.array([[10, 12, 60, 70], [40, 20, 100, 50], [5, 60, 90, 102], [0, 0, 0, 0]], np.float32)
    return {
        "image": rng.normal(size=(images, height, width, 3)).astype(np.float32),
        "box": truth[None] + 2 * np.arange(images, dtype=np.float32)[:, None, None],
        "label": np.array([[2, 3, 1, 0]], np.int32).repeat(images, 0),
        "object_mask": (rng.uniform(size=(images, 4, 14, 14)) < 0.5).repeat(8, 2).repeat(8, 3),
    }


def drawn(spec):
    """Weights by NumPy: compiling as many generators takes longer than the rest."""
    rng = np.random.default_rng(1)

    def draw(name, x):
        if x.ndim > 1:
            head = name.startswith("rpn") or "logits" in name or "offsets" in name
            return rng.normal(0, (0.1 if head else 1) * np.sqrt(2 / np.prod(x.shape[:-1])), x.shape).astype(np.float32)
        return np.full(x.shape, name.endswith(("scale", "var")), np.float32)

    return tuple(
        {name: draw(name, x) for name, x in one.items()} for one in jax.eval_shape(spec.init, jax.random.key(0))
    )


@cache
def compiled(devices, images, sides):
    """The program of loss and gradients of a narrow model whose images, of these sides, are split over so many devices.

    Its arguments come with it.
    """
    spec = MaskRcnn(4, width=4, features=8, hidden=16, sizes=(8, 16, 32, 64, 128), proposals=(20, 20), each=(30, 30),
                    rpn_sample=(64, 32), sample=(16, 8))  # fmt: skip
    params, statistics = drawn(spec)
    batch = some_batch(images, *sides)

    def loss(params, batch):
        batch = batch | {"image": with_logical_constraint(batch["image"], "height", None, None)}
        outputs, _ = spec.apply(params, statistics, batch, train=True, key=jax.random.key(0))
        return outputs["loss"].mean(), outputs

    mesh = jax.make_mesh((devices,), ("spatial",), axis_types=(AxisType.Auto,))
    with logical_axis_rules(mesh, {"height": ("spatial",)} if devices > 1 else {}):
        program = jax.jit(jax.value_and_grad(loss, has_aux=True))
        return program.lower(params, batch).compile(), (params, batch)


def results(devices, images, sides):
    """Loss and its parts, and the gradients."""
    program, arguments = compiled(devices, images, sides)
    return jax.device_get(program(*arguments))


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "images", "sides"), [(2, 1, STANDING), (4, 2, STANDING), (8, 1, LYING)])
def test_images_and_regions_split_over_devices_give_the_loss_and_gradients_of_whole_ones(devices, images, sides):
    (loss, parts), gradients = results(1, images, sides)
    (split_loss, split_parts), split_gradients = results(devices, images, sides)
    np.testing.assert_allclose(split_loss, loss, rtol=1e-5)
    for name in parts:
        np.testing.assert_allclose(split_parts[name], parts[name], rtol=1e-5, err_msg=name)
    largest = max(np.abs(one).max() for one in gradients.values())
    for name in gradients:
        near = 1e-5 * np.abs(gradients[name]).max() + 1e-7 * largest
        np.testing.assert_allclose(split_gradients[name], gradients[name], rtol=1e-4, atol=near, err_msg=name)


@pytest.mark.slow
def test_two_images_on_a_device_are_split_as_one_is():
    """Twice the work of one image: no stage gathers the regions of all images to every device."""
    one, two = (compiled(4, images, STANDING)[0].cost_analysis()["flops"] for images in (1, 2))
    assert two < 2.2 * one
