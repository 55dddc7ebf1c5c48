"""Weights from torchvision's state dicts and back: ResNets, the ResNet in an SSD, Mask R-CNN.

A state dict is a mapping from names to NumPy arrays here: `{k: v.numpy() for k, v in state.items()}` of PyTorch's.
Nothing needs PyTorch.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from multipod.errors import RecipeError
from multipod.models.mask_rcnn import MaskRcnn
from multipod.models.resnet import BLOCKS, ResNet
from multipod.models.ssd import Ssd
from multipod.pytrees import Params, Statistics

State = Mapping[str, np.ndarray]
Convertible = ResNet | Ssd | MaskRcnn


@dataclass(frozen=True)
class Place:
    """Where a tensor of ours stands in a state dict.

    Attributes:
      name: its name there.
      ours: from theirs to ours.
      theirs: from ours to theirs.
    """

    name: str
    ours: Callable[[np.ndarray], np.ndarray]
    theirs: Callable[[np.ndarray], np.ndarray]


def from_torchvision(
    model: Convertible, state: State, params: Params, statistics: Statistics
) -> tuple[Params, Statistics]:
    """`params` and `statistics` with every tensor that torchvision's model has replaced by its own.

    Of an `Ssd` that is the stem and three stages of a ResNet, whose other tensors are left out; of the others all.

    Raises:
      RecipeError: names that are missing and shapes that differ, all of them.
    """
    shapes = {**params, **statistics}
    found, wrong = {}, []
    for name, place in _places(model, tuple(shapes)).items():
        if place.name not in state:
            wrong.append(f"{place.name} is missing")
            continue
        shape = place.theirs(np.zeros(shapes[name].shape, np.bool_)).shape
        if np.shape(state[place.name]) != shape:
            wrong.append(f"{place.name} is {np.shape(state[place.name])}, and the model needs {shape}")
            continue
        found[name] = jnp.asarray(place.ours(np.asarray(state[place.name])), jnp.float32)
    if wrong:
        raise RecipeError(
            f"{type(model).__name__}: {len(wrong)} tensors of the state dict do not fit: {'; '.join(wrong[:8])}"
            f"{'; ...' if len(wrong) > 8 else ''}. Give the weights of the same network, or change the recipe."
        )
    return {k: found.get(k, v) for k, v in params.items()}, {k: found.get(k, v) for k, v in statistics.items()}


def to_torchvision(model: Convertible, params: Params, statistics: Statistics) -> dict[str, np.ndarray]:
    """The state dict that torchvision's model loads, float32; of an `Ssd` its part of a ResNet's.

    Batch norms' `num_batches_tracked` are 0.
    """
    tensors = jax.device_get({**params, **statistics})
    state = {}
    for name, place in _places(model, tuple(tensors)).items():
        state[place.name] = np.ascontiguousarray(place.theirs(np.asarray(tensors[name], np.float32)))
        if place.name.endswith("running_var") and not isinstance(model, MaskRcnn):
            state[place.name.replace("running_var", "num_batches_tracked")] = np.zeros((), np.int64)
    return state


def _places(model: Convertible, names: tuple[str, ...]) -> dict[str, Place]:
    """For each tensor that torchvision has too, its place there."""
    body = "backbone.body." if isinstance(model, MaskRcnn) else ""
    found = {}
    for name in names:
        path, _, leaf = name.rpartition("/")
        if path == "stem/conv" or path == "stem/norm" or path.startswith("blocks/"):
            prefix = body + _of_resnet(path, model.depth)
        elif isinstance(model, MaskRcnn):
            prefix = _of_mask_rcnn(name)
        elif isinstance(model, ResNet):
            prefix = "fc"
        else:
            continue
        found[name] = _place(prefix, name, leaf, model)
    return found


def _of_resnet(path: str, depth: int) -> str:
    """`layer2.0.conv1` for blocks/3/body/0/conv."""
    if path.startswith("stem"):
        return "conv1" if path.endswith("conv") else "bn1"
    _, number, *rest = path.split("/")
    stage, place = 1, int(number)
    while place >= BLOCKS[depth][stage - 1]:
        place, stage = place - BLOCKS[depth][stage - 1], stage + 1
    if rest[0] == "shortcut":
        layer = f"downsample.{0 if rest[-1] == 'conv' else 1}"
    else:
        layer = f"{'conv' if rest[-1] == 'conv' else 'bn'}{int(rest[1]) + 1}"
    return f"layer{stage}.{place}.{layer}"


_MASK_RCNN = (
    (r"fpn/lateral/(\d+)/conv", r"backbone.fpn.inner_blocks.\1.0"),
    (r"fpn/output/(\d+)/conv", r"backbone.fpn.layer_blocks.\1.0"),
    (r"rpn/conv/conv", "rpn.head.conv.0.0"),
    (r"rpn/objectness/conv", "rpn.head.cls_logits"),
    (r"rpn/offsets/conv", "rpn.head.bbox_pred"),
    (r"box_head/first", "roi_heads.box_head.fc6"),
    (r"box_head/second", "roi_heads.box_head.fc7"),
    (r"box_head/logits", "roi_heads.box_predictor.cls_score"),
    (r"box_head/offsets", "roi_heads.box_predictor.bbox_pred"),
    (r"mask_head/convs/(\d+)/conv", r"roi_heads.mask_head.\1.0"),
    (r"mask_head/logits/conv", "roi_heads.mask_predictor.mask_fcn_logits"),
)


def _of_mask_rcnn(name: str) -> str:
    if name.startswith("mask_head/double"):
        return "roi_heads.mask_predictor.conv5_mask"
    path = name.rpartition("/")[0]
    return next(re.sub(ours, theirs, path) for ours, theirs in _MASK_RCNN if re.fullmatch(ours, path))


_LEAVES = {"scale": "weight", "bias": "bias", "double_bias": "bias", "mean": "running_mean", "var": "running_var"}


def _place(prefix: str, name: str, leaf: str, model: Convertible) -> Place:
    if leaf in _LEAVES:
        return Place(f"{prefix}.{_LEAVES[leaf]}", np.asarray, np.asarray)
    weight = f"{prefix}.weight"
    if leaf == "double":
        return Place(weight, lambda x: x.transpose(0, 2, 3, 1), lambda x: x.transpose(0, 3, 1, 2))
    if name == "box_head/first/kernel" and isinstance(model, MaskRcnn):
        features = model.features  # theirs are [hidden, features, 7, 7], ours [7, 7, features, hidden], each flat
        return Place(
            weight,
            lambda x: x.reshape(-1, features, 7, 7).transpose(2, 3, 1, 0).reshape(-1, len(x)),
            lambda x: x.reshape(7, 7, features, -1).transpose(3, 2, 0, 1).reshape(x.shape[1], -1),
        )
    if name.endswith("conv/kernel"):
        return Place(weight, lambda x: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1))
    return Place(weight, np.transpose, np.transpose)
