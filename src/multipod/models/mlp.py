"""Dense layers on flat images: the smallest model that a pipeline can cut."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.nn.initializers import variance_scaling

from multipod.errors import RecipeError
from multipod.nn.dense import Dense
from multipod.nn.layered import ModelLayer, names_under
from multipod.nn.model import FlaxModel
from multipod.pytrees import Batch


@dataclass(frozen=True)
class Mlp(FlaxModel):
    """A first layer, residual layers x + relu(dense(x)), and a last one, on batch["image"], flattened.

    Attributes:
      inputs: numbers of an image.
      features: between layers.
      layers: residual layers.
      classes: number of classes.
    """

    inputs: int = 64
    features: int = 64
    layers: int = 6
    classes: int = 10

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("inputs", "features", "classes")}
        wrong = [f"{name}={n}" for name, n in sizes.items() if n < 1] + [f"layers={self.layers}"] * (self.layers < 0)
        if wrong:
            raise RecipeError(f"Mlp: {', '.join(wrong)}. Sizes are 1 or more, layers 0 or more.")

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh module."""
        return _Mlp(self, rngs)

    def forward(self, module: Any, batch: Batch) -> jax.Array:
        """Logits [examples, classes]."""
        x = module.enter(batch)
        for n in range(self.layers):
            x = module.step(n, x)
        return module.last(x)

    def cut_points(self) -> tuple[ModelLayer, ...]:
        """The first layer, each residual one, the last."""

        def step(n: int) -> ModelLayer:
            names = names_under(self, f"layers/{n}/")
            return ModelLayer(f"layer {n}", names, lambda module, x, batch: module.step(n, x), 1.0 * self.features**2)

        enter, last = names_under(self, "first/"), names_under(self, "last/")
        return (
            ModelLayer("first", enter, lambda module, x, batch: module.enter(batch), 1.0 * self.inputs * self.features),
            *map(step, range(self.layers)),
            ModelLayer("last", last, lambda module, x, batch: module.last(x), 1.0 * self.features * self.classes),
        )


class _Mlp(nnx.Module):
    def __init__(self, spec: Mlp, rngs: nnx.Rngs) -> None:
        self.first = Dense({"pixels": spec.inputs}, {"embed": spec.features}, rngs=rngs)
        # Together the layers add about as much as comes in.
        init = variance_scaling(1 / max(spec.layers, 1), "fan_in", "truncated_normal")
        sizes = {"embed": spec.features}, {"embed_out": spec.features}
        self.layers = nnx.List([Dense(*sizes, init=init, rngs=rngs) for _ in range(spec.layers)])
        self.last = Dense({"embed": spec.features}, {"classes": spec.classes}, rngs=rngs)

    def enter(self, batch: Batch) -> jax.Array:
        """What the first residual layer reads."""
        image = batch["image"]
        return self.first(image.reshape(len(image), -1))

    def step(self, n: int, x: jax.Array) -> jax.Array:
        """x after residual layer n."""
        return x + jax.nn.relu(self.layers[n](x))
