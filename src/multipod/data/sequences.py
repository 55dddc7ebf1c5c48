"""Token sequences of many lengths as a `Source`: padded to one length a batch, and what is hidden from a model.

`Sequences` chooses the length for the whole batch over all hosts. `SpanCorruptor` is T5's task; masked language models
are in `multipod.data.stdlib_text` (`Masking`), and rows that hold several sequences in `multipod.data.packing`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from multipod.data.order import ByLength, generator
from multipod.data.source import HostBatch, fingerprint
from multipod.errors import DataError


@dataclass(frozen=True, eq=False)
class TokenFile:
    """Sequences end to end in one array, which may be mapped from a file.

    Attributes:
      tokens: all of them, whole numbers.
      ends: int64 [sequences]: where each ends, increasing.
    """

    tokens: np.ndarray
    ends: np.ndarray

    def __post_init__(self) -> None:
        if len(self.ends) and ((np.diff(self.ends, prepend=0) < 0).any() or self.ends[-1] != len(self.tokens)):
            raise DataError(
                f"token file: the ends of {len(self.ends):,} sequences do not cut {len(self.tokens):,} tokens. "
                "They must increase to the number of tokens. Write both again."
            )

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> np.ndarray:
        """The tokens of a sequence."""
        first = int(self.ends[number - 1]) if number else 0
        return np.asarray(self.tokens[first : int(self.ends[number])])

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [sequences]."""
        return np.diff(self.ends, prepend=0)


def token_file(sequences: Sequence[np.ndarray]) -> TokenFile:
    """The sequences end to end, int32."""
    ends = np.cumsum([len(one) for one in sequences], dtype=np.int64)
    return TokenFile(np.concatenate([np.zeros(0, np.int32), *sequences]).astype(np.int32), ends)


@dataclass(frozen=True, eq=False)
class Sequences:
    """`token` and `weight` (1: a token, 0: padding), int32 [n, length].

    With `by_length`, batches hold sequences of like lengths and are as long as the longest of them needs; the length
    follows from the numbers of the whole batch, so all hosts choose the same. Each length is a shape of its own, which
    a compiled step must have been compiled for.

    Attributes:
      file: the sequences.
      by_length: orders by length; None: every batch is `length` long.
      length: of a batch; the longest of `by_length` unless a batch was chosen.
      pad: the token that fills up.
    """

    file: TokenFile
    by_length: ByLength | None = None
    length: int = 0
    pad: int = 0

    def __post_init__(self) -> None:
        if not self.length:
            longest = self.by_length.bounds[-1] if self.by_length else int(self.file.lengths.max(initial=1))
            object.__setattr__(self, "length", longest)
            if self.by_length is not None:
                self.by_length.buckets(self.file.lengths)  # refuses those that are too long

    def __len__(self) -> int:
        return len(self.file)

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The sequences with these numbers, padded.

        Raises:
          DataError: one is longer than the batch.
        """
        token = np.full((len(numbers), self.length), self.pad, np.int32)
        weight = np.zeros_like(token)
        for row, number in enumerate(numbers.tolist()):
            own = self.file[number]
            if len(own) > self.length:
                raise DataError(
                    f"sequence {number} has {len(own)} tokens, the batch {self.length}. Cut it, or take longer ones."
                )
            token[row, : len(own)] = own
            weight[row, : len(own)] = 1
        return {"token": token, "weight": weight}

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself."""
        return batch

    def epoch_order(self, seed: int, epoch: int, batch: int) -> np.ndarray:
        """By length if so asked, at random otherwise."""
        if self.by_length is None:
            return generator(seed, epoch).permutation(len(self))
        return self.by_length.epoch(self.file.lengths, seed, epoch, batch)

    def sized_for(self, numbers: np.ndarray) -> "Sequences":
        """These sequences at the length that the whole batch needs."""
        if self.by_length is None:
            return self
        return replace(self, length=self.by_length.length(self.file.lengths[numbers]))

    def sizes(self) -> "list[Sequences]":
        """These sequences at every length."""
        bounds = self.by_length.bounds if self.by_length else (self.length,)
        return [replace(self, length=bound) for bound in bounds]

    def identity(self) -> str:
        """A fingerprint of all lengths and of a thousand tokens."""
        some = self.file.tokens[:: max(1, len(self.file.tokens) // 1000)]
        return f"{len(self):,} sequences {fingerprint([self.file.ends.tobytes(), np.asarray(some).tobytes()])}"


@dataclass(frozen=True)
class SpanCorruptor:
    """Hides spans of a sequence; the model tells them one after the other.

    A share `density` of the tokens is cut out, in spans of `mean` tokens on average; each span leaves one sentinel, and
    the target is each sentinel with the tokens that it stands for, then one more. Spans and what lies between them are
    random partitions of their totals, and the sequence begins with tokens that stay.

    Source: Raffel et al., 2019, arXiv:1910.10683, section 3.1.4: 15 % and spans of 3.

    Attributes:
      sentinel: the first; the k-th span has `sentinel` - k, as in T5's vocabulary, whose sentinels are its last.
      density: of tokens that are hidden.
      mean: tokens of a span.
    """

    sentinel: int
    density: float = 0.15
    mean: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.density < 1 or not self.mean >= 1:
            raise DataError(f"{self}: density is above 0 and below 1, spans have a token or more. Change the recipe.")

    def sizes(self, length: int) -> tuple[int, int]:
        """Tokens of the input and of the target that a sequence of this length becomes."""
        hidden, spans = self._counts(length)
        return length - hidden + spans, hidden + spans + 1

    def apply(self, tokens: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Input and target of one sequence of two tokens or more. Together they hold every token once."""
        hidden, spans = self._counts(len(tokens))
        cut = _parts(hidden, spans, rng)
        kept = _parts(len(tokens) - hidden, spans, rng)
        given, told = [], []
        place = 0
        for span, (stays, goes) in enumerate(zip(kept.tolist(), cut.tolist(), strict=True)):
            mark = np.array([self.sentinel - span], tokens.dtype)
            given += [tokens[place : place + stays], mark]
            told += [mark, tokens[place + stays : place + stays + goes]]
            place += stays + goes
        return np.concatenate(given), np.concatenate([*told, np.array([self.sentinel - spans], tokens.dtype)])

    def _counts(self, length: int) -> tuple[int, int]:
        if length < 2:
            raise DataError(f"span corruption: a sequence of {length} tokens has none to hide and keep. Leave it out.")
        hidden = min(max(round(self.density * length), 1), length - 1)
        spans = min(max(round(hidden / self.mean), 1), length - hidden)
        return hidden, spans


@dataclass(frozen=True, eq=False)
class SpanRows:
    """Sequences with spans hidden, for an encoder and a decoder (`multipod.models.transformer`).

    `source`, int32 [n, given], is what is left; `label`, int32 [n, told], what was hidden, `weight` 1 where it counts,
    and `target` the same one place to the right, behind `start`: what the decoder reads. `given` and `told` are what a
    sequence of `length` tokens needs; shorter ones are padded, and one of fewer than two tokens is all padding.
    Training hides other spans each time; read as they are, they are hidden by `seed`.

    Attributes:
      file: the sequences; longer ones are cut at `length`.
      corruption: what is hidden.
      length: tokens of a whole sequence.
      seed: of what evaluation hides; not the seed of a run.
      pad: the token that fills up.
      start: the first that the decoder reads.
    """

    file: TokenFile
    corruption: SpanCorruptor
    length: int
    seed: int = 0
    pad: int = 0
    start: int = 2

    def __len__(self) -> int:
        return len(self.file)

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The sequences with these numbers, corrupted the same way each time."""
        return self._rows(numbers, [np.random.Philox(key=[self.seed, number]) for number in numbers.tolist()])

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself: `read_augmented` hides other spans."""
        return batch

    def read_augmented(
        self, numbers: np.ndarray, rows: np.ndarray, rng: np.random.Generator, out: HostBatch | None = None
    ) -> HostBatch:
        """The sequences with other spans hidden."""
        keys = rng.integers(2**63, size=int(rows.max()) + 1)[rows]
        return self._rows(numbers, [np.random.Philox(key=int(key)) for key in keys])

    def identity(self) -> str:
        """The identity of the sequences."""
        return Sequences(self.file).identity()

    def _rows(self, numbers: np.ndarray, bits: Sequence[np.random.Philox]) -> HostBatch:
        given, told = self.corruption.sizes(self.length)
        source = np.full((len(numbers), given), self.pad, np.int32)
        label = np.full((len(numbers), told), self.pad, np.int32)
        weight = np.zeros_like(label)
        for row, (number, own) in enumerate(zip(numbers.tolist(), bits, strict=True)):
            tokens = self.file[number][: self.length]
            if len(tokens) < 2:
                continue
            shown, hidden = self.corruption.apply(tokens, np.random.Generator(own))
            source[row, : len(shown)] = shown
            label[row, : len(hidden)] = hidden
            weight[row, : len(hidden)] = 1
        target = np.where(weight == 0, self.pad, np.pad(label, ((0, 0), (1, 0)), constant_values=self.start)[:, :-1])
        return {"source": source, "target": target.astype(np.int32), "label": label, "weight": weight}


def _parts(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """`total` as a sum of so many whole numbers of at least 1, all such sums alike."""
    cuts = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)
