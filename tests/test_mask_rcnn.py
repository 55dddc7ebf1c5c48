"""Mask R-CNN against torchvision's with the same random weights: detections, losses and gradients."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multipod.errors import WeightsError
from multipod.interop.weights import convert
from multipod.interop.weights.families import family_of
from multipod.models.mask_rcnn import LOSSES, MaskRcnn
from multipod.models.resnet import ResNet
from multipod.models.ssd import Ssd

NARROW = MaskRcnn(
    classes=7, features=16, hidden=32, proposals=(60, 60), each=(100, 100), rpn_sample=(10**6, 10**5),
    sample=(70, 40), detections=20, least_score=0.1,
)  # fmt: skip


def from_torchvision(model, state, params, statistics):
    return convert.to_ours(family_of(model, library="torchvision"), model, state, params, statistics)


def to_torchvision(model, params, statistics):
    return convert.to_theirs(family_of(model, library="torchvision"), model, params, statistics)


def reference():
    from torchvision_reference import torch, torchvision

    return torch, torchvision


@pytest.mark.slow
def test_parameters_are_counted_as_published():
    shapes = {classes: jax.eval_shape(MaskRcnn(classes).init, jax.random.key(0))[0] for classes in (81, 91)}

    def count(classes, *names):
        params = shapes[classes]
        return sum(x.size for name, x in params.items() if name.startswith(names))

    assert (count(91, ""), count(81, "")) == (44_401_393, 44_347_573)
    assert (count(91, "stem", "blocks"), count(91, "fpn"), count(91, "rpn")) == (23_454_912, 3_344_384, 593_935)
    assert (count(91, "box_head"), count(91, "mask_head")) == (14_362_055, 2_646_107)


@cache
def pair():
    """torchvision's model, narrow and with random weights, and ours with the same."""
    torch, _ = reference()
    from torchvision.models import resnet50
    from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.mask_rcnn import MaskRCNN, MaskRCNNHeads, MaskRCNNPredictor
    from torchvision.models.detection.rpn import RPNHead
    from torchvision.ops import FeaturePyramidNetwork, FrozenBatchNorm2d
    from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

    torch.manual_seed(1)
    backbone = _resnet_fpn_extractor(resnet50(norm_layer=FrozenBatchNorm2d), 3)
    wide, spec = NARROW.features, NARROW
    backbone.fpn = FeaturePyramidNetwork([256, 512, 1024, 2048], wide, LastLevelMaxPool())
    backbone.out_channels = wide
    theirs = MaskRCNN(
        backbone,
        rpn_head=RPNHead(wide, 3),
        box_head=TwoMLPHead(wide * 49, spec.hidden),
        box_predictor=FastRCNNPredictor(spec.hidden, spec.classes),
        mask_head=MaskRCNNHeads(wide, (wide,) * 4, 1),
        mask_predictor=MaskRCNNPredictor(wide, wide, spec.classes),
        rpn_pre_nms_top_n_train=100, rpn_pre_nms_top_n_test=100, rpn_post_nms_top_n_train=60,
        rpn_post_nms_top_n_test=60, rpn_batch_size_per_image=10**6, rpn_positive_fraction=0.1,
        box_score_thresh=spec.least_score, box_detections_per_img=spec.detections, box_batch_size_per_image=160,
        box_positive_fraction=0.25,
    )  # fmt: skip
    for name, tensor in theirs.state_dict().items():
        if "bn" in name or "downsample.1" in name:
            tensor.uniform_(*((0.5, 1.0) if "var" in name or "weight" in name else (-0.1, 0.1)))
        elif name.endswith("bias"):
            tensor.normal_(0, 0.05)
        elif "rpn.head" in name or "box_predictor" in name:
            tensor.mul_(8 if "bbox" not in name else 3)
    theirs.roi_heads.box_predictor.cls_score.weight.data.mul_(40)
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    shapes = jax.eval_shape(spec.init, jax.random.key(0))
    return theirs, state, from_torchvision(spec, state, *shapes)


def some_batch():
    rng = np.random.default_rng(3)
    truth = np.array([[10, 12, 60, 70], [50, 20, 120, 50], [5, 60, 90, 126], [0, 0, 0, 0]], np.float32)
    return {
        "image": rng.normal(size=(1, 128, 128, 3)).astype(np.float32),
        "box": truth[None],
        "label": np.array([[2, 6, 1, 0]], np.int32),
        "object_mask": (rng.uniform(size=(1, 4, 14, 14)) < 0.5).repeat(8, 2).repeat(8, 3),
    }


@pytest.mark.slow
def test_state_dicts_come_and_go():
    torch, _ = reference()

    theirs, state, (params, statistics) = pair()
    back = to_torchvision(NARROW, params, statistics)
    assert set(back) == set(state)
    for name, tensor in state.items():
        np.testing.assert_array_equal(back[name], tensor, err_msg=name)
    theirs.load_state_dict({name: torch.tensor(tensor) for name, tensor in back.items()})
    with pytest.raises(WeightsError, match=r"1 tensors .*\n  rpn.head.cls_logits.bias: missing"):
        from_torchvision(
            NARROW, {k: v for k, v in state.items() if k != "rpn.head.cls_logits.bias"}, params, statistics
        )
    with pytest.raises(WeightsError, match="and the model needs"):
        from_torchvision(MaskRcnn(8, features=16, hidden=32), state, *jax.eval_shape(
            MaskRcnn(8, features=16, hidden=32).init, jax.random.key(0)))  # fmt: skip


@pytest.mark.parametrize("model", [ResNet(34), Ssd()])
def test_a_resnets_state_dict_fits_ours(model):
    torch, _ = reference()
    from torchvision.models import resnet34

    theirs = resnet34()
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    back = to_torchvision(
        model, *_filled(from_torchvision(model, state, *jax.eval_shape(model.init, jax.random.key(0))))
    )
    assert set(state) - set(back) == {k for k in state if isinstance(model, Ssd) and k.startswith(("layer4", "fc"))}
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, state[name])
    theirs.load_state_dict({k: torch.tensor(v) for k, v in back.items()}, strict=isinstance(model, ResNet))


def _filled(trees):
    return jax.tree.map(lambda x: np.zeros(x.shape) if isinstance(x, jax.ShapeDtypeStruct) else x, trees)


@pytest.mark.slow
def test_detections_are_torchvisions():
    torch, _ = reference()
    from torchvision.models.detection.image_list import ImageList

    theirs, _, weights = pair()
    batch = some_batch()
    images = ImageList(torch.tensor(batch["image"]).permute(0, 3, 1, 2), [(128, 120)])
    with torch.no_grad():
        theirs.eval()
        features = theirs.backbone(images.tensors)
        proposals, _ = theirs.rpn(images, features)
        (expected,), _ = theirs.roi_heads(features, proposals, images.image_sizes)
    apply = jax.jit(partial(NARROW.apply, train=False, key=jax.random.key(0)))
    found, _ = apply(*weights, {"image": batch["image"], "extent": np.array([[128, 120]], np.int32)})
    n = len(expected["scores"])
    assert n > 5
    assert found["kept"].sum() == n
    np.testing.assert_array_equal(found["label"][0, :n], expected["labels"].numpy())
    for ours, name in (("box", "boxes"), ("score", "scores")):
        np.testing.assert_allclose(found[ours][0, :n], expected[name].numpy(), rtol=1e-4, atol=1e-4, err_msg=name)
    np.testing.assert_allclose(found["mask"][0, :n], expected["masks"][:, 0].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_losses_and_their_gradients_are_torchvisions():
    """All but the mask's, whose targets torchvision samples otherwise. The samples are large enough to hold all."""
    torch, _ = reference()
    from torchvision.models.detection.image_list import ImageList

    theirs, _, (params, statistics) = pair()
    batch = some_batch()
    images = ImageList(torch.tensor(batch["image"]).permute(0, 3, 1, 2), [(128, 128)])
    target = {"boxes": batch["box"][0, :3], "labels": batch["label"][0, :3].astype(np.int64)}
    targets = [{name: torch.tensor(value) for name, value in target.items()}]
    theirs.train()
    theirs.zero_grad()
    pool, theirs.roi_heads.mask_roi_pool = theirs.roi_heads.mask_roi_pool, None  # slow, and not compared
    features = theirs.backbone(images.tensors)
    proposals, rpn = theirs.rpn(images, features, targets)
    _, second = theirs.roi_heads(features, proposals, images.image_sizes, targets)
    theirs.roi_heads.mask_roi_pool = pool
    expected = [rpn["loss_objectness"], rpn["loss_rpn_box_reg"], second["loss_classifier"], second["loss_box_reg"]]
    sum(expected).backward()

    @jax.jit
    def losses(params):
        outputs, new = NARROW.apply(params, statistics, batch, train=True, key=jax.random.key(0))
        return sum(outputs[name].sum() for name in LOSSES[:4]), (outputs, new)

    (_, (ours, new)), gradients = jax.jit(jax.value_and_grad(losses, has_aux=True))(params)
    for name, value in zip(LOSSES[:4], expected, strict=True):
        np.testing.assert_allclose(ours[name][0], value.item(), rtol=1e-4, err_msg=name)
    assert jnp.isfinite(ours["mask_loss"]).all()
    np.testing.assert_allclose(ours["loss"], sum(ours[name] for name in LOSSES), rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, new, statistics)
    back = to_torchvision(NARROW, gradients, statistics)
    for name, tensor in theirs.named_parameters():
        if tensor.grad is None:
            assert not back[name].any() or "mask" in name, name
        else:
            size = tensor.grad.abs().max().item()
            np.testing.assert_allclose(back[name], tensor.grad.numpy(), rtol=1e-3, atol=2e-4 * size, err_msg=name)
