"""What every manifest is made of: a run, its processes, and the shell lines that begin it or go on with it."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from multipod.errors import PeerLostError

PORT = 8476
"""Where process 0 listens for the others, in pods and machines that are a run's own."""

REFUSED = 2
"""Exit code of what only the user can mend: to start it again would be refused again."""

RESTARTED = (1, PeerLostError.exit_code)
"""Exit codes, beside those of signals (128 and above), after which a run may be started again."""


@dataclass(frozen=True)
class RenderedRun:
    """A run that something else is to start.

    Attributes:
      words: the command, without `multipod`, as each process runs it.
      resuming: the command that goes on with the run in `out`; none where the command is not `train`.
      out: the run's folder, at the same place for all processes; empty where the command is not `train`.
      processes: how many there are.
      per_node: how many of them one host has, where the launcher asks.
      cpus: of a process.
      gpus: of a process; TPUs where the accelerator is one.
      restarts: how often all may be started again.
      image: the container image.
      accelerator: kind of device, as the launcher names it; empty for CPU, or where it is not asked.
      queue: of Kueue's, or of the launcher's.
      timeout_s: the longest that a process waits for another.
    """

    words: Sequence[str]
    resuming: Sequence[str] = ()
    out: str = ""
    processes: int = 1
    per_node: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    restarts: int = 0
    image: str = ""
    accelerator: str = ""
    queue: str = ""
    timeout_s: float = 60.0

    @property
    def name(self) -> str:
        """A name that every launcher takes: small letters, digits and hyphens, a letter first, 40 at most."""
        named = self.out.rstrip("/").rpartition("/")[2] or (self.words[1] if len(self.words) > 1 else self.words[0])
        plain = re.sub(r"[^a-z0-9]+", "-", named.rpartition(":")[2].lower()).strip("-")
        return (plain if plain[:1].isalpha() else f"run-{plain}".rstrip("-"))[:40].rstrip("-")

    @property
    def whole_cpus(self) -> int:
        """CPUs of a process, rounded up."""
        return max(1, -int(-self.cpus // 1))

    @property
    def whole_gpus(self) -> int:
        """GPUs of a process, rounded up."""
        return -int(-self.gpus // 1)

    @property
    def grace_s(self) -> int:
        """Seconds from the notice to the end, in which a run saves."""
        return max(120, round(2 * self.timeout_s))

    def command_lines(self, rank: str = "$MULTIPOD_PROCESS_ID", run: str = "exec multipod") -> list[str]:
        """Shell lines of a process: they begin the run, or go on with it from its newest checkpoint.

        A folder that a first start left without a checkpoint is moved aside by process 0; `rank` is the shell's word
        for a process's number, empty where the lines run once for all.
        """
        if not self.resuming:
            return [f"{run} {shlex.join(self.words)}"]
        out = shlex.quote(self.out)
        first = f'[ "{rank}" = 0 ] && ' if rank else ""
        return [
            f"if ls {out}/checkpoints/[0-9]* >/dev/null 2>&1; then",
            f"  {run} {shlex.join(self.resuming)}",
            "else",
            f"  {first}[ -e {out} ] && mv {out} {out}.without-checkpoint.$(date +%s)",
            f"  {run} {shlex.join(self.words)}",
            "fi",
        ]
