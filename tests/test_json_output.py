"""`--json`: what the tables say, for programs."""

import json
from fractions import Fraction

import numpy as np
import pytest
from click.testing import CliRunner

from multipod.cli.json_output import plain
from multipod.cli.main import cli
from multipod.layout.text import layout_changes, spelled
from multipod.recipe.override import override
from multipod.recipes.digits import digits
from multipod.recipes.find import RECIPES


def printed(*words):
    done = CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_what_is_no_number_of_json_becomes_one():
    value = {"a": Fraction(1, 2), 3: (np.float32(2), np.int64(3)), "nan": float("nan"), "inf": [-np.inf], "n": None}
    assert plain(value) == {"a": 0.5, "3": [2.0, 3], "nan": None, "inf": [None], "n": None}
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == plain(value)


def test_recipes_and_presets_are_listed():
    listed = printed("list", "--json")
    assert set(listed["recipes"]) == set(RECIPES)
    assert listed["recipes"]["digits"].startswith("Small residual network")
    assert listed["presets"]["bert-lamb"] == [8192]


def test_a_simulation_says_what_its_table_says():
    found = printed("simulate", "--on", "mesh:8x8", "--fail", "2-3,2-5", "--bytes", "100M", "--json")
    assert [one["algorithm"] for one in found["algorithms"]][:2] == ["tree-packing", "detour-ring"]
    best = found["algorithms"][0]
    assert best["seconds"] == pytest.approx(1.308e-3, rel=1e-3)
    assert best["of_bound"] == pytest.approx(found["bound"]["seconds"] / best["seconds"])
    assert best["busiest_link"] == ["0,0", "0,1"]
    assert best["link_bytes"] == pytest.approx(63.16e6, rel=1e-3)
    assert "row-column" in found["left_out"]
    assert found["bytes"] == 100_000_000


def test_a_plan_gives_layouts_that_train_takes():
    found = printed("plan", "bert", "--on", "tpu-v3-pod:4x4", "--batch", "512", "--top", "3", "--price", "2", "--json")
    assert len(found["layouts"]) == 3
    assert found["devices"] == 32
    steps = [one["step_s"] for one in found["layouts"]]
    assert steps == sorted(steps)
    assert all(one["run"]["price"] > 0 for one in found["layouts"])
    for one in found["layouts"]:
        assert spelled(override(digits(), layout_changes(one["layout"])).layout) != ""


def test_json_and_pictures_are_not_asked_for_together():
    words = ["plan", "bert", "--on", "tpu-v3-pod:4x4", "--json", "--explain", "1"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert "Leave out --explain" in done.output
