"""Space-to-depth: the same convolution, with its stride folded into the channels."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from multipod.models.resnet import ResNet
from multipod.nn.images.conv_norm import ConvNorm
from multipod.nn.images.convolution import convolution_with_folded_stride

NUMBERS = ("NHWC", "HWIO", "NHWC")


@pytest.mark.slow
@given(
    blocks=st.tuples(st.integers(2, 5), st.integers(2, 5)),
    size=st.integers(1, 7),
    step=st.integers(1, 3),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
@settings(max_examples=8, deadline=None)
def test_a_folded_convolution_is_the_convolution(blocks, size, step, padding):
    image = np.random.default_rng(size).standard_normal((2, blocks[0] * step + 6, blocks[1] * step + 6, 3), np.float32)
    image = image[:, : blocks[0] * step + 6 // step * step, : blocks[1] * step + 6 // step * step]
    kernel = np.random.default_rng(step).standard_normal((size, size, 3, 4), np.float32)
    pads = (padding, padding[::-1])
    expected = lax.conv_general_dilated(image, kernel, (step, step), pads, dimension_numbers=NUMBERS)
    found = convolution_with_folded_stride(
        jnp.asarray(image), jnp.asarray(kernel), (step, step), pads, dimension_numbers=NUMBERS
    )
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("side", [32, 31])
def test_a_folded_stem_changes_no_parameter_and_no_value(side):
    style = ResNet(18, width=8, fold_stem=True).style
    plain, folded = (ConvNorm(style, 3, 8, 7, stride=2, fold=fold, rngs=nnx.Rngs(0)) for fold in (False, True))
    image = jax.random.normal(jax.random.key(0), (2, side, side, 3))
    np.testing.assert_array_equal(plain.conv.kernel[...], folded.conv.kernel[...])
    np.testing.assert_allclose(folded.conv(image), plain.conv(image), rtol=1e-4, atol=1e-5)
    key, model = jax.random.key(1), ResNet(18, width=8)
    shapes, other = (jax.eval_shape(one.init, key) for one in (model, replace(model, fold_stem=True)))
    assert shapes == other
