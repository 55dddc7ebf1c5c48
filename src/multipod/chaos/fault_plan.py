"""Plans of faults: those that are given, and those that are drawn."""

import random
import tomllib
from pathlib import Path

import msgspec

from multipod.chaos.inject import KINDS, Fault, Kind
from multipod.errors import ChaosError

EARLIEST = 2
"""No random fault before so many updates."""

RANDOM_KINDS: tuple[Kind, ...] = ("kill", "stop", "slow", "cut", "corrupt")
"""Drawn where a plan names none. A flipped bit needs a recipe that looks for trouble, so it must be asked for."""


class RandomFaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Faults to be drawn: how many, of what kinds, and how long those last that last."""

    count: int = 0
    kinds: tuple[Kind, ...] = RANDOM_KINDS
    seconds: float = 1.0


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says what is to go wrong; in a file, a slip of the pen is an error.

    Attributes:
      processes: of the run.
      seed: of the random faults.
      fault: those that are given.
      random: those that are drawn.
    """

    processes: int = 2
    seed: int = 0
    fault: tuple[Fault, ...] = ()
    random: RandomFaults = RandomFaults()

    @property
    def flips(self) -> bool:
        """Whether a bit may flip."""
        given = any(fault.kind == "flip" for fault in self.fault)
        return given or (self.random.count > 0 and "flip" in self.random.kinds)

    def faults(self, updates: int) -> list[Fault]:
        """All faults of a run of `updates`, in their order; the same for the same seed.

        Raises:
          ChaosError: all that is wrong with those given.
        """
        wrong = [
            f"fault {number}: {fault.kind} {what}"
            for number, fault in enumerate(self.fault, 1)
            for what in _wrong(fault, self.processes, updates)
        ]
        if wrong:
            raise ChaosError("The plan cannot be carried out:\n  " + "\n  ".join(wrong) + "\nMend these in the plan.")
        rng = random.Random(self.seed)
        drawn = [
            Fault(
                rng.choice(self.random.kinds),
                rng.randrange(EARLIEST, max(EARLIEST + 1, updates - 1)),
                rng.randrange(self.processes),
                self.random.seconds,
            )
            for _ in range(self.random.count)
        ]
        return sorted((*self.fault, *drawn), key=lambda fault: fault.at)


def _wrong(fault: Fault, processes: int, updates: int) -> list[str]:
    wrong = []
    if not 0 <= fault.at < updates:
        wrong.append(f"at={fault.at}: the run has updates 0 to {updates - 1} to break before")
    if not 0 <= fault.rank < processes:
        wrong.append(f"rank={fault.rank}: there are ranks 0 to {processes - 1}")
    if not fault.seconds > 0:
        wrong.append(f"seconds={fault.seconds:g}: say more than 0")
    if not 0 <= fault.bit < 32:
        wrong.append(f"bit={fault.bit}: a float32 has bits 0 to 31")
    return wrong


def read_plan(path: Path) -> FaultPlan:
    """The plan in a TOML file.

    Raises:
      ChaosError: it cannot be read, or says what no plan says.
    """
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), FaultPlan)
    except OSError as error:
        raise ChaosError(
            f"{path} cannot be read: {error.strerror}. Name a plan: docs/availability.md has one."
        ) from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ChaosError(
            f"{path} is no plan: {error}. It has processes, seed, [[fault]] (kind, at, rank, seconds, bit, sticky) and "
            f"[random] (count, kinds, seconds); kinds are {', '.join(KINDS)}."
        ) from error
