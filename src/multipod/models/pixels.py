"""Models of images that come as bytes: cast and normalised on the device, so that a quarter of the bytes is sent."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from multipod.errors import RecipeError
from multipod.nn.dims import Dims, dims_of, input_dims
from multipod.nn.images.conv_norm import Dtype
from multipod.nn.model import HasClasses, Model
from multipod.pytrees import Batch, Outputs, Params, Statistics

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Of ImageNet's training images, red, green and blue, in shares of 255."""
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Normalized:
    """`model` on batch["image"] / 255, less `mean`, over `std`; [examples, height, width, channels], any dtype.

    XLA fuses the three with what reads them.

    Attributes:
      model: any model of images.
      mean: one number for each channel.
      std: likewise.
      dtype: of the normalised image. The arithmetic is float32.

    Raises:
      RecipeError: not as many numbers, or, when called, images with other channels.
    """

    model: Model
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not all(value > 0 for value in self.std):
            raise RecipeError(
                f"Normalized: mean={self.mean} and std={self.std} need as many numbers, std above 0. Change the recipe."
            )

    @property
    def classes(self) -> int:
        """The classes of the model; 0 if it does not say."""
        return self.model.classes if isinstance(self.model, HasClasses) else 0

    @property
    def input_dims(self) -> dict[str, Dims]:
        """The input dims of the model."""
        return input_dims(self.model)

    def dims(self) -> dict[str, Dims]:
        """The names of the dims of the model's parameters."""
        return dims_of(self.model)

    def init(self, key: jax.Array) -> tuple[Params, Statistics]:
        """Fresh parameters and statistics of the model."""
        return self.model.init(key)

    def apply(
        self, params: Params, statistics: Statistics, batch: Batch, *, train: bool, key: jax.Array
    ) -> tuple[Outputs, Statistics]:
        """The model's outputs for the normalised images."""
        image = batch["image"]
        if image.shape[-1] != len(self.mean):
            raise RecipeError(
                f"Normalized: images of shape {image.shape} have {image.shape[-1]} channels, and there are "
                f"{len(self.mean)} means. Give as many."
            )
        scale = 1 / (255 * jnp.asarray(self.std, jnp.float32))
        shift = -jnp.asarray(self.mean, jnp.float32) / jnp.asarray(self.std, jnp.float32)
        normal = (image.astype(jnp.float32) * scale + shift).astype(self.dtype)
        return self.model.apply(params, statistics, batch | {"image": normal}, train=train, key=key)


def behind_pixels(model: Model) -> Model:
    """The model that has the weights: what `Normalized` stands before, or the model itself."""
    while isinstance(model, Normalized):
        model = model.model
    return model
