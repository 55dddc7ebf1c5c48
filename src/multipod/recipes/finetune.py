"""The recipe of a fine-tuning: a pre-trained run's model on a task, with what ST-MoE's study changes."""

import json
from dataclasses import dataclass, field, fields, replace
from typing import Any

from multipod.data.span_corruption import SpanCorruption
from multipod.data.tasks import Task
from multipod.errors import RecipeError
from multipod.metrics.sparse import SparseTokens
from multipod.models.st_moe import StMoe
from multipod.optim.partly import Partly
from multipod.recipe.override import override
from multipod.recipe.recipe import Recipe

PREFIX = "finetune:"


@dataclass(frozen=True)
class FineTuning:
    """What is asked for. The defaults are those that were best for sparse models (arXiv:2202.08906).

    Attributes:
      recipe: the pre-trained run's recipe.
      overrides: its changes, as `name=value`.
      task: the file of the task.
      train: which parameters are updated, see `multipod.optim.partly.SUBSETS`.
      rate: the constant learning rate.
      batch: examples of an update.
      updates: length.
      dropout: share dropped, but inside experts.
      expert_dropout: share dropped of the experts' hidden features.
      capacity: capacity factor in evaluation.
      sentinels: mark what is to be told by a sentinel.
    """

    recipe: str
    task: str
    overrides: tuple[str, ...] = ()
    train: tuple[str, ...] = field(default=("all",))
    rate: float = 1e-3
    batch: int = 32
    updates: int = 200
    dropout: float = 0.1
    expert_dropout: float = 0.2
    capacity: float = 2.0
    sentinels: bool = True

    def name(self) -> str:
        """The name by which `multipod.recipes.find` knows the recipe."""
        return PREFIX + json.dumps({one.name: getattr(self, one.name) for one in fields(self)})


def from_name(name: str) -> Recipe:
    """The recipe behind a name that `FineTuning.name` made."""
    values = json.loads(name.removeprefix(PREFIX))
    listed: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return fine_tuned(FineTuning(**listed))


def fine_tuned(asked: FineTuning) -> Recipe:
    """The recipe.

    Raises:
      RecipeError: the run is not of a model that can be fine-tuned so.
    """
    from multipod.recipes.find import load

    before = override(load(asked.recipe), list(asked.overrides))
    model, data, optimizer = before.model, before.data, _constant(before.optimizer, asked.rate)
    if not isinstance(model, StMoe) or not isinstance(data, SpanCorruption):
        raise RecipeError(
            f"fine-tuning {asked.recipe}: it is a {type(model).__name__} on {type(data).__name__}. Text-to-text tasks "
            "need an StMoe that was trained by SpanCorruption: st-moe-small, or your own."
        )
    routing = replace(model.routing, evaluation_capacity=asked.capacity)
    model = replace(model, dropout=asked.dropout, expert_dropout=asked.expert_dropout, routing=routing, group_rows=0)
    return replace(
        before,
        name=f"{before.name}-finetuned",
        model=model,
        data=Task(asked.task, data, sentinels=asked.sentinels),
        objective=SparseTokens(),
        optimizer=Partly(optimizer, asked.train),
        batch=asked.batch,
        updates=asked.updates,
        evaluate_every=max(1, asked.updates // 4),
        checkpoint_every=0,
    )


def _constant(optimizer: Any, rate: float) -> Any:
    """`optimizer` at a constant rate. Its state is that of the pre-training, so it has no warm-up."""
    known = {one.name for one in fields(optimizer)}
    changes = {"rate": rate, "decay": "constant", "warmup": 0.0, "warmup_updates": 0}
    return replace(optimizer, **{name: value for name, value in changes.items() if name in known})
