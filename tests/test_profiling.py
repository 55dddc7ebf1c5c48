"""A profile of some updates: which are refused, what is in the run's folder, planned beside measured."""

import gzip
import json
import subprocess
import sys

import pytest
from processes import clean_environment

from multipod.errors import RecipeError
from multipod.runs import profiling
from multipod.runs.options import ProfiledUpdates, parse_profiled
from multipod.runs.profiling import device_events, refuse_unfit_libtpu, steps_trace
from multipod.train.events import Updated

PLANNED = {"layout": "zero1", "machine": "dgx-h100", "step_s": 0.5, "compute_s": 0.3, "collectives_s": 0.2}
MEASURED = [Updated(n, {"loss": 1.0, "bad": float("nan")}, 0.6, 0.1 * (n == 2), 10.0) for n in (1, 2)]


@pytest.mark.parametrize(("text", "first", "last"), [("10:13", 10, 13), ("4", 4, 4), ("1:1", 1, 1)])
def test_updates_as_text(text, first, last):
    assert parse_profiled(text) == ProfiledUpdates(first, last)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10:5", "the last may not come before the first. Write --profile 5:10"),
        ("0:5", "updates count from 1"),
        ("a:b", "write the first and the last update to profile, as 10:13"),
        ("3:", "write the first and the last"),
        ("-3:5", "write the first and the last"),
    ],
)
def test_text_that_is_no_updates(text, message):
    with pytest.raises(RecipeError, match=message):
        parse_profiled(text)


def test_updates_that_the_run_does_not_do():
    ProfiledUpdates(10, 13).check(13, 9)
    with pytest.raises(RecipeError, match=r"--profile 10:14: the run has 13 updates.* as --profile 10:13"):
        ProfiledUpdates(10, 14).check(13)
    with pytest.raises(RecipeError, match=r"the run goes on after update 10. Profile later ones, as --profile 11:13"):
        ProfiledUpdates(10, 13).check(13, 10)


def slices(events, pid: int) -> list[tuple[str, int, float, float]]:
    return [
        (event["name"], event["tid"], round(event["ts"]), round(event["ts"] + event["dur"]))
        for event in events
        if event["ph"] == "X" and event["pid"] == pid
    ]


def test_each_planned_step_begins_with_the_measured_one():
    events = list(steps_trace(MEASURED, PLANNED, [("updating 1", 0.0), ("updating 2", 0.6), ("ending", 1.2)]))
    assert slices(events, 1) == [
        ("planned 1", 1, 0, 500_000), ("compute", 2, 0, 300_000), ("collectives", 2, 300_000, 500_000),
        ("planned 2", 1, 600_000, 1_100_000), ("compute", 2, 600_000, 900_000), ("collectives", 2, 900_000, 1_100_000),
    ]  # fmt: skip
    assert slices(events, 2) == [
        ("update 1", 1, 0, 600_000), ("update 2", 1, 600_000, 1_200_000), ("waits for data", 2, 600_000, 700_000),
        ("updating 1", 3, 0, 600_000), ("updating 2", 3, 600_000, 1_200_000),
    ]  # fmt: skip
    assert {event["args"].get("name") for event in events} >= {"planned: zero1 on dgx-h100", "measured", "host"}
    json.dumps(events, allow_nan=False)


def test_kernels_of_devices_come_along(tmp_path):
    name = lambda pid, name: {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}  # noqa: E731
    kernels = [{"ph": "X", "name": "fusion", "pid": pid, "tid": 1, "ts": 5, "dur": 2} for pid in (1, 7)]
    (tmp_path / "plugins/profile/now").mkdir(parents=True)
    with gzip.open(tmp_path / "plugins/profile/now/perfetto_trace.json.gz", "wt") as file:
        json.dump({"traceEvents": [name(1, "/device:GPU:0"), name(7, "/host:CPU"), *kernels, {}]}, file)
    assert [(event["pid"], event["name"]) for event in device_events(tmp_path)] == [
        (101, "process_name"),
        (101, "fusion"),
    ]
    assert device_events(tmp_path / "none") == []


def test_a_libtpu_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(profiling.metadata, "requires", lambda name: ["numpy", "libtpu==0.0.42.*; extra == 'tpu'"])
    fits = type("Found", (), {"version": "0.0.42.1"})
    monkeypatch.setattr(profiling.metadata, "distributions", lambda name: [fits])
    refuse_unfit_libtpu(None)
    monkeypatch.setattr(fits, "version", "0.0.52")
    with pytest.raises(RecipeError, match=r"libtpu 0.0.52 is installed.* built with 0.0.42"):
        refuse_unfit_libtpu("tpu,cpu")
    refuse_unfit_libtpu("cpu")


@pytest.mark.slow
def test_a_run_has_its_profile(tmp_path):
    command = [sys.executable, "-m", "multipod", "train", "mlp-small", "--out", "run", "--quiet", "--profile", "3:4"]
    sizes = ["--cpu-devices", "1", "--set", "updates=5", "--set", "evaluate_every=0", "--set", "checkpoint_every=0"]
    environment = clean_environment() | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([*command, *sizes], cwd=tmp_path, env=environment, check=True, timeout=240)
    folder = tmp_path / "run" / "profile"
    assert list(folder.glob("plugins/profile/*/*.xplane.pb"))  # for XProf and TensorBoard
    with gzip.open(next(folder.glob("plugins/profile/*/perfetto_trace.json.gz"))) as file:
        assert json.load(file)["traceEvents"]
    events = json.loads((folder / "steps.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert names == ["update 3", "update 4"]
