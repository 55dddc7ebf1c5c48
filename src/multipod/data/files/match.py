"""The files that a user means: a path, a pattern such as `train-*`, or braces as shells and WebDataset have them."""

import glob
import os
import re
from itertools import product
from pathlib import Path

from multipod.errors import DataError

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_ADDRESS = re.compile(r"(?!hub:)([a-z][a-z0-9+.-]+):/")  # one slash is left where it has been a Path
SHOWN = 5


def match_files(where: str, what: str) -> tuple[Path, ...]:
    """The files behind a path, a pattern such as `train-*`, or braces (`expand_braces`), each once.

    Without braces they are in the order of their names; with braces, in the order in which these say them.

    Raises:
      DataError: there is none, one cannot be read, one that braces name is missing, or it is an address of a store.
    """
    refuse_address(where)
    patterns = expand_braces(where)
    found = {pattern: _matches(pattern) for pattern in patterns}
    missing = [pattern for pattern, files in found.items() if not files]
    if len(missing) == len(found):
        near = Path(patterns[0]).expanduser()
        while not near.exists():
            near = near.parent
        raise DataError(f"{where}: no {what} there. What is there is {near}{_some_of(near)}. Name files or a pattern.")
    if missing:
        listed = ", ".join(missing[:SHOWN]) + (f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else "")
        raise DataError(
            f"{where}: {len(missing):,} of {len(patterns):,} {what} are missing: {listed}. "
            "Bring them, or name those that are there."
        )
    return tuple(dict.fromkeys(path for files in found.values() for path in files))


def refuse_address(where: str) -> None:
    """Refuses the address of an object store, where a path is wanted: examples are read by their places in files.

    Raises:
      DataError: says how to bring the files near.
    """
    found = _ADDRESS.match(where)
    if found is not None:
        copy = {"s3": "aws s3 sync", "gs": "gcloud storage rsync -r"}.get(found[1], "rclone copy")
        raise DataError(
            f"{where}: data are read from disks, in any order, and this is an address. Copy them near ({copy} ...), or "
            "mount the store (mountpoint-s3, gcsfuse), and name that folder."
        )


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


def _some_of(folder: Path) -> str:
    if not folder.is_dir():
        return ""
    names = sorted(path.name for path in folder.iterdir())[:6]
    return f" with {', '.join(names)}" if names else ", empty"
