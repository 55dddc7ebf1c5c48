"""The links of a mesh, where devices say what they are and where they sit: how fast, and which lines are rings."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from multipod.topology.machines import MACHINES
from multipod.topology.topology import BYTES_PER_S, LATENCY_S

PODS: Mapping[str, str] = {
    "TPU v2": "tpu-v2-pod",
    "TPU v3": "tpu-v3-pod",
    "TPU v4": "tpu-v4-pod",
    "TPU v5 lite": "tpu-v5e-pod",
    "TPU v5e": "tpu-v5e-pod",
    "TPU v5": "tpu-v5p-pod",
    "TPU v5p": "tpu-v5p-pod",
    "TPU v6 lite": "tpu-v6e-pod",
    "TPU v6e": "tpu-v6e-pod",
}
"""The machine whose slices hold devices of a kind. Others, CPUs and GPUs among them, do not say where they sit."""


def link_figures(kind: str) -> tuple[float, float]:
    """(seconds, bytes a second) of a link between chips of devices of this kind; a plain link's where nobody knows."""
    if kind not in PODS:
        return LATENCY_S, BYTES_PER_S
    machine = MACHINES[PODS[kind]]
    links = machine.build(machine.shape)
    return float(links.latency_s[0]), float(links.bytes_per_s[0])


def closed_dims(grid: np.ndarray) -> tuple[bool, ...]:
    """Which dims of a grid of devices are closed: in all its lines the ends are as near as neighbours are.

    Nothing is guessed: a dim is open where the devices have no coordinates, where their kind is not in `PODS`,
    where they are no whole slice of chips, or where no line has both its ends.

    Args:
      grid: of devices, with None where one has failed.
    """
    live = [device for device in grid.flat if device is not None]
    slice_shape = _slice_shape(live)
    if slice_shape is None:
        return (False,) * grid.ndim
    wraps = MACHINES[PODS[live[0].device_kind]].build(slice_shape).wrap
    around = np.array([n if wrap else 2 * n for n, wrap in zip(slice_shape, wraps, strict=True)])

    def links(a: Any, b: Any) -> int:
        far = np.abs(np.array(a.coords[: len(around)]) - np.array(b.coords[: len(around)]))
        return int(np.minimum(far, around - far).sum())

    def is_closed(dim: int) -> bool:
        lines = np.moveaxis(grid, dim, -1).reshape(-1, grid.shape[dim])
        ends = [links(line[0], line[-1]) for line in lines if line[0] is not None and line[-1] is not None]
        pairs = [(a, b) for line in lines for a, b in pairwise(line) if a is not None and b is not None]
        hops = [far for a, b in pairs if (far := links(a, b))]  # 0 between the devices of a chip
        return bool(grid.shape[dim] > 2 and ends and hops and max(ends) <= np.median(hops))

    return tuple(is_closed(dim) for dim in range(grid.ndim))


def _slice_shape(devices: Iterable[Any]) -> tuple[int, ...] | None:
    """The chips of the slice that the devices are part of, by dimension; None if that is not known."""
    first = next(iter(devices), None)
    if first is None or first.device_kind not in PODS or getattr(first, "coords", None) is None:
        return None
    dims = len(MACHINES[PODS[first.device_kind]].shape)
    client = getattr(first, "client", None)
    everyone = client.devices() if client is not None else devices
    places = {tuple(device.coords) for device in everyone}
    if len({getattr(device, "slice_index", 0) for device in everyone}) > 1:
        return None  # several slices, which number their chips alike
    shape = tuple(1 + max(place[dim] for place in places) for dim in range(len(first.coords)))
    whole = len(places) == np.prod(shape) and all(n == 1 for n in shape[dims:])
    return shape[:dims] if whole else None
