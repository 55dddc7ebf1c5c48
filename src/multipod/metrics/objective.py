"""Objectives: from a model's outputs to values of each example, of which `loss` is minimised.

Every metric that is a sum is a pair. The device part is the objective, called in the step: its values are added up
over examples and devices with the padding masked (`masked_sums`). The host part turns the sums into what a run
reports (`report_of`): means over the examples, unless the objective is one that `Reports` something else.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from multipod.errors import MetricError
from multipod.metrics.hosts import ProcessGroup
from multipod.pytrees import Batch, Outputs

Values = dict[str, jax.Array]
"""Named arrays of shape [examples]; `loss` is always among them. Booleans are counted exactly."""
Sums = Mapping[str, Any]
"""What the values add up to, and `count`: numbers, or arrays of one."""
Answers = Sequence[tuple[np.ndarray, ...]]
"""What `JudgesAnswers.answer` gave for each batch, this host's rows; the last array is the mask, true for examples."""


class Objective(Protocol):
    """What training minimises and evaluation reports, example by example.

    More methods are optional, one for each protocol below: what it `Reports`, that it `Scores` examples or `Detects`
    objects, that it `JudgesAnswers` of the model.
    """

    def __call__(self, outputs: Outputs, batch: Batch) -> Values:
        """The values of each example; their means over all examples are what a run reports."""
        ...


@runtime_checkable
class Reports(Protocol):
    """An objective whose report is not the mean of its values."""

    def finish(self, sums: Sums) -> dict[str, float]:
        """What a run reports, from sums that include `count`."""
        ...


@runtime_checkable
class Scores(Protocol):
    """An objective of yes and no: an evaluation makes the exact `auc` of its scores, one more of the sums."""

    def score(self, outputs: Outputs, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The score and the label of each example."""
        ...


@runtime_checkable
class Detects(Protocol):
    """An objective of boxes: an evaluation makes COCO's average precision of what it finds, one more of the sums.

    Attributes:
      kinds: what is judged, `box` and perhaps `mask`.
    """

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is judged: `box`, `mask`."""
        ...

    def detect(self, outputs: Outputs, batch: Batch) -> dict[str, jax.Array]:
        """What was found in each example; slots behind the last detection are padding.

        - `image_id`: [examples], `size`: [examples, 2], height and width of the original image.
        - `box`: [examples, slots, 4], left, top, width, height in pixels of the original image.
        - `score`, `label`: [examples, slots]; labels as the data number them. `kept`: bool, false for padding.
        - `mask`: with the kind `mask`, [examples, slots, pixels, pixels], each stretched over its box; shares of 1.
        """
        ...


@runtime_checkable
class JudgesAnswers(Protocol):
    """An objective for which an evaluation also has the model answer: translations, say. Not in pipeline stages."""

    def answer(self, model: Any, params: Any, outputs: Outputs, batch: Batch, data: Any) -> tuple[jax.Array, ...]:
        """The answers to this device's examples, arrays whose first dim counts examples; works inside `jax.jit`.

        `outputs` are the model's of the same batch, and `data` those of the recipe.
        """
        ...

    def judge(self, answers: "Answers", data: Any, hosts: ProcessGroup) -> dict[str, float]:
        """More sums of the evaluation, of all hosts; each host judges the examples that it has.

        Raises:
          MetricError: an answer that cannot be judged.
          MissingPackageError: a library that judges them is not installed.
        """
        ...


@dataclass(frozen=True)
class Classification:
    """Softmax cross-entropy with smoothed labels, and accuracy.

    Attributes:
      label_smoothing: the share of probability spread evenly over all classes (arXiv:1512.00567).
      top: also report, for each k here, how often the label is among the k classes with the largest logits.
    """

    label_smoothing: float = 0.0
    top: tuple[int, ...] = ()

    def __call__(self, outputs: jax.Array, batch: Batch) -> Values:
        """`loss` (float32), `accuracy` and `top_K_accuracy` (bool) of each example, from logits [examples, classes].

        Of mixed images (`multipod.data.mixing`) the loss is that of both labels by their shares, and accuracies are of
        `label`.

        A label outside the classes counts as wrong, and its loss means nothing: `metrics.labels.check_labels` finds
        it on the host. A check here, one `select`, would change how XLA rounds the whole step.
        """
        logits, labels = outputs.astype(jnp.float32), batch["label"]
        targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), self.label_smoothing)
        if "mixed_label" in batch:
            share, others = batch["mixed_share"][:, None], jax.nn.one_hot(batch["mixed_label"], logits.shape[-1])
            targets = (1 - share) * targets + share * optax.smooth_labels(others, self.label_smoothing)
        values = {"loss": optax.softmax_cross_entropy(logits, targets), "accuracy": logits.argmax(-1) == labels}
        return values | {f"top_{k}_accuracy": among_top(k, logits, labels) for k in self.top}


@dataclass(frozen=True)
class TokenClassification:
    """Cross-entropy of tokens, with accuracy and perplexity over tokens: language models and translation.

    With smoothed labels, eps of the probability spread evenly over all V tokens of the vocabulary, a token costs

        log sum exp(z) - (1 - eps) z_label - eps mean(z)

    from its logits z: nothing as large as the logits is made of the labels, and logits that are split over the
    vocabulary need no gathering. (The MLPerf Transformer spreads eps over the V - 1 other tokens and
    subtracts the least possible cost: the same gradient at eps V / (V - 1), and a constant.)

    Attributes:
      weight: the entry of the batch that says which tokens count (not zero: counts), [examples, positions];
        empty: all count.
      tokens_per_example: what an example's loss is divided by. 0: its own number of tokens that count, so that
        every example weighs the same; a constant gives every token the same weight.
      label_smoothing: eps, in the loss alone; `nats` and perplexity are without it (arXiv:1512.00567).
    """

    weight: str = "weight"
    tokens_per_example: float = 0.0
    label_smoothing: float = 0.0

    def __call__(self, outputs: jax.Array, batch: Batch) -> Values:
        """`loss`, and sums over an example's tokens, from logits [examples, positions, vocabulary] and `label`.

        `nats` is the cross-entropy of all tokens that count, `right` how many of them have the largest logit, `tokens`
        their number. The loss of a label outside the vocabulary is NaN where it counts.
        """
        logits, labels = outputs.astype(jnp.float32), batch["label"]
        counts = batch[self.weight] != 0 if self.weight else jnp.ones(labels.shape, bool)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.clip(labels, 0, logits.shape[-1] - 1))
        each = jnp.where(_is_class(labels, logits), each, jnp.nan)
        nats = jnp.where(counts, each, 0).sum(-1)
        cost = nats
        if self.label_smoothing:
            even = jax.nn.logsumexp(logits, -1) - logits.mean(-1)
            smoothed = (1 - self.label_smoothing) * each + self.label_smoothing * even
            cost = jnp.where(counts, smoothed, 0).sum(-1)
        tokens = counts.sum(-1, dtype=jnp.int32)
        return {
            "loss": cost / (self.tokens_per_example or jnp.maximum(tokens, 1).astype(cost.dtype)),
            "nats": nats,
            "right": ((logits.argmax(-1) == labels) & counts).sum(-1, dtype=jnp.int32),
            "tokens": tokens,
        }

    def finish(self, sums: Sums) -> dict[str, float]:
        """`loss`, a mean over examples, and `accuracy` and `perplexity` over tokens.

        Raises:
          MetricError: no example or no token was counted.
        """
        loss, tokens = means(sums)["loss"], int(sums["tokens"])
        if not tokens:
            raise MetricError(
                f"evaluation: of {int(sums['count']):,} examples no token counts: batch[{self.weight!r}] is zero "
                "everywhere. See how the data mark the tokens to predict."
            )
        nats = float(sums["nats"]) / tokens
        return {
            "loss": loss,
            "accuracy": float(sums["right"]) / tokens,
            "perplexity": math.inf if nats > 700 else math.exp(nats),  # beyond, a float overflows
        }


def among_top(k: int, logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Whether fewer than k classes come before the label; [examples], bool.

    Classes are ordered by falling logits, equal ones by their number, as in `jax.lax.top_k`; no sort is needed. NaN
    comes before everything, and a label outside the classes after everything.

    Raises:
      MetricError: there are fewer than k classes.
    """
    classes = logits.shape[-1]
    if not 1 <= k <= classes:
        raise MetricError(f"top_{k}_accuracy: the model has {classes} classes. Give `top` numbers from 1 to {classes}.")
    own = jnp.take_along_axis(logits, jnp.clip(labels, 0, classes - 1)[..., None], axis=-1)
    earlier = (logits == own) & (jnp.arange(classes) < labels[..., None])
    before = (~(logits <= own) | earlier).sum(-1)
    return (before < k) & _is_class(labels, logits)


def masked_sums(values: Values, mask: jax.Array | None = None) -> Values:
    """The sum of each value over the examples where `mask` is true, and their number as `count`.

    Booleans are summed as int32: counts of correct answers stay exact to the last example.
    """
    mask = jnp.ones(values["loss"].shape, bool) if mask is None else mask
    sums = {
        name: jnp.sum(value & mask, dtype=jnp.int32) if value.dtype == bool else jnp.where(mask, value, 0).sum()
        for name, value in values.items()
    }
    return sums | {"count": jnp.sum(mask, dtype=jnp.int32)}


def means(sums: Sums) -> dict[str, float]:
    """The mean of each value, from sums that include `count`.

    Raises:
      MetricError: no example was counted.
    """
    count = int(sums["count"])
    if not count:
        raise MetricError(
            "evaluation: no example was counted: the evaluation set is empty, or all of it is masked. Give it examples."
        )
    return {name: float(value) / count for name, value in sums.items() if name != "count"}


def report_of(objective: Objective, sums: Sums) -> dict[str, float]:
    """What a run reports, from sums that include `count`: what the objective `Reports`, or the means.

    Raises:
      MetricError: no example was counted, or see the objective.
    """
    return objective.finish(sums) if isinstance(objective, Reports) else means(sums)


def scores_of(objective: Objective, outputs: Outputs, batch: Batch) -> tuple[jax.Array, ...] | dict[str, jax.Array]:
    """The score and the label of each example, or what it detects; empty if the objective does neither."""
    if isinstance(objective, Detects):
        return objective.detect(outputs, batch)
    return objective.score(outputs, batch) if isinstance(objective, Scores) else ()


def answers_of(
    objective: Objective, model: Any, params: Any, outputs: Outputs, batch: Batch, mask: jax.Array, data: Any
) -> tuple[jax.Array, ...] | dict[str, jax.Array]:
    """The model's answers and the mask, of an objective that `JudgesAnswers`; of others what `scores_of` gives."""
    if isinstance(objective, JudgesAnswers):
        return *objective.answer(model, params, outputs, batch, data), mask
    return scores_of(objective, outputs, batch)


def _is_class(labels: jax.Array, logits: jax.Array) -> jax.Array:
    return (labels >= 0) & (labels < logits.shape[-1])
