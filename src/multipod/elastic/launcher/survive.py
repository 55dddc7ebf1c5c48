"""The launcher's side of a run that survives: it announces worlds, reaps the dead and starts others in their place.

`survive` is to such a run what `supervise.supervise` is to one that ends with its first process. It starts the same
processes with the same watch over them, and does what `membership.decide` says.
"""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from multipod.elastic.domains import describe_exposure
from multipod.elastic.launcher.membership import (
    ClusterView,
    ElasticPolicy,
    decide,
    has_joined,
    judge_ending,
    lost_its_peers,
)
from multipod.elastic.launcher.processes import LineSink, Rank, WorkerCommand, WorkerProcesses, print_to_stderr
from multipod.elastic.launcher.services import CoordinationServices, CoordinatorHost
from multipod.elastic.launcher.supervise import (
    BEFORE_FIRST,
    INTERRUPTED,
    SETTLE_S,
    RunOutcome,
    StopSignals,
    blame,
    count_signals,
    describe_end,
    has_refused,
)
from multipod.elastic.straggling import SpeedHistory, Straggler
from multipod.elastic.world import World, go_message
from multipod.runtime import Timeouts

LOOPBACK = CoordinatorHost()
PEER_LOSS_S = 0.3  # a rank that lost its peers says so, and the death that caused it is seen about as soon
MAX_FAILURES = 4  # worlds in a row without one update, and starts in a row of one rank that soon end
SLOW_FACTOR = 2.0  # times the median rank: such a rank is named
EARLY_S = 20.0  # a replacement that dies sooner than that after its start has failed


def survive(
    workers: Sequence[WorkerCommand],
    policy: ElasticPolicy,
    timeouts: Timeouts,
    show: LineSink = print_to_stderr,
    coordinator: CoordinatorHost = LOOPBACK,
) -> RunOutcome:
    """Runs all workers to their end; the first `policy.slots` as the run, the others as its spares.

    Does what `supervise` does; but a rank that is lost does not end the run. Ranks on other hosts
    (`multipod.elastic.launcher.remote`) need a `coordinator` that they can reach.

    Raises:
      ClusterError: a worker, or the launcher's helper, could not be started.
    """
    with (
        count_signals() as stops,
        WorkerProcesses(show) as processes,
        CoordinationServices(workers[0].environment, coordinator) as services,
    ):
        processes.start(workers)
        run = _ElasticRun(processes, list(workers), policy, timeouts, services, show)
        outcome = run.watch(stops)
        run.end_waiting()
        lines = () if outcome.culprit is None else processes.last_lines(outcome.culprit)
        processes.ask_to_end(timeouts.grace_s, hurry=lambda: stops.count > 1 or outcome.reason == BEFORE_FIRST)
    return replace(outcome, lines=lines or outcome.lines, folder=run.progress.folder, saved=run.progress.saved)


@dataclass
class _CurrentWorld:
    """The world as it was last announced, and what became of it.

    Attributes:
      slots: the rank on each taken slot, the dead taken out.
      members: all its ranks, the dead too.
      announced_lost: ranks that it was announced without, with the reason.
      lost: ranks that were lost since.
      degraded_s: when it is to be left for another; None while it is well.
      started: all its ranks were told to join it.
      had_update: its ranks did an update together.
      fruitless: worlds in a row, up to the last, in which not one update was done.
    """

    slots: dict[int, int] = field(default_factory=dict)
    members: list[int] = field(default_factory=list)
    generation: int = -1
    announced_s: float = 0.0
    announced_lost: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    degraded_s: float | None = None
    started: bool = True
    had_update: bool = True
    fruitless: int = 0

    def remove(self, rank: Rank, reason: str, now_s: float) -> None:
        """Takes a dead rank out of its slot, if it has one."""
        slot = next((slot for slot, number in self.slots.items() if number == rank.number), None)
        if slot is not None:
            del self.slots[slot]
            self.lost[str(rank.number)] = reason
            self.degraded_s = now_s

    def expect_loss(self, ranks: Sequence[Rank], now_s: float) -> None:
        """Gives the death that made a rank lose its peers a moment to be seen."""
        if self.degraded_s is None and any(lost_its_peers(rank, self.generation) for rank in ranks):
            self.degraded_s = now_s + PEER_LOSS_S

    def is_degraded(self, now_s: float) -> bool:
        """Whether the world is to be left, by now."""
        return self.degraded_s is not None and now_s >= self.degraded_s

    @property
    def untold_losses(self) -> dict[str, str]:
        """The losses that no rank has told of yet: only a world that does an update tells of those before it."""
        return dict(self.lost) if self.had_update else self.announced_lost | self.lost

    def count_fruitless(self) -> bool:
        """Counts this world, before it is left; returns whether too many in a row were fruitless."""
        self.fruitless = 0 if self.had_update else self.fruitless + 1
        return self.fruitless >= MAX_FAILURES

    def replace_by(self, world: World, now_s: float) -> None:
        """Becomes the next world."""
        self.slots, self.members = dict(zip(world.slots, world.ranks, strict=True)), list(world.ranks)
        self.generation, self.announced_s = world.generation, now_s
        self.announced_lost, self.lost = dict(world.lost), {}
        self.degraded_s, self.started, self.had_update = None, False, world.planned


@dataclass
class _Progress:
    """What the ranks have said of the run."""

    folder: str = ""
    saved: int | None = None
    trained: bool = False  # an update was done, by these processes

    def read(self, members: Sequence[Rank]) -> None:
        """Takes in the beats of the ranks that live."""
        beats = [rank.beat for rank in members if rank.code is None and rank.beat is not None]
        self.folder = next((beat.folder for beat in beats if beat.folder), self.folder)
        saved = [beat.saved for beat in beats if beat.saved is not None]
        self.saved = max([*saved, *([] if self.saved is None else [self.saved])], default=None)


@dataclass
class _Replacements:
    """Knows the ranks for which no other process is started: of another recipe, or dying early again and again."""

    show: LineSink
    reaped: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    early_deaths: dict[int, int] = field(default_factory=dict)

    def is_new_death(self, rank: Rank) -> bool:
        """Whether the rank has died, and has not been reaped since it was last started."""
        return rank.code not in (None, 0, INTERRUPTED) and rank.number not in self.reaped

    def may_return(self, rank: Rank, started_s: float) -> bool:
        """Counts a death of the rank; returns whether another process is to be started for it."""
        early = rank.ended_s - started_s < EARLY_S
        self.early_deaths[rank.number] = self.early_deaths.get(rank.number, 0) + 1 if early else 0
        if self.early_deaths[rank.number] > MAX_FAILURES and rank.number not in self.given_up:
            self.show(f"launch: rank {rank.number} ended {MAX_FAILURES} times soon after its start. It is given up.")
            self.given_up.add(rank.number)
        return rank.number not in self.given_up


class _StragglerWatch:
    """Knows how fast the devices of the ranks are, and names those that are steadily slow, each once."""

    def __init__(self, policy: ElasticPolicy, show: LineSink) -> None:
        self.policy, self.show = policy, show
        self.speeds, self.named = SpeedHistory(policy.steady_beats), set[int]()

    def find(self, members: Sequence[Rank]) -> list[Straggler]:
        """Takes in the speeds of the ranks that live; returns the stragglers, slowest first."""
        for rank in members:
            if rank.beat is not None and rank.code is None:
                self.speeds.add(rank.number, rank.beat.speed_s)
        stragglers = self.speeds.find_slow(self.policy.evict_factor or SLOW_FACTOR)
        for straggler in stragglers:
            if straggler.rank not in self.named:
                self.named.add(straggler.rank)
                self.show(f"launch: {straggler}.")
        return stragglers

    def forget(self, number: int) -> None:
        """Forgets a rank that is no more."""
        self.speeds.forget(number)
        self.named.discard(number)


class _ElasticRun:
    """The moving parts of `survive`."""

    def __init__(
        self,
        processes: WorkerProcesses,
        workers: list[WorkerCommand],
        policy: ElasticPolicy,
        timeouts: Timeouts,
        services: CoordinationServices,
        show: LineSink,
    ) -> None:
        self.processes, self.workers, self.policy, self.timeouts = processes, workers, policy, timeouts
        self.services, self.show = services, show
        self.world, self.progress = _CurrentWorld(), _Progress()
        self.replacements, self.stragglers = _Replacements(show), _StragglerWatch(policy, show)
        self.kill_reasons: dict[int, str] = {}  # of ranks that the launcher itself ended
        self.exposure = ""  # which losses the copies in memory do not outlive, as last said
        self.interrupted_pid = -1  # the process that an interrupt was passed on to

    @property
    def ranks(self) -> list[Rank]:
        """Every rank, by number."""
        return [child.rank for child in self.processes.children]

    @property
    def members(self) -> list[Rank]:
        """The ranks of the world that have not been taken out of it."""
        return [self.processes.children[number].rank for number in self.world.slots.values()]

    def watch(self, stops: StopSignals) -> RunOutcome:
        """Polls until the run is over."""
        while True:
            self.processes.poll()
            self.read_beats()
            if self.services.ended:
                return RunOutcome(1, None, "the launcher's helper, which holds JAX's coordination service, has died")
            if stops.count > 1:
                return RunOutcome(INTERRUPTED, reason="the run was interrupted twice, and all processes were killed")
            outcome = (self.ask_to_stop() if stops.count else None) or self.act(interrupted=stops.count > 0)
            if outcome is not None:
                return outcome

    def ask_to_stop(self) -> RunOutcome | None:
        """Passes an interrupt on to a rank that trains, to another if it dies; returns the outcome if there is nobody.

        Before the first update is done there is nothing to save that is not saved: the end need not wait for that.
        """
        living = [rank.pid for rank in self.members if rank.code is None]
        if not living:
            return RunOutcome(INTERRUPTED, reason="the run was interrupted")
        if not self.progress.trained:
            return RunOutcome(INTERRUPTED, reason=BEFORE_FIRST)
        if self.interrupted_pid not in living:
            self.interrupted_pid = living[0]
            os.kill(self.interrupted_pid, signal.SIGINT)
        return None

    def act(self, interrupted: bool) -> RunOutcome | None:
        """Does what `decide` says; returns the outcome, once the run is over."""
        clock_s, world = self.processes.clock_s, self.world
        refused = [rank for rank in self.ranks if has_refused(rank)]
        if refused and not self.progress.trained:  # no loss of a process: the others would train without a part
            return blame(refused) if clock_s - min(rank.ended_s for rank in refused) >= SETTLE_S else None
        if world.generation < 0:
            failed = [rank for rank in self.ranks if rank.code is not None]
            if failed:
                return blame(failed) if clock_s - min(rank.ended_s for rank in failed) >= SETTLE_S else None
        else:
            members = [self.processes.children[number].rank for number in world.members]
            ending, outcome = judge_ending(members, clock_s, self.timeouts)
            if ending:
                return outcome
            self.reap(interrupted)
        self.evict_stragglers()
        view = ClusterView(
            self.ranks, world.slots, world.generation, world.announced_s, world.is_degraded(clock_s), clock_s
        )
        decision = decide(view, self.policy, self.timeouts)
        self.replacements.given_up |= decision.mismatched
        for number, reason in decision.kill.items():
            if world.generation < 0:
                return RunOutcome(1, number, reason)
            self.kill(number, reason)
        if decision.slots is not None:
            if world.count_fruitless():
                return self.report_fruitless()
            if decision.reason:
                self.show(f"launch: {decision.reason}. They leave what they are in.")
            self.announce(decision.slots, decision.planned)
        return decision.end

    def report_fruitless(self) -> RunOutcome:
        """The outcome of a run whose worlds all break before their first update, with what a rank said of the last."""
        broken = next((rank.beat.broken for rank in self.members if rank.beat and rank.beat.broken), "")
        reason = f"{MAX_FAILURES} times in a row the processes did not do a single update together"
        return RunOutcome(1, None, f"{reason}{': ' if broken else ''}{broken}")

    def end_waiting(self) -> None:
        """Ends the ranks that wait for a slot: they hold nothing, and would not hear of the end."""
        for rank in self.ranks:
            if rank.code is None and rank.number not in self.world.members:
                self.processes.kill(rank.number)

    def evict_stragglers(self) -> None:
        """Lets a rank go that is steadily slow, if that was asked for."""
        for straggler in self.stragglers.find(self.members):
            rank = self.ranks[straggler.rank]
            enough = len(self.world.slots) > self.policy.min_processes
            if self.policy.evict_factor and enough and has_joined(rank, self.world.generation):
                self.kill(straggler.rank, f"{straggler}; it was let go")
                self.stragglers.speeds.forget(straggler.rank)
                return

    def kill(self, number: int, reason: str) -> None:
        """Ends a rank that is of no use."""
        self.kill_reasons[number] = reason
        self.processes.kill(number)

    def reap(self, interrupted: bool) -> None:
        """Takes the dead out of the world, and starts others in their place."""
        clock_s = self.processes.clock_s
        self.world.expect_loss([rank for rank in self.ranks if rank.code is None], clock_s)
        for rank in filter(self.replacements.is_new_death, self.ranks):
            self.replacements.reaped.add(rank.number)
            reason = self.kill_reasons.pop(rank.number, "")
            reason = reason or f"{rank} {describe_end(rank.code or 0)}; last seen: {rank.activity}"
            self.world.remove(rank, reason, clock_s)
            self.stragglers.forget(rank.number)
            self.show(f"launch: {reason}.")
            started_s = self.processes.children[rank.number].started_s
            if self.policy.replace and not interrupted and self.replacements.may_return(rank, started_s):
                self.replacements.reaped.discard(rank.number)
                self.processes.restart(rank.number, self.workers[rank.number])

    def announce(self, slots: dict[int, int], planned: bool) -> None:
        """Tells all ranks in it of the next world."""
        before, generation = set(self.world.members), self.world.generation + 1
        taken = tuple(sorted(slots))
        ranks = tuple(slots[slot] for slot in taken)
        world = World(
            generation,
            taken,
            ranks,
            self.policy.slots,
            self.services.open(len(ranks), self.timeouts.service_s),
            planned,
            self.progress.folder,
            self.world.untold_losses,
            tuple(rank for rank in ranks if rank not in before) if generation else (),
            self.policy.mirror_every,
            self.policy.mirror_copies,
            tuple(self.workers[rank].place for rank in ranks),
        )
        if (exposure := describe_exposure(world.places, world.mirror_copies)) != self.exposure:
            self.exposure = exposure
            self.show(f"launch: {exposure or 'copies in memory lie on other hosts again'}.")
        self.world.replace_by(world, self.processes.clock_s)
        for number in ranks:
            self.processes.send(number, world.to_line())
        if generation:
            when = " after this update" if planned else ""
            self.show(f"launch: {len(ranks)} of {self.policy.slots} processes go on{when}.")

    def read_beats(self) -> None:
        """Takes in what the ranks of the world say; lets them begin once all are there, and closes old services."""
        members, world = self.members, self.world
        self.progress.read(members)
        there = [
            rank for rank in members if rank.code is None and rank.beat and rank.beat.generation == world.generation
        ]
        if not world.started and world.degraded_s is None and len(there) == len(world.members):
            world.started = True
            for rank in members:
                self.processes.send(rank.number, go_message(world.generation))
        joined = [rank for rank in members if has_joined(rank, world.generation)]
        world.had_update = world.had_update or bool(joined)
        self.progress.trained = self.progress.trained or bool(joined)
        if world.generation > 0 and len(joined) == len(members):
            left = [rank.beat.left for rank in joined if rank.beat is not None and rank.beat.left >= 0]
            self.services.close_until(min(left, default=-1))
