"""The fields of a layout under one flat list of names: what recipe.toml and `--set layout.NAME` call them.

Files of runs have these names, so they stay; `Layout` itself has its fields where they mean something.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from multipod.errors import LayoutError
from multipod.layout.layout import Layout
from multipod.layout.split import ModelSplit, PipelineSplit
from multipod.layout.sync import Sync

GROUPS: dict[str, type] = {"": Layout, "split": ModelSplit, "pipeline": PipelineSplit, "sync": Sync}

RENAMED = {"replica_shape": "tile", "stages": "stage"}
"""Fields whose flat names are others."""

SHARDING = {"none": (False, False), "zero1": (True, False), "fsdp": (False, True)}
"""`sync.sharding` as the flat fields `shard_update` and `shard_weights`."""

FLAGS = ("shard_update", "shard_weights")

FLAT_NAMES: dict[str, str] = {
    f"{group}.{field.name}".lstrip("."): RENAMED.get(field.name, field.name)
    for group, kind in GROUPS.items()
    for field in fields(kind)
    if field.name not in (*GROUPS, "sharding")
}
"""The flat name of each field by its path, as `model` of `split.model` and `tile` of `replica_shape`."""

ALIASES: dict[str, str] = {flat: path for path, flat in FLAT_NAMES.items()} | dict.fromkeys(FLAGS, "sync.sharding")
"""The path in a `Layout` of the value of each flat name."""

_NO_PIPELINE = PipelineSplit(1)


def _split(path: str) -> tuple[str, str]:
    group, _, name = path.rpartition(".")
    return group, name


TYPES: dict[str, Any] = {
    **{
        flat: get_type_hints(GROUPS[group])[name] for path, flat in FLAT_NAMES.items() for group, name in [_split(path)]
    },
    **dict.fromkeys(FLAGS, bool),
}
"""The type of each flat field."""


def to_fields(layout: Layout) -> dict[str, Any]:
    """All flat fields of a layout; those of a pipeline, where it has none, at their defaults."""
    owners = {"": layout, "split": layout.split, "pipeline": layout.pipeline or _NO_PIPELINE, "sync": layout.sync}
    values = {flat: getattr(owners[group], name) for path, flat in FLAT_NAMES.items() for group, name in [_split(path)]}
    return values | dict(zip(FLAGS, SHARDING[layout.sync.sharding], strict=True))


def from_fields(values: Mapping[str, Any]) -> Layout:
    """The layout with these flat fields; those that are left out have their defaults.

    Raises:
      LayoutError: all that is wrong with it, fields of a pipeline that there is not among them.
    """
    given: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for path, flat in FLAT_NAMES.items():
        group, name = _split(path)
        given[group] |= {name: values[flat]} if flat in values else {}
    update, weights = (bool(values.get(flag)) for flag in FLAGS)
    given["sync"]["sharding"] = "fsdp" if weights else "zero1" if update else "none"
    makers: dict[str, Callable[..., Any]] = {"split": ModelSplit, "pipeline": _pipeline, "sync": Sync}
    made: dict[str, Any] = {}
    wrong = []
    for group, make in makers.items():
        try:
            made[group] = make(**given[group])
        except LayoutError as error:
            wrong.append(str(error))
    if wrong:
        raise LayoutError("\n".join(wrong))
    return Layout(**given[""], **made)


def with_fields(layout: Layout, changes: Mapping[str, Any]) -> Layout:
    """The layout with some flat fields changed; a pipeline that goes takes its own fields along.

    Raises:
      LayoutError: as `from_fields`.
    """
    values = to_fields(layout) | dict(changes)
    if values["stage"] == 1:
        gone = {flat for path, flat in FLAT_NAMES.items() if path.startswith("pipeline.")} - changes.keys()
        values = {flat: value for flat, value in values.items() if flat not in gone}
    return from_fields(values)


def changes_to(layout: Layout, always: Collection[str] = ()) -> list[str]:
    """What a recipe must be changed by to lie like this, as `layout.model=4`: all that is unusual or `always` said."""
    usual = to_fields(Layout())
    values = {name: value for name, value in to_fields(layout).items() if value != usual[name] or name in always}
    return [f"layout.{name}={_text(value)}" for name, value in values.items()]


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value)) if all(isinstance(size, int) for size in value) else str(list(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _pipeline(stages: int = 1, **others: Any) -> PipelineSplit | None:
    if stages != 1:
        return PipelineSplit(stages, **others)
    idle = [f"layout.{name}={value}" for name, value in others.items() if value != getattr(_NO_PIPELINE, name)]
    if idle:
        raise LayoutError(
            f"{' and '.join(idle)} without a pipeline: there are no stages. Set layout.stage, or leave it out."
        )
    return None


def flat_change(name: str, text: str) -> dict[str, str]:
    """A change of a field, named by its path or by its flat name, as texts of flat fields.

    Raises:
      LayoutError: a sharding that there is not.
    """
    if name != "sync.sharding":
        return {FLAT_NAMES.get(name, name): text}
    if text not in SHARDING:
        raise LayoutError(f"layout.sync.sharding={text!r} is no sharding. Take {', '.join(SHARDING)}.")
    return {flag: str(on).lower() for flag, on in zip(FLAGS, SHARDING[text], strict=True)}


def is_field(name: str) -> bool:
    """Whether a layout has a field of this flat name or path."""
    return name in TYPES or name in FLAT_NAMES or name == "sync.sharding"
