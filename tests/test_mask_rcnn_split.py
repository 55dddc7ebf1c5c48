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


def some_batch(height, width):
    rng = np.random.default_rng(3)
    truth = np.array([[10, 12, 60, 70], [40, 20, 100, 50], [5, 60, 90, 102], [0, 0, 0, 0]], np.float32)
    return {
        "image": rng.normal(size=(1, height, width, 3)).astype(np.float32),
        "box": truth[None],
        "label": np.array([[2, 3, 1, 0]], np.int32),
        "object_mask": (rng.uniform(size=(1, 4, 14, 14)) < 0.5).repeat(8, 2).repeat(8, 3),
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
def split_over(devices, sides):
    """Loss and gradients of a narrow model whose images, of these sides, are split over so many devices."""
    spec = MaskRcnn(4, width=4, features=8, hidden=16, sizes=(8, 16, 32, 64, 128), proposals=(20, 20), each=(30, 30),
                    rpn_sample=(64, 32), sample=(16, 8))  # fmt: skip
    params, statistics = drawn(spec)
    batch = some_batch(*sides)

    def loss(params, batch):
        batch = batch | {"image": with_logical_constraint(batch["image"], "height", None, None)}
        outputs, _ = spec.apply(params, statistics, batch, train=True, key=jax.random.key(0))
        return outputs["loss"].mean(), outputs

    mesh = jax.make_mesh((devices,), ("spatial",), axis_types=(AxisType.Auto,))
    with logical_axis_rules(mesh, {"height": ("spatial",)} if devices > 1 else {}):
        return jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch))


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "sides"), [(2, STANDING), (4, STANDING), (8, LYING)])
def test_images_and_regions_split_over_devices_give_the_loss_and_gradients_of_whole_ones(devices, sides):
    (loss, parts), gradients = split_over(1, sides)
    (split_loss, split_parts), split_gradients = split_over(devices, sides)
    np.testing.assert_allclose(split_loss, loss, rtol=1e-5)
    for name in parts:
        np.testing.assert_allclose(split_parts[name], parts[name], rtol=1e-5, err_msg=name)
    largest = max(np.abs(one).max() for one in gradients.values())
    for name in gradients:
        near = 1e-5 * np.abs(gradients[name]).max() + 1e-7 * largest
        np.testing.assert_allclose(split_gradients[name], gradients[name], rtol=1e-4, atol=near, err_msg=name)
