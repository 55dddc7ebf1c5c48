"""The text of a recipe: its files, its vocabulary, and the tokens of both parts, which are kept on disk."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from multipod.data.files.formats import open_records
from multipod.data.files.kept import made_once
from multipod.data.files.records import Records
from multipod.data.source import fingerprint
from multipod.data.text.kept_tokens import TextField, key_of, tokens_folder
from multipod.data.text.vocabulary import Vocabulary, open_vocabulary, train_vocabulary
from multipod.errors import DataError


@dataclass(frozen=True)
class Corpus:
    """Where texts are and how they are cut.

    Attributes:
      places: of the training text, which a vocabulary is trained on if none is named: patterns of files, and the field
        of their records.
      format: of the files, a name of `FORMATS`; empty: by what is there, and text lines where that is not known.
      vocabulary: a file, see `multipod.data.text.vocabulary`; empty: trained.
      vocab: entries of a trained vocabulary, and the most that a named one may have.
      spans: whether spans of the texts are hidden.
    """

    places: tuple[tuple[str, str], ...]
    format: str
    vocabulary: str
    vocab: int
    spans: bool = False

    def cutter(self) -> Vocabulary:
        """The vocabulary, trained now and kept in the user's cache if none is named.

        Raises:
          DataError: see `open_vocabulary`; or it has more than `vocab` entries.
        """
        vocabulary = _vocabulary(self)
        if vocabulary.size > self.vocab:
            raise DataError(
                f"vocabulary {self.vocabulary}: it has {vocabulary.size:,} entries with the special ones, and the data "
                f"say vocab={self.vocab:,}. Set data.vocab={vocabulary.size}, and the model's vocab to as many or more."
            )
        return vocabulary


@lru_cache(maxsize=16)
def open_text(where: str, kind: str) -> Records:
    """The records of a text; files of an unknown name are lines.

    Raises:
      DataError: see `open_records`.
    """
    return open_records(where, kind, otherwise="lines")


@lru_cache(maxsize=8)
def _vocabulary(corpus: Corpus) -> Vocabulary:
    if corpus.vocabulary:
        return open_vocabulary(Path(corpus.vocabulary).expanduser(), spans=corpus.spans)
    parts = [(TextField(open_text(where, corpus.format), field)) for where, field in corpus.places]
    keys = [key_of(part.records, part.field) for part in parts]
    key = fingerprint([text.encode() for text in ("byte-pairs", str(corpus.vocab), *keys)])

    def make(path: Path) -> None:
        train_vocabulary((text for part in parts for text in part), corpus.vocab, path)

    return open_vocabulary(made_once(tokens_folder() / f"{key}.json", make))
