"""Files that are whole or not there."""

import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def save(file: str | Path, parts: Iterable[bytes]) -> None:
    """Writes `parts` to a file, one after the other.

    A file of that name is replaced when the new one is whole, and stays as it is if anything fails before, be it in
    making the parts. What is no plain file, such as a pipe or a device, is written to.

    Raises:
      OSError: it cannot be written.
    """
    file = Path(file)
    if file.exists() and not file.is_file():
        with file.open("wb") as out:
            out.writelines(parts)
        return
    file = Path(os.path.realpath(file))  # behind a link the file is replaced, not the link
    beside = file.with_name(f".{file.name[:100]}.{secrets.token_hex(4)}.part")
    try:
        with beside.open("xb") as out:
            out.writelines(parts)
        beside.replace(file)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
