"""Wikipedia, or any text, for BERT's pre-training: as text, or in rows that were packed before."""

from dataclasses import dataclass, field

import numpy as np

from multipod.data.files.records import Records
from multipod.data.source import HostBatch, Source
from multipod.data.stdlib_text import Masking
from multipod.data.text.corpus import Corpus, open_text
from multipod.data.text.kept_tokens import TextField, keep_tokens, key_of
from multipod.data.text.sentence_pairs import SentencePairs
from multipod.data.text.sentences import Documents, cut_sentences, plan_rows
from multipod.errors import DataError
from multipod.pytrees import IdRange

PACKED = {
    "token": "input_ids",
    "segment": "input_mask",
    "type": "segment_ids",
    "masked": "masked_lm_positions",
    "label": "masked_lm_ids",
    "weight": "masked_lm_weights",
    "next": "next_sentence_labels",
}
"""What rows are made of, and what the files of BERT's own code and of MLPerf call it."""


@dataclass(frozen=True)
class PretrainingText:
    """Rows for `multipod.models.bert.Bert` with both heads.

    Files whose records have the fields of `PACKED` are taken as they are: TFRecords of BERT's own code and of MLPerf,
    or the same in another format. All others are text, which is cut into tokens once, kept in the cache, and paired
    anew in each epoch (`multipod.data.text.sentence_pairs`).

    Attributes:
      train_files: a file, a folder or a pattern of files to learn from.
      test_files: the same, to be judged by.
      format: of the files, a name of `FORMATS`; empty: by what is there, and lines of text where that is not known.
      text_field: of a record of text.
      documents: `blank`, one sentence a record and one without text between documents, as BERT's own files are; or
        `record`, one document a record, which is then cut into sentences.
      length: tokens in a row.
      masking: which tokens are to be told, of text; `most` of packed rows, too.
      vocabulary: a file of those that `multipod.data.text.vocabulary` lists; empty: trained on the training text.
      vocab: entries of a trained vocabulary, and the most that a named one may have.
      split_seed: of what evaluation sees of text; not the seed of a run.
    """

    train_files: str = ""
    test_files: str = ""
    format: str = ""
    text_field: str = "text"
    documents: Documents = "blank"
    length: int = 512
    masking: Masking = field(default_factory=lambda: Masking(most=76))
    vocabulary: str = ""
    vocab: int = 30_522
    split_seed: int = 0

    def __post_init__(self) -> None:
        if self.length < 5 or self.masking.most < 1:
            raise DataError(
                f"pre-training text: rows of {self.length} tokens, {self.masking.most} of them told. A row holds two "
                "sentences and three marks: take 5 or more, and tell at least one."
            )

    def train(self) -> Source:
        """The rows to learn from."""
        return self._source("train_files")

    def test(self) -> Source:
        """The rows to be judged by."""
        return self._source("test_files")

    def example(self) -> HostBatch:
        """One row of zeros: its shapes and types, without any file."""
        wide = dict.fromkeys(("token", "type", "segment"), self.length)
        told = dict.fromkeys(("masked", "label", "weight"), min(self.masking.most, self.length))
        rows = {name: np.zeros((1, size), np.int32) for name, size in (wide | told).items()}
        return rows | {"next": np.zeros(1, np.int32)}

    def ids_given(self) -> dict[str, IdRange]:
        """Tokens of the vocabulary."""
        words = IdRange((self.vocab,), "vocab")
        return {"token": words, "label": words, "type": IdRange((2,), "")}

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens as text; of packed rows only where `vocabulary` is named."""
        return self._corpus.cutter().decode(tokens[1:])

    @property
    def _corpus(self) -> Corpus:
        return Corpus(((self.train_files, self.text_field),), self.format, self.vocabulary, self.vocab)

    def _source(self, part: str) -> Source:
        where = getattr(self, part)
        if not where or not self.train_files:
            raise DataError(
                f"the recipe does not say where its text is. Give --set data.{part}=FILES: text, one sentence a line "
                "and an empty line behind each document (or data.documents=record), or packed TFRecords."
            )
        records = open_text(where, self.format)
        if set(PACKED.values()) <= set(records.record(0)):
            return PackedRows(records, self.length, min(self.masking.most, self.length))
        vocabulary = self._corpus.cutter()
        key = key_of(records, self.text_field, self.documents, vocabulary.identity)
        texts = TextField(records, self.text_field, keep_empty=True)
        tokens = keep_tokens(key, cut_sentences(texts, self.documents, vocabulary), vocabulary.size)
        rows = plan_rows(tokens, key, self.length - 3)
        if len(rows) < 2 or rows[-1, 2] == 0:
            raise DataError(
                f"{where}: {len(rows):,} rows of {int(len(rows) > 0)} document. The next sentence is told from those "
                "of other documents: put an empty line behind each, or set data.documents=record."
            )
        return SentencePairs(tokens, rows, self.length, self.masking, vocabulary, self.split_seed)


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Records with the fields of `PACKED`, under our names, int32; a weight that is not zero counts.

    Attributes:
      records: the files.
      length: tokens in a row.
      most: predictions in a row.
    """

    records: Records
    length: int
    most: int

    def __len__(self) -> int:
        return len(self.records)

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The rows with these numbers.

        Raises:
          DataError: one is damaged, lacks a field, or is of another length.
        """
        found = self.records.read(numbers)
        batch = {name: self._column(found.get(field), field, numbers) for name, field in PACKED.items()}
        batch["weight"] = (batch["weight"] != 0).astype(np.int32)
        return {name: array.astype(np.int32) for name, array in batch.items()}

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself."""
        return batch

    def identity(self) -> str:
        """The identity of the records."""
        return self.records.identity()

    def _column(self, values: np.ndarray | None, field: str, numbers: np.ndarray) -> np.ndarray:
        wide = self.length if field in ("input_ids", "input_mask", "segment_ids") else self.most
        shape = (len(numbers),) if field == "next_sentence_labels" else (len(numbers), wide)
        if values is None or (values.dtype == object and len(numbers)) or values.size != np.prod(shape):
            what = "is missing" if values is None else f"has {np.size(values[0])} numbers"
            raise DataError(
                f"{self.records.name(int(numbers[0]))}: {field} {what}, and rows are of {self.length} tokens with "
                f"{self.most} predictions. Set data.length and data.masking.most as the files are."
            )
        return values.reshape(shape)
