"""Hosts that are network namespaces of this one: processes with addresses of their own, and a link that can be cut.

For `multipod chaos --hosts`: needs root, `ip` (iproute2) and `unshare`. All that is made has names of this process and
is removed at the end; the network of the machine itself is not touched: the switch is in a namespace too.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from multipod.elastic.launcher.processes import WorkerCommand
from multipod.elastic.launcher.remote import Agents
from multipod.elastic.launcher.services import CoordinatorHost
from multipod.errors import ClusterError

LINK = "eth0"
PORT = 41999
_NET = "10.213.77"


@dataclass(frozen=True)
class NetworkHosts:
    """Hosts on one switch; host k has the address `addresses[k]` and the name `names[k]`."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    file: Path

    def inside(self, number: int) -> list[str]:
        """What goes before a command that is to run on a host."""
        name = self.names[number]
        # A host name of its own, which its own hosts file knows: gloo listens where the name leads.
        inner = f'mount --bind {self.file} /etc/hosts && hostname {name} && exec "$@"'
        return ["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "sh", "-c", inner, "sh"]

    def place(self, workers: Sequence[WorkerCommand]) -> list[WorkerCommand]:
        """Puts rank k on host k; rank 0 listens where the others can reach it."""
        coordinator = f"{self.addresses[0]}:{PORT}"
        addresses = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_COORDINATOR_BIND_ADDRESS": coordinator}
        return [
            WorkerCommand([*self.inside(number), *worker.command], {**worker.environment, **addresses})
            for number, worker in enumerate(workers)
        ]

    @contextmanager
    def agents(self, limit_s: float, environment: Mapping[str, str] | None = None) -> Iterator[Agents]:
        """An agent on each host but the last, from which their run is launched; ours is its environment, else."""
        head, secret = len(self.names) - 1, self.file.with_name("secret")
        secret.touch(0o600)
        secret.write_text(secrets.token_hex())
        listen = tuple(f"{address}:{PORT}" for address in self.addresses[:head])
        command = [sys.executable, "-m", "multipod", "agent", "--secret", str(secret), "--listen"]
        started = []
        try:
            for number, address in enumerate(listen):
                words = [*self.inside(number), *command, address]
                started.append(
                    subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
                )
            prefix = ("ip", "netns", "exec", self.names[head])
            yield Agents(listen, secret, limit_s, CoordinatorHost(self.addresses[head], prefix), prefix)
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait()


@contextmanager
def make_hosts(count: int) -> Iterator[NetworkHosts]:
    """Makes the hosts, and removes them, whatever happens.

    Raises:
      ClusterError: they cannot be made here.
    """
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        raise ClusterError("--hosts makes network namespaces: run as root, with iproute2 and unshare installed.")
    names = tuple(f"mp{os.getpid()}-{number}" for number in range(count))
    switch = f"mp{os.getpid()}-s"
    addresses = tuple(f"{_NET}.{number + 1}" for number in range(count))
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "hosts"
            known = (f"{address} {name}\n" for address, name in zip(addresses, names, strict=True))
            file.write_text("127.0.0.1 localhost\n" + "".join(known))
            _make(switch, names, addresses)
            yield NetworkHosts(names, addresses, file)
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _make(switch: str, names: Sequence[str], addresses: Sequence[str]) -> None:
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "br0", "type", "bridge")
    _ip("-n", switch, "link", "set", "br0", "up")
    for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
        _ip("netns", "add", name)
        _ip("-n", switch, "link", "add", f"p{number}", "type", "veth", "peer", "name", LINK, "netns", name)
        _ip("-n", switch, "link", "set", f"p{number}", "master", "br0", "up")
        _ip("-n", name, "address", "add", f"{address}/24", "dev", LINK)
        _ip("-n", name, "link", "set", LINK, "up")
        _ip("-n", name, "link", "set", "lo", "up")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(
            f"ip {' '.join(words)}: {done.stderr.strip()}. There are no such hosts here: leave out --hosts."
        )
