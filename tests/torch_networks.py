"""ResNet and EfficientNet as plain functions of PyTorch, on the same named weights; needs torch."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = Mapping[str, Tensor]


def resnet(weights: Weights, image: Tensor, *, blocks: tuple[int, ...], bottleneck: bool, train: bool) -> Tensor:
    """Logits [n, classes] of ResNet v1.5, image [n, channels, h, w]."""
    layer = partial(conv_norm, weights, train=train, epsilon=1e-5)
    x = F.relu(layer("stem", image, 2, pad_evenly(3)))
    x = F.max_pool2d(x, 3, 2, 1)
    number = 0
    for stage, count in enumerate(blocks):
        for place in range(count):
            stride = 2 if stage and not place else 1
            name = f"blocks/{number}"
            if bottleneck:
                y = F.relu(layer(f"{name}/body/0", x, 1, pad_evenly(0)))
                y = F.relu(layer(f"{name}/body/1", y, stride, pad_evenly(1)))
                y = layer(f"{name}/body/2", y, 1, pad_evenly(0))
            else:
                y = F.relu(layer(f"{name}/body/0", x, stride, pad_evenly(1)))
                y = layer(f"{name}/body/1", y, 1, pad_evenly(1))
            if f"{name}/shortcut/conv/kernel" in weights:
                x = layer(f"{name}/shortcut", x, stride, pad_evenly(0))
            x = F.relu(x + y)
            number += 1
    return F.linear(x.mean((2, 3)), weights["head/kernel"].T, weights["head/bias"])


def efficientnet(weights: Weights, image: Tensor, *, shapes: list[tuple[int, int]], train: bool) -> Tensor:
    """Logits [n, classes] without dropout; `shapes` has the window and the stride of each block's depthwise part."""
    layer = partial(conv_norm, weights, train=train, epsilon=1e-3)
    x = F.silu(layer("stem", image, 2, pad_as_tensorflow(3, 2)))
    for number, (window, stride) in enumerate(shapes):
        name, y = f"blocks/{number}", x
        if f"{name}/expand/conv/kernel" in weights:
            y = F.silu(layer(f"{name}/expand", y, 1, pad_evenly(0)))
        y = layer(f"{name}/depthwise", y, stride, pad_as_tensorflow(window, stride), groups=y.shape[1])
        y = F.silu(y)
        squeezed = dense(weights, f"{name}/squeeze_excite/reduce", y.mean((2, 3)))
        excited = dense(weights, f"{name}/squeeze_excite/expand", F.silu(squeezed))
        y = layer(f"{name}/project", y * torch.sigmoid(excited)[:, :, None, None], 1, pad_evenly(0))
        x = x + y if x.shape == y.shape else y
    x = F.silu(layer("last", x, 1, pad_evenly(0)))
    return dense(weights, "head", x.mean((2, 3)))


def conv_norm(
    weights: Weights,
    name: str,
    x: Tensor,
    stride: int,
    pad: Callable[[Tensor], Tensor],
    *,
    groups: int = 1,
    train: bool,
    epsilon: float,
) -> Tensor:
    kernel = weights[f"{name}/conv/kernel"].permute(3, 2, 0, 1)
    y = F.conv2d(pad(x), kernel, stride=stride, groups=groups)
    mean, var, scale, bias = (weights[f"{name}/norm/{part}"] for part in ("mean", "var", "scale", "bias"))
    return F.batch_norm(y, mean.clone(), var.clone(), scale, bias, training=train, eps=epsilon)


def dense(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}/kernel"].T, weights[f"{name}/bias"])


def pad_evenly(pixels: int) -> Callable[[Tensor], Tensor]:
    return lambda x: F.pad(x, [pixels] * 4)


def pad_as_tensorflow(window: int, stride: int) -> Callable[[Tensor], Tensor]:
    def pad(x: Tensor) -> Tensor:
        pads = []
        for size in reversed(x.shape[2:]):  # torch wants the last dim first
            total = max((-(-size // stride) - 1) * stride + window - size, 0)
            pads += [total // 2, total - total // 2]
        return F.pad(x, pads)

    return pad
