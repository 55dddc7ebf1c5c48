"""The processes of a run on a Ray cluster: an actor on each host that Ray chooses starts one, and watches it.

Ray places them, notices when a host is lost, and carries what they say; the processes find each other through JAX as
everywhere. An actor that dies takes its process with it: the process's control socket closes. Needs the package `ray`
here and on the cluster, and multipod and the run's folder at the same paths on all hosts.
"""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from multipod.elastic.launcher.standby import spawn_rank
from multipod.elastic.launcher.supervise import (
    BEFORE_FIRST,
    INTERRUPTED,
    REFUSED,
    RunOutcome,
    StopSignals,
    count_signals,
)
from multipod.errors import ClusterError, PeerLostError
from multipod.extras import require

POLL_S = 0.5
START_S = 120.0
"""For Ray to place all actors: it waits for resources for ever."""

Command = Callable[[int, str], tuple[Sequence[str], Mapping[str, str]]]
"""From a rank and the coordinator's address to its command and what it needs in its environment."""


@dataclass(frozen=True)
class RayResources:
    """Resources that Ray sets aside for a process."""

    cpus: float = 1.0
    gpus: float = 0.0


@dataclass(repr=False)  # Ray puts the name of an actor before each of its lines
class RayHost:
    """An actor's process, and the last lines of its output."""

    process: subprocess.Popen[bytes] | None = None
    folder: str = ""
    saved: int | None = None
    lines: list[str] = field(default_factory=list)

    def address(self) -> str:
        """This host as others reach it, with a port that was free a moment ago."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def run(self, rank: int, command: Sequence[str], environment: Mapping[str, str], cwd: str) -> dict[str, Any]:
        """Runs the process to its end: its exit code, the run's folder, and the newest checkpoint."""
        os.chdir(cwd)
        # As rank 1 of a launcher, whose output is a pipe; which rank it is the environment says.
        self.process, ours = spawn_rank(1, command, {**os.environ, **environment})
        assert self.process.stdout is not None
        with ours, self.process.stdout as output:
            threading.Thread(target=self._read_beats, args=(ours.dup(),), daemon=True).start()
            for line in output:
                text = line.decode(errors="replace").rstrip("\n")
                self.lines = [*self.lines[-19:], text]
                print(f"[rank {rank}] {text}", flush=True)
            code = self.process.wait()
        return {"code": code, "folder": self.folder, "saved": self.saved, "lines": self.lines}

    def stop(self) -> None:
        """Asks the process to stop, as Ctrl-C does."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def _read_beats(self, beats: socket.socket) -> None:
        with suppress(OSError, ValueError), beats, beats.makefile() as lines:
            for line in lines:
                beat = json.loads(line)
                self.folder, self.saved = beat["folder"] or self.folder, beat["saved"]


def run_on_ray(command: Command, processes: int, address: str, each: RayResources | None = None) -> RunOutcome:
    """Runs the processes on the cluster at `address` to their end; `local` makes one of this machine for them alone.

    The first Ctrl-C or notice of pre-emption asks the run to stop and save. When one process fails, or its host is
    lost, all others are ended.

    Raises:
      ClusterError: there is no such cluster, or no room on it.
      MissingPackageError: Ray is not installed.
    """
    require("--ray", "ray")
    import ray

    each = each or RayResources()
    here: dict[str, Any] = {"num_cpus": max(1, round(processes * each.cpus))} if address == "local" else {}
    try:
        with count_signals() as early:  # of its own: Ray sets a handler for SIGTERM
            ray.init(address=address, log_to_driver=True, include_dashboard=False if here else None, **here)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ClusterError(
            f"--ray {address}: {reason}. Start a cluster with `ray start --head`, or say local."
        ) from error
    try:
        made = ray.remote(num_cpus=each.cpus, num_gpus=each.gpus, max_concurrency=4)(RayHost)
        hosts = [made.remote() for _ in range(processes)]
        with count_signals() as stops:
            stops.count = early.count
            coordinator = _wait_for_hosts(ray, hosts, stops)
            if coordinator is None:
                return RunOutcome(INTERRUPTED, reason=BEFORE_FIRST)
            if not coordinator:
                raise ClusterError(
                    f"--ray {address}: no room for {processes} processes of {each.cpus:g} CPUs and {each.gpus:g} GPUs "
                    f"in {START_S:.0f} s; the cluster has {ray.cluster_resources()}. Ask for fewer."
                )
            cwd = os.getcwd()
            refs = [host.run.remote(rank, *command(rank, coordinator), cwd) for rank, host in enumerate(hosts)]
            return _watch(ray, hosts, refs, stops)
    finally:
        ray.shutdown()


def _wait_for_hosts(ray: Any, hosts: Sequence[Any], stops: StopSignals) -> str | None:
    """The coordinator's address, once Ray has placed all actors; empty if it does not in time, None if interrupted."""
    refs, until_s = [host.address.remote() for host in hosts], time.monotonic() + START_S
    while not stops.count:
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=POLL_S)
        if len(ready) == len(refs):
            address: str = ray.get(refs[0])
            return address
        if time.monotonic() > until_s:
            return ""
    return None


def _watch(ray: Any, hosts: Sequence[Any], refs: Sequence[Any], stops: StopSignals) -> RunOutcome:
    """Waits for all, or for the first that fails."""
    waiting, ended, asked = list(refs), dict[int, dict[str, Any]](), False
    while waiting:
        ready, waiting = ray.wait(waiting, timeout=POLL_S)
        if stops.count > 1:
            return _outcome(ended, INTERRUPTED, "the run was interrupted twice, and all processes were killed")
        if stops.count and not asked:
            asked = True
            hosts[0].stop.remote()
        for ref in ready:
            rank = refs.index(ref)
            try:
                ended[rank] = ray.get(ref)
            except ray.exceptions.RayError as error:
                lost = f"the host of rank {rank} was lost: {str(error).splitlines()[0]}"
                return _outcome(ended, 1, lost, rank)
            code = ended[rank]["code"]
            if code not in (0, INTERRUPTED) and not asked:
                return _blame(ray, hosts, refs, ended)
    stopped = any(end["code"] == INTERRUPTED for end in ended.values())
    return _outcome(ended, INTERRUPTED if stopped else 0, "the run was interrupted" if stopped else "")


def _blame(ray: Any, hosts: Sequence[Any], refs: Sequence[Any], ended: dict[int, Any]) -> RunOutcome:
    """Finds the cause among the ranks that end within a moment of the first: one that lost a peer is none."""
    late, _ = ray.wait([ref for rank, ref in enumerate(refs) if rank not in ended], num_returns=1, timeout=2 * POLL_S)
    for ref in late:
        with suppress(ray.exceptions.RayError):
            ended[refs.index(ref)] = ray.get(ref)
    victims = (0, INTERRUPTED, PeerLostError.exit_code, -signal.SIGABRT)
    causes = [rank for rank, end in ended.items() if end["code"] not in victims] or list(ended)
    for host in hosts:
        ray.kill(host)
    rank, code = causes[0], ended[causes[0]]["code"]
    what = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    outcome = _outcome(ended, 1, f"rank {rank} {what}", rank)
    # Nothing here says which updates were done: before the first checkpoint a start would do the same again.
    return replace(outcome, exit_code=REFUSED) if code == REFUSED and outcome.saved is None else outcome


def _outcome(ended: Mapping[int, dict[str, Any]], code: int, reason: str, culprit: int | None = None) -> RunOutcome:
    folder = next((end["folder"] for end in ended.values() if end["folder"]), "")
    saved = [end["saved"] for end in ended.values() if end["saved"] is not None]
    lines = tuple(ended[culprit]["lines"]) if culprit is not None and culprit in ended else ()
    return RunOutcome(code, culprit, reason, lines=lines, folder=folder, saved=max(saved, default=None))
