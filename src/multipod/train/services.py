"""The coordination services of a run that survives, as its launcher has them: in a helper process."""

import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from multipod.errors import ClusterError


class Services:
    """The launcher's helper (`multipod.train.coordinator`): a coordination service for each world, on loopback."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.addresses: list[str | None] = []
        quiet = {**environment, "TF_CPP_MIN_LOG_LEVEL": "3"}
        try:
            self._helper = subprocess.Popen(
                [sys.executable, "-m", "multipod.train.coordinator"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=quiet,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ClusterError(f"the launcher's helper could not be started: {error}. Check ulimit -a.") from error

    def __enter__(self) -> "Services":
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
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        answer = self._ask(f"open {address} {processes} {round(silent_s)}")
        if answer != f"ok {address}":
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
