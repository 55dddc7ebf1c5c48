"""The `Recipe`: everything that changes what a run learns, and nothing about where it is written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from multipod import notebook
from multipod.data.source import Data
from multipod.errors import RecipeError
from multipod.layout.layout import Layout
from multipod.metrics.objective import Objective
from multipod.nn.model import Model
from multipod.optim.ema import Ema
from multipod.optim.optimizer import Builds
from multipod.optim.pipemare import PipeMare
from multipod.recipe.bad_updates import BadUpdateRules
from multipod.recipe.target import read_target


@dataclass(frozen=True)
class Recipe:
    """A training run.

    Attributes:
      name: one word; run folders begin with it.
      model: two functions on pytrees, see `multipod.nn.model.Model`.
      data: sources of training and test examples.
      objective: the values of an example, of which `loss` is minimised.
      optimizer: one of `multipod.optim.optimizers.OPTIMIZERS`, or your own (`Builds`).
      batch: examples in an update, over the whole mesh.
      updates: length of the run.
      layout: how the run lies on a mesh.
      evaluate_every: updates between evaluations; one more follows the last update. 0: only that one.
      evaluation_batch: examples evaluated at once, over the whole mesh.
      checkpoint_every: updates between checkpoints; one more follows the last update. 0: only that one.
      keep_checkpoints: how many checkpoints are kept, newest first.
      accumulate: parts that each device's rows of a batch go through the model in, one after the other, with their
        gradients added up: the memory of a smaller batch, the update of this one. (Batch norm sees the parts.)
      pipemare: of an asynchronous pipeline (`layout.schedule`), which of PipeMare's techniques it uses.
      seed: of the parameters, of the order of the data, and of its augmentation.
      bad_updates: what is done about an update whose numbers are bad: not finite, or a spike.
      preset: a name in `multipod.optim.presets.PRESETS`, where `optimizer` and `updates` are what it has for `batch`: a
        change of the batch changes them (`multipod.recipe.scaling`). None: they do not depend on each other.
      ema: the moving average of the weights that is judged in their place; None: the weights are.
      target: an evaluation that reaches it ends the run: `accuracy >= 0.759`, `perplexity <= 20`, or several joined by
        `and`, of any values that its evaluations have. Empty: it ends after `updates`.
    """

    aliases: ClassVar[Mapping[str, str]] = {"trouble": "bad_updates"}

    name: str
    model: Model
    data: Data
    objective: Objective
    optimizer: Builds
    batch: int
    updates: int
    layout: Layout = field(default_factory=Layout)
    evaluate_every: int = 0
    evaluation_batch: int = 512
    checkpoint_every: int = 0
    keep_checkpoints: int = 3
    seed: int = 0
    accumulate: int = 1
    pipemare: PipeMare = field(default_factory=PipeMare)
    bad_updates: BadUpdateRules = field(default_factory=BadUpdateRules)
    preset: str | None = None
    ema: Ema | None = None
    target: str = ""

    def _repr_html_(self) -> str:
        """Draws the length of the run and what it is made of, in a notebook."""
        rows = [
            ("updates", f"{self.updates:,}, of {self.batch:,} examples each"),
            ("evaluated", f"every {self.evaluate_every:,} updates" if self.evaluate_every else "at the end"),
            ("saved", f"every {self.checkpoint_every:,} updates" if self.checkpoint_every else "at the end"),
            ("target", self.target or None),
            ("preset", self.preset),
            ("seed", self.seed),
        ]
        shown = ["model", "data", "objective", "optimizer"]
        shown += ["layout"] * (self.layout != Layout()) + ["bad_updates"] * (self.bad_updates != BadUpdateRules())
        shown += ["ema"] * (self.ema is not None)
        parts = [notebook.fields(name, getattr(self, name)) for name in shown]
        return notebook.card("recipe", self.name, rows, *parts)

    def __post_init__(self) -> None:
        least = {"batch": 1, "updates": 1, "evaluation_batch": 1, "keep_checkpoints": 1, "accumulate": 1}
        least |= {"evaluate_every": 0, "checkpoint_every": 0, "seed": 0}
        wrong = [f"{name}={getattr(self, name)} (at least {n})" for name, n in least.items() if getattr(self, name) < n]
        if wrong:
            raise RecipeError(f"recipe {self.name}: {', '.join(wrong)}. Change it in the recipe or with --set.")
        if read_target(self.target) and not self.evaluate_every:
            raise RecipeError(
                f"recipe {self.name}: target={self.target!r}, and evaluate_every=0: nothing would look before the end. "
                "Give evaluate_every the updates between two evaluations."
            )
