"""Ranks on other hosts: an agent there starts them, a proxy here speaks for each.

The launcher knows processes of its own host only. So it starts, for a rank on another host, a *proxy*: a small
process that connects to that host's *agent*, has it start the rank, and carries beats, words, output and signals
between the two. It ends as the rank ends. When the host is silent it ends itself, and a new one waits until the host is
back; the launcher sees a rank that died and one that is starting, as on its own host.

Nobody is left behind. A rank whose proxy is gone, or silent, is ended by its agent, and somewhat sooner than the
launcher lets the others go on without it: what is cut off writes nothing any more (`LEASE`). A rank whose agent is gone
ends itself, as it does when a launcher of its own host has died.

Messages are small JSON objects, signed (`multipod.elastic.launcher.links`). Whoever does not know the secret has one of
`MOST_STRANGERS` places for at most `HANDSHAKE_S`, and nothing else of an agent's.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from multipod.elastic.domains import place_of
from multipod.elastic.heartbeat import Beat, end_group
from multipod.elastic.launcher.links import (
    HANDSHAKE_S,
    SignedLink,
    StrangerError,
    agree_as_agent,
    agree_as_launcher,
    raise_descriptor_limit,
)
from multipod.elastic.launcher.processes import LONGEST_LINE, WorkerCommand, exit_code_of
from multipod.elastic.launcher.services import CoordinatorHost
from multipod.elastic.launcher.standby import spawn_rank
from multipod.errors import ClusterError, PeerLostError
from multipod.train.stop import NOTICES

POLL_S = 0.05
MOST_STRANGERS = 64  # connections that have not shown yet that they know the secret
ACCEPT_AGAIN_S = 0.1  # after an error of accept: descriptors or memory may be there again by then
LEASE = 2 / 3  # of the silence after which the launcher gives a host up
SHORTEST_SECRET = 16
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGCONT, *NOTICES)
PASSED_VARIABLES = ("MULTIPOD_", "JAX_", "XLA_", "NCCL_", "GLOO_")
"""Variables that a rank has from the launcher's environment; the others are those of its agent."""


@dataclass(frozen=True)
class LaunchRequest:
    """What a proxy asks an agent for.

    Attributes:
      arguments: what follows `multipod`.
      environment: variables with names of `PASSED_VARIABLES`.
      folder: to run in.
      silent_s: each side takes the other for lost after so long without a message; the agent after `LEASE` of it.
      beat_s: between two messages.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    silent_s: float
    beat_s: float


def read_secret(path: Path) -> bytes:
    """The secret that launcher and agents share.

    Raises:
      ClusterError: there is none, it is short, or others can read it.
    """
    try:
        secret, mode = path.read_bytes().strip(), path.stat().st_mode
    except OSError as error:
        raise ClusterError(
            f"the secret {path} cannot be read: {error.strerror}. Make one, the same on all hosts: "
            f"(umask 077; openssl rand -hex 32 > {path})"
        ) from error
    if mode & 0o077:
        raise ClusterError(f"the secret {path} can be read by others. Change that: chmod 600 {path}")
    if len(secret) < SHORTEST_SECRET:
        raise ClusterError(f"the secret {path} has {len(secret)} bytes. Take {SHORTEST_SECRET} or more.")
    return secret


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    Raises:
      ClusterError: it is something else.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ClusterError(f"{text} is no address of an agent. Write HOST:PORT, as 10.0.0.2:4100.")
    return host, int(port)


def serve(
    listener: socket.socket, secret: bytes, environment: Mapping[str, str], report: Callable[[str], None]
) -> None:
    """An agent: takes requests from whoever knows the secret, each in a thread of its own, until `listener` is closed.

    The ranks get `environment` beside what the request says. Leaving, by an exception too, ends all of them. No number
    of strangers ends it: the oldest of too many handshakes makes room, as an honest one takes milliseconds.
    """
    raise_descriptor_limit()
    sessions: list[_Session] = []
    reported = ""
    try:
        while listener.fileno() >= 0:
            try:
                sock, (host, port, *_) = listener.accept()
            except OSError as error:  # too many descriptors, no memory, or who asked is gone again
                if (said := error.strerror or str(error)) != reported:
                    report(f"a connection was not taken: {said}")
                    reported = said
                time.sleep(ACCEPT_AGAIN_S)
                continue
            sessions = [session for session in sessions if session.thread.is_alive()]
            unknown = [session for session in sessions if not session.known]
            if len(unknown) >= MOST_STRANGERS:
                unknown[0].turn_away()
                unknown[0].thread.join(timeout=1.0)
            sessions.append(_Session(sock, f"{host}:{port}", secret, environment, report))
    finally:
        for session in sessions:
            session.stopped = True
            session.turn_away()
        for session in sessions:
            session.thread.join(timeout=HANDSHAKE_S)


class _Session:
    """One connection to an agent: one rank, once it is `known`."""

    def __init__(self, sock: socket.socket, who: str, secret: bytes, environment: Mapping[str, str],
                 report: Callable[[str], None]) -> None:  # fmt: skip
        self.sock, self.who, self.environment, self.report = sock, who, environment, report
        self.stopped = self.known = False
        self.thread = threading.Thread(target=self._run, args=(secret,), name=f"session {who}", daemon=True)
        self.thread.start()

    def turn_away(self) -> None:
        """Ends the connection of a stranger."""
        if not self.known:
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def _run(self, secret: bytes) -> None:
        until_s = time.monotonic() + HANDSHAKE_S
        try:
            self.link = agree_as_agent(self.sock, secret, until_s)
            self.known = True
            first = self.link.receive(until_s - time.monotonic())
            request = LaunchRequest(**first["request"])  # type: ignore[index]
        except (StrangerError, EOFError, OSError, ValueError, TypeError, KeyError) as error:
            self.report(f"{self.who} was turned away: {error or type(error).__name__}")
            self.sock.close()
            return
        try:
            self._run_rank(request)
        except (EOFError, OSError) as error:
            self.report(f"{self.who}: {error or 'gone'}")
        finally:
            self.link.close()

    def _run_rank(self, request: LaunchRequest) -> None:
        command = [sys.executable, "-m", "multipod", *request.arguments]
        theirs = {name: value for name, value in request.environment.items() if name.startswith(PASSED_VARIABLES)}
        try:
            process, ours = spawn_rank(1, command, {**self.environment, **theirs}, request.folder)
        except OSError as error:
            self.link.send(refused=f"{error.strerror or error}: {error.filename or request.folder}")
            return
        self.report(f"{self.who} started process {process.pid}: multipod {' '.join(request.arguments)[:100]}")
        readers = [
            threading.Thread(target=self._forward, args=(ours.makefile("rb"), "beat"), daemon=True),
            threading.Thread(target=self._forward, args=(process.stdout, "out"), daemon=True),
        ]
        for reader in readers:
            reader.start()
        try:
            why = self._watch(process, ours, request)
        finally:
            code = _end_rank(process)
            ours.close()
        for reader in readers:
            reader.join(timeout=1.0)
        self.report(f"process {process.pid} ended with {code}{why}")
        with suppress(OSError):
            self.link.send(code=code)

    def _watch(self, process: subprocess.Popen[bytes], ours: socket.socket, request: LaunchRequest) -> str:
        """Watches until the rank has ended, or is to end; returns why it is to."""
        sent_s = 0.0
        while exit_code_of(process.pid) is None:
            if self.stopped:
                return ": the agent is stopped"
            if self.link.silent_s > LEASE * request.silent_s:
                return f": its launcher was silent for {self.link.silent_s:.1f} s"
            try:
                message = self.link.receive(POLL_S)
                if time.monotonic() - sent_s > request.beat_s:
                    sent_s = time.monotonic()
                    self.link.send()
            except (EOFError, OSError):
                return ": its launcher is gone"
            if message and "line" in message:
                with suppress(OSError):
                    ours.sendall(message["line"].encode() + b"\n")
            if message and message.get("signal") in FORWARDED_SIGNALS:
                os.kill(process.pid, message["signal"])
        return ""

    def _forward(self, source: Any, name: str) -> None:
        with suppress(OSError, ValueError), source:  # the connection may be closed
            while text := source.readline(LONGEST_LINE):  # what is longer goes on as another line, as on this host
                self.link.send(**{name: text.decode(errors="replace").rstrip("\n")})


def _end_rank(process: subprocess.Popen[bytes]) -> int:
    """Ends what is left of the rank and of what it started; returns its exit code, or minus the signal."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # it is not reaped: its number is still its own
    return process.wait()


class RankProxy:
    """The launcher's side: what a proxy does from its start to its rank's end.

    Args:
      address: of the agent.
      control: the socket to the launcher, as a rank has one.
      show: given each line that the rank prints.
      lost: called when the launcher has closed its end, which only its death does; the agent then ends the rank.
    """

    def __init__(self, address: str, secret: bytes, request: LaunchRequest, control: socket.socket,
                 show: Callable[[str], None], lost: Callable[[], None] = end_group) -> None:  # fmt: skip
        self.address, self.secret, self.request = address, secret, request
        self.control, self.show, self.lost = control, show, lost
        self.link: SignedLink | None = None
        self.signals: list[int] = []

    def __call__(self) -> int:
        """Returns the rank's exit code, or minus its signal; `PeerLostError`'s if its host is lost.

        Raises:
          ClusterError: the agent refuses the secret or the request.
        """
        for number in FORWARDED_SIGNALS:
            signal.signal(number, lambda number, frame: self.signals.append(number))
        threading.Thread(target=self._listen, name="launcher", daemon=True).start()
        self.link = self._connect()
        self.link.send(request=asdict(self.request))
        try:
            return self._follow(self.link)
        except (EOFError, OSError) as error:
            self.show(f"the agent at {self.address} is gone: {error or 'it closed the connection'}")
            return PeerLostError.exit_code
        finally:
            self.link.close()

    def _connect(self) -> SignedLink:
        """Connects to the agent; waits for its host as long as it takes."""
        reported = False
        while True:
            try:
                sock = socket.create_connection(split_address(self.address), timeout=max(1.0, self.request.beat_s))
                try:
                    return agree_as_launcher(sock, self.secret, time.monotonic() + HANDSHAKE_S)
                except BaseException:
                    sock.close()
                    raise
            except StrangerError as error:
                raise ClusterError(
                    f"the agent at {self.address} was refused: {error}. Give launcher and agents the same version of "
                    "multipod and the same --secret."
                ) from error
            except (EOFError, OSError) as error:
                if not reported:
                    self.show(f"waiting for the agent at {self.address}: {error or 'it closed the connection'}")
                reported = True
            if self.signals and self.signals[-1] != signal.SIGCONT:
                raise ClusterError(f"stopped while waiting for the agent at {self.address}.")
            waiting = Beat(f"waiting for its host {self.address}", 0, 0, 0.0)
            self.control.sendall(json.dumps(asdict(waiting)).encode() + b"\n")
            time.sleep(self.request.beat_s)

    def _follow(self, link: SignedLink) -> int:
        sent_s = 0.0
        while link.silent_s <= self.request.silent_s:
            message = link.receive(POLL_S) or {}
            if "beat" in message:
                self.control.sendall(message["beat"].encode() + b"\n")
            if "out" in message:
                self.show(message["out"])
            if "refused" in message:
                raise ClusterError(f"the agent at {self.address} cannot start this rank: {message['refused']}.")
            if "code" in message:
                return int(message["code"])
            while self.signals:
                link.send(signal=self.signals.pop(0))
            if time.monotonic() - sent_s > self.request.beat_s:
                sent_s = time.monotonic()
                link.send()
        self.show(f"its host gave no sign of life for {link.silent_s:.1f} s ({self.address})")
        return PeerLostError.exit_code

    def _listen(self) -> None:
        """Passes on what the launcher sends."""
        with suppress(OSError), self.control.makefile("rb") as lines:
            for text in lines:
                if self.link is not None:
                    self.link.send(line=text.decode().rstrip("\n"))
        self.lost()


def end_as(code: int) -> None:
    """Ends this process as the rank ended: by its exit code, or by the same signal."""
    if code < 0:
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def address_towards(host: str, port: int) -> str:
    """This host's address on the way to another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
        return address


@dataclass(frozen=True)
class Agents:
    """The agents of a run.

    Attributes:
      addresses: `HOST:PORT` of each.
      secret: the file.
      limit_s: the time-out that all others follow from.
      coordinator: where the processes find each world's coordination service.
      racks: the rack of each, as far as they were told; empty texts where not.
      command_prefix: goes before a proxy's command, as in `CoordinatorHost`.
    """

    addresses: tuple[str, ...]
    secret: Path
    limit_s: float
    coordinator: CoordinatorHost
    command_prefix: tuple[str, ...] = ()
    racks: tuple[str, ...] = ()

    def place(self, workers: Sequence[WorkerCommand], processes: int) -> list[WorkerCommand]:
        """The workers as proxies for what agents run: neighbours share a host, spares go round."""
        placed = []
        for rank, worker in enumerate(workers):
            at = rank * len(self.addresses) // processes if rank < processes else rank % len(self.addresses)
            words = ["rank-proxy", "--secret", str(self.secret.absolute()), "--timeout", f"{self.limit_s:g}"]
            python, arguments = worker.command[:3], worker.command[3:]
            command = [*self.command_prefix, *python, *words, self.addresses[at], *arguments]
            place = place_of(split_address(self.addresses[at])[0], self.racks[at] if self.racks else "")
            placed.append(replace(worker, command=command, place=place))
        return placed
