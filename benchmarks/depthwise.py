"""EfficientNet-B0 with our depthwise convolution and with XLA's, on one CPU device.

    python benchmarks/depthwise.py [--pixels 224] [--examples 2]

Milliseconds of an evaluation and of a training gradient, the least of several that take turns, and their ratio.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

from multipod import runtime

runtime.prepare(1)  # before JAX is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import machine  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax import lax  # noqa: E402

from multipod.models.efficientnet import EfficientNet  # noqa: E402

KEY = jax.random.key(0)


@dataclass(frozen=True)
class WithXla(EfficientNet):
    """The network with XLA's depthwise convolutions."""

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh module."""
        module = super().module(rngs)
        for block in module.blocks:
            block.depthwise.conv.conv_general_dilated = lax.conv_general_dilated
        return module


def weights(model: EfficientNet) -> tuple[dict, dict]:
    """Parameters and statistics of the right sizes; to compile the real ones takes half a minute."""
    rng = np.random.default_rng(0)

    def value(name: str, shape: tuple[int, ...]) -> jax.Array:
        spread = np.sqrt(2 / np.prod(shape[:-1])) if name.endswith("kernel") else 0
        center = 1 if name.endswith(("scale", "var")) else 0
        return jnp.asarray(rng.normal(center, spread, shape), jnp.float32)

    shapes = jax.eval_shape(model.init, KEY)
    return tuple({name: value(name, leaf.shape) for name, leaf in tree.items()} for tree in shapes)


def programs(model: EfficientNet) -> list[Callable]:
    """An evaluation and a gradient in training; each takes (params, statistics, image)."""

    def logits(params, statistics, image, train):
        return model.apply(params, statistics, {"image": image}, train=train, key=KEY)[0]

    def loss(params, statistics, image):
        return jnp.sin(logits(params, statistics, image, True)).sum()

    return [jax.jit(lambda *arguments: logits(*arguments, False)), jax.jit(jax.grad(loss))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--examples", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args()
    print(machine.headline(machine.facts()), flush=True)
    rates = {"dropout": 0.0, "stochastic_depth": 0.0}
    arguments = *weights(EfficientNet(**rates)), jax.random.normal(KEY, (options.examples, *[options.pixels] * 2, 3))
    ways = [programs(EfficientNet(**rates)), programs(WithXla(**rates))]
    first = [[jax.block_until_ready(program(*arguments)) for program in way] for way in ways]
    assert jnp.allclose(first[0][0], first[1][0], rtol=1e-3, atol=1e-4)
    least_ms = [[np.inf, np.inf], [np.inf, np.inf]]
    for _ in range(options.repeats):
        for way, times in zip(ways, least_ms, strict=True):
            for number, program in enumerate(way):
                start = time.perf_counter()
                jax.block_until_ready(program(*arguments))
                times[number] = min(times[number], 1000 * (time.perf_counter() - start))
    rows = [
        [what, f"{ours:.0f}", f"{xla:.0f}", f"{xla / ours:.1f}"]
        for what, ours, xla in zip(["evaluation", "gradient"], *least_ms, strict=True)
    ]
    print(machine.table([f"{options.examples} x {options.pixels} pixels", "ours, ms", "XLA, ms", "times"], rows))
    print(f"Load average at the end: {machine.facts()['load']}")


if __name__ == "__main__":
    main()
