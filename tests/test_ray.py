"""`multipod launch --ray` on Ray's local cluster; where Ray is not installed, only what is refused."""

import importlib.util
import sys
import time

import psutil
import pytest
from click.testing import CliRunner
from processes import interrupt, started
from test_cli import TINY

from multipod.cli.launch import launch
from multipod.errors import ClusterError

RAY = importlib.util.find_spec("ray") is not None
LAUNCH = [sys.executable, "-m", "multipod", "launch", "--processes", "2", "--ray", "local", "--restarts", "1"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ray", "local", "--survive"], "--ray starts processes on other hosts. Leave out --survive and --standby"),
        (["--ray", "local", "--ray-each", "many"], "--each many: say CPUs and GPUs of a process, as 8,1"),
    ],
)
def test_what_ray_cannot_do_is_refused(options, said):
    with pytest.raises(ClusterError, match=said):
        CliRunner().invoke(launch, ["--processes", "2", *options, "--", "train", "digits"], catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(540)  # Ray and two processes are started, and both processes once more: four minutes when busy
@pytest.mark.skipif(not RAY, reason="Ray is not installed")
def test_a_run_on_ray_is_started_again_when_a_process_dies_and_stops_when_asked(tmp_path):
    changes = ["--set", "updates=200000", "--set", "evaluate_every=0", "--set", "checkpoint_every=20", "--quiet"]

    def trained(updates: int) -> None:
        until = time.monotonic() + 200
        while not any(int(p.name) > updates for p in (tmp_path / "run" / "checkpoints").glob("[0-9]*[0-9]")):
            assert launcher.poll() is None, launcher.stderr.read()
            assert time.monotonic() < until
            time.sleep(0.1)

    with started([*LAUNCH, "--", "train", TINY, *changes, "--out", "run"], tmp_path) as launcher:
        trained(20)
        (one,) = [p for p in family(launcher.pid) if p.environ().get("MULTIPOD_PROCESS_ID") == "1" and ours(p)]
        last = max(int(p.name) for p in (tmp_path / "run" / "checkpoints").glob("[0-9]*[0-9]"))
        one.kill()
        trained(last + 100)
        members = family(launcher.pid)
        said = interrupt(launcher, 100)
    assert launcher.returncode == 130, said
    assert "rank 1 was killed by signal 9. All start again from update" in said
    assert not [p for p in members if p.is_running() and ours(p)]


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def ours(process: psutil.Process) -> bool:
    try:
        return "multipod" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
