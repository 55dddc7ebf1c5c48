"""Vocabularies in the forms that users have them in, all behind one class. Needs the extra `text`.

| file | what it is |
|---|---|
| `*.json` | a tokenizer of Hugging Face's `tokenizers`, of any kind |
| `*.txt` | BERT's list of word pieces (`vocab.txt`), lower case where the list has no capital letter |
| `*.model` | SentencePiece, T5's among them |
| `*.codes`, `*.bpe` | merges of subword-nmt, of words between spaces |
| none | byte-pair tokens over bytes, trained on the training text |
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from multipod.data.source import fingerprint
from multipod.data.stdlib_text import SPECIAL, train_tokenizer
from multipod.errors import DataError, MultipodError
from multipod.extras import import_optional

NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "mask": ("[MASK]", "<mask>"),
    "start": ("[START]", "[CLS]", "<s>", "<bos>"),
    "end": ("[END]", "[SEP]", "</s>", "<eos>"),
}
"""What vocabularies call the tokens that a model needs, the usual first."""

_NO_PIECE = "\N{REPLACEMENT CHARACTER}"


class Cutter(Protocol):
    """Cuts text into the pieces of a file, by the file's own numbers."""

    def size(self) -> int:
        """How many pieces there are."""
        ...

    def number(self, piece: str) -> int | None:
        """The number of a piece; None if there is none of this name."""
        ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The pieces of each text, without any that mark its ends."""
        ...

    def decode(self, pieces: list[int]) -> str:
        """The text of pieces."""
        ...


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Numbers for pieces of text, of which 0 is padding, as all models here take it.

    A file that has another padding, or lacks one of the special tokens, gets these in front: its own numbers then begin
    behind them. Text of which spans are hidden needs no mask, and begins with padding where the file has no start
    token: a file of T5 (arXiv:1910.10683) keeps its numbers, which the weights of a released T5 were trained with.

    Attributes:
      cutter: what the file does.
      shift: how many tokens stand before the file's.
      mask: in the place of hidden tokens.
      start: before a text: the decoder's first, and BERT's `[CLS]`.
      end: behind a text, and behind each of two sentences (`[SEP]`).
      identity: changes when the file does.
      sentinels: how many of its last tokens are T5's sentinels, `<extra_id_0>` the last; for hidden spans, else 0.
    """

    cutter: Cutter
    shift: int
    mask: int
    start: int
    end: int
    identity: str
    sentinels: int = 0

    @property
    def size(self) -> int:
        """How many numbers there are, without sentinels: with them, the least `vocab` of a model."""
        return self.shift + self.cutter.size() - self.sentinels

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text, int32, without special ones."""
        return [np.array(one, np.int32) + np.int32(self.shift) for one in self.cutter.encode(texts)]

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens, without special ones, and up to the first that ends it."""
        ended = np.flatnonzero(tokens == self.end)
        tokens = tokens[: ended[0]] if len(ended) else tokens
        special = (0, self.mask, self.start, self.end)
        return self.cutter.decode([int(one) - self.shift for one in tokens if one not in special and one >= self.shift])


def open_vocabulary(path: Path, *, spans: bool = False) -> Vocabulary:
    """The vocabulary of a file, `spans`: for text of which spans are hidden.

    Raises:
      DataError: no such file, of no known kind, or it cannot be read.
      MissingPackageError: its library is not installed.
    """
    load = next((load for suffixes, load in _KINDS.items() if path.name.endswith(suffixes)), None)
    if load is None:
        known = ", ".join(suffix for suffixes in _KINDS for suffix in suffixes)
        raise DataError(f"vocabulary {path}: files of this name are not known. Name one that ends in {known}.")
    try:
        identity = fingerprint([path.read_bytes()])
        return make_vocabulary(load(path), identity, spans=spans)
    except MultipodError:
        raise
    except Exception as error:  # the libraries raise bare exceptions
        raise DataError(f"vocabulary {path} cannot be read: {error}. See whether its kind fits its name.") from error


def make_vocabulary(cutter: Cutter, identity: str, *, spans: bool = False) -> Vocabulary:
    """The cutter's numbers with the special tokens of `NAMES`, its own where it has them; `spans` as `Vocabulary` says.

    Roles that hidden spans can do without have the number of padding.
    """
    found = {role: next((n for n in map(cutter.number, names) if n is not None), None) for role, names in NAMES.items()}
    missing = [role for role, number in found.items() if number is None]
    spared = [role for role in missing if spans and role in ("mask", "start")]
    sentinels = _sentinels(cutter) if spans else 0
    # Tokens are kept on disk by the identity: those of a file that masks need otherwise are others.
    identity += "-spans" if spared else ""
    missing = [role for role in missing if role not in spared]
    front = [] if found["pad"] == 0 and not missing else ["pad", *(role for role in missing if role != "pad")]
    special = {
        role: front.index(role) if role in front else 0 if role in spared else len(front) + (number or 0)
        for role, number in found.items()
    }
    return Vocabulary(cutter, len(front), special["mask"], special["start"], special["end"], identity, sentinels)


def _sentinels(cutter: Cutter) -> int:
    """How many of the last pieces are `<extra_id_0>`, `<extra_id_1>` and so on, the first of them last."""
    count = 0
    while cutter.number(f"<extra_id_{count}>") == cutter.size() - 1 - count >= 0:
        count += 1
    return count


def train_vocabulary(texts: Iterable[str], vocab: int, path: Path) -> None:
    """Writes a tokenizer of `vocab` byte-pair tokens over bytes, trained on `texts`, which are not kept in memory."""
    train_tokenizer(texts, vocab).save(str(path))


@dataclass(frozen=True, eq=False)
class _Tokenizer:
    """A tokenizer of the library tokenizers."""

    tokenizer: Any

    def size(self) -> int:
        return self.tokenizer.get_vocab_size()

    def number(self, piece: str) -> int | None:
        return self.tokenizer.token_to_id(piece)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, pieces: list[int]) -> str:
        return self.tokenizer.decode(pieces)

    def __getstate__(self) -> dict[str, str]:
        return {"text": self.tokenizer.to_str()}

    def __setstate__(self, state: dict[str, str]) -> None:
        object.__setattr__(self, "tokenizer", _tokenizers().Tokenizer.from_str(state["text"]))


@dataclass(frozen=True, eq=False)
class _SentencePiece:
    """A processor of the library SentencePiece."""

    processor: Any

    def size(self) -> int:
        return self.processor.get_piece_size()

    def number(self, piece: str) -> int | None:
        number = self.processor.piece_to_id(piece)
        return number if self.processor.id_to_piece(number) == piece else None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.processor.encode(list(texts))

    def decode(self, pieces: list[int]) -> str:
        return self.processor.decode(pieces)


def _tokenizers() -> Any:
    return import_optional("vocabulary", "tokenizers")


def _of_json(path: Path) -> Cutter:
    tokenizer = _tokenizers().Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True  # their names in a text are ordinary text
    return _Tokenizer(tokenizer)


def _of_word_pieces(path: Path) -> Cutter:
    tokenizers = _tokenizers()
    pieces = path.read_text(encoding="utf-8").splitlines()
    cased = any(piece != piece.lower() for piece in pieces if not piece.startswith("[") or not piece.endswith("]"))
    numbers = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    return _Tokenizer(tokenizer)


def _of_merges(path: Path) -> Cutter:
    """Merges of subword-nmt 0.2: a word ends in `</w>`. Letters that no merge has are unknown."""
    tokenizers = _tokenizers()
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or not lines[0].startswith("#version: 0.2"):
        raise DataError(f"vocabulary {path}: it does not begin with '#version: 0.2'. Learn the merges by subword-nmt.")
    merges = [(one, two) for one, two in (line.split(" ") for line in lines[1:] if line)]
    letters = sorted({letter for pair in merges for part in pair for letter in part.removesuffix("</w>")})
    pieces = [*SPECIAL, _NO_PIECE, *letters, *(f"{letter}</w>" for letter in letters)]
    numbers = {piece: n for n, piece in enumerate(dict.fromkeys([*pieces, *(a + b for a, b in merges)]))}
    model = tokenizers.models.BPE(numbers, merges, unk_token=_NO_PIECE, end_of_word_suffix="</w>", fuse_unk=False)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = tokenizers.decoders.BPEDecoder(suffix="</w>")
    return _Tokenizer(tokenizer)


def _of_sentencepiece(path: Path) -> Cutter:
    module = import_optional(f"vocabulary {path}", "sentencepiece")
    return _SentencePiece(module.SentencePieceProcessor(model_file=str(path)))


_KINDS = {
    (".json",): _of_json,
    (".txt",): _of_word_pieces,
    (".model",): _of_sentencepiece,
    (".codes", ".bpe"): _of_merges,
}
"""How the names of vocabulary files end, and what opens them."""
