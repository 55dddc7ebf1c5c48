"""Copies of runs in an S3-compatible server that the tests start: whole or not there, and patient when it is gone."""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from processes import interrupt, started
from s3_server import s3_server
from test_cli import TINY
from tiny_recipe import tiny

from multipod.errors import ClusterError, RunFolderError
from multipod.runs.object_store import RunCopier, StoredRun, refuse_fetching
from multipod.runs.request import TrainRequest
from multipod.runs.training import train_run
from multipod.train.checkpoints.checksums import damaged_files, seal
from multipod.train.run_folder import RunFolder

s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
server = pytest.fixture(s3_server, scope="module")


def folder_with(path: Path, *updates: int) -> RunFolder:
    """A run folder with made-up checkpoints, sealed."""
    folder = RunFolder(path)
    for update in updates:
        arrays = folder.checkpoints / str(update) / "default"
        arrays.mkdir(parents=True)
        (arrays / "array").write_bytes(os.urandom(1000))
        seal(folder.checkpoints / str(update))
    folder.recipe.write_text("name = 'made up'\n")
    folder.facts.write_text("{}")
    return folder


def wait_for(condition) -> None:
    until = time.monotonic() + 150
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_store_that_is_gone_is_tried_again_and_loses_nothing(server, tmp_path):
    folder, stored, told = folder_with(tmp_path / "run", 1, 2, 3), StoredRun("s3://bucket/patient"), []
    with RunCopier(folder, stored, keep=2, tell=told.append) as copier:
        copier.committed(1, parts=1)
        wait_for(lambda: stored.updates() == [1])
        server.stop()
        copier.committed(2, parts=1)
        wait_for(lambda: told)
        assert told[0].startswith("NOT COPIED to s3://bucket/patient: ")
        server.start()
        wait_for(lambda: stored.updates() == [1, 2])
        copier.committed(3, parts=1)
    assert told[1:] == ["s3://bucket/patient is back: copied"]
    assert stored.updates() == [2, 3]  # the oldest went when the newest was complete
    stored.fetch(tmp_path / "back")
    files = sorted(path.relative_to(tmp_path / "back") for path in (tmp_path / "back").rglob("*") if path.is_file())
    assert [str(path) for path in files] == [
        "checkpoints/3/checksums.json",
        "checkpoints/3/default/array",
        "recipe.toml",
        "run.json",
    ]
    for path in files:
        assert (tmp_path / "back" / path).read_bytes() == (folder.path / path).read_bytes()


def test_a_checkpoint_without_its_checksums_is_not_there(server, tmp_path):
    folder, stored = folder_with(tmp_path / "run", 4), StoredRun("s3://bucket/half")
    stored.put_records(folder)
    stored.put_checkpoint(folder, 4)
    s3fs.S3FileSystem().rm_file("bucket/half/checkpoints/4/checksums.json")
    assert stored.updates() == []
    with pytest.raises(RunFolderError, match="there is no run with a checkpoint at s3://bucket/half"):
        stored.fetch(tmp_path / "back")


def test_an_end_without_the_store_says_what_is_missing(server, tmp_path):
    folder, stored, told = folder_with(tmp_path / "run", 5), StoredRun("s3://bucket/late"), []
    server.stop()
    try:
        with (
            pytest.raises(
                RunFolderError, match=r"s3://bucket/late lacks the end of this run: .*--copy-to s3://bucket/l"
            ),
            RunCopier(folder, stored, keep=2, tell=told.append, last_s=0.5) as copier,
        ):
            copier.committed(5, parts=1)
    finally:
        server.start()


@pytest.mark.slow
def test_a_run_goes_on_from_its_copy_in_another_place(server, tmp_path, monkeypatch):
    recipe = replace(tiny(), updates=12, evaluate_every=0, checkpoint_every=4)
    monkeypatch.chdir(tmp_path)
    first = train_run(recipe, out="here", copy_to="s3://bucket/run", stop_after=6)
    assert first.ended.resume.endswith("--copy-to s3://bucket/run")
    stored = StoredRun("s3://bucket/run")
    assert stored.updates() == [4, 6]
    with pytest.raises(RunFolderError, match="s3://bucket/run holds a run already"):
        train_run(recipe, out="again", copy_to="s3://bucket/run")
    assert not (tmp_path / "again").exists()
    second = train_run(recipe, resume="s3://bucket/run")
    assert (second.folder, second.ended.update) == (Path("runs/run-001"), 12)
    assert stored.updates()[-1] == 12


def test_what_cannot_be_is_refused():
    with pytest.raises(RunFolderError, match=r"nowhere://bucket/run: .*Install multipod\[remote\]"):
        StoredRun("nowhere://bucket/run")
    with pytest.raises(ClusterError, match=r"bring it near \(aws s3 sync s3://bucket/run FOLDER\), and give --resume"):
        refuse_fetching(TrainRequest(resume=Path("s3:/bucket/run")))


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_that_survives_is_copied_by_whoever_leads_it(server, tmp_path):
    stored, run = StoredRun("s3://bucket/survivor"), tmp_path / "two"
    command = [sys.executable, "-m", "multipod", "launch", "--processes", "2", "--survive", "--", "train", TINY]
    command += ["--set", "updates=200000", "--set", "evaluate_every=0", "--set", "checkpoint_every=100"]
    command += ["--mesh", "2x2", "--out", "two", "--copy-to", stored.url]
    with started(command, tmp_path) as launcher:
        wait_for(stored.updates)
        ranks = {p.environ().get("MULTIPOD_PROCESS_ID"): p for p in psutil.Process(launcher.pid).children()}
        ranks["0"].kill()
        wait_for(lambda: "regrouped" in (run / "metrics.jsonl").read_text())
        later = max(stored.updates()) + 200
        wait_for(lambda: max(stored.updates()) >= later)
        said = interrupt(launcher, 100)
    assert launcher.returncode == 130, said
    assert max(stored.updates()) == max(int(path.name) for path in RunFolder(run).checkpoints.glob("[0-9]*"))
    stored.fetch(tmp_path / "fetched")
    last = max(stored.updates())
    assert not damaged_files(tmp_path / "fetched" / "checkpoints" / str(last))
