"""The launcher's side of a run that survives: who trains with whom, and who takes the place of the dead.

`survive` is to such a run what `supervise.supervise` is to one that ends with its first process. It starts the same
processes with the same watch over them; where one is lost it tells the others of a new world (`multipod.elastic.world`)
without it, and starts another in its place. `decide` decides, as a pure function of what is known of the ranks.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from multipod.elastic.launcher.processes import LineSink, Rank, WorkerCommand, WorkerProcesses, print_to_stderr
from multipod.elastic.launcher.services import CoordinationServices, CoordinatorHost
from multipod.elastic.launcher.supervise import (
    BEFORE_FIRST,
    INTERRUPTED,
    SETTLE_S,
    START_S,
    RunOutcome,
    StopSignals,
    blame,
    count_signals,
    describe_end,
    find_silent_rank,
    find_stalled_rank,
)
from multipod.elastic.straggling import SpeedHistory
from multipod.elastic.world import World, go_message
from multipod.runtime import Timeouts

LOOPBACK = CoordinatorHost()
BROKEN_S = 0.3  # a rank that lost its peers says so, and the death that caused it is seen about as soon
FRUITLESS = 4  # worlds in a row in which not one update was done
CHANGE_S = 10.0  # the silence that is granted to one between two worlds
SLOW = 2.0  # times the median rank: such a rank is named
SOON_S = 20.0  # a replacement that dies sooner than that after its start counts as fruitless, too


@dataclass(frozen=True)
class ElasticPolicy:
    """How a run survives.

    Attributes:
      slots: processes of a whole run.
      least: with fewer processes it does not go on.
      spares: processes that wait, ready, for the place of another.
      replace: start a new process for each that is lost.
      mirror_every: updates between two copies of the state in memory.
      evict: let a rank go that is slower than the median by this factor, for `steady` beats; 0 never.
      steady: how many.
    """

    slots: int
    least: int = 1
    spares: int = 0
    replace: bool = True
    mirror_every: int = 1
    evict: float = 0.0
    steady: int = 10


@dataclass(frozen=True)
class Decision:
    """What is to be done now.

    Attributes:
      end: the run is over.
      kill: ranks to end, with why.
      slots: the next world: the rank on each taken slot; None leaves it as it is.
      planned: all ranks of the world now are well.
      why: it is left for, where that is not the loss of a rank.
    """

    end: RunOutcome | None = None
    kill: dict[int, str] = field(default_factory=dict)
    slots: dict[int, int] | None = None
    planned: bool = False
    why: str = ""


@dataclass(frozen=True)
class ClusterView:
    """What the launcher knows of a run.

    Attributes:
      ranks: every process, by number; those in `slots` are in the world, the others wait or are on their way.
      slots: the rank on each taken slot of the world, those that died in it taken out.
      generation: of the world; -1 before the first.
      since_s: when it was announced.
      hurt: it has lost a rank, or a rank lost its peers in it.
      now_s: the launcher's clock.
    """

    ranks: Sequence[Rank]
    slots: dict[int, int]
    generation: int
    since_s: float
    hurt: bool
    now_s: float

    @property
    def members(self) -> list[Rank]:
        """Of the world, those that live."""
        return [self.ranks[number] for number in self.slots.values()]

    @property
    def others(self) -> list[Rank]:
        """That live and are in no world."""
        return [rank for rank in self.ranks if rank.code is None and rank.number not in self.slots.values()]


def decide(now: ClusterView, rules: ElasticPolicy, timeouts: Timeouts) -> Decision:
    """What to do, as far as can be told at `now.now_s`."""
    kill = _useless(now, timeouts)
    if kill:
        return Decision(kill=kill)
    stalled = find_stalled_rank(now.members, now.now_s, timeouts) if now.members and not now.hurt else None
    if stalled is not None and stalled.culprit is not None:
        return Decision(kill={stalled.culprit: stalled.reason})
    settled = all(_is_in(rank, now.generation) for rank in now.members)
    if stalled is not None and settled:  # nobody can be blamed, and it is not the first update of a world: all leave it
        return Decision(slots=now.slots, why=stalled.reason)
    ready = [rank.number for rank in now.others if rank.beat is not None and rank.beat.identity and not rank.beat.done]
    if now.generation < 0:  # the first world is a whole one, without spares
        first = {number: number for number in range(rules.slots)}
        return Decision(slots=first) if first.keys() <= set(ready) else Decision()
    empty = [slot for slot in range(rules.slots) if slot not in now.slots]
    filled = now.slots | dict(zip(empty, ready, strict=False))
    if now.hurt:
        if len(filled) >= rules.least and now.slots:
            return Decision(slots=filled)
        return Decision() if now.others and now.slots else Decision(end=_too_few(now, rules))
    if len(filled) > len(now.slots) and settled:
        return Decision(slots=filled, planned=True)
    return Decision()


def _is_broken(rank: Rank, generation: int) -> bool:
    """Whether it lost its peers in this world."""
    return rank.beat is not None and rank.beat.generation == generation and bool(rank.beat.broken)


def _is_in(rank: Rank, generation: int) -> bool:
    return rank.beat is not None and rank.beat.joined and rank.beat.generation == generation


def judge_ending(members: Sequence[Rank], now_s: float, timeouts: Timeouts) -> tuple[bool, RunOutcome | None]:
    """Whether the run is ending, and how it ended. It is ending once a rank is done and none trains any more.

    `members` are all of the last world, the dead too. One who waits to join it has come too late where another is done,
    in the world before: it would wait for ever.
    """
    well = [rank for rank in members if rank.code in (None, 0, INTERRUPTED)]
    done = [rank for rank in well if rank.code is not None or (rank.beat is not None and rank.beat.done)]
    training = [rank for rank in well if rank not in done and rank.beat is not None and rank.beat.joined]
    if not done or training:
        return False, None
    if any(rank.code is None for rank in done) and now_s - max(r.heard_s for r in done) < timeouts.collective_s:
        return True, None
    if any(rank.code == INTERRUPTED for rank in members):
        return True, RunOutcome(INTERRUPTED, reason="the run was interrupted")
    return True, RunOutcome(0)


def _useless(now: ClusterView, timeouts: Timeouts) -> dict[int, str]:
    """Ranks that live and are of no use, with why: silent, late for the world, or of another recipe than the first."""
    running = [rank for rank in now.ranks if rank.code is None]
    # Leaving a world, and building the next, holds Python up for seconds on a busy machine.
    patient = [rank for rank in running if _is_in(rank, now.generation) or now.now_s - rank.heard_s > CHANGE_S]
    silent = find_silent_rank(patient, now.now_s, timeouts) if patient else None
    if silent is not None and silent.culprit is not None:
        return {silent.culprit: silent.reason}
    late = [rank for rank in now.members if rank.beat is None or rank.beat.generation < now.generation]
    late_s = now.now_s - now.since_s
    if late and late_s > max(START_S, timeouts.collective_s):
        return {rank.number: f"{rank} did not join the others for {late_s:.0f} s" for rank in late}
    wanted = next((rank.beat.identity for rank in now.ranks if rank.beat is not None and rank.beat.identity), "")
    return {
        rank.number: f"{rank} {STRANGER}: it has {rank.beat.identity}; rank {now.ranks[0].number} has {wanted}"
        for rank in running
        if rank.beat is not None and rank.beat.identity not in ("", wanted)
    }


STRANGER = "would train something else"


def _too_few(now: ClusterView, rules: ElasticPolicy) -> RunOutcome:
    dead = [rank for rank in now.ranks if rank.code is not None]
    culprit = min(dead, key=lambda rank: rank.ended_s) if dead else None
    why = f": {culprit} {describe_end(culprit.code or 0)}" if culprit is not None else ""
    number = None if culprit is None else culprit.number
    left = f"{len(now.slots)} of {rules.slots} processes are left, and at least {rules.least} are needed"
    return RunOutcome(1, number, left + why)


def survive(
    workers: Sequence[WorkerCommand],
    rules: ElasticPolicy,
    timeouts: Timeouts,
    relay: LineSink = print_to_stderr,
    told: Callable[["MembershipEvent"], None] = lambda news: None,
    meeting: CoordinatorHost = LOOPBACK,
) -> RunOutcome:
    """Runs all workers to their end; the first `rules.slots` as the run, the others as its spares.

    As `supervise`; but a rank that is lost does not end the run. `told` hears of each change. Ranks on other hosts
    (`multipod.elastic.launcher.remote`) need a `meeting` that they can reach.

    Raises:
      ClusterError: a worker, or the launcher's helper, could not be started.
    """
    with (
        count_signals() as presses,
        WorkerProcesses(relay) as crew,
        CoordinationServices(workers[0].environment, meeting) as services,
    ):
        roster = _Roster(crew, list(workers), rules, timeouts, services, relay, told)
        outcome = roster.watch(presses)
        roster.dismiss()
        lines = () if outcome.culprit is None else crew.last_lines(outcome.culprit)
        crew.ask_to_end(timeouts.grace_s, hurry=lambda: presses.count > 1 or outcome.reason == BEFORE_FIRST)
    return replace(outcome, lines=lines or outcome.lines, folder=roster.folder, saved=roster.saved)


@dataclass(frozen=True)
class MembershipEvent:
    """A change in a run that survives. `what` is started, lost, slow or world; times are of `time.monotonic`."""

    what: str
    at_s: float
    rank: int = -1
    pid: int = -1
    why: str = ""
    world: World | None = None


class _Roster:
    """The moving parts of `survive`."""

    def __init__(
        self,
        crew: WorkerProcesses,
        workers: list[WorkerCommand],
        rules: ElasticPolicy,
        timeouts: Timeouts,
        services: CoordinationServices,
        relay: LineSink,
        told: Callable[[MembershipEvent], None],
    ) -> None:
        self.crew, self.workers, self.rules, self.timeouts = crew, workers, rules, timeouts
        self.services, self.relay, self.told = services, relay, told
        self.slots: dict[int, int] = {}
        self.generation, self.since_s = -1, 0.0
        self.last: list[int] = []  # all of the last world, the dead too
        self.hurt_s: float | None = None
        self.gone = True  # all of this world were told to join it
        self.trained = False  # an update was done, by these processes
        self.asked = -1  # the process that was told of an interrupt
        self.causes: dict[int, str] = {}  # of those that the launcher itself ended
        self.lost: dict[str, str] = {}
        self.given_up: set[int] = set()
        self.buried: set[int] = set()
        self.quick: dict[int, int] = {}
        self.fruitless, self.fruitful = 0, True
        self.folder = ""
        self.saved: int | None = None
        self.speeds, self.named = SpeedHistory(rules.steady), set[int]()
        crew.start(workers)
        for child in crew.children:
            self.tell("started", child.rank)

    def watch(self, presses: StopSignals) -> RunOutcome:
        """Polls until the run is over."""
        while True:
            self.crew.poll()
            self.take_notes()
            if self.services.ended:
                return RunOutcome(1, None, "the launcher's helper, which holds JAX's coordination service, has died")
            if presses.count > 1:
                return RunOutcome(INTERRUPTED, reason="the run was interrupted twice, and all processes were killed")
            outcome = (self.ask_to_stop() if presses.count else None) or self.obey(interrupted=presses.count > 0)
            if outcome is not None:
                return outcome

    def ask_to_stop(self) -> RunOutcome | None:
        """Passes an interrupt on to one that trains, to another if that one dies; the outcome if there is nobody.

        Before the first update is done there is nothing to save that is not saved: the end need not wait for that.
        """
        members = [self.crew.children[number].rank for number in self.slots.values()]
        living = [rank.pid for rank in members if rank.code is None]
        if not living:
            return RunOutcome(INTERRUPTED, reason="the run was interrupted")
        if not self.trained:
            return RunOutcome(INTERRUPTED, reason=BEFORE_FIRST)
        if self.asked not in living:
            self.asked = living[0]
            os.kill(self.asked, signal.SIGINT)
        return None

    @property
    def ranks(self) -> list[Rank]:
        return [child.rank for child in self.crew.children]

    def obey(self, interrupted: bool) -> RunOutcome | None:
        """Does what `decide` says; the outcome, once the run is over."""
        clock_s = self.crew.clock_s
        if self.generation < 0:
            failed = [rank for rank in self.ranks if rank.code is not None]
            if failed:
                return blame(failed) if clock_s - min(rank.ended_s for rank in failed) >= SETTLE_S else None
        else:
            ending, outcome = judge_ending(
                [self.crew.children[number].rank for number in self.last], clock_s, self.timeouts
            )
            if ending:
                return outcome
            self.bury(interrupted)
        self.look_for_stragglers()
        hurt = self.hurt_s is not None and clock_s >= self.hurt_s
        now = ClusterView(self.ranks, self.slots, self.generation, self.since_s, hurt, clock_s)
        step = decide(now, self.rules, self.timeouts)
        for number, why in step.kill.items():
            if self.generation < 0:
                return RunOutcome(1, number, why)
            self.end(number, why)
        if step.slots is not None:
            self.fruitless = 0 if self.fruitful else self.fruitless + 1
            if self.fruitless >= FRUITLESS:
                said = next((rank.beat.broken for rank in now.members if rank.beat and rank.beat.broken), "")
                reason = f"{FRUITLESS} times in a row the processes did not do a single update together"
                return RunOutcome(1, None, f"{reason}{': ' if said else ''}{said}")
            if step.why:
                self.relay(f"launch: {step.why}. They leave what they are in.")
            self.announce(step.slots, step.planned)
        return step.end

    def dismiss(self) -> None:
        """Ends those who wait for a place: they hold nothing, and would not hear of the end."""
        for rank in self.ranks:
            if rank.code is None and rank.number not in self.last:
                with suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)

    def look_for_stragglers(self) -> None:
        """Names ranks that are steadily slow, each once, and lets one go if that was asked for."""
        for rank in self.ranks:
            if rank.number in self.slots.values() and rank.beat is not None and rank.code is None:
                self.speeds.add(rank.number, rank.beat.speed_s)
        for slow in self.speeds.slow(self.rules.evict or SLOW):
            if slow.rank not in self.named:
                self.named.add(slow.rank)
                self.relay(f"launch: {slow}.")
                self.tell("slow", self.crew.children[slow.rank].rank, str(slow))
            if (
                self.rules.evict
                and len(self.slots) > self.rules.least
                and _is_in(self.ranks[slow.rank], self.generation)
            ):
                self.end(slow.rank, f"{slow}; it was let go")
                self.speeds.forget(slow.rank)
                return

    def end(self, number: int, why: str) -> None:
        """Ends a rank that is of no use."""
        self.causes[number] = why
        if STRANGER in why:
            self.given_up.add(number)
        with suppress(ProcessLookupError):
            os.killpg(self.crew.children[number].rank.pid, signal.SIGKILL)

    def bury(self, interrupted: bool) -> None:
        """Takes the dead out of the world, and starts others in their place."""
        for rank in self.ranks:
            if rank.code is None:
                if _is_broken(rank, self.generation) and self.hurt_s is None:
                    self.hurt_s = self.crew.clock_s + BROKEN_S  # the death that caused it is seen about as soon
                continue
            if rank.number in self.buried or rank.code in (0, INTERRUPTED):
                continue
            self.buried.add(rank.number)
            why = self.causes.pop(rank.number, "") or f"{rank} {describe_end(rank.code)}; last seen: {rank.place}"
            slot = next((slot for slot, number in self.slots.items() if number == rank.number), None)
            if slot is not None:
                del self.slots[slot]
                self.lost[str(rank.number)] = why
                self.hurt_s = self.crew.clock_s
            self.speeds.forget(rank.number)
            self.named.discard(rank.number)
            self.relay(f"launch: {why}.")
            self.tell("lost", rank, why)
            if self.rules.replace and not interrupted and self.may_return(rank):
                self.buried.discard(rank.number)
                self.crew.restart(rank.number, self.workers[rank.number])
                self.tell("started", self.crew.children[rank.number].rank)

    def may_return(self, rank: Rank) -> bool:
        """Whether another process is started for this one: not for a stranger, nor for one that keeps dying early."""
        early = rank.ended_s - self.crew.children[rank.number].started_s < SOON_S
        self.quick[rank.number] = self.quick.get(rank.number, 0) + 1 if early else 0
        if self.quick[rank.number] > FRUITLESS and rank.number not in self.given_up:
            self.relay(f"launch: rank {rank.number} ended {FRUITLESS} times soon after its start. It is given up.")
            self.given_up.add(rank.number)
        return rank.number not in self.given_up

    def announce(self, slots: dict[int, int], planned: bool) -> None:
        """Tells all in it of the next world."""
        before = set(self.last)
        self.generation, self.since_s = self.generation + 1, self.crew.clock_s
        self.hurt_s, self.fruitful, self.gone = None, planned, False
        taken = tuple(sorted(slots))
        ranks = tuple(slots[slot] for slot in taken)
        address = self.services.open(len(ranks), self.timeouts.service_s)
        world = World(
            self.generation,
            taken,
            ranks,
            self.rules.slots,
            address,
            planned,
            self.folder,
            dict(self.lost),
            tuple(rank for rank in ranks if rank not in before) if self.generation else (),
            self.rules.mirror_every,
        )
        self.slots, self.lost, self.last = dict(zip(taken, ranks, strict=True)), {}, list(ranks)
        for number in ranks:
            self.crew.say(number, world.to_line())
        if self.generation:
            when = " after this update" if planned else ""
            self.relay(f"launch: {len(ranks)} of {self.rules.slots} processes go on{when}.")
        self.tell("world", None, world=world)

    def take_notes(self) -> None:
        """The run's folder and progress, and services that nobody needs any more."""
        members = [self.crew.children[number].rank for number in self.slots.values()]
        beats = [rank.beat for rank in members if rank.code is None and rank.beat is not None]
        self.folder = next((beat.folder for beat in beats if beat.folder), self.folder)
        saved = [beat.saved for beat in beats if beat.saved is not None]
        self.saved = max([*saved, *([] if self.saved is None else [self.saved])], default=None)
        there = [
            rank for rank in members if rank.code is None and rank.beat and rank.beat.generation == self.generation
        ]
        if not self.gone and self.hurt_s is None and len(there) == len(self.last):
            self.gone = True
            for rank in members:
                self.crew.say(rank.number, go_message(self.generation))
        joined = [rank for rank in members if _is_in(rank, self.generation)]
        self.fruitful = self.fruitful or bool(joined)
        self.trained = self.trained or bool(joined)
        if self.generation > 0 and len(joined) == len(members):
            left = [rank.beat.left for rank in joined if rank.beat is not None and rank.beat.left >= 0]
            self.services.close_until(min(left, default=-1))

    def tell(self, what: str, rank: Rank | None, why: str = "", world: World | None = None) -> None:
        number, pid = (-1, -1) if rank is None else (rank.number, rank.pid)
        self.told(MembershipEvent(what, time.monotonic(), number, pid, why, world))
