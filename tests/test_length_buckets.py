"""Batches of like lengths: one size a batch on all hosts, a step for each size, the numbers of full-length batches."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multipod.data.batches import TrainBatches
from multipod.data.pairs import Pairs
from multipod.data.sequences import token_file
from multipod.errors import DataError
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.metrics.objective import TokenClassification
from multipod.optim.rates import Cosine
from multipod.optim.sgd import Sgd
from multipod.recipe.recipe import Recipe
from multipod.step.program import program_of
from multipod.train.context import RunContext
from multipod.train.loop import train

BOUNDS = ((4, 4), (4, 8), (12, 8))


def pairs(bounds=BOUNDS, count=48):
    rng = np.random.default_rng(3)
    lengths = [(n := int(rng.integers(1, 13)), min(8, 1 + n // 2)) for _ in range(count)]
    source, label = ([rng.integers(3, 20, pair[side]) for pair in lengths] for side in (0, 1))
    return Pairs(token_file(source), token_file(label), bounds, start=2)


@dataclass(frozen=True)
class Words:
    """Pairs as the data of a recipe; `lengths` are noted as batches are read."""

    bounds: tuple = BOUNDS
    kept: dict = field(default_factory=dict, compare=False)

    def train(self):
        return self.kept.setdefault(self.bounds, pairs(self.bounds))

    def test(self):
        return pairs(self.bounds, 10)


@dataclass(frozen=True)
class Bag:
    """Tells a token from the one before it and from the mean of the source: compiles in no time."""

    def init(self, key):
        return {"table": 0.1 * jax.random.normal(key, (20, 8)), "head": jnp.eye(8, 20)}, {}

    def apply(self, params, statistics, batch, *, train, key):
        given = params["table"][batch["source"]] * (batch["source"] != 0)[..., None]
        seen = params["table"][batch["target"]] + given.sum(1, keepdims=True)
        return jnp.tanh(seen) @ params["head"], statistics


def recipe(bounds=BOUNDS, **changes):
    return Recipe(
        "words",
        Bag(),
        Words(bounds),
        TokenClassification(),
        Sgd(Cosine(0.1)),
        batch=8,
        updates=7,
        layout=Layout((1, 1)),
        evaluation_batch=8,
        **changes,
    )


def test_all_hosts_read_a_batch_at_one_size_and_every_pair_once_an_epoch():
    source = pairs()
    seen, sizes = [], set()
    for k in range(6):
        whole = TrainBatches(source, 8, 0, np.arange(8))
        batch = whole[k]
        for rows in np.array_split(np.arange(8), 3):
            part = TrainBatches(source, 8, 0, rows)[k]
            for name, array in part.items():
                np.testing.assert_array_equal(array, batch[name][rows])
        size = batch["source"].shape[1], batch["label"].shape[1]
        assert size == next(
            b for b in BOUNDS if b[0] >= (batch["source"] != 0).sum(1).max() and b[1] >= batch["weight"].sum(1).max()
        )
        sizes.add(size)
        seen += whole.numbers(k).tolist()
    assert sorted(seen) == list(range(48))
    assert len(sizes) > 1
    np.testing.assert_array_equal(batch["target"][:, 0], 2)
    told = batch["weight"][:, 1:] == 1
    np.testing.assert_array_equal(batch["target"][:, 1:][told], batch["label"][:, :-1][told])


def test_the_trainer_takes_batches_of_several_sizes_and_padding_changes_no_loss():
    told, recipe_ = [], recipe(BOUNDS[1:])
    program = program_of(recipe_, make_mesh(recipe_.layout))
    train(program, RunContext(observers=[told.append]))
    losses = [event.values["loss"] for event in told if type(event).__name__ == "Updated"]
    whole = replace(recipe_, data=Words(BOUNDS[-1:]))
    fixed, source = program_of(whole, program.mesh), recipe_.data.train()
    full = replace(source, bounds=BOUNDS[-1:])
    update, state, go = fixed.compile_update(), fixed.init(), fixed.controls()
    order = TrainBatches(source, 8, 0, np.arange(8))
    sizes = set()
    for k in range(7):
        sizes.add(order[k]["source"].shape[1])
        state, sums = update(state, fixed.place_batch(full.read(order.numbers(k)), np.arange(8), 8), go)
        assert float(sums["loss"]) / 8 == pytest.approx(losses[k], rel=1e-5)
    assert len(sizes) > 1


def test_a_size_that_nothing_was_compiled_for_is_named():
    program = program_of(recipe(), make_mesh(Layout((1, 1))))
    update, state = program.compile_update(), jax.eval_shape(program.init)
    batch = program.place_batch(replace(pairs(((13, 9),))).read(np.arange(8)), np.arange(8), 8)
    with pytest.raises(DataError, match=r"no update was compiled for a batch of .*'source': \(8, 13\)"):
        update(state, batch, program.controls())


def test_what_fits_no_size_and_sizes_that_do_not_grow_are_refused():
    with pytest.raises(
        DataError, match=r"pairs: \d+ of 48 do not fit a batch of 4 \+ 8 tokens; pair \d+ has \d+ \+ \d"
    ):
        pairs(BOUNDS[:2])
    with pytest.raises(DataError, match="do not grow"):
        pairs(((12, 8), (4, 8)))
    with pytest.raises(DataError, match="48 sources and 0 labels"):
        Pairs(pairs().source, token_file([]), BOUNDS, 2)
