"""Fused attention: who is chosen and why, equal to the plain form, in the programs for GPUs and TPUs."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_devices import absent_mesh, custom_calls, lowered_text
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from layout_recipes import words

from multipod import runtime
from multipod.errors import RecipeError
from multipod.layout import compiled
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.split import ModelSplit
from multipod.models.transformer import small_transformer
from multipod.nn.logical_axes import logical_axis_rules
from multipod.nn.text import fused_attention as fused
from multipod.nn.text.attention import KeysValues, attend, attend_by
from multipod.nn.text.fused_attention import (
    AttentionCase,
    AttentionChoice,
    by_cudnn,
    by_splash,
    choose,
    counted_choices,
)
from multipod.nn.text.segments import Segments
from multipod.step.inspect import attention_choices
from multipod.step.program import program_of

GPU = AttentionCase("gpu", "NVIDIA H100 80GB HBM3", True, "bfloat16", 128, 64, 64)
TPU = AttentionCase("tpu", "TPU v5e", True, "float32", 128, 256, 64)


@pytest.mark.parametrize(
    ("asked", "case", "kernel", "reason"),
    [
        ("auto", GPU, "cudnn", ""),
        ("cudnn", GPU, "cudnn", ""),
        ("splash", GPU, "plain", "attention=splash"),
        ("plain", GPU, "plain", "attention=plain"),
        ("auto", TPU, "splash", ""),
        ("auto", replace(TPU, head=256), "splash", ""),
        ("auto", replace(GPU, platform="cpu"), "plain", "cpu has no fused kernel"),
        ("auto", replace(GPU, in_mesh=False), "plain", "outside of a mesh"),
        ("auto", replace(GPU, dropout=0.1), "plain", "dropout is 0.1"),
        ("auto", replace(TPU, bias=True), "plain", "positions' bias"),
        ("cudnn", replace(GPU, segments=False), "plain", "not made of segments"),
        ("auto", replace(TPU, heads_split=False), "plain", "do not divide over the devices"),
        ("auto", replace(GPU, dtype="float32"), "plain", "model.dtype is float32"),
        ("auto", replace(GPU, head=129), "plain", "these have 129"),
        ("auto", replace(GPU, queries=97), "plain", "97 and 64"),
        ("auto", replace(GPU, device_kind="Tesla V100-SXM2-16GB"), "plain", "compute capability 8.0"),
        ("auto", replace(GPU, device_kind="AMD Instinct MI300X"), "plain", "NVIDIA's GPUs"),
        ("auto", replace(TPU, keys=100), "plain", "blocks of 128"),
        ("auto", replace(TPU, head=192), "plain", "these have 192"),
        ("auto", replace(TPU, device_kind="TPU v3"), "plain", "TPU v3"),
    ],
)
def test_the_choice_and_its_reason(asked, case, kernel, reason):
    choice = choose(asked, case)
    assert choice.kernel == kernel
    assert reason in choice.reason
    assert bool(choice.reason) == (kernel == "plain")


def test_a_kernel_by_name_that_cannot_is_an_error():
    with pytest.raises(RecipeError, match=r"attention=cudnn: .*dropout is 0.1. Say attention=auto"):
        choose("cudnn", replace(GPU, dropout=0.1))


def example(queries: int, keys: int, causal: bool, heads: int = 1, features: int = 8):
    """Arrays [1, length, heads, features], and segments: two sequences and padding at the end."""
    draw = np.random.default_rng(0).normal
    arrays = [jnp.asarray(draw(size=(1, n, heads, features)), jnp.float32) for n in (queries, keys, keys)]
    number = [np.where(np.arange(n) < n - n // 5, 1 + (np.arange(n) > n // 3), 0)[None] for n in (queries, keys)]
    return arrays, Segments(*map(jnp.asarray, number), causal)


@pytest.mark.parametrize(("queries", "keys", "causal"), [(128, 256, False), (128, 128, True)])
def test_splash_is_the_plain_form_and_so_is_its_gradient(queries, keys, causal):
    arrays, segments = example(queries, keys, causal)
    tokens = (segments.queries != 0)[..., None, None] * jnp.cos(jnp.arange(8))

    def compared(attention):
        total = lambda q, k, v: (attention(q, k, v) * tokens).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(total, (0, 1, 2)) if causal else total)(*arrays)

    plain = compared(lambda q, k, v: attend(q, KeysValues(k, v), segments.mask()))
    splash = compared(lambda q, k, v: by_splash(q, k, v, segments, interpret=True))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), splash, plain)


@pytest.mark.parametrize("causal", [False, True])
def test_what_cudnn_is_asked_for_is_the_plain_form(monkeypatch, causal):
    arrays, segments = example(12, 12, causal)
    everywhere = jax.nn.dot_product_attention
    xla = lambda *args, implementation, **options: everywhere(*args, implementation="xla", **options)  # noqa: E731
    monkeypatch.setattr(jax.nn, "dot_product_attention", xla)
    tokens = np.asarray(segments.queries != 0)[0]
    plain = jax.jit(attend)(arrays[0], KeysValues(*arrays[1:]), segments.mask())
    np.testing.assert_allclose(jax.jit(by_cudnn)(*arrays, segments)[:, tokens], plain[:, tokens], rtol=1e-5, atol=1e-6)


SPLIT = Layout((2, 1), split=ModelSplit(model=2))


def gradients(mesh, dtype: str, kernel: str = "auto"):
    """The gradient of attention, manual over the data axes, heads split over `model`; and its shapes."""

    def local(q, k, v, ids):
        with logical_axis_rules(mesh, {"heads": ("model",)}):
            total = lambda q: attend_by(kernel, q, KeysValues(k, v), Segments(ids, ids, True)).astype("float32").sum()  # noqa: E731
            return jax.grad(total)(q)

    rows = PartitionSpec("y")
    function = jax.shard_map(
        local, mesh=mesh, in_specs=(rows,) * 4, out_specs=rows, axis_names={"y", "x"}, check_vma=False
    )
    whole = NamedSharding(mesh, PartitionSpec("y", None, "model"))
    arrays = [jax.ShapeDtypeStruct((4, 128, 4, 64), dtype, sharding=whole)] * 3
    ids = jax.ShapeDtypeStruct((4, 128), jnp.int32, sharding=NamedSharding(mesh, rows))
    return function, (*arrays, ids)


@pytest.mark.parametrize(
    ("platform", "dtype", "calls"),
    [
        ("cuda", "float32", set()),
        ("tpu", "float32", {"tpu_custom_call"}),
    ],
)
def test_the_kernel_is_in_the_program_of_the_platform(platform, dtype, calls):
    function, shapes = gradients(absent_mesh(SPLIT, platform), dtype)
    assert custom_calls(lowered_text(function, platform, *shapes)) == calls


def test_cudnn_is_called_by_each_device_for_its_own_heads(monkeypatch):
    # JAX lowers what XLA may partition for devices that are here alone: CPUs that are taken for GPUs.
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91200)
    monkeypatch.setattr("multipod.nn.text.fused_attention.target_platform", lambda: "gpu")
    monkeypatch.setattr("multipod.nn.text.fused_attention.target_device_kind", lambda: GPU.device_kind)
    function, shapes = gradients(make_mesh(SPLIT), "bfloat16")
    text = lowered_text(function, "cuda", *shapes)
    assert custom_calls(text) == {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"}
    assert "tensor<2x128x2x64xbf16>" in text  # half of the rows, half of the heads


def test_a_kernel_that_is_not_asked_for_is_not_there():
    function, shapes = gradients(absent_mesh(SPLIT, "tpu"), "float32", "plain")
    assert not custom_calls(lowered_text(function, "tpu", *shapes))


@pytest.mark.skipif(not compiled.has_libtpu(), reason="needs the extra tpu")
@pytest.mark.jax_version
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")  # of devices that are not here
def test_a_compiled_tpu_program_has_the_kernel():
    runtime.absent_tpus()
    devices = np.array(compiled.absent_devices("v5e:2x2")).reshape(2, 1, 2)
    mesh = Mesh(devices, ("y", "x", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    function, shapes = gradients(mesh, "bfloat16")
    text = jax.jit(function).lower(*shapes).compile().as_text()
    assert len(re.findall('custom_call_target="tpu_custom_call"', text)) >= 2  # forward and backward


def test_models_take_it_and_show_counts_it():
    model = small_transformer(64, features=128, hidden=16, heads=1, encoder_layers=1, decoder_layers=2)
    recipe = words(Layout((2, 2)), model=model)
    program = program_of(recipe, absent_mesh(recipe.layout, "tpu"))
    plain = AttentionChoice("plain", "splash takes lengths in blocks of 128, and these are 12 and 12")
    assert attention_choices(program) == {plain: 5}  # one of the encoder, two of each decoder layer
    forced = replace(recipe, model=replace(model, attention="plain"))
    assert set(attention_choices(program_of(forced, program.mesh))) == {AttentionChoice("plain", "attention=plain")}


def test_nothing_is_counted_unless_asked():
    fused.count_choice(AttentionChoice("plain", "x"))
    with counted_choices() as choices:
        fused.count_choice(AttentionChoice("splash"))
    assert {str(choice): n for choice, n in choices.items()} == {"splash": 1}
