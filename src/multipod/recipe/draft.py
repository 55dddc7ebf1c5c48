"""A dataclass value under change: fields, types and wrappers are exchanged first, and all is built at once."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from multipod.errors import RecipeError


@dataclass(frozen=True)
class TypeChoice:
    """The types that a field may hold.

    Attributes:
      types: dataclasses by their names.
      wrapper: a dataclass that may be put around any of them; a field that only it has puts it there.
      inside: the wrapper's field that holds what it is put around.
    """

    types: Mapping[str, type] = field(default_factory=dict)
    wrapper: type | None = None
    inside: str = ""


@dataclass
class Draft:
    """A dataclass that is not built yet.

    Attributes:
      kind: its type.
      values: its fields as far as they are given; values, or drafts of values.
      choices: what fields take, by their annotations.
      choice: the types that may stand in its place.
    """

    kind: type
    values: dict[str, Any]
    choices: Mapping[Any, TypeChoice]
    choice: TypeChoice = field(default_factory=TypeChoice)

    def has(self, name: str) -> bool:
        """Whether the type has a field of this name."""
        return name in _fields(self.kind)

    def annotation(self, name: str) -> Any:
        """Returns the annotation of a field."""
        return typing.get_type_hints(self.kind)[name]

    def child(self, name: str) -> "Draft | None":
        """Returns the draft of a field that holds a dataclass; None if it holds anything else.

        An optional dataclass that is not there begins with its defaults.
        """
        value, annotation = self.values.get(name, default_of(_fields(self.kind)[name])), self.annotation(name)
        choice = self.choices.get(annotation, TypeChoice())
        if isinstance(value, Draft):
            return value
        if value is None and (kind := optional_dataclass(annotation)):
            self.values[name] = Draft(kind, {}, self.choices, choice)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            self.values[name] = draft_of(value, self.choices, choice)
        else:
            return None
        return self.values[name]

    def choose(self, name: str) -> None:
        """Takes the type of this name in `choice`, with the fields that both have and that were no defaults."""
        wrapped = self.child(self.choice.inside) if self.kind is self.choice.wrapper else None
        if wrapped is not None:
            wrapped.choose(name)
            return
        kind, before = self.choice.types[name], _fields(self.kind)
        if kind is not self.kind:
            changed = [n for n, v in self.values.items() if isinstance(v, Draft) or v != default_of(before[n])]
            self.kind, self.values = kind, {n: self.values[n] for n in changed if n in _fields(kind)}

    def can_wrap(self, name: str) -> bool:
        """Whether a wrapper with a field of this name may be put around what is here."""
        wrapper = self.choice.wrapper
        return wrapper is not None and wrapper is not self.kind and name in _fields(wrapper)

    def wrap(self) -> None:
        """Puts the wrapper of `choice` around what is here."""
        assert self.choice.wrapper is not None
        inner = Draft(self.kind, self.values, self.choices)
        self.kind, self.values = self.choice.wrapper, {self.choice.inside: inner}

    def build(self, path: str = "") -> Any:
        """Builds the value, which `path` leads to from the recipe.

        Raises:
          RecipeError: fields without a default are missing.
        """
        inside = {name: f"{path}.{name}".lstrip(".") for name in _fields(self.kind)}
        values = {n: v.build(inside[n]) if isinstance(v, Draft) else v for n, v in self.values.items()}
        needed = [name for name, each in _fields(self.kind).items() if default_of(each) is dataclasses.MISSING]
        missing = [inside[name] for name in needed if name not in values]
        if missing:
            raise RecipeError(f"{self.kind.__name__} needs {' and '.join(missing)}: set that, too.")
        return self.kind(**values)


def draft_of(value: Any, choices: Mapping[Any, TypeChoice], choice: TypeChoice | None = None) -> Draft:
    """Returns a draft of a dataclass value as it is."""
    given = {name: getattr(value, name) for name in _fields(type(value))}
    return Draft(type(value), given, choices, choice or TypeChoice())


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """Returns the default of a field, or `dataclasses.MISSING`."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def optional_dataclass(annotation: Any) -> type | None:
    """Returns the dataclass of an annotation like `Pipeline | None`; None of any other."""
    kinds = typing.get_args(annotation)
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType) or type(None) not in kinds:
        return None
    rest = [kind for kind in kinds if kind is not type(None)]
    return rest[0] if len(rest) == 1 and dataclasses.is_dataclass(rest[0]) and isinstance(rest[0], type) else None


def _fields(kind: Any) -> dict[str, "dataclasses.Field[Any]"]:
    return {each.name: each for each in dataclasses.fields(kind) if each.init}
