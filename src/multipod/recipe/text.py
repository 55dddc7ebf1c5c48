"""A recipe as text (TOML), and what differs between two such texts."""

import dataclasses
import tomllib
from collections.abc import Callable
from typing import Any

import tomli_w

from multipod.layout.layout import COMBINATIONS
from multipod.recipe.recipe import Recipe
from multipod.recipe.trouble import Trouble

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

TROUBLE = tuple(f"trouble.{name}" for name in ("kind", *(field.name for field in dataclasses.fields(Trouble))))
"""Fields that say what to do about bad updates: a run that met one may go on with others."""

RENAMED = {"multipod.models.dlrm_tables:TablePlacement": "multipod.models.dlrm_tables:TablePlacement"}
"""Types that the texts of older runs call by another name."""


def to_text(recipe: Recipe) -> str:
    """The whole recipe as TOML. Values that are objects appear as tables, with their type as `kind`."""
    return tomli_w.dumps(_table(recipe))


def differences(old: str, new: str, *, learning: bool = True) -> list[str]:
    """What a run that began with recipe text `old` would do otherwise under `new`: `batch: 128, now 64`.

    Where it does not go on `learning`, but is looked at, it may lie anywhere.
    """
    before, after = _flat(tomllib.loads(old)), _flat(tomllib.loads(new))
    combines = {before.get("layout.gradient_sum"), after.get("layout.gradient_sum")} & set(COMBINATIONS)
    moved = ("layout.failed", "layout.report_orthogonality") if combines and learning else WHERE
    free = (*DATA_PLACES, *TROUBLE, *moved)
    return [
        f"{name}: {before.get(name, 'absent')}, now {after.get(name, 'absent')}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name) and name not in free
    ]


def _table(value: Any) -> dict[str, Any]:
    kind = {} if isinstance(value, Recipe) else {"kind": _kind(type(value))}
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
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


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: _renamed(value)}
    return flat


def _renamed(value: Any) -> Any:
    return RENAMED.get(value, value) if isinstance(value, str) else value
