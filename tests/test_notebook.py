"""In a notebook values draw themselves: well-formed HTML without scripts, every text escaped, the values in it."""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tiny_recipe import tiny

from multipod import notebook, runs
from multipod.collectives.build import build
from multipod.layout.text import layout_changes
from multipod.recipe.override import override
from multipod.recipe.recipe import Recipe
from multipod.recipes.find import RECIPES, load
from multipod.topology.machines import MACHINES, parse

VOID = {"br", "hr", "img", "input", "link", "meta"}
CLOSED = {"rect", "path", "polyline"}
"""SVG's own, which close themselves."""


class Reader(HTMLParser):
    """Collects the text of a page, and refuses what is not closed in order, runs, or comes from elsewhere."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "iframe", "object", "link", "img"}
        for name, value in attrs:
            assert not name.startswith("on")
            assert name not in {"href", "src"}
            assert value is None or "url(" not in value
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in CLOSED
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] != "style":
            self.texts.append(data)
        else:
            assert "http" not in data
            assert "@import" not in data


def read(value: Any) -> Reader:
    """What a notebook shows of a value."""
    reader = Reader()
    reader.feed(value if isinstance(value, str) else value._repr_html_())
    reader.close()
    assert reader.open == []
    return reader


def shown(value: Any) -> str:
    return " ".join(read(value).texts)


@dataclass(frozen=True)
class Inner:
    hostile: str = ""
    size: int = 3


HOSTILE = "<script>alert('x')</script>&\"<b>"


def test_all_text_is_escaped() -> None:
    value = Inner(HOSTILE, 4)
    parts = notebook.fields(HOSTILE, value) + notebook.table([HOSTILE], [[HOSTILE, 1234, 0.5]])
    parts += notebook.curve([1.0, 2.0], HOSTILE) + notebook.bars([1.0], HOSTILE) + notebook.grid(2, 2, set(), HOSTILE)
    page = notebook.card(HOSTILE, HOSTILE, [(HOSTILE, HOSTILE)], parts)
    assert "<script>" not in page
    assert "<b>" not in page.replace('<b class="mp-title">', "")
    reader = read(page)
    assert reader.texts.count(HOSTILE) >= 8
    assert "1,234" in reader.texts


def test_a_long_text_is_shortened_before_it_is_escaped() -> None:
    page = notebook.rows_table([("a", "&" * 1000)])
    assert html.unescape(page).count("&") == notebook.LONGEST - 1
    assert "…" in shown(page)


def test_fields_that_have_their_default_are_left_out() -> None:
    assert "size" not in shown(notebook.fields("one", Inner("x")))
    assert shown(notebook.fields("one", Inner())) == "one Inner"


def test_curves_are_of_what_is_finite_and_end_where_they_end() -> None:
    assert notebook.curve([1.0, float("nan")], "loss") == ""
    page = notebook.curve([3.0, float("nan"), 1.0, 2.0], "loss")
    assert "loss: 1 to 3, last 2" in shown(page)
    (points,) = [part for part in page.split('"') if "," in part and part[:1].isdigit()]
    places = [tuple(map(float, pair.split(","))) for pair in points.split()]
    assert places[0] == (3.0, 3.0)  # the largest, at the top
    assert places[1][1] == 57.0  # the least, at the bottom
    assert page.count("…") == 0
    assert len(notebook.curve([1.0 * k for k in range(10_000)], "loss")) < 8_000


def test_pictures_of_very_large_things_are_left_out() -> None:
    assert notebook.grid(1024, 4, set(), "chips") == ""
    assert notebook.bars([1.0] * 100_000, "steps").count("<rect") <= notebook.POINTS
    assert notebook.bars([], "steps") == notebook.bars([0.0], "steps") == ""


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_every_machine_draws_itself(name: str) -> None:
    machine = parse(name)
    assert f"{len(machine.chips):,} of" in shown(machine)


def test_a_machine_shows_what_has_failed() -> None:
    machine = parse("mesh:4x4", ("1,2",), ("0-1",))
    assert "1 chip, 1 link" in shown(machine)
    whole, crossed = re.findall(r'path d="([^"]*)"', machine._repr_html_())
    assert (whole.count("z"), crossed.count("z")) == (15, 1)
    assert crossed.startswith("M37 19h16")  # row 1, column 2, of squares 18 apart


def test_a_schedule_counts_its_messages() -> None:
    schedule = build("ring", parse("mesh:4x4"), "all-reduce")
    reader = read(schedule)
    assert {"all-reduce", "ring", "30, of 16 messages each"} <= set(reader.texts)
    assert "rect" not in reader.seen
    uneven = build("double-tree", parse("mesh:4x4"), "all-reduce")
    reader = read(uneven)
    assert {"double-tree", f"{len(uneven.steps):,}"} <= set(reader.texts)
    assert reader.seen.count("rect") == len(uneven.steps)


@pytest.mark.parametrize(
    "words", ["data=2x4,update", "data=2x2,model=2", "data=1x2,stage=4,schedule=1f1b,micro=8", "data=2x2,expert=2"]
)
def test_a_layout_says_what_is_split(words: str) -> None:
    layout = override(load("st-moe-small" if "expert" in words else "digits"), layout_changes(words)).layout
    text = shown(layout)
    assert "x".join(map(str, layout.mesh)) in text
    for axis, size in layout.replica_sizes.items():
        assert f"{axis}={size}" in text


def recipes() -> Iterator[Recipe]:
    for name in sorted(RECIPES):
        yield load(name)


def test_every_recipe_draws_itself() -> None:
    for recipe in recipes():
        reader = read(recipe)
        assert recipe.name in reader.texts
        assert f"{recipe.updates:,}, of {recipe.batch:,} examples each" in reader.texts
        assert {"details", "summary"} <= set(reader.seen)


def test_a_run_and_its_result_draw_themselves(tmp_path: Path) -> None:
    recipe = replace(tiny(), updates=40, evaluate_every=10, checkpoint_every=10)
    result = runs.train(recipe, out=tmp_path / "a <run>", stop_after=25)
    reader = read(result)
    text = " ".join(reader.texts)
    assert str(tmp_path / "a <run>") in text
    assert "stopped" in reader.texts
    assert "25 updates" in reader.texts
    assert "--resume" in text
    assert "test, after 20" in text
    assert "polyline" in reader.seen
    text = shown(runs.open(tmp_path / "a <run>"))
    assert "25 of 40 updates" in text
    assert "training loss:" in text
    (tmp_path / "a <run>" / "metrics.jsonl").unlink()
    assert "training loss:" not in shown(result)
