"""Documents that cannot lie: every name, path, command, link and count that they state is looked up in the tree."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from document_names import (
    DOTTED,
    FENCE,
    IDENTIFIER,
    PAGES,
    SPAN,
    Span,
    blocks,
    command_spans,
    docstring_spans,
    page_spans,
    split,
    trouble,
)
from tree_names import PACKAGE, ROOT, Tree

from multipod import errors
from multipod.cli.main import cli
from multipod.errors import MultipodError

NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NUMBER = "(" + "|".join([rf"\b{word}\b" for word in NUMBERS] + [r"\b\d[\d,]*"]) + ")"


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree()


def report(spans: Iterator[Span], tree: Tree) -> list[str]:
    """The spans that name what is not there, with the reasons."""
    return [f"{span}: {why}" for span in spans if (why := trouble(span, tree))]


@pytest.mark.slow
def test_pages_name_what_is_there(tree):
    assert report(page_spans(), tree) == []


def test_docstrings_name_what_is_there(tree):
    assert report(docstring_spans(tree), tree) == []


def test_command_lines_are_commands(tree):
    assert report(command_spans(), tree) == []


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("src/multipod/micro/schema.py", "read.py", "no such file"),
        ("src/multipod/models/dlrm.py", "multipod.data.criteo", "leads nowhere"),
        ("src/multipod/micro/schema.py", "multipod.train.worlds", "leads nowhere"),
        ("docs/TOUR.md", "Recipe.no_such_field", "Recipe has no no_such_field"),
        ("docs/TOUR.md", "multipod.errors.NoSuchError", "leads nowhere"),
        ("docs/TOUR.md", "errors.NoSuchError", "multipod.errors has no NoSuchError"),
        ("docs/TOUR.md", "train/no_such.py", "no such file"),
        ("docs/TOUR.md", "no-such-folder/", "no such folder"),
        ("docs/TOUR.md", "nowhere.json", "no such file"),
        ("docs/TOUR.md", "no_such_word", "no no_such_word in the code"),
        ("docs/TOUR.md", "no-such-algorithm", "no no-such-algorithm in the code"),
        ("docs/TOUR.md", "no_such_call(mesh)", "no no_such_call in the code"),
        ("docs/TOUR.md", "make_mesh(no_such=1)", "no no_such in the code"),
        ("docs/TOUR.md", "a text with NoSuchClass in it", "no NoSuchClass in the code"),
        ("docs/TOUR.md", "layout.mash=4", "nothing has a member mash"),
        ("docs/TOUR.md", "--no-such-option 3", "no option --no-such-option"),
        ("docs/TOUR.md", "make no-such-target", "no target no-such-target"),
        ("docs/TOUR.md", "python benchmarks/no_such.py", "no benchmarks/no_such.py"),
        ("docs/TOUR.md", "multipod no-such", "multipod has no command no-such"),
        ("docs/TOUR.md", "multipod train digits --restarts 3", "no option --restarts"),
        ("docs/TOUR.md", "multipod launch --restarts 3 -- train digits --no-such", "no option --no-such"),
        ("docs/TOUR.md", "multipod train no-such-recipe --resume", "no recipe no-such-recipe"),
        ("docs/TOUR.md", "multipod train digits --set layout.no_such=4", "no class in ['layout'] has a field no_such"),
        ("docs/TOUR.md", "multipod show digits --layout data=2,no_such=4", "no 'no_such' in a layout"),
    ],
)
def test_the_checker_refuses_what_is_not_there(file, text, why, tree):
    assert why in trouble(Span(ROOT / file, 1, text), tree)


# Links, tables and counts.


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", re.sub(r"\]\([^)]*\)", "", heading)).lower().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_headings_lead_to_one(page):
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    wrong = [anchor for target, anchor in links if anchor not in anchors(page.parent / target if target else page)]
    assert wrong == []


ERRORS = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")


def test_the_tree_of_errors_is_drawn_as_it_is():
    tree = re.findall(r"^([│├└─ ]*)(\w+Error) +(?:\[(\w+)\])?(?: *exit (\d+))?", FENCE.search(ERRORS)[3], re.MULTILINE)
    drawn, above = {}, {-1: "Exception"}
    for indent, name, builtin, code in tree:
        above[len(indent)] = name
        parent = above[max(depth for depth in above if depth < len(indent))]
        drawn[name] = (parent, *([builtin] if builtin else [])), int(code or drawn.get(parent, ((), 2))[1])
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MultipodError)]
    assert drawn == {kind.__name__: (tuple(base.__name__ for base in kind.__bases__), kind.exit_code) for kind in kinds}


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        match
        for match in re.findall(r"\*\*(\w+)\*\*, by `multipod ([^`]+)`[^\n]*\n```\nmultipod: ([^`]+)\n```", ERRORS)
        if "runs/" not in match[1]
    ],
    ids=lambda text: text[:30],
)
def test_an_error_is_worded_as_the_page_says(kind, words, message, tmp_path, monkeypatch):
    """All but those that need a run."""
    (tmp_path / "imagenet" / "train").mkdir(parents=True)
    (tmp_path / "imagenet" / "val").mkdir()
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, split(words), standalone_mode=False)
    assert (type(done.exception).__name__, str(done.exception)) == (kind, message)


def pages_behind(page: Path) -> set[Path]:
    """The pages that a page links to; a folder stands for all in it."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    places = [(page.parent / target).resolve() for target in targets]
    return {found for place in places for found in (place.glob("*.md") if place.is_dir() else [place])} & {*PAGES}


def test_every_page_can_be_reached_from_the_readme():
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        new = set().union(*map(pages_behind, new)) - reached
    assert sorted({*PAGES} - reached) == []


def rows(page: Path) -> Iterator[list[str]]:
    """The cells of each row of a page's tables."""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_contracts_are_in_the_files_that_the_table_names():
    """A row of names with a file, or a folder, in the next cell."""
    page = ROOT / "docs" / "ARCHITECTURE.md"
    contracts = [row for row in rows(page) if len(row) > 1 and re.fullmatch(r"`[\w/]+(\.py|/)`", row[1])]
    assert len(contracts) > 10
    for names, where, *_ in contracts:
        place = PACKAGE / where.strip("`")
        text = "\n".join(file.read_text() for file in ([place] if place.is_file() else sorted(place.glob("*.py"))))
        for name in SPAN.findall(names):
            assert re.search(rf"^(class {name}\b|{name} = |{name}: )", text, re.MULTILINE), (name, where)


def test_the_glossary_names_what_its_files_hold():
    """The second cell's names stand in the file of the last."""
    page = ROOT / "docs" / "glossary.md"
    words = [row for row in rows(page) if len(row) == 4 and row[0] != "you look for" and set(row[0]) != {"-"}]
    assert len(words) > 40
    for theirs, ours, _, where in words:
        file = PACKAGE / where.strip("`")
        assert file.is_file(), (theirs, where)
        names = [name for name in SPAN.findall(ours) if DOTTED.fullmatch(name) or IDENTIFIER.fullmatch(name)]
        text = file.read_text(encoding="utf-8")
        assert [name for name in names if not re.search(rf"\b{name}\b", text)] == [], (theirs, where)


def test_names_are_in_the_files_named_beside_them(tree):
    """Where a text says `SUMS` (`execute/sums.py`), or `Source` in `data/source.py`."""
    beside = re.compile(r"`(\w+)`,? (?:\(|in |of )`([\w/]+\.(?:py|h))`")
    texts = [(page, page.read_text(encoding="utf-8")) for page in PAGES] + [
        (file, text) for file, _, text in tree.docstrings
    ]
    found = [(file, *match) for file, text in texts for match in beside.findall(" ".join(text.split()))]
    assert len(found) > 10
    for file, name, where in found:
        places = [base / where for base in (PACKAGE, ROOT, ROOT / "src", file.parent) if (base / where).is_file()]
        assert places, (file, name, where)
        assert re.search(rf"\b{name}\b", places[0].read_text(encoding="utf-8")), (file, name, where)


CALLS = re.compile(r"^ *(\w+(?:\.\w+)?) +([\w/]+\.py)(?: |$)", re.MULTILINE)
"""Lines such as `over_data   step/specs.py   what happens`."""


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "design/house.md"])
def test_a_way_through_the_code_names_functions_with_their_files(page):
    calls = CALLS.findall("\n".join(text for *_, text in blocks(ROOT / "docs" / page)))
    assert len(calls) > 5
    for name, file in calls:
        text = (PACKAGE / file).read_text(encoding="utf-8")
        for part in name.split("."):
            assert re.search(rf"\b(def|class) {part}\b|^ +{part}: ", text, re.MULTILINE), (name, file)


def tour_stops() -> list[list[str]]:
    """The stops of both tours: what stands at each."""
    text = (ROOT / "docs" / "TOUR.md").read_text(encoding="utf-8")
    return [re.split(r"^\d+\. ", tour, flags=re.MULTILINE)[1:] for tour in text.split("\n## ")[:2]]


def linked(stop: str) -> list[Path]:
    """The files of the package that a stop of a tour links to."""
    return [PACKAGE / name for name in re.findall(r"\]\(\.\./src/multipod/([^)]+)\)", stop)]


def test_the_tours_stops_hold_what_is_said_of_them():
    for stop in [stop for tour in tour_stops() for stop in tour]:
        text = stop + "".join(file.read_text(encoding="utf-8") for file in linked(stop))
        for name in SPAN.findall(stop):
            if IDENTIFIER.fullmatch(name) or re.fullmatch(r"_?[A-Z]\w+\.\w+", name):
                for part in name.split("."):
                    assert len(re.findall(rf"\b{part}\b", text)) > 1, (name, linked(stop))


def number(word: str) -> int:
    """`1,777`, `Seven` or `two` as a number."""
    return NUMBERS.index(word.lower()) if word.lower() in NUMBERS else int(word.replace(",", ""))


def lines_of(dotted: str, tree: Tree) -> int:
    """The lines of a method's body without its docstring."""
    owner, name = dotted.split(".")
    for file in sorted(PACKAGE.rglob("*.py")):
        if f"class {owner}" in (text := file.read_text(encoding="utf-8")):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef) and node.name == owner:
                    for method in node.body:
                        if isinstance(method, ast.FunctionDef) and method.name == name:
                            body = method.body[1:] if ast.get_docstring(method) else method.body
                            return method.end_lineno - body[0].lineno + 1
    raise AssertionError(f"no method {dotted}")


def entries(dotted: str) -> int:
    """How many entries a table of the package has: `collectives.build.ALGORITHMS`."""
    module, name = dotted.rsplit(".", 1)
    for node in ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return len(node.value.keys if isinstance(node.value, ast.Dict) else node.value.elts)
    raise AssertionError(f"no table {dotted}")


def test_the_tours_lines_are_counted():
    first, _ = tour_stops()
    stated = re.search(r"together they are\s+about ([\d,]+) lines", (ROOT / "docs" / "TOUR.md").read_text())
    total = sum(len(file.read_text().splitlines()) for stop in first for file in linked(stop))
    assert total == pytest.approx(number(stated[1]), rel=0.06)


def test_the_lines_of_a_method_are_counted(tree):
    """Where a page says: `Class.method` ... in so many lines."""
    for page in PAGES:
        for method, _, count in re.findall(rf"`([A-Z]\w+\.\w+)`(:|,) [^`.]*?\bin\s+{NUMBER}\s+lines", page.read_text()):
            assert lines_of(method, tree) == number(count), (page, method)


def test_every_command_has_its_call_from_python():
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    context = click.Context(cli)
    commands = [name for name in cli.list_commands(context) if not cli.get_command(context, name).hidden]
    assert [name for name in commands if f"`multipod {name}`" not in page] == []


def test_every_room_has_one_line():
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    floors = re.search(r"<!-- floors.*?-->\n```\n(.*?)```", text, re.DOTALL)
    lines = text[text.index("## The rooms") : text.index("## The contracts")].splitlines()
    table = [line for line in lines if line.startswith("| `")]
    assert [line.split("`")[1] for line in table] == floors[1].split()
    assert [line for line in table if len(line) > 160] == []


def test_what_a_run_leaves_and_what_a_resumed_one_may_change_is_written_down():
    from multipod.recipe.text import DATA_PLACES, WHERE
    from multipod.train.run_folder import RunFolder

    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    leaves = text[text.index("## What a run leaves behind") :]
    table = {row[0].strip("`").split("/")[0] for row in rows(ROOT / "docs" / "ARCHITECTURE.md")}
    parts = [
        getattr(RunFolder(Path()), name).name for name, part in vars(RunFolder).items() if isinstance(part, property)
    ]
    assert {*parts, "examples", "owner.json", "report.html", "damaged"} - table == set()
    assert set(SPAN.findall(leaves)) & {*WHERE, *DATA_PLACES} == {*WHERE, *DATA_PLACES}
    assert [name for name in SPAN.findall(leaves) if name.startswith("layout.") and name not in WHERE] == []


COUNTS = [
    (rf"{NUMBER} algorithms build schedules", lambda: entries("collectives.build.ALGORITHMS")),
    (rf"holds {NUMBER} ways of summing", lambda: entries("execute.sums.SUMS")),
    (rf"TOUR.md\): {NUMBER} files to read in order", lambda: len(tour_stops()[0])),
    (rf"files to read in order, and {NUMBER} for the sums", lambda: len(tour_stops()[1])),
    (rf"`WAYS` [^|]*\| the {NUMBER} that are there", lambda: entries("step.sync.choose.WAYS")),
    (rf"`AXES` [^|]*\| the {NUMBER} that are there", lambda: entries("layout.axes.AXES")),
    (rf"{NUMBER} calls, all downward", lambda: len(CALLS.findall((ROOT / "docs/design/house.md").read_text()))),
    (rf"# Tour: {NUMBER} files", lambda: len(tour_stops()[0])),
]


@pytest.mark.parametrize(("phrase", "count"), COUNTS, ids=range(len(COUNTS)))
def test_counts_are_true(phrase, count):
    stated = [word for page in PAGES for word in re.findall(phrase, page.read_text(encoding="utf-8"), re.IGNORECASE)]
    assert [word for word in stated if number(word) != count()] == []
