"""The table of what goes with what as a page: `python -m multipod.layout.matrix > docs/layouts-matrix.md`."""

from multipod.layout.compatible import CONFLICTS, FEATURES

HEAD = """# What goes with what

Printed from `multipod.layout.compatible` by `python -m multipod.layout.matrix > docs/layouts-matrix.md`. A letter is
the reason below for which two things exclude each other; where there is none they go together. `multipod show` says
what a layout rules out, and every command refuses what is excluded here with the reason and the remedy.
"""


def page() -> str:
    """The whole page, Markdown."""
    return "\n".join([HEAD, *_matrix(), "", *_reasons(), ""])


def _matrix() -> list[str]:
    """A row and a column for each feature that some other excludes."""
    names = [name for name in FEATURES if any(name in (*c.these, *c.those) for c in CONFLICTS)]
    columns = [str(number) for number in range(1, len(names) + 1)]
    lines = [_line(["", *columns]), _line([":--", *[":-:"] * len(names)])]
    for number, name in enumerate(names, 1):
        cells = [_cell(name, other) for other in names]
        lines.append(_line([f"{number} {FEATURES[name].title}", *cells]))
    return lines


def _cell(one: str, other: str) -> str:
    return " ".join(_letter(number) for number, conflict in enumerate(CONFLICTS) if conflict.parts(one, other))


def _letter(number: int) -> str:
    return chr(ord("a") + number)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _reasons() -> list[str]:
    lines = [_line(["", "what excludes what", "why", "instead"]), _line([":--"] * 4)]
    for number, conflict in enumerate(CONFLICTS):
        sides = f"{_titles(conflict.these)} **with** {_titles(conflict.those)}"
        lines.append(_line([_letter(number), sides, conflict.reason, conflict.remedy]))
    return lines


def _titles(names: tuple[str, ...]) -> str:
    return "; ".join(FEATURES[name].title for name in names)


if __name__ == "__main__":
    print(page(), end="")
