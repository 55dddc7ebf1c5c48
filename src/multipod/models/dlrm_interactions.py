"""How a DLRM brings its vectors together before the top MLP: by their dot products, or by a low-rank cross network.

An interaction takes vectors [examples, n, features], of which the first is the bottom MLP's, and gives what the top MLP
takes, [examples, `outputs(n, features)`]. What it learns are parameters of the model, flat and named `cross/...`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from multipod.pytrees import Params

Form = Literal["gather", "masked"]


@dataclass(frozen=True)
class DotInteraction:
    """The first vector, and the dot products of all pairs of vectors; without parameters.

    Attributes:
      form: "gather" takes the pairs below the diagonal; "masked" zeroes the others and gives all products to a first
        top layer with rows for them, which suits chips with matrix units. Their values are equal.

    Source: DLRM, arXiv:1906.00091; the masked form: arXiv:2011.03641.
    """

    form: Form = "gather"

    def wrong(self) -> list[str]:
        """All that is wrong with it."""
        return []

    def outputs(self, vectors: int, features: int) -> int:
        """Numbers of an example that the top MLP takes."""
        return features + (vectors**2 if self.form == "masked" else vectors * (vectors - 1) // 2)

    def fan_in(self, vectors: int, features: int) -> int:
        """What the first top layer's initial values go by: those of the outputs that are not always zero."""
        return DotInteraction().outputs(vectors, features)

    def shapes(self, vectors: int, features: int) -> dict[str, tuple[int, ...]]:
        """The shapes of its parameters."""
        return {}

    def init(self, normal: Callable[[tuple[int, ...]], jax.Array], vectors: int, features: int) -> dict[str, jax.Array]:
        """The first parameters, made of `normal(shape)`."""
        return {}

    def __call__(self, params: Params, vectors: jax.Array) -> jax.Array:
        """What the top MLP takes."""
        return jnp.concatenate([vectors[:, 0], interact(vectors, self.form)], 1)


@dataclass(frozen=True)
class CrossInteraction:
    """A low-rank cross network over all vectors one behind the other, x_0 of `n * features` numbers.

        x_{l+1} = x_0 * (U_l (V_l x_l) + b_l) + x_l        * is element by element

    `cross/0/v` is V_0 transposed, [width, rank], `cross/0/u` is U_0 transposed, [rank, width], `cross/0/bias` is b_0.
    The last x goes to the top MLP, with no copy of the first vector beside it. Kernels begin normal with deviation
    sqrt(2 / (in + out)), biases at 0.

    Attributes:
      layers: of the network; MLPerf's DLRM-DCNv2 has 3.
      rank: of every layer; MLPerf's is 512.

    Source: Wang et al., 2020, arXiv:2008.13535, the low-rank cross network without experts.
    """

    layers: int = 3
    rank: int = 512

    def wrong(self) -> list[str]:
        """All that is wrong with it."""
        fields = {"layers": self.layers, "rank": self.rank}
        return [f"interaction.{name}={value} (at least 1)" for name, value in fields.items() if value < 1]

    def outputs(self, vectors: int, features: int) -> int:
        """Numbers of an example that the top MLP takes."""
        return vectors * features

    def fan_in(self, vectors: int, features: int) -> int:
        """What the first top layer's initial values go by."""
        return self.outputs(vectors, features)

    def shapes(self, vectors: int, features: int) -> dict[str, tuple[int, ...]]:
        """The shapes of its parameters."""
        width = self.outputs(vectors, features)
        each = {"v": (width, self.rank), "u": (self.rank, width), "bias": (width,)}
        return {f"cross/{layer}/{name}": shape for layer in range(self.layers) for name, shape in each.items()}

    def init(self, normal: Callable[[tuple[int, ...]], jax.Array], vectors: int, features: int) -> dict[str, jax.Array]:
        """The first parameters, made of `normal(shape)`."""
        deviation = (2 / (self.outputs(vectors, features) + self.rank)) ** 0.5
        return {
            name: jnp.zeros(shape) if name.endswith("bias") else deviation * normal(shape)
            for name, shape in self.shapes(vectors, features).items()
        }

    def __call__(self, params: Params, vectors: jax.Array) -> jax.Array:
        """What the top MLP takes."""
        first = x = vectors.reshape(len(vectors), -1)
        for layer in range(self.layers):
            v, u, bias = (params[f"cross/{layer}/{name}"] for name in ("v", "u", "bias"))
            x = first * (x @ v @ u + bias) + x
        return x


Interaction = DotInteraction | CrossInteraction
"""What a DLRM has between its tables and its top MLP."""

INTERACTIONS: dict[str, type[Interaction]] = {"dot": DotInteraction, "cross": CrossInteraction}
"""Every interaction by the name that `--set model.interaction=` takes."""


def interact(vectors: jax.Array, form: Form) -> jax.Array:
    """The dot products x_i . x_j of vectors [examples, n, features], i > j.

    "gather": [examples, n (n - 1) / 2], row by row: (1, 0), (2, 0), (2, 1), ... "masked": the whole square, [examples,
    n^2], with zeros on and above the diagonal; entry n i + j is x_i . x_j.
    """
    n = vectors.shape[1]
    products = jnp.einsum("eif,ejf->eij", vectors, vectors)
    below = np.tril(np.ones((n, n), bool), -1)
    if form == "masked":
        return jnp.where(below, products, 0).reshape(len(vectors), n * n)
    return products.reshape(len(vectors), n * n)[:, np.flatnonzero(below)]


def masked_kernel_of(kernel: jax.Array, features: int, vectors: int) -> jax.Array:
    """The first top kernel of the masked form from that of the gather form: the same logits, bit for bit in exact sums.

    Rows that only ever meet zeros are zero.
    """
    below = np.flatnonzero(np.tril(np.ones((vectors, vectors), bool), -1))
    square = jnp.zeros((vectors**2, kernel.shape[1]), kernel.dtype).at[below].set(kernel[features:])
    return jnp.concatenate([kernel[:features], square])
