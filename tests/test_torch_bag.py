"""The PyTorch bag of a tensor train against `torch.nn.EmbeddingBag` of the same table, and against the JAX form."""

import copy
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multipod.errors import DataError, NativeError, RecipeError
from multipod.nn.tables import tensor_train_library
from multipod.nn.tables.tensor_train import materialize, tensor_train
from multipod.nn.tables.tensor_train_bag import bag as jax_bag

torch = pytest.importorskip("torch")

from multipod.interop.torch import TTEmbeddingBag, from_jax, to_jax  # noqa: E402
from multipod.interop.torch_tables import operator, plain  # noqa: E402
from multipod.interop.torch_tables.plain import Bags  # noqa: E402

SHAPES = {
    "two": (60, 6, (3,), None, None),
    "three": (700, 12, (5, 9), (8, 9, 10), (1, 3, 4)),
    "wide": (900, 64, 16, None, None),
    "four": (300, 24, (3, 18, 4), None, None),
}
"""A shape with vectors of sixteen, of eight and of four, tails, two, three and four cores."""


@pytest.fixture(autouse=True)
def _threads():
    """Two threads, whatever the machine has, and the same numbers in every test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def made(name: str = "three", **options) -> TTEmbeddingBag:
    """A module whose table has entries of the size of one."""
    found = TTEmbeddingBag(*SHAPES[name], **options)
    with torch.no_grad():
        for core in found.cores:
            core.copy_(torch.randn(core.shape) / core.shape[1] ** 0.5)
    return found


def dense(bag: TTEmbeddingBag, **options):
    """PyTorch's own, with the table that the cores spell out."""
    found = torch.nn.EmbeddingBag(
        bag.num_embeddings,
        bag.embedding_dim,
        mode=bag.mode,
        include_last_offset=bag.include_last_offset,
        padding_idx=bag.padding_idx,
        **options,
    )
    with torch.no_grad():
        found.weight.copy_(bag.full_weight())
    return found


def batch(rows: int, count: int = 90, dtype=torch.int64):
    """Ids with duplicates and empty bags, first and last ones too."""
    ids = torch.randint(rows, (count,), dtype=dtype)
    ids[::3] = ids[torch.arange(len(ids[::3])) % 4]
    ids[7] = rows - 1
    offsets = torch.tensor([0, 0, 3, 20, 20, 21, 60, count], dtype=dtype)
    return ids, offsets


def of_cores(table_gradient, bag: TTEmbeddingBag) -> list:
    """The gradient of the cores, from that of the table, by autograd of the table in float64."""
    cores = [core.detach().double().requires_grad_() for core in bag.cores]
    table = plain.materialize(cores)[: bag.num_embeddings]
    return torch.autograd.grad(table, cores, table_gradient.double())


def assert_close(ours, theirs, scale=1.0):
    largest = max(1.0, float(theirs.detach().abs().max())) if theirs.numel() else 1.0
    torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=1e-5, atol=2e-6 * largest * scale)


@pytest.mark.parametrize("way", ["native", "plain"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 5, -1])
@pytest.mark.parametrize(
    ("name", "dtype", "last"),
    [
        ("two", torch.int64, False),
        ("three", torch.int32, True),
        ("wide", torch.int64, True),
        ("four", torch.int32, False),
    ],
)
def test_bags_and_gradients_are_those_of_the_dense_table(name, dtype, last, padding_idx, mode, way):
    bag = made(name, mode=mode, padding_idx=padding_idx, include_last_offset=last, way=way)
    other = dense(bag)
    ids, offsets = batch(bag.num_embeddings, dtype=dtype)
    ids[4:9] = 5
    ours, theirs = bag(ids, offsets), other(ids, offsets)
    assert_close(ours, theirs)
    above = torch.randn(theirs.shape)
    ours.backward(above)
    theirs.backward(above)
    for core, right in zip(bag.cores, of_cores(other.weight.grad, bag), strict=True):
        assert_close(core.grad, right)


@pytest.mark.parametrize("way", ["native", "plain"])
@pytest.mark.parametrize("padding_idx", [None, 5])
def test_per_sample_weights_and_their_gradient(padding_idx, way):
    bag = made(mode="sum", padding_idx=padding_idx, way=way)
    other = dense(bag)
    ids, offsets = batch(700)
    ids[10:13] = 5
    weights = [torch.randn(len(ids), generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    ours, theirs = bag(ids, offsets, weights[0]), other(ids, offsets, weights[1])
    assert_close(ours, theirs)
    above = torch.randn(theirs.shape)
    ours.backward(above)
    theirs.backward(above)
    assert_close(weights[0].grad, weights[1].grad)
    for core, right in zip(bag.cores, of_cores(other.weight.grad, bag), strict=True):
        assert_close(core.grad, right)


@pytest.mark.parametrize("way", ["native", "plain"])
@pytest.mark.parametrize("shape", [(11, 4), (3, 1), (5, 0), (0, 4), (0, 0)])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_ids_of_two_dims_and_of_none(shape, mode, way):
    bag = made("wide", mode=mode, way=way, padding_idx=2)
    ids = torch.randint(900, shape)
    ids[:, :1] = 2
    right = (
        torch.nn.functional.embedding_bag(ids, bag.full_weight(), mode=mode, padding_idx=2) if 0 not in shape else None
    )
    found = bag(ids)
    assert found.shape == (shape[0], 64)
    if right is None:
        assert not found.detach().any()
    else:
        assert_close(found, right)
    found.sum().backward()
    assert all(torch.isfinite(core.grad).all() for core in bag.cores)


@pytest.mark.parametrize("way", ["native", "plain"])
def test_no_ids_at_all(way):
    bag = made(way=way)
    found = bag(torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0, 0]))
    found.sum().backward()
    assert found.tolist() == [[0.0] * 12] * 3
    assert not any(core.grad.any() for core in bag.cores)
    assert bag(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)).shape == (0, 12)


@pytest.mark.parametrize("name", SHAPES)
def test_the_jax_form_gives_the_same(name):
    shape = tensor_train(*SHAPES[name][:2], SHAPES[name][2], cores=2 if name == "two" else 4 if name == "four" else 3)
    rng = np.random.default_rng(0)
    cores = tuple(jnp.asarray(rng.normal(size=s) / s[1] ** 0.5, jnp.float32) for s in shape.shapes)
    bag = from_jax(shape, cores, mode="sum", include_last_offset=True, way="native")
    ids, offsets = batch(shape.rows, dtype=torch.int32)
    weights = torch.randn(len(ids))
    numbers = [jnp.asarray(x.numpy()) for x in (ids, offsets, weights)]
    right = jax_bag(shape, cores, *numbers, way="jax")
    above = rng.normal(size=right.shape).astype(np.float32)
    gradients = jax.grad(lambda c: (jax_bag(shape, c, *numbers, way="native") * above).sum())(cores)
    found = bag(ids, offsets, weights)
    found.backward(torch.from_numpy(above))
    largest = float(jnp.abs(right).max())
    np.testing.assert_allclose(found.detach().numpy(), right, rtol=0, atol=1e-6 * largest)
    for core, gradient in zip(bag.cores, gradients, strict=True):
        np.testing.assert_allclose(core.grad.numpy(), gradient, rtol=0, atol=1e-6 * float(jnp.abs(gradient).max()))
    np.testing.assert_allclose(bag.full_weight().detach().numpy(), materialize(shape, cores), rtol=1e-5, atol=1e-5)


def test_to_jax_and_back_changes_nothing():
    bag = made()
    shape, cores = to_jax(bag)
    again = from_jax(shape, cores)
    assert shape == bag.tt
    assert [*bag.state_dict()] == ["cores.0", "cores.1", "cores.2"]
    for name, value in again.state_dict().items():
        assert torch.equal(value, bag.state_dict()[name])


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("rows", "features", "ranks"), [(200_000, 64, 16), (30_000, 64, (80,)), (60_000, 81, (9, 16, 9))]
)
@pytest.mark.parametrize("sparse", [False, True])
def test_threads_give_the_same_to_rounding(rows, features, ranks, sparse, threads):
    """Batches that are large enough for threads, also of two and four cores."""
    bag = TTEmbeddingBag(rows, features, ranks, mode="mean", weight_dist="approx-normal", sparse=sparse, way="native")
    other = TTEmbeddingBag(rows, features, ranks, mode="mean", way="plain")
    other.load_state_dict(bag.state_dict())
    ids = torch.randint(rows, (3000, 8))
    torch.set_num_threads(threads)
    ours, again, theirs = bag(ids), bag(ids), other(ids)
    assert torch.equal(ours, again)
    assert_close(ours, theirs)
    above = torch.randn(ours.shape)
    ours.backward(above)
    theirs.backward(above)
    for core, right in zip(bag.cores, other.cores, strict=True):
        found = core.grad.to_dense() if sparse else core.grad
        assert float((found - right.grad).abs().max()) <= 1e-5 * float(right.grad.abs().max())


@pytest.mark.parametrize("name", SHAPES)
def test_sparse_gradients_hold_the_slices_that_were_read(name):
    bag, other = made(name, sparse=True, mode="sum"), made(name, mode="sum")
    other.load_state_dict(bag.state_dict())
    ids = torch.tensor([1, 17, 1, bag.num_embeddings - 1])
    offsets = torch.tensor([0, 1])
    assert all(one.is_coalesced() for one in torch.autograd.grad(bag(ids, offsets).sum(), list(bag.cores)))
    bag(ids, offsets).square().sum().backward()
    other(ids, offsets).square().sum().backward()
    digits = np.unravel_index(ids.unique().numpy(), bag.tt.row_factors)
    for core, right, digit in zip(bag.cores, other.cores, digits, strict=True):
        assert core.grad.is_sparse
        torch.sparse_coo_tensor(core.grad._indices(), core.grad._values(), core.grad.shape, check_invariants=True)
        assert core.grad._indices().tolist() == [sorted({*digit.tolist()})]
        torch.testing.assert_close(core.grad.to_dense(), right.grad)
    before = [core.grad.to_dense() for core in bag.cores]
    bag(ids, offsets).square().sum().backward()  # gradients add up
    for core, once in zip(bag.cores, before, strict=True):
        torch.testing.assert_close(core.grad.to_dense(), 2 * once)


OPTIMIZERS = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05), True),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.5), True),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.1), True),
    "SparseAdam": (lambda p: torch.optim.SparseAdam(p, lr=0.05), True),
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.05), False),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # Adagrad's own
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_train_it(name):
    build, sparse = OPTIMIZERS[name]
    bag = TTEmbeddingBag(500, 8, 4, mode="sum", sparse=sparse, weight_dist="approx-normal")
    ids, wanted = torch.arange(20).view(10, 2), torch.randn(10, 8)
    optimizer = build(list(bag.parameters()))
    losses = []
    for _ in range(60):
        loss = (bag(ids) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_sgd_by_sparse_gradients_is_that_by_dense_ones():
    bags = [made(sparse=sparse) for sparse in (True, False)]
    bags[1].load_state_dict(bags[0].state_dict())
    ids, offsets = batch(700)
    for bag in bags:
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
        bag(ids, offsets).square().sum().backward()
        optimizer.step()
    for ours, theirs in zip(*(bag.cores for bag in bags), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_it_is_saved_copied_and_loaded(tmp_path):
    bag = made(padding_idx=3, sparse=True)
    ids, offsets = batch(700)
    right = bag(ids, offsets)
    held = io.BytesIO()
    torch.save(bag, held)
    held.seek(0)
    whole = torch.load(held, weights_only=False)
    torch.save(bag.state_dict(), tmp_path / "bag.pt")
    loaded = TTEmbeddingBag(*SHAPES["three"], padding_idx=3)
    loaded.load_state_dict(torch.load(tmp_path / "bag.pt", weights_only=True))
    for other in (whole, copy.deepcopy(bag), loaded):
        assert torch.equal(other(ids, offsets), right)
    assert "tt_ranks=[5, 9], mode='mean', padding_idx=3" in repr(whole)


def test_what_was_changed_since_is_found():
    bag = made()
    ids, offsets = batch(700)
    found = bag(ids, offsets)
    with torch.no_grad():
        bag.cores[1].add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        found.sum().backward()


def test_memory_in_another_order_and_frozen_cores():
    bag, other = made(mode="sum"), made(mode="sum")
    other.load_state_dict(bag.state_dict())
    bag.cores[1] = torch.nn.Parameter(bag.cores[1].detach().transpose(1, 3).contiguous().transpose(1, 3))
    bag.cores[0].requires_grad_(False)
    ids = torch.randint(700, (4, 30)).T
    weights = torch.randn(4, 30).T
    ours, theirs = (
        bag(ids, per_sample_weights=weights),
        other(ids.contiguous(), per_sample_weights=weights.contiguous()),
    )
    assert torch.equal(ours, theirs)
    above = torch.randn(12, 30).T
    ours.backward(above)
    theirs.backward(above)
    assert bag.cores[0].grad is None
    assert torch.equal(bag.cores[1].grad, other.cores[1].grad)


def test_the_plain_form_has_the_gradients_of_finite_differences():
    bag = TTEmbeddingBag(30, 6, (2, 3), dtype=torch.float64)
    ids, offsets = torch.tensor([3, 29, 3, 7, 0]), torch.tensor([0, 2, 2])
    weights = torch.randn(5, dtype=torch.float64, requires_grad=True)
    cores = [torch.randn(core.shape, dtype=torch.float64, requires_grad=True) for core in bag.cores]

    def sums(weights, *cores):
        return plain.bag(cores, Bags(ids, offsets, weights, padding=7))

    assert torch.autograd.gradcheck(sums, (weights, *cores))
    assert torch.autograd.gradgradcheck(sums, (weights, *cores))
    assert bag(ids, offsets).dtype == torch.float64


def test_half_precision_goes_the_plain_way():
    bag = made().to(torch.bfloat16)
    ids, offsets = batch(700)
    right = plain.bag([core.float() for core in bag.cores], Bags(ids, offsets, mean=True))
    torch.testing.assert_close(bag(ids, offsets).float(), right, rtol=0.05, atol=0.1)


def test_the_kernel_is_differentiable_once():
    bag = made(way="native")
    ids, offsets = batch(700)
    (first, *_) = torch.autograd.grad(bag(ids, offsets).square().sum(), list(bag.cores), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("weighted", [False, True])
def test_the_operator_is_what_pytorch_asks_of_one(weighted):
    bag = made("two", mode="sum")
    ids, offsets = batch(60)
    weights = torch.randn(len(ids), requires_grad=True) if weighted else None
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (list(bag.cores), ids, offsets, weights, -1, False, False, 60)
    torch.library.opcheck(operator.tensor_train_bag, arguments, test_utils=tests)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_it_is_a_node_of_a_compiled_program(backend):
    bag = made("two", mode="sum", padding_idx=4)
    linear = torch.nn.Linear(6, 2)
    ids, offsets = batch(60)
    weights = torch.randn(len(ids))

    def loss(ids, offsets, weights):
        return linear(bag(ids, offsets, weights)).square().sum()

    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    right = torch.autograd.grad(loss(ids, offsets, weights), list(bag.cores))
    found = torch.autograd.grad(compiled(ids, offsets, weights), list(bag.cores))
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(ids[:21], offsets[:6], weights[:21]), loss(ids[:21], offsets[:6], weights[:21])
        )
    sparse = made("two", mode="sum", sparse=True)
    torch.compile(lambda ids: sparse(ids, offsets).sum(), backend=backend)(ids).backward()  # not in the graph, but done
    assert sparse.cores[0].grad.is_sparse


def test_a_table_becomes_cores():
    made_of = TTEmbeddingBag(720, 12, (5, 9), (8, 9, 10), (1, 3, 4), weight_dist="approx-normal")
    table = made_of.full_weight().detach()
    bag = TTEmbeddingBag.from_pretrained(table, (5, 9), tt_p_shapes=(8, 9, 10), tt_q_shapes=(1, 3, 4), mode="sum")
    torch.testing.assert_close(bag.full_weight(), table, rtol=1e-4, atol=1e-4)
    assert not any(core.requires_grad for core in bag.cores)


def test_initial_tables_have_the_spread_that_is_meant():
    entries = TTEmbeddingBag(4_096, 64, 8).full_weight()
    assert entries.var().item() == pytest.approx(1 / (3 * 4_096), rel=0.1)
    released = TTEmbeddingBag(1_000, 64, 8, weight_dist="approx-normal")
    core = released.cores[1]
    scale = 3_000 ** (-1 / 6)
    assert core.abs().min().item() >= 2 * scale * 0.999
    assert core.std().item() == pytest.approx(5.746**0.5 * scale, rel=0.05)
    normal = TTEmbeddingBag(1_000, 64, 8, weight_dist="normal").cores[1]
    assert normal.std().item() == pytest.approx(1_000**-0.5, rel=0.1)
    naive = TTEmbeddingBag(1_000, 64, 8, weight_dist="naive-uniform").cores[1]
    assert 0 <= naive.min().item() < naive.max().item() <= 1_000**-0.5
    uniform = TTEmbeddingBag(1_000, 64, 8, weight_dist="uniform").cores[1]
    assert uniform.max().item() == pytest.approx((2 / 1_064 / 64) ** (1 / 6), rel=0.01)
    torch.manual_seed(3)
    first = TTEmbeddingBag(60, 6, 2).cores[0]
    torch.manual_seed(3)
    assert torch.equal(TTEmbeddingBag(60, 6, 2).cores[0], first)


def test_fbtts_arguments_that_change_nothing_are_taken():
    bag = TTEmbeddingBag(
        num_embeddings=700,
        embedding_dim=12,
        tt_ranks=[5, 9],
        tt_p_shapes=[8, 9, 10],
        tt_q_shapes=[1, 3, 4],
        sparse=False,
        use_cache=False,
        cache_size=0,
        weight_dist="approx-normal",
        enforce_embedding_dim=True,
        mode="sum",
        include_last_offset=True,
    )
    assert [tuple(core.shape) for core in bag.cores] == [(8, 1, 1, 5), (9, 5, 3, 9), (10, 9, 4, 1)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"optimizer": "sgd", "learning_rate": 0.1},
            r"optimizer='sgd': the update is not done in backward.*learning_rate",
        ),
        ({"use_cache": True}, r"use_cache=True: there is no cache of rows"),
        ({"max_norm": 1.0}, r"max_norm=1.0: .* clip the gradients"),
        ({"scale_grad_by_freq": True}, r"scale_grad_by_freq=True: rows share their cores"),
        ({"_weight": torch.zeros(2)}, r"_weight=.*from_pretrained"),
        ({"mode": "max"}, r"mode='max' needs every row of a bag at once.*Take mode='sum' or 'mean'"),
        ({"mode": "median"}, r"mode='median' is none of"),
        ({"padding_idx": 700}, r"padding_idx=700 is outside its 700 rows"),
        ({"weight_dist": "approx-uniform"}, r"FBTT's comb of narrow peaks is not there"),
        ({"weight_dist": "normall"}, r"Nearest: normal"),
        ({"tt_p_shapes": (8, 9, 9)}, r"cover 648 rows of 700"),
        ({"tt_ranks": (5, 99)}, r"rank 99 of bond 2 is larger than it can be"),
    ],
)
def test_arguments_that_are_refused(options, said):
    given = dict(
        zip(("num_embeddings", "embedding_dim", "tt_ranks", "tt_p_shapes", "tt_q_shapes"), SHAPES["three"], strict=True)
    )
    with pytest.raises(RecipeError, match=said):
        TTEmbeddingBag(**(given | options))


def test_an_argument_that_neither_has():
    with pytest.raises(TypeError, match="no argument 'paddding_idx'"):
        TTEmbeddingBag(60, 6, 3, paddding_idx=1)


IDS = torch.tensor([1, 2, 3])


@pytest.mark.parametrize("way", ["native", "plain"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.tensor([1, 60]), torch.tensor([0])), r"id 60 at place 1 is outside its 60 rows, the first of 1 such"),
        ((torch.tensor([[1, 2], [-1, 60]]),), r"id -1 at place 2 is outside its 60 rows, the first of 2 such"),
        ((IDS, torch.tensor([0, 2, 1])), r"offsets go back at bag 1, from 2 to 1"),
        ((IDS, torch.tensor([1])), r"offsets\[0\] is 1, not 0"),
        ((IDS, torch.tensor([0, 4])), r"offsets (end at|go back)"),
        ((IDS.float(), torch.tensor([0])), r"input is torch.float32, not int32 or int64"),
        ((IDS,), r"input has one dim, and there are no offsets"),
        ((IDS.view(1, 3), torch.tensor([0])), r"input has two dims, \[bags, ids a bag\], and there are offsets"),
        ((IDS.view(1, 1, 3),), r"input has 3 dims"),
        ((IDS, torch.tensor([0]), torch.ones(2)), r"per_sample_weights are \[2\], not \[3\] as the input"),
    ],
)
def test_batches_that_are_refused(arguments, said, way):
    with pytest.raises(DataError, match=said):
        made("two", mode="sum", way=way)(*arguments)


def test_weights_are_for_sums():
    with pytest.raises(DataError, match="per_sample_weights are for mode='sum', and it is 'mean'"):
        made("two")(IDS, torch.tensor([0]), torch.ones(3))


def test_the_kernel_takes_float32_alone():
    bag = made("two", way="native", dtype=torch.float64)
    with pytest.raises(NativeError, match=r"takes float32 on the CPU, and the cores are torch.float64"):
        bag(IDS, torch.tensor([0]))
    with pytest.raises(RecipeError, match="sparse=True needs the C"):
        made("two", sparse=True, way="plain")(IDS, torch.tensor([0]))


def test_without_a_compiler_the_plain_form_is_taken(monkeypatch):
    def refuse():
        raise NativeError("no C++ compiler")

    right = made("two")(IDS, torch.tensor([0])).detach()
    monkeypatch.setattr(tensor_train_library, "load", refuse)
    torch.manual_seed(0)
    torch.testing.assert_close(made("two")(IDS, torch.tensor([0])).detach(), right)
    with pytest.raises(NativeError):
        made("two", way="native")


def _hook_gradients(bag, ids):
    """What a hook on gradients, such as DDP's, is handed."""
    seen = {}
    for name, parameter in bag.named_parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(seen.__setitem__, name))
    bag(ids).sum().backward()
    return seen


def test_hooks_on_parameters_see_gradients():
    bag = made("wide", mode="sum")
    seen = _hook_gradients(bag, torch.randint(900, (5, 3)))
    assert [*sorted(seen)] == ["cores.0", "cores.1", "cores.2"]
