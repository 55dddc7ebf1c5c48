"""Recipes: overriding, text, finding."""

import json
import sys
import tomllib
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder

import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import make_optimizer

from multipod.errors import LayoutError, RecipeError
from multipod.optim.optimizers import OPTIMIZERS
from multipod.optim.rates import RATES, Cosine, WarmUp
from multipod.recipe.override import list_names, override
from multipod.recipe.scaling import preset_remarks
from multipod.recipe.text import differences, to_text
from multipod.recipes.digits import digits
from multipod.recipes.find import RECIPES, find, load


def test_a_batch_brings_the_numbers_of_its_preset():
    """MLPerf v0.7's row for 65,536; numbers that are set stay, and without the preset all do."""
    recipe, batch = load("resnet50"), "batch=65536"
    large = override(recipe, [batch])
    assert (large.updates, large.optimizer.rate.then.peak, large.optimizer.momentum) == (1817, 23.081, 0.953721)
    assert large.evaluate_every == large.checkpoint_every == recipe.evaluate_every * 8192 // 65536
    own = override(recipe, [batch, "optimizer.rate=5", "updates=100"])
    assert (own.updates, own.optimizer.rate.then.peak, own.optimizer.rate.share) == (100, 5, large.optimizer.rate.share)
    assert override(recipe, ["preset=none", batch]) == replace(recipe, preset=None, batch=65536)
    assert override(recipe, ["batch=8192", "preset=resnet50-lars"]) == recipe
    assert override(override(large, ["updates=9"]), [batch]).updates == 9  # as a resumed run is changed again
    with pytest.raises(RecipeError, match=r"no optimizer preset is called 'resnet50-lar'. Nearest: resnet50-lars"):
        override(recipe, ["preset=resnet50-lar"])
    with pytest.raises(RecipeError, match=r"batch=0 \(at least 1\)"):
        override(recipe, ["batch=0"])


def test_a_preset_keeps_the_recipes_epochs_where_its_source_says_no_length():
    small = override(digits(), ["preset=transformer-adam", "batch=64", "optimizer.skip=gate"])
    assert (small.updates, small.evaluate_every) == (2 * digits().updates, 2 * digits().evaluate_every)
    assert small.optimizer.rules.skip == ("gate",)
    assert small.optimizer.rate.updates == 1000 * 512 // 64


def test_a_preset_says_its_numbers_what_is_set_otherwise_and_its_range():
    assert preset_remarks(digits()) == []
    (line,) = preset_remarks(override(load("resnet50"), ["batch=65536"]))
    assert line.startswith("preset resnet50-lars at batch 65,536: peak rate 23.081, 1,817 updates, 645 of them warm-up")
    assert "arXiv:2011.03641" in line
    beyond = preset_remarks(override(load("resnet50"), ["batch=256", "optimizer.rate=0.3"]))
    assert beyond[1:] == [
        "  set otherwise: optimizer.rate: 10.0, now 0.3",
        "  warning: batch 256 was not published (only 4,096 to 65,536): the rate is that of the next smaller "
        "published batch, or of the smallest, as in Google's ResNet code",
    ]


@pytest.mark.parametrize(
    ("change", "read", "value"),
    [
        ("optimizer.rate=0.2", lambda r: r.optimizer.rate.then.peak, 0.2),
        ("optimizer.rate=1e-3", lambda r: r.optimizer.rate.then.peak, 1e-3),
        ("batch=64", lambda r: r.batch, 64),
        ("layout.shard_update=true", lambda r: r.layout.sync.zero1, True),
        ("layout.mesh=2x4", lambda r: r.layout.mesh, (2, 4)),
        ("layout.gradient_sum=torus", lambda r: r.layout.sync.gradient_sum, "torus"),
        ("model.blocks=2,2", lambda r: r.model.blocks, (2, 2)),
        ("model.blocks=[1, 2, 3]", lambda r: r.model.blocks, (1, 2, 3)),
        ("model.batch_norm_tile=2x2", lambda r: r.model.batch_norm_tile, (2, 2)),
        ("model.batch_norm_tile=all", lambda r: r.model.batch_norm_tile, "all"),
        ("name=7", lambda r: r.name, "7"),
        ("optimizer.skip=expert,gate", lambda r: r.optimizer.rules.skip, ("expert", "gate")),
    ],
)
def test_a_change_is_read_as_the_type_of_its_field(change, read, value):
    assert read(override(digits(), [change])) == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimizer.rat=0.2", r"the recipe has no field 'optimizer.rat'. Nearest: optimizer.rate"),
        ("rate=0.2", r"no field 'rate'"),
        ("batch.size=2", r"no field 'batch.size'"),
        ("batch=many", r"batch='many' does not fit: Expected `int`, got `str`. The field is int"),
        ("batch=1.5", r"batch='1.5' does not fit"),
        ("layout=ring", r"layout is a group of fields. Set one of them: layout.mesh"),
        ("optimizer=lamp", r"optimizer: none is called 'lamp'. Nearest: lamb"),
        ("optimizer.name=lamp", r"optimizer.name: none is called 'lamp'. Nearest: lamb"),
        ("layout.gradient_sum=rings", r"no sum is called 'rings'. Nearest: ring, "),
        ("layout.mesh=2x4x2", r"is no mesh of rows x columns"),
        ("batch", r"--set 'batch' is not of the form name=value"),
        ("batch=0", r"batch=0 \(at least 1\)"),
        ("optimizer.rate=-1", r"optimizer.rate=-1.0 must be positive"),
        ("optimizer.rate=nan", r"is not a number. Give one"),
        ("optimizer.warmup=2", r"is a share of all updates"),
    ],
)
def test_a_change_that_does_not_fit_is_refused(change, message):
    with pytest.raises((RecipeError, LayoutError), match=message):
        override(digits(), [change])


def test_every_field_has_a_name_and_its_own_text_sets_it_to_itself():
    recipe = digits()
    table = tomllib.loads(to_text(recipe)) | {"preset": "none"}
    for name in list_names(recipe):
        value = table
        for part in name.split("."):
            value = None if value is None else value.get(part)
        if value is None:
            continue  # which TOML has no word for
        text = (
            ",".join(map(str, value))
            if isinstance(value, list)
            else str(value).lower()
            if isinstance(value, bool)
            else str(value)
        )
        assert override(recipe, [f"{name}={text}"]) == recipe, name


def test_fields_that_fit_only_together_may_be_given_in_any_order():
    changes = ["layout.report_orthogonality=true", "layout.gradient_sum=adasum"]
    assert override(digits(), changes) == override(digits(), changes[::-1])
    with pytest.raises(LayoutError, match="gradient_sum=ordered: it is a sum and knows nothing of angles"):
        override(digits(), changes[:1])


def test_the_text_tells_every_difference_but_where_the_run_lies():
    old = to_text(digits())
    assert differences(old, old) == []
    new = override(digits(), ["batch=64", "optimizer.rate=0.1", "layout.mesh=1x8"])
    assert differences(old, to_text(new)) == ["batch: 128, now 64", "optimizer.rate: 0.004, now 0.1"]
    other = replace(digits(), optimizer=Mine())
    assert any("optimizer.kind" in line for line in differences(old, to_text(other)))


@dataclass(frozen=True)
class Mine:
    power: float = 2.0

    def build(self, updates):
        return optax.sgd(self.power)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_loads_and_says_in_one_line_what_it_is(name):
    assert load(name).name == name
    assert find(name).__doc__.splitlines()[0].endswith(".")


def test_a_recipe_comes_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from multipod.recipes.digits import digits\ndef short():\n    return digits()\ndef wrong():\n    return 3\n"
    )
    assert load(f"{file}:short") == digits()
    with pytest.raises(RecipeError, match="returned int, not a multipod"):
        load(f"{file}:wrong")
    with pytest.raises(RecipeError, match=r"has no function .shor.. Nearest: short"):
        load(f"{file}:shor")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digit", "no recipe 'digit'. Nearest: digits. Or write my_recipe.py:function"),
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("digits:f", "no recipe 'digits:f'"),
    ],
)
def test_a_recipe_that_is_not_there_is_refused(name, message):
    with pytest.raises(RecipeError, match=message):
        load(name)


def test_a_file_that_fails_is_named_with_its_error(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(RecipeError, match=r"broken.py cannot be read as a recipe: ZeroDivisionError"):
        load(f"{file}:f")


@settings(deadline=None)
@given(updates=st.integers(1, 400), warmup=st.floats(0, 1), decay=st.sampled_from(["cosine", "linear"]))
def test_the_rate_rises_to_its_peak_and_falls_to_zero(updates, warmup, decay):
    rate = WarmUp(RATES[decay](0.5), warmup).schedule(updates)
    rises = round(warmup * updates)
    assert float(rate(rises)) == pytest.approx(0.5)
    if rises < updates:
        assert float(rate(updates)) == pytest.approx(0, abs=1e-6)
    if rises > 0:
        assert float(rate(0)) == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_lowers_a_quadratic(name):
    import jax

    rates = {
        "sgd": 0.05,
        "lars": 5.0,
        "lars_scaled": 3.0,
        "lion": 0.06,
        "rmsprop": 0.05,
        "sm3": 0.3,
        "adagrad": 0.4,
        "rowwise_adagrad": 0.4,
    }
    asked = make_optimizer(name, WarmUp(Cosine(rates.get(name, 0.1)), 0.1), weight_decay=1e-4)
    optimizer = asked.build(60)

    def loss(params):
        return ((params["w"] - 1) ** 2).sum() + ((params["b"] - 1) ** 2).sum()

    @jax.jit
    def run(params):
        def one(carry, _):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(one, (params, optimizer.init(params)), length=60)[0][0]

    start = {"w": jax.numpy.full((3, 3), 3.0), "b": jax.numpy.full(3, 1.0)}
    assert float(loss(run(start))) < 0.3 * float(loss(start))


def test_a_recipe_file_may_be_called_like_a_module_and_import_its_neighbours(tmp_path, monkeypatch):
    (tmp_path / "numbers_beside.py").write_text("UPDATES = 7\n")
    (tmp_path / "json.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass, replace\n"
        "from numbers_beside import UPDATES\n"
        "from multipod.recipes.digits import digits\n"
        "@dataclass(frozen=True)\n"
        "class Mine:\n    power: float = 2.0\n"
        "def recipe():\n    return replace(digits(), updates=UPDATES)\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load(f"{tmp_path / 'json.py'}:recipe").updates == 7
    assert PathFinder.find_spec("json").origin == json.__file__, "a new process would find the recipe in its place"
