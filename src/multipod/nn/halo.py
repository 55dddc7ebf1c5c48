"""Convolution, pooling, batch norm and upsampling of images that are split over devices, with explicit halo exchange.

XLA splits these operations by itself where arrays have a sharding over height and width; that is the default, and
`docs/design/spatial.md` says what it does for which shapes. This is the same written out: each device asks its
neighbours for the rows that its windows reach (`lax.ppermute`), and runs the ordinary operation on what it has then.
It reads as the reference, and never gathers an image whole.

All functions but `split_image`, `whole_image` and `image_spec` run inside `jax.shard_map`, manual over the axes that
the image is split over, and outside it too where it is not split. They can be differentiated. Gradients taken inside
`shard_map` are those of the sum of all devices' values, as always there: a loss that all peers compute alike counts
once for each of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from multipod.errors import LayoutError
from multipod.nn import convolution as plain
from multipod.nn.split import Reads, Split, Window, enlarge, slide

Padding = Literal["SAME", "VALID"] | Sequence[tuple[int, int]]
"""Rows of padding before and behind, for height and width, or the name of a rule that finds them."""

HEIGHT, WIDTH = 1, 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SplitImage:
    """A device's block of an image, and how the whole is split.

    Outside `shard_map` the same with all blocks side by side, as one global array. Pixels that are padding may hold
    anything: an operation that looks at several pixels puts its own identity there before it looks. What the
    operations here leave in them is finite, so that no gradient of zero meets an infinity.

    Attributes:
      pixels: [n, height.block, width.block, channels]; outside, height.padded x width.padded.
      height: the split of dim 1.
      width: the split of dim 2.
    """

    pixels: jax.Array
    height: Split = field(metadata={"static": True})
    width: Split = field(metadata={"static": True})

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which the image is split."""
        return tuple(split.axis for split in (self.height, self.width) if split.axis is not None)

    def map(self, function: Callable[[jax.Array], jax.Array]) -> "SplitImage":
        """The image with `function` applied to its pixels, each by itself: a bias, an activation."""
        return replace(self, pixels=function(self.pixels))

    def filled(self, value: float) -> jax.Array:
        """The pixels, with `value` in those that are padding."""
        pixels = self.pixels
        for dim, split in ((HEIGHT, self.height), (WIDTH, self.width)):
            if split.padded != split.size:
                rows = _part(split) * split.block + jnp.arange(split.block)
                pixels = jnp.where(_along(dim, rows < split.size), pixels, jnp.asarray(value, pixels.dtype))
        return pixels


def split_image(image: jax.Array, height: Split, width: Split) -> SplitImage:
    """`image`, [n, height.size, width.size, channels], padded to equal blocks: what `shard_map` cuts into parts.

    Raises:
      LayoutError: an image of another size.
    """
    if image.shape[HEIGHT : WIDTH + 1] != (height.size, width.size):
        raise LayoutError(
            f"split_image: an image {image.shape} has not the {height.size} x {width.size} pixels of its splits. "
            "Make them from image.shape[1:3]."
        )
    ends = [(0, split.padded - split.size) for split in (height, width)]
    return SplitImage(jnp.pad(image, ((0, 0), *ends, (0, 0))), height, width)


def whole_image(image: SplitImage) -> jax.Array:
    """The global array, [n, height.size, width.size, channels], without the padding that made blocks equal."""
    return image.pixels[:, : image.height.size, : image.width.size]


def image_spec(height: Split, width: Split, batch: str | tuple[str, ...] | None = None) -> PartitionSpec:
    """How a `SplitImage` lies on the mesh, its first dim split over `batch`: for `shard_map` and for shardings."""
    return PartitionSpec(batch, height.axis, width.axis)


def convolution(
    image: SplitImage,
    kernel: jax.Array,
    *,
    strides: Sequence[int] = (1, 1),
    padding: Padding = "SAME",
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    **options: Any,
) -> SplitImage:
    """`lax.conv_general_dilated` with a kernel [kh, kw, channels / groups, features] that every device has whole.

    A device receives at most (kh - 1) dilation rows of halo where blocks divide evenly by the stride, more where
    they do not (`multipod.nn.split.slide`); the same along the width, with the corners in it.

    Args:
      image: the input.
      kernel: its gradient is a share on each device, to be summed (`shard_map`'s own checks do it outside).
      strides: along height and width.
      padding: "SAME" and "VALID" refer to the size of the whole image.
      dilation: of the kernel, along height and width.
      groups: of channels, which do not see each other.
      options: those of `lax.conv_general_dilated`.

    Raises:
      LayoutError: no window fits, or the axes are not those of the program.
    """
    size = kernel.shape[0], kernel.shape[1]
    pixels, height, width = _read_windows(image, _windows(image, size, strides, padding, dilation), 0)
    pixels = plain.convolution(
        pixels,
        kernel,
        strides,
        ((0, 0), (0, 0)),
        rhs_dilation=dilation,
        feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        **options,
    )
    return SplitImage(pixels, height, width)


def max_pool(
    image: SplitImage, window: Sequence[int], *, strides: Sequence[int] = (1, 1), padding: Padding = "VALID"
) -> SplitImage:
    """The largest of each window. Padding counts as -inf; floats only."""
    pixels, height, width = _read_windows(image, _windows(image, window, strides, padding), -np.inf)
    pixels = lax.reduce_window(pixels, -np.inf, lax.max, (1, *window, 1), (1, *strides, 1), "VALID")
    # Where a device's window lies in nothing but padding it found -inf.
    return SplitImage(SplitImage(pixels, height, width).filled(0), height, width)


def average_pool(
    image: SplitImage,
    window: Sequence[int],
    *,
    strides: Sequence[int] = (1, 1),
    padding: Padding = "VALID",
    count_padding: bool = True,
) -> SplitImage:
    """The mean of each window; without `count_padding`, of those of its pixels that are in the image."""
    windows = _windows(image, window, strides, padding)
    pixels, height, width = _read_windows(image, windows, 0)
    sums = lax.reduce_window(pixels, 0.0, lax.add, (1, *window, 1), (1, *strides, 1), "VALID")
    if count_padding:
        return SplitImage(sums / (window[0] * window[1]), height, width)
    dims = zip((HEIGHT, WIDTH), (image.height, image.width), (height, width), windows, strict=True)
    for dim, before, after, slid in dims:
        firsts = np.arange(after.size) * slid.stride - slid.before
        counts = np.minimum(firsts + slid.size, before.size) - np.maximum(firsts, 0)
        sums = sums / _along(dim, _own(after, counts.astype(sums.dtype), 1))
    return SplitImage(sums, height, width)


def global_mean(image: SplitImage) -> jax.Array:
    """The mean of all pixels of the whole image, [n, channels], the same on all its devices."""
    sums = _sum_over(image.filled(0).sum((HEIGHT, WIDTH), dtype=jnp.float32), image.axes)
    return (sums / (image.height.size * image.width.size)).astype(image.pixels.dtype)


def global_max(image: SplitImage) -> jax.Array:
    """The largest of all pixels of the whole image, [n, channels], the same on all its devices; floats only.

    Equal largest pixels share the gradient evenly, as in `jnp.max`, wherever they lie.
    """
    pixels = image.filled(-np.inf)
    largest = lax.stop_gradient(pixels).max((HEIGHT, WIDTH))
    if image.axes:
        largest = lax.pmax(largest, image.axes)
    equal = pixels == largest[:, None, None]
    count = _sum_over(equal.sum((HEIGHT, WIDTH), dtype=jnp.float32), image.axes)
    sums = _sum_over(jnp.where(equal, pixels, 0).sum((HEIGHT, WIDTH), dtype=jnp.float32), image.axes)
    mean = (sums / count).astype(pixels.dtype)
    return largest + (mean - lax.stop_gradient(mean))  # the gradient of the mean, which pmax has not; nothing else


def batch_norm(
    image: SplitImage, scale: jax.Array, bias: jax.Array, *, epsilon: float = 1e-5, over: Sequence[str] = ()
) -> tuple[SplitImage, jax.Array, jax.Array]:
    """Batch norm with the statistics of whole images, and their mean and (biased) variance, [channels], float32.

    One message of 2 C + 1 floats, differentiated through: the sums of x and x^2 over pixels that are no
    padding, and how many these are; so that sizes may differ between devices. `over` names further mesh axes, over
    which other examples lie.

    Source: arXiv:2011.03641 and arXiv:1811.06992: mean and mean of squares in one message, over the peers of an image
    as well as over the group of the batch norm.
    """
    wide = image.map(lambda pixels: pixels.astype(jnp.float32)).filled(0)
    pixels = image.pixels.shape[0] * _valid(image.height) * _valid(image.width)
    sums = jnp.concatenate([wide.sum((0, HEIGHT, WIDTH)), jnp.square(wide).sum((0, HEIGHT, WIDTH)), pixels[None]])
    sums = _sum_over(sums, (*image.axes, *over))
    mean, square = jnp.split(sums[:-1] / sums[-1], 2)
    var = jnp.maximum(square - jnp.square(mean), 0)  # rounding may leave a constant channel below zero
    factor = lax.rsqrt(var + epsilon) * scale
    normal = (wide * factor + (bias - mean * factor)).astype(image.pixels.dtype)
    return replace(image, pixels=normal), mean, var


def upsample(image: SplitImage, size: Sequence[int], method: Literal["nearest", "bilinear"] = "nearest") -> SplitImage:
    """The image enlarged to `size` pixels, height x width, as by `jax.image.resize`.

    Raises:
      LayoutError: a size smaller than the image's, or the axes are not those of the program.
    """
    pixels, splits = image.pixels, []
    for dim, split, rows in zip((HEIGHT, WIDTH), (image.height, image.width), size, strict=True):
        out, reads, taps = enlarge(split, rows, method == "bilinear")
        pixels = _read(pixels, dim, split, reads, 0)
        start = np.repeat(reads.starts, out.block)[: out.size]  # of the device that makes each row
        lower, upper = (jnp.take(pixels, _own(out, table - start, 0), dim) for table in (taps.lower, taps.upper))
        if method == "bilinear":
            t = _along(dim, _own(out, np.asarray(taps.t, np.float32), 0))
            mixed = (1 - t) * lower.astype(jnp.float32) + t * upper.astype(jnp.float32)
            lower = mixed.astype(pixels.dtype)
        pixels = lower
        splits.append(out)
    return SplitImage(pixels, *splits)


def _windows(
    image: SplitImage,
    size: Sequence[int],
    strides: Sequence[int],
    padding: Padding,
    dilation: Sequence[int] = (1, 1),
) -> tuple[Window, Window]:
    """The windows along height and width, with the padding that a rule means for the whole image."""
    bare = [Window(*numbers) for numbers in zip(size, strides, dilation, strict=True)]
    if isinstance(padding, str):
        if padding not in ("SAME", "VALID"):
            raise LayoutError(f"padding={padding!r} is no rule. Take SAME or VALID, or pairs of numbers.")
        reaches = [window.reach for window in bare]
        padding = lax.padtype_to_pads((image.height.size, image.width.size), reaches, strides, padding)
    height, width = (replace(w, before=ends[0], after=ends[1]) for w, ends in zip(bare, padding, strict=True))
    return height, width


def _read_windows(image: SplitImage, windows: tuple[Window, Window], identity: float) -> tuple[jax.Array, Split, Split]:
    """The pixels that this device's windows read, without further padding, and the output's splits.

    Height first, then width: the second exchange carries the corners, so there is none along the diagonal.
    """
    height, height_reads = slide(image.height, windows[0])
    width, width_reads = slide(image.width, windows[1])
    pixels = _read(image.pixels, HEIGHT, image.height, height_reads, identity)
    return _read(pixels, WIDTH, image.width, width_reads, identity), height, width


def _read(pixels: jax.Array, dim: int, split: Split, reads: Reads, identity: float) -> jax.Array:
    """The rows `reads` of the image along `dim`, with `identity` in all that are outside it."""
    _check(pixels.shape[dim], split)
    before = _halo(pixels, dim, split, reads.before, 1)
    after = _halo(pixels, dim, split, reads.after, -1)
    pixels = jnp.concatenate([*before, pixels, *after], dim)
    fill = jnp.asarray(identity, pixels.dtype)
    pixels = lax.pad(pixels, fill, [(reads.lead, reads.trail, 0) if d == dim else (0, 0, 0) for d in range(4)])
    part = _part(split)
    if len(set(reads.offsets)) == 1:
        pixels = lax.slice_in_dim(pixels, reads.offsets[0], reads.offsets[0] + reads.count, axis=dim)
    else:
        pixels = lax.dynamic_slice_in_dim(pixels, jnp.asarray(reads.offsets)[part], reads.count, dim)
    if reads.starts[0] >= 0 and reads.starts[-1] + reads.count <= split.size:
        return pixels
    rows = jnp.asarray(reads.starts)[part] + jnp.arange(reads.count)
    return jnp.where(_along(dim, (rows >= 0) & (rows < split.size)), pixels, fill)


def _halo(pixels: jax.Array, dim: int, split: Split, rows: int, way: Literal[1, -1]) -> list[jax.Array]:
    """The `rows` rows before this device's block (way 1: everything travels up the axis) or behind it (-1), in order.

    Each message goes to a direct neighbour. A halo wider than a block is passed on: after hop h
    a device holds rows that set out h devices away. Devices at the end of the line receive zeros.
    """
    line = [(i, i + way) for i in range(split.parts) if 0 <= i + way < split.parts]
    pieces: list[jax.Array] = []
    while rows > 0:
        length = pixels.shape[dim]
        taken = min(rows, length)
        near = length - taken if way == 1 else 0  # the rows nearest to the receiver
        pixels = lax.ppermute(lax.slice_in_dim(pixels, near, near + taken, axis=dim), split.axis, line)
        pieces.append(pixels)
        rows -= taken
    return pieces[::-way]


def _check(block: int, split: Split) -> None:
    try:
        devices = 1 if split.axis is None else lax.axis_size(split.axis)
    except NameError:
        raise LayoutError(
            f"{split}: the program has no mesh axis {split.axis!r} here. Call it inside jax.shard_map over that axis, "
            "or leave parts and axis out."
        ) from None
    if devices != split.parts:
        raise LayoutError(f"{split}: axis {split.axis!r} has {devices} devices. Give parts={devices}.")
    if block != split.block:
        raise LayoutError(
            f"{split}: this device's block has {block} rows, not {split.block}. Make the image with split_image, and "
            "split it by image_spec."
        )


def _part(split: Split) -> jax.Array | int:
    """This device's number along the split's axis."""
    return 0 if split.axis is None else lax.axis_index(split.axis)


def _valid(split: Split) -> jax.Array:
    """The rows on this device that are no padding."""
    return jnp.asarray([len(split.rows(part)) for part in range(split.parts)], jnp.float32)[_part(split)]


def _own(split: Split, table: np.ndarray, padding: float) -> jax.Array:
    """This device's block of a table with one entry for each row of the image; `padding` where there is none."""
    padded = np.pad(table, (0, split.padded - split.size), constant_values=padding)
    return jnp.asarray(padded.reshape(split.parts, split.block))[_part(split)]


def _along(dim: int, values: jax.Array) -> jax.Array:
    """`values` as an array of 4 dims that lies along `dim`."""
    return values.reshape([-1 if d == dim else 1 for d in range(4)])


def _sum_over(values: jax.Array, axes: Sequence[str]) -> jax.Array:
    return lax.psum(values, tuple(axes)) if axes else values
