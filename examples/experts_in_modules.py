"""A layer of experts in modules of Flax NNX and of Linen: python examples/experts_in_modules.py"""

import jax
import optax
from flax import linen, nnx

from multipod.nn.experts.layer import ExpertSpec, SparseMlp
from multipod.nn.experts.routing import Routing

SPEC = ExpertSpec(Routing(experts=4, chosen=2, group=32), hidden=64)


def extra_loss(report):
    """The router's two losses with their coefficients, to be added to one's own."""
    return SPEC.routing.balance * report["balance"] + SPEC.routing.z * report["z"]


class Block(nnx.Module):
    """A residual layer of experts in NNX."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.mlp = SparseMlp(SPEC, 16, rngs)

    def __call__(self, x):
        """The outputs, and a loss."""
        y, report = self.mlp(x)
        return x + y, extra_loss(report)


class LinenBlock(linen.Module):
    """A residual layer of experts in Linen."""

    @linen.compact
    def __call__(self, x):
        """The outputs, and a loss."""
        y, report = nnx.bridge.to_linen(SparseMlp, SPEC, 16, name="mlp")(x)
        return x + y, extra_loss(report)


x = jax.random.normal(jax.random.key(0), (64, 16))
block = Block(nnx.Rngs(0))
optimizer = nnx.Optimizer(block, optax.adam(3e-2), wrt=nnx.Param)


@nnx.jit
def update(block, optimizer):
    """One update towards twice x."""

    def loss(block):
        y, extra = block(x)
        return ((y - 2 * x) ** 2).mean() + extra

    value, gradient = nnx.value_and_grad(loss)(block)
    optimizer.update(block, gradient)
    return value


losses = [float(update(block, optimizer)) for _ in range(60)]
print(f"NNX: loss {losses[0]:.2f}, after 60 updates {losses[-1]:.2f}")
keys = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
(y, _), variables = jax.jit(LinenBlock().init_with_output)(keys, x)
print(f"Linen: {sum(leaf.size for leaf in jax.tree.leaves(variables)):,} numbers, outputs {y.shape}")
