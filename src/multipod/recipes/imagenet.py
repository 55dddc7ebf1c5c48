"""ImageNet, from wherever its files are: ResNet-50 and EfficientNet B0 to B7 with the optimizers of published runs.

Another batch takes another row of the published runs (`multipod.optim.presets`): `--set batch=65536` changes rate,
warm-up and length.

    multipod train resnet50 --set data.train_files=imagenet/train --set data.test_files=imagenet/val

`train` and `val` hold a folder for each of the 1,000 classes; or name TFRecords, as `imagenet/train-*`, whose labels
begin with 1 (`--set data.first_label=1`), WebDataset archives, as `imagenet-train-{0000..1023}.tar`, or ArrayRecords
that `multipod data convert` made of any of them.
"""

from dataclasses import replace

from multipod.data.images.files import ImageFiles
from multipod.layout.layout import Layout
from multipod.metrics.objective import Classification
from multipod.models.efficientnet import SCALINGS, efficientnet
from multipod.models.pixels import Normalized
from multipod.models.resnet import ResNet
from multipod.nn.model import Model
from multipod.optim.ema import Ema
from multipod.optim.presets import IMAGENET_EXAMPLES, find_preset
from multipod.recipe.recipe import Recipe

EPOCHS_BETWEEN_EVALUATIONS = 4
"""As in MLPerf."""


def resnet50() -> Recipe:
    """ResNet-50 on ImageNet, batch 8,192, LARS, 56 epochs (MLPerf v0.7). Needs data.train_files and data.test_files."""
    model = Normalized(ResNet(50, batch_norm_tile=64, dtype="bfloat16"), dtype="bfloat16")
    return _recipe("resnet50", model, ImageFiles(), "resnet50-lars", 8192)


def efficientnet_b0() -> Recipe:
    """EfficientNet-B0 on ImageNet, batch 4,096, RMSProp, 350 epochs. Needs data.train_files and data.test_files.

    The optimizer is the family's own, as arXiv:2011.00071 ran it for B2 and B5, and the moving average of the weights
    is judged. Stochastic depth, dropout and AutoAugment are those of the family's code.
    """
    return _efficientnet("b0")


def efficientnet_b1() -> Recipe:
    """EfficientNet-B1 on ImageNet, images of 240 pixels; all else as for B0."""
    return _efficientnet("b1")


def efficientnet_b2() -> Recipe:
    """EfficientNet-B2 on ImageNet, images of 260 pixels; all else as for B0."""
    return _efficientnet("b2")


def efficientnet_b3() -> Recipe:
    """EfficientNet-B3 on ImageNet, images of 300 pixels; all else as for B0."""
    return _efficientnet("b3")


def efficientnet_b4() -> Recipe:
    """EfficientNet-B4 on ImageNet, images of 380 pixels; all else as for B0."""
    return _efficientnet("b4")


def efficientnet_b5() -> Recipe:
    """EfficientNet-B5 on ImageNet, images of 456 pixels; all else as for B0."""
    return _efficientnet("b5")


def efficientnet_b6() -> Recipe:
    """EfficientNet-B6 on ImageNet, images of 528 pixels; all else as for B0."""
    return _efficientnet("b6")


def efficientnet_b7() -> Recipe:
    """EfficientNet-B7 on ImageNet, images of 600 pixels; all else as for B0."""
    return _efficientnet("b7")


def _efficientnet(name: str) -> Recipe:
    model = Normalized(efficientnet(name, dtype="bfloat16"), dtype="bfloat16")
    data = ImageFiles(pixels=SCALINGS[name].pixels, augment="autoaugment")
    recipe = _recipe(f"efficientnet-{name}", model, data, "efficientnet-rmsprop", 4096)
    return replace(recipe, ema=Ema(0.9999))


def _recipe(name: str, model: Model, data: ImageFiles, preset: str, batch: int) -> Recipe:
    known = find_preset(preset).at(batch)
    every = EPOCHS_BETWEEN_EVALUATIONS * IMAGENET_EXAMPLES // batch
    return Recipe(
        name=name,
        model=model,
        data=data,
        objective=Classification(label_smoothing=0.1, top=(5,)),
        optimizer=known.optimizer,
        layout=Layout(),
        batch=batch,
        updates=known.updates,
        evaluate_every=every,
        evaluation_batch=batch,
        checkpoint_every=every,
        preset=preset,
    )
