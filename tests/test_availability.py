"""Checkpoints, the lock, bad updates and goodput: what a run does when its surroundings fail it."""

import math
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from processes import files_no_larger_than
from tiny_recipe import tiny

from multipod.errors import CheckpointError, PoisonedError, RecipeError, RunFolderError
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.recipe.bad_updates import BadUpdateRules
from multipod.recipe.override import override
from multipod.recipe.recipe import Recipe
from multipod.recipe.text import differences, to_text
from multipod.runs import lock
from multipod.step.program import Program, program_of
from multipod.train.bad_numbers.loss_spikes import SpikeDetector, kind_of
from multipod.train.bad_numbers.replay import compare_placements
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.checkpoints.checksums import damaged_files, seal
from multipod.train.checkpoints.saving import RetryingSaver
from multipod.train.context import LoopHooks, RunContext
from multipod.train.events import BadUpdate, Compiled, Ended, Evaluated, Saved, SaveFailed, Started, Updated
from multipod.train.goodput import GoodputAccount, account_for, past_seconds
from multipod.train.hooks import no_faults
from multipod.train.loop import train

# Checksums and checkpoints.


def test_each_part_of_the_files_is_sealed_and_read_by_one(tmp_path):
    for number in range(5):
        (tmp_path / f"file{number}").write_bytes(bytes(range(number, 200)))
    for part in range(3):
        seal(tmp_path, part, 3)
    assert damaged_files(tmp_path) == []
    (tmp_path / "file1").write_bytes(b"short")
    (tmp_path / "file2").unlink()
    (tmp_path / "file3").write_bytes(bytes(197))
    expected = [
        "file1 has 5 bytes, not 199",
        "file2 is missing",
        "file3 has 197 bytes that are not those saved",
    ]
    assert damaged_files(tmp_path) == expected
    assert sorted(line for part in range(3) for line in damaged_files(tmp_path, part, 3)) == expected
    (tmp_path / "checksums.json").write_text("{")
    assert damaged_files(tmp_path) == ["checksums.json is damaged"]


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of(tiny(), make_mesh(Layout((2, 4))))


def hurt(folder: Path) -> Path:
    """Flips a bit of the largest file."""
    largest = max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    return largest


def test_a_damaged_newest_checkpoint_is_put_aside_named_and_the_one_before_is_taken(program, tmp_path):
    told: list[str] = []
    state = program.init()
    with closing(Checkpoints(tmp_path / "checkpoints", 3)) as store:
        for update in (1, 2):
            store.save(state._replace(update=state.update + update), update)
        store.wait()
        name = hurt(tmp_path / "checkpoints" / "2").name
        with pytest.raises(CheckpointError, match=f"{name} has .* that are not those saved\nTry --at 1"):
            store.restore(program.shapes)
        assert int(store.restore(program.shapes, on_damage=told.append).update) == 1
        assert name in told[0]
        assert told[0].endswith(f"Going on from the one before it, 1; the damaged one lies in {tmp_path / 'damaged'}.")
        assert [path.name for path in (tmp_path / "damaged").iterdir()] == ["2"]
        store.save(state._replace(update=state.update + 2), 2)  # the number is free again
        store.wait()
        assert int(store.restore(program.shapes).update) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of Orbax's own threads
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_storage_that_fails_for_a_while_is_tried_again_while_training_goes_on(program, tmp_path):
    told: list = []
    state = program.init()
    with closing(Checkpoints(tmp_path / "checkpoints", 3)) as store:
        saving = RetryingSaver(store, told.append, sleep=lambda s: None)
        with files_no_larger_than(2000):
            saving.save(state._replace(update=state.update + 1), 1)
            until = time.monotonic() + 60
            while not saving.is_owed(1) and time.monotonic() < until:
                time.sleep(0.01)
            assert saving.is_owed(1)
            saving.save(state._replace(update=state.update + 2), 2)
        assert [type(event) for event in told] == [Saved, SaveFailed]
        assert (told[1].update, told[1].retry) == (2, 3)
        assert "could not be written" in told[1].reason
        assert not saving.is_owed(2)
        assert saving.is_owed(3)
        saving.save_last(state._replace(update=state.update + 3), 3)
        assert isinstance(told[-1], Saved)
        assert store.updates() == [3]
        assert int(store.restore(program.shapes).update) == 3


class Refusing:
    """A store that refuses the first few saves."""

    has_failed = False

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals

    def save(self, state, update):
        self.refusals -= 1
        if self.refusals >= 0:
            raise CheckpointError("no room\nMake some.")

    def wait(self):
        return


def test_tries_grow_rarer_and_the_last_state_is_tried_for_some_seconds():
    told: list = []
    saving = RetryingSaver(Refusing(4), told.append)
    due = []
    for update in range(10, 30):
        if update == 10 or (due and not isinstance(told[-1], Saved) and saving.is_owed(update)):
            saving.save(None, update)
            due.append(update)
    assert due == [10, 11, 13, 17, 25]
    assert [event.reason for event in told[:4]] == ["no room"] * 4
    pauses: list[float] = []
    RetryingSaver(Refusing(3), told.append, sleep=pauses.append).save_last(None, 1)
    assert pauses == [0.5, 1, 2]
    with pytest.raises(CheckpointError, match="no room"):
        RetryingSaver(Refusing(9), told.append, sleep=pauses.append).save_last(None, 1)


def test_saves_that_fail_in_the_background_are_tried_as_rarely():
    """One that has begun is not yet one that is on disk."""

    class Failing:
        """A store whose saves begin well and fail later; the ninth is the first that does not."""

        begun, failing = 0, False

        @property
        def has_failed(self):
            return self.failing

        def save(self, state, update):
            if self.failing:
                self.failing = False
                raise CheckpointError("no room\nMake some.")
            self.begun += 1
            self.failing = self.begun < 5
            begun.append(update)

        def wait(self):
            return

    told: list = []
    begun: list[int] = []
    saving = RetryingSaver(Failing(), told.append)
    for update in range(10, 60):
        if update == 10 or saving.is_owed(update):
            saving.save(None, update)
    assert begun == [10, 12, 15, 20, 29]  # noticed one update later, then 1, 2, 4, 8 updates
    assert [event.retry - event.update for event in told if isinstance(event, SaveFailed)] == [1, 2, 4, 8]
    saving.save(None, 60)  # waits for the one before, which is on disk: the count begins anew
    Failing.failing = True
    saving._store.failing = True
    saving.save(None, 61)
    assert told[-1].retry == 62


# The lock.


def test_a_held_folder_names_its_owner_and_is_free_when_the_owner_dies(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from multipod.runs.lock import hold\n"
        "held = hold(Path(sys.argv[1]), 'multipod train x'); print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(
            RunFolderError, match=rf"held by a run that is alive: process {owner.pid} on .*`multipod train x`"
        ):
            lock.hold(tmp_path, "another")
        owner.kill()
    held = lock.hold(tmp_path, "another")  # the file is there still, its owner is not
    held.release()
    held.release()
    assert not list(tmp_path.iterdir())


def test_an_owner_on_another_host_is_watched(tmp_path):
    path = tmp_path / lock.LOCK
    path.write_text('{"host": "elsewhere", "pid": 1, "command": "multipod train x"}')

    def beats(seconds):
        assert seconds > 3 * lock.BEAT_S
        path.touch()

    with pytest.raises(RunFolderError, match="process 1 on elsewhere"):
        lock.hold(tmp_path, "here", sleep=beats)
    lock.hold(tmp_path, "here", sleep=lambda seconds: None).release()  # it said nothing: dead
    path.write_text("nonsense")
    lock.hold(tmp_path, "here").release()


# Bad updates: the policy.


def test_what_is_a_spike_follows_from_the_updates_before():
    watch = SpikeDetector(BadUpdateRules("skip", spike=3, window=16, most=2))
    for _ in range(15):
        watch.add(2.0, 0.5)
    assert watch.limits() == (math.inf, math.inf)
    watch.add(2.0, 0.5)
    assert watch.limits() == (6.0, 1.5)
    assert [watch.count_bad() for _ in range(3)] == [False, False, True]
    for _ in range(16):
        watch.add(1.0, 0.5)
    assert watch.limits() == (3.0, 1.5)
    assert not watch.count_bad()
    assert SpikeDetector(BadUpdateRules("skip")).limits() == (math.inf, math.inf)
    assert kind_of(math.nan, 1.0, (3.0, 3.0)) == "not finite"
    assert kind_of(1.0, math.inf, (3.0, 3.0)) == "not finite"
    assert kind_of(4.0, 1.0, (3.0, 3.0)) == "loss spike"
    assert kind_of(1.0, 4.0, (3.0, 3.0)) == "gradient spike"


def test_trouble_is_one_group_of_the_recipe_and_a_run_may_change_it():
    recipe = override(tiny(), ["bad_updates.action=roll-back", "bad_updates.spike=4"])
    assert recipe.bad_updates == BadUpdateRules("roll-back", 4.0)
    assert differences(to_text(tiny()), to_text(recipe)) == []
    with pytest.raises(RecipeError, match=r"bad_updates: spike=0.5 \(0, or above 1.*window=3 \(at least 16\), most=-1"):
        BadUpdateRules(spike=0.5, window=3, most=-1)
    with pytest.raises(RecipeError, match="one of ignore, skip, roll-back, stop"):
        override(tiny(), ["bad_updates.action=pray"])


def test_who_is_outvoted_is_the_bad_device():
    good = np.arange(8, dtype=np.uint32).reshape(4, 2)
    fine = [np.ones(4, bool)] * 3
    assert compare_placements([good, good, good], fine).devices == ()

    def with_bad(device):
        placements = [good.copy() for _ in range(3)]
        for k, placement in enumerate(placements):
            placement[(device - k) % 4] += 1
        return placements

    for device in range(4):
        found = compare_placements(with_bad(device), fine)
        assert (found.devices, found.sure) == ((device,), True)
    assert compare_placements([good, good, good], [np.array([True, False, True, True])] * 3).shares == (1,)
    two = np.arange(4, dtype=np.uint32).reshape(2, 2)
    assert compare_placements([two, two + np.uint32([[1, 0], [0, 0]])], [np.ones(2, bool)] * 2) == replace(
        compare_placements([two, two], [np.ones(2, bool)] * 2), devices=(0, 1), sure=False
    )
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="4 of 4 devices differ"):
        compare_placements([good, good, rng.integers(0, 99, (4, 2)).astype(np.uint32)], fine)


# Bad updates: the run.


class Flips:
    """A bit flips in a gradient of the first device before some updates; `sticky`: whoever asks again, too."""

    def __init__(self, at: dict[int, int], sticky: bool = False) -> None:
        self.at, self.sticky = at, sticky

    flips = True

    def before(self, update, given):
        return self.at.pop(update, 0)

    after = no_faults.after


EXPONENT = 31
"""1 + the bit that turns a small float32 into a huge one: its highest of the exponent."""


def run(recipe: Recipe, faults=no_faults, store=None, **options):
    told: list = []
    program = program_of(recipe, make_mesh(Layout((2, 4))), faulty=True)
    hooks = LoopHooks(faults=faults)
    state, ended = train(program, RunContext(store, [told.append], hooks, **options))
    return state, ended, told


@pytest.fixture(scope="module")
def short() -> Recipe:
    return replace(
        tiny(), updates=24, evaluate_every=0, checkpoint_every=0, bad_updates=BadUpdateRules("skip", spike=5)
    )


@pytest.fixture(scope="module")
def undisturbed(short):
    return run(short)


def same(a, b) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((np.asarray(x) == np.asarray(y)).all()), a, b)))


def test_a_passing_fault_costs_one_update_and_changes_nothing(short, undisturbed):
    state, ended, told = run(short, Flips({18: EXPONENT}))
    (troubled,) = [event for event in told if isinstance(event, BadUpdate)]
    assert (troubled.update, troubled.action, troubled.back_to) == (19, "repeated", 19)
    assert troubled.kind in ("gradient spike", "not finite")
    assert "a passing fault, not the batch" in troubled.verdict
    assert same(state, undisturbed[0])
    assert ended.troubled == {"repeated": 1}
    assert undisturbed[1].troubled == {}


def test_a_bad_chip_is_named_and_its_update_is_left_out(short, undisturbed):
    state, ended, told = run(short, Flips({18: EXPONENT}, sticky=True))
    (troubled,) = [event for event in told if isinstance(event, BadUpdate)]
    assert troubled.action == "skip"
    assert "bad chip: device 0 of process 0 on " in troubled.verdict
    assert ended.update == int(state.update) == 24
    assert not same(state.params, undisturbed[0].params)
    assert [event.update for event in told if isinstance(event, Updated)] == list(range(1, 25))


def test_rolling_back_goes_on_with_later_batches(short, tmp_path):
    recipe = override(replace(short, checkpoint_every=8), ["bad_updates.action=roll-back"])
    with closing(Checkpoints(tmp_path / "checkpoints", 3)) as store:
        state, ended, told = run(recipe, Flips({18: EXPONENT}, sticky=True), store)
    (troubled,) = [event for event in told if isinstance(event, BadUpdate)]
    assert (troubled.update, troubled.back_to, troubled.action) == (19, 16, "roll-back")
    updates = [event.update for event in told if isinstance(event, Updated)]
    assert updates == [*range(1, 20), *range(17, 25)]
    assert (int(state.update), int(state.position)) == (24, 27)
    assert ended.repeated == 3
    assert ended.lost_s["repeated"] > 0


def test_stopping_saves_the_weights_before_the_bad_update(short, tmp_path):
    recipe = override(short, ["bad_updates.action=stop", "bad_updates.replay=false"])
    with closing(Checkpoints(tmp_path / "checkpoints", 3)) as store:
        with pytest.raises(
            PoisonedError, match=r"update 19: .*It was not tried again\. The weights before it are saved as update 19"
        ):
            run(recipe, Flips({18: EXPONENT}), store)
        assert store.updates() == [19]
        before = run(recipe, no_faults, stop_after=18)[0]
        program = program_of(recipe, make_mesh(Layout((2, 4))))
        assert same(store.restore(program.shapes).params, before.params)


# Goodput.


def test_the_time_of_a_run_is_told_by_what_it_went_into():
    events = [
        Started("", 0, 10, 8, began_s=5.0),
        Compiled(3.0),
        *(Updated(number, {}, 2.0, 0.5, 4.0) for number in range(1, 5)),
        Saved(4, 0.25),
        Evaluated(4, {}, {}, 1, 1.0),
        Evaluated(4, {}, {}, 1, 1.0, beside=True),
        *(Updated(number, {}, 2.0, 0.5, 4.0) for number in range(5, 7)),
        SaveFailed(6, "no room", 7, 0.5),
        BadUpdate(6, "loss spike", {}, {}, "skip", "", 6, 0.75),
    ]
    account = account_for(events)
    assert account.good_s == 7.5
    assert account.lost_s == {
        "start": 5.0, "compile": 3.0, "input": 3.0, "checkpoint": 0.75, "evaluation": 1.0, "trouble": 2.25,
    }  # fmt: skip
    past, repeated = past_seconds(events, 4, away_s=10.0)
    assert (past["good"], past["repeated"], past["restart"], repeated) == (6.0, 1.5, 10.0, 2)
    assert sum(past.values()) == pytest.approx(account.told_s + 10)
    assert "restart" not in past_seconds(events, 4, away_s=-3600.0)[0]  # a clock was set back

    again = GoodputAccount()
    again(Started("", 4, 10, 8, began_s=1.0, past=past, repeated=repeated))
    again(Updated(5, {}, 2.0, 0.5, 4.0))
    assert again.good_s == 7.5
    assert again.repeated == 2
    assert again.goodput(30.0) == 0.25


def test_a_run_accounts_for_all_of_its_time(undisturbed):
    _, ended, told = undisturbed
    assert ended.goodput * ended.run_s + sum(ended.lost_s.values()) == pytest.approx(ended.run_s)
    assert 0 < ended.goodput < 1
    assert account_for(event for event in told if not isinstance(event, Ended)).good_s == pytest.approx(
        ended.goodput * ended.run_s
    )
