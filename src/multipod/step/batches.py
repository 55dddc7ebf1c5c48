"""Where the batches of a whole model lie on a mesh."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from multipod.data.global_arrays import to_mesh
from multipod.data.source import HostBatch, example_of, examples_of
from multipod.layout.mesh import data_axes, data_devices, padded_batch
from multipod.nn.dims import input_dims
from multipod.nn.logical_axes import Splits
from multipod.pytrees import Batch
from multipod.recipe.recipe import Recipe
from multipod.step.images import SplitImages
from multipod.step.memory_layout import InputFormats


@dataclass(frozen=True)
class BatchPlacement:
    """The batches of a recipe on a mesh: rows over the data axes, images over the axes that `splits` names.

    Attributes:
      splits: the axes inside the tiles that split dims of a name.
    """

    recipe: Recipe
    mesh: Mesh | AbstractMesh
    splits: Splits

    @cached_property
    def rows(self) -> int:
        """The rows of a batch on this mesh. Those beyond `recipe.batch` are padding, and batches then have a `mask`.

        Raises:
          LayoutError: the batch does not divide over a whole mesh.
        """
        return padded_batch(self.recipe.batch, self.recipe.layout, self.mesh)

    @property
    def device_rows(self) -> int:
        """The rows of a batch on each data device."""
        return self.rows // data_devices(self.mesh)

    @property
    def padded(self) -> bool:
        """Whether batches hold padding."""
        return self.rows > self.recipe.batch

    @cached_property
    def images(self) -> SplitImages:
        """How the images of a batch are split inside the tiles."""
        return SplitImages(input_dims(self.recipe.model), self.splits, dict(self.mesh.shape))

    @cached_property
    def examples(self) -> list[dict[str, np.ndarray]]:
        """A training example of each size that batches have, the largest last."""
        return examples_of(self.recipe.data, "train")

    @cached_property
    def test_example(self) -> dict[str, np.ndarray]:
        """An example of the test data."""
        return example_of(self.recipe.data, "test")

    def shapes(self, example: HostBatch | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch of the run, of the largest size or that of `example`, as shapes with shardings."""
        entries = self.images.padded(self.examples[-1] if example is None else example)
        entries |= {"mask": np.ones(1, bool)} if self.padded else {}
        shardings = self.shardings(entries)
        return {
            name: jax.ShapeDtypeStruct((self.rows, *array.shape[1:]), array.dtype, sharding=shardings[name])
            for name, array in entries.items()
        }

    def device_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """One device's rows of a batch of the largest size, as shapes."""
        return {
            name: jax.ShapeDtypeStruct((self.device_rows, *leaf.shape[1:]), leaf.dtype)
            for name, leaf in self.shapes().items()
        }

    def shardings(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """How the arrays of a host batch lie on the mesh: rows over the data axes, images over the spatial ones."""
        return {name: self._sharding(name, np.ndim(array)) for name, array in batch.items()}

    def _sharding(self, name: str, rank: int) -> NamedSharding:
        known = self._shardings.get((name, rank))
        if known is None:  # made once: an update of a millisecond would notice
            spec = PartitionSpec(data_axes(self.mesh), *self.images.axes(name, rank))
            known = self._shardings[name, rank] = NamedSharding(self.mesh, spec)
        return known

    @cached_property
    def _shardings(self) -> dict[tuple[str, int], NamedSharding]:
        return {}

    def place(self, host: HostBatch, rows: np.ndarray, total: int, formats: InputFormats | None = None) -> Batch:
        """A host batch on the mesh, of which this process gives `rows` of `total`, in the `formats` asked for."""
        host = self.images.padded(host)
        return to_mesh(host, rows, total, {**self.shardings(host), **(formats or {})})
