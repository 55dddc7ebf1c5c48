"""Outcomes of experiments: what is written, and that every line of the table leads somewhere."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from multipod.errors import RecipeError
from multipod.experiments.experiments import EXPERIMENTS, experiment
from multipod.experiments.outcome import Claim, Outcome, Section
from multipod.experiments.page import markdown_of, record_of, table, write


def an_outcome() -> Outcome:
    figure = Figure()
    figure.subplots().plot([1, 2], [2, 1])
    claims = (
        Claim(
            "error below 1 %",
            "arXiv:2006.02924",
            np.float32(0.5),
            1,
            np.bool_(True),
            (0, 1),
            0.25,
            fails_if="it is off",
        ),
        Claim("loss ends", "closed form", float("nan"), "finite", False, fails_if="it diverges"),
    )
    section = Section("Loss", "What was tried.", ("a|b", "c"), [("1", "2")], figure="loss")
    return Outcome("A page", claims, (section,), {"loss": figure}, {"predictions": [{"run": "x", "step_ms": 1.5}]})


def test_files(tmp_path: Path) -> None:
    files = write("trial", an_outcome(), tmp_path / "new", seconds=90)
    assert [file.name for file in files] == ["trial.md", "trial.json", "trial_loss.svg"]
    values = json.loads(files[1].read_text())
    assert values["claims"][0] == {
        "claim": "error below 1 %",
        "source": "arXiv:2006.02924",
        "measured": 0.5,
        "threshold": 1.0,
        "holds": True,
        "seeds": [0, 1],
        "spread": 0.25,
        "fails_if": "it is off",
    }
    assert values["claims"][1]["measured"] == "nan"
    assert values["predictions"] == [{"run": "x", "step_ms": 1.5}]
    assert {"date", "commit", "hardware", "versions"} <= values.keys()
    page = files[0].read_text()
    assert "`multipod reproduce trial`, 1.5 minutes" in page
    assert "![Loss](trial_loss.svg)" in page
    assert "| loss ends | closed form | nan | finite | **no** | it diverges |" in page
    again = write("trial", an_outcome(), tmp_path / "again", seconds=90)
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in files]


def test_table_escapes_bars() -> None:
    assert table(("a|b",), [("c",)]).splitlines()[0] == "| a\\|b |"


def test_page_without_figures() -> None:
    about = {"hardware": "h", "date": "d", "commit": "c", "versions": {}}
    page = markdown_of(record_of("x", Outcome("T", ()), about, 60))
    assert page.startswith("# T\n\n`multipod reproduce x`, 1.0 minutes on h; d, commit c")


def test_unknown() -> None:
    with pytest.raises(RecipeError, match="no experiment 'adasun'"):
        experiment("adasun")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_table(name: str) -> None:
    module, function = EXPERIMENTS[name].place.split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_command(multipod) -> None:
    listed = multipod("reproduce")
    assert listed.returncode == 0, listed.stderr
    wrong = multipod("reproduce", "nothing-like-it")
    assert wrong.returncode == 2
    assert "no experiment 'nothing-like-it'" in wrong.stderr
