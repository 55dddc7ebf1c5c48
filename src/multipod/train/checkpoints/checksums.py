"""Checksums of the files of a checkpoint: written beside them once it is committed, compared before it is read.

Orbax reads only the files it needs and notices no change of their bytes; a checkpoint that was copied, cut or
flipped on the way must not be trained on. Each of `parts` processes reads its share of the files.
"""

import json
import os
import zlib
from pathlib import Path

CHECKSUMS = "checksums"


def name(part: int) -> str:
    """The file that part `part` of the checksums is in."""
    return f"{CHECKSUMS}.json" if part == 0 else f"{CHECKSUMS}.{part}.json"


def seal(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Writes the size and the CRC-32 of every file of a committed checkpoint beside them, or of one in `parts`."""
    beside = folder / f"{name(part)}.part"
    beside.write_text(json.dumps(_checksums(folder, part, parts), indent=0))
    os.replace(beside, folder / name(part))


def damaged_files(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint, or with one in `parts`: a line each, nothing if all is well.

    Files without a checksum count as good: a process was killed between commit and seal.
    """
    expected: dict[str, list[int]] = {}
    for sealed in sorted(folder.glob(f"{CHECKSUMS}*.json")):
        try:
            expected |= json.loads(sealed.read_text())
        except ValueError:
            return [f"{sealed.name} is damaged"]
    wrong = []
    for file, (size, crc) in sorted(expected.items())[part::parts]:
        path = folder / file
        if not path.is_file():
            wrong.append(f"{file} is missing")
        elif path.stat().st_size != size:
            wrong.append(f"{file} has {path.stat().st_size} bytes, not {size}")
        elif _crc(path) != crc:
            wrong.append(f"{file} has {size} bytes that are not those saved")
    return wrong


def is_sealed(folder: Path) -> bool:
    """Whether there are checksums at all."""
    return (folder / name(0)).is_file()


def _checksums(folder: Path, part: int, parts: int) -> dict[str, list[int]]:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith(CHECKSUMS))
    return {str(file.relative_to(folder)): [file.stat().st_size, _crc(file)] for file in files[part::parts]}


def _crc(file: Path) -> int:
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc
