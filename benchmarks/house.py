"""Counts of the code's shape, a column for each checkout: `python benchmarks/house.py [CHECKOUT ...]`."""

import ast
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
LEANING = re.compile(r"(The same|As|Of|Those|That|Its)\b")


def trees(root: Path) -> Iterator[tuple[Path, ast.Module, int]]:
    """Each file of the package, its syntax tree and its lines."""
    for file in sorted((root / "src" / "multipod").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        yield file, ast.parse(text), text.count("\n")


def body_lines(node: FUNCTION) -> int:
    """Lines of a function without its docstring."""
    first = node.body[0]
    documented = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return node.end_lineno - node.lineno + 1 - (first.end_lineno - first.lineno + 1 if documented else 0)


def spread(sizes: list[int]) -> str:
    """Median, ninth tenth and maximum."""
    return f"{statistics.median(sizes):.0f} / {sorted(sizes)[len(sizes) * 9 // 10]} / {max(sizes)}"


def count(root: Path) -> dict[str, object]:
    """What is counted, by name."""
    package = list(trees(root))
    nodes = [node for _, tree, _ in package for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, FUNCTION)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    methods = {node: sum(isinstance(inner, FUNCTION) for inner in node.body) for node in classes}
    inner = {
        (id(tree), node.lineno)
        for _, tree, _ in package
        for function in ast.walk(tree)
        if isinstance(function, FUNCTION)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    public = Counter(
        node.name
        for _, tree, _ in package
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    )
    lines = [size for _, _, size in package]
    sizes = list(map(body_lines, functions))
    firsts = [(ast.get_docstring(node) or "").split("\n")[0] for node in [*functions, *classes]]
    folders = Counter(file.parent for file, _, _ in package if file.name != "__init__.py")
    largest = max(classes, key=lambda node: methods[node])
    uses_of_any = sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)
    return {
        "files": len(package),
        "lines": sum(lines),
        "file median / p90 / max": spread(lines),
        "function median / p90 / max": spread(sizes),
        "most methods of a class": f"{methods[largest]} ({largest.name})",
        "classes of over 20 methods": sum(n > 20 for n in methods.values()),
        "classes of over 200 lines": sum(node.end_lineno - node.lineno >= 200 for node in classes),
        "imports inside functions": len(inner),
        "`Any` per 1,000 lines": f"{1000 * uses_of_any / sum(lines):.1f}",
        "public class names defined twice": sum(n > 1 for n in public.values()),
        "first lines that need a neighbour": sum(bool(LEANING.match(line)) for line in firsts),
        "files of the fullest folder": max(folders.values()),
    }


def main() -> None:
    """Prints a table in Markdown."""
    roots = [Path(name) for name in sys.argv[1:]] or [Path(__file__).parents[1]]
    columns = [count(root) for root in roots]
    print("| | " + " | ".join(root.name or "." for root in roots) + " |")
    print("|---|" + "---|" * len(roots))
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(str(column[name]) for column in columns) + " |")


if __name__ == "__main__":
    main()
