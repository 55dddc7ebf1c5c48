"""The smallest networks with what large batches are about: kernels, biases, embeddings and, if asked, batch norm."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import jax
from flax import nnx

from multipod.nn.images.batch_norm import Moving, Tile, TileBatchNorm
from multipod.nn.model import FlaxModel
from multipod.pytrees import Batch


@dataclass(frozen=True)
class Perceptron(FlaxModel):
    """Dense layers with ReLU between them, on flat images.

    Attributes:
      inputs: pixels of an image.
      hidden: features of each hidden layer.
      classes: number of classes.
      norm: batch norm before each ReLU.
      tile: of the batch norm.
      moving: what evaluation normalises with.
      tiles: with `moving="kept"`, the tiles of the mesh.
      momentum: of its moving moments.
    """

    inputs: int = 64
    hidden: tuple[int, ...] = (64, 64)
    classes: int = 10
    norm: bool = False
    tile: Tile = "all"
    moving: Moving = "pooled"
    tiles: int = 1
    momentum: float = 0.9

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh module."""
        return _Perceptron(self, rngs)

    def forward(self, module: nnx.Module, batch: Batch) -> jax.Array:
        """Logits [examples, classes] for batch["image"]."""
        return module(batch["image"])


@dataclass(frozen=True)
class Cloze(FlaxModel):
    """The smallest masked language model: one token from those around it, by a hidden layer on their embeddings.

    Attributes:
      vocab: kinds of tokens.
      places: tokens around it.
      features: of an embedding.
      hidden: features of the hidden layer.
    """

    vocab: int
    places: int = 8
    features: int = 16
    hidden: int = 64

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh module."""
        return _Cloze(self, rngs)

    def forward(self, module: nnx.Module, batch: Batch) -> jax.Array:
        """Logits [examples, vocab] for batch["around"], [examples, places]."""
        return module(batch["around"])


class _Cloze(nnx.Module):
    def __init__(self, spec: Cloze, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Linear(spec.vocab, spec.features, use_bias=False, rngs=rngs)
        self.hidden = nnx.Linear(spec.places * spec.features, spec.hidden, rngs=rngs)
        self.head = nnx.Linear(spec.hidden, spec.vocab, rngs=rngs)

    def __call__(self, around: jax.Array) -> jax.Array:
        # A product with ones and zeros: under `vmap` a lookup's gradient is a loop on CPU.
        x = self.embedding(jax.nn.one_hot(around, self.embedding.in_features))
        return self.head(nnx.relu(self.hidden(x.reshape(len(x), -1))))


class _Perceptron(nnx.Module):
    def __init__(self, spec: Perceptron, rngs: nnx.Rngs) -> None:
        sizes = [spec.inputs, *spec.hidden, spec.classes]
        init = nnx.initializers.he_normal()
        self.layers = nnx.List([nnx.Linear(a, b, kernel_init=init, rngs=rngs) for a, b in pairwise(sizes)])
        norm = partial(TileBatchNorm, tile=spec.tile, moving=spec.moving, tiles=spec.tiles, momentum=spec.momentum)
        self.norms = nnx.List([norm(size, rngs=rngs) for size in spec.hidden] if spec.norm else [])

    def __call__(self, image: jax.Array) -> jax.Array:
        x = image.reshape(len(image), -1)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number < len(self.layers) - 1:
                x = nnx.relu(self.norms[number](x) if self.norms else x)
        return x
