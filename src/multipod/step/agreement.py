"""Whether data, model and objective of a recipe fit together, found out before anything is compiled.

Ids are compared as values: data that say how many they give (`GivesIds`) against a model that says how many it takes
(`TakesIds`, `HasClasses`). Fields and shapes need no protocol: tracing the step reads them, and what a trace refuses is
told as what the data give and who cannot take it.
"""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from multipod.data.source import GivesIds
from multipod.errors import MultipodError, RecipeError
from multipod.nn.model import HasClasses, Model, TakesIds
from multipod.pytrees import Batch, IdRange, Params, Statistics
from multipod.recipe.recipe import Recipe

_MISFITS = KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError, NotImplementedError


def check_ids(recipe: Recipe) -> None:
    """Refuses data with ids that the model has no place for: tokens, labels, rows of tables. Reads no example.

    Raises:
      RecipeError: all entries of which this is so, with the fields to change.
    """
    data, model = recipe.data, recipe.model
    given, taken = data.ids_given() if isinstance(data, GivesIds) else {}, _ids_taken(model)
    entries: dict[tuple[IdRange, IdRange], list[str]] = {}
    for name in given.keys() & taken.keys():
        entries.setdefault((given[name], taken[name]), []).append(f"batch[{name!r}]")
    wrong = [line for ranges, names in entries.items() if (line := _beyond(", ".join(sorted(names)), *ranges))]
    if wrong:
        raise RecipeError(f"recipe {recipe.name}: {type(data).__name__} and {_name(model)} differ. {' '.join(wrong)}")


def _ids_taken(model: Model) -> Mapping[str, IdRange]:
    if isinstance(model, TakesIds):
        return model.ids_taken()
    classes = model.classes if isinstance(model, HasClasses) else 0
    return {"label": IdRange((classes,), "classes")} if classes else {}


def _beyond(names: str, given: IdRange, taken: IdRange) -> str:
    """What is wrong with the entries of these names; empty if nothing is."""
    columns, places = given.by_column(), taken.by_column()
    if len(columns) != len(places):
        said = f"The data give {len(columns)} columns of {names}, and the model takes {len(places)}."
        return f"{said} {_way(given, taken)}"
    pairs = enumerate(zip(columns, places, strict=True))
    place, ids, room = next(((k, ids, room) for k, (ids, room) in pairs if ids > room), (0, 0, 0))
    if not ids:
        return ""
    column = f"[:, {place}]" if len(columns) > 1 else ""
    return (
        f"The data give {names}{column} ids up to {ids - 1:,}, and the model takes them up to {room - 1:,}. "
        f"{_way(given, taken)}"
    )


def _way(given: IdRange, taken: IdRange) -> str:
    ways = [f"model.{taken.field}={_listed(given.counts)}"] if taken.field else []
    if ways and given.hots != taken.hots:
        ways[0] += f" and model.hots={_listed(given.hots)}"
    ways += [f"data.{given.field} no larger than the model's"] if given.field else []
    return f"Set {', or '.join(ways)}." if ways else "Give another model or other data."


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


@contextmanager
def refusing_misfits(recipe: Recipe, reader: Any, batch: Batch) -> Iterator[None]:
    """Turns what a trace of `reader`, the model or the objective, cannot take of `batch` into one message.

    Raises:
      RecipeError: who reads what, what the data give, and the line that says so.
    """
    try:
        yield
    except MultipodError:
        raise
    except _MISFITS as error:
        raise RecipeError(_misfit(recipe, reader, batch, error)) from error


def init_model(recipe: Recipe, key: jax.Array) -> tuple[Params, Statistics]:
    """`recipe.model.init(key)`.

    Raises:
      RecipeError: sizes of which no model can be made, with what the model's code says of them.
    """
    try:
        return recipe.model.init(key)
    except MultipodError:
        raise
    except (*_MISFITS, ArithmeticError) as error:
        raise RecipeError(
            f"recipe {recipe.name}: no {_name(recipe.model)} can be made ({_line(error)}): {_reason(error)}. Its "
            f"fields are {_fields(recipe.model)}. Change one in the recipe or with --set model.NAME=VALUE."
        ) from error


def _misfit(recipe: Recipe, reader: Any, batch: Batch, error: Exception) -> str:
    where, who, data = f"recipe {recipe.name}", _name(reader), _name(recipe.data)
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    if isinstance(key, str) and key not in batch:
        return (
            f"{where}: {who} reads batch[{key!r}] ({_line(error)}), and {data} gives {', '.join(batch)}. Give data "
            "that have it, or a model and an objective that do without."
        )
    given = ", ".join(f"{name} {array.dtype}[{_sizes(array.shape)}]" for name, array in batch.items())
    return (
        f"{where}: {who} does not fit what it is given ({_line(error)}): {_reason(error)}. {data} "
        f"gives, on a device, {given}, to the model {_name(recipe.model)}. Change the part that reads it, or the data."
    )


def _reason(error: Exception) -> str:
    """The first line of an error, with its type."""
    return f"{type(error).__name__}: {(str(error).strip() or 'refused').splitlines()[0].rstrip('.')}"


def _fields(model: Any) -> str:
    """The numbers among a model's fields, as `width=0, classes=10`."""
    plain = vars(model) if hasattr(model, "__dict__") else {}
    return ", ".join(f"{name}={value}" for name, value in plain.items() if isinstance(value, int | float | tuple))


def _line(error: Exception) -> str:
    """The last line of the trace that is no library's, as `model.py:31`."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "in a library"


def _name(part: Any) -> str:
    return type(part).__name__


def _sizes(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))
