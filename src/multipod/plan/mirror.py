"""What it costs to survive a lost host in the process (`multipod launch --survive`): copies in memory, and for whom.

Each host copies what its devices hold to its memory, each piece once, and sends what it alone holds to the next host,
from its first device to that one's, all hosts at once (docs/design/availability.md). One process a host is assumed.
"""

from dataclasses import dataclass

from multipod.plan.machine import Machine
from multipod.plan.network import to_next_host_s
from multipod.plan.predict import Prediction, replicas_of

HOST_BYTES_PER_S = 12e9
"""From a device to its host's memory: PCIe 3.0 with 16 lanes, as DMA reaches it. An assumption, for want of data."""

COPIES = 2
"""That each host keeps, since one may have finished an update that another has not."""


@dataclass(frozen=True)
class Mirroring:
    """One copy of the state, of the host that has most.

    Attributes:
      copied: bytes that go from the devices to the host's memory.
      sent: bytes that this host alone holds, which the next one keeps too: what would die with it.
      copy_s, send_s: how long these take; nothing of a step is hidden behind them.
    """

    copied: float
    sent: float
    copy_s: float
    send_s: float

    @property
    def kept(self) -> float:
        """Bytes of host memory."""
        return COPIES * (self.copied + self.sent)

    @property
    def seconds(self) -> float:
        """Seconds of a copy, which is made each k updates with `--mirror-every k`."""
        return self.copy_s + self.send_s


def mirroring(step: Prediction, machine: Machine) -> Mirroring:
    """What a copy costs in this layout on this machine."""
    shared = machine.network == "shared"  # its only chip is the host
    here = min(machine.devices, (1 if shared else machine.chips_per_host) * machine.devices_per_chip)
    sync, memory = step.layout.sync, step.memory
    parts = min(here, step.layout.replica_devices)  # devices of this host whose weights differ
    weights = (here if sync.fsdp else parts) * memory.parameters
    optimizer = (here if sync.shards_update else parts) * memory.optimizer
    sent = 0.0
    if here < machine.devices:
        only = replicas_of(step.layout, step.batch, machine) == 1
        sent = (weights if only or sync.fsdp else 0.0) + (optimizer if only or sync.shards_update else 0.0)
    chip = machine.topology.chip
    assert chip is not None  # a Machine has one
    lane = chip.memory_bytes_per_s if shared else HOST_BYTES_PER_S
    send_s = to_next_host_s(machine, sent) if sent else 0.0
    return Mirroring(weights + optimizer, sent, (weights + optimizer) / lane, send_s)


def with_copies(step: Prediction, machine: Machine, every: int) -> Prediction:
    """The step with its share of a copy, which is made each `every` updates; 0: never."""
    if not every:
        return step
    return step.with_part("copies_s", "copies for a lost host", mirroring(step, machine).seconds / every)
