"""Click records from the files that DLRM's and MLPerf's own programs write: .npz, one a day, and .bin.

DLRM's preparation of Criteo's logs leaves day_0_reordered.npz and so on (Kaggle's: one file), each with y [n],
X_int [n, 13] and X_cat [n, 26]: labels, counts before the logarithm, and ids numbered from 0. MLPerf's reference
makes three files of them, train_data.bin, test_data.bin and val_data.bin: label, counts and ids of an example
behind each other, 40 int32, which is the form of our records; the last two are the halves of the last day. Beside both
lies day_fea_count.npz, whose array counts [26] says how many ids each field has.

Source: github.com/facebookresearch/dlrm, data_utils.py and data_loader_terabyte.py.
"""

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from multipod.data.clicks.records import DESCRIPTION, RECORD_BYTES, write_description
from multipod.data.clicks.text import COLUMNS, DENSE, FIELDS
from multipod.errors import DataError

CHUNK = 1 << 16
"""Examples that are read at once."""

ARRAYS = {"y": 0, "X_int": DENSE, "X_cat": FIELDS}
"""The arrays of a .npz, and how many numbers an example has in each; 0 is one without a dim of its own."""

BINARY = ("train", "test", "val")
"""How the names of MLPerf's files begin, in the order in which they are records."""


def take(files: Sequence[Path], out: Path, rows: Sequence[int] = (), cut: int = 7) -> dict[str, int]:
    """Makes a folder of click records of published files; returns the examples of each of its parts.

    Args:
      files: .npz, one a day in their order, or one, which is cut into `cut` days; or MLPerf's .bin, which are
        linked and not copied. Beside those may be day_fea_count.npz.
      rows: of each field's table; empty takes them from day_fea_count.npz, or from the largest id of each field.
      cut: days that a single .npz is cut into.

    Raises:
      DataError: a file is none of these, or holds what no record can; nothing is described then.
    """
    if (out / DESCRIPTION).exists():
        raise DataError(f"{out} has click records already. Choose another --out.")
    data = [path for path in files if path.name != "day_fea_count.npz"]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise DataError(f"there is no file {', '.join(missing)}. Name files that DLRM's or MLPerf's programs wrote.")
    kinds = {path.suffix for path in data}
    if kinds not in ({".npz"}, {".bin"}):
        found = ", ".join(sorted(kinds)) or "nothing"
        raise DataError(f"clicks take: files of {found}. Give .npz, one a day, or .bin; text goes to `clicks prepare`.")
    out.mkdir(parents=True, exist_ok=True)
    known = _counts(files) if not rows else tuple(rows)
    if kinds == {".bin"}:
        parts, days, most = _link(data, out)
    else:
        parts, days, most = _unpack(data, out, cut)
    sizes = known or tuple(int(largest) + 1 for largest in most)
    outside = [f"field {k + 1} has id {most[k]:,}, and {sizes[k]:,} rows" for k in range(FIELDS) if most[k] >= sizes[k]]
    if outside:
        more = f" and {len(outside) - 3} more" if len(outside) > 3 else ""
        raise DataError(f"{out}: {'; '.join(outside[:3])}{more}. Give larger --rows, or the right day_fea_count.npz.")
    write_description(out, parts, days, sizes)
    return parts


def _counts(files: Sequence[Path]) -> tuple[int, ...]:
    """The ids of each field, from the first file that says them; empty where none does."""
    for path in files:
        if path.suffix == ".npz":
            with _opened(path) as archive:
                if "counts.npy" in archive.namelist():
                    with archive.open("counts.npy") as member:
                        counts = np.lib.format.read_array(member)
                    if counts.shape != (FIELDS,):
                        raise DataError(f"{path}: counts have the shape {counts.shape}, not ({FIELDS},).")
                    return tuple(map(int, counts))
    return ()


def _link(files: Sequence[Path], out: Path) -> tuple[dict[str, int], list[int], np.ndarray]:
    """Links MLPerf's files; returns the parts, the days, and the largest id of each field.

    The training file counts as a day, the other two as the last one.
    """
    named = {kind: path for kind in BINARY for path in files if path.name.startswith(kind)}
    if len(named) != len(files) or not {"train", "test"} <= named.keys():
        raise DataError(
            f"clicks take: {', '.join(path.name for path in files)}. Give train_data.bin, test_data.bin and, for the "
            "other half of its day, val_data.bin, each once."
        )
    counts, most = {}, np.zeros(FIELDS, np.int64)
    for kind, path in named.items():
        size = path.stat().st_size
        if not size or size % RECORD_BYTES:
            raise DataError(f"{path} has {size:,} bytes, no multiple of {RECORD_BYTES}: it is cut off or no such file.")
        counts[kind] = size // RECORD_BYTES
        records = np.memmap(path, np.int32, "r").reshape(-1, COLUMNS)
        for first in range(0, counts[kind], CHUNK):
            most = np.maximum(most, _largest(path, first, records[first : first + CHUNK]))
    last = counts["test"] + counts.get("val", 0)
    if "val" in counts and counts["test"] != -(-last // 2):
        raise DataError(
            f"{named['test']} has {counts['test']:,} examples and {named['val']} {counts['val']:,}: they are no halves "
            "of a day. Take the files of one preparation."
        )
    parts = {}
    for number, (kind, path) in enumerate(named.items()):
        parts[f"part-{number:05}.bin"] = counts[kind]
        (out / f"part-{number:05}.bin").symlink_to(path.absolute())
    return parts, [counts["train"], last], most


def _unpack(files: Sequence[Path], out: Path, cut: int) -> tuple[dict[str, int], list[int], np.ndarray]:
    """Writes a part for each .npz; returns the parts, the days, and the largest id of each field."""
    parts, most = {}, np.zeros(FIELDS, np.int64)
    for number, path in enumerate(files):
        written, name = 0, f"part-{number:05}.bin"
        with (out / name).open("wb") as part:
            for records in _records(path):
                most = np.maximum(most, _largest(path, written, records))
                part.write(records.tobytes())
                written += len(records)
        if not written:
            raise DataError(f"{path} has no examples. Leave it out.")
        parts[name] = written
    days = list(parts.values())
    if len(days) == 1:
        edges = np.linspace(0, days[0], cut + 1).astype(int)
        days = np.diff(edges).tolist()
    return parts, days, most


def _records(path: Path) -> Iterator[np.ndarray]:
    """The examples of a .npz as records int32 [n, 40], some at a time: a day of Terabyte's has 200 million."""
    with _opened(path) as archive:
        lacking = [name for name in ARRAYS if f"{name}.npy" not in archive.namelist()]
        if lacking:
            raise DataError(f"{path} has no array {', '.join(lacking)}. Give what DLRM's preparation wrote.")
        opened = [archive.open(f"{name}.npy") for name in ARRAYS]
        heads = [_head(path, name, member) for name, member in zip(ARRAYS, opened, strict=True)]
        lengths = {length for length, _ in heads}
        if len(lengths) > 1:
            raise DataError(f"{path}: its arrays have {sorted(lengths)} examples. It is damaged: copy it again.")
        for first in range(0, heads[0][0], CHUNK):
            count = min(CHUNK, heads[0][0] - first)
            columns = []
            for member, (_, dtype), width in zip(opened, heads, ARRAYS.values(), strict=True):
                found = np.frombuffer(member.read(count * max(1, width) * dtype.itemsize), dtype)
                columns.append(found.reshape(count, max(1, width)).astype(np.int64))
            yield _fitting(path, first, np.concatenate(columns, 1))


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as .npz: {error}. Copy it again.") from error


def _head(path: Path, name: str, member: IO[bytes]) -> tuple[int, np.dtype]:
    """The examples and the dtype of an array in a .npz, of which the numbers are read next."""
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read(member)
    width = ARRAYS[name]
    wanted = shape[1:] == ((width,) if width else ())
    if not wanted or by_columns or dtype.kind not in "iuf":
        raise DataError(
            f"{path}: {name} is {dtype}{list(shape)}{', by columns' if by_columns else ''}, not numbers "
            f"[n{f', {width}' if width else ''}] row by row. Give what DLRM's preparation wrote."
        )
    return int(shape[0]), dtype


def _fitting(path: Path, first: int, records: np.ndarray) -> np.ndarray:
    """The records as int32, if they fit."""
    fits = (np.abs(records) < 2**31).all(1)
    if not fits.all():
        raise DataError(f"{path}: example {first + int(np.argmin(fits)):,} has a number that is no int32.")
    return records.astype(np.int32)


def _largest(path: Path, first: int, records: np.ndarray) -> np.ndarray:
    """The largest id of each field; labels must be 0 or 1, and ids not negative."""
    label, ids = records[:, 0], records[:, 1 + DENSE :]
    wrong = ~((label == 0) | (label == 1)) | (ids < 0).any(1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(
            f"{path}: example {first + row:,} has label {label[row]} and smallest id {ids[row].min()}. Labels are 0 or "
            "1, ids count from 0: this is another file, or a damaged one."
        )
    return ids.max(0).astype(np.int64)
