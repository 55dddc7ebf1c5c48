"""Texts cut into tokens once: written to the user's cache, and mapped into memory from there.

A text is read, cut and written some records at a time, by one process of a host while the others wait; none ever
holds it whole. What is in the cache is found by the names, sizes, times and some bytes of the files, and by the
vocabulary.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from multipod import runtime
from multipod.data.files.disk import Damaged, read_at
from multipod.data.files.kept import made_once
from multipod.data.files.records import FilesOfRecords, Records
from multipod.data.sequences import TokenFile
from multipod.data.source import fingerprint
from multipod.data.text.vocabulary import Vocabulary
from multipod.errors import DataError

T = TypeVar("T")
AT_ONCE = 1000
LETTERS_AT_ONCE = 2**17
"""Texts, and letters of texts, that are cut together."""
_SAMPLE = 2**16


class KeptTokens(TokenFile):
    """Sequences in a folder of the cache, mapped into memory; another process that it is sent to maps them again."""

    folder: Path

    def __init__(self, folder: Path) -> None:
        ends = np.load(folder / "ends.npy", mmap_mode="r")
        count = int(ends[-1]) if len(ends) else 0
        kind = np.uint16 if (folder / "tokens.u2").exists() else np.int32
        path = folder / ("tokens.u2" if kind is np.uint16 else "tokens.i4")
        tokens = np.memmap(path, kind, "r", shape=(count,)) if count else np.zeros(0, kind)
        for name, value in (("folder", folder), ("tokens", tokens), ("ends", ends)):
            object.__setattr__(self, name, value)  # without reading all ends: they were written whole

    def __getitem__(self, number: int) -> np.ndarray:
        """The tokens of a sequence, int32."""
        return super().__getitem__(number).astype(np.int32)

    def __reduce__(self) -> Any:
        return KeptTokens, (self.folder,)


def keep_tokens(key: str, sequences: Iterable[np.ndarray], vocab: int) -> KeptTokens:
    """The sequences, of numbers below `vocab`, in the folder of the cache for this key; taken only if it is not there.

    Raises:
      DataError: see `multipod.data.files.kept.made_once`.
    """
    suffix = "u2" if vocab <= 2**16 else "i4"

    def make(folder: Path) -> None:
        folder.mkdir()
        lengths = [np.zeros(0, np.int64)]
        with (folder / f"tokens.{suffix}").open("wb") as out:
            for several in in_groups(sequences, AT_ONCE):
                out.write(np.concatenate(several).astype(suffix).tobytes())
                lengths.append(np.array([len(one) for one in several], np.int64))
        np.save(folder / "ends.npy", np.cumsum(np.concatenate(lengths)))

    return KeptTokens(made_once(tokens_folder() / key, make))


def tokens_folder() -> Path:
    """Where tokens are kept: `tokens` in the user's cache."""
    return runtime.index_cache().with_name("tokens")


def key_of(records: Records, *parts: str) -> str:
    """What tells the tokens of these records from all others: the files, and what is done to them."""
    facts = [records.identity()]
    if isinstance(records, FilesOfRecords):
        facts += map(_facts, records.files)
    return fingerprint([part.encode() for part in (*facts, *parts)])


def in_groups(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """The values in lists of so many, the last of fewer."""
    rest = iter(values)
    while group := list(islice(rest, size)):
        yield group


def cut_texts(texts: Iterable[str], vocabulary: Vocabulary) -> Iterator[np.ndarray]:
    """The tokens of each text; libraries need a hundred times the room of a text to cut it, so few are cut at once."""
    held: list[str] = []
    letters = 0
    for text in texts:
        held.append(text)
        letters += len(text)
        if letters >= LETTERS_AT_ONCE or len(held) == AT_ONCE:
            yield from vocabulary.encode(held)
            held, letters = [], 0
    yield from vocabulary.encode(held)


@dataclass(frozen=True)
class TextField:
    """The texts of records, one after the other, those left out that are empty or cannot be read.

    Attributes:
      records: where they are.
      field: their name; `a.b` is `b` in the group `a`.
      keep_empty: give an empty text in the place of each that cannot be read.
    """

    records: Records
    field: str = "text"
    keep_empty: bool = False

    def __iter__(self) -> Iterator[str]:
        for number in range(len(self.records)):
            text = ""
            with suppress(Damaged):  # of another encoding, say
                text = text_of(self.records, number, self.field)
            if text or self.keep_empty:
                yield text


def text_of(records: Records, number: int, field: str) -> str:
    """The text of one record.

    Raises:
      Damaged: it cannot be read.
      DataError: it has no such field, or one that is no text.
    """
    value: Any = records.record(number)
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            known = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise DataError(f"{records.name(number)} has no field {field!r}; it has {known}. Say which holds the text.")
        value = value[name]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise Damaged(f"it is not UTF-8: {error}") from error
    if not isinstance(value, str):
        raise DataError(f"{records.name(number)}: field {field!r} is {type(value).__name__}, no text. Name another.")
    return value


def _facts(path: Path) -> str:
    """Size, time and some bytes of a file: its first, middle and last."""
    facts = path.stat()
    places = (0, max(0, facts.st_size // 2), max(0, facts.st_size - _SAMPLE))
    some = fingerprint([read_at(path, place, _SAMPLE) for place in places])
    return f"{path.name} {facts.st_size} {facts.st_mtime_ns} {some}"
