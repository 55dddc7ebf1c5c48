"""What stands between back quotes in documents and docstrings, and why it would name nothing that is there."""

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
from tree_names import CODE, PACKAGE, ROOT, Tree

from multipod.cli.main import cli
from multipod.errors import MultipodError
from multipod.layout.text import layout_changes

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
REJECTED = re.compile(r"^\*\*Rejected\.\*\*.*?(?=^\s*$|\Z)", re.MULTILINE | re.DOTALL)
"""A paragraph of a design note about what was not built: it may name what is not there."""
THEIRS = re.compile(r"^\|[^|\n]*(?=\|)", re.MULTILINE)
"""The first cell of a table's row: on the pages `from-*.md` it is in another program's words."""
PATH = re.compile(r"[\w.*/-]+\.(?:py|md|c|h|cc|svg|json|jsonl|toml|html|yml|npy|txt|csv|ld|tar\.xz)")
FOLDER = re.compile(r"[\w./-]+/")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
HYPHENED = re.compile(r"[a-z]\w*(?:-\w+)+")
TELLING = re.compile(r"(?<![\w$%])(?:_*[A-Za-z]\w*_\w+|[A-Z][a-z]+[A-Z]\w*)")
"""What is a name wherever it stands: `update_spec`, `VectorSum`."""
PLACEHOLDER = re.compile(r"(?<![a-z0-9])[A-Z][A-Z_]+(?![a-z0-9])")
"""`NAME`, `DIR`: any word may stand there."""
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
    "experiment trackers": "WANDB_PROJECT COMET_PROJECT_NAME",
    "Kubernetes": "kubectl nvidia-h100-80gb google.com/tpu nvidia.com/gpu",
}
"""Words that are rightly not of this tree, under whose they are."""
FOREIGN = {word for words in ELSEWHERE.values() for word in words.split()} | {
    "make run",
    "multipod train digits --set optimizer.rat=0.2",  # docs/errors.md shows what is said of it
}


class Span(NamedTuple):
    """A text between back quotes, with where it stands."""

    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} `{self.text}`"


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def spans_of(text: str, file: Path, first_line: int = 1) -> Iterator[Span]:
    """What stands between back quotes in `text`, but for fenced blocks and what was rejected."""
    for match in SPAN.finditer(REJECTED.sub(_blank, FENCE.sub(_blank, text))):
        yield Span(file, first_line + text.count("\n", 0, match.start()), " ".join(match[1].split()))


def page_spans() -> Iterator[Span]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        yield from spans_of(THEIRS.sub(_blank, text) if page.name.startswith("from-") else text, page)


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
