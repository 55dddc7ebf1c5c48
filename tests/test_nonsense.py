"""Nonsense from users: commands and fields of recipes take it, or refuse it in words, without a traceback."""

import sys
import tomllib

import jax
import pytest
from tiny_recipe import tiny

from multipod import runtime
from multipod.cli.main import main
from multipod.errors import MultipodError
from multipod.layout.mesh import make_mesh
from multipod.recipe.override import override
from multipod.recipe.text import to_text
from multipod.recipes.find import load
from multipod.step.program import program_of

NONSENSE = ("", "-1", "nan", "1e400", "1.5", "[1,", "none", "kaputt:Kaputt", "\N{SNOWMAN}")


def names_in(table: dict, before: str = "") -> list[str]:
    """The fields of a recipe's text, with dots."""
    inside = [names_in(value, f"{before}{name}.") for name, value in table.items() if isinstance(value, dict)]
    return [f"{before}{name}" for name in table if name != "kind"] + [name for names in inside for name in names]


def refusal(make) -> str:
    """What a user is told where `make` refuses; empty where it does not. Any other error is the test's."""
    try:
        make()
    except MultipodError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("make", [tiny, lambda: load("dlrm-small")], ids=["tiny", "clicks"])
def test_a_field_takes_nonsense_or_says_why_not(make):
    recipe, refused = make(), 0
    changes = [f"{name}={value}" for name in names_in(tomllib.loads(to_text(recipe))) for value in NONSENSE]
    for change in changes:
        try:
            said = refusal(lambda change=change: override(recipe, [change]))
        except Exception as error:
            raise AssertionError(f"--set {change}") from error
        refused += bool(said)
        assert not said or len(said) > 20, change
    assert 50 < refused < len(changes)


CHANGES = """
batch=0 batch=-1 batch=7 updates=0 updates=-1 evaluation_batch=0 evaluate_every=-1 accumulate=0 accumulate=3 seed=-1
layout.mesh=0x0 layout.mesh=3x3 layout.mesh=2x4x1 layout.failed=9,9 layout.bucket_bytes=-1 layout.sync.gradient_sum=none
optimizer.rate=nan optimizer.rate=-1 optimizer.clip=-1 ema.decay=2 keep_checkpoints=0 checkpoint_every=-1
"""


@pytest.mark.parametrize("change", CHANGES.split())
def test_a_recipe_that_takes_nonsense_makes_a_program_or_says_why_not(change):
    def make() -> None:
        recipe = override(tiny(), [change])
        program = program_of(recipe, make_mesh(recipe.layout))
        assert jax.tree.leaves(program.shapes)
        assert program.rows >= recipe.batch > 0

    said = refusal(make)
    assert not said or len(said) > 20


COMMANDS = """
nonsense
train
train nonsense
train nowhere.py:f
train digits --set
train digits --set batch
train digits --set =
train digits --set nonsense=1
train digits --mesh nonsense
train digits --mesh 0x0
train digits --mesh -1x2
train digits --layout nonsense
train digits --layout data=x
train digits --fail nonsense --mesh 2x4
train digits --timeout nan
train digits --cpu-devices 0
train digits --stop-after 0
train digits --run-ahead -1
train digits --steps-per-call 0
train digits --steps-per-call nonsense
train digits --profile nonsense
train digits --profile 3:1
train digits --log nonsense
train digits --out s3://bucket/run
train digits --copy-to nowhere://bucket
train digits --resume nowhere
train --resume nowhere
train --resume nowhere --at 3
train --from nowhere
train digits --at 1
train digits --read-threads -1
train digits --decoded-cache nonsense
finetune nowhere nonsense
eval nowhere
average nowhere --out x
report nowhere
show nonsense
show digits --layout nonsense
export nowhere
data inspect nonsense
data convert nowhere out --to nonsense
data convert nowhere out --to tar
data convert s3://bucket/a out --to tar
topology show nonsense
topology show mesh --fail nonsense
schedule nonsense
simulate nonsense
plan nonsense
plan digits --on nonsense
plan digits --batch -1
pipeline nonsense
micro nonsense
micro inspect nowhere
launch
launch --processes 0 -- train digits
launch --processes nonsense -- train digits
launch -- nonsense
agent --port nonsense
chaos nonsense
reproduce nonsense
clicks prepare nowhere --out x
clicks take nowhere.npz --out x
clicks take nowhere.npz --out x --rows nonsense
clicks generate --out x --examples -1
mlperf nonsense
mlperf check nowhere
doctor --nonsense
""".strip().splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_nonsense_in_words(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["multipod", *command.split(" ")])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(runtime, "prepare", lambda *arguments: None)
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code in (1, 2), said
    assert "Traceback" not in said.out + said.err
    assert len(said.err.strip().splitlines()[-1]) > 20
    assert not list(tmp_path.iterdir()), "it made something"
