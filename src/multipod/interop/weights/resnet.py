"""ResNets of torchvision and timm, which have the same names, and where they are parts: SSD, Mask R-CNN."""

import numpy as np

from multipod.interop.weights.forms import FlatImage, Transposed
from multipod.interop.weights.places import CONV, LINEAR, NORM, Family, NamedLayer, Place, Tensors, places_of
from multipod.models.mask_rcnn import MaskRcnn
from multipod.models.resnet import BLOCKS, ResNet
from multipod.models.ssd import Ssd

COUNTERS = r".*\.num_batches_tracked"
"""How many batches a norm has seen: of no use where the momentum is fixed."""


def counters(tensors: Tensors) -> dict[str, np.ndarray]:
    """PyTorch's counters of its batch norms, 0, for the norms among `tensors`."""
    norms = (name.removesuffix("running_var") for name in tensors if name.endswith(".running_var"))
    return {f"{norm}num_batches_tracked": np.zeros((), np.int64) for norm in norms}


def resnet_layers(depth: int, prefix: str = "") -> list[NamedLayer]:
    """The stem and all blocks."""
    layers = [*_conv_norm("stem", f"{prefix}conv1", f"{prefix}bn1")]
    numbers = [(stage, place) for stage, count in enumerate(BLOCKS[depth], 1) for place in range(count)]
    for number, (stage, place) in enumerate(numbers):
        ours, theirs = f"blocks/{number}", f"{prefix}layer{stage}.{place}"
        for k in range(3 if depth >= 50 else 2):
            layers += _conv_norm(f"{ours}/body/{k}", f"{theirs}.conv{k + 1}", f"{theirs}.bn{k + 1}")
        layers += _conv_norm(f"{ours}/shortcut", f"{theirs}.downsample.0", f"{theirs}.downsample.1")
    return layers


def _conv_norm(ours: str, conv: str, norm: str) -> list[NamedLayer]:
    return [NamedLayer(f"{ours}/conv", conv, CONV), NamedLayer(f"{ours}/norm", norm, NORM)]


def _of_resnet(model: ResNet) -> dict[str, Place]:
    return places_of([*resnet_layers(model.depth), NamedLayer("head", "fc", LINEAR)])


def _of_ssd(model: Ssd) -> dict[str, Place]:
    return places_of(resnet_layers(model.depth))


def _of_mask_rcnn(model: MaskRcnn) -> dict[str, Place]:
    heads = [
        ("rpn/conv/conv", "rpn.head.conv.0.0", CONV),
        ("rpn/objectness/conv", "rpn.head.cls_logits", CONV),
        ("rpn/offsets/conv", "rpn.head.bbox_pred", CONV),
        ("box_head/second", "roi_heads.box_head.fc7", LINEAR),
        ("box_head/logits", "roi_heads.box_predictor.cls_score", LINEAR),
        ("box_head/offsets", "roi_heads.box_predictor.bbox_pred", LINEAR),
        ("mask_head/logits/conv", "roi_heads.mask_predictor.mask_fcn_logits", CONV),
        *((f"mask_head/convs/{k}/conv", f"roi_heads.mask_head.{k}.0", CONV) for k in range(4)),
        *((f"fpn/lateral/{k}/conv", f"backbone.fpn.inner_blocks.{k}.0", CONV) for k in range(4)),
        *((f"fpn/output/{k}/conv", f"backbone.fpn.layer_blocks.{k}.0", CONV) for k in range(4)),
    ]
    first, double = "roi_heads.box_head.fc6", "roi_heads.mask_predictor.conv5_mask"
    alone = {
        "box_head/first/kernel": Place((f"{first}.weight",), FlatImage(model.features, 7)),
        "box_head/first/bias": Place((f"{first}.bias",)),
        "mask_head/double": Place((f"{double}.weight",), Transposed((0, 2, 3, 1))),
        "mask_head/double_bias": Place((f"{double}.bias",)),
    }
    body = resnet_layers(model.depth, "backbone.body.")
    return places_of([*body, *(NamedLayer(*head) for head in heads)]) | alone


TORCHVISION = (
    Family("torchvision", (ResNet,), _of_resnet, ignored=(COUNTERS,), aside=counters),
    Family("torchvision", (Ssd,), _of_ssd, ignored=(COUNTERS,), part=True, aside=counters),
    Family("torchvision", (MaskRcnn,), _of_mask_rcnn, ignored=(COUNTERS,)),
)
"""Of an `Ssd` that is the stem and three stages of a ResNet; the other tensors of both stay out."""

TIMM = (Family("timm", (ResNet,), _of_resnet, ignored=(COUNTERS,), aside=counters),)
"""Its `resnet18` to `resnet152`, not those with other stems (`resnet50d`, for example)."""
