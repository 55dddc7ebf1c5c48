"""The files that a user means: a path, a pattern such as `train-*`, or braces as shells and WebDataset have them."""

import glob
import os
import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import TypeVar

from multipod.data.files.addresses import address_of, bring_near, find_files
from multipod.errors import DataError

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
SHOWN = 5
Found = TypeVar("Found")


def match_files(where: str, what: str) -> tuple[Path, ...]:
    """The files behind a path, a pattern such as `train-*`, or braces (`expand_braces`), each once.

    Those of an address such as `s3://bucket/train-*` are brought near first (`multipod.data.files.addresses`). Without
    braces they are in the order of their names; with braces, in the order in which these say them.

    Raises:
      DataError: there is none, one cannot be read or fetched, or one that braces name is missing.
    """
    address = address_of(where)
    if address:
        return tuple(bring_near(_of_each(address, what, find_files)))
    return tuple(_of_each(where, what, _matches))


def _of_each(where: str, what: str, matches: Callable[[str], Sequence[Found]]) -> list[Found]:
    """What matches each of the patterns that braces stand for."""
    patterns = expand_braces(where)
    found = {pattern: matches(pattern) for pattern in patterns}
    missing = [pattern for pattern, files in found.items() if not files]
    if len(missing) == len(found):
        raise DataError(f"{where}: no {what} there.{_near_to(patterns[0])} Name files or a pattern.")
    if missing:
        listed = ", ".join(missing[:SHOWN]) + (f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else "")
        raise DataError(
            f"{where}: {len(missing):,} of {len(patterns):,} {what} are missing: {listed}. "
            "Bring them, or name those that are there."
        )
    return list(dict.fromkeys(file for files in found.values() for file in files))


def expand_braces(text: str) -> tuple[str, ...]:
    """The texts that braces stand for, as in a shell: `{a,b}` is each of its parts, `{000..123}` each number.

    Numbers have as many digits as the wider of the two ends, and may fall. Braces may stand inside braces. Those
    around anything else, or without their other half, are part of the name.
    """
    span = _first_group(text)
    if span is None:
        return (text,)
    first, last = span
    inner, rest = text[first + 1 : last], expand_braces(text[last + 1 :])
    parts = _parts(inner)
    if (numbers := _RANGE.fullmatch(inner)) is not None:
        choices = _numbers(*numbers.groups())
    elif len(parts) > 1:
        choices = [one for part in parts for one in expand_braces(part)]
    else:
        choices = [f"{{{one}}}" for one in expand_braces(inner)]
    return tuple(text[:first] + choice + end for choice, end in product(choices, rest))


def _first_group(text: str) -> tuple[int, int] | None:
    """The places of the first brace that has its other half, and of that."""
    opened: list[int] = []
    groups = []
    for place, letter in enumerate(text):
        if letter == "{":
            opened.append(place)
        elif letter == "}" and opened:
            groups.append((opened.pop(), place))
    return min(groups, default=None)


def _parts(inner: str) -> list[str]:
    """The text cut at the commas that are in no braces."""
    parts, depth = [""], 0
    for letter in inner:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _numbers(first: str, last: str) -> list[str]:
    width = max(len(first), len(last)) if first.startswith("0") or last.startswith("0") else 0
    low, high = int(first), int(last)
    step = 1 if low <= high else -1
    return [str(number).zfill(width) for number in range(low, high + step, step)]


def _matches(pattern: str) -> list[Path]:
    """The files of one pattern; of a name without wildcards, the file if it is there."""
    name = os.path.expanduser(pattern)
    found = [name] if os.path.isfile(name) else sorted(glob.glob(name, recursive=True))
    return [path for path in map(Path, found) if path.is_file()]


def _near_to(pattern: str) -> str:
    """The nearest folder on disks that is there, and what it has."""
    if address_of(pattern):
        return ""
    near = Path(pattern).expanduser()
    while not near.exists():
        near = near.parent
    names = sorted(path.name for path in near.iterdir())[:6] if near.is_dir() else []
    what = f" with {', '.join(names)}" if names else ", empty" if near.is_dir() else ""
    return f" What is there is {near}{what}."
