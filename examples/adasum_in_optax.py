"""Adasum behind Adam in a program of Optax on four devices: python examples/adasum_in_optax.py"""

from multipod import runtime

runtime.prepare(cpu_devices=8)

import jax  # noqa: E402  (what reads the environment comes after it is settled)
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType, PartitionSpec  # noqa: E402

from multipod.interop.adasum import adasum  # noqa: E402

optimizer = optax.chain(optax.adam(0.05), adasum("data"))
x = jax.random.normal(jax.random.key(0), (64, 8))
y = x @ jnp.arange(8.0)


def update(weights, state, x, y):
    """One update on each device's own rows; weights end alike, Adam's moments stay each device's own."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(weights)
    changes, state = optimizer.update(gradient, jax.tree.map(lambda s: s[0], state))
    return weights + changes, jax.tree.map(lambda s: s[None], state), jax.lax.pmean(loss, "data")


mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
whole, split = PartitionSpec(), PartitionSpec("data")
step = jax.jit(
    jax.shard_map(
        update, mesh=mesh, in_specs=(whole, split, split, split), out_specs=(whole, split, whole), check_vma=False
    )
)
weights = jnp.zeros(8)
state = jax.tree.map(lambda s: jnp.stack([s] * 4), optimizer.init(weights))
for number in range(100):
    weights, state, loss = step(weights, state, x, y)
    if number in (0, 99):
        print(f"update {number + 1}: loss {loss:.2f}")
