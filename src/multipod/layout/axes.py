"""The axes of the mesh of devices, a row each: what one splits, and how users call it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh.

    Attributes:
      splits: what it splits, for the help of `--layout`.
      words: its names in `--layout`, ours first; () for a second axis of the same word.
      batch: whether it splits the batch.
      weights: whether its devices hold different weights.
      dims: names of dims that it splits where no rule says otherwise (`multipod.layout.rules`).
      size: of a `ModelSplit`, how many parts it makes; None where the mesh or the pipeline says it.
    """

    splits: str
    words: tuple[str, ...] = ()
    batch: bool = False
    weights: bool = False
    dims: tuple[str, ...] = ()
    size: Callable[[Any], int] | None = None


AXES: dict[str, Axis] = {
    "y": Axis("the batch, over rows x columns of replicas", ("data", "dp"), batch=True),
    "x": Axis("the batch", batch=True),
    "stage": Axis("layers, into the stages of a pipeline", ("stage", "pp"), weights=True),
    "spatial": Axis(
        "images, by height, or height x width", ("spatial", "sp"), dims=("height",), size=lambda s: (*s.spatial, 1)[0]
    ),
    "width": Axis("images, by width", dims=("width",), size=lambda s: (*s.spatial, 1, 1)[1]),
    "model": Axis(
        "heads, hidden features and vocabulary",
        ("model", "tp"), weights=True, dims=("heads", "mlp", "vocab"), size=lambda s: s.model,
    ),
    "expert": Axis(
        "experts, or tables, and the batch",
        ("expert", "ep"), batch=True, weights=True, dims=("experts", "table_rows", "table_columns"),
        size=lambda s: s.expert,
    ),
}  # fmt: skip
"""All axes, in the order of the mesh: first the data axes, then those inside a replica. Stages come before what a stage
splits, whose devices talk at every layer and so lie closest, as inside one host.

What is split by name: attention by heads, feed-forward blocks by their hidden features, and the vocabulary
(arXiv:2011.03641; arXiv:1909.08053, section 3), experts, images, and tables of recommendation models."""

DATA_AXES = ("y", "x")
"""The axes that split the batch over replicas: rows and columns of the mesh."""

REPLICA_AXES = tuple(axis for axis in AXES if axis not in DATA_AXES)
"""The axes inside a replica, whose devices lie side by side on the mesh of chips."""

BATCH_AXES = tuple(name for name, axis in AXES.items() if axis.batch)
"""The axes that split the batch, where a mesh has them: the data axes and `expert`."""

DEFAULT_RULES = tuple(f"{dim}={name}" for name, axis in AXES.items() for dim in axis.dims)
"""What is split where a layout gives no rule."""
