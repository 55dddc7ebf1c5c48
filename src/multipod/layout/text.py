"""A layout as one line of text: `data=2x2,model=4,update`, or in the field's short words `dp=2x2,tp=4,zero1`."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from multipod.errors import LayoutError, nearest
from multipod.layout.axes import AXES
from multipod.layout.fields import FLAGS, to_fields
from multipod.layout.layout import Layout

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}

FLAT_OF_AXES = {"y": "mesh"}
"""The flat fields of axes that have not the axis's own name."""


@dataclass(frozen=True)
class Word:
    """What may stand in the text.

    Attributes:
      names: the first is ours, and is written; the others are the field's.
      field: flat, that it sets (`multipod.layout.fields`).
      about: for the help.
      read: from the text behind `=` to that of the field.
    """

    names: tuple[str, ...]
    field: str
    about: str
    read: Callable[[str], str] = str


def _bytes(text: str) -> str:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)i?b?", text.lower())
    if not found:
        raise LayoutError(f"--layout: buckets={text!r} is no number of bytes. Write 4MB, 500KB or 4000000.")
    return str(round(float(found[1]) * UNITS[found[2]]))


def _mesh(text: str) -> str:
    return "" if text == "-1" else text


def _flag(text: str) -> str:
    return text or "true"


WORDS: tuple[Word, ...] = (
    *(
        Word(axis.words, FLAT_OF_AXES.get(name, name), f"splits {axis.splits}", _mesh if name == "y" else str)
        for name, axis in AXES.items()
        if axis.words
    ),
    Word(("schedule",), "schedule", "of a pipeline, as 1f1b or interleaved"),
    Word(("micro",), "micro_batches", "micro-batches of a pipeline"),
    Word(("chunks",), "chunks", "parts of the model on a device, interleaved"),
    Word(("cut",), "cut", "layers of each part, as 3x4x3"),
    Word(("tile",), "tile", "rows x columns of the devices of a replica"),
    Word(("sum",), "gradient_sum", "who adds gradients, as xla, ring or adasum"),
    Word(("gather",), "gather_dtype", "type in which split weights travel"),
    Word(("wire",), "sum_dtype", "type in which gradients travel"),
    Word(("buckets",), "bucket_bytes", "bytes of a message of gradients, as 4MB", _bytes),
    Word(("update", "zero1"), "shard_update", "ZeRO-1: optimizer state split over the data axes", _flag),
    Word(("weights", "fsdp"), "shard_weights", "FSDP, ZeRO-3: weights too", _flag),
)
"""All words; those of the axes come from their table."""

BY_NAME = {name: word for word in WORDS for name in word.names}

EXAMPLE = "data=2x2,model=4,update"


def layout_help() -> str:
    """What `--layout` takes, for the help of commands."""
    words = "; ".join(f"{' or '.join(word.names)}: {word.about}" for word in WORDS)
    return f"How the run lies on the devices, as {EXAMPLE} or dp=2x2,tp=4,zero1. {words}."


def layout_changes(text: str) -> list[str]:
    """The changes to a recipe, `layout.model=4` and so on, that `text` asks for.

    Raises:
      LayoutError: a word that means nothing here, or without the value that it needs.
    """
    changes = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in BY_NAME:
            raise LayoutError(f"--layout: no {name!r} in a layout. {nearest(name, BY_NAME)} As {EXAMPLE}.")
        word = BY_NAME[name]
        if not value and (equals or word.field not in FLAGS):
            raise LayoutError(f"--layout: {name!r} has no value ({word.about}). As {EXAMPLE}.")
        changes.append(f"layout.{word.field}={word.read(value)}")
    return changes


def spelled(layout: Layout, always: Collection[str] = ()) -> str:
    """The text of a layout; rules, failed replicas and what is as usual are left out.

    always: flat fields that are said even so.
    """
    values, usual = to_fields(layout), to_fields(Layout())
    if layout.pipeline is not None:
        usual["schedule"] = ""
    parts = []
    for word in WORDS:
        value = values[word.field]
        if word.field in FLAGS:
            parts += [word.names[0]] if value else [f"{word.names[0]}=false"] if word.field in always else []
        elif value != usual[word.field] or word.field in always:
            parts.append(f"{word.names[0]}={'x'.join(map(str, value)) if isinstance(value, tuple) else value}")
    return ",".join(parts)
