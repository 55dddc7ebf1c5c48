"""Texts and their translations from files: packed rows to learn from, one pair a row to be judged by."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from multipod.data.files.disk import Damaged
from multipod.data.files.match import match_files
from multipod.data.files.records import Records
from multipod.data.pairs import Pairs
from multipod.data.source import HostBatch
from multipod.data.text.corpus import Corpus, open_text
from multipod.data.text.kept_tokens import KeptTokens, TextField, cut_texts, keep_tokens, key_of, text_of
from multipod.data.text.lone_pairs import LonePairs, pairs_by_length
from multipod.data.text.packed_pairs import PackedPairs, plan_pairs
from multipod.data.text.vocabulary import Vocabulary
from multipod.errors import DataError
from multipod.pytrees import IdRange


class Side(NamedTuple):
    """The texts of one language: records, and the field that holds them."""

    where: str
    records: Records
    field: str


@dataclass(frozen=True)
class TextPairs:
    """Pairs of texts for `multipod.models.transformer.Transformer`, cut into tokens of one vocabulary.

    Files are either text, a line each, of which those that end in `.SOURCE` and `.TARGET` belong together
    (`train.{en,de}`; packed by gzip as well), or records of any format that hold both: `translation`, a group of a text
    in each language, as Hugging Face has them, or one field for each language.

    Training rows hold several pairs, which do not see each other; pairs of which one side is empty or longer than a row
    are left out, and `identity` says how many. With `buckets` a row holds one pair instead, and a batch pairs of like
    lengths, the same on all hosts (`multipod.data.pairs.Pairs`). The pairs of the test set stand alone, one a row.

    Attributes:
      train_files: a file, a folder or a pattern of files to learn from.
      test_files: the same, to be judged by.
      format: of files that hold both languages, a name of `FORMATS`; empty: by what is there.
      languages: of what is read and of what is told.
      vocabulary: a file of those that `multipod.data.text.vocabulary` lists; empty: trained on both sides.
      vocab: entries of a trained vocabulary, and the most that a named one may have.
      length: tokens in a training row, of each side.
      test_length: the most tokens of a side in a test row; a longer source is cut there, and of a longer target the
        loss counts so many. What BLEU is judged by is the whole text.
      split_seed: of the order in which training pairs are packed; not the seed of a run.
      buckets: tokens of a row, of each side, in a batch, growing, the last `length`; empty: rows of several pairs.
    """

    train_files: str = ""
    test_files: str = ""
    format: str = ""
    languages: tuple[str, str] = ("en", "de")
    vocabulary: str = ""
    vocab: int = 32_768
    length: int = 256
    test_length: int = 256
    split_seed: int = 0
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.length < 2 or self.test_length < 2:
            raise DataError(
                f"text pairs: rows of {self.length} tokens, of {self.test_length} in the test set. A text needs 2 or "
                "more: one and its end."
            )
        if self.buckets and (self.buckets[-1] != self.length or sorted({*self.buckets}) != list(self.buckets)):
            raise DataError(
                f"text pairs: buckets={self.buckets} do not grow to length={self.length}, above which pairs are left "
                "out. Sort them, and make the last one that."
            )

    def train(self) -> PackedPairs | Pairs:
        """Rows of several pairs to learn from; with `buckets`, of one."""
        vocabulary, sides, tokens = self._kept("train_files")
        key = key_of(sides[0].records, *(one.folder.name for one in tokens))
        if self.buckets:
            return pairs_by_length(key, tokens, self.buckets, vocabulary)
        plan = plan_pairs(key, *tokens, self.length, self.split_seed)
        if not len(plan.ends):
            raise DataError(
                f"{self.train_files}: none of {len(tokens[0]):,} pairs has text on both sides of at most "
                f"{self.length} tokens. Set data.length higher, or see whether the files are {self.languages} text."
            )
        return PackedPairs(*tokens, plan, self.length, vocabulary.start, vocabulary.end)

    def test(self) -> LonePairs:
        """Pairs one by one, to be judged by."""
        vocabulary, _, tokens = self._kept("test_files")
        longest = [int(np.diff(one.ends, prepend=0).max(initial=1)) for one in tokens]
        wide = tuple(
            min(-(-(most + extra) // 8) * 8, self.test_length) for most, extra in zip(longest, (0, 1), strict=True)
        )
        return LonePairs(*tokens, (wide[0], wide[1]), vocabulary.start, vocabulary.end)

    def example(self) -> HostBatch:
        """One training row of zeros: its shapes and types, without any file."""
        names = ["source", "label", "target", "weight"]
        if not self.buckets:
            names += [f"{side}_{kind}" for side in ("source", "target") for kind in ("segment", "position")]
        return {name: np.zeros((1, self.length), np.int32) for name in names}

    def ids_given(self) -> dict[str, IdRange]:
        """Tokens of the vocabulary."""
        return dict.fromkeys(("source", "target", "label"), IdRange((self.vocab,), "vocab"))

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens as text, up to the first that ends it."""
        return self._corpus.cutter().decode(tokens)

    def marks(self) -> tuple[int, int]:
        """The token that a decoder begins with, and the one that ends a text."""
        vocabulary = self._corpus.cutter()
        return vocabulary.start, vocabulary.end

    def reference(self, number: int) -> str:
        """The text that test pair `number` should be translated to, as it stands in the file."""
        target = self._sides("test_files")[1]
        try:
            return text_of(target.records, number, target.field)
        except Damaged:
            return ""

    @property
    def _corpus(self) -> Corpus:
        places = () if self.vocabulary else tuple((one.where, one.field) for one in self._sides("train_files"))
        return Corpus(places, self.format, self.vocabulary, self.vocab)

    def _sides(self, part: str) -> tuple[Side, Side]:
        where = getattr(self, part)
        if not where:
            source, target = self.languages
            raise DataError(
                f"the recipe does not say where its text is. Give --set data.{part}=wmt/train.{{{source},{target}}} "
                "for two files of lines, or a pattern of Parquet files with a column `translation`."
            )
        return _sides(where, self.format, self.languages)

    def _kept(self, part: str) -> tuple[Vocabulary, tuple[Side, Side], tuple[KeptTokens, KeptTokens]]:
        """The vocabulary, both sides, and their tokens, as many sequences each."""
        sides, vocabulary = self._sides(part), self._corpus.cutter()
        found = []
        for side in sides:
            texts = TextField(side.records, side.field, keep_empty=True)
            key = key_of(side.records, "all", side.field, vocabulary.identity)
            found.append(keep_tokens(key, cut_texts(texts, vocabulary), vocabulary.size))
        if len(found[0]) != len(found[1]):
            counted = " and ".join(f"{side.where} has {len(one):,}" for side, one in zip(sides, found, strict=True))
            raise DataError(f"text pairs: {counted} texts. Give one translation to each.")
        return vocabulary, sides, (found[0], found[1])


@lru_cache(maxsize=8)
def _sides(where: str, kind: str, languages: tuple[str, str]) -> tuple[Side, Side]:
    """Both sides of the files: of two kinds of files, or of two fields."""
    apart = None if kind else _files_apart(where, languages)
    if apart is not None:
        source, target = apart
        return Side(source, open_text(source, "lines"), "text"), Side(target, open_text(target, "lines"), "text")
    records = open_text(where, kind)
    first = records.record(0)
    group = first.get("translation", first)
    prefix = "translation." if "translation" in first else ""
    missing = [language for language in languages if not isinstance(group, dict) or language not in group]
    if missing:
        known = ", ".join(group) if isinstance(group, dict) else type(group).__name__
        raise DataError(
            f"{records.name(0)} has no text {' and none '.join(missing)}; it has {known}. Set data.languages, or name "
            f"files of lines that end in .{languages[0]} and .{languages[1]}."
        )
    return Side(where, records, prefix + languages[0]), Side(where, records, prefix + languages[1])


def _files_apart(where: str, languages: tuple[str, str]) -> tuple[str, str] | None:
    """The files of each language, as braces; None if a file is of neither."""
    try:
        files = match_files(where, "text")
    except DataError:
        return None  # a folder; what is not there is said where it is opened
    found = [[str(path) for path in files if path.name.endswith((f".{one}", f".{one}.gz"))] for one in languages]
    if len(found[0]) + len(found[1]) < len(files) or not all(found):
        return None
    source, target = (names[0] if len(names) == 1 else f"{{{','.join(names)}}}" for names in found)
    return source, target
