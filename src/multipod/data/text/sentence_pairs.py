"""Rows of two sentences for BERT's pre-training: hidden tokens, and whether the second sentence follows the first."""

from dataclasses import dataclass

import numpy as np

from multipod.data.order import draw_for_rows
from multipod.data.source import HostBatch
from multipod.data.stdlib_text import Masking
from multipod.data.text.kept_tokens import KeptTokens
from multipod.data.text.vocabulary import Vocabulary

_TRIES = 10


@dataclass(frozen=True, eq=False)
class SentencePairs:
    """`token`, `type`, `segment` (1: a token, 0: padding), `masked`, `label`, `weight`, and `next`, int32.

    A row is `[START] A [END] B [END]`. Its sentences follow each other in one document; they are cut in two at a
    random place, and in half of the rows (and in those of one sentence) B is taken from another row, of another
    document if ten tries find one. `next` is 1 where it was. What does not fit is cut from the end of the longer part.
    Training draws cuts, partners and masks anew each time; read as they are, they are drawn by `seed`.

    Source: Devlin et al., 2018, arXiv:1810.04805, section 3.1 and A.2. Their code makes such rows once, with masks for
    ten epochs; there the sentences that a random B replaces begin the next row, and a tenth of the rows is shorter.

    Attributes:
      tokens: the sentences.
      rows: as `multipod.data.text.sentences.plan_rows` makes them.
      length: tokens in a row.
      masking: which tokens are to be told.
      vocabulary: of the tokens.
      seed: of what evaluation sees; not the seed of a run.
    """

    tokens: KeptTokens
    rows: np.ndarray
    length: int
    masking: Masking
    vocabulary: Vocabulary
    seed: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The rows with these numbers, drawn the same way each time."""
        draws = [np.random.Generator(np.random.Philox(key=[self.seed, n])).random(self._draws) for n in numbers]
        return self._made(numbers, np.reshape(draws, (-1, self._draws)))

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself: `read_augmented` draws anew."""
        return batch

    def read_augmented(
        self, numbers: np.ndarray, rows: np.ndarray, rng: np.random.Generator, out: HostBatch | None = None
    ) -> HostBatch:
        """The rows with other cuts, partners and masks."""
        return self._made(numbers, draw_for_rows(rows, self._draws, rng))

    def identity(self) -> str:
        """How many rows there are, and of which tokens."""
        return f"{len(self):,} rows of {self.length} tokens {self.tokens.folder.name}"

    @property
    def _draws(self) -> int:
        return 2 + _TRIES + 3 * self.length

    def _made(self, numbers: np.ndarray, draws: np.ndarray) -> HostBatch:
        rows = {name: np.zeros((len(numbers), self.length), np.int32) for name in ("token", "type", "segment")}
        ordinary = np.zeros((len(numbers), self.length), np.int32)
        follows = np.zeros(len(numbers), np.int32)
        for row, (number, own) in enumerate(zip(numbers.tolist(), draws, strict=True)):
            first, second, other = self._parts(number, own)
            follows[row] = other
            own_row = {name: array[row] for name, array in rows.items()}
            ordinary[row] = self._write(first, second, own_row)
        hidden = self.masking.apply(
            rows | {"segment": ordinary},
            draws[:, 2 + _TRIES :].reshape(-1, self.length, 3),
            self.vocabulary.size,
            self.vocabulary.mask,
            1 + max(self.vocabulary.mask, self.vocabulary.start, self.vocabulary.end),
        )
        return hidden | {"segment": rows["segment"], "next": follows}

    def _parts(self, number: int, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
        """The tokens of A and B, and whether B is another row's."""
        first, stop, document = self.rows[number].tolist()
        whole = stop - first < 2
        cut = stop if whole else first + 1 + int(draws[0] * (stop - first - 1))
        begin, end = self._joined(first, cut), self._joined(cut, stop)
        another = bool(whole or draws[1] < 0.5) and len(self.rows) > 1
        if another:
            partners = (draws[2 : 2 + _TRIES] * len(self.rows)).astype(int).tolist()
            partner = next((one for one in partners if self.rows[one, 2] != document), partners[-1])
            begin_other, stop_other, _ = self.rows[partner].tolist()
            end = self._joined(begin_other, stop_other)
        room = self.length - 3
        second = max(room - len(begin), min(len(end), room // 2))
        return begin[: room - min(second, len(end))], end[:second], another

    def _joined(self, first: int, stop: int) -> np.ndarray:
        """The tokens of following sentences."""
        ends = self.tokens.ends
        begin = int(ends[first - 1]) if first else 0
        return np.asarray(self.tokens.tokens[begin : int(ends[stop - 1])]) if stop > first else np.zeros(0, np.int32)

    def _write(self, begin: np.ndarray, end: np.ndarray, row: HostBatch) -> np.ndarray:
        """Writes one row; returns 1 where a token may be hidden, [length]."""
        middle, last = 1 + len(begin), 2 + len(begin) + len(end)
        token, marks = row["token"], [0, middle, last]
        token[marks] = self.vocabulary.start, self.vocabulary.end, self.vocabulary.end
        token[1:middle], token[middle + 1 : last] = begin, end
        row["type"][middle + 1 : last + 1] = 1
        row["segment"][: last + 1] = 1
        ordinary = row["segment"].copy()
        ordinary[marks] = 0
        return ordinary
