"""Processes that wait for the place of one that ended: they hear what to run and run it, or are ended."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from processes import clean_environment
from tiny_recipe import tiny

import multipod
from multipod.cli.cluster import find
from multipod.cli.launch import LaunchOptions, refuse_standby_contradictions
from multipod.cli.launching.child_command import read_child
from multipod.cli.launching.workers import make_workers, use_standbys
from multipod.elastic.launcher.processes import WorkerCommand
from multipod.elastic.launcher.standby import STANDBY_VARIABLE, StandbyPool, StandbyProcess, spawn_rank
from multipod.elastic.launcher.supervise import supervise
from multipod.errors import ClusterError
from multipod.layout.mesh import make_mesh
from multipod.runs import standby
from multipod.runtime import Timeouts
from multipod.step.program import program_of

HERE = Path(__file__).parent
SOURCE = Path(multipod.__file__).parents[1]
LIMITS = Timeouts(20)
# Waits if it is to, then says what it was told and by whom, and does two updates.
WORKER = """
import os, sys, time
from multipod.elastic.heartbeat import CONTROL_FD, Heartbeat
from multipod.elastic.launcher.standby import STANDBY_VARIABLE, wait_for_command
before, waited = os.getpid(), STANDBY_VARIABLE in os.environ
arguments, environment = wait_for_command(int(os.environ[CONTROL_FD])) if waited else (sys.argv[1:], {})
os.environ.update(environment)
beat = Heartbeat(int(os.environ[CONTROL_FD]), 0.05)
for update in range(3):
    beat("updating", update)
time.sleep(0.3)
with open(os.environ["NOTES"], "a") as notes:
    print(os.getpid(), waited, *arguments, os.environ["PLACE"], file=notes)
if "fail" in arguments:
    sys.exit(1)
beat.close()
"""


def worker(notes: Path, *words: str, place: str) -> WorkerCommand:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "NOTES": str(notes), "PLACE": place}
    return WorkerCommand([sys.executable, "-c", WORKER, *words], environment)


@pytest.mark.processes
def test_a_process_that_waited_takes_the_place_and_what_is_not_needed_is_ended(tmp_path):
    notes = tmp_path / "notes"
    before = psutil.Process().children(recursive=True)
    with StandbyPool() as reserve:
        first = worker(notes, "fail", place="one")
        filled = []

        def fill() -> None:
            filled.append(reserve.fill([(first.command, first.environment)] * 2))

        assert supervise([first], LIMITS, settled=fill).exit_code == 1
        assert len(filled) == 1
        second = worker(notes, "go", "on", place="two")
        waiting = reserve.take()
        assert waiting is not None
        assert reserve.take() is None
        assert supervise([WorkerCommand(second.command, second.environment, waiting[0])], LIMITS).exit_code == 0
        waiting[1].end()
        fill()
    assert psutil.Process().children(recursive=True) == before  # the other one, too
    pids, waited, *words = zip(*(line.split()[:2] for line in notes.read_text().splitlines()), strict=True)
    assert (len(set(pids)), waited, words) == (2, ("False", "True"), [])
    assert notes.read_text().splitlines()[1].split(maxsplit=2)[2] == "go on two"


@pytest.mark.processes
def test_one_that_is_gone_is_replaced_by_a_new_one(tmp_path):
    process, ours = spawn_rank(0, [sys.executable, "-c", "pass"], os.environ)
    process.wait()
    gone = StandbyProcess(process, ours, os.environ)
    one = worker(tmp_path / "notes", "x", place="new")
    assert supervise([WorkerCommand(one.command, one.environment, gone)], LIMITS).exit_code == 0
    assert (tmp_path / "notes").read_text().split()[1:] == ["False", "x", "new"]


def test_standby_without_use_is_refused():
    with pytest.raises(
        ClusterError, match=r"there are none. Add --restarts 3(.|\n)*take --spares 1(.|\n)*this is `eval`"
    ):
        refuse_standby_contradictions(LaunchOptions(2, survive=True, standby=True), read_child(["eval"]))
    refuse_standby_contradictions(LaunchOptions(2, survive=True), read_child(["eval"]))


def test_processes_that_wait_are_of_no_use_without_each_other():
    with StandbyPool() as reserve:
        reserve.fill([([sys.executable, "-c", "import time; time.sleep(600)"], os.environ)] * 2)
        one, two = reserve._waiting
        one.process.kill()
        one.process.wait()
        assert reserve.take() is None
        assert two.process.poll() is not None  # it was ended, too


@pytest.mark.slow
@pytest.mark.processes
def test_train_waits_with_its_peers_and_then_runs_what_it_is_told(tmp_path):
    train = ["train", f"{HERE / 'tiny_recipe.py'}:tiny", "--set", "updates=3", "--cpu-devices", "1"]
    made = make_workers(train, 2, {**clean_environment(), "PYTHONPATH": str(SOURCE)})
    with StandbyPool() as reserve:
        reserve.fill([(one.command, one.environment) for one in made])
        told = [
            WorkerCommand([*one.command, "--quiet", "--out", str(tmp_path / "run")], one.environment) for one in made
        ]
        run = use_standbys(told, reserve)
        assert all(
            one.standby is not None and one.environment == two.environment for one, two in zip(run, made, strict=True)
        )
        assert supervise(run, Timeouts(60)).exit_code == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["processes"] == 2


def test_what_was_compiled_while_waiting_is_taken_if_it_is_the_same(monkeypatch):
    recipe = tiny()
    program = program_of(recipe, make_mesh(recipe.layout))
    monkeypatch.setattr(standby, "_prepared", [program])
    named = replace(recipe.layout, mesh=recipe.layout.mesh_shape(8))  # as a resumed run says what the first chose
    assert standby.reuse_prepared(program_of(replace(tiny(), layout=named), make_mesh(named))) is program
    for other in (program_of(replace(recipe, batch=80), program.mesh), program_of(recipe, program.mesh, faulty=True)):
        assert standby.reuse_prepared(other) is other


def test_one_process_alone_waits_as_well():
    (one,) = make_workers(["train", "digits"], 1, {STANDBY_VARIABLE: "1"})
    assert find(one.environment).waits
    assert find({name: value for name, value in one.environment.items() if name != STANDBY_VARIABLE}).name == "none"
