"""Typed changes to a recipe by dotted names: `optimizer.rate=0.2`."""

import contextlib
import dataclasses
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import msgspec

from multipod.errors import RecipeError, nearest
from multipod.layout.fields import TYPES, flat_change, is_field, with_fields
from multipod.layout.layout import Layout

T = TypeVar("T")


def override(value: T, changes: Sequence[str]) -> T:
    """`value` (a recipe) with each `name=text` applied, the last of a name; the text is read as the field's type says.

    A group is changed in one go, so that fields which fit only together may be given in any order.

    Raises:
      RecipeError: no such field (with the nearest names), or a text of another type.
    """
    wanted: dict[str, Any] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise RecipeError(
                f"--set {change!r} is not of the form name=value. Write, for example, optimizer.rate=0.2."
            )
        path = name.strip().split(".")
        _check(value, name.strip(), path)
        group = wanted
        for head in path[:-1]:
            group = group.setdefault(head, {})
        group[path[-1]] = name.strip(), text.strip()
    return cast(T, _changed(value, wanted))


def names(value: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of all fields that can be set; of a layout, its flat names."""
    if isinstance(value, Layout):
        yield from (prefix + name for name in TYPES)
        return
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from names(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _check(root: Any, name: str, path: Sequence[str]) -> None:
    """Refuses a name that is no field, or a group of fields."""
    value = root
    for k, head in enumerate(path):
        if isinstance(value, Layout) and is_field(".".join(path[k:])):
            return
        known = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
        if head not in known:
            raise RecipeError(f"the recipe has no field {name!r}. {nearest(name, names(root))}")
        value = getattr(value, head)
    if dataclasses.is_dataclass(value):
        raise RecipeError(f"{name} is a group of fields. Set one of them: {', '.join(names(value, name + '.'))}.")


def _changed(value: Any, wanted: dict[str, Any]) -> Any:
    """`value` with all fields changed at once: one alone may not fit what the others still are."""
    if isinstance(value, Layout):
        return _changed_layout(value, wanted)
    kinds = typing.get_type_hints(type(value))
    fields = {
        head: _changed(getattr(value, head), inner)
        if isinstance(inner, dict)
        else _read(inner[1], kinds[head], inner[0])
        for head, inner in wanted.items()
    }
    return dataclasses.replace(value, **fields)


def _changed_layout(layout: Layout, wanted: dict[str, Any]) -> Layout:
    """The layout with all changes, by flat names or by paths."""
    flat = {
        field: (name, one) for path, name, text in _leaves(wanted) for field, one in flat_change(path, text).items()
    }
    return with_fields(layout, {field: _read(text, TYPES[field], name) for field, (name, text) in flat.items()})


def _leaves(wanted: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(path, name, text) of each change in a group."""
    for head, inner in wanted.items():
        if isinstance(inner, dict):
            yield from _leaves(inner, f"{prefix}{head}.")
        else:
            yield prefix + head, *inner


def _read(text: str, kind: Any, name: str) -> Any:
    """`text` as a value of type `kind`. Sizes may be written 2x4, lists with or without brackets."""
    error: Exception | None = None
    for candidate in _readings(text):
        try:
            return msgspec.convert(candidate, kind, strict=False)
        except msgspec.ValidationError as reason:
            error = error or reason
    raise RecipeError(f"{name}={text!r} does not fit: {error}. The field is {_spell(kind)}.")


def _readings(text: str) -> Iterator[Any]:
    yield text
    with contextlib.suppress(msgspec.DecodeError):
        yield msgspec.json.decode(text.encode())
    yield [part for part in re.sub(r"(?<=\d)x(?=\d)", ",", text.strip("[]()")).split(",") if part]


def _spell(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")
