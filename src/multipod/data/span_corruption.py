"""Span corruption: text in which short spans are replaced by sentinels, to be told. Needs the extra `text`.

Source: Raffel et al., 2019, arXiv:1910.10683, section 3.1.4.
"""

from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np

from multipod.data.source import HostBatch
from multipod.data.stdlib_text import (
    END,
    SPECIAL,
    START,
    StdlibText,
    Tokenizer,
    encode,
    split_texts,
    tokens_of,
    train_tokenizer,
)
from multipod.data.text.text_tokens import TextTokens
from multipod.errors import RecipeError
from multipod.pytrees import IdRange


@dataclass(frozen=True)
class Spans:
    """Which spans are replaced.

    Attributes:
      share: of the tokens that are in spans, about.
      mean: tokens of a span, on average.
    """

    share: float = 0.15
    mean: float = 3.0

    def counts(self, tokens: int) -> tuple[int, int]:
        """How many of so many tokens are in spans, and how many spans there are."""
        hidden = int(np.clip(round(tokens * self.share), 1, tokens - 1))
        return hidden, int(np.clip(round(hidden / self.mean), 1, min(hidden, tokens - hidden)))

    def lengths(self, tokens: int) -> tuple[int, int]:
        """Tokens of source and target for so many tokens of text, each with an end token."""
        hidden, spans = self.counts(tokens)
        return tokens - hidden + spans + 1, hidden + spans + 1

    def text_for(self, source: int) -> int:
        """The most tokens of text whose source is not longer than `source`: 568 for 512, with a target of 114."""
        tokens = 2
        while self.lengths(tokens + 1)[0] <= source:
            tokens += 1
        return tokens

    def places(self, tokens: int, rng: np.random.Generator) -> np.ndarray:
        """The number of the span, from 1, at each of `tokens` places; 0 outside. It begins outside a span."""
        hidden, spans = self.counts(tokens)
        inside, outside = _parts(hidden, spans, rng), _parts(tokens - hidden, spans, rng)
        lengths = np.stack([outside, inside], 1).reshape(-1)
        numbers = np.stack([np.zeros(spans, int), 1 + np.arange(spans)], 1).reshape(-1)
        return np.repeat(numbers, lengths)


def _parts(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """`total` cut into so many positive parts, every way as likely as any other."""
    cuts = 1 + np.sort(rng.choice(total - 1, parts - 1, replace=False))
    return np.diff([0, *cuts, total])


def corrupt(text: np.ndarray, places: np.ndarray, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Source and target of `text`: each span is one sentinel in the source; the target has them with what they hide.

    The sentinel of span i is token vocab - i. Both end with `END`.
    """
    begins = (places > 0) & (np.diff(places, prepend=0) != 0)
    source = np.where(begins, vocab - places, text)[(places == 0) | begins]
    hidden = places > 0
    firsts = np.flatnonzero(begins[hidden])
    target = np.insert(text[hidden], firsts, vocab - places[begins])
    return np.append(source, END), np.append(target, END)


def restore(source: np.ndarray, target: np.ndarray, vocab: int, spans: int) -> np.ndarray:
    """The text behind `corrupt`."""
    held: dict[int, list[int]] = {}
    for token in target[:-1]:
        if token >= vocab - spans:
            last = held[int(token)] = []
        else:
            last.append(int(token))
    return np.array([part for token in source[:-1] for part in held.get(int(token), [int(token)])], np.int32)


@dataclass(frozen=True)
class CorruptedRows:
    """Rows of text [rows, tokens]. Training hides other spans each time; `read` hides by `seed`."""

    rows: np.ndarray
    spans: Spans
    vocab: int
    seed: int

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The rows with these numbers, corrupted the same way each time."""
        rngs = [np.random.Generator(np.random.Philox(key=[self.seed, n])) for n in numbers]
        return self._made(list(self.rows[numbers]), rngs)

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """These rows with other spans hidden."""
        seeds = rng.integers(2**63, size=rows.max() + 1)[rows]
        spans = self.spans.counts(self.rows.shape[1])[1]
        texts = [restore(*pair, self.vocab, spans) for pair in zip(batch["source"], batch["label"], strict=True)]
        return self._made(texts, [np.random.Generator(np.random.Philox(key=int(seed))) for seed in seeds])

    def _made(self, texts: list[np.ndarray], rngs: list[np.random.Generator]) -> HostBatch:
        tokens = self.rows.shape[1]
        pairs = [
            corrupt(text, self.spans.places(tokens, rng), self.vocab) for text, rng in zip(texts, rngs, strict=True)
        ]
        source, label = (np.stack(several).astype(np.int32) for several in zip(*pairs, strict=True))
        return teacher_forced(source, label)


def teacher_forced(source: np.ndarray, label: np.ndarray, start: int = START) -> HostBatch:
    """`source`, `target` (what the decoder reads: `label` behind `start`), `label`, `weight`."""
    target = np.concatenate([np.full((len(label), 1), start, label.dtype), label[:, :-1]], 1)
    return {"source": source, "target": target, "label": label, "weight": (label != 0).astype(np.int32)}


@dataclass(frozen=True)
class SpanCorruption:
    """The standard library's text, end to end, cut into rows and corrupted.

    Attributes:
      length: tokens of a source; the text of a row is as long as fits.
      text: which files, and the tokens; its `length` and `masking` are not used.
      sentinels: entries of the vocabulary behind the tokens' own.
      spans: what is hidden.
    """

    length: int = 128
    text: StdlibText = field(default_factory=lambda: StdlibText(vocab=1024))
    sentinels: int = 100
    spans: Spans = field(default_factory=Spans)

    def __post_init__(self) -> None:
        spans = self.spans.counts(self.spans.text_for(self.length))[1]
        if spans > self.sentinels:
            raise RecipeError(
                f"span corruption: {spans} spans in a row of length={self.length}, and {self.sentinels} sentinels. "
                f"Take sentinels={spans}, or shorter rows."
            )

    @property
    def vocab(self) -> int:
        """Tokens and sentinels."""
        return self.text.vocab + self.sentinels

    def tokenizer(self) -> Tokenizer:
        """What cuts text into tokens."""
        return _tokenizer(self.text)

    def text_tokens(self) -> TextTokens:
        """What a task is cut with that follows this pre-training."""
        tokenizer, words = self.tokenizer(), self.text.vocab

        def decode(tokens: np.ndarray) -> str:
            told = tokens[: np.append(np.flatnonzero(tokens == END), len(tokens))[0]]
            return tokenizer.decode(told[(told >= len(SPECIAL)) & (told < words)].tolist())

        return TextTokens(partial(encode, tokenizer), decode, START, END, self.vocab - 1)

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens as text, up to the end of the row; sentinels as <1>, <2>, ..."""
        tokenizer = self.tokenizer()
        parts: list[str] = []
        held: list[int] = []
        for token in [*tokens.tolist(), END]:
            if token in (0, END) or token >= self.text.vocab:
                parts.append(tokenizer.decode(held))
                held = []
            if token in (0, END):
                break
            if token >= self.text.vocab:
                parts.append(f"<{self.vocab - token}>")
            else:
                held.append(token)
        return "".join(parts)

    def ids_given(self) -> dict[str, IdRange]:
        """Tokens and sentinels."""
        return dict.fromkeys(("source", "target", "label"), IdRange((self.vocab,), "text.vocab + data.sentinels"))

    def train(self) -> CorruptedRows:
        """The rows to learn from."""
        return self._source("train")

    def test(self) -> CorruptedRows:
        """The rows to be judged by."""
        return self._source("test")

    def _source(self, part: str) -> CorruptedRows:
        stream, length = _stream(self.text)[part], self.spans.text_for(self.length)
        rows = stream[: len(stream) // length * length].reshape(-1, length)
        return CorruptedRows(rows, self.spans, self.vocab, self.text.split_seed)


@lru_cache(maxsize=4)
def _tokenizer(text: StdlibText) -> Tokenizer:
    return train_tokenizer(split_texts(text)["train"], text.vocab)


@lru_cache(maxsize=4)
def _stream(text: StdlibText) -> dict[str, np.ndarray]:
    return {part: np.concatenate(several) for part, several in tokens_of(text, split_texts(text)).items()}
