"""A run whose data are slow: the trainer tells the readers how long its devices waited, and they become more."""

import time
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from multipod.data.batches import TrainBatches
from multipod.data.source import ArraySource
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.metrics.objective import Classification
from multipod.optim.rates import Cosine
from multipod.optim.sgd import Sgd
from multipod.recipe.recipe import Recipe
from multipod.step.program import program_of
from multipod.train.context import RunContext
from multipod.train.loop import train


class Slow(ArraySource):
    """A disk far away."""

    def read(self, numbers):
        time.sleep(0.15 if len(numbers) > 1 else 0)
        return super().read(numbers)


@dataclass(frozen=True)
class Numbers:
    def train(self):
        return Slow({"x": np.ones((64, 4), np.float32), "label": np.zeros(64, np.int32)})

    def test(self):
        return ArraySource({"x": np.ones((4, 4), np.float32), "label": np.zeros(4, np.int32)})


@dataclass(frozen=True)
class Linear:
    def init(self, key):
        return {"weight": jnp.zeros((4, 3))}, {}

    def apply(self, params, statistics, batch, *, train, key):
        return batch["x"] @ params["weight"], statistics


def test_the_trainer_tells_the_readers_how_long_it_waited(monkeypatch):
    feeds, start = [], TrainBatches.start
    monkeypatch.setattr(TrainBatches, "start", lambda *given: feeds.append(start(*given)) or feeds[-1])
    recipe = Recipe(
        "slow", Linear(), Numbers(), Classification(), Sgd(Cosine(1e-3)), batch=8, updates=18,
        layout=Layout((1, 1)), evaluation_batch=4,
    )  # fmt: skip
    train(program_of(recipe, make_mesh(recipe.layout)), RunContext())
    (feed,) = feeds
    assert feed.tuner.shares[0] > 0.02
    assert feed.tuner.threads > 1 or feed.tuner.ahead > 2
