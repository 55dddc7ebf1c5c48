"""Experiment trackers: each gets every number of a run, resumed or not, and none of them can stop it."""

import json
import sqlite3
import struct
import sys
import threading
import time
import zipfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_recipe import tiny

from multipod import runs
from multipod.errors import MissingPackageError, RunFolderError
from multipod.train.events import Compiled, Ended, Evaluated, Saved, Updated
from multipod.train.observers.table import OBSERVERS, names_in, refuse_observers
from multipod.train.observers.trackers import background
from multipod.train.observers.trackers.background import InBackground, known_ids, remember_id
from multipod.train.observers.trackers.tracker import TrackedRun

ENDED = Ended(2, False, 0.9, 5203.0, 0.0123, 9.8, 7.9, 0.114, 0.031, 0.02, 21.3, 620500)
EVENTS = [
    Compiled(1.0),
    Updated(1, {"loss": 0.5}, 0.01, 0.001, 6400.0),
    Updated(2, {"loss": 0.25}, 0.01, 0.001, 6400.0),
    Evaluated(2, {"loss": 0.3}, {"loss": 3.0}, 10, 0.2),
    Saved(2, 0.1),
]


class Recorder:
    """A tracker that keeps what it is given, and fails or hangs on request."""

    def __init__(self, failing: str = "", hang: threading.Event | None = None) -> None:
        self.failing, self.hang = failing, hang
        self.rows: list[Any] = []
        self.runs: list[TrackedRun] = []
        self.finished: list[bool] = []

    id = "run-7"

    def open(self, run: TrackedRun) -> "Recorder":
        self.runs.append(run)
        self.fail("open")
        return self

    def log(self, rows: Any) -> None:
        self.fail("log")
        self.rows += rows

    def finish(self, ended: bool) -> None:
        self.fail("finish")
        self.finished.append(ended)

    def fail(self, where: str) -> None:
        if self.failing == where:
            raise ConnectionError(f"no route to host in {where}\nand more")
        if self.hang is not None:
            self.hang.wait()


def tell(recorder: Recorder, folder: Path, events: list[Any], **options: Any) -> list[str]:
    """What the observer warned of."""
    warnings: list[str] = []
    observer = InBackground("theirs", recorder.open, folder, {"batch": 64}, warnings.append, **options)
    for event in events:
        observer(event)
    observer.close()
    observer.close()
    return warnings


def test_a_tracker_is_told_every_number_in_order_and_that_the_run_ended(tmp_path: Path) -> None:
    recorder = Recorder()
    assert tell(recorder, tmp_path, [*EVENTS, ENDED]) == []
    assert [update for update, _ in recorder.rows] == [1, 2, 2, 2]
    assert [row.get("train/loss", row.get("test/loss")) for _, row in recorder.rows] == [0.5, 0.25, 0.3, None]
    assert recorder.finished == [True]
    assert recorder.runs == [TrackedRun(tmp_path, {"batch": 64}, "")]


def test_a_run_that_ends_without_its_summary_has_failed(tmp_path: Path) -> None:
    recorder = Recorder()
    tell(recorder, tmp_path, EVENTS)
    assert recorder.finished == [False]


def test_a_resumed_run_goes_on_in_the_trackers_run(tmp_path: Path) -> None:
    recorder = Recorder()
    remember_id(tmp_path, "another", "x")
    tell(recorder, tmp_path, EVENTS)
    tell(recorder, tmp_path, EVENTS)
    assert [run.known for run in recorder.runs] == ["", "run-7"]
    assert known_ids(tmp_path) == {"another": "x", "theirs": "run-7"}


@pytest.mark.parametrize("where", ["open", "log", "finish"])
def test_a_service_that_fails_is_named_once(tmp_path: Path, where: str) -> None:
    (warning,) = tell(Recorder(failing=where), tmp_path, [*EVENTS, *EVENTS, ENDED])
    assert warning.startswith(f"--log theirs: ConnectionError: no route to host in {where}. It is told no more")


def test_a_service_that_hangs_holds_up_neither_updates_nor_the_end(tmp_path: Path) -> None:
    answers, began_s = threading.Event(), time.monotonic()
    (warning,) = tell(Recorder(hang=answers), tmp_path, [*EVENTS, ENDED], last_s=0.2)
    assert time.monotonic() - began_s < 20
    assert "it has not taken the last numbers within 0.2 s" in warning
    answers.set()


def test_rows_wait_in_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "WAITING_ROWS", 2)
    answers = threading.Event()
    (warning,) = tell(Recorder(hang=answers), tmp_path, EVENTS * 3, last_s=0.1)
    assert "it has not answered while 2 rows came" in warning
    answers.set()


def test_many_rows_are_handed_over_together(tmp_path: Path) -> None:
    recorder = Recorder()
    tell(recorder, tmp_path, [Updated(n, {"loss": 1.0}, 0.1, 0.0, 1.0) for n in range(1, 1001)])
    assert [update for update, _ in recorder.rows] == list(range(1, 1001))


# The command line.


def test_names_are_split_at_commas() -> None:
    assert names_in(["csv,mlperf", " jsonl ", "csv"]) == ("csv", "mlperf", "jsonl", "csv")


def test_unknown_names_are_refused_with_the_nearest_and_all() -> None:
    with pytest.raises(RunFolderError, match=r"--log wandd: there is no such logger. Did you mean wandb\?") as refused:
        runs.train(tiny(), log="csv,wandd")
    assert all(name in str(refused.value) for name in OBSERVERS)


def test_missing_packages_say_their_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    message = r"--log csv,comet,wandb: comet_ml, wandb are not installed. pip install 'multipod\[comet,wandb\]'"
    with pytest.raises(MissingPackageError, match=message):
        refuse_observers(["csv", "comet", "wandb"])


def test_a_run_goes_on_without_its_tracker_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Recorder(failing="open").open
    monkeypatch.setitem(OBSERVERS, "broken", lambda run: InBackground("broken", broken, run.folder.path, {}))
    recipe = replace(tiny(), updates=4, evaluate_every=0, checkpoint_every=0)
    result = runs.train(recipe, out=tmp_path / "run", stop_after=2, log="broken,csv")
    assert capsys.readouterr().err.count("--log broken: ConnectionError") == 1
    assert result.ended.resume.endswith(" --log broken,csv")


# The trackers themselves, without a network.


def tracked(name: str, folder: Path) -> dict[str, float]:
    """A run that is stopped after 20 of 30 updates and gone on with; returns the losses that its own file has."""
    recipe = replace(tiny(), updates=30, checkpoint_every=10)
    runs.train(recipe, out=folder, stop_after=20, log=name)
    runs.train(resume=folder, log=name)
    events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {event["update"]: event["values"]["loss"] for event in events if event["event"] == "updated"}


def wandb_records(path: Path) -> list[Any]:
    """The records of wandb's own file: its protobufs, in the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, records, part = path.read_bytes(), [], b""
    at = 7  # behind wandb's header, which counts to the first block
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        part += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(part)
            records.append(record)
            part = b""
    return records


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    losses = tracked("wandb", tmp_path / "run")
    history: dict[float, float] = {}
    for file in sorted(tmp_path.glob("run/wandb/offline-run-*/*.wandb")):
        records = wandb_records(file)
        (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        assert (run.run_id, run.display_name, run.project) == (known_ids(tmp_path / "run")["wandb"], "run", "multipod")
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert (config["batch"], config["updates"], config["optimizer.rate"]) == (128, 30, 0.004)
        (end,) = [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"]
        assert end == 0
        for record in records:
            row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "train/loss" in row:
                history[int(row["update"])] = float(row["train/loss"])
    assert history == pytest.approx(losses)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_trackio_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio")
    from trackio.utils import TRACKIO_DIR

    losses = tracked("trackio", tmp_path / "run")
    with closing(sqlite3.connect(TRACKIO_DIR / "multipod.db")) as database:
        name = known_ids(tmp_path / "run")["trackio"]
        rows = database.execute("select step, metrics from metrics where run_name = ?", [name]).fetchall()
        (config,) = database.execute("select config from configs where run_name = ?", [name]).fetchone()
    logged = [(step, json.loads(metrics)) for step, metrics in rows]
    assert {step: row["train/loss"] for step, row in logged if "train/loss" in row} == pytest.approx(losses)
    assert json.loads(config)["batch"] == 128


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_mlflow_in_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "digits of ours")
    mlflow = pytest.importorskip("mlflow")
    losses = tracked("mlflow", tmp_path / "run")
    runs.train(resume=tmp_path / "run", changes=["updates=40"], log="mlflow")  # MLflow changes no parameter
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("digits of ours")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name) == (known_ids(tmp_path / "run")["mlflow"], "run")
    assert run.info.status == "FINISHED"
    assert (run.data.params["batch"], run.data.params["updates"], run.data.tags["updates"]) == ("128", "30", "40")
    history = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/loss")}
    assert {update: history[update] for update in losses} == pytest.approx(losses)
    assert len(history) == 40


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_comet_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMET_START_ONLINE", "false")
    monkeypatch.setenv("COMET_LOGGING_CONSOLE", "ERROR")
    pytest.importorskip("comet_ml")
    losses = tracked("comet", tmp_path / "run")
    key, history, parameters = known_ids(tmp_path / "run")["comet"], {}, set()
    archives = sorted(tmp_path.glob("run/comet/*.zip"))
    assert len(archives) == 2
    for archive in archives:
        with zipfile.ZipFile(archive) as files:
            about = json.loads(files.read("experiment.json"))
            messages = [json.loads(line)["payload"] for line in files.read("messages.json").splitlines()]
        assert (about["offline_id"], about["project_name"], about["resume_strategy"]) == (
            key,
            "multipod",
            "get_or_create",
        )
        told = [message["metric"] for message in messages if "metric" in message]
        history |= {one["step"]: one["metricValue"] for one in told if one["metricName"] == "train/loss"}
        named = [message["param"] for message in messages if "param" in message]
        parameters |= {(one["paramName"], one["paramValue"]) for one in named}
    assert history == pytest.approx(losses)
    assert ("batch", "128") in parameters
