"""Evaluates a run on its test data, and has it tell answers to text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multipod.data.source import DecodesTokens
from multipod.data.span_corruption import START
from multipod.data.stdlib_text import END
from multipod.data.text.text_tokens import HidesSpans
from multipod.errors import RecipeError
from multipod.metrics.objective import report_of
from multipod.nn.model import Generates
from multipod.runs.opening import OpenedRun, open_run
from multipod.runs.options import RuntimeOptions
from multipod.train.evaluation import evaluate as evaluate_state


@dataclass(frozen=True)
class EvaluationResult:
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
    run: str | Path | OpenedRun,
    *,
    at: int | None = None,
    changes: Sequence[str] = (),
    options: RuntimeOptions | None = None,
) -> EvaluationResult:
    """Evaluates a run, opened or in this folder, on all of its test examples; `changes` are of its layout.

    Raises:
      MultipodError: see `multipod.runs.opening.open_run`.
    """
    opened = run if isinstance(run, OpenedRun) else open_run(run, at=at, changes=changes, options=options)
    sums = evaluate_state(opened.program, opened.state, opened.recipe.data.test())
    values = report_of(opened.recipe.objective, sums)
    return EvaluationResult(int(opened.state.update), int(sums["count"]), values, dict(sums))


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
    model, data = run.recipe.model, run.recipe.data
    if not isinstance(model, Generates) or not isinstance(data, DecodesTokens):
        raise RecipeError(
            f"--tell: {type(model).__name__} on {type(data).__name__} has no text to tell. Leave it out, "
            "or give a run of an StMoe on text."
        )
    source = data.test()
    batch = source.read(np.arange(min(count, len(source))))
    label = batch["label"]
    source_tokens = {"source": jnp.asarray(batch["source"])}
    tokens = data.text_tokens() if isinstance(data, HidesSpans) else None
    start, end = (tokens.start, tokens.end) if tokens else (START, END)
    answer = jax.jit(lambda params: model.generate(params, source_tokens, start=start, end=end, length=label.shape[1]))
    answers = np.asarray(answer(run.params))
    return [
        Answer(data.decode(asked), data.decode(told), data.decode(wanted), bool((told == wanted).all()))
        for asked, told, wanted in zip(batch["source"], answers, label, strict=True)
    ]
