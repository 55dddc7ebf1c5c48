"""Trains a pre-trained run's model on a text-to-text task."""

from dataclasses import replace
from pathlib import Path

from multipod.recipes.finetune import FineTuning, make_finetuning
from multipod.runs.opening import restore_state
from multipod.runs.options import RuntimeOptions
from multipod.runs.recipes import configure_recipe, recorded_changes, recorded_recipe
from multipod.runs.request import ANOTHER_RUN, RunResult, TrainRequest
from multipod.runs.training import train_request
from multipod.step.program import Program
from multipod.step.state import State
from multipod.train.run_folder import open_folder


def finetune_run(
    pretrained: str | Path,
    asked: FineTuning,
    request: TrainRequest | None = None,
    *,
    reset_optimizer: bool = False,
    options: RuntimeOptions | None = None,
) -> RunResult:
    """Fine-tunes the model of the run in the folder `pretrained` in a new run.

    Of `request` all but the recipe is used; its `at` is the checkpoint of the pre-trained run to begin from.

    Raises:
      RecipeError: the run's model cannot be fine-tuned so.
      CheckpointError: there is no such checkpoint.
    """
    folder, facts = open_folder(Path(pretrained))
    before = configure_recipe(recorded_recipe(folder, facts), recorded_changes(folder, facts), RuntimeOptions())
    given = request or TrainRequest()

    def begin(program: Program) -> State:
        return pretrained_state(program, Path(pretrained), given.at, reset_optimizer)

    recipe = make_finetuning(before, asked)
    return train_request(replace(given, recipe=recipe, at=None, begin=begin, origin=ANOTHER_RUN), options)


def pretrained_state(program: Program, run: Path, at: int | None, reset_optimizer: bool) -> State:
    """The state before the first update: the run's parameters, and its optimizer's state unless it is reset.

    Raises:
      CheckpointError: there is none, or it is of another model.
    """
    folder, _ = open_folder(run)
    local = program.recipe.layout.sync.local_state  # of the chips of that run, which may be others
    before = restore_state(folder, program.shapes, at, weights_only=reset_optimizer and local)
    fresh = program.init()
    return fresh._replace(params=before.params, optimizer=fresh.optimizer if reset_optimizer else before.optimizer)
