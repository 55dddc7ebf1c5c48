"""The objective of text-to-text tasks: tokens to learn from, and the model's own answers to be judged by."""

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from multipod.errors import MetricError
from multipod.metrics.answers import ANSWER_METRICS
from multipod.metrics.hosts import ProcessGroup, gather_parts
from multipod.metrics.objective import Answers, Sums, Values
from multipod.metrics.sparse import SparseTokens
from multipod.pytrees import Batch, Outputs

_JUDGED = "judged/"
"""Before the name of each metric among the sums of an evaluation."""


@runtime_checkable
class AsksTasks(Protocol):
    """Data of one or several text-to-text tasks, such as `multipod.data.tasks.Task`.

    Batches of several have an entry `task`: the number of each example's task.
    """

    def marks(self) -> tuple[int, int]:
        """The token that a decoder begins with, and the one that ends a text."""
        ...

    def answer_text(self, tokens: np.ndarray) -> str:
        """The words of an answer, without special tokens and sentinels."""
        ...

    def task_names(self) -> tuple[str, ...]:
        """What the tasks are called in a report."""
        ...


@dataclass(frozen=True)
class TextToText:
    """The values of `SparseTokens`; an evaluation also has the model answer every test example, and judges the words.

    All answers of all hosts are judged together; rows that fill up a batch do not count. With several tasks each metric
    is reported for each as `METRIC/TASK`, and as `METRIC` the mean over the tasks, all of the same weight. Each device
    answers its own rows, and each host sends all others the words of its answers.

    Attributes:
      tokens: the objective of the tokens.
      metrics: names of `multipod.metrics.answers.ANSWER_METRICS`.
      beam: 1: the likeliest token at each place; more: beam search that keeps so many answers in sight.
      penalty: exponent of the beam search's length penalty (arXiv:1609.08144, equation 14).
      longest: tokens of an answer at most; 0: as many as the longest that is wanted.
    """

    tokens: SparseTokens = field(default_factory=SparseTokens)
    metrics: tuple[str, ...] = ("exact_match", "token_f1")
    beam: int = 1
    penalty: float = 0.6
    longest: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.metrics if name not in ANSWER_METRICS]
        if unknown or not self.metrics:
            raise MetricError(
                f"text-to-text: metrics={', '.join(self.metrics) or 'none'}: no metric of answers is called "
                f"{', '.join(unknown) or 'so'}. Name some of {', '.join(ANSWER_METRICS)}."
            )
        if self.beam < 1 or self.longest < 0 or not self.penalty >= 0:
            raise MetricError(
                f"text-to-text: beam={self.beam} (1 or more), longest={self.longest} and penalty={self.penalty} (0 or "
                "more). Change objective.beam, objective.longest or objective.penalty."
            )

    def __call__(self, outputs: dict[str, Outputs], batch: Batch) -> Values:
        """The values of `tokens`."""
        return self.tokens(outputs, batch)

    def answer(self, model: Any, params: Any, outputs: Outputs, batch: Batch, data: Any) -> tuple[jax.Array, ...]:
        """The answer to each source, int32 [examples, length], its label, and its task's number if there are several.

        Raises:
          MetricError: a model that does not answer texts, or data that are no tasks.
        """
        method = "generate" if self.beam == 1 else "translate"
        wrong = [] if hasattr(model, method) else [f"{type(model).__name__} has no method `{method}`"]
        wrong += [] if isinstance(data, AsksTasks) else [f"{type(data).__name__} is no task"]
        if wrong:
            raise MetricError(f"text-to-text: {'; '.join(wrong)}. Take an StMoe on a `Task` or a `TaskMixture`.")
        start, end = data.marks()
        length = self.longest or batch["label"].shape[1]
        source, search = {"source": batch["source"]}, {"start": start, "end": end, "length": length}
        if self.beam == 1:
            told = model.generate(params, source, **search)
        else:
            told = model.translate(params, source, **search, beam=self.beam, penalty=self.penalty).tokens[:, 0]
        return told, batch["label"], *([batch["task"]] if "task" in batch else [])

    def judge(self, answers: Answers, data: Any, hosts: ProcessGroup) -> dict[str, float]:
        """Each metric over the answers of all hosts, for each task and the mean over tasks.

        Raises:
          MetricError: no example was counted.
          MissingPackageError: a metric's library is not installed.
        """
        texts = [
            row
            for part in gather_parts(lambda: _texts(answers, data), list[tuple[int, str, str]], hosts)
            for row in part
        ]
        if not texts:
            raise MetricError("text-to-text: no answer was counted: all test examples are masked. Give it examples.")
        numbers = sorted({task for task, _, _ in texts})
        by_task = [[row for row in texts if row[0] == number] for number in numbers]
        judged: dict[str, float] = {}
        for metric in self.metrics:
            values = [ANSWER_METRICS[metric](*zip(*((a, b) for _, a, b in rows), strict=True)) for rows in by_task]
            judged[_JUDGED + metric] = sum(values) / len(values)
            if len(names := data.task_names()) > 1:
                judged |= {f"{_JUDGED}{metric}/{names[n]}": value for n, value in zip(numbers, values, strict=True)}
        return judged

    def finish(self, sums: Sums) -> dict[str, float]:
        """What `tokens` reports; of an evaluation the metrics, too.

        Raises:
          PoisonedError: see `SparseTokens.finish`.
          MetricError: no example or no token was counted.
        """
        report = self.tokens.finish({name: one for name, one in sums.items() if not name.startswith(_JUDGED)})
        judged = {name: one for name, one in sums.items() if name.startswith(_JUDGED)}
        return report | {name.removeprefix(_JUDGED): float(one) for name, one in judged.items()}


def _texts(answers: Answers, data: AsksTasks) -> list[tuple[int, str, str]]:
    """The task's number, what was told and what was wanted, of this host's examples."""
    found = []
    for told, label, *rest in answers:
        tasks = rest[0] if len(rest) > 1 else np.zeros(len(label), int)
        for row in np.flatnonzero(rest[-1]):
            found.append((int(tasks[row]), data.answer_text(told[row]), data.answer_text(label[row])))
    return found
