"""`multipod train --from`: what a new run takes over from one that lay otherwise."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from multipod.cli.options import Where, chosen_recipe
from multipod.errors import RecipeError

if TYPE_CHECKING:
    from multipod.step.program import Program
    from multipod.step.state import State


def taken_over(
    run: Path, recipe: str, changes: list[str], at: int | None, where: Where
) -> "tuple[str, list[str], Callable[[Program], State]]":
    """The recipe's name and the changes of a run that goes on from `run`, and what its first state is.

    Raises:
      RecipeError: another recipe's name.
      RunFolderError, LayoutError: as of `multipod.runs.start_from.check_relay`.
    """
    from multipod.runs.start_from import check_relay, relayed
    from multipod.train.run_folder import check_same, open_folder

    folder, facts = open_folder(run)
    if recipe and recipe != facts["recipe"]:
        raise RecipeError(f"{run} is a run of {facts['recipe']}, not of {recipe}. Leave the name out.")
    before = chosen_recipe(facts["recipe"], facts["overrides"], replace(where, mesh=None, fail=()))
    check_same(folder, before)
    changes = [*facts["overrides"], *changes]
    check_relay(folder, facts, before, chosen_recipe(facts["recipe"], changes, where))
    return facts["recipe"], changes, lambda program: relayed(program, folder, facts, before, at)
