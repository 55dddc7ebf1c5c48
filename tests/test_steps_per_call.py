"""Several updates in one program: the same results, whatever lies between two of them."""

from contextlib import closing
from dataclasses import replace

import jax
import pytest
from test_run_ahead import OneDark, plain, run, same
from test_staged import LATE, T123, dense
from tiny_recipe import tiny

from multipod import runs
from multipod.errors import ClusterError, PoisonedError
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.sync import Sync
from multipod.recipe.bad_updates import BadUpdateRules
from multipod.recipe.override import override
from multipod.step.program import program_of
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.context import LoopHooks, RunContext
from multipod.train.events import BadUpdate, Ended, Updated
from multipod.train.loop import train
from multipod.train.updating import steps_per_call_of


@pytest.fixture(scope="module")
def recipe():
    layout = replace(Layout(), mesh=(1, 1))
    return replace(tiny(), layout=layout, batch=56, updates=15, evaluate_every=5, checkpoint_every=7)


@pytest.fixture(scope="module")
def one_by_one(recipe):
    return run(recipe)


def test_calls_end_where_something_is_due_and_nothing_else_changes(recipe, one_by_one):
    told = []
    hooks = LoopHooks(
        on_phase=lambda phase, update: told.append(f"give {update + 1}") if phase == "updating" else None,
        on_update=lambda state, event, leaving: told.append(f"done {event.update}") or 0.0,
    )
    state, events = run(recipe, steps_per_call=3, run_ahead=1, hooks=hooks)
    assert plain(events) == plain(one_by_one[1])
    assert same(state, one_by_one[0])
    # A call has updates 1 to 3; 4 and 5 are single, because 5 is evaluated; 6 and 7 because 7 is saved.
    assert " ".join(told).startswith("give 1 give 2 give 3 give 4 done 1 done 2 done 3 give 5 done 4 done 5 give 6")
    assert " give 8 give 9 give 10 done 8 done 9 done 10 " in " ".join(told)
    steps = [event.step_s for event in events if isinstance(event, Updated)]
    assert len(steps) == 15
    assert min(steps[7:10]) > 0
    assert max(steps[7:10]) < 1.5 * min(steps[7:10]) + 2e-3  # shares of one time


def test_several_devices_and_a_rest_that_fills_no_call(recipe):
    wide = replace(recipe, updates=7, evaluate_every=0, checkpoint_every=0)
    wide = replace(wide, layout=replace(wide.layout, mesh=(2, 4), sync=Sync(sharding="fsdp")))
    assert same(run(wide)[0], run(wide, steps_per_call=4)[0])


@pytest.mark.slow
def test_stages_whose_pipe_is_never_empty():
    recipe = dense(LATE, updates=5, pipemare=T123)
    program, results = program_of(recipe, make_mesh(recipe.layout)), []
    for together in (1, 4):
        told: list = []
        state, _ = train(program, RunContext(observers=[told.append], steps_per_call=together))
        results.append((plain(told), state))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


@pytest.mark.slow
def test_a_run_that_is_stopped_in_a_call_is_gone_on_with(recipe, one_by_one, tmp_path):
    program = program_of(recipe, make_mesh(recipe.layout, jax.devices()[:1]))
    with closing(Checkpoints(tmp_path / "checkpoints", 3)) as store:
        state, _ = run(recipe, store, steps_per_call=3, stop_after=4)
        assert (int(state.update), store.updates()) == (4, [4])
        asked = RunContext(store, steps_per_call=3)
        asked = replace(asked, observers=[lambda event: isinstance(event, Updated) and asked.stop.ask()])
        state, ended = train(program, asked, store.restore(program.shapes))
        assert ended.interrupted
        assert 4 < ended.update == int(state.update) == store.updates()[-1] < 10
        state, _ = train(program, RunContext(store, steps_per_call=3), store.restore(program.shapes))
    assert same(state, one_by_one[0])


@pytest.mark.slow
@pytest.mark.parametrize("action", ["skip", "stop"])
def test_what_is_behind_a_bad_update_in_its_call_changes_nothing(recipe, action, tmp_path):
    rules = BadUpdateRules(action, replay=action == "skip")
    recipe = replace(recipe, updates=24, evaluate_every=0, data=OneDark(), bad_updates=rules)
    results = []
    for together in (1, 5):
        told, program = [], program_of(recipe, make_mesh(recipe.layout, jax.devices()[:1]))
        with closing(Checkpoints(tmp_path / str(together), 3)) as store:
            context = RunContext(store, [told.append], steps_per_call=together, run_ahead=together - 1)
            try:
                state, message = train(program, context)[0], ""
            except PoisonedError as error:
                state, message = store.restore(program.shapes), str(error)
        results.append((plain(told), message, state))
        bad = [event.update for event in told if isinstance(event, BadUpdate)]
        assert len(bad) >= 1
        assert bad[0] % 5 not in (0, 1)  # updates stand before it and behind it in its call
    assert results[0][:2] == results[1][:2]
    assert same(results[0][2], results[1][2])


@pytest.mark.slow
def test_a_run_folder_remembers_it_and_what_cannot_be_is_refused(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = replace(recipe, layout=replace(recipe.layout, mesh=(2, 4)))
    result = runs.train(recipe, out="run", steps_per_call=5, stop_after=5)
    assert isinstance(result.ended, Ended)
    parts = result.ended.start_s
    assert list(parts) == ["import", "devices", "trace", "folder", "state", "data", "compile", "update"]
    assert sum(parts.values()) == pytest.approx(result.ended.first_step_s, abs=0.05)
    assert "time to the first update" in (result.folder / "report.html").read_text()
    assert result.ended.resume == "multipod train --resume run --steps-per-call 5"
    with pytest.raises(ClusterError, match=r"--steps-per-call 8: evaluate_every=5, so no call .* Give at most 5"):
        runs.train(recipe, out="other", steps_per_call=8)
    assert not (tmp_path / "other").exists()
    with pytest.raises(ClusterError, match=r"--steps-per-call 2: bad_updates.spike compares .* Leave out --steps-per"):
        steps_per_call_of(2, override(recipe, ["bad_updates.action=skip", "bad_updates.spike=5"]))
    with pytest.raises(ClusterError, match="--image-order HWNC is of single updates"):
        steps_per_call_of(2, recipe, "HWNC")
    with pytest.raises(ClusterError, match=r"--steps-per-call 2: because\. Leave"):
        steps_per_call_of(2, recipe, in_order="because")
    assert steps_per_call_of(1, recipe, "HWNC", "because") == 1
