"""The image networks: parameter counts as published, values as in PyTorch, initial values, rates, refusals."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from multipod.errors import RecipeError
from multipod.layout.mesh import batch_sharding, make_mesh
from multipod.models.efficientnet import SCALINGS, EfficientNet, efficientnet, round_features, round_repeats
from multipod.models.resnet import BLOCKS, ResNet
from multipod.nn.images.batch_norm import TileBatchNorm
from multipod.nn.images.depthwise import DIMENSIONS, depthwise_convolution
from multipod.nn.images.squeeze_excite import SqueezeExcite
from multipod.optim.tensors import TensorRules
from multipod.recipe.override import override
from multipod.step.program import program_of

KEY = jax.random.key(5)
# To compile is most of what these tests cost, and without optimization it takes half as long.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
# torchvision's documentation of its models, and Keras's for EfficientNet without the moving moments.
PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "b0": 5_288_548,
    "b1": 7_794_184,
    "b2": 9_109_994,
    "b3": 12_233_232,
    "b4": 19_341_616,
    "b5": 30_389_784,
    "b6": 43_040_704,
    "b7": 66_347_960,
}
SMALL = {
    "resnet18": ResNet(18, width=8, classes=7),
    "resnet50": ResNet(50, width=8, classes=7),
    "efficientnet": EfficientNet(width=0.25, depth=0.3, classes=7, dropout=0, stochastic_depth=0),
}


def published(name: str) -> ResNet | EfficientNet:
    return efficientnet(name) if name in SCALINGS else ResNet(int(name.removeprefix("resnet")))


def images(count: int = 4, pixels: int = 33, channels: int = 3) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (count, pixels, pixels, channels))


def randomised(model) -> tuple[dict, dict]:
    """Parameters and statistics in which no scale, bias or moment has its initial value."""
    rng = np.random.default_rng(3)

    def value(name: str, shape: tuple[int, ...]) -> jax.Array:
        if name.endswith("kernel"):
            return jnp.asarray(rng.normal(0, np.sqrt(2 / math.prod(shape[:-1])), shape), jnp.float32)
        center = 1.0 if name.endswith(("scale", "var")) else 0.0
        return jnp.asarray(rng.uniform(center - 0.4, center + 0.4, shape), jnp.float32)

    params, statistics = jax.eval_shape(model.init, KEY)
    return tuple({name: value(name, leaf.shape) for name, leaf in tree.items()} for tree in (params, statistics))


def initial(model, *ends: str) -> dict[str, np.ndarray]:
    """The initial parameters whose names end so. (To compile the random numbers of all takes XLA half a minute.)"""
    chosen = jit(lambda: {name: leaf for name, leaf in model.init(KEY)[0].items() if name.endswith(ends)})()
    return {name: np.asarray(leaf) for name, leaf in chosen.items()}


# b3, b4 and b6 take seconds each and add nothing: the rounding rules are tested for all.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in ("b3", "b4", "b6")])
def test_the_network_has_the_published_number_of_parameters(name):
    params, _ = jax.eval_shape(published(name).init, KEY)
    assert sum(math.prod(leaf.shape) for leaf in params.values()) == PUBLISHED[name]


def by_torch(model) -> Callable:
    import torch_networks

    if isinstance(model, ResNet):
        return partial(torch_networks.resnet, blocks=BLOCKS[model.depth], bottleneck=model.depth >= 50)
    published = [(1, 3, 1), (2, 3, 2), (2, 5, 2), (3, 3, 2), (3, 5, 1), (4, 5, 2), (1, 3, 1)]
    shapes = [
        (window, stride if place == 0 else 1)
        for repeats, window, stride in published
        for place in range(math.ceil(repeats * model.depth))
    ]
    return partial(torch_networks.efficientnet, shapes=shapes)


def in_torch(model, trees: dict, image: jax.Array, target: jax.Array | None = None, double: bool = False) -> tuple:
    """Logits by PyTorch and, where there is a target, the gradients of (logits * target).sum(); as NumPy arrays."""
    import torch

    kind = torch.float64 if double else torch.float32
    moments = ("mean", "var")
    weights = {
        name: torch.tensor(np.asarray(leaf), dtype=kind, requires_grad=not name.endswith(moments))
        for name, leaf in trees.items()
    }
    pixels = torch.tensor(np.asarray(image), dtype=kind).permute(0, 3, 1, 2)
    logits = by_torch(model)(weights, pixels, train=target is not None)
    if target is None:
        return logits.detach().numpy(), {}
    (logits * torch.tensor(np.asarray(target), dtype=kind)).sum().backward()
    return logits.detach().numpy(), {name: leaf.grad.numpy() for name, leaf in weights.items() if leaf.requires_grad}


def distance(one: dict, other: dict) -> float:
    """The distance of all tensors together, each in units of its own size."""
    parts = [np.linalg.norm(one[name] - other[name]) / np.linalg.norm(other[name]) for name in other]
    return float(np.linalg.norm(parts) / np.sqrt(len(parts)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_evaluation_gives_what_pytorch_gives_with_the_same_weights(name):
    pytest.importorskip("torch")
    model = SMALL[name]
    params, statistics = randomised(model)
    forward = jit(lambda p, s, x: model.apply(p, s, {"image": x}, train=False, key=KEY))
    ours, after = forward(params, statistics, images())
    theirs, _ = in_torch(model, params | statistics, images())
    assert ours.shape == (4, model.classes)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
    assert all((after[name] == statistics[name]).all() for name in statistics)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "efficientnet"])
def test_training_is_as_near_as_pytorch_to_pytorch_in_float64(name):
    pytest.importorskip("torch")
    model = SMALL[name]
    params, statistics = randomised(model)
    image, target = images(8, 33), jnp.cos(jnp.arange(56.0)).reshape(8, 7)

    @jit
    def ours(params):
        def loss(params):
            logits, _ = model.apply(params, statistics, {"image": image}, train=True, key=KEY)
            return (logits * target).sum(), logits

        return jax.grad(loss, has_aux=True)(params)

    gradients, logits = ours(params)
    single_logits, single = in_torch(model, params | statistics, image, target)
    exact_logits, exact = in_torch(model, params | statistics, image, target, double=True)
    assert distance(gradients, exact) < 4 * distance(single, exact) + 1e-5
    assert distance({"": logits}, {"": exact_logits}) < 4 * distance({"": single_logits}, {"": exact_logits}) + 1e-6


def test_the_rounding_rules_give_the_published_sizes():
    assert [round_features(32, s.width) for s in SCALINGS.values()] == [32, 32, 32, 40, 48, 48, 56, 64]
    assert [round_features(1280, s.width) for s in SCALINGS.values()] == [
        1280,
        1280,
        1408,
        1536,
        1792,
        2048,
        2304,
        2560,
    ]
    assert [round_repeats(4, s.depth) for s in SCALINGS.values()] == [4, 5, 5, 6, 8, 9, 11, 13]


@given(st.integers(8, 2000), st.floats(0.05, 4))
def test_features_are_a_multiple_of_eight_near_what_was_asked_for(features, width):
    rounded, asked = round_features(features, width), features * width
    assert rounded % 8 == 0
    assert max(0.9 * asked, 8) <= rounded < max(asked + 8, 9)


@pytest.mark.slow
def test_kernels_begin_normal_by_fan_out_and_heads_as_published():
    expected = {
        "stem/conv/kernel": 3 * 3 * 16,
        "blocks/13/depthwise/conv/kernel": 5 * 5,
        "blocks/13/expand/conv/kernel": 6 * 96,
        "blocks/13/squeeze_excite/expand/kernel": 6 * 96,
    }
    params = initial(EfficientNet(width=0.5), *expected, "head/kernel")
    for name, fan_out in expected.items():
        kernel, spread = params[name], np.sqrt(2 / fan_out)
        assert abs(kernel.std() / spread - 1) < 6 / np.sqrt(kernel.size), name
        assert abs(kernel.mean()) < 6 * spread / np.sqrt(kernel.size), name
    assert 0.999 / np.sqrt(1000) < np.abs(params["head/kernel"]).max() <= 1 / np.sqrt(1000)
    params = initial(ResNet(18, width=16), "stem/conv/kernel", "head/kernel")
    assert params["stem/conv/kernel"].std() == pytest.approx(np.sqrt(2 / (49 * 16)), rel=0.05)
    assert params["head/kernel"].std() == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_residual_blocks_of_resnets_begin_as_the_identity(name):
    model = SMALL[name]
    last = {18: 1, 50: 2}[model.depth]
    scales = initial(model, "/norm/scale")
    zero = {f"blocks/{number}/body/{last}/norm/scale" for number in range(sum(BLOCKS[model.depth]))}
    assert {name for name, leaf in scales.items() if not leaf.any()} == zero
    assert all((leaf == 1).all() for name, leaf in scales.items() if name not in zero)


def test_no_scale_of_efficientnet_begins_at_zero():
    assert all((leaf == 1).all() for leaf in initial(SMALL["efficientnet"], "/norm/scale").values())


def test_the_rate_of_stochastic_depth_rises_from_zero_over_the_residual_blocks():
    module = nnx.eval_shape(lambda: efficientnet("b0").module(nnx.Rngs(0)))
    rates = {number: block.drop.rate for number, block in enumerate(module.blocks) if block.drop is not None}
    assert rates == pytest.approx({number: 0.2 * number / 16 for number in (2, 4, 6, 7, 9, 10, 12, 13, 14)})
    assert module.dropout.rate == 0.2


class OneBlock(EfficientNet):
    """Block 6 alone, the only residual one at this depth, which is left out at 6/8 of the rate."""

    def forward(self, module, batch):
        return module.blocks[6](batch["image"])


@pytest.mark.slow
def test_a_block_is_left_out_for_whole_examples_and_what_remains_is_enlarged():
    x = jax.random.normal(KEY, (400, 2, 2, 48))
    params, statistics = randomised(OneBlock(width=0.25, depth=0.3))

    def out(rate: float, train: bool = True) -> jax.Array:
        model = OneBlock(width=0.25, depth=0.3, stochastic_depth=rate)
        return jit(lambda x: model.apply(params, statistics, {"image": x}, train=train, key=KEY)[0])(x)

    whole, kept = out(0.0), out(0.8)
    dropped = (kept == x).all((1, 2, 3))
    expected = jnp.where(dropped[:, None, None, None], x, x + (whole - x) / 0.4)
    np.testing.assert_allclose(kept, expected, rtol=1e-4, atol=1e-4)
    assert abs(int(dropped.sum()) - 240) < 6 * math.sqrt(400 * 0.6 * 0.4)
    np.testing.assert_array_equal(out(0.0, train=False), out(0.8, train=False))


@pytest.mark.slow
def test_randomness_comes_from_the_key_and_only_in_training():
    model = EfficientNet(width=0.25, depth=0.3, classes=5, dropout=0.5, stochastic_depth=0.5)
    params, statistics = randomised(model)
    run = jit(
        lambda key, train: model.apply(params, statistics, {"image": images()}, train=train, key=key)[0],
        static_argnums=1,
    )
    other = jax.random.key(6)
    np.testing.assert_array_equal(run(KEY, True), run(KEY, True))
    assert (run(KEY, True) != run(other, True)).any()
    np.testing.assert_array_equal(run(KEY, False), run(other, False))


def test_squeeze_and_excitation_is_the_published_equation():
    layer = SqueezeExcite(6, 3, rngs=nnx.Rngs(1))
    x = np.asarray(jax.random.normal(KEY, (2, 4, 5, 6)), np.float64)
    weigh = {name: np.asarray(getattr(layer, name).kernel[...], np.float64) for name in ("reduce", "expand")}
    squeezed = x.mean((1, 2)) @ weigh["reduce"]
    excited = squeezed / (1 + np.exp(-squeezed)) @ weigh["expand"]
    expected = x / (1 + np.exp(-excited))[:, None, None]
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "efficientnet"])
def test_bfloat16_is_for_activations_alone(name):
    model = replace(SMALL[name], dtype="bfloat16")
    params, statistics = randomised(model)
    run = lambda model: model.apply(params, statistics, {"image": images()}, train=True, key=KEY)  # noqa: E731
    with jax.numpy_dtype_promotion("strict"):
        traced = jax.jit(lambda: run(model)).trace()
    logits, after = traced.out_info
    assert {leaf.dtype for leaf in [logits, *jax.tree.leaves((params, after))]} == {jnp.dtype("float32")}
    convolutions = [line for line in str(traced.jaxpr).splitlines() if "conv_general_dilated[" in line]
    assert convolutions
    assert all("bf16" in line for line in convolutions)
    if name == "resnet18":
        return  # its values would say the same
    logits, exact = jit(lambda: (run(model)[0], run(SMALL[name])[0]))()
    error = np.abs(logits - exact).max() / np.abs(exact).max()
    assert 1e-5 < error < 0.1


@pytest.mark.parametrize("name", SMALL)
def test_every_norm_has_the_tile_and_the_published_constants(name):
    model = replace(SMALL[name], batch_norm_tile=(1, 2))
    module = nnx.eval_shape(lambda: model.module(nnx.Rngs(0)))
    norms = [node for _, node in nnx.iter_modules(module) if isinstance(node, TileBatchNorm)]
    constants = (1e-3, 0.99) if name == "efficientnet" else (1e-5, 0.9)
    assert len(norms) > 15
    assert {(norm.tile, norm.epsilon, norm.momentum) for norm in norms} == {((1, 2), *constants)}


def test_optimizers_adapt_the_kernels_and_nothing_else():
    rules = TensorRules()
    for name, kernels in {"resnet50": 53 + 1, "b0": 49 + 2 * 16 + 1}.items():
        params, _ = jax.eval_shape(published(name).init, KEY)
        adapted = {tensor for tensor, yes in rules.adapted(params).items() if yes}
        assert adapted == {tensor for tensor in params if tensor.endswith("kernel")}
        assert len(adapted) == kernels
        left = {tensor for tensor, yes in rules.decayed_in_loss(params).items() if not yes}
        assert left == {tensor for tensor in params if "norm/" in tensor}


@pytest.mark.parametrize(
    ("window", "strides"), [((3, 3), (1, 1)), ((3, 3), (2, 2)), ((5, 5), (2, 2)), ((5, 5), (1, 3)), ((2, 3), (3, 1))]
)
def test_depthwise_convolution_and_its_gradients_are_xlas(window, strides):
    image = jax.random.normal(KEY, (2, 8, 9, 5))
    kernel = jax.random.normal(jax.random.key(9), (*window, 1, 5))

    def results(conv, padding, image, kernel):
        def total(image, kernel):
            out = conv(image, kernel, strides, padding, dimension_numbers=DIMENSIONS, feature_group_count=5)
            return (out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)).sum(), out

        return jax.value_and_grad(total, (0, 1), has_aux=True)(image, kernel)

    @jit
    def both(*arrays):  # in one program, because to compile is what this costs
        paddings = ("SAME", "VALID", ((2, 1), (0, 3)))
        convs = (depthwise_convolution, lax.conv_general_dilated)
        return [[results(conv, padding, *arrays) for padding in paddings] for conv in convs]

    ours, theirs = both(image, kernel)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_depthwise_convolution_in_bfloat16_is_summed_in_float32():
    image, kernel = jnp.ones((1, 9, 9, 2), jnp.bfloat16), jnp.full((5, 5, 1, 2), 1.0078125, jnp.bfloat16)
    out = depthwise_convolution(image, kernel, (1, 1), "VALID", feature_group_count=2)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, jnp.bfloat16(25 * 1.0078125))


@pytest.mark.parametrize(("platform", "convolutions"), [("cpu", 0), ("tpu", 3), ("cuda", 3)])
def test_depthwise_convolution_is_xlas_own_but_on_cpu(platform, convolutions):
    image, kernel = jnp.ones((1, 6, 6, 3)), jnp.ones((3, 3, 1, 3))
    conv = partial(depthwise_convolution, strides=(1, 1), padding="SAME", feature_group_count=3)
    both = jax.jit(jax.value_and_grad(lambda image, kernel: jnp.square(conv(image, kernel)).sum(), (0, 1)))
    text = both.trace(image, kernel).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.convolution") == convolutions


def test_depthwise_convolution_refuses_what_is_not_depthwise():
    with pytest.raises(NotImplementedError, match=r"\(1, 6, 6, 4\) by \(3, 3, 2, 4\) in 2 groups"):
        depthwise_convolution(jnp.ones((1, 6, 6, 4)), jnp.ones((3, 3, 2, 4)), (1, 1), "SAME", feature_group_count=2)
    with pytest.raises(NotImplementedError, match="no dilation"):
        depthwise_convolution(
            jnp.ones((1, 6, 6, 4)), jnp.ones((3, 3, 1, 4)), (1, 1), "SAME", feature_group_count=4, rhs_dilation=(2, 2)
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ResNet(42, width=0),
            "ResNet: depth=42 (one of 18, 34, 50, 101, 152), width=0 (at least 1). "
            "Change it in the recipe or with --set.",
        ),
        (
            lambda: EfficientNet(dropout=1.0, dtype="float16", width=math.nan),
            "EfficientNet: dtype='float16' (one of float32, bfloat16), width=nan (at least 0.01), "
            "dropout=1.0 (at least 0, below 1). Change it in the recipe or with --set.",
        ),
        (lambda: efficientnet("b8"), "EfficientNet has no member 'b8'. Nearest: b7, b6, b5, b4."),
        (
            lambda: forward_of(images(channels=1)),
            "ResNet: images of shape (4, 33, 33, 1) have 1 channels, and the model 3. Set model.channels=1.",
        ),
        (
            lambda: forward_of(images()[0]),
            "ResNet: images of shape (33, 33, 3) are not [examples, height, width, channels]. "
            "Add the dim that is missing in the data.",
        ),
    ],
)
def test_what_is_wrong_is_said(make, message):
    with pytest.raises(RecipeError) as caught:
        make()
    assert str(caught.value) == message


def forward_of(image: jax.Array) -> None:
    model = SMALL["resnet18"]
    params, statistics = jax.eval_shape(model.init, KEY)
    jax.eval_shape(lambda p, s: model.apply(p, s, {"image": image}, train=False, key=KEY), params, statistics)


def test_fields_can_be_set_by_name(small):
    changed = override(small(model=ResNet()), ["model.depth=101", "model.batch_norm_tile=2x4", "model.dtype=bfloat16"])
    assert changed.model == ResNet(101, batch_norm_tile=(2, 4), dtype="bfloat16")
    with pytest.raises(RecipeError, match=r"ResNet: depth=7 \(one of|model.depth='7' does not fit"):
        override(changed, ["model.depth=7"])


@pytest.mark.slow
def test_it_trains_on_a_mesh(small):
    """From weights made here: to compile the initial ones takes as long as the update."""
    model = EfficientNet(0.25, 0.3, channels=1, classes=10, dtype="bfloat16", batch_norm_tile=(1, 1))
    recipe = small(mesh=(1, 2), model=model)
    program = program_of(recipe, make_mesh(recipe.layout))
    params, statistics = randomised(model)
    fresh = program.shapes._replace(
        params=params,
        statistics=statistics,
        optimizer=program.placement.optimizer.init(params),
        key=jax.random.key_data(KEY),
        update=jnp.zeros((), jnp.int32),
        position=jnp.zeros((), jnp.int32),
    )
    fresh = jax.tree.map(np.array, fresh)  # the state is given up at the first update
    state = jax.device_put(fresh, jax.tree.map(lambda leaf: leaf.sharding, program.shapes))
    batch = recipe.data.train().read(np.arange(recipe.batch))
    batch = jax.device_put(batch, batch_sharding(program.mesh))
    update, losses = program.compile_update(), []
    for _ in range(20):
        state, sums = update(state, batch, program.controls())
        losses.append(float(sums["loss"] / sums["count"]))
    assert losses[-1] < 0.7 * losses[0]
    assert all((state.statistics[name] != statistics[name]).all() for name in statistics)
