"""Metrics of answers in words: accuracy, exact match, F1, ROUGE, Matthews correlation. Nothing here needs JAX.

Each takes the answers and what was wanted, as many of one as of the other, and returns a number from 0 to 1 (Matthews
correlation: -1 to 1).
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType

from multipod.extras import import_optional

AnswerMetric = Callable[[Sequence[str], Sequence[str]], float]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ROUGE_WORD = re.compile(r"[a-z0-9]+")


def normalize_answer(text: str) -> str:
    """Returns a text as SQuAD compares it: in lower case, without punctuation, articles and repeated spaces.

    Source: Rajpurkar et al., 2016, arXiv:1606.05250, section 6.1.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def answer_accuracy(told: Sequence[str], wanted: Sequence[str]) -> float:
    """Returns the share of answers that are what was wanted, letter by letter, but for spaces around them."""
    return _mean([one.strip() == other.strip() for one, other in _pairs(told, wanted)])


def exact_match(told: Sequence[str], wanted: Sequence[str]) -> float:
    """Returns the share of answers that are what was wanted, compared as `normalize_answer` leaves them."""
    return _mean([normalize_answer(one) == normalize_answer(other) for one, other in _pairs(told, wanted)])


def token_f1(told: Sequence[str], wanted: Sequence[str]) -> float:
    """Returns the mean F1 of the words that an answer shares with what was wanted, both normalised.

    Source: arXiv:1606.05250, section 6.1. Where one of the two has no word it is 1 if the other has none either, as in
    SQuAD 2.0.
    """
    pairs = [(normalize_answer(one).split(), normalize_answer(other).split()) for one, other in _pairs(told, wanted)]
    return _mean([_overlap_f1(Counter(one), Counter(other)) if one and other else one == other for one, other in pairs])


def rouge_n(told: Sequence[str], wanted: Sequence[str], *, n: int) -> float:
    """Returns the mean F1 of the n-grams that an answer shares with what was wanted.

    Words are runs of letters a to z and digits, in lower case, without stemming. A text of fewer than n words has 0.

    Source: Lin, 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", section 2, whose score is the recall;
    the F1 is what later work reports.
    """
    return _mean([_overlap_f1(_ngrams(one, n), _ngrams(other, n)) for one, other in _pairs(told, wanted)])


def rouge_l(told: Sequence[str], wanted: Sequence[str]) -> float:
    """Returns the mean F1 of the longest common subsequence of words, each text as one sentence. Words as in `rouge_n`.

    Source: Lin, 2004, section 3.1, with equal weight for precision and recall.
    """
    pairs = [(_rouge_words(one), _rouge_words(other)) for one, other in _pairs(told, wanted)]
    return _mean([_f1(common_subsequence(one, other), len(one), len(other)) for one, other in pairs])


def common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """Returns the length of the longest common subsequence. Time: the product of the lengths."""
    lengths = [0] * (len(other) + 1)  # of what was seen of `one` with each beginning of `other`
    for word in one:
        diagonal = 0
        for place, match in enumerate(other, 1):
            above = lengths[place]
            lengths[place] = diagonal + 1 if word == match else max(above, lengths[place - 1])
            diagonal = above
    return lengths[-1]


def matthews(told: Sequence[str], wanted: Sequence[str]) -> float:
    """Returns the Matthews correlation of answers that name a class, by scikit-learn; 0 if all are of one class.

    What is wanted of some example is a class; all other answers together are one more.

    Raises:
      MissingPackageError: scikit-learn is not installed.
    """
    wanted, told = _classes(told, wanted)
    if len({*wanted, *told}) == 1:
        return 0.0  # scikit-learn says the same, with a warning
    return float(_sklearn_metrics("matthews").matthews_corrcoef(wanted, told))


def macro_f1(told: Sequence[str], wanted: Sequence[str]) -> float:
    """Returns the mean over all classes of the F1 of each, by scikit-learn; classes as in `matthews`.

    Answers that name no class count against the class that was wanted.

    Raises:
      MissingPackageError: scikit-learn is not installed.
    """
    wanted, told = _classes(told, wanted)
    score = _sklearn_metrics("macro_f1").f1_score
    return float(score(wanted, told, labels=sorted(set(wanted)), average="macro", zero_division=0))


ANSWER_METRICS: Mapping[str, AnswerMetric] = {
    "answer_accuracy": answer_accuracy,
    "exact_match": exact_match,
    "token_f1": token_f1,
    "rouge_1": partial(rouge_n, n=1),
    "rouge_2": partial(rouge_n, n=2),
    "rouge_l": rouge_l,
    "matthews": matthews,
    "macro_f1": macro_f1,
}
"""Every metric by the name that it is reported by."""


def _pairs(told: Sequence[str], wanted: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(told, wanted, strict=True))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _f1(common: int, told: int, wanted: int) -> float:
    return 2 * common / (told + wanted) if common else 0.0


def _overlap_f1(told: Counter[str], wanted: Counter[str]) -> float:
    return _f1((told & wanted).total(), told.total(), wanted.total())


def _rouge_words(text: str) -> list[str]:
    return _ROUGE_WORD.findall(text.lower())


def _ngrams(text: str, n: int) -> Counter[str]:
    words = _rouge_words(text)
    return Counter(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))


def _classes(told: Sequence[str], wanted: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns what was wanted and the answers without spaces around them; what is no class as one that none is."""
    labels = [one.strip() for one in wanted]
    known = set(labels)
    none = max(known, key=len) + "?"  # longer than every class, so that it is none of them
    return labels, [one.strip() if one.strip() in known else none for one in told]


def _sklearn_metrics(name: str) -> ModuleType:
    return import_optional(name, "sklearn.metrics")
