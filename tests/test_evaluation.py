"""Evaluation at once and beside training."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from tiny_recipe import tiny

from multipod.data.digits import Digits
from multipod.data.source import ArraySource
from multipod.errors import MetricError
from multipod.layout.mesh import make_mesh
from multipod.step.program import program_of
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.context import RunContext
from multipod.train.evaluation import evaluate
from multipod.train.events import Evaluated, Saved, Updated
from multipod.train.loop import train

pytestmark = pytest.mark.jax_version


@pytest.fixture(scope="module")
def program():
    """Evaluations take five batches, so those beside training end updates later than they begin."""
    recipe = replace(tiny(), batch=56, updates=14, evaluate_every=4, checkpoint_every=0, evaluation_batch=80)
    return program_of(recipe, make_mesh(recipe.layout))


def events_of(program, **around):
    events = []
    train(program, RunContext(observers=[events.append], **around))
    return [event for event in events if isinstance(event, Evaluated | Updated | Saved)]


def test_an_evaluation_beside_training_is_that_at_once(program):
    at_once, beside = events_of(program), events_of(program, evaluate_beside=True)

    def told(events):
        return [(e.update, e.values, e.sums, e.count) for e in events if isinstance(e, Evaluated)]

    assert told(beside) == told(at_once)
    assert [update for update, *_ in told(beside)] == [4, 8, 12, 14]
    losses = [[e.values["loss"] for e in events if isinstance(e, Updated)] for events in (at_once, beside)]
    assert losses[0] == losses[1]

    def place(events, update):
        """How many updates were done when the evaluation of this one was told."""
        told = next(k for k, e in enumerate(events) if isinstance(e, Evaluated) and e.update == update)
        return sum(isinstance(e, Updated) for e in events[:told])

    assert [place(at_once, update) for update in (4, 8, 12)] == [4, 8, 12]
    assert place(beside, 4) > 4
    assert place(beside, 12) == 14  # waited for at the end


def test_before_a_checkpoint_evaluations_are_waited_for(program, tmp_path):
    recipe = replace(program.recipe, checkpoint_every=8)
    checkpoints = Checkpoints(tmp_path, keep=3)
    events = events_of(replace(program, recipe=recipe), evaluate_beside=True, checkpoints=checkpoints)
    checkpoints.close()
    saved = next(k for k, event in enumerate(events) if isinstance(event, Saved))
    assert events[saved].update == 8
    assert [e.update for e in events[:saved] if isinstance(e, Evaluated)] == [4, 8]


@dataclass(frozen=True)
class Untested:
    """Data without a test set."""

    def train(self):
        return Digits().train()

    def test(self):
        return ArraySource({name: array[:0] for name, array in Digits().test().arrays.items()})


def test_an_empty_test_set_is_refused_before_anything_is_trained(program):
    recipe = replace(program.recipe, data=Untested())
    empty = replace(program, recipe=recipe)
    with pytest.raises(MetricError, match="the test set has no examples, so nothing could be said of the run"):
        train(empty, RunContext())
    with pytest.raises(MetricError, match="the test set has no examples"):
        evaluate(empty, program.init(), recipe.data.test())
    assert np.isfinite(evaluate(program, program.init(), Digits().test())["loss"])
