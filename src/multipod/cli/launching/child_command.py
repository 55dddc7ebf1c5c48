"""The command that a launcher starts: its words, and the few options that the launcher must know itself."""

from collections.abc import Sequence
from dataclasses import dataclass

import click

from multipod.errors import ClusterError
from multipod.layout.layout import parse_shape
from multipod.runtime import CPU_DEVICES, Timeouts

_OPTIONS = ("mesh", "cpu_devices", "timeout", "out", "resume", "fail")
_READER = click.Command(
    "command",
    params=[
        *(click.Option([f"--{name.replace('_', '-')}"]) for name in _OPTIONS),
        click.Option(["--log"], multiple=True),
    ],
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)


@dataclass(frozen=True)
class ChildCommand:
    """A command of multipod, without `multipod`. Options that it does not give are None.

    Attributes:
      words: the command and all its arguments.
      mesh: of `--mesh`.
      cpu_devices: of `--cpu-devices`.
      timeout: of `--timeout`.
      out: of `--out`.
      resume: of `--resume`.
      fail: of the last `--fail`.
      log: of all `--log`.
    """

    words: tuple[str, ...]
    mesh: str | None = None
    cpu_devices: str | None = None
    timeout: str | None = None
    out: str | None = None
    resume: str | None = None
    fail: str | None = None
    log: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The command alone, as `train`; empty if there is none."""
        return self.words[0] if self.words else ""

    def devices_per_process(self, processes: int) -> int:
        """CPU devices of each process: those of `--mesh`, or `CPU_DEVICES`, shared out evenly.

        Raises:
          LayoutError: a mesh that cannot be read.
          ClusterError: they do not divide.
        """
        devices, whence = CPU_DEVICES, f"without --mesh there are {CPU_DEVICES} devices"
        if self.mesh is not None:
            rows, columns = parse_shape(self.mesh)
            devices, whence = rows * columns, f"--mesh {self.mesh} has {rows * columns} devices"
        if devices % processes:
            fitting = ", ".join(str(count) for count in range(1, devices + 1) if devices % count == 0)
            raise ClusterError(
                f"launch: {whence}, which {processes} processes cannot share evenly. "
                f"Give --processes one of {fitting}, or a --mesh whose size is a multiple of {processes}."
            )
        return devices // processes

    def settle_timeouts(self, given_s: float | None) -> Timeouts:
        """The time-outs of launcher and workers alike, from `launch --timeout` or the command's `--timeout`.

        Raises:
          ClusterError: the two differ, or the command's is no number that `Timeouts` takes.
        """
        if self.timeout is None:
            return Timeouts() if given_s is None else Timeouts(given_s)
        try:
            timeouts = Timeouts(float(self.timeout))
        except ValueError as error:
            raise ClusterError(
                f"launch: --timeout {self.timeout}: {error} Write --timeout 60, before the `--`."
            ) from None
        if given_s not in (None, timeouts.limit_s):
            raise ClusterError(
                f"launch: --timeout is {given_s:g} before the `--` and {self.timeout} after it. "
                "Give it once, before the `--`."
            )
        return timeouts

    def worker_arguments(self, processes: int, timeouts: Timeouts) -> list[str]:
        """What follows `multipod` in each worker: the command, with its `--cpu-devices` and `--timeout`.

        Raises:
          ClusterError: no command, `launch` itself, or devices that do not divide over the processes.
        """
        if not self.words:
            raise ClusterError(
                f"launch: there is no command to run in the {processes} processes. "
                f"Write it after `--`: multipod launch --processes {processes} -- train digits"
            )
        if self.name == "launch":
            raise ClusterError(
                "launch: the command is `launch` again, and a process that is launched cannot launch others. "
                "Give what they are to run after the `--`, for example: train digits"
            )
        added = []
        if self.cpu_devices is None:
            added += ["--cpu-devices", str(self.devices_per_process(processes))]
        if self.timeout is None:
            added += ["--timeout", f"{timeouts.limit_s:g}"]
        return [*self.words, *added]

    def resuming(self, folder: str, processes: int) -> "ChildCommand":
        """The command that goes on with the run in `folder`, which this command began.

        It repeats what a resumed run cannot take from its folder: unusual devices of a process, its time-out, and its
        loggers.
        """
        devices = self.cpu_devices or str(self.devices_per_process(processes))
        usual = CPU_DEVICES % processes == 0 and devices == str(CPU_DEVICES // processes)
        kept = [] if usual else ["--cpu-devices", devices]
        kept += [] if self.timeout is None else ["--timeout", self.timeout]
        kept += ["--log", ",".join(self.log)] if self.log else []
        return read_child(["train", "--resume", folder, *kept])


def read_child(words: Sequence[str]) -> ChildCommand:
    """Reads the command that a launcher is to start."""
    context = _READER.make_context("command", list(words), resilient_parsing=True)
    return ChildCommand(tuple(words), **context.params)
