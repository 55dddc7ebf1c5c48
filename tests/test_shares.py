"""Shares of tensors: as small as promised, on any number of devices, and no update, checkpoint or copy sees them."""

import functools
import math
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from layout_recipes import words
from optimizers import make_optimizer
from tiny_recipe import Perceptron, tiny

from multipod.data.batches import TrainBatches
from multipod.elastic.worker.snapshots import SnapshotMemory, choose_copy, restore_copy, take_snapshot
from multipod.layout.layout import Layout
from multipod.layout.mesh import abstract_mesh, make_mesh
from multipod.layout.shares import Share, share_of
from multipod.layout.split import ModelSplit
from multipod.layout.sync import Sync
from multipod.models.bert import Bert
from multipod.optim.lamb import Lamb
from multipod.optim.optimizers import OPTIMIZERS
from multipod.optim.rates import Constant
from multipod.optim.tensors import TensorRules
from multipod.plan.shares import shared_elements
from multipod.plan.workload import Workload
from multipod.recipe.recipe import Recipe
from multipod.recipes.imagenet import resnet50
from multipod.step.placement import MeshPlacement
from multipod.step.program import program_of
from multipod.step.specs import arrays_of, keep, sharded, specs_of, whole_tensors
from multipod.step.state import State, device_bytes
from multipod.step.sync.flat_update import FlatUpdate
from multipod.train.checkpoints.checkpoint import Checkpoints

OLD = Path(__file__).parent / "recorded" / "checkpoint_dims.tar.xz"
"""A checkpoint of before there were flat tensors: two updates of `perceptron` under FSDP on 2x4, and its numbers."""


# A tensor.


@st.composite
def tensors(draw):
    """A shape, data axes, a split of some dims over axes inside a replica, and leading dims to leave alone."""
    shape = draw(st.lists(st.integers(1, 40), max_size=4))
    parts = [draw(st.sampled_from([k for k in (1, 2, 4) if n % k == 0])) for n in shape]
    inner = {f"axis{d}": k for d, k in enumerate(parts) if k > 1}
    base = PartitionSpec(*(f"axis{d}" if k > 1 else None for d, k in enumerate(parts)))
    rows, columns = draw(st.sampled_from([(1, 2), (1, 3), (1, 7), (3, 4), (6, 10), (8, 16), (32, 256), (1, 8191)]))
    return shape, {"y": rows, "x": columns}, base, inner, draw(st.sampled_from([0, 0, 1]))


@given(tensors())
@settings(max_examples=300, deadline=None)
def test_a_share_comes_back_whole_and_is_small(tensor):
    shape, sizes, base, inner, lead = tensor
    share = share_of(shape, sizes, base, sizes | inner, lead)
    whole = np.arange(1, math.prod(shape) + 1, dtype=np.float32).reshape(shape)
    kept = share.flatten(whole)
    assert kept.shape == share.kept
    assert len(share.kept) == len(shape)
    np.testing.assert_array_equal(share.unflatten(kept), whole)
    assert (kept == 0).sum() == kept.size - whole.size, "padding is zeros"
    np.testing.assert_array_equal(Share.from_json(share.to_json()).unflatten(kept), whole)
    every = sizes | inner
    split = [math.prod(every[a] for a in (names if isinstance(names, tuple) else (names,) if names else ()))
             for names in (*share.spec, *[None] * (len(shape) - len(share.spec)))]  # fmt: skip
    assert all(n % k == 0 for n, k in zip(share.kept, split, strict=True)), "JAX asks for equal shares"
    held = math.prod(n // k for n, k in zip(share.kept, split, strict=True))
    assert held <= whole.size / math.prod(every.values()) + 256


@given(tensors())
@settings(max_examples=30, deadline=None)
def test_the_part_of_a_flat_tensor_is_the_flat_part(tensor):
    shape, sizes, base, inner, lead = tensor
    share = share_of(shape, sizes, base, sizes | inner, lead)
    if not share.is_flat:
        return
    whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)

    def first(array, parts):
        return array[tuple(slice(0, n // k) for n, k in zip(array.shape, parts, strict=True))]

    # Each data device's piece of all parts of the last dim lies in one place, as a program sees it that is manual
    # over the data axes alone.
    kept = share.flatten(whole)
    pieces = kept.reshape(*kept.shape[:-1], share.devices, share.parts[-1], -1)[..., 0, :]
    of_part = first(pieces.reshape(*kept.shape[:-1], -1), (*share.parts[:-1], 1))
    np.testing.assert_array_equal(share.local.flatten(first(whole, share.parts)), of_part)


# The state of real models, as shapes.


@functools.cache
def shapes_of(name):
    model = {"bert": Bert(layers=1), "resnet50": resnet50().model, "words": words().model}[name]
    return model, jax.eval_shape(model.init, jax.random.key(0))


@functools.cache
def optimizer_shapes(name, optimizer):
    return jax.eval_shape(optimizer.build(10).init, shapes_of(name)[1][0])


def placed(name, optimizer, layout):
    """Where a real model lies under `optimizer`; its state is worked out once for all meshes."""
    model, (params, statistics) = shapes_of(name)
    made = MeshPlacement(replace(words(layout), model=model, optimizer=optimizer), abstract_mesh(layout))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    state = State(params, statistics, optimizer_shapes(name, optimizer), number, number, number)
    made.__dict__["state"] = state
    return made


MESHES = [(1, 2), (1, 3), (2, 3), (1, 7), (3, 4), (6, 10), (8, 16), (32, 64), (32, 256)]
HOLES = [(1, 59), (1, 2047), (1, 8188)]
"""The rows in which the rest of 6x10, 32x64 and 32x256 lie when chips have failed."""


@pytest.mark.parametrize("mesh", [*MESHES, *HOLES])
@pytest.mark.parametrize("name", ["bert", "resnet50"])
def test_state_on_a_device_is_its_share_of_the_whole(name, mesh):
    devices, kinds = math.prod(mesh), OPTIMIZERS if mesh == (1, 7) else ["lamb"]
    for optimizer in (make_optimizer(kind, Constant(0.1), momentum=0.9) for kind in kinds):
        placement = placed(name, optimizer, Layout(mesh, sync=Sync(sharding="fsdp")))
        held = [
            (placement.state.params, placement.shares),
            (placement.state.optimizer, FlatUpdate(placement).state_shares),
        ]
        for whole, shares in held:
            kept = jax.eval_shape(functools.partial(keep, shares=shares), whole)
            leaves = jax.tree.leaves(whole)
            total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
            on_one = device_bytes(sharded(kept, placement.mesh, specs_of(shares)))
            assert on_one <= 1.02 * total / devices + 1024 * len(leaves), (optimizer, on_one, total / devices)


@pytest.mark.parametrize("mesh", [(1, 7), (6, 10), (32, 256)])
@pytest.mark.parametrize("kind", ["lamb", "sm3"])
def test_the_planner_prices_what_is_split(mesh, kind):
    placement = placed("resnet50", make_optimizer(kind, Constant(0.1)), Layout(mesh, sync=Sync(sharding="fsdp")))
    leaves = jax.tree.leaves(placement.state.params)
    tensors = tuple(Counter(leaf.shape for leaf in leaves).items())
    workload = Workload(
        "resnet50", sum(leaf.size for leaf in leaves), lambda *_: None, tensors=tensors, flattens=kind == "lamb"
    )
    priced = shared_elements(workload, placement.recipe.layout, math.prod(mesh))
    kept = jax.eval_shape(functools.partial(keep, shares=placement.shares), placement.state.params)
    assert 4 * priced.kept == device_bytes(sharded(kept, placement.mesh, specs_of(placement.shares)))
    assert priced.sent == sum(leaf.size for leaf in jax.tree.leaves(kept))
    whole = 4 * sum(math.prod(share.kept) for share in jax.tree.leaves(placement.shares) if share.is_flat)
    assert 4 * priced.gathered == (0 if kind == "lamb" else whole)


def test_beside_tensors_that_are_split_within_a_replica():
    layout = Layout((1, 3), split=ModelSplit(model=2), sync=Sync(sharding="zero1"))
    placement = placed("words", Lamb(Constant(0.1)), layout)
    shares = dict(zip(placement.tensors, jax.tree.leaves(placement.shares), strict=True))
    table = shares["embedding/table"]
    assert table.kept == (2, 513), "[64, 16] with 64 by model: 2 parts of 512, padded to 513"
    assert table.spec == PartitionSpec("model", ("y", "x"))


# An update.


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_of_shares_is_that_of_whole_tensors(name):
    """Against Optax on whole tensors, the padding included: it stays zero, and counts in no norm."""
    layout = Layout((1, 7), sync=Sync(sharding="zero1"))
    options = {"momentum": 0.9, "weight_decay": 0.1, "clip": 1.0, "rules": TensorRules(stacked=("layers",))}
    optimizer = make_optimizer(name, Constant(0.1), **options)
    rng = np.random.default_rng(0)
    sizes = {"in": (64, 24), "layers": (3, 20, 50), "scale": (300,), "bias": (10,), "wide": (130, 150)}
    params, *gradients = ({k: rng.normal(size=n).astype(np.float32) for k, n in sizes.items()} for _ in range(3))
    transformation = optimizer.build(10)
    made = MeshPlacement(replace(tiny(), optimizer=optimizer, layout=layout, updates=10), make_mesh(layout))
    state = State(params, {}, transformation.init(params), *[jnp.zeros((), jnp.int32)] * 3)
    made.__dict__["state"] = jax.eval_shape(lambda: state)
    made.__dict__["base"] = {k: PartitionSpec() for k in sizes}
    update, shares = FlatUpdate(made), made.shares
    assert {k for k, share in shares.items() if share.is_flat} == {"in", "layers", "scale", "wide"}
    assert not optimizer.flattens or shares["layers"].kept == (3, 1, 1001)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # to compile is what this costs
    def both(params, state):
        flat = arrays_of(keep(params, shares)), keep(state, update.state_shares)
        for gradient in gradients:
            changes, state = transformation.update(gradient, state, params)
            params = optax.apply_updates(params, changes)
            flat = update(arrays_of(keep(gradient, shares)), flat[1], flat[0])
        return (params, state), flat

    (params, state), (flat, flat_state) = both(params, state.optimizer)
    for one, other in (({k: shares[k].unflatten(flat[k]) for k in sizes}, params), (whole_tensors(flat_state), state)):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=3e-6), one, other)
    assert not np.asarray(flat["scale"])[300:].any()


def perceptron(layout: Layout, **changes) -> Recipe:
    """A perceptron whose batch divides over 1 to 8 devices, and whose tensors do not."""
    return replace(tiny(), batch=168, updates=4, layout=layout, model=Perceptron(30), **changes)


def two_updates(recipe):
    """The program and its state after two updates."""
    program = program_of(recipe, make_mesh(recipe.layout))
    update, state = program.compile_update(), program.init()
    batches = TrainBatches(recipe.data.train(), recipe.batch, recipe.seed, np.arange(program.rows), program.padded)
    for _, batch in zip(range(2), batches.start(0), strict=False):
        placed_batch = program.place_batch(batch, np.arange(program.rows), program.rows)
        state, _ = jax.block_until_ready(update(state, placed_batch, program.controls()))
    return program, state


@functools.cache
def alone():
    program, state = two_updates(perceptron(Layout((1, 1)), optimizer=Lamb(Constant(0.01))))
    return jax.device_get(program.full_params(state))


@pytest.mark.parametrize(
    "sync",
    [
        Sync("torus", sharding="zero1", bucket_bytes=2000),
        Sync(sharding="fsdp"),
        Sync(sharding="zero1", gather_dtype="bfloat16"),
    ],
)
def test_seven_devices_learn_what_one_does(sync):
    program, state = two_updates(perceptron(Layout((1, 7), sync=sync), optimizer=Lamb(Constant(0.01))))
    tolerance = 2e-2 if sync.gather_dtype else 1e-5
    found = jax.device_get(program.full_params(state))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), found, alone())
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(alone()))
    assert device_bytes(program.shapes.optimizer) <= 2 * total / 7 + 1024


# Checkpoints and copies.


def saved_in(folder, state):
    checkpoints = Checkpoints(folder, 1)
    checkpoints.save(state, int(state.update))
    checkpoints.wait()
    checkpoints.close()


def numbers(state):
    """The state's numbers by name, whole."""
    whole = whole_tensors(jax.device_get(state))._asdict()
    leaves = jax.tree_util.tree_flatten_with_path(whole)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def assert_restored(folder, layout, expected, recipe=perceptron):
    """Asserts that every number is there again, in this layout."""
    asked = recipe(layout, optimizer=make_optimizer("adamw", Constant(0.01)))
    checkpoints = Checkpoints(folder, 1, read_only=True)
    state = checkpoints.restore(program_of(asked, make_mesh(layout)).shapes)
    checkpoints.close()
    found = numbers(state)
    assert found.keys() == expected.keys()
    for name, number in found.items():
        np.testing.assert_array_equal(number, expected[name], err_msg=name)


LAYOUTS = [
    Layout((1, 7), sync=Sync(sharding="fsdp")),
    Layout((2, 3), sync=Sync(sharding="zero1")),
    Layout((2, 2)),
]


def test_a_checkpoint_of_seven_devices_goes_to_any_layout(tmp_path):
    recipe = perceptron(LAYOUTS[0], optimizer=make_optimizer("adamw", Constant(0.01)))
    program = program_of(recipe, make_mesh(LAYOUTS[0]))
    state = program.init()
    saved_in(tmp_path, state)
    assert (tmp_path / "0" / "shares.json").is_file()
    for layout in LAYOUTS:
        assert_restored(tmp_path, layout, numbers(state))


def test_a_checkpoint_of_before_goes_to_any_layout(tmp_path):
    with tarfile.open(OLD) as archive:
        archive.extractall(tmp_path, filter="data")
    expected = dict(np.load(tmp_path / "state.npz"))
    recipe = functools.partial(replace, perceptron(Layout()), model=Perceptron(), batch=56)
    for layout in LAYOUTS:
        assert_restored(tmp_path / "checkpoints", layout, expected, lambda at, **kw: recipe(layout=at, **kw))


def test_a_copy_in_memory_goes_to_fewer_devices():
    optimizer = make_optimizer("adamw", Constant(0.01))
    state = program_of(perceptron(LAYOUTS[0], optimizer=optimizer), make_mesh(LAYOUTS[0])).init()
    snapshot = take_snapshot(state, (0, 0))
    fewer = Layout((2, 3), sync=Sync(sharding="fsdp"))
    program = program_of(perceptron(fewer, optimizer=optimizer), make_mesh(fewer))
    choice = choose_copy([SnapshotMemory(snapshots=[snapshot]).manifest()], program.shapes)
    back = numbers(restore_copy(choice, snapshot, program.shapes, program.mesh))
    for name, number in numbers(state).items():
        np.testing.assert_array_equal(back[name], number, err_msg=name)
