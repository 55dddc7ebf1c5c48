"""A translation task that every Python has: from a function of the standard library to the first line of its docstring.

Needs the extra `text`.
"""

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from multipod.data.packing import pack_rows, shift_right
from multipod.data.pairs import Pairs
from multipod.data.sequences import token_file
from multipod.data.source import ArraySource, HostBatch
from multipod.data.stdlib_text import (
    END,
    SPECIAL,
    START,
    Tokenizer,
    decode_tokens,
    encode,
    is_test_file,
    read_files,
    train_tokenizer,
)
from multipod.errors import RecipeError
from multipod.pytrees import IdRange


class DocstringPair(NamedTuple):
    """A function without its docstring, and the first line of it."""

    code: str
    summary: str


def pairs(text: str) -> Iterator[DocstringPair]:
    """The documented functions and methods of a Python file, in order; none if it does not parse."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in sorted(found, key=lambda node: node.lineno):
        summary = (ast.get_docstring(node) or "").partition("\n")[0].strip()
        if not summary:
            continue
        doc = node.body[0]
        above, below = lines[node.lineno - 1 : doc.lineno - 1], lines[(doc.end_lineno or doc.lineno) : node.end_lineno]
        yield DocstringPair(textwrap.dedent("\n".join([*above, *below])), summary)


@dataclass(frozen=True)
class Docstrings:
    """Pairs of code and summary as packed rows for an encoder-decoder (`multipod.models.transformer`).

    One byte-pair vocabulary for both sides is trained on the training files; a file is on the same side as in
    `StdlibText`. Code is cut at `source_length` tokens, a summary, with its end token, at `target_length`. Rows
    hold several pairs, which do not see each other (segments), and their loss counts no padding. With `buckets` each
    row holds one pair instead, and batches hold pairs of like lengths (`multipod.data.pairs`).

    Attributes:
      source_length, target_length: tokens in a row.
      vocab: entries of the vocabulary, `SPECIAL` and all 256 bytes among them.
      files: which files of the library, as a pattern of `pathlib.Path.glob`.
      test_share: the share of files kept for testing, about.
      buckets: lengths of sources in a batch, growing, the last `source_length`; empty: packed rows.
    """

    source_length: int = 128
    target_length: int = 32
    vocab: int = 1024
    files: str = "*.py"
    test_share: float = 0.15
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.vocab < len(SPECIAL) + 256:
            raise RecipeError(f"docstrings: vocab={self.vocab} has no room for all bytes. Take 260 or more.")
        if self.buckets and self.buckets[-1] != self.source_length:
            raise RecipeError(
                f"docstrings: the last of buckets={self.buckets} is not source_length={self.source_length}, at which "
                "code is cut. Make them equal."
            )
        if self.source_length < 1 or self.target_length < 2:
            raise RecipeError(
                f"docstrings: rows of {self.source_length} and {self.target_length} tokens. A source needs 1 or more, "
                "a target 2: one and its end."
            )

    def ids_given(self) -> dict[str, IdRange]:
        """Tokens of the vocabulary, the same on both sides."""
        return dict.fromkeys(("source", "target", "label"), IdRange((self.vocab,), "vocab"))

    def train(self) -> ArraySource | Pairs:
        """The rows to learn from."""
        return self._source("train")

    def test(self) -> ArraySource | Pairs:
        """The rows to be judged by."""
        return self._source("test")

    def _source(self, part: str) -> ArraySource | Pairs:
        if not self.buckets:
            return ArraySource(_rows(self)[part])
        source, label = _cut(self, _pairs(self)[part])
        bounds = tuple(
            (length, self.target_length) for length in (self.buckets if part == "train" else self.buckets[-1:])
        )
        return Pairs(token_file(source), token_file(label), bounds, START)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the rows were made with."""
        return _tokenizer(self)

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens as text."""
        return decode_tokens(self.tokenizer(), tokens)

    def test_pairs(self) -> list[DocstringPair]:
        """The pairs that the test rows hold, to be translated one by one."""
        return _pairs(self)["test"]


@lru_cache(maxsize=4)
def _pairs(spec: Docstrings) -> dict[str, list[DocstringPair]]:
    sides: dict[str, list[DocstringPair]] = {"train": [], "test": []}
    for name, text in read_files(spec.files).items():
        sides["test" if is_test_file(name, spec.test_share) else "train"] += pairs(text)
    for part, found in sides.items():
        if not found:
            raise RecipeError(f"docstrings: no documented function of {spec.files!r} is {part} text. Take more files.")
    return sides


@lru_cache(maxsize=4)
def _tokenizer(spec: Docstrings) -> Tokenizer:
    return train_tokenizer([text for pair in _pairs(spec)["train"] for text in pair], spec.vocab)


@lru_cache(maxsize=4)
def _rows(spec: Docstrings) -> dict[str, HostBatch]:
    return {part: _packed(spec, found) for part, found in _pairs(spec).items()}


def _cut(spec: Docstrings, found: list[DocstringPair]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Tokens of code and of summaries, these with their end token."""
    tokenizer = _tokenizer(spec)
    source = [one[: spec.source_length] for one in encode(tokenizer, [pair.code for pair in found])]
    summaries = encode(tokenizer, [pair.summary for pair in found])
    return source, [np.append(one[: spec.target_length - 1], np.int32(END)) for one in summaries]


def _packed(spec: Docstrings, found: list[DocstringPair]) -> HostBatch:
    source, label = _cut(spec, found)
    rows = pack_rows({"source": source, "label": label}, {"source": spec.source_length, "label": spec.target_length})
    segment, position = rows.pop("label_segment"), rows.pop("label_position")
    target = shift_right(rows["label"], segment, position, START)
    return rows | {
        "target": target,
        "target_segment": segment,
        "target_position": position,
        "weight": (segment != 0).astype(np.int32),
    }
