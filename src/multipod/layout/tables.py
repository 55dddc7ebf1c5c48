"""Where the tables of a recommendation model lie on the devices, and what each way sends. Plain arithmetic, no JAX.

| way | who holds what | a lookup sends | an update sends |
|---|---|---|---|
| `replicated` | every device the whole table | nothing | an all-reduce of the table's gradient |
| `table` | one device the whole table | the batch's ids to it, its vectors back | the vectors' gradients to it |
| `row` | every device as many rows | ids to all, partial sums reduce-scattered | gradients gathered |
| `column` | every device features / devices of each row | ids to all, columns exchanged | the same back |

A table in tensor-train form is replicated: its cores are small, and so is their gradient. `nn/tables/sharded_tables.py`
looks tables up in each of these ways, and `multipod.models.dlrm_tables` is how a model in the trainer has them.

Source: the multipod's DLRM (arXiv:2011.03641, section 4.6): the largest tables split by rows over the chips, the
smallest concatenated and replicated; PyTorch's DLRM (arXiv:1906.00091) places by table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from multipod.errors import LayoutError

Way = Literal["replicated", "table", "row", "column"]
WAYS: tuple[Way, ...] = ("replicated", "table", "row", "column")

SMALL_BYTES = 4 << 20
"""Tables up to this size are replicated: at MLPerf's sizes the 13 smallest of 26, as the multipod had it."""


@dataclass(frozen=True)
class PlacedTable:
    """A table and its place.

    Attributes:
      number: of the table, in the model's order.
      rows: of the table.
      features: of a row.
      way: how it lies.
      device: of way "table", the device that has it.
      parameters: numbers in it; fewer than rows x features where it is a tensor train.
    """

    number: int
    rows: int
    features: int
    way: Way
    device: int = 0
    parameters: int = 0

    @property
    def held(self) -> int:
        """Numbers of the table, or of its cores."""
        return self.parameters or self.rows * self.features


@dataclass(frozen=True)
class TablePlan:
    """All tables of a model on so many devices."""

    devices: int
    tables: tuple[PlacedTable, ...]

    def bytes_on(self, device: int) -> int:
        """Bytes of tables on a device, float32."""
        return 4 * sum(_held_on(table, device, self.devices) for table in self.tables)

    @property
    def fullest_bytes(self) -> int:
        """Bytes of tables on the fullest device."""
        return max(map(self.bytes_on, range(self.devices)))

    def offsets(self) -> dict[int, int]:
        """Where each replicated table begins in the one into which all of them are concatenated: one lookup for all."""
        found, rows = {}, 0
        for table in self.tables:
            if table.way == "replicated" and not table.parameters:
                found[table.number] = rows
                rows += table.rows
        return found

    def sent_bytes(self, batch: int, hot: int = 1) -> int:
        """Bytes that a device sends in an update, float32 and int32, for `batch` examples of `hot` ids a table."""
        return sum(sent_bytes(table, batch, self.devices, hot) for table in self.tables)


def place_tables(
    rows: Sequence[int],
    features: int,
    devices: int,
    *,
    way: Way | Literal["auto"] = "auto",
    small_bytes: int = SMALL_BYTES,
    compressed: dict[int, int] | None = None,
) -> TablePlan:
    """A place for every table.

    "auto": tables up to `small_bytes`, and those in tensor-train form, are replicated; the others are split by rows. By
    "table" the largest goes first, each to the device with the least so far.

    Args:
      rows: of the tables.
      features: of a row.
      devices: that share the tables.
      way: one for all tables that are not compressed, or "auto".
      small_bytes: see above.
      compressed: the number of a table in tensor-train form, and its parameters.

    Raises:
      LayoutError: an unknown way, no devices, or columns that do not divide over the devices.
    """
    compressed = compressed or {}
    if way not in (*WAYS, "auto") or devices < 1:
        raise LayoutError(f"tables: way={way!r} on {devices} devices. Ways are {', '.join(WAYS)} and auto.")
    if way == "column" and features % devices:
        raise LayoutError(
            f"tables: {features} columns do not divide over {devices} devices. Split by rows, "
            "or take a number that does."
        )
    load = [0] * devices
    placed: dict[int, PlacedTable] = {}
    for number in sorted(range(len(rows)), key=lambda t: (-rows[t], t)):
        size, own = rows[number] * features, way
        if number in compressed:
            own = "replicated"
        elif way == "auto":
            own = "replicated" if 4 * size <= small_bytes or devices == 1 else "row"
        device = 0
        if own == "table":
            device = load.index(min(load))
            load[device] += size
        placed[number] = PlacedTable(number, rows[number], features, own, device, compressed.get(number, 0))  # type: ignore[arg-type]
    return TablePlan(devices, tuple(placed[number] for number in range(len(rows))))


def sent_bytes(table: PlacedTable, batch: int, devices: int, hot: int = 1) -> int:
    """Bytes that a device sends in an update for one table (of way "table", the mean over the devices).

    All-reduce sends twice (devices - 1) / devices of the buffer, all-gather and reduce-scatter once; ids are int32, and
    gathered for `hot` of them an example. Vectors travel once in the lookup and once, as gradients, in the update.
    """
    share = (devices - 1) / devices
    if table.way == "replicated":
        return round(2 * share * 4 * table.held)
    ids, vectors = 4 * hot * batch, 4 * table.features * batch
    if table.way == "row":  # ids to all; reduce-scatter of the batch's vectors, and the all-gather of their gradients
        return round(share * (ids + 2 * vectors))
    if table.way == "column":  # ids to all; each device's columns of the others' examples, and back
        return round(share * (ids + 2 * vectors / devices))
    return round(share * (ids + 2 * vectors) / devices)


def _held_on(table: PlacedTable, device: int, devices: int) -> int:
    if table.way == "replicated":
        return table.held
    if table.way == "table":
        return table.held if table.device == device else 0
    if table.way == "column":
        return table.held // devices
    return ((table.rows - device + devices - 1) // devices) * table.features
