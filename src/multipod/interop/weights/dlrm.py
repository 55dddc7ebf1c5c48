"""DLRM of its authors (facebookresearch/dlrm): layers in sequences, a table for each field."""

import numpy as np

from multipod.errors import WeightsError
from multipod.interop.weights.forms import SAME, SomeRows
from multipod.interop.weights.places import LINEAR, Family, NamedLayer, Place, places_of
from multipod.models.dlrm import Dlrm
from multipod.models.dlrm_interactions import DotInteraction


def _of_dlrm(model: Dlrm) -> dict[str, Place]:
    """Their sequences count the activations between layers too. Their tables are ours one below the other.

    Raises:
      WeightsError: a model with a cross network.
    """
    if not isinstance(model.interaction, DotInteraction):
        raise WeightsError(
            "dlrm's models have dot products between tables and top, and this one has a cross network, which they have "
            "no tensors for. Convert a model of interaction=dot, or write a family (docs/weights.md)."
        )
    counts = {"bottom": len(model.bottom) + 1, "top": len(model.top) + 1}
    sequences = {"bottom": "bot_l", "top": "top_l"}
    layers = [
        NamedLayer(f"{part}/{k}", f"{sequences[part]}.{2 * k}", LINEAR) for part in counts for k in range(counts[part])
    ]
    found = places_of(layers)
    if model.interaction.form == "masked":
        found["top/0/kernel"] = Place(found["top/0/kernel"].names, SomeRows(_rows_of_pairs(model)))
    for name, array in model.embeddings.arrays.items():
        names = tuple(f"emb_l.{number}.weight" for number in array.numbers)
        found[name] = Place(names, SAME, slices=tuple(zip(array.begins, array.sizes, strict=True)))
    return found


def _rows_of_pairs(model: Dlrm) -> tuple[int, ...]:
    """The rows of the first top kernel that meet numbers: the features, and the pairs below the diagonal."""
    vectors = len(model.rows) + 1
    below = np.flatnonzero(np.tril(np.ones((vectors, vectors), bool), -1))
    return (*range(model.features), *(model.features + below).tolist())


FACEBOOK = (Family("dlrm", (Dlrm,), _of_dlrm),)
