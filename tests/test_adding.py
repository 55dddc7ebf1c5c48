"""What adding something takes: each test adds one by a value and a line in a table, and sees it used everywhere."""

import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np
import optax
import pytest
from click.testing import CliRunner
from processes import clean_environment
from rich.console import Console
from tiny_recipe import Perceptron, tiny

from multipod.cli.main import COMMANDS, cli
from multipod.collectives.build import ALGORITHMS, Builder, build
from multipod.collectives.schedule import ADD, COPY, Schedule, even_bounds, make_step
from multipod.collectives.verify import verify
from multipod.data.files.formats import FORMATS, Format, open_records
from multipod.data.files.records import Record, Records, files_identity, locate_record
from multipod.execute.engines.numpy import run as run_schedule
from multipod.layout.layout import Layout
from multipod.layout.sync import Sync
from multipod.optim.optimizer import Optimizer
from multipod.optim.optimizers import OPTIMIZERS
from multipod.recipe.override import override
from multipod.recipe.text import from_text, to_text
from multipod.recipes.find import RECIPES, load
from multipod.topology.machines import parse
from multipod.train.observers.table import OBSERVERS, CallOnly, ObservedRun, make_observers
from multipod.train.run_folder import RunFolder

ROOT = Path(__file__).parents[1]


def command(*words: str) -> str:
    """What a command prints."""
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def star(topology, collective="all-reduce"):
    """All chips send to the first, one after the other; then it sends the sum to all."""
    hub, *others = topology.chips
    steps = [make_step([chip], [hub], 0, op=ADD) for chip in others]
    return Schedule(collective, "star", topology, 1, even_bounds(1), [*steps, make_step(hub, others, 0, op=COPY)])


def test_a_collective_is_a_function_and_a_line(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "star", Builder(star, ("all-reduce",), "all through the first chip", "none", True))
    machine = parse("mesh:3x3", ["0,1"])
    schedule = build("star", machine)
    verify(schedule)
    vectors = {chip: np.full(5, 2.0**chip) for chip in machine.chips}
    for summed in run_schedule(schedule, vectors).values():
        np.testing.assert_array_equal(summed, sum(vectors.values()))
    assert "star" in command("simulate", "all-reduce", "--on", "mesh:3x3", "--fail", "0,1", "--bytes", "1M")
    assert "star" in command("schedule", "all-reduce", "--on", "mesh:3x3", "--algorithm", "star")
    assert Layout(sync=Sync("star")).sync.gradient_sum == "star"


@dataclass(frozen=True, eq=False)
class Bytes(Records):
    """Field `byte`: each byte of the files."""

    files: tuple[Path, ...]

    def __len__(self) -> int:
        return int(self.file_ends[-1])

    def record(self, number: int) -> Record:
        file, place = locate_record(self.file_ends, number)
        return {"byte": np.uint8(self.files[file].read_bytes()[place])}

    def name(self, number: int) -> str:
        return f"byte {number}"

    @property
    def file_ends(self) -> np.ndarray:
        return np.cumsum([path.stat().st_size for path in self.files])

    def identity(self) -> str:
        return files_identity("bytes", self.files, len(self))


def test_a_data_format_is_a_class_and_a_line(tmp_path, monkeypatch):
    monkeypatch.setitem(FORMATS, "bytes", Format("single bytes", (".bin",), Bytes))
    (tmp_path / "a.bin").write_bytes(b"ab")
    (tmp_path / "b.bin").write_bytes(b"c")
    for where in (str(tmp_path), str(tmp_path / "*.bin")):
        records = open_records(where)
        assert records.read(np.arange(3))["byte"].tolist() == [97, 98, 99]
    assert "bytes          single bytes (.bin)" in command("data", "formats")


@dataclass(frozen=True)
class SignDescent(Optimizer):
    """w <- w - rate * sign(g)."""

    damping: float = 0.0

    def build(self, updates: int) -> optax.GradientTransformation:
        rate = self.schedule(updates)
        return optax.chain(optax.scale_by_sign(), optax.scale(1 - self.damping), optax.scale_by_learning_rate(rate))


def test_an_optimizer_is_a_class_and_a_line(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "sign", SignDescent)
    recipe = override(tiny(), ["optimizer=sign", "optimizer.damping=0.5"])
    assert recipe.optimizer == SignDescent(tiny().optimizer.rate, damping=0.5)
    assert from_text(to_text(recipe)).optimizer == recipe.optimizer
    assert "damping" in command("show", "digits", "--set", "optimizer=sign")


def test_a_logger_is_a_class_and_a_line(tmp_path, monkeypatch):
    heard = []
    monkeypatch.setitem(OBSERVERS, "list", lambda run: CallOnly(heard.append))
    (observer,) = make_observers(ObservedRun(RunFolder(tmp_path), Console()), ["list"])
    observer("an event")
    assert heard == ["an event"]


def narrow():
    """A narrower perceptron."""
    return replace(tiny(), name="narrow", model=Perceptron(width=4))


def test_a_recipe_with_a_model_is_a_function_and_a_line(monkeypatch):
    monkeypatch.setitem(RECIPES, "narrow", f"{__name__}:narrow")
    assert load("narrow").model.width == 4
    listed = [line for line in command("list").splitlines() if "narrow" in line]
    assert "A narrower perceptron." in listed[0]


def test_a_command_is_a_function_and_a_line(monkeypatch):
    monkeypatch.setitem(globals(), "hello", click.command(lambda: click.echo("hello")))
    monkeypatch.setitem(COMMANDS, "hello", f"{__name__}:hello")
    assert command("hello") == "hello\n"
    assert "hello" in command("--help")


@pytest.mark.slow
def test_a_layout_axis_is_a_row_and_a_field(tmp_path):
    """The tables made of `AXES` are fixed when it is imported, so a copy of the package gets the axis."""
    copy = tmp_path / "multipod"
    shutil.copytree(ROOT / "src" / "multipod", copy, ignore=shutil.ignore_patterns("__pycache__"))
    insert(
        copy / "layout" / "axes.py",
        "}  # fmt: skip",
        '    "context": Axis("text", ("context", "cp"), size=lambda s: s.context),',
    )
    insert(copy / "layout" / "split.py", "    rules: tuple[str, ...] = ()", "    context: int = 1")
    words = "show", "stdlib-docs", "--layout", "dp=2x2,cp=2", "--set", "layout.rules=mlp=context"
    environment = clean_environment() | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "multipod", *words], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    for part in ("y=2 x x=2 x context=2: 8 cpu devices", "512 by context", "context = 2"):
        assert part in done.stdout


def insert(file: Path, before: str, line: str) -> None:
    """Writes a line before the first that begins as `before` says."""
    text = file.read_text()
    assert f"\n{before}" in text
    file.write_text(text.replace(f"\n{before}", f"\n{line}\n{before}", 1))


def test_every_table_is_named_in_the_contribution_guide():
    guide = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for table in ("ALGORITHMS", "FORMATS", "RECIPES", "COMMANDS", "OPTIMIZERS", "OBSERVERS", "AXES"):
        assert f"`{table}` (" in guide
