"""Documents cut into sentences, and the rows that sentences which follow each other fill."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from multipod.data.files.kept import made_once
from multipod.data.text.kept_tokens import KeptTokens, cut_texts, in_groups
from multipod.data.text.vocabulary import Vocabulary

Documents = Literal["blank", "record"]
"""How documents are told apart: by records without text between them, or each record is one."""

_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]*[^\W\d_a-z])")


def sentences(text: str) -> list[str]:
    """The sentences of a document: cut at line ends, and behind `.`, `!`, `?` where a capital letter follows."""
    return [one for line in text.splitlines() for one in map(str.strip, _END.split(line)) if one]


def cut_sentences(texts: Iterable[str], documents: Documents, vocabulary: Vocabulary) -> Iterator[np.ndarray]:
    """The tokens of each sentence, and an empty sequence behind the last of each document."""
    return cut_texts(_marked(texts, documents), vocabulary)


def _marked(texts: Iterable[str], documents: Documents) -> Iterator[str]:
    """The sentences, with an empty one behind each document."""
    open_document = False
    for text in texts:
        yield from (several := sentences(text) if documents == "record" else [text.strip()] if text.strip() else [])
        open_document |= bool(several)
        if open_document and (documents == "record" or not several):
            yield ""
            open_document = False
    if open_document:
        yield ""


def plan_rows(tokens: KeptTokens, key: str, room: int) -> np.ndarray:
    """int64 [rows, 3], kept on disk: the first sentence of each row, the one behind its last, and its document.

    A row has as many following sentences of one document as fit `room` tokens, at least one.
    """

    def make(path: Path) -> None:
        with path.open("wb") as out:
            for several in in_groups(_rows(tokens.ends, room), 10_000):
                out.write(np.array(several, np.int64).tobytes())

    path = made_once(tokens.folder.with_name(f"{key}-rows-{room}.i8"), make)
    size = path.stat().st_size
    return np.memmap(path, np.int64, "r").reshape(-1, 3) if size else np.zeros((0, 3), np.int64)


def _rows(ends: np.ndarray, room: int) -> Iterator[tuple[int, int, int]]:
    first = used = document = before = number = 0
    for block in range(0, len(ends), 10_000):
        for end in np.asarray(ends[block : block + 10_000]).tolist():
            length, before = end - before, end
            if number > first and (not length or used + length > room):
                yield first, number, document
                first, used = number, 0
            if not length:
                first, document = number + 1, document + 1
            used += length
            number += 1
    if number > first:
        yield first, number, document
