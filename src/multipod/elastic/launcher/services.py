"""The coordination services of a run that survives, as its launcher has them: in a helper process."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from multipod.errors import ClusterError


@dataclass(frozen=True)
class CoordinatorHost:
    """Where the processes of a world find its coordination service.

    Attributes:
      address: what it listens on; all processes must reach it. By default nobody else does.
      command_prefix: goes before the helper's command, to run it elsewhere: `ip netns exec NAME`.
    """

    address: str = "127.0.0.1"
    command_prefix: Sequence[str] = ()


class CoordinationServices:
    """The launcher's helper (`multipod.elastic.launcher.coordinator`): a coordination service for each world."""

    def __init__(self, environment: Mapping[str, str], host: CoordinatorHost) -> None:
        self._host = host.address
        self.addresses: list[str | None] = []
        quiet = {**environment, "TF_CPP_MIN_LOG_LEVEL": "3"}
        try:
            self._helper = subprocess.Popen(
                [*host.command_prefix, sys.executable, "-m", "multipod.elastic.launcher.coordinator"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=quiet,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ClusterError(f"the launcher's helper could not be started: {error}. Check ulimit -a.") from error

    def __enter__(self) -> "CoordinationServices":
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._helper.stdin.close()  # type: ignore[union-attr]
        with suppress(subprocess.TimeoutExpired):
            self._helper.wait(timeout=2)
        self._helper.kill()
        self._helper.wait()
        self._helper.stdout.close()  # type: ignore[union-attr]

    def open(self, processes: int, silent_s: float) -> str:
        """The address of a new service for so many processes.

        Raises:
          ClusterError: there is none, with what JAX said.
        """
        answer = self._ask(f"open {self._host} {processes} {round(silent_s)}")
        good, _, address = answer.partition(" ")
        if good != "ok":
            raise ClusterError(f"the coordination service of the next world did not start: {answer or 'no answer'}.")
        self.addresses.append(address)
        return address

    @property
    def ended(self) -> bool:
        """Whether the helper is no more: its services are gone, and JAX ends all processes that used them."""
        return self._helper.poll() is not None

    def close_until(self, generation: int) -> None:
        """Ends the services of the worlds up to this one: all their processes have left them."""
        for number, address in enumerate(self.addresses[: generation + 1]):
            if address is not None:
                self._ask(f"close {address}")
                self.addresses[number] = None

    def _ask(self, line: str) -> str:
        assert self._helper.stdin is not None
        assert self._helper.stdout is not None
        try:
            self._helper.stdin.write(line + "\n")
            self._helper.stdin.flush()
            return self._helper.stdout.readline().strip()
        except OSError as error:
            return str(error)
