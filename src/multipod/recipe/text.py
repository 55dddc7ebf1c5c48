"""A recipe as text (TOML) and back, and what differs between two such texts."""

import dataclasses
import tomllib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import tomli_w

from multipod.errors import RecipeError
from multipod.layout.fields import to_fields
from multipod.layout.layout import Layout
from multipod.layout.sync import COMBINATIONS
from multipod.optim.optimizer import RegularizedOptimizer
from multipod.recipe.bad_updates import BadUpdateRules
from multipod.recipe.choices import CHOICES
from multipod.recipe.old_forms import upgrade
from multipod.recipe.override import aliases_of
from multipod.recipe.read import read_value
from multipod.recipe.recipe import Recipe

WHERE = (
    *("layout.mesh", "layout.failed", "layout.tile", "layout.rules"),
    *("layout.spatial", "layout.model", "layout.expert"),
    *("layout.shard_update", "layout.shard_weights", "layout.bucket_bytes"),
    *("layout.gradient_sum", "layout.report_orthogonality"),
)
"""Fields that say where a run lies and who adds, not what it learns: a run may go on with others. Adasum depends on all
of them; a run that combines by it may lose chips all the same, since its tree is one of chip numbers."""

DATA_PLACES = ("data.train_files", "data.test_files", "data.format")
"""Fields that say where the data are. Whether they are the same data, `train.run_folder.check_data` asks the data."""

BAD_UPDATES = tuple(f"bad_updates.{field.name}" for field in dataclasses.fields(BadUpdateRules))
"""Fields that say what to do about bad updates: a run that met one may go on with others."""


def to_text(recipe: Recipe) -> str:
    """Returns the whole recipe as TOML. Values that are objects appear as tables, with their type as `kind`."""
    return tomli_w.dumps(_table(recipe))


def from_text(text: str) -> Recipe:
    """Returns the recipe whose text `to_text` wrote, in this version or an older one.

    Raises:
      RecipeError: no TOML, a type that cannot be imported, or a field that its type does not have.
    """
    try:
        table = upgrade(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(
            f"the text of a recipe is no TOML: {error}. Write one with `multipod show RECIPE`."
        ) from error
    return read_value(table, Recipe, "recipe")


def differences(old: str, new: str, *, learning: bool = True) -> list[str]:
    """Returns what a run that began with recipe text `old` would do otherwise under `new`: `batch: 128, now 64`.

    Where it does not go on `learning`, but is looked at, it may lie anywhere. A field that an older version did not
    have has its default there.
    """
    before, after = (flat_fields(_completed(text)) for text in (old, new))
    combines = {before.get("layout.gradient_sum"), after.get("layout.gradient_sum")} & set(COMBINATIONS)
    moved = ("layout.failed", "layout.report_orthogonality") if combines and learning else WHERE
    free = (*DATA_PLACES, *BAD_UPDATES, *moved, "target")
    return [
        f"{name}: {before.get(name, 'absent')}, now {after.get(name, 'absent')}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name) and name not in free
    ]


def _completed(text: str) -> str:
    """Returns a recipe's text with the fields that it lacks; itself, if its types cannot be imported here."""
    with suppress(RecipeError):
        return to_text(from_text(text))
    return text


def _table(value: Any) -> dict[str, Any]:
    kind = {} if isinstance(value, Recipe) else {"kind": _kind(type(value))}
    # What a dataclass does not show of itself is none of its settings: the parent of a Linen module, for example.
    named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr}
    fields = to_fields(value) if isinstance(value, Layout) else named
    return kind | {name: _plain(field) for name, field in fields.items() if field is not None}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _table(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, str | int | float | bool):
        return value
    return _kind(value if isinstance(value, type | Callable) else type(value))


def _kind(value: Any) -> str:
    return f"{getattr(value, '__module__', '?')}:{getattr(value, '__qualname__', repr(value))}"


def flat_fields(text: str) -> dict[str, Any]:
    """Returns the fields of a recipe's text in today's form, by the names that `--set` takes."""
    fields = _flat(upgrade(tomllib.loads(text)))
    short = {name: _flat_name(name) for name in fields}
    return {name if short[name] in fields else short[name]: value for name, value in fields.items()}


def _flat_name(name: str) -> str:
    """Returns the alias of a field that has one: `optimizer.rate` of `optimizer.rate.then.peak`."""
    group, _, path = name.partition(".")
    for wrapper in (choice for choice in CHOICES.values() if choice.wrapper):
        path = path.replace(f".{wrapper.inside}.", ".")
    return f"{group}.{_ALIASES.get(group, {}).get(path, name.removeprefix(f'{group}.'))}" if path else name


_ALIASES = {
    group: {path: alias for alias, path in aliases_of(kind).items()}
    for group, kind in {"optimizer": RegularizedOptimizer}.items()
}
"""The aliases of a recipe's groups of fields, by what they stand for."""


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
