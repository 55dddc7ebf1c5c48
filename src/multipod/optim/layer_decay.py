"""Rates that fall from layer to layer below the head, for fine-tuning."""

from collections.abc import Iterable
from typing import Any

import jax
import optax

from multipod.optim.tensors import name_of

EMBEDDINGS = frozenset({"tokens", "positions", "types", "embedding", "embedding_norm", "target_table", "stem"})
"""First parts of the names of tensors that lie below the first layer."""


def layer_factors(names: Iterable[str], decay: float) -> dict[str, float]:
    """What each tensor's step is multiplied by: decay^(L + 1 - l) for layer l of L, from its name.

    l is 1 for the first layer of a stack (`layers/0/`, `encoder/0/`), whose L is its own number of layers; 0 for
    `EMBEDDINGS`, below the longest stack; and L + 1 for what has no number, the heads, which keep the whole rate.
    """
    names = list(names)
    places = {name: _numbered(name) for name in names}
    lengths: dict[str, int] = {}
    for stack, layer in filter(None, places.values()):
        lengths[stack] = max(lengths.get(stack, 0), layer)
    longest = max(lengths.values(), default=0)

    def above(name: str) -> int:
        place = places[name]
        if place is not None:
            return lengths[place[0]] + 1 - place[1]
        return longest + 1 if name.split("/")[0] in EMBEDDINGS else 0

    return {name: decay ** above(name) for name in names}


def scale_by_layer(decay: float) -> optax.GradientTransformation:
    """Multiplies each tensor's change by `layer_factors`; a change is in proportion to its rate, weight decay included.

    Source: Clark et al., 2020, arXiv:2003.10555, appendix A; the exponents are those of Bao et al., 2021,
    arXiv:2106.08254, where the head has the whole rate and the last layer decay times that.
    """

    def scale(changes: Any, params: Any = None) -> Any:
        paths = jax.tree_util.tree_flatten_with_path(changes)[0]
        factors = layer_factors((name_of(path) for path, _ in paths), decay)
        return jax.tree.map_with_path(lambda path, change: change * factors[name_of(path)], changes)

    return optax.stateless(scale)


def _numbered(name: str) -> tuple[str, int] | None:
    """The stack that a tensor lies in and its layer there, from 1; by the first number in its name."""
    parts = name.split("/")
    place = next((k for k, part in enumerate(parts) if part.isdecimal()), None)
    return None if place is None else ("/".join(parts[:place]), int(parts[place]) + 1)
