"""`multipod launch`: the same command as several processes on this machine, joined over loopback."""

import os
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from multipod.elastic.launcher.membership import ElasticPolicy
from multipod.elastic.launcher.membership import survive as survive_run
from multipod.elastic.launcher.processes import WorkerCommand, print_to_stderr
from multipod.elastic.launcher.remote import Agents, address_towards, read_secret, split_address
from multipod.elastic.launcher.services import CoordinatorHost
from multipod.elastic.launcher.standby import StandbyPool
from multipod.elastic.launcher.supervise import INTERRUPTED, RunOutcome, supervise
from multipod.errors import ClusterError
from multipod.layout.layout import parse_shape
from multipod.runtime import CPU_DEVICES, Timeouts


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--processes", type=click.IntRange(min=1), required=True, help="How many processes to start.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=3, max=7 * 24 * 3600),
    metavar="SECONDS",
    show_default=f"{Timeouts().limit_s:g}",
    help="The longest that a process may wait for another; all lower time-outs follow from it.",
)
@click.option("--survive", is_flag=True, help="Go on without a process that dies, and take another in for it.")
@click.option(
    "--least",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="With --survive: the fewest processes that it goes on with.",
)
@click.option(
    "--spares",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="With --survive: processes that wait, ready, to take a place that falls empty.",
)
@click.option("--no-replace", is_flag=True, help="With --survive: start no process in the place of a dead one.")
@click.option(
    "--mirror-every",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="K",
    help="With --survive: copy the state to memory, and what one process alone holds to the next, every K updates.",
)
@click.option(
    "--evict",
    type=click.FloatRange(1.5),
    metavar="FACTOR",
    help="With --survive: let a process go whose device is slower than the median by this factor for long.",
)
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Start all again from the last checkpoint, so often at most, when the run cannot go on otherwise.",
)
@click.option(
    "--standby",
    is_flag=True,
    help="With --restarts: keep processes ready that have compiled all, and go on when they have read the checkpoint.",
)
@click.option(
    "--hosts",
    metavar="HOST:PORT,...",
    help="With --survive: where the agents are (`multipod agent`) that start the processes, neighbours on one host.",
)
@click.option(
    "--secret",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="With --hosts: the agents' secret.",
)
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="Start the processes on a Ray cluster: its address, `auto`, or `local` for one on this machine.",
)
@click.option(
    "--ray-each",
    default="1,0",
    show_default=True,
    metavar="CPUS,GPUS",
    help="With --ray: what is set aside for each process.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def launch(
    processes: int,
    timeout: float | None,
    survive: bool,
    least: int,
    spares: int,
    no_replace: bool,
    mirror_every: int,
    evict: float | None,
    restarts: int,
    standby: bool,
    hosts: str | None,
    secret: Path | None,
    ray: str | None,
    ray_each: str,
    command: tuple[str, ...],
) -> None:
    """Run a multipod COMMAND as several processes, on this machine or by agents on others.

    multipod launch --processes 4 -- train digits --mesh 2x4

    When one process dies or is stuck, the others are ended, and the message says which it was and how
    to go on. With --survive the others go on at once, without a restart; see docs/design/availability.md.
    """
    timeouts = settle_timeouts(command, timeout)
    worker_arguments(command, processes, timeouts)  # what it refuses is refused before anything is started
    rules = ElasticPolicy(processes, least, spares, not no_replace, mirror_every, evict or 0.0) if survive else None
    check_rules(command, processes, least, spares, rules)
    check_standby(command, standby, restarts, survive)
    apart = None if hosts is None and secret is None else agents_of(hosts, secret, processes, survive, timeouts)
    if ray is not None and (survive or standby):
        raise ClusterError("launch: --ray starts processes on other hosts. Leave out --survive and --standby.")
    started = None if ray is None else on_ray(ray, ray_each, processes)
    outcome = attempts(list(command), processes, timeouts, rules, restarts, standby, started, apart)
    if outcome.exit_code:
        how = ["--survive"] if survive else []
        how += [] if hosts is None else ["--hosts", hosts, "--secret", str(secret)]
        how += [] if ray is None else ["--ray", ray, "--ray-each", ray_each]
        print_to_stderr(f"multipod: {report(outcome, processes, command, timeout, how)}")
        sys.exit(outcome.exit_code)


def check_rules(command: Sequence[str], processes: int, least: int, spares: int, rules: ElasticPolicy | None) -> None:
    """Refuses options that do not fit each other.

    Raises:
      ClusterError: all that is wrong.
    """
    wrong = []
    if rules is None and (least > 1 or spares):
        wrong.append("--least and --spares say how a run survives. Add --survive, or leave them out.")
    if rules is not None and command[0] != "train":
        wrong.append(f"--survive goes with `train`, and this is `{command[0]}`. Leave out --survive.")
    if least > processes:
        wrong.append(f"--least {least} is more than --processes {processes}. Lower it.")
    if rules is not None and option(command, "--fail") is not None:
        wrong.append("--survive decides itself which chips are missing. Leave out --fail.")
    if wrong:
        raise ClusterError("launch: " + "\n".join(wrong))


def check_standby(command: Sequence[str], standby: bool, restarts: int, survive: bool) -> None:
    """Refuses --standby where nothing would use it.

    Raises:
      ClusterError: all that is wrong.
    """
    wrong = []
    if standby and not restarts:
        wrong.append("--standby is for restarts, and there are none. Add --restarts 3, or leave it out.")
    if standby and survive:
        wrong.append("--standby is for restarts of all. With --survive, take --spares 1.")
    if standby and command[0] != "train":
        wrong.append(f"--standby goes with `train`, and this is `{command[0]}`. Leave out --standby.")
    if wrong:
        raise ClusterError("launch: " + "\n".join(wrong))


def attempts(
    command: Sequence[str],
    processes: int,
    timeouts: Timeouts,
    rules: ElasticPolicy | None,
    restarts: int,
    standby: bool = False,
    started: Callable[[Sequence[str]], RunOutcome] | None = None,
    apart: Agents | None = None,
) -> RunOutcome:
    """Runs the command, and again from its last checkpoint while it fails and may; how it ended at last.

    `started` runs its processes, where that is not done here; `apart` are the agents that run those of a run that
    survives, where there are any.
    """
    now = list(command)
    with StandbyPool() as reserve:
        while True:
            arguments = worker_arguments(now, processes, timeouts)
            count = processes + (0 if rules is None else rules.spares)
            made = workers(arguments, processes, os.environ, count, rules is not None)
            fill = partial(fill_standbys, reserve, arguments, processes)
            if started is not None:
                outcome = started(arguments)
            elif apart is not None and rules is not None:
                outcome = survive_run(apart.place(made, processes), rules, timeouts, meeting=apart.meeting)
            elif rules is not None:
                outcome = survive_run(made, rules, timeouts)
            elif standby:
                outcome = supervise(use_standbys(made, reserve), timeouts, settled=fill if restarts else lambda: None)
            else:
                outcome = supervise(made, timeouts)
            if outcome.exit_code != 1 or not restarts:
                return outcome
            restarts -= 1
            again = "from the start"
            if outcome.saved is not None and outcome.folder:
                now = resumed(outcome.folder, command, processes)
                again = f"from update {outcome.saved}"
            elif outcome.folder and option(command, "--out") is not None and option(command, "--resume") is None:
                return outcome  # its folder is there and holds no checkpoint
            print_to_stderr(f"multipod: launch: {outcome.reason}. All start again {again}; restarts left: {restarts}.")


def fill_standbys(reserve: StandbyPool, arguments: Sequence[str], processes: int) -> None:
    """Starts a process that waits for each rank; they meet at an address of their own."""
    reserve.fill([(one.command, one.environment) for one in workers(arguments, processes, os.environ)])


def use_standbys(made: Sequence[WorkerCommand], reserve: StandbyPool) -> list[WorkerCommand]:
    """The workers, in the processes that wait and where these have met; as they are if there are none."""
    waiting = reserve.take()
    if waiting is None:
        return list(made)
    return [replace(one, warm=warm, environment=warm.environment_told) for one, warm in zip(made, waiting, strict=True)]


def agents_of(hosts: str | None, secret: Path | None, processes: int, survive: bool, timeouts: Timeouts) -> Agents:
    """The agents that --hosts names.

    Raises:
      ClusterError: all that is wrong with the options, an address or the secret.
    """
    named = [one for one in (hosts or "").split(",") if one]
    wrong = []
    if not named or secret is None:
        wrong.append("--hosts and --secret go together: where the agents are, and what they and this launcher know.")
    if not survive:
        wrong.append("--hosts is for runs that survive. Add --survive; without it, start processes by a scheduler.")
    if len(named) > processes:
        wrong.append(f"--hosts names {len(named)} hosts for {processes} processes. Leave some out.")
    if wrong or secret is None:
        raise ClusterError("launch: " + "\n".join(wrong))
    for one in named:
        split_address(one)
    read_secret(secret)
    return Agents(tuple(named), secret, timeouts.limit_s, CoordinatorHost(address_towards(*split_address(named[0]))))


def on_ray(address: str, each: str, processes: int) -> Callable[[Sequence[str]], RunOutcome]:
    """What runs processes with given arguments on the Ray cluster at `address`.

    Raises:
      ClusterError: `each` is no pair of numbers.
    """
    from multipod.cli.ray_hosts import RayResources, run_on_ray

    try:
        cpus, gpus = map(float, each.split(","))
    except ValueError:
        raise ClusterError(f"launch: --ray-each {each}: say CPUs and GPUs of a process, as 8,1.") from None

    def run(arguments: Sequence[str]) -> RunOutcome:
        def command(rank: int, meeting: str) -> tuple[list[str], dict[str, str]]:
            environment = {
                "JAX_COORDINATOR_ADDRESS": meeting,
                "JAX_COORDINATOR_BIND_ADDRESS": meeting,
                "MULTIPOD_PROCESSES": str(processes),
                "MULTIPOD_PROCESS_ID": str(rank),
            }
            return [sys.executable, "-m", "multipod", *arguments], environment

        return run_on_ray(command, processes, address, RayResources(cpus, gpus))

    return run


def settle_timeouts(command: Sequence[str], given_s: float | None) -> Timeouts:
    """The time-outs of launcher and workers alike, from `launch --timeout` or the command's `--timeout`.

    Raises:
      ClusterError: the two differ, or the command's is no number that `Timeouts` takes.
    """
    text = option(command, "--timeout")
    if text is None:
        return Timeouts() if given_s is None else Timeouts(given_s)
    try:
        timeouts = Timeouts(float(text))
    except ValueError as error:
        raise ClusterError(f"launch: --timeout {text}: {error} Write --timeout 60, before the `--`.") from None
    if given_s not in (None, timeouts.limit_s):
        raise ClusterError(
            f"launch: --timeout is {given_s:g} before the `--` and {text} after it. Give it once, before the `--`."
        )
    return timeouts


def worker_arguments(command: Sequence[str], processes: int, timeouts: Timeouts) -> list[str]:
    """What follows `multipod` in each worker: the command, with its `--cpu-devices` and `--timeout`.

    Raises:
      ClusterError: no command, `launch` itself, or devices that do not divide over the processes.
    """
    if not command:
        raise ClusterError(
            f"launch: there is no command to run in the {processes} processes. "
            f"Write it after `--`: multipod launch --processes {processes} -- train digits"
        )
    if command[0] == "launch":
        raise ClusterError(
            "launch: the command is `launch` again, and a process that is launched cannot launch others. "
            "Give what they are to run after the `--`, for example: train digits"
        )
    added = []
    if option(command, "--cpu-devices") is None:
        added += ["--cpu-devices", str(devices_per_process(command, processes))]
    if option(command, "--timeout") is None:
        added += ["--timeout", f"{timeouts.limit_s:g}"]
    return [*command, *added]


def devices_per_process(command: Sequence[str], processes: int) -> int:
    """CPU devices of each process: those of the command's `--mesh`, or `CPU_DEVICES`, shared out evenly.

    Raises:
      LayoutError: a mesh that cannot be read.
      ClusterError: they do not divide.
    """
    mesh = option(command, "--mesh")
    devices, said = CPU_DEVICES, f"without --mesh there are {CPU_DEVICES} devices"
    if mesh is not None:
        rows, columns = parse_shape(mesh)
        devices, said = rows * columns, f"--mesh {mesh} has {rows * columns} devices"
    if devices % processes:
        fitting = ", ".join(str(count) for count in range(1, devices + 1) if devices % count == 0)
        raise ClusterError(
            f"launch: {said}, which {processes} processes cannot share evenly. "
            f"Give --processes one of {fitting}, or a --mesh whose size is a multiple of {processes}."
        )
    return devices // processes


def option(command: Sequence[str], name: str) -> str | None:
    """The value of the last `name VALUE` or `name=VALUE` in the command, None if there is none."""
    found = None
    for at, word in enumerate(command):
        if word == name and at + 1 < len(command):
            found = command[at + 1]
        elif word.startswith(name + "="):
            found = word.partition("=")[2]
    return found


def workers(
    arguments: Sequence[str],
    processes: int,
    environment: Mapping[str, str],
    count: int | None = None,
    survives: bool = False,
) -> list[WorkerCommand]:
    """One worker a rank, each told its place in the cluster by its environment; `count` of them, spares included.

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


def report(
    outcome: RunOutcome, processes: int, command: Sequence[str], timeout: float | None, how: Sequence[str] = ()
) -> str:
    """What a user is told of a run that did not end well: who, why, the last lines, the next move."""
    ended = {1: "", 2: " The other process was ended."}.get(processes, " All other processes were ended.")
    if outcome.exit_code == INTERRUPTED:
        ended = ""
    elif outcome.culprit is None:
        ended = " All processes were ended."
    parts = [f"launch: {outcome.reason}.{ended}"]
    if outcome.lines:
        parts += ["Its last lines:", *(f"  {line}" for line in outcome.lines)]
    if outcome.stuck:
        parts.append("If it was slow and not stuck, give a longer --timeout.")
    return "\n".join([*parts, next_move(outcome, processes, command, timeout, how)])


def next_move(
    outcome: RunOutcome, processes: int, command: Sequence[str], timeout: float | None, how: Sequence[str]
) -> str:
    """How to go on, launched as it was: from the last checkpoint, or from the start."""
    launcher = ["multipod", "launch", "--processes", str(processes), *how]
    if timeout is not None:
        launcher += ["--timeout", f"{timeout:g}"]
    if outcome.saved is None or not outcome.folder:
        there = f"remove {outcome.folder}, then " if outcome.folder and option(command, "--out") is not None else ""
        return f"No checkpoint was saved. To start again: {there}{shlex.join([*launcher, '--', *command])}"
    again = resumed(outcome.folder, command, processes)
    return f"Update {outcome.saved} is saved. To go on from it: {shlex.join([*launcher, '--', *again])}"


def resumed(folder: str, command: Sequence[str], processes: int) -> list[str]:
    """The command that goes on with the run in `folder`, which this command began."""
    return ["train", "--resume", folder, *_kept_options(command, processes)]


def _kept_options(command: Sequence[str], processes: int) -> list[str]:
    """What a resumed run cannot take from its folder: unusual devices of a process, and its time-out."""
    devices, limit = option(command, "--cpu-devices"), option(command, "--timeout")
    if devices is None:
        devices = str(devices_per_process(command, processes))
    usual = CPU_DEVICES % processes == 0 and devices == str(CPU_DEVICES // processes)
    return ([] if usual else ["--cpu-devices", devices]) + ([] if limit is None else ["--timeout", limit])
