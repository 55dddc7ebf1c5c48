"""Calibration by steps that somebody measured, from Python and from the command line; what it refuses."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from multipod.cli.main import cli
from multipod.errors import MultipodError
from multipod.layout import compiled
from multipod.layout.layout import Layout
from multipod.layout.sync import Sync
from multipod.plan.calibration.steps import MeasuredStep, fit_steps, read_steps
from multipod.plan.machine import find, read
from multipod.plan.predict import predict_step
from multipod.plan.tables.models import MODELS
from multipod.train.events import Ended
from multipod.train.observers.history import RunFacts
from multipod.train.observers.report import _planned

TRUTH = {"matmul": 0.62, "memory": 0.8, "op_s": 9e-6, "link": 0.5}
RUNS = [
    ("bert", "dgx-a100", 256, "ring"), ("bert", "dgx-a100", 32, "ring"), ("transformer", "dgx-a100", 512, "ring"),
    ("bert", "dgx-a100:8", 512, "torus-2d"), ("transformer", "dgx-a100:8", 512, "torus-2d"),
    ("transformer", "dgx-a100:4", 128, "ring"), ("bert", "dgx-a100:2", 64, "ring"),
]  # fmt: skip


def made(tmp_path, steps=None):
    """Steps of a machine with the constants `TRUTH`, to a thousandth."""
    rows = []
    for model, on, batch, schedule in RUNS:
        machine = find(on).calibrated(**TRUTH)
        seconds = predict_step(MODELS[model], Layout(sync=Sync(schedule, "zero1")), batch, machine).step_s
        rows.append({"model": model, "on": on, "batch": batch, "schedule": schedule, "step_ms": 1e3 * seconds})
    file = tmp_path / "steps.json"
    file.write_text(json.dumps({"format": "multipod-steps-1", "steps": rows if steps is None else steps}))
    return file


def test_constants_that_made_the_steps_are_found(tmp_path):
    steps = read_steps(made(tmp_path))
    assert steps[0] == MeasuredStep("bert", "dgx-a100", Layout(sync=Sync("ring", "zero1")), 256, steps[0].step_ms)
    fit = fit_steps(steps, find("dgx-a100"), MODELS.__getitem__)
    found = fit.machine.calibration
    for name in ("matmul", "memory", "link"):
        assert getattr(found, name) == pytest.approx(TRUTH[name], rel=0.1)
    assert fit.median_error < 0.02
    assert found.source.startswith("matmul, memory, op_s, link, vector, message_s fitted to 7 measured steps")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*words):
        result = CliRunner().invoke(cli, ["plan", *words, "--cache", "off"], standalone_mode=False)
        if result.exception is not None:
            raise result.exception
        return " ".join(result.output.split())

    return run


def test_a_machine_file_from_the_command_line(run, tmp_path):
    made(tmp_path)
    text = run("calibrate", "steps.json", "--on", "dgx-a100", "--save", "a100.json")
    assert "matmul 0.6" in text
    assert "plan with --calibration a100.json" in text
    assert read(tmp_path / "a100.json")["calibration"].matmul == pytest.approx(0.62, rel=0.1)
    text = run("bert", "--on", "dgx-a100", "--batch", "256", "--calibration", "a100.json", "--top", "2")
    assert "constants: matmul, memory, op_s, link, vector, message_s fitted to 7 measured steps" in text
    assert "1 " in text


ONE = {"model": "bert", "batch": 256, "step_ms": 412.0}
TO = ("--on", "dgx-a100", "--save", "x.json")


@pytest.mark.parametrize(
    ("steps", "words", "message"),
    [
        ([ONE, ONE | {"step_ms": 900.0}], TO, "Data that contradict themselves by half fit nothing"),
        ([ONE], TO, "1 measured steps fix no constants. Give two at the least"),
        ([ONE, {"model": "bert", "batsh": 3}], TO, "step 2: there is no field 'batsh'. Nearest: batch"),
        ([ONE, {"model": "bert"}], TO, "step 2: it says no batch, step_ms"),
        ([ONE, ONE | {"step_ms": -1}], TO, "step 2: step_ms=-1 is no number above 0"),
        ([ONE, ONE | {"split": {"modell": 2}}], TO, "nothing is split over 'modell'. Nearest: model"),
        ([ONE, ONE | {"batch": 2, "model": "bertt"}], TO, "nothing to plan is called 'bertt'. Nearest: bert"),
        ([ONE, ONE | {"batch": 2}], TO, "leaves some of 8 replicas without an example"),
        ([ONE, ONE], (), "say whose constants are fitted and where they go"),
        ("no list", TO, "holds no measured steps. Write"),
    ],
)
def test_measured_steps_that_cannot_be(run, tmp_path, steps, words, message):
    made(tmp_path, steps)
    with pytest.raises((MultipodError, Exception)) as refused:
        run("calibrate", "steps.json", *words)
    assert message in str(getattr(refused.value, "message", refused.value))


def test_no_file_and_no_json(run, tmp_path):
    with pytest.raises(MultipodError, match=r"steps.json: No such file or directory"):
        run("calibrate", "steps.json", *TO)
    (tmp_path / "steps.json").write_text("[")
    with pytest.raises(MultipodError, match=r"steps.json is no JSON"):
        run("calibrate", "steps.json", *TO)


@pytest.mark.slow
def test_without_libtpu_it_says_what_else_and_how(run, monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "has_libtpu", lambda: False)
    (tmp_path / "own.py").write_text("from multipod.recipes.digits import digits\n\ndef nothing():\n    return 3\n")
    with pytest.raises(MultipodError, match=r"pip install 'multipod\[tpu\]'; without it the planner reckons from"):
        run("own.py:digits", "--on", "tpu-v3-pod:2x2", "--compile", "--top", "1")
    with pytest.raises(MultipodError, match="nothing"):  # a function that makes no recipe has no step
        run("own.py:nothing", "--on", "tpu-v3-pod:2x2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bert", "--on", "here:4", "--batch", "64", "--fail", "0,1"), "`here` is this one host"),
        (("bert", "--on", "tpu-v3-pod:2x2", "--batch", "64", "--updates", "-1"), "--updates -1 is no run"),
        (("bert", "--on", "tpu-v3-pod:2x2", "--batch", "64", "--trace", "no/t.json"), "no is no folder to write in"),
        (("bert", "--on", "tpu-v3-pod:2x2", "--batch", "64", "--precision", "float32"), "products of bfloat16 only"),
        (("bert", "--on", "tpu-v3-pod:2x2", "--batch", "64", "--explain", "999"), "--explain 999: there are"),
        (
            ("bert", "--on", "tpu-v3-pod:2x2", "--batch", "64", "--updates", "1e6", "--failures", "1e3"),
            "such a run never ends",
        ),
    ],
)
def test_more_refusals(run, words, message):
    with pytest.raises((MultipodError, Exception)) as refused:
        run(*words)
    assert message in str(getattr(refused.value, "message", refused.value))


def test_failures_precision_and_traces_from_the_command_line(run, tmp_path):
    text = run(
        "bert", "--on", "tpu-v3-pod:4x4", "--batch", "256", "--updates", "1e5", "--failures", "1e-3", "--trace",
        "t.json", "--top", "1", "--host-rate", "1e9", "--evaluate-every", "100",
    )  # fmt: skip
    assert "failures: one in 2 d" in text
    assert "goodput 9" in text
    assert "a step of layout 1 in t.json: open it in ui.perfetto.dev" in text
    assert "stage " in text  # shown though it is not among the quickest
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_a_report_holds_what_was_predicted_beside_what_was_measured():
    """Every part of the step that a run measures, with the plan's own figure beside it."""
    plan = {"step_s": 0.010, "compute_s": 0.007, "collectives_s": 0.002, "update_s": 0.001, "evaluation_s": 0.0005}
    facts = RunFacts("1", "tiny", bytes_per_device={"parameters": 4000, "optimizer": 8000, "other": 1}, plan=plan)
    facts = replace(facts, plan=plan | {"machine": "here:8", "layout": "batch 64", "state_bytes": 12000.0})
    ended = Ended(100, False, 0.9, 5e3, 0.0125, 9.8, 7.9, 0.16, 0.04, 0.02, 21.3, 8000, lost_s={"evaluation": 0.2})
    (section,) = _planned(facts, ended)
    rows = dict(section[1])
    assert section[0] == "Plan"
    assert rows["step"] == "predicted 10.0 ms, measured 12.5 ms, +25%"
    assert rows["sums"] == "predicted 2.00 ms; the gradient sum alone measured 2.00 ms"
    assert rows["passes and update"] == "predicted 8.00 ms, measured 10.0 ms"
    assert rows["input"] == "predicted 0.00 ms, measured 0.50 ms"
    assert rows["evaluation"] == "predicted 0.50 ms, measured 2.00 ms"
    assert rows["state per device"].startswith("predicted 11.7 KiB, laid out 11.7 KiB")
    assert _planned(replace(facts, plan={}), ended) == []
