"""Typed changes to a recipe by dotted names: `optimizer.rate=0.2`."""

import contextlib
import dataclasses
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from multipod.errors import RecipeError, nearest

T = TypeVar("T")


def override(value: T, changes: Sequence[str]) -> T:
    """`value` (a recipe) with each `name=text` applied in order; the text is read as the field's type says.

    Raises:
      RecipeError: no such field (with the nearest names), or a text of another type.
    """
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise RecipeError(
                f"--set {change!r} is not of the form name=value. Write, for example, optimizer.rate=0.2."
            )
        value = _with(value, name.strip(), name.strip().split("."), text.strip(), value)
    return value


def names(value: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of all fields that can be set."""
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from names(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _with(value: Any, name: str, path: Sequence[str], text: str, root: Any) -> Any:
    head, *rest = path
    known = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    if head not in known:
        raise RecipeError(f"the recipe has no field {name!r}. {nearest(name, names(root))}")
    inner = getattr(value, head)
    if rest:
        changed = _with(inner, name, rest, text, root)
    elif dataclasses.is_dataclass(inner):
        raise RecipeError(f"{name} is a group of fields. Set one of them: {', '.join(names(inner, name + '.'))}.")
    else:
        changed = _read(text, typing.get_type_hints(type(value))[head], name)
    return dataclasses.replace(value, **{head: changed})


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
