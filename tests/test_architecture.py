"""The floors of docs/ARCHITECTURE.md, held against the imports of the code."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeGuard

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "multipod"
MARK = "<!-- floors: read by tests/test_architecture.py -->"
MAY_READ_ENVIRONMENT = {"cli", "runtime"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
NAMED_TUPLE = {"_asdict", "_fields", "_field_defaults", "_make", "_replace"}
"""Public methods: the underscore keeps them apart from the fields."""
DEFERRED = re.compile(r"multipod(\.\w+)+(:\w+)?")


class Import(NamedTuple):
    """`module` of the package imported by `file`; `names` are those taken out of it."""

    file: Path
    line: int
    module: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def floors(text: str) -> list[list[str]]:
    """The rooms of each floor, from the top, as the marked block of the document names them."""
    lines = iter(text.splitlines())
    assert any(line == MARK for line in lines), f"docs/ARCHITECTURE.md has no line {MARK}"
    assert next(lines).startswith("```"), "no fenced block follows the mark"
    block = []
    for line in lines:
        if line.startswith("```"):
            return block
        block.append(line.split())
    raise AssertionError("the marked block is not closed")


def heights(table: list[list[str]]) -> dict[str, int]:
    """Room to floor; the ground is 0."""
    return {room: height for height, rooms in enumerate(reversed(table)) for room in rooms}


def room_of(module: str) -> str:
    """`nn` for multipod.nn.images.batch_norm; empty for the package itself."""
    return [*module.split("."), ""][1]


def module_of(file: Path) -> str:
    """`multipod.nn.images.batch_norm`, as one would import the file."""
    parts = ["multipod", *file.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts).removesuffix(".__init__")


def home(file: Path) -> str:
    """The room that a file lies in; empty for the package's own __init__."""
    first = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for file in files():
        yield file, ast.parse(file.read_text(encoding="utf-8"), str(file))


def imports(file: Path, nodes: Iterator[ast.AST]) -> Iterator[Import]:
    """All imports of the package among `nodes`, those that name a module as text included."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = tuple(alias.name for alias in node.names)
            if module == "multipod":  # what is taken out of the root are its rooms
                for name in names:
                    yield Import(file, node.lineno, f"multipod.{name}", ())
            elif module.startswith("multipod.") or node.level:
                yield Import(file, node.lineno, module, names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "multipod":
                    yield Import(file, node.lineno, alias.name, ())
        elif is_text(node) and DEFERRED.fullmatch(node.value):
            yield Import(file, node.lineno, node.value.split(":")[0], ())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in NAMED_TUPLE


def is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def all_imports() -> list[Import]:
    return [found for file, tree in trees() for found in imports(file, ast.walk(tree))]


def wrong(found: list[Import], height: dict[str, int]) -> list[str]:
    """The imports that do not point down, in words."""
    return [
        f"{one}: from floor {height[home(one.file)]} to floor {height[room_of(one.module)]}"
        for one in found
        if home(one.file) != room_of(one.module) and height[home(one.file)] <= height[room_of(one.module)]
    ]


@pytest.fixture(scope="module")
def table() -> list[list[str]]:
    return floors((ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8"))


def test_every_room_is_in_the_table_once_and_the_other_way_round(table):
    named = [room for floor in table for room in floor]
    rooms = {home(file) for file in files()} - {""}
    assert sorted(named) == sorted(rooms)


def test_imports_are_absolute_and_name_the_module_that_owns_the_thing(table):
    known = {room for floor in table for room in floor}
    assert [str(found) for found in all_imports() if room_of(found.module) not in known] == []


@pytest.mark.slow
def test_imports_point_down(table):
    assert wrong(all_imports(), heights(table)) == []


def test_the_root_imports_nothing():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


@pytest.mark.slow
def test_only_the_command_line_reads_the_environment():
    found = []
    for file, tree in trees():
        for node in ast.walk(tree):
            names = [node.attr] if isinstance(node, ast.Attribute) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            if ENVIRONMENT & {*names} and home(file) not in MAY_READ_ENVIRONMENT:
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert found == []


@pytest.mark.slow
def test_private_names_stay_in_their_module():
    found = []
    for file, tree in trees():
        there: dict[str, Import] = {}  # what other modules are called in this file
        for one in imports(file, ast.walk(tree)):
            parts = [*one.module.split("."), *one.names]
            found += [f"{one}, {part}" for part in parts if is_private(part)]
            there |= dict.fromkeys(one.names or [one.module.split(".")[-1]], one)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in there
                and is_private(node.attr)
            ):
                found.append(f"{file.relative_to(ROOT)}:{node.lineno} uses {node.value.id}.{node.attr}")
    assert found == []


def test_the_command_line_comes_before_jax():
    """`runtime.prepare` settles what JAX reads when it is imported, so the options must not bring JAX in.

    Nor PyTorch or TensorFlow, which libraries import where they are installed: seconds before a launcher hears of a
    process, and before each press of TAB is answered.
    """
    modules = [module_of(file) for file in files() if home(file) == "cli" and file.parent.name != "printing"]
    unwanted = ("jax", "flax", "torch", "tensorflow")
    code = f"import sys, {', '.join(modules)}; print([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_checker_sees_imports_that_point_up():
    source = """
from multipod import cli
LATER = "multipod.step.state:State"
def late():
    from multipod.train.loop import train
"""
    found = list(imports(PACKAGE / "nn" / "made_up.py", ast.walk(ast.parse(source))))
    assert {one.module for one in found} == {"multipod.cli", "multipod.step.state", "multipod.train.loop"}
    assert len(wrong(found, heights([["cli"], ["train"], ["step", "nn"], ["errors"]]))) == 3
    assert wrong(found, heights([["nn"], ["cli", "step", "train"]])) == []
