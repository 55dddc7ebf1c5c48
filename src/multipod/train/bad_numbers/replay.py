"""Finds out why an update is bad: the chip, the batch, or neither. See `step.replay`."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from multipod.layout.mesh import data_devices
from multipod.pytrees import Batch
from multipod.step.guard import Controls
from multipod.step.program import Program
from multipod.step.state import State
from multipod.train import multihost

PLACEMENTS = 3
"""Two disagree, and the third says which is wrong."""


@dataclass(frozen=True)
class Finding:
    """What replays on other devices say.

    Attributes:
      devices: places (in the order of the shares of a batch) of devices whose results differ from those that others
        have for the same share; none if all agree.
      shares: of the batch, that are not finite whoever works them out.
      sure: each of `devices` was outvoted. Two devices cannot tell which of them is right.
    """

    devices: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    sure: bool = True


def compare_placements(words: Sequence[np.ndarray], finite: Sequence[np.ndarray]) -> Finding:
    """Compares the fingerprints of each placement k, in which device s + k (mod devices) works out share s.

    Raises:
      ValueError: the devices differ so widely that no few of them can be wrong: their results depend on neighbours.
    """
    devices = len(words[0])
    wrong: set[int] = set()
    sure = True
    for share in range(devices):
        rows = [tuple(placement[share]) for placement in words]
        usual = max(rows, key=rows.count)
        if len(set(rows)) == 1:
            continue
        sure &= rows.count(usual) > len(rows) / 2
        wrong |= {(share + k) % devices for k, row in enumerate(rows) if row != usual or rows.count(usual) == 1}
    if sure and 2 * len(wrong) > devices:
        raise ValueError(f"{len(wrong)} of {devices} devices differ")
    shares = [share for share in range(devices) if not any(placement[share] for placement in finite)]
    return Finding(tuple(sorted(wrong)), tuple(shares), sure)


@dataclass(frozen=True)
class Cause:
    """What was found out on other devices: a line, and whether a chip is named in it."""

    text: str
    chip: bool = False


def find_cause(program: Program, before: State, batch: Batch, controls: Controls) -> Cause:
    """What is known of an update that was bad twice in place; `before` is the state before it.

    All processes call it at the same point, and all get the same.
    """
    replay = program.replay
    if replay is None:
        why = "because devices work out their shares together in this layout"
        return Cause(f"bad again in place; not tried elsewhere, {why}")
    devices = data_devices(program.mesh)
    shifts = range(min(PLACEMENTS, devices))
    tried = [replay.fingerprints(before, batch, controls, shift % devices) for shift in shifts]
    hosts = multihost.gather_lines(socket.gethostname())
    try:
        finding = compare_placements([words for words, _ in tried], [finite for _, finite in tried])
    except ValueError as error:
        return Cause(f"bad again in place; elsewhere {error}, which their talk with neighbours may explain")
    if finding.devices:
        named = ", ".join(_named(program, device, hosts) for device in finding.devices)
        which = "" if finding.sure else "one of "
        return Cause(f"bad chip: {which}{named} works out other bits than others do from the same examples", chip=True)
    rows = program.rows // devices
    if finding.shares:
        first = ", ".join(f"{share * rows} to {(share + 1) * rows - 1}" for share in finding.shares[:4])
        return Cause(f"bad batch: rows {first} are not finite on {len(tried)} different devices, bit for bit")
    return Cause(f"bad batch: {len(tried)} different devices agree bit for bit on every share")


def _named(program: Program, device: int, hosts: Sequence[str]) -> str:
    assert isinstance(program.mesh, Mesh)
    chip = program.mesh.devices.reshape(data_devices(program.mesh), -1)[device, 0]
    host = hosts[chip.process_index] if chip.process_index < len(hosts) else "?"
    return f"device {chip.id} of process {chip.process_index} on {host}"
