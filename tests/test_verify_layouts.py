"""`verify`: layouts that learn the same pass, and each of a list of faults is found; against float64 and NumPy."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multipod.errors import LayoutError
from multipod.execute.sums import SUMS, VectorSum, xla
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.split import PipelineSplit
from multipod.layout.sync import Sync
from multipod.models.mlp import Mlp
from multipod.optim.adamw import AdamW
from multipod.optim.rates import Constant
from multipod.recipes.find import load
from multipod.step import loss as step_loss
from multipod.step import unstaged
from multipod.step.program import program_of
from multipod.verify.compare import compare
from multipod.verify.drawing import LayoutDraws
from multipod.verify.moving import HostStates
from multipod.verify.recording import gradient_in, recording
from multipod.verify.reference import Reference
from multipod.verify.verify import LayoutResult, hold, verify
from multipod.verify.widened import widened

RECIPE = replace(
    load("mlp-small"), model=Mlp(features=8, layers=2), optimizer=AdamW(Constant(0.01)), batch=24, evaluation_batch=32
)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(recording(RECIPE), 2)


def held(reference: Reference, layout: Layout) -> LayoutResult:
    recipe = replace(reference.recipe, layout=layout)
    return hold(program_of(recipe, make_mesh(layout)), reference)


def test_a_widened_function_is_its_float64_form() -> None:
    def function(x: jax.Array, at: jax.Array) -> dict[str, jax.Array]:
        def body(carry: jax.Array, one: jax.Array) -> tuple[jax.Array, jax.Array]:
            return carry * jnp.float32(0.5) + one, jnp.tanh(carry)

        last, each = lax.scan(body, jnp.zeros(3, jnp.float32), x)
        low = (x.astype(jnp.bfloat16) @ x.T.astype(jnp.bfloat16)).astype(jnp.float32)
        grown = lax.while_loop(lambda v: v.sum() < 100, lambda v: v * 2 + 1, jnp.abs(x[0]))
        added = jnp.zeros((4, 3), jnp.float32).at[at].add(x)
        chosen = lax.cond(x[0, 0] > 0, lambda: jnp.exp(x), lambda: -x)
        noise = jax.random.normal(jax.random.key(3), (4,))
        return {"last": last, "each": each, "low": low, "grown": grown, "added": added, "chosen": chosen, "n": noise}

    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    at = np.array([0, 2, 2, 3, 0])
    made = jax.tree.map(np.asarray, widened(function, x, at)(x, at))
    assert {array.dtype for array in made.values()} == {np.dtype("float64")}
    wide = x.astype(np.float64)
    carry, each = np.zeros(3), []
    for row in wide:
        each.append(np.tanh(carry))
        carry = carry * 0.5 + row
    grown = np.abs(wide[0])
    while grown.sum() < 100:
        grown = grown * 2 + 1
    added = np.zeros((4, 3))
    np.add.at(added, at, wide)
    chosen = np.exp(wide) if wide[0, 0] > 0 else -wide
    expected = {"last": carry, "each": np.array(each), "low": wide @ wide.T, "grown": grown, "added": added,
                "chosen": chosen}  # fmt: skip
    for name, value in expected.items():
        np.testing.assert_allclose(made[name], value, rtol=1e-14, atol=1e-14, err_msg=name)
    np.testing.assert_allclose(made["n"], jax.random.normal(jax.random.key(3), (4,)), rtol=1e-5)


def test_a_widened_function_over_several_devices_is_refused() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    both = jax.shard_map(
        lambda x: lax.all_gather(x, "x"), mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x")
    )
    with pytest.raises(LayoutError, match="over 2 devices: a reference is of one device"):
        widened(both, np.ones(4, np.float32))(np.ones(4, np.float32))


@pytest.mark.slow
def test_the_recorded_gradient_is_that_of_the_loss(reference: Reference) -> None:
    states, source = reference.states, reference.source
    model, objective = RECIPE.model, RECIPE.objective
    first = states.first
    _, made = states.made(states.write(first), states.batch(source, 0))
    batch = jax.device_get(states.batch(source, 0))

    def mean(params: Any) -> jax.Array:
        outputs, _ = model.apply(params, {}, batch, train=True, key=jax.random.key(0))
        return objective(outputs, batch)["loss"].mean()

    recorded = gradient_in(made.state.optimizer)
    assert recorded is not None
    expected = jax.grad(mean)(first.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), recorded, expected)


GOOD = {
    "zero1 by a ring": Layout((1, 4), sync=Sync("ring", sharding="zero1")),
    "fsdp in buckets": Layout((2, 2), sync=Sync(sharding="fsdp", bucket_bytes=200)),
    "stages and data": Layout((1, 2), pipeline=PipelineSplit(2, "1f1b", 2)),
    "a failed chip": Layout((2, 3), failed=((0, 1),)),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_layout_learns_what_one_device_learns(reference: Reference, name: str) -> None:
    result = held(reference, GOOD[name])
    assert result.wrong == ()
    assert 0 < result.ratio < 5


def all_reduces_by(change: Callable[[jax.Array, Any], jax.Array]) -> Callable[[Any], VectorSum]:
    def made(axes: Any) -> VectorSum:
        total = xla(axes)
        return VectorSum(lambda v: change(v, axes), total.reduce_scatter, total.all_gather, total.alone_bytes)

    return made


def scatters_by(change: Callable[[jax.Array, Any], jax.Array]) -> Callable[[Any], VectorSum]:
    def made(axes: Any) -> VectorSum:
        total = xla(axes)
        return VectorSum(
            total.all_reduce, lambda v: change(total.reduce_scatter(v), axes), total.all_gather, total.alone_bytes
        )

    return made


SUM_FAULTS: dict[str, Callable[[jax.Array, Any], jax.Array]] = {
    "no sum at all": lambda v, axes: v,
    "over one axis only": lambda v, axes: lax.psum(v, axes[-1]),
    "one device left out": lambda v, axes: lax.psum(jnp.where(lax.axis_index(tuple(axes)) == 1, 0, v), tuple(axes)),
    "a mean in place of the sum": lambda v, axes: lax.pmean(v, tuple(axes)),
    "a part in a thousand too large": lambda v, axes: lax.psum(v, tuple(axes)) * 1.001,
    "in another type on the wire": lambda v, axes: lax.psum(v.astype(jnp.bfloat16).astype(jnp.float32), tuple(axes)),
    "the first element twice": lambda v, axes: lax.psum(v, tuple(axes)).at[0].multiply(2),
    "shifted by one": lambda v, axes: jnp.roll(lax.psum(v, tuple(axes)), 1),
}


def test_devices_that_differ_are_found(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    def own(vector: jax.Array, axes: Any) -> jax.Array:
        return lax.psum(vector, tuple(axes)) * (1 + 1e-6 * lax.axis_index(tuple(axes)))

    monkeypatch.setitem(SUMS, "direct", all_reduces_by(own))
    result = held(reference, Layout((1, 2), sync=Sync("direct")))
    assert any(wrong.startswith("devices 0 and 1 hold other bits of the same part of ") for wrong in result.wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUM_FAULTS)
def test_a_wrong_sum_is_found(reference: Reference, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUMS, "direct", all_reduces_by(SUM_FAULTS[name]))
    result = held(reference, Layout((2, 2), sync=Sync("direct")))
    assert any("times as far from float64" in wrong for wrong in result.wrong), result
    assert result.at == 0


def test_a_wrong_share_is_found(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    def neighbours(share: jax.Array, axes: Any) -> jax.Array:
        count = lax.axis_size(tuple(axes))
        return lax.ppermute(share, tuple(axes), [(n, (n + 1) % count) for n in range(count)])

    monkeypatch.setitem(SUMS, "direct", scatters_by(neighbours))
    assert held(reference, Layout((1, 4), sync=Sync("direct", sharding="zero1"))).wrong


def test_padding_that_counts_is_found(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    true = step_loss.masked_sums
    monkeypatch.setattr(step_loss, "masked_sums", lambda values, mask=None: true(values, None))
    result = held(reference, GOOD["a failed chip"])
    assert any("times as far from float64" in wrong for wrong in result.wrong)


def of_split(wrong: Callable[..., Any], right: Callable[..., Any]) -> Callable[..., Any]:
    """`wrong` in programs over several devices, `right` on one."""

    def method(self: HostStates, *arguments: Any) -> Any:
        return (wrong if self.program.mesh.size > 1 else right)(self, *arguments)

    return method


def lost_momentum(self: HostStates, portable: Any) -> Any:
    return KEPT["write"](self, portable._replace(optimizer=jax.tree.map(np.zeros_like, portable.optimizer)))


def another_key(self: HostStates, portable: Any) -> Any:
    return KEPT["write"](self, portable._replace(update=portable.update + 1))


def rounded_weights(self: HostStates, state: Any) -> Any:
    portable = KEPT["read"](self, state)
    low = jax.tree.map(lambda leaf: np.asarray(leaf.astype(jnp.bfloat16), np.float32), portable.params)
    return portable._replace(params=low)


KEPT = {name: getattr(HostStates, name) for name in ("write", "read", "batch")}
HOST_FAULTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "a batch read twice": ("batch", lambda self, source, update: KEPT["batch"](self, source, 0), "times as far"),
    "the batch after it": ("batch", lambda self, source, n: KEPT["batch"](self, source, n + 1), "times as far"),
    "a state saved without its moments": ("write", lost_momentum, "done again from its state as saved"),
    "a state saved with another update": ("write", another_key, "done again from its state as saved"),
    "weights saved in another type": ("read", rounded_weights, "has not the bits"),
}


@pytest.mark.parametrize("name", HOST_FAULTS)
def test_a_wrong_batch_or_state_is_found(reference: Reference, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference.walk
    method, fault, said = HOST_FAULTS[name]
    monkeypatch.setattr(HostStates, method, of_split(fault, KEPT[method]))
    result = held(reference, Layout((1, 2)))
    assert any(said in wrong for wrong in result.wrong), result


def test_an_initialisation_by_device_count_is_found(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference.walk
    true = unstaged.fresh_state
    monkeypatch.setattr(unstaged, "fresh_state", lambda recipe, optimizer: true(replace(recipe, seed=1), optimizer))
    assert any("before the first update" in wrong for wrong in held(reference, Layout((1, 2))).wrong)


def test_an_evaluation_that_counts_padding_is_found(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference.walk
    states = HostStates(program_of(replace(reference.recipe, layout=Layout((1, 2))), make_mesh(Layout((1, 2)))))
    monkeypatch.setattr("multipod.step.evaluate.masked_sums", lambda values, mask=None: all_of(values))
    result = hold(states.program, reference)
    assert any(wrong.startswith("the evaluation's count is") for wrong in result.wrong), result


def all_of(values: Any) -> Any:
    return {name: value.sum() for name, value in values.items()} | {"count": jnp.int32(values["loss"].size)}


def test_state_that_is_not_split_breaks_its_promise(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout((1, 2))
    program = program_of(replace(reference.recipe, layout=layout), make_mesh(layout))
    monkeypatch.setattr("multipod.verify.checks.device_bytes", lambda shapes: 1000)
    assert any("bytes on a device were promised" in wrong for wrong in hold(program, reference).wrong)


@pytest.mark.slow
def test_draws_are_layouts_of_the_recipe_and_none_comes_twice() -> None:
    draws = LayoutDraws(RECIPE, 4, seed=1)
    drawn = [next(draws).recipe for _ in range(3)]
    assert len({repr((recipe.layout, recipe.accumulate)) for recipe in drawn}) == 3
    assert all(recipe.layout.mesh_shape(4) == recipe.layout.mesh for recipe in drawn)
    again = LayoutDraws(RECIPE, 4, seed=1)
    assert [next(again).recipe for _ in range(3)] == drawn
    assert any(reason.startswith("layout.spatial=2 splits nothing") for reason in draws.refused)


def test_any_function_can_be_compared() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    split, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(16, 8)).astype(np.float32), rng.normal(size=(8, 4)).astype(np.float32)

    def gradient(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.tanh(x @ w).sum() / 16)(w)

    def by_hand(average: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def local(x: jax.Array, w: jax.Array) -> jax.Array:
            own = jax.grad(lambda w: jnp.tanh(x @ w).sum() / 4)(lax.pcast(w, "x", to="varying"))
            return average(own, "x")

        specs = PartitionSpec("x"), PartitionSpec()
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())

    ways = {"data": (split, whole), "whole": (whole, whole)}
    assert [one.same for one in compare(gradient, x, w, layouts=ways)] == [True, True]
    one_way = {"data": (split, whole)}
    (right,) = compare(by_hand(lax.pmean), x, w, layouts=one_way, reference=gradient)
    (wrong,) = compare(by_hand(lax.psum), x, w, layouts=one_way, reference=gradient)
    assert right.same
    assert not wrong.same
    assert wrong.ratio > 1e5


@pytest.mark.slow
def test_the_command_says_same_and_writes_json(multipod: Any, tmp_path: Any) -> None:
    small = ("--set", "model.features=8", "--set", "model.layers=1", "--set", "batch=24")
    layout = ("--layout", "data=1x2,update", "--devices", "2", "--updates", "1")
    said = multipod("verify", "mlp-small", *layout, "--out", "v.json", *small)
    assert said.returncode == 0, said.stderr
    assert "mlp-small, 1 updates: 1 of 1 layouts learn the same." in said.stdout
    (told,) = json.loads((tmp_path / "v.json").read_text())["results"]
    assert (told["layout"], told["wrong"]) == ("data=1x2,update", [])


def test_a_verdict_fails_if_one_layout_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUMS, "direct", all_reduces_by(SUM_FAULTS["no sum at all"]))
    layouts = [Layout((1, 2)), Layout((1, 2), sync=Sync("direct"))]
    told: list[LayoutResult] = []
    verdict = verify(RECIPE, layouts=layouts, updates=1, report=told.append)
    assert [bool(result.wrong) for result in verdict.results] == [False, True]
    assert not verdict.holds
    assert tuple(told) == verdict.results
