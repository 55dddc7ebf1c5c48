"""Recipes small enough to run in every layout: a Transformer, a network for images of odd sizes, a detector."""

from dataclasses import dataclass, replace

import numpy as np

from multipod.data.detection.shapes import Shapes
from multipod.data.source import ArraySource
from multipod.layout.layout import Layout
from multipod.metrics.detection import Detection
from multipod.metrics.objective import Classification, TokenClassification
from multipod.metrics.sparse import SparseTokens
from multipod.models.pixels import Normalized
from multipod.models.resnet import SmallResNet
from multipod.models.ssd import Ssd
from multipod.models.st_moe import small_st_moe
from multipod.models.transformer import small_transformer
from multipod.nn.detection.default_boxes import DefaultBoxes
from multipod.nn.experts.routing import Routing
from multipod.optim.lamb import Lamb
from multipod.optim.rates import Cosine, WarmUp
from multipod.optim.sgd import Sgd
from multipod.recipe.recipe import Recipe

VOCAB = 64


@dataclass(frozen=True)
class Tokens:
    """Random sequences of 12 tokens, each to be told from the one before it."""

    def train(self):
        rows = np.random.default_rng(0).integers(1, VOCAB, (64, 13)).astype(np.int32)
        before, label = rows[:, :-1], rows[:, 1:]
        return ArraySource({"source": before, "target": before, "label": label, "weight": np.ones_like(label)})

    test = train


@dataclass(frozen=True)
class Pictures:
    """Noise of `height` x `width`, and classes."""

    height: int = 10
    width: int = 6

    def train(self):
        rng = np.random.default_rng(0)
        image = rng.normal(size=(48, self.height, self.width, 2)).astype(np.float32)
        return ArraySource({"image": image, "label": rng.integers(0, 4, 48).astype(np.int32)})

    test = train


def words(layout: Layout = Layout((1, 1)), **changes) -> Recipe:  # noqa: B008 (frozen)
    """One encoder and one decoder layer, under LAMB: norms of whole tensors must not see how they are split."""
    model = small_transformer(VOCAB, features=16, hidden=32, heads=4, encoder_layers=1, decoder_layers=1)
    objective = TokenClassification(label_smoothing=0.1)
    recipe = Recipe("words", model, Tokens(), objective, Lamb(WarmUp(Cosine(0.01), 0.1)), 16, 10, layout=layout)
    return replace(recipe, evaluation_batch=32, **changes)


def objects(layout: Layout = Layout((1, 1)), **changes) -> Recipe:  # noqa: B008 (frozen)
    """SSD, whose batch norm spans groups of 4 images, on drawn shapes."""
    boxes = DefaultBoxes(64, (8, 4), (8, 16), (16, 30, 60), ((2,), (2,)))
    model = Normalized(Ssd(18, classes=4, width=4, boxes=boxes, extra=((8, 16, 2),), batch_norm_tile=4))
    data = Shapes(train_images=48, test_images=8, pixels=64, least_size=0.2, crop=False)
    recipe = Recipe("objects", model, data, Detection(), Sgd(WarmUp(Cosine(0.02), 0.1)), 16, 10, layout=layout)
    return replace(recipe, evaluation_batch=8, **changes)


def moe() -> Recipe:
    """Layers of four experts in encoder and decoder."""
    model = small_st_moe(
        VOCAB, features=16, hidden=32, heads=4, kv=8, layers=1, every=1, group_rows=1, routing=Routing(4)
    )
    return replace(words(), name="moe", model=model, objective=SparseTokens())


def pictures(layout: Layout = Layout((1, 1)), height: int = 10, width: int = 6, **changes) -> Recipe:  # noqa: B008
    """Two stages of a residual network, the second of stride 2."""
    model = SmallResNet(channels=2, classes=4, width=4, blocks=(1, 1), activation="silu")
    data = Pictures(height, width)
    recipe = Recipe("pictures", model, data, Classification(), Sgd(WarmUp(Cosine(0.05), 0.1)), 16, 10, layout=layout)
    return replace(recipe, evaluation_batch=48, **changes)
