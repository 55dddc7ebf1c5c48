"""The ways of running the processes of a command to their end: here, elsewhere, surviving, with standbys."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from multipod.cli.cluster import LAUNCHER_VARIABLE
from multipod.cli.launching.child_command import ChildCommand
from multipod.cli.launching.ray_hosts import RayResources, run_on_ray
from multipod.cli.launching.workers import make_workers, use_standbys
from multipod.elastic.launcher.membership import ElasticPolicy
from multipod.elastic.launcher.processes import print_to_stderr
from multipod.elastic.launcher.remote import Agents
from multipod.elastic.launcher.standby import StandbyPool
from multipod.elastic.launcher.supervise import RunOutcome, supervise
from multipod.elastic.launcher.survive import survive
from multipod.runtime import Timeouts

Starter = Callable[[Sequence[str], bool], RunOutcome]
"""Runs processes with these arguments to their end; also given whether they may be started once more."""


@dataclass(frozen=True)
class Ray:
    """A Ray cluster: its address, and what it sets aside for a process."""

    address: str
    each: RayResources


@dataclass(frozen=True)
class LaunchSettings:
    """How processes are to be launched.

    Attributes:
      processes: how many.
      timeouts: of launcher and workers.
      policy: how the run survives the loss of a process; None if it ends with it.
      agents: those that start the processes of a run that survives, on other hosts.
      ray: the cluster that starts the processes.
      restarts: how often all may be started again.
      standby: keep processes ready for that.
      words: the launcher's command line, for the processes to say how to go on.
    """

    processes: int
    timeouts: Timeouts
    policy: ElasticPolicy | None = None
    agents: Agents | None = None
    ray: Ray | None = None
    restarts: int = 0
    standby: bool = False
    words: tuple[str, ...] = ()


def run_with_restarts(command: ChildCommand, settings: LaunchSettings) -> RunOutcome:
    """Runs the command, and again from its last checkpoint while it fails and may; returns how it ended at last."""
    current, restarts = command, settings.restarts
    with open_starter(settings) as start:
        while True:
            outcome = start(current.worker_arguments(settings.processes, settings.timeouts), restarts > 0)
            if outcome.exit_code != 1 or not restarts:
                return outcome
            restarts -= 1
            again = "from the start"
            if outcome.saved is not None and outcome.folder:
                current = command.resuming(outcome.folder, settings.processes)
                again = f"from update {outcome.saved}"
            elif outcome.folder and command.out is not None and command.resume is None:
                return outcome  # its folder is there and holds no checkpoint
            print_to_stderr(f"multipod: launch: {outcome.reason}. All start again {again}; restarts left: {restarts}.")


@contextmanager
def open_starter(settings: LaunchSettings) -> Iterator[Starter]:
    """What runs the processes as the settings say; processes that wait are ended at the end."""
    environment = {**os.environ, **({LAUNCHER_VARIABLE: shlex.join(settings.words)} if settings.words else {})}
    if settings.ray is not None:
        yield on_ray(settings.ray, settings.processes)
    elif settings.policy is not None:
        yield surviving(settings.policy, settings.agents, settings.timeouts, environment)
    elif settings.standby:
        with StandbyPool() as pool:
            yield with_standbys(pool, settings.processes, settings.timeouts, environment)
    else:
        yield supervised(settings.processes, settings.timeouts, environment)


def supervised(processes: int, timeouts: Timeouts, environment: Mapping[str, str]) -> Starter:
    """Starts processes of which all end with the first."""

    def start(arguments: Sequence[str], again: bool) -> RunOutcome:
        return supervise(make_workers(arguments, processes, environment), timeouts)

    return start


def with_standbys(pool: StandbyPool, processes: int, timeouts: Timeouts, environment: Mapping[str, str]) -> Starter:
    """Has processes wait, at an address of theirs, once these train; a restart takes the processes that wait."""

    def start(arguments: Sequence[str], again: bool) -> RunOutcome:
        def fill() -> None:
            if again:
                waiting = make_workers(arguments, processes, environment)
                pool.fill([(worker.command, worker.environment) for worker in waiting])

        workers = use_standbys(make_workers(arguments, processes, environment), pool)
        return supervise(workers, timeouts, settled=fill)

    return start


def surviving(
    policy: ElasticPolicy, agents: Agents | None, timeouts: Timeouts, environment: Mapping[str, str]
) -> Starter:
    """Starts processes that go on without one that is lost, here or by agents on other hosts."""

    def start(arguments: Sequence[str], again: bool) -> RunOutcome:
        count = policy.slots + policy.spares
        workers = make_workers(arguments, policy.slots, environment, count, survives=True)
        if agents is None:
            return survive(workers, policy, timeouts)
        return survive(agents.place(workers, policy.slots), policy, timeouts, coordinator=agents.coordinator)

    return start


def on_ray(ray: Ray, processes: int) -> Starter:
    """Starts processes on a Ray cluster."""

    def start(arguments: Sequence[str], again: bool) -> RunOutcome:
        def command(rank: int, coordinator: str) -> tuple[Sequence[str], Mapping[str, str]]:
            environment = {
                "JAX_COORDINATOR_ADDRESS": coordinator,
                "JAX_COORDINATOR_BIND_ADDRESS": coordinator,
                "MULTIPOD_PROCESSES": str(processes),
                "MULTIPOD_PROCESS_ID": str(rank),
            }
            return [sys.executable, "-m", "multipod", *arguments], environment

        return run_on_ray(command, processes, ray.address, ray.each)

    return start
