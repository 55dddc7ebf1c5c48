"""The command line as a user meets it: real processes for what trains, this one for what is refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import orbax.checkpoint as ocp
import pytest
from processes import clean_environment

from multipod.cli import train
from multipod.cli.main import COMMANDS, cli, main
from multipod.cli.options import print_unless_closed
from multipod.cli.printing.self_tests import SCHEDULES
from multipod.execute.sums import SUMS
from multipod.train.events import Compiled
from multipod.train.observers.table import as_observer

TINY = f"{Path(__file__).with_name('tiny_recipe.py')}:tiny"


def lines(run, event):
    """The events of one kind in a run's metrics."""
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [e for e in events if e["event"] == event]


def losses(run):
    """The training loss of each update."""
    return {e["update"]: e["values"]["loss"] for e in lines(run, "updated")}


def parameters(run, update):
    """Every tensor of a checkpoint, read by Orbax alone."""
    tree = ocp.StandardCheckpointer().restore((run / "checkpoints" / str(update) / "default").absolute())
    return {path: np.asarray(leaf) for path, leaf in flat(tree).items()}


def flat(tree, prefix=""):
    if isinstance(tree, dict | list | tuple):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {k: v for name, inner in pairs for k, v in flat(inner, f"{prefix}/{name}").items()}
    return {} if tree is None else {prefix: tree}


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """Runs a command in this process that must exit 2; returns its message."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["multipod", *map(str, args)])
        with pytest.raises(SystemExit) as done:
            main()
        message = capsys.readouterr().err
        assert done.value.code == 2, message
        assert "Traceback" not in message
        return message

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of 60 updates, never changed by a test."""
    run = tmp_path_factory.mktemp("finished") / "run"
    command = [sys.executable, "-m", "multipod", "train", TINY, "--out", str(run)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return run, done.stdout


@pytest.mark.slow
@pytest.mark.jax_version
def test_digits_reach_98_percent(multipod, tmp_path):
    done = multipod("train", "digits", "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    run = tmp_path / "runs" / "digits-001"
    assert lines(run, "evaluated")[-1]["count"] == 360
    assert lines(run, "ended")[0]["accuracy"] >= 0.98


@pytest.mark.slow
def test_a_run_leaves_one_folder_that_says_everything(finished):
    run, out = finished
    assert {p.name for p in run.iterdir()} == {
        "recipe.toml", "run.json", "metrics.jsonl", "tensorboard", "checkpoints", "report.html",
    }  # fmt: skip
    assert [e["update"] for e in lines(run, "updated")] == list(range(1, 61))
    assert [e["update"] for e in lines(run, "evaluated")] == [20, 40, 60]
    assert {p.name for p in (run / "checkpoints").iterdir() if p.is_dir()} == {"20", "40", "60"}
    ended = lines(run, "ended")[0]
    assert 0 < ended["median_step_s"] < ended["first_step_s"] < ended["wall_s"]
    assert 0 <= ended["outside_share"] < 1
    assert ended["gradient_sum_share"] > 0
    for row in (
        "test accuracy",
        "updates",
        "median step time",
        "time to first step",
        "gradient sum",
        "optimizer state",
    ):
        assert row in out
    assert "compiled programs" in out
    page = (run / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


@pytest.mark.slow
def test_a_run_stopped_and_resumed_is_the_same_run(multipod, finished, tmp_path):
    whole, _ = finished
    first = multipod("train", TINY, "--out", "run", "--stop-after", "30")
    assert first.returncode == 130
    assert "multipod train --resume run" in first.stdout
    second = multipod("train", "--resume", "run")
    assert second.returncode == 0, second.stderr
    run = tmp_path / "run"
    assert losses(run) == losses(whole)
    ours, theirs = parameters(run, 60), parameters(whole, 60)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    command = [sys.executable, "-m", "multipod", "train", TINY, "--set", "updates=20000", "--out", "run"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: (tmp_path / "run" / "checkpoints" / "40").is_dir(), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopping after this update and saving" in err
    assert "multipod train --resume run" in out
    last = lines(tmp_path / "run", "ended")[0]["update"]
    assert (tmp_path / "run" / "checkpoints" / str(last)).is_dir()


@pytest.mark.slow
def test_kill_9_while_saving_leaves_a_checkpoint_that_works(multipod, tmp_path):
    options = [
        "--set",
        "updates=20000",
        "--set",
        "checkpoint_every=1",
        "--set",
        "model.width=4096",
        "--set",
        "evaluate_every=0",
    ]
    command = [sys.executable, "-m", "multipod", "train", TINY, *options, "--out", "run"]
    process = subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stdout=subprocess.DEVNULL)
    folder = tmp_path / "run" / "checkpoints"

    def half_written():
        names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        return "3" in names and any("tmp" in name for name in names)

    wait_for(half_written, process)
    process.kill()
    process.wait(timeout=30)
    resumed = multipod("train", "--resume", "run", "--stop-after", "8")
    assert resumed.returncode == 130, resumed.stderr
    done = multipod("eval", "run")
    assert done.returncode == 0, done.stderr


def wait_for(condition, process, seconds=120):
    """Until the condition holds, while the process lives."""
    for _ in range(seconds * 100):
        if condition():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    pytest.fail(f"did not happen within {seconds} s")


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "empty", "remove", "flip"])
def test_a_damaged_checkpoint_is_refused_and_an_older_one_works(multipod, finished, tmp_path, damage):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    largest = max((run / "checkpoints" / "60").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    content = bytearray(largest.read_bytes())
    content[len(content) // 3] ^= 1
    damaged = {"cut": content[: len(content) // 2], "empty": b"", "flip": content}
    largest.unlink() if damage == "remove" else largest.write_bytes(damaged[damage])
    done = multipod("eval", "run")
    assert done.returncode == 2, done.stdout
    assert "cannot be restored" in done.stderr
    assert "Try --at 40" in done.stderr
    assert "Traceback" not in done.stderr
    if damage == "cut":
        done = multipod("train", "--resume", "run", "--at", "40")
        assert done.returncode == 0, done.stderr
        assert losses(run) == losses(finished[0])


@pytest.mark.slow
def test_evaluating_a_run_gives_what_training_reported(multipod, finished):
    run, _ = finished
    last = lines(run, "evaluated")[-1]
    for mesh in ("2x4", "1x7"):
        done = multipod("eval", str(run), "--mesh", mesh, *["--json"] * (mesh == "1x7"))
        assert done.returncode == 0, done.stderr
        if mesh == "2x4":
            assert f"({int(last['sums']['accuracy'])}/360)" in done.stdout
        else:
            judged = json.loads(done.stdout)
            assert (judged["update"], judged["examples"]) == (last["update"], 360)
            assert judged["values"]["accuracy"] == last["sums"]["accuracy"] / 360


@pytest.mark.slow
@pytest.mark.jax_version
def test_doctor_finds_everything_in_order(multipod):
    done = multipod("doctor", "--cpu-devices", "6", "--mesh", "2x3", "--fail", "1,1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok ") == 2 * len([*SUMS, *SCHEDULES])
    for word in ("jax", "devices", "cluster", "compilation cache"):
        assert word in done.stdout


@pytest.mark.slow
def test_show_compiles_for_the_mesh_itself_or_says_why_not(multipod):
    done = multipod("show", TINY, "--layout", "data=4x4,sum=xla", "--set", "batch=64", "--fail", "0,1", "--compile")
    assert done.returncode == 0, done.stderr
    assert "compiled for 15 cpu devices" in " ".join(done.stdout.split())
    assert re.search(r"all-reduce over x .* 2 a step", done.stdout)  # gradients, and the sums of the metrics
    done = multipod("show", TINY, "--layout", "data=64x64", "--set", "batch=4096", "--compile")
    assert done.returncode == 2
    assert "the mesh has 4,096 devices, and XLA compiles for 2,048 virtual CPU devices at the most" in done.stderr


@pytest.mark.slow
def test_list_and_show(multipod):
    assert "digits" in multipod("list").stdout
    done = multipod("show", "digits", "--set", "layout.shard_update=true", "--mesh", "2x2")
    assert done.returncode == 0, done.stderr
    for part in (
        "peak = 0.004",
        "y=2 x x=2: 4 cpu devices",
        "77,562",
        "32 of 128 examples",
        "not split in the update",
    ):
        assert part in done.stdout


def test_every_command_explains_itself(capsys, monkeypatch):
    for name in COMMANDS:
        monkeypatch.setattr(sys, "argv", ["multipod", name, "--help"])
        with pytest.raises(SystemExit) as done:
            main()
        assert done.value.code == 0
        assert "Usage:" in capsys.readouterr().out


def test_the_help_groups_all_commands_and_cuts_no_sentence():
    context = click.Context(cli, info_name="multipod", terminal_width=100)
    text = cli.get_help(context)
    whole = "Train RECIPE in several processes while things go wrong, and compare it with a run in which nothing does."
    assert whole in " ".join(text.split())
    shown = re.findall(r"^  ([a-z-]+)  ", text.partition("Train:")[2], re.MULTILINE)
    assert sorted(shown) == sorted(name for name in COMMANDS if not cli.get_command(context, name).hidden)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "no command 'trian'. Nearest: train"),
        (["train"], "say which recipe to train"),
        (["train", "digit"], "no recipe 'digit'. Nearest: digits"),
        (["train", "digits", "--mesh", "4x4"], "mesh 4x4 needs 16 devices, and there are 8"),
        (["train", "digits", "--mesh", "four"], "is not of the form ROWSxCOLUMNS"),
        (
            ["train", "digits", "--mesh", "1x7"],
            "batch=128 does not divide over the 7 devices of mesh 1x7. Use batch=126 or 133",
        ),
        (
            ["train", "digits", "--set", "optimizer.rat=1"],
            "no field 'optimizer.rat'. Nearest: optimizer.rate",
        ),
        (["train", "digits", "--set", "batch=x"], "batch='x' does not fit: Expected `int`"),
        (
            ["train", "digits", "--set", "model.batch_norm_tile=2x3"],
            "batch-norm tile 2x3 does not divide mesh 2x4",
        ),
        (["train", "digits", "--seed", "-1"], "-1 is not in the range"),
        (["train", "digits", "--gradient-sum", "tree"], "no sum is called 'tree'. Nearest: "),
        (["train", "digits", "--fail", "2,0"], "--fail '2,0': 2 is no range in dimension 0 of mesh:2x4"),
        (["train", "digits", "--fail", "first"], "--fail 'first' names no block of mesh:2x4"),
        (["train", "digits", "--fail", "0-1,1"], "is cut into 2 parts that cannot reach each other"),
        (
            ["train", "digits", "--gradient-sum", "torus-2d", "--fail", "0,1"],
            "torus-2d needs every chip of the grid, and on mesh:2x4 (1 chip failed) 1 of 8 have failed",
        ),
        (["train", "digits", "--timeout", "0.5"], "is too short to tell slow from dead"),
        (["train", "--resume", "nowhere"], "there is no run folder nowhere"),
        (["train", "digits", "--at", "3"], "--at names a checkpoint of a run"),
        (["train", "--resume", "a", "--out", "b"], "leave out --out"),
        (["train", "digits", "--batch", "64"], "No such option '--batch'. Say --set batch=N."),
        (["train", "digits", "--lr", "3"], "Say --set optimizer.rate=X. `multipod show RECIPE` has all fields."),
        (
            ["train", "digits", "--epochs", "5"],
            "Say --set updates=N (an epoch is the training examples over the batch)",
        ),
        (["eval", "nowhere"], "there is no run folder nowhere. `multipod train RECIPE` makes one."),
        (["report", "nowhere"], "there is no run folder nowhere"),
        (["show", "nowhere.py:f"], "there is no file nowhere.py"),
        (["train", "digits", "--out", "/proc/run"], "/proc/run cannot be written"),
        (["train", "digits", "--out", "gs://bucket/run"], "gs://bucket/run is in an object store"),
        (["eval", "s3://bucket/run"], "s3://bucket/run is in an object store"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_in_one_message(refused, args, message):
    assert message in refused(*args)


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_a_command_quietly(tmp_path):
    command = "import sys; from multipod.cli.main import main; sys.argv = ['multipod', 'list']; main()"
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-c", command], stdout=writes, stderr=subprocess.PIPE, env=clean_environment()
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_run_whose_reader_goes_away_is_asked_to_stop(tmp_path, monkeypatch):
    asked, discarded = [], []
    monkeypatch.setattr(train.signal, "raise_signal", asked.append)
    monkeypatch.setattr(train, "discard_output", lambda: discarded.append(True))

    def observer(event):
        raise BrokenPipeError

    train.UntilClosed(as_observer(observer))(Compiled(1.0))
    assert (asked, discarded) == ([signal.SIGTERM], [True])


def test_a_folder_that_is_no_run_is_refused(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    assert "It is no run's: choose a folder that is not there yet" in refused("train", TINY, "--out", "full")
    assert "it has no recipe.toml and no run.json" in refused("train", "--resume", "empty")


def test_half_written_and_damaged_run_folders_are_refused(refused, finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    facts = tmp_path / "run" / "run.json"
    facts.write_text(facts.read_text()[:40])
    assert "run.json is damaged" in refused("train", "--resume", "run")
    facts.unlink()
    assert "it has no run.json" in refused("eval", "run")


def test_a_run_without_checkpoints_is_refused(refused, finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run", ignore=shutil.ignore_patterns("[246]0"))
    assert "holds no checkpoint" in refused("eval", "run")


@pytest.mark.slow
def test_another_recipe_is_refused_with_its_differences(refused, finished):
    run, _ = finished
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    message = refused("train", "--resume", run, "--set", "batch=64", "--seed", "3")
    assert "is a run of another recipe" in message
    assert "batch: 128, now 64" in message
    assert "seed: 0, now 3" in message
    assert "not of digits" in refused("train", "digits", "--resume", run)
    assert "has no checkpoint 33. It has: 20, 40, 60" in refused("eval", run, "--at", "33")
    assert "is there already" in refused("train", "digits", "--out", run)
    assert before == {p: p.stat().st_mtime_ns for p in run.rglob("*")}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_ends_the_run_and_keeps_what_was_saved(multipod, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        options = ["--set", "model.width=1024", "--set", "checkpoint_every=10", "--set", "keep_checkpoints=9"]
        done = multipod("train", TINY, *options, "--out", str(disk / "run"))
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert "--resume" in done.stderr
        evaluated = multipod("eval", str(disk / "run"))
        assert evaluated.returncode == 0, evaluated.stderr
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_what_storage_threads_meet_after_a_failed_save_is_not_printed(capsys):
    for error in (RuntimeError("Event loop is closed"), RuntimeError("something else")):
        print_unless_closed(RuntimeError, error, None)
    assert capsys.readouterr().err == "RuntimeError: something else\n"
