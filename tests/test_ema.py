"""The moving average of the weights: its rule, where it lies, who reads it, and that a resumed run has the same."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from multipod import runs
from multipod.data.source import ArraySource
from multipod.errors import LayoutError, RecipeError
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.sync import Sync
from multipod.metrics.objective import Classification
from multipod.optim.adamw import AdamW
from multipod.optim.ema import Ema
from multipod.optim.rates import Constant
from multipod.pytrees import Batch
from multipod.recipe.override import override
from multipod.recipe.recipe import Recipe
from multipod.recipes.find import load
from multipod.step.program import program_of
from multipod.step.state import State, device_bytes
from multipod.train.evaluation import evaluate

AVERAGE = Ema(0.6)


@dataclass(frozen=True)
class Points:
    """Sixteen points in five classes."""

    def train(self) -> ArraySource:
        draws = np.random.default_rng(0)
        return ArraySource(
            {
                "x": draws.normal(size=(16, 7)).astype(np.float32),
                "label": draws.integers(0, 5, 16).astype(np.int32),
            }
        )

    test = train


@dataclass(frozen=True)
class Centred:
    """A dense layer behind a moving mean, whose sizes no number of devices divides."""

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        params = {"w": jax.random.normal(key, (7, 5)), "b": jnp.zeros(5)}
        return params, {"mean": jnp.zeros(7), "seen": jnp.zeros((), jnp.int32)}

    def apply(self, params: Any, statistics: Any, batch: Batch, *, train: bool, key: jax.Array) -> tuple[Any, Any]:
        outputs = (batch["x"] - statistics["mean"]) @ params["w"] + params["b"]
        mean = 0.5 * statistics["mean"] + 0.5 * batch["x"].mean(0)
        return outputs, {"mean": mean, "seen": statistics["seen"] + 1} if train else statistics


def recipe_of(sync: Sync, ema: Ema | None = AVERAGE) -> Recipe:
    return Recipe(
        name="points",
        model=Centred(),
        data=Points(),
        objective=Classification(),
        optimizer=AdamW(Constant(0.05)),
        batch=8,
        updates=4,
        layout=Layout(mesh=(1, 4), sync=sync),
        ema=ema,
        evaluate_every=2,
        checkpoint_every=2,
    )


def batches(recipe: Recipe) -> list[dict[str, np.ndarray]]:
    arrays = recipe.data.train().read(np.arange(16))
    return [{name: array[k * 8 % 16 :][:8] for name, array in arrays.items()} for k in range(recipe.updates)]


def trained(recipe: Recipe) -> tuple[Any, list[tuple[Any, Any]], State]:
    """The program, parameters and statistics before and after each update, and the last state."""
    program = program_of(recipe, make_mesh(recipe.layout))
    state, step, past = program.init(), program.compile_update(), []
    past.append(jax.device_get((program.full_params(state), state.statistics)))
    for host in batches(recipe):
        state, _ = step(state, program.place_batch(host, np.arange(8), 8), program.controls())
        past.append(jax.device_get((program.full_params(state), state.statistics)))
    return program, past, state


def reference(past: list[Any], decays: list[float]) -> Any:
    average = past[0]
    for new, d in zip(past[1:], decays, strict=True):
        average = jax.tree.map(lambda a, w, d=d: d * a + (1 - d) * w, average, new)
    return average


def test_the_rules_are_those_of_tensorflow() -> None:
    """https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage, num_updates."""
    decays = jax.vmap(Ema(0.9999).decay_at)(jnp.array([1, 2, 10, 100, 89_990, 1_000_000]))
    np.testing.assert_allclose(decays[:4], [2 / 11, 3 / 12, 11 / 20, 101 / 110], rtol=1e-6)
    assert float(decays[4]) < 0.9999 == pytest.approx(float(decays[5]), abs=1e-7)
    assert float(Ema(0.9, warm_up=False).decay_at(jnp.int32(1))) == pytest.approx(0.9)


def test_without_warm_up_it_is_optax_ema_with_the_first_weights_as_zero() -> None:
    weights = [np.full(3, value, np.float32) for value in (0.0, 2.0, -1.0, 5.0)]
    ema = optax.ema(0.7, debias=False)
    state, expected = ema.init(jnp.zeros(3)), None
    average = jnp.zeros(3)
    for number, new in enumerate(weights[1:], 1):
        expected, state = ema.update(jnp.asarray(new), state)
        average = Ema(0.7, warm_up=False).follow(average, jnp.asarray(new), jnp.int32(number))
    np.testing.assert_allclose(average, expected, rtol=1e-6)


@pytest.mark.parametrize("sync", [Sync(), Sync(sharding="zero1"), Sync(sharding="fsdp")], ids=["sum", "zero1", "fsdp"])
def test_weights_and_statistics_are_averaged_and_judged(sync: Sync) -> None:
    """The averages of 4 devices are those of NumPy, lie as the moments do, and are what an evaluation reads."""
    recipe = recipe_of(sync)
    program, past, state = trained(recipe)
    decays = [min(0.6, (1 + n) / (10 + n)) for n in range(1, 5)]
    params, statistics = reference(past, decays)
    seen = program.evaluation.prepare(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), program.full_params(seen), params)
    np.testing.assert_allclose(seen.statistics["mean"], statistics["mean"], rtol=2e-6)
    assert int(seen.statistics["seen"]) == 4  # a count is no average
    average = state.optimizer
    assert device_bytes(average.params) == device_bytes(average.inner[0].mu)
    sums = evaluate(program, state, recipe.data.test())
    host = recipe.data.test().read(np.arange(16))
    logits = (host["x"] - statistics["mean"]) @ params["w"] + params["b"]
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, host["label"]).sum()
    assert sums["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_training_is_the_same_with_and_without() -> None:
    with_it, without = (trained(recipe_of(Sync(), ema))[1][-1] for ema in (Ema(), None))
    jax.tree.map(np.testing.assert_array_equal, with_it, without)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_averages_and_opens_with_them(tmp_path) -> None:
    recipe = recipe_of(Sync(sharding="zero1"))
    whole = runs.train(recipe, out=tmp_path / "whole")
    runs.train(recipe, out=tmp_path / "cut", stop_after=2)
    again = runs.train(resume=tmp_path / "cut")
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(whole.state), jax.device_get(again.state))
    opened = runs.open(tmp_path / "cut")
    program = opened.program
    jax.tree.map(
        np.testing.assert_array_equal, opened.params, program.full_params(program.evaluation.prepare(opened.state))
    )
    assert not np.allclose(opened.params["w"], program.full_params(opened.state)["w"])
    assert runs.evaluate(tmp_path / "cut").values == pytest.approx(again.values, rel=1e-6)


def test_it_is_a_field_of_a_recipe() -> None:
    assert override(load("mlp-small"), ["ema.decay=0.999"]).ema == Ema(0.999)
    assert load("efficientnet-b0").ema == Ema(0.9999)
    with pytest.raises(RecipeError, match=r"ema.decay=1.0 must be at least 0 and below 1"):
        override(load("mlp-small"), ["ema.decay=1"])
    recipe = override(load("mlp-small"), ["ema.decay=0.9", "layout.stage=2", "layout.mesh=1x1"])
    with pytest.raises(LayoutError, match=r"layout.stage=2 with ema=true: .* Set ema=none"):
        _ = program_of(recipe, make_mesh(recipe.layout)).shapes
    cached = override(load("dlrm-small"), ["ema.decay=0.9", "model.hot.share=0.01"])
    with pytest.raises(RecipeError, match="ema with Dlrm, which moves rows"):
        _ = program_of(cached, make_mesh(cached.layout)).shapes
