"""Ways to write the convolutions of the digits network, each alone on one CPU device.

    python benchmarks/convolution.py [--examples 16] [--in-loop]

For each layer and each way: microseconds of the forward pass, of the gradient to the kernel, and of the
gradient to the image; the least of many repeats. 16 examples are a device's share of the recipe's batch.
With --in-loop each is the only step of a `lax.map`; the last layer is one of Mask R-CNN's mask head.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

from multipod import runtime

runtime.prepare(1)  # before JAX is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import machine  # noqa: E402
from jax import lax  # noqa: E402

from multipod.nn.images.convolution import convolution  # noqa: E402

Convolution = Callable[[jax.Array, jax.Array, int], jax.Array]

LAYERS = [  # image size, channels in, channels out, kernel size, stride
    (8, 1, 16, 3, 1),
    (8, 16, 16, 3, 1),
    (8, 16, 32, 3, 2),
    (8, 16, 32, 1, 2),
    (4, 32, 32, 3, 1),
    (4, 32, 64, 3, 2),
    (4, 32, 64, 1, 2),
    (2, 64, 64, 3, 1),
    (14, 256, 256, 3, 1),
]


def channels_last(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """XLA's convolution, NHWC, as Flax calls it."""
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def channels_first(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """XLA's convolution, NCHW, between transposes."""
    y = lax.conv_general_dilated(x.transpose(0, 3, 1, 2), kernel.transpose(3, 2, 0, 1), (stride, stride), "SAME")
    return y.transpose(0, 2, 3, 1)


def padded_channels(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """`channels_last` with the channels filled up to a multiple of 16."""
    missing = -x.shape[-1] % 16
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing)))
    return channels_last(x, jnp.pad(kernel, ((0, 0), (0, 0), (0, missing), (0, 0))), stride)


def windows(x: jax.Array, size: int, stride: int) -> list[jax.Array]:
    """The image under each place of the kernel: size * size arrays of the output's height and width."""
    padding = lax.padtype_to_pads(x.shape[1:3], (size, size), (stride, stride), "SAME")
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    last = [(n - size) // stride * stride + 1 for n in x.shape[1:3]]
    return [x[:, i : i + last[0] : stride, j : j + last[1] : stride] for i in range(size) for j in range(size)]


def one_product(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """One matrix product of all windows side by side with the whole kernel."""
    side_by_side = jnp.concatenate(windows(x, kernel.shape[0], stride), axis=-1)
    return side_by_side @ kernel.reshape(-1, kernel.shape[-1])


def many_products(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """A matrix product for each place of the kernel, added up."""
    places = kernel.reshape(-1, *kernel.shape[2:])
    return sum(window @ place for window, place in zip(windows(x, kernel.shape[0], stride), places, strict=True))


def ours(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """What the models have."""
    return convolution(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def in_loop(way: Convolution) -> Convolution:
    """`way` as the one step of a loop."""
    return lambda x, kernel, stride: lax.map(lambda one: way(one, kernel, stride), x[None])[0]


WAYS: dict[str, Convolution] = {
    "ours": ours,
    "NHWC": channels_last,
    "NCHW": channels_first,
    "16n channels": padded_channels,
    "one product": one_product,
    "many products": many_products,
}


def programs(way: Convolution, stride: int) -> list[Callable[..., jax.Array]]:
    """Forward, gradient to the kernel, gradient to the image; each takes (x, kernel, cotangent)."""
    forward = jax.jit(lambda x, kernel, out: way(x, kernel, stride))
    to_kernel = jax.jit(lambda x, kernel, out: jax.vjp(partial(way, x, stride=stride), kernel)[1](out)[0])
    to_image = jax.jit(lambda x, kernel, out: jax.vjp(lambda x: way(x, kernel, stride), x)[1](out)[0])
    return [forward, to_kernel, to_image]


def least_us(program: Callable[..., jax.Array], arguments: tuple[jax.Array, ...], repeats: int = 50) -> float:
    """The least microseconds of many calls, or of five seconds, after one that compiles."""
    jax.block_until_ready(program(*arguments))
    taken: list[float] = []
    while len(taken) < repeats and sum(taken) < 5:
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        taken.append(time.perf_counter() - start)
    return 1e6 * min(taken)


def row(layer: tuple[int, int, int, int, int], examples: int, *, loop: bool) -> list[str]:
    """One layer's figures, checked against each other."""
    size, channels_in, channels_out, kernel_size, stride = layer
    key = jax.random.key(0)
    x = jax.random.normal(key, (examples, size, size, channels_in))
    kernel = jax.random.normal(key, (kernel_size, kernel_size, channels_in, channels_out))
    out = channels_last(x, kernel, stride)
    cells = []
    for way in map(in_loop, WAYS.values()) if loop else WAYS.values():
        assert jnp.allclose(way(x, kernel, stride), out, rtol=1e-4, atol=1e-3), way
        cells.append(" / ".join(f"{least_us(p, (x, kernel, out)):.0f}" for p in programs(way, stride)))
    return [f"{size}x{size}, {channels_in} to {channels_out}, {kernel_size}x{kernel_size} / {stride}", *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=16)
    parser.add_argument("--in-loop", action="store_true")
    options = parser.parse_args()
    print(machine.headline(machine.facts()), flush=True)
    rows = [row(layer, options.examples, loop=options.in_loop) for layer in LAYERS]
    print(machine.table(["layer", *WAYS], rows))
    print(f"Load average at the end: {machine.facts()['load']}")


if __name__ == "__main__":
    main()
