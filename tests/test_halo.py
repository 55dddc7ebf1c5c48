"""Operations on split images against the same operations of JAX and Flax on the whole image."""

import math
import re
from dataclasses import replace
from fractions import Fraction
from functools import partial

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from multipod.errors import LayoutError
from multipod.nn import halo
from multipod.nn.halo import SplitImage, image_spec, split_image, whole_image
from multipod.nn.split import Split, Window, enlarge, slide

pytestmark = pytest.mark.jax_version

HEIGHTS = (300, 150, 75, 38, 19, 10, 5, 3, 1)
AXES = ("down", "across")
DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def mesh_of(parts):
    devices = jax.devices()[: math.prod(parts)]
    return jax.make_mesh(parts, AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)


def splits(shape, parts):
    return [Split(size, n, axis) for size, n, axis in zip(shape[1:3], parts, AXES, strict=True)]


def poisoned(image):
    """The image with NaN in its padding, which spreads to all that looks at it."""
    return replace(image, pixels=image.filled(np.nan))


def uneven(shape):
    """Weights by which each value counts differently in a sum."""
    return jnp.cos(jnp.arange(math.prod(shape), dtype=jnp.float32)).reshape(shape)


def outputs(result):
    """The images among the results put together, arrays as they are."""
    images = jax.tree.leaves(result, is_leaf=lambda node: isinstance(node, SplitImage))
    return [whole_image(image) if isinstance(image, SplitImage) else image for image in images]


def on_mesh(function, parts, batch=None, **options):
    """`function(image, params)` of split images as one of whole images: results are images, or the same everywhere."""

    def run(image, params):
        height, width = splits(image.shape, parts)
        spec = image_spec(height, width, batch)

        def specs(result):
            is_image = lambda node: isinstance(node, SplitImage)  # noqa: E731
            return jax.tree.map(lambda n: spec if is_image(n) else PartitionSpec(), result, is_leaf=is_image)

        local = lambda image, params: function(poisoned(image), params)  # noqa: E731
        whole = SplitImage(image, Split(height.size), Split(width.size))
        kinds = jax.eval_shape(function, whole, params)  # the same operations of an image that is not split
        mapped = jax.shard_map(
            local,
            mesh=mesh_of(parts),
            in_specs=(spec, PartitionSpec()),
            out_specs=specs(kinds),
            **options,
        )
        return mapped(split_image(image, height, width), params)

    return run


def with_gradients(function):
    """Outputs and the gradients of their uneven sum, by image and parameters, in one program."""

    def total(image, params):
        values = outputs(function(image, params))
        return sum((value * uneven(value.shape)).sum() for value in values), values

    def run(image, params):
        (_, values), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(image, params)
        return values, gradients

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})  # compiles in half the time


def assert_same(split, whole, image, params, parts, atol=2e-5, **options):
    ours = with_gradients(on_mesh(split, parts, **options))(image, params)
    assert_close(ours, with_gradients(whole)(image, params), atol)


def assert_close(ours, theirs, atol=2e-5):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=atol * max(1, float(jnp.abs(b).max(initial=0))))


def normal(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


# The bookkeeping, in NumPy alone.


@st.composite
def lines(draw):
    parts = draw(st.integers(1, 8))
    size = draw(st.sampled_from(HEIGHTS) | st.integers(1, 40))
    return Split(size, parts, "down")


@settings(deadline=None, max_examples=300)
@given(lines())
def test_every_row_lies_on_one_device_and_no_device_holds_more_than_its_block(split):
    assert [row for part in range(split.parts) for row in split.rows(part)] == list(range(split.size))
    assert all(len(split.rows(part)) <= split.block for part in range(split.parts))
    assert split.padded - split.size < split.block * split.parts
    assert split.block == math.ceil(split.size / split.parts)


NOBODY = -1000  # in a row's place: no device sent it


def found(split, reads, part):
    """The image's rows that device `part` reads; None where it is to read padding."""
    held = [row if row < split.size else None for row in range(split.padded)]
    first, end = part * split.block, (part + 1) * split.block
    before = [held[row] if row >= 0 else NOBODY for row in range(first - reads.before, first)]
    after = [held[row] if row < split.padded else NOBODY for row in range(end, end + reads.after)]
    together = [NOBODY] * reads.lead + before + held[first:end] + after + [NOBODY] * reads.trail
    assert 0 <= reads.offsets[part] <= len(together) - reads.count
    rows = together[reads.offsets[part] :][: reads.count]
    places = range(reads.starts[part], reads.starts[part] + reads.count)
    wanted = [place if 0 <= place < split.size else None for place in places]
    # What is in the image was sent; the rest is masked, whatever it is.
    assert [row for row, place in zip(rows, wanted, strict=True) if place is not None] == [
        place for place in wanted if place is not None
    ]
    return wanted


@settings(deadline=None, max_examples=400)
@given(
    lines(), st.integers(1, 7), st.integers(1, 3), st.integers(1, 6), st.tuples(st.integers(0, 7), st.integers(0, 7))
)
def test_every_window_finds_its_rows_on_the_device_that_makes_its_output(split, size, stride, dilation, padding):
    window = Window(size, stride, dilation, *padding)
    assume(window.outputs(split.size) > 0)
    out, reads = slide(split, window)
    assert out.size == np.zeros(split.size + sum(padding))[: split.size + sum(padding) - window.reach + 1 : stride].size
    for part in range(split.parts):
        rows = out.rows(part)
        has = found(split, reads, part) if rows else []
        for number, row in enumerate(rows):
            first = row * stride - padding[0]
            wanted = [r if 0 <= r < split.size else None for r in range(first, first + window.reach, dilation)]
            assert has[number * stride :][: window.reach : dilation] == wanted


@settings(deadline=None, max_examples=100)
@given(lines(), st.integers(1, 8))
def test_a_halo_is_no_wider_than_some_device_needs(split, reach):
    window = Window(reach, 1, 1, reach // 2, reach - 1 - reach // 2)
    _, reads = slide(split, window)
    needed = [split.rows(part) for part in range(split.parts) if split.rows(part)]
    before = max(rows[0] - max(0, rows[0] - reach // 2) for rows in needed)
    assert reads.before == before
    assert reads.hops(split.block) == math.ceil(before / split.block) + math.ceil(reads.after / split.block)


# The operations, on eight devices.


def same_convolution(image, kernel, strides=(1, 1), padding="SAME", dilation=(1, 1), groups=1):
    return lax.conv_general_dilated(
        image,
        kernel,
        strides,
        padding,
        rhs_dilation=dilation,
        dimension_numbers=DIMENSIONS,
        feature_group_count=groups,
    )


def flax_batch_norm(image, scale, bias):
    norm = flax.linen.BatchNorm(use_running_average=False, use_fast_variance=False)
    return norm.apply({"params": {"scale": scale, "bias": bias}}, image, mutable=["batch_stats"])[0]


class Blocks:
    """A pyramid's operations on split images, each with NaN in the padding of its input."""

    def conv(self, x, kernel, **options):
        return halo.convolution(poisoned(x), kernel, **options)

    def norm(self, x, scale, bias):
        return halo.batch_norm(poisoned(x), scale, bias)[0].map(jax.nn.relu)

    def max_pool(self, x):
        return halo.max_pool(poisoned(x), (3, 3), strides=(2, 2), padding="SAME")

    def up(self, x, size, method):
        return halo.upsample(poisoned(x), size, method)

    def add(self, x, y):
        return x.map(lambda pixels: pixels + y.pixels)

    def mean(self, x):
        return halo.global_mean(poisoned(x))


class Whole(Blocks):
    """The same on whole images, by JAX and Flax."""

    def conv(self, x, kernel, **options):
        return same_convolution(x, kernel, **options)

    def norm(self, x, scale, bias):
        return jax.nn.relu(flax_batch_norm(x, scale, bias))

    def max_pool(self, x):
        return flax.linen.max_pool(x, (3, 3), (2, 2), "SAME")

    def up(self, x, size, method):
        return jax.image.resize(x, (x.shape[0], *size, x.shape[3]), method)

    def add(self, x, y):
        return x + y

    def mean(self, x):
        return x.mean((1, 2))


def pyramid(ops, image, params):
    """The sizes of an SSD at 300 pixels, down to 1, and a way back up: 300 150 75 38 19 10 5 3 1, 10 19."""
    x = ops.conv(image, params["k7"], strides=(2, 2))  # 150
    x = ops.max_pool(ops.norm(x, params["scale"], params["bias"]))  # 75
    x = ops.conv(x, params["k"], strides=(2, 2))  # 38
    x = ops.max_pool(x)  # 19
    x = c19 = ops.conv(x, params["k"], dilation=(6, 6))
    x = ops.conv(x, params["k"], strides=(2, 2))  # 10
    x = c5 = ops.norm(ops.conv(x, params["k"], strides=(2, 2)), params["scale"], params["bias"])  # 5
    x = ops.conv(x, params["k"], padding="VALID")  # 3
    x = ops.conv(x, params["k"], padding="VALID")  # 1
    up = ops.up(ops.up(c5, (10, 10), "nearest"), (19, 19), "bilinear")
    return ops.add(c19, up), ops.up(x, (3, 3), "nearest"), ops.mean(x)


PYRAMID = {
    "k7": normal((7, 7, 2, 4), 1),
    "k": 0.3 * normal((3, 3, 4, 4), 2),
    "scale": 1 + 0.1 * normal(4, 3),
    "bias": normal(4, 4),
}


@pytest.fixture(scope="module")
def whole_pyramid():
    image = normal((1, 300, 300, 2))
    return image, with_gradients(partial(pyramid, Whole()))(image, PYRAMID)


@pytest.mark.parametrize("parts", [(2, 1), (4, 1), (8, 1)], ids=str)
def test_a_pyramid_from_300_rows_to_1_equals_the_whole_one(parts, whole_pyramid):
    image, expected = whole_pyramid
    assert_close(with_gradients(on_mesh(partial(pyramid, Blocks()), parts))(image, PYRAMID), expected, atol=1e-4)


def nearest(rows, size):
    """The row under the middle of each new row. `jax.image.resize` rounds its place first, and may fall one short."""
    return np.array([math.floor((r + Fraction(1, 2)) * rows / size) for r in range(size)])


@st.composite
def cases(draw):
    """An operation on split images, the same on whole ones, a shape and a mesh."""
    parts = draw(st.sampled_from([(2, 1), (4, 1), (8, 1), (1, 8), (2, 2), (2, 4), (4, 2)]))
    shape = 2, draw(st.sampled_from(HEIGHTS[2:]) | st.integers(1, 30)), draw(st.integers(1, 12)), 4
    window, strides = [tuple(draw(st.integers(1, n)) for _ in range(2)) for n in (5, 3)]
    name = draw(st.sampled_from(["convolution"] * 3 + ["max", "average", "counted", "nearest", "bilinear"]))
    dilation = tuple(draw(st.integers(1, 6)) for _ in range(2)) if name == "convolution" else (1, 1)
    # Padding in which a whole window fits has no mean of what is in the image, and a largest of nothing.
    most = [d * (n - 1) for n, d in zip(window, dilation, strict=True)]
    padding = draw(st.sampled_from(["SAME", "VALID"]) | st.tuples(*[st.tuples(*[st.integers(0, n)] * 2) for n in most]))
    if isinstance(padding, str):
        ends = lax.padtype_to_pads(shape[1:3], [m + 1 for m in most], strides, padding)
    else:
        ends = padding
    size = tuple(draw(st.integers(n, 2 * n + 5)) for n in shape[1:3])
    if name not in ("nearest", "bilinear"):
        assume(all(n + sum(pad) > m for n, pad, m in zip(shape[1:3], ends, most, strict=True)))
    groups = draw(st.sampled_from([1, 2]))
    options = {"strides": strides, "padding": padding}
    filters = {"dilation": dilation, "groups": groups}
    flax_pool = {"window_shape": window, "strides": strides, "padding": padding}
    params = normal((*window, 4 // groups, 6), 1) if name == "convolution" else np.float32(0)
    split, whole = {
        "convolution": (
            lambda x, k: halo.convolution(x, k, **options, **filters),
            lambda x, k: same_convolution(x, k, **options, **filters),
        ),
        "max": (lambda x, _: halo.max_pool(x, window, **options), lambda x, _: flax.linen.max_pool(x, **flax_pool)),
        "average": (
            lambda x, _: halo.average_pool(x, window, **options),
            lambda x, _: flax.linen.avg_pool(x, **flax_pool),
        ),
        "counted": (
            lambda x, _: halo.average_pool(x, window, **options, count_padding=False),
            lambda x, _: flax.linen.avg_pool(x, **flax_pool, count_include_pad=False),
        ),
        "nearest": (
            lambda x, _: halo.upsample(x, size),
            lambda x, _: x[:, nearest(x.shape[1], size[0])][:, :, nearest(x.shape[2], size[1])],
        ),
        "bilinear": (
            lambda x, _: halo.upsample(x, size, "bilinear"),
            lambda x, _: jax.image.resize(x, (2, *size, 4), "bilinear"),
        ),
    }[name]
    return split, whole, shape, params, parts


@settings(deadline=None, max_examples=10)
@given(cases())
def test_any_operation_equals_the_whole_one(case):
    split, whole, shape, params, parts = case
    assert_same(split, whole, normal(shape), params, parts)


def test_nearest_rows_are_those_of_jax_where_no_place_is_whole():
    image = normal((1, 19, 5, 4))
    assert_same(
        lambda x, _: halo.upsample(x, (38, 15)),
        lambda x, _: jax.image.resize(x, (1, 38, 15, 4), "nearest"),
        image,
        np.float32(0),
        (4, 1),
    )


def test_equal_largest_pixels_share_the_gradient_of_a_global_max():
    image = np.round(normal((2, 10, 7, 3)))
    image[0] = 0
    assert_same(
        lambda x, _: (halo.global_max(x), halo.global_mean(x)),
        lambda x, _: (x.max((1, 2)), x.mean((1, 2))),
        image,
        np.float32(0),
        (4, 2),
    )


def test_batch_norm_takes_all_peers_of_an_image_and_the_examples_on_other_axes():
    params = {"scale": 1 + 0.1 * normal(3, 1), "bias": normal(3, 2)}
    image = 3 + 2 * normal((4, 9, 5, 3))

    def split(x, p):
        normalised, mean, var = halo.batch_norm(x, p["scale"], p["bias"], over=("across",))
        return normalised, mean, var

    def whole(x, p):
        return flax_batch_norm(x, p["scale"], p["bias"]), x.mean((0, 1, 2)), x.var((0, 1, 2))

    def run(image, params):
        height, width = Split(9, 4, "down"), Split(5)
        spec = image_spec(height, width, "across")
        out = jax.tree.map(lambda _: spec, SplitImage(0, height, Split(5)))
        local = lambda image, params: split(poisoned(image), params)  # noqa: E731
        mapped = jax.shard_map(
            local,
            mesh=mesh_of((4, 2)),
            in_specs=(spec, PartitionSpec()),
            out_specs=(out, PartitionSpec(), PartitionSpec()),
        )
        return mapped(split_image(image, height, width), params)

    assert_close(with_gradients(run)(image, params), with_gradients(whole)(image, params))


def test_gradients_inside_shard_map_are_those_of_the_sum_over_devices():
    image, kernel = normal((1, 19, 6, 4)), normal((3, 3, 4, 4), 1)
    height, width = Split(19, 8, "down"), Split(6)

    def loss(pixels, kernel):
        x = halo.convolution(SplitImage(pixels, height, width), kernel, strides=(2, 2))
        return jnp.square(halo.global_mean(x.map(jnp.tanh))).sum() / 8  # each of 8 peers has the whole mean

    def local(image, kernel):
        pixels, share = jax.grad(loss, (0, 1))(poisoned(image).pixels, kernel)
        return replace(image, pixels=pixels), lax.psum(share, "down")

    spec = image_spec(height, width)
    mapped = jax.shard_map(
        local,
        mesh=mesh_of((8, 1)),
        in_specs=(spec, PartitionSpec()),
        out_specs=(spec, PartitionSpec()),
        check_vma=False,  # as the update does
    )
    pixels, gradient = jax.jit(mapped)(split_image(image, height, width), kernel)

    def whole(image, kernel):
        return jnp.square(jnp.tanh(same_convolution(image, kernel, (2, 2))).mean((1, 2))).sum()

    assert_close((whole_image(pixels), gradient), jax.jit(jax.grad(whole, (0, 1)))(image, kernel))


def test_half_precision_stays_and_is_summed_in_full():
    image = jnp.full((1, 38, 38, 2), 1.25, jnp.bfloat16)

    def split(x, p):
        normalised, mean, _ = halo.batch_norm(x, p, p)
        return halo.upsample(halo.max_pool(normalised, (2, 2)), (40, 40), "bilinear"), halo.global_mean(x), mean

    up, total, mean = jax.jit(on_mesh(split, (4, 1)))(image, jnp.ones(2))
    assert (up.pixels.dtype, total.dtype, mean.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(total, 1.25)  # 1,444 ones and a quarter: bfloat16 would stop adding at 512
    np.testing.assert_allclose(mean, 1.25, rtol=1e-6)


# What travels, from the compiled program.

BYTES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1}
MOVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"


def moved(function, *arguments):
    """(operation, bytes of its result on a device) for each that moves data between devices, as compiled."""
    text = re.sub(r"/\*.*?\*/", "", jax.jit(function).lower(*arguments).compile().as_text())
    found = re.findall(rf"= (\(?[^=]*?) ({MOVES})(?:-start)?\(", text)
    return [
        (
            operation,
            sum(
                BYTES[kind] * math.prod(map(int, dims.split(",")))
                for kind, dims in re.findall(r"(\w+)\[([\d,]+)\]", of)
            ),
        )
        for of, operation in found
    ]


@pytest.fixture(scope="module")
def along_height():
    return mesh_of((4, 1))


def by_xla(function, mesh, height, width):
    """`function` of whole images on pixels padded for this split, which XLA splits by the shardings it is told."""
    sharding = NamedSharding(mesh, image_spec(height, width))

    def run(pixels, kernel):
        inside = lax.with_sharding_constraint(whole_image(SplitImage(pixels, height, width)), sharding)
        out = lax.with_sharding_constraint(function(inside, kernel), sharding)
        ends = [(0, -n % split.parts) for n, split in zip(out.shape[1:3], (height, width), strict=True)]
        return lax.with_sharding_constraint(jnp.pad(out, ((0, 0), *ends, (0, 0))), sharding)

    return run


SIZES = {
    "convolution": (
        lambda x, k: halo.convolution(x, k, strides=(2, 2)),
        lambda x, k: same_convolution(x, k, (2, 2)),
        38,
        Window(3, 2, 1, 0, 1),
    ),
    "wide": (
        lambda x, k: halo.convolution(x, k, dilation=(6, 6)),
        lambda x, k: same_convolution(x, k, dilation=(6, 6)),
        10,
        Window(3, 1, 6, 6, 6),
    ),
    "bilinear": (
        lambda x, k: halo.upsample(x, (75, 8), "bilinear"),
        lambda x, k: jax.image.resize(x, (2, 75, 8, 16), "bilinear"),
        38,
        None,
    ),
}


@pytest.mark.parametrize(("name", "gathers"), [("convolution", False), ("wide", True), ("bilinear", True)])
def test_no_image_is_gathered_whole_where_xla_gathers_it(name, gathers, along_height):
    ours, whole, rows, window = SIZES[name]
    image, kernel = normal((2, rows, 8, 16)), normal((3, 3, 16, 16), 1)
    height, width = Split(rows, 4, "down"), Split(8)
    spec = image_spec(height, width)

    def local(pixels, kernel):
        return ours(SplitImage(pixels, height, width), kernel).filled(0)

    split = jax.shard_map(local, mesh=along_height, in_specs=(spec, PartitionSpec()), out_specs=spec)
    pixels = jax.device_put(split_image(image, height, width).pixels, NamedSharding(along_height, spec))
    reads = slide(height, window)[1] if window else enlarge(height, 75, True)[1]
    halos = sent(reads, height, image.nbytes // rows)
    assert sorted(moved(split, pixels, kernel)) == [("collective-permute", size) for size in sorted(halos)]

    both = moved(jax.grad(lambda pixels, kernel: (split(pixels, kernel) ** 2).sum(), (0, 1)), pixels, kernel)
    assert {operation for operation, _ in both} <= {"collective-permute", "all-reduce"}
    assert all(n <= kernel.nbytes for operation, n in both if operation == "all-reduce")  # the kernel's gradient
    # The measure is not blind: of the same operation in XLA's hands it sees the gather.
    theirs = moved(by_xla(whole, along_height, height, width), pixels, kernel)
    assert [operation for operation, n in theirs if n >= image.nbytes] == ["all-gather"] * gathers


def sent(reads, split, row_bytes):
    """The bytes of each message: whole blocks, and what is left of the halo in front and behind."""
    for rows in (reads.before, reads.after):
        while rows > 0:
            yield min(rows, split.block) * row_bytes
            rows -= split.block


@pytest.mark.parametrize("name", SIZES)
def test_xla_splits_the_same_operations_by_their_shardings(name, along_height):
    _, whole, rows, _ = SIZES[name]
    image, kernel = normal((2, rows, 8, 16)), normal((3, 3, 16, 16), 1)
    height, width = Split(rows, 4, "down"), Split(8)
    size = jax.eval_shape(whole, image, kernel).shape[1]

    def split(image, kernel):
        pixels = split_image(image, height, width).pixels
        return by_xla(whole, along_height, height, width)(pixels, kernel)[:, :size]

    assert_close(with_gradients(split)(image, kernel), with_gradients(whole)(image, kernel), atol=5e-5)


# What is refused.


def test_a_split_says_what_it_lacks():
    with pytest.raises(LayoutError, match=r"Split\(size=9, parts=4, axis=None\): 4 parts lie along .* Name it"):
        Split(9, 4)
    with pytest.raises(LayoutError, match=r"at least one row, and lies in at least one part\. Give both"):
        Split(0)


def test_a_window_that_does_not_fit_is_refused():
    image = SplitImage(jnp.ones((1, 3, 3, 1)), Split(3), Split(3))
    expected = r"reaches over 7 rows does not fit into 3 rows of image and 0 \+ 0 of padding. Pad \(SAME\), or take"
    with pytest.raises(LayoutError, match=expected):
        halo.convolution(image, jnp.ones((3, 3, 1, 1)), dilation=(3, 3), padding="VALID")


def test_an_unknown_padding_is_refused():
    image = SplitImage(jnp.ones((1, 3, 3, 1)), Split(3), Split(3))
    with pytest.raises(LayoutError, match=r"padding='FULL' is no rule\. Take SAME or VALID, or pairs of numbers"):
        halo.max_pool(image, (2, 2), padding="FULL")


def test_upsampling_does_not_lose_rows():
    image = SplitImage(jnp.ones((1, 3, 3, 1)), Split(3), Split(3))
    with pytest.raises(LayoutError, match=r"upsampling 3 rows to 2 would lose some\. Pool or convolve with a stride"):
        halo.upsample(image, (2, 3))


def test_an_image_of_another_size_is_refused():
    with pytest.raises(LayoutError, match=r"\(1, 9, 6, 2\) has not the 8 x 6 pixels of its splits. Make them from"):
        split_image(jnp.ones((1, 9, 6, 2)), Split(8), Split(6))


def test_an_axis_that_the_program_has_not_is_named():
    image = SplitImage(jnp.ones((1, 3, 4, 1)), Split(9, 3, "down"), Split(4))
    with pytest.raises(LayoutError, match=r"no mesh axis 'down' here\. Call it inside jax.shard_map over that axis"):
        halo.max_pool(image, (3, 3))


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (Split(8, 2, "down"), "axis 'down' has 4 devices. Give parts=4."),
        (Split(9, 4, "down"), "this device's block has 2 rows, not 3. Make the image with split_image"),
    ],
)
def test_blocks_that_are_not_those_of_the_mesh_are_refused(split, expected):
    def local(pixels):
        return halo.max_pool(SplitImage(pixels, split, Split(4)), (3, 3)).pixels

    spec = PartitionSpec(None, "down")
    with pytest.raises(LayoutError, match=re.escape(expected)):
        jax.eval_shape(
            jax.shard_map(local, mesh=mesh_of((4, 1)), in_specs=spec, out_specs=spec), jnp.ones((1, 8, 4, 1))
        )
