"""A dataclass value under change: fields, types and wrappers are exchanged first, and all is built at once."""

import dataclasses
import types
import typing
from typing import Any

from multipod.errors import RecipeError
from multipod.recipe.choices import CHOICES, Choice


class Draft:
    """A dataclass that is not built yet.

    Attributes:
      kind: its type.
      values: its fields as far as they are given; values, or drafts of values.
      choice: the types that may stand in its place.
    """

    def __init__(self, kind: type, values: dict[str, Any], choice: Choice | None = None) -> None:
        self.kind, self.values, self.choice = kind, values, choice or Choice()

    @classmethod
    def of(cls, value: Any, choice: Choice | None = None) -> "Draft":
        """Returns a draft of a dataclass value as it is."""
        given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return cls(type(value), given, choice)

    def has(self, name: str) -> bool:
        """Whether the type has a field of this name."""
        return any(field.name == name for field in dataclasses.fields(self.kind))

    def annotation(self, name: str) -> Any:
        """Returns the annotation of a field."""
        return typing.get_type_hints(self.kind)[name]

    def child(self, name: str) -> "Draft | None":
        """Returns the draft of a field that holds a dataclass; None if it holds anything else.

        An optional dataclass that is not there begins with its defaults.
        """
        field = next(field for field in dataclasses.fields(self.kind) if field.name == name)
        value, annotation = self.values.get(name, _default(field)), self.annotation(name)
        if isinstance(value, Draft):
            return value
        choice = CHOICES.get(annotation)
        if value is None and (kind := optional_dataclass(annotation)):
            value = Draft(kind, {}, choice)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = Draft.of(value, choice)
        else:
            return None
        self.values[name] = value
        return value

    def choose(self, name: str) -> None:
        """Takes the type of this name in `choice`, with the fields that both have and that were no defaults."""
        wrapped = self.child(self.choice.inside) if self.kind is self.choice.wrapper else None
        if wrapped is not None:
            wrapped.choose(name)
            return
        kind = self.choice.types[name]
        if kind is self.kind:
            return
        defaults = {field.name: _default(field) for field in dataclasses.fields(self.kind)}
        changed = {n: value for n, value in self.values.items() if isinstance(value, Draft) or value != defaults[n]}
        self.kind, self.values = kind, {n: value for n, value in changed.items() if Draft(kind, {}).has(n)}

    def wrap(self) -> None:
        """Puts the wrapper of `choice` around what is here."""
        assert self.choice.wrapper is not None
        self.kind, self.values = self.choice.wrapper, {self.choice.inside: Draft(self.kind, self.values)}

    def build(self, path: str) -> Any:
        """Builds the value, which `path` leads to from the recipe.

        Raises:
          RecipeError: fields without a default are missing.
        """
        values = {
            name: value.build(f"{path}.{name}".lstrip(".")) if isinstance(value, Draft) else value
            for name, value in self.values.items()
        }
        needed = [field.name for field in dataclasses.fields(self.kind) if field.init and _default(field) is _MISSING]
        missing = [f"{path}.{name}".lstrip(".") for name in needed if name not in values]
        if missing:
            raise RecipeError(f"{self.kind.__name__} needs {' and '.join(missing)}: set that, too.")
        return self.kind(**values)


_MISSING = dataclasses.MISSING


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default_factory() if field.default_factory is not _MISSING else field.default


def optional_dataclass(annotation: Any) -> type | None:
    """Returns the dataclass of an annotation like `Pipeline | None`; None of any other."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return None
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    both = len(kinds) == 1 and len(typing.get_args(annotation)) == 2
    return kinds[0] if both and dataclasses.is_dataclass(kinds[0]) and isinstance(kinds[0], type) else None
