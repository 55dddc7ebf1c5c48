"""What the image networks have in common: checks of their fields and of the images given to them."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from multipod.errors import RecipeError
from multipod.pytrees import Batch

IMAGE_DIMS = {"image": (None, "height", "width", None)}
"""The names of the dims of batch["image"], [examples, height, width, channels]: what a layout may split."""


def check_fields(
    model: Any, *, choices: dict[str, Collection[Any]], least: dict[str, float], rates: Collection[str] = ()
) -> None:
    """Refuses fields that are not among their choices, below their least, or no rates in [0, 1): all in one message.

    Raises:
      RecipeError: names each such field.
    """
    value = lambda name: getattr(model, name)  # noqa: E731
    wrong = [
        f"{name}={value(name)!r} (one of {', '.join(map(str, known))})"
        for name, known in choices.items()
        if value(name) not in known
    ]
    wrong += [f"{name}={value(name)} (at least {low})" for name, low in least.items() if not value(name) >= low]
    wrong += [f"{name}={value(name)} (at least 0, below 1)" for name in rates if not 0 <= value(name) < 1]
    if wrong:
        raise RecipeError(f"{type(model).__name__}: {', '.join(wrong)}. Change it in the recipe or with --set.")


def check_image(model: Any, image: jax.Array) -> jax.Array:
    """`image`, if it is [examples, height, width, model.channels].

    Raises:
      RecipeError: it is not.
    """
    name = type(model).__name__
    if image.ndim != 4:
        raise RecipeError(
            f"{name}: images of shape {image.shape} are not [examples, height, width, channels]. "
            "Add the dim that is missing in the data."
        )
    if image.shape[-1] != model.channels:
        raise RecipeError(
            f"{name}: images of shape {image.shape} have {image.shape[-1]} channels, and the model {model.channels}. "
            f"Set model.channels={image.shape[-1]}."
        )
    return image


def without_crowds(batch: Batch) -> jax.Array:
    """batch["label"], int [examples, truths], with 0, which is none, where batch["crowd"] is true."""
    return jnp.where(batch["crowd"], 0, batch["label"]) if "crowd" in batch else batch["label"]
