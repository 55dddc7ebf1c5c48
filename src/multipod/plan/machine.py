"""A machine as the planner sees it: a topology, what its devices really reach, and what a run costs around the
steps."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from multipod.errors import PlanError, nearest
from multipod.plan.files import read_object
from multipod.topology import machines
from multipod.topology.chips import CHIPS
from multipod.topology.topology import Topology

Network = Literal["links", "shared"]


@dataclass(frozen=True)
class Calibration:
    """What the machine's data sheet does not say; one set of constants for all models, sizes and layouts.

    Attributes:
      convolution, matmul, vector: share of the peak FLOP/s that operators of this kind reach where they fill the unit.
      memory: share of the memory's peak bandwidth.
      op_s: seconds that each operator takes beside its arithmetic: starting it, filling and draining its pipelines.
      link: share of a link's peak bandwidth.
      hop_s: latency of a link.
      message_s: seconds that each collective takes beside its hops and bytes.
      start_s: seconds of a run before its first step counts, and after its last.
      step_error, sum_error: relative errors of a step's price and of a sum's: layouts that differ by less are ties.
      alone: (a shared host) the share of its cores that a single device keeps busy; several devices use all.
      source: where the constants are from.
    """

    convolution: float = 0.5
    matmul: float = 0.5
    vector: float = 0.5
    memory: float = 0.7
    op_s: float = 2e-6
    link: float = 0.67
    hop_s: float = 1e-6
    message_s: float = 2e-6
    start_s: float = 5.0
    step_error: float = 0.15
    sum_error: float = 0.3
    alone: float = 1.0
    source: str = "guesses, not fitted"

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={getattr(self, name)!r}"
            for name in CONSTANTS
            if not isinstance(getattr(self, name), int | float) or not 0 <= getattr(self, name) < math.inf
        ]
        wrong += [f"{name}=0" for name in SHARES if getattr(self, name) == 0]
        if wrong:
            raise PlanError(
                f"calibration: {', '.join(wrong)}. Shares of a peak are above 0, seconds are 0 or more; mend the "
                f"file or "
                "calibrate again."
            )


SHARES = ("convolution", "matmul", "vector", "memory", "link", "alone")
CONSTANTS = (*SHARES, "op_s", "hop_s", "message_s", "start_s", "step_error", "sum_error")


@dataclass(frozen=True)
class Machine:
    """What a plan is made for.

    Attributes:
      topology: chips and links; failed ones too.
      calibration: see there.
      devices_per_chip: devices that share a chip's peaks and its links: two cores on TPU v2 and v3; on a CPU, where the
        "chip" is the host, all virtual devices.
      lanes: products fill the matrix unit in tiles of `lanes` x `lanes`, and tensors lie in memory in rows of as
        many; 1 where sizes do not matter.
      network: `links` are simulated; `shared` is one memory through which all messages go one after the other.
      cores: (shared) that start the operators of all devices, one each at a time.
      overlaps: whether gradients travel while the backward pass goes on.
      chips_per_host: for the input.
      host_examples_per_s: that a host prepares; 0 if not known, and then never waited for.
      host_spread: standard deviation of a batch's time over its mean, on one host (heavy-tailed images).
      prefetch: batches that a host has ready at the most.
      price: of a chip for an hour, in any currency; 0 if not known.
      chip_failures_per_hour: of one chip.
    """

    topology: Topology
    calibration: Calibration = Calibration()
    devices_per_chip: int = 1
    lanes: int = 1
    network: Network = "links"
    cores: int = 1
    overlaps: bool = False
    chips_per_host: int = 8
    host_examples_per_s: float = 0.0
    host_spread: float = 0.0
    prefetch: int = 2
    price: float = 0.0
    chip_failures_per_hour: float = 0.0

    def __post_init__(self) -> None:
        if self.topology.chip is None:
            raise PlanError(
                f"{self.topology} says nothing of its chips, so nobody can tell how fast they are. Take a machine of "
                "`multipod topology list` with a chip, as tpu-v3-pod:8x8."
            )

    def __str__(self) -> str:
        return str(self.topology)

    @property
    def chips(self) -> int:
        """Live chips."""
        return len(self.topology.chips)

    @property
    def devices(self) -> int:
        """Live devices."""
        return self.chips * self.devices_per_chip

    @property
    def hosts(self) -> int:
        """Hosts, as if all were full."""
        return -(-self.chips // self.chips_per_host)

    def flop_per_s(self, dtype: str = "bfloat16") -> float:
        """Peak of a device."""
        speeds = self.topology.chip.flop_per_s  # type: ignore[union-attr]
        if self.network == "shared":
            dtype = "float32"  # a host multiplies in the type that it is given
        # JAX's default precision: a TPU multiplies float32 as bfloat16, a GPU that can as TensorFloat-32.
        if dtype == "float32" and "tensorfloat32" in speeds:
            dtype = "tensorfloat32"
        speed = speeds.get(dtype) or speeds.get("bfloat16") or max(speeds.values())
        return speed * self.share

    @property
    def share(self) -> float:
        """The share of its chip's peaks that a device can use."""
        equal = 1 / self.devices_per_chip
        return min(equal, self.calibration.alone) if self.network == "shared" else equal

    @property
    def op_s(self) -> float:
        """Seconds that each operator takes beside its arithmetic; where devices outnumber their cores, they wait."""
        waiting = max(1.0, self.devices_per_chip / self.cores) if self.network == "shared" else 1.0
        return self.calibration.op_s * waiting

    @property
    def memory_bytes(self) -> float:
        """Bytes of memory of a device."""
        return self.topology.chip.memory_bytes / self.devices_per_chip  # type: ignore[union-attr]

    @property
    def memory_bytes_per_s(self) -> float:
        """Peak of a device's share."""
        return self.topology.chip.memory_bytes_per_s * self.share  # type: ignore[union-attr]

    @property
    def link_bytes_per_s(self) -> float:
        """What links carry in one direction, calibrated; of the slowest dimension in use."""
        return self.calibration.link * slowest(self.topology)

    def calibrated(self, **constants: float) -> "Machine":
        """The machine with some constants changed."""
        return replace(self, calibration=replace(self.calibration, **constants))  # type: ignore[arg-type]

    def of(self, topology: Topology) -> "Machine":
        """A machine of this kind with another topology: a slice, or one with failures."""
        return replace(self, topology=topology)


def slowest(topology: Topology) -> float:
    """Bytes a second of the slowest links that join chips of this topology, in one direction."""
    used = [float(speed) for speed, size in zip(topology.bytes_per_s, topology.shape, strict=True) if size > 1]
    return min(used, default=min(map(float, topology.bytes_per_s)))


TPU_V3 = Calibration(
    convolution=0.752,
    matmul=0.907,
    vector=0.03,
    memory=0.945,
    op_s=1.37e-5,
    link=0.603,
    hop_s=5e-7,
    message_s=1e-6,
    start_s=5.2,
    step_error=0.035,
    sum_error=0.27,
    source="fitted to the steps of MLPerf v0.6 (arXiv:1909.09756): `multipod reproduce planner`, "
    "docs/results/planner.md",
)


def here(devices: int, cores: int, calibration: Calibration | None = None) -> Machine:
    """This host with so many virtual devices, as one chip of so many cores: its devices share cores and memory.

    Peaks are those of `cpu-core` in the catalogue; what this host's really are is the calibration's to say.
    """
    core = CHIPS["cpu-core"]
    chip = replace(
        core,
        name="host",
        flop_per_s={name: cores * speed for name, speed in core.flop_per_s.items()},
        memory_bytes=cores * core.memory_bytes,
        memory_bytes_per_s=cores * core.memory_bytes_per_s,
        source=f"{cores} of the catalogue's cpu-core",
    )
    topology = Topology((1,), chip=chip, name=f"here:{devices}")
    constants = calibration or Calibration(memory=1.0, link=1.0, op_s=1e-5, message_s=1e-4, hop_s=1e-6)
    return Machine(topology, constants, devices_per_chip=devices, network="shared", cores=cores, chips_per_host=1)


def find(name: str, fail: Sequence[str] = (), fail_links: Sequence[str] = (), file: Path | None = None) -> Machine:
    """The machine behind the words of a command line (as `multipod.topology.machines.parse` reads them).

    Args:
      name: of the catalogue, perhaps with a size: `tpu-v3-pod:8x8`.
      fail: blocks of failed chips.
      fail_links: failed links.
      file: calibration as `write` made it; else that of the chip's kind.

    Raises:
      TopologyError: words that mean no machine.
      PlanError: a machine without chips, a file that is no calibration.
    """
    topology = machines.parse(name, fail, fail_links)
    chip = topology.chip.name if topology.chip is not None else ""
    machine = Machine(topology, **KINDS.get(chip, {}))
    return replace(machine, **read(file)) if file is not None else machine


KINDS: Mapping[str, Mapping[str, Any]] = {
    "tpu-v2": {"devices_per_chip": 2, "lanes": 128, "calibration": TPU_V3},
    "tpu-v3": {"devices_per_chip": 2, "lanes": 128, "calibration": TPU_V3},
    "tpu-v4": {"lanes": 128, "overlaps": True, "chips_per_host": 4},
    "tpu-v5e": {"lanes": 128, "overlaps": True},
    "tpu-v5p": {"lanes": 128, "overlaps": True, "chips_per_host": 4},
    "tpu-v6e": {"lanes": 128, "overlaps": True},
    "a100": {"overlaps": True, "lanes": 8},
    "h100": {"overlaps": True, "lanes": 8},
    "h200": {"overlaps": True, "lanes": 8},
}
"""What machines of a chip are beside their topology. Those without fitted constants have the guesses of
`Calibration`."""

SETTINGS = (
    *("devices_per_chip", "lanes", "network", "overlaps", "chips_per_host", "host_examples_per_s", "price"),
    *("host_spread", "prefetch", "chip_failures_per_hour"),
)


def write(machine: Machine, file: Path, **about: Any) -> None:
    """Writes the machine's calibration and settings (not its topology) as JSON, with anything else worth knowing."""
    data = {"format": FORMAT, **about, "settings": {name: getattr(machine, name) for name in SETTINGS}}
    file.write_text(json.dumps(data | {"calibration": asdict(machine.calibration)}, indent=1) + "\n")


FORMAT = "multipod-machine-1"


def read(file: Path) -> dict[str, Any]:
    """The fields of `CatalogueEntry` that a file sets.

    Raises:
      PlanError: no such file, or it is no calibration.
    """
    data = read_object(file, (FORMAT,), "machine file", "Make one with `multipod plan calibrate`.")
    settings, constants = data.get("settings", {}), data.get("calibration", {})
    known = {"settings": SETTINGS, "calibration": tuple(field.name for field in fields(Calibration))}
    for part, given in (("settings", settings), ("calibration", constants)):
        for name in given:
            if name not in known[part]:
                raise PlanError(f"{file}: {part} has no {name!r}. {nearest(name, known[part])}")
    return {**settings, "calibration": Calibration(**constants)}
