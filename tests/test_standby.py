"""Processes that wait for the place of one that ended: they hear what to run and run it, or are ended."""

import os
import sys
from pathlib import Path

import psutil
import pytest

import multipod
from multipod.cli.launch import check_standby, workers
from multipod.errors import ClusterError
from multipod.runtime import Timeouts
from multipod.train.standby import WAITS, Reserve, Warm, spawned
from multipod.train.supervise import Worker, supervise

SOURCE = Path(multipod.__file__).parents[1]
LIMITS = Timeouts(20)
# Waits if it is to, then says what it was told and by whom, and does two updates.
WORKER = """
import os, sys, time
from multipod.train.heartbeat import CONTROL_FD, Heartbeat
from multipod.train.standby import WAITS, told
before, waited = os.getpid(), WAITS in os.environ
arguments, environment = told(int(os.environ[CONTROL_FD])) if waited else (sys.argv[1:], {})
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


def worker(notes: Path, *words: str, place: str) -> Worker:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "NOTES": str(notes), "PLACE": place}
    return Worker([sys.executable, "-c", WORKER, *words], environment)


@pytest.mark.processes
def test_a_process_that_waited_takes_the_place_and_what_is_not_needed_is_ended(tmp_path):
    notes = tmp_path / "notes"
    before = psutil.Process().children(recursive=True)
    with Reserve() as reserve:
        first = worker(notes, "fail", place="one")
        filled = []

        def fill() -> None:
            filled.append(reserve.fill([(first.command, first.environment)] * 2))

        assert supervise([first], LIMITS, settled=fill).exit_code == 1
        assert len(filled) == 1
        second = worker(notes, "go", "on", place="two")
        warm = reserve.take(0)
        assert warm is not None
        assert supervise([Worker(second.command, second.environment, warm)], LIMITS).exit_code == 0
        assert reserve.take(0) is None
    assert psutil.Process().children(recursive=True) == before  # the other one, too
    pids, waited, *words = zip(*(line.split()[:2] for line in notes.read_text().splitlines()), strict=True)
    assert (len(set(pids)), waited, words) == (2, ("False", "True"), [])
    assert notes.read_text().splitlines()[1].split(maxsplit=2)[2] == "go on two"


@pytest.mark.processes
def test_one_that_is_gone_is_replaced_by_a_new_one(tmp_path):
    process, ours = spawned(0, [sys.executable, "-c", "pass"], os.environ)
    process.wait()
    gone = Warm(process, ours, os.environ)
    one = worker(tmp_path / "notes", "x", place="new")
    assert supervise([Worker(one.command, one.environment, gone)], LIMITS).exit_code == 0
    assert (tmp_path / "notes").read_text().split()[1:] == ["False", "x", "new"]


def test_standby_without_use_is_refused():
    with pytest.raises(
        ClusterError, match=r"there are none. Add --restarts 3(.|\n)*take --spares 1(.|\n)*this is `eval`"
    ):
        check_standby(["eval"], True, 0, True)
    check_standby(["eval"], False, 0, True)


@pytest.mark.processes
def test_train_waits_with_all_imported_and_then_runs_what_it_is_told(tmp_path):
    (waits,) = workers(["train", "digits", "--cpu-devices", "1"], 2, {**os.environ, WAITS: "1"}, count=1)
    with Reserve() as reserve:
        reserve.fill([(waits.command, waits.environment)])
        warm = reserve.take(0)
        assert warm is not None
        assert warm.begins([*waits.command[:3], "report", str(tmp_path / "none")], {**waits.environment, "X": "1"})
        assert warm.process.wait(timeout=120) == 2  # there is no such run: told by the command that it was told to run
        warm.end()
