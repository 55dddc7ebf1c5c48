"""From one format to another, shard by shard; what is written stays, so an interrupted conversion goes on."""

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multipod.data.files.array_record import write_array_record
from multipod.data.files.disk import Damaged
from multipod.data.files.parquet import write_parquet
from multipod.data.files.records import Record, Records
from multipod.data.files.tar import WHOLE_NUMBERS
from multipod.data.files.tfrecord import write_tfrecord
from multipod.data.order import generator
from multipod.errors import DataError, nearest

NOTE = "multipod-convert.json"
"""In the target's folder: what is converted there, and which records could not be read."""


ARRAYS = "arrays"


@dataclass(frozen=True)
class Converted:
    """What came of a conversion: records written, now and before, and those that could not be read, with why."""

    records: int
    shards: int
    damaged: dict[str, str]


def convert(
    source: Records,
    target: Path,
    kind: str,
    per_shard: int = 1000,
    tell: Callable[[int], None] = lambda done: None,
    shuffle: int | None = None,
) -> Converted:
    """Writes all records of `source` into the folder `target`, `per_shard` in a file, in order.

    A shard is written beside its place and then renamed, so that one that bears its name is whole. Called again on
    the same source, it goes on with the first shard that is missing. Damaged records are left out.

    Args:
      source: the records.
      target: a folder; made if need be.
      kind: a name of `WRITERS`.
      per_shard: records in a file; of `arrays`, which are one file a field, in one go.
      tell: called with the number of records done.
      shuffle: a seed: the records in a random order; None: in their own.

    Raises:
      DataError: the folder holds another conversion, or the format cannot hold these fields.
    """
    if kind not in WRITERS:
        raise DataError(f"convert: records cannot be written as {kind!r}. {nearest(kind, WRITERS)}")
    if per_shard < 1:
        raise DataError(f"convert: {per_shard} records in a file. Give 1 or more.")
    what = {"source": source.identity(), "kind": kind, "per_shard": per_shard}
    note = _begin(target, what | ({} if shuffle is None else {"shuffle": shuffle}))
    numbers = np.arange(len(source)) if shuffle is None else generator(shuffle, 0).permutation(len(source))
    if kind == ARRAYS:
        return write_arrays(source, numbers, target, per_shard, tell)
    damaged: dict[str, str] = note["damaged"]
    shards = -(-len(source) // per_shard)
    suffix, write = WRITERS[kind]
    for shard in range(shards):
        path = target / f"part-{shard:05d}-of-{shards:05d}{suffix}"
        stop = min((shard + 1) * per_shard, len(source))
        if not path.exists():
            beside = path.with_name(f".{path.name}.part")
            beside.unlink(missing_ok=True)
            records = list(_readable(source, numbers[shard * per_shard : stop], shard * per_shard, damaged, tell))
            if records:
                write(beside, records)
            else:
                continue
            _write_note(target, note)
            os.replace(beside, path)
        tell(stop)
    return Converted(len(source) - len(damaged), shards, damaged)


def write_arrays(
    source: Records, numbers: np.ndarray, target: Path, at_once: int, tell: Callable[[int], None]
) -> Converted:
    """Writes these records as one array for each field, `FIELD.npy`; see `convert`. Goes on behind what is done.

    Raises:
      DataError: a field holds no numbers, or is not of one shape; or a record is damaged.
    """
    first = source.read(numbers[:1])
    wrong = [name for name, array in first.items() if array.dtype.kind not in "iufb"]
    if wrong:
        raise DataError(f"convert: {', '.join(wrong)} hold no numbers, as arrays must. Convert to another format.")
    counter = target / ".done"
    done = int(counter.read_text()) if counter.is_file() else 0
    files = {name: target / f"{name}.npy" for name in first}
    shapes = {name: (len(numbers), *array.shape[1:]) for name, array in first.items()}
    made = {
        name: np.lib.format.open_memmap(path, "r+" if done else "w+", first[name].dtype, shape=shapes[name])
        for name, path in files.items()
    }
    while done < len(numbers):
        some = numbers[done : done + at_once]
        for name, array in source.read(some).items():
            if (array.dtype, array.shape[1:]) != (made[name].dtype, made[name].shape[1:]):
                raise DataError(
                    f"convert: {source.name(int(some[0]))} or one of the next {len(some) - 1} has a {name} of another "
                    f"shape or type than the first. Convert to another format."
                )
            made[name][done : done + len(some)] = array
        for array in made.values():
            array.flush()
        done += len(some)
        counter.write_text(str(done))
        tell(done)
    return Converted(len(numbers), len(files), {})


def _begin(target: Path, what: dict[str, Any]) -> dict[str, Any]:
    """The note of the target's folder: a new one, or that of the same conversion."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        if (target / NOTE).is_file():
            note = json.loads((target / NOTE).read_text())
            changed = [
                f"{name} was {note.get(name)}, now {value}" for name, value in what.items() if note.get(name) != value
            ]
            if changed:
                raise DataError(f"{target} holds another conversion: {'; '.join(changed)}. Name another folder.")
            return note
        if any(target.iterdir()):
            raise DataError(f"{target} is not empty, and no conversion began there. Name another folder.")
    except (OSError, json.JSONDecodeError) as error:
        raise DataError(f"{target} cannot be written: {error}. Name another folder.") from error
    note = {**what, "damaged": {}}
    _write_note(target, note)
    return note


def _write_note(target: Path, note: dict[str, Any]) -> None:
    beside = target / f".{NOTE}.part"
    beside.write_text(json.dumps(note, indent=1) + "\n")
    os.replace(beside, target / NOTE)


def _readable(
    source: Records, numbers: np.ndarray, done: int, damaged: dict[str, str], tell: Callable[[int], None]
) -> Iterator[Record]:
    for place, number in enumerate(numbers.tolist(), done):
        try:
            yield source.record(number)
        except Damaged as error:
            damaged[source.name(number)] = str(error)
        if place % 50 == 0:
            tell(place)


def _write_tar(path: Path, records: Sequence[Record]) -> None:
    """Members are named by the shard and the place, fields by the suffix; numbers as text, arrays as JSON."""
    stem = path.name.strip(".").split("-of-")[0]
    with tarfile.open(path, "w") as archive:
        for place, record in enumerate(records):
            for field, value in _members(record).items():
                member = tarfile.TarInfo(f"{stem}-{place:06d}.{field}")
                member.size = len(value)
                archive.addfile(member, io.BytesIO(value))


def _members(record: Record) -> dict[str, bytes]:
    members, rest = {}, {}
    for name, value in record.items():
        plain = name.rsplit("/", 1)[-1]
        if isinstance(value, bytes):
            members[_suffix(value) or plain] = value
        elif plain in (*WHOLE_NUMBERS, "class") and np.ndim(value) == 0:
            members["cls"] = str(int(value)).encode()
        else:
            rest[name] = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return members | ({"json": json.dumps(rest).encode()} if rest else {})


def _suffix(value: bytes) -> str:
    """The suffix by which archives name an image of this kind; empty if it is none of them."""
    known = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp"}
    return next((suffix for begin, suffix in known.items() if value.startswith(begin)), "")


WRITERS: dict[str, tuple[str, Any]] = {
    "tfrecord": (".tfrecord", write_tfrecord),
    "array-record": (".array_record", write_array_record),
    "tar": (".tar", _write_tar),
    "parquet": (".parquet", write_parquet),
    ARRAYS: (".npy", None),
}
"""Formats that can be written: the suffix of a shard, and what writes one; `arrays` have none (`write_arrays`)."""
