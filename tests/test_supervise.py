"""The launcher: what it decides, on made-up ranks; and real processes that die, hang and are interrupted."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

import multipod
from multipod.cli import cluster, launch
from multipod.cli.launching import starters
from multipod.elastic.heartbeat import Beat, Heartbeat
from multipod.elastic.launcher.membership import ElasticPolicy
from multipod.elastic.launcher.processes import Channel, Rank, WorkerCommand
from multipod.elastic.launcher.supervise import RunOutcome, judge, supervise
from multipod.elastic.launcher.survive import survive
from multipod.errors import ClusterError, LayoutError
from multipod.runs.options import RuntimeOptions
from multipod.runs.request import resume_command
from multipod.runtime import Timeouts
from multipod.train.hooks import ignore_phase
from multipod.train.run_folder import RunFolder

SOURCE = Path(multipod.__file__).parents[1]
SHORT = Timeouts(limit_s=3)
CALM = Timeouts(limit_s=20)  # where no time-out is to be met, however busy the machine
LONG_S = 20.0  # far more than any of the runs below may take

# What every worker script can use: `rank`, `beat`, and a folder to leave notes in.
BEGIN = """
import os, pathlib, signal, subprocess, sys, time
from multipod.elastic.heartbeat import Heartbeat
rank = int(os.environ["MULTIPOD_PROCESS_ID"])
notes = pathlib.Path(os.environ["NOTES"])
beat = Heartbeat(int(os.environ["MULTIPOD_CONTROL_FD"]), 0.1)
beat("updating", 0)
beat("updating", 1)
def start_grandchild():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (notes / "grandchild").write_text(str(child.pid))
def ready():
    (notes / f"part-{rank}").write_text(str(os.getpid()))
    (notes / f"part-{rank}").rename(notes / f"pid-{rank}")
"""
FOREVER = "ready()\nwhile True: time.sleep(0.05)\n"
STOPS_WHEN_ASKED = """
try:
    ready()
    while not (notes / "stop").exists(): time.sleep(0.02)
except KeyboardInterrupt:
    (notes / "stop").write_text(f"rank {rank}")
beat.note(folder="runs/digits-1", saved=2)
beat.close()
sys.exit(130)
"""
IGNORES_ALL = """
signal.signal(signal.SIGINT, lambda *_: (notes / "asked").write_text(f"rank {rank}"))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""


def crew(notes: Path, *scripts: str) -> list[WorkerCommand]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "NOTES": str(notes),
        "PYTHONUNBUFFERED": "1",  # else what is printed first comes last
        "MULTIPOD_PROCESSES": str(len(scripts)),
    }
    return [
        WorkerCommand([sys.executable, "-c", BEGIN + script], {**environment, "MULTIPOD_PROCESS_ID": str(rank)})
        for rank, script in enumerate(scripts)
    ]


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids(notes: Path) -> list[int]:
    return [int(path.read_text()) for path in [*notes.glob("pid-*"), *notes.glob("grandchild")]]


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Every test here must leave no process behind: neither its children nor those that wrote a note."""
    before = psutil.Process().children(recursive=True)
    yield
    left = [child.pid for child in psutil.Process().children(recursive=True) if child not in before]
    assert not [pid for pid in [*left, *pids(tmp_path)] if lives(pid)]


# ---------------------------------------------------------------------------- what it decides


def beating(phase: str, update: int, age_s: float = 0.0, begun: int = 5, done: bool = False) -> Beat:
    return Beat(phase, update, begun, age_s, done=done)


@pytest.mark.parametrize(
    ("codes", "culprit", "text"),
    [
        ([75, 75, -9, 75], 2, "rank 2 (pid 102) was killed by SIGKILL; last seen: in update 5"),
        ([-6, -6, 3, 75], 2, "rank 2 (pid 102) exited with code 3; last seen: in update 5"),
        ([3, -6, -11, 75], 2, "rank 2 (pid 102) was killed by SIGSEGV; last seen: in update 5"),
        ([75, -6, 75], 1, "rank 1 (pid 101) was killed by SIGABRT; last seen: in update 5"),
        ([75, 75], 0, "rank 0 (pid 100) exited with code 75; last seen: in update 5"),
        ([130, -9], 1, "rank 1 (pid 101) was killed by SIGKILL; last seen: in update 5"),
        ([-50], 0, "rank 0 (pid 100) was killed by signal 50; last seen: in update 5"),
    ],
)
def test_of_several_failed_ranks_the_cause_is_named(codes: list[int], culprit: int, text: str) -> None:
    ranks = [Rank(n, 100 + n, 9.0, beating("updating", 4), code, 9.0) for n, code in enumerate(codes)]
    assert judge(ranks, 9.0, SHORT) == RunOutcome(1, culprit, text)


def test_a_rank_that_fails_before_its_first_beat_was_starting() -> None:
    expected = RunOutcome(1, 0, "rank 0 (pid 100) exited with code 3; last seen: starting")
    assert judge([Rank(0, 100, code=3)], 1.0, SHORT) == expected


@pytest.mark.parametrize(
    ("beat", "code"),
    [
        (None, 2),
        (beating("compiling", 0, begun=0), 2),
        (beating("updating", 40, begun=1), 2),  # the first one after a resume
        (beating("saving", 41, begun=1), 1),
        (beating("updating", 41, begun=2), 1),
    ],
)
def test_a_refusal_before_the_first_update_is_no_failure(beat: Beat | None, code: int) -> None:
    ranks = [Rank(0, 100, 9.0, beat, 75, 9.0), Rank(1, 101, 9.0, beat, 2, 9.1)]
    outcome = judge(ranks, 9.8, SHORT)
    assert outcome is not None
    assert (outcome.exit_code, outcome.culprit) == (code, 1)


def test_ranks_that_end_a_moment_later_are_waited_for() -> None:
    first = Rank(1, 101, 9.0, beating("evaluating", 4), 75, ended_s=9.0)
    other = Rank(0, 100, 9.0, beating("updating", 4))
    assert judge([other, first], 9.4, SHORT) is None
    outcome = judge([other, first], 9.6, SHORT)
    assert outcome is not None
    assert outcome.reason == "rank 1 (pid 101) exited with code 75; last seen: evaluating after update 4"


@pytest.mark.parametrize("codes", [[130, 130], [130, 0], [-2, 75], [130, -6]])
def test_an_interrupt_is_no_failure(codes: list[int]) -> None:
    ranks = [Rank(n, 100 + n, 9.0, beating("saving", 4), code, 9.0) for n, code in enumerate(codes)]
    assert judge(ranks, 9.0, SHORT) == RunOutcome(130, reason="the run was interrupted")


def test_after_an_interrupt_the_others_have_the_time_of_a_silence() -> None:
    ranks = [Rank(0, 100, 9.0, beating("saving", 4), 130, 9.0), Rank(1, 101, 9.0, beating("saving", 4))]
    assert judge(ranks, 9.9, SHORT) is None
    assert judge(ranks, 10.1, SHORT) == RunOutcome(130, reason="the run was interrupted")


@pytest.mark.parametrize(
    ("beat", "now_s", "text"),
    [
        (beating("updating", 4), 21.0, "gave no sign of life for 21 s; last seen: in update 5"),
        (beating("compiling", 0), 21.0, "gave no sign of life for 21 s; last seen: compiling"),
        (beating("updating", 4), 20.0, None),
        (None, 60.0, None),
        (None, 61.0, "gave no sign of life for 61 s since its start"),
        (beating("ending", 9, done=True), 95.0, None),
        (beating("ending", 9, done=True), 96.0, "has done its last update, and has not exited for 96 s"),
    ],
)
def test_a_silent_rank_is_stuck(beat: Beat | None, now_s: float, text: str | None) -> None:
    ranks = [
        Rank(0, 100, 0.0, beat, code=0),
        Rank(1, 101, now_s, beating("saving", 4)),
        Rank(2, 102, 0.0, beat),
    ]
    expected = None if text is None else RunOutcome(1, 2, f"rank 2 (pid 102) {text}", stuck=True)
    assert judge(ranks, now_s, Timeouts()) == expected


@pytest.mark.parametrize(
    ("beats", "culprit", "text"),
    [
        ([("updating", 5), ("updating", 4)], 1, "rank 1 (pid 101) {} while in update 5, and the others wait"),
        (
            [("saving", 4), ("updating", 4)],
            0,
            "rank 0 (pid 100) {} while saving after update 4, and the others wait",
        ),
        ([("updating", 4), ("updating", 4)], None, "all ranks {} while in update 5"),
        (
            [("updating", 5), ("updating", 4), ("updating", 4)],
            None,
            "ranks 1, 2 {} while in update 5, and the others wait",
        ),
        ([("updating", 4)], 0, "rank 0 (pid 100) {} while in update 5"),
    ],
)
def test_ranks_that_live_and_do_not_move_are_stuck(
    beats: list[tuple[str, int]], culprit: int | None, text: str
) -> None:
    def at(age_s: float) -> list[Rank]:
        return [Rank(n, 100 + n, 9.0, beating(*place, age_s)) for n, place in enumerate(beats)]

    assert judge(at(60.0), 9.0, Timeouts()) is None
    reason = text.format("made no progress for 61 s")
    assert judge(at(60.5), 9.5, Timeouts()) == RunOutcome(1, culprit, reason, stuck=True)


@pytest.mark.parametrize(
    "other",
    [
        beating("updating", 4, 10.0),  # moved a moment ago
        beating("updating", 0, 99.0, begun=1),  # the first update may hold compilation
        beating("ending", 9, 99.0, done=True),  # done, and waiting at the barrier
    ],
)
def test_a_slow_run_is_not_stuck(other: Beat) -> None:
    ranks = [Rank(0, 100, 9.0, beating("updating", 4, 99.0)), Rank(1, 101, 9.0, other)]
    assert judge(ranks, 9.0, Timeouts()) is None


def test_a_long_evaluation_of_all_is_not_stuck() -> None:
    ranks = [Rank(n, 100 + n, 9.0, beating("evaluating", 4, 999.0)) for n in range(2)]
    assert judge(ranks, 9.0, Timeouts()) is None


# ------------------------------------------------------------------------------- the heartbeat


def test_the_heartbeat_tells_phase_folder_and_checkpoint_and_ends_with_done() -> None:
    launcher, worker = socket.socketpair()
    lost = threading.Event()
    with launcher:
        beat = Heartbeat(worker.detach(), 0.01, lost.set)
        beat("updating", 4)
        beat.note(folder=Path("runs/digits-1"), saved=4)
        beat.close()
        lines = []
        with launcher.makefile() as stream:
            while not lines or not lines[-1]["done"]:
                lines.append(json.loads(stream.readline()))
        assert lines[0]["phase"] in ("starting", "updating")
        age_s = lines[-1].pop("age_s")
        assert 0 <= age_s < LONG_S
        assert Beat(**lines[-1], age_s=0.0) == Beat("updating", 4, 1, 0.0, "runs/digits-1", 4, done=True)
        assert not lost.is_set()
    assert lost.wait(LONG_S)


def test_a_dead_launcher_does_not_raise_in_the_training_thread() -> None:
    launcher, worker = socket.socketpair()
    launcher.close()
    lost = threading.Event()
    beat = Heartbeat(worker.detach(), 0.01, lost.set)
    assert lost.wait(LONG_S)
    beat("updating", 1)
    beat.note(saved=1)
    beat.close()
    ignore_phase("updating", 1)


# ------------------------------------------------------------------------------ real processes


@pytest.mark.processes
def test_all_succeed_and_output_is_relayed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = "print('hello from', rank, flush=True); beat.note(folder='runs/digits-1', saved=7); beat.close()"
    assert supervise(crew(tmp_path, script, script), CALM) == RunOutcome(0, folder="runs/digits-1", saved=7)
    shown = capfd.readouterr()
    assert shown.out == "hello from 0\n"
    assert shown.err == "[rank 1] hello from 1\n"


@pytest.mark.processes
def test_a_rank_that_dies_with_words_to_it_unread_has_closed_its_channel() -> None:
    """The system then answers the launcher's read with a reset, not with the end of the stream."""
    ours, theirs = socket.socketpair()
    ours.send(b"read by nobody")
    theirs.send(b"its last words\nand half")
    theirs.close()
    heard: list[str] = []
    channel = Channel(ours.detach(), heard.append)
    channel.read(most=64)
    channel.close()
    assert not channel.open
    assert heard in ([], ["its last words", "and half"])  # as the system pleases


def test_a_rank_that_exits_is_named_with_its_last_lines(tmp_path: Path) -> None:
    fails = "for n in range(30): print('line', n)\nbeat.close(); sys.exit('no such file')"
    relayed: list[str] = []
    # Rank 0 does not end by SIGTERM, like a process that has joined jax.distributed.
    outcome = supervise(crew(tmp_path, IGNORES_ALL + FOREVER, FOREVER, fails), CALM, relayed.append)
    assert (outcome.exit_code, outcome.culprit, outcome.stuck) == (1, 2, False)
    assert outcome.reason.endswith("exited with code 1; last seen: in update 2")
    assert outcome.lines == (*[f"line {n}" for n in range(11, 30)], "no such file")
    assert relayed == [*[f"[rank 2] line {n}" for n in range(30)], "[rank 2] no such file"]


@pytest.mark.processes
@pytest.mark.parametrize("replace_it", [False, True])
def test_a_run_that_survives_ends_once_by_a_refusal_and_not_on_a_part_of_its_processes(
    tmp_path: Path, replace_it: bool
) -> None:
    waits = 'import os, time; open(os.environ["NOTES"] + f"/pid-{os.getpid()}", "w").write(str(os.getpid()))\n'
    refuses = "print('the batch does not divide', flush=True); raise SystemExit(2)"
    scripts = [waits + "time.sleep(600)", waits + refuses, waits + "time.sleep(600)"]
    workers = [
        WorkerCommand([sys.executable, "-c", script], worker.environment)
        for script, worker in zip(scripts, crew(tmp_path, *scripts), strict=True)
    ]
    outcome = survive(workers, ElasticPolicy(3, replace=replace_it), SHORT, show=lambda line: None)
    assert (outcome.exit_code, outcome.culprit) == (2, 1)
    assert outcome.lines == ("the batch does not divide",)
    assert len(pids(tmp_path)) <= 3  # nobody was started anew


@pytest.mark.processes
def test_what_jax_says_of_a_lost_peer_is_kept_and_not_shown(tmp_path: Path) -> None:
    """Lines of JAX 0.10.2, shortened."""
    said = (
        "my own words",
        "E1122 00:37:25.482822    1987 coordination_service_agent.cc:289] Polled an error from coordination service.",
        "Additional GRPC error information from remote target coordination_service while calling /PollForError:",
        ':UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"Socket closed"}',
        "W1122 00:37:25.482822    1987 my_own_kernel.cc:12] Polled nothing.",
        "F1122 00:37:25.482871    1987 client.h:80] Terminating process because the JAX distributed service detected "
        "fatal errors. This most likely indicates that another task died.",
        "    @     0x7f69cd440634  absl::lts_20260107::log_internal::LogMessage::SendToLog()",
    )
    relayed: list[str] = []
    fails = f"for line in {said!r}: print(line)\nbeat.close(); sys.exit(7)"
    outcome = supervise(crew(tmp_path, FOREVER, fails), CALM, relayed.append)
    assert outcome.lines == said
    assert relayed == [f"[rank 1] {line}" for line in (said[0], said[4])]


@pytest.mark.processes
def test_a_killed_rank_is_named_and_its_grandchild_is_gone(tmp_path: Path) -> None:
    victim = "beat.close(); sys.exit(75)"  # a healthy rank that sees the loss first
    dies = "start_grandchild(); ready(); time.sleep(0.2); os.kill(os.getpid(), signal.SIGKILL)"
    waits = "while not (notes / 'pid-1').exists(): time.sleep(0.02)\ntime.sleep(0.2)\n"
    outcome = supervise(crew(tmp_path, waits + victim, dies), CALM)
    assert (outcome.exit_code, outcome.culprit) == (1, 1)
    assert "was killed by SIGKILL; last seen: in update" in outcome.reason
    assert len(pids(tmp_path)) == 2  # the fixture looks whether they live


@pytest.mark.processes
def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    outcome = supervise(
        crew(tmp_path, FOREVER, "ready(); time.sleep(0.2); os.kill(os.getpid(), signal.SIGSTOP)"), SHORT
    )
    assert (outcome.exit_code, outcome.culprit, outcome.stuck) == (1, 1, True)
    assert "gave no sign of life for 1 s; last seen: in update" in outcome.reason


@pytest.mark.slow
@pytest.mark.processes
def test_a_rank_that_lives_but_hangs_is_named(tmp_path: Path) -> None:
    outcome = supervise(crew(tmp_path, "beat('updating', 2)\n" + FOREVER, FOREVER), Timeouts(limit_s=5))
    assert (outcome.exit_code, outcome.culprit, outcome.stuck) == (1, 1, True)
    assert outcome.reason.endswith("made no progress for 5 s while in update 2, and the others wait")


@pytest.mark.processes
def test_a_rank_may_end_long_before_the_others(tmp_path: Path) -> None:
    slow = "\nfor n in range(2, 8): beat('updating', n); time.sleep(0.25)\nbeat.close()"
    assert supervise(crew(tmp_path, "beat.close()", slow), CALM) == RunOutcome(0)


@pytest.mark.processes
def test_a_command_that_does_not_exist_is_refused_and_the_started_ranks_end(tmp_path: Path) -> None:
    workers = [*crew(tmp_path, FOREVER), WorkerCommand(["/no/such/program"], {})]
    with pytest.raises(ClusterError, match=r"rank 1 could not be started: .*Check the command '/no/such/program'"):
        supervise(workers, CALM)


@pytest.mark.processes
def test_an_exception_in_the_launcher_leaves_nothing(tmp_path: Path) -> None:
    def broken(line: str) -> None:
        raise RuntimeError("the terminal is gone")

    with pytest.raises(RuntimeError, match="the terminal is gone"):
        supervise(crew(tmp_path, FOREVER, "print('x', flush=True)\n" + FOREVER), CALM, broken)


# A launcher of its own, to be killed and interrupted.
LAUNCHER = """
import json, sys
from multipod.runtime import Timeouts
from multipod.elastic.launcher.processes import WorkerCommand
from multipod.elastic.launcher.supervise import supervise
outcome = supervise([WorkerCommand(*worker) for worker in json.loads(sys.argv[1])], Timeouts())
print(outcome.exit_code, outcome.reason, outcome.folder, outcome.saved, sep="|", flush=True)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts scripts as ranks under a launcher process, and waits until all are ready."""
    started: list[subprocess.Popen[str]] = []

    def start(*scripts: str) -> subprocess.Popen[str]:
        workers = [[worker.command, worker.environment] for worker in crew(tmp_path, *scripts)]
        command = [sys.executable, "-c", LAUNCHER, json.dumps(workers)]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == len(scripts))
        time.sleep(0.3)  # for the first beats to arrive
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.processes
def test_a_killed_launcher_leaves_nothing(tmp_path: Path, launcher: Callable[..., subprocess.Popen[str]]) -> None:
    process = launcher(FOREVER, "start_grandchild()\n" + FOREVER)
    process.kill()
    assert len(pids(tmp_path)) == 3
    wait_for(lambda: not any(map(lives, pids(tmp_path))))


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_interrupt_goes_to_rank_0(
    tmp_path: Path, launcher: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = launcher(STOPS_WHEN_ASKED, STOPS_WHEN_ASKED)
    process.send_signal(number)
    out, _ = process.communicate(timeout=LONG_S)
    assert out == "130|the run was interrupted|runs/digits-1|2\n"
    assert (tmp_path / "stop").read_text() == "rank 0"


@pytest.mark.processes
def test_the_second_interrupt_ends_all_at_once(tmp_path: Path, launcher: Callable[..., subprocess.Popen[str]]) -> None:
    process = launcher(IGNORES_ALL + FOREVER, IGNORES_ALL + FOREVER)
    process.send_signal(signal.SIGINT)
    wait_for((tmp_path / "asked").exists)
    time.sleep(0.4)  # sooner, it would be taken for the same press
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=LONG_S)
    assert out == "130|the run was interrupted twice, and all processes were killed||None\n"
    assert (tmp_path / "asked").read_text() == "rank 0"


COMPILES = """
beat("compiling", 0)
beat._begun = 0
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""


@pytest.mark.processes
def test_an_interrupt_before_the_first_update_waits_for_nothing(
    tmp_path: Path, launcher: Callable[..., subprocess.Popen[str]]
) -> None:
    process = launcher(COMPILES + FOREVER, COMPILES + FOREVER)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=LONG_S)
    assert out == "130|the run was interrupted before its first update||None\n"


# ---------------------------------------------------------------------------- multipod launch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, list[WorkerCommand]]]:
    """`multipod launch` with these words, whose processes end with this outcome."""

    def run(outcome: RunOutcome, *words: str) -> tuple[int, str, list[WorkerCommand]]:
        seen: list[WorkerCommand] = []
        monkeypatch.setattr(starters, "supervise", lambda workers, timeouts: seen.extend(workers) or outcome)
        result = CliRunner().invoke(launch.launch, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stderr, seen

    return run


Launched = Callable[..., tuple[int, str, list[WorkerCommand]]]


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["4", "--", "train", "digits"], "train digits --cpu-devices 2 --timeout 60"),
        (
            ["2", "--", "train", "digits", "--mesh", "2x3"],
            "train digits --mesh 2x3 --cpu-devices 3 --timeout 60",
        ),
        (
            ["2", "--timeout", "9", "train", "digits", "--mesh=2x2"],
            "train digits --mesh=2x2 --cpu-devices 2 --timeout 9",
        ),
        (["3", "train", "x", "--cpu-devices=4", "--timeout", "5"], "train x --cpu-devices=4 --timeout 5"),
    ],
)
def test_each_worker_is_told_its_devices_and_its_place(launched: Launched, words: list[str], arguments: str) -> None:
    code, shown, workers = launched(RunOutcome(0), "--processes", *words)
    assert (code, shown) == (0, "")
    assert len(workers) == int(words[0])
    for rank, worker in enumerate(workers):
        assert list(worker.command) == [sys.executable, "-m", "multipod", *arguments.split()]
        assert worker.environment["MULTIPOD_PROCESS_ID"] == str(rank)
        assert worker.environment["MULTIPOD_PROCESSES"] == words[0]
        assert "JAX_NUM_CPU_DEVICES" not in worker.environment
    assert len({worker.environment["JAX_COORDINATOR_ADDRESS"] for worker in workers}) == 1
    assert workers[0].environment["JAX_COORDINATOR_ADDRESS"].startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ([], ClusterError, r"there is no command to run in the 3 processes\. Write it after `--`"),
        (["launch", "train"], ClusterError, r"the command is `launch` again.*Give what they are to run"),
        (
            ["train", "digits"],
            ClusterError,
            r"without --mesh there are 8 devices, which 3 processes cannot share evenly\. "
            r"Give --processes one of 1, 2, 4, 8, or a --mesh whose size is a multiple of 3\.",
        ),
        (
            ["train", "--mesh", "2x2"],
            ClusterError,
            r"--mesh 2x2 has 4 devices, which 3 processes cannot share evenly",
        ),
        (["train", "--mesh", "four"], LayoutError, r"mesh 'four' is not of the form ROWSxCOLUMNS"),
        (["train", "--timeout", "1"], ClusterError, r"--timeout 1: .*too short.*Write --timeout 60, before"),
        (
            ["train", "--timeout", "soon"],
            ClusterError,
            r"--timeout soon: could not convert.*Write --timeout 60",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused(
    launched: Launched, words: list[str], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        launched(RunOutcome(0), "--processes", "3", "--", *words)


@pytest.mark.parametrize("limit_s", [3, 30, 60, 3600])
def test_who_names_the_culprit_comes_before_what_ends_all(limit_s: float) -> None:
    limits = Timeouts(limit_s)
    assert 3 * limits.beat_s < limits.silence_s < limits.no_progress_s < limits.collective_s + 1
    assert limits.grace_s < limits.silence_s
    assert limits.compile_s > 5 * limits.collective_s  # a rank that compiles is not lost


def test_two_different_time_outs_are_refused(launched: Launched) -> None:
    with pytest.raises(ClusterError, match=r"--timeout is 9 before the `--` and 5 after it\. Give it once"):
        launched(RunOutcome(0), "--processes", "2", "--timeout", "9", "--", "train", "digits", "--timeout", "5")


def test_a_failure_names_the_rank_its_last_lines_and_the_command_that_resumes(launched: Launched) -> None:
    outcome = RunOutcome(
        1, 2, "rank 2 (pid 9) was killed by SIGKILL; last seen: in update 5", False, ("a", "b"), "runs/a b", 4
    )
    code, shown, _ = launched(outcome, "--processes", "4", "--", "train", "digits", "--mesh", "2x4")
    assert code == 1
    assert shown.splitlines() == [
        "multipod: launch: rank 2 (pid 9) was killed by SIGKILL; last seen: in update 5. "
        "All other processes were ended.",
        "Its last lines:",
        "  a",
        "  b",
        "Update 4 is saved. To go on from it: multipod launch --processes 4 -- train --resume 'runs/a b'",
    ]


def test_a_stall_of_all_names_nobody(launched: Launched) -> None:
    outcome = RunOutcome(1, None, "all ranks made no progress for 61 s while in update 5", stuck=True)
    code, shown, _ = launched(outcome, "--processes", "1", "--", "train", "digits")
    assert code == 1
    assert shown.splitlines()[0] == (
        "multipod: launch: all ranks made no progress for 61 s while in update 5. All processes were ended."
    )


def test_a_failure_before_any_checkpoint_says_how_to_start_again(launched: Launched) -> None:
    outcome = RunOutcome(
        1, 1, "rank 1 (pid 9) gave no sign of life for 3 s; last seen: compiling", stuck=True, folder="runs/a"
    )
    code, shown, _ = launched(outcome, "--processes", "2", "--timeout", "9", "--", "train", "digits")
    assert code == 1
    assert shown.splitlines() == [
        "multipod: launch: rank 1 (pid 9) gave no sign of life for 3 s; last seen: compiling. "
        "The other process was ended.",
        "If it was slow and not stuck, give a longer --timeout.",
        "No checkpoint was saved. To start again: multipod launch --processes 2 --timeout 9 -- train digits",
    ]


def test_a_refusal_is_told_once_and_starts_nothing_again(launched: Launched) -> None:
    outcome = RunOutcome(2, 1, "rank 1 (pid 9) exited with code 2; last seen: starting", lines=("no recipe x",))
    code, shown, started = launched(outcome, "--processes", "2", "--restarts", "3", "--", "train", "x")
    assert code == 2
    assert len(started) == 2
    assert shown.splitlines() == [
        "multipod: launch: rank 1 (pid 9) exited with code 2; last seen: starting. The other process was ended.",
        "Its last lines:",
        "  no recipe x",
        "Nothing was trained, and another start would end alike. Change what the message says.",
    ]


def test_a_process_repeats_the_launcher_s_words_in_the_command_that_goes_on(launched: Launched) -> None:
    """A rank prints the launcher's own words; read back, they launch the same run."""
    words = ["--processes", "3", "--restarts", "2", "--timeout", "9", "--", "train", "digits", "--mesh", "1x3"]
    _, _, started = launched(RunOutcome(0), *words)
    found = cluster.find(started[0].environment)
    options = RuntimeOptions(cpu_devices=1, cluster=found, timeouts=Timeouts(9))
    command = resume_command(RunFolder(Path("runs/a b")), options)
    launcher = "multipod launch --processes 3 --timeout 9 --restarts 2"
    assert sorted(command.split()) == sorted(f"{launcher} -- train --resume 'runs/a b' --cpu-devices 1".split())
    _, _, again = launched(RunOutcome(0), *shlex.split(command)[2:])
    assert again[0].command[3:] == ["train", "--resume", "runs/a b", "--cpu-devices", "1", "--timeout", "9"]
    outcome = RunOutcome(130, reason="the run was interrupted", folder="runs/a b", saved=4)
    assert launched(outcome, *words)[1].splitlines()[-1].endswith(command)


def test_an_interrupt_exits_130_and_the_resumed_run_has_the_same_devices(launched: Launched) -> None:
    outcome = RunOutcome(130, reason="the run was interrupted", folder="runs/a", saved=4)
    code, shown, _ = launched(outcome, "--processes", "2", "--", "train", "digits", "--mesh", "2x2")
    assert code == 130
    assert shown.splitlines() == [
        "multipod: launch: the run was interrupted.",
        "Update 4 is saved. To go on from it: multipod launch --processes 2 -- train --resume runs/a --cpu-devices 2",
    ]
