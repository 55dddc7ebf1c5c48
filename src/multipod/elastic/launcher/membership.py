"""Who trains with whom: decided from what is known of the ranks, as a pure function.

Where a rank is lost, the others are told of a new world (`multipod.elastic.world`) without it, and another process is
started in its place. `decide` says when; `multipod.elastic.launcher.survive` does it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from multipod.elastic.launcher.processes import Rank
from multipod.elastic.launcher.supervise import (
    INTERRUPTED,
    START_S,
    RunOutcome,
    describe_end,
    find_silent_rank,
    find_stalled_rank,
)
from multipod.runtime import Timeouts

CHANGE_S = 10.0  # the silence that is granted to a rank between two worlds


@dataclass(frozen=True)
class ElasticPolicy:
    """How a run survives.

    Attributes:
      slots: processes of a full run.
      min_processes: with fewer it does not go on.
      spares: processes that wait, ready, for the slot of another.
      replace: start a new process for each that is lost.
      mirror_every: updates between two copies of the state in memory.
      mirror_copies: how many failure domains besides its own are to hold what one holds.
      evict_factor: let a rank go that is slower than the median by this factor, for `steady_beats`; 0 never.
      steady_beats: how many times a rank must have been slow.
    """

    slots: int
    min_processes: int = 1
    spares: int = 0
    replace: bool = True
    mirror_every: int = 1
    mirror_copies: int = 1
    evict_factor: float = 0.0
    steady_beats: int = 10


@dataclass(frozen=True)
class Decision:
    """What is to be done now.

    Attributes:
      end: the run is over.
      kill: ranks to end, with the reason.
      mismatched: ranks among them that would train something else, for which no other process is started.
      slots: the next world: the rank on each taken slot; None leaves it as it is.
      planned: all ranks of the world now are well.
      reason: why that world is left, where it is not the loss of a rank.
    """

    end: RunOutcome | None = None
    kill: dict[int, str] = field(default_factory=dict)
    mismatched: frozenset[int] = frozenset()
    slots: dict[int, int] | None = None
    planned: bool = False
    reason: str = ""


@dataclass(frozen=True)
class ClusterView:
    """What the launcher knows of a run.

    Attributes:
      ranks: every process, by number; those in `slots` are in the world, the others wait or are on their way.
      slots: the rank on each taken slot of the world, those that died in it taken out.
      generation: of the world; -1 before the first.
      announced_s: when the world was announced.
      degraded: the world has lost a rank, or a rank lost its peers in it.
      now_s: the launcher's clock.
    """

    ranks: Sequence[Rank]
    slots: dict[int, int]
    generation: int
    announced_s: float
    degraded: bool
    now_s: float

    @property
    def members(self) -> list[Rank]:
        """Ranks of the world that live."""
        return [self.ranks[number] for number in self.slots.values()]

    @property
    def outside(self) -> list[Rank]:
        """Live processes that belong to no world."""
        return [rank for rank in self.ranks if rank.code is None and rank.number not in self.slots.values()]


def decide(view: ClusterView, policy: ElasticPolicy, timeouts: Timeouts) -> Decision:
    """Returns the launcher's next decision, given the cluster as seen at `view.now_s`."""
    useless = _find_useless(view, timeouts)
    if useless.kill:
        return useless
    stalled = find_stalled_rank(view.members, view.now_s, timeouts) if view.members and not view.degraded else None
    if stalled is not None and stalled.culprit is not None:
        return Decision(kill={stalled.culprit: stalled.reason})
    settled = all(has_joined(rank, view.generation) for rank in view.members)
    if stalled is not None and settled:  # nobody can be blamed, and it is not the first update of a world: all leave it
        return Decision(slots=view.slots, reason=stalled.reason)
    ready = [
        rank.number for rank in view.outside if rank.beat is not None and rank.beat.identity and not rank.beat.done
    ]
    if view.generation < 0:  # the first world is a full one, without spares
        first = {number: number for number in range(policy.slots)}
        return Decision(slots=first) if first.keys() <= set(ready) else Decision()
    empty = [slot for slot in range(policy.slots) if slot not in view.slots]
    filled = view.slots | dict(zip(empty, ready, strict=False))
    if view.degraded:
        if len(filled) >= policy.min_processes and view.slots:
            return Decision(slots=filled)
        return Decision() if view.outside and view.slots else Decision(end=_report_too_few(view, policy))
    if len(filled) > len(view.slots) and settled:
        return Decision(slots=filled, planned=True)
    return Decision()


def has_joined(rank: Rank, generation: int) -> bool:
    """Whether the rank has all its peers in this world."""
    return rank.beat is not None and rank.beat.joined and rank.beat.generation == generation


def lost_its_peers(rank: Rank, generation: int) -> bool:
    """Whether the rank lost its peers in this world."""
    return rank.beat is not None and rank.beat.generation == generation and bool(rank.beat.broken)


def judge_ending(members: Sequence[Rank], now_s: float, timeouts: Timeouts) -> tuple[bool, RunOutcome | None]:
    """Whether the run is ending, and how it ended. It is ending once a rank is done and none trains any more.

    `members` are all of the last world, the dead too. A rank that waits to join it has come too late where another is
    done, in the world before: it would wait for ever.
    """
    well = [rank for rank in members if rank.code in (None, 0, INTERRUPTED)]
    done = [rank for rank in well if rank.code is not None or (rank.beat is not None and rank.beat.done)]
    training = [rank for rank in well if rank not in done and rank.beat is not None and rank.beat.joined]
    if not done or training:
        return False, None
    if any(rank.code is None for rank in done) and now_s - max(r.last_beat_s for r in done) < timeouts.collective_s:
        return True, None
    if any(rank.code == INTERRUPTED for rank in members):
        return True, RunOutcome(INTERRUPTED, reason="the run was interrupted")
    return True, RunOutcome(0)


def _find_useless(view: ClusterView, timeouts: Timeouts) -> Decision:
    """To end the ranks that live and are of no use: silent, late for the world, or of another recipe than the first."""
    running = [rank for rank in view.ranks if rank.code is None]
    # Leaving a world, and building the next, holds Python up for seconds on a busy machine.
    patient = [
        rank for rank in running if has_joined(rank, view.generation) or view.now_s - rank.last_beat_s > CHANGE_S
    ]
    silent = find_silent_rank(patient, view.now_s, timeouts) if patient else None
    if silent is not None and silent.culprit is not None:
        return Decision(kill={silent.culprit: silent.reason})
    late = [rank for rank in view.members if rank.beat is None or rank.beat.generation < view.generation]
    late_s = view.now_s - view.announced_s
    if late and late_s > max(START_S, timeouts.collective_s):
        return Decision(kill={rank.number: f"{rank} did not join the others for {late_s:.0f} s" for rank in late})
    wanted = next((rank.beat.identity for rank in view.ranks if rank.beat is not None and rank.beat.identity), "")
    mismatched = {
        rank.number: f"{rank} would train something else: it has {rank.beat.identity}; "
        f"rank {view.ranks[0].number} has {wanted}"
        for rank in running
        if rank.beat is not None and rank.beat.identity not in ("", wanted)
    }
    return Decision(kill=mismatched, mismatched=frozenset(mismatched))


def _report_too_few(view: ClusterView, policy: ElasticPolicy) -> RunOutcome:
    dead = [rank for rank in view.ranks if rank.code is not None]
    culprit = min(dead, key=lambda rank: rank.ended_s) if dead else None
    cause = f": {culprit} {describe_end(culprit.code or 0)}" if culprit is not None else ""
    number = None if culprit is None else culprit.number
    left = f"{len(view.slots)} of {policy.slots} processes are left, and at least {policy.min_processes} are needed"
    return RunOutcome(1, number, left + cause)
