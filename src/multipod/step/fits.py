"""Whether an update fits in memory: asked of XLA once it is compiled, before it is run."""

import math
from typing import Any

import jax

from multipod import runtime
from multipod.errors import LayoutError
from multipod.layout.mesh import data_devices
from multipod.step.program import Program


def refuse_too_large(program: Program, compiled: Any, room_bytes: int | None = None) -> None:
    """Refuses an update that needs more memory than a device has, with what would fit.

    Args:
      program: whose state is on its devices already.
      compiled: its update.
      room_bytes: that a device has left beside the state; of the devices that are here if None. Where that is not
        known nothing is refused.

    Raises:
      LayoutError: it does not fit.
    """
    stats = compiled.memory_analysis()
    room = _room_bytes(program) if room_bytes is None else room_bytes
    need = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    if room is None or need <= room:
        return
    recipe, devices = program.recipe, data_devices(program.mesh)
    rows = program.rows // devices
    # Temporaries grow with the rows of a device; those that do not, gradients, are few where this matters.
    fit = math.floor(rows * room / need)
    parts = next((k for k in range(recipe.accumulate + 1, rows + 1) if rows % k == 0 and rows // k <= fit), 0)
    ways = [f"batch={fit * devices}" if fit else "", f"accumulate={parts}" if parts else "", "more devices"]
    raise LayoutError(
        f"{recipe.name}: an update of {rows} rows on each device needs {need / 2**30:.3g} GiB beside the state, and "
        f"there are {room / 2**30:.3g}. About what would fit: {', or '.join(way for way in ways if way)}."
    )


def _room_bytes(program: Program) -> int | None:
    """What each device has left: of its own memory, or, of virtual devices, their share of the host's."""
    local = [device for device in program.mesh.devices.flat if device.process_index == jax.process_index()]
    stats = [device.memory_stats() for device in local]
    if all(stat and "bytes_limit" in stat for stat in stats):
        return min(stat["bytes_limit"] - stat.get("bytes_in_use", 0) for stat in stats)
    available = runtime.available_bytes()
    return None if available is None or local[0].platform != "cpu" else available // len(local)
