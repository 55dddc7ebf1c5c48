"""Where the dense tables of a DLRM lie: in which array each is kept, and how its rows are looked up there.

Tables are kept in few arrays, one below the other, so that one gather serves many. What a layout may split over its
axis `expert` is an array of its own, with room to divide by `parts`: whatever number of devices that divides `parts`
shares it, the array is the same, and so is a checkpoint of it.

| array | tables of way (`multipod.layout.tables`) | split by the layout |
|---|---|---|
| `tables/dense` | `replicated` | never |
| `tables/rows` | `row` | in blocks of rows |
| `tables/whole` | `table`, each whole in one of the parts | in blocks of rows, which are whole tables |
| `tables/columns` | `column` | by columns |
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np

from multipod.errors import LayoutError
from multipod.layout.tables import SMALL_BYTES, place_tables
from multipod.layout.tables import Way as Place
from multipod.nn.dims import Dims
from multipod.nn.tables import sharded_tables
from multipod.nn.tables.sharded_tables import AXIS, TableFields

Placement = Literal["replicated", "table", "row", "column", "auto"]

ARRAYS: dict[Place, str] = {
    "replicated": "tables/dense",
    "row": "tables/rows",
    "table": "tables/whole",
    "column": "tables/columns",
}
DIMS: dict[str, Dims] = {
    "tables/rows": ("table_rows", None),
    "tables/whole": ("table_rows", None),
    "tables/columns": (None, "table_columns"),
}
"""Names of the dims that a layout's rules may split; by default both go to the axis `expert`."""


@dataclass(frozen=True)
class TablePlacement:
    """How the dense tables of a model lie.

    Attributes:
      place: a way for all tables, or "auto": those up to `small_bytes` replicated, the others split by rows, as the
        multipod's DLRM had them.
      parts: what the rows of an array that may be split are a multiple of; a layout's `expert` must divide it. Of
        "table" as many as there are devices is best: all parts have the rows of the fullest.
      small_bytes: see `place`.
    """

    place: Placement = "replicated"
    parts: int = 8
    small_bytes: int = SMALL_BYTES

    def wrong(self) -> list[str]:
        """All that is wrong with it."""
        least = {"parts": 1, "small_bytes": 0}
        return [f"tables.{n}={getattr(self, n)} (at least {low})" for n, low in least.items() if getattr(self, n) < low]


@dataclass(frozen=True)
class TableArray:
    """An array of tables.

    Attributes:
      numbers: of the tables in it, in the model's order.
      begins: the first row of each.
      sizes: rows of each.
      rows: of the array, room included.
      parts: that the rows are divided in.
    """

    numbers: tuple[int, ...]
    begins: tuple[int, ...]
    sizes: tuple[int, ...]
    rows: int
    parts: int

    def fields(self, hots: Sequence[int]) -> TableFields:
        """What a lookup must know of these tables' fields, of which a model has `hots` ids each."""
        own = tuple(hots[number] for number in self.numbers)
        return TableFields(own, tuple(begin * self.parts // self.rows for begin in self.begins), self.parts)


def pack_tables(rows: Mapping[int, int], features: int, tables: TablePlacement) -> dict[str, TableArray]:
    """The arrays that hold tables of so many `rows`, by number; none that would be empty."""
    devices = 1 if tables.place == "column" else tables.parts  # columns have no room, and divide as they can
    plan = place_tables(list(rows.values()), features, devices, way=tables.place, small_bytes=tables.small_bytes)
    ways = dict(zip(rows, plan.tables, strict=True))
    found = {}
    for way, name in ARRAYS.items():
        own = [number for number in rows if ways[number].way == way]
        if own:
            found[name] = _packed([rows[n] for n in own], own, way, tables.parts, [ways[n].device for n in own])
    return found


def _packed(sizes: Sequence[int], numbers: Sequence[int], way: Place, parts: int, devices: Sequence[int]) -> TableArray:
    if way != "table":
        begins = np.cumsum([0, *sizes])
        total = int(begins[-1])
        room = math.ceil(total / parts) * parts if way == "row" else total
        return TableArray(tuple(numbers), tuple(begins[:-1].tolist()), tuple(sizes), room, parts)
    loads, within = [0] * parts, []
    for size, device in zip(sizes, devices, strict=True):
        within.append(loads[device])
        loads[device] += size
    each = max(loads)
    begins_of = [device * each + start for device, start in zip(devices, within, strict=True)]
    return TableArray(tuple(numbers), tuple(begins_of), tuple(sizes), parts * each, parts)


def look_up(name: str, array: jax.Array, places: jax.Array, fields: TableFields, shape: tuple[int, int]) -> jax.Array:
    """Vectors [examples, fields, features] of `places` in the array of this name; NaN where a place is -1.

    `array` has this `shape`, [rows, features]; or inside `jax.shard_map` it is the part of such an array that a layout
    has put on this device.

    Raises:
      LayoutError: whole tables, and devices that do not divide the parts.
    """
    devices = math.prod(shape) // array.size
    if devices == 1:
        return sharded_tables.look_up_whole(array, places, fields)
    if name == ARRAYS["table"] and fields.parts % devices:
        fits = " or ".join(str(n) for n in range(1, fields.parts + 1) if fields.parts % n == 0)
        raise LayoutError(
            f"{name}: whole tables in {fields.parts} parts do not divide over expert={devices} devices. Take expert="
            f"{fits}, or set model.tables.parts={devices}."
        )
    return _WAYS[name](array, places, fields, AXIS)


_WAYS: dict[str, Callable[..., jax.Array]] = {
    "tables/rows": sharded_tables.look_up_by_rows,
    "tables/whole": sharded_tables.look_up_by_tables,
    "tables/columns": sharded_tables.look_up_by_columns,
}
