"""The words of the code: docstrings whose first line stands alone, and no public class name twice."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "multipod"
NEEDS_A_NEIGHBOUR = re.compile(r"(The same|As|Of|Those|That|Its)\b")
"""A line that begins so can only be read after the line above it or the function beside it."""


class Documented(NamedTuple):
    """Something with a docstring."""

    file: Path
    line: int
    name: str
    first_line: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} {self.name}: {self.first_line}"


def files(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def documented(file: Path) -> Iterator[Documented]:
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            name = "module" if isinstance(node, ast.Module) else node.name
            yield Documented(file, getattr(node, "lineno", 1), name, text.splitlines()[0])


def public_classes() -> dict[str, list[str]]:
    """Class name to the files of the package that define it."""
    places = defaultdict(list)
    for file in files("src/multipod"):
        for node in ast.parse(file.read_text(encoding="utf-8"), str(file)).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(file.relative_to(PACKAGE)))
    return places


@pytest.mark.slow
def test_first_lines_of_docstrings_stand_alone():
    lines = [entry for file in files("src", "benchmarks", "examples", "tests") for entry in documented(file)]
    leaning = [str(entry) for entry in lines if NEEDS_A_NEIGHBOUR.match(entry.first_line)]
    assert leaning == []


def test_no_public_class_name_stands_twice():
    """Whoever reads a name in a traceback, or imports it, should not have to ask which of several it is."""
    assert {name: places for name, places in public_classes().items() if len(places) > 1} == {}


@pytest.mark.parametrize("line", ["As theirs.", "Of a table.", "Its rows.", "That live.", "The same."])
def test_the_checker_sees_lines_that_need_a_neighbour(line):
    assert NEEDS_A_NEIGHBOUR.match(line)


@pytest.mark.parametrize("line", ["Assigns.", "Often.", "The samples.", "Item.", "Thats all.", "Offers one."])
def test_the_checker_leaves_other_words_alone(line):
    assert not NEEDS_A_NEIGHBOUR.match(line)
