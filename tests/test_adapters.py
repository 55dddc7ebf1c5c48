"""What other programs take from here, each against a reference: Optax, NNX, Linen, `shard_map`, Grain."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from grain.python import Batch, DataLoader, NoSharding, ShardOptions
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from multipod.data.batches import TrainBatches
from multipod.data.digits import Digits
from multipod.data.grain_pipelines import ExactlyOnce, SourceElements
from multipod.errors import DataError, LayoutError
from multipod.execute.adasum.operator import tree
from multipod.interop.adasum import adasum
from multipod.nn.experts.layer import ExpertSpec, SparseMlp
from multipod.nn.experts.routing import Routing
from multipod.nn.halo import halo
from multipod.nn.images.span_norm import SpanBatchNorm
from multipod.nn.tables.tensor_train import tensor_train
from multipod.nn.tables.tensor_train_module import TensorTrainBag
from multipod.optim.lars import lars
from multipod.optim.pipemare import correct_weights, gamma_of, track_velocity
from multipod.optim.sm3 import scale_by_sm3

RNG = np.random.default_rng(0)


DATA = P("data")


def over(count, out_specs=DATA, **kwargs):
    """`jax.shard_map` over so many devices along `data`."""
    mesh = jax.make_mesh((count,), ("data",), (AxisType.Auto,), devices=jax.devices()[:count])
    return partial(jax.shard_map, mesh=mesh, out_specs=out_specs, check_vma=False, **kwargs)


def test_adasum_behind_adam_is_the_combination_of_the_devices_changes():
    optimizer = optax.chain(optax.adam(0.1, eps=1.0), adasum("data"))  # changes that are not all of one length
    params = {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}
    gradients = {"kernel": RNG.normal(size=(4, 3, 2)).astype("f"), "bias": RNG.normal(size=(4, 2)).astype("f")}

    def change(gradients):
        own = jax.tree.map(lambda g: g[0], gradients)
        return optimizer.update(own, optimizer.init(params), params)[0]

    found = jax.jit(over(4, P(), in_specs=P("data"))(change))(gradients)
    adam = optax.adam(0.1, eps=1.0)
    alone = [adam.update(jax.tree.map(lambda g, k=k: g[k], gradients), adam.init(params), params)[0] for k in range(4)]
    for name in params:
        expected = tree({k: np.asarray(one[name]).ravel() for k, one in enumerate(alone)})
        np.testing.assert_allclose(found[name].ravel(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "optimizer",
    [
        lars(optax.constant_schedule(0.1)),
        lars(optax.constant_schedule(0.1), scaled=True),
        optax.chain(scale_by_sm3(), optax.scale(-0.1)),
        optax.chain(optax.sgd(0.1), track_velocity(gamma_of(0.135, 3.5))),
    ],
    ids=["lars", "lars-scaled", "sm3", "pipemare"],
)
def test_our_optimizers_are_transformations_that_optax_combines(optimizer):
    """Each is used as in any program of Optax: chained behind a clip, over some of the parameters, jitted."""
    params = {"kernel": jnp.full((3, 2), 2.0), "frozen": jnp.ones(2)}
    chosen = optax.chain(optax.clip_by_global_norm(1e9), optimizer)
    labels = {"kernel": "learns", "frozen": "stays"}
    both = optax.multi_transform({"learns": chosen, "stays": optax.set_to_zero()}, labels)
    gradient = {"kernel": jnp.asarray(RNG.normal(size=(3, 2)), jnp.float32), "frozen": jnp.ones(2)}
    changes, _ = jax.jit(both.update)(gradient, both.init(params), params)
    alone, _ = optimizer.update(
        {"kernel": gradient["kernel"]}, optimizer.init({"kernel": params["kernel"]}), {"kernel": params["kernel"]}
    )
    np.testing.assert_allclose(changes["kernel"], alone["kernel"], rtol=1e-6)
    assert (np.sign(changes["kernel"]) == -np.sign(gradient["kernel"])).all()
    assert not changes["frozen"].any()


def test_pipemares_extrapolation_finds_the_weights_of_a_steady_drift():
    transformation = track_velocity(0.5)
    state = transformation.init(jnp.zeros(2))
    drift = jnp.array([1.0, -2.0])
    for _ in range(30):
        _, state = transformation.update(drift, state)
    np.testing.assert_allclose(correct_weights(30 * drift, state.velocity, 4), 26 * drift, rtol=1e-6)


@pytest.mark.parametrize(("devices", "span"), [(1, 4), (2, 4), (8, 4), (4, 16), (2, None)])
def test_batch_norm_of_a_span_is_that_of_nnx_on_each_group(devices, span):
    """Outputs, gradients and moving moments, whatever the number of devices."""
    x = (RNG.normal(size=(16, 3, 5)) * 3 + 1).astype("f")
    weights = RNG.normal(size=x.shape).astype("f")
    groups = x.reshape(16 // (span or 16), -1, 3, 5)

    def plain(x):
        module = nnx.BatchNorm(5, rngs=nnx.Rngs(0))
        return jnp.concatenate([module(group) for group in x])

    expected, back = jax.vjp(plain, groups)

    def normalised(x, ct):
        module = SpanBatchNorm(5, span=span, axis_name="data")
        y, back = jax.vjp(lambda x: nnx.clone(module)(x), x)
        module(x)
        return y, back(ct)[0], module.mean[...], module.var[...]

    specs = (P("data"), P("data"), P(), P())
    y, gradient, mean, var = jax.jit(over(devices, specs, in_specs=P("data"))(normalised))(x, weights)
    np.testing.assert_allclose(y, expected, atol=2e-6)
    np.testing.assert_allclose(gradient, back(weights)[0].reshape(x.shape), atol=1e-5)
    np.testing.assert_allclose(mean, 0.01 * x.mean((0, 1)), rtol=1e-4)
    np.testing.assert_allclose(var, 0.99 + 0.01 * x.var((0, 1)), rtol=1e-5)


def test_batch_norm_of_a_span_evaluates_and_refuses_what_does_not_divide():
    module = SpanBatchNorm(5, span=6)
    with pytest.raises(LayoutError, match=r"span=6: 1 devices hold 16 examples each\. Take a span that divides 16"):
        module(jnp.ones((16, 5)))
    module.eval()
    np.testing.assert_allclose(module(jnp.ones((16, 5))), 1 / np.sqrt(1 + 1e-5), rtol=1e-6)


@pytest.mark.parametrize("wrap", [False, True])
def test_a_halo_has_the_neighbours_rows_and_its_gradient_goes_back(wrap):
    x = RNG.normal(size=(2, 16, 3)).astype("f")
    weights = RNG.normal(size=(4, 2, 4 + 3, 3)).astype("f")

    def parts(x):
        padded = jnp.pad(x, ((0, 0), (2, 1), (0, 0)), mode="wrap" if wrap else "constant")
        return jnp.stack([padded[:, 4 * k : 4 * k + 7] for k in range(4)])

    expected, back = jax.vjp(parts, x)
    split = over(4, in_specs=P(None, "data"))(lambda x: halo(x, "data", (2, 1), dim=1, wrap=wrap)[None])
    found, gradient = jax.vjp(jax.jit(split), x)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(gradient(weights)[0], back(weights)[0], atol=1e-6)


def test_a_convolution_with_halos_is_that_of_the_whole_image_and_too_wide_a_halo_is_refused():
    image, kernel = RNG.normal(size=(1, 16, 6, 2)).astype("f"), RNG.normal(size=(5, 5, 2, 3)).astype("f")
    convolve = partial(jax.lax.conv_general_dilated, window_strides=(1, 1), dimension_numbers=("NHWC", "HWIO", "NHWC"))
    whole = convolve(image, kernel, padding=((2, 2), (2, 2)))
    split = over(4, P(None, "data"), in_specs=P(None, "data"))(
        lambda x: convolve(halo(x, "data", 2, dim=1), kernel, padding=((0, 0), (2, 2)))
    )
    np.testing.assert_allclose(jax.jit(split)(image), whole, atol=1e-5)
    with pytest.raises(LayoutError, match="a device has 4 rows"):
        over(4, in_specs=P("data"))(lambda x: halo(x, "data", 5))(jnp.ones(16))


TT = tensor_train(1000, 16, 8)


@pytest.mark.parametrize("form", ["nnx", "linen"])
def test_a_tensor_train_bag_in_a_module_is_the_table_that_its_cores_stand_for(form):
    ids, offsets = jnp.array([3, 999, 3, 500], jnp.int32), jnp.array([0, 3, 3, 4], jnp.int32)
    if form == "nnx":
        module = TensorTrainBag(TT, rngs=nnx.Rngs(0))
        cores, rows, bags = module.weights(), module(ids.reshape(2, 2)), module(ids, offsets)
        assert len(jax.tree.leaves(nnx.state(module, nnx.Param))) == 3
    else:
        module = nnx.bridge.to_linen(TensorTrainBag, TT)
        variables = module.init(jax.random.key(0), ids)
        cores = [jnp.asarray(core) for core in jax.tree.leaves(variables["params"])]
        rows, bags = module.apply(variables, ids.reshape(2, 2)), module.apply(variables, ids, offsets)
    table = np.einsum("axib,cbjd,edky->aceijk", *cores)
    table = table.reshape(TT.padded_rows, 16)
    np.testing.assert_allclose(rows, table[np.asarray(ids)].reshape(2, 2, 16), rtol=1e-4, atol=1e-6)
    expected = np.stack([table[3] * 2 + table[999], np.zeros(16), table[500]])
    np.testing.assert_allclose(bags, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_sparse_layer_in_linen_is_the_one_in_nnx():
    spec = ExpertSpec(Routing(experts=4, group=8, second="all"), hidden=16)
    x = jnp.asarray(RNG.normal(size=(8, 12)), jnp.float32)
    ours = SparseMlp(spec, 12, rngs=nnx.Rngs(0))
    layer = nnx.bridge.to_linen(SparseMlp, spec, 12)
    key = jax.random.key(0)
    variables = layer.init({"params": key, "dropout": key}, x)
    params = jax.tree.unflatten(jax.tree.structure(variables["params"]), jax.tree.leaves(nnx.state(ours, nnx.Param)))
    (expected, report), (found, told) = ours(x), layer.apply(variables | {"params": params}, x, rngs={"dropout": key})
    np.testing.assert_array_equal(found, expected)
    assert float(told["balance"]) == float(report["balance"])


@pytest.mark.parametrize("processes", [1, 3])
def test_grain_reads_in_our_order_each_record_once_on_any_number_of_processes(processes):
    source = SourceElements(Digits().test())
    count = len(source)

    def loader(shard):
        sharding = NoSharding() if processes == 1 else ShardOptions(shard, processes)
        sampler = ExactlyOnce(count, seed=5, epochs=2)
        return DataLoader(data_source=range(count), sampler=sampler, shard_options=sharding, worker_count=0)

    read = [list(loader(shard)) for shard in range(processes)]
    dealt = np.stack(read, 1).ravel()
    batches = TrainBatches(Digits().test(), 40, 5, np.arange(40))
    np.testing.assert_array_equal(dealt, np.concatenate([batches.numbers(k) for k in range(2 * count // 40)]))
    iterator = iter(loader(0))
    for _ in range(100):
        next(iterator)
    again = iter(loader(0))
    again.set_state(iterator.get_state())
    assert list(again) == read[0][100:]


def test_grain_makes_batches_of_our_examples():
    source = SourceElements(Digits().test())
    sampler = ExactlyOnce(len(source), epochs=1)
    batch = next(
        iter(
            DataLoader(
                data_source=source, sampler=sampler, operations=[Batch(8)], shard_options=NoSharding(), worker_count=0
            )
        )
    )
    numbers = TrainBatches(Digits().test(), 8, 0, np.arange(8)).numbers(0)
    np.testing.assert_array_equal(batch["label"], Digits().test().read(numbers)["label"])
    with pytest.raises(IndexError, match="no place 360"):
        sampler[360]
    with pytest.raises(DataError, match="at least one record"):
        ExactlyOnce(0)
