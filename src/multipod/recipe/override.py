"""Typed changes to a recipe by dotted names: `optimizer.rate=0.2`, `optimizer=lars`.

A name is a path through the fields of dataclasses, or an alias of one: a dataclass may declare

    aliases: ClassVar[Mapping[str, str]] = {"warmup": "rate.share"}

by which `optimizer.warmup` leads to the field `share` of its `rate`; the empty path is the dataclass itself, for the
choice of its type. A field that may hold one of several types (`multipod.recipe.choices`) is set by the name of one:
it keeps the fields that both have. A name that a wrapper has not is looked for in what it is put around; a name that
only a wrapper has puts it there.
"""

import contextlib
import dataclasses
import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from multipod.errors import RecipeError, nearest
from multipod.layout.fields import FLAT_NAMES, TYPES, flat_change, is_field, with_fields
from multipod.layout.layout import Layout
from multipod.recipe.draft import Draft, draft_of, optional_dataclass

T = TypeVar("T")


@typing.runtime_checkable
class HasLayout(typing.Protocol):
    """A recipe, as far as its layout goes."""

    layout: Layout


@typing.runtime_checkable
class HasPreset(typing.Protocol):
    """A recipe, as far as its preset goes."""

    preset: str | None
    batch: int


class ChangeTarget(NamedTuple):
    """What a dotted name leads to: a field of a draft, or the draft itself where `field` is empty."""

    draft: Draft
    field: str


class _Unknown(Exception):
    """A name that leads nowhere: the draft that has it not, and the path to that."""

    def __init__(self, draft: Draft, path: Sequence[str]) -> None:
        self.draft, self.path = draft, ".".join(path)


def override(value: T, changes: Sequence[str]) -> T:
    """Returns `value` (a recipe) with each `name=text` applied, the last of a name.

    Texts are read as the types of the fields say. All is changed in one go, so that fields which fit only together can
    be given in any order. A batch or a preset brings the numbers of the recipe's preset for that batch
    (`multipod.recipe.scaling`); what is set beside it stays.

    Raises:
      RecipeError: no such field (with the nearest names), or a text of another type.
    """
    settings = dict(map(_setting, changes))
    if not settings:
        return value
    if isinstance(value, Layout):
        return cast(T, _changed_layout(value, settings))
    if isinstance(value, HasPreset) and settings.keys() & {"preset", "batch"}:
        value = cast(T, _with_preset(value, settings))
        settings.pop("preset", None)
    root = _draft(value)
    in_layout = {name: text for name, text in settings.items() if name.startswith("layout.")}
    if in_layout and isinstance(value, HasLayout):
        root.values["layout"] = _changed_layout(value.layout, in_layout, "layout.")
        settings = {name: text for name, text in settings.items() if name not in in_layout}
    # Types first, since fields are those of the type that is chosen; outer ones before what they hold.
    chosen = [
        name for name in sorted(settings, key=lambda name: name.count(".")) if _choose(root, name, settings[name])
    ]
    for name, text in settings.items():
        if name not in chosen:
            _set(root, value, name, text)
    return cast(T, root.build())


def _with_preset(value: Any, settings: Mapping[str, str]) -> Any:
    """Returns a recipe with the preset and the batch that are set, and what the one has for the other."""
    from multipod.recipe.scaling import apply_preset  # which brings JAX in, as `CHOICES` does

    text = settings.get("preset", value.preset)
    name, batch = None if text == "none" else text, _read(settings.get("batch", str(value.batch)), int, "batch")
    if batch < 1 or (name, batch) == (value.preset, value.batch):
        return value  # a batch that is none is refused with all else that is wrong
    return apply_preset(value, name, batch)


def _changed_layout(layout: Layout, settings: Mapping[str, str], prefix: str = "") -> Layout:
    """Returns a layout with all changes, which name its fields by their flat names or by their paths."""
    changes: dict[str, Any] = {}
    for name, text in settings.items():
        path = name.removeprefix(prefix)
        if not is_field(path):
            known = {prefix + each for each in (*TYPES, *FLAT_NAMES)}
            raise RecipeError(f"the recipe has no field {name!r}. {nearest(name, known)}")
        changes |= {field: _read(each, TYPES[field], name) for field, each in flat_change(path, text).items()}
    return with_fields(layout, changes)


def list_names(value: Any, prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of all fields that can be set; of a layout, its flat names."""
    if isinstance(value, Layout):
        yield from (prefix + name for name in TYPES)
        return
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from list_names(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def aliases_of(kind: type) -> Mapping[str, str]:
    """Returns the short names that a dataclass declares for fields further inside."""
    return getattr(kind, "aliases", {})


def _draft(value: Any) -> Draft:
    from multipod.recipe.choices import CHOICES  # which brings JAX in, and the command line starts without it

    return draft_of(value, CHOICES)


def _setting(change: str) -> tuple[str, str]:
    name, equals, text = change.partition("=")
    if not equals:
        raise RecipeError(f"--set {change!r} is not of the form name=value. Write, for example, optimizer.rate=0.2.")
    return name.strip(), text.strip()


def _choose(root: Draft, name: str, text: str) -> bool:
    """Whether `name` leads to a value whose type `text` chooses; it is then chosen."""
    try:
        draft = _group(_find(root, name.split("."), wraps=False))
    except _Unknown:
        return False  # perhaps a field of a type that is chosen later
    if draft is None or text not in draft.choice.types:
        return False
    draft.choose(text)
    return True


def _set(root: Draft, value: Any, name: str, text: str) -> None:
    try:
        target = _find(root, name.split("."))
    except _Unknown as unknown:
        kind = f" {unknown.path} is {unknown.draft.kind.__name__}." if unknown.path else ""
        raise RecipeError(f"the recipe has no field {name!r}. {nearest(name, set(_known(value)))}{kind}") from None
    draft = _group(target)
    if target.field and text == "none" and optional_dataclass(target.draft.annotation(target.field)):
        target.draft.values[target.field] = None
    elif draft is None:
        target.draft.values[target.field] = _read(text, target.draft.annotation(target.field), name)
    elif text in draft.choice.types:
        draft.choose(text)
    elif draft.choice.types:
        raise RecipeError(f"{name}: none is called {text!r}. {nearest(text, draft.choice.types)}")
    else:
        fields = list_names(draft.build(name), name + ".")
        raise RecipeError(f"{name} is a group of fields. Set one of them: {', '.join(fields)}.")


def _group(target: ChangeTarget) -> Draft | None:
    """Returns the draft at a target; None where a plain value stands."""
    return target.draft.child(target.field) if target.field else target.draft


def _find(root: Draft, path: Sequence[str], wraps: bool = True) -> ChangeTarget:
    """Returns what a dotted name leads to; if it `wraps`, wrappers are put where the name asks for them."""
    draft = root
    for number, head in enumerate(path[:-1]):
        alias = aliases_of(draft.kind).get(head)
        target = _follow(draft, [alias] if alias and not draft.has(head) else [head], path[:number], wraps)
        inner = _group(target)
        if inner is None:
            raise _Unknown(draft, path[:number])
        draft = inner
    alias = aliases_of(draft.kind).get(path[-1])
    if alias == "":
        return ChangeTarget(draft, "")
    return _follow(draft, [path[-1]] if alias is None else alias.split("."), path[:-1], wraps)


def _follow(draft: Draft, fields: Sequence[str], path: Sequence[str], wraps: bool) -> ChangeTarget:
    """Returns what plain field names lead to from a draft, at the end of `path`."""
    for name in fields[:-1]:
        target = _holder(draft, name, path, wraps)
        inner = _group(target)
        if inner is None:
            raise _Unknown(draft, path)
        draft, path = inner, [*path, name]
    return _holder(draft, fields[-1], path, wraps)


def _holder(draft: Draft, name: str, path: Sequence[str], wraps: bool) -> ChangeTarget:
    """Returns the target of a field: in the draft, in what it wraps, or in the wrapper that is then put around it."""
    if draft.has(name):
        return ChangeTarget(draft, name)
    inner = draft.child(draft.choice.inside) if draft.kind is draft.choice.wrapper else None
    if inner is not None:
        if inner.has(name):
            return ChangeTarget(inner, name)
        raise _Unknown(inner, path)
    if wraps and draft.can_wrap(name):
        draft.wrap()
        return ChangeTarget(draft, name)
    raise _Unknown(draft, path)


def _known(value: Any, prefix: str = "") -> Iterator[str]:
    """Yields the names that can be set in a dataclass value, aliases among them."""
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        yield prefix + field.name
        if isinstance(inner, Layout):
            yield from (f"{prefix}{field.name}.{name}" for name in TYPES)
            continue
        if dataclasses.is_dataclass(inner):
            yield from _known(inner, f"{prefix}{field.name}.")
    for alias in aliases_of(type(value)):
        with contextlib.suppress(_Unknown):
            _find(_draft(value), [alias])
            yield prefix + alias


def _read(text: str, kind: Any, name: str) -> Any:
    """Returns `text` as a value of type `kind`. Sizes may be written 2x4, lists with or without brackets."""
    error: Exception | None = None
    for candidate in _readings(text):
        try:
            return _numbers(msgspec.convert(candidate, kind, strict=False), text, name)
        except msgspec.ValidationError as reason:
            error = error or reason
    raise RecipeError(f"{name}={text!r} does not fit: {error}. The field is {_spell(kind)}.")


def _numbers(value: T, text: str, name: str) -> T:
    """Returns `value`, of which no number is NaN."""
    if any(isinstance(part, float) and math.isnan(part) for part in (value if isinstance(value, tuple) else (value,))):
        raise RecipeError(f"{name}={text!r} is not a number. Give one.")
    return value


def _readings(text: str) -> Iterator[Any]:
    yield text
    with contextlib.suppress(msgspec.DecodeError):
        yield msgspec.json.decode(text.encode())
    yield [part for part in re.sub(r"(?<=\d)x(?=\d)", ",", text.strip("[]()")).split(",") if part]


def _spell(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")
