"""A table in tensor-train form as a Flax NNX module: what `nnx.Embed` is for an ordinary table, with bags."""

import jax
import jax.numpy as jnp
from flax import nnx

from multipod.nn.tables.bags import Mode
from multipod.nn.tables.tensor_train import Cores, TensorTrain
from multipod.nn.tables.tensor_train_bag import Weights, bag
from multipod.nn.tables.tensor_train_init import initial_cores


class TensorTrainBag(nnx.Module):
    """Sums or means of rows of a table that is kept as a tensor train; the cores are its parameters.

    In Flax Linen: `nnx.bridge.to_linen(TensorTrainBag, tt)`.

    Args:
      tt: the shape of the table, of `multipod.nn.tables.tensor_train.tensor_train`.
      mode: "sum", or "mean".
      rngs: of the initial cores (`initial_cores`).

    Source: Yin et al., 2021, arXiv:2101.11714 (TT-Rec).
    """

    def __init__(self, tt: TensorTrain, mode: Mode = "sum", *, rngs: nnx.Rngs) -> None:
        self.tt, self.mode = tt, mode
        self.cores = nnx.List([nnx.Param(core) for core in initial_cores(tt, rngs.params())])

    def weights(self) -> Cores:
        """The cores as arrays."""
        return tuple(core[...] for core in self.cores)

    def __call__(self, ids: jax.Array, offsets: jax.Array | None = None, weights: Weights = None) -> jax.Array:
        """Bags [bags, features] of flat `ids` [n] and `offsets` [bags + 1]; without offsets rows [..., features].

        Raises:
          DataError: outside of `jax.jit`, ids or offsets that do not fit the table.
        """
        if offsets is not None:
            return bag(self.tt, self.weights(), ids, offsets, weights, self.mode)
        flat = ids.reshape(-1)
        rows = bag(self.tt, self.weights(), flat, jnp.arange(len(flat) + 1, dtype=jnp.int32))
        return rows.reshape(*ids.shape, self.tt.features)
