"""BLEU over many hosts, as sacreBLEU defines it. Needs the extra `bleu`; nothing here needs JAX.

sacreBLEU splits the text, counts the n-grams and finishes the score. What is ours is the statistic between: counts
that add over hosts, so that each host decodes and counts its own share, as the submission of arXiv:2011.03641 does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from multipod.errors import MetricError
from multipod.extras import import_optional
from multipod.metrics.hosts import ALONE, ProcessGroup, gather_parts

ORDER = 4


@dataclass(frozen=True)
class BleuCounts:
    """What BLEU is computed from; adds over any split of the sentences.

    Attributes:
      right: n-grams of the hypotheses that a reference has too, for n = 1 to 4.
      total: all n-grams of the hypotheses.
      length: words of the hypotheses.
      reference_length: words of the references, of each sentence the one closest in length.
      sentences: hypotheses counted.
    """

    right: tuple[int, ...] = (0,) * ORDER
    total: tuple[int, ...] = (0,) * ORDER
    length: int = 0
    reference_length: int = 0
    sentences: int = 0

    def __add__(self, other: "BleuCounts") -> "BleuCounts":
        """The counts of both sets of sentences."""
        return BleuCounts(
            tuple(a + b for a, b in zip(self.right, other.right, strict=True)),
            tuple(a + b for a, b in zip(self.total, other.total, strict=True)),
            self.length + other.length,
            self.reference_length + other.reference_length,
            self.sentences + other.sentences,
        )

    def score(self, smoothing: str = "exp") -> float:
        """BLEU, 0 to 100. `smoothing` is sacreBLEU's: exp (its default), floor, add-k or none.

        Raises:
          MetricError: no sentence was counted.
        """
        if not self.sentences:
            raise MetricError("bleu: no sentence was counted: the evaluation set is empty, or all of it is masked.")
        finish = _sacrebleu().metrics.BLEU.compute_bleu
        return finish(
            list(self.right), list(self.total), self.length, self.reference_length, smooth_method=smoothing
        ).score


def bleu_counts(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    mask: Sequence[bool] | None = None,
    tokenize: str = "13a",
    lowercase: bool = False,
) -> BleuCounts:
    """The counts of one host's sentences.

    Args:
      hypotheses: detokenised text, as sacreBLEU wants it.
      references: as in sacreBLEU, `references[k][i]` is reference k of sentence i.
      mask: only sentences where it is true count.
      tokenize: sacreBLEU's name of the tokeniser. All hosts must use the same.
      lowercase: count without regard to case.

    Raises:
      MetricError: numbers of sentences differ.
      MissingPackageError: sacreBLEU is not installed.
    """
    counts = {f"references[{k}]": len(one) for k, one in enumerate(references)}
    counts |= {} if mask is None else {"mask": len(mask)}
    wrong = [f"{name} has {count}" for name, count in counts.items() if count != len(hypotheses)]
    if wrong or not references:
        raise MetricError(
            f"bleu: {len(hypotheses)} hypotheses, and {'; '.join(wrong) or 'no references'}. Give one each a sentence."
        )
    kept = [i for i in range(len(hypotheses)) if mask is None or mask[i]]
    if not kept:
        return BleuCounts()
    judge = _sacrebleu().metrics.BLEU(tokenize=tokenize, lowercase=lowercase)
    found = judge.corpus_score([hypotheses[i] for i in kept], [[one[i] for i in kept] for one in references])
    return BleuCounts(tuple(found.counts), tuple(found.totals), found.sys_len, found.ref_len, len(kept))


def bleu(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    mask: Sequence[bool] | None = None,
    tokenize: str = "13a",
    lowercase: bool = False,
    smoothing: str = "exp",
    hosts: ProcessGroup = ALONE,
) -> float:
    """BLEU, 0 to 100, over the sentences of all hosts; see `bleu_counts`. Every host gets the same.

    Raises:
      MetricError: what `bleu_counts` refuses on some host, which is named; or no sentence was counted.
    """
    parts = gather_parts(lambda: bleu_counts(hypotheses, references, mask, tokenize, lowercase), BleuCounts, hosts)
    return sum(parts, BleuCounts()).score(smoothing)


def _sacrebleu() -> ModuleType:
    return import_optional("bleu", "sacrebleu")
