"""`multipod launch`: a command as several processes on this machine, joined over loopback, or on others."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from multipod.cli.launching.child_command import ChildCommand, read_child
from multipod.cli.launching.manifests.render import RENDERERS, rendered_run
from multipod.cli.launching.ray_hosts import RayResources
from multipod.cli.launching.starters import LaunchSettings, Ray, run_with_restarts
from multipod.elastic.launcher.membership import ElasticPolicy
from multipod.elastic.launcher.processes import print_to_stderr
from multipod.elastic.launcher.remote import Agents, address_towards, read_secret, split_address
from multipod.elastic.launcher.services import CoordinatorHost
from multipod.elastic.launcher.supervise import INTERRUPTED, REFUSED, RunOutcome
from multipod.errors import ClusterError
from multipod.runtime import Timeouts


@dataclass(frozen=True)
class LaunchOptions:
    """The options of `multipod launch`, which its help describes."""

    processes: int
    timeout: float | None = None
    survive: bool = False
    least: int = 1
    spares: int = 0
    no_replace: bool = False
    mirror_every: int = 1
    mirror_copies: int = 1
    evict: float | None = None
    restarts: int = 0
    standby: bool = False
    hosts: str | None = None
    secret: Path | None = None
    ray: str | None = None
    ray_each: str = "1,0"
    render: str | None = None
    per_node: int = 1
    image: str = ""
    accelerator: str = ""
    queue: str = ""

    @property
    def policy(self) -> ElasticPolicy | None:
        """How the run survives; None if it does not."""
        if not self.survive:
            return None
        return ElasticPolicy(
            self.processes,
            self.least,
            self.spares,
            not self.no_replace,
            self.mirror_every,
            self.mirror_copies,
            self.evict or 0.0,
        )

    @property
    def each(self) -> tuple[float, float]:
        """CPUs and GPUs of a process.

        Raises:
          ClusterError: --each is no pair of numbers.
        """
        try:
            cpus, gpus = map(float, self.ray_each.split(","))
        except ValueError:
            raise ClusterError(f"launch: --each {self.ray_each}: say CPUs and GPUs of a process, as 8,1.") from None
        return cpus, gpus

    def launcher_words(self) -> list[str]:
        """The launcher's command line, to launch a run where this one was."""
        words = ["multipod", "launch", "--processes", str(self.processes)]
        if self.survive:
            words += ["--survive"]
            given = {"--least": self.least, "--spares": self.spares, "--mirror-every": self.mirror_every}
            given["--mirror-copies"] = self.mirror_copies
            usual = type(self)
            for name, value in given.items():
                words += [name, str(value)] if value != getattr(usual, name[2:].replace("-", "_")) else []
            words += ["--no-replace"] if self.no_replace else []
            words += [] if self.evict is None else ["--evict", f"{self.evict:g}"]
        words += ["--restarts", str(self.restarts)] if self.restarts else []
        words += ["--standby"] if self.standby else []
        words += [] if self.hosts is None else ["--hosts", self.hosts, "--secret", str(self.secret)]
        words += [] if self.ray is None else ["--ray", self.ray, "--ray-each", self.ray_each]
        return words + ([] if self.timeout is None else ["--timeout", f"{self.timeout:g}"])


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
    help="With --survive: copy the state to memory, and what one process alone holds to another, every K updates.",
)
@click.option(
    "--mirror-copies",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="With --survive: how many other hosts (or processes, on one host) keep what would be lost with one.",
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
    metavar="HOST:PORT[@RACK],...",
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
    "--each",
    "ray_each",
    default="1,0",
    show_default=True,
    metavar="CPUS,GPUS",
    help="With --ray and --render: what is set aside for each process.",
)
@click.option(
    "--render",
    type=click.Choice(list(RENDERERS)),
    help="Start nothing: print the manifest by which this launcher starts the run; see docs/launchers.md.",
)
@click.option(
    "--per-node",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="With --render slurm: processes on a node.",
)
@click.option("--image", default="", help="With --render: the container image that has multipod and the recipe.")
@click.option(
    "--accelerator",
    default="",
    metavar="KIND",
    help="With --render: the kind of device, in the launcher's words: H100, nvidia-h100-80gb, v5litepod-16.",
)
@click.option("--queue", default="", metavar="NAME", help="With --render: Kueue's queue, or Slurm's partition.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def launch(command: tuple[str, ...], **given: Any) -> None:
    """Run a multipod COMMAND as several processes, on this machine or by agents on others.

    multipod launch --processes 4 -- train digits --mesh 2x4

    When one process dies or is stuck, the others are ended, and the message says which it was and how
    to go on. With --survive the others go on at once, without a restart; see docs/design/availability.md.
    """
    options, child = LaunchOptions(**given), read_child(command)
    if options.render is not None:
        click.echo(render(options, child, options.render), nl=False)
        return
    outcome = run_with_restarts(child, settle(options, child))
    if outcome.exit_code:
        print_to_stderr(f"multipod: {describe_failure(outcome, child, options)}")
        sys.exit(outcome.exit_code)


def render(options: LaunchOptions, child: ChildCommand, launcher: str) -> str:
    """The manifest of the run for a launcher.

    Raises:
      ClusterError: options that are about processes here, or that this launcher cannot do.
    """
    here = {"--survive": options.survive, "--standby": options.standby, "--hosts": options.hosts, "--ray": options.ray}
    given = [name for name, value in here.items() if value]
    if given:
        raise ClusterError(
            f"launch --render {launcher}: {' and '.join(given)} say how this launcher starts processes, and {launcher} "
            "is to start them. Leave them out; --restarts is how often it starts all again."
        )
    timeouts = child.settle_timeouts(options.timeout)
    run = rendered_run(
        child,
        timeouts,
        processes=options.processes,
        each=options.each,
        per_node=options.per_node,
        restarts=options.restarts,
        image=options.image,
        accelerator=options.accelerator,
        queue=options.queue,
    )
    return RENDERERS[launcher](run)


def settle(options: LaunchOptions, child: ChildCommand) -> LaunchSettings:
    """What the options come to. What is refused is refused before anything is started.

    Raises:
      ClusterError: options that contradict each other or the command.
    """
    timeouts = child.settle_timeouts(options.timeout)
    child.worker_arguments(options.processes, timeouts)
    refuse_survival_contradictions(options, child)
    refuse_standby_contradictions(options, child)
    named = options.hosts is not None or options.secret is not None
    return LaunchSettings(
        options.processes,
        timeouts,
        options.policy,
        agents=find_agents(options, timeouts) if named else None,
        ray=None if options.ray is None else find_ray(options, options.ray),
        restarts=options.restarts,
        standby=options.standby,
        words=tuple(options.launcher_words()),
    )


def refuse_survival_contradictions(options: LaunchOptions, child: ChildCommand) -> None:
    """Refuses options of survival that do not fit each other or the command.

    Raises:
      ClusterError: all that is wrong.
    """
    wrong = []
    if not options.survive and (options.least > 1 or options.spares or options.mirror_copies > 1):
        wrong.append("--least, --spares and --mirror-copies say how a run survives. Add --survive, or leave them out.")
    if options.survive and child.name != "train":
        wrong.append(f"--survive goes with `train`, and this is `{child.name}`. Leave out --survive.")
    if options.least > options.processes:
        wrong.append(f"--least {options.least} is more than --processes {options.processes}. Lower it.")
    hosts = {address.partition("@")[0].rpartition(":")[0] for address in (options.hosts or "").split(",") if address}
    domains, kind = (len(hosts), "hosts") if len(hosts) > 1 else (options.processes, "processes")
    if options.survive and options.mirror_copies > max(1, domains - 1):
        wrong.append(
            f"--mirror-copies {options.mirror_copies} needs {options.mirror_copies + 1} {kind}, and there are "
            f"{domains}. Lower it, or add {kind}."
        )
    if options.survive and child.fail is not None:
        wrong.append("--survive decides itself which chips are missing. Leave out --fail.")
    if wrong:
        raise ClusterError("launch: " + "\n".join(wrong))


def refuse_standby_contradictions(options: LaunchOptions, child: ChildCommand) -> None:
    """Refuses --standby where nothing would use it.

    Raises:
      ClusterError: all that is wrong.
    """
    wrong = []
    if options.standby and not options.restarts:
        wrong.append("--standby is for restarts, and there are none. Add --restarts 3, or leave it out.")
    if options.standby and options.survive:
        wrong.append("--standby is for restarts of all. With --survive, take --spares 1.")
    if options.standby and child.name != "train":
        wrong.append(f"--standby goes with `train`, and this is `{child.name}`. Leave out --standby.")
    if wrong:
        raise ClusterError("launch: " + "\n".join(wrong))


def find_agents(options: LaunchOptions, timeouts: Timeouts) -> Agents:
    """The agents that --hosts names.

    Raises:
      ClusterError: all that is wrong with the options, an address or the secret.
    """
    named = [address.partition("@") for address in (options.hosts or "").split(",") if address]
    addresses, racks = [address for address, _, _ in named], [rack for _, _, rack in named]
    wrong = []
    if not addresses or options.secret is None:
        wrong.append("--hosts and --secret go together: where the agents are, and what they and this launcher know.")
    if not options.survive:
        wrong.append("--hosts is for runs that survive. Add --survive; without it, start processes by a scheduler.")
    if len(addresses) > options.processes:
        wrong.append(f"--hosts names {len(addresses)} hosts for {options.processes} processes. Leave some out.")
    if any((at and not rack) or "/" in rack for _, at, rack in named):
        wrong.append("--hosts: after an @ comes the name of a rack, without a slash: 10.0.0.1:4100@rack1.")
    if wrong or options.secret is None:
        raise ClusterError("launch: " + "\n".join(wrong))
    for address in addresses:
        split_address(address)
    read_secret(options.secret)
    coordinator = CoordinatorHost(address_towards(*split_address(addresses[0])))
    return Agents(tuple(addresses), options.secret, timeouts.limit_s, coordinator, racks=tuple(racks))


def find_ray(options: LaunchOptions, address: str) -> Ray:
    """The Ray cluster at `address`.

    Raises:
      ClusterError: the run is to survive or has standbys, or --each is no pair of numbers.
    """
    if options.survive or options.standby:
        raise ClusterError("launch: --ray starts processes on other hosts. Leave out --survive and --standby.")
    return Ray(address, RayResources(*options.each))


def describe_failure(outcome: RunOutcome, child: ChildCommand, options: LaunchOptions) -> str:
    """What a user is told of a run that did not end well: who, why, the last lines, the next move."""
    ended = {1: "", 2: " The other process was ended."}.get(options.processes, " All other processes were ended.")
    if outcome.exit_code == INTERRUPTED:
        ended = ""
    elif outcome.culprit is None:
        ended = " All processes were ended."
    parts = [f"launch: {outcome.reason}.{ended}"]
    if outcome.lines:
        parts += ["Its last lines:", *(f"  {line}" for line in outcome.lines)]
    if outcome.stuck:
        parts.append("If it was slow and not stuck, give a longer --timeout.")
    return "\n".join([*parts, describe_next_move(outcome, child, options)])


def describe_next_move(outcome: RunOutcome, child: ChildCommand, options: LaunchOptions) -> str:
    """How to go on, launched as it was: from the last checkpoint, or from the start."""
    launcher = options.launcher_words()
    if outcome.exit_code == REFUSED:
        return "Nothing was trained, and another start would end alike. Change what the message says."
    if outcome.saved is None or not outcome.folder:
        there = f"remove {outcome.folder}, then " if outcome.folder and child.out is not None else ""
        return f"No checkpoint was saved. To start again: {there}{shlex.join([*launcher, '--', *child.words])}"
    again = child.resuming(outcome.folder, options.processes)
    return f"Update {outcome.saved} is saved. To go on from it: {shlex.join([*launcher, '--', *again.words])}"
