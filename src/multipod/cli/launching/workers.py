"""The processes of a command as the launcher starts them: commands, environments, and processes that wait."""

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from multipod.elastic.launcher.processes import WorkerCommand
from multipod.elastic.launcher.standby import StandbyPool


def make_workers(
    arguments: Sequence[str],
    processes: int,
    environment: Mapping[str, str],
    count: int | None = None,
    survives: bool = False,
) -> list[WorkerCommand]:
    """One worker a rank, whose environment says its place in the cluster; `count` of them, spares included.

    JAX_NUM_CPU_DEVICES is taken out: the launcher decides the number of devices, by `--cpu-devices`.
    """
    inherited = {name: value for name, value in environment.items() if name != "JAX_NUM_CPU_DEVICES"}
    address = f"127.0.0.1:{free_port()}"
    cluster = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # JAX's default listens on every network
        "MULTIPOD_PROCESSES": str(processes),
    }
    if survives:
        cluster |= {"MULTIPOD_SURVIVES": "1"}
    return [
        WorkerCommand(
            [sys.executable, "-m", "multipod", *arguments],
            {**inherited, **cluster, "MULTIPOD_PROCESS_ID": str(rank)},
        )
        for rank in range(processes if count is None else count)
    ]


def free_port() -> int:
    """A TCP port that was free on loopback a moment ago.

    Another program may take it before rank 0 binds it; then rank 0 fails to start, and says so.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def use_standbys(workers: Sequence[WorkerCommand], pool: StandbyPool) -> list[WorkerCommand]:
    """The workers, in the processes that wait and where these have met; as they are if there are none."""
    waiting = pool.take()
    if waiting is None:
        return list(workers)
    return [
        replace(worker, standby=standby, environment=standby.run_environment)
        for worker, standby in zip(workers, waiting, strict=True)
    ]
