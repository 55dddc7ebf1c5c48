"""The objective of translation: cross-entropy to learn from, and BLEU by beam search to be judged by. Extra `bleu`."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from multipod.errors import MetricError
from multipod.metrics.bleu import ORDER, BleuCounts, bleu_counts
from multipod.metrics.hosts import ProcessGroup, gather_parts
from multipod.metrics.objective import Answers, Sums, TokenClassification, Values
from multipod.pytrees import Batch, Outputs


@runtime_checkable
class Translates(Protocol):
    """A model that searches for the best answer to a text, such as `multipod.models.transformer.Transformer`."""

    def translate(
        self, params: Any, batch: Batch, *, start: int, end: int, length: int, beam: int = 4, penalty: float = 0.6
    ) -> Any:
        """The best translations of each source, `tokens` [examples, beam, length], best first."""
        ...


@runtime_checkable
class SpellsText(Protocol):
    """Data whose tokens stand for text; they may have a method `reference(number)`, too: what was to be told."""

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens as text, up to the first that ends it."""
        ...

    def marks(self) -> tuple[int, int]:
        """The token that a decoder begins with, and the one that ends a text."""
        ...


@dataclass(frozen=True)
class Bleu:
    """Cross-entropy of tokens; an evaluation also translates every test source by beam search and reports `bleu`.

    BLEU is sacreBLEU's, 0 to 100, over all sentences of the test set on all hosts; rows that fill up a batch do not
    count. Each device searches for its own rows, and each host spells and counts its own sentences. Judged is the text
    against the data's `reference(number)`, where batches have the entry `number`; else against the label's own text.

    The defaults are those of MLPerf's Transformer: beam 4, length penalty 0.6, 50 tokens more than the source's row.

    Attributes:
      weight, tokens_per_example, label_smoothing: of the cross-entropy, see `TokenClassification`.
      beam: translations that are kept in sight.
      penalty: exponent of the length penalty (arXiv:1609.08144, equation 14).
      extra: a translation has at most so many tokens more than a row of sources.
      tokenize: sacreBLEU's name of how it cuts words.
      lowercase: count without regard to case, as MLPerf's GNMT is judged.
    """

    weight: str = "weight"
    tokens_per_example: float = 0.0
    label_smoothing: float = 0.0
    beam: int = 4
    penalty: float = 0.6
    extra: int = 50
    tokenize: str = "13a"
    lowercase: bool = False

    def __post_init__(self) -> None:
        if self.beam < 1 or self.extra < 1 or not 0 <= self.penalty < math.inf:
            raise MetricError(
                f"bleu: beam={self.beam}, extra={self.extra} (1 or more), penalty={self.penalty} (0 or more). "
                "Change objective.beam, objective.extra or objective.penalty."
            )

    @property
    def tokens(self) -> TokenClassification:
        """The objective of the tokens."""
        return TokenClassification(self.weight, self.tokens_per_example, self.label_smoothing)

    def __call__(self, outputs: jax.Array, batch: Batch) -> Values:
        """The values of `tokens`."""
        return self.tokens(outputs, batch)

    def answer(self, model: Any, params: Any, outputs: Outputs, batch: Batch, data: Any) -> tuple[jax.Array, ...]:
        """The best translation of each source, int32 [examples, length], its label, and its number if it has one.

        Raises:
          MetricError: a model that does not translate, data that spell no text, or packed rows.
        """
        wrong = [] if isinstance(model, Translates) else [f"{type(model).__name__} has no method `translate`"]
        wrong += [] if isinstance(data, SpellsText) else [f"{type(data).__name__} has no methods `decode` and `marks`"]
        wrong += ["rows of the test set hold several sentences (source_segment)"] if "source_segment" in batch else []
        if wrong:
            raise MetricError(
                f"bleu: {'; '.join(wrong)}. Take an encoder-decoder on text pairs, one pair a row in the test set."
            )
        start, end = data.marks()
        length = batch["source"].shape[1] + self.extra
        source = {"source": batch["source"]}
        search = {"start": start, "end": end, "length": length, "beam": self.beam, "penalty": self.penalty}
        told = model.translate(params, source, **search).tokens[:, 0]
        return told, batch["label"], *([batch["number"]] if "number" in batch else [])

    def judge(self, answers: Answers, data: Any, hosts: ProcessGroup) -> dict[str, float]:
        """The counts that BLEU is made of, over all hosts.

        Raises:
          MissingPackageError: sacreBLEU is not installed; with several hosts, a MetricError that names those.
        """
        counts = sum(gather_parts(lambda: self._counts(answers, data), BleuCounts, hosts), BleuCounts())
        lists = {f"bleu_{name}_{n + 1}": getattr(counts, name)[n] for name in ("right", "total") for n in range(ORDER)}
        rest = {f"bleu_{name}": value for name, value in asdict(counts).items() if not isinstance(value, tuple)}
        return {name: float(value) for name, value in (lists | rest).items()}

    def finish(self, sums: Sums) -> dict[str, float]:
        """What `tokens` reports; of an evaluation `bleu`, too.

        Raises:
          MetricError: no example or no token was counted.
        """
        report = self.tokens.finish({name: sum_ for name, sum_ in sums.items() if not name.startswith("bleu_")})
        if "bleu_sentences" not in sums:
            return report
        right, total = (tuple(int(sums[f"bleu_{name}_{n + 1}"]) for n in range(ORDER)) for name in ("right", "total"))
        rest = (int(sums[f"bleu_{name}"]) for name in ("length", "reference_length", "sentences"))
        return report | {"bleu": BleuCounts(right, total, *rest).score()}

    def _counts(self, answers: Answers, data: Any) -> BleuCounts:
        counts = BleuCounts()
        for told, label, *rest in answers:
            rows = np.flatnonzero(rest[-1])
            hypotheses = [data.decode(told[row]) for row in rows]
            if len(rest) > 1 and hasattr(data, "reference"):
                references = [data.reference(int(rest[0][row])) for row in rows]
            else:
                references = [data.decode(label[row]) for row in rows]
            counts += bleu_counts(hypotheses, [references], tokenize=self.tokenize, lowercase=self.lowercase)
        return counts
