"""Text in files, one document a record, as rows for a masked language model or for span corruption; extra `text`."""

from dataclasses import dataclass, field

import numpy as np

from multipod.data.order import draw_for_rows
from multipod.data.sequences import SpanCorruptor, SpanRows
from multipod.data.source import HostBatch
from multipod.data.stdlib_text import SPECIAL, Masking
from multipod.data.text.corpus import Corpus, open_text
from multipod.data.text.kept_tokens import KeptTokens, TextField, cut_texts, keep_tokens, key_of
from multipod.data.text.text_tokens import TextTokens
from multipod.data.text.vocabulary import Vocabulary
from multipod.errors import DataError
from multipod.pytrees import IdRange


@dataclass(frozen=True)
class TextFiles:
    """Texts of files, cut into tokens once and kept in the user's cache.

    The task is told by `spans`: without, rows are `length` tokens that follow each other, so that a row holds several
    documents, which do not see each other, and `masking` hides tokens; with, each document is cut at `length`, and
    spans of it are hidden.

    Attributes:
      train_files: a file or a pattern of files to learn from.
      test_files: the same, to be judged by.
      format: of the files, a name of `FORMATS`; empty: by what is there, and lines of text where that is not known.
      text_field: of a record that holds the text.
      vocabulary: a file of those that `multipod.data.text.vocabulary` lists; empty: trained on the training text.
      length: tokens in a row.
      vocab: entries of the vocabulary, of a trained one `SPECIAL` and all 256 bytes among them; sentinels of spans are
        its last.
      masking: which tokens are to be told; BERT's 76 of 512 are `Masking(most=76)`.
      spans: hide spans instead.
      density: of tokens in hidden spans.
      mean: tokens of a hidden span.
      split_seed: of what the test rows hide; not the seed of a run.
    """

    train_files: str = ""
    test_files: str = ""
    format: str = ""
    text_field: str = "text"
    vocabulary: str = ""
    length: int = 128
    vocab: int = 4096
    masking: Masking = field(default_factory=Masking)
    spans: bool = False
    density: float = 0.15
    mean: float = 3.0
    split_seed: int = 0

    def __post_init__(self) -> None:
        least = len(SPECIAL) + 256 + (self.corruption.sizes(self.length)[1] if self.spans else 0)
        if self.vocab < least and not self.vocabulary:
            raise DataError(
                f"text files: vocab={self.vocab} has no room for all bytes and sentinels. Take {least} or more."
            )

    @property
    def corruption(self) -> SpanCorruptor:
        """How spans are hidden."""
        return SpanCorruptor(self.vocab - 1, self.density, self.mean)

    def train(self) -> "MaskedTokens | SpanRows":
        """The rows to learn from."""
        return self._source("train_files")

    def test(self) -> "MaskedTokens | SpanRows":
        """The rows to be judged by."""
        return self._source("test_files")

    def ids_given(self) -> dict[str, IdRange]:
        """Tokens of the vocabulary."""
        names = ("source", "target", "label") if self.spans else ("token", "label")
        return dict.fromkeys(names, IdRange((self.vocab,), "vocab"))

    def text_tokens(self) -> TextTokens | None:
        """What a task is cut with that follows a pre-training by spans; None without spans."""
        if not self.spans:
            return None
        vocabulary = self._cutter()
        words = self._words

        def decode(tokens: np.ndarray) -> str:
            return vocabulary.decode(tokens[tokens < words])

        return TextTokens(vocabulary.encode, decode, vocabulary.start, vocabulary.end, self.corruption.sentinel)

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens as text, sentinels as <NUMBER>, and special ones by their role."""
        vocabulary = self._cutter()
        names = {vocabulary.mask: "[MASK]", vocabulary.start: "[START]", vocabulary.end: "[END]"}
        parts: list[str] = []
        kept: list[int] = []
        for token in [*tokens[tokens != 0].tolist(), -1]:
            sentinel = self.spans and token >= self._words
            if token < 0 or token in names or sentinel:
                parts.append(vocabulary.decode(np.array(kept, np.int32)))
                parts += [f"<{token}>" if sentinel else names[token]] if token >= 0 else []
                kept = []
            else:
                kept.append(token)
        return "".join(parts)

    @property
    def _corpus(self) -> Corpus:
        return Corpus(((self.train_files, self.text_field),), self.format, self.vocabulary, self._words, self.spans)

    def _cutter(self) -> Vocabulary:
        """The vocabulary.

        Raises:
          DataError: see `Corpus.cutter`; or its own sentinels are not the last entries of `vocab`.
        """
        vocabulary = self._corpus.cutter()
        last = vocabulary.size + vocabulary.sentinels
        if vocabulary.sentinels and last != self.vocab:
            raise DataError(
                f"vocabulary {self.vocabulary}: its sentinels end at {last:,}, and the data say vocab={self.vocab:,}, "
                f"which puts other sentinels there. Set data.vocab={last}, and the model's vocab to as many or more."
            )
        return vocabulary

    @property
    def _words(self) -> int:
        """Entries of the vocabulary before the sentinels."""
        return self.vocab - (self.corruption.sizes(self.length)[1] if self.spans else 0)

    def _source(self, part: str) -> "MaskedTokens | SpanRows":
        where = getattr(self, part)
        if not where or not self.train_files:
            raise DataError(
                f"the recipe does not say where its text is. Give --set data.{part}=FILES, one document a line."
            )
        vocabulary, records = self._cutter(), open_text(where, self.format)
        texts = TextField(records, self.text_field)
        key = key_of(records, self.text_field, vocabulary.identity)
        tokens = keep_tokens(key, cut_texts(texts, vocabulary), vocabulary.size)
        if not len(tokens.tokens):
            raise DataError(f"{where} has no line of text. Name files that have some.")
        if self.spans:
            return SpanRows(tokens, self.corruption, self.length, self.split_seed, start=vocabulary.start)
        return MaskedTokens(tokens, self.length, self.masking, vocabulary, self.split_seed)


@dataclass(frozen=True, eq=False)
class MaskedTokens:
    """Rows of `length` tokens that follow each other in kept tokens; the last may be shorter.

    `segment` numbers the documents of a row from 1, `position` counts within each. Training hides other tokens each
    time; read as they are, they are hidden by `seed`.
    """

    tokens: KeptTokens
    length: int
    masking: Masking
    vocabulary: Vocabulary
    seed: int

    def __len__(self) -> int:
        return -(-len(self.tokens.tokens) // self.length)

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The rows with these numbers, masked the same way each time."""
        draws = [np.random.Generator(np.random.Philox(key=[self.seed, n])).random((self.length, 3)) for n in numbers]
        return self._masked(numbers, np.reshape(draws, (-1, self.length, 3)))

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself: `read_augmented` hides other tokens."""
        return batch

    def read_augmented(
        self, numbers: np.ndarray, rows: np.ndarray, rng: np.random.Generator, out: HostBatch | None = None
    ) -> HostBatch:
        """The rows with other tokens masked."""
        return self._masked(numbers, draw_for_rows(rows, 3 * self.length, rng).reshape(-1, self.length, 3))

    def identity(self) -> str:
        """How many rows there are, and of which tokens."""
        return f"{len(self):,} rows of {self.length} tokens {self.tokens.folder.name}"

    def _masked(self, numbers: np.ndarray, draws: np.ndarray) -> HostBatch:
        rows = {name: np.zeros((len(numbers), self.length), np.int32) for name in ("token", "segment", "position")}
        for row, number in enumerate(numbers.tolist()):
            self._write(number, *(array[row] for array in rows.values()))
        words = self.vocabulary
        first = 1 + max(words.mask, words.start, words.end)
        return self.masking.apply(rows, draws, words.size, words.mask, first)

    def _write(self, number: int, token: np.ndarray, segment: np.ndarray, position: np.ndarray) -> None:
        begin = number * self.length
        some = np.asarray(self.tokens.tokens[begin : begin + self.length])
        ends, places = self.tokens.ends, begin + np.arange(len(some))
        lowest, highest = np.searchsorted(ends, [begin, begin + len(some)], side="right")
        stops = np.asarray(ends[lowest : highest + 1])
        document = np.searchsorted(stops, places, side="right")
        firsts = np.concatenate([[begin], stops])[document]
        token[: len(some)], segment[: len(some)], position[: len(some)] = some, 1 + document, places - firsts
