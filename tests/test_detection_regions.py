"""RoIAlign, pyramids and masks, against torchvision and PyTorch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from multipod.nn.detection.masks import crop_masks, paste_masks
from multipod.nn.detection.pyramid import FeaturePyramid
from multipod.nn.detection.roi_align import RoiAlign, pyramid_level, stride_scales
from multipod.nn.detection.second_stage import of_wanted

close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def reference():
    from torchvision_reference import torch, torchvision

    return torch, torchvision


def some_boxes(rng, count, *, low=-8.0, high=60.0):
    """Boxes that reach outside an image of 48 pixels, some of no area and some a pixel wide."""
    boxes = np.sort(rng.uniform(low, high, (count, 2, 2)), 1).reshape(count, 4).astype(np.float32)
    boxes[0, 2:], boxes[1, 2:] = boxes[0, :2], boxes[1, :2] + 1
    return boxes


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("samples", [1, 2])
def test_values_and_gradients_are_torchvisions_both_ways(samples, aligned):
    torch, torchvision = reference()
    rng = np.random.default_rng(3)
    features, boxes = rng.normal(size=(12, 9, 4)).astype(np.float32), some_boxes(rng, 20)
    weights = rng.normal(size=(20, 5, 5, 4)).astype(np.float32)
    image = torch.tensor(features).permute(2, 0, 1)[None].requires_grad_()
    out = torchvision.ops.roi_align(image, [torch.tensor(boxes)], 5, 0.25, samples, aligned)
    (out * torch.tensor(weights).permute(0, 3, 1, 2)).sum().backward()
    for way in ("gather", "einsum"):
        align = RoiAlign(5, samples, aligned, way=way)

        def total(x, align=align):
            found = align(x, boxes, scale=0.25)
            return (found * weights).sum(), found

        (_, ours), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(features)
        close(ours, out.detach().permute(0, 2, 3, 1).numpy())
        np.testing.assert_allclose(gradient, image.grad[0].permute(1, 2, 0).numpy(), rtol=1e-4, atol=1e-5)


def test_pixels_outside_count_as_zero_where_asked_and_inside_all_agree():
    rng = np.random.default_rng(4)
    features = rng.normal(size=(8, 8, 2)).astype(np.float32)
    boxes = np.array([[1, 1, 5, 6], [-3, 2, 4, 9]], np.float32)
    ways = {
        (border, way): np.asarray(jax.jit(RoiAlign(3, border=border, way=way))(features, boxes))
        for border in ("clamp", "zero")
        for way in ("gather", "einsum")
    }
    first = ways["clamp", "gather"]
    for found in ways.values():
        close(found[0], first[0])
    close(ways["zero", "gather"], ways["zero", "einsum"])
    assert np.abs(ways["zero", "gather"][1] - first[1]).max() > 0.1
    padded = np.pad(features, ((4, 4), (4, 4), (0, 0)))
    close(ways["zero", "gather"][1], jax.jit(RoiAlign(3))(padded, boxes + 4)[1])


@pytest.mark.parametrize("way", ["gather", "einsum"])
def test_boxes_are_read_from_their_own_level_of_a_pyramid(way):
    torch, torchvision = reference()
    rng = np.random.default_rng(5)
    maps = [rng.normal(size=(2, 64 >> k, 96 >> k, 3)).astype(np.float32) for k in range(4)]
    boxes = np.stack([some_boxes(rng, 16, low=-20, high=400) for _ in range(2)])
    pool = torchvision.ops.MultiScaleRoIAlign(["0", "1", "2", "3"], 4, 2)
    tensors = {str(k): torch.tensor(x).permute(0, 3, 1, 2) for k, x in enumerate(maps)}
    theirs = pool(tensors, list(torch.tensor(boxes)), [(256, 384)] * 2).permute(0, 2, 3, 1)
    align = RoiAlign(4, way=way)

    @jax.jit
    @jax.vmap
    def ours(maps, boxes):
        return align.of_pyramid(maps, boxes, pyramid_level(boxes) - 2, scales=stride_scales(2, 5))

    close(ours(maps, boxes).reshape(theirs.shape), theirs.numpy())


def test_levels_are_those_of_the_paper():
    sides = np.array([0, 1, 111.9, 112, 224, 447.9, 448, 2000])
    boxes = np.concatenate([np.zeros((8, 2)), np.stack([sides, sides], 1)], 1).astype(np.float32)
    assert jax.jit(pyramid_level)(boxes).tolist() == [2, 2, 2, 3, 4, 4, 5, 5]
    assert jax.jit(partial(pyramid_level, highest=6))(boxes).tolist()[-1] == 6


def test_masks_are_pasted_as_by_torchvision():
    torch, _ = reference()
    from torchvision.models.detection.roi_heads import paste_masks_in_image

    rng = np.random.default_rng(6)
    masks = rng.uniform(size=(12, 7, 7)).astype(np.float32)
    boxes = np.clip(some_boxes(rng, 12, low=-5, high=45), 0, [40, 32, 40, 32]).astype(np.float32)
    boxes[2] = [-2, 3, 30, 33]
    theirs = paste_masks_in_image(torch.tensor(masks)[:, None], torch.tensor(boxes), (32, 40)).numpy()[:, 0]
    ours = jax.jit(partial(paste_masks, height=32, width=40))(masks, boxes)
    close(ours, theirs)
    assert theirs[2].sum() > 100


def test_masks_are_cut_as_by_a_sampled_grid():
    torch, _ = reference()
    rng = np.random.default_rng(7)
    masks = rng.uniform(size=(6, 14, 14)).astype(np.float32)
    boxes = np.array([[2, 3, 30, 40]] * 6, np.float32)
    rois = np.array([[2, 3, 30, 40], [5, 5, 20, 20], [0, 0, 40, 50], [28, 10, 44, 30], [50, 50, 60, 60], [7, 8, 7, 8]])
    along = (np.arange(9) + 0.5) / 9
    x, y = ((rois[:, [k]] + along * (rois[:, [k + 2]] - rois[:, [k]]) - boxes[:, [k]]) / (
        boxes[:, [k + 2]] - boxes[:, [k]]) * 2 - 1 for k in (0, 1))  # fmt: skip
    grid = np.stack(np.broadcast_arrays(x[:, None, :], y[:, :, None]), -1).astype(np.float32)
    theirs = torch.nn.functional.grid_sample(torch.tensor(masks)[:, None], torch.tensor(grid), align_corners=False)
    ours = jax.jit(partial(crop_masks, size=9))(masks, boxes, rois.astype(np.float32))
    close(ours, theirs.numpy()[:, 0])
    assert (np.asarray(ours)[4] == 0).all()


def test_a_pyramid_is_torchvisions():
    torch, torchvision = reference()
    from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

    theirs = torchvision.ops.FeaturePyramidNetwork([3, 5, 6], 4, LastLevelMaxPool())
    graph, state = nnx.split(FeaturePyramid([3, 5, 6], 4, rngs=nnx.Rngs(0)))
    flat = dict(nnx.to_flat_state(state))
    for ours, name in (("lateral", "inner_blocks"), ("output", "layer_blocks")):
        for k in range(3):
            layer = getattr(theirs, name)[k][0]
            flat[ours, k, "conv", "kernel"][...] = jnp.asarray(layer.weight.detach().permute(2, 3, 1, 0).numpy())
            flat[ours, k, "conv", "bias"][...] = jnp.asarray(layer.bias.detach().numpy()) + k
            layer.bias.data += k
    rng = np.random.default_rng(8)
    maps = [
        rng.normal(size=(2, *side, c)).astype(np.float32)
        for side, c in zip([(9, 14), (5, 7), (3, 4)], [3, 5, 6], strict=True)
    ]
    out = theirs({str(k): torch.tensor(x).permute(0, 3, 1, 2) for k, x in enumerate(maps)})
    ours = jax.jit(lambda state, maps: nnx.merge(graph, state)(maps))(nnx.from_flat_state(flat), maps)
    assert len(ours) == len(out) == 4
    for mine, other in zip(ours, out.values(), strict=True):
        close(mine, other.detach().permute(0, 2, 3, 1).numpy())


def test_what_is_not_wanted_is_not_computed_on_cpu():
    """Values and gradients of the wanted are those of all, and a chunk of which none is wanted is left out."""
    rng = np.random.default_rng(9)
    table, boxes = rng.normal(size=(4, 6)).astype(np.float32), rng.normal(size=(2, 48, 4)).astype(np.float32)
    wanted = np.zeros((2, 48), bool)
    wanted[0, :3] = wanted[1, :18] = True
    seen = []

    def total(table, boxes, way):
        def function(boxes):
            jax.debug.callback(lambda: seen.append(boxes.shape))
            return jnp.tanh(boxes @ table)[..., None]

        found = way(function, boxes, jnp.asarray(wanted))
        return jnp.where(wanted[..., None, None], found, 0).sum(), found

    graded = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True), static_argnums=2)
    (value, _), gradients = graded(table, boxes, lambda function, boxes, _: function(boxes))
    jax.effects_barrier()
    assert seen == [(2, 48, 4)]
    (ours, found), ours_gradients = graded(table, boxes, partial(of_wanted, chunk=16))
    jax.effects_barrier()
    assert seen[1:] == [(2, 16, 4)] * 2
    close(ours, value)
    assert not found[:, 32:].any()
    close(ours_gradients[0], gradients[0])
    close(ours_gradients[1], gradients[1])
    assert of_wanted(lambda boxes: boxes, jnp.ones((1, 10, 4)), jnp.ones((1, 10), bool)).shape == (1, 10, 4)
