"""Tensor-train tables: shapes, conversions, initial values, and bags against the tables they stand for."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from multipod.errors import DataError, NativeError, RecipeError
from multipod.nn.tables import tensor_train_native
from multipod.nn.tables.bags import check_bags, check_ids, dense_bag
from multipod.nn.tables.tensor_train import (
    TensorTrain,
    covering_factors,
    decompose,
    exact_factors,
    look_up,
    materialize,
    tensor_train,
)
from multipod.nn.tables.tensor_train_bag import bag
from multipod.nn.tables.tensor_train_init import initial_cores, spread

# To compile is most of what these tests cost, and without optimization it takes half as long.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
KEY = jax.random.key(7)
# rows: factors, and parameters at ranks 8, 16, 32, 64 with columns 2 x 2 x 4 (arXiv:2101.11714; the largest tables of
# Criteo's Kaggle set).
KAGGLE = {
    10_131_227: ((200, 220, 250), (39_360, 135_040, 495_360, 1_891_840)),
    8_351_593: ((200, 200, 209), (35_488, 122_176, 449_152, 1_717_504)),
    7_046_547: ((200, 200, 200), (35_200, 121_600, 448_000, 1_715_200)),
    5_461_306: ((166, 175, 188), (31_072, 106_944, 393_088, 1_502_976)),
    2_202_608: ((125, 130, 136), (22_992, 79_264, 291_648, 1_115_776)),
    286_181: ((53, 72, 75), (12_464, 43_360, 160_448, 615_808)),
    142_572: ((50, 52, 55), (9_216, 31_744, 116_736, 446_464)),
}
# A shape with vectors of sixteen, of eight and of four, tails, two, three and four cores.
SHAPES = {
    "two": tensor_train(60, 6, 3, cores=2),
    "three": tensor_train(700, 12, (5, 9), row_factors=(8, 9, 10), column_factors=(1, 3, 4)),
    "wide": tensor_train(900, 64, 16),
    "four": tensor_train(300, 24, (3, 18, 4), cores=4),
}


def drawn(tt: TensorTrain, seed: int = 7) -> tuple[jax.Array, ...]:
    """Cores of the size of one; NumPy draws without compiling."""
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=shape) / shape[1] ** 0.5, jnp.float32) for shape in tt.shapes)


def ragged(tt: TensorTrain, bags: int = 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids with duplicates, bags of which some are empty, padding at the end, weights."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 5, bags))]).astype(np.int32)
    ids = rng.integers(0, tt.rows, offsets[-1] + 6).astype(np.int32)
    ids[: len(ids) // 2] = ids[rng.integers(0, 7, len(ids) // 2)]
    ids[3], ids[offsets[-1]] = tt.rows - 1, -5  # the last row; padding may hold anything
    return ids, offsets, rng.normal(size=len(ids)).astype(np.float32)


@given(st.integers(1, 10**8), st.integers(2, 4))
def test_covering_factors_cover_with_little_padding(rows, count):
    factors = covering_factors(rows, count)
    assert math.prod(factors) >= rows
    assert max(factors) <= math.ceil(rows ** (1 / count)) + 1
    assert math.prod(factors) <= rows + count * max(factors) ** (count - 1)


def test_exact_factors():
    assert [exact_factors(n, 3) for n in (16, 64, 128, 7, 1)] == [(2, 2, 4), (4, 4, 4), (4, 4, 8), (1, 1, 7), (1, 1, 1)]


def test_default_factors_of_the_largest_kaggle_table():
    tt = tensor_train(10_131_227, 16, 32)
    assert tt.row_factors == (216, 217, 217)
    assert tt.padded_rows / tt.rows < 1.005
    assert tt.parameters < 520_000


@pytest.mark.parametrize("rows", KAGGLE)
def test_parameters_of_the_published_factorisations(rows):
    factors, parameters = KAGGLE[rows]
    found = [tensor_train(rows, 16, rank, row_factors=factors, column_factors=(2, 2, 4)) for rank in (8, 16, 32, 64)]
    assert tuple(tt.parameters for tt in found) == parameters
    assert found[0].parameters == sum(map(math.prod, found[0].shapes))


@pytest.mark.parametrize("name", SHAPES)
def test_entries_are_products_of_matrices(name):
    tt = SHAPES[name]
    cores = drawn(tt)
    table = np.asarray(jit(partial(materialize, tt))(cores))
    some = np.array([0, 1, tt.rows // 2, tt.rows - 1])
    np.testing.assert_allclose(jit(partial(look_up, tt))(cores, some), table[some], rtol=1e-5, atol=1e-6)
    exact = [np.asarray(core, np.float64) for core in cores]
    for i, j in [(0, 0), (tt.rows - 1, tt.features - 1), (tt.rows // 3, 1)]:
        rows, columns = np.unravel_index(i, tt.row_factors), np.unravel_index(j, tt.column_factors)
        product = np.eye(1)
        for core, row, column in zip(exact, rows, columns, strict=True):
            product = product @ core[row, :, column, :]
        assert table[i, j] == pytest.approx(product.item(), rel=1e-4, abs=1e-6)


def test_svd_finds_a_table_that_has_these_ranks():
    tt = tensor_train(210, 24, (4, 3), row_factors=(5, 6, 7), column_factors=(2, 3, 4))
    with jax.enable_x64():
        table = np.asarray(materialize(tt, tuple(core.astype(jnp.float64) for core in drawn(tt))))
    cores, error = decompose(table, tt)
    assert error < 1e-12
    sizes = [np.sqrt(np.mean(np.square(core))) for core in cores]
    assert sizes == pytest.approx([sizes[0]] * 3)
    with jax.enable_x64():
        np.testing.assert_allclose(materialize(tt, tuple(map(jnp.asarray, cores))), table, rtol=1e-9, atol=1e-12)


def test_svd_error_lies_between_what_singular_values_allow():
    tt = tensor_train(119, 12, (4, 3), row_factors=(4, 5, 6), column_factors=(2, 3, 2))
    table = np.random.default_rng(0).normal(size=(119, 12))
    padded = np.concatenate([table, np.zeros((1, 12))]).reshape(4, 5, 6, 2, 3, 2).transpose(0, 3, 1, 4, 2, 5)
    tails = []
    for bond, rank in ((8, 4), (120, 3)):
        values = np.linalg.svd(padded.reshape(bond, -1), compute_uv=False)
        tails.append(np.sqrt(np.sum(values[rank:] ** 2)) / np.linalg.norm(table))
    _, error = decompose(table, tt)
    assert max(tails) * 0.999 <= error <= math.hypot(*tails) * 1.001
    _, whole = decompose(table, tensor_train(119, 12, 10**6, row_factors=(4, 5, 6), column_factors=(2, 3, 2)))
    assert whole < 1e-12


def test_svd_refuses_another_shape():
    with pytest.raises(RecipeError, match=r"the table is 3 x 4, and the tensor train 60 x 6"):
        decompose(np.zeros((3, 4)), SHAPES["two"])
    assert decompose(np.zeros((60, 6)), SHAPES["two"])[1] == 0.0


@pytest.mark.parametrize("way", ["jax", "native"])
@pytest.mark.parametrize(
    ("name", "weighted", "mode"),
    [("two", False, "sum"), ("three", True, "sum"), ("wide", False, "sum"), ("four", True, "mean")],
)
def test_bags_equal_those_of_the_table(name, weighted, mode, way):
    tt = SHAPES[name]
    cores = drawn(tt)
    ids, offsets, w = ragged(tt)
    w = jnp.abs(jnp.asarray(w)) if weighted else None

    def of_train(cores, w):
        return bag(tt, cores, jnp.asarray(ids), jnp.asarray(offsets), w, mode, way=way)

    def of_table(cores, w):
        return dense_bag(materialize(tt, cores), jnp.asarray(ids), jnp.asarray(offsets), w, mode)

    def values(function):
        wrt = (0, 1) if weighted else (0,)
        return jit(
            lambda c, w: (
                function(c, w),
                jax.grad(lambda *a: (function(*a) * jnp.sin(jnp.arange(tt.features) + 1.0)).sum(), wrt)(c, w),
            )
        )(cores, w)

    for ours, theirs in zip(jax.tree.leaves(values(of_train)), jax.tree.leaves(values(of_table)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6 * float(jnp.abs(theirs).max()) + 1e-12, rtol=1e-5)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_equal_pytorchs(mode):
    torch = pytest.importorskip("torch")
    tt = SHAPES["three"]
    cores = drawn(tt)
    ids, offsets, w = ragged(tt)
    used = int(offsets[-1])
    module = torch.nn.EmbeddingBag(tt.rows, tt.features, mode=mode, include_last_offset=True)
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(np.array(materialize(tt, cores))))
    scale = torch.from_numpy(w[:used]) if mode == "sum" else None
    theirs = module(torch.from_numpy(ids[:used]).long(), torch.from_numpy(offsets).long(), scale).detach().numpy()
    weights = jnp.asarray(w) if mode == "sum" else None
    np.testing.assert_allclose(bag(tt, cores, ids, offsets, weights, mode), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["jax", "native"])
def test_an_id_outside_the_table_spoils_its_bag_alone(way):
    tt = SHAPES["three"]
    cores = drawn(tt)
    ids, offsets = jnp.array([1, 2, tt.rows, 3, -1, 4]), jnp.array([0, 2, 4, 4, 5, 6])

    @jit
    def both(cores):
        def total(cores):
            bags = bag(tt, cores, ids_traced[0], ids_traced[1], way=way)
            return jnp.where(jnp.isnan(bags), 0, bags).sum(), bags

        ids_traced = ids + jnp.int32(cores[0].sum() * 0), offsets + jnp.int32(cores[0].sum() * 0)  # not constants
        return jax.grad(total, has_aux=True)(cores)

    gradient, bags = both(cores)
    assert np.isnan(bags).any(1).tolist() == [False, True, False, True, False]
    assert np.isnan(bags).all(1).tolist() == [False, True, False, True, False]
    assert all(np.isfinite(core).all() for core in gradient)
    assert not np.asarray(bags[2]).any()


def test_more_distinct_ids_than_said_spoil_their_bags():
    tt = SHAPES["three"]
    cores = drawn(tt)
    ids, offsets = np.array([5, 5, 9, 700 - 1], np.int32), np.arange(5, dtype=np.int32)
    found = jit(lambda c: bag(tt, c, ids, offsets, way="jax", distinct=2))(cores)
    assert np.isnan(found).any(1).tolist() == [False, False, False, True]


def test_double_precision_goes_the_way_of_jax():
    tt = SHAPES["four"]
    ids, offsets, _ = ragged(tt)
    with jax.enable_x64():
        cores = tuple(core.astype(jnp.float64) for core in drawn(tt))
        ours, theirs = jit(lambda c: (bag(tt, c, ids, offsets), dense_bag(materialize(tt, c), ids, offsets)))(cores)
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_no_ids_and_no_compiler(monkeypatch):
    tt = SHAPES["two"]
    cores = drawn(tt)
    nothing = np.zeros(0, np.int32), np.zeros(4, np.int32)
    for way in ("jax", "native"):
        assert not np.asarray(bag(tt, cores, *nothing, way=way)).any()

    def refuse():
        raise NativeError("no C++ compiler")

    monkeypatch.setattr(tensor_train_native, "register", refuse)
    assert bag(tt, cores, *nothing).shape == (3, 6)
    with pytest.raises(NativeError):
        bag(tt, cores, *nothing, way="native")


def test_devices_of_a_mesh_each_look_up_their_own_bags():
    tt = SHAPES["three"]
    cores = drawn(tt)
    ids = np.random.default_rng(0).integers(0, tt.rows, (8, 6)).astype(np.int32)
    offsets = np.tile(np.array([0, 2, 6], np.int32), (8, 1))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))

    @jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), *[PartitionSpec("x")] * 2),
        out_specs=PartitionSpec("x"),
        check_vma=False,
    )
    def spread_out(cores, ids, offsets):
        return bag(tt, cores, ids[0], offsets[0])

    alone = [bag(tt, cores, *one) for one in zip(ids, offsets, strict=True)]
    np.testing.assert_allclose(spread_out(cores, ids, offsets), np.concatenate(alone), rtol=1e-5, atol=1e-6)


def test_entries_begin_nearly_gaussian():
    tt = tensor_train(4_096, 64, 8)
    variance = 1 / (3 * tt.rows)
    sampled, plain = (
        spread(materialize(tt, initial_cores(tt, KEY, distribution)), variance)
        for distribution in ("sampled-gaussian", "gaussian")
    )
    assert sampled.variance == pytest.approx(variance, rel=0.1)
    assert plain.variance == pytest.approx(variance, rel=0.25)
    assert sampled.kurtosis == pytest.approx(3.02, abs=0.1)
    assert plain.kurtosis == pytest.approx(4.66, abs=0.5)
    assert sampled.distance < 0.01 < plain.distance
    assert abs(sampled.near_zero - 0.0399) < abs(plain.near_zero - 0.0399)


def test_the_released_scale_is_larger_by_what_it_leaves_out():
    tt = tensor_train(1_000, 64, 8)
    exact, released = (np.std(materialize(tt, initial_cores(tt, KEY, scale=scale))) for scale in ("exact", "released"))
    assert released / exact == pytest.approx(8 * 5.746**1.5, rel=1e-3)


def test_spread_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    entries = np.random.default_rng(0).normal(size=4000)
    ours = spread(entries, 0.9)
    assert ours.kurtosis == pytest.approx(stats.kurtosis(entries, fisher=False))
    assert ours.distance == pytest.approx(
        stats.kstest(entries, stats.norm(scale=math.sqrt(0.9)).cdf).statistic, rel=1e-4
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"row_factors": (9, 9, 9)}, r"the row factors 9 x 9 x 9 cover 729 rows of 1,000"),
        ({"column_factors": (2, 2, 2)}, r"the column factors 2 x 2 x 2 make 8 features, not 16"),
        ({"rank": (8, 99)}, r"rank 99 of bond 2 is larger than it can be, 40"),
        ({"rank": (8, 0)}, r"ranks \(8, 0\) has 0"),
        (
            {"row_factors": (1000, 1), "column_factors": (4, 2, 2)},
            r"2 row factors, 3 column factors and 1 ranks, not d",
        ),
        ({"row_factors": (2000, 2000, 2000)}, r"make 8,000,000,000 rows, and ids are int32"),
        ({"cores": 1}, r"at least 2 cores"),
    ],
)
def test_shapes_that_cannot_be(fields, said):
    with pytest.raises(RecipeError, match=said):
        tensor_train(1_000, 16, **({"rank": 8} | fields))


def test_everything_wrong_is_listed():
    with pytest.raises(
        RecipeError, match=r"cover 8 rows of 1,000; the column factors 1 x 1 x 1 make 1 features, not 16; rank 9"
    ):
        TensorTrain(1_000, 16, (2, 2, 2), (1, 1, 1), (9, 1))


@pytest.mark.parametrize(
    ("ids", "offsets", "said"),
    [
        ([1, 60], [0, 1, 2], r"ads: id 60 at place 1 is outside its 60 rows, the first of 1 such ids"),
        ([1, -1, -2], [0, 3], r"id -1 at place 1 is outside its 60 rows, the first of 2 such ids"),
        ([1, 2, 3], [0, 2, 1], r"offsets go back at bag 1, from 2 to 1"),
        ([1, 2], [1, 2], r"offsets\[0\] is 1, not 0"),
        ([1, 2], [0, 3], r"offsets end at 3, and there are 2 ids"),
        ([1.0, 2.0], [0, 2], r"ids are float\d+ \[2\], not integers \[n\]"),
        ([1, 2], [], r"offsets are .* \[0\], not integers \[bags \+ 1\]"),
    ],
)
def test_bags_that_do_not_fit(ids, offsets, said):
    with pytest.raises(DataError, match=said):
        check_bags(np.array(ids), np.array(offsets, int), 60, table="ads")


def test_the_same_is_refused_when_called_directly():
    tt = SHAPES["two"]
    cores = drawn(tt)
    with pytest.raises(DataError, match=r"clicks: id 77 at place 0 is outside its 60 rows"):
        bag(tt, cores, np.array([77], np.int32), np.array([0, 1], np.int32), table="clicks")
    with pytest.raises(DataError, match=r"weights are \[2\], not \[1\] as the ids"):
        bag(tt, cores, np.array([7], np.int32), np.array([0, 1], np.int32), np.ones(2, np.float32))
    with pytest.raises(RecipeError, match=r"the cores have shapes"):
        bag(SHAPES["three"], cores, np.array([7], np.int32), np.array([0, 1], np.int32))
    with pytest.raises(DataError, match=r"field 3: id 99 at place 1000 is outside its 50 rows"):
        check_ids(np.array([[99]]), 50, "field 3", example=1000)


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_the_kernel_equals_its_reference(data):
    sizes = [data.draw(st.integers(1, 9)) for _ in range(data.draw(st.integers(2, 4)))]
    columns = [data.draw(st.integers(1, 5)) for _ in sizes]
    rank = data.draw(st.integers(1, 20))
    tt = tensor_train(math.prod(sizes), math.prod(columns), rank, row_factors=sizes, column_factors=columns)
    cores = drawn(tt)
    ids, offsets, w = ragged(tt, bags=5, seed=rank)
    digits = np.unravel_index(np.maximum(ids, 0), tt.row_factors)
    rows = np.ones((len(ids), 1, 1))
    for core, digit in zip(cores, digits, strict=True):
        rows = np.einsum("xar,xrbs->xabs", rows, np.asarray(core, np.float64)[digit])
        rows = rows.reshape(len(ids), -1, rows.shape[-1])
    sums = np.array([w[a:b] @ rows[a:b, :, 0] for a, b in itertools.pairwise(offsets)])
    np.testing.assert_allclose(bag(tt, cores, ids, offsets, w), sums, rtol=1e-4, atol=1e-4 * np.abs(rows).max())


def test_the_kernel_on_the_largest_table_that_int32_can_name():
    tt = tensor_train(1290**3, 8, 3, row_factors=(1290, 1290, 1290))
    cores = drawn(tt)
    ids = np.random.default_rng(0).integers(0, tt.rows, 40).astype(np.int32)
    ids[:3] = 0, tt.rows - 1, tt.rows - 1290
    both = jit(lambda c: [bag(tt, c, ids, np.arange(41, dtype=np.int32), way=way) for way in ("native", "jax")])
    ours, theirs = both(cores)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_a_bag_gives_does_not_depend_on_the_others():
    tt = SHAPES["wide"]
    cores = drawn(tt)
    ids, offsets, w = ragged(tt)
    together = np.asarray(bag(tt, cores, ids, offsets, w, way="native"))
    for number in (0, 5, 11):
        own = slice(offsets[number], offsets[number + 1])
        ends = np.array([0, own.stop - own.start], np.int32)
        alone = bag(tt, cores, ids[own], ends, w[own], way="native")
        np.testing.assert_array_equal(alone[0], together[number])


def test_offsets_that_go_back_in_a_compiled_program_stay_inside_its_arrays():
    tt = SHAPES["two"]
    ids, offsets = np.arange(6, dtype=np.int32), jnp.array([0, 5, 2, 99, -7, 6], jnp.int32)
    found = jit(lambda c, o: jax.grad(lambda c: bag(tt, c, ids, o, way="native").sum())(c))(drawn(tt), offsets)
    assert all(np.isfinite(core).all() for core in found)
