"""Which cluster this process is part of, and joining its peers through JAX's own detection."""

import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from multipod.elastic.launcher.standby import STANDBY_VARIABLE
from multipod.errors import ClusterError, PeerLostError
from multipod.runs.options import ALONE, Cluster
from multipod.runtime import Timeouts, keep_stdout_for_python


def _slurm(env: Mapping[str, str]) -> Cluster | None:
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if not all(name in env for name in needed):
        return None
    return Cluster("Slurm", int(env["SLURM_NTASKS"]), int(env["SLURM_PROCID"]))


def _open_mpi(env: Mapping[str, str]) -> Cluster | None:
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    if "OMPI_MCA_orte_hnp_uri" not in env and int(env["OMPI_COMM_WORLD_SIZE"]) > 1:
        raise ClusterError(
            "Open MPI 5 started these processes, which JAX cannot detect. Give each process its place by "
            "JAX_COORDINATOR_ADDRESS, MULTIPOD_PROCESSES and MULTIPOD_PROCESS_ID: docs/clusters.md shows how."
        )
    return Cluster("Open MPI", int(env["OMPI_COMM_WORLD_SIZE"]), int(env["OMPI_COMM_WORLD_RANK"]))


def _kubernetes(env: Mapping[str, str]) -> Cluster | None:
    if "KUBERNETES_SERVICE_HOST" not in env or "JOB_COMPLETION_INDEX" not in env:
        return None
    # How many there are is known to the Kubernetes API alone; JAX asks it (package `kubernetes`).
    return Cluster("Kubernetes", 2, int(env["JOB_COMPLETION_INDEX"]))


def _tpu(env: Mapping[str, str]) -> Cluster | None:
    hosts = [host for host in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if len(hosts) < 2:
        return None
    return Cluster("TPU hosts", len(hosts), int(env.get("TPU_WORKER_ID", 0)))


def _launcher(env: Mapping[str, str]) -> Cluster | None:
    if "MULTIPOD_PROCESSES" not in env:
        return None
    processes, process = int(env["MULTIPOD_PROCESSES"]), int(env["MULTIPOD_PROCESS_ID"])
    return Cluster(
        "multipod launch",
        processes,
        process,
        True,
        "MULTIPOD_SURVIVES" in env,
        waits=STANDBY_VARIABLE in env,
        launcher=env.get(LAUNCHER_VARIABLE, ""),
    )


LAUNCHER_VARIABLE = "MULTIPOD_LAUNCHER"
"""The environment variable with the launcher's command line, up to the `--`."""

KINDS: tuple[Callable[[Mapping[str, str]], Cluster | None], ...] = (
    _launcher,
    _open_mpi,
    _slurm,
    _kubernetes,
    _tpu,
)
"""How each kind of cluster is recognised; the first that answers is it."""


def find(environment: Mapping[str, str]) -> Cluster:
    """The cluster that this environment speaks of; one process alone is none.

    Raises:
      ClusterError: variables of a cluster that are no numbers.
    """
    for kind in KINDS:
        try:
            found = kind(environment)
        except (KeyError, ValueError) as error:
            raise ClusterError(
                f"the cluster's environment variables cannot be read: {error}. Unset them to run alone."
            ) from error
        if found is not None and (found.processes > 1 or found.waits):
            return found
    return ALONE


def join(cluster: Cluster, timeouts: Timeouts) -> None:
    """Joins the other processes of `cluster`, if there are any.

    Raises:
      ClusterError: they cannot be reached in time.
    """
    if cluster.processes == 1:
        return
    import jax

    from multipod.elastic.worker.jax_world import keep_compiled

    if jax.distributed.is_initialized():
        return
    numbers: dict[str, Any] = (
        {"num_processes": cluster.processes, "process_id": cluster.process} if cluster.explicit else {}
    )
    if cluster.explicit:
        numbers["cluster_detection_method"] = "deactivate"  # we may run inside another cluster's job
        _claims.append(claimed(os.environ.get("JAX_COORDINATOR_ADDRESS", ""), cluster.process))
    limit = timeouts.collective_s
    keep_stdout_for_python()
    try:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            **numbers,
            initialization_timeout=limit,
            heartbeat_timeout_seconds=limit,
            shutdown_timeout_seconds=limit,
        )
        keep_compiled()
    except Exception as error:
        raise PeerLostError(
            f"process {cluster.process} of {cluster.processes} ({cluster.name}) could not join its peers: "
            f"{str(error).splitlines()[0].rstrip('.')}. See docs/clusters.md, or run `multipod doctor` in each process."
        ) from error


_claims: list[socket.socket | None] = []
"""Kept as long as this process lives."""


def claimed(address: str, process: int) -> socket.socket | None:
    """Takes the place of process number `process` in the run that meets at `address`, on this host.

    JAX would abort a process of the run when a second one takes its number, and the others after their time-out. On
    other hosts nobody can tell before that. The place is free again when the socket is closed, or this process dies;
    None where the system has no such sockets.

    Raises:
      ClusterError: another process has it.
    """
    if not sys.platform.startswith("linux"):
        return None
    name = f"\0multipod/{os.getuid()}/{address}/{process}"
    place = socket.socket(socket.AF_UNIX)
    try:
        place.bind(name)
        place.listen()
    except OSError:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(name)
            owner = int.from_bytes(asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
        place.close()
        raise ClusterError(
            f"process {process} of the run at {address} is here already, with the process number {owner}. Give each "
            "its own MULTIPOD_PROCESS_ID, or end that one."
        ) from None
    return place
