"""Runs that go on without a process: what is decided, what is kept in memory, how a mesh closes; and a real one."""

import json
import socket
from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from processes import files_no_larger_than
from tiny_recipe import tiny

from multipod.cli.launch import launch
from multipod.data.batches import TrainBatches
from multipod.elastic.heartbeat import Beat, Heartbeat
from multipod.elastic.launcher.membership import ClusterView, ElasticPolicy, decide, judge_ending
from multipod.elastic.launcher.processes import Rank
from multipod.elastic.launcher.supervise import RunOutcome
from multipod.elastic.straggling import SpeedHistory, find_stragglers
from multipod.elastic.worker.snapshots import Snapshot, SnapshotMemory, choose_copy, restore_copy, take_snapshot
from multipod.elastic.worker.update_buffer import UpdateBuffer, append_missing, read_updates
from multipod.elastic.world import World, read_world
from multipod.errors import ClusterError, LayoutError, RunFolderError
from multipod.layout.layout import Layout
from multipod.layout.slots import mesh_of_survivors
from multipod.layout.split import ModelSplit
from multipod.runs.example_log import ExampleLog, used
from multipod.runtime import Timeouts
from multipod.train import multihost
from multipod.train.events import Regrouped, Updated
from multipod.train.observers import jsonl
from multipod.train.observers.text import regrouped_text

RULES, LIMITS = ElasticPolicy(slots=4), Timeouts(6)


def beat(update: int = 5, phase: str = "updating", **fields) -> Beat:
    given = {"begun": update + 2, "age_s": 0.1, "identity": "same", "generation": 0, "joined": True}
    return Beat(phase, update, **{**given, **fields})


def ranks(count: int = 4, **changes: Rank) -> list[Rank]:
    made = [Rank(number, 100 + number, last_beat_s=10.0, beat=beat()) for number in range(count)]
    return [changes.get(f"r{rank.number}", rank) for rank in made]


def now(
    all_ranks: list[Rank], slots: dict[int, int] | None = None, generation: int = 0, hurt: bool = False
) -> ClusterView:
    found = {number: number for number in range(4) if number < len(all_ranks)} if slots is None else slots
    return ClusterView(all_ranks, found, generation, 9.0, hurt, 10.5)


def test_the_first_world_waits_for_all_and_takes_no_spare():
    waiting = Rank(3, 103, last_beat_s=10.0, beat=beat(identity="", generation=-1, joined=False))
    spare = Rank(4, 104, last_beat_s=10.0, beat=beat(generation=-1, joined=False))
    assert decide(now([*ranks(r3=waiting), spare], {}, generation=-1), RULES, LIMITS).slots is None
    step = decide(now([*ranks(), spare], {}, generation=-1), RULES, LIMITS)
    assert step.slots == {0: 0, 1: 1, 2: 2, 3: 3}


def test_the_others_go_on_and_a_spare_takes_the_empty_seat():
    dead = Rank(1, 101, code=-9, ended_s=10.4)
    left = {0: 0, 2: 2, 3: 3}
    assert decide(now(ranks(r1=dead), left, hurt=True), RULES, LIMITS).slots == left
    spare = Rank(4, 104, last_beat_s=10.0, beat=beat(generation=-1, joined=False))
    step = decide(now([*ranks(r1=dead), spare], left, hurt=True), RULES, LIMITS)
    assert step.slots == {0: 0, 1: 4, 2: 2, 3: 3}
    assert not step.planned


def test_one_who_comes_back_is_taken_in_when_the_others_are_settled():
    back = Rank(1, 111, last_beat_s=10.0, beat=beat(generation=-1, joined=False))
    left = {0: 0, 2: 2, 3: 3}
    step = decide(now(ranks(r1=back), left), RULES, LIMITS)
    assert step.slots == {0: 0, 1: 1, 2: 2, 3: 3}
    assert step.planned
    joining = Rank(2, 102, last_beat_s=10.0, beat=beat(joined=False))
    assert decide(now(ranks(r1=back, r2=joining), left), RULES, LIMITS).slots is None


def test_fewer_than_the_least_wait_for_one_on_its_way_and_else_end():
    rules, left = replace(RULES, min_processes=4), {0: 0, 2: 2, 3: 3}
    starting = Rank(1, 111, last_beat_s=10.0)
    assert decide(now(ranks(r1=starting), left, hurt=True), rules, LIMITS).end is None
    dead = Rank(1, 101, code=-9, ended_s=10.4, beat=beat())
    end = decide(now(ranks(r1=dead), left, hurt=True), rules, LIMITS).end
    assert end is not None
    assert end.culprit == 1
    assert end.reason == "3 of 4 processes are left, and at least 4 are needed: rank 1 (pid 101) was killed by SIGKILL"


def test_silent_stuck_and_strange_ranks_are_named():
    silent = Rank(2, 102, last_beat_s=1.0, beat=beat())
    assert "gave no sign of life" in decide(now(ranks(r2=silent)), RULES, LIMITS).kill[2]
    ahead = [Rank(number, 100 + number, last_beat_s=10.0, beat=beat(age_s=30.0)) for number in range(4)]
    behind = Rank(3, 103, last_beat_s=10.0, beat=beat(update=4, begun=6, age_s=30.0))
    assert "made no progress" in decide(now([*ahead[:3], behind]), RULES, LIMITS).kill[3]
    other = Rank(1, 101, last_beat_s=10.0, beat=beat(identity="multipod 9"))
    why = decide(now(ranks(r1=other)), RULES, LIMITS).kill[1]
    assert why == "rank 1 (pid 101) would train something else: it has multipod 9; rank 0 has same"


def test_where_nobody_can_be_blamed_all_leave_what_they_hang_in():
    """A save that failed on one: the others wait for it, and it waits for them in the next update."""
    saving = [
        Rank(number, 100 + number, last_beat_s=10.0, beat=beat(phase="saving", age_s=30.0)) for number in (0, 2, 3)
    ]
    on = Rank(1, 101, last_beat_s=10.0, beat=beat(age_s=30.0))
    step = decide(now([saving[0], on, *saving[1:]]), RULES, LIMITS)
    assert (step.kill, step.planned, step.slots) == ({}, False, {0: 0, 1: 1, 2: 2, 3: 3})
    assert step.reason == "ranks 0, 2, 3 made no progress for 30 s while saving after update 5, and the others wait"
    first = [replace(rank, beat=replace(rank.beat, joined=False)) for rank in (saving[0], on, *saving[1:])]
    assert decide(now(first), RULES, LIMITS).slots is None  # the first update of a world may take long
    again = [replace(rank, beat=replace(rank.beat, phase="starting", age_s=0.1)) for rank in ranks()]
    assert decide(now(again, generation=1), RULES, LIMITS).slots is None


def test_nobody_is_stuck_in_an_update_between_two_worlds():
    ours, theirs = socket.socketpair()
    with ours, ours.makefile() as lines:
        heartbeat = Heartbeat(theirs.detach(), 60.0, lost=lambda: None)
        heartbeat("updating", 7)
        heartbeat.restart()
        heartbeat.note(generation=1, joined=False)
        heartbeat.close()
        last = next(said for line in lines if (said := Beat(**json.loads(line))).done)
    assert (last.phase, last.update, last.generation) == ("starting", 7, 1)
    waiting = replace(last, age_s=50.0, begun=9, identity="same", done=False)
    for seen, stuck in ((waiting, False), (replace(waiting, phase="updating"), True)):
        alone = [Rank(0, 100, last_beat_s=10.0, beat=seen)]
        assert bool(decide(now(alone, {0: 0}, generation=1), RULES, LIMITS).kill) is stuck


def test_a_run_ends_when_nobody_trains_any_more():
    done = [Rank(number, number, last_beat_s=10.0, code=0, beat=beat(done=True)) for number in range(3)]
    leaving = Rank(3, 3, last_beat_s=10.0, beat=beat(done=True))
    assert judge_ending([*done, leaving], 10.5, LIMITS) == (True, None)
    assert judge_ending([*done, replace(leaving, code=0)], 10.5, LIMITS) == (True, RunOutcome(0))
    assert judge_ending([*done, replace(leaving, code=-9)], 10.5, LIMITS) == (True, RunOutcome(0))
    assert judge_ending([*done, replace(leaving, beat=beat())], 10.5, LIMITS) == (False, None)
    late = replace(leaving, beat=beat(generation=1, joined=False))  # told of a world that the others ended before
    assert judge_ending([*done, late], 10.5, LIMITS) == (True, RunOutcome(0))
    assert judge_ending([*done[:2], replace(done[2], code=None), late], 10.5, LIMITS) == (True, None)
    stopped = [replace(rank, code=130) for rank in done]
    assert judge_ending(stopped, 10.5, LIMITS)[1] == RunOutcome(130, reason="the run was interrupted")
    assert judge_ending([Rank(0, 1, code=2), Rank(1, 2, code=2)], 10.5, LIMITS) == (False, None)


def test_a_world_survives_its_text():
    world = World(3, (0, 2), (0, 5), 4, "127.0.0.1:99", True, "runs/a", {"1": "killed"}, (5,), 10)
    assert read_world(world.to_line()) == world
    assert world.process_of(5) == 1
    assert read_world("no json") is None


LEAVES = {"split": jnp.arange(12.0), "whole": jnp.arange(5)}


def piece(number: int, begin: int, size: int) -> tuple[tuple[int, tuple[int]], np.ndarray]:
    return (number, (begin,)), np.asarray(jax.tree.leaves(LEAVES)[number])[begin : begin + size]


def manifest(*snapshots: Snapshot) -> str:
    return SnapshotMemory(snapshots=list(snapshots)).manifest()


@given(st.sets(st.integers(0, 3), min_size=1), st.booleans())
def test_what_is_chosen_is_whole_between_the_living(living, mirrors):
    """Four processes hold a quarter each, and with mirrors the next one's too; some of them live."""

    def held(process: int) -> Snapshot:
        own = dict([piece(0, 3 * process, 3), piece(1, 0, 5)])
        copy = dict([piece(0, 3 * ((process - 1) % 4), 3)] if mirrors else [])
        return Snapshot((7, 0), {**own, **copy}, frozenset(copy))

    choice = choose_copy([manifest(held(process)) for process in sorted(living)], LEAVES)
    reach = living | ({(process - 1) % 4 for process in living} if mirrors else set())
    assert (choice is None) == (reach != {0, 1, 2, 3})
    if choice is not None:
        assert choice.source == ("mirror" if len(living) < 4 else "peers")


def test_the_newest_copy_that_all_can_use_is_taken_and_a_newcomer_needs_nothing():
    whole = dict([piece(0, 0, 12), piece(1, 0, 5)])
    old, new = Snapshot((6, 0), whole), Snapshot((7, 0), whole)
    choice = choose_copy([manifest(old, new), manifest(old)], LEAVES)
    assert choice is not None
    assert (choice.stamp, choice.source) == ((7, 0), "peers")
    choice = choose_copy([manifest(old, new), manifest(old, new)], LEAVES)
    assert choice is not None
    assert (choice.stamp, choice.source) == ((7, 0), "memory")
    assert choose_copy([manifest(), manifest()], LEAVES) is None


def test_a_state_comes_back_from_memory_on_another_mesh():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    smaller = jax.sharding.Mesh(mesh.devices[:4], ("x",))
    state = {
        "weights": jax.device_put(jnp.arange(16.0), NamedSharding(mesh, PartitionSpec("x"))),
        "half": jax.device_put(jnp.ones((3, 2), jnp.bfloat16) * -0.0, NamedSharding(mesh, PartitionSpec())),
        "update": jax.device_put(jnp.int32(9), NamedSharding(mesh, PartitionSpec())),
    }
    snapshot = take_snapshot(state, (9, 0))
    assert snapshot.nbytes == 64 + 12 + 4

    def shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        spec = leaf.sharding.spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(smaller, spec))

    shapes = jax.tree.map(shape, state)
    choice = choose_copy([manifest(snapshot)], shapes)
    assert choice is not None
    back = restore_copy(choice, snapshot, shapes, smaller)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        assert np.asarray(before).tobytes() == np.asarray(after).tobytes()
        assert after.sharding.mesh == smaller


@pytest.mark.parametrize(
    ("empty", "failed"),
    [
        ((), ()),
        ((1,), ((0, 2), (0, 3))),
        ((0, 3), ((0, 0), (0, 1), (1, 2), (1, 3))),
        ((0, 1), ((0, 0), (0, 1), (0, 2), (0, 3))),
    ],
    ids=["whole", "one", "diagonal", "a row"],
)
def test_a_mesh_closes_around_empty_seats(empty, failed):
    devices = {slot: jax.devices()[2 * slot : 2 * slot + 2] for slot in range(4) if slot not in empty}
    layout, mesh = mesh_of_survivors(Layout(mesh=(2, 4)), devices, 4)
    assert sorted(device.id for device in mesh.devices.flat) == [
        device.id for slot in sorted(devices) for device in devices[slot]
    ]
    assert len(layout.failed) == len(failed)
    if empty != (0, 3):  # their chips touch only at a corner: those that are left move together
        assert layout.failed == failed
    assert dict(mesh.shape) == ({"y": 2, "x": 4} if not empty else {"y": 1, "x": 8 - len(failed)})


def test_a_layout_that_the_seats_cannot_carry_is_refused():
    devices = {0: jax.devices()[:2], 1: jax.devices()[2:4]}
    with pytest.raises(LayoutError, match="mesh 2x4 needs 8 devices, and 2 processes have 4"):
        mesh_of_survivors(Layout(mesh=(2, 4)), devices, 2)
    with pytest.raises(
        LayoutError, match=r"the 1 processes that are left have 2 devices each, and with replicas of model=4"
    ):
        mesh_of_survivors(Layout(split=ModelSplit(model=4)), {0: jax.devices()[:2]}, 2)


def test_the_log_of_examples_counts_what_the_result_is_made_of(tmp_path):
    with pytest.raises(RunFolderError, match="Train with --log-examples"):
        used(tmp_path)
    folder = tmp_path / "examples"
    folder.mkdir()

    def line(update: int, generation: int, examples: list[int] | None = None) -> str:
        return json.dumps(
            {"update": update, "generation": generation} | ({} if examples is None else {"examples": examples})
        )

    # Process 0 did update 1, and update 2, begun twice, after 1 had died in it; 1 was killed while it wrote.
    zero = [line(1, 0, [3, 1]), line(1, 0), line(2, 0, [5]), line(2, 1, [9]), line(2, 1, [5, 4]), line(2, 1)]
    (folder / "0.jsonl").write_text("\n".join(zero) + "\n")
    (folder / "1.jsonl").write_text("\n".join([line(1, 0, [2]), line(2, 0, [4]), '{"upd']))
    assert used(tmp_path) == {1: [1, 2, 3], 2: [4, 5]}


def test_a_full_disk_gets_the_log_of_examples_later(tmp_path):
    log = ExampleLog(tmp_path, TrainBatches(tiny().data.train(), 8, 0, np.arange(8)), 0)
    with files_no_larger_than(40):
        for update in range(3):
            log.begins(update)
            log.done(update + 1)
    log.close()
    assert [len(numbers) for numbers in used(tmp_path).values()] == [8, 8, 8]


def test_what_a_leader_had_not_written_yet_is_told_by_another(tmp_path):
    metrics, recent = tmp_path / "metrics.jsonl", UpdateBuffer()
    done = [Updated(number, {"loss": 1.0 / number}, 0.01, 0.0, 800.0) for number in range(1, 301)]
    done[297] = replace(done[297], values={"loss": float("nan")})
    for event in done:
        recent.add(event, event.update * 0.02)  # 50 a second: the last three seconds are kept
    metrics.write_bytes(b"".join(map(jsonl.encode, done[:240])))
    said = msgspec.json.decode(msgspec.json.encode(recent.last_updates(all_of_them=True)))
    append_missing(metrics, read_updates(said), 299)
    assert metrics.read_bytes() == b"".join(map(jsonl.encode, done[:299]))
    assert [event["update"] for event in recent.last_updates(all_of_them=False)] == [297, 298, 299, 300]


def test_a_straggler_is_one_who_is_slow_most_of_the_time():
    even = {0: [4e-3] * 10, 1: [5e-3] * 10, 2: [4e-3] * 10}
    assert find_stragglers(even, 2.0) == []
    held_up_once = [4e-3] * 9 + [0.2]
    assert find_stragglers({**even, 3: held_up_once}, 2.0) == []
    (found,) = find_stragglers({**even, 3: [12e-3] * 10}, 2.0)
    assert (found.rank, found.count) == (3, 10)
    assert str(found) == (
        "rank 3 is 2.7 times as slow as the median rank: 12.0 ms against 4.5 ms for the same work, over 10 times"
    )
    assert find_stragglers({0: [4e-3] * 10, 1: [12e-3] * 10}, 2.0) == []  # of two, nobody knows which is the usual one


def test_only_new_times_of_the_same_process_count():
    speeds = SpeedHistory(steady=2)
    for _ in range(5):
        for rank, seconds in ((0, 1e-3), (1, 1e-3), (2, 9e-3)):
            speeds.add(rank, seconds)  # each beat says it again
    assert speeds.find_slow(2.0) == []
    for rank, seconds in ((0, 1.1e-3), (1, 1.1e-3), (2, 9.1e-3)):
        speeds.add(rank, seconds)
    assert [slow.rank for slow in speeds.find_slow(2.0)] == [2]
    speeds.forget(2)
    assert speeds.find_slow(2.0) == []


def test_processes_that_would_train_something_else_are_named(monkeypatch):
    said = ["jax 0.10.2, recipe 1a", "jax 0.10.2, recipe 1b", "jax 0.10.2, recipe 1a", "jax 0.10.1, recipe 1a"]
    monkeypatch.setattr(multihost, "gather_lines", lambda line: said)
    with pytest.raises(
        ClusterError, match=r"process 0 has .* 1a\n  process 1 has .* 1b\n  process 3 has jax 0\.10\.1, .*\nUse"
    ):
        multihost.assert_same(said[0])
    monkeypatch.setattr(multihost, "gather_lines", lambda line: [line] * 3)
    multihost.assert_same(said[0])


def test_what_happened_is_told_in_a_line():
    lost = Regrouped(85, 1, 3, 4, {"1": "rank 1 (pid 9) was killed by SIGKILL"}, [], "mirror", 0, 2.14)
    assert regrouped_text(lost) == (
        "after update 85, without rank 1: 3 of 4 processes; what died came from its mirror; 2.1 s without an update"
    )
    came = Regrouped(90, 2, 4, 4, {}, [1], "checkpoint", 12, 2.0, planned=True)
    assert regrouped_text(came) == (
        "after update 90, with rank 1: 4 of 4 processes; THE STATE CAME FROM A CHECKPOINT, "
        "12 updates done again; 2.0 s without an update"
    )
    assert jsonl.decode(json.loads(jsonl.encode(lost))) == lost


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--least", "2", "--", "train", "digits"],
            "--mirror-copies say how a run survives. Add --survive",
        ),
        (["--survive", "--", "doctor"], "--survive goes with `train`, and this is `doctor`. Leave out --survive."),
        (["--survive", "--least", "3", "--", "train", "digits"], "--least 3 is more than --processes 2. Lower it."),
        (["--survive", "--", "train", "digits", "--fail", "0,1"], "--survive decides itself which chips are missing."),
    ],
)
def test_options_that_do_not_fit_are_refused(options, said):
    result = CliRunner().invoke(launch, ["--processes", "2", *options])
    assert said in str(result.exception)
