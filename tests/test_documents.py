"""Documents that cannot lie: every name, path, command, link and count that they state is looked up in the tree."""

import ast
import builtins
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from click.testing import CliRunner
from tree_names import CODE, PACKAGE, ROOT, Tree

from multipod import errors
from multipod.cli.main import cli
from multipod.errors import MultipodError
from multipod.layout.text import layout_changes

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
REJECTED = re.compile(r"^\*\*Rejected\.\*\*.*?(?=^\s*$|\Z)", re.MULTILINE | re.DOTALL)
"""A paragraph of a design note about what was not built: it may name what is not there."""
PATH = re.compile(r"[\w.*/-]+\.(?:py|md|c|h|cc|svg|json|jsonl|toml|html|yml|npy|txt|csv|ld|tar\.xz)")
FOLDER = re.compile(r"[\w./-]+/")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
HYPHENED = re.compile(r"[a-z]\w*(?:-\w+)+")
TELLING = re.compile(r"(?<![\w$%])(?:_*[A-Za-z]\w*_\w+|[A-Z][a-z]+[A-Z]\w*)")
"""What is a name wherever it stands: `update_spec`, `VectorSum`."""
PLACEHOLDER = re.compile(r"(?<![a-z0-9])[A-Z][A-Z_]+(?![a-z0-9])")
"""`NAME`, `DIR`: any word may stand there."""
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NUMBER = "(" + "|".join([rf"\b{word}\b" for word in NUMBERS] + [r"\b\d[\d,]*"]) + ")"
FIELD_ROOMS = {
    "layout": ["layout"],
    "optimizer": ["optim"],
    "data": ["data"],
    "model": ["models", "nn"],
    "objective": ["metrics"],
    "bad_updates": ["recipe"],
    "recipe": ["recipe"],
}
"""Where the classes of a recipe's fields live: `model.tables.place` names fields of classes in `models` or `nn`."""

OTHER_PROGRAMS = (
    *("apt-get", "from", "git", "horovodrun", "import", "ip", "kill", "mpirun", "pip", "ruff", "srun", "torchrun"),
    "vizviewer",
)
OTHER_PACKAGES = {"hvd"}
ELSEWHERE = {
    "clusters": "ALREADY_EXISTS JAX_COORDINATOR_PORT OMPI_COMM_WORLD_LOCAL_RANK _RANK TPU_PROCESS_ADDRESSES kubernetes "
    "node01 subdomain terminationGracePeriodSeconds --kill-on-bad-exit --requeue --signal",
    "Horovod": "BroadcastGlobalVariablesCallback broadcast_optimizer_state HOROVOD_FUSION_THRESHOLD HOROVOD_TIMELINE "
    "experimental_run_tf_function",
    "PyTorch": "fp16_compress_hook find_unused_parameters bn2 ln_f tf_efficientnet_b0 nn.TransformerEncoderLayer "
    "nn.TransformerDecoderLayer",
    "TensorBoard, Grain": "SummaryWriter add_scalar mp_prefetch",
    "JAX, Flax, Orbax": "BatchNorm_0 jax_enable_recoverability live_devices logaddexp ragged_dot timeout_secs "
    "barrier_sync_fn xla_cpu_collective_timeout_seconds",
    "the system": "EX_TEMPFAIL MALLOC_TOP_PAD_ _TRIM_THRESHOLD_ _MMAP_THRESHOLD_ flatc libm mypy perf std::bad_cast "
    "jpeg_crop_scanline jpeg_skip_scanlines",
    "file formats": "Feature ByteList BytesList FloatList Int64List schema.fbs",
    "halves of primitives' names": "_max _min _and _or",
    "examples of a reader's own": "my_recipe.py digits.0.npy labels.csv DATA.entries train-00000-of-01024",
    "common speech": "space-to-depth",
    "MPI": "Split_type",
}
"""Words that are rightly not of this tree, under whose they are."""
FOREIGN = {word for words in ELSEWHERE.values() for word in words.split()} | {
    "make run",
    "multipod train digits --set optimizer.rat=0.2",  # docs/errors.md shows what is said of it
}

NOT_YET: set[tuple[str, str]] = set()
"""Page and span: names that are still to be mended."""


class Span(NamedTuple):
    """A text between back quotes, with where it stands."""

    file: Path
    line: int
    text: str

    @property
    def page(self) -> str:
        return str(self.file.relative_to(ROOT))

    def __str__(self) -> str:
        return f"{self.page}:{self.line} `{self.text}`"


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree()


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def spans_of(text: str, file: Path, first_line: int = 1) -> Iterator[Span]:
    """What stands between back quotes in `text`, but for fenced blocks and what was rejected."""
    for match in SPAN.finditer(REJECTED.sub(_blank, FENCE.sub(_blank, text))):
        yield Span(file, first_line + text.count("\n", 0, match.start()), " ".join(match[1].split()))


def page_spans() -> Iterator[Span]:
    for page in PAGES:
        yield from spans_of(page.read_text(encoding="utf-8"), page)


def docstring_spans(tree: Tree) -> Iterator[Span]:
    for file, line, text in tree.docstrings:
        yield from spans_of(text, file, line)


def blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """First line, language and text of each fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        yield text.count("\n", 0, match.start()) + 2, match[2], match[3]


def command_spans() -> Iterator[Span]:
    """The command lines in fenced blocks of pages."""
    for page in PAGES:
        for first, language, block in blocks(page):
            joined = block.replace("\\\n", "  ")
            for number, line in enumerate(joined.splitlines()):
                if language in ("", "sh", "bash") and re.match(r"(\$ )?(multipod|make|python) \S", line):
                    yield Span(page, first + number, line.removeprefix("$ "))


# What a span may be, and what may be wrong with it: each function returns a reason, empty where all is well.


def trouble(span: Span, tree: Tree) -> str:
    """Why what the span names is not there; empty where it is, or where the span names nothing."""
    text = span.text
    first = text.split()[0]
    if text in FOREIGN or first in FOREIGN or first in OTHER_PROGRAMS:
        return ""
    if first in ("multipod", "make", "python") and " " in text:
        return command_trouble(text, tree)
    if re.match(r"--?[a-z]", text):
        return option_trouble(text, tree)
    if PATH.fullmatch(text) or FOLDER.fullmatch(text):
        return path_trouble(span, tree)
    if DOTTED.fullmatch(text):
        return dotted_trouble(text, tree)
    if IDENTIFIER.fullmatch(text) or HYPHENED.fullmatch(text):
        return word_trouble(text, tree)
    return expression_trouble(text, tree) or changes_trouble(text, tree)


def word_trouble(text: str, tree: Tree) -> str:
    known = text in tree.words or text in FOREIGN or hasattr(builtins, text) or tree.formed.fullmatch(text)
    return "" if known or (PLACEHOLDER.fullmatch(text) and "_" not in text) else f"no {text} in the code"


def expression_trouble(text: str, tree: Tree) -> str:
    """What is wrong with the names in a Python expression, or in a text that is none."""
    if re.match(r"[A-Z_]+=", text):
        return ""  # a setting of the environment
    theirs = "|".join(sorted(tree.foreign | OTHER_PACKAGES))
    for name in TELLING.findall(re.sub(rf"\S*/\S*|\b({theirs})\.[\w.]+(\[.*\])?", "", text.removeprefix("-D"))):
        is_formula = any(len(part) == 1 for part in name.split("_"))
        if not is_formula and (wrong := word_trouble(name, tree)):
            return wrong
    try:
        parsed = ast.parse(text, mode="eval")
    except SyntaxError:
        return ""
    for node in ast.walk(parsed):
        wrong = ""
        if isinstance(node, ast.Attribute) and DOTTED.fullmatch(ast.unparse(node)):
            wrong = dotted_trouble(ast.unparse(node), tree)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            wrong = word_trouble(node.func.id, tree)
        elif isinstance(node, ast.keyword) and node.arg:
            wrong = word_trouble(node.arg, tree)
        if wrong:
            return wrong
    return ""


def dotted_trouble(text: str, tree: Tree) -> str:
    """What is wrong with `multipod.x.y`, `module.name`, `Class.member`, `layout.field` or `variable.attribute`."""
    root, *rest = text.split(".")
    if root == "multipod":
        return "" if tree.holds(text) else "leads nowhere"
    if root in tree.members and root not in tree.ends:
        return "" if rest[0] in tree.members_of(root) or rest[0] in FOREIGN else f"{root} has no {rest[0]}"
    heads = [text.rsplit(".", count)[0] for count in range(len(rest) + 1)]
    modules = [(head, dotted) for head in heads for dotted in tree.ends.get(head, [])]
    if any(tree.holds(dotted + text[len(head) :]) for head, dotted in modules):
        return ""
    if not field_trouble(text, tree):
        return ""
    if root in tree.foreign or root in OTHER_PACKAGES or root in FOREIGN or hasattr(builtins, root):
        return ""
    if modules and root not in tree.parameters:
        return f"{modules[0][1]} has no {rest[-1]}"
    if root not in tree.identifiers:
        return f"no {root} in the code"
    return next((f"nothing has a member {part}" for part in rest if part not in tree.attributes | FOREIGN), "")


def field_trouble(text: str, tree: Tree) -> str:
    """What is wrong with a field of a recipe: `layout.mesh`, `model.tables.place`."""
    root, *rest = text.split(".")
    if root not in tree.members_of("Recipe") | {"recipe"}:
        return f"a recipe has no {root}"
    rooms = FIELD_ROOMS.get(root, ["recipe"])
    known = set().union(*map(tree.members_in, rooms), *(tree.room_texts[room] for room in rooms))
    return next((f"no class in {rooms} has a field {part}" for part in rest if part not in known), "")


def changes_trouble(text: str, tree: Tree) -> str:
    """What is wrong with `field=value,field=value`; the fields may be words of `--layout`."""
    if not re.fullmatch(r"[a-z_][\w.]*=\S*(,[a-z_][\w.]*(=\S*)?)*", text):
        return ""
    for name in re.findall(r"(?:^|(?<=,))[a-z_][\w.]*(?==)", text):
        wrong = dotted_trouble(name, tree) if "." in name else word_trouble(name, tree)
        if wrong:
            return wrong
    return ""


def path_trouble(span: Span, tree: Tree) -> str:
    """What is wrong with a path. `NAME` in it stands for any name; a file that a run writes is in the code's texts."""
    text, is_code = span.text, span.file.suffix == ".py"
    pattern = PLACEHOLDER.sub("*", text.removeprefix("./"))
    if text.startswith(("~", "/")):
        return ""
    bases = [ROOT, ROOT / "src", PACKAGE, ROOT / "c", ROOT / "docs", span.file.parent]
    bases += [parent for parent in span.file.parents if parent.is_relative_to(PACKAGE)]
    if any(next(base.glob(pattern), None) for base in bases):
        return ""
    anywhere = () if is_code and text.endswith(".py") else (*CODE, "docs")  # docstrings say the folder of a far file
    if any(next((ROOT / folder).rglob(pattern), None) for folder in anywhere):
        return ""
    if text.endswith((".py", ".md", ".c", ".h", ".cc")):
        return "no such file"
    if text.endswith("/"):
        return folder_trouble(pattern, tree)
    name = pattern.split("/")[-1]
    written = {other for other in tree.written if "*" in name or not re.match(r"\*+\.", other)}
    return "" if any(fnmatch(name.replace("*", "x"), other) for other in written) else "no such file"


def folder_trouble(pattern: str, tree: Tree) -> str:
    """What is wrong with a folder that is not in the repository: one that a run writes, or a part of a model."""
    first, *others = pattern.rstrip("/").split("/")
    if first in (*CODE, "docs") or f"multipod.{first}" in tree.modules:
        return "no such folder"
    known = tree.words | tree.written
    return next(
        ("no such folder" for part in (first, *others) if part not in known and not re.match(r"[*\d]", part)), ""
    )


def command_trouble(text: str, tree: Tree) -> str:
    """What is wrong with a command line of `multipod`, `make` or `python`; nothing is run."""
    program, *words = split(text)
    if program == "multipod":
        return multipod_trouble(words, tree)
    if program == "make":
        makefile = ROOT / ("c/Makefile" if "-C" in words else "Makefile")
        targets = [word for word in words if "=" not in word and word not in ("...", "-C", "c")]
        known = re.findall(r"^([\w-]+):", makefile.read_text(encoding="utf-8"), re.MULTILINE)
        return next((f"no target {word}" for word in targets if word not in known), "")
    if words[0].startswith(("benchmarks/", "examples/", "c/")) and not (ROOT / words[0]).is_file():
        return f"no {words[0]}"
    return option_trouble(text, tree)


def split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def multipod_trouble(words: list[str], tree: Tree) -> str:
    """What click would say of the words behind `multipod`; options may stand without their values."""
    command: click.Command = cli
    context = click.Context(cli, info_name="multipod")
    while isinstance(command, click.Group) and words and re.match(r"[a-z]", words[0]):
        name, *words = words
        if name not in command.list_commands(context) and not command.get_command(context, name):
            return f"{context.command_path} has no command {name}"
        command = command.get_command(context, name) or command
        context = click.Context(command, parent=context, info_name=name)
    own, _, rest = (words, "", []) if "--" not in words else (words[: words.index("--")], "", words)
    if wrong := options_trouble(own, context) or values_trouble(own, context, tree):
        return wrong
    return multipod_trouble(rest[rest.index("--") + 1 :], tree) if rest else ""


def options_trouble(words: list[str], context: click.Context) -> str:
    """Options among `words` that neither the command of `context` nor, behind dots, one of its own commands has."""
    commands = [context.command]
    if isinstance(context.command, click.Group):
        commands += [context.command.get_command(context, name) for name in context.command.list_commands(context)]
    params = [param for command in commands for param in command.params]
    known = {"--help", "-h", *(name for param in params for name in (*param.opts, *param.secondary_opts))}
    named = [word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)]
    return next((f"no option {name}" for name in named if name not in known), "")


def values_trouble(words: list[str], context: click.Context, tree: Tree) -> str:
    """What is wrong with recipes, fields and layouts among the words of a command."""
    params = {param.name for param in context.command.params}
    if wrong := settings_trouble(words, tree):
        return wrong
    if "recipe" in params and words and HYPHENED.fullmatch(words[0]) and words[0] not in tree.texts:
        return f"no recipe {words[0]}"
    return ""


def settings_trouble(words: list[str], tree: Tree) -> str:
    """What is wrong with the values of `--set` and `--layout`."""
    for option, value in pairwise(words):
        if option == "--layout" and not value.startswith(("-", "...")) and not PLACEHOLDER.search(value):
            wrong = layout_trouble(value)
        elif option == "--set" and "." in value.partition("=")[0] and not PLACEHOLDER.search(value):
            wrong = field_trouble(value.partition("=")[0], tree)
        else:
            continue
        if wrong:
            return wrong
    return ""


def layout_trouble(text: str) -> str:
    try:
        layout_changes(text)
    except MultipodError as error:
        return str(error)
    return ""


def option_trouble(text: str, tree: Tree) -> str:
    """Options that no program of this tree takes."""
    named = re.findall(r"(?<!\S)--[a-z][\w-]*", text)
    unknown = [f"no option {name}" for name in named if name not in tree.options | FOREIGN]
    return unknown[0] if unknown else settings_trouble(text.split(), tree)


def report(spans: Iterator[Span], tree: Tree) -> list[str]:
    """The spans that name what is not there, with the reasons, but for those in `NOT_YET`."""
    wrong = [(span, trouble(span, tree)) for span in spans]
    return [f"{span}: {why}" for span, why in wrong if why and (span.page, span.text) not in NOT_YET]


def test_pages_name_what_is_there(tree):
    assert report(page_spans(), tree) == []


def test_docstrings_name_what_is_there(tree):
    assert report(docstring_spans(tree), tree) == []


def test_command_lines_are_commands(tree):
    assert report(command_spans(), tree) == []


def test_nothing_is_excused_that_is_mended(tree):
    wrong = {(span.page, span.text) for span in [*page_spans(), *docstring_spans(tree)] if trouble(span, tree)}
    assert NOT_YET - wrong == set()


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


def test_the_way_of_a_gradient_names_functions_with_their_files():
    """Lines such as `over_data   step/specs.py   what happens`."""
    page = ROOT / "docs" / "ARCHITECTURE.md"
    found = re.findall(r"^ *(\w+(?:\.\w+)?) +([\w/]+\.py) ", "\n".join(text for *_, text in blocks(page)), re.MULTILINE)
    assert len(found) > 5
    for name, file in found:
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
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict) and ast.unparse(node.target) == name:
            return len(node.value.keys)
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
    (rf"# Tour: {NUMBER} files", lambda: len(tour_stops()[0])),
]


@pytest.mark.parametrize(("phrase", "count"), COUNTS, ids=range(len(COUNTS)))
def test_counts_are_true(phrase, count):
    stated = [match for page in PAGES for match in re.findall(phrase, page.read_text(encoding="utf-8"))]
    assert [word for word in stated if number(word) != count()] == []
