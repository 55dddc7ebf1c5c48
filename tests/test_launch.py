"""`multipod launch` with real processes joined by JAX: equal to one process, and what happens when one is lost."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from processes import clean_environment, disturb_with_garbage
from test_cli import TINY, losses, wait_for

from multipod.cli.cluster import claimed
from multipod.errors import ClusterError

pytestmark = [pytest.mark.processes, pytest.mark.jax_version]
LAUNCH = [sys.executable, "-m", "multipod", "launch", "--processes", "4"]


@pytest.fixture
def launched(tmp_path):
    """A long run in four processes that has saved its 20th update; ended at the end of the test."""
    changes = ["--set", "updates=200000", "--set", "evaluate_every=0"]
    command = [*LAUNCH, "--timeout", "30", "--", "train", TINY, *changes, "--out", "run"]
    launcher = subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: (tmp_path / "run" / "checkpoints" / "20" / "checksums.json").is_file(), launcher)
    ranks = {int(p.environ()["MULTIPOD_PROCESS_ID"]): p for p in psutil.Process(launcher.pid).children()}
    yield launcher, ranks
    for process in [*ranks.values(), launcher]:
        if process.poll() is None if process is launcher else process.is_running():
            process.kill()


@pytest.mark.slow
def test_four_processes_train_like_one_and_leave_one_folder(multipod, tmp_path):
    one = multipod("train", TINY, "--mesh", "2x4", "--out", "one", "--quiet")
    assert one.returncode == 0, one.stderr
    four = subprocess.Popen(
        [*LAUNCH, "--", "train", TINY, "--mesh", "2x4", "--out", "four"],
        cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    listening: set[str] = set()  # strangers talk garbage to all that does, throughout the run
    while four.poll() is None:
        listening |= disturb_with_garbage(four.pid)
        time.sleep(0.5)
    out, err = four.communicate()
    assert four.returncode == 0, err
    assert "Gloo" not in out + err
    assert listening, "nobody listened"
    assert all(address.removeprefix("::ffff:").startswith("127.") for address in listening), listening
    assert {p.name for p in tmp_path.iterdir()} == {"one", "four"}
    a, b = losses(tmp_path / "one"), losses(tmp_path / "four")
    assert a.keys() == b.keys()
    assert max(abs(a[update] - b[update]) for update in a) < 1e-4


@pytest.mark.slow
def test_no_process_compiles_again_what_it_compiled_the_last_time(tmp_path):
    command = [sys.executable, "-m", "multipod", "launch", "--processes", "2", "--", "train", TINY, "--mesh", "1x2"]
    environment = clean_environment() | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    kept = []
    for name in ("first", "second"):
        done = subprocess.run(
            [*command, "--out", name, "--cache", "cache", "--set", "updates=2"],
            cwd=tmp_path, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        kept.append({path.name for path in (tmp_path / "cache").iterdir() if path.name.endswith("-cache")})
    assert sum("update" in name for name in kept[0]) >= 2, kept[0]  # one of each process
    assert kept[1] == kept[0]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "limit_s"), [(signal.SIGKILL, 30), (signal.SIGSTOP, 45)], ids=["killed", "stopped"])
def test_a_lost_rank_is_named_and_the_run_can_go_on(multipod, launched, tmp_path, number, limit_s):
    launcher, ranks = launched
    ranks[2].send_signal(number)
    start = time.monotonic()
    _, err = launcher.communicate(timeout=limit_s)
    assert time.monotonic() - start < limit_s
    assert launcher.returncode == 1
    assert "rank 2" in err
    assert "was killed by SIGKILL" in err if number == signal.SIGKILL else "no sign of life" in err
    assert "multipod launch --processes 4 --timeout 30 -- train --resume" in err
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks.values())
    done = multipod("eval", "run")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ctrl_c_reaches_all_ranks_at_the_same_update(launched, tmp_path):
    launcher, ranks = launched
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, err
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks.values())
    last = max(losses(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / str(last) / "checksums.json").is_file()


def test_two_processes_of_one_number_are_told_apart():
    first = claimed("127.0.0.1:1", 3)
    with pytest.raises(
        ClusterError, match=rf"process 3 of the run at 127\.0\.0\.1:1 is here already, .* {os.getpid()}\."
    ):
        claimed("127.0.0.1:1", 3)
    with claimed("127.0.0.1:1", 4), claimed("127.0.0.1:2", 3):
        first.close()
    claimed("127.0.0.1:1", 3).close()
