"""What this tree holds by name, read by `ast` without importing it: modules, classes, words, options, written files."""

import ast
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "multipod"
CODE = ("src", "tests", "benchmarks", "examples", "c")
UNREAD = {"__pycache__", "build", "test_documents.py", "document_names.py"}
"""Not read: what was built, and the tests that list words which are not this tree's."""


def code_files(pattern: str, *folders: str) -> list[Path]:
    """The files of that pattern under `folders` of the repository, sorted."""
    return sorted(file for folder in folders for file in (ROOT / folder).rglob(pattern) if not UNREAD & {*file.parts})


def parse(file: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def docstrings(body: list[ast.stmt]) -> Iterator[ast.Constant]:
    """The docstring of a body, and the texts that stand below its assignments to document them."""
    for statement in body:
        match statement:
            case ast.Expr(value=ast.Constant(value=str())):
                yield statement.value


def foreign_roots(node: ast.AST) -> list[str]:
    """What an import of another package makes known, such as `jax`, `np` or `PartitionSpec`."""
    if isinstance(node, ast.Import):
        return [part for alias in node.names for part in (alias.asname, alias.name.split(".")[0]) if part]
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] != "multipod":
        return [node.module.split(".")[0], *(alias.asname or alias.name for alias in node.names)]
    return []


def bound_names(statement: ast.stmt) -> list[str]:
    """The names that a statement of a module or class binds."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [statement.name]
        case ast.Assign():
            return [node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)]
        case ast.AnnAssign() if isinstance(statement.target, ast.Name):
            return [statement.target.id]
        case ast.If() | ast.Try() | ast.With():
            inner = [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt)]
            return [name for node in inner for name in bound_names(node)]
    return []


def formed_text(node: ast.JoinedStr) -> str:
    """An f-string with a zero character for each value."""
    return "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)


class Tree:
    """Everything that documents may name.

    Attributes:
      modules: the names that each module of the package binds or imports, by its dotted name; imported ones with
        where they come from, its own with an empty text.
      members: methods and fields of each class, without those of its bases.
      rooms: the rooms that have a class of that name.
      identifiers: every name in the code of `CODE`, C included.
      room_texts: the texts of each room, among them old names of fields.
      texts: every text in the Python code that is no docstring; an f-string has zero characters for its values.
      attributes: what stands behind a dot somewhere.
      parameters: what a function takes somewhere.
      foreign: first names of other packages that the code imports, and what it calls them.
      docstrings: file, first line and text of every docstring.
    """

    def __init__(self) -> None:
        self.modules: dict[str, dict[str, str]] = {}
        self.members: dict[str, set[str]] = {}
        self.bases: dict[str, set[str]] = {}
        self.rooms: dict[str, set[str]] = {}
        self.identifiers: set[str] = set()
        self.room_texts: dict[str, set[str]] = {}
        self.texts: set[str] = set()
        self.attributes: set[str] = set()
        self.parameters: set[str] = set()
        self.foreign: set[str] = set()
        self.docstrings: list[tuple[Path, int, str]] = []
        for file in code_files("*.py", *CODE):
            tree = parse(file)
            self.identifiers.add(file.stem)
            documents = self._read_words(file, tree)
            if file.is_relative_to(PACKAGE):
                self._read_module(file, tree)
            self.docstrings += [(file, node.lineno, node.value) for node in documents]
        for file in [*code_files("*.[ch]", "c", "src"), *code_files("*.cc", "src")]:
            text = re.sub(r"/\*.*?\*/|//[^\n]*", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
            self.identifiers.update(re.findall(r"\b[A-Za-z_]\w*", text))
        self.attributes.update(*self.members.values())
        self.identifiers |= self.attributes | self.parameters

    def _read_words(self, file: Path, tree: ast.Module) -> list[ast.Constant]:
        """Takes identifiers and texts; returns the docstrings."""
        texts, documents = [], list(docstrings(tree.body))
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                self.identifiers.add(node.id)
            elif isinstance(node, ast.Attribute):
                self.attributes.add(node.attr)
            elif isinstance(node, ast.Constant):
                texts.append(node)
            elif isinstance(node, ast.arg):
                self.parameters.add(node.arg)
            elif isinstance(node, ast.keyword):
                self.identifiers.add(node.arg or "")
            elif isinstance(node, ast.alias):
                self.identifiers.update([*node.name.split("."), node.asname or ""])
            elif isinstance(node, ast.JoinedStr):
                self.texts.add(formed_text(node))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.identifiers.add(node.name)
                documents += docstrings(node.body)
        excused = {*map(id, documents)}
        texts_here = {node.value for node in texts if isinstance(node.value, str) and id(node) not in excused}
        self.texts |= texts_here
        if file.is_relative_to(PACKAGE):
            self.room_texts.setdefault(file.relative_to(PACKAGE).parts[0], set()).update(texts_here)
        return documents

    def _read_module(self, file: Path, tree: ast.Module) -> None:
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        module = self.modules[".".join(["multipod", *parts]).removesuffix(".__init__")] = {}
        for node in ast.walk(tree):
            self.foreign.update(foreign_roots(node))
            if isinstance(node, ast.ImportFrom):
                module.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
            elif isinstance(node, ast.ClassDef):
                self._read_class(node)
                self.rooms.setdefault(node.name, set()).add(parts[0])
        module.update(dict.fromkeys((name for statement in tree.body for name in bound_names(statement)), ""))

    def _read_class(self, node: ast.ClassDef) -> None:
        members = self.members.setdefault(node.name, set())
        for statement in node.body:
            members.update(bound_names(statement))
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self":
                members.add(inner.attr)
        bases = {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
        self.bases.setdefault(node.name, set()).update(bases - {node.name})

    def members_of(self, name: str) -> set[str]:
        """The methods and fields of a class, those of its bases in this tree included."""
        return self.members.get(name, set()).union(*map(self.members_of, self.bases.get(name, ())))

    def members_in(self, room: str) -> set[str]:
        """The methods and fields of all classes of a room."""
        return set().union(*(self.members[name] for name, rooms in self.rooms.items() if room in rooms))

    def holds(self, dotted: str) -> bool:
        """Whether a dotted name that begins with `multipod` leads somewhere, as far as its parts are this tree's."""
        parts = dotted.split(".")
        depth = max(n for n in range(len(parts) + 1) if n == 0 or ".".join(parts[:n]) in self.modules)
        if depth in (0, len(parts)):
            return depth > 0
        name, *rest = parts[depth:]
        source = self.modules[".".join(parts[:depth])].get(name)
        if source:
            return not source.startswith("multipod.") or self.holds(".".join([source, *rest]))
        return source == "" and (not rest or name not in self.members or rest[0] in self.members_of(name))

    @cached_property
    def words(self) -> set[str]:
        """Identifiers, parts of modules' names, and the words in texts of the code without spaces: `tree-packing`."""
        parts = (part for dotted in self.modules for part in dotted.split("."))
        spoken = (word for text in self.texts if " " not in text for word in re.findall(r"[\w-]*\w", text))
        return self.identifiers.union(parts, spoken)

    @cached_property
    def formed(self) -> re.Pattern[str]:
        """What an f-string of the code can become, if it is one word with five letters of its own."""
        shapes = {text for text in self.texts if "\0" in text and re.fullmatch(r"[\w.\0-]+", text)}
        shapes = {text for text in shapes if len(re.findall("[a-z]", text)) >= 5}
        return re.compile("|".join(r"[\w.-]+".join(map(re.escape, text.split("\0"))) for text in sorted(shapes)))

    @cached_property
    def written(self) -> set[str]:
        """Names of files that stand in texts of the code, such as `metrics.jsonl`; `*` for what is filled in."""
        found = (re.findall(r"[\w.*-]+", text.replace("\0", "*")) for text in self.texts)
        return {name for names in found for name in names if re.search(r"[a-z]{3}", name)}

    @cached_property
    def ends(self) -> dict[str, list[str]]:
        """The dotted names of modules under each of their ends: `goodput` and `plan.goodput`."""
        ends: dict[str, list[str]] = {}
        for dotted in self.modules:
            parts = dotted.split(".")[1:]
            for start in range(len(parts)):
                ends.setdefault(".".join(parts[start:]), []).append(dotted)
        return ends

    @cached_property
    def options(self) -> set[str]:
        """Every `--option` that a program of this tree takes, those of benchmarks included."""
        return {name for text in self.texts if text.startswith("-") for name in re.findall(r"--?[\w-]+", text)}
