"""Tables of a recommendation model as large as its data ask for."""

from collections.abc import Sequence

from multipod.data.source import SetsTables
from multipod.recipe.override import override
from multipod.recipe.recipe import Recipe

FIELD = "model.rows"


def table_changes(recipe: Recipe, changes: Sequence[str]) -> list[str]:
    """Returns the change that gives the recipe's model the rows that its data set.

    Args:
      recipe: with `changes`, which may say where the data are.
      changes: each `name=value`; a `model.rows` among them stands.

    Returns:
      `model.rows=...`; nothing where the data set none, or `changes` do.
    """
    rows = recipe.data.table_rows() if isinstance(recipe.data, SetsTables) else ()
    said = any(change.partition("=")[0].strip() == FIELD for change in changes)
    return [f"{FIELD}={','.join(map(str, rows))}"] if rows and not said else []


def override_with_tables(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """Returns the recipe with all `changes` (`multipod.recipe.override`), and its tables as its data set them.

    Raises:
      RecipeError: a change that does not fit, or rows that the model cannot have.
      DataError: the data are there and cannot be read.
    """
    changed = override(recipe, changes)
    return override(changed, table_changes(changed, changes))
