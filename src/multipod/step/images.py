"""Images that are split inside the tiles of a mesh: padded on the host to equal parts, and cut again in the program."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from multipod.layout.rules import Dims, parts
from multipod.nn.logical_axes import with_logical_constraint

SPLIT = ("height", "width")
"""The dims of inputs that are split: with others it is not known what padding would mean."""


@dataclass(frozen=True)
class SplitImages:
    """Which dims of a batch's entries are split, and over what.

    Attributes:
      inputs: the names of the dims of the model's inputs (`multipod.nn.dims.input_dims`).
      splits: the axes inside the tiles that split dims of a name.
      sizes: the sizes of the mesh's axes.
    """

    inputs: Mapping[str, Dims]
    splits: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]

    def __bool__(self) -> bool:
        """Whether any input is split."""
        return any(dim in self.splits for dim in self.dims)

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the dims that the model's inputs have and that may be split."""
        return tuple(dict.fromkeys(dim for dims in self.inputs.values() for dim in dims if dim in SPLIT))

    def axes(self, name: str, rank: int) -> tuple[tuple[str, ...] | None, ...]:
        """What splits the dims of the batch's entry `name` behind the first."""
        return tuple(self.splits.get(dim) if dim in SPLIT else None for dim in self._dims(name, rank)[1:])

    def padded(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A host batch whose split dims divide over their axes: zeros behind the last row and column."""
        return {name: self._padded(name, array) for name, array in batch.items()} if self.splits else dict(batch)

    def cut(self, batch: Mapping[str, jax.Array], examples: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Returns the batch as the model takes it, cut as in `examples`; inside a program, under axis rules."""
        if not self:
            return dict(batch)
        return {name: self._cut(name, array, examples[name].shape) for name, array in batch.items()}

    def _dims(self, name: str, rank: int) -> Dims:
        dims = self.inputs.get(name, ())
        return dims if len(dims) == rank else (None,) * rank

    def _padded(self, name: str, array: np.ndarray) -> np.ndarray:
        dims = self._dims(name, array.ndim)
        counts = [parts(self.splits.get(dim, ()), self.sizes) if dim in SPLIT else 1 for dim in dims]
        extra = [(0, -n % count) for n, count in zip(array.shape, counts, strict=True)]
        return np.pad(array, extra) if any(behind for _, behind in extra) else array

    def _cut(self, name: str, array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if name not in self.inputs:
            return array
        whole = array[(slice(None), *(slice(size) for size in shape[1:]))]
        return with_logical_constraint(whole, *self._dims(name, array.ndim)[1:])
