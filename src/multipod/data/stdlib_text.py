"""Text that every Python has: the sources of its own standard library. Needs the extra `text`.

The text differs a little from one Python to the next, so numbers of a run are compared within one version.
"""

import hashlib
import json
import os
import re
import sysconfig
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from multipod.data.packing import pack_rows
from multipod.data.source import HostBatch
from multipod.errors import RecipeError
from multipod.extras import require
from multipod.pytrees import IdRange

PAD, MASK, START, END = range(4)
Tokenizer = Any
"""A `tokenizers.Tokenizer`, of the extra `text`."""

SPECIAL = ("[PAD]", "[MASK]", "[START]", "[END]")
"""The first tokens of every vocabulary, in the order of their numbers."""

_LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "tests"}
_DEFINITION = re.compile(r"^(?=(?:@|def |class |async def ))", re.MULTILINE)


@dataclass(frozen=True)
class Masking:
    """Which tokens a masked language model is to tell, and what it sees in their place.

    Of each row's tokens `share` are to be told, at most `most` of them and at least one: a random choice. It sees
    `[MASK]` in 80 % of these places, another token in 10 %, and the token itself in 10 %.

    Source: Devlin et al., 2018, arXiv:1810.04805, section 3.1.
    """

    share: float = 0.15
    most: int = 20

    def apply(
        self, rows: HostBatch, draws: np.ndarray, vocab: int, mask: int = MASK, first: int = len(SPECIAL)
    ) -> HostBatch:
        """`rows` with tokens hidden, and what is to be told: `masked`, `label`, `weight`, [rows, most].

        `draws` are [rows, length, 3], uniform in [0, 1). `masked` are places, increasing; where a row has fewer, the
        others have weight 0. `mask` is the token of hidden places, and `first` the first of those that may stand there
        in its place.
        """
        token = rows["token"]
        is_token = rows["segment"] != 0
        most = min(self.most, token.shape[1])
        told = np.clip(np.round(self.share * is_token.sum(1)).astype(int), is_token.any(1), most)
        order = np.argsort(np.where(is_token, draws[..., 0], 2.0), axis=1, kind="stable")[:, :most]
        counts = np.arange(most) < told[:, None]
        places = np.sort(np.where(counts, order, token.shape[1]), axis=1)
        masked = np.where(counts, places, 0)  # the places that count come first, as the others were at the end
        label = np.where(counts, np.take_along_axis(token, masked, 1), 0)

        kind, other = np.moveaxis(np.take_along_axis(draws[..., 1:], masked[..., None], 1), -1, 0)
        other = first + (other * (vocab - first)).astype(token.dtype)
        seen = np.where(kind < 0.8, mask, np.where(kind < 0.9, other, label))
        hidden = token.copy()
        row, column = np.nonzero(counts)
        hidden[row, masked[row, column]] = seen[row, column]
        return rows | {
            "token": hidden,
            "masked": masked.astype(np.int32),
            "label": label.astype(np.int32),
            "weight": counts.astype(np.int32),
        }


@dataclass(frozen=True)
class MaskedRows:
    """Packed rows of a text. Training masks other tokens each time; read as they are, they are masked by `seed`."""

    rows: HostBatch
    masking: Masking
    vocab: int
    seed: int

    def __len__(self) -> int:
        return len(self.rows["token"])

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The rows with these numbers, masked the same way each time."""
        length = self.rows["token"].shape[1]
        draws = [np.random.Generator(np.random.Philox(key=[self.seed, n])).random((length, 3)) for n in numbers]
        rows = {name: array[numbers] for name, array in self.rows.items()}
        return self.masking.apply(rows, np.reshape(draws, (-1, length, 3)), self.vocab)

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """These rows with other tokens masked."""
        token = batch["token"].copy()
        row, place = np.nonzero(batch["weight"])
        token[row, batch["masked"][row, place]] = batch["label"][row, place]
        draws = rng.random((rows.max() + 1, token.shape[1], 3))[rows]
        return self.masking.apply(batch | {"token": token}, draws, self.vocab)


@dataclass(frozen=True)
class StdlibText:
    """The standard library as packed rows for a masked language model (`multipod.models.bert`).

    Files are split into training and test text by a checksum of their names, so a file stays on its side from
    one Python to the next. Byte-pair tokens are trained on the training text. Each file is cut at its top-level
    functions and classes, and where a piece is longer than a row; pieces are packed first-fit decreasing.

    Everything is a pure function of these fields and of the Python at hand. It takes some seconds, so the tokens may be
    kept in `cache`; what is there is found by a checksum of the text and of the fields.

    Attributes:
      length: tokens in a row.
      vocab: entries of the vocabulary, `SPECIAL` and all 256 bytes among them.
      files: which files of the library, as a pattern of `pathlib.Path.glob`; `**/*.py` are all (about 11 MB).
      test_share: the share of files kept for testing, about.
      masking: which tokens are to be told.
      split_seed: of the masks of the test text; not the seed of a run.
      cache: a folder for the tokens; empty: nothing is kept.
    """

    length: int = 128
    vocab: int = 4096
    files: str = "*.py"
    test_share: float = 0.15
    masking: Masking = field(default_factory=Masking)
    split_seed: int = 0
    cache: str = ""

    def __post_init__(self) -> None:
        if self.vocab < len(SPECIAL) + 256:
            raise RecipeError(f"stdlib text: vocab={self.vocab} has no room for all bytes. Take 260 or more.")

    def train(self) -> MaskedRows:
        """The rows to learn from."""
        return self._source("train")

    def test(self) -> MaskedRows:
        """The rows to be judged by."""
        return self._source("test")

    def ids_given(self) -> dict[str, IdRange]:
        """Tokens of the vocabulary."""
        return dict.fromkeys(("token", "label"), IdRange((self.vocab,), "vocab"))

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens as text; trains the tokenizer again, some seconds."""
        return decode_tokens(_tokenizer_of(self.files, self.test_share, self.vocab), tokens)

    def _source(self, part: str) -> MaskedRows:
        return MaskedRows(_rows(self)[part], self.masking, self.vocab, self.split_seed)


def library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_files(pattern: str, folder: Path | None = None) -> dict[str, str]:
    """The text of all Python files of the library that match, by their names below it, in order.

    Tests are left out, and installed packages.

    Raises:
      RecipeError: no file matches.
    """
    folder = folder or library()
    texts = {}
    for path in sorted(folder.glob(pattern)):
        name = path.relative_to(folder)
        if path.suffix == ".py" and path.is_file() and not _LEFT_OUT & set(name.parts):
            texts[name.as_posix()] = path.read_text(encoding="utf-8", errors="replace")
    if not texts:
        raise RecipeError(f"stdlib text: no file of {folder} matches {pattern!r}. Take *.py, json/*.py or **/*.py.")
    return texts


def is_test_file(name: str, share: float) -> bool:
    """Whether the file of this name is test text."""
    return zlib.crc32(name.encode()) < share * 2**32


def pieces(text: str) -> list[str]:
    """The text, cut before each top-level function or class and what decorates it; joined, it is the text again."""
    cuts = [match.start() for match in _DEFINITION.finditer(text)]
    # A definition belongs to the decorators right above it.
    cuts = [cut for before, cut in zip([None, *cuts], cuts, strict=False) if not _decorates(text, before, cut)]
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b]


def _decorates(text: str, before: int | None, cut: int) -> bool:
    """Whether everything from the cut before to this one is one decorator."""
    return before is not None and text[before] == "@" and "\n\n" not in text[before:cut]


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-pair tokenizer over bytes, with `SPECIAL` first: decoding gives back any text exactly.

    Source: Sennrich et al., 2015, arXiv:1508.07909, by the library `tokenizers`; the same texts give the same tokens.

    Raises:
      MissingPackageError: `tokenizers` is not installed.
    """
    require("stdlib text", "tokenizers")
    import tokenizers

    by_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = by_bytes
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(SPECIAL), initial_alphabet=by_bytes.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """The tokens of each text, int32. The names of special tokens in a text are ordinary text."""
    tokenizer.encode_special_tokens = True
    return [np.array(one.ids, np.int32) for one in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def decode_tokens(tokenizer: Tokenizer, tokens: np.ndarray, sentinels: int = 0) -> str:
    """Tokens as text, without padding; special ones by their names, and from `sentinels` on (0: none) as <NUMBER>."""
    parts: list[str] = []
    held: list[int] = []
    for token in [*tokens[tokens != PAD].tolist(), -1]:
        if token < len(SPECIAL) or (sentinels and token >= sentinels):
            parts.append(tokenizer.decode(held))
            held = []
            if token >= 0:
                parts.append(SPECIAL[token] if token < len(SPECIAL) else f"<{token}>")
        else:
            held.append(token)
    return "".join(parts)


def split_texts(spec: StdlibText) -> dict[str, list[str]]:
    """The texts of the files of each part, `train` and `test`.

    Raises:
      RecipeError: a part has none.
    """
    texts = read_files(spec.files)
    parts = {
        part: [t for name, t in texts.items() if is_test_file(name, spec.test_share) == (part == "test")]
        for part in _PARTS
    }
    for part, found in parts.items():
        if not found:
            raise RecipeError(
                f"stdlib text: none of the {len(texts)} files of {spec.files!r} is {part} text at "
                f"test_share={spec.test_share}. Take more files, or another share."
            )
    return parts


@lru_cache(maxsize=4)
def _rows(spec: StdlibText) -> dict[str, HostBatch]:
    kept = tokens_of(spec, split_texts(spec))
    return {part: pack_rows({"token": _cut(kept[part], spec.length)}, {"token": spec.length}) for part in _PARTS}


_PARTS = ("train", "test")


def tokens_of(spec: StdlibText, parts: dict[str, list[str]]) -> dict[str, list[np.ndarray]]:
    """The tokens of all pieces of each part, from the cache where they are there."""
    if not spec.cache:
        return _encoded(spec, parts)
    import tokenizers

    known = {"vocab": spec.vocab, "parts": parts, "tokenizers": tokenizers.__version__}
    path = Path(spec.cache) / f"stdlib-{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:20]}.npz"
    if not path.is_file():
        _write(path, _encoded(spec, parts))
    with np.load(path) as stored:
        return {part: np.split(stored[part], stored[f"{part}_ends"][:-1]) for part in _PARTS}


def _encoded(spec: StdlibText, parts: dict[str, list[str]]) -> dict[str, list[np.ndarray]]:
    tokenizer = train_tokenizer(parts["train"], spec.vocab)
    return {
        part: encode(tokenizer, [piece for text in texts for piece in pieces(text)]) for part, texts in parts.items()
    }


def _write(path: Path, tokens: dict[str, list[np.ndarray]]) -> None:
    """Writes the file whole or not at all: other processes of the run may want it at the same moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {part: np.concatenate(several) for part, several in tokens.items()}
    arrays |= {f"{part}_ends": np.cumsum([len(one) for one in several]) for part, several in tokens.items()}
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    os.replace(file.name, path)


@lru_cache(maxsize=2)
def _tokenizer_of(files: str, share: float, vocab: int) -> Tokenizer:
    return train_tokenizer(split_texts(StdlibText(vocab=vocab, files=files, test_share=share))["train"], vocab)


def _cut(sequences: list[np.ndarray], length: int) -> list[np.ndarray]:
    """The sequences in parts of at most `length` tokens."""
    return [one[start : start + length] for one in sequences for start in range(0, len(one), length)]
