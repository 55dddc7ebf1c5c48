"""Adasum in every form and engine, against a float64 tree written here, and closed forms."""

import itertools
from contextlib import closing
from dataclasses import replace

import adasum_ranks
import engines
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from ranks import RANKS
from test_step import largest_difference, trained
from tiny_recipe import Perceptron

from multipod.collectives.adasum import combinations, dot_sums, group_sum, halving, leaves
from multipod.collectives.schedule import ADASUM, ADD, COPY, Schedule, even_bounds, make_step
from multipod.collectives.verify import verify
from multipod.data.batches import TrainBatches
from multipod.errors import CheckpointError, LayoutError, PoisonedError, ScheduleError
from multipod.execute.adasum import operator as adasum
from multipod.execute.adasum.arithmetic import Arithmetic
from multipod.execute.adasum.devices import combine_tree
from multipod.execute.adasum.double_float import DoubleFloat
from multipod.execute.adasum.native import load_functions
from multipod.execute.adasum.operator import Layers, gram_weights
from multipod.execute.adasum.weights import find_tree_weights
from multipod.execute.engines.numpy import run
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh, topology_of
from multipod.layout.sync import Sync
from multipod.optim.adamw import AdamW
from multipod.optim.optimizers import OPTIMIZERS
from multipod.optim.rates import Cosine
from multipod.optim.sgd import Sgd
from multipod.recipe.text import differences, to_text
from multipod.step.program import program_of
from multipod.step.state import fresh_state
from multipod.topology.topology import Topology
from multipod.train.checkpoints.checkpoint import Checkpoints

LAYERS = Layers((30, 1, 0, 7, 90))
HOLED = Topology((4, 4), failed_chips=frozenset({(1, 1), (2, 3)}))


def pair(a, b, m_a, m_b):
    """The formula of the issue, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    d, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    c_a = 1 - m_a / (m_a + m_b) * d / aa if aa else 1.0
    c_b = 1 - m_b / (m_a + m_b) * d / bb if bb else 1.0
    return c_a * a + c_b * b


def tree64(vectors, low=0, high=None):
    """(combination, leaves) of the vectors with numbers in [low, high), by recursion; None if there are none."""
    high = 1 << max(vectors).bit_length() if high is None else high
    if high - low == 1:
        return (vectors[low].astype(np.float64), 1) if low in vectors else None
    middle = (low + high) // 2
    left, right = tree64(vectors, low, middle), tree64(vectors, middle, high)
    if left is None or right is None:
        return left or right
    return pair(left[0], right[0], left[1], right[1]), left[1] + right[1]


def by_layer(vectors, layers):
    """The float64 tree of each layer, joined."""
    cuts = itertools.pairwise(layers.ends)
    return np.concatenate([tree64({n: v[begin:end] for n, v in vectors.items()})[0] for begin, end in cuts])


def random_vectors(numbers, length, dtype="float32", seed=0, common=1.0):
    rng = np.random.default_rng(seed)
    base = rng.standard_normal(length)
    return {n: (common * base + rng.standard_normal(length)).astype(dtype) for n in numbers}


def gram_of(vectors):
    stacked = np.stack([vector.astype(np.float64) for vector in vectors.values()])
    return stacked @ stacked.T


# The forms, each a function {number: vector} -> combination of one tensor.


def by_halving(vectors):
    count = 1 + max(vectors)
    topology = Topology((count,), failed_chips=frozenset(set(range(count)) - set(vectors)), switched=(True,))
    length = len(next(iter(vectors.values())))
    results = list(run(halving(topology), vectors, Layers((length,))).values())
    assert all(np.array_equal(result, results[0]) for result in results)
    return results[0]


def by_gram(vectors):
    weights = gram_weights(gram_of(vectors)[None], tuple(vectors))[0]
    return sum(w * v.astype(np.float64) for w, v in zip(weights, vectors.values(), strict=True))


def by_pairs(vectors):
    """The Gram form in pairs of float32, on normalised vectors."""
    stacked = np.stack([vector.astype(np.float64) for vector in vectors.values()])
    exponents = np.array([int(np.frexp(np.abs(row).max())[1]) if row.any() else -126 for row in stacked])
    gram = gram_of(dict(enumerate(np.ldexp(stacked, -exponents[:, None]))))[None]
    high = gram.astype(np.float32)
    places = [-1] * (1 << max(vectors).bit_length())
    for rank, number in enumerate(vectors):
        places[number] = rank
    found = jax.jit(find_tree_weights, static_argnums=2)(
        DoubleFloat(jnp.asarray(high), jnp.asarray((gram - high).astype(np.float32))),
        jnp.asarray(exponents[None], jnp.int32),
        tuple(places),
    )
    weights = np.asarray(found.high, np.float64) + np.asarray(found.low, np.float64)
    return weights[0] @ np.ldexp(stacked, int(found.top[0]) - exponents[:, None])


FORMS = {"tree": adasum.tree, "halving": by_halving, "Gram": by_gram, "pairs": by_pairs}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("p", range(1, 10))
def test_parallel_gives_the_mean_and_orthogonal_the_sum(form, p):
    rng = np.random.default_rng(p)
    factors, direction = rng.uniform(-3, 3, p), rng.standard_normal(40)
    parallel = {k: factors[k] * direction for k in range(p)}
    assert np.abs(form(parallel) - factors.mean() * direction).max() < 2e-6
    orthogonal = {k: factors[k] * np.eye(40)[k] for k in range(p)}
    assert np.abs(form(orthogonal) - sum(orthogonal.values())).max() < 2e-6


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_values_known_from_elsewhere(form):
    def of(*vectors):
        return form({k: np.array(vector, np.float64) for k, vector in enumerate(vectors)}).tolist()

    assert of((1, 0), (1, 1)) == pytest.approx([1.25, 0.75])
    assert of((2, 1), (1, 3)) == pytest.approx([1.75, 2.75])
    assert of((1, 2), (-1, -2)) == pytest.approx([0, 0], abs=1e-6)
    assert of((1, 2), (0, 0)) == [1, 2]
    assert of(*([x] for x in (1, 2, 3, 6, 8))) == pytest.approx([4.0])  # without weights 3.25


@settings(deadline=None, max_examples=60)
@given(
    st.sets(st.integers(0, 20), min_size=1, max_size=9),
    st.integers(0, 2**32),
    st.floats(0, 3),
    st.sampled_from(["float32", "float64"]),
)
def test_all_forms_agree_with_the_tree_whatever_ranks_are_left(numbers, seed, common, dtype):
    vectors = random_vectors(sorted(numbers), 50, dtype, seed, common)
    expected = tree64(vectors)[0]
    for name, form in FORMS.items():
        if name != "pairs":  # it compiles anew for every set
            bound = 1e-6 if name == "halving" and dtype == "float32" else 1e-11
            assert np.abs(form(vectors) - expected).max() <= bound * np.abs(expected).max(), name


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.floats(-1, 1), st.floats(0.01, 100))
def test_the_length_is_the_one_that_algebra_gives(seed, cosine, ratio):
    rng = np.random.default_rng(seed)
    a, b = (one / np.linalg.norm(one) for one in rng.standard_normal((2, 30)))
    b -= (a @ b) * a
    b = ratio * (cosine * a + (1 - cosine**2) ** 0.5 * b / np.linalg.norm(b))
    found = adasum.adasum(a, b)
    squared = (1 + ratio**2) * (1 - 0.75 * cosine**2) + 0.5 * cosine**3 * ratio
    assert found @ found == pytest.approx(squared, rel=1e-9, abs=1e-12)
    assert np.allclose(adasum.adasum(b, a), found)
    assert np.allclose(adasum.adasum(1e60 * a, 1e60 * b), 1e60 * found)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 5e-324, 1e-44, 1e30])
def test_small_and_large_numbers(scale):
    for dtype in ("float64", "float32"):
        vectors = {k: (scale * v.astype(np.float64)).astype(dtype) for k, v in random_vectors(range(3), 20).items()}
        if float(np.finfo(dtype).smallest_subnormal) > scale or scale < adasum.LEAST:
            assert np.isfinite(by_halving(vectors)).all()
        else:
            expected = tree64(vectors)[0]
            bound = max(1e-6 * np.abs(expected).max(), 4 * float(np.finfo(dtype).smallest_subnormal))
            assert np.abs(by_halving(vectors) - expected).max() <= bound


# Schedules.


@pytest.mark.parametrize("chips", range(1, 18))
@pytest.mark.parametrize("node", [1, 3])
def test_schedules_are_proven(chips, node):
    schedule = halving(Topology((chips,)), node)
    proof = verify(schedule)
    assert proof.steps == len(schedule.steps)
    sums = [one for one in dot_sums(schedule) if one is not None]
    assert len(sums) == sum(map(bool, combinations(schedule)))
    verify(Schedule("all-reduce", "group", Topology((chips,)), 1, even_bounds(1), group_sum(range(chips))))


@pytest.mark.parametrize("topology", [Topology((16,)), Topology((9,)), HOLED], ids=str)
def test_nobody_sends_more_than_in_a_reduce_scatter(topology):
    schedule = halving(topology)
    p, length = len(topology.chips), 1 << 20
    ends, sent = schedule.elements(length), dict.fromkeys(topology.chips, 0)
    for step in schedule.steps:
        if (step.op == ADASUM).any():
            for src, first, stop in zip(step.src.tolist(), step.first, step.stop, strict=True):
                sent[src] += int(ends[stop] - ends[first])
    assert max(sent.values()) <= length * (p - 1) / p + 100
    parts = [one.members for one in combinations(schedule)[[bool(c) for c in combinations(schedule)].index(True)]]
    assert sorted(parts) == sorted({tuple(r for r in range(p) if topology.chips[r] // 2 == n) for n in range(8)} - {
        members for members in [tuple(r for r in range(p) if topology.chips[r] // 2 == n) for n in range(8)]
        if len(members) < 2
    })  # fmt: skip


def test_a_lost_chip_leaves_the_rest_of_the_tree():
    vectors = random_vectors(HOLED.chips, 128)
    results = run(halving(HOLED), vectors, LAYERS)
    expected = by_layer(vectors, LAYERS)
    for result in results.values():
        assert np.abs(result - expected).max() < 1e-6 * np.abs(expected).max()
    assert leaves(HOLED)[4:8] == (4, -1, 5, 6)


def test_means_inside_nodes_adasum_between():
    vectors = random_vectors(range(6), 128, "float64")
    found = run(halving(Topology((6,)), 2), {k: vector / 2 for k, vector in vectors.items()}, LAYERS)[3]
    means = {k: (vectors[2 * k] + vectors[2 * k + 1]) / 2 for k in range(3)}
    assert np.allclose(found, by_layer(means, LAYERS), rtol=0, atol=1e-12)


def by_hand(*steps, chips=4):
    return Schedule(
        "all-reduce", "by hand", Topology((chips,)), 2, even_bounds(2), [make_step(*step) for step in steps]
    )


BACK = ([1, 0], [0, 1], [1, 0], None, COPY)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (by_hand(([1], [0], 0, None, ADASUM), chips=2), "combines place 1 of 2 0 times, and dot products need"),
        (by_hand(([1, 0], [0, 1], [0, 1], None, [ADASUM, ADD]), chips=2), "step 0 combines and does something else"),
        (
            by_hand(([1, 1], [0, 0], [0, 1], None, ADD), ([0, 0], [2, 3], [0, 1], None, ADASUM)),
            "is of other sets in other places|combines place",
        ),
        (
            by_hand(([0, 1, 2, 1], [1, 0, 1, 2], [0, 1, 0, 1], None, ADASUM)),
            "is sent piece 0 twice|are in two combinations at once",
        ),
        (by_hand(([0, 0], [1, 1], [0, 1], None, COPY), ([0, 1], [1, 0], [0, 1], None, ADASUM)), "contributions twice"),
        (
            by_hand(([0, 0], [2, 2], [0, 1], None, COPY), ([1, 1], [2, 2], [0, 1], None, ADASUM)),
            "is received by chips 2, which are in neither",
        ),
    ],
)
def test_combinations_without_whole_dots_are_refused(schedule, message):
    with pytest.raises(ScheduleError, match=message):
        combinations(schedule)


def test_verify_asks_for_whole_dots():
    half = by_hand(([1], [0], 0, None, ADASUM), ([0], [1], 1, None, ADASUM), BACK, chips=2)
    good = by_hand(([1, 0], [0, 1], [0, 1], None, ADASUM), BACK, chips=2)
    assert verify(good).steps == 2
    with pytest.raises(ScheduleError, match="dot products need each place"):
        verify(half)


@pytest.mark.parametrize("node", [0, -1, 1.5])
def test_a_node_of_no_chips_is_refused(node):
    with pytest.raises(ScheduleError, match="holds no chip"):
        halving(Topology((4,)), node)


def test_poisoned_tensors_are_named():
    vectors = random_vectors(range(3), 128)
    vectors[1][3], vectors[2][35], vectors[0][36] = np.inf, np.nan, -np.inf
    layers = replace(LAYERS, names=("embed", "scale", "none", "head", "body"))
    with pytest.raises(PoisonedError, match=r"not finite: embed on rank 1; head on ranks 0, 2\. There is no result"):
        run(halving(Topology((3,))), vectors, layers)
    with pytest.raises(PoisonedError, match="body on rank 0"):
        run(halving(Topology((1,))), {0: np.full(128, 1e200)}, layers)


def test_layers_must_fit():
    with pytest.raises(ScheduleError, match="5 tensors have 128 elements together, and the vector has 10"):
        run(halving(Topology((2,))), random_vectors(range(2), 10), LAYERS)
    with pytest.raises(ScheduleError, match="1 names for 2 tensors"):
        Layers((1, 2), ("one",))


def test_orthogonality_is_one_for_orthogonal_and_one_over_p_for_equal():
    layers = Layers((4, 4, 4))
    vectors = {k: np.concatenate([np.eye(4)[k], np.ones(4), np.zeros(4)]) for k in range(4)}
    combined = run(halving(Topology((4,))), vectors, layers)[0]
    assert adasum.orthogonality(combined, vectors.values(), layers).tolist() == pytest.approx([1, 0.25, 1])


# JAX.


def on_devices(trees, specs=None, mesh=None, leaf_numbers=None, inside=()):
    """`combine_tree` of one tree a device; the results, and the report."""
    p = len(trees)
    mesh = mesh or (1, p)
    grid = Mesh(np.array(jax.devices()[:p]).reshape(mesh), ("y", "x"))
    specs = specs or jax.tree.map(lambda _: PartitionSpec(), trees[0])
    stacked = jax.tree.map(lambda *tensors: jnp.stack(tensors), *trees)
    numbers = leaf_numbers or leaves(Topology((p if not inside else mesh[0],)))

    def local(tree):
        return combine_tree(
            jax.tree.map(lambda tensor: tensor[0], tree), specs, {"y": mesh[0], "x": mesh[1]}, numbers, inside
        )

    function = jax.shard_map(
        local, mesh=grid, in_specs=PartitionSpec(("y", "x")), out_specs=(specs, PartitionSpec()), check_vma=False
    )
    return jax.jit(function)(stacked)


@pytest.mark.jax_version
@pytest.mark.parametrize("p", [1, 3, 8])
def test_jax_agrees_with_the_tree(p):
    rng = np.random.default_rng(p)
    common = rng.standard_normal((1, 40, 33))
    tensors = {
        "near": common + 0.1 * rng.standard_normal((p, 40, 33)),
        "far": rng.standard_normal((p, 2500)) * 10.0 ** rng.uniform(-3, 3, (p, 1)),
        "tiny": 1e-30 * rng.standard_normal((p, 7)),
        "large": 1e30 * rng.standard_normal((p, 64)),
        "zero": np.zeros((p, 5)),
        "parallel": rng.standard_normal((1, 300)) * rng.uniform(-2, 2, (p, 1)),
    }
    trees = [{name: jnp.asarray(tensor[k], jnp.float32) for name, tensor in tensors.items()} for k in range(p)]
    trees = [tree | {"half": tree["near"].astype(jnp.bfloat16), "empty": jnp.zeros((0, 3))} for tree in trees]
    combined, report = on_devices(trees)
    for k, name in enumerate(sorted(trees[0])):
        given = {r: np.asarray(tree[name]).astype(np.float64) for r, tree in enumerate(trees)}
        expected = tree64(given)[0]
        found = np.asarray(combined[name]).astype(np.float64)
        bound = 2**-8 if name == "half" else 1e-6
        assert found.shape == expected.shape
        assert np.abs(found - expected).max(initial=0) <= bound * np.abs(expected).max(initial=0), name
        together = sum((one**2).sum() for one in given.values())
        share = (expected**2).sum() / together if together else 1.0
        assert float(report.orthogonality[k]) == pytest.approx(share, rel=1e-4 if name != "half" else 0.02)
    assert not np.asarray(report.poisoned).any()


@pytest.mark.jax_version
def test_jax_splits_as_specs_say_and_averages_rows():
    trees = [{"a": jnp.asarray(v[:96].reshape(12, 8)), "b": jnp.asarray(v[96:])} for v in random_vectors(range(8), 107).values()]  # fmt: skip # noqa: E501
    specs = {"a": PartitionSpec("y", "x"), "b": PartitionSpec()}
    for inside in ((), ("x",)):
        combined, _ = on_devices(trees, specs, (2, 4), inside=inside)
        for name in ("a", "b"):
            given = np.stack([np.asarray(tree[name]) for tree in trees]).astype(np.float64)
            given = given.reshape(2, 4, *given.shape[1:]).mean(1) if inside else given
            expected = tree64(dict(enumerate(given)))[0]
            assert np.abs(np.asarray(combined[name]) - expected).max() < 1e-6 * np.abs(expected).max()


def test_jax_reports_what_is_poisoned_and_spoils_nothing_else():
    trees = [{"a": jnp.ones(5) * k, "b": jnp.ones(3)} for k in range(4)]
    trees[2]["a"] = trees[2]["a"].at[1].set(jnp.inf)
    combined, report = on_devices(trees)
    assert np.isnan(combined["a"]).all()
    assert combined["b"].tolist() == pytest.approx([1, 1, 1])
    assert np.argwhere(report.poisoned).tolist() == [[2, 0]]


def test_too_many_vectors_are_refused():
    with pytest.raises(LayoutError, match=r"200 vectors are too many .* the most are 128\. Average inside nodes"):
        combine_tree({"a": jnp.ones(3)}, {"a": PartitionSpec()}, {"y": 10, "x": 20}, range(256))
    with pytest.raises(LayoutError, match="are not the last"):
        combine_tree({"a": jnp.ones(3)}, {"a": PartitionSpec()}, {"y": 2, "x": 2}, range(4), ("y",))


# Training.


def trained_by_hand(recipe, updates, rows=1):
    """Training on one device, with an optimizer and a state for each of eight; changes by the float64 tree."""
    optimizer = recipe.optimizer.build(recipe.updates)
    state = fresh_state(recipe, optimizer)
    batches = TrainBatches(recipe.data.train(), recipe.batch, recipe.seed, np.arange(recipe.batch))
    params, own = state.params, [state.optimizer] * 8

    @jax.jit
    def change(params, own, batch):
        def loss(params):
            outputs, _ = recipe.model.apply(params, state.statistics, batch, train=True, key=jax.random.key(0))
            return recipe.objective(outputs, batch)["loss"].mean()

        return optimizer.update(jax.grad(loss)(params), own, params)

    for position in range(updates):
        batch = batches[position]
        shares = [{n: np.split(value, 8)[r] for n, value in batch.items()} for r in range(8)]
        changes, own = zip(*(change(params, own[r], shares[r]) for r in range(8)), strict=True)

        def combined(*tensors):
            means = np.stack(tensors).astype(np.float64).reshape(8 // rows, rows, *tensors[0].shape).mean(1)
            return tree64(dict(enumerate(means)))[0].astype(np.float32)

        params = optax.apply_updates(params, jax.tree.map(combined, *changes))
    return params


@pytest.mark.parametrize(("optimizer", "way"), [("sgd", "adasum"), ("adamw", "adasum-rows"), ("lamb", "adasum")])
def test_changes_of_local_optimizers_are_combined(small, optimizer, way):
    recipe = small(model=Perceptron(), gradient_sum=way)
    recipe = replace(recipe, optimizer=OPTIMIZERS[optimizer](Cosine(0.01)))
    program, state, _ = trained(recipe, 4)
    expected = trained_by_hand(recipe, 4, 4 if way == "adasum-rows" else 1)
    assert largest_difference(state.params, expected) < 5e-6
    assert all(leaf.shape[0] == 8 for leaf in jax.tree.leaves(program.shapes.optimizer))


def test_a_split_update_changes_nothing(small):
    recipe = small(model=Perceptron(), gradient_sum="adasum-gradients")
    recipe = replace(recipe, optimizer=Sgd(Cosine(0.02)))
    _, whole, _ = trained(recipe, 3)
    _, split, _ = trained(replace(recipe, layout=replace(recipe.layout, sync=Sync("adasum-gradients", "zero1"))), 3)
    assert largest_difference(whole.params, split.params) < 2e-6


def test_seven_chips_report_and_go_on_from_a_checkpoint(small, tmp_path):
    layout = Layout((2, 4), sync=Sync("adasum", report_orthogonality=True), failed=((0, 1),))
    recipe = replace(small(model=Perceptron()), layout=layout)
    recipe = replace(recipe, batch=56, optimizer=AdamW(Cosine(0.01)))
    program, state, sums = trained(recipe, 2)
    shares = {name: float(value) / 56 for name, value in sums.items() if name.startswith("orthogonality/")}
    assert len(shares) == len(jax.tree.leaves(state.params))
    assert all(1 / 7 - 1e-3 <= share <= 1 + 1e-3 for share in shares.values())
    second_moments = [np.asarray(leaf) for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim > 2]
    assert all((leaf[0] != leaf[1]).any() for leaf in second_moments)
    live = topology_of(layout, program.mesh).chips
    with closing(Checkpoints(tmp_path, keep=1, chips=live)) as saved:
        saved.save(state, 2)
        saved.wait()
        assert largest_difference(saved.restore(program.shapes), state) == 0
    layout = replace(layout, failed=((0, 1), (1, 3)))
    fewer = program_of(replace(recipe, layout=layout), make_mesh(layout))
    left = topology_of(layout, fewer.mesh).chips
    with closing(Checkpoints(tmp_path, keep=1, chips=left)) as saved:
        resumed = saved.restore(fewer.shapes)
    for leaf, shape in zip(jax.tree.leaves(resumed), jax.tree.leaves(fewer.shapes), strict=True):
        assert leaf.sharding == shape.sharding
    rows = [live.index(chip) for chip in left]
    own = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], state.optimizer)
    assert largest_difference(resumed, state._replace(optimizer=own)) == 0
    told = pytest.raises(CheckpointError, match="chips 1 have no optimizer state in it: it was saved by chips 0, 2, 3")
    with closing(Checkpoints(tmp_path, keep=1, chips=range(8))) as saved, told:
        saved.restore(program.shapes)
    alone = program_of(
        replace(recipe, layout=Layout((1, 3), sync=Sync("adasum"))), make_mesh(Layout((1, 3), sync=Sync("adasum")))
    )
    with closing(Checkpoints(tmp_path, keep=1, read_only=True)) as saved:
        seen = saved.restore(alone.shapes, weights_only=True)
    assert seen.optimizer is None
    assert largest_difference(seen.params, state.params) == 0


def test_a_poisoned_update_is_refused_by_name(small):
    recipe = small(model=Perceptron(), gradient_sum="adasum")
    program = program_of(recipe, make_mesh(recipe.layout))
    poisoned = np.zeros((8, len(jax.tree.leaves(program.shapes.params))), bool)
    poisoned[3, 0] = True
    with pytest.raises(PoisonedError, match=r"update: not finite: .+ on rank 3\. The weights are lost: lower the rate"):
        program.check({"poisoned": poisoned})
    program.check({"poisoned": np.zeros_like(poisoned)})
    program.check({})


def test_a_run_that_combines_goes_on_only_as_it_began(small):
    began = small(gradient_sum="adasum")
    assert differences(to_text(began), to_text(small(gradient_sum="adasum", mesh=(1, 8)))) == [
        "layout.mesh: [2, 4], now [1, 8]"
    ]
    assert differences(to_text(began), to_text(small())) == ["layout.gradient_sum: adasum, now xla"]
    hurt = replace(began, layout=replace(began.layout, failed=((0, 1),)))
    assert differences(to_text(began), to_text(hurt)) == []
    elsewhere = to_text(small(gradient_sum="adasum", mesh=(1, 3)))
    assert differences(to_text(began), elsewhere, learning=False) == []
    assert differences(to_text(small()), to_text(small(mesh=(1, 8)))) == []


def test_layouts_that_cannot_be_are_refused():
    with pytest.raises(LayoutError, match="gradient_sum=xla: it is a sum and knows nothing of angles"):
        Layout(sync=Sync(report_orthogonality=True))
    with pytest.raises(LayoutError, match="with failed chips: the mesh is a single row"):
        Layout((2, 4), sync=Sync("adasum-rows"), failed=((0, 0),))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_functions_in_c_are_those_of_numpy(dtype):
    fast, plain = Arithmetic(), Arithmetic(native=False)
    if load_functions(np.dtype(dtype)) is None:
        pytest.skip("no C compiler")
    rng = np.random.default_rng(0)
    for length in (0, 1, 15, 16, 4097):
        a, b = rng.normal(size=(2, length)).astype(dtype)
        cuts = np.array([(2, 0, length // 3), (0, length // 3, length)], np.int64)
        numbers = [np.zeros(9), np.zeros(9), np.zeros(12), np.zeros(12)]
        fast.add_dots(numbers[0], a, b, cuts, True)
        plain.add_dots(numbers[1], b, a, cuts, False)
        fast.add_gram(numbers[2], [a, b], cuts)
        plain.add_gram(numbers[3], [a, b], cuts)
        np.testing.assert_allclose(*numbers[:2], rtol=1e-12)
        np.testing.assert_allclose(*numbers[2:], rtol=1e-12)
        gram = numbers[2].reshape(3, 4)
        np.testing.assert_allclose(numbers[0].reshape(3, 3), gram[:, [1, 0, 3]], rtol=1e-12, atol=1e-300)
        own, other = rng.normal(size=(2, 3))
        blended, expected, mixed, summed = (a.copy() for _ in range(4))
        fast.blend(blended, b, cuts, own, other)
        plain.blend(expected, b, cuts, own, other)
        fast.mix(mixed, [mixed, b], cuts, np.stack([own, other], 1))
        plain.mix(summed, [summed, b], cuts, np.stack([own, other], 1))
        for one in (blended, mixed, summed):
            np.testing.assert_allclose(one, expected, rtol=2 * np.finfo(dtype).eps, atol=1e-12)
        assert fast.finite(a)
        for bad in (np.nan, np.inf, -np.inf):
            assert all(not fast.finite(np.insert(a, place, bad)) for place in {0, length // 2, length})
    large = np.zeros(3)
    fast.add_dots(large, np.full(4, 3e38, np.float32), np.ones(4, np.float32), np.array([[0, 0, 4]]), True)
    assert large[1] == pytest.approx(3.6e77)


# Ranks.


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("engine", ["torch", "mpi"])
def test_ranks(engine, tmp_path):
    reports = engines.reports(engine, adasum_ranks.__file__, tmp_path)
    assert [one["failed"] for one in reports] == [{}] * RANKS
    assert len(reports[0]["cases"]) >= 12
    for rank, one in enumerate(reports):
        refused = one["refused"]
        assert refused["poisoned"] == (
            f"PoisonedError: adasum all-reduce on mesh:4 on rank {rank}: not finite: embed on ranks 2, 3; head on rank "
            "1. There is no result, and every rank knows: skip this update on all of them, or lower the rate or the "
            "loss scale."
        )
        assert "1 tensors have 5 elements together, and the vector has 2038" in refused["layers"]
        assert "rank 2 10 x float32 in 2 tensors" in refused["other layers"]
        assert "; tensor 0 is tensor 0 [4] on rank 2, and tensor 0 [5] on rank 0. Give" in refused["other layers"]
        assert "no Gram form: it is for 2 to 16 ranks" in refused["no Gram form"]
        assert "rank 1 40 x float32 in 1 tensors" in refused["other form"]
        assert "by gram by adasum" in refused["other form"]
        assert "int32 has no angles" in refused["integers"]
        if rank < RANKS - 1:
            assert refused["late"].startswith(
                f"PeerLostError: adasum all-reduce on mesh:4 on rank {rank} of 4: the sum broke off: "
            )
        if engine == "torch":
            assert refused["poisoned gradient"].startswith(
                f"PoisonedError: Adasum on rank {rank}: gradients: not finite: 2.bias on rank 3. There is no result"
            )
            assert "second step" not in refused
            assert refused["other model"] == (
                "ScheduleError: Adasum: parameter 0 is 0.weight [6, 6] torch.float32 on rank 2, and 0.weight [5, 6] "
                "torch.float32 on rank 0. Give all ranks the same model."
            )
