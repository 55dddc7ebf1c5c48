"""Text in files, one document a line, as rows for a masked language model or for span corruption; extra `text`."""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from multipod.data.files.disk import Damaged
from multipod.data.files.formats import open_records
from multipod.data.packing import pack_rows
from multipod.data.sequences import SpanCorruptor, SpanRows, TokenFile, token_file
from multipod.data.stdlib_text import SPECIAL, START, MaskedRows, Masking, decode_tokens, encode, train_tokenizer
from multipod.errors import DataError
from multipod.pytrees import IdRange


@dataclass(frozen=True)
class TextFiles:
    """Lines of text files, cut into tokens that were trained on the training text.

    The task is told by `spans`: without, rows of `length` tokens hold several documents (`packing`), and `masking`
    hides tokens; with, each document is cut at `length`, and spans of it are hidden. Tokens are kept in memory.

    Attributes:
      train_files: a file or a pattern of files to learn from.
      test_files: the same, to be judged by.
      length: tokens in a row.
      vocab: entries of the vocabulary, `SPECIAL` and all 256 bytes among them; sentinels of spans are its last.
      masking: which tokens are to be told; BERT's 76 of 512 are `Masking(most=76)`.
      spans: hide spans instead.
      density: of tokens in hidden spans.
      mean: tokens of a hidden span.
      split_seed: of what the test rows hide; not the seed of a run.
    """

    train_files: str = ""
    test_files: str = ""
    length: int = 128
    vocab: int = 4096
    masking: Masking = field(default_factory=Masking)
    spans: bool = False
    density: float = 0.15
    mean: float = 3.0
    split_seed: int = 0

    def __post_init__(self) -> None:
        least = len(SPECIAL) + 256 + (self.corruption.sizes(self.length)[1] if self.spans else 0)
        if self.vocab < least:
            raise DataError(
                f"text files: vocab={self.vocab} has no room for all bytes and sentinels. Take {least} or more."
            )

    @property
    def corruption(self) -> SpanCorruptor:
        """How spans are hidden."""
        return SpanCorruptor(self.vocab - 1, self.density, self.mean)

    def train(self) -> MaskedRows | SpanRows:
        """The rows to learn from."""
        return self._source("train_files")

    def test(self) -> MaskedRows | SpanRows:
        """The rows to be judged by."""
        return self._source("test_files")

    def ids_given(self) -> dict[str, IdRange]:
        """Tokens of the vocabulary."""
        names = ("source", "target", "label") if self.spans else ("token", "label")
        return dict.fromkeys(names, IdRange((self.vocab,), "vocab"))

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens as text, sentinels as <NUMBER>."""
        return decode_tokens(_tokenizer(self.train_files, self._words), tokens, self._words if self.spans else 0)

    @property
    def _words(self) -> int:
        """Entries of the vocabulary before the sentinels."""
        return self.vocab - (self.corruption.sizes(self.length)[1] if self.spans else 0)

    def _source(self, part: str) -> MaskedRows | SpanRows:
        where = getattr(self, part)
        if not where or not self.train_files:
            raise DataError(
                f"the recipe does not say where its text is. Give --set data.{part}=FILES, one document a line."
            )
        tokens = _tokens(where, self.train_files, self._words)
        if self.spans:
            return SpanRows(tokens, self.corruption, self.length, self.split_seed, start=START)
        pieces = [
            one[start : start + self.length]
            for one in (tokens[number] for number in range(len(tokens)))
            for start in range(0, len(one), self.length)
        ]
        rows = pack_rows({"token": pieces}, {"token": self.length})
        return MaskedRows(rows, self.masking, self.vocab, self.split_seed)


def _lines(where: str) -> list[str]:
    """The lines that are not empty and can be read."""
    records, lines = open_records(where, "lines"), []
    for number in range(len(records)):
        try:
            lines.append(records.record(number)["text"])
        except Damaged:
            continue  # of another encoding
    return [line for line in lines if line]


@lru_cache(maxsize=2)
def _tokenizer(where: str, vocab: int) -> object:
    return train_tokenizer(_lines(where), vocab)


@lru_cache(maxsize=4)
def _tokens(where: str, train: str, vocab: int) -> TokenFile:
    lines = _lines(where)
    if not lines:
        raise DataError(f"{where} has no line of text. Name files that have some.")
    return token_file([np.asarray(one) for one in encode(_tokenizer(train, vocab), lines)])
