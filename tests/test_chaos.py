"""Faults made to happen: plans, what they are told to do, what came of them, and formulas of goodput."""

import json
import math
import os
import subprocess
import sys
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import files_no_larger_than
from test_cli import TINY

from multipod.chaos.campaign import carry_out
from multipod.chaos.effects import compare_examples, fault_effects, largest_difference, loss_difference
from multipod.chaos.fault_plan import FaultPlan, RandomFaults, read_plan
from multipod.chaos.hosts import LINK, make_hosts
from multipod.chaos.inject import Fault, Injector, flip_newest, note, records
from multipod.cli.chaos import settle_plan
from multipod.elastic.launcher.processes import WorkerCommand
from multipod.elastic.launcher.supervise import supervise
from multipod.errors import ChaosError, ClusterError, PlanError
from multipod.plan.goodput import Failing, daly_s, goodput, simulated, young_s
from multipod.runtime import Timeouts

# Plans.


def test_a_plan_is_read_and_its_draws_are_repeatable(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(
        'processes = 4\nseed = 7\n[[fault]]\nkind = "flip"\nat = 30\nbit = 31\n[random]\ncount = 5\nkinds = ["kill"]\n'
    )
    plan = read_plan(path)
    assert plan == FaultPlan(4, 7, (Fault("flip", 30, bit=31),), RandomFaults(5, ("kill",)))
    faults = plan.faults(100)
    assert faults == plan.faults(100)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert len(faults) == 6
    assert faults != FaultPlan(4, 8, plan.fault, plan.random).faults(100)
    assert settle_plan(path, 9, "stop,slow", 3, 2) == FaultPlan(2, 3, plan.fault, RandomFaults(9, ("stop", "slow")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("processes = ", "is no plan: Invalid value"),
        ('[[fault]]\nkind = "explode"\nat = 1', "Invalid enum value 'explode'.*kinds are kill, stop"),
        ('[[fault]]\nkind = "kill"\nat = 1\nwhen = 2', "unknown field `when`"),
        ('[[fault]]\nkind = "kill"', "missing required field `at`"),
    ],
)
def test_a_slip_of_the_pen_in_a_plan_is_named(tmp_path, text, message):
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(ChaosError, match=message):
        read_plan(tmp_path / "plan.toml")


def test_what_cannot_be_carried_out_is_refused_all_at_once(tmp_path):
    plan = FaultPlan(2, fault=(Fault("kill", 60), Fault("stop", 5, rank=2, seconds=0), Fault("flip", 5, bit=32)))
    with pytest.raises(ChaosError, match=r"fault 1: kill at=60.*\n.*2: stop rank=2.*\n.*2: stop seconds=0.*\n.*bit=32"):
        plan.faults(60)
    with pytest.raises(ChaosError, match="cannot be read: No such file"):
        read_plan(tmp_path / "none.toml")
    with pytest.raises(ChaosError, match="nothing is to go wrong"):
        settle_plan(None, None, None, None, None)
    with pytest.raises(ChaosError, match=r"--kinds kill,maim: there is no maim\. Known: kill, stop"):
        settle_plan(None, 3, "kill,maim", None, None)


# Inside a process.


def injector(tmp_path, *faults, rank=0):
    said = {"faults": [msgspec.to_builtins(fault) for fault in faults]}
    (tmp_path / "faults.json").write_text(json.dumps(said))
    return Injector(tmp_path, rank)


def test_a_fault_happens_once_and_is_noted_before(tmp_path):
    faults = Fault("flip", 3, bit=30, sticky=True), Fault("slow", 5, rank=1, seconds=0.0)
    first = injector(tmp_path, *faults)
    assert first.flips
    assert [first.before(update, list) for update in range(6)] == [0, 0, 0, 31, 0, 0]
    assert [(record["kind"], record["update"]) for record in records(tmp_path / "fired-0.jsonl")] == [("flip", 3)]
    assert injector(tmp_path, *faults).before(3, list) == 0  # the process that takes over
    other = injector(tmp_path, *faults, rank=1)
    assert not other.before(5, list)
    assert [record["fault"] for record in records(tmp_path / "fired-1.jsonl")] == [1]


def test_the_newest_checkpoint_is_damaged_where_it_is_large(tmp_path):
    assert flip_newest(tmp_path) is None
    for update in ("9", "10"):
        (tmp_path / update).mkdir()
        (tmp_path / update / "small").write_bytes(b"s")
        (tmp_path / update / "large").write_bytes(bytes(99))
        (tmp_path / update / "checksums.json").write_text("{}" * 99)
    assert flip_newest(tmp_path) == tmp_path / "10" / "large"
    assert sum((tmp_path / "10" / "large").read_bytes()) == 4


def test_a_full_disk_is_one_whose_files_cannot_grow(tmp_path):
    with files_no_larger_than(10):
        with pytest.raises(OSError, match="File too large"):
            (tmp_path / "file").write_bytes(bytes(11))
        note(tmp_path / "record", {"update": 1})  # what happened is written down all the same
        with pytest.raises(OSError, match="File too large"):
            (tmp_path / "file").write_bytes(bytes(11))
    assert records(tmp_path / "record")[0]["update"] == 1


def test_cutting_the_network_ends_connections_in_this_process_alone():
    """In a process of its own: it cuts all connections there are."""
    program = (
        "import socket; from multipod.chaos.inject import cut\n"
        "with socket.create_server(('127.0.0.1', 0)) as server:\n"
        "    a = socket.create_connection(server.getsockname()); b = server.accept()[0]\n"
        "    one, two = socket.socketpair()\n"
        "    cut('', 1.0)\n"
        "    assert b.recv(9) == b''\n"
        "    one.send(b'still here'); print(two.recv(99).decode())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "still here\n"), done.stderr


# What came of it.


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_time_and_updates_lost_to_each_fault(tmp_path):
    seen = [(1, 1), (2, 2), (3, 3), (10, 2), (11, 3), (12, 4), (13, 5), (20, 5), (21, 6)]
    write(tmp_path / "seen-0.jsonl", *({"t": t, "update": u, "world": [t // 10, 0]} for t, u in seen if t < 10))
    late = [{"t": t + 0.1, "update": u, "world": [t // 10, 0]} for t, u in seen if t < 10]  # of the same updates
    write(tmp_path / "seen-1.jsonl", *late, *({"t": t, "update": u, "world": [t // 10, 0]} for t, u in seen if t > 9))
    write(tmp_path / "fired-0.jsonl", {"t": 13.5, "fault": 1, "update": 5} | msgspec.to_builtins(Fault("stop", 5)))
    write(
        tmp_path / "fired-1.jsonl", {"t": 3.5, "fault": 0, "update": 3} | msgspec.to_builtins(Fault("kill", 3, rank=1))
    )
    first, second = fault_effects(tmp_path, 2)
    assert (first.fault, first.update, first.recovered_s, first.repeated) == (Fault("kill", 3, rank=1), 3, 8.5, 2)
    assert (second.fault, second.recovered_s, second.repeated) == (Fault("stop", 5), 7.5, 1)


def gave(update, world, *numbers):
    return {"update": update, "numbers": list(numbers), "world": [0, world]}


def did(update, world):
    return {"update": update, "world": [0, world]}


def test_examples_are_those_of_the_updates_that_count(tmp_path):
    for name, lost in (("calm", ()), ("wild", (gave(2, 0, 9),))):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "seen-0.jsonl", gave(1, 0, 0), did(1, 0), *lost, gave(2, 0, 2), did(2, 0))
        write(tmp_path / name / "seen-1.jsonl", gave(1, 0, 1), did(1, 0), gave(2, 0, 3), did(2, 0))
    found = compare_examples(tmp_path / "wild", tmp_path / "calm", 2)
    assert (found.updates, found.used, found.same, found.uneven) == (2, 4, True, 0)
    write(tmp_path / "wild" / "seen-1.jsonl", gave(1, 0, 0), did(1, 0), gave(2, 0, 0), did(2, 0))
    found = compare_examples(tmp_path / "wild", tmp_path / "calm", 2)
    assert (found.same, found.uneven) == (False, 1)


def test_an_update_counts_as_the_last_world_did_it_and_one_word_that_it_is_done_is_enough(tmp_path):
    calm, wild = tmp_path / "calm", tmp_path / "wild"
    for folder in (calm, wild):
        folder.mkdir()
    write(calm / "seen-0.jsonl", *(line for k in (1, 2, 3) for line in (gave(k, 0, 2 * k), did(k, 0))))
    write(calm / "seen-1.jsonl", *(line for k in (1, 2, 3) for line in (gave(k, 0, 2 * k + 1), did(k, 0))))
    # The second process died in update 2, which the first had finished; alone it broke off 3 in a world, and did it.
    write(wild / "seen-0.jsonl", gave(1, 0, 2), did(1, 0), gave(2, 0, 4), did(2, 0),
          gave(3, 1, 6, 7), gave(3, 2, 7, 6), did(3, 2))  # fmt: skip
    write(wild / "seen-1.jsonl", gave(1, 0, 3), did(1, 0), gave(2, 0, 5))
    found = compare_examples(wild, calm, 2)
    assert (found.updates, found.used, found.same, found.uneven) == (3, 6, True, 0)


def test_how_far_results_are_apart():
    one = {"w": np.array([1.0, -4.0]), "n": np.array([3])}
    assert largest_difference(one, one) == 0
    assert largest_difference({**one, "w": np.array([1.0, -4.04])}, one) == pytest.approx(0.01)
    assert largest_difference({**one, "n": np.array([4])}, one) == math.inf
    assert largest_difference({"w": one["w"]}, one) == math.inf
    assert largest_difference({**one, "w": np.array([1.0, np.nan])}, one) == math.inf


def test_losses_of_the_same_updates_are_compared(tmp_path):
    for name, losses in (("one", [2.0, 9.0, 1.0]), ("two", [2.0, 1.0])):
        (tmp_path / name).mkdir()
        lines = [{"event": "updated", "update": 1 + k, "values": {"loss": loss}} for k, loss in enumerate(losses)]
        if name == "one":
            lines[2]["update"] = 2  # done again
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert loss_difference(tmp_path / "one", tmp_path / "two") == 0
    with open(tmp_path / "two" / "metrics.jsonl", "a") as file:
        file.write('{"event": "updated", "update": 2, "values": {"loss": 1.5}}\n')
    assert loss_difference(tmp_path / "one", tmp_path / "two") == 0.25
    (tmp_path / "two" / "metrics.jsonl").write_text("")
    assert loss_difference(tmp_path / "one", tmp_path / "two") == math.inf


def test_a_run_that_comes_no_further_is_given_up(tmp_path):
    dies = WorkerCommand([sys.executable, "-c", "raise SystemExit(1)"], dict(os.environ))
    with pytest.raises(ChaosError, match=r"did not reach its end in 4 starts; the last: rank 0 .* exited with code 1"):
        carry_out([], tmp_path / "new", ["train", "x"], lambda command, relay: supervise([dies], Timeouts(3), relay))


# Goodput.


@given(st.floats(50, 500), st.floats(0.1, 3), st.floats(0, 10))
def test_daly_s_interval_is_nearly_the_best(between_s, save_s, restart_s):
    failing = Failing(between_s, save_s, restart_s)
    best = max(goodput(young_s(failing) * 1.02**power, failing) for power in range(-50, 50))
    assert goodput(daly_s(failing), failing) > best * 0.998
    assert 0 < best < 1


def test_the_formula_agrees_with_drawn_failures():
    for failing in (Failing(100, 2, 5), Failing(40, 1, 10)):
        for interval_s in (5, 20, 60):
            drawn = np.mean([simulated(interval_s, failing, 20_000, seed) for seed in range(4)])
            assert goodput(interval_s, failing) == pytest.approx(drawn, abs=0.02)
    slow = Failing(100, 0.5, 5, commit_s=6)
    drawn = np.mean([simulated(20, slow, 20_000, seed) for seed in range(4)])
    assert goodput(20, slow) == pytest.approx(drawn, abs=0.02)
    assert young_s(Failing(200, 1, 0)) == 20  # sqrt(2 * 1 * 200)
    assert daly_s(Failing(1, 3, 0)) == 1
    with pytest.raises(PlanError, match="cannot be: times are 0 or more"):
        Failing(0, 1, 1)


# With real processes.


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_that_is_killed_and_whose_checkpoint_is_damaged_ends_as_if_nothing_had_been(multipod, tmp_path):
    (tmp_path / "plan.toml").write_text('processes = 1\n[[fault]]\nkind = "corrupt"\nat = 50\n')
    done = multipod(
        "chaos", TINY, "--plan", "plan.toml", "--out", "out", "--json", "out.json",
        "--", "--mesh", "1x2", "--set", "checkpoint_every=10", "--set", "evaluate_every=0",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["starts"], found["difference"], found["left_behind"]) == (2, 0, [])
    assert [blow["kind"] for blow in found["faults"]] == ["corrupt"]
    assert found["faults"][0]["repeated"] >= 10  # the newest was damaged: one further back
    assert found["examples"]["same"]
    assert list((tmp_path / "out" / "disturbed" / "run" / "damaged").iterdir())
    assert "cannot be restored" in done.stderr


TALK = """
import socket, sys, time
number, link, file = int(sys.argv[1]), sys.argv[2], sys.argv[3]
from multipod.chaos.inject import cut
if number == 0:
    with socket.create_server((socket.gethostbyname(socket.gethostname()), 4000)) as server:
        open(file, "w").close()
        talk = server.accept()[0]
        print(talk.recv(9).decode(), flush=True)
        cut(link, 1.0)
        time.sleep(0.3)
        start = time.monotonic()
        talk.sendall(b"late")
        print(talk.recv(9).decode(), flush=True)
        assert time.monotonic() - start > 0.5
else:
    import os
    while not os.path.exists(file):
        time.sleep(0.02)
    talk = socket.create_connection((sys.argv[4], 4000), timeout=30)
    talk.sendall(b"hello")
    talk.sendall(talk.recv(9))
"""


def test_hosts_have_addresses_and_a_link_that_can_be_cut_and_leave_nothing(tmp_path):
    with ExitStack() as stack:
        try:
            pair = stack.enter_context(make_hosts(2))
        except ClusterError as error:
            pytest.skip(str(error))  # making them needs root
        command = [sys.executable, "-c", TALK]
        ready = str(tmp_path / "ready")
        workers = [
            WorkerCommand([*command, str(number), LINK, ready, pair.addresses[0]], dict(os.environ))
            for number in (0, 1)
        ]
        one, two = (
            subprocess.Popen(worker.command, env=worker.environment, stdout=subprocess.PIPE, text=True)
            for worker in pair.place(workers)
        )
        said, _ = one.communicate(timeout=60)
        two.communicate(timeout=60)
        assert (one.returncode, two.returncode, said) == (0, 0, "hello\nlate\n")
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not set(pair.names) & set(left.split())
    with pytest.raises(ClusterError, match="There are no such hosts here"), make_hosts(2), make_hosts(2):
        pass
