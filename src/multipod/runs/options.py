"""Where a run happens: mesh, devices, time-outs, cache and peers. None of it changes what a run learns."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from multipod.elastic.heartbeat import Heartbeat
from multipod.errors import RecipeError
from multipod.runtime import Timeouts


@dataclass(frozen=True)
class Cluster:
    """The processes of one run.

    Attributes:
      name: who started them; "none" is a single process.
      processes: the world size: how many there are.
      process: the number of this one, where the environment says it.
      explicit: the numbers are passed to JAX, which cannot detect this kind by itself.
      survives: the processes come and go, and the launcher says who trains with whom (`multipod.elastic.world`).
      waits: this process is to wait until the launcher says what it runs (`multipod.elastic.launcher.standby`).
      launcher: the command line that launches processes as these were, without what they run; empty if not known.
    """

    name: str
    processes: int
    process: int
    explicit: bool = False
    survives: bool = False
    waits: bool = False
    launcher: str = ""


ALONE = Cluster("none", 1, 0)


@dataclass(frozen=True)
class RuntimeOptions:
    """Where and how a command runs. The defaults are one process on all devices that JAX finds.

    Attributes:
      mesh: rows and columns of replicas; None takes the recipe's, or all devices.
      fail: blocks of chips to do without, as the user wrote them: `0,1` or `0-1,2-3`.
      cpu_devices: virtual CPU devices of this process.
      timeouts: the longest that anything waits for a peer.
      cache: the folder of compiled programs; None keeps none.
      cluster: the processes of this run.
      heartbeat: what the launcher listens to; None if this process was not launched by one.
      command: how the run was started, for its records.
      started_s: when this process started on what it does, on the monotonic clock.
    """

    mesh: tuple[int, int] | None = None
    fail: tuple[str, ...] = ()
    cpu_devices: int = 8
    timeouts: Timeouts = field(default_factory=Timeouts)
    cache: Path | None = None
    cluster: Cluster = ALONE
    heartbeat: Heartbeat | None = None
    command: str = "multipod.runs.train"
    started_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class ProfiledUpdates:
    """The updates to profile, from number `first` to number `last`, both included."""

    first: int
    last: int

    def check(self, total: int, done: int = 0) -> None:
        """Refuses updates that a run of `total` does not do which has done `done`.

        Raises:
          RecipeError: says which it does.
        """
        if self.last > total:
            raise RecipeError(
                f"--profile {self}: the run has {total} updates. Profile some of those, as "
                f"--profile {max(done + 1, total - 3)}:{total}."
            )
        if self.first <= done:
            raise RecipeError(
                f"--profile {self}: the run goes on after update {done}. Profile later ones, as "
                f"--profile {done + 1}:{min(done + 4, total)}."
            )

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


def parse_profiled(text: str) -> ProfiledUpdates:
    """The updates written as `10:13`, or `10` for one.

    Raises:
      RecipeError: anything else.
    """
    first, colon, last = text.partition(":")
    if not first.isdecimal() or (colon and not last.isdecimal()):
        raise RecipeError(f"--profile {text}: write the first and the last update to profile, as 10:13.")
    updates = ProfiledUpdates(int(first), int(last) if colon else int(first))
    if not 1 <= updates.first <= updates.last:
        raise RecipeError(
            f"--profile {text}: updates count from 1, and the last may not come before the first. "
            f"Write --profile {max(1, min(updates.first, updates.last))}:{max(1, updates.first, updates.last)}."
        )
    return updates
