"""Updates that are given to the devices ahead: the same results, whatever happens meanwhile."""

from contextlib import closing
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from tiny_recipe import tiny

from multipod.data.digits import Digits
from multipod.data.source import ArraySource
from multipod.errors import CheckpointError, ClusterError, PoisonedError
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.recipe.bad_updates import BadUpdateRules
from multipod.recipe.override import override
from multipod.step.program import program_of
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.context import LoopHooks, RunContext
from multipod.train.events import BadUpdate, Evaluated, Saved, SaveFailed, Updated
from multipod.train.hooks import WorldLeft, no_faults
from multipod.train.loop import train
from multipod.train.updating import default_run_ahead, run_ahead_of

EXPONENT = 31
"""1 + the bit that turns a small float32 into a huge one."""


@dataclass(frozen=True)
class OneDark:
    """The digits, one of whose images is not a number."""

    dark: int = 900

    def train(self):
        source = Digits().train()
        image = source.arrays["image"].astype(np.float32)
        image[self.dark] = np.nan
        return ArraySource(source.arrays | {"image": image})

    def test(self):
        return Digits().test()


class Flips:
    """A bit flips in a gradient of the first device before some updates."""

    flips = True
    after = no_faults.after

    def __init__(self, at, sticky=False):
        self.at, self.sticky = dict(at), sticky

    def before(self, update, given):
        return self.at.pop(update, 0)


@pytest.fixture(scope="module")
def recipe():
    layout = replace(Layout(), mesh=(1, 1))
    return replace(tiny(), layout=layout, batch=56, updates=14, evaluate_every=4, checkpoint_every=6)


def run(recipe, store=None, faulty=False, **around):
    """A run on its first device; returns its state, and what was told but for times."""
    told = []
    program = program_of(recipe, make_mesh(recipe.layout, jax.devices()[: np.prod(recipe.layout.mesh)]), faulty=faulty)
    state, _ = train(program, RunContext(store, [told.append], **around))
    return state, told


def plain(told):
    """What is the same whatever the time."""
    names = {Updated: ("update", "values"), Evaluated: ("update", "values", "beside"), Saved: ("update",)}
    names |= {BadUpdate: ("update", "kind", "action", "verdict", "back_to")}
    return [
        (type(event).__name__, *(str(getattr(event, name)) for name in names[type(event)]))
        for event in told
        if type(event) in names
    ]


def same(one, two):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))


@pytest.fixture(scope="module")
def one_by_one(recipe):
    return run(recipe)


def test_the_host_waits_for_an_update_once_others_are_on_their_way_and_nothing_else_changes(recipe, one_by_one):
    told = []
    hooks = LoopHooks(
        on_phase=lambda phase, update: told.append((phase, update + 1)) if phase == "updating" else None,
        on_update=lambda state, event, leaving: told.append(("done", event.update)) or 0.0,
    )
    state, events = run(recipe, run_ahead=2, hooks=hooks)
    assert plain(events) == plain(one_by_one[1])
    assert same(state, one_by_one[0])
    # After updates 4, 6, 8 and 12 the state is wanted: none may begin before it is evaluated or saved.
    assert told[:10] == [("updating", 1), ("updating", 2), ("updating", 3), ("done", 1), ("updating", 4), *(
        ("done", update) for update in (2, 3, 4)
    ), ("updating", 5), ("updating", 6)]  # fmt: skip
    assert [word for word in told if word[0] == "done"] == [("done", update) for update in range(1, 15)]


def test_several_devices_run_ahead_as_well_if_they_are_told_to(recipe, one_by_one):
    wide = replace(recipe, layout=replace(recipe.layout, mesh=(2, 4)))
    assert same(run(wide)[0], run(wide, run_ahead=3)[0])


def test_a_run_that_is_stopped_is_gone_on_with(recipe, one_by_one, tmp_path):
    program = program_of(recipe, make_mesh(recipe.layout, jax.devices()[:1]))
    with closing(Checkpoints(tmp_path / "checkpoints", 3)) as store:
        state, _ = run(recipe, store, run_ahead=3, stop_after=5)
        assert (int(state.update), store.updates()) == (5, [5])
        asked = RunContext(store, run_ahead=3)
        asked = replace(asked, observers=[lambda event: isinstance(event, Updated) and asked.stop.ask()])
        state, ended = train(program, asked, store.restore(program.shapes))
        assert ended.interrupted
        assert 5 < ended.update == int(state.update) == store.updates()[-1] < 10
        state, _ = train(program, RunContext(store, run_ahead=3), store.restore(program.shapes))
    assert same(state, one_by_one[0])


def test_a_world_is_left_when_nothing_is_on_its_way(recipe):
    left = []
    hooks = LoopHooks(
        on_update=lambda state, event, leaving: left.append((event.update, int(state.update), leaving)) or 0.0,
        wants_restart=lambda: len(left) >= 7,
    )
    with pytest.raises(WorldLeft, match="after update 12"):
        run(replace(recipe, evaluate_every=0, checkpoint_every=0), run_ahead=2, hooks=hooks)
    assert left[-2:] == [(11, 12, False), (12, 12, True)]


def test_a_save_that_is_owed_is_of_the_newest_state(recipe, monkeypatch, tmp_path):
    with closing(Checkpoints(tmp_path / "checkpoints", 3)) as store:
        whole, fails = store.save, [True]

        def save(state, update):
            if fails and fails.pop():
                raise CheckpointError("no room")
            assert int(state.update) == update
            whole(state, update)

        monkeypatch.setattr(store, "save", save)
        told = run(replace(recipe, evaluate_every=0), store, run_ahead=2)[1]
    assert [event.update for event in told if isinstance(event, SaveFailed)] == [6]
    assert [event.update for event in told if isinstance(event, Saved)] == [9, 12, 14]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "flips"),
    [
        (["bad_updates.action=skip"], {}),
        (["bad_updates.action=skip", "bad_updates.replay=false"], {}),
        (["bad_updates.action=roll-back", "bad_updates.replay=false"], {}),
        (["bad_updates.action=skip"], {8: EXPONENT, 9: EXPONENT}),
    ],
    ids=["skip", "skip at once", "roll back", "repeat"],
)
def test_what_is_behind_a_bad_update_waits_until_it_is_judged(recipe, changes, flips, tmp_path):
    data = {} if flips else {"data": OneDark()}
    recipe = override(
        replace(recipe, updates=24, evaluate_every=0, bad_updates=BadUpdateRules("skip"), **data), changes
    )
    results = []
    for ahead in (0, 3):
        # A flip waits with the update that it was for, so the second is seen only where updates go one by one.
        flipping = LoopHooks(faults=Flips(flips if ahead == 0 else dict(list(flips.items())[:1])))
        with closing(Checkpoints(tmp_path / str(ahead), 3)) as store:
            results.append(run(recipe, store, faulty=bool(flips), run_ahead=ahead, hooks=flipping))
    (one, told), (two, ahead_told) = results
    bad = [event for event in ahead_told if isinstance(event, BadUpdate)]
    assert len(bad) >= 1
    assert {event.kind for event in bad} == {"not finite"}
    if not flips:
        assert plain(told) == plain(ahead_told)
    else:
        assert [event.action for event in bad] == ["repeated"]
        undisturbed = run(recipe, faulty=True)[0]
        assert same(two, undisturbed)
    assert same(one, two)


def test_a_run_that_stops_at_a_bad_update_saves_the_state_before_it(recipe, tmp_path):
    rules = BadUpdateRules("stop", replay=False)
    recipe = replace(recipe, updates=40, evaluate_every=0, checkpoint_every=0, data=OneDark(), bad_updates=rules)
    messages, states = [], []
    for ahead in (0, 3):
        with closing(Checkpoints(tmp_path / str(ahead), 3)) as store:
            with pytest.raises(PoisonedError) as error:
                run(recipe, store, run_ahead=ahead)
            messages.append(str(error.value))
            program = program_of(recipe, make_mesh(recipe.layout, jax.devices()[:1]))
            states.append(store.restore(program.shapes))
    assert messages[0] == messages[1]
    assert same(*states)


def test_how_far_updates_run_ahead():
    assert default_run_ahead(8, "cpu", (0, 10, 2)) == 0
    assert default_run_ahead(8, "cpu", (0, 12, 0)) == default_run_ahead(1, "cpu", (0, 10, 2)) == 2
    assert default_run_ahead(8, "gpu", (0, 10, 2)) == 2
    assert run_ahead_of(5, BadUpdateRules("skip")) == 5
    assert run_ahead_of(None, BadUpdateRules("skip", spike=5)) == run_ahead_of(0, BadUpdateRules(), "because") == 0
    with pytest.raises(ClusterError, match=r"--run-ahead 1: bad_updates.spike compares each .* Leave out --run-ahead"):
        run_ahead_of(1, BadUpdateRules("skip", spike=5))
