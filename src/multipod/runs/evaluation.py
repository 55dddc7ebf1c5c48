"""Evaluates a run on its test data, and has it tell answers to text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from multipod.data.span_corruption import START
from multipod.data.stdlib_text import END
from multipod.errors import RecipeError
from multipod.metrics.objective import finished
from multipod.runs.opening import OpenedRun, open_run
from multipod.runs.options import RuntimeOptions
from multipod.train.evaluation import evaluate as evaluate_state


@dataclass(frozen=True)
class Evaluation:
    """What a run makes of its test data.

    Attributes:
      update: updates done in the state that was judged.
      count: test examples, each counted once.
      values: what the objective says of them, `loss`, `accuracy` and so on.
      sums: the sums over examples that the values were made of.
    """

    update: int
    count: int
    values: dict[str, float]
    sums: dict[str, Any]


def evaluate_run(
    run: str | Path | OpenedRun, *, at: int | None = None, options: RuntimeOptions | None = None
) -> Evaluation:
    """Evaluates a run, opened or in this folder, on all of its test examples.

    Raises:
      MultipodError: see `multipod.runs.opening.open_run`.
    """
    opened = run if isinstance(run, OpenedRun) else open_run(run, at=at, options=options)
    sums = evaluate_state(opened.program, opened.state, opened.recipe.data.test())
    return Evaluation(int(opened.state.update), int(sums["count"]), finished(opened.recipe.objective, sums), dict(sums))


@dataclass(frozen=True)
class Answer:
    """What a model told of one test example, token by token, beside what was wanted."""

    source: str
    told: str
    wanted: str
    right: bool


def tell_answers(run: OpenedRun, count: int) -> Sequence[Answer]:
    """What the model answers to the first `count` test examples, each token behind those it told before.

    Raises:
      RecipeError: a model or data that have no text to tell.
    """
    recipe = run.recipe
    if not hasattr(recipe.model, "tell") or not hasattr(recipe.data, "spelled"):
        raise RecipeError(
            f"--tell: {type(recipe.model).__name__} on {type(recipe.data).__name__} has no text to tell. Leave it out, "
            "or give a run of an StMoe on text."
        )
    model: Any = recipe.model
    source = recipe.data.test()
    batch = source.read(np.arange(min(count, len(source))))
    label = batch["label"]
    asked = {"source": batch["source"]}
    tell = jax.jit(lambda params: model.tell(params, asked, start=START, end=END, length=label.shape[1]))
    tokens = np.asarray(tell(run.params))
    spell = recipe.data.spelled
    return [
        Answer(spell(asked), spell(told), spell(wanted), bool((told == wanted).all()))
        for asked, told, wanted in zip(batch["source"], tokens, label, strict=True)
    ]
