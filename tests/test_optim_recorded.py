"""Rates and optimizers against numbers that were recorded when one class had the fields of all of them.

They were equal to the last bit under the same compiler flags; these tests compile without optimisation.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from test_optim import flat, run, tree

from multipod.optim.optimizer import Optimizer
from multipod.optim.optimizers import OPTIMIZERS
from multipod.optim.presets import find_preset
from multipod.recipe.old_forms import upgrade
from multipod.recipe.read import read_value

RECORDED = json.loads((Path(__file__).parent / "recorded" / "optimizers.json").read_text())
DEFAULTS = {
    "name": "adamw", "rate": 1e-3, "momentum": 0.9, "weight_decay": 0.0, "warmup": 0.1, "decay": "cosine", "clip": 0.0,
    "clip_before_sum": False, "nesterov": True, "beta2": 0.0, "eps": 0.0, "trust_coefficient": 0.001,
    "weight_decay_in": "optimizer", "skip": [], "stacked": [], "warmup_updates": 0, "warmup_start": 0.0,
    "decay_from_start": False, "end_rate": 0.0, "power": 2.0, "decay_rate": 0.1, "decay_every": 0.25, "drops": [],
    "sparse": False,
}  # fmt: skip
"""The fields that were not recorded."""


def read(old, kind="multipod.optim.optimizer:Optimizer"):
    return read_value(upgrade({"kind": kind} | DEFAULTS | old), Optimizer, "optimizer")


def rates_of(optimizer, case):
    return jax.vmap(optimizer.schedule(case["updates"]))(np.array(case["at"]))


def assert_close(rates, recorded, case=""):
    np.testing.assert_allclose(rates, recorded, 1e-6, 1e-7 * max(recorded), err_msg=str(case))


@pytest.mark.parametrize("decay", sorted({case["fields"].get("decay", "cosine") for case in RECORDED["rates"]}))
def test_every_rate_is_what_it_was_at_every_update(decay):
    for case in RECORDED["rates"]:
        if case["fields"].get("decay", "cosine") == decay:
            np.testing.assert_allclose(
                rates_of(read(case["fields"]), case), case["rates"], 1e-6, 1e-7, err_msg=str(case)
            )


@pytest.mark.parametrize("name", RECORDED["presets"])
def test_every_preset_and_its_rate_are_what_they_were(name):
    case, (preset, batch) = RECORDED["presets"][name], name.split("@")
    run = find_preset(preset).at(int(batch))
    assert_close(rates_of(run.optimizer, case), case["rates"])
    assert read(case["fields"]) == run.optimizer


@pytest.mark.parametrize("number", range(len(RECORDED["results"])))
def test_every_optimizer_ends_where_it_ended(number):
    case = RECORDED["results"][number]
    if "adafactor" in case:
        old = case["adafactor"] | {"kind": "multipod.optim.adafactor:Adafactor"}
        optimizer = read_value(upgrade(old), Optimizer, "optimizer")
    else:
        optimizer = read(case["fields"])
        assert type(optimizer) is OPTIMIZERS[case["fields"]["name"]]
    shapes = {"dense": {"kernel": (4, 3), "bias": (3,)}, "norm1": {"scale": (3,)}, "gain": (),
              "layers": {"kernel": (2, 3, 2)}, "gate": {"kernel": (2, 2)}}  # fmt: skip
    params, gradients = tree(0, shapes), [tree(seed, shapes, scale=0.5) for seed in range(1, 6)]
    ended = flat(run(optimizer.build(case["updates"]), params, gradients)[0])
    for name, values in case["params"].items():
        np.testing.assert_allclose(ended[name].ravel(), values, 1e-6, 1e-7, err_msg=name)
