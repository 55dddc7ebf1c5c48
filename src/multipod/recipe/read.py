"""Values out of the tables of a recipe's text, with the types that the tables name."""

import dataclasses
import importlib
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from multipod.errors import RecipeError, nearest
from multipod.layout.fields import TYPES, from_fields
from multipod.layout.layout import Layout


def read_value(value: Any, annotation: Any, path: str) -> Any:
    """Returns what TOML says at `path` of a recipe as a value of a field with this annotation.

    A table with a `kind`, `module:name`, becomes the dataclass of that name. Only dataclasses are called.

    Raises:
      RecipeError: as `import_kind`, or a value that does not fit.
    """
    if isinstance(value, dict):
        kind = import_kind(value["kind"], path) if "kind" in value else annotation
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return _dataclass(value, kind, path)
        if "kind" in value:
            raise RecipeError(f"{path}: {value['kind']} is no dataclass. A recipe is read back from dataclasses alone.")
        return {name: read_value(item, _argument(annotation, -1), f"{path}.{name}") for name, item in value.items()}
    if isinstance(value, list) and (any(isinstance(item, dict) for item in value) or not _is_plain(annotation)):
        return tuple(read_value(item, _argument(annotation, 0), path) for item in value)
    if isinstance(value, str) and not _is_plain(annotation) and ":" in value:
        return _object(value, annotation, path)
    return _plain(value, annotation, path)


def import_kind(kind: str, path: str) -> Any:
    """Returns the class or function `module:name`.

    Raises:
      RecipeError: there is none, or it stands in a file that cannot be imported by its name.
    """
    module, _, name = kind.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeError(
            f"{path}: {kind} cannot be imported ({error}). If it stands in the file of a recipe, FILE.py:FUNCTION, "
            "set PYTHONPATH to the folder of that file; it must not stand inside a function."
        ) from error
    return value


def _dataclass(table: dict[str, Any], kind: type, path: str) -> Any:
    if kind is Layout:
        return _layout(table, path)
    annotations = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    unknown = [name for name in table if name not in fields and name != "kind"]
    if unknown:
        said = " ".join(f"{path}.{name}: {nearest(name, fields)}" for name in unknown)
        raise RecipeError(f"{kind.__name__} has no field {' and no field '.join(unknown)}. {said}")
    values = {name: read_value(table[name], annotations[name], f"{path}.{name}") for name in fields if name in table}
    # TOML has no nothing: `to_text` leaves it out.
    values |= {name: None for name in fields if name not in table and _takes_none(annotations[name])}
    missing = [name for name, field in fields.items() if name not in values and _is_required(field)]
    if missing:
        raise RecipeError(f"{path}: {kind.__name__} needs {' and '.join(missing)}. Write that, too.")
    return kind(**values)


def _layout(table: dict[str, Any], path: str) -> Layout:
    """Returns a layout, whose fields a text calls by their flat names."""
    values = {name: value for name, value in table.items() if name != "kind"}
    unknown = [name for name in values if name not in TYPES]
    if unknown:
        said = " ".join(f"{path}.{name}: {nearest(name, TYPES)}" for name in unknown)
        raise RecipeError(f"Layout has no field {' and no field '.join(unknown)}. {said}")
    return from_fields({name: _plain(value, TYPES[name], f"{path}.{name}") for name, value in values.items()})


def _object(name: str, annotation: Any, path: str) -> Any:
    """Returns the function or class of this name, where a field holds one."""
    value = import_kind(name, path)
    if not isinstance(value, type | Callable) or (
        isinstance(value, type) and typing.get_origin(annotation) is not type
    ):
        raise RecipeError(
            f"{path}: the text says of a {name} only its type. A recipe that is read back has dataclasses."
        )
    return value


def _plain(value: Any, annotation: Any, path: str) -> Any:
    if not _is_plain(annotation):
        return value
    try:
        return msgspec.convert(value, annotation)
    except msgspec.ValidationError as error:
        raise RecipeError(f"{path}={value!r} does not fit: {error}.") from error


def _is_plain(annotation: Any) -> bool:
    """Whether values of this annotation are numbers, texts, or lists of such, and no objects."""
    if typing.get_origin(annotation) is typing.Literal:
        return True
    arguments = [argument for argument in typing.get_args(annotation) if argument is not Ellipsis]
    if arguments:
        origin = typing.get_origin(annotation)
        return origin in (tuple, list, dict, typing.Union, types.UnionType) and all(map(_is_plain, arguments))
    return annotation in (str, int, float, bool, type(None))


def _argument(annotation: Any, number: int) -> Any:
    arguments = [argument for argument in typing.get_args(annotation) if argument is not Ellipsis]
    return arguments[number] if arguments else Any


def _takes_none(annotation: Any) -> bool:
    return type(None) in typing.get_args(annotation)


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
