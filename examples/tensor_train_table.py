"""A table of ten million rows as a tensor train in a Flax module: python examples/tensor_train_table.py"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from multipod.nn.tables.tensor_train import tensor_train
from multipod.nn.tables.tensor_train_module import TensorTrainBag

tt = tensor_train(rows=10_000_000, features=64, rank=16)
table = TensorTrainBag(tt, rngs=nnx.Rngs(0))  # in Linen: nnx.bridge.to_linen(TensorTrainBag, tt)
print(f"{tt.parameters:,} numbers in place of {tt.rows * tt.features:,}: {tt.compression:.0f} times fewer")

ids = jnp.array([3, 9_999_999, 1_234_567, 3], jnp.int32)
offsets = jnp.array([0, 1, 3, 4], jnp.int32)  # three bags: one id, two ids, one id
wanted = jax.random.normal(jax.random.key(1), (3, 64))
optimizer = nnx.Optimizer(table, optax.adam(3e-2), wrt=nnx.Param)


@nnx.jit
def update(table, optimizer):
    """One update of the cores towards the wanted bags."""
    value, gradient = nnx.value_and_grad(lambda table: jnp.mean((table(ids, offsets) - wanted) ** 2))(table)
    optimizer.update(table, gradient)
    return value


losses = [float(update(table, optimizer)) for _ in range(100)]
print(f"loss {losses[0]:.2f}, after 100 updates {losses[-1]:.2f}")
