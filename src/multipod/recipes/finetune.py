"""The recipe of a fine-tuning: a pre-trained run's model on a task, with what ST-MoE's study changes."""

from dataclasses import dataclass, fields, replace
from typing import Any

from multipod.data.span_corruption import SpanCorruption
from multipod.data.task_mixture import TaskMixture
from multipod.data.tasks import Task
from multipod.data.text.files import TextFiles
from multipod.errors import RecipeError
from multipod.metrics.sparse import SparseTokens
from multipod.metrics.text_to_text import TextToText
from multipod.models.st_moe import StMoe
from multipod.optim.optimizer import Optimizer
from multipod.optim.partly import Partly
from multipod.optim.rates import Constant
from multipod.recipe.recipe import Recipe


@dataclass(frozen=True)
class FineTuning:
    """What is asked for. The defaults are those that were best for sparse models (arXiv:2202.08906).

    Attributes:
      tasks: the file of each task, or its data set; `multipod.data.tasks.Task` says which. Several are mixed.
      train: which parameters are updated, see `multipod.optim.partly.SUBSETS`.
      rate: the constant learning rate.
      batch: examples of an update.
      updates: length.
      dropout: share dropped, but inside experts.
      expert_dropout: share dropped of the experts' hidden features.
      capacity: capacity factor in evaluation.
      sentinels: mark what is to be told by a sentinel.
      metrics: what the model's answers are judged by in evaluation, names of `multipod.metrics.answers.ANSWER_METRICS`;
        empty: the model gives no answers there.
      limit, temperature: of a mixture, see `multipod.data.task_mixture.TaskMixture`.
    """

    tasks: tuple[str, ...]
    train: tuple[str, ...] = ("all",)
    rate: float = 1e-3
    batch: int = 32
    updates: int = 200
    dropout: float = 0.1
    expert_dropout: float = 0.2
    capacity: float = 2.0
    sentinels: bool = True
    metrics: tuple[str, ...] = ("exact_match", "token_f1")
    limit: int = 0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.tasks, str) or not self.tasks:
            raise RecipeError(f"fine-tuning: tasks={self.tasks!r} are not several names. Give FineTuning(('FILE',)).")


def make_finetuning(before: Recipe, asked: FineTuning) -> Recipe:
    """Returns the recipe that fine-tunes the model of a run of the recipe `before`.

    Raises:
      RecipeError: the run is not of a model that can be fine-tuned so.
    """
    model, data, optimizer = before.model, before.data, _make_constant(before.optimizer, asked.rate)
    pretrained = data if isinstance(data, SpanCorruption) or (isinstance(data, TextFiles) and data.spans) else None
    if not isinstance(model, StMoe) or pretrained is None:
        raise RecipeError(
            f"fine-tuning {before.name}: it is a {type(model).__name__} on {type(data).__name__}. Text-to-text tasks "
            "need an StMoe that was trained to tell hidden spans: st-moe-small, or your own on TextFiles with "
            "data.spans=true."
        )
    routing = replace(model.routing, evaluation_capacity=asked.capacity)
    model = replace(model, dropout=asked.dropout, expert_dropout=asked.expert_dropout, routing=routing, group_rows=0)
    return replace(
        before,
        name=f"{before.name}-finetuned",
        model=model,
        data=_make_data(asked, pretrained),
        objective=TextToText(metrics=asked.metrics) if asked.metrics else SparseTokens(),
        optimizer=Partly(optimizer, asked.train),
        batch=asked.batch,
        updates=asked.updates,
        evaluate_every=max(1, asked.updates // 4),
        checkpoint_every=0,
    )


def _make_data(asked: FineTuning, pretrained: SpanCorruption | TextFiles) -> Task | TaskMixture:
    tasks = tuple(Task(file, pretrained, sentinels=asked.sentinels) for file in asked.tasks)
    return tasks[0] if len(tasks) == 1 else TaskMixture(tasks, asked.limit, asked.temperature)


def _make_constant(optimizer: Any, rate: float) -> Any:
    """Returns `optimizer` at a constant rate. Its state is that of the pre-training, so it has no warm-up."""
    known = {field.name for field in fields(optimizer)}
    constant: Any = Constant(rate) if isinstance(optimizer, Optimizer) else rate
    return replace(optimizer, rate=constant) if "rate" in known else optimizer
